"""Panels: a low-rank factor F (n, r) on disk, in panels of columns and chunks of rows.

    F[:, p] = (S K S[:, S_p] - sum_{q<p} F[:, q] F[S_p, q]^T) L_p^-T,   L_p L_p^T = (S K S - F F^T)[S_p, S_p]

Below one location, all of them raw checksummed chunks:

    pivots-0007     panel 7's pivots S_p: row number, root of the weight, features, rows of F up to and with L_p
    panel-0007      F[:, p] in row chunks
    diagonal-0007   diag(S K S - F F^T) before panel 7, in row chunks (0000 is the diagonal of S K S)
    gram            F^T F

A task makes one row chunk of one panel, and from it the next diagonal. Row chunks are cut by n and r alone.

The tasks that write a low-rank factor: the diagonal of S K S, a row chunk of a panel, F^T F over a group of chunks.

A task makes its chunk from the kernel and the pivots (or from the tiles of a given matrix) and from the same rows of
the panels before. It never reads rows of another chunk, and what it writes depends on nothing but its indices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dkrr.errors import DamagedChunkError, DataError
from dkrr.kernels.base import mirror
from dkrr.linalg.blocks import Floats, Indices
from dkrr.linalg.lowrank.rpcholesky import block_size
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.passes import Operands, made
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer, gemm_nt, is_finite, syrk_tn, trsm_right

CHUNK_BYTES = 128 << 20

MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 256, 16_384

NUM_CHUNKS = 8

MAX_GROUPS = 16


def row_chunks(n: int, rank: int) -> TileGrid:
    """Row chunks of F: n / 8 rows in 256 .. 16,384, and at most 128 MiB of all its columns."""
    rows = max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, -(-n // NUM_CHUNKS), CHUNK_BYTES // (8 * rank)))
    return TileGrid(n, min(-(-rows // MIN_CHUNK_ROWS) * MIN_CHUNK_ROWS, MAX_CHUNK_ROWS))


@dataclass(frozen=True)
class Pivots:
    """The pivots of a panel, and all that a task needs of them.

    Parameters
    ----------
    index : (k,)
        Row numbers.
    root : (k,)
        Square roots of their weights.
    x : (k, d)
        Their features, centred; (k, 0) for a given matrix.
    lower : (k, first + k)
        Their rows of F; the last k columns are L_p.
    """

    index: Indices
    root: Floats
    x: Floats
    lower: Floats

    def __len__(self) -> int:
        return len(self.index)

    def to_block(self) -> Floats:
        """One (k, 2 + d + first + k) block."""
        return np.hstack([self.index[:, None].astype(np.float64), self.root[:, None], self.x, self.lower])

    @classmethod
    def from_block(cls, block: Any, num_features: int) -> Pivots:
        """Inverse of :meth:`to_block`."""
        block, end = np.array(block), 2 + num_features
        x, lower = np.ascontiguousarray(block[:, 2:end]), np.ascontiguousarray(block[:, end:])
        return cls(block[:, 0].astype(np.int64), block[:, 1].copy(), x, lower)


@dataclass(frozen=True)
class Panels:
    """Where the arrays are; ``widths`` are those of the panels that exist or are being made."""

    location: str
    grid: TileGrid
    widths: tuple[int, ...] = ()

    @property
    def num_panels(self) -> int:
        return len(self.widths)

    @property
    def rank(self) -> int:
        """Columns of all panels."""
        return sum(self.widths)

    def first(self, p: int) -> int:
        """First column of panel p."""
        return sum(self.widths[:p])

    def with_panel(self, width: int) -> Panels:
        """One panel more."""
        return replace(self, widths=(*self.widths, width))

    def panel(self, p: int) -> ChunkArray:
        return self._array(f"panel-{p:04d}", self.widths[p])

    def diagonal(self, p: int) -> ChunkArray:
        """The residual diagonal (n, 1) before panel p."""
        return self._array(f"diagonal-{p:04d}", 1)

    def _array(self, path: str, width: int) -> ChunkArray:
        return ChunkArray(self.location, path, (self.grid.n, width), (self.grid.tile_size, width), "float64")

    def read(self, p: int, c: int, *, verify: bool = True) -> Any:
        """Row chunk c of panel p (rows, k), read-only and mapped: drop it soon."""
        return self.panel(p).read((c, 0), verify=verify)[: self.grid.rows(c)]

    def is_valid(self, p: int, c: int) -> bool:
        """Whether row chunk c of panel p and its diagonal are there."""
        return self.panel(p).is_valid((c, 0)) and self.diagonal(p + 1).is_valid((c, 0))

    def write(self, array: ChunkArray, c: int, block: Any) -> None:
        """Write a row chunk; what is beyond the last row is NaN."""
        if len(block) < array.chunks[0]:
            padded = np.full(array.chunks, np.nan)
            padded[: len(block)] = block
            block = padded
        array.write((c, 0), block)

    def gram(self) -> ChunkArray:
        """F^T F (r, r), one chunk."""
        return ChunkArray(self.location, "gram", (self.rank,) * 2, (self.rank,) * 2, "float64")

    @property
    def num_groups(self) -> int:
        """Tasks of F^T F: one a row chunk, at most 16."""
        return min(MAX_GROUPS, self.grid.num_tiles)

    def group(self, g: int) -> range:
        """Row chunks of group g."""
        chunks = self.grid.num_tiles
        return range(g * chunks // self.num_groups, (g + 1) * chunks // self.num_groups)


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
    array, span = task.panels.diagonal(0), task.grid.span(c)
    if array.is_valid((c, 0)):
        return False
    values = task.operator.diagonal_of(span.start, span.stop)
    task.panels.write(array, c, np.ascontiguousarray(values)[:, None])
    return True


def panel_chunk(task: PanelTask, p: int, c: int) -> bool:
    """Compute and write row chunk c of panel p and of the diagonal after it, unless they are valid.

    Cost: m k kernel entries and m k (2 first + k) flops for a chunk of m rows.
    """
    panels = task.panels
    if panels.is_valid(p, c):
        return False
    panel, rows = panels.panel(p), panels.grid.rows(c)

    def compute() -> Any:
        pivots = task.pivots(p)
        block = buffer("panel", (rows, len(pivots)), np.float64)
        scaled_columns(task, panels.grid.span(c), pivots, block)
        for q in range(p):
            first = panels.first(q)
            left = panels.read(q, c)
            gemm_nt(block, left, pivots.lower[:, first : first + panels.widths[q]])
            del left
        trsm_right(block, pivots.lower[:, panels.first(p) :])
        return block

    def finish(block: Any) -> None:
        before = panels.diagonal(p).read((c, 0))[:rows, 0]
        after = np.maximum(before - np.einsum("ij,ij->i", block, block), 0.0)
        failpoint("precondition.diagonal.before_write")
        panels.write(panels.diagonal(p + 1), c, after[:, None])

    def write(block: Any) -> None:
        panels.write(panel, c, block)
        finish(block)

    if panel.is_valid((c, 0)):
        finish(panels.read(p, c))
        return True
    return made("precondition.panel", compute, write, lambda _: _blame(task, p, c))


def _blame(task: PanelTask, p: int, c: int) -> DataError:
    """The error for a chunk that is not finite, unless one before it is to blame."""
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
    return DataError(
        f"panel {p} of the preconditioner is not finite in rows {task.grid.span(c)}, kernel {task.operator.kernel}",
        hint="scale the features",
    )


def scaled_columns(task: PanelTask, span: slice, pivots: Pivots, out: Any) -> None:
    """(S K S)[span, pivots] (rows, k) into ``out``; that of a pivot with itself is exactly the kernel's diagonal."""
    operator = task.operator
    if operator.kernel is None and operator.gram is not None:
        given_block(operator.gram, np.arange(span.start, span.stop), pivots.index, out)
    else:
        kernel, rows = operator.known()
        kernel.block(rows.read(span.start, span.stop), pivots.x, out)
        inside = np.flatnonzero((pivots.index >= span.start) & (pivots.index < span.stop))
        if len(inside):
            out[pivots.index[inside] - span.start, inside] = kernel.diag(pivots.x[inside])
    root = operator.root_of(span.start, span.stop)
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


def gram_group(task: PanelTask, _: Operands, g: int, total: Floats) -> None:
    """F^T F over the row chunks of group g. r^2 flops a row."""
    panels = task.panels
    for c in panels.group(g):
        mapped = [panels.read(p, c) for p in range(panels.num_panels)]
        for start in range(0, panels.grid.rows(c), STRIP_ROWS):
            syrk_tn(total, np.hstack([panel[start : start + STRIP_ROWS] for panel in mapped]))
        del mapped
    np.negative(total, out=total)
    mirror(total)
