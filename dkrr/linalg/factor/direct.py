"""The direct solver: a tile Cholesky factor on disk, two substitutions, and the true residual.

Two verbs, split by what they need to know: ``prepare`` sees only the matrix, ``solve`` only right-hand sides. With an
intercept s is one more right-hand side, and the rest is :func:`dkrr.linalg.targets.solve_bordered`.

Cost
----
n^3 / 3 flops once; for right-hand sides 4 n^2 t flops and two readings of the factor, and one product with S K S for
the residual. With an intercept the driver holds six (n, t) arrays; a refinement is two more sweeps and a product.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import numpy as np

from dkrr.errors import ResidualError
from dkrr.linalg.blocks import BlockColumns, FloatMatrix, FloatVector
from dkrr.linalg.catalogue import continue_lineage, factor_fields, key_of
from dkrr.linalg.factor.cholesky import factorise
from dkrr.linalg.factor.triangular import substitute
from dkrr.linalg.matmul import OperatorProduct, ResidualNorms, residual_norms
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.passes import Owners
from dkrr.linalg.solution import Solution, backward_error_bar
from dkrr.linalg.targets import solve_bordered, weighted_sums
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileMatrix


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
        return u, self._judged(norms), norms.intercept

    def _bordered(self, rhs: BlockColumns, normal: FloatVector) -> BlockColumns:
        """u of A u + b s = S Y, s^T u = 0."""
        operator, grid, store, numbers = self.operator, rhs.grid, place(rhs.array.store, "bordered"), count()
        product = OperatorProduct(operator, self.workspace, store, phase="residual")

        def solve(r: FloatMatrix) -> FloatMatrix:
            number = next(numbers)
            right = BlockColumns.create(store, f"r-{number}", grid, r.shape[1], "float64").fill(r)
            return self.substitute(right, f"-{number}").whole()

        def sums(u: FloatMatrix) -> FloatVector:
            blocks = range(grid.num_tiles)
            return sum((weighted_sums(u[grid.span(i)], operator.root_weight(i)) for i in blocks), np.zeros(u.shape[1]))

        values = rhs.whole()
        both = solve(np.hstack([values, normal[:, None]]))
        u = solve_bordered(
            solve,
            lambda u: product(u) + operator.alpha * u,
            values,
            normal,
            begun=(both[:, :-1], both[:, -1:]),
            sums=sums,
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

    def _judged(self, norms: ResidualNorms) -> Solution:
        """The facts about an answer with these norms; raises :class:`ResidualError` when it is not good enough."""
        n, precision = self.factor.grid.n, self.solver.precision
        bar = backward_error_bar(n, precision)
        worst = max(norms.backward_error)
        if not worst <= bar:
            target = norms.backward_error.index(worst)
            raise ResidualError(
                f"backward error {worst:.2g} of target {target} exceeds {bar:.2g} (30 n eps, {precision})",
                hint="a stored tile is not what it should be: check the store with `dkrr info --verify`, "
                "remove the factor and start again",
                backward_error=norms.backward_error,
            )
        return Solution(
            solver="cholesky",
            precision=precision,
            converged=True,
            num_iterations=0,
            relative_residual=norms.relative_residual,
            backward_error=norms.backward_error,
            seconds={phase: summary.seconds for phase, summary in self.workspace.phases.items()},
            message=f"Cholesky factor of {n:,} rows in {self.factor.grid.num_lower:,} tiles, "
            f"largest relative residual {max(norms.relative_residual):.1e}",
        )


def factor_owner(operator: RidgeOperator, factor: TileMatrix, workspace: Workspace) -> Owners:
    """Computes a tile of a factor again."""

    def again(index: tuple[int, ...]) -> None:
        factor.array.delete(index)
        summary = factorise(operator, factor, workspace.executor, workspace.progress, split=workspace.split)
        workspace.record("factorise", summary)

    return {factor.location: again}
