"""Choosing kernel, widths and alpha on subsets of the rows, then checking and refining the choice on more of them.

    1  search      every family with one shared width, then with one width for each feature, on a small subset:
                   the marginal likelihood is maximised from two starts each
    2  search      the best of them (by leave-one-out error), continued on a larger subset
    3  slice       the best with a shared width and the best with one for each feature: the leave-one-out error over
                   (factor on the widths) x alpha, one eigendecomposition a factor
    4  check       the finalists on the most rows that the time allows, alpha refined; of those whose error is as good
                   as the smallest, the best conditioned is chosen (:mod:`dkrr.selection.choice`)

With another loss than the square its widths are those of the square to begin with: slices and check are then what a fit
of it loses on held-out rows, by folds and over C (:class:`~dkrr.selection.choice.FoldLoss`), and the smallest C that is
as good as the best is chosen.

The subsets are nested. Leave-one-out errors are in units of the targets' standard deviations. Several targets share
kernel and alpha.

The choice is a function of the rows, the settings and the seed, down to the bits on one kind of CPU, as long as the
budget cuts nothing off. Where it does, a note says so.

Cost: see :func:`trial_flops`; with 1,000, 2,000 and 8,000 rows about 3e12 flops.

The time that counts is that which trials took when they ran. One that is read back after an interruption counts as
much again, so that the search continues as it would have without the interruption.

A trial is frozen parameters, a task that runs it on any worker, and a JSON document with what it found:

    search   widths and alpha that minimise the negative log marginal likelihood, from a start, by L-BFGS-B in
             log l_1, ..., log l_p, log alpha (p = 1 or d) with the exact gradient; a local minimum
    slice    widths times a factor: the leave-one-out error for a grid of alphas, from one eigendecomposition
    check    the same for a few alphas on more rows; the squared errors of the rows are in an array beside the document
    folds    what a fit with another loss than the square loses on held-out rows, for every alpha, of each row as above

A trial is named by the digest of its parameters and of the rows, and its document is its checkpoint: a task that finds
it returns what it says. So an interrupted search continues, and one that is repeated is read.

The rows are a random subset of those of a data set, in random order, as a data set of its own: the first m of them are
a random subset themselves, so that a search on few rows and a check on more of them use nested samples. Rows of weight
0 are left out: they take no part in a fit.

References
----------
Byrd, Lu, Nocedal, Zhu (1995), A limited memory algorithm for bound constrained optimization.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse.linalg import eigsh
from scipy.spatial.distance import pdist

from dkrr.dataset import Dataset, Floats, RowArray, ingest
from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import Executor, Node, Progress
from dkrr.errors import DamagedChunkError, DataError, MemoryBudgetError, NotPositiveDefiniteError, StoreError
from dkrr.fit.inputs import TemporaryStore, find_dataset, find_executor, rows_on_disk
from dkrr.kernels import Kernel
from dkrr.linalg.fit_losses import fit_losses, label_targets
from dkrr.linalg.loss import Loss, log_probabilities
from dkrr.linalg.operators import Rows, read_rows
from dkrr.linalg.workspace import BASELINE_BYTES
from dkrr.selection.choice import (
    AS_GOOD,
    Candidate,
    Explained,
    FoldLoss,
    TuneResult,
    TuneSettings,
    WidthKind,
    choose_candidates,
    family_kernel,
)
from dkrr.store.files import delete_key, place, read_json, storage_errors, write_json

# widths, in standard deviations of their feature: a feature that is wider than the upper bound has no influence
WIDTH_BOUNDS = (1e-2, 1e4)

MEDIAN_ROWS = 1_000

# relative change of the loss, and largest component of its gradient, at which a search ends
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4

FORMAT = 4  # of the documents, and of what is computed

# of an evaluation, for each n^3: a factor and an inverse with the gradient, of few rows as much again for entries and
# strips; a factor and the diagonal of its inverse; an eigendecomposition
FLOPS = {"search": 1.0, "check": 2 / 3, "slice": 9.0}

# on the gaps of the fits of folds, which only have to tell one C from another
FOLD_TOL = 1e-3

# of a fold and an alpha, for each entry of K
FOLD_FLOPS = 2000.0


def draw_subset(dataset: Dataset, num_rows: int, seed: int, location: str) -> Dataset:
    """Draw ``num_rows`` rows (all, if there are not so many) and write them to ``location``.

    What an earlier call with the same arguments wrote there is used as it is; one that writes it is waited for.

    Raises
    ------
    DataError
        The data has no targets, or fewer than two rows of positive weight.
    """
    if not dataset.num_targets:
        raise DataError(f"{dataset.path} has no target", hint="name one: [data] target = [-1]")
    weight, n = dataset.weight, dataset.num_rows
    usable = np.arange(n) if weight is None else np.flatnonzero(weight.read(0, n)[:, 0] > 0)
    if len(usable) < 2:
        raise DataError(f"{dataset.path} has {len(usable)} rows of positive weight", hint="two at least are needed")
    chosen = usable[np.random.default_rng(seed).permutation(len(usable))[:num_rows]]
    x, y = (read_rows(part, chosen) for part in (dataset.X, dataset.targets))
    own = None if weight is None else read_rows(weight, chosen)[:, 0]
    return ingest(x, location, y=y, sample_weight=own, wait=True)


def explained(rows: Dataset, num_rows: int, *, intercept: bool) -> Explained:
    """The first ``num_rows`` rows of a subset."""
    weight = None if rows.weight is None else rows.weight.read(0, num_rows)[:, 0]
    return Explained(x=rows.X.read(0, num_rows), y=rows.targets.read(0, num_rows), weight=weight, intercept=intercept)


def start_width(x: Floats) -> float:
    """The median distance of rows that differ, of at most 1,000: half of such pairs are closer than one width."""
    distances = pdist(x[:MEDIAN_ROWS])
    median = float(np.median(distances[distances > 0])) if distances.any() else float(np.sqrt(x.var(axis=0).sum()))
    return median or float(np.sqrt(x.shape[1]))


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is tried.

    Parameters
    ----------
    stage
        Name of the part of the search that it belongs to.
    kind
        "search", "slice", "check" or "folds".
    family
        One of :data:`~dkrr.selection.choice.FAMILIES`.
    widths
        One, or one for each feature: where a search begins, or what is evaluated.
    alphas
        One to begin with, or all that are evaluated.
    num_rows
        Rows of the subset that are used.
    num_evaluations
        At most; of a slice, one.
    factor
        By which the widths of a slice were multiplied.
    fold_loss
        Of folds.
    """

    stage: str
    kind: Literal["search", "slice", "check", "folds"]
    family: str
    widths: tuple[float, ...]
    alphas: tuple[float, ...]
    num_rows: int
    num_evaluations: int = 1
    factor: float = 1.0
    fold_loss: FoldLoss | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the same that JSON gives back."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {name: value for name, value in found.items() if name != "fold_loss" or value is not None}

    def key(self, digest: str) -> str:
        """The name of its document, for rows of this digest."""
        # the name of the stage is for people: the same work in another stage is the same trial
        fields = {name: value for name, value in self.to_dict().items() if name != "stage"}
        text = json.dumps([FORMAT, digest, fields], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:40]


@dataclass(frozen=True, kw_only=True)
class TrialBatch:
    """Trials that run beside each other: the payload of their tasks. ``digest`` names the rows and the intercept."""

    folder: str
    rows: Rows
    digest: str
    intercept: bool
    trials: tuple[Trial, ...]

    def squares(self, number: int, num_columns: int) -> RowArray:
        """What the rows of a check add to its squared errors (n, alphas)."""
        trial = self.trials[number]
        name, n = f"{trial.key(self.digest)}.zarr", trial.num_rows
        return RowArray.unsaved(self.folder, name, num_rows=n, num_columns=num_columns, rows_per_chunk=n)

    def known(self, number: int) -> dict[str, Any] | None:
        """What a trial found before, if all of it is there."""
        found = read_json(self.folder, f"{self.trials[number].key(self.digest)}.json")
        if found is not None and "evaluations" in found:
            try:
                self.squares(number, len(found["evaluations"])).read(0, self.trials[number].num_rows)
            except (StoreError, DamagedChunkError):
                return None
        return found


def run_trial(batch: TrialBatch, number: int) -> tuple[bool, dict[str, Any]]:
    """Run one trial of a batch, or read what it found before. A task of :mod:`dkrr.engine.tasks`.

    Raises
    ------
    MemoryBudgetError
        A matrix of so many rows does not fit.
    """
    trial, known = batch.trials[number], batch.known(number)
    if known is not None:
        return False, known
    started = time.perf_counter()
    try:
        rows = explained(batch.rows.open(), trial.num_rows, intercept=batch.intercept)
        with single_blas_thread():
            found = minimise(rows, trial) if trial.kind == "search" else _held_out(rows, trial)
    except MemoryError as exc:
        raise MemoryBudgetError(
            f"a trial on {trial.num_rows:,} rows ran out of memory ({trial_bytes(trial):,} bytes and more)",
            hint="set [tune] rows lower, or raise memory_limit",
        ) from exc
    squares = found.pop("squares", None)
    if squares is not None:
        array = batch.squares(number, squares.shape[1])
        array.save_shape()
        array.write_chunk(0, squares)
    found["seconds"] = round(time.perf_counter() - started, 3)
    write_json(batch.folder, f"{trial.key(batch.digest)}.json", found)
    return True, found


def minimise(rows: Explained, trial: Trial) -> dict[str, Any]:
    """The best widths and alpha among the evaluations that a search may make, from where it begins."""
    scale, widths = rows.spread, np.array(trial.widths)
    scales = scale if len(widths) > 1 else np.array([float(np.sqrt(np.mean(scale**2)))])
    bounds = np.log([*(np.array(WIDTH_BOUNDS) * s for s in scales), rows.alpha_bounds])
    found: list[dict[str, Any]] = []

    def loss(parameters: Floats) -> tuple[float, Floats]:
        if len(found) >= trial.num_evaluations:  # a line search may ask for more than maxfun
            raise StopIteration
        at = np.exp(parameters)
        value, gradient, error = rows.evaluate(trial.family, at[:-1], float(at[-1]))
        found.append({"widths": at[:-1].tolist(), "alpha": float(at[-1]), "loss": value, "loo_rmse": error})
        return value - float(np.log(rows.deviation).mean()), gradient  # in units of the targets, where a search ends

    try:
        minimize(
            loss,
            np.clip(np.log([*widths, trial.alphas[0]]), *bounds.T),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"ftol": LOSS_TOLERANCE, "gtol": GRADIENT_TOLERANCE, "maxfun": trial.num_evaluations},
        )
    except StopIteration:
        pass
    except NotPositiveDefiniteError:
        # rounding put an end to the way towards small alphas; what was found before it stands
        if not found:
            raise
    return min(found, key=lambda point: point["loss"]) | {"num_evaluations": len(found)}


def _held_out(rows: Explained, trial: Trial) -> dict[str, Any]:
    """The errors of all alphas (k,) and the best one; but for a slice what they come from, and the largest eigenvalue
    of S K S, to 1 %."""
    widths, alphas = np.array(trial.widths), list(trial.alphas)
    if trial.fold_loss is not None:
        squares = fold_losses(trial.fold_loss, family_kernel(trial.family, widths), rows)[:, ::-1]
    elif trial.kind == "slice":
        squares = rows.path(trial.family, widths, np.array(alphas))
    else:
        refined = rows.refine(trial.family, widths, alphas[0], trial.num_evaluations)
        alphas, squares = list(refined), np.column_stack(list(refined.values()))
    errors = np.sqrt(squares.mean(axis=0)) if trial.fold_loss is None else trial.fold_loss.error(squares)
    name = "loo_rmse" if trial.fold_loss is None else "error"
    best = int(np.argmin(errors))
    found = {"widths": list(trial.widths), "alpha": alphas[best], name: float(errors[best]), "errors": errors.tolist()}
    found |= {"num_evaluations": trial.num_evaluations}
    if trial.kind == "slice":
        return found
    matrix = rows.matrix(trial.family, widths)
    n = len(matrix)
    norm = eigsh(matrix, k=1, v0=np.ones(n), tol=1e-2, return_eigenvectors=False)[0] if n > 2 else np.abs(matrix).sum()
    evaluations = [[alpha, float(error)] for alpha, error in zip(alphas, errors, strict=True)]
    return found | {"evaluations": evaluations, "norm": float(norm), "squares": np.ascontiguousarray(squares)}


def fold_losses(asked: FoldLoss, kernel: Kernel, rows: Explained) -> Floats:
    """What each row loses when the other folds are fitted, for each C of ``asked`` (n, k), by its metric.

    Row i is of fold i mod ``num_folds``, counted within each class.

    Targets of a loss for labels are a column for each class, largest where a row has it. Weights count in the fits, and
    the losses are multiplied by them over their mean.

    Raises
    ------
    DataError
        A class has one row alone.

    Cost
    ----
    ``num_folds`` fits with k values of C, and a product of each.
    """
    x, y, weight, kernel = rows.x, rows.y, np.square(rows.root), kernel.resolve(rows.x.shape[1])
    n, k = len(x), len(asked.C)
    share = weight / weight.mean()
    codes = np.zeros(n, dtype=np.intp)
    if asked.losses[0].is_for_labels:
        varying = y[:, np.ptp(y, axis=0) > 0]  # a class that no row has cannot be told from the others
        codes = np.argmax(varying > 0.5 * (varying.min(axis=0) + varying.max(axis=0)), axis=1)
        count = np.bincount(codes)
        if count.min() < 2:
            raise DataError(
                f"a class has one of the {n:,} rows of a fold search; at least two expected",
                hint="give the search more rows ([tune] rows, search_rows), or leave that class out",
            )
        if asked.metric == "balanced_accuracy":
            share = weight * n / (len(count) * np.bincount(codes, weights=weight)[codes])
        y = label_targets(codes, weight, range(len(count)))
    fold = np.empty(n, dtype=np.intp)
    for code in range(codes.max() + 1):
        own = np.flatnonzero(codes == code)
        fold[own] = (np.arange(len(own)) + code) % asked.num_folds
    found = np.empty((n, k))
    for number in np.unique(fold):
        test = fold == number
        train = ~test
        fit = fit_losses(
            kernel, x[train], y[train], asked.losses, asked.C, weight=weight[train], fit_intercept=rows.intercept,
            tol=FOLD_TOL, allow_unconverged=True,
        )  # fmt: skip
        values = kernel.block(x[test], x[train]) @ fit.dual_coef + fit.intercept
        found[test] = _lost(asked, values.reshape(len(values), k, -1), y[test], codes[test])
    return np.asarray(found * share[:, None])


def _lost(asked: FoldLoss, values: Floats, y: Floats, codes: NDArray[np.intp]) -> Floats:
    """Of rows with decision values or predictions (f, k, m): (f, k)."""
    if asked.losses[0].is_for_labels:
        whole = np.concatenate((-values, values), axis=2) if values.shape[2] == 1 else values
        if asked.metric == "log_loss":
            logarithms = log_probabilities(whole.reshape(-1, whole.shape[2])).reshape(whole.shape)
            return np.asarray(-logarithms[np.arange(len(y)), :, codes])
        return np.asarray(whole.argmax(axis=2) != codes[:, None], dtype=np.float64)
    truth = np.broadcast_to(y[:, None, :], values.shape)
    if asked.metric == "rmse":
        return np.asarray(np.square(truth - values).mean(axis=2))
    losses = asked.losses * (values.shape[2] // len(asked.losses))
    lost = [loss.value(truth[..., j], values[..., j]) for j, loss in enumerate(losses)]
    return np.asarray(np.mean(lost, axis=0))


def trial_flops(trial: Trial) -> float:
    """About what a trial costs, at its most evaluations."""
    if trial.fold_loss is not None:
        return FOLD_FLOPS * trial.fold_loss.num_folds * len(trial.alphas) * float(trial.num_rows) ** 2
    return FLOPS[trial.kind] * float(trial.num_rows) ** 3 * trial.num_evaluations


def trial_bytes(trial: Trial) -> int:
    """Its matrices: K and a factor with its inverse, three for an eigendecomposition or the fit of a fold."""
    return (24 if trial.kind in ("slice", "folds") else 16) * trial.num_rows**2


# --- the search -------------------------------------------------------------------------------------------------------

SHARED_EVALUATIONS, FEATURE_EVALUATIONS, CONTINUED_EVALUATIONS, CHECK_EVALUATIONS = 30, 60, 30, 5

NUM_CONTINUED = 4

UNFINISHED = "unfinished"

FACTORS = tuple(2.0 ** (k / 2) for k in range(-2, 3))

FOLD_FACTORS = (0.5, 1.0, 2.0)

NUM_ALPHAS, ALPHA_SPAN = 21, 100.0

# shares of the time that is left which a stage may take, so that something is left for what follows
CONTINUED_SHARE, SLICE_SHARE = 0.5, 0.4

# a cluster takes longer to start than a search on so few rows
IN_PROCESS_ROWS = 500


@dataclass(kw_only=True, eq=False)
class Tuner:
    """A search in progress: seconds that are spent on the executor's threads, and notes on what there was no time for.

    Parameters
    ----------
    subset
        The rows.
    batch
        What all trials share, without a trial.
    num_rows
        Of the data set: what is chosen is fitted to all of them.
    """

    subset: Dataset
    batch: TrialBatch
    settings: TuneSettings
    executor: Executor
    num_rows: int
    progress: Progress | None = None
    records: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    spent_seconds: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)  # seconds a flop, of kinds of trials

    def run(self) -> TuneResult:
        """Search, slice, check, choose."""
        sizes = sorted({min(size, self.subset.num_rows) for size in self.settings.search_rows})
        candidates = self._first_search(sizes[0])
        for size in sizes[1:]:
            candidates = self._continue(candidates, size)
        # all finalists have to be judged by folds, where there are any: the runner-up too
        slices = self._slice(self._leaders(candidates, 0 if self.settings.fold_loss is None else 1))
        best, checked = self._check(self._finalists(candidates, slices))
        self._note_ends(best.alpha)
        return TuneResult(
            best=best,
            candidates=checked,
            records=self.records,
            slices=slices,
            notes=self.notes,
            seconds=round(self.spent_seconds, 3),
        )

    def _note_ends(self, alpha: float) -> None:
        low, high = self.alpha_bounds
        if low < high and not 1.01 * low < alpha < high / 1.01:
            name, values = "alpha", (alpha, low, high)
            if self.settings.fold_loss is not None:
                name, values = "C", (0.5 / alpha, 0.5 / high, 0.5 / low)
            self.notes.append("{} {:.3g} is at an end of what is tried, {:.3g} to {:.3g}".format(name, *values))

    @cached_property
    def alpha_bounds(self) -> tuple[float, float]:
        """The smallest and the largest alpha that is tried."""
        if self.settings.fold_loss is not None:
            return self.settings.fold_loss.alphas[0], self.settings.fold_loss.alphas[-1]
        return explained(self.subset, self.subset.num_rows, intercept=False).alpha_bounds

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return max(0.0, self.settings.budget_seconds - self.spent_seconds)

    def _wall(self, seconds: Sequence[float]) -> float:
        return max(max(seconds), sum(seconds) / self.executor.num_threads)

    def _seconds_for(self, trials: Sequence[Trial]) -> float:
        """About how long trials take; the rate is that of fewer rows, which are slower for each flop."""
        rate = self.rates.get(trials[0].kind, self.rates[""])
        return self._wall([rate * trial_flops(trial) for trial in trials])

    def _allows(self, trials: Sequence[Trial], share: float = 1.0) -> bool:
        """Whether trials fit into a share of the time that is left, and into the memory of a worker."""
        limit = memory_limit_of(self.executor)
        if limit is not None and max(map(trial_bytes, trials)) > max(0, limit - BASELINE_BYTES):
            return False
        return self._seconds_for(trials) <= share * self.seconds_left

    def _affordable(self, trials: list[Trial], share: float, *, least: int = 0, group: int = 1) -> list[Trial]:
        """As many of the first trials as :meth:`_allows` lets pass, and at least so many; notes what is left out.

        ``group``: so many trials belong together, all of them or none.
        """
        count = len(trials)
        while count > least and not self._allows(trials[:count], share):
            count -= group
        if count < len(trials):
            self.notes.append(
                f"{trials[0].stage}: {count} of {len(trials)} trials; all would take "
                f"{self._seconds_for(trials):.0f} s, {self.seconds_left:.0f} s are left"
            )
        return trials[:count]

    @property
    def kinds(self) -> tuple[WidthKind, ...]:
        """Of widths that may be chosen."""
        widths = "shared" if self.subset.num_features == 1 else self.settings.widths
        return ("shared", "per_feature") if widths == "both" else (widths,)

    def _leaders(self, candidates: list[Candidate], more: int = 0) -> list[Candidate]:
        """The best with a shared width and with one for each feature, the better one first; ``more`` of the rest."""
        ranked = sorted(candidates, key=lambda candidate: candidate.loo_rmse)
        of_kind = {item.kind: item for item in reversed(ranked) if item.kind in self.kinds}
        first = [item for item in ranked if item is of_kind.get(item.kind)]
        return first + [item for item in ranked if item not in first][:more]

    def _first_search(self, num_rows: int) -> list[Candidate]:
        """Every family from two starts, first with a shared width, then with one for each feature."""
        rows = explained(self.subset, num_rows, intercept=False)
        scale = rows.spread
        width, relative = start_width(rows.x), start_width(rows.x / scale)
        starts = [
            (family, np.array([start]), alpha)
            for family in self.settings.kernels
            for start, alpha in ((width, 0.1 * rows.mean_weight), (width / 3, 0.01 * rows.mean_weight))
        ]
        shared = self._search("shared width", starts, num_rows, SHARED_EVALUATIONS, least=len(starts))
        if self.kinds == ("shared",):
            return shared
        starts = [
            start
            for found in sorted(shared, key=lambda candidate: candidate.loo_rmse)
            for start in (
                (found.family, np.full(len(scale), found.widths[0]), found.alpha),
                (found.family, relative * scale, 0.1 * rows.mean_weight),
            )
        ]
        per_feature = self._search("width per feature", starts, num_rows, FEATURE_EVALUATIONS, least=1)
        return [*shared, *per_feature] if "shared" in self.kinds else per_feature

    def _continue(self, candidates: list[Candidate], num_rows: int) -> list[Candidate]:
        """The best few on more rows; those that are not continued are out, unless none of their kind was."""
        chosen = self._leaders(candidates, NUM_CONTINUED)[:NUM_CONTINUED]
        starts = [(candidate.family, candidate.widths, candidate.alpha) for candidate in chosen]
        found = self._search(f"search on {num_rows:,} rows", starts, num_rows, CONTINUED_EVALUATIONS, one=False)
        kinds = {candidate.kind for candidate in found}
        return [*found, *(candidate for candidate in chosen if candidate.kind not in kinds)]

    def _search(
        self,
        stage: str,
        starts: list[tuple[str, Floats, float]],
        num_rows: int,
        num_evaluations: int,
        *,
        least: int = 0,
        one: bool = True,
    ) -> list[Candidate]:
        """Maximise the likelihood from each start that there is time for; ``one``: the best of each family."""
        trials = [
            Trial(
                stage=stage,
                kind="search",
                family=family,
                widths=tuple(widths.tolist()),
                alphas=(alpha,),
                num_rows=num_rows,
                num_evaluations=num_evaluations,
            )
            for family, widths, alpha in starts
        ]
        trials = self._affordable(trials, CONTINUED_SHARE, least=least)
        found = [candidate for candidate, _ in self._run(trials)]
        if not one:
            return found
        best = {item.family: item for item in sorted(found, key=lambda item: item.loss or 0.0, reverse=True)}
        return [best[family] for family in dict.fromkeys(item.family for item in found)]

    def _slice(self, candidates: list[Candidate]) -> list[dict[str, Any]]:
        """The error over (factor on the widths) x alpha around each candidate."""
        trials, loss = [], self.settings.fold_loss
        factors = FACTORS if loss is None else FOLD_FACTORS
        for candidate in candidates:
            low, high = self.alpha_bounds
            span = max(candidate.alpha / ALPHA_SPAN, low), min(candidate.alpha * ALPHA_SPAN, high)
            alphas = np.geomspace(*span, NUM_ALPHAS)
            trials += [
                Trial(
                    stage="slice",
                    kind="slice" if loss is None else "folds",
                    family=candidate.family,
                    widths=tuple((factor * candidate.widths).tolist()),
                    alphas=tuple(alphas.tolist()) if loss is None else loss.alphas,
                    num_rows=candidate.num_rows,
                    factor=factor,
                    fold_loss=loss,
                )
                for factor in factors
            ]
        count = len(factors)
        # a slice with holes would be none, and without any nothing is known of another loss
        trials = self._affordable(trials, SLICE_SHARE, least=0 if loss is None else count, group=count)
        errors = [found["errors"] for _, found in self._run(trials)]
        return [
            {
                "kernel": candidate.family,
                "widths_kind": candidate.kind,
                "widths": candidate.widths.tolist(),
                "num_rows": candidate.num_rows,
                "factors": list(factors),
                "alphas": list(trials[k * count].alphas),
                "errors": errors[k * count : (k + 1) * count],
                **({} if loss is None else {"metric": loss.metric}),
            }
            for k, candidate in enumerate(candidates[: len(trials) // count])
        ]

    def _finalists(self, candidates: list[Candidate], slices: list[dict[str, Any]]) -> list[Candidate]:
        """The best of each kind, what its slice found better, and the runner-up."""
        found = {(plane["kernel"], tuple(plane["widths"])): plane for plane in slices}
        first, all_of_them = self._leaders(candidates), self._leaders(candidates, 1)
        finalists = []
        for candidate in all_of_them if self.settings.fold_loss is not None else first:
            plane = found.get((candidate.family, tuple(candidate.widths.tolist())))
            if plane is None:
                finalists.append(candidate)
                continue
            best = plane["factors"][int(np.argmin(np.min(plane["errors"], axis=1)))]
            finalists += [_from_slice(candidate, plane, factor) for factor in dict.fromkeys((1.0, best))]
        if self.settings.fold_loss is not None:
            return [item for item in finalists if item.metric]
        return finalists + all_of_them[len(first) :]

    def _check(self, finalists: list[Candidate]) -> tuple[Candidate, list[Candidate]]:
        """The finalists on the most rows for which there is time, and which of them is chosen; as they are, and the one
        of the smallest error, when there is none."""
        loss = self.settings.fold_loss

        def trials(num_rows: int) -> list[Trial]:
            return [
                Trial(
                    stage=f"check on {num_rows:,} rows",
                    kind="check" if loss is None else "folds",
                    family=candidate.family,
                    # what is judged is what will stand in the job file
                    widths=tuple(float(f"{width:.5g}") for width in candidate.widths),
                    alphas=(candidate.alpha,) if loss is None else loss.alphas,
                    num_rows=num_rows,
                    num_evaluations=CHECK_EVALUATIONS if loss is None else 1,
                    factor=candidate.factor,
                    fold_loss=loss,
                )
                for candidate in finalists
            ]

        most = min(self.settings.rows, self.subset.num_rows)
        searched = max(candidate.num_rows for candidate in finalists)
        size = most
        while not self._allows(trials(size)) and size > searched:
            size = max(searched, round(size / 2**0.5))
        wanted = trials(size)
        if not self._allows(wanted):
            seconds = self._seconds_for(wanted)
            self.notes.append(f"no check: {seconds:.0f} s expected, {self.seconds_left:.0f} s are left")
            left = [candidate for candidate in finalists if candidate.num_rows == searched]
            left.sort(key=lambda candidate: candidate.loo_rmse)
            return left[0], left
        if size < most:
            self.notes.append(f"checked on {size:,} of {most:,} rows: time or memory allows no more")
        points, squares = [], []
        for number, ((candidate, found), origin) in enumerate(zip(self._run(wanted), finalists, strict=True)):
            of_rows = replace(self.batch, trials=tuple(wanted)).squares(number, len(found["evaluations"])).read(0, size)
            norm = found["norm"] * self.num_rows / size  # rows of the same kind: it grows as they do
            for (alpha, error), column in zip(found["evaluations"], of_rows.T, strict=True):
                point = replace(candidate, alpha=alpha, loo_rmse=error, condition=1.0 + norm / alpha)
                points.append(replace(point, factor=origin.factor, origin=origin.origin))
                squares.append(np.ascontiguousarray(column))
        return choose_candidates(points, squares)

    def _run(self, trials: list[Trial]) -> list[tuple[Candidate, dict[str, Any]]]:
        """Run the trials of a stage beside each other, keep their records, and return what they found in order."""
        if not trials:
            return []
        nodes = [Node((number,), flops=trial_flops(trial)) for number, trial in enumerate(trials)]
        summary = self.executor.run(
            f"tune {trials[0].stage}", run_trial, replace(self.batch, trials=tuple(trials)), nodes, self.progress
        )
        found = [summary.values[number,] for number in range(len(trials))]
        # widths and alpha under other names than those that a trial began with
        names = {"widths": "found_widths", "alpha": "found_alpha", "num_evaluations": "num_evaluated"}
        for trial, values in zip(trials, found, strict=True):
            renamed = {names.get(name, name): value for name, value in values.items()}
            self.records.append({"number": len(self.records), **trial.to_dict(), **renamed})
        seconds = [item["seconds"] for item in found]
        self.spent_seconds += self._wall(seconds)
        # by what they may cost at most, and, of kinds that are not known yet, by what these did
        self.rates[trials[0].kind] = sum(seconds) / sum(map(trial_flops, trials))
        made = (
            replace(trial, num_evaluations=item["num_evaluations"]) for trial, item in zip(trials, found, strict=True)
        )
        self.rates.setdefault("", sum(seconds) / sum(map(trial_flops, made)))
        return [
            (
                Candidate(
                    family=trial.family,
                    widths=np.array(values["widths"]),
                    alpha=values["alpha"],
                    loo_rmse=values["loo_rmse" if trial.fold_loss is None else "error"],
                    num_rows=trial.num_rows,
                    loss=values.get("loss"),
                    metric="" if trial.fold_loss is None else trial.fold_loss.metric,
                ),
                values,
            )
            for trial, values in zip(trials, found, strict=True)
        ]


def _from_slice(candidate: Candidate, plane: dict[str, Any], factor: float) -> Candidate:
    """The candidate with its widths times a factor, and the largest alpha whose error is as good as the smallest."""
    errors = np.array(plane["errors"][plane["factors"].index(factor)])
    j = int(np.flatnonzero(errors <= AS_GOOD * errors.min())[-1])
    return replace(
        candidate,
        widths=factor * candidate.widths,
        alpha=plane["alphas"][j],
        loo_rmse=float(errors[j]),
        loss=None,
        factor=factor,
        origin="likelihood" if factor == 1.0 else "slice",
        metric=plane.get("metric", ""),
    )


def tune(
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    settings: TuneSettings | None = None,
    store: str | None = None,
    executor: Executor | None = None,
    fit_intercept: bool = False,
    progress: Progress | None = None,
) -> TuneResult:
    """Choose kernel, widths and alpha for rows.

    Parameters
    ----------
    X, y, sample_weight
        All that :meth:`dkrr.KernelRidge.fit` takes. Whiten the features first (``[data] standardize`` does), or one
        width for all of them means little.
    settings
        What is searched; :class:`~dkrr.selection.choice.TuneSettings` by default.
    store
        Root below which the subset and a document for each trial are kept, under ``tune``; a search that was
        interrupted continues with them. None: a temporary folder.
    executor
        Who runs the trials, as many at once as it has threads, each with one BLAS thread. None: this process for few
        rows, else the caller's Dask client or a local cluster.
    fit_intercept
        Whether the fit will have an intercept.

    Returns
    -------
    TuneResult
        ``dkrr.KernelRidge(**result.parameters())`` is the estimator.

    Raises
    ------
    DataError
        No targets, fewer than two rows of positive weight, or targets that are all constant. A loss for labels wants a
        column for each class, several quantiles want one target.
    """
    settings = settings or TuneSettings()
    most = max(settings.rows, *settings.search_rows)
    with ExitStack() as stack:
        if store is None:
            store = stack.enter_context(closing(TemporaryStore())).path
        stack.enter_context(storage_errors(store, only_full=True))
        dataset = stack.enter_context(rows_on_disk(find_dataset(X), y, sample_weight, store))
        if executor is None:
            executor = stack.enter_context(find_executor(min(most, dataset.num_rows), IN_PROCESS_ROWS))
        parts = [dataset.digest, dataset.digest_y, dataset.digest_weight, settings.seed, fit_intercept]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]
        subset = draw_subset(dataset, most, settings.seed, place(store, "tune", f"{digest}.zarr", f"rows-{most}"))
        first, names = min(*settings.search_rows, subset.num_rows), dataset.target_names
        # a likelihood has no best width where every target is constant; one among others that vary does no harm
        if not np.ptp(subset.targets.read(0, first), axis=0).any():
            shown = ", ".join(repr(name) for name in names[:4]) + (", ..." if len(names) > 4 else "")
            raise DataError(
                f"target{'s' * (len(names) > 1)} {shown} {'are' if len(names) > 1 else 'is'} the same in all {first:,} "
                "rows that the search begins with: no width predicts it better than another",
                hint="name another target, or let the search begin with more rows ([tune] search_rows)",
            )
        if settings.fold_loss is not None:
            _check_loss_targets(settings.fold_loss.losses, dataset.num_targets)
        location = place(store, "tune", f"{digest}.zarr")
        asked = hashlib.sha256(json.dumps(asdict(settings), sort_keys=True).encode()).hexdigest()[:16]
        mark = f"{UNFINISHED}-{asked}.json"
        write_json(location, mark, {})  # a search that is interrupted continues with its trials
        result = Tuner(
            subset=subset,
            batch=TrialBatch(
                folder=place(location, "trials"),
                rows=Rows.of(subset),
                digest=digest,
                intercept=fit_intercept,
                trials=(),
            ),
            settings=settings,
            executor=executor,
            num_rows=dataset.num_rows,
            progress=progress,
        ).run()
        delete_key(location, mark)
        return result


def _check_loss_targets(losses: Sequence[Loss], num_targets: int) -> None:
    if losses[0].is_for_labels and num_targets < 2:
        raise DataError(
            "the loss is for classes, and y has one column; one for each class expected, largest where a row has it",
            hint="pass (y[:, None] == numpy.unique(y)).astype(float)",
        )
    if len(losses) > 1 and num_targets > 1:
        raise DataError(f"{len(losses)} quantiles, {num_targets} targets; one target expected", hint="tune each alone")
