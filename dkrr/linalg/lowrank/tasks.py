"""The tasks that write a low-rank factor: the diagonal of S K S, a row chunk of a panel, F^T F over a group of chunks.

A task makes its chunk from the kernel and the pivots (or from the tiles of a given matrix) and from the same rows of
the panels before. It never reads rows of another chunk, and what it writes depends on nothing but its indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DamagedChunkError, DataError
from dkrr.kernels.base import mirror
from dkrr.linalg.lowrank.panels import Panels, Pivots, row_chunks
from dkrr.linalg.lowrank.rpcholesky import block_size
from dkrr.linalg.operators import RidgeOperator
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, is_finite, syrk_tn, trsm_right

__all__ = [
    "PanelTask",
    "given_block",
    "gram_group",
    "low_rank_task_bytes",
    "panel_bytes",
    "panel_chunk",
    "start_diagonal",
]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

STRIP_ROWS = 1024


@dataclass(frozen=True)
class PanelTask:
    """The matrix, the factor, and the features of a pivot."""

    operator: RidgeOperator
    panels: Panels
    num_features: int

    @property
    def grid(self) -> TileGrid:
        return self.panels.grid

    def pivots(self, p: int) -> Pivots:
        """The pivots of panel p, as the driver wrote them."""
        width = 2 + self.num_features + self.panels.first(p + 1)
        shape = (self.panels.widths[p], width)
        array = ChunkArray(self.panels.location, f"pivots-{p:04d}", shape, shape, "float64")
        return Pivots.from_block(array.read((0, 0)), self.num_features)

    def root_weight(self, span: slice) -> Floats | None:
        """Square roots of the weights of some rows, None without weights."""
        if not self.operator.weighted or self.operator.rows is None:
            return None
        return self.operator.rows.root_weight(span.start, span.stop)


def panel_bytes(n: int, rank: int) -> int:
    """A row chunk of a panel of F."""
    rank = min(rank, n)
    return 8 * min(n, row_chunks(n, rank).tile_size) * min(rank, block_size(rank))


def low_rank_task_bytes(n: int, rank: int, num_features: int) -> int:
    """Memory of a task besides the baseline, for R rows a chunk and panels of k columns: the larger of

    8 (4 R k + k (r + 2 d) + 2 R d)      a panel: its chunk, a copy while it is solved and padded, one chunk before
    8 (R r + r^2 + 1,024 r)              F^T F: a chunk of F mapped, the sum, a strip
    """
    rank = min(rank, n)
    m, k = min(n, row_chunks(n, rank).tile_size), min(rank, block_size(rank))
    panel = 4 * m * k + k * (rank + 2 * num_features) + 2 * m * num_features
    return 8 * max(panel, m * rank + rank**2 + STRIP_ROWS * rank)


def start_diagonal(task: PanelTask, c: int) -> bool:
    """Write row chunk c of diag(S K S) unless it is valid."""
    array = task.panels.diagonal(0)
    if array.is_valid((c, 0)):
        return False
    operator, span = task.operator, task.grid.span(c)
    if operator.kernel is not None:
        assert operator.rows is not None  # noqa: S101  (narrows the type)
        values = operator.kernel.diag(operator.rows.read(span.start, span.stop))
    else:
        assert operator.gram is not None  # noqa: S101
        index = np.arange(span.start, span.stop)
        values = given_diagonal(operator.gram, index)
    root = task.root_weight(span)
    if root is not None:
        values = np.square(root) * values
    task.panels.write(array, c, np.ascontiguousarray(values)[:, None])
    return True


def panel_chunk(task: PanelTask, p: int, c: int) -> bool:
    """Compute and write row chunk c of panel p and of the diagonal after it, unless they are valid.

    Cost: m k kernel entries and m k (2 first + k) flops for a chunk of m rows.
    """
    panels = task.panels
    if panels.is_valid(p, c):
        return False
    failpoint("precondition.panel.before_read")
    panel, rows = panels.panel(p), panels.grid.rows(c)
    pivots = task.pivots(p)
    if panel.is_valid((c, 0)):
        block = panels.read(p, c)
    else:
        block = buffer("panel", (rows, len(pivots)), np.float64)
        scaled_columns(task, panels.grid.span(c), pivots, block)
        for q in range(p):
            first = panels.first(q)
            left = panels.read(q, c)
            gemm_nt(block, left, pivots.lower[:, first : first + panels.widths[q]])
            del left
        trsm_right(block, pivots.lower[:, panels.first(p) :])
        failpoint("precondition.panel.after_compute", block)
        if not is_finite(block):
            _blame(task, p, c)
        panels.write(panel, c, block)
    before = panels.diagonal(p).read((c, 0))[:rows, 0]
    after = np.maximum(before - np.einsum("ij,ij->i", block, block), 0.0)
    failpoint("precondition.diagonal.before_write")
    panels.write(panels.diagonal(p + 1), c, after[:, None])
    failpoint("precondition.panel.after_write")
    return True


def _blame(task: PanelTask, p: int, c: int) -> None:
    for q in range(p):
        if not is_finite(task.panels.read(q, c)):
            array = task.panels.panel(q)
            raise DamagedChunkError(
                f"chunk ({c}, 0) of {array.location} is damaged (holds a value that is not finite)",
                hint="delete it and start the job again",
                path=array.location,
                index=(c, 0),
                reason="holds a value that is not finite",
            )
    raise DataError(
        f"panel {p} of the preconditioner is not finite in rows {task.grid.span(c)}, kernel {task.operator.kernel}",
        hint="scale the features",
    )


def scaled_columns(task: PanelTask, span: slice, pivots: Pivots, out: Any) -> None:
    """(S K S)[span, pivots] (rows, k) into ``out``; that of a pivot with itself is exactly the kernel's diagonal."""
    operator = task.operator
    if operator.kernel is None:
        assert operator.gram is not None  # noqa: S101  (narrows the type)
        given_block(operator.gram, np.arange(span.start, span.stop), pivots.index, out)
    else:
        assert operator.rows is not None  # noqa: S101
        operator.kernel.block(operator.rows.read(span.start, span.stop), pivots.x, out)
        inside = np.flatnonzero((pivots.index >= span.start) & (pivots.index < span.stop))
        if len(inside):
            out[pivots.index[inside] - span.start, inside] = operator.kernel.diag(pivots.x[inside])
    root = task.root_weight(span)
    if root is not None:
        out *= root[:, None]
        out *= pivots.root


def given_block(gram: TileMatrix, rows: Indices, columns: Indices, out: Any) -> None:
    """K[rows, columns] of a matrix in lower tiles, into ``out``; every tile that is met is read once, and verified."""
    b = gram.grid.tile_size
    row_tiles, column_tiles = rows // b, columns // b
    for i in np.unique(row_tiles):
        for j in np.unique(column_tiles):
            p, q = np.flatnonzero(row_tiles == i), np.flatnonzero(column_tiles == j)
            if i >= j:
                part = gram.read(int(i), int(j))[np.ix_(rows[p] - i * b, columns[q] - j * b)]
            else:
                part = gram.read(int(j), int(i))[np.ix_(columns[q] - j * b, rows[p] - i * b)].T
            out[np.ix_(p, q)] = part


def given_diagonal(gram: TileMatrix, rows: Indices) -> Floats:
    """K[i, i] for consecutive rows of a matrix in lower tiles."""
    values = np.empty(len(rows))
    tiles = rows // gram.grid.tile_size
    for i in np.unique(tiles):
        inside = tiles == i
        values[inside] = gram.read(int(i), int(i)).diagonal()[rows[inside] - i * gram.grid.tile_size]
    return values


def gram_group(task: PanelTask, g: int) -> bool:
    """Write F^T F over the row chunks of group g unless it is valid. r^2 flops a row; one r x r matrix in memory."""
    panels = task.panels
    parts = panels.gram_parts()
    if parts.is_valid((g, 0)):
        return False
    total = np.zeros((panels.rank, panels.rank))
    for c in panels.group(g):
        mapped = [panels.read(p, c) for p in range(panels.num_panels)]
        for start in range(0, panels.grid.rows(c), STRIP_ROWS):
            syrk_tn(total, np.hstack([panel[start : start + STRIP_ROWS] for panel in mapped]))
        del mapped
    np.negative(total, out=total)
    mirror(total)
    parts.write((g, 0), total)
    return True
