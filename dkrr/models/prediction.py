"""Predict and score a data set with a model, or say how uncertain predictions are, a block of rows a task.

A block that is valid is not computed again, so an interrupted prediction continues where it was.

Cost
----
m n kernel entries and 2 m n t flops; a task holds its rows, one strip, and 2,048 training rows. Variances: n^2 m flops
for each distinct alpha and m / w passes over the factor; a task holds w rows of V, 8 n w bytes.
"""

from __future__ import annotations

import math
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
from dkrr.store.chunks import ChunkArray
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
    ``has_classes``, ``is_logistic``, ``levels`` of quantiles: which errors are summed besides the squares.
    """

    model: str
    model_digest: str
    rows: Rows
    block_rows: int
    result: RowArray | None = None
    phase: Literal["predict", "variance"] = "predict"
    half_width: tuple[float, ...] | None = None
    sample_every: int = 0
    columns: tuple[int, ...] | None = None
    targets: tuple[int, ...] | None = None
    has_classes: bool = False
    is_logistic: bool = False
    levels: tuple[float, ...] = ()

    def span(self, i: int, num_rows: int) -> tuple[int, int]:
        """Rows of block i."""
        return i * self.block_rows, min((i + 1) * self.block_rows, num_rows)


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
    if _is_whole(task.result.array, i):
        return False
    failpoint(f"{task.phase}.block.before_read")
    dataset = task.rows.open()
    start, stop = task.span(i, dataset.num_rows)
    rows = _taken(dataset.X.read(start, stop), task.columns)
    model = _saved_model(task.model, task.model_digest)
    if task.phase == "predict":
        values = model.predict_rows(rows, first_row=start)
    else:
        values = model.spread.variance(model.prepared_rows(rows, start))
    failpoint(f"{task.phase}.block.after_compute", values)
    if not np.isfinite(values).all():
        raise DataError(
            f"{_COMPUTED[task.phase]} of rows {start:,} to {stop:,} are not finite", hint="scale the features"
        )
    task.result.write_chunk(i, values)
    failpoint(f"{task.phase}.block.after_write")
    return True


def _is_whole(array: ChunkArray, i: int) -> bool:
    """Whether a block is there and its checksum right: reading it costs nothing beside computing it."""
    if not array.is_valid((i, 0)):
        return False
    try:
        array.read((i, 0))
    except DamagedChunkError:
        return False
    return True


def score_block_task(task: PredictTask, i: int) -> tuple[bool, dict[str, Any]]:
    """Sums of squared errors over row block i."""
    dataset = task.rows.open()
    start, stop = task.span(i, dataset.num_rows)
    rows = _taken(dataset.X.read(start, stop), task.columns)
    values = _saved_model(task.model, task.model_digest).predict_rows(rows, first_row=start)
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    truth = _taken(dataset.y.read(start, stop), task.targets)
    sums: dict[str, Any] = {"squares": np.square(values - truth).sum(axis=0)}
    if task.has_classes:
        sums["of_class"] = _hits(truth, values)
    if task.is_logistic:
        sums["log_loss"] = -float(np.take_along_axis(log_probabilities(values), np.argmax(truth, 1)[:, None], 1).sum())
    if task.levels:
        residual, level = truth - values, np.array(task.levels)
        sums["pinball"] = np.maximum(level * residual, (level - 1) * residual).sum(axis=0)
        low, high = values[:, np.argmin(level)], values[:, np.argmax(level)]
        sums["between"] = int(np.sum((low <= truth[:, 0]) & (truth[:, 0] <= high)))
    if task.half_width is not None:
        sums["inside"] = (np.abs(values - truth) <= np.array(task.half_width)).sum(axis=0)
    if task.sample_every:
        some = np.arange(-start % task.sample_every, stop - start, task.sample_every)
        sums["sample"] = np.stack([truth[some, :SAMPLE_TARGETS], values[some, :SAMPLE_TARGETS]], axis=-1)
        if 1 < truth.shape[1] <= MOST_CLASSES:
            sums["confusion"] = _confusion(truth, values)
    return True, sums


def _hits(truth: Floats, values: Floats) -> Any:
    """Rows of each true class (2, t): those that are right, and all."""
    true = np.argmax(truth, axis=1)
    right = true[np.argmax(values, axis=1) == true]
    return np.stack([np.bincount(rows, minlength=truth.shape[1]) for rows in (right, true)])


def _confusion(truth: Floats, values: Floats) -> Any:
    """Rows (t, t) whose largest entry of y is in column i, and whose largest prediction is in column j."""
    t = truth.shape[1]
    pairs = t * np.argmax(truth, axis=1) + np.argmax(values, axis=1)
    return np.bincount(pairs, minlength=t * t).reshape(t, t)


def _nodes(task: PredictTask, num_rows: int, flops_per_row: float) -> list[Node]:
    count = -(-num_rows // task.block_rows)
    return [Node((i,), (), flops_per_row * task.block_rows) for i in range(count)]


def _flops_per_row(model: Model) -> float:
    return 2.0 * model.num_rows * (model.num_features + model.num_targets)


def predict_dataset(
    model: Model, dataset: Dataset, store: Any, executor: Executor, progress: Progress | None = None
) -> tuple[RowArray, RunSummary]:
    """Predict every row of a data set into an array ``predictions`` (m, t) in ``store``.

    Parameters
    ----------
    model
        A saved model (its ``location`` is what the tasks open).
    """
    width = min(BLOCK_ROWS, dataset.num_rows)
    return _in_blocks("predict", "predictions", model, dataset, store, width, _flops_per_row(model), executor, progress)


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
    flops = float(model.num_rows) ** 2 * len(model.spread.systems)  # what is wrong with the factors is said here
    limit = memory_limit_of(executor)
    width = variance.block_rows(model.num_rows, None if limit is None else int(SHARE_OF_LIMIT * limit))
    wanted = -(-dataset.num_rows // (TASKS_PER_THREAD * max(1, executor.num_threads)))
    width = min(width, max(variance.MIN_BLOCK_ROWS, wanted))
    # another number of workers, another width: blocks of the same are found again
    return _in_blocks("variance", f"variances-{width}", model, dataset, store, width, flops, executor, progress)


def _in_blocks(
    phase: Literal["predict", "variance"],
    name: str,
    model: Model,
    dataset: Dataset,
    store: Any,
    width: int,
    flops_per_row: float,
    executor: Executor,
    progress: Progress | None,
) -> tuple[RowArray, RunSummary]:
    """Compute every row into an array of ``store``, ``width`` rows a block; damaged blocks again, at most twice."""
    columns = match_features(model, dataset)
    dataset.verify()  # chunks of rows that changed places pass their checksums; one pass is little beside predicting
    assert model.digest is not None  # noqa: S101  (narrows the type)
    attributes = {"model": model.digest, "rows_digest": dataset.digest}
    result = RowArray.create(
        store,
        name,
        num_rows=dataset.num_rows,
        num_columns=model.num_targets,
        rows_per_chunk=width,
        attributes=attributes if columns is None else attributes | {"columns": list(columns)},
    )
    rows = Rows.of(dataset)
    task = PredictTask(str(model.location), model.digest, rows, width, result, phase, columns=columns)
    nodes = _nodes(task, dataset.num_rows, flops_per_row)
    for _ in range(3):
        try:
            return result, executor.run(phase, predict_block_task, task, nodes, progress)
        except DamagedChunkError as damage:
            if damage.path != result.array.location:
                raise
            result.array.delete(damage.index)
    raise DataError(f"the {_COMPUTED[phase]} in {store} are damaged again and again", hint="use another store")


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
    levels, loss = tuple(model.levels), model.provenance.get("loss", "square")
    if len(levels) > 1:
        targets = (0 if targets is None else targets[0],) * len(levels)
    dataset.verify()
    threads = max(1, executor.num_threads)
    block_rows = min(BLOCK_ROWS, max(MIN_BLOCK_ROWS, -(-dataset.num_rows // (4 * threads))))
    rows = Rows.of(dataset)
    assert model.digest is not None  # noqa: S101  (narrows the type)
    if intervals is None and model.quantiles is not None and model.quantiles.knows(DEFAULT_INTERVALS):
        intervals = DEFAULT_INTERVALS
    width = None if intervals is None else tuple(half_widths(model, intervals, "jackknife", None).tolist())
    task = PredictTask(
        str(model.location),
        model.digest,
        rows,
        block_rows,
        half_width=width,
        sample_every=-(-dataset.num_rows // sample_rows) if sample_rows else 0,
        columns=columns,
        targets=targets,
        has_classes=model.classes is not None,
        is_logistic=model.classes is not None and loss == "logistic",
        levels=levels * (model.num_targets if len(levels) == 1 else 1),
    )
    nodes = _nodes(task, dataset.num_rows, _flops_per_row(model))
    summary = executor.run("evaluate", score_block_task, task, nodes, progress)
    parts = [summary.values[node.key] for node in nodes]
    m = dataset.num_rows
    mean_squares = np.sum([part["squares"] for part in parts], axis=0) / m
    spread = np.square(_taken(_std(dataset)[None], targets)[0])
    rmse = np.sqrt(mean_squares)
    r2 = 1 - np.divide(mean_squares, spread, out=np.full_like(mean_squares, np.nan), where=spread > 0)
    whitened = None if model.scaling is None else (rmse / model.scaling.y_std).tolist()
    inside = None if width is None else (np.sum([part["inside"] for part in parts], axis=0) / m).tolist()
    score = Score(m, rmse.tolist(), r2.tolist(), whitened, intervals=intervals, coverage=inside)
    if task.has_classes:
        right, count = np.sum([part["of_class"] for part in parts], axis=0)
        balanced = float(np.mean(right[count > 0] / count[count > 0]))
        score = replace(score, accuracy=int(right.sum()) / m, balanced_accuracy=balanced)
        if make_loss(loss).is_for_labels:
            share = count[count > 0] / m
            constant = {"accuracy": float(share.max()), "balanced_accuracy": 1.0 / len(share)}
            constant |= {"log_loss": -float(share @ np.log(share))} if task.is_logistic else {}
            score = replace(score, rmse=[], r2=[], rmse_whitened=None, of_constant=constant)
    if task.is_logistic:
        score = replace(score, log_loss=sum(part["log_loss"] for part in parts) / m)
    if levels:
        found = (np.sum([part["pinball"] for part in parts], axis=0) / m).tolist()
        assert dataset.y is not None  # noqa: S101  (narrows the type)
        truth = _taken(dataset.y.read(0, m), targets)
        least = [_least_pinball(y, level) for y, level in zip(truth.T, task.levels, strict=True)]
        score = replace(score, pinball=found, of_constant={"pinball": float(np.mean(least))})
    if len(levels) > 1:
        between = sum(part["between"] for part in parts) / m
        score = replace(score, intervals=round(max(levels) - min(levels), 12), coverage=[between])
    return score, summary


def _least_pinball(y: Any, level: float) -> float:
    """The mean pinball loss of the empirical quantile, which no other constant has less of."""
    residual = y - np.quantile(y, level, method="inverted_cdf")
    return float(np.mean(np.maximum(level * residual, (level - 1) * residual)))


def _std(dataset: Dataset) -> Any:
    """Population standard deviation of the targets, 0 for a constant one."""
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    total = np.zeros(dataset.num_targets)
    for start, stop in dataset.y.blocks():
        total += np.square(dataset.y.read(start, stop) - dataset.y_mean).sum(axis=0)
    return np.sqrt(total / dataset.num_rows)
