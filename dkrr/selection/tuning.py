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

Cost: see :func:`~dkrr.selection.search.trial_flops`; with 1,000, 2,000 and 8,000 rows about 3e12 flops.

The time that counts is that which trials took when they ran. One that is read back after an interruption counts as
much again, so that the search continues as it would have without the interruption.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, Floats
from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.tasks import Executor, Node, Progress
from dkrr.errors import DataError
from dkrr.fit.inputs import TemporaryStore, find_dataset, find_executor, rows_on_disk
from dkrr.linalg.operators import Rows
from dkrr.linalg.workspace import BASELINE_BYTES
from dkrr.selection.choice import (
    ALPHA_BOUNDS,
    AS_GOOD,
    Candidate,
    TuneResult,
    TuneSettings,
    WidthKind,
    choose_candidates,
)
from dkrr.selection.search import (
    Trial,
    TrialBatch,
    draw_subset,
    explained,
    run_trial,
    standard_deviations,
    start_width,
    trial_bytes,
    trial_flops,
)
from dkrr.store.files import full_disk, place

SHARED_EVALUATIONS, FEATURE_EVALUATIONS, CONTINUED_EVALUATIONS, CHECK_EVALUATIONS = 30, 60, 30, 5

NUM_CONTINUED = 4

FACTORS = tuple(2.0 ** (k / 2) for k in range(-2, 3))

FOLD_FACTORS = (0.5, 1.0, 2.0)

NUM_ALPHAS, ALPHA_SPAN = 21, 100.0

# shares of the time that is left which a stage may take, so that something is left for what follows
CONTINUED_SHARE, SLICE_SHARE = 0.5, 0.4

# a cluster takes longer to start than a search on so few rows
IN_PROCESS_ROWS = 500


@dataclass(kw_only=True)
class Budget:
    """Seconds on ``num_threads`` threads, bytes for a task (None: no limit), and notes on what was left out."""

    total_seconds: float
    num_threads: int
    memory_bytes: int | None = None
    spent_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    _rates: dict[str, float] = field(default_factory=dict)  # seconds a flop, of kinds of trials

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.total_seconds - self.spent_seconds)

    def spend(self, trials: Sequence[Trial], seconds: Sequence[float], evaluated: Sequence[int]) -> None:
        """Count trials that ran beside each other, and learn their rate, by what they may cost at most."""
        self.spent_seconds += self._wall(seconds)
        self._rates[trials[0].kind] = sum(seconds) / sum(map(trial_flops, trials))
        made = [replace(trial, num_evaluations=count) for trial, count in zip(trials, evaluated, strict=True)]
        self._rates.setdefault("", sum(seconds) / sum(map(trial_flops, made)))

    def seconds_for(self, trials: Sequence[Trial]) -> float:
        """About how long trials take; the rate is that of fewer rows, which are slower for each flop."""
        rate = self._rates.get(trials[0].kind, self._rates[""])
        return self._wall([rate * trial_flops(trial) for trial in trials])

    def _wall(self, seconds: Sequence[float]) -> float:
        return max(max(seconds), sum(seconds) / self.num_threads)

    def allows(self, trials: Sequence[Trial], share: float = 1.0) -> bool:
        """Whether trials fit into a share of the time that is left, and into memory."""
        if self.memory_bytes is not None and max(map(trial_bytes, trials)) > self.memory_bytes:
            return False
        return self.seconds_for(trials) <= share * self.left

    def affordable(self, trials: list[Trial], share: float, *, least: int = 0, group: int = 1) -> list[Trial]:
        """As many of the first trials as :meth:`allows` lets pass, and at least so many; notes what is left out.

        ``group``: so many trials belong together, all of them or none.
        """
        count = len(trials)
        while count > least and not self.allows(trials[:count], share):
            count -= group
        if count < len(trials):
            self.notes.append(
                f"{trials[0].stage}: {count} of {len(trials)} trials; all would take {self.seconds_for(trials):.0f} s, "
                f"{self.left:.0f} s are left"
            )
        return trials[:count]


@dataclass(kw_only=True, eq=False)
class Tuner:
    """A search in progress.

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
    budget: Budget
    progress: Progress | None = None
    records: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> TuneResult:
        """Search, slice, check, choose."""
        sizes = sorted({min(size, self.subset.num_rows) for size in self.settings.search_rows})
        candidates = self._first_search(sizes[0])
        for size in sizes[1:]:
            candidates = self._continue(candidates, size)
        # all finalists have to be judged by folds, where there are any: the runner-up too
        slices = self._slice(self._leaders(candidates, 0 if self.settings.fold_loss is None else 1))
        best, checked = self._check(self._finalists(candidates, slices))
        return TuneResult(
            best=best,
            candidates=checked,
            records=self.records,
            slices=slices,
            notes=self.budget.notes,
            seconds=round(self.budget.spent_seconds, 3),
        )

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
        scale = standard_deviations(rows)
        width, relative = start_width(rows.x), start_width(rows.x / scale)
        starts = [
            (family, np.array([start]), alpha)
            for family in self.settings.kernels
            for start, alpha in ((width, 0.1), (width / 3, 0.01))
        ]
        shared = self._search("shared width", starts, num_rows, SHARED_EVALUATIONS, least=len(starts))
        if self.kinds == ("shared",):
            return shared
        starts = [
            start
            for found in sorted(shared, key=lambda candidate: candidate.loo_rmse)
            for start in (
                (found.family, np.full(len(scale), found.widths[0]), found.alpha),
                (found.family, relative * scale, 0.1),
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
        trials = self.budget.affordable(trials, CONTINUED_SHARE, least=least)
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
            low, high = candidate.alpha / ALPHA_SPAN, candidate.alpha * ALPHA_SPAN
            alphas = np.geomspace(max(low, ALPHA_BOUNDS[0]), min(high, ALPHA_BOUNDS[1]), NUM_ALPHAS)
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
        trials = self.budget.affordable(trials, SLICE_SHARE, least=0 if loss is None else count, group=count)
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
        while not self.budget.allows(trials(size)) and size > searched:
            size = max(searched, round(size / 2**0.5))
        wanted = trials(size)
        if not self.budget.allows(wanted):
            seconds = self.budget.seconds_for(wanted)
            self.budget.notes.append(f"no check: {seconds:.0f} s expected, {self.budget.left:.0f} s are left")
            left = [candidate for candidate in finalists if candidate.num_rows == searched]
            left.sort(key=lambda candidate: candidate.loo_rmse)
            return left[0], left
        if size < most:
            self.budget.notes.append(f"checked on {size:,} of {most:,} rows: time or memory allows no more")
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
        self.budget.spend(trials, [item["seconds"] for item in found], [item["num_evaluations"] for item in found])
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
        No targets, fewer than two rows of positive weight, or targets that are all constant.
    """
    settings = settings or TuneSettings()
    most = max(settings.rows, *settings.search_rows)
    with ExitStack() as stack:
        if store is None:
            store = stack.enter_context(closing(TemporaryStore())).path
        stack.enter_context(full_disk(store))
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
        limit = memory_limit_of(executor)
        budget = Budget(
            total_seconds=settings.budget_seconds,
            num_threads=executor.num_threads,
            memory_bytes=None if limit is None else max(0, limit - BASELINE_BYTES),
        )
        return Tuner(
            subset=subset,
            batch=TrialBatch(
                folder=place(store, "tune", f"{digest}.zarr", "trials"),
                rows=Rows.of(subset),
                digest=digest,
                intercept=fit_intercept,
                trials=(),
            ),
            settings=settings,
            executor=executor,
            num_rows=dataset.num_rows,
            budget=budget,
            progress=progress,
        ).run()
