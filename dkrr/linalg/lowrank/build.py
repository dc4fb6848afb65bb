"""Building F panel by panel: the driver draws the pivots, tasks compute the columns.

The driver holds the residual diagonal d (n,), the features of all pivots and their r x r rows of F; the residual of a
block of proposals needs nothing else, as F[S', :] = (S K S)[S', S] L^-T. Proposals are a function of the seed and of d,
and the pivots of a panel are stored before its tasks start: a build that is interrupted goes on with the same pivots,
and a valid chunk is never computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import Node
from dkrr.errors import DamagedChunkError, NumericalError, StoreError
from dkrr.linalg.blocks import Floats
from dkrr.linalg.lowrank.panels import Panels, PanelTask, Pivots, given_block, gram_group, panel_chunk, start_diagonal
from dkrr.linalg.lowrank.rpcholesky import FLOOR, accept, block_size, draw_uniform, draw_weighted
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.passes import Owners, Pass, repaired, run_tasks
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, read_json, remove_array
from dkrr.threads import single_blas_thread
from dkrr.tiles.blas import gemm_nt, trsm_right

logger = logging.getLogger("dkrr.linalg")

PHASE = "precondition"


@dataclass
class PanelBuild:
    """One build: what is fixed, and what the driver knows so far."""

    operator: RidgeOperator
    workspace: Workspace
    panels: Panels
    method: Literal["rpcholesky", "nystrom"]
    rank: int
    seed: int
    trace: list[tuple[int, float]] = field(default_factory=list)
    pivots: list[Pivots] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = self.operator.rows
        self.num_features = 0 if self.operator.kernel is None or rows is None else rows.open().num_features
        self._lower = np.zeros((self.rank, self.rank))
        self._x = np.empty((self.rank, self.num_features))
        self._root = np.ones(self.rank)
        self._roots = self.operator.normal()

    @property
    def task(self) -> PanelTask:
        return PanelTask(self.operator, self.panels, self.num_features)

    @property
    def index(self) -> NDArray[np.int64]:
        """All pivots, in order."""
        return np.concatenate([np.empty(0, np.int64), *(panel.index for panel in self.pivots)])

    def build(self) -> None:
        """Make panels until the rank is reached or nothing is left, then F^T F.

        Cost
        ----
        n r kernel entries, 2 n r^2 flops (half of them for F^T F), 8 n r bytes; one round of tasks a panel.
        """
        chunks = range(self.panels.grid.num_tiles)
        array = self.panels.diagonal(0)
        ChunkArray.create(array.store, array.path, shape=array.shape, chunks=array.chunks)
        self._run(start_diagonal, [Node((c,), (), 1.0) for c in chunks if not array.is_valid((c, 0))])
        start = self._diagonal(0)
        floors = FLOOR * start
        total = float(start.sum())
        residual = start
        self.trace.append((0, 1.0 if total else 0.0))
        while self.panels.rank < self.rank:
            p = self.panels.num_panels
            residual = np.where(residual > floors, residual, 0.0)
            residual[self.index] = 0.0
            found = self._stored_pivots(p)
            pivots = self._draw(p, residual, floors) if found is None else found
            if pivots is None:
                logger.info("nothing is left of the matrix at rank %d (%d wanted)", self.panels.rank, self.rank)
                break
            self._take(p, pivots)
            self._run(panel_chunk, [self._node(p, c) for c in chunks if not self.panels.is_valid(p, c)])
            residual = self._diagonal(p + 1)
            left = residual.copy()
            left[self.index] = 0.0
            self.trace.append((self.panels.rank, float(left.sum()) / total if total else 0.0))
        self._lower, self._x = np.empty((0, 0)), np.empty((0, 0))  # only drawing needs them

    def gram(self) -> Floats:
        """F^T F (r, r), read or computed by tasks over groups of row chunks and summed in their order."""
        panels, work = self.panels, self.workspace
        if not panels.rank:  # a matrix of zeros
            return np.zeros((0, 0))
        array = panels.gram()
        try:
            return np.array(array.read((0, 0)))
        except DamagedChunkError:
            array.delete((0, 0))
        total: Floats = Pass(
            PHASE,
            partial(gram_group, self.task),
            lambda g: NumericalError(f"F^T F of the preconditioner is not finite in group {g}", hint="raise alpha"),
            [float(panels.grid.n) * panels.rank**2 / panels.num_groups] * panels.num_groups,
            (panels.rank, panels.rank),
            operands={},
            workspace=work,
            store=panels.location,
            folder="gram-parts",
            owners=self.owners,
        ).sum()
        ChunkArray.create(array.store, array.path, shape=array.shape, chunks=array.chunks)
        array.write((0, 0), total)
        remove_array(place(panels.location, "gram-parts"))
        return total

    @property
    def owners(self) -> Owners:
        """How a damaged chunk of the factor is made again."""
        panels = self.panels
        made: dict[str, Any] = {panels.diagonal(0).location: partial(self._diagonal_again, 0)}
        for p in range(panels.num_panels):
            made[place(panels.location, f"pivots-{p:04d}")] = partial(self._pivots_again, p)
            made[panels.panel(p).location] = partial(self._panel_again, p)
            made[panels.diagonal(p + 1).location] = partial(self._diagonal_again, p + 1)
        return made

    def _pivots_again(self, p: int, _: tuple[int, ...]) -> None:
        self._store_pivots(p, self.pivots[p])

    def _panel_again(self, p: int, index: tuple[int, ...]) -> None:
        self.panels.panel(p).delete(index)
        self._run(panel_chunk, [self._node(p, index[0])])

    def _diagonal_again(self, p: int, index: tuple[int, ...]) -> None:
        self.panels.diagonal(p).delete(index)
        if p:
            self._run(panel_chunk, [self._node(p - 1, index[0])])
        else:
            self._run(start_diagonal, [Node((index[0],), (), 1.0)])

    def mended(self, read: Callable[[], Any]) -> Any:
        """What ``read()`` gives, once whatever of the factor it finds damaged has been made again.

        Raises
        ------
        StoreError
            It is damaged again and again.
        """
        return repaired(read, self.owners)

    def _node(self, p: int, c: int) -> Node:
        width = self.panels.widths[p]
        flops = float(self.panels.grid.rows(c) * width * (2 * self.panels.first(p) + width + 2 * self.num_features))
        return Node((p, c), (), flops)

    def _run(self, function: Any, nodes: list[Node]) -> None:
        """Run tasks; whatever of the factor they find damaged is computed again first."""
        work = self.workspace
        if nodes:
            summary = run_tasks(work.executor, PHASE, function, self.task, nodes, work.progress, owners=self.owners)
            work.record(PHASE, summary)

    def _diagonal(self, p: int) -> Floats:
        """The residual diagonal before panel p (n,)."""
        array, chunks = self.panels.diagonal(p), range(self.panels.grid.num_tiles)
        parts = [self.mended(partial(array.read, (c, 0)))[: self.panels.grid.rows(c), 0] for c in chunks]
        return np.concatenate(parts)

    def _draw(self, p: int, residual: Floats, floors: Floats) -> Pivots | None:
        """The pivots of panel p; None when nothing is left to draw from."""
        residual = residual.copy()
        for attempt in range(self.panels.grid.n):
            if not residual.any():
                return None
            generator = np.random.default_rng([self.seed, p, attempt])
            first, limit = self.panels.rank, self.rank - self.panels.rank
            size = block_size(self.rank)
            draws: Floats | None = None
            if self.method == "rpcholesky":
                proposals = draw_weighted(residual, size, generator)
                draws = generator.random(size)
            else:
                proposals = draw_uniform(residual, min(size, limit), generator)
            with single_blas_thread():
                candidates, h = self._residual_block(proposals)
                taken, lower = accept(h, proposals, floors[proposals], draws, limit)
            if len(taken):
                known = candidates.lower[taken, :first]
                return Pivots(proposals[taken], candidates.root[taken], candidates.x[taken], np.hstack([known, lower]))
            residual[proposals] = 0.0  # evaluated anew, all of them are rounding
        return None

    def _residual_block(self, proposals: NDArray[np.int64]) -> tuple[Pivots, Floats]:
        """Features, weights and F[S', :] of the proposals S', and (S K S - F F^T)[S', S']."""
        first, operator, b = self.panels.rank, self.operator, len(proposals)
        root = self._roots[proposals]
        h, known = np.empty((b, b)), np.empty((b, first))
        if operator.kernel is None and operator.gram is not None:
            x = np.empty((b, 0))
            columns = np.concatenate([proposals, self.index])
            block = np.empty((b, len(columns)))
            given_block(operator.gram, proposals, columns, block)
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
        return Pivots(proposals, root, x, known), h

    def _take(self, p: int, pivots: Pivots) -> None:
        """Add panel p with its pivots; they are stored before any task starts."""
        first, last = self.panels.rank, self.panels.rank + len(pivots)
        self.panels = self.panels.with_panel(len(pivots))
        self.pivots.append(pivots)
        self._lower[first:last, :last] = pivots.lower
        self._x[first:last], self._root[first:last] = pivots.x, pivots.root
        self._store_pivots(p, pivots)

    def _store_pivots(self, p: int, pivots: Pivots) -> None:
        location, name = self.panels.location, f"pivots-{p:04d}"
        block = np.ascontiguousarray(pivots.to_block())
        array = ChunkArray.create(location, name, shape=block.shape, chunks=block.shape)
        for made in (self.panels.panel(p), self.panels.diagonal(p + 1)):
            ChunkArray.create(location, made.path, shape=made.shape, chunks=made.chunks)
        try:
            if np.array_equal(array.read((0, 0)), block):
                return
        except DamagedChunkError:
            pass  # not there yet, or found damaged by a task
        failpoint("precondition.pivots.before_write")
        array.write((0, 0), block)

    def _stored_pivots(self, p: int) -> Pivots | None:
        """The pivots an earlier build chose for panel p. Panels that rest on lost ones are removed."""
        location, first = self.panels.location, sum(self.panels.widths[:p])
        try:
            array = ChunkArray.open(location, f"pivots-{p:04d}")
            block = array.read((0, 0))
            if array.shape != array.chunks or block.shape[1] != 2 + self.num_features + first + len(block):
                raise StoreError(f"{array.location} has shape {array.shape}")
            return Pivots.from_block(block, self.num_features)
        except StoreError:
            self._forget(p)
            return None

    def _forget(self, p: int) -> None:
        """Remove panel p and all that follow, and F^T F."""
        location, q = self.panels.location, p
        names = ["gram", "gram-parts"]
        while any(read_json(location, f"{kind}-{q:04d}/zarr.json") for kind in ("pivots", "panel")):
            names += [f"pivots-{q:04d}", f"panel-{q:04d}", f"diagonal-{q + 1:04d}"]
            q += 1
        for name in names:
            remove_array(place(location, name))
