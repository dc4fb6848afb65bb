"""Predict and score a data set with a model, or say how uncertain predictions are, a block of rows a task.

A block that is valid is not computed again, so an interrupted prediction continues where it was.

Cost
----
m n kernel entries and 2 m n t flops; a task holds its rows, one strip, and 2,048 training rows. Variances: n^2 m flops
for each distinct alpha and m / w passes over the factor; a task holds w rows of V, 8 n w bytes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dkrr.dataset import Dataset, Floats, RowArray
from dkrr.dataset.columns import match_features, match_targets
from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError, StoreError
from dkrr.linalg.inference import variance
from dkrr.linalg.losses.loss import log_probabilities, make_loss
from dkrr.linalg.operators import Rows
from dkrr.models.model import BLOCK_ROWS, Model, load_model
from dkrr.models.uncertainty import half_widths
from dkrr.store.failpoints import failpoint

__all__ = ["LOWER_IS_BETTER", "Score", "predict_dataset", "predict_variance", "score_dataset"]


# of the metrics of a Score, those that are errors
LOWER_IS_BETTER = frozenset({"rmse", "log_loss", "pinball"})

MIN_BLOCK_ROWS = 128

DEFAULT_INTERVALS = 0.9

SAMPLE_TARGETS = 4

MOST_CLASSES = 50

# of a worker's memory, for the rows of V: the rest is the interpreter, two mapped tiles and a tile's operands
SHARE_OF_LIMIT = 0.3

TASKS_PER_THREAD = 4


_COMPUTED = {"predict": "predictions", "variance": "variances"}


@dataclass(frozen=True)
class PredictTask:
    """Which model, which rows, and where what is computed goes (None: only errors of predictions are summed).

    ``phase``: predictions, or their variances.
    ``half_width``: how far from a prediction the ends of its interval are, per target, to count what is inside.
    ``sample_every``: of every so many rows truth and prediction are handed back as they are; 0 for none.
    ``columns``, ``targets``: those of the model among the columns of X and y (-1 for one of zeros); None for all.
    """

    model: str
    model_digest: str
    rows: Rows
    block_rows: int
    columns: tuple[int, ...] | None
    result: RowArray | None = None
    phase: Literal["predict", "variance"] = "predict"
    targets: tuple[int, ...] | None = None
    half_width: tuple[float, ...] | None = None
    sample_every: int = 0

    def open(self, i: int) -> tuple[Model, Dataset, Floats, slice]:
        """The model, the data set, features of the rows of block i as the model has them, and which rows those are."""
        dataset = self.rows.open()
        span = slice(i * self.block_rows, min((i + 1) * self.block_rows, dataset.num_rows))
        rows = _taken(dataset.X.read(span.start, span.stop), self.columns)
        return _saved_model(self.model, self.model_digest), dataset, rows, span


@dataclass(frozen=True)
class Score:
    """Errors over held-out rows, per target.

    Parameters
    ----------
    num_rows
        m.
    rmse, r2 : lists of t
        Root mean squared error in the units of the target; coefficient of determination. Empty where predictions are
        decision values of classes and not their targets, as those of hinge and logistic losses are.
    rmse_whitened : list of t or None
        RMSE divided by the training targets' standard deviation, when the model whitens.
    accuracy
        Fraction of rows whose largest output is the true class, for one-hot targets.
    intervals, coverage
        What jackknife intervals promise, and the fraction of rows that is inside them, per target; None for a model
        without leave-one-out quantiles. With ``pinball``: the same of the band between the outer two quantiles.
    balanced_accuracy
        The mean over the true classes of the fraction of their rows that is right.
    log_loss
        Minus the mean logarithm of the probability of the true class, of a logistic loss.
    pinball : list of t or None
        Mean of max(q r, (q - 1) r), r = y - prediction, of the quantile q of each column.
    of_constant
        Metrics of the constant prediction that is best for each of them, of a loss for labels or quantiles: what a
        model that learnt nothing would reach.
    """

    num_rows: int
    rmse: list[float]
    r2: list[float]
    rmse_whitened: list[float] | None = None
    accuracy: float | None = None
    intervals: float | None = None
    coverage: list[float] | None = None
    balanced_accuracy: float | None = None
    log_loss: float | None = None
    pinball: list[float] | None = None
    of_constant: dict[str, float] | None = None

    @property
    def metric(self) -> str:
        """What is looked at where nothing else is asked for."""
        return "pinball" if self.pinball is not None else "rmse" if self.accuracy is None else "accuracy"

    def value(self, metric: str) -> float:
        """One number: the mean over the targets where each has one; constant ones, which are all 0 where no row has a
        class, have no r2.

        Raises
        ------
        DataError
            The model, or the data, has no such score.
        """
        if metric in ("accuracy", "balanced_accuracy") and self.accuracy is None:
            raise DataError(f"{metric} needs a one-hot target", hint="set one_hot = true, or metric = 'rmse'")
        found = getattr(self, metric)
        if found is None or found == []:
            raise DataError(f"predictions of this loss have no {metric}", hint=f"metric = {self.metric!r}")
        if metric != "r2":
            return float(np.mean(found))
        varying = [value for value in self.r2 if not math.isnan(value)]
        return sum(varying) / len(varying) if varying else math.nan

    def facts(self) -> dict[str, Any]:
        """What there is, by the names that people read."""
        facts: dict[str, Any] = {"rows": self.num_rows}
        if self.rmse:
            facts |= {"rmse": self.value("rmse"), "r2": self.value("r2")}
        if self.rmse_whitened is not None:
            facts["rmse (whitened)"] = float(np.mean(self.rmse_whitened))
        band = f"inside {self.intervals or 0.0:.1%} {'intervals' if self.pinball is None else 'of the outer quantiles'}"
        others = {
            "accuracy": self.accuracy,
            "balanced accuracy": self.balanced_accuracy,
            "log loss": self.log_loss,
            "pinball loss": self.pinball,
            band: self.coverage,
        }
        return facts | {name: float(np.mean(value)) for name, value in others.items() if value is not None}


def _taken(rows: Floats, columns: tuple[int, ...] | None) -> Floats:
    """The ``columns`` of some rows; -1 stands for a column of zeros, None for all as they are."""
    if columns is None:
        return rows
    found = np.ascontiguousarray(rows[:, columns])
    found[:, np.array(columns) < 0] = 0.0
    return found


@lru_cache(maxsize=2)
def _saved_model(path: str, digest: str) -> Model:
    """The model at a path, kept open per process; ``digest`` is that of its manifest."""
    # the caller has verified the manifest; chunks carry their own checksum
    model = load_model(path, verify=False)
    if model.digest != digest:
        raise StoreError(f"{path} was replaced by another model during a prediction", hint="start again")
    return model


def predict_block_task(task: PredictTask, i: int) -> bool:
    """Compute predictions, or variances, of row block i into the result unless they are there."""
    assert task.result is not None  # noqa: S101  (narrows the type)
    with contextlib.suppress(DamagedChunkError):  # reading costs nothing beside computing
        task.result.array.read((i, 0))
        return False
    failpoint(f"{task.phase}.block.before_read")
    model, _, rows, span = task.open(i)
    if task.phase == "predict":
        values = model.predict_rows(rows, first_row=span.start)
    else:
        values = model.spread.variance(model.prepared_rows(rows, span.start))
    failpoint(f"{task.phase}.block.after_compute", values)
    if not np.isfinite(values).all():
        raise DataError(
            f"{_COMPUTED[task.phase]} of rows {span.start:,} to {span.stop:,} are not finite", hint="scale the features"
        )
    task.result.write_chunk(i, values)
    failpoint(f"{task.phase}.block.after_write")
    return True


def score_block_task(task: PredictTask, i: int) -> tuple[bool, dict[str, Any]]:
    """Sums of errors over row block i."""
    model, dataset, rows, span = task.open(i)
    values = model.predict_rows(rows, first_row=span.start)
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    truth = _taken(dataset.y.read(span.start, span.stop), task.targets)
    mean = _taken(np.asarray(dataset.y_mean)[None], task.targets)
    sums: dict[str, Any] = {
        "squares": np.square(values - truth).sum(axis=0),
        "spread": np.square(truth - mean).sum(axis=0),
    }
    if model.classes is not None:
        sums["of_class"] = _hits(truth, values)
    if _is_logistic(model):
        sums["log_loss"] = -float(np.take_along_axis(log_probabilities(values), np.argmax(truth, 1)[:, None], 1).sum())
    if model.levels:
        sums["pinball"] = _pinball(truth - values, np.array(model.levels)).sum(axis=0)
        low, high = values[:, np.argmin(model.levels)], values[:, np.argmax(model.levels)]
        sums["between"] = int(np.sum((low <= truth[:, 0]) & (truth[:, 0] <= high)))
    if task.half_width is not None:
        sums["inside"] = (np.abs(values - truth) <= np.array(task.half_width)).sum(axis=0)
    if task.sample_every:
        some = np.arange(-span.start % task.sample_every, len(rows), task.sample_every)
        sums["sample"] = np.stack([truth[some, :SAMPLE_TARGETS], values[some, :SAMPLE_TARGETS]], axis=-1)
        if 1 < (t := truth.shape[1]) <= MOST_CLASSES:
            # rows whose largest entry of y is in column i, and whose largest prediction is in column j
            pairs = t * np.argmax(truth, axis=1) + np.argmax(values, axis=1)
            sums["confusion"] = np.bincount(pairs, minlength=t * t).reshape(t, t)
    return True, sums


def _is_logistic(model: Model) -> bool:
    return model.classes is not None and model.provenance.get("loss") == "logistic"


def _pinball(residual: Floats, level: Any) -> Floats:
    return np.asarray(np.maximum(level * residual, (level - 1) * residual))


def _hits(truth: Floats, values: Floats) -> Any:
    """Rows of each true class (2, t): those that are right, and all."""
    true = np.argmax(truth, axis=1)
    right = true[np.argmax(values, axis=1) == true]
    return np.stack([np.bincount(rows, minlength=truth.shape[1]) for rows in (right, true)])


def predict_dataset(
    model: Model, dataset: Dataset, store: Any, executor: Executor, progress: Progress | None = None
) -> tuple[RowArray, RunSummary]:
    """Predict every row of a data set into an array ``predictions`` (m, t) in ``store``.

    Parameters
    ----------
    model
        A saved model (its ``location`` is what the tasks open).
    """
    return _in_blocks("predict", "predictions", model, dataset, store, BLOCK_ROWS, executor, progress)


def predict_variance(
    model: Model, dataset: Dataset, store: Any, executor: Executor, progress: Progress | None = None
) -> tuple[RowArray, RunSummary]:
    """var f / sigma^2 of every row of a data set, into an array ``variances-w`` (m, t) in ``store``.

    Parameters
    ----------
    model
        A saved model, with factors that the workers can open.

    Raises
    ------
    ParameterError, StoreError
        See :func:`dkrr.models.uncertainty.variance_spread`.
    """
    _ = model.spread  # what is wrong with the factors is said here
    limit = memory_limit_of(executor)
    width = variance.block_rows(model.num_rows, None if limit is None else int(SHARE_OF_LIMIT * limit))
    wanted = -(-dataset.num_rows // (TASKS_PER_THREAD * max(1, executor.num_threads)))
    width = min(width, max(variance.MIN_BLOCK_ROWS, wanted))
    # another number of workers, another width: blocks of the same are found again
    return _in_blocks("variance", f"variances-{width}", model, dataset, store, width, executor, progress)


def _in_blocks(
    phase: Literal["predict", "variance"],
    name: str,
    model: Model,
    dataset: Dataset,
    store: Any,
    width: int,
    executor: Executor,
    progress: Progress | None,
) -> tuple[RowArray, RunSummary]:
    """Compute every row into an array of ``store``, ``width`` rows a block."""
    columns = match_features(model, dataset)
    digests: dict[str, Any] = {"model": model.digest, "rows_digest": dataset.digest}
    result = RowArray.create(
        store,
        name,
        num_rows=dataset.num_rows,
        num_columns=model.num_targets,
        rows_per_chunk=min(width, dataset.num_rows),
        attributes=digests if columns is None else digests | {"columns": list(columns)},
    )
    task = PredictTask(
        str(model.location), str(model.digest), Rows.of(dataset), result.rows_per_chunk, columns, result, phase
    )
    return result, _run(phase, predict_block_task, task, model, dataset, executor, progress)


def _run(
    phase: str,
    function: Callable[..., Any],
    task: PredictTask,
    model: Model,
    dataset: Dataset,
    executor: Executor,
    progress: Progress | None,
) -> RunSummary:
    dataset.verify()  # chunks of rows that changed places pass their checksums; one pass is little beside predicting
    flops = 2.0 * model.num_rows * (model.num_features + model.num_targets)
    if phase == "variance":
        flops = float(model.num_rows) ** 2 * len(model.spread.systems)
    count = -(-dataset.num_rows // task.block_rows)
    nodes = [Node((i,), (), flops * task.block_rows) for i in range(count)]
    return executor.run(phase, function, task, nodes, progress)


def score_dataset(
    model: Model,
    dataset: Dataset,
    executor: Executor,
    progress: Progress | None = None,
    *,
    intervals: float | None = None,
    sample_rows: int = 0,
) -> tuple[Score, RunSummary]:
    """RMSE, R^2 and what else a :class:`Score` has for this model, of a saved model on a data set with targets.

    ``intervals`` is the coverage that the model's jackknife intervals shall have, whose real one is counted; None: 0.9
    if the model has leave-one-out quantiles. With ``sample_rows`` the values of the tasks in the summary hold "sample",
    truth and prediction (k, t', 2) of evenly spaced rows, at most so many and of at most four targets, and "confusion",
    counts (t, t), where there are 2 to 50 targets.

    Raises
    ------
    ParameterError
        ``intervals`` is given, and the model has no quantiles for it.
    DataError
        Features, targets or classes that the model does not have, see :mod:`dkrr.dataset.columns`.
    """
    columns, targets = match_features(model, dataset), match_targets(model.observed, dataset)
    levels, m = tuple(model.levels), dataset.num_rows
    if len(levels) > 1:
        targets = (0 if targets is None else targets[0],) * len(levels)
    if intervals is None and model.quantiles is not None and model.quantiles.knows(DEFAULT_INTERVALS):
        intervals = DEFAULT_INTERVALS
    task = PredictTask(
        str(model.location),
        str(model.digest),
        Rows.of(dataset),
        min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, -(-m // (4 * max(1, executor.num_threads))))),
        columns,
        targets=targets,
        half_width=None if intervals is None else tuple(half_widths(model, intervals, "jackknife", None).tolist()),
        sample_every=-(-m // sample_rows) if sample_rows else 0,
    )
    summary = _run("evaluate", score_block_task, task, model, dataset, executor, progress)
    parts = [values for _, values in sorted(summary.values.items())]
    means = {
        name: np.sum([part[name] for part in parts], axis=0) / m
        for name in parts[0]
        if name not in ("sample", "confusion")
    }
    rmse = np.sqrt(means["squares"])
    spread = means["spread"]
    r2 = 1 - np.divide(means["squares"], spread, out=np.full_like(rmse, np.nan), where=spread > 0)
    score = Score(
        m,
        rmse.tolist(),
        r2.tolist(),
        None if model.scaling is None else (rmse / model.scaling.y_std).tolist(),
        intervals=intervals,
        coverage=means["inside"].tolist() if "inside" in means else None,
        log_loss=float(means["log_loss"]) if "log_loss" in means else None,
    )
    if "of_class" in means:
        right, share = (values[means["of_class"][1] > 0] for values in means["of_class"])
        score = replace(score, accuracy=float(right.sum()), balanced_accuracy=float(np.mean(right / share)))
        if make_loss(model.provenance.get("loss", "square")).is_for_labels:
            constant = {"accuracy": float(share.max()), "balanced_accuracy": 1.0 / len(share)}
            constant |= {"log_loss": -float(share @ np.log(share))} if _is_logistic(model) else {}
            score = replace(score, rmse=[], r2=[], rmse_whitened=None, of_constant=constant)
    if levels:
        assert dataset.y is not None  # noqa: S101  (narrows the type)
        truth = _taken(dataset.y.read(0, m), targets)
        # no other constant has less than the empirical quantile
        least = [
            _pinball(y - np.quantile(y, level, method="inverted_cdf"), level).mean()
            for y, level in zip(truth.T, levels * (model.num_targets if len(levels) == 1 else 1), strict=True)
        ]
        score = replace(score, pinball=means["pinball"].tolist(), of_constant={"pinball": float(np.mean(least))})
    if len(levels) > 1:
        score = replace(score, intervals=round(max(levels) - min(levels), 12), coverage=[float(means["between"])])
    return score, summary
