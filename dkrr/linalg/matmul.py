"""V -> S K S V on the workers, for V (n, t) in the driver's memory.

The n rows are cut into S super-blocks; one task a pair (I, J), I >= J, evaluates the entries of K[I, J] once and uses
them for the rows of I and for those of J. V goes to the tasks and the two partial results come back as whole chunks in
the store; the driver adds them up in a fixed order while tasks still run, and removes them. The partition depends on
n, d and the kernel, not on the workers, so the sums are the same bits on any number of them.

Cost
----
n^2 / 2 kernel entries and 2 n^2 t flops. S (S + 1) / 2 tasks a panel of columns. Through the store: n t numbers one way
and S n t the other, of which few are there at once. The driver holds V, S V when weighted, and the result. Memory of a
task: :func:`product_task_bytes`.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import InProcessExecutor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, NumericalError
from dkrr.linalg.exchange import Exchange, Layout, MemoryExchange, StoreExchange
from dkrr.linalg.gram import repair_gram_tile
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.pairs import BAND_BYTES, BLOCK_ROWS, STRIP_ROWS, Entries, Pair, StoredEntries, is_nonnegative
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.workspace import Workspace
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, remove_array
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import is_finite

__all__ = ["MultiplyTask", "OperatorProduct", "multiply_pair", "product_task_bytes"]

logger = logging.getLogger("dkrr.linalg")

# A panel of columns: a block of V in it, and each half of a partial result, takes at most this.
PANEL_BYTES = 16 << 20
MAX_PANEL_COLUMNS = 256

FloatMatrix = NDArray[np.float64]


def panel_width(block_rows: int, num_columns: int) -> int:
    """Columns of a panel: at most 256 and 16 MiB a super-block, all panels of about the same width."""
    most = max(1, min(MAX_PANEL_COLUMNS, PANEL_BYTES // (8 * block_rows)))
    return -(-num_columns // -(-num_columns // most))


def product_task_bytes(block_rows: int, num_columns: int, num_features: int, *, compiled: bool = False) -> int:
    """Memory of a task besides the baseline: 4 B w 8 + 2 max(16 MiB, 6,144 d 8) + 4 (256 + d) 6,144 8 bytes.

    V_I, V_J and both results with w columns of a panel and B rows; a band of the rows of I and of J; a strip and the
    operands of a block of 6,144 x 6,144 entries, each in two copies. Compiled code has no strip; it packs the columns,
    of V too.
    """
    width = panel_width(block_rows, num_columns)
    rows = min(block_rows, BLOCK_ROWS)
    band = min(max(BAND_BYTES, 8 * BLOCK_ROWS * num_features), 8 * block_rows * num_features)
    beside = width if compiled else STRIP_ROWS
    return 8 * (4 * block_rows * width + 4 * rows * (beside + num_features)) + 2 * band


@dataclass(frozen=True)
class MultiplyTask:
    """Where entries come from, and how vectors travel. ``grid`` is the operator's, for messages."""

    entries: Entries
    exchange: Exchange
    grid: TileGrid
    precision: Literal["float64", "float32"] = "float64"
    absolute_last: bool = False


def multiply_pair(task: MultiplyTask, i: int, j: int, panel: int) -> bool:
    """Compute and hand over K[I, J] V_J and K[I, J]^T V_I unless they are there; whether they were computed."""
    exchange, layout = task.exchange, task.exchange.layout
    key = (i, j, panel)
    if exchange.has(key):
        return False
    failpoint("multiply.pair.before_read")
    columns = exchange.vector(j, panel)
    part = layout.room(key)
    out_rows, out_columns = layout.halves(key, part)
    pair = Pair(
        rows=layout.blocks.span(i),
        columns=layout.blocks.span(j),
        v_rows=columns if i == j else exchange.vector(i, panel),
        v_columns=columns,
        out_rows=out_rows,
        out_columns=out_columns,
        precision=task.precision,
        absolute_last=task.absolute_last and panel == len(layout.panels) - 1,
    )
    task.entries.multiply(pair)
    failpoint("multiply.pair.after_compute", part)
    if not is_finite(part):
        task.entries.explain(pair)
    exchange.put(key, part)
    failpoint("multiply.pair.after_write")
    return True


class OperatorProduct:
    """The product with S K S (without alpha); a context manager that removes its scratch files.

    Parameters
    ----------
    operator, workspace
        The matrix, and who runs the tasks.
    scratch
        Folder, URL or store below which vectors and partial sums pass; a folder of this object's own is made there and
        removed at the end. Not touched when tasks run in this process.
    precision
        Of the kernel entries; sums are float64.
    use_gram
        Read stored Gram tiles of a kernel where the operator has them, instead of evaluating it.
    num_blocks
        S; None derives it from n, d and the kernel.
    phase
        Name under which progress and figures are reported.
    progress
        "workspace" reports to the workspace's callback; a callback of your own, or None.

    Notes
    -----
    A block of V or a partial result that is damaged in the scratch is written or computed again, a Gram tile of a
    kernel as well; a damaged tile of a given matrix raises ``DamagedChunkError``.
    """

    def __init__(
        self,
        operator: RidgeOperator,
        workspace: Workspace,
        scratch: Any,
        *,
        precision: Literal["float64", "float32"] = "float64",
        use_gram: bool = False,
        num_blocks: int | None = None,
        phase: str = "multiply",
        progress: Progress | Literal["workspace"] | None = "workspace",
    ) -> None:
        self.operator, self.workspace, self.scratch, self.precision = operator, workspace, scratch, precision
        self.use_gram, self.phase = use_gram, phase
        self.progress = workspace.progress if progress == "workspace" else progress
        self.entries = operator.entries(use_gram=use_gram)
        self.blocks = operator.super_blocks(use_gram=use_gram, num_blocks=num_blocks)
        self.root = operator.root_weights()
        self.num_products = 0
        self.row_sums: FloatMatrix | None = None
        # an earlier run that was killed may have workers that still write for it
        self.folder = f"product-{uuid.uuid4().hex}"
        self.in_memory = isinstance(workspace.executor, InProcessExecutor)

    @property
    def reads_tiles(self) -> bool:
        """Whether entries are read from tiles instead of being evaluated."""
        return isinstance(self.entries, StoredEntries)

    def __enter__(self) -> OperatorProduct:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.in_memory:
            remove_array(place(self.scratch, self.folder))

    def __call__(self, v: FloatMatrix) -> FloatMatrix:
        """S K S V (n, t) float64; the order of every sum depends on n and the settings only.

        Raises
        ------
        NumericalError
            V is not finite.
        DataError
            The kernel is not finite.
        """
        return self._multiply(v, absolute_last=False)

    def with_row_sums(self, v: FloatMatrix) -> tuple[FloatMatrix, FloatMatrix]:
        """S K S V (n, t), and sum_q |(S K S)_pq| (n,) from the same pass over the entries."""
        columns = np.hstack([v, np.ones((len(v), 1))])
        absolute = self.reads_tiles or not is_nonnegative(self.operator.kernel)
        product = self._multiply(columns, absolute_last=absolute)
        return product[:, :-1], product[:, -1].copy()

    def norm(self) -> float:
        """|S K S|, the largest sum of a row, where a caller has kept ``row_sums``; 0 before."""
        return 0.0 if self.row_sums is None else float(self.row_sums.max())

    def _multiply(self, v: FloatMatrix, *, absolute_last: bool) -> FloatMatrix:
        n = self.operator.grid.n
        if v.ndim != 2 or len(v) != n:
            raise ValueError(f"V has shape {v.shape}, ({n}, t) expected")
        if not is_finite(v):
            column = int(np.flatnonzero(~np.isfinite(v).all(axis=0))[0])
            raise NumericalError(f"column {column} of a vector to multiply with is not finite", hint="raise alpha")
        result = np.zeros(v.shape)
        if not v.shape[1]:
            return result
        scaled = np.asarray(v if self.root is None else self.root[:, None] * v, dtype=np.float64)
        width = panel_width(self.blocks.tile_size, v.shape[1])
        panels = tuple(slice(start, min(start + width, v.shape[1])) for start in range(0, v.shape[1], width))
        layout = Layout(self.blocks, panels)
        self.num_products += 1
        if self.in_memory:
            self._run(layout, MemoryExchange(layout, scaled), scaled, absolute_last, result)
        else:
            exchange = StoreExchange(layout, self.scratch, f"{self.folder}/{self.num_products}")
            try:
                for panel in range(len(panels)):
                    for i in range(self.blocks.num_tiles):
                        exchange.write_vector(i, panel, scaled)
                self._run(layout, exchange, scaled, absolute_last, result)
            finally:
                exchange.remove()
        if self.root is not None:
            result *= self.root[:, None]
        return result

    def _run(
        self, layout: Layout, exchange: Exchange, v: FloatMatrix, absolute_last: bool, result: FloatMatrix
    ) -> None:
        task = MultiplyTask(self.entries, exchange, self.operator.grid, self.precision, absolute_last)
        total = _Total(exchange, self._nodes(layout), result)
        repairs = Repairs()

        def report(*figures: Any) -> None:
            with contextlib.suppress(DamagedChunkError, OSError):  # met again when all tasks are done
                total.add_what_is_there()
            if self.progress is not None:
                self.progress(*figures)

        summary = RunSummary()
        while total.remaining:
            try:
                run = self.workspace.executor.run(self.phase, multiply_pair, task, total.remaining, report)
                summary.merge(run)
                total.add_all()
            except DamagedChunkError as damage:
                if isinstance(exchange, StoreExchange) and exchange.repair(damage, v):
                    repairs.add(damage)
                elif self._is_own_tile(damage):
                    repairs.add(damage)
                    repair_gram_tile(self.operator, damage.index, self.workspace.executor)
                else:
                    raise
        self.workspace.record(self.phase, summary)

    def _nodes(self, layout: Layout) -> list[Node]:
        """The largest pairs first: small ones at the end even out what workers do."""
        cost, blocks = 2.0 * self.operator.num_features, layout.blocks
        nodes = [
            Node(
                (i, j, panel),
                (),
                blocks.rows(i) * blocks.rows(j) * (cost + 4.0 * layout.width(panel)) / (1 + (i == j)),
            )
            for panel in range(len(layout.panels))
            for i, j in blocks.lower()
        ]
        return sorted(nodes, key=lambda node: -node.flops)

    def _is_own_tile(self, damage: DamagedChunkError) -> bool:
        """Whether a tile is one of a stored Gram matrix that can be computed again."""
        gram = self.operator.gram
        return gram is not None and damage.path == gram.location and self.operator.kernel is not None


class _Total:
    """Adds the results of pairs in the order of the nodes, each as soon as those before it are there."""

    def __init__(self, exchange: Exchange, nodes: Sequence[Node], result: FloatMatrix) -> None:
        self.exchange, self.nodes, self.result = exchange, nodes, result
        self.position = 0

    @property
    def remaining(self) -> Sequence[Node]:
        """The pairs that have not been added."""
        return self.nodes[self.position :]

    def add_what_is_there(self) -> None:
        """Go on until the results of a pair are not there."""
        while self.position < len(self.nodes) and self.exchange.has(self._key):
            self._add_next()

    def add_all(self) -> None:
        """Go on to the end.

        Raises
        ------
        DamagedChunkError
            The results of a pair are missing or damaged.
        """
        while self.position < len(self.nodes):
            self._add_next()

    @property
    def _key(self) -> tuple[int, int, int]:
        i, j, panel = self.nodes[self.position].key
        return i, j, panel

    def _add_next(self) -> None:
        key = self._key
        i, j, panel = key
        layout = self.exchange.layout
        columns = layout.panels[panel]
        of_rows, of_columns = layout.halves(key, self.exchange.get(key))
        self.result[layout.blocks.span(i), columns] += of_rows
        if i != j:
            self.result[layout.blocks.span(j), columns] += of_columns
        del of_rows, of_columns
        self.position += 1  # they are added, whatever becomes of their file
        try:
            self.exchange.discard(key)
        except OSError as exc:  # the folder of the product is removed at the end
            logger.info("the results of pair %s stay until the product is done: %s", key, exc)
