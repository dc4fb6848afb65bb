"""Planner: what "auto" becomes. Every way that gives the exact answer is priced, and the cheapest that fits is taken.

    choice = argmin over feasible candidates of estimated seconds

Candidates are the Cholesky factor in float64, in mixed precision, and conjugate gradients of several ranks, each with
a Gram matrix that is stored or evaluated on the fly. The number of iterations is a range, from a sample of the rows
(:mod:`dkrr.planning.trial`); candidates are compared at the upper end of it, for an iteration that takes longer than
expected costs more than one that is not tried. An approximation is never a candidate, nor is an answer in float32.

Cost: arithmetic, less than 0.1 s, besides the rates (:mod:`dkrr.planning.rates`) and the sample, which are only taken
where the choice may matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from typing import Any

from dkrr.errors import ParameterError
from dkrr.fitting import BASELINE_BYTES, FitSettings, choose_gram, choose_tile_size, task_bytes
from dkrr.kernels import Kernel
from dkrr.kernels.features import count_features
from dkrr.linalg.factor.schedule import Split
from dkrr.linalg.lowrank.ranks import choose_rank
from dkrr.linalg.nystrom.limits import nystrom_bytes
from dkrr.linalg.primal.solver import MAX_FEATURES, primal_bytes
from dkrr.planning.choices import SolverChoice
from dkrr.planning.costs import (
    Machine,
    cg_disk,
    cg_memory,
    cg_seconds,
    cholesky_disk,
    cholesky_memory,
    cholesky_seconds,
    nystrom_seconds,
    pass_seconds,
    primal_seconds,
)
from dkrr.planning.iterations import Iterations
from dkrr.planning.simulate import Simulation, TileSeconds, simulate
from dkrr.planning.tiling import FEW_WORKERS, at_most, choose_split, choose_tiles
from dkrr.planning.trial import Trial
from dkrr.tiles import TileGrid

__all__ = ["Candidate", "Decision", "Limits", "Problem", "decide", "is_plainly_primal"]

RANKS = (0, 250, 500, 1000, 2000, 4000)
# below so many flops of the float64 factor every way takes about as long, and measuring would cost more than it saves
SMALL_FLOPS = 2.5e11
# a trial may take this share of the time of a float64 factor, within bounds
TRIAL_SHARE, LEAST_TRIAL_SECONDS, MOST_TRIAL_SECONDS = 0.03, 0.1, 1.5
# solvers that have no tiles
TILELESS = ("nystrom", "primal")
NYSTROM_ITERATIONS = Iterations(12, 30)
UNKNOWN_ITERATIONS = Iterations(20, 100)
# with the factor of an alpha that is up to ten times as large or small
FACTOR_ITERATIONS = Iterations(5, 40)
# arrays (n, t) that conjugate gradients hold in the driver
DRIVER_VECTORS = 10
DISK_RESERVE_BYTES = 256 * 2**20


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
    """What there is: tasks at once, memory of a task, memory of this process, disk; None where nothing limits it."""

    threads: int
    memory_bytes: int | None
    driver_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One way to solve, and its price. ``infeasible`` says why it cannot be taken, "" when it can.

    ``seconds`` are those of ``iterations.high``; ``seconds_low`` is the total at ``iterations.low``. ``split`` says
    which sums of a factor are split, and ``efficiency`` is the share of the workers' time that a simulation of the
    factor finds busy, 0 where there is none.
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
        rank = "" if self.solver != "cg" else f", rank {self.rank:,}" if self.rank else ", no preconditioner"
        stored = ", stored Gram" if self.gram == "stored" else ""
        return f"{self.solver} {self.precision}{rank}{stored}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"name": self.name, "total_seconds": self.total_seconds}


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The way that is taken, the others, and why; ``tile_rule`` says where the tile edge comes from."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reason: str
    tile_rule: str

    def settings(self, problem: Problem, choice: SolverChoice) -> FitSettings:
        """The fit with nothing left to choose; of nystrom and primal the parts that they share with the others."""
        chosen = self.chosen
        iterative = choice.iterative(rank=chosen.rank or None)
        if chosen.solver == "cg" and not chosen.rank and choice.rank == "auto" and choice.preconditioner != "factor":
            iterative = replace(iterative, preconditioner="none")
        return FitSettings(
            kernel=problem.kernel,
            alpha=problem.alpha,
            tile_size=chosen.tile_size,
            precision=chosen.precision,  # type: ignore[arg-type]
            gram=chosen.gram,  # type: ignore[arg-type]
            solver=chosen.solver if chosen.solver in ("cholesky", "cg") else "cg",  # type: ignore[arg-type]
            iterative=iterative,
            fit_intercept=problem.fit_intercept,
        )


def decide(
    problem: Problem,
    choice: SolverChoice,
    limits: Limits,
    *,
    tile_size: int | None = None,
    machine: Callable[[], Machine],
    trial: Callable[[float], Trial | None] = lambda seconds: None,
    always_measure: bool = False,
) -> Decision:
    """Resolve everything that was left to "auto".

    Parameters
    ----------
    machine, trial
        Called only where the choice may depend on them, ``machine`` first; ``trial`` with the seconds it may take, 3 %
        of what a float64 factor would.
    tile_size
        The edge that was asked for; None means "auto".
    always_measure
        Price the candidates of a small problem too, for a plan that is looked at.

    Raises
    ------
    ParameterError
        A worker cannot hold a task.
    """
    many = limits.threads > FEW_WORKERS and choice.solver in ("auto", "cholesky")
    rule = TILE_RULE_OF_MANY.format(limits.threads) if many else TILE_RULE
    rule = "as given" if tile_size is not None else rule
    if is_plainly_primal(problem, choice):
        only = _priced(problem, PRIMAL, choice, limits, tile_size, machine() if always_measure else None, None)
        if not only.infeasible:
            reason = "few features: less arithmetic than one product with the Gram matrix"
            return Decision(chosen=only, candidates=(only,), reason=reason, tile_rule=rule)
    flops = problem.num_rows**3 / 3 * problem.num_alphas
    if flops <= SMALL_FLOPS:
        ways = _ways(problem, replace(choice, **_small(problem, choice, limits)))
        rates = machine() if always_measure else None
        # the caller compares with the disk, and what a small problem writes is small whatever the solver
        only = _priced(problem, ways[0], choice, replace(limits, disk_bytes=None), tile_size, rates, None)
        if not only.infeasible or choice.solver != "auto":
            reason = f"small: a float64 factor takes {flops:.1g} flops" if choice.solver == "auto" else "as asked"
            return Decision(chosen=only, candidates=(only,), reason=reason, tile_rule=rule)
    ways = _ways(problem, choice)
    rates = machine() if always_measure or len(ways) > 1 else None
    found = None
    if rates is not None and any(way[0] == "cg" or way[1] == "mixed" for way in ways):
        plain = _priced(problem, ("cholesky", "float64", "on_the_fly", 0), choice, limits, tile_size, rates, None)
        found = trial(max(LEAST_TRIAL_SECONDS, min(MOST_TRIAL_SECONDS, TRIAL_SHARE * plain.total_seconds)))
    priced = tuple(_priced(problem, way, choice, limits, tile_size, rates, found) for way in ways)
    best = cheapest(priced)
    return Decision(chosen=best, candidates=priced, reason=_reason(best, priced, choice), tile_rule=rule)


def _small(problem: Problem, choice: SolverChoice, limits: Limits) -> dict[str, Any]:
    """What "auto" becomes where measuring would cost more than the best choice could save."""
    named: dict[str, Any] = {}
    if choice.solver == "auto":
        named["solver"] = "primal" if _may_be_primal(problem, choice) and _primal_is_less(problem) else "cholesky"
    if choice.precision == "auto":
        named["precision"] = "float64"
    if choice.solver == "cg" and choice.rank == "auto" and choice.preconditioner not in ("none", "factor"):
        n, d = problem.num_rows, problem.num_features
        named["rank"] = choose_rank(n, d, min(problem.alpha), tol=choice.tol, num_columns=problem.num_targets)
    return named


TILE_RULE = "n / 10 up to a multiple of 128, in 256..2048, within 80 % of a worker's memory"
TILE_RULE_OF_MANY = "the fastest of those simulated for {} workers, within 80 % of a worker's memory"


def cheapest(priced: Sequence[Candidate]) -> Candidate:
    """The feasible candidate with the least seconds; the first one when none is feasible."""
    feasible = [item for item in priced if not item.infeasible]
    return min(feasible, key=lambda item: item.total_seconds) if feasible else priced[0]


Way = tuple[str, str, str, int]  # solver, precision, gram, rank
PRIMAL: Way = ("primal", "float64", "on_the_fly", 0)


def _ways(problem: Problem, choice: SolverChoice) -> list[Way]:
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
    if _may_be_primal(problem, choice):
        yield PRIMAL
    precisions = {"auto": ("float64", "mixed")}.get(choice.precision, (choice.precision,))
    for precision in precisions:
        if choice.solver in ("auto", "cholesky"):
            yield "cholesky", precision, usual if choice.gram == "auto" else choice.gram, 0
        if choice.solver == "cg" or (choice.solver == "auto" and precision != "float32" and not given):
            grams = (dear,) if choice.gram == "auto" else (choice.gram,)
            for gram in grams:
                for rank in _ranks(problem, choice):
                    yield "cg", precision, gram, rank


def _may_be_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether "auto" may become primal: fewer features than rows, and no word about matrices that it has not."""
    size = count_features(problem.kernel, problem.num_features)
    if not problem.primal or choice.solver != "auto" or size is None:
        return False
    asked = choice.precision in ("auto", "float64") and choice.gram == "auto"
    return asked and size < problem.num_rows and size <= MAX_FEATURES


def is_plainly_primal(problem: Problem, choice: SolverChoice) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than 10 for each entry of K: then no way through K is faster."""
    if not _may_be_primal(problem, choice):
        return False
    n, size = problem.num_rows, count_features(problem.kernel, problem.num_features) or 0
    return n * size**2 + problem.num_alphas * size**3 / 3 < 10 * n**2


def _primal_is_less(problem: Problem) -> bool:
    """Whether n D^2 + D^3 / 3 flops are less than n^3 / 3, where nothing is measured."""
    n, size = problem.num_rows, count_features(problem.kernel, problem.num_features) or 0
    return n * size**2 + problem.num_alphas * size**3 / 3 < n**3 / 3 * problem.num_alphas


def _ranks(problem: Problem, choice: SolverChoice) -> Iterator[int]:
    if choice.preconditioner in ("none", "factor"):
        yield 0
    elif choice.rank != "auto":
        yield min(choice.rank, problem.num_rows)
    else:
        yield from (rank for rank in RANKS if rank <= problem.num_rows / 4)


def _priced(
    problem: Problem,
    way: Way,
    choice: SolverChoice,
    limits: Limits,
    tile_size: int | None,
    machine: Machine | None,
    trial: Trial | None,
) -> Candidate:
    solver, precision, gram, rank = way
    n, d, t = problem.num_rows, problem.num_features, problem.num_targets
    infeasible = ""
    itemsize = 8 if precision == "float64" or solver != "cholesky" else 4
    if tile_size is not None:
        b = tile_size
        has_tiles = solver not in TILELESS
        if has_tiles and limits.memory_bytes is not None and task_bytes(b, d, itemsize) > limits.memory_bytes:
            infeasible = f"tiles of {b} do not fit a worker"
    else:
        try:
            b = choose_tile_size(n, d, limits.memory_bytes, itemsize, limits.threads)
            if solver == "cholesky":
                b = choose_tiles(n, d, limits.memory_bytes, limits.threads, precision, gram, b)
        except ParameterError as exc:
            b, infeasible = 128, "" if solver in TILELESS else exc.message
    iterations: Iterations | None = None
    if solver == "nystrom":
        m = choice.nystrom(n).num_centers
        memory = BASELINE_BYTES + nystrom_bytes(n, m, d, t)[0]
        disk = {"centres": 16 * m * m, "vectors": 80 * m * t, "model": 8 * m * (d + t)}
        iterations = NYSTROM_ITERATIONS
    elif solver == "primal":
        size = count_features(problem.kernel, d) or 0
        task, driver, sums = primal_bytes(problem.kernel, d, n, t)
        memory, disk = BASELINE_BYTES + task, {"sums": sums, "model": 8 * size * t}
        if limits.driver_bytes is not None and driver > limits.driver_bytes:
            infeasible = f"this process needs {driver / 2**30:,.1f} GiB, {limits.driver_bytes / 2**30:,.1f} are free"
    elif solver == "cg":
        memory = cg_memory(n, b, d, t, rank, limits.threads)
        disk = cg_disk(n, b, d, t, gram=gram, rank=rank)
        iterations = UNKNOWN_ITERATIONS
        if choice.preconditioner == "factor":
            iterations = FACTOR_ITERATIONS
        elif trial is not None:
            iterations = trial.cg(problem.alpha, tuple(_ranks(problem, choice)), choice.tol)[rank]
    else:
        memory = cholesky_memory(b, d, precision)
        disk = cholesky_disk(n, b, d, t, precision=precision, gram=gram, num_alphas=problem.num_alphas)
        if precision == "mixed":
            iterations = Iterations(3, 12) if trial is None else trial.mixed(problem.alpha, choice.tol)
    if not infeasible:
        vectors = 0 if iterations is None else DRIVER_VECTORS * 8 * n * t
        infeasible = _misfit(memory, vectors, sum(disk.values()), limits, iterations, choice)
    candidate = Candidate(
        solver=solver,
        precision=precision,
        gram=gram,
        tile_size=b,
        rank=rank,
        num_centers=choice.nystrom(n).num_centers if solver == "nystrom" else 0,
        iterations=iterations,
        memory_bytes=memory,
        disk_bytes=disk,
        infeasible=infeasible,
        split=choose_split(n, b, limits.threads, precision, gram) if solver == "cholesky" else None,
    )
    if machine is None:
        return candidate
    if candidate.split is not None:
        candidate = replace(candidate, efficiency=_simulated(problem, candidate, machine).efficiency)
    low, high = (
        _seconds(problem, candidate, machine, 0.0 if iterations is None else count)
        for count in ((0, 0) if iterations is None else (iterations.low, iterations.high))
    )
    return replace(candidate, seconds=high, seconds_low=sum(low.values()))


def _simulated(problem: Problem, way: Candidate, machine: Machine) -> Simulation:
    """The factorisation on the machine's workers, with the split of the candidate; of its first 192 tiles a side."""
    grid = at_most(TileGrid(problem.num_rows, way.tile_size))
    seconds = TileSeconds.of(machine, way.tile_size, way.precision, way.gram)
    return simulate(grid, way.split or Split(), machine.threads, seconds)


def _seconds(problem: Problem, way: Candidate, machine: Machine, iterations: float) -> dict[str, float]:
    n, t = problem.num_rows, problem.num_targets
    if way.solver == "primal":
        size = count_features(problem.kernel, problem.num_features) or 0
        return primal_seconds(machine, n, problem.num_features, size, t, problem.num_alphas)
    if way.solver == "nystrom":
        m = way.num_centers
        return nystrom_seconds(machine, n, m, t, precision=way.precision, iterations=iterations)
    seconds = _exact_seconds(problem, way, machine, iterations)
    if problem.fit_intercept and way.iterations is not None:
        # after an iteration, the intercept and the residual of the whole system from one more product
        rounds = 1 if way.solver == "cg" else problem.num_alphas
        product = machine.exact_factor * pass_seconds(machine, n, t, "float64")
        seconds["residual"] = seconds.get("residual", 0.0) + rounds * product
    return seconds


def _exact_seconds(problem: Problem, way: Candidate, machine: Machine, iterations: float) -> dict[str, float]:
    n, b, t = problem.num_rows, way.tile_size, problem.num_targets
    if way.solver == "cg":
        return cg_seconds(
            machine, n, b, t, precision=way.precision, gram=way.gram, rank=way.rank, iterations=iterations
        )
    return cholesky_seconds(
        machine,
        n,
        b,
        t,
        precision=way.precision,
        gram=way.gram,
        num_alphas=problem.num_alphas,
        iterations=iterations,
    )


def _misfit(
    memory: int, vectors: int, disk: int, limits: Limits, iterations: Iterations | None, choice: SolverChoice
) -> str:
    """Why a candidate cannot be taken, in a few words."""
    if limits.memory_bytes is not None and memory > limits.memory_bytes:
        return f"a task needs {memory / 2**20:,.0f} MiB, a worker has {limits.memory_bytes / 2**20:,.0f}"
    if limits.driver_bytes is not None and vectors > limits.driver_bytes:
        return f"this process needs {vectors / 2**30:,.1f} GiB of vectors, {limits.driver_bytes / 2**30:,.1f} are free"
    if limits.disk_bytes is not None and disk + DISK_RESERVE_BYTES > limits.disk_bytes:
        return f"writes {disk / 1e9:.3g} GB, {limits.disk_bytes / 1e9:.3g} GB are free"
    most = choice.iterative().iterations
    if iterations is not None and iterations.high > most and choice.solver == "auto":
        return f"may need {iterations.high:,.0f} iterations, {most:,} are allowed"
    return ""


def _reason(best: Candidate, priced: Sequence[Candidate], choice: SolverChoice) -> str:
    """One sentence."""
    if best.infeasible:
        return "nothing fits"
    if len(priced) == 1:
        return "as asked"
    others = [item for item in priced if item is not best and not item.infeasible]
    kinds = {(item.solver, item.precision): item for item in sorted(others, key=lambda item: -item.total_seconds)}
    kinds.pop((best.solver, best.precision), None)
    if not kinds:
        return f"the only one that fits, of {len(priced)}" if not others else f"the fastest of {len(others) + 1}"
    second = min(kinds.values(), key=lambda item: item.total_seconds if item.seconds else inf)
    return f"fastest: {best.total_seconds:,.0f} s, {second.name} would take {second.total_seconds:,.0f} s"
