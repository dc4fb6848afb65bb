"""The direct solver: a tile Cholesky factor on disk, two substitutions, and the true residual.

Two verbs, split by what they need to know: ``prepare`` sees only the matrix, ``solve`` only right-hand sides. With an
intercept s is one more right-hand side, and the rest is :func:`dkrr.linalg.operators.solve_bordered`.

Cost
----
n^3 / 3 flops once; for right-hand sides 4 n^2 t flops and two readings of the factor, and one product with S K S for
the residual. With an intercept the driver holds six (n, t) arrays; a refinement is two more sweeps and a product.

The graph of a left-looking tile Cholesky: which task waits for which, in what order, and what is cut into parts.

    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T

With one task a tile the sum of column j begins when column j - 1 is finished, so that few tiles on many workers wait
for each other: every column costs the time of its longest sum. Two cuts help, and neither changes a byte of the factor,
since the terms stay in their order and parts are stored as they are, in the factor's precision.

The *first terms* of a sum, all but the last w, are a task of their own that waits for column j - w - 1 only; the task
of the tile goes on from there. Simulated, 20 tiles a side on 32 workers are busy 15 % of the time without and 51 % with
w = 2; 122 tiles on 100 workers 27 % and 95 % with w = 6 (:mod:`dkrr.fit.rates`).

Rows that an extension adds are few row blocks, and each is a chain of tasks. Two workers share one: the first
(j + 1) // 2 terms of its sum in column j are made ahead of the chain. (Measured with two workers, 30,000 rows: 300 more
at 23 GF/s a worker, 3,000 more at 31, where the fit itself has 41.) Other workers have the other row blocks.

First terms are kept in a scratch matrix beside the factor, not in the memory of workers: what is lost with its worker
would have to be computed again together with everything that waits for it, and reading a tile back costs a thirtieth of
one product. It is named after the factor, so that an attempt finds what an earlier one left.

Cost of the graph
-----------------
N (N + 1) / 2 nodes with at most three dependencies, and as many again where every column is split. The scratch matrix
holds about (w + 1) N tiles at most.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np

from dkrr.engine.tasks import Executor, Key, Node, Progress, RunSummary
from dkrr.errors import StoreMismatchError
from dkrr.linalg.catalogue import TakenOver, continue_lineage, factor_fields, key_of
from dkrr.linalg.cholesky import CholeskyTask, Split, factor_tile
from dkrr.linalg.gram import gram_owner
from dkrr.linalg.matmul import OperatorProduct, residual_norms
from dkrr.linalg.operators import BlockColumns, FloatMatrix, FloatVector, RidgeOperator, solve_bordered
from dkrr.linalg.solution import Solution
from dkrr.linalg.triangular import substitute
from dkrr.linalg.workspace import Owners, Workspace, repaired
from dkrr.store.files import join, name_of, parent_of, place, remove_array
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix

# a task that finds its tile takes as long as so much arithmetic
LOOK_FLOPS = 1e8
# with so many row blocks for each worker of an extension there is work for everybody
MANY_BLOCKS = 4
_SUMS = "-sums.zarr"


def usual_split(num_tiles: int, num_threads: int) -> Split:
    """The split where nobody has simulated one: none for one thread, one column more than threads for a few.

    Ten tiles a side on two workers: 92 % busy without, 98 % with it.
    """
    if num_threads < 2:
        return Split()
    if num_threads <= 4:
        return Split(num_columns=num_threads + 1)
    many = 4 * num_threads > num_tiles
    return Split(num_columns=num_tiles if many else num_threads + 1, num_last=min(6, max(2, num_tiles // 12)))


def cholesky_nodes(grid: TileGrid, split: Split | None = None, num_finished: int = 0) -> list[Node]:
    """The graph in the order of its priorities.

    A node (i, j) is a tile, and (i, j, 0) the first terms of its sum. ``num_finished`` rows are there: tasks of whole
    tiles only look.

    The critical path goes (j, j), (j+1, j), (j+1, j+1): of every column the tile below the diagonal comes first and
    the next diagonal tile right behind it, before the rest of the column. First terms come behind the last column that
    they read. The new rows of an extension come right behind tile (j, j), as long as the others are only looked at:
    they are a chain of products, and with all looks of a column before them one of two workers stood idle for 0.5 s
    (30,000 + 300 rows).
    """
    split, area = split or Split(), float(grid.tile_size) ** 2
    (num_whole, rest), shares = divmod(num_finished, grid.tile_size), not split.new_from
    nodes: list[tuple[tuple[int, int, int], Node]] = []
    for i, j in grid.lower():
        place = (j - 1, j, 1) if i == j else (j, i, 0)
        before: tuple[Key, ...] = ((i, j - 1),) * (j > 0) + ((j, j),) * (i != j)
        update, last = (1.0, 1 / 3) if i == j else (2.0, 1.0)
        flops = (grid.rows(i) - rest * (i == num_whole)) * area
        if i < num_whole:
            nodes.append((place, Node((i, j), before, min(LOOK_FLOPS, flops * (last + j * update)))))
            continue
        if j < num_whole and not shares:
            place = (j - 1, j, 2)
        h = split.num_first(grid, i, j)
        if h:
            needed: tuple[Key, ...] = ((i, h - 1),) if i == j else ((i, h - 1), (j, h - 1))
            nodes.append(
                ((h - 1, grid.num_tiles, i) if shares else place, Node((i, j, 0), needed, flops * h * update, shares))
            )
            before += ((i, j, 0),)
        nodes.append((place, Node((i, j), before, max(area, flops * (last + (j - h) * update)), shares)))
    return [node for _, node in sorted(nodes, key=lambda item: item[0])]


def scratch_location(factor: TileMatrix) -> str:
    """Where the first terms of sums are."""
    location = factor.array.store
    return join(parent_of(location), name_of(location).removesuffix(".zarr") + _SUMS)


def factor_of_scratch(name: str) -> str | None:
    """Name of the factor that something in the folder of factors is scratch of; None for what is not scratch."""
    return name.removesuffix(_SUMS) + ".zarr" if name.endswith(_SUMS) else None


def factorise(
    operator: RidgeOperator,
    factor: TileMatrix,
    executor: Executor,
    progress: Progress | None = None,
    *,
    split: Split | None = None,
    taken: TakenOver | None = None,
) -> RunSummary:
    """Compute every tile of L that is not valid.

    A tile that a reader finds damaged is deleted and computed again, then everything that still misses; so is a tile of
    the stored Gram matrix of a kernel.

    Parameters
    ----------
    split
        Which sums are split. No byte of the factor depends on it; None takes what is usual for the executor's threads.
    taken
        What earlier factors have of its ragged tiles.

    Raises
    ------
    NotPositiveDefiniteError
        A pivot is not positive; names the global row, the pivot, alpha and a suggested alpha.
    DamagedChunkError
        A tile of a given (precomputed) matrix or a row chunk is damaged.
    StoreError
        A tile is damaged again and again.
    """
    grid, taken = factor.grid, taken or TakenOver()
    side, workers = grid.num_tiles, executor.num_threads
    split = usual_split(side, workers) if split is None else split
    num_whole = taken.num_rows // grid.tile_size
    if workers >= 2 and side - num_whole < MANY_BLOCKS * workers:
        split = replace(split, new_from=num_whole)
    sums, beside = None, scratch_location(factor)
    if split.num_first(grid, side - 1, side - 1):
        facts = {"split": split.to_dict(), "rows": taken.num_rows}
        create = partial(TileMatrix.create, beside, grid, dtype=factor.array.dtype, attributes=facts)
        try:
            sums = create()
        except StoreMismatchError:  # of an attempt with another split, other workers or other finished rows
            remove_array(beside)
            sums = create()
    task = CholeskyTask(operator, factor, taken, split, sums)

    def again(index: tuple[int, ...]) -> None:
        task.forget_sums(index[0])
        factor.array.delete(index)

    owners = {factor.location: again, **gram_owner(operator, executor)}
    if sums is not None:
        owners[sums.location] = sums.array.delete
    nodes = cholesky_nodes(grid, split, taken.num_rows)
    summary = repaired(lambda: executor.run("factorise", factor_tile, task, nodes, progress), owners)
    remove_array(beside)
    # what was done is counted in tiles
    summary.num_computed -= sum(len(key) > 2 for key in summary.values)
    summary.num_tasks = grid.num_lower
    return summary


def factor_location(store: Any, fields: dict[str, Any]) -> Any:
    """Where the factor with these fields is."""
    return place(store, "factors", key_of(fields) + ".zarr")


@dataclass(frozen=True, kw_only=True)
class CholeskyFactor:
    """A finished factor: solves for any number of right-hand sides."""

    operator: RidgeOperator
    factor: TileMatrix
    workspace: Workspace

    @classmethod
    def prepare(
        cls,
        operator: RidgeOperator,
        workspace: Workspace,
        *,
        precision: Literal["float64", "float32"] = "float64",
        weight_digest: str | None = None,
        source_digest: str = "",
    ) -> CholeskyFactor:
        """Factorise A, continuing a factor with the same key where it was left. n^3 / 3 flops.

        Parameters
        ----------
        precision
            "float64", or "float32" for a factor (and an answer) in single precision at half the disk and time.

        Raises
        ------
        NotPositiveDefiniteError
            A is not positive definite; names the row and a suggested alpha.
        """
        fields = factor_fields(operator, precision, weight_digest, workspace.blas, source_digest)
        location = factor_location(workspace.store, fields)
        with hold_lock(location):
            factor = workspace.matrix(location, operator.grid, precision, fields)
            taken = continue_lineage(operator, factor, "factors", fields, workspace.store)
            summary = factorise(
                operator, factor, workspace.executor, workspace.progress, split=workspace.split, taken=taken
            )
            workspace.record("factorise", summary)
            taken.record(workspace, "factor", operator.grid.n, summary, power=3)
        return cls(operator=operator, factor=factor, workspace=workspace)

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
            n, norms.relative_residual, norms.backward_error, solver="cholesky", precision=self.factor.array.dtype,
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
            BlockColumns.create(rhs.array.store, name + suffix, rhs.grid, rhs.num_columns, self.factor.array.dtype)
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
        operator, factor, work = self.operator, self.factor, self.workspace

        def again(index: tuple[int, ...]) -> None:
            factor.array.delete(index)
            work.record("factorise", factorise(operator, factor, work.executor, work.progress, split=work.split))

        return {factor.location: again}

    def make_durable(self) -> None:
        """fsync the tiles where the workspace is durable; for who reads them without :meth:`substitute`."""
        if self.workspace.durable:
            self.factor.array.sync()
