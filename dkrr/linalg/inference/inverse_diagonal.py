"""The diagonal of A^-1 from a tile Cholesky factor A = L L^T, in panels of columns of L^-1.

    (A^-1)_cc = sum_{r >= c} (L^-1)_rc^2

    X = L^-1 E,   X_i = L[i,i]^-1 (E_i - sum_{k<i} L[i,k] X_k)    for the columns c0 .. c0+w of I, by row blocks i

A panel is one task: it substitutes downwards from its own row block, keeps X, (n - c0) w numbers, in memory, and writes
nothing but w sums of squares. Panels do not depend on one another; the largest come first. The sums are kept in the
factor's folder, in chunks of at most 64, and go with it: a computation that was interrupted is run again, and panels
whose sums are there return at once. Exact leave-one-out needs this diagonal, and nothing else of n^3 flops.

Cost
----
n^3 / 3 flops, as much as the factor, at the rate of products of b x b with b x w. A panel reads the part of the factor
below it once, n^3 / (6 w) elements in all. Memory of a task: :func:`panel_bytes`.

References
----------
Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 14.2; Du Croz and Higham, Stability of methods
for matrix inversion, IMA J. Numer. Anal. 12 (1992).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dkrr.engine.tasks import Node
from dkrr.errors import MemoryBudgetError, NumericalError
from dkrr.linalg.blocks import BlockColumns, FloatVector
from dkrr.linalg.factor.direct import CholeskyFactor
from dkrr.linalg.factor.triangular import solve_rows
from dkrr.linalg.passes import made, repaired
from dkrr.linalg.sizes import BASELINE_BYTES
from dkrr.linalg.workspace import INVERSE_DIAGONAL
from dkrr.store.chunks import FloatArray
from dkrr.store.files import place, remove_array
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer

# A wider panel reads the factor less often: at tiles of 2,048 rows and 512 columns reading is a tenth of the work.
MAX_WIDTH = 1024
# Panels for each worker, so that the last ones, which are short, even out what the first ones took.
PANELS_PER_THREAD = 8
CHUNK_ENTRIES = 64
# of a worker's memory, as for tiles
MEMORY_SHARE = 0.8
# Two operands that are mapped, and the accumulator and the padded tile that a worker keeps from a factorisation.
TILES_IN_MEMORY = 4


@dataclass(frozen=True)
class PanelTask:
    """Which factor, where the sums go, and how many columns a panel has."""

    factor: TileMatrix
    result: BlockColumns
    width: int

    @property
    def grid(self) -> TileGrid:
        return self.factor.grid

    def nodes(self) -> list[Node]:
        """Panels of columns, the ones with most rows below them first."""
        n = self.grid.n
        return [Node((c,), flops=float(n - c) ** 2 * min(self.width, n - c)) for c in range(0, n, self.width)]


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
    grid, factor, sums = task.grid, task.factor, task.result
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
    task = PanelTask(factor, result, width)

    def run() -> FloatVector:
        work.record("invert", work.executor.run("invert", panel_task, task, task.nodes(), work.progress))
        return result.whole()[:, 0]

    return repaired(run, {**factored.owner, result.array.location: result.array.delete})


def forget_inverse_diagonal(factored: CholeskyFactor) -> None:
    """Remove a result, so that the next call computes it again."""
    remove_array(place(factored.factor.array.store, INVERSE_DIAGONAL))
