"""Predictions of rows, and how uncertain they are, wherever the rows are; and what predictions are worth.

Rows in memory, a block at a time, or, where it takes longer than starting a cluster, on workers: a task a block, which
it writes into an array in a store. A block that is valid is not computed again, so an interrupted prediction continues
where it was. A score is what scikit-learn's metrics say of an array of predictions.

Cost
----
m n kernel entries and 2 m n t flops; a task holds its rows, one strip, and 2,048 training rows. Variances: n^2 m flops
for each distinct alpha and m / w passes over the factor; a task holds w rows of V, 8 n w bytes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dkrr.dataset import (
    Dataset,
    Floats,
    RowArray,
    check_places,
    feature_columns,
    ingest,
    match_features,
    match_targets,
    open_table,
)
from dkrr.engine.cluster import executor_for, memory_limit_of, runs_in_process
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError, ParameterError, StoreError
from dkrr.fit.inputs import TemporaryStore, find_dataset
from dkrr.linalg import leave_one_out as variance
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.loss import log_probabilities, make_loss
from dkrr.linalg.operators import Rows
from dkrr.models.model import BLOCK_ROWS, Model, load_model
from dkrr.models.validation import is_out_of_core
from dkrr.store.files import is_url, place, remove_array, storage_errors
from dkrr.tiles import TileMatrix

# One core evaluates so many kernel entries, or does so many flops, in about the time that a cluster takes to start.
MAX_IN_PROCESS_ENTRIES = 4_000_000_000
MAX_IN_PROCESS_FLOPS = 4e11

# of the metrics of a Score, those that are errors
LOWER_IS_BETTER = frozenset({"rmse", "log_loss", "pinball"})

DEFAULT_INTERVALS = 0.9

SAMPLE_TARGETS = 4

MOST_CLASSES = 50

# beside the largest of a block, what a row on its own may differ by
SAMPLE_RTOL = 1e-6

# of a worker's memory, for the rows of V: the rest is the interpreter, two mapped tiles and a tile's operands
SHARE_OF_LIMIT = 0.3

MIN_BLOCK_ROWS, TASKS_PER_THREAD = 128, 4

Phase = Literal["predict", "variance"]
# what is made (m, t) of a block of rows as they were given, of which the first has a number
COMPUTE: dict[Phase, Callable[[Model, Floats, int], Floats]] = {
    "predict": Model.predict_rows,
    "variance": Model.variance_rows,
}


def values_of(model: Model, X: Any, phase: Phase = "predict") -> Floats:
    """Predictions, or variances var f(z) / sigma^2, (m, t) of rows wherever they are.

    Parameters
    ----------
    X
        Rows in memory, or what is read a block at a time: a path, a Zarr array, a data set, a memory map.

    Raises
    ------
    DataError
        A name of the model's is missing; or, without names, another number of features.
    ParameterError, StoreError
        The model has no variance, see :attr:`dkrr.Model.variance_systems`.
    """
    if not is_out_of_core(X, 0, 0) or isinstance(X, np.memmap):
        if needs_workers(model, len(X), phase):
            return _on_workers(model, X, len(X), phase)
        with single_blas_thread():
            found: Floats = model.compute(X, COMPUTE[phase])
            return found
    X = find_dataset(X)
    table = open_table(X, named=[model.names])
    columns, is_dataset = feature_columns(model, table), isinstance(X, Dataset)
    holds_rows_only = is_dataset or len(columns) == len(table.names)
    if holds_rows_only and table.num_rows and needs_workers(model, table.num_rows, phase):
        return _on_workers(model, X if is_dataset else table, table.num_rows, phase)
    parts, row = [], 0
    with single_blas_thread():
        for block, _ in table.blocks(columns):
            parts.append(COMPUTE[phase](model, np.ascontiguousarray(block), row))
            row += len(block)
    return np.concatenate(parts)


def needs_workers(model: Model, num_rows: int, phase: Phase = "predict") -> bool:
    """Whether workers can open all that is needed, and starting them takes little time beside the work."""
    if phase == "variance":
        systems = model.variance_systems.values()
        flops = float(model.num_rows) ** 2 * num_rows * len(systems)
        is_stored = all(isinstance(system.factor, TileMatrix) for system in systems)
        return is_stored and flops > MAX_IN_PROCESS_FLOPS and not runs_in_process()
    if num_rows * model.num_rows <= MAX_IN_PROCESS_ENTRIES or model.kernel is None or runs_in_process():
        return False
    try:
        model.kernel.to_dict()
    except ParameterError:  # a function without an importable name exists in this process alone
        return False
    return True


def _on_workers(model: Model, X: Any, num_rows: int, phase: Phase) -> Floats:
    """From a saved copy of the model and rows on disk, both in a temporary store."""
    needed = 8 * (num_rows + model.num_rows) * (model.num_features + model.num_targets)
    with closing(TemporaryStore(needed)) as store:
        location = place(store.path, "model.zarr")
        model.write(location)
        dataset = X if isinstance(X, Dataset) else ingest(X, place(store.path, "rows.zarr"))
        with storage_errors(store.path, only_full=True), executor_for() as executor:
            saved = load_model(location, verify=False)
            result, _ = predict_dataset(saved, dataset, place(store.path, "result.zarr"), executor, phase=phase)
        return result.read(0, num_rows)


@dataclass(frozen=True)
class PredictTask:
    """Which model, which rows, and where what is computed goes.

    ``columns``: those of the model among the columns of X, None for all as they are.
    """

    model: str
    model_digest: str
    rows: Rows
    columns: tuple[int, ...] | None
    result: RowArray
    phase: Phase


@lru_cache(maxsize=2)
def _saved_model(path: str, digest: str) -> Model:
    """The model at a path, kept open per process; ``digest`` is that of its manifest."""
    model = load_model(path, verify=not is_url(path))  # objects only where the caller did
    if model.digest != digest:
        raise StoreError(f"{path} was replaced by another model during a prediction", hint="start again")
    return model


def predict_block_task(task: PredictTask, i: int) -> bool:
    """Compute predictions, or variances, of row block i into the result unless they are there.

    Blocks that changed places pass their checksums, so three rows of one that is there are computed again.
    """
    start = i * task.result.rows_per_chunk
    stop = min(start + task.result.rows_per_chunk, task.result.num_rows)
    rows = _taken(task.rows.open().X.read(start, stop), task.columns)
    model, compute = _saved_model(task.model, task.model_digest), COMPUTE[task.phase]
    with contextlib.suppress(DamagedChunkError):
        there, sample = task.result.read(start, stop), np.unique([0, len(rows) // 2, len(rows) - 1])
        again = compute(model, np.ascontiguousarray(rows[sample]), start)
        if np.allclose(there[sample], again, rtol=0, atol=SAMPLE_RTOL * np.abs(there).max()):
            return False
    values = compute(model, rows, start)
    sys.audit("dkrr.compute", f"{task.phase}.block", values)
    if not np.isfinite(values).all():
        noun = "predictions" if task.phase == "predict" else "variances"
        raise DataError(f"{noun} of rows {start:,} to {stop:,} are not finite", hint="scale the features")
    task.result.write_chunk(i, values)
    return True


def _taken(rows: Floats, columns: tuple[int, ...] | None) -> Floats:
    """The ``columns`` of some rows; -1 stands for a column of zeros, None for all as they are."""
    if columns is None:
        return rows
    found = np.ascontiguousarray(rows[:, columns])
    found[:, np.array(columns) < 0] = 0.0
    return found


def predict_dataset(
    model: Model,
    dataset: Dataset,
    store: Any,
    executor: Executor,
    progress: Progress | None = None,
    *,
    phase: Phase = "predict",
    width: int | None = None,
    said: str = "",
) -> tuple[RowArray, RunSummary]:
    """Predict every row of a data set into an array ``predictions`` (m, t) in ``store``, or ``variances-w``.

    Its name goes on with a key of the model and the rows, so that blocks of others are never taken for these.

    Parameters
    ----------
    model
        A saved model (its ``location`` is what the tasks open); for variances one with factors that they can open.
    phase
        "variance" for var f / sigma^2.
    width
        Rows of a block, 4,096 by default; of variances as many as fit the workers.
    said
        The name of the phase for the progress.

    Raises
    ------
    ParameterError, StoreError
        See :attr:`dkrr.Model.variance_systems`.
    """
    n, m = model.num_rows, dataset.num_rows
    name, width, flops = "predictions", width or BLOCK_ROWS, 2.0 * n * (model.num_features + model.num_targets)
    if phase == "variance":
        flops = float(n) ** 2 * len(model.variance_systems)  # what is wrong with the factors is said here
        limit = memory_limit_of(executor)
        wanted = -(-m // (TASKS_PER_THREAD * max(1, executor.num_threads)))
        most = variance.block_rows(n, None if limit is None else int(SHARE_OF_LIMIT * limit))
        width = min(most, max(variance.MIN_BLOCK_ROWS, wanted))
        name = f"variances-{width}"  # another number of workers, another width: blocks of the same are found again
    columns = match_features(model, dataset)
    fields: dict[str, Any] = {"model": model.digest, "rows_digest": dataset.digest}
    fields |= {} if columns is None else {"columns": list(columns)}
    result = RowArray.create(
        store,
        f"{name}-{key_of(fields)}",
        num_rows=m,
        num_columns=model.num_targets,
        rows_per_chunk=min(width, m),
        attributes=fields,
    )
    task = PredictTask(str(model.location), str(model.digest), Rows.of(dataset), columns, result, phase)
    dataset.verify()  # chunks of rows that changed places pass their checksums; one pass is little beside predicting
    nodes = [Node((i,), (), flops * result.rows_per_chunk) for i in range(-(-m // result.rows_per_chunk))]
    return result, executor.run(said or phase, predict_block_task, task, nodes, progress)


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
    levels
        These quantiles, or the one of all columns; None for another loss.
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
    levels: list[float] | None = None
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


def score_dataset(
    model: Model,
    dataset: Dataset,
    executor: Executor,
    progress: Progress | None = None,
    *,
    store: Any = None,
    intervals: float | None = None,
    sample_rows: int = 0,
) -> tuple[Score, RunSummary]:
    """RMSE, R^2 and what else a :class:`Score` has for this model, of a saved model on a data set with targets.

    Parameters
    ----------
    store
        Where the workers of ``executor`` write predictions, which are removed at the end; None: a temporary folder.
    intervals
        The coverage that the model's jackknife intervals shall have, whose real one is counted; None: 0.9 if the model
        has leave-one-out quantiles.
    sample_rows
        If there are any, the values in the summary hold "sample", truth and prediction (k, t', 2) of evenly spaced
        rows, at most so many and of at most four targets, and "confusion", counts (t, t), where there are 2 to 50
        targets.

    Raises
    ------
    ParameterError
        ``intervals`` is given, and the model has no quantiles for it.
    DataError
        Features, targets or classes that the model does not have, see :mod:`dkrr.dataset.table`.

    Cost
    ----
    That of the predictions, and of two arrays (m, t) in this process.
    """
    check_places(model, dataset.places, dataset.path, is_named=bool(dataset.names))
    match_features(model, dataset)
    targets, m, levels = match_targets(model.observed, dataset), dataset.num_rows, model.levels
    if len(levels) > 1:
        targets = (0 if targets is None else targets[0],) * len(levels)
    if intervals is None and model.quantiles is not None and model.quantiles.knows(DEFAULT_INTERVALS):
        intervals = DEFAULT_INTERVALS
    half_width = None if intervals is None else model.half_widths(intervals, "jackknife", None)
    width = min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, -(-m // (4 * max(1, executor.num_threads)))))
    with contextlib.ExitStack() as stack:
        if store is None:
            store = stack.enter_context(closing(TemporaryStore(8 * m * model.num_targets))).path
        scratch = place(store, "scratch", f"{uuid.uuid4().hex}.zarr")
        stack.callback(remove_array, scratch)
        result, summary = predict_dataset(model, dataset, scratch, executor, progress, width=width, said="evaluate")
        values = result.read(0, m)
    truth = _taken(dataset.targets.read(0, m), targets)
    errors, spread = values - truth, truth - _taken(np.asarray(dataset.y_mean)[None], targets)
    # powers of two, so that no square over- or underflows and none is rounded otherwise
    unit = np.ldexp(1.0, np.frexp(np.maximum(np.abs(errors), np.abs(spread)).max(axis=0))[1] - 1)
    squares, around_mean = np.square(errors / unit).mean(axis=0), np.square(spread / unit).mean(axis=0)
    rmse = unit * np.sqrt(squares)
    score = Score(
        m,
        rmse.tolist(),
        (1 - np.divide(squares, around_mean, out=np.full_like(rmse, np.nan), where=around_mean > 0)).tolist(),
        None if model.scaling is None else (rmse / model.scaling.y_std).tolist(),
        intervals=intervals,
        coverage=None if half_width is None else (np.abs(values - truth) <= half_width).mean(axis=0).tolist(),
    )
    if model.classes is not None:
        score = _with_classes(score, model, truth, values)
    if levels:
        score = _with_quantiles(score, levels, truth, values)
    if sample_rows:
        some, t = slice(None, None, -(-m // sample_rows)), truth.shape[1]
        found = {"sample": np.stack([truth[some, :SAMPLE_TARGETS], values[some, :SAMPLE_TARGETS]], axis=-1)}
        if 1 < t <= MOST_CLASSES:
            from sklearn import metrics

            # rows whose largest entry of y is in column i, and whose largest prediction is in column j
            pairs = np.argmax(truth, axis=1), np.argmax(values, axis=1)
            found["confusion"] = metrics.confusion_matrix(*pairs, labels=np.arange(t))
        summary = replace(summary, values={(0,): found})
    return score, summary


def _with_classes(score: Score, model: Model, truth: Floats, values: Floats) -> Score:
    """What is said of one-hot targets, of which a loss for labels predicts no values."""
    from sklearn import metrics  # loads for most of a second

    true, said = np.argmax(truth, axis=1), np.argmax(values, axis=1)
    count = np.bincount(true)
    share = count[count > 0] / len(true)
    recall = metrics.recall_score(true, said, labels=np.flatnonzero(count), average="macro", zero_division=0.0)
    score = replace(score, accuracy=float(np.mean(true == said)), balanced_accuracy=float(recall))
    loss = model.provenance.get("loss", "square")
    if not make_loss(loss).is_for_labels:
        return score
    constant = {"accuracy": float(share.max()), "balanced_accuracy": 1.0 / len(share)}
    score = replace(score, rmse=[], r2=[], rmse_whitened=None, of_constant=constant)
    if loss != "logistic":
        return score
    found = -np.take_along_axis(log_probabilities(values), true[:, None], axis=1).mean()
    return replace(score, log_loss=float(found), of_constant=constant | {"log_loss": -float(share @ np.log(share))})


def _with_quantiles(score: Score, levels: list[float], truth: Floats, values: Floats) -> Score:
    """The pinball loss of each column, beside that of its empirical quantile: no other constant has less."""
    from sklearn import metrics

    columns = list(zip(truth.T, values.T, levels * (truth.shape[1] // len(levels)), strict=True))
    lost = [metrics.mean_pinball_loss(y, found, alpha=level) for y, found, level in columns]
    least = [
        metrics.mean_pinball_loss(y, np.full(len(y), np.quantile(y, level, method="inverted_cdf")), alpha=level)
        for y, _, level in columns
    ]
    score = replace(score, pinball=lost, levels=levels, of_constant={"pinball": float(np.mean(least))})
    if len(levels) == 1:
        return score
    low, high = values[:, np.argmin(levels)], values[:, np.argmax(levels)]
    between = float(np.mean((low <= truth[:, 0]) & (truth[:, 0] <= high)))
    return replace(score, intervals=round(max(levels) - min(levels), 12), coverage=[between])
