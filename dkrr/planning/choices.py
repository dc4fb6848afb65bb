"""What was asked of a solver, "auto" included: one description for job files and for the estimator.

You need it where a person's words become parameters. Combinations that have no meaning are refused here, with the way
that has one; what "auto" becomes is decided in :mod:`dkrr.planning.planner`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from dkrr.errors import ParameterError
from dkrr.linalg.settings import IterativeSettings, NystromSettings

__all__ = ["DEFAULT_NUM_CENTERS", "SOLVER_PARAMETERS", "SolverChoice"]

DEFAULT_NUM_CENTERS = 5000
# what the estimator takes in ``solver_params``
SOLVER_PARAMETERS = ("preconditioner", "rank", "seed", "allow_unconverged", "num_centers", "centers")


@dataclass(frozen=True, kw_only=True)
class SolverChoice:
    """A solver as it was asked for.

    Parameters
    ----------
    solver
        "auto", "cholesky", "cg", "primal" for kernels with few explicit features, or "nystrom", which is an
        approximation and never what "auto" becomes.
    precision
        "auto" (always a float64 answer), "float64", "mixed" (float32 inside, a float64 answer), or "float32".
    gram
        "auto", "stored" or "on_the_fly".
    tol, max_iter, seed, allow_unconverged
        Of everything that iterates; see :class:`dkrr.linalg.settings.IterativeSettings`.
    preconditioner, rank
        Of cg.
    num_centers, centers
        Of nystrom.

    Raises
    ------
    ParameterError
        A value that does not exist, or values that have no meaning together.
    """

    solver: str = "auto"
    precision: str = "auto"
    gram: str = "auto"
    tol: float = 1e-8
    max_iter: int | None = None
    preconditioner: str = "auto"
    rank: int | Literal["auto"] = "auto"
    seed: int = 0
    allow_unconverged: bool = False
    num_centers: int | Literal["auto"] = "auto"
    centers: str = "auto"

    def __post_init__(self) -> None:
        for name in ("rank", "num_centers", "seed", "max_iter"):  # NumPy counts in integers of its own
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise ParameterError(f"{name} is {value!r}; one of {', '.join(map(repr, allowed))} expected")
        for name in ("rank", "num_centers"):
            value = getattr(self, name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ParameterError(f"{name} is {value!r}; 'auto' or a whole number above 0 expected")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ParameterError(f"seed is {self.seed!r}; a whole number of at least 0 expected")
        if not isinstance(self.allow_unconverged, bool):
            raise ParameterError(f"allow_unconverged is {self.allow_unconverged!r}; True or False expected")
        self.iterative()  # checks tol and max_iter
        if problem := self._problem():
            raise ParameterError(problem[0], hint=problem[1])

    def _problem(self) -> tuple[str, str] | None:
        """What has no meaning together, and what has."""
        for name in ("num_centers", "centers"):
            if self.solver != "nystrom" and getattr(self, name) != "auto":
                return f"{name} is for solver 'nystrom', {self.solver!r} given", (
                    "nystrom is an approximation and is only done when it is asked for by name"
                )
        if self.solver == "nystrom":
            if self.precision == "float32":
                return "precision 'float32' with solver 'nystrom', whose answers are float64", (
                    "precision 'mixed' makes its passes in float32 and gives a float64 answer"
                )
            if self.gram == "stored":
                return "gram 'stored' with solver 'nystrom'", "nystrom has no n x n matrix to store; leave it out"
        if self.solver == "primal":
            if self.precision not in ("auto", "float64"):
                return f"precision {self.precision!r} with solver 'primal', which is all float64", "leave it out"
            if self.gram == "stored":
                return "gram 'stored' with solver 'primal'", "primal has no n x n matrix to store; leave it out"
        for name in ("preconditioner", "rank"):
            if self.solver != "cg" and getattr(self, name) != "auto":
                other = "; that of nystrom is made of its centres" if self.solver == "nystrom" else ""
                return f"{name} is for solver 'cg', {self.solver!r} given{other}", f"ask for cg, or leave {name} out"
        if self.solver == "cg" and self.precision == "float32":
            return "precision 'float32' with solver 'cg', whose answers are float64", (
                "precision 'mixed' evaluates the kernel in float32 and gives a float64 answer"
            )
        if self.preconditioner in ("none", "factor") and self.rank != "auto":
            return f"rank {self.rank} with preconditioner {self.preconditioner!r}", "leave one of them out"
        return None

    @classmethod
    def from_estimator(cls, parameters: Mapping[str, Any] | None, **named: Any) -> SolverChoice:
        """From the estimator's own parameters and its ``solver_params``.

        Raises
        ------
        ParameterError
            A key of ``solver_params`` that does not exist.
        """
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ParameterError(f"solver_params is {parameters!r}; a dict expected")
        unknown = sorted(str(key) for key in (parameters or {}) if key not in SOLVER_PARAMETERS)
        if unknown:
            raise ParameterError(
                f"solver_params has {unknown[0]!r}; known: {', '.join(SOLVER_PARAMETERS)}",
                hint="solver, precision, tol and max_iter are parameters of the estimator itself",
            )
        return cls(**named, **(parameters or {}))

    @property
    def is_iterative(self) -> bool:
        """Whether an iteration was asked for by name."""
        return self.solver in ("cg", "nystrom") or self.precision == "mixed"

    def iterative(self, *, rank: int | Literal["auto"] | None = None) -> IterativeSettings:
        """Parameters of the iteration; ``rank`` is what an "auto" became."""
        return IterativeSettings(
            tol=self.tol,
            max_iter=self.max_iter,
            preconditioner="rpcholesky" if self.preconditioner == "auto" else self.preconditioner,  # type: ignore[arg-type]
            rank=self.rank if self.rank != "auto" or rank is None else rank,
            seed=self.seed,
            allow_unconverged=self.allow_unconverged,
        )

    def nystrom(self, num_rows: int) -> NystromSettings:
        """Parameters of Nystrom regression on ``num_rows`` rows that may be centres: by default at most all of them."""
        wanted = min(DEFAULT_NUM_CENTERS, num_rows) if self.num_centers == "auto" else self.num_centers
        centers = "uniform" if self.centers == "auto" else self.centers
        return NystromSettings(num_centers=wanted, centers=centers)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SolverChoice:
        """Inverse of :meth:`to_dict`; what a later version added is left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


_ALLOWED = {
    "solver": ("auto", "cholesky", "cg", "nystrom", "primal"),
    "precision": ("auto", "float64", "float32", "mixed"),
    "gram": ("auto", "stored", "on_the_fly"),
    "preconditioner": ("auto", "rpcholesky", "nystrom", "factor", "none"),
    "centers": ("auto", "rpcholesky", "uniform"),
}
