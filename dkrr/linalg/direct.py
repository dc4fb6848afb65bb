"""The direct solver: a tile Cholesky factor on disk, two substitutions, and the true residual.

Two verbs, split by what they need to know: ``prepare`` sees only the matrix, ``solve`` only right-hand sides. With an
intercept s is one more right-hand side, and the rest is :func:`dkrr.linalg.targets.solve_bordered`.

Cost
----
n^3 / 3 flops once; for right-hand sides 4 n^2 t flops and two readings of the factor, and one product with S K S for
the residual. With an intercept the driver holds six (n, t) arrays; a refinement is two more sweeps and a product.

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

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np

from dkrr.engine.tasks import Node
from dkrr.errors import MemoryBudgetError, NumericalError
from dkrr.linalg.blocks import BlockColumns, FloatMatrix, FloatVector
from dkrr.linalg.catalogue import continue_lineage, factor_fields, key_of
from dkrr.linalg.cholesky import factorise
from dkrr.linalg.matmul import OperatorProduct, residual_norms
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.passes import Owners, made, repaired
from dkrr.linalg.solution import Solution
from dkrr.linalg.targets import solve_bordered
from dkrr.linalg.triangular import solve_rows, substitute
from dkrr.linalg.workspace import BASELINE_BYTES, INVERSE_DIAGONAL, Workspace
from dkrr.store.chunks import FloatArray
from dkrr.store.files import place, remove_array
from dkrr.store.lease import hold_lock
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


@dataclass(frozen=True, kw_only=True)
class CholeskySolver:
    """Parameters of the direct solver.

    Parameters
    ----------
    precision
        "float64", or "float32" for a factor (and an answer) in single precision at half the disk and time.
    """

    precision: Literal["float64", "float32"] = "float64"

    def prepare(
        self,
        operator: RidgeOperator,
        workspace: Workspace,
        *,
        weight_digest: str | None = None,
        source_digest: str = "",
    ) -> CholeskyFactor:
        """Factorise A, continuing a factor with the same key where it was left. n^3 / 3 flops.

        Raises
        ------
        NotPositiveDefiniteError
            A is not positive definite; names the row and a suggested alpha.
        """
        fields = factor_fields(operator, self.precision, weight_digest, workspace.blas, source_digest)
        location = factor_location(workspace.store, fields)
        with hold_lock(location):
            factor = workspace.matrix(location, operator.grid, self.precision, fields)
            taken = continue_lineage(operator, factor, "factors", fields, workspace.store)
            summary = factorise(
                operator, factor, workspace.executor, workspace.progress, split=workspace.split, taken=taken
            )
            workspace.record("factorise", summary)
            workspace.record_reuse("factor", operator.grid.n, taken.to_dict(), summary, power=3)
        return CholeskyFactor(solver=self, operator=operator, factor=factor, workspace=workspace)


def factor_location(store: Any, fields: dict[str, Any]) -> Any:
    """Where the factor with these fields is."""
    return place(store, "factors", key_of(fields) + ".zarr")


@dataclass(frozen=True, kw_only=True)
class CholeskyFactor:
    """A finished factor: solves for any number of right-hand sides."""

    solver: CholeskySolver
    operator: RidgeOperator
    factor: TileMatrix
    workspace: Workspace

    def solve(self, rhs: BlockColumns, *, bordered: bool = False) -> tuple[BlockColumns, Solution, FloatVector]:
        """Solve A u = rhs for all columns, or A u + b s = rhs, s^T u = 0; evaluate the true residual.

        Parameters
        ----------
        rhs : BlockColumns (n, t)
            S Y, of centred targets with an intercept. The blocks z and u are stored beside it.

        Returns
        -------
        u : BlockColumns (n, t)
            With an intercept in float64, also from a float32 factor, so that s^T u = 0 holds to its rounding.
        solution : Solution
        intercept : (t,)
            Of the centred targets; 0 without one.

        Raises
        ------
        ResidualError
            The backward error of a target exceeds 30 n eps: some tile is not what it should be, although its
            checksum is right.
        """
        operator, store = self.operator, rhs.array.store
        normal = operator.normal() if bordered else None
        u = self.substitute(rhs) if normal is None else self._bordered(rhs, normal)
        norms = residual_norms(operator, rhs, u, self.workspace, store, normal=normal)
        n, work = self.factor.grid.n, self.workspace
        solution = Solution.direct(
            n, norms.relative_residual, norms.backward_error, solver="cholesky", precision=self.solver.precision,
            seconds={phase: summary.seconds for phase, summary in work.phases.items()},
            message=f"Cholesky factor of {n:,} rows in {self.factor.grid.num_lower:,} tiles",
            hint="a stored tile is not what it should be: check the store with `dkrr info --verify`, "
            "remove the factor and start again",
        )  # fmt: skip
        return u, solution, norms.intercept

    def _bordered(self, rhs: BlockColumns, normal: FloatVector) -> BlockColumns:
        """u of A u + b s = S Y, s^T u = 0."""
        operator, grid, store, numbers = self.operator, rhs.grid, place(rhs.array.store, "bordered"), count()
        product = OperatorProduct(operator, self.workspace, store, phase="residual")

        def solve(r: FloatMatrix) -> FloatMatrix:
            number = next(numbers)
            right = BlockColumns.create(store, f"r-{number}", grid, r.shape[1], "float64").fill(r)
            return self.substitute(right, f"-{number}").whole()

        values = rhs.whole()
        both = solve(np.hstack([values, normal[:, None]]))
        u = solve_bordered(
            solve,
            lambda u: product(u) + operator.alpha * u,
            values,
            normal,
            begun=(both[:, :-1], both[:, -1:]),
        )
        return BlockColumns.create(store, "u", grid, rhs.num_columns, "float64").fill(u)

    def substitute(self, rhs: BlockColumns, suffix: str = "") -> BlockColumns:
        """L^-T L^-1 rhs (n, t), in the precision of the factor; nothing is verified.

        The blocks are kept as "z" and "u" with the suffix. Of a durable store the factor is durable afterwards.
        """
        work = self.workspace
        forward, backward = (
            BlockColumns.create(rhs.array.store, name + suffix, rhs.grid, rhs.num_columns, self.solver.precision)
            for name in ("z", "u")
        )
        # the disk writes what the sweeps read: tiles of the last seconds are on no disk yet, and all are in memory
        with ThreadPoolExecutor(1, thread_name_prefix="dkrr-sync") as thread:
            synced = thread.submit(self.make_durable)
            blocks = rhs, forward, backward
            work.record(
                "solve", substitute("solve", self.factor, blocks, work.executor, work.progress, owners=self.owner)
            )
            synced.result()
        return backward

    @property
    def owner(self) -> Owners:
        """Computes a tile of the factor again that was lost after it was written."""
        return factor_owner(self.operator, self.factor, self.workspace)

    def make_durable(self) -> None:
        """fsync the tiles where the workspace is durable; for who reads them without :meth:`substitute`."""
        if self.workspace.durable:
            self.factor.array.sync()


def factor_owner(operator: RidgeOperator, factor: TileMatrix, workspace: Workspace) -> Owners:
    """Computes a tile of a factor again."""

    def again(index: tuple[int, ...]) -> None:
        factor.array.delete(index)
        summary = factorise(operator, factor, workspace.executor, workspace.progress, split=workspace.split)
        workspace.record("factorise", summary)

    return {factor.location: again}


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
