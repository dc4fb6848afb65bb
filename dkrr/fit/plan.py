"""What "auto" becomes. Every way that gives the exact answer is priced, and the cheapest that fits is taken.

    choice = argmin over feasible candidates of estimated seconds

Candidates are the Cholesky factor in float64, in mixed precision, and conjugate gradients of several ranks, each with
a Gram matrix that is stored or evaluated on the fly. The number of iterations is a range, from a sample of the rows
(:mod:`dkrr.fit.trial`); candidates are compared at the upper end of it, for an iteration that takes longer than
expected costs more than one that is not tried. An approximation is never a candidate, nor is an answer in float32.

What earlier fits left in the store comes before: only tiles of the same size, precision and source can be continued, so
where they save at least half of the work (m^3 / 3 of n^3 / 3 flops for m of n rows, each distinct alpha), or nothing
else was asked for, their choices are taken over.

Cost: arithmetic, less than 0.1 s, besides the rates (:mod:`dkrr.fit.rates`) and the sample, which are only taken where
the choice may matter. What can be continued: see :mod:`dkrr.linalg.catalogue`, and a listing for each factor found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from dkrr.dataset import Dataset
from dkrr.errors import StoreError
from dkrr.fit.choices import (
    PRIMAL,
    Candidate,
    FitSettings,
    Limits,
    Problem,
    SolverChoice,
    Way,
    is_plainly_primal,
    settings_of,
    small_choice,
    ways_of,
)
from dkrr.fit.prices import priced_way
from dkrr.fit.rates import FEW_WORKERS, Machine, itemsize
from dkrr.fit.trial import Trial
from dkrr.linalg.catalogue import Ancestor, ancestors, judge_center, work_of_tiles
from dkrr.linalg.workspace import choose_tile_size, task_bytes
from dkrr.store.files import is_url
from dkrr.tiles import TileGrid, TileMatrix

logger = logging.getLogger("dkrr.plan")

# below so many flops of the float64 factor every way takes about as long, and measuring would cost more than it saves
SMALL_FLOPS = 2.5e11
# a trial may take this share of the time of a float64 factor, within bounds
TRIAL_SHARE, LEAST_TRIAL_SECONDS, MOST_TRIAL_SECONDS = 0.06, 0.1, 8.0
ASKED = "asked for"
# of the flops; below, whatever is fastest without an earlier factor is chosen
WORTHWHILE = 0.5


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The way that is taken and why, and what else may be done where it leads to no answer.

    Parameters
    ----------
    problem, choice, limits, tile_size, machine
        As in :func:`decide`; ``choice`` and ``tile_size`` are the words as they were asked.
    chosen, candidates
        The way that is taken, and all that were priced.
    reasons
        A sentence for "solver", "precision", "rank" (of cg) and "tile_size" (of a factor).
    continued
        The factor that the way goes on with, where there is one.
    """

    problem: Problem
    choice: SolverChoice
    limits: Limits
    tile_size: int | None
    machine: Callable[[], Machine]
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    reasons: dict[str, str] = field(default_factory=dict)
    continued: Continued | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """The words, without how far an iteration may go, which may change from one attempt to the next."""
        words = self.choice.to_dict() | {"tile_size": self.tile_size}
        return {name: value for name, value in words.items() if name not in ("max_iter", "allow_unconverged")}

    @property
    def priced(self) -> bool:
        """Whether prices were compared. Where they were not, the rows are few."""
        return len(self.candidates) > 1

    def settings(self) -> FitSettings:
        """The fit with nothing left to choose, see :func:`dkrr.fit.choices.settings_of`."""
        return settings_of(self.chosen, self.problem, self.choice)

    def others(self) -> tuple[FitSettings, ...]:
        """The ways that the words allow, the cheapest first; without a sample where they were not priced before."""
        known = self.candidates if self.priced else self._price(self.choice)
        return self._settings(known, self.choice)

    def beyond(self) -> tuple[FitSettings, ...]:
        """The ways that the words exclude: the hint of an error names the cheapest that would work."""
        asked = self.choice
        free = SolverChoice(tol=asked.tol, max_iter=asked.max_iter, seed=asked.seed)
        return self._settings(self._price(free, without=ways_of(self.problem, asked)), free)

    def _settings(self, candidates: Sequence[Candidate], choice: SolverChoice) -> tuple[FitSettings, ...]:
        """Those with tiles and an exact answer that are feasible, in the order of their prices."""
        usable = [item for item in candidates if item.solver in ("cholesky", "cg") and not item.infeasible]
        usable.sort(key=lambda item: item.total_seconds)
        return tuple(settings_of(item, self.problem, choice) for item in usable)

    def _price(self, choice: SolverChoice, without: Sequence[Way] = ()) -> tuple[Candidate, ...]:
        ways = [way for way in ways_of(self.problem, choice) if way not in without]
        if not ways or (len(ways) == 1 and not without):  # the one that was taken
            return ()
        rates = self.machine()
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
    rows: tuple[Any, Dataset] | None = None,
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
    rows
        A store, and the rows: what is to be continued is looked for there.

    Raises
    ------
    ParameterError
        A worker cannot hold a task.
    """
    continued = None if rows is None else find_continued(*rows, problem, choice, limits, tile_size=tile_size)
    words, edge = (choice, tile_size) if continued is None else continued.resolve(choice, tile_size)

    def price(way: Way, rates: Machine | None, found: Trial | None = None, limits: Limits = limits) -> Candidate:
        return priced_way(problem, way, words, limits, edge, rates, found)

    best: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()
    is_small = problem.num_rows**3 / 3 * problem.num_alphas <= SMALL_FLOPS
    if is_small or is_plainly_primal(problem, words):
        way = PRIMAL if is_plainly_primal(problem, words) else ways_of(problem, small_choice(problem, words))[0]
        # the caller compares with the disk, and what a small problem writes is small whatever the solver
        room = limits if way == PRIMAL and not is_small else replace(limits, disk_bytes=None)
        only = price(way, machine() if always_measure else None, limits=room)
        if not only.infeasible or (is_small and words.solver != "auto"):
            best, candidates, n = only, (only,), problem.num_rows
            why = f"the rows are few: the matrix of all {n:,} is factored in seconds, by the plainest way"
            if only.solver == "primal":
                why = (
                    f"less arithmetic than with the matrix of all {n:,} rows: this kernel is linear in "
                    f"{problem.num_explicit:,} features, and one coefficient for each of them is the same answer"
                )
    if best is None:
        ways, found = ways_of(problem, words), None
        rates = machine() if always_measure or len(ways) > 1 else None
        if rates is not None and any(way[0] == "cg" or way[1] == "mixed" for way in ways):
            plain = price(("cholesky", "float64", "on_the_fly", 0), rates)
            found = trial(max(LEAST_TRIAL_SECONDS, min(MOST_TRIAL_SECONDS, TRIAL_SHARE * plain.total_seconds)))
        candidates = tuple(price(way, rates, found) for way in ways)
        feasible = [item for item in candidates if not item.infeasible]
        best = min(feasible, key=lambda item: item.total_seconds) if feasible else candidates[0]
        why = _why_solver(best, candidates)
    reasons = {"solver": why if words.solver == "auto" else ASKED}
    reasons["precision"] = _why_precision(best, candidates, words)
    if best.solver == "cg":
        reasons["rank"] = _why_rank(best, words)
    if best.solver == "cholesky":
        reasons["tile_size"] = _why_tiles(best, problem, limits) if edge is None else ASKED
    decision = Decision(
        problem=problem,
        choice=choice,
        limits=limits,
        tile_size=tile_size,
        machine=machine,
        chosen=best,
        candidates=candidates,
        reasons=reasons,
    )
    if continued is None:
        return decision
    logger.info("%s", continued.sentence())
    named = choice.to_dict() | {"tile_size": tile_size or "auto"}
    left_open = [name for name, text in reasons.items() if text == ASKED and named[name] == "auto"]
    reasons |= dict.fromkeys(left_open, "as in the factor that is continued")
    own = ("cholesky", continued.tile_size, continued.precision, continued.gram)
    if (best.solver, best.tile_size, best.precision, best.gram) != own:
        return decision
    less = continued.saved(best)
    continued = replace(continued, seconds=best.total_seconds - less.total_seconds if best.seconds else None)
    return replace(decision, chosen=less, continued=continued)


def _why_solver(best: Candidate, priced: Sequence[Candidate]) -> str:
    if best.infeasible:
        return "nothing fits; this one is shown"
    others = [item for item in priced if not item.infeasible and item.solver != best.solver]
    if not others:
        return "the only exact way that fits into memory and on the disk" if len(priced) > 1 else "the only exact way"
    second = min(others, key=lambda item: item.total_seconds)
    other = f"{second.name} would take {second.total_seconds:,.0f} s"
    return f"the fastest exact way: about {best.total_seconds:,.0f} s, {other}"


def _why_precision(best: Candidate, priced: Sequence[Candidate], choice: SolverChoice) -> str:
    if choice.precision != "auto":
        return ASKED
    if best.precision == "mixed":
        less = "faster and half the disk" if best.solver == "cholesky" else "faster"
        return f"most arithmetic with 7 digits, which is {less}; the answer is corrected to 16"
    mixed = [item for item in priced if item.precision == "mixed" and item.solver == best.solver]
    other = min(mixed, key=lambda item: (bool(item.infeasible), item.total_seconds), default=None)
    if other is None:
        return "all arithmetic with 16 digits: there is little to gain from fewer"
    why = other.infeasible or f"it would take about {other.total_seconds:,.0f} s"
    return f"all arithmetic with 16 digits; 7 and a correction to 16 gain nothing here ({why})"


def _why_rank(best: Candidate, choice: SolverChoice) -> str:
    if choice.rank != "auto" or not choice.is_low_rank:
        return ASKED
    if not best.rank:
        return "few iterations are expected without a preconditioner, too"
    return "a larger preconditioner takes longer to make than it saves in iterations, a smaller one costs more of them"


def _why_tiles(best: Candidate, problem: Problem, limits: Limits) -> str:
    """Which of its bounds the edge is at, see :func:`~dkrr.linalg.workspace.choose_tile_size`."""
    b, n, d = best.tile_size, problem.num_rows, problem.num_features
    if limits.threads > FEW_WORKERS:
        return f"the fastest of those that were simulated for {limits.threads:,} workers and fit into their memory"
    if b < choose_tile_size(n, d, None, itemsize(best.precision), limits.threads):
        return "the largest whose tasks take no more than 80 % of a worker's memory"
    if b <= 256:
        return "the smallest that are worth a task"
    sides = TileGrid(n, b).num_tiles
    return f"{sides} a side: enough to keep every worker busy to the end, and few, for large tiles are read less often"


# --- what earlier fits left -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Continued:
    """Factors of the first rows that a fit can go on with.

    Parameters
    ----------
    tile_size, precision, gram
        As they were chosen then; "mixed" has a float32 factor.
    num_rows, of_rows
        m of n.
    num_bytes
        Of the whole tiles that need not be computed, of all factors together.
    share
        Of n^3 / 3 flops for each factor that is saved.
    seconds
        What that saves; None where nothing was measured.
    """

    tile_size: int
    precision: str
    gram: str
    num_rows: int
    of_rows: int
    num_bytes: int
    share: float
    seconds: float | None = None

    def resolve(self, choice: SolverChoice, tile_size: int | None) -> tuple[SolverChoice, int | None]:
        """What "auto" becomes where it pays to go on."""
        tile_size = self.tile_size if tile_size is None else tile_size
        if self.share < WORTHWHILE and choice.solver == "auto":
            return choice, tile_size
        frozen = {"solver": "cholesky", "precision": self.precision, "gram": self.gram}
        named: dict[str, Any] = {name: value for name, value in frozen.items() if getattr(choice, name) == "auto"}
        return replace(choice, **named), tile_size

    def saved(self, chosen: Candidate) -> Candidate:
        """The candidate with the seconds that are left."""
        seconds = dict(chosen.seconds)
        for phase, power in (("factorise", 1.0), ("gram", 2 / 3)):
            if phase in seconds:
                seconds[phase] *= 1 - self.share**power
        low = max(0.0, chosen.seconds_low - chosen.total_seconds + sum(seconds.values()))
        return replace(chosen, seconds=seconds, seconds_low=low)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what is reused and what that saves."""
        return {"rows": self.num_rows, "of_rows": self.of_rows, "share": self.share, "seconds": self.seconds}

    def sentence(self) -> str:
        """The same in words."""
        text = f"continues a factor of the first {self.num_rows:,} of {self.of_rows:,} rows"
        text += f": {self.share:.0%} of the flops are saved"
        return text + (f", about {self.seconds:,.0f} s" if self.seconds else "")


def _finished(tiles: TileMatrix, m: int) -> tuple[int, float, bool]:
    """Of the first m rows of a factor: whole tiles, flops of all finished rows, and whether no tile is missing."""
    b, missing, is_whole = tiles.grid.tile_size, set(tiles.missing()), m == tiles.grid.n
    there = [(i, j) for i in range(-(-m // b)) for j in range(i + 1) if (i, j) not in missing]
    flops = m**3 / 3 * work_of_tiles(tiles.grid, m, lambda key: key not in missing)
    # the ragged row block is whole where the factor ends there
    return sum(is_whole or (i + 1) * b <= m for i, _ in there), flops, not missing


def find_continued(
    store: Any, dataset: Dataset, problem: Problem, choice: SolverChoice, limits: Limits, *, tile_size: int | None
) -> Continued | None:
    """The longest finished prefix of a fit in a store, among the factors that the words of the choice allow.

    Parameters
    ----------
    tile_size
        The edge that was asked for; None means "auto".
    limits
        Tiles that are larger than the memory of a task are not gone on with.
    """
    kernel, n, distinct = problem.kernel, problem.num_rows, set(problem.alpha)
    if kernel is None or choice.solver not in ("auto", "cholesky"):
        return None
    best: dict[float, tuple[Ancestor, TileMatrix, int, float]] = {}
    done: set[float] = set()
    judge, kind = cache(partial(judge_center, dataset, kernel, problem.drift_limit)), None
    for ancestor in ancestors(store, dataset, kernel.to_dict(), kinds=["factors"]):
        fields, m = ancestor.fields, ancestor.num_rows
        alpha, own = fields.get("alpha"), [fields[name] for name in ("tile_size", "dtype", "gram")]
        precisions = {"float64": ("auto", "float64"), "float32": ("auto", "float32", "mixed")}[fields["dtype"]]
        is_open = (
            choice.precision in precisions
            and choice.gram in ("auto", fields["gram"])
            and tile_size in (None, fields["tile_size"])
            and (fields["weight_digest"] is None) == (dataset.weight is None)
        )
        if alpha not in distinct or alpha in done or not is_open:
            continue
        size = task_bytes(own[0], dataset.num_features, itemsize(own[1]))
        is_too_large = limits.memory_bytes is not None and size > limits.memory_bytes
        center = fields.get("center")
        is_far = center is not None and judge(tuple(center), ancestor.center_rows).center is None
        if (best and own != kind) or is_too_large or is_far:
            continue
        try:
            tiles = TileMatrix.open(ancestor.location)
        except StoreError:
            continue
        num_tiles, flops, is_finished = _finished(tiles, m)
        if num_tiles:
            kind = own if not best else kind
            best.setdefault(alpha, (ancestor, tiles, num_tiles, flops))
            if m < n or is_finished:
                done.add(alpha)
    if not best:
        return None
    found, tiles, *_ = next(iter(best.values()))
    num_tiles, flops = (sum(column) for column in list(zip(*best.values(), strict=True))[2:])
    usual = "float64" if found.fields["dtype"] == "float64" else "mixed"
    return Continued(
        tile_size=tiles.grid.tile_size,
        precision=usual if choice.precision == "auto" else choice.precision,
        gram=found.fields["gram"],
        num_rows=min(ancestor.num_rows for ancestor, *_ in best.values()),
        of_rows=n,
        num_bytes=0 if is_url(store) else num_tiles * (tiles.array.chunk_bytes + 4),
        share=flops / (n**3 / 3 * len(distinct)),
    )
