"""Programs that run one task alone in a fresh process and say how far its memory rose.

``prepare`` writes the system of a few tiles a side on which a task works, in a process of its own: buffers that it
leaves behind would hide what the task needs. ``run_task_alone`` first runs the same kind of task on tiny tiles, so that
libraries and the buffers of BLAS are loaded, sets the process' high-water mark back, and runs the task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cholesky import CholeskyTask, Split, factor_tile
from dkrr.linalg.direct import factorise
from dkrr.linalg.gram import TileTask, build_gram, gram_tile
from dkrr.linalg.matmul import OperatorProduct, panel_width
from dkrr.linalg.operators import RidgeOperator, rows_of
from dkrr.linalg.products import ArrayRows, kernel_product
from dkrr.linalg.solution import Solution
from dkrr.linalg.triangular import BACKWARD, FORWARD, Sweeps, substitute, sweep_task
from dkrr.linalg.workspace import Pass, Workspace, compute_part
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset
from dkrr.store.chunks import ChunkArray
from dkrr.tiles import TileGrid, TileMatrix
from tests.benchmarks.processes import reset_peak, resident_bytes

__all__ = ["KINDS", "prepare", "run_task_alone"]

# A kind of task and the tile or block it is run on: of 5 tiles a side, the last one ragged.
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "gram": ("gram", (2, 1)),
    "gram, diagonal": ("gram", (2, 2)),
    "gram, ragged": ("gram", (4, 1)),
    "gram, found valid": ("gram, found valid", (2, 1)),
    "factor": ("factor", (3, 2)),
    "factor, diagonal": ("factor", (3, 3)),
    "factor, ragged": ("factor", (4, 3)),
    "factor, ragged diagonal": ("factor", (4, 4)),
    "factor from a stored Gram matrix": ("factor, stored", (3, 2)),
    "factor, found valid": ("factor, found valid", (3, 2)),
    "partial sum": ("partial sum", (3, 3)),
    "factor from a partial sum": ("factor, from a sum", (4, 3)),
    "forward": ("forward", (3, 0)),
    "backward": ("backward", (0, 0)),
    "residual": ("residual", (1, 0, 0)),
    "residual, diagonal": ("residual", (1, 1, 0)),
    "predict": ("predict", (0,)),
    # every operand of a tile at once, as a careless task would hold them: the bar must notice
    "control: holds its operands": ("control", (4, 3)),
}
SPLIT = Split(num_columns=3)


def operator_of(dataset: Dataset, tile_size: int) -> RidgeOperator:
    kernel = make_kernel("matern", kernel_params={"nu": 1.5, "length_scale": 1.0}).resolve(dataset.num_features)
    return RidgeOperator(
        grid=TileGrid(dataset.num_rows, tile_size),
        alpha=1e-1,
        kernel=kernel,
        rows=rows_of(dataset, kernel),
        weighted=True,
    )


def prepare(*, systems: dict[str, int], d: int, t: int, precision: str) -> dict[str, Any]:
    """Write rows, Gram matrix, factor, right-hand sides, solutions and a model to each folder with its tile size."""
    for folder, tile_size in systems.items():
        write_system(folder, tile_size, d, t, precision)
    return {}


def write_system(folder: str, tile_size: int, d: int, t: int, precision: str) -> None:
    random = np.random.default_rng(0)
    n = 5 * tile_size - tile_size // 3
    x, y = random.standard_normal((n, d)), random.standard_normal((n, t))
    dataset = ingest(x, f"{folder}/rows.zarr", y=y, sample_weight=random.uniform(0.5, 2, n))
    operator, executor = operator_of(dataset, tile_size), InProcessExecutor()
    build_gram(operator, TileMatrix.create(f"{folder}/gram.zarr", operator.grid, dtype="float64"), executor)
    factor = TileMatrix.create(f"{folder}/factor.zarr", operator.grid, dtype=precision)
    factorise(operator, factor, executor)
    shape, chunks = (10 * tile_size, 5 * tile_size), (tile_size, tile_size)
    sums = ChunkArray.create(f"{folder}/sums.zarr", "", shape=shape, chunks=chunks, dtype=precision)
    tile = np.array(factor.read(4, 3))
    factor.delete(4, 3)
    factor_tile(CholeskyTask(operator, factor, split=SPLIT, parts=sums), 4, 3, 0)
    factor.write(4, 3, tile)  # by the task it would take the sum away
    rhs, z, u = (
        BlockColumns.create(f"{folder}/solve.zarr", name, operator.grid, t, dtype)
        for name, dtype in (("rhs", "float64"), ("z", precision), ("u", precision))
    )
    rhs.fill(y)
    substitute("solve", factor, (rhs, z, u), executor)
    Model(
        kernel=operator.kernel,
        x_fit=dataset.X,
        dual_coef=ArrayRows(y),
        solution=Solution(
            solver="cholesky",
            precision=precision,
            converged=True,
            num_iterations=0,
            relative_residual=[0.0] * t,
            backward_error=[0.0] * t,
        ),
    ).save(f"{folder}/model.zarr")


def task_of(kind: str, folder: str, tile_size: int, index: tuple[int, ...]) -> Callable[[], Any]:
    """The task as a call without arguments; what it computes is removed from the store first."""
    dataset = open_dataset(f"{folder}/rows.zarr")
    operator = operator_of(dataset, tile_size)
    gram, factor = (TileMatrix.open(f"{folder}/{name}.zarr") for name in ("gram", "factor"))
    if kind == "gram":
        gram.delete(*index)
    if kind.startswith("gram"):
        return functools.partial(gram_tile, TileTask(operator, gram), *index)
    if kind == "factor, stored":
        operator = replace(operator, gram=gram)
    if kind.startswith(("factor", "partial")):
        if kind != "factor, found valid":
            factor.delete(*index)
        sums = ChunkArray.open(f"{folder}/sums.zarr") if "sum" in kind else None
        task = CholeskyTask(operator, factor, split=SPLIT if "sum" in kind else Split(), parts=sums)
        return functools.partial(factor_tile, task, *index, *((0,) if kind == "partial sum" else ()))
    if kind == "control":
        i, j = index
        return lambda: [np.array(factor.read(row, k)) for k in range(j + 1) for row in (i, j)]
    if kind == "predict":
        model, executor = load_model(f"{folder}/model.zarr"), InProcessExecutor()
        # both blocks, one after the other: what a block needs, and what the first one leaves behind
        return lambda: predict_dataset(model, dataset, f"{folder}/predictions.zarr", executor)[1].num_computed
    rhs, z, u = (
        BlockColumns.create(f"{folder}/solve.zarr", name, operator.grid, dataset.num_targets, dtype)
        for name, dtype in (("rhs", "float64"), ("z", factor.dtype.name), ("u", factor.dtype.name))
    )
    if kind == "residual":
        return functools.partial(compute_part, residual_task(operator, f"{folder}/scratch", u), 1)
    sweep, blocks = (FORWARD, z) if kind == "forward" else (BACKWARD, u)
    blocks.array.delete(index)
    # as many steps as row blocks: a task is one block of the result
    side = operator.grid.num_tiles
    step = index[0] if sweep == FORWARD else side - 1 - index[0]
    return functools.partial(sweep_task, Sweeps(factor, rhs, z, u, side), sweep, index[1], step, step)


def residual_task(operator: RidgeOperator, scratch: str, u: BlockColumns) -> Pass:
    """The product of two super-blocks; the first panel of the solutions waits in the scratch."""
    workspace = Workspace(scratch, None)  # type: ignore[arg-type]  # tasks of workers, which are not here
    product = OperatorProduct(operator, workspace, scratch, num_blocks=2)
    blocks = product.blocks
    v = u.whole(0)[:, : panel_width(blocks.tile_size, u.num_columns)]
    found = Pass(
        "residual",
        functools.partial(product.multiply_pair, False),
        product.explain,
        [1.0] * 3,
        (2 * blocks.tile_size, v.shape[1]),
        operands={"v": [np.ascontiguousarray(v[blocks.span(i)]) for i in range(2)]},
        workspace=workspace,
        store=scratch,
    )
    found.unwritten.pop().write()
    return found


def load_compiled_code() -> None:
    """Products load Numba once a process, about 100 MiB: a part of the baseline, not of a task."""
    rows, column = np.random.default_rng(0).standard_normal((1024, 3)), np.ones((1024, 1))
    kernel = make_kernel("matern", kernel_params={"nu": 1.5, "length_scale": 1.0}).resolve(3)
    for u in (None, column):
        sums = np.zeros_like(column)
        kernel_product(kernel, rows, rows, column, sums, u=u, out_t=None if u is None else sums.copy(), same=u is None)


def run_task_alone(
    *, kind: str, index: list[int], folder: str, tile_size: int, tiny_folder: str, tiny_tile_size: int
) -> dict[str, Any]:
    """Peak of the process in bytes, and how far it rose above what was resident before the task."""
    if kind in ("residual", "predict"):
        load_compiled_code()
    task_of(kind, tiny_folder, tiny_tile_size, tuple(index))()
    task = task_of(kind, folder, tile_size, tuple(index))
    reset_peak()
    before, _ = resident_bytes()
    outcome = task()
    _, peak = resident_bytes()
    if kind == "partial sum":  # its tile is missing now, and other tasks read it
        for used, edge in ((tiny_folder, tiny_tile_size), (folder, tile_size)):
            task_of("factor", used, edge, tuple(index))()
    written = bool(outcome[0] if isinstance(outcome, tuple) else outcome)
    return {"before_bytes": before, "peak_bytes": peak, "rise_bytes": peak - before, "computed": written}
