"""Variances of a data set's predictions, a block of rows a task, on the workers.

Every task reads each tile of the factor once and holds w rows of V, 8 n w bytes. A block that is valid is not computed
again, so an interrupted run continues where it was.

Cost
----
n^2 m flops, n m kernel entries, and m / w passes over the factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, RowArray
from dkrr.dataset.columns import match_features
from dkrr.engine.session import memory_limit_of
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError
from dkrr.failpoints import failpoint
from dkrr.linalg.inference.variance import MIN_BLOCK_ROWS, block_rows
from dkrr.linalg.operators import Rows
from dkrr.model import Model
from dkrr.prediction import column_facts, is_whole, saved_model, taken

__all__ = ["predict_variance"]

# of a worker's memory, for the rows of V: the rest is the interpreter, two mapped tiles and a tile's operands
SHARE_OF_LIMIT = 0.3
TASKS_PER_THREAD = 4


@dataclass(frozen=True)
class VarianceTask:
    """Which model, which rows, where variances go, and which columns of X are the model's (None for all)."""

    model: str
    model_digest: str
    rows: Rows
    result: RowArray
    columns: tuple[int, ...] | None = None


def variance_block_task(task: VarianceTask, i: int) -> bool:
    """Compute the variances of row block i unless they are there."""
    if is_whole(task.result.array, i):
        return False
    failpoint("variance.block.before_read")
    model = saved_model(task.model, task.model_digest)
    start, stop = task.result.span(i)
    rows = taken(task.rows.open().X.read(start, stop), task.columns)
    values = model.spread.variance(model.prepared_rows(rows, start))
    failpoint("variance.block.after_compute", values)
    if not np.isfinite(values).all():
        raise DataError(f"variances of rows {start:,} to {stop:,} are not finite", hint="scale the features")
    task.result.write_chunk(i, values)
    failpoint("variance.block.after_write")
    return True


def predict_variance(
    model: Model, dataset: Dataset, store: Any, executor: Executor, progress: Progress | None = None
) -> tuple[RowArray, RunSummary]:
    """var f / sigma^2 of every row of a data set, into an array ``variances`` (m, t) in ``store``.

    Parameters
    ----------
    model
        A saved model (its ``location`` is what the tasks open), with factors that the workers can open.

    Raises
    ------
    ParameterError, StoreError
        See :func:`dkrr.uncertainty.variance_spread`.
    """
    columns = match_features(model, dataset)
    dataset.verify()
    spread = model.spread  # what is wrong with the factors is said here, not by a task
    limit = memory_limit_of(executor)
    width = block_rows(model.num_rows, None if limit is None else int(SHARE_OF_LIMIT * limit))
    wanted = -(-dataset.num_rows // (TASKS_PER_THREAD * max(1, executor.num_threads)))
    width = min(width, max(MIN_BLOCK_ROWS, wanted))
    assert model.digest is not None  # noqa: S101  (narrows the type)
    attributes = {"model": model.digest, "rows_digest": dataset.digest} | column_facts(columns)
    result = RowArray.create(
        store,
        f"variances-{width}",  # another number of workers, another width: blocks of the same are found again
        num_rows=dataset.num_rows,
        num_columns=model.num_targets,
        rows_per_chunk=width,
        attributes=attributes,
    )
    task = VarianceTask(str(model.location), model.digest, Rows.of(dataset), result, columns)
    flops = float(model.num_rows) ** 2 * width * len(spread.systems)
    nodes = [Node((i,), (), flops) for i in range(result.num_chunks)]
    for _ in range(3):
        try:
            return result, executor.run("variance", variance_block_task, task, nodes, progress)
        except DamagedChunkError as damage:
            if damage.path != result.array.location:
                raise
            result.array.delete(damage.index)
    raise DataError(f"the variances in {store} are damaged again and again", hint="use another store")
