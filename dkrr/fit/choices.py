"""What is to be solved, what was asked for, what there is, and the ways that these words allow.

    Problem      rows, features, targets, kernel, alpha       SolverChoice  a person's words, "auto" included
    Limits       workers, memory, disk                        Candidate     one way with its price
    FitSettings  a fit by one way, with nothing left to choose

You need it where a person's words become parameters. Combinations that have no meaning are refused here, with the way
that has one; what "auto" becomes is decided in :mod:`dkrr.fit.plan`. An approximation is never among its ways, nor is
an answer in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from typing import Any, Literal, Self

import numpy as np

from dkrr.dataset import DRIFT_LIMIT
from dkrr.errors import ParameterError
from dkrr.kernels import Kernel
from dkrr.kernels.features import count_features
from dkrr.linalg.direct import Split
from dkrr.linalg.preconditioner import choose_rank
from dkrr.linalg.primal import MAX_FEATURES
from dkrr.linalg.solution import Foreseen, IterativeSettings, NystromSettings, way_name
from dkrr.linalg.workspace import choose_gram

DEFAULT_NUM_CENTERS = 5000
RANKS = (0, 250, 500, 1000, 2000, 4000)
# an estimate of a number of iterations is good to this factor
MARGIN = 1.25

Way = tuple[str, str, str, int]  # solver, precision, gram, rank
PRIMAL: Way = ("primal", "float64", "on_the_fly", 0)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be solved. ``kernel`` is resolved, None for a given matrix.

    ``primal``: whether who asks can do without tiles and dual coefficients, so that "auto" may become primal.
    ``drift_limit``: how far newer rows may lie from the centre of an earlier fit for it to be kept, see
    :mod:`dkrr.linalg.catalogue`; None keeps any, where the drift of whitened rows was judged before.
    """

    num_rows: int
    num_features: int
    num_targets: int
    kernel: Kernel | None
    alpha: tuple[float, ...]
    fit_intercept: bool = False
    primal: bool = False
    drift_limit: float | None = DRIFT_LIMIT

    @property
    def num_alphas(self) -> int:
        """Distinct values of alpha: so many factors are needed."""
        return len(set(self.alpha))

    @property
    def num_explicit(self) -> int:
        """D, the number of explicit features of the kernel; 0 where it has none."""
        return count_features(self.kernel, self.num_features) or 0

    @property
    def primal_flops(self) -> float:
        """n D^2 + D^3 / 3 for each alpha."""
        return self.num_rows * self.num_explicit**2 + self.num_alphas * self.num_explicit**3 / 3


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What there is: tasks at once, memory of a task, memory of this process, disk; None where nothing limits it."""

    threads: int
    memory_bytes: int | None
    driver_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True)
class Iterations:
    """A number of iterations, as a range."""

    low: float
    high: float

    @classmethod
    def around(cls, best: float) -> Iterations:
        """What is expected where the best estimate is ``best``."""
        return cls(max(1.0, best / MARGIN), float(ceil(max(1.0, best) * MARGIN - 1e-9)))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to solve, and its price. ``infeasible`` says why it cannot be taken, "" when it can.

    ``seconds`` are those of ``iterations.high``; ``seconds_low`` is the total at ``iterations.low``. ``split`` says
    which sums of a factor are split, and ``efficiency`` is the share of the workers' time that a simulation of the
    factor finds busy, 0 where there is none. ``memory_bytes`` is the peak of a worker with one thread,
    ``client_bytes`` that of this process beside its interpreter.
    """

    solver: str
    precision: str
    gram: str
    tile_size: int
    rank: int = 0
    num_centers: int = 0
    iterations: Iterations | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    seconds_low: float = 0.0
    memory_bytes: int = 0
    client_bytes: int = 0
    disk_bytes: dict[str, int] = field(default_factory=dict)
    infeasible: str = ""
    split: Split | None = None
    efficiency: float = 0.0

    @property
    def total_seconds(self) -> float:
        """At the upper end of the iterations."""
        return sum(self.seconds.values())

    @property
    def name(self) -> str:
        """``cg mixed, rank 500``."""
        if self.solver == "nystrom":
            return f"nystrom {self.precision}, {self.num_centers:,} centres"
        return way_name(self.solver, self.precision, self.gram, self.rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"name": self.name, "total_seconds": self.total_seconds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`."""
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(cls)}
        for name, kind in (("iterations", Iterations), ("split", Split)):
            known[name] = None if known[name] is None else kind(**known[name])
        return cls(**known)


@dataclass(frozen=True, kw_only=True)
class SolverChoice(IterativeSettings):
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
        Of everything that iterates; see :class:`dkrr.linalg.solution.IterativeSettings`.
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
    preconditioner: str = "auto"  # type: ignore[assignment]
    num_centers: int | Literal["auto"] = "auto"
    centers: str = "auto"

    def __post_init__(self) -> None:
        for name in ("rank", "num_centers", "seed", "max_iter"):  # NumPy counts in integers of its own
            if isinstance(getattr(self, name), np.integer):
                object.__setattr__(self, name, int(getattr(self, name)))
        for name, (is_right, expected) in _EXPECTED.items():
            if not is_right(value := getattr(self, name)):
                raise ParameterError(f"{name} is {value!r}; {expected} expected")
        super().__post_init__()
        for is_wrong, problem, hint in self._problems():
            if is_wrong:
                raise ParameterError(problem, hint=hint)

    def _problems(self) -> Iterator[tuple[bool, str, str]]:
        """What has no meaning together, and what has."""
        solver, precision = self.solver, self.precision
        for name in ("num_centers", "centers"):
            yield (
                solver != "nystrom" and getattr(self, name) != "auto",
                f"{name} is for solver 'nystrom', {solver!r} given",
                "nystrom is an approximation and is only done when it is asked for by name",
            )
        for name, how in (("nystrom", "makes its passes"), ("cg", "evaluates the kernel")):
            yield (
                solver == name and precision == "float32",
                f"precision 'float32' with solver {name!r}, whose answers are float64",
                f"precision 'mixed' {how} in float32 and gives a float64 answer",
            )
        yield (
            solver == "primal" and precision not in ("auto", "float64"),
            f"precision {precision!r} with solver 'primal', which is all float64",
            "leave it out",
        )
        yield (
            solver in ("nystrom", "primal") and self.gram == "stored",
            f"gram 'stored' with solver {solver!r}",
            f"{solver} has no n x n matrix to store; leave it out",
        )
        other = "; that of nystrom is made of its centres" if solver == "nystrom" else ""
        for name in ("preconditioner", "rank"):
            yield (
                solver != "cg" and getattr(self, name) != "auto",
                f"{name} is for solver 'cg', {solver!r} given{other}",
                f"ask for cg, or leave {name} out",
            )
        yield (
            not self.is_low_rank and self.rank != "auto",
            f"rank {self.rank} with preconditioner {self.preconditioner!r}",
            "leave one of them out",
        )

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
        known = ("preconditioner", "rank", "seed", "allow_unconverged", "num_centers", "centers")
        for key in parameters or {}:
            if key not in known:
                raise ParameterError(
                    f"solver_params has {key!r}; known: {', '.join(known)}",
                    hint="solver, precision, tol and max_iter are parameters of the estimator itself",
                )
        return cls(**named, **(parameters or {}))

    def iterative(self, *, rank: int | Literal["auto"] | None = None) -> IterativeSettings:
        """Parameters of the iteration; ``rank`` is what an "auto" became."""
        own = {item.name: getattr(self, item.name) for item in fields(IterativeSettings)}
        if self.preconditioner == "auto":
            own["preconditioner"] = "rpcholesky"
        return IterativeSettings(**own | ({} if rank is None or self.rank != "auto" else {"rank": rank}))

    def nystrom(self, num_rows: int) -> NystromSettings:
        """Parameters of Nystrom regression on ``num_rows`` rows that may be centres: by default at most all of them."""
        wanted = min(DEFAULT_NUM_CENTERS, num_rows) if self.num_centers == "auto" else self.num_centers
        centers = "uniform" if self.centers == "auto" else self.centers
        return NystromSettings(num_centers=wanted, centers=centers)  # type: ignore[arg-type]


def _one_of(*words: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in words, f"one of {', '.join(map(repr, words))}"


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_COUNT: tuple[Callable[[Any], bool], str] = (
    lambda value: value == "auto" or _is_whole(value, 1),
    "'auto' or a whole number above 0",
)
_EXPECTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "solver": _one_of("auto", "cholesky", "cg", "nystrom", "primal"),
    "precision": _one_of("auto", "float64", "float32", "mixed"),
    "gram": _one_of("auto", "stored", "on_the_fly"),
    "preconditioner": _one_of("auto", "rpcholesky", "nystrom", "factor", "none"),
    "centers": _one_of("auto", "rpcholesky", "uniform"),
    "rank": _COUNT,
    "num_centers": _COUNT,
    "seed": (lambda value: _is_whole(value, 0), "a whole number of at least 0"),
    "allow_unconverged": (lambda value: isinstance(value, bool), "True or False"),
}


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """A fit with nothing left to choose.

    Parameters
    ----------
    kernel
        Resolved kernel; None with a given matrix.
    alpha
        One ridge, or one per target.
    tile_size, precision, gram, solver
        As resolved. "mixed": float32 inside, the float64 answer.
    iterative
        Of cg, and of the refinement of a mixed factor.
    fit_intercept
        Whether f has an unpenalised constant, see :mod:`dkrr.linalg.operators`.
    center
        Where a translation-invariant kernel is centred; None means anew, see :meth:`dkrr.kernels.Kernel.center`.
    drift_limit
        As in :class:`Problem`.
    foreseen
        What a plan foresees of it; None where there was none.
    accept_limit
        Whether conjugate gradients may end at the limit of float64 above ``tol``, as the answer of a factor does; where
        they were named that is an error.
    """

    kernel: Kernel | None
    alpha: tuple[float, ...]
    tile_size: int
    precision: Literal["float64", "float32", "mixed"] = "float64"
    gram: Literal["stored", "on_the_fly"] = "on_the_fly"
    solver: Literal["cholesky", "cg"] = "cholesky"
    iterative: IterativeSettings = field(default_factory=IterativeSettings)
    fit_intercept: bool = False
    center: tuple[float, ...] | None = None
    drift_limit: float | None = DRIFT_LIMIT
    foreseen: Foreseen | None = None
    accept_limit: bool = False

    @property
    def iterates(self) -> bool:
        """Whether there is an iteration, so that a guess of the answer is of use."""
        return self.solver == "cg" or self.precision == "mixed"

    @property
    def rank(self) -> int:
        """Of the preconditioner of cg; 0 for none, or where it is chosen later."""
        iterative = self.iterative
        is_low_rank = self.solver == "cg" and iterative.is_low_rank
        return int(iterative.rank) if is_low_rank and iterative.rank != "auto" else 0

    @property
    def name(self) -> str:
        """``cg mixed, rank 500``."""
        return way_name(self.solver, self.precision, self.gram, self.rank)

    @property
    def way(self) -> dict[str, Any]:
        """What differs between the ways to one answer."""
        return {
            "solver": self.solver,
            "precision": self.precision,
            "gram": self.gram,
            "tile_size": self.tile_size,
            "preconditioner": self.iterative.preconditioner if self.solver == "cg" else "none",
            "rank": self.rank,
        }


def settings_of(way: Candidate, problem: Problem, choice: SolverChoice) -> FitSettings:
    """The fit by one way; of nystrom and primal the parts that they share with the others."""
    iterative = choice.iterative(rank=way.rank or None)
    if way.solver == "cg" and not way.rank and choice.is_low_rank and choice.rank == "auto":
        iterative = replace(iterative, preconditioner="none")
    low, high = (0.0, 0.0) if way.iterations is None else (way.iterations.low, way.iterations.high)
    return FitSettings(
        kernel=problem.kernel,
        alpha=problem.alpha,
        tile_size=way.tile_size,
        precision=way.precision,  # type: ignore[arg-type]
        gram=way.gram,  # type: ignore[arg-type]
        solver=way.solver if way.solver in ("cholesky", "cg") else "cg",  # type: ignore[arg-type]
        iterative=iterative,
        fit_intercept=problem.fit_intercept,
        drift_limit=problem.drift_limit,
        foreseen=Foreseen(low=low, high=high, seconds=dict(way.seconds)),
    )


def ways_of(problem: Problem, choice: SolverChoice) -> list[Way]:
    """All ways that the words of the choice allow."""
    usual = choose_gram(problem.kernel, problem.num_alphas) if choice.gram == "auto" else choice.gram
    # several alphas cost cg nothing
    of_cg, found = choose_gram(problem.kernel, 1) if choice.gram == "auto" else choice.gram, list[Way]()
    if choice.solver == "nystrom":
        found.append(("nystrom", "float64" if choice.precision == "auto" else choice.precision, "on_the_fly", 0))
    if choice.solver == "primal" or may_be_primal(problem, choice):
        found.append(PRIMAL)
    for precision in ("float64", "mixed") if choice.precision == "auto" else (choice.precision,):
        if choice.solver in ("auto", "cholesky"):
            found.append(("cholesky", precision, usual, 0))
        is_open = choice.solver == "auto" and precision != "float32" and problem.kernel is not None
        if choice.solver == "cg" or is_open:
            found += [("cg", precision, of_cg, rank) for rank in ranks_of(problem, choice)]
    return list(dict.fromkeys(found))


def may_be_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether "auto" may become primal: fewer features than rows, and no word about matrices that it has not."""
    is_open = choice.solver == "auto" and choice.precision in ("auto", "float64") and choice.gram == "auto"
    return problem.primal and is_open and 0 < problem.num_explicit < min(problem.num_rows, MAX_FEATURES + 1)


def is_plainly_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than 10 for each entry of K: then no way through K is faster."""
    return may_be_primal(problem, choice) and problem.primal_flops < 10 * problem.num_rows**2


def ranks_of(problem: Problem, choice: SolverChoice) -> list[int]:
    """Ranks of the preconditioner that the choice allows, 0 for none."""
    if not choice.is_low_rank:
        return [0]
    if choice.rank != "auto":
        return [min(choice.rank, problem.num_rows)]
    return [rank for rank in RANKS if rank <= problem.num_rows / 4]


def small_choice(problem: Problem, choice: SolverChoice) -> SolverChoice:
    """What "auto" becomes where measuring would cost more than the best choice could save."""
    n, named = problem.num_rows, dict[str, Any]()
    if choice.solver == "auto":
        is_less = problem.primal_flops < n**3 / 3 * problem.num_alphas
        named["solver"] = "primal" if may_be_primal(problem, choice) and is_less else "cholesky"
    if choice.precision == "auto":
        named["precision"] = "float64"
    if choice.solver == "cg" and choice.rank == "auto" and choice.is_low_rank:
        tol, t = choice.tol, problem.num_targets
        named["rank"] = choose_rank(n, problem.num_features, min(problem.alpha), tol=tol, num_columns=t)
    return replace(choice, **named)
