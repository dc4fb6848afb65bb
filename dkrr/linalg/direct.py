"""The direct solver: a tile Cholesky factor on disk, two substitutions, and the true residual.

Two verbs, split by what they need to know: ``prepare`` sees only the matrix, ``solve`` only right-hand sides. With an
intercept s is one more right-hand side, and the rest is :func:`dkrr.linalg.operators.solve_bordered`.

Cost
----
n^3 / 3 flops once; for right-hand sides 4 n^2 t flops and two readings of the factor, and one product with S K S for
the residual. With an intercept the driver holds six (n, t) arrays; a refinement is two more sweeps and a product.

Left-looking tile Cholesky: A = L L^T, one task and one file a tile.

    L[j,j] = potrf(A[j,j] - sum_{k<j} L[j,k] L[j,k]^T)
    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T        i > j

A task waits for its left neighbour (i, j-1) and for the diagonal tile (j, j); everything else it reads follows by
transitivity. A[i,j] is needed exactly once, so it is evaluated from the kernel on the spot or read from a stored Gram
matrix. A valid tile is the checkpoint: a factorisation that was interrupted is run again, and tasks whose tile is
valid return at once, after a look at two of its entries. The order of every sum is fixed by the tile indices, so a
resumed factor has the same bytes as an undisturbed one.

A factor that extends an earlier one keeps the finished rows of ragged tiles and computes the others. Rows s <= p < e of
an off-diagonal tile need the same rows of the tiles to their left and nothing of each other:

    L[s:e, j] = (A[s:e, j] - sum_{k<j} L[s:e, k] L[j, k]^T) L[j, j]^-T

Of a diagonal tile whose first r rows are finished, with the new rows P = A[r:, :] - sum_k L[r:, k] L[i, k]^T:

    L21 = P1 L11^-T,     L22 = potrf(P2 - L21 L21^T)

The first terms of a long sum may be computed ahead of the others, as a task of their own, whose result waits in a
scratch matrix for the task that writes the tile.

With one task a tile the sum of column j begins when column j - 1 is finished, so that few tiles on many workers wait
for each other: every column costs the time of its longest sum. A cut helps, and changes no byte of the factor, since
the terms stay in their order and what is cut off is stored as it is, in the factor's precision.

The *first terms* of a sum, all but the last w, are a task of their own that waits for column j - w - 1 only; the task
of the tile goes on from there. Simulated, 20 tiles a side on 32 workers are busy 15 % of the time without and 51 % with
w = 2; 122 tiles on 100 workers 27 % and 95 % with w = 6 (:mod:`dkrr.fit.rates`).

Rows that an extension adds are few row blocks, and each is a chain of tasks: all columns are split there, so that first
terms of several sums are made side by side, ahead of the chain. Simulated, 30,000 rows and 300 more keep two workers
98 % busy (54 % without), and take 0.41 of the time on four.

First terms are kept in a scratch matrix beside the factor, not in the memory of workers: what is lost with its worker
would have to be computed again together with everything that waits for it, and reading a tile back costs a thirtieth of
one product. It is named after the factor, so that an attempt finds what an earlier one left.

Cost of the graph
-----------------
N (N + 1) / 2 nodes with at most three dependencies, and as many again where every column is split. The scratch matrix
holds about (w + 1) N tiles at most.
n^3 / (3 b) elements are read, n^2 / 2 written; memory of a task: one accumulator and two mapped tiles.

References
----------
Golub and Van Loan, Matrix Computations, 4th ed., section 4.2; Buttari et al., A class of parallel tiled linear algebra
algorithms for multicore architectures, Parallel Computing 35 (2009).
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np

from dkrr.engine.tasks import Key, Node, RunSummary
from dkrr.errors import DamagedChunkError, DataError, StoreMismatchError
from dkrr.linalg.catalogue import TakenOver, continue_lineage, factor_fields, key_of
from dkrr.linalg.gram import TileTask, factor_sample_agrees, gram_owner
from dkrr.linalg.matmul import OperatorProduct, residual_norms
from dkrr.linalg.operators import BlockColumns, FloatMatrix, FloatVector, RidgeOperator, solve_bordered
from dkrr.linalg.solution import Solution, no_factor
from dkrr.linalg.triangular import substitute
from dkrr.linalg.workspace import Owners, Workspace, repaired
from dkrr.store.chunks import FloatArray, buffer
from dkrr.store.files import join, name_of, parent_of, place, remove_array, remove_drafts
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import gemm_nt, lost_pivot, potrf, syrk, trsm_right
from dkrr.tiles.store import made

logger = logging.getLogger("dkrr.linalg")


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which sums are split, and where.

    Parameters
    ----------
    num_columns
        The last so many columns are split; 0 for none.
    num_last
        w, the terms that are left to the task of the tile.
    """

    num_columns: int = 0
    num_last: int = 1

    def num_first(self, grid: TileGrid, j: int) -> int:
        """So many terms of a sum of column j are a task of their own."""
        return j - self.num_last if j >= max(self.num_last + 2, grid.num_tiles - self.num_columns) else 0

    def to_dict(self) -> dict[str, int]:
        """Plain data, for the record of a run."""
        return asdict(self)


@dataclass(frozen=True)
class CholeskyTask(TileTask):
    """Everything a task of the factorisation needs; the matrix is L, and what is taken over are finished rows.

    Parameters
    ----------
    split
        Which sums have first terms that are tasks of their own.
    sums
        These first terms, if there are any.
    """

    split: Split = field(default_factory=Split)
    sums: TileMatrix | None = None

    def read_sum(self, i: int, j: int) -> FloatArray | None:
        """The first terms of the sum of tile (i, j); None where there are none.

        Raises
        ------
        DamagedChunkError
            They are there, and are not what was written.
        """
        if self.sums is not None and self.split.num_first(self.grid, j):
            try:
                return self.sums.read(i, j)
            except DamagedChunkError:
                if self.sums.is_valid(i, j):
                    raise  # else there are none, or a twin of this task has just removed them
        return None

    def forget_sums(self, i: int) -> None:
        """Remove all that row block i went into: one of its tiles was wrong."""
        for tile in self.grid.lower() if self.sums is not None else ():
            if i in tile:
                self.sums.array.delete(tile)  # type: ignore[union-attr]


def factor_tile(task: CholeskyTask, i: int, j: int, part: int | None = None) -> tuple[bool, dict[str, Any]] | bool:
    """Compute and write L[i, j], or the first terms of its sum, unless it is there.

    A tile that is there was written by an earlier run, or by an attempt whose receipt was lost. Two of its entries are
    compared with A: it may have changed places with another tile, whose checksum is as good.
    """
    factor, sums = task.matrix, task.sums
    suspect = factor.is_valid(i, j)
    if part is not None and sums is not None:
        if suspect or sums.is_valid(i, j):
            return False
        compute_sum, write_sum = partial(_first_terms, task, i, j), partial(sums.write, i, j)
        return made("cholesky.sum", compute_sum, write_sum, partial(_not_finite, task, i, j)), {"part": 1}
    if suspect:
        if factor_sample_agrees(task.operator, factor, i, j):
            return False
        logger.warning("tile (%d, %d) of %s does not give back the matrix; computing it again", i, j, factor.location)

    def compute() -> Any:
        # a tile that was wrong may be so because the rows that it kept are
        c, info = _tile(task, i, j, alone=suspect)
        if i == j:
            _check_pivots(task, j, c, info)
        return c

    def write(c: Any) -> None:
        if suspect:
            task.forget_sums(i)  # first: what comes between must not leave parts of a tile that is gone
        factor.write(i, j, c)

    made("cholesky.tile", compute, write, partial(_not_finite, task, i, j))
    if sums is not None:
        sums.array.delete((i, j))  # so that only those of a few columns exist at once
    return True


def _tile(task: CholeskyTask, i: int, j: int, *, alone: bool) -> tuple[FloatArray, int]:
    """Tile (i, j) from its finished rows, the first terms of its sum, and what is left to compute; and potrf's answer.

    That is 0 if it is good, else counts from the first row of the tile. ``alone``: from A and the tiles to its left.
    """
    c: FloatArray = buffer("accumulator", task.grid.shape(i, j), task.matrix.dtype)
    first = 0 if alone else task.taken.first(i)
    # tiles may change places
    kept = task.taken.read(i, j, partial(factor_sample_agrees, task.operator)) if first else None
    begin = 0 if kept is None else first
    if kept is not None:
        c[:first, : kept.shape[1]] = kept
        del kept  # a tile that is mapped counts as memory
    spans = [(start, stop) for start, stop in ((0, first), (first, len(c))) if begin <= start < stop]
    for start, stop in spans:
        block = c[start:stop, : stop if i == j else None]
        _update(task, i, j, start, block, 0 if alone or start < first else None)
        if i != j:
            trsm_right(block, task.matrix.read(j, j))
    if i == j:
        c[:first, first:] = 0
        for start, stop in spans:
            if start:
                trsm_right(c[start:, :start], c[:start, :start])
                syrk(c[start:, start:], c[start:, :start])
            info = potrf(c[start:stop, start:stop])
            if info:
                return c, start + info
    return c, 0


def _update(
    task: CholeskyTask, i: int, j: int, start: int, c: FloatArray, begin: int | None = 0, last: int | None = None
) -> None:
    """c <- A[s, j] - sum_{k<last} L[s, k] L[j, k]^T for the rows s of tile (i, j) from ``start`` on, k ascending.

    Of a diagonal tile its first columns. ``last`` is j where it is not given. With ``begin`` None what there is of the
    sum is taken from its first terms.
    """
    factor, rows = task.matrix, slice(start, start + len(c))
    begun = task.read_sum(i, j) if begin is None else None
    if begun is None:
        begin = 0
        task.operator.tile(i, j, c, start=start, stop=rows.stop)
    else:
        begin = task.split.num_first(task.grid, j)
        c[...] = begun[rows, : c.shape[1]]
        del begun
    for k in range(begin, j if last is None else last):
        # at most two tiles are mapped at once, and both are dropped after their product
        right = factor.read(j, k)
        if i != j:
            gemm_nt(c, factor.read(i, k)[rows], right)
        elif len(c) == task.grid.rows(i):
            syrk(c, right)
        else:
            gemm_nt(c, right[rows], right[: c.shape[1]])
        del right


def _first_terms(task: CholeskyTask, i: int, j: int) -> FloatArray:
    """The first terms of the sum of tile (i, j), in the rows that are not finished in an earlier factor."""
    c: FloatArray = buffer("accumulator", task.grid.shape(i, j), task.matrix.dtype)
    first = task.taken.first(i)
    c[:first] = 0
    _update(task, i, j, first, c[first:], last=task.split.num_first(task.grid, j))
    return c


def _check_operands(task: CholeskyTask, i: int, j: int) -> None:
    """Blame a stored tile for a result that cannot be used, before the matrix is blamed.

    What is not finite was read directly: a task that reads it writes nothing. A wrong number may have come a longer
    way, so tiles are compared with A column by column, and the first that disagrees is the one.

    Raises
    ------
    DamagedChunkError
        A tile that the sum for (i, j) rests on passes its checksum and is not finite, or does not give back the matrix.
    """
    factor = task.matrix
    read = [(row, k) for k in range(j) for row in dict.fromkeys((j, i))] + ([(j, j)] if i != j else [])
    factor.check_finite(read)
    for k in range(j + (i != j)):
        for row in dict.fromkeys((*range(k, j + 1), i)):
            if (row, k) != (i, j) and not factor_sample_agrees(task.operator, factor, row, k):
                raise factor.wrong(row, k, "does not give back the matrix")


def _check_pivots(task: CholeskyTask, j: int, c: FloatArray, info: int) -> None:
    """Name the row, the pivot and an alpha that would do, unless a stored tile is to blame."""
    grid, alpha, diagonal = task.grid, task.operator.alpha, task.operator.diagonal(j)

    def again() -> FloatArray:
        tile: FloatArray = buffer("accumulator", grid.shape(j, j), task.matrix.dtype)
        _update(task, j, j, 0, tile)
        return np.tril(tile) + np.tril(tile, -1).T

    lost = lost_pivot(c, info, diagonal, alpha, grid.n, again)
    if lost is not None:
        _check_operands(task, j, j)
        where = f"tile ({j}, {j}) of {task.matrix.location}"
        raise no_factor(where, grid.span(j).start, lost, alpha, task.matrix.dtype, grid.n, diagonal)


def _not_finite(task: CholeskyTask, i: int, j: int, c: Any) -> DataError:
    """The error for a tile, unless a stored one that it rests on is to blame."""
    _check_operands(task, i, j)
    row, column = np.argwhere(~np.isfinite(c))[0]
    return DataError(
        f"tile ({i}, {j}) of {task.matrix.location} is not finite at entry ({row}, {column}), "
        f"kernel {task.operator.kernel}",
        hint="scale the features",
    )


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
    (num_whole, rest), shares = divmod(num_finished, grid.tile_size), num_finished < grid.tile_size
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
        h = split.num_first(grid, j)
        if h:
            needed: tuple[Key, ...] = ((i, h - 1),) if i == j else ((i, h - 1), (j, h - 1))
            nodes.append(((h - 1, grid.num_tiles, i), Node((i, j, 0), needed, flops * h * update, shares)))
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
    operator: RidgeOperator, factor: TileMatrix, workspace: Workspace, taken: TakenOver | None = None
) -> RunSummary:
    """Compute every tile of L that is not valid; phase "factorise" of the workspace.

    A tile that a reader finds damaged is deleted and computed again, then everything that still misses; so is a tile of
    the stored Gram matrix of a kernel.

    Parameters
    ----------
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
    grid, taken, executor = factor.grid, taken or TakenOver(), workspace.executor
    side, workers = grid.num_tiles, executor.num_threads
    split = workspace.split or usual_split(side, workers)
    num_whole = taken.num_rows // grid.tile_size
    if workers >= 2 and num_whole and 0 < side - num_whole < MANY_BLOCKS * workers:
        split = Split(num_columns=side, num_last=min(4, max(1, side // 6)))
    sums, beside = None, scratch_location(factor)
    if split.num_first(grid, side - 1):
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
        workspace.delete_damaged(factor, index)

    owners = {factor.location: again, **gram_owner(operator, workspace)}
    if sums is not None:
        owners[sums.location] = sums.array.delete
    nodes = cholesky_nodes(grid, split, taken.num_rows)
    summary = repaired(lambda: executor.run("factorise", factor_tile, task, nodes, workspace.progress), owners)
    remove_array(beside)
    # what was done is counted in tiles
    summary.num_computed -= sum(len(key) > 2 for key in summary.values)
    summary.num_tasks = grid.num_lower
    return workspace.record("factorise", summary)


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
        is_new = str(location) not in workspace.matrices
        with hold_lock(location):
            factor = workspace.matrix(location, operator.grid, precision, fields)
            if factor.missing():  # of a whole one, others may be making a damaged tile again
                remove_drafts(location, "c/**/*")
            taken = continue_lineage(operator, factor, "factors", fields, workspace.store)
            if is_new:  # what is computed later is made again
                workspace.matrices[str(location)].update(factor.missing())
            summary = factorise(operator, factor, workspace, taken)
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
            substitute("solve", self.factor, (rhs, forward, backward), work, self.owner)
            synced.result()
        return backward

    @property
    def owner(self) -> Owners:
        """Computes a tile of the factor again that was lost after it was written."""
        operator, factor, work = self.operator, self.factor, self.workspace

        def again(index: tuple[int, ...]) -> None:
            work.delete_damaged(factor, index)
            factorise(operator, factor, work)

        return {factor.location: again}

    def make_durable(self) -> None:
        """fsync the tiles where the workspace is durable; for who reads them without :meth:`substitute`."""
        if self.workspace.durable:
            self.factor.array.sync()
