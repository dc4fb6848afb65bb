"""Forward and back substitution with a tile factor, for many right-hand sides in bounded memory.

    z_i = L[i,i]^-1 (s_i y_i - sum_{k<i} L[i,k] z_k)            forward, i = 0 .. N-1
    u_i = L[i,i]^-T (z_i - sum_{k>i} L[k,i]^T u_k)              backward, i = N-1 .. 0

Right-hand sides are stored in blocks of b rows and at most 256 columns; the chains of different column blocks are
independent. A block that is valid is not computed again.

The row blocks are cut into P steps. Task (p, p) finishes the blocks of step p; it waits for step p - 1 only, because
other tasks (p, q), q < p - 1, have already taken away what steps 0 .. q contribute to its sums. Their sums are kept
beside the result until the sweep is done. Every sum runs over k in ascending order of the sweep and is stored as it is,
so neither P nor the number of workers changes a bit; P follows from the work and the workers.

Cost
----
2 n^2 t flops and one pass over the factor per sweep and column block: up to about 8 columns it is bound by memory
bandwidth. The longest chain reads (3 P - 2) / P^2 of the factor.

References
----------
Golub and Van Loan, Matrix Computations, 4th ed., section 3.1; Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., chapter 8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, DataError
from dkrr.linalg.blocks import MAX_BLOCK_COLUMNS, BlockColumns
from dkrr.linalg.passes import Owners, run_tasks
from dkrr.linalg.repairs import check_finite
from dkrr.store.chunks import FloatArray
from dkrr.store.failpoints import failpoint
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import is_finite, trsm_left

# Up to so many columns a tile is multiplied in strips, right behind its checksum: two to four times faster than whole.
NARROW = 16
# Rows of a triangle in the back substitution of a few columns.
TRIANGLE_ROWS = 128
# What the number of steps is chosen with: bytes a second of one task, columns that cost as much as reading once more,
# latency of a step, what any other task costs, and the longest task.
TASK_BYTES_PER_SECOND = 5e9
COLUMNS_PER_READING = 40
STEP_SECONDS = 0.008
TASK_SECONDS = 0.004
MAX_TASK_SECONDS = 20.0


@dataclass(frozen=True)
class SweepTask:
    """One sweep: which factor, from where to where, in which direction; whether checksums of tiles are compared."""

    factor: TileMatrix
    source: BlockColumns
    result: BlockColumns
    direction: Literal["forward", "backward"]
    verify: bool = True

    @property
    def grid(self) -> TileGrid:
        return self.factor.grid

    def row(self, position: int) -> int:
        """The row block that comes at a position of the sweep."""
        return position if self.direction == "forward" else self.grid.num_tiles - 1 - position

    def tile(self, row: int, other: int) -> tuple[int, int]:
        """Which tile couples row block ``row`` to the earlier one ``other``."""
        return (row, other) if self.direction == "forward" else (other, row)

    def sums(self, num_steps: int, step: int) -> BlockColumns:
        """Where sums that have come as far as ``step`` are kept."""
        result = self.result
        path = f"{result.array.path}-sums-{num_steps}"
        # only the tasks of sweeps with as many steps read it, and they know its shape: no metadata on disk
        array = replace(result.array, path=path, dtype=self.factor.array.dtype)
        return BlockColumns(array, self.grid, result.generation * num_steps + step)


@dataclass(frozen=True)
class SweepsTask:
    """Sweeps that follow one another, cut into the same number of steps."""

    sweeps: tuple[SweepTask, ...]
    num_steps: int

    @property
    def grid(self) -> TileGrid:
        return self.sweeps[0].grid

    def positions(self, step: int) -> range:
        """Positions of the row blocks of a step."""
        count = self.grid.num_tiles
        return range(step * count // self.num_steps, (step + 1) * count // self.num_steps)


@dataclass
class _Chain:
    """One column block of one sweep, as a task sees it. Blocks of vectors are (rows, c) in Fortran order."""

    task: SweepsTask
    sweep: SweepTask
    panel: int
    known: dict[int, FloatArray] = field(default_factory=dict)

    def finish(self, position: int, step: int) -> None:
        """Compute and write the block of the result at a position of ``step``."""
        sweep, i = self.sweep, self.sweep.row(position)
        failpoint("solve.block.before_read")
        block = self._subtract(position, step - 2, position)
        lower = sweep.factor.read(i, i, verify=sweep.verify)
        block = solve_triangle(lower, block, transposed=sweep.direction == "backward")
        failpoint("solve.block.after_compute", block.T)
        self._check(block, i, position, (i, i))
        sweep.result.write(i, self.panel, block)
        self._keep(position, block)
        failpoint("solve.block.after_write")

    def update(self, position: int, step: int) -> bool:
        """Compute and write the sum at a position after ``step`` unless it is there; whether it was computed."""
        i, sums = self.sweep.row(position), self.sweep.sums(self.task.num_steps, step)
        if sums.is_valid(i, self.panel):
            return False
        last = self.task.positions(step).stop
        block = self._subtract(position, step - 1, last)
        failpoint("solve.sum.after_compute", block.T)
        self._check(block, i, last)
        sums.write(i, self.panel, block)
        return True

    def _subtract(self, position: int, step: int, stop: int) -> FloatArray:
        """The source minus what positions 0 .. stop - 1 contribute, from the sum after ``step`` if there is one."""
        i, first, block = self.sweep.row(position), 0, None
        if step >= 0:
            # a sum that is lost or damaged is only work to do again
            with contextlib.suppress(DamagedChunkError):
                block = self.sweep.sums(self.task.num_steps, step).read(i, self.panel)
                first = self.task.positions(step).stop
        if block is None:
            block = self.sweep.source.read(i, self.panel)
        block = np.array(block, dtype=self.sweep.factor.dtype, order="F")
        for other in range(first, stop):
            subtract_product(block, self.sweep, self.sweep.tile(i, self.sweep.row(other)), self._read(other))
        return block

    def _read(self, position: int) -> FloatArray:
        block = self.known.get(position)
        if block is None:
            block = np.asfortranarray(self.sweep.result.read(self.sweep.row(position), self.panel))
            self._keep(position, block)
        return block

    def _keep(self, position: int, block: FloatArray) -> None:
        """Keep a block that later rows need, while all of them together take less than a tile."""
        if self.sweep.grid.n * block.shape[1] <= self.sweep.grid.tile_size**2:
            self.known[position] = block

    def _check(self, block: FloatArray, i: int, stop: int, *tiles: tuple[int, int]) -> None:
        if is_finite(block):
            return
        sweep = self.sweep
        check_finite(sweep.factor, [*tiles, *(sweep.tile(i, sweep.row(other)) for other in range(stop))])
        raise DataError(
            f"the solution of rows {sweep.grid.span(i)} is not finite", hint="scale the targets, or raise alpha"
        )


def subtract_product(block: FloatArray, sweep: SweepTask, tile: tuple[int, int], known: FloatArray) -> None:
    """block -= T known forward, T^T known backward, for a tile T of the factor; blocks in Fortran order."""
    transposed = sweep.direction == "backward"
    if block.shape[1] > NARROW:
        whole = sweep.factor.read(*tile, verify=sweep.verify)
        block -= (whole.T if transposed else whole) @ known
        return
    out, x = block.T, known.T
    # strips are verified behind their products, and what a damaged one makes of them is thrown away
    with np.errstate(over="ignore", invalid="ignore"):
        for start, strip in sweep.factor.read_strips(*tile, verify=sweep.verify):
            rows = slice(start, start + len(strip))
            if transposed:
                out -= x[:, rows] @ strip
            else:
                out[:, rows] -= x @ strip.T


def solve_triangle(lower: FloatArray, block: FloatArray, *, transposed: bool) -> FloatArray:
    """L^-1 block, or L^-T block when ``transposed``; blocks in Fortran order."""
    if not transposed or block.shape[1] > NARROW:
        return np.asfortranarray(trsm_left(lower, block, transposed=transposed))
    # by rows of triangles from the last one: a whole trsm takes up to three times as long for one column
    out = np.array(block.T, order="C")
    for start in range((len(lower) - 1) // TRIANGLE_ROWS * TRIANGLE_ROWS, -1, -TRIANGLE_ROWS):
        rows = slice(start, min(start + TRIANGLE_ROWS, len(lower)))
        out[:, rows] = trsm_left(lower[rows, rows], out[:, rows].T, transposed=True).T
        if start:
            out[:, :start] -= out[:, rows] @ lower[rows, :start]
    solved: FloatArray = out.T
    return solved


def substitute(task: SweepsTask, number: int, panel: int, step: int, before: int) -> bool:
    """Run task (step, before) of sweep ``number`` for a column block; whether anything was computed.

    Blocks of the result that are valid are left alone, and so are their sums.
    """
    chain = _Chain(task, task.sweeps[number], panel)
    computed = False
    for position in task.positions(step):
        if chain.sweep.result.is_valid(chain.sweep.row(position), panel):
            continue
        if step == before:
            chain.finish(position, step)
            computed = True
        else:
            computed |= chain.update(position, before)
    return computed


def choose_num_steps(grid: TileGrid, itemsize: int, num_columns: int, num_threads: int) -> int:
    """P, the steps of a sweep: the least estimated time, and no task longer than 20 s.

    A sweep that one task reads in T seconds takes max(1 / workers, (3 P - 2) / P^2) T, P latencies of 8 ms, and 4 ms
    for each of the (P - 1) (P - 2) / 2 other tasks. Column blocks have chains of their own, which share the workers.
    """
    columns = min(num_columns, MAX_BLOCK_COLUMNS)
    bytes_read = grid.n**2 / 2 * itemsize
    seconds = bytes_read / TASK_BYTES_PER_SECOND * (1 + columns / COLUMNS_PER_READING)
    workers = max(1.0, num_threads / -(-num_columns // MAX_BLOCK_COLUMNS))

    def estimate(steps: int) -> float:
        reading = max(1 / workers, (3 * steps - 2) / steps**2) * seconds
        return reading + steps * STEP_SECONDS + (steps - 1) * (steps - 2) / 2 * TASK_SECONDS

    least = min(grid.num_tiles, int(seconds // MAX_TASK_SECONDS) + 1)
    if workers == 1:
        return least
    return min(range(least, grid.num_tiles + 1), key=estimate)


def sweep_nodes(task: SweepsTask) -> list[Node]:
    """The graph of all sweeps, in the order of its priorities: of what becomes possible together, the chain first."""
    count, nodes = task.num_steps, []
    for number, one in enumerate(task.sweeps):
        for stage in range(count):
            for panel in range(one.source.num_panels):
                columns = one.source.columns(panel)
                flops = 2.0 * task.grid.tile_size**2 * (columns.stop - columns.start)
                rows = len(task.positions(stage))
                before: list[tuple[int, ...]] = []
                if stage:
                    before.append((number, panel, stage - 1, stage - 1))
                elif number:
                    before.append((number - 1, panel, count - 1, count - 1))
                if stage > 1:
                    before.append((number, panel, stage, stage - 2))
                own = rows / 2 + len(task.positions(stage - 1)) if stage else rows / 2
                key = (number, panel, stage, stage)
                nodes.append(Node(key, tuple(before), flops * rows * own, shares=False))
            # what the blocks of the step before this one contribute to all later steps but this one
            for step in range(stage + 1, count):
                for panel in range(one.source.num_panels if stage else 0):
                    columns = one.source.columns(panel)
                    entries = task.grid.tile_size**2 * len(task.positions(step)) * len(task.positions(stage - 1))
                    done = (number, panel, stage - 1, stage - 1)
                    sums = ((number, panel, step, stage - 2),) if stage > 1 else ()
                    flops = 2.0 * entries * (columns.stop - columns.start)
                    nodes.append(Node((number, panel, step, stage - 1), (done, *sums), flops, shares=False))
    return nodes


def sweeps(
    phase: str,
    tasks: Sequence[SweepTask],
    executor: Executor,
    progress: Progress | None = None,
    *,
    num_steps: int | None = None,
    owners: Owners | None = None,
) -> RunSummary:
    """Run substitutions one after the other in one graph; the source of each is the result of the one before.

    ``owners`` compute tiles of the factor again.
    """
    first = tasks[0]
    if num_steps is None:
        itemsize = first.factor.dtype.itemsize
        num_steps = choose_num_steps(first.grid, itemsize, first.source.num_columns, executor.num_threads)
    task = SweepsTask(tuple(tasks), num_steps)
    summary = run_tasks(executor, phase, substitute, task, sweep_nodes(task), progress, owners=owners or {})
    for one in tasks:
        for step in range(num_steps - 2):
            one.sums(num_steps, step).delete()
    return summary
