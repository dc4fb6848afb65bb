"""Predictions, and variances of them, of rows that are not in memory, or that are too many for one core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray, ingest
from dkrr.dataset.columns import feature_columns
from dkrr.dataset.sources import open_table
from dkrr.dataset.sources.table import Table
from dkrr.engine.cluster import blas_of, executor_for, memory_limit_of, runs_in_process
from dkrr.engine.tasks import Executor, RunSummary
from dkrr.errors import ParameterError
from dkrr.fit.fitting import FitSettings, ridge_operator
from dkrr.fit.inputs import TemporaryStore, check_disk, find_dataset, find_executor, resolve_tile_size, rows_on_disk
from dkrr.fit.prices import cholesky_disk
from dkrr.linalg.factor.direct import CholeskySolver
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset, predict_variance
from dkrr.models.tiled import Training, check_unchanged
from dkrr.models.uncertainty import has_spread
from dkrr.models.validation import is_dask_array, is_out_of_core
from dkrr.store.files import full_disk, place
from dkrr.threads import single_blas_thread
from dkrr.tiles import TileGrid, TileMatrix

__all__ = [
    "MAX_IN_PROCESS_ENTRIES",
    "ensure_factor",
    "is_worth_a_cluster",
    "predict_on_workers",
    "predict_table",
    "variance_of",
]

logger = logging.getLogger("dkrr.models.uncertainty")
FloatArray = NDArray[np.float64]

# One core evaluates so many kernel entries, or does so many flops, in about the time that a cluster takes to start.
MAX_IN_PROCESS_ENTRIES = 4_000_000_000

MAX_IN_PROCESS_FLOPS = 4e11

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
    result = _by_blocks(table, columns, model.predict_rows)
    return result[:, 0] if model.y_is_1d else result


def _by_blocks(table: Table, columns: list[int], work: Callable[[FloatArray, int], FloatArray]) -> FloatArray:
    """What ``work`` makes of each block of rows and the number of its first one, in this process."""
    parts, row = [], 0
    with single_blas_thread():
        for block, _ in table.blocks(columns):
            parts.append(work(np.ascontiguousarray(block), row))
            row += len(block)
    return np.concatenate(parts)


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
    result = _on_workers(model, X, num_rows, predict_dataset)
    return result[:, 0] if model.y_is_1d else result


def _on_workers(model: Model, X: Any, num_rows: int, work: Work) -> Any:
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
        return _variance_of_table(model, find_dataset(X))
    if _needs_workers(model, len(X)):
        found: FloatArray = _on_workers(model, X, len(X), predict_variance)
        return found
    with single_blas_thread():
        return model.variance(X)


def ensure_factor(model: Model, training: Training, store: Any) -> None:
    """Make the float64 factor of a fit that left a float32 one, in the store that it left it in; logged.

    Only after precision="mixed": that fit has paid for a factor, though for one of half the digits. Nothing is done
    for few rows, whose factor is made in memory, or where there is one.

    Cost
    ----
    n^3 / 3 flops for each distinct alpha, n^2 / 2 numbers in the store, which stay.
    """
    facts, kernel = model.provenance, model.kernel
    is_mixed = facts.get("solver") == "cholesky" and facts.get("precision") == "mixed"
    if not is_mixed or kernel is None or store is None or has_spread(model):
        return
    alphas = tuple(facts["alpha"])
    with (
        full_disk(store),
        single_blas_thread(),
        rows_on_disk(training.X, training.y, training.weight, store) as dataset,
        find_executor(dataset.num_rows, training.max_in_process_rows) as executor,
    ):
        check_unchanged(model, dataset)
        n, d = dataset.num_rows, dataset.num_features
        b = resolve_tile_size(training.tile_size, n, d, "float64", memory_limit_of(executor))
        needed = cholesky_disk(n, b, d, 1, precision="float64", gram="on_the_fly", num_alphas=len(set(alphas)))
        check_disk(store, needed["factor"], TileGrid(n, b), {"rows_digest": [dataset.digest], "dtype": ["float64"]})
        logger.info("a standard deviation needs a float64 factor of %s rows, which this fit has not", f"{n:,}")
        center = None if model.center is None else tuple(model.center.tolist())
        settings = FitSettings(kernel=kernel, alpha=alphas, tile_size=b, center=center)
        operator = ridge_operator(dataset, settings, alphas[0])
        workspace = Workspace(store=store, executor=executor, blas=blas_of(executor))
        for alpha in dict.fromkeys(alphas):
            CholeskySolver().prepare(operator.with_alpha(alpha), workspace, weight_digest=dataset.digest_weight)


def _needs_workers(model: Model, num_rows: int) -> bool:
    """Whether the factors are where workers can open them, and so much work that starting them is little beside it."""
    systems = model.spread.systems
    flops = float(model.num_rows) ** 2 * num_rows * len(systems)
    stored = all(isinstance(system.factor, TileMatrix) for system in systems)
    return stored and flops > MAX_IN_PROCESS_FLOPS and not runs_in_process()


def _variance_of_table(model: Model, X: Any) -> FloatArray:
    table = open_table(X, named=[model.names])
    columns = feature_columns(model, table)
    if len(columns) == len(table.names) and table.num_rows and _needs_workers(model, table.num_rows):
        rows = X if isinstance(X, Dataset) else table
        found: FloatArray = _on_workers(model, rows, table.num_rows, predict_variance)
        return found
    return _by_blocks(table, columns, lambda block, row: model.spread.variance(model.prepared_rows(block, row)))
