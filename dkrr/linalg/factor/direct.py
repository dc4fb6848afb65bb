"""The direct solver: a tile Cholesky factor on disk, two substitutions, and the true residual.

Two verbs, split by what they need to know: ``prepare`` sees only the matrix, ``solve`` only right-hand sides.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from dkrr.engine.tasks import RunSummary
from dkrr.errors import DamagedChunkError, ResidualError
from dkrr.linalg.catalogue import continue_lineage, factor_fields, key_of
from dkrr.linalg.factor.cholesky import factorise
from dkrr.linalg.factor.triangular import BlockColumns, SweepTask, sweep
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.residual import ResidualNorms, residual_norms
from dkrr.linalg.solution import Solution, backward_error_bar
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileMatrix

__all__ = ["CholeskyFactor", "CholeskySolver", "Workspace"]


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

    def solve(self, rhs: BlockColumns) -> tuple[BlockColumns, Solution]:
        """Solve A u = rhs for all columns, evaluate the true residual.

        Parameters
        ----------
        rhs : BlockColumns (n, t)
            S Y. The blocks z and u are stored beside it.

        Returns
        -------
        u : BlockColumns (n, t)
        solution : Solution

        Raises
        ------
        ResidualError
            The backward error of a target exceeds 30 n eps: some tile is not what it should be, although its
            checksum is right.
        """
        u = self.substitute(rhs)
        return u, self.judged(residual_norms(self.operator, rhs, u, self.workspace, rhs.array.store))

    def substitute(self, rhs: BlockColumns, suffix: str = "") -> BlockColumns:
        """L^-T L^-1 rhs (n, t), in the precision of the factor; nothing is verified.

        The blocks are kept as "z" and "u" with the suffix. Of a durable store the factor is durable afterwards.
        """

        def columns(name: str) -> BlockColumns:
            return BlockColumns.create(rhs.array.store, name + suffix, rhs.grid, rhs.num_columns, self.solver.precision)

        forward, backward = columns("z"), columns("u")
        # the disk writes what the sweeps read: tiles of the last seconds are on no disk yet, and all are in memory
        with ThreadPoolExecutor(1, thread_name_prefix="dkrr-sync") as thread:
            synced = thread.submit(self.make_durable)
            for source, result, direction in ((rhs, forward, "forward"), (forward, backward, "backward")):
                task = SweepTask(self.factor, source, result, direction)  # type: ignore[arg-type]
                self.workspace.record("solve", self._sweep(task))
            synced.result()
        return backward

    def make_durable(self) -> None:
        """fsync the tiles where the workspace is durable; for who reads them without :meth:`substitute`."""
        if self.workspace.durable:
            self.factor.array.sync()

    def judged(self, norms: ResidualNorms) -> Solution:
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
        seconds = {phase: summary.seconds for phase, summary in self.workspace.phases.items()}
        return Solution(
            solver="cholesky",
            precision=precision,
            converged=True,
            num_iterations=0,
            relative_residual=norms.relative_residual,
            backward_error=norms.backward_error,
            seconds=seconds,
            message=f"Cholesky factor of {n:,} rows in {self.factor.grid.num_lower:,} tiles, "
            f"largest relative residual {max(norms.relative_residual):.1e}",
        )

    def _sweep(self, task: SweepTask) -> RunSummary:
        work = self.workspace
        repairs = Repairs()
        while True:
            try:
                return sweep(task, work.executor, work.progress)
            except DamagedChunkError as damage:
                # a tile that was lost after it was written: compute it again, then go on
                if damage.path != self.factor.location:
                    raise
                repairs.add(damage)
                self.factor.delete(*damage.index)
                again = factorise(self.operator, self.factor, work.executor, work.progress, split=work.split)
                work.record("factorise", again)
