"""Use a saved model from the command line: predict or score the rows of a file on the workers.

A model is a path, or a version that an alias of a registry names, so that the same command can run every night. The
alias is resolved once, at the start, and the version is written beside the output before anything is predicted: a
prediction that was interrupted among its rows goes on with the version it began with, although the alias may name
another one by then.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dkrr.dataset import Dataset, Floats, ingest, open_dataset
from dkrr.dataset.columns import feature_columns, kept_columns, match_features, ordered_like, target_columns
from dkrr.dataset.sources import Table, open_table
from dkrr.engine.cluster import executor_for
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import Executor, InProcessExecutor, Progress
from dkrr.errors import DamagedChunkError, DataError, ParameterError, StoreError, StoreMismatchError
from dkrr.fit.inputs import TemporaryStore, nothing_new
from dkrr.jobs.export import Predictions, check_output, export_predictions, work_of
from dkrr.jobs.registry import RECORD, ModelRegistry, NamedModel, Reference, Version
from dkrr.linalg.leave_one_out import IntervalMethod
from dkrr.linalg.loss import log_probabilities
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import needs_workers, predict_dataset, predict_variance, score_dataset
from dkrr.models.uncertainty import half_widths, interval, standard_deviation
from dkrr.store.documents import manifest_digest
from dkrr.store.files import (
    children,
    is_below,
    is_url,
    join,
    name_of,
    parent_of,
    place,
    read_json,
    remove_array,
    write_json,
)
from dkrr.store.lease import hold_lock

logger = logging.getLogger("dkrr.jobs.predict")
RESULT = "result.zarr"  # of a prediction, in its folder beside the output
VERSION = "version.json"


@dataclass(frozen=True, kw_only=True)
class Extras:
    """What shall stand beside predictions, or in their place.

    Parameters
    ----------
    std
        Standard deviations of f; with ``noise`` those of a new observation.
    interval
        The coverage of intervals, None for no interval.
    method
        Of the intervals.
    probabilities
        Of the classes, in the place of the decision values of a logistic loss.
    """

    std: bool = False
    noise: bool = False
    interval: float | None = None
    method: IntervalMethod = "jackknife"
    probabilities: bool = False

    @property
    def needs_variance(self) -> bool:
        return self.std or (self.interval is not None and self.method != "jackknife")

    def check(self, model: Model) -> None:
        """Refuse what this model cannot say, before anything is predicted.

        Raises
        ------
        ParameterError, StoreError
            No factor, no leave-one-out quantiles for this coverage, which is between 0 and 1, or no probabilities.
        """
        if self.probabilities and (model.provenance.get("loss") != "logistic" or model.classes is None):
            raise ParameterError(
                "this model has no probabilities, which are those of a logistic loss of classes",
                hint="fit a job with [model] loss = 'logistic'",
            )
        if self.needs_variance:
            _ = model.variance_systems
        if self.interval is not None:
            half_widths(model, self.interval, self.method, np.ones((1, model.num_targets)))

    def columns(self, names: Sequence[str]) -> list[str]:
        """Names of the columns: the targets, then each with _std, with _lower, and with _upper."""
        endings = ["", *["_std"] * self.std, *(["_lower", "_upper"] if self.interval is not None else [])]
        return [name + ending for ending in endings for name in names]

    def beside(self, model: Model, values: Floats, variance: Floats | None) -> Floats:
        """Predictions (m, t) and what stands beside them; ``variance`` is var f / sigma^2 (m, t) where it is needed."""
        if self.probabilities:
            values = np.exp(log_probabilities(values))
        parts = [values]
        if self.std and variance is not None:
            parts.append(standard_deviation(model, variance, noise=self.noise))
        if self.interval is not None:
            flat = values[:, 0] if model.y_is_1d else values
            parts.extend(interval(model, flat, self.interval, self.method, variance))
        return np.hstack([part.reshape(len(values), -1) for part in parts])


class Predicted(NamedTuple):
    """How many rows were predicted, and by which version of a registry."""

    num_rows: int
    version: Version | None


def predict_job(
    model: str | Reference,
    data: str,
    output: str,
    *,
    extras: Extras | None = None,
    overwrite: bool = False,
    reading: dict[str, Any] | None = None,
    keep: Sequence[str] = (),
    registry: str | None = None,
    progress: Progress | None = None,
) -> Predicted:
    """Predict the rows of ``data`` into ``output`` (.zarr, .npy, .parquet or .csv).

    What stands at ``output`` is replaced if dkrr wrote it as predictions; with ``overwrite`` whatever it is, unless the
    predictions are made from it. A stamp beside it says where it came from, see :mod:`dkrr.jobs.export`. Finished
    blocks stay beside the output until it is complete, so an interrupted prediction continues; where they are damaged,
    or of other rows or another model than this one, they are of use to nobody and made anew.

    Columns of ``data`` are the model's by name where both have names: their order is free, others are left aside. A row
    with a missing value is an error, since it would have no prediction. For one-hot targets the class of the largest
    score is there, too. A column of predictions that has the name of a kept one is called NAME_predicted.

    Parameters
    ----------
    model
        A saved model, or one of a registry.
    extras
        Further columns.
    reading
        How a text file is read: header, delimiter and decimal of :func:`~dkrr.ingest`.
    keep
        Columns of ``data`` that are copied beside the predictions (.csv and .parquet).
    registry
        Root; None: ``DKRR_MODELS``, else ./models.

    Raises
    ------
    DataError
        The data has other features than the model, or targets that cannot be told from features; or no column that is
        to be kept.
    ParameterError, StoreError
        The model cannot say what was asked for, or the output is something else's place; there is no such model, alias
        or version.
    LockedError
        Another process predicts into the same output.
    """
    work, named = work_of(output), None
    inputs = [data, str(model)]
    if isinstance(model, Reference):
        named = ModelRegistry(registry).open(model.name)
        inputs[1] = parent_of(named.resolve(model.selector).location)  # a mistake is found before anything is made
    # an input that is part of a version is all of it
    folders = [parent_of(item) for item in inputs]
    inputs += [folder for folder in folders if read_json(folder, RECORD) is not None]
    check_output(output, inputs, overwrite=overwrite)

    def predict() -> Predicted:
        version = None
        if isinstance(model, Reference) and named is not None:
            version = _version_for(named, model, work)
            location = version.model_path
            stamp = {"model": named.name, "selector": model.selector, "version": version.id}
        else:
            location = str(model)
            stamp = {"model": location if is_url(location) else os.path.abspath(location)}
        predictions, origin = _predicted(
            location, data, output, extras or Extras(), overwrite, reading or {}, keep, progress
        )
        export_predictions(predictions, output, stamp=stamp | origin, overwrite=overwrite)
        remove_array(work)
        return Predicted(predictions.num_rows, version)

    with nothing_new(work), hold_lock(work):
        try:
            return predict()
        except (StoreMismatchError, DamagedChunkError) as exc:
            if isinstance(exc, DamagedChunkError) and not is_below(exc.path, work):
                raise
            logger.info("what an interrupted prediction left in %s is made anew: %s", work, exc.message)
            remove_array(work)
            return predict()


def _version_for(model: NamedModel, reference: Reference, work: str) -> Version:
    """The version an interrupted prediction began with, while it is there; else the one that is meant now.

    One that came to nothing before it had a place for its predictions (its rows could not be read, say) began nothing.
    """
    meant = {"registry": model.root, "name": reference.name, "selector": reference.selector}
    found = read_json(work, VERSION)
    has_begun = bool(children(join(work, RESULT)))
    if has_begun and isinstance(found, dict) and all(found.get(key) == value for key, value in meant.items()):
        try:
            return model.resolve(str(found["version"]))
        except StoreError:
            pass  # pruned since
    remove_array(work)
    version = model.resolve(reference.selector)
    write_json(work, VERSION, {**meant, "version": version.id})
    return version


def _predicted(
    location: str,
    data: str,
    output: str,
    extras: Extras,
    overwrite: bool,
    reading: dict[str, Any],
    keep: Sequence[str],
    progress: Progress | None,
) -> tuple[Predictions, dict[str, Any]]:
    """All that is computed, in the folder beside an output that is held, and what the stamp says of it."""
    if keep and not name_of(output).endswith((".csv", ".parquet")):
        raise ParameterError(
            f"{output} holds numbers alone, columns cannot be kept there", hint="write .csv or .parquet"
        )
    model = load_model(location)
    check_output(output, model.provenance.get("factors", ()), overwrite=overwrite)
    extras.check(model)
    work = work_of(output)
    dataset, table = _rows_for(model, data, work, reading, keep=keep)
    variances = None
    try:
        match_features(model, dataset)
        layout = _layout(model, table, keep, extras, output)
        result = place(work, RESULT)
        with executor_of_size(model, 0 if extras.needs_variance else dataset.num_rows) as executor:
            values, _ = predict_dataset(model, dataset, result, executor, progress)
            if extras.needs_variance:
                variances = predict_variance(model, dataset, result, executor, progress)[0]
    except DataError:  # these rows stay as bad as they are, there is nothing to continue
        remove_array(work)
        raise

    def read(start: int, stop: int) -> Floats:
        variance = None if variances is None else variances.read(start, stop)
        return extras.beside(model, values.read(start, stop), variance)

    origin = {"model_digest": manifest_digest(location), "num_rows": dataset.num_rows, "rows_digest": dataset.digest}
    return Predictions(num_rows=dataset.num_rows, read=read, **layout), origin


def _layout(model: Model, table: Table | None, keep: Sequence[str], extras: Extras, output: str) -> dict[str, Any]:
    """What the columns of an output are called, as :class:`~dkrr.jobs.export.Predictions` is told.

    Raises
    ------
    DataError
        Two columns of an output that has names would have the same one.
    """
    columns = () if table is None else kept_columns(table, keep)
    kept = [table.names[column] for column in columns] if table is not None else []

    def free(name: str) -> str:
        return f"{name}_predicted" if name in kept else name

    targets = list(model.target_names) or [f"prediction_{column}" for column in range(model.num_targets)]
    names = [free(name) for name in extras.columns(targets)]
    classes = () if model.classes is None else tuple(model.classes)
    label = free((*target_columns(model.target_names, classes), "label")[0]) if classes else ""
    counts = Counter([*kept, *names, *([label] if classes else [])])
    twice = [name for name, count in counts.items() if count > 1]
    if twice and name_of(output).endswith((".csv", ".parquet")):
        raise DataError(
            f"{output} would have two columns {twice[0]!r}",
            hint="write .npy or .zarr, which have no names, keep other columns, or rename the targets and fit again",
        )
    is_flat = model.y_is_1d and len(names) == 1
    return {"names": names, "y_is_1d": is_flat, "source": table, "keep": columns, "label": label, "classes": classes}


@contextmanager
def executor_of_size(
    model: Model, num_rows: int, start: Callable[[], AbstractContextManager[Executor]] = executor_for
) -> Iterator[Executor]:
    """This process for predictions that take less time than a cluster takes to start; else what ``start()`` makes.

    Parameters
    ----------
    num_rows
        Rows to predict; 0 where more than predictions is computed, for which there are always workers.
    """
    if num_rows and not needs_workers(model, num_rows):
        with single_blas_thread():
            yield InProcessExecutor()
        return
    with start() as executor:
        yield executor


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
        with executor_of_size(model, dataset.num_rows) as executor:
            score, _ = score_dataset(model, dataset, executor, progress, store=work.path, intervals=intervals)
    finally:
        work.close()
    if metric is not None:
        return {metric: score.value(metric), "rows": score.num_rows}
    return score.facts()


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
