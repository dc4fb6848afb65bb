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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from dkrr.fitting import FitSettings
from dkrr.planning.candidates import Candidate, Limits, Problem
from dkrr.planning.choices import SolverChoice
from dkrr.planning.costs import Machine
from dkrr.planning.pricing import priced_way
from dkrr.planning.tiling import FEW_WORKERS
from dkrr.planning.trial import Trial
from dkrr.planning.ways import PRIMAL, is_plainly_primal, small_choice, ways_of

__all__ = ["Decision", "decide"]

# below so many flops of the float64 factor every way takes about as long, and measuring would cost more than it saves
SMALL_FLOPS = 2.5e11
# a trial may take this share of the time of a float64 factor, within bounds
TRIAL_SHARE, LEAST_TRIAL_SECONDS, MOST_TRIAL_SECONDS = 0.03, 0.1, 1.5
TILE_RULE = "n / 10 up to a multiple of 128, in 256..2048, within 80 % of a worker's memory"
TILE_RULE_OF_MANY = "the fastest of those simulated for {} workers, within 80 % of a worker's memory"


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
        only = priced_way(problem, PRIMAL, choice, limits, tile_size, machine() if always_measure else None, None)
        if not only.infeasible:
            reason = "few features: less arithmetic than one product with the Gram matrix"
            return Decision(chosen=only, candidates=(only,), reason=reason, tile_rule=rule)
    flops = problem.num_rows**3 / 3 * problem.num_alphas
    if flops <= SMALL_FLOPS:
        ways = ways_of(problem, replace(choice, **small_choice(problem, choice)))
        rates = machine() if always_measure else None
        # the caller compares with the disk, and what a small problem writes is small whatever the solver
        only = priced_way(problem, ways[0], choice, replace(limits, disk_bytes=None), tile_size, rates, None)
        if not only.infeasible or choice.solver != "auto":
            reason = f"small: a float64 factor takes {flops:.1g} flops" if choice.solver == "auto" else "as asked"
            return Decision(chosen=only, candidates=(only,), reason=reason, tile_rule=rule)
    ways = ways_of(problem, choice)
    rates = machine() if always_measure or len(ways) > 1 else None
    found = None
    if rates is not None and any(way[0] == "cg" or way[1] == "mixed" for way in ways):
        plain = priced_way(problem, ("cholesky", "float64", "on_the_fly", 0), choice, limits, tile_size, rates, None)
        found = trial(max(LEAST_TRIAL_SECONDS, min(MOST_TRIAL_SECONDS, TRIAL_SHARE * plain.total_seconds)))
    priced = tuple(priced_way(problem, way, choice, limits, tile_size, rates, found) for way in ways)
    best = _cheapest(priced)
    return Decision(chosen=best, candidates=priced, reason=_reason(best, priced, choice), tile_rule=rule)


def _cheapest(priced: Sequence[Candidate]) -> Candidate:
    """The feasible candidate with the least seconds; the first one when none is feasible."""
    feasible = [item for item in priced if not item.infeasible]
    return min(feasible, key=lambda item: item.total_seconds) if feasible else priced[0]


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
