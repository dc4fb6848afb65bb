"""The stages of a search: families on few rows, the best of them on more, slices, and the check of the finalists.

The schedule is that of :mod:`dkrr.selection.tuning`; here are its trials, in the order in which they run, and what is
carried from one stage to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import Executor, Node, Progress
from dkrr.selection.budget import Budget
from dkrr.selection.choice import (
    AS_GOOD,
    Candidate,
    TuneResult,
    TuneSettings,
    WidthKind,
    best_of,
    best_of_families,
    choose_candidates,
)
from dkrr.selection.search import ALPHA_BOUNDS, start_width
from dkrr.selection.subset import Subset, standard_deviations
from dkrr.selection.trials import Trial, TrialBatch, read_squares, run_trial, trial_flops

__all__ = ["Tuner"]

FloatArray = NDArray[np.float64]

SHARED_EVALUATIONS, FEATURE_EVALUATIONS = 30, 60
CONTINUED_EVALUATIONS, CHECK_EVALUATIONS = 30, 3
NUM_CONTINUED = 4
FACTORS = tuple(2.0 ** (k / 2) for k in range(-2, 3))
FOLD_FACTORS = (0.5, 1.0, 2.0)
NUM_ALPHAS, ALPHA_SPAN = 21, 100.0
# shares of the time that is left which a stage may take, so that something is left for what follows
CONTINUED_SHARE, SLICE_SHARE = 0.5, 0.4


@dataclass(kw_only=True, eq=False)
class Tuner:
    """A search in progress.

    Parameters
    ----------
    subset, digest
        The rows, and what names them.
    folder
        Where the documents of the trials are.
    num_rows
        Of the data set: what is chosen is fitted to all of them.
    """

    subset: Subset
    digest: str
    settings: TuneSettings
    intercept: bool
    executor: Executor
    folder: str
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
        slices = self._slice(self._sliced(candidates))
        finalists = self._finalists(candidates, slices)
        best, checked = self._check(finalists)
        return TuneResult(
            best=best,
            candidates=checked,
            records=self.records,
            slices=slices,
            notes=self.budget.notes,
            seconds=round(self.budget.spent_seconds, 3),
        )

    def _kinds(self) -> tuple[WidthKind, ...]:
        both: tuple[WidthKind, ...] = ("shared", "per_feature")
        if self.subset.num_features == 1:
            return ("shared",)
        return both if self.settings.widths == "both" else tuple(k for k in both if k == self.settings.widths)

    def _best_of_each_kind(self, candidates: list[Candidate]) -> list[Candidate]:
        """The best with a shared width and the best with one for each feature, the better one first."""
        found = [best for kind in self._kinds() if (best := best_of(candidates, kind)) is not None]
        return sorted(found, key=lambda candidate: candidate.loo_rmse)

    def _sliced(self, candidates: list[Candidate]) -> list[Candidate]:
        """The best of each kind; for folds, by which all finalists have to be judged, the runner-up too."""
        ranked = sorted(candidates, key=lambda candidate: candidate.loo_rmse)
        first = self._best_of_each_kind(ranked)
        return first if self.settings.fold_loss is None else first + _others(ranked, first)[:1]

    def _first_search(self, num_rows: int) -> list[Candidate]:
        """Every family from two starts, first with a shared width, then with one for each feature."""
        rows = self.subset.read(num_rows, intercept=False)
        scale = standard_deviations(rows)
        width, relative = start_width(rows.x), start_width(rows.x / scale)
        trials = [
            _search("shared width", family, np.array([start]), alpha, num_rows, SHARED_EVALUATIONS)
            for family in self.settings.kernels
            for start, alpha in ((width, 0.1), (width / 3, 0.01))
        ]
        shared = best_of_families(self._run("shared width", trials))
        if self._kinds() == ("shared",):
            return shared
        trials = [
            _search("width per feature", candidate.family, start, alpha, num_rows, FEATURE_EVALUATIONS)
            for candidate in sorted(shared, key=lambda candidate: candidate.loo_rmse)
            for start, alpha in (
                (np.full(len(scale), candidate.widths[0]), candidate.alpha),
                (relative * scale, 0.1),
            )
        ]
        trials = self.budget.affordable(trials, CONTINUED_SHARE, least=1)
        found = best_of_families(self._run("width per feature", trials))
        return [*shared, *found] if "shared" in self._kinds() else found

    def _continue(self, candidates: list[Candidate], num_rows: int) -> list[Candidate]:
        """The best few on more rows; those that are not continued are out, unless none of their kind was."""
        ranked = sorted(candidates, key=lambda candidate: candidate.loo_rmse)
        first = self._best_of_each_kind(ranked)
        chosen = [*first, *(candidate for candidate in ranked if candidate not in first)][:NUM_CONTINUED]
        stage = f"search on {num_rows:,} rows"
        trials = [
            _search(stage, candidate.family, candidate.widths, candidate.alpha, num_rows, CONTINUED_EVALUATIONS)
            for candidate in chosen
        ]
        trials = self.budget.affordable(trials, CONTINUED_SHARE)
        found = self._run(stage, trials) if trials else []
        kinds = {candidate.kind for candidate in found}
        return [*found, *(candidate for candidate in chosen if candidate.kind not in kinds)]

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
        if not trials:
            return []
        candidates = candidates[: len(trials) // count]
        self._run("slice", trials)
        slices = []
        for k, candidate in enumerate(candidates):
            own = self.records[len(self.records) - len(trials) :][k * count : (k + 1) * count]
            slices.append(
                {
                    "kernel": candidate.family,
                    "widths_kind": candidate.kind,
                    "widths": candidate.widths.tolist(),
                    "num_rows": candidate.num_rows,
                    "factors": list(factors),
                    "alphas": own[0]["alphas"],
                    "errors": [record["errors"] for record in own],
                    **({} if loss is None else {"metric": loss.metric}),
                }
            )
        return slices

    def _finalists(self, candidates: list[Candidate], slices: list[dict[str, Any]]) -> list[Candidate]:
        """The best of each kind, what its slice found better, and the runner-up."""
        ranked = sorted(candidates, key=lambda candidate: candidate.loo_rmse)
        first = self._sliced(ranked)
        finalists = []
        for candidate in first:
            own = [p for p in slices if (p["kernel"], p["widths"]) == (candidate.family, candidate.widths.tolist())]
            finalists.append(_from_slice(candidate, own[0], 1.0) if own else candidate)
            if own:
                best = own[0]["factors"][int(np.argmin(np.min(own[0]["errors"], axis=1)))]
                if best != 1.0:
                    finalists.append(_from_slice(candidate, own[0], best))
        if self.settings.fold_loss is not None:
            return [candidate for candidate in finalists if candidate.metric]
        return finalists + _others(ranked, first)[:1]

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
        sizes = [most]
        while sizes[-1] > searched:
            sizes.append(max(searched, round(sizes[-1] / 2**0.5)))
        for size in sizes:
            wanted = trials(size)
            if self.budget.allows(wanted):
                break
        else:
            seconds = self.budget.seconds_for(wanted)
            self.budget.notes.append(f"no check: {seconds:.0f} s expected, {self.budget.left:.0f} s are left")
            left = [candidate for candidate in finalists if candidate.num_rows == searched]
            left.sort(key=lambda candidate: candidate.loo_rmse)
            return left[0], left
        if size < most:
            self.budget.notes.append(f"checked on {size:,} of {most:,} rows: time or memory allows no more")
        checked = self._run(wanted[0].stage, wanted)
        points, squares = [], []
        records = self.records[len(self.records) - len(wanted) :]
        for number, (candidate, origin, record) in enumerate(zip(checked, finalists, records, strict=True)):
            of_rows = read_squares(self._batch(wanted), number, len(record["evaluations"]))
            norm = record["norm"] * self.num_rows / size  # rows of the same kind: it grows as they do
            for (alpha, likelihood, error), column in zip(record["evaluations"], of_rows.T, strict=True):
                found = replace(candidate, alpha=alpha, loss=likelihood, loo_rmse=error, condition=1.0 + norm / alpha)
                points.append(replace(found, factor=origin.factor, origin=origin.origin))
                squares.append(np.ascontiguousarray(column))
        return choose_candidates(points, squares)

    def _batch(self, trials: list[Trial]) -> TrialBatch:
        return TrialBatch(
            folder=self.folder,
            subset=self.subset,
            digest=self.digest,
            intercept=self.intercept,
            trials=tuple(trials),
        )

    def _run(self, stage: str, trials: list[Trial]) -> list[Candidate]:
        """Run the trials of a stage beside each other, keep their records, and return what they found in order."""
        batch = self._batch(trials)
        nodes = [Node((number,), flops=trial_flops(trial)) for number, trial in enumerate(trials)]
        summary = self.executor.run(f"tune {stage}", run_trial, batch, nodes, self.progress)
        found, seconds, evaluated = [], [], []
        for number, trial in enumerate(trials):
            values = summary.values[number,]
            self.records.append({"number": len(self.records), **trial.to_dict(), **_renamed(values)})
            seconds.append(values["seconds"])
            evaluated.append(values["num_evaluations"])
            found.append(
                Candidate(
                    family=trial.family,
                    widths=np.array(values["widths"]),
                    alpha=values["alpha"],
                    loo_rmse=values["loo_rmse" if trial.fold_loss is None else "error"],
                    num_rows=trial.num_rows,
                    loss=values.get("loss"),
                    metric="" if trial.fold_loss is None else trial.fold_loss.metric,
                )
            )
        self.budget.spend(trials, seconds, evaluated)
        return found


def _others(ranked: list[Candidate], first: list[Candidate]) -> list[Candidate]:
    return [candidate for candidate in ranked if candidate not in first]


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


def _search(stage: str, family: str, widths: FloatArray, alpha: float, num_rows: int, num_evaluations: int) -> Trial:
    return Trial(
        stage=stage,
        kind="search",
        family=family,
        widths=tuple(widths.tolist()),
        alphas=(alpha,),
        num_rows=num_rows,
        num_evaluations=num_evaluations,
    )


def _renamed(values: dict[str, Any]) -> dict[str, Any]:
    """What a trial found, beside what it was: widths and alpha under other names than those it began with."""
    names = {"widths": "found_widths", "alpha": "found_alpha", "num_evaluations": "num_evaluated"}
    return {names.get(name, name): value for name, value in values.items()}
