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

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dkrr.fitting import FitSettings
from dkrr.kernels.features import count_features
from dkrr.linalg.settings import Foreseen
from dkrr.linalg.sizes import choose_tile_size
from dkrr.planning.candidates import Candidate, Limits, Problem
from dkrr.planning.choices import SolverChoice
from dkrr.planning.costs import Machine, itemsize
from dkrr.planning.pricing import priced_way
from dkrr.planning.tiling import FEW_WORKERS
from dkrr.planning.trial import Trial
from dkrr.planning.ways import PRIMAL, Way, is_plainly_primal, small_choice, ways_of
from dkrr.tiles import TileGrid

__all__ = ["Decision", "Ways", "decide", "settings_of"]

# below so many flops of the float64 factor every way takes about as long, and measuring would cost more than it saves
SMALL_FLOPS = 2.5e11
# a trial may take this share of the time of a float64 factor, within bounds
TRIAL_SHARE, LEAST_TRIAL_SECONDS, MOST_TRIAL_SECONDS = 0.06, 0.1, 8.0
ASKED = "asked for"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The way that is taken, the others, and why: ``reasons`` has a sentence for "solver", "precision", "rank" (of cg)
    and "tile_size" (of a factor).
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reasons: dict[str, str]

    def settings(self, problem: Problem, choice: SolverChoice) -> FitSettings:
        """The fit with nothing left to choose; of nystrom and primal the parts that they share with the others."""
        return settings_of(self.chosen, problem, choice)


def settings_of(way: Candidate, problem: Problem, choice: SolverChoice) -> FitSettings:
    """The fit by one way, with nothing left to choose."""
    iterative = choice.iterative(rank=way.rank or None)
    if way.solver == "cg" and not way.rank and choice.rank == "auto" and choice.preconditioner != "factor":
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
        foreseen=Foreseen(low=low, high=high, seconds=dict(way.seconds)),
    )


def in_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those with tiles and an exact answer that are feasible, the cheapest first."""
    usable = [item for item in candidates if item.solver in ("cholesky", "cg") and not item.infeasible]
    return sorted(usable, key=lambda item: item.total_seconds)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What else may be done where the way that was chosen leads to no answer: priced when it is asked for.

    Parameters
    ----------
    problem, choice, limits, tile_size, machine
        As in :func:`decide`; ``choice`` has the words as they were asked.
    candidates
        Those of the decision, where they were priced; else all ways are, without a sample.
    """

    problem: Problem
    choice: SolverChoice
    limits: Limits
    tile_size: int | None
    machine: Callable[[], Machine]
    candidates: tuple[Candidate, ...] = ()

    @property
    def asked(self) -> dict[str, Any]:
        """The words, without how far an iteration may go, which may change from one attempt to the next."""
        words = self.choice.to_dict() | {"tile_size": self.tile_size}
        return {name: value for name, value in words.items() if name not in ("max_iter", "allow_unconverged")}

    @property
    def priced(self) -> bool:
        """Whether the decision compared prices."""
        return len(self.candidates) > 1

    def others(self) -> tuple[FitSettings, ...]:
        """The ways that the words allow, the cheapest first."""
        known = self.candidates if self.priced else self._priced(self.choice)
        return tuple(settings_of(item, self.problem, self.choice) for item in in_order(known))

    def beyond(self) -> tuple[FitSettings, ...]:
        """The ways that the words exclude."""
        asked = self.choice
        free = SolverChoice(tol=asked.tol, max_iter=asked.max_iter, seed=asked.seed)
        allowed = set(ways_of(self.problem, asked))
        priced = self._priced(free, without=allowed)
        return tuple(settings_of(item, self.problem, free) for item in in_order(priced))

    def _priced(self, choice: SolverChoice, without: Container[Way] = ()) -> tuple[Candidate, ...]:
        ways = [way for way in ways_of(self.problem, choice) if way not in without]
        if len(ways) < 2 and not without:  # the one that was taken
            return ()
        rates = self.machine() if ways else None
        return tuple(priced_way(self.problem, way, choice, self.limits, self.tile_size, rates, None) for way in ways)


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
        Called only where the choice may depend on them, ``machine`` first; ``trial`` with the seconds it may take, 6 %
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

    def decision(chosen: Candidate, candidates: tuple[Candidate, ...], reason: str) -> Decision:
        reasons = {"solver": reason if choice.solver == "auto" else ASKED}
        reasons["precision"] = _why_precision(chosen, candidates, choice)
        if chosen.solver == "cg":
            reasons["rank"] = _why_rank(chosen, choice)
        if chosen.solver == "cholesky":
            reasons["tile_size"] = _why_tiles(chosen, problem, limits) if tile_size is None else ASKED
        return Decision(chosen=chosen, candidates=candidates, reasons=reasons)

    if is_plainly_primal(problem, choice):
        only = priced_way(problem, PRIMAL, choice, limits, tile_size, machine() if always_measure else None, None)
        if not only.infeasible:
            return decision(only, (only,), _why_primal(problem))
    flops = problem.num_rows**3 / 3 * problem.num_alphas
    if flops <= SMALL_FLOPS:
        ways = ways_of(problem, replace(choice, **small_choice(problem, choice)))
        rates = machine() if always_measure else None
        # the caller compares with the disk, and what a small problem writes is small whatever the solver
        only = priced_way(problem, ways[0], choice, replace(limits, disk_bytes=None), tile_size, rates, None)
        if not only.infeasible or choice.solver != "auto":
            few = (
                f"the rows are few: the matrix of all {problem.num_rows:,} is factored in seconds, by the plainest way"
            )
            return decision(only, (only,), _why_primal(problem) if only.solver == "primal" else few)
    ways = ways_of(problem, choice)
    rates = machine() if always_measure or len(ways) > 1 else None
    found = None
    if rates is not None and any(way[0] == "cg" or way[1] == "mixed" for way in ways):
        plain = priced_way(problem, ("cholesky", "float64", "on_the_fly", 0), choice, limits, tile_size, rates, None)
        found = trial(max(LEAST_TRIAL_SECONDS, min(MOST_TRIAL_SECONDS, TRIAL_SHARE * plain.total_seconds)))
    priced = tuple(priced_way(problem, way, choice, limits, tile_size, rates, found) for way in ways)
    best = _cheapest(priced)
    return decision(best, priced, _why_solver(best, priced))


def _cheapest(priced: Sequence[Candidate]) -> Candidate:
    """The feasible candidate with the least seconds; the first one when none is feasible."""
    feasible = [item for item in priced if not item.infeasible]
    return min(feasible, key=lambda item: item.total_seconds) if feasible else priced[0]


def _why_solver(best: Candidate, priced: Sequence[Candidate]) -> str:
    if best.infeasible:
        return "nothing fits; this one is shown"
    others = [item for item in priced if not item.infeasible and item.solver != best.solver]
    if not others:
        return "the only exact way that fits into memory and on the disk" if len(priced) > 1 else "the only exact way"
    second = min(others, key=lambda item: item.total_seconds)
    other = f"{second.name} would take {second.total_seconds:,.0f} s"
    return f"the fastest exact way: about {best.total_seconds:,.0f} s, {other}"


def _why_primal(problem: Problem) -> str:
    size = count_features(problem.kernel, problem.num_features) or 0
    return (
        f"less arithmetic than with the matrix of all {problem.num_rows:,} rows: this kernel is linear in {size:,} "
        "features, and one coefficient for each of them is the same answer"
    )


def _why_precision(best: Candidate, priced: Sequence[Candidate], choice: SolverChoice) -> str:
    if choice.precision != "auto":
        return ASKED
    if best.infeasible:
        return "nothing fits"
    if best.precision == "mixed":
        less = "faster and half the disk" if best.solver == "cholesky" else "faster"
        return f"most arithmetic with 7 digits, which is {less}; the answer is corrected to 16"
    mixed = [item for item in priced if item.precision == "mixed" and item.solver == best.solver]
    if not mixed:
        return "all arithmetic with 16 digits: there is little to gain from fewer"
    other = min(mixed, key=lambda item: (bool(item.infeasible), item.total_seconds))
    why = other.infeasible or f"it would take about {other.total_seconds:,.0f} s"
    return f"all arithmetic with 16 digits; 7 and a correction to 16 gain nothing here ({why})"


def _why_rank(best: Candidate, choice: SolverChoice) -> str:
    if choice.rank != "auto" or choice.preconditioner in ("none", "factor"):
        return ASKED
    if not best.rank:
        return "few iterations are expected without a preconditioner, too"
    return "a larger preconditioner takes longer to make than it saves in iterations, a smaller one costs more of them"


def _why_tiles(best: Candidate, problem: Problem, limits: Limits) -> str:
    """Which of its bounds the edge is at, see :func:`~dkrr.linalg.sizes.choose_tile_size`."""
    b, n, d = best.tile_size, problem.num_rows, problem.num_features
    if limits.threads > FEW_WORKERS:
        return f"the fastest of those that were simulated for {limits.threads:,} workers and fit into their memory"
    if b < choose_tile_size(n, d, None, itemsize(best.precision), limits.threads):
        return "the largest whose tasks take no more than 80 % of a worker's memory"
    sides = TileGrid(n, b).num_tiles
    if b <= 256:
        return "the smallest that are worth a task"
    return f"{sides} a side: enough to keep every worker busy to the end, and few, for large tiles are read less often"
