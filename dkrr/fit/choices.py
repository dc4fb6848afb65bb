"""What is to be solved, what was asked for, what there is, and the ways that these words allow.

    Problem     rows, features, targets, kernel, alpha        SolverChoice  a person's words, "auto" included
    Limits      workers, memory, disk                         Candidate     one way with its price

You need it where a person's words become parameters. Combinations that have no meaning are refused here, with the way
that has one; what "auto" becomes is decided in :mod:`dkrr.fit.plan`. An approximation is never among its ways, nor is
an answer in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import ceil, log2
from typing import Any, Literal

import numpy as np

from dkrr.errors import ParameterError
from dkrr.kernels import Kernel
from dkrr.kernels.features import count_features
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.lowrank.rpcholesky import choose_rank
from dkrr.linalg.primal.solver import MAX_FEATURES
from dkrr.linalg.settings import IterativeSettings, NystromSettings, way_name
from dkrr.linalg.sizes import choose_gram

__all__ = [
    "DEFAULT_NUM_CENTERS",
    "PRIMAL",
    "SOLVER_PARAMETERS",
    "Candidate",
    "Iterations",
    "Limits",
    "Problem",
    "SolverChoice",
    "Way",
    "extrapolate",
    "growth",
    "is_plainly_primal",
    "may_be_primal",
    "primal_is_less",
    "ranks_of",
    "small_choice",
    "ways_of",
]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be solved, as far as its cost goes. ``kernel`` is resolved, None for a given matrix.

    ``primal``: whether who asks can do without tiles and dual coefficients, so that "auto" may become primal.
    """

    num_rows: int
    num_features: int
    num_targets: int
    kernel: Kernel | None
    alpha: tuple[float, ...]
    fit_intercept: bool = False
    primal: bool = False

    @property
    def num_alphas(self) -> int:
        """Distinct values of alpha: so many factors are needed."""
        return len(set(self.alpha))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What there is: tasks at once, memory of a task, memory of this process, disk; None where nothing limits it.

    ``fetches``: the store is no local folder, so that what a task reads is fetched instead of being mapped.
    """

    threads: int
    memory_bytes: int | None
    driver_bytes: int | None = None
    disk_bytes: int | None = None
    fetches: bool = False


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
        if self.solver == "primal":
            return "primal float64"
        if self.solver == "nystrom":
            return f"nystrom {self.precision}, {self.num_centers:,} centres"
        return way_name(self.solver, self.precision, self.gram, self.rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"name": self.name, "total_seconds": self.total_seconds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Candidate:
        """Inverse of :meth:`to_dict`; what a later version added is left out."""
        known: dict[str, Any] = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        for name, kind in (("iterations", Iterations), ("split", Split)):
            if known.get(name) is not None:
                known[name] = kind(**known[name])
        return cls(**known)


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

RANKS = (0, 250, 500, 1000, 2000, 4000)

Way = tuple[str, str, str, int]  # solver, precision, gram, rank

PRIMAL: Way = ("primal", "float64", "on_the_fly", 0)


def ways_of(problem: Problem, choice: SolverChoice) -> list[Way]:
    """All ways that the words of the choice allow."""
    return list(dict.fromkeys(_all_ways(problem, choice)))


def _all_ways(problem: Problem, choice: SolverChoice) -> Iterator[Way]:
    usual = choose_gram(problem.kernel, problem.num_alphas)
    dear = choose_gram(problem.kernel, 1)  # several alphas cost cg nothing
    given = problem.kernel is None
    if choice.solver == "nystrom":
        yield "nystrom", "float64" if choice.precision == "auto" else choice.precision, "on_the_fly", 0
        return
    if choice.solver == "primal":
        yield PRIMAL
        return
    if may_be_primal(problem, choice):
        yield PRIMAL
    precisions = {"auto": ("float64", "mixed")}.get(choice.precision, (choice.precision,))
    for precision in precisions:
        if choice.solver in ("auto", "cholesky"):
            yield "cholesky", precision, usual if choice.gram == "auto" else choice.gram, 0
        if choice.solver == "cg" or (choice.solver == "auto" and precision != "float32" and not given):
            grams = (dear,) if choice.gram == "auto" else (choice.gram,)
            for gram in grams:
                for rank in ranks_of(problem, choice):
                    yield "cg", precision, gram, rank


def may_be_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether "auto" may become primal: fewer features than rows, and no word about matrices that it has not."""
    size = count_features(problem.kernel, problem.num_features)
    if not problem.primal or choice.solver != "auto" or size is None:
        return False
    asked = choice.precision in ("auto", "float64") and choice.gram == "auto"
    return asked and size < problem.num_rows and size <= MAX_FEATURES


def is_plainly_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than 10 for each entry of K: then no way through K is faster."""
    if not may_be_primal(problem, choice):
        return False
    n, size = problem.num_rows, count_features(problem.kernel, problem.num_features) or 0
    return n * size**2 + problem.num_alphas * size**3 / 3 < 10 * n**2


def primal_is_less(problem: Problem) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than n^3 / 3, where nothing is measured."""
    n, size = problem.num_rows, count_features(problem.kernel, problem.num_features) or 0
    return n * size**2 + problem.num_alphas * size**3 / 3 < n**3 / 3 * problem.num_alphas


def ranks_of(problem: Problem, choice: SolverChoice) -> Iterator[int]:
    """Ranks of the preconditioner that the choice allows, 0 for none."""
    if choice.preconditioner in ("none", "factor"):
        yield 0
    elif choice.rank != "auto":
        yield min(choice.rank, problem.num_rows)
    else:
        yield from (rank for rank in RANKS if rank <= problem.num_rows / 4)


def small_choice(problem: Problem, choice: SolverChoice) -> dict[str, Any]:
    """What "auto" becomes where measuring would cost more than the best choice could save."""
    named: dict[str, Any] = {}
    if choice.solver == "auto":
        named["solver"] = "primal" if may_be_primal(problem, choice) and primal_is_less(problem) else "cholesky"
    if choice.precision == "auto":
        named["precision"] = "float64"
    if choice.solver == "cg" and choice.rank == "auto" and choice.preconditioner not in ("none", "factor"):
        n, d = problem.num_rows, problem.num_features
        named["rank"] = choose_rank(n, d, min(problem.alpha), tol=choice.tol, num_columns=problem.num_targets)
    return named


# the largest power of n with which iterations grow: the condition does like n^2, where rows come ever closer
LARGEST_POWER = 1.0

MARGIN = 1.25


@dataclass(frozen=True)
class Iterations:
    """A number of iterations, as a range."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """The geometric mean."""
        return float((self.low * self.high) ** 0.5)

    @classmethod
    def around(cls, best: float) -> Iterations:
        """What is expected where the best estimate is ``best``."""
        return cls(max(1.0, best / MARGIN), float(ceil(max(1.0, best) * MARGIN - 1e-9)))

    def __str__(self) -> str:
        low, high = round(self.low), round(self.high)
        return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def growth(small: float, large: float, least: float, most: float) -> float:
    """The power of the number of rows with which something grows that was ``small`` on half of them, within bounds."""
    if not small or not large:
        return most
    return min(most, max(least, log2(large / small)))


def extrapolate(
    half: tuple[float, float], whole: tuple[float, float], s: int, n: int, *, preconditioned: bool
) -> Iterations:
    """From samples of s / 2 and s rows to n; each with the iterations for alpha, and for alpha s / n."""
    if n <= s:  # alpha s / n is alpha
        return Iterations(min(whole), min(whole))
    ratio = n / s
    own = whole[0] * ratio ** growth(half[0], whole[0], 0.0, LARGEST_POWER)
    included = log2(max(whole[1] / whole[0], 1.0)) / log2(ratio)
    scaled = whole[1] * ratio ** max(0.0, growth(half[1], whole[1], 0.0, LARGEST_POWER) - included)
    low = Iterations.around(min(own, scaled))
    return Iterations(low.low, Iterations.around(max(own, scaled)).high) if preconditioned else low
