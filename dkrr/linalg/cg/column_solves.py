"""Conjugate gradients for more columns than one block should have, each block kept when it is done.

    (S K S + alpha_k I) x_k = b_k,    k = 1 .. c

Targets, a vector of ones for an intercept, and probes of a diagonal are all columns, each with an alpha. Up to 64
columns share every pass over the kernel, fewer beyond 900,000 rows, so that a block fits 4 GiB; more would gain little,
as their products are then most of a pass. Columns of one alpha stay together: they need as many iterations.

A block that is done leaves its solutions and a mark with its key; an interrupted one goes on from the checkpoint of its
iteration. What a mark names and is damaged is solved again.

Cost
----
Iterations as in :mod:`dkrr.linalg.cg.iteration`. The calling process holds about 9 n doubles for each column of a block
while it is solved, and what is asked for of the solutions afterwards; 8 n c bytes on disk.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DamagedChunkError
from dkrr.failpoints import failpoint
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cg.solver import PreparedCG
from dkrr.linalg.keys import key_of
from dkrr.linalg.repairs import Repairs
from dkrr.stores import place, read_json, remove_array, write_json

__all__ = ["MAX_COLUMNS", "Column", "ColumnSolves"]

logger = logging.getLogger("dkrr.linalg")

MAX_COLUMNS = 64
# of the calling process, which holds 9 n doubles for each column of a block
MAX_BLOCK_BYTES = 4 << 30

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """One system: its ridge, and which right-hand side it has."""

    alpha: float
    kind: Literal["target", "ones", "probe"]
    index: int = 0


@dataclass(frozen=True)
class _Done:
    """A block that is solved: where, and how well."""

    location: str
    columns: tuple[Column, ...]
    relative_residual: tuple[float, ...]
    num_iterations: int


class ColumnSolves:
    """Solutions of columns, computed by :meth:`run`, read by :meth:`take`.

    Parameters
    ----------
    prepared
        Operator and preconditioner.
    store
        Folder or URL for these columns alone.
    columns
        Any number; distinct. Those of one alpha follow one another.
    values
        Gives the right-hand side (n,) of a column, the same whenever it is asked.
    tol
        Relative residual to reach; None means that of the solver.
    """

    def __init__(
        self,
        prepared: PreparedCG,
        store: Any,
        columns: Sequence[Column],
        values: Callable[[Column], FloatVector],
        *,
        tol: float | None = None,
    ) -> None:
        solver = prepared.solver
        settings = solver.settings if tol is None else replace(solver.settings, tol=tol)
        self.prepared = replace(prepared, solver=replace(solver, settings=settings))
        self.store, self.values = store, values
        self.grid = prepared.operator.grid
        most = max(1, min(MAX_COLUMNS, MAX_BLOCK_BYTES // (9 * 8 * self.grid.n)))
        count = -(-len(columns) // most)
        bounds = [k * len(columns) // max(1, count) for k in range(count + 1)]
        self._blocks = [tuple(columns[start:stop]) for start, stop in pairwise(bounds)]
        self._done: dict[int, _Done] = {}
        self._place = {column: (k, j) for k, block in enumerate(self._blocks) for j, column in enumerate(block)}
        self._repairs = Repairs()

    def run(self) -> None:
        """Solve every block that is not done.

        Raises
        ------
        NotPositiveDefiniteError, PreconditionerError, ConvergenceError
            See :func:`dkrr.linalg.cg.iteration.conjugate_gradients`.
        """
        for number in range(len(self._blocks)):
            self._settle(number)

    def take(self, columns: Sequence[Column]) -> FloatMatrix:
        """X (n, c) of some columns; a block that is damaged by now is solved again."""
        found = np.empty((self.grid.n, len(columns)))
        numbers = {self._place[column][0] for column in columns}
        for number in sorted(numbers):
            here = [(k, self._place[column][1]) for k, column in enumerate(columns) if self._place[column][0] == number]
            into, out = [k for k, _ in here], [j for _, j in here]
            while True:
                done = self._settle(number)
                try:
                    x = BlockColumns.create(done.location, "u", self.grid, len(done.columns), "float64")
                    for i in range(self.grid.num_tiles):
                        found[self.grid.span(i), into] = x.read_rows(i)[:, out]
                    break
                except DamagedChunkError as damage:
                    self._repairs.add(damage)
                    del self._done[number]
                    remove_array(done.location)
        return found

    def relative_residual(self, columns: Sequence[Column]) -> FloatVector:
        """|b - A x| / |b| of some columns (c,), true."""
        places = [self._place[column] for column in columns]
        return np.array([self._settle(number).relative_residual[j] for number, j in places])

    @property
    def num_iterations(self) -> int:
        """Of all blocks together."""
        return sum(self._settle(number).num_iterations for number in range(len(self._blocks)))

    def remove(self) -> None:
        """Remove everything that was kept."""
        self._done.clear()
        remove_array(self.store)

    def _settle(self, number: int) -> _Done:
        """The block, solved now if it has to be."""
        if number in self._done:
            return self._done[number]
        columns = self._blocks[number]
        values = np.column_stack([self.values(column) for column in columns])
        alpha = np.array([column.alpha for column in columns])
        key = self._key(values, alpha)
        location = place(self.store, key)
        mark = read_json(location, "done.json")
        if mark is None:
            mark = self._solve(location, values, alpha)
        else:
            logger.info("block %d of %d is there already", number + 1, len(self._blocks))
        self._done[number] = _Done(location, columns, tuple(mark["relative_residual"]), int(mark["num_iterations"]))
        return self._done[number]

    def _solve(self, location: str, values: FloatMatrix, alpha: FloatVector) -> dict[str, Any]:
        rhs = BlockColumns.create(location, "rhs", self.grid, values.shape[1], "float64")
        for i, panel in rhs.blocks():
            rhs.write(i, panel, values[self.grid.span(i), rhs.columns(panel)])
        del values
        _, solution = self.prepared.solve(rhs, alpha)
        failpoint("columns.block.before_mark")
        mark = {"relative_residual": solution.relative_residual, "num_iterations": solution.num_iterations}
        write_json(location, "done.json", mark)
        failpoint("columns.block.after_mark")
        for name in ("rhs", "state"):
            remove_array(place(location, name))
        return mark

    def _key(self, values: FloatMatrix, alpha: FloatVector) -> str:
        solver = self.prepared.solver
        fields = self.prepared.fields | {
            "alpha": alpha.tolist(),
            "tol": solver.settings.tol,
            "precision": solver.precision,
            "tile_size": self.grid.tile_size,
            "gram": "on_the_fly" if self.prepared.operator.gram is None else "stored",
            "rhs": hashlib.sha256(np.ascontiguousarray(values).data.cast("B")).hexdigest(),
        }
        return key_of(fields)
