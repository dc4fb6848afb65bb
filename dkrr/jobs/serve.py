"""Use a saved model from the command line: predict or score the rows of a file on the workers."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.dataset.columns import feature_columns, kept_columns, match_features, ordered_like, target_columns
from dkrr.dataset.sources import Table, open_table
from dkrr.engine.cluster import executor_for
from dkrr.engine.tasks import Executor, InProcessExecutor, Progress
from dkrr.errors import DamagedChunkError, DataError, ParameterError, StoreError, StoreMismatchError
from dkrr.fit.inputs import TemporaryStore, nothing_new
from dkrr.jobs.export import Beside, check_output, export_predictions, work_of
from dkrr.jobs.registry import RECORD
from dkrr.jobs.uncertain import Asked, probability_table, uncertain_columns, uncertain_table
from dkrr.models.large_predictions import is_worth_a_cluster
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset, score_dataset
from dkrr.store.documents import manifest_digest
from dkrr.store.files import is_below, is_url, name_of, parent_of, place, read_json, remove_array
from dkrr.store.lease import hold_lock
from dkrr.threads import single_blas_thread

__all__ = ["evaluate_job", "holding", "predict_held", "predict_job"]

logger = logging.getLogger("dkrr.jobs.serve")
Result = TypeVar("Result")
RESULT = "result.zarr"  # of a prediction, in its folder beside the output


def predict_job(
    model_path: str,
    data: str,
    output: str,
    *,
    asked: Asked | None = None,
    overwrite: bool = False,
    reading: dict[str, Any] | None = None,
    keep: Sequence[str] = (),
    progress: Progress | None = None,
) -> int:
    """Predict the rows of ``data`` into ``output`` (.zarr, .npy, .parquet or .csv); the number of rows.

    What stands at ``output`` is replaced if dkrr wrote it as predictions; with ``overwrite`` whatever it is, unless the
    predictions are made from it. A stamp beside it says where it came from, see :mod:`dkrr.jobs.export`.

    ``reading`` says how a text file is read: header, delimiter and decimal of :func:`~dkrr.ingest`. A row with a
    missing value is an error, since it would have no prediction.

    Columns of ``data`` are the model's by name where both have names: their order is free, others are left aside.
    ``keep`` names some to be copied beside the predictions (.csv and .parquet); for one-hot targets the class of the
    largest score is there, too, see :class:`~dkrr.jobs.export.Beside`. A column of predictions that has the name of a
    kept one is called NAME_predicted.

    With ``asked`` standard deviations and ends of intervals are further columns, see
    :func:`~dkrr.jobs.uncertain.uncertain_columns`.

    Finished blocks stay beside the output until it is complete, so an interrupted prediction continues.

    Raises
    ------
    DataError
        The data has other features than the model, or targets that cannot be told from features; or no column that is
        to be kept.
    ParameterError, StoreError
        The model cannot say what was asked for, or the output is something else's place.
    LockedError
        Another process predicts into the same output.
    """
    stamp = {"model": model_path if is_url(model_path) else os.path.abspath(model_path)}
    options: dict[str, Any] = {"asked": asked, "overwrite": overwrite, "reading": reading, "progress": progress}

    def predict() -> int:
        return predict_held(model_path, data, output, **options, keep=keep, stamp=stamp)

    return holding(output, [model_path, data], predict, overwrite=overwrite)


def holding(output: str, inputs: list[str], predict: Callable[[], Result], *, overwrite: bool) -> Result:
    """Predict while an output that may be written is held; an input that is part of a version is all of it.

    What an interrupted prediction left is of use to nobody where it is damaged, or of other rows or another model than
    this one: it is removed, and made anew.
    """
    folders = [parent_of(item) for item in inputs]
    versions = [folder for folder in folders if read_json(folder, RECORD) is not None]
    check_output(output, [*inputs, *versions], overwrite=overwrite)
    work = work_of(output)
    with nothing_new(work), hold_lock(work):
        try:
            return predict()
        except (StoreMismatchError, DamagedChunkError) as exc:
            if isinstance(exc, DamagedChunkError) and not is_below(exc.path, work):
                raise
            logger.info("what an interrupted prediction left in %s is made anew: %s", work, exc.message)
            remove_array(work)
            return predict()


def predict_held(
    model_path: str,
    data: str,
    output: str,
    *,
    asked: Asked | None,
    overwrite: bool,
    reading: dict[str, Any] | None,
    keep: Sequence[str],
    progress: Progress | None,
    stamp: dict[str, Any],
) -> int:
    """:func:`predict_job` for a caller that holds the output, with what the stamp shall say besides the rows."""
    if keep and not name_of(output).endswith((".csv", ".parquet")):
        raise ParameterError(
            f"{output} holds numbers alone, columns cannot be kept there", hint="write .csv or .parquet"
        )
    model = load_model(model_path)
    check_output(output, model.provenance.get("factors", ()), overwrite=overwrite)
    asked = asked or Asked()
    asked.check(model)
    work = work_of(output)
    dataset, table = _rows_for(model, data, work, reading or {}, keep=keep)
    try:
        match_features(model, dataset)
        beside = _beside(model, table, keep)
        columns = _columns(model, asked, beside, output)
        with _executor(model, dataset, asked) as executor:
            result = place(work, RESULT)
            predictions, _ = predict_dataset(model, dataset, result, executor, progress)
            if asked.probabilities:
                predictions = probability_table(predictions, result)
            if asked.std or asked.interval is not None:
                predictions = uncertain_table(model, dataset, predictions, asked, result, executor, progress)
    except DataError:  # these rows stay as bad as they are, there is nothing to continue
        remove_array(work)
        raise
    is_flat = model.y_is_1d and predictions.num_columns == 1
    digest = manifest_digest(model_path)
    stamp = {"model_digest": digest, **stamp, "num_rows": dataset.num_rows, "rows_digest": dataset.digest}
    export_predictions(predictions, output, columns, y_is_1d=is_flat, stamp=stamp, overwrite=overwrite, beside=beside)
    remove_array(work)
    return dataset.num_rows


@contextmanager
def _executor(model: Model, dataset: Dataset, asked: Asked) -> Iterator[Executor]:
    """This process for what takes less time than a cluster takes to start; else as usual."""
    if asked.needs_variance or is_worth_a_cluster(model, dataset.num_rows):
        with executor_for() as executor:
            yield executor
        return
    with single_blas_thread():
        yield InProcessExecutor()


def evaluate_job(
    model_path: str,
    data: str,
    *,
    metric: str | None = None,
    intervals: float | None = None,
    reading: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score a model on the rows of ``data``, whose last columns (or named columns) are the targets.

    ``intervals``: the coverage of the jackknife intervals whose real one is counted (None: 0.9, of a model that has
    leave-one-out quantiles). ``reading`` says how a text file is read, and what is done with rows that have missing
    values: header, delimiter, decimal and missing of :func:`~dkrr.ingest`.
    """
    model = load_model(model_path)
    work = TemporaryStore()  # not beside the model, which may be a version that never changes
    try:
        dataset, _ = _rows_for(model, data, work.path, reading or {}, with_targets=True)
        with _executor(model, dataset, Asked()) as executor:
            score, _ = score_dataset(model, dataset, executor, progress, intervals=intervals)
    finally:
        work.close()
    if metric is not None:
        return {metric: score.value(metric), "rows": score.num_rows}
    facts: dict[str, Any] = {"rows": score.num_rows}
    if score.rmse:
        facts |= {"rmse": score.value("rmse"), "r2": score.value("r2")}
    if score.rmse_whitened is not None:
        facts["rmse (whitened)"] = float(np.mean(score.rmse_whitened))
    if score.accuracy is not None:
        facts |= {"accuracy": score.accuracy, "balanced accuracy": score.balanced_accuracy}
    if score.log_loss is not None:
        facts["log loss"] = score.log_loss
    if score.pinball is not None:
        facts["pinball loss"] = score.value("pinball")
    if score.coverage is not None:
        what = "intervals" if score.pinball is None else "of the outer quantiles"
        facts[f"inside {score.intervals:.1%} {what}"] = float(np.mean(score.coverage))
    return facts


def _beside(model: Model, table: Table | None, keep: Sequence[str]) -> Beside:
    """What the output has beside the numbers."""
    columns = () if table is None else kept_columns(table, keep)
    if model.classes is None:
        return Beside(source=table, keep=columns)
    label = (*target_columns(model.target_names, model.classes), "label")[0]
    if table is not None and label in [table.names[column] for column in columns]:
        label = f"{label}_predicted"
    return Beside(source=table, keep=columns, label=label, classes=tuple(model.classes))


def _columns(model: Model, asked: Asked, beside: Beside, output: str) -> list[str]:
    """What the columns of numbers are called.

    Raises
    ------
    DataError
        Two columns of an output that has names would have the same one.
    """
    names = uncertain_columns(
        list(model.target_names) or [f"prediction_{column}" for column in range(model.num_targets)], asked
    )
    names = [f"{name}_predicted" if name in beside.names else name for name in names]
    counts = Counter([*beside.names, *names, *([beside.label] if beside.classes else [])])
    twice = [name for name, count in counts.items() if count > 1]
    if twice and name_of(output).endswith((".csv", ".parquet")):
        raise DataError(
            f"{output} would have two columns {twice[0]!r}",
            hint="write .npy or .zarr, which have no names, keep other columns, or rename the targets and fit again",
        )
    return names


def _rows_for(
    model: Model,
    data: str,
    work: str,
    reading: dict[str, Any],
    *,
    with_targets: bool = False,
    keep: Sequence[str] = (),
) -> tuple[Dataset, Table | None]:
    """The data as rows with the model's features: a data set as it is, else a table, ingested beside the output."""
    try:
        dataset = open_dataset(data)
    except StoreError:
        # missing values are no matter of how a file is read
        text = {name: value for name, value in reading.items() if name != "missing"}
        table = open_table(data, **text, named=[model.names, keep])
    else:
        if keep:
            raise DataError(
                f"columns of {data} cannot be kept, it is a data set", hint="predict the file that it was made of"
            )
        return dataset, None
    kept_columns(table, keep)  # a mistake is found before anything is made
    destination = place(work, "data.zarr")
    if not with_targets:
        # rows that an interrupted prediction left are compared with the data, which may be another by now
        # by name: a number may be the name of another column
        features = [table.names[column] for column in feature_columns(model, table)]
        return ingest(table, destination, features=features), table
    observed = model.observed
    options = ordered_like(observed, table)
    if not options and table.target is None:
        labels = target_columns(observed.target_names, model.classes)
        is_there = bool(labels) and set(labels) <= set(table.names)
        last = range(-1 if model.classes is not None else -observed.num_targets, 0)
        options = {"target": list(labels if is_there else last)}
    one_hot = model.classes is not None and table.classes is None
    missing = reading.get("missing", "error")
    return ingest(table, destination, **options, one_hot=one_hot, classes=model.classes, missing=missing), table
