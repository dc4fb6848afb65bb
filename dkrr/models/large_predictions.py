"""Predictions, and variances of them, of rows that are not in memory, or that are too many for one core."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray, ingest
from dkrr.dataset.columns import feature_columns
from dkrr.dataset.sources import open_table
from dkrr.engine.cluster import executor_for, runs_in_process
from dkrr.engine.tasks import Executor, RunSummary
from dkrr.errors import ParameterError
from dkrr.fit.inputs import TemporaryStore, find_dataset
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset, predict_variance
from dkrr.models.validation import is_dask_array, is_out_of_core
from dkrr.store.files import full_disk, place
from dkrr.threads import single_blas_thread
from dkrr.tiles import TileMatrix

__all__ = ["MAX_IN_PROCESS_ENTRIES", "is_worth_a_cluster", "predict_on_workers", "predict_table", "variance_of"]

# One core evaluates so many kernel entries, or does so many flops, in about the time that a cluster takes to start.
MAX_IN_PROCESS_ENTRIES = 4_000_000_000
MAX_IN_PROCESS_FLOPS = 4e11

Work = Callable[[Model, Dataset, Any, Executor], tuple[RowArray, RunSummary]]
FloatArray = NDArray[np.float64]


def predict_table(model: Model, X: Any) -> Any:
    """Predictions (m,) or (m, t) for rows that are read a block at a time: a path, a Zarr array, a data set.

    Raises
    ------
    DataError
        A name of the model's is missing; or, without names, another number of features.
    """
    result = _of_table(model, X, is_worth_a_cluster, predict_dataset, model.predict_rows)
    return result[:, 0] if model.y_is_1d else result


def predict_on_workers(model: Model, X: Any, num_rows: int) -> Any:
    """The same predictions, a block of rows a task, through a temporary store."""
    result = _on_workers(model, X, num_rows, predict_dataset)
    return result[:, 0] if model.y_is_1d else result


def variance_of(model: Model, X: Any) -> FloatArray:
    """var f(z) / sigma^2 (m, t) for rows in memory or, a block at a time, in a path, a Zarr array or a data set.

    Raises
    ------
    ParameterError
        X is a dask array; the model has no variance, see :func:`dkrr.models.uncertainty.variance_spread`.
    DataError
        A name of the model's is missing; or, without names, another number of features.
    """
    if is_dask_array(X):
        raise ParameterError(
            "standard deviations of a dask array", hint="give a path or a data set, which is read in blocks"
        )
    if is_out_of_core(X, 0, 0) and not isinstance(X, np.memmap):

        def of_rows(block: FloatArray, row: int) -> FloatArray:
            return model.spread.variance(model.prepared_rows(block, row))

        return _of_table(model, find_dataset(X), _needs_workers, predict_variance, of_rows)
    if _needs_workers(model, len(X)):
        return _on_workers(model, X, len(X), predict_variance)
    with single_blas_thread():
        return model.variance(X)


def is_worth_a_cluster(model: Model, num_rows: int) -> bool:
    """Whether so many predictions take longer than starting a cluster, and can be computed on one."""
    if num_rows * model.num_rows <= MAX_IN_PROCESS_ENTRIES or model.kernel is None or runs_in_process():
        return False
    try:
        model.kernel.to_dict()
    except ParameterError:  # a function without an importable name exists in this process alone
        return False
    return True


def _needs_workers(model: Model, num_rows: int) -> bool:
    """Whether the factors are where workers can open them, and so much work that starting them is little beside it."""
    systems = model.spread.systems
    flops = float(model.num_rows) ** 2 * num_rows * len(systems)
    stored = all(isinstance(system.factor, TileMatrix) for system in systems)
    return stored and flops > MAX_IN_PROCESS_FLOPS and not runs_in_process()


def _of_table(
    model: Model,
    X: Any,
    needs_workers: Callable[[Model, int], bool],
    work: Work,
    of_rows: Callable[[FloatArray, int], FloatArray],
) -> FloatArray:
    """What ``of_rows`` makes of each block of rows and the number of its first one, or ``work`` on workers (m, t)."""
    table = open_table(X, named=[model.names])
    columns, is_dataset = feature_columns(model, table), isinstance(X, Dataset)
    holds_rows_only = is_dataset or len(columns) == len(table.names)
    if holds_rows_only and table.num_rows and needs_workers(model, table.num_rows):
        return _on_workers(model, X if is_dataset else table, table.num_rows, work)
    parts, row = [], 0
    with single_blas_thread():
        for block, _ in table.blocks(columns):
            parts.append(of_rows(np.ascontiguousarray(block), row))
            row += len(block)
    return np.concatenate(parts)


def _on_workers(model: Model, X: Any, num_rows: int, work: Work) -> FloatArray:
    """What ``work`` makes (m, t) of a saved copy of the model and rows on disk, both in a temporary store."""
    needed = 8 * (num_rows + model.num_rows) * (model.num_features + model.num_targets)
    with closing(TemporaryStore(needed)) as store:
        location = place(store.path, "model.zarr")
        model.write(location)
        dataset = X if isinstance(X, Dataset) else ingest(X, place(store.path, "rows.zarr"))
        with full_disk(store.path), executor_for() as executor:
            saved = load_model(location, verify=False)
            result, _ = work(saved, dataset, place(store.path, "result.zarr"), executor)
        return result.read(0, num_rows)
