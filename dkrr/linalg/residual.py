"""The true residual R = S Y - A u, evaluated in float64 from the kernel and the rows, never from stored tiles.

(Only for a precomputed matrix, which has no kernel, the given matrix is read.) It is independent of everything the
factorisation stored, so a wrong tile that passed its checksum shows here.

Cost
----
n^2 kernel entries and 2 n^2 t flops; one task a row block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.chunks import FloatArray
from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.triangular import BlockColumns
from dkrr.tiles import TileGrid

__all__ = ["ResidualNorms", "ResidualTask", "residual_norms"]


@dataclass(frozen=True)
class ResidualTask:
    """Which system, which right-hand sides, which solution."""

    operator: RidgeOperator
    rhs: BlockColumns
    solution: BlockColumns

    @property
    def grid(self) -> TileGrid:
        return self.operator.grid


@dataclass(frozen=True)
class ResidualNorms:
    """Norms per target that the two numbers of a :class:`Solution` are made of."""

    relative_residual: list[float]
    backward_error: list[float]
    summary: RunSummary


def residual_block(task: ResidualTask, i: int) -> tuple[bool, dict[str, Any]]:
    """Sums and maxima over row block i."""
    tile_size = task.grid.tile_size

    def read(start: int, stop: int) -> Any:
        return task.solution.read_rows(start // tile_size).astype(np.float64, copy=False)

    rhs = task.rhs.read_rows(i).astype(np.float64, copy=False)
    product, row_sums = task.operator.matmul_rows(i, read, task.rhs.num_columns)
    return True, block_norms(rhs - product, rhs, read(task.grid.span(i).start, 0), row_sums)


def block_norms(residual: FloatArray, rhs: FloatArray, solution: FloatArray, row_sums: FloatArray) -> dict[str, Any]:
    return {
        "residual_squares": np.square(residual).sum(axis=0),
        "rhs_squares": np.square(rhs).sum(axis=0),
        "residual_max": np.abs(residual).max(axis=0),
        "rhs_max": np.abs(rhs).max(axis=0),
        "solution_max": np.abs(solution).max(axis=0),
        "matrix_norm": row_sums.max(keepdims=True),
    }


def combine_norms(parts: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Relative residual and backward error per target from the norms of all row blocks, in order."""

    def total(name: str) -> Any:
        return np.sum([part[name] for part in parts], axis=0)

    def largest(name: str) -> Any:
        return np.max([part[name] for part in parts], axis=0)

    rhs = np.sqrt(total("rhs_squares"))
    residual = np.sqrt(total("residual_squares"))
    bound = largest("matrix_norm") * largest("solution_max") + largest("rhs_max")
    error = largest("residual_max")
    relative = np.divide(residual, rhs, out=np.zeros_like(residual), where=rhs > 0)
    relative = np.where((rhs == 0) & (residual > 0), np.inf, relative)
    backward = np.divide(error, bound, out=np.zeros_like(error), where=bound > 0)
    return relative.tolist(), backward.tolist()


def residual_norms(task: ResidualTask, executor: Executor, progress: Progress | None = None) -> ResidualNorms:
    """Evaluate the residual of every target."""
    grid = task.grid
    flops = 2.0 * grid.n * grid.tile_size * task.rhs.num_columns
    nodes = [Node((i,), (), flops) for i in range(grid.num_tiles)]
    summary = executor.run("residual", residual_block, task, nodes, progress)
    relative, backward = combine_norms([summary.values[node.key] for node in nodes])
    return ResidualNorms(relative, backward, summary)
