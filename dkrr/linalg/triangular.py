"""Forward and back substitution with a tile factor, for many right-hand sides in bounded memory.

    z_i = L[i,i]^-1 (s_i y_i - sum_{k<i} L[i,k] z_k)            forward, i = 0 .. N-1
    u_i = L[i,i]^-T (z_i - sum_{k>i} L[k,i]^T u_k)              backward, i = N-1 .. 0

Right-hand sides are stored in blocks of b rows and at most 256 columns; the chains of different column blocks are
independent. A block that is valid is not computed again.

Both sweeps are one graph. The row blocks are cut into P steps.
Task (p, p) finishes the blocks of step p; it waits for step p - 1 only, because
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

The diagonal of A^-1 from a tile Cholesky factor A = L L^T, in panels of columns of L^-1.

    (A^-1)_cc = sum_{r >= c} (L^-1)_rc^2

    X = L^-1 E,   X_i = L[i,i]^-1 (E_i - sum_{k<i} L[i,k] X_k)    for the columns c0 .. c0+w of I, by row blocks i

A panel is one task: it substitutes downwards from its own row block, keeps X, (n - c0) w numbers, in memory, and writes
nothing but w sums of squares. Panels do not depend on one another; the largest come first. The sums are kept in the
factor's folder, in chunks of at most 64, and go with it: a computation that was interrupted is run again, and panels
whose sums are there return at once. Exact leave-one-out needs this diagonal, and nothing else of n^3 flops.

Cost of the diagonal
--------------------
n^3 / 3 flops, as much as the factor, at the rate of products of b x b with b x w. A panel reads the part of the factor
below it once, n^3 / (6 w) elements in all. Memory of a task: :func:`panel_bytes`.

References
----------
Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 14.2; Du Croz and Higham, Stability of methods
for matrix inversion, IMA J. Numer. Anal. 12 (1992).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dkrr.engine.tasks import Key, Node
from dkrr.errors import DamagedChunkError, DataError, MemoryBudgetError, NumericalError
from dkrr.linalg.operators import MAX_BLOCK_COLUMNS, BlockColumns, FloatVector
from dkrr.linalg.workspace import BASELINE_BYTES, DIGEST, INVERSE_DIAGONAL, Owners, Workspace, repaired
from dkrr.store.chunks import FloatArray, buffer
from dkrr.store.files import place, read_json, remove_array, write_json
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import gemm_nt, trsm_left, trsm_right
from dkrr.tiles.store import made

if TYPE_CHECKING:
    from dkrr.linalg.dense import DenseFactor
    from dkrr.linalg.direct import CholeskyFactor

logger = logging.getLogger("dkrr.linalg")

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


FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True)
class Sweeps:
    """Which factor, from right-hand sides to z and u, in how many steps; whether checksums of tiles are compared."""

    factor: TileMatrix
    rhs: BlockColumns
    z: BlockColumns
    u: BlockColumns
    num_steps: int
    verify: bool = True

    @property
    def grid(self) -> TileGrid:
        return self.factor.grid

    def ends(self, sweep: int) -> tuple[BlockColumns, BlockColumns]:
        """What a sweep reads, and its result."""
        return (self.rhs, self.z) if sweep == FORWARD else (self.z, self.u)

    def row(self, sweep: int, position: int) -> int:
        """The row block that comes at a position of a sweep."""
        return position if sweep == FORWARD else self.grid.num_tiles - 1 - position

    def positions(self, step: int) -> range:
        """Positions of the row blocks of a step."""
        count = self.grid.num_tiles
        return range(step * count // self.num_steps, (step + 1) * count // self.num_steps)

    def sums_path(self, sweep: int) -> str:
        """Below the store of the result, where its sums are."""
        return f"{self.ends(sweep)[1].array.path}-sums-{self.num_steps}"

    def sums(self, sweep: int, step: int) -> BlockColumns:
        """Sums that have come as far as ``step``."""
        # only the tasks of sweeps with as many steps read it, and they know its shape: no metadata on disk
        path = f"{self.sums_path(sweep)}/{step}"
        return BlockColumns(replace(self.ends(sweep)[1].array, path=path, dtype=self.factor.array.dtype), self.grid)


def sweep_task(task: Sweeps, sweep: int, panel: int, step: int, before: int) -> bool:
    """Run task (step, before) of a sweep for a column block; whether anything was computed."""
    return any([_sweep_block(task, sweep, panel, at, step, before) for at in task.positions(step)])


def _sweep_block(task: Sweeps, sweep: int, panel: int, position: int, step: int, before: int) -> bool:
    """The result at a position of ``step``, or where ``before`` is less its sum after that step.

    Blocks of the result that are valid are left alone, and so are their sums.
    """
    factor, i, ends, (source, result) = task.factor, task.row(sweep, position), step == before, task.ends(sweep)
    out = result if ends else task.sums(sweep, before)
    if result.is_valid(i, panel) or (not ends and out.is_valid(i, panel)):
        return False
    rows = [task.row(sweep, k) for k in range(position if ends else task.positions(before).stop)]
    tiles = [(max(i, row), min(i, row)) for row in rows]

    def compute() -> FloatArray:
        first, block, after = 0, None, step - 2 if ends else before - 1
        if after >= 0:
            # a sum that is lost or damaged is only work to do again
            with contextlib.suppress(DamagedChunkError):
                block, first = task.sums(sweep, after).read(i, panel), task.positions(after).stop
        block = np.array(source.read(i, panel) if block is None else block, dtype=factor.dtype, order="F")
        for row, tile in zip(rows[first:], tiles[first:], strict=True):
            _subtract(task, block, tile, np.asfortranarray(result.read(row, panel)), transposed=sweep == BACKWARD)
        if ends:
            block = solve_triangle(factor.read(i, i, verify=task.verify), block, transposed=sweep == BACKWARD)
        return np.asarray(block.T)

    def explain(_: FloatArray) -> DataError:
        factor.check_finite([*tiles, *[(i, i)] * ends])
        hint = "scale the targets, or raise alpha"
        return DataError(f"the solution of rows {task.grid.span(i)} is not finite", hint=hint)

    site = "solve.block" if ends else "solve.sum"
    return made(site, compute, lambda block: out.write(i, panel, block.T), explain)


def _subtract(task: Sweeps, block: FloatArray, tile: tuple[int, int], known: FloatArray, *, transposed: bool) -> None:
    """block -= T known, or T^T known, for a tile T of the factor; blocks in Fortran order."""
    if block.shape[1] > NARROW:
        whole = task.factor.read(*tile, verify=task.verify)
        block -= (whole.T if transposed else whole) @ known
        return
    out, x = block.T, known.T
    # strips are verified behind their products, and what a damaged one makes of them is thrown away
    with np.errstate(over="ignore", invalid="ignore"):
        for start, strip in task.factor.read_strips(*tile, verify=task.verify):
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
    return np.asarray(out.T)


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


def sweep_nodes(task: Sweeps) -> list[Node]:
    """The graph of both sweeps, in the order of its priorities: of what becomes possible together, the chain first."""
    last, nodes = task.num_steps - 1, []
    for sweep in (FORWARD, BACKWARD):
        for stage in range(task.num_steps):
            # behind the chain, what the blocks of the step before this one contribute to all later steps
            for step in range(stage, task.num_steps if stage else 1):
                rows, others = len(task.positions(step)), len(task.positions(stage - 1)) if stage else 0
                size = rows * (others + rows / 2 if step == stage else others)
                for panel in range(task.rhs.num_panels):
                    columns = task.rhs.columns(panel)
                    before: list[Key] = []
                    if stage or sweep:
                        before.append((sweep, panel, stage - 1, stage - 1) if stage else (FORWARD, panel, last, last))
                    if stage > 1:
                        before.append((sweep, panel, step, stage - 2))
                    key = (sweep, panel, step, stage if step == stage else stage - 1)
                    flops = 2.0 * task.grid.tile_size**2 * size * (columns.stop - columns.start)
                    nodes.append(Node(key, tuple(before), flops, shares=False))
    return nodes


def substitute(
    phase: str,
    factor: TileMatrix,
    blocks: tuple[BlockColumns, BlockColumns, BlockColumns],
    workspace: Workspace,
    owners: Owners,
    *,
    verify: bool = True,
) -> None:
    """z = L^-1 rhs and u = L^-T z.

    Parameters
    ----------
    blocks
        rhs, z and u; the last two are written.
    verify
        Whether the checksums of tiles are compared.
    """
    itemsize, threads = factor.dtype.itemsize, workspace.executor.num_threads
    num_steps = choose_num_steps(factor.grid, itemsize, blocks[0].num_columns, threads)
    task = Sweeps(factor, *blocks, num_steps, verify)
    workspace.run(phase, sweep_task, task, sweep_nodes(task), owners)
    for sweep in (FORWARD, BACKWARD):
        remove_array(place(task.ends(sweep)[1].array.store, task.sums_path(sweep)))


def solve_rows(
    factor: TileMatrix | DenseFactor, half: FloatArray, fill: Callable[[int, FloatArray], object], first: int = 0
) -> None:
    """half (w, n - first) <- B L^-T for the rows from ``first`` on, where B is zero before them: L^-1 B^T, transposed.

    Right-hand sides that are rows make the product C -= A B^T of C-order tiles and the solve C <- C L^-T: those of the
    factorisation. At most one tile is mapped at once, and dropped after its product.

    Parameters
    ----------
    fill
        ``fill(i, block)`` writes the columns of B that belong to row block i.
    """
    grid = factor.grid
    begin = first // grid.tile_size
    inside = first - grid.span(begin).start

    def columns(i: int) -> slice:
        span = grid.span(i)
        return slice(max(span.start - first, 0), span.stop - first)

    for i in range(begin, grid.num_tiles):
        block = half[:, columns(i)]
        fill(i, block)
        for k in range(begin, i):
            gemm_nt(block, half[:, columns(k)], factor.read(i, k)[:, inside if k == begin else 0 :])
        trsm_right(block, factor.read(i, i)[inside:, inside:] if i == begin else factor.read(i, i))


# Two operands that are mapped, and the accumulator and the padded tile that a worker keeps from a factorisation.
TILES_IN_MEMORY = 4

# A wider panel reads the factor less often: at tiles of 2,048 rows and 512 columns reading is a tenth of the work.
MAX_WIDTH = 1024


# Panels for each worker, so that the last ones, which are short, even out what the first ones took.
PANELS_PER_THREAD = 8


CHUNK_ENTRIES = 64


# of a worker's memory, as for tiles
MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class PanelTask:
    """Which factor, where the sums go, and how many columns a panel has."""

    factor: TileMatrix
    result: BlockColumns
    width: int


def panel_bytes(grid: TileGrid, width: int, itemsize: int = 8) -> int:
    """Memory of a task besides the interpreter's: n w numbers, and four tiles."""
    return (grid.n * width + TILES_IN_MEMORY * grid.tile_size**2) * itemsize


def inverse_room(memory_limit: int | None) -> int | None:
    """What a task may hold besides the interpreter, for :func:`inverse_diagonal`: 80 % of the limit less 210 MiB."""
    return None if memory_limit is None else int(MEMORY_SHARE * memory_limit) - BASELINE_BYTES


def panel_width(grid: TileGrid, itemsize: int, num_threads: int, memory_bytes: int | None) -> int:
    """Columns of a panel: at most 1,024, eight panels a worker, and what fits into ``memory_bytes``.

    A whole number of result chunks, so that two panels never write to one.

    Raises
    ------
    MemoryBudgetError
        Not even one chunk fits.
    """
    chunk = min(CHUNK_ENTRIES, grid.tile_size)
    needed = panel_bytes(grid, chunk, itemsize)
    if memory_bytes is not None and needed > memory_bytes:
        raise MemoryBudgetError(
            f"{chunk} columns of the inverse of {grid.n:,} rows and four tiles of {grid.tile_size} take "
            f"{needed:,} bytes; a task may hold {max(0, memory_bytes):,}",
            hint="raise memory_limit",
            needed=needed,
        )
    even = -(-grid.n // (PANELS_PER_THREAD * num_threads * chunk)) * chunk
    width = min(MAX_WIDTH, grid.tile_size, even)
    if memory_bytes is not None:
        room = (memory_bytes // itemsize - TILES_IN_MEMORY * grid.tile_size**2) // grid.n
        width = min(width, room)
    return width // chunk * chunk


def panel_task(task: PanelTask, first: int) -> bool:
    """Compute and write the diagonal entries of a panel, from column ``first`` on, unless they are there."""
    grid, factor, sums = task.factor.grid, task.factor, task.result
    stop = min(first + task.width, grid.n)
    blocks = range(first // sums.grid.tile_size, -(-stop // sums.grid.tile_size))
    if all(sums.is_valid(i, 0) for i in blocks):
        return False

    def compute() -> FloatVector:
        """Sums of squares of these columns of L^-1."""
        half = buffer("panel", (stop - first, grid.n - first), factor.dtype)

        def fill(i: int, block: FloatArray) -> None:
            block[...] = 0
            np.fill_diagonal(block[max(0, grid.span(i).start - first) :], 1)

        solve_rows(factor, half, fill, first)
        values = np.einsum("pr,pr->p", half, half, dtype=np.float64)
        return np.where(values > 0, values, np.nan)

    def write(values: FloatVector) -> None:
        for i in blocks:
            span = sums.grid.span(i)
            sums.write(i, 0, values[span.start - first : span.stop - first, None])

    def explain(_: object) -> NumericalError:
        side, begin = grid.num_tiles, first // grid.tile_size
        factor.check_finite((i, k) for k in range(begin, side) for i in range(k, side))
        return NumericalError(
            f"the diagonal of the inverse is not finite and positive in rows {first:,} to {stop:,} of "
            f"{factor.location} ({factor.array.dtype})",
            hint="raise alpha",
        )

    return made("inverse.panel", compute, write, explain)


def inverse_diagonal(factored: CholeskyFactor, *, memory_bytes: int | None = None) -> FloatVector:
    """The diagonal of A^-1 (n,), from a finished factor; continues where an earlier attempt stopped.

    A tile that is found damaged is computed again, as in a solve. A float32 factor gives its sums in float64 and an
    accuracy of float32.

    Parameters
    ----------
    factored
        The factor, with the operator that it can be repaired from. Its folder takes the result.
    memory_bytes
        What a task may hold besides the interpreter; None for no limit.

    Raises
    ------
    MemoryBudgetError
        A task may not hold 64 columns.
    NumericalError
        An entry is not finite although the factor is.

    Cost
    ----
    n^3 / 3 flops; n^3 / (6 w) elements of the factor read; 8 n bytes written.
    """
    factor, work = factored.factor, factored.workspace
    rows = TileGrid(factor.grid.n, min(CHUNK_ENTRIES, factor.grid.tile_size))
    result = BlockColumns.create(factor.array.store, INVERSE_DIAGONAL, rows, 1, "float64")
    width = panel_width(factor.grid, factor.dtype.itemsize, work.executor.num_threads, memory_bytes)
    task, n = PanelTask(factor, result, width), factor.grid.n
    # panels of columns, the ones with most rows below them first
    nodes = [Node((c,), flops=float(n - c) ** 2 * min(width, n - c)) for c in range(0, n, width)]

    def run() -> tuple[FloatVector, str]:
        work.record("invert", work.executor.run("invert", panel_task, task, nodes, work.progress))
        return result.whole()[:, 0], result.array.digest()

    found, digest = repaired(run, {**factored.owner, result.array.location: result.array.delete})
    written = read_json(result.array.location, DIGEST)
    if written is None:
        write_json(result.array.location, DIGEST, {"sha256": digest})
    elif written != {"sha256": digest}:
        logger.warning("chunks of %s were exchanged; computing it again", result.array.location)
        forget_inverse_diagonal(factored)
        return inverse_diagonal(factored, memory_bytes=memory_bytes)
    return found


def forget_inverse_diagonal(factored: CholeskyFactor) -> None:
    """Remove a result, so that the next call computes it again."""
    remove_array(place(factored.factor.array.store, INVERSE_DIAGONAL))
