"""A low-rank factor F (n, r) of S K S on disk, in panels of columns and chunks of rows: what it is, and how it is made.

    F[:, p] = (S K S[:, S_p] - sum_{q<p} F[:, q] F[S_p, q]^T) L_p^-T,   L_p L_p^T = (S K S - F F^T)[S_p, S_p]

Below one location, all of them raw checksummed chunks:

    panel-0007-<digest of S_p>/f     F[:, p] in row chunks
    gram                             F^T F

A panel is a :class:`~dkrr.linalg.passes.Pass` whose parts stay: a task makes one row chunk of it from the kernel and
the pivots (or from the tiles of a given matrix) and from the same rows of the panels before. It never reads rows of
another chunk, and what it writes depends on nothing but its indices. Row chunks are cut by n and r alone.

The driver draws the pivots. It holds the residual diagonal d (n,), from which it takes what each chunk explains, the
features of all pivots and their r x r rows of F; the residual of a block of proposals needs nothing else, as
F[S', :] = (S K S)[S', S] L^-T. Proposals are a function of the seed and of d: a build that is interrupted, or opened
again, draws the same pivots, and a valid chunk is never computed again. One that is found damaged is.

Cost
----
n r kernel entries, 2 n r^2 flops (half of them for F^T F), 8 n r bytes on disk; one round of tasks a panel. The driver
holds a few n-vectors and up to four r x r matrices; it reads F once. Of a task see
:func:`low_rank_task_bytes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from dkrr.engine.machine import single_blas_thread
from dkrr.errors import DamagedChunkError, DataError, NumericalError
from dkrr.kernels.base import mirror
from dkrr.linalg.blocks import Floats, Indices
from dkrr.linalg.catalogue import gram_fields, key_of
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.passes import Operands, Pass
from dkrr.linalg.rpcholesky import FLOOR, block_size, next_pivots
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Owners, Workspace, repaired
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, remove_array
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import gemm_nt, syrk_tn, trsm_right

logger = logging.getLogger("dkrr.linalg")

PHASE = "precondition"
CHUNK_BYTES = 128 << 20
MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 256, 16_384
NUM_CHUNKS = 8
# tasks of F^T F
MAX_GROUPS = 16
STRIP_ROWS = 1024


def row_chunks(n: int, rank: int) -> TileGrid:
    """Row chunks of F: n / 8 rows in 256 .. 16,384, and at most 128 MiB of all its columns."""
    rows = max(MIN_CHUNK_ROWS, min(MAX_CHUNK_ROWS, -(-n // NUM_CHUNKS), CHUNK_BYTES // (8 * rank)))
    return TileGrid(n, min(-(-rows // MIN_CHUNK_ROWS) * MIN_CHUNK_ROWS, MAX_CHUNK_ROWS))


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


def low_rank_fields(
    operator: RidgeOperator,
    settings: IterativeSettings,
    rank: int,
    blas: str,
    *,
    weight_digest: str | None = None,
    source_digest: str = "",
) -> dict[str, Any]:
    """What decides the bytes of F: no alpha, and no tile size (except that of a given matrix)."""
    fields = gram_fields(operator, "float64", source_digest)
    if operator.kernel is not None:
        del fields["tile_size"]
    rank = min(rank, operator.grid.n)
    fields["weight_digest"] = weight_digest if operator.weighted else None
    fields |= {"method": settings.preconditioner, "seed": settings.seed, "rank": rank, "blas": blas}
    fields["rows_per_chunk"] = row_chunks(operator.grid.n, rank).tile_size
    return fields


def low_rank_location(store: Any, fields: dict[str, Any]) -> str:
    """``<store>/preconditioners/<key>.zarr``."""
    return place(store, "preconditioners", key_of(fields) + ".zarr")


@dataclass(frozen=True)
class Panels:
    """The matrix, and the panels of F that are there; ``num_features`` is that of a pivot, 0 for a given matrix."""

    operator: RidgeOperator
    location: str
    grid: TileGrid
    num_features: int
    arrays: tuple[ChunkArray, ...] = ()

    @property
    def num_panels(self) -> int:
        return len(self.arrays)

    @property
    def rank(self) -> int:
        """Columns of all panels."""
        return self.first(self.num_panels)

    def first(self, p: int) -> int:
        """First column of panel p."""
        return sum(array.shape[1] for array in self.arrays[:p])

    def read(self, p: int, c: int, *, verify: bool = True) -> Any:
        """Row chunk c of panel p (rows, k), read-only and mapped: drop it soon."""
        return self.arrays[p].read((c, 0), verify=verify)[: self.grid.rows(c)]

    def next_panel(self, operands: Operands, c: int, out: Floats) -> None:
        """Row chunk c of the panel after these; m k kernel entries and m k (2 first + k) flops for m rows.

        The operand are its k pivots, one row of 2 + d + first + k numbers each: row number, root of the weight,
        features (centred; none for a given matrix), and rows of F, the last k columns of which are L_p.
        """
        pivots, end, span = np.array(operands["pivots"].read()), 2 + self.num_features, self.grid.span(c)
        block, lower = out[: self.grid.rows(c)], np.ascontiguousarray(pivots[:, end:])
        operator, index = self.operator, pivots[:, 0].astype(np.int64)
        if operator.kernel is None and operator.gram is not None:
            given_block(operator.gram, np.arange(span.start, span.stop), index, block)
        else:
            (kernel, rows), x = operator.known(), np.ascontiguousarray(pivots[:, 2:end])
            kernel.block(rows.read(span.start, span.stop), x, block)
            inside = np.flatnonzero((index >= span.start) & (index < span.stop))
            if len(inside):  # of a pivot with itself exactly
                block[index[inside] - span.start, inside] = kernel.diag(x[inside])
        root = operator.root_of(span.start, span.stop)
        if root is not None:
            block *= root[:, None]
            block *= pivots[:, 1]
        for q in range(self.num_panels):
            left = self.read(q, c)
            gemm_nt(block, left, lower[:, self.first(q) : self.first(q + 1)])
            del left
        trsm_right(block, lower[:, self.rank :])

    def gram_group(self, num_groups: int, _: Operands, g: int, total: Floats) -> None:
        """F^T F over the row chunks of group g. r^2 flops a row."""
        chunks = self.grid.num_tiles
        for c in range(g * chunks // num_groups, (g + 1) * chunks // num_groups):
            mapped = [self.read(p, c) for p in range(self.num_panels)]
            for start in range(0, self.grid.rows(c), STRIP_ROWS):
                syrk_tn(total, np.hstack([panel[start : start + STRIP_ROWS] for panel in mapped]))
            del mapped
        np.negative(total, out=total)
        mirror(total)


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


class PanelBuild:
    """One build: what is fixed, and what the driver knows so far.

    Parameters
    ----------
    settings
        ``preconditioner`` ("rpcholesky" or "nystrom") and ``seed``.
    rank
        Columns wanted. Fewer are made when the residual becomes zero before.

    Attributes
    ----------
    index : (r,)
        The pivots, in order.
    trace
        ``(rank, trace(S K S - F F^T) / trace(S K S))`` before the first and after each panel.
    """

    def __init__(
        self, operator: RidgeOperator, workspace: Workspace, location: str, settings: IterativeSettings, rank: int
    ) -> None:
        rows = operator.rows
        d = 0 if operator.kernel is None or rows is None else rows.open().num_features
        self.panels = Panels(operator, location, row_chunks(operator.grid.n, rank), d)
        self.workspace, self.settings, self.rank = workspace, settings, rank
        self.pivots: list[Floats] = []
        self.index = np.empty(0, np.int64)
        self.trace: list[tuple[int, float]] = []
        self._lower, self._x, self._root = np.zeros((rank, rank)), np.empty((rank, d)), np.ones(rank)
        self._roots = operator.normal()

    def build(self) -> None:
        """Make panels until the rank is reached or nothing is left."""
        grid = self.panels.grid
        diagonal: Floats = self.panels.operator.diagonal_from(0).astype(np.float64, copy=False)
        floors: Floats = FLOOR * diagonal
        total = float(diagonal.sum())
        self.trace.append((0, 1.0 if total else 0.0))

        def explain(c: int, part: Floats) -> None:
            block, span = part[: grid.rows(c)], grid.span(c)
            diagonal[span] = np.maximum(diagonal[span] - np.einsum("ij,ij->i", block, block), 0.0)

        while self.panels.rank < self.rank:
            p, first = self.panels.num_panels, self.panels.rank
            pivots = self._drawn(p, diagonal, floors)
            if pivots is None:
                logger.info("nothing is left of the matrix at rank %d (%d wanted)", first, self.rank)
                break
            last, end = first + len(pivots), 2 + self.panels.num_features
            self._root[first:last], self._x[first:last] = pivots[:, 1], pivots[:, 2:end]
            self._lower[first:last, :last] = pivots[:, end:]
            self.pivots.append(pivots)
            self.index = np.concatenate([self.index, pivots[:, 0].astype(np.int64)])
            panel = self._panel(p, self.workspace)
            if not all(panel.array.is_valid((c, 0)) for c in range(grid.num_tiles)):
                failpoint("precondition.pivots.before_write")
            panel.consume(explain)
            self.panels = replace(self.panels, arrays=(*self.panels.arrays, panel.array))
            left = diagonal.copy()
            left[self.index] = 0.0
            self.trace.append((last, float(left.sum()) / total if total else 0.0))
        self._lower, self._x = np.empty((0, 0)), np.empty((0, 0))  # only drawing needs them

    def _panel(self, p: int, workspace: Workspace | None) -> Pass:
        """The tasks of panel p, here without a workspace."""
        before, pivots = replace(self.panels, arrays=self.panels.arrays[:p]), self.pivots[p]
        grid, k, d = before.grid, len(pivots), before.num_features
        flops = [float(grid.rows(c) * k * (2 * before.rank + k + 2 * d)) for c in range(grid.num_tiles)]

        def explain(c: int) -> DataError:
            where = f"rows {grid.span(c)}, kernel {before.operator.kernel}"
            return DataError(f"panel {p} of the preconditioner is not finite in {where}", hint="scale the features")

        return Pass(
            PHASE,
            before.next_panel,
            explain,
            flops,
            (grid.tile_size, k),
            operands={"pivots": [pivots]},
            workspace=workspace,
            store=before.location,
            folder=f"panel-{p:04d}-{hashlib.sha256(pivots[:, 0].tobytes()).hexdigest()[:8]}",
            parts="f",
            site="precondition.panel",
            owners=self.owners,
        )

    def gram(self) -> Floats:
        """F^T F (r, r), read or computed by tasks over groups of row chunks and summed in their order."""
        panels, r = self.panels, self.panels.rank
        if not r:  # a matrix of zeros
            return np.zeros((0, 0))
        array = ChunkArray(panels.location, "gram", (r, r), (r, r), "float64")
        with contextlib.suppress(DamagedChunkError):
            return np.array(array.read((0, 0)))
        num_groups = min(MAX_GROUPS, panels.grid.num_tiles)
        total: Floats = Pass(
            PHASE,
            partial(panels.gram_group, num_groups),
            lambda g: NumericalError(f"F^T F of the preconditioner is not finite in group {g}", hint="raise alpha"),
            [float(panels.grid.n) * r**2 / num_groups] * num_groups,
            (r, r),
            operands={},
            workspace=self.workspace,
            store=panels.location,
            folder="gram-parts",
            owners=self.owners,
        ).sum()
        array.write((0, 0), total)
        remove_array(place(panels.location, "gram-parts"))
        return total

    @property
    def owners(self) -> Owners:
        """How a damaged chunk of the factor is made again, in this process."""
        return {array.location: partial(self._again, p) for p, array in enumerate(self.panels.arrays)}

    def _again(self, p: int, index: tuple[int, ...]) -> None:
        panel = self._panel(p, None)
        with single_blas_thread():
            panel.array.write(index, repaired(partial(panel.part, index[0]), self.owners))

    def _drawn(self, p: int, diagonal: Floats, floors: Floats) -> Floats | None:
        """The pivots of panel p; None when nothing is left to draw from."""
        residual = np.where(diagonal > floors, diagonal, 0.0)
        residual[self.index] = 0.0
        limit, is_uniform = self.rank - self.panels.rank, self.settings.preconditioner == "nystrom"
        generators = (np.random.default_rng([self.settings.seed, p, attempt]) for attempt in count())
        with single_blas_thread():
            found = next_pivots(
                residual, floors, generators, block_size(self.rank), limit, self._residual_block, is_uniform=is_uniform
            )
        return None if found is None else np.hstack(found[1:])

    def _residual_block(self, proposals: Indices) -> tuple[Floats, Floats]:
        """(S K S - F F^T)[S', S'] of the proposals S'; their numbers, roots of weights, features and F[S', :]."""
        first, operator, b = self.panels.rank, self.panels.operator, len(proposals)
        root = self._roots[proposals]
        x, h, known = np.empty((b, 0)), np.empty((b, b)), np.empty((b, first))
        if operator.kernel is None and operator.gram is not None:
            block = np.empty((b, b + first))
            given_block(operator.gram, proposals, np.concatenate([proposals, self.index]), block)
            h[...], known[...] = block[:, :b], block[:, b:]
        else:
            kernel, rows = operator.known()
            x = rows.take(proposals, operator.grid.n)
            kernel.block(x, x, h, same=True)
            if first:
                kernel.block(x, self._x[:first], known)
        h *= root[:, None]
        h *= root
        if first:
            known *= root[:, None]
            known *= self._root[:first]
            trsm_right(known, self._lower[:first, :first])
            gemm_nt(h, known, known)
        return h, np.hstack([proposals[:, None].astype(np.float64), root[:, None], x, known])
