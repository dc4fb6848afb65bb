"""Predictions of rows that are not in memory, or that are too many for one core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, RowArray, ingest
from dkrr.dataset.columns import feature_columns
from dkrr.dataset.sources import open_table
from dkrr.engine.cluster import runs_in_process
from dkrr.engine.session import executor_for
from dkrr.engine.tasks import Executor, RunSummary
from dkrr.errors import ParameterError
from dkrr.model import Model, load_model
from dkrr.prediction import predict_dataset
from dkrr.stores import full_disk, place
from dkrr.temporary import TemporaryStore
from dkrr.threads import single_blas_thread

__all__ = ["is_worth_a_cluster", "on_workers", "predict_on_workers", "predict_table"]

# One core evaluates so many kernel entries in about the time that a cluster takes to start.
MAX_IN_PROCESS_ENTRIES = 4_000_000_000

Work = Callable[[Model, Dataset, Any, Executor], tuple[RowArray, RunSummary]]


def predict_table(model: Model, X: Any) -> Any:
    """Predictions (m,) or (m, t) for rows that are read a block at a time: a path, a Zarr array, a data set.

    Raises
    ------
    DataError
        A name of the model's is missing; or, without names, another number of features.
    """
    table = open_table(X, named=[model.names])
    columns = feature_columns(model, table)
    holds_rows_only = isinstance(X, Dataset) or len(columns) == len(table.names)
    if holds_rows_only and table.num_rows is not None and is_worth_a_cluster(model, table.num_rows):
        return predict_on_workers(model, X if isinstance(X, Dataset) else table, table.num_rows)
    parts, row = [], 0
    with single_blas_thread():
        for block, _ in table.blocks(columns):
            parts.append(model.predict_rows(np.ascontiguousarray(block), first_row=row))
            row += len(block)
    result = np.concatenate(parts)
    return result[:, 0] if model.y_is_1d else result


def is_worth_a_cluster(model: Model, num_rows: int) -> bool:
    """Whether so many predictions take longer than starting a cluster, and can be computed on one."""
    if num_rows * model.num_rows <= MAX_IN_PROCESS_ENTRIES or model.kernel is None or runs_in_process():
        return False
    try:
        model.kernel.to_dict()
    except ParameterError:  # a function without an importable name exists in this process alone
        return False
    return True


def predict_on_workers(model: Model, X: Any, num_rows: int) -> Any:
    """The same predictions, a block of rows a task, through a temporary store."""
    result = on_workers(model, X, num_rows, predict_dataset)
    return result[:, 0] if model.y_is_1d else result


def on_workers(model: Model, X: Any, num_rows: int, work: Work) -> Any:
    """What ``work`` makes (m, t) of a saved copy of the model and rows on disk, both in a temporary store."""
    store = TemporaryStore(8 * (num_rows + model.num_rows) * (model.num_features + model.num_targets))
    try:
        location = place(store.path, "model.zarr")
        model.write(location)
        dataset = X if isinstance(X, Dataset) else ingest(X, place(store.path, "rows.zarr"))
        with full_disk(store.path), executor_for() as executor:
            saved = load_model(location, verify=False)
            result, _ = work(saved, dataset, place(store.path, "result.zarr"), executor)
        return result.read(0, num_rows)
    finally:
        store.close()
