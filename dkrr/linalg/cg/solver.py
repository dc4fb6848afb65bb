"""The iterative solver: conjugate gradients around products that run on the workers.

The same two verbs as the direct solver: ``prepare`` sees only the matrix and says what the preconditioner is, ``solve``
takes the right-hand sides, with an alpha for each. The preconditioner is made when it is first applied: a start that is
good already is seen by its residual, before anything is built. There is no factor, and nothing in the store is as large
as n^2, unless the iterations read a stored Gram matrix.

Cost
----
An iteration is one pass over n^2 / 2 kernel entries for all columns and alphas. The driver holds about 8 n t doubles.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.catalogue import key_of, short_name
from dkrr.linalg.cg.checkpoint import EVERY_SECONDS, StoredCheckpoint
from dkrr.linalg.cg.earlier_factor import find_earlier_factor
from dkrr.linalg.cg.errors import too_slow
from dkrr.linalg.cg.forecast import Forecast
from dkrr.linalg.cg.iteration import CGResult, conjugate_gradients
from dkrr.linalg.cg.plane import Plane, PlanePreconditioner, within
from dkrr.linalg.cg.state import CGState
from dkrr.linalg.columns import largest, ratio
from dkrr.linalg.factor.triangular import BlockColumns
from dkrr.linalg.lowrank.preconditioner import build_low_rank, choose_rank, low_rank_fields, low_rank_location
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.precondition import Deferred, Identity, Openable, Preconditioner
from dkrr.linalg.residual import sampled_row_sums
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.solution import Solution, limit_bar
from dkrr.linalg.trace import ResidualTrace
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place

__all__ = ["CGSolver", "ExactProduct", "PreparedCG", "already_good", "backward_errors"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CGSolver:
    """Parameters of the iterative solver.

    Parameters
    ----------
    settings
        Tolerance, limit, preconditioner.
    precision
        "float64", or "mixed": kernel entries of an iteration in float32, true residuals in float64; the same answer by
        the residual.
    accept_limit
        Whether an iterate that gets no further above ``tol`` counts as converged where its backward error is that of a
        factor's answer, see :func:`~dkrr.linalg.solution.limit_bar`; else it is a ConvergenceError.
    checkpoint_seconds, checkpoint_iterations
        When the state is kept: after so much time, or so many iterations.
    """

    settings: IterativeSettings
    precision: Literal["float64", "mixed"] = "float64"
    accept_limit: bool = False
    checkpoint_seconds: float = EVERY_SECONDS
    checkpoint_iterations: int | None = None

    def prepare(
        self,
        operator: RidgeOperator,
        workspace: Workspace,
        *,
        weight_digest: str | None = None,
        source_digest: str = "",
        store: Any = None,
        num_columns: int = 1,
        ready: Callable[[], object] = lambda: None,
    ) -> PreparedCG:
        """Say what the preconditioner is. It is made when it is first needed, continuing one where it was left.

        Parameters
        ----------
        operator
            Its alpha is the smallest that will be solved for; an automatic rank goes by it and by ``num_columns``.
        store
            Where it is kept; None means the workspace's store, where fits of the same rows share it.
        ready
            Called before a stored Gram matrix of the operator is read.
        """
        rank = self._rank(operator, workspace, num_columns)
        fields = low_rank_fields(
            operator,
            self.settings,
            max(1, rank),
            workspace.blas,
            weight_digest=weight_digest,
            source_digest=source_digest,
        )
        make: Callable[[], Preconditioner | Openable] = Identity
        inexact = False
        if self.settings.preconditioner == "factor":
            earlier = find_earlier_factor(operator, workspace)
            make, inexact, fields = lambda: earlier, earlier.inexact, {**fields, "factor": earlier.key}
            workspace.reused["preconditioner"] = {
                "rows": earlier.factor.grid.n,
                "of_rows": operator.grid.n,
                "alpha": earlier.alpha,
                "sources": [short_name(earlier.factor.location)],
            }
        if rank:
            location = low_rank_location(workspace.store if store is None else store, fields)
            make = partial(
                build_low_rank,
                operator,
                workspace,
                location,
                self.settings,
                rank=rank,
                weight_digest=weight_digest,
                source_digest=source_digest,
            )
        return PreparedCG(
            solver=self,
            operator=operator,
            workspace=workspace,
            make=cache(make),
            inexact=inexact,
            fields=fields,
            ready=ready,
        )

    def _rank(self, operator: RidgeOperator, workspace: Workspace, num_columns: int) -> int:
        settings = self.settings
        if settings.preconditioner in ("none", "factor"):
            return 0
        if settings.rank != "auto":
            return settings.rank
        return choose_rank(
            operator.grid.n,
            operator.num_features,
            operator.alpha,
            tol=settings.tol,
            num_columns=num_columns,
            num_workers=workspace.executor.num_threads,
        )


@dataclass(frozen=True, kw_only=True)
class PreparedCG:
    """A matrix with its preconditioner: solves for any number of right-hand sides and alphas at once.

    ``make`` gives the preconditioner, the same one whenever it is called; ``inexact`` is what it will be. ``ready`` is
    called before a stored Gram matrix of the operator is read.
    """

    solver: CGSolver
    operator: RidgeOperator
    workspace: Workspace
    make: Callable[[], Preconditioner | Openable]
    fields: dict[str, Any]
    inexact: bool = False
    ready: Callable[[], object] = lambda: None

    @property
    def preconditioner(self) -> Preconditioner | Openable:
        """The preconditioner, made now if it was not needed before."""
        return self.make()

    def solve(
        self,
        rhs: BlockColumns,
        alpha: FloatVector,
        start: FloatMatrix | None = None,
        *,
        in_plane: bool = False,
    ) -> tuple[BlockColumns, Solution]:
        """Solve (S K S + alpha_k I) u_k = rhs_k for all columns.

        Parameters
        ----------
        rhs : BlockColumns (n, t)
            S Y. The state of an interrupted solve, and u, are kept beside it.
        alpha : (t,)
            One ridge a column; that of the operator plays no part.
        start : (n, t), optional
            A guess of u. An interrupted solve goes on from its own state instead.
        in_plane
            Solve for an intercept b as well: A u + b s = S Y with s^T u = 0, see :mod:`dkrr.linalg.cg.plane`.

        Returns
        -------
        u : BlockColumns (n, t)
        solution : Solution

        Raises
        ------
        NotPositiveDefiniteError, PreconditionerError, ConvergenceError
            See :func:`dkrr.linalg.cg.iteration.conjugate_gradients`.
        """
        work, store, solver = self.workspace, rhs.array.store, self.solver
        values: FloatMatrix = np.vstack([rhs.read_rows(i) for i in range(rhs.grid.num_tiles)]).astype(
            np.float64, copy=False
        )
        alpha = np.broadcast_to(np.asarray(alpha, np.float64), (rhs.num_columns,))
        plane = self._plane() if in_plane else None
        if plane is not None:
            plane.project(values)
            start = None if start is None else plane.project(np.array(start, dtype=np.float64))
        checkpoint = StoredCheckpoint(
            place(store, "state"),
            key_of(self._fingerprint(values, alpha) | ({"in_plane": True} if in_plane else {})),
            every_seconds=solver.checkpoint_seconds,
            every_iterations=solver.checkpoint_iterations,
            durable=work.durable,
        )
        trace = work.trace("conjugate gradients", solver.settings.tol, alpha)
        mixed = solver.precision == "mixed"
        stored = self.operator.gram is not None and self.operator.kernel is not None
        inexact = mixed or stored
        with (
            Deferred(partial(self._opened, store, trace), inexact=self.inexact) as preconditioner,
            OperatorProduct(
                self.operator, work, store, phase="residual" if inexact else "multiply", progress=None
            ) as product,
            OperatorProduct(
                self.operator,
                work,
                store,
                precision="float32" if mixed else "float64",
                use_gram=stored,
                progress=None,
            ) as approximate,
        ):
            if inexact and self.operator.kernel is not None:
                # a column of sums in every true residual would be a tenth of it; four times as much with signed entries
                product.row_sums = sampled_row_sums(self.operator)
            exact = within(plane, ExactProduct(product, always=inexact and self.operator.kernel is None))

            def is_limit(state: CGState) -> NDArray[np.bool_]:
                return backward_errors(product, alpha, values, state.x, state.largest) <= limit_bar(len(values))

            result = conjugate_gradients(
                within(plane, self._when_ready(approximate)) if inexact else exact,
                values,
                alpha,
                preconditioner if plane is None else PlanePreconditioner(plane, preconditioner),
                solver.settings,
                start=start,
                norm=None if mixed else product.norm,
                true_multiply=exact if inexact else None,
                checkpoint=checkpoint,
                on_iteration=self._report(rhs.num_columns, trace),
                is_limit=is_limit if solver.accept_limit else None,
            )
            trace.replace(result.history)
            num_products = product.num_products + approximate.num_products
        u = BlockColumns.create(store, "u", rhs.grid, rhs.num_columns, "float64")
        for i, panel in u.blocks():
            u.write(i, panel, result.x[u.grid.span(i), u.columns(panel)])
        backward = backward_errors(product, alpha, values, result.x, result.largest_residual)
        if start is not None:
            work.reused.setdefault("start", {})["relative_residual"] = float(result.history[0].max())
        return u, self._solution(result, backward, num_products, preconditioner)

    def _opened(self, store: Any, trace: ResidualTrace) -> contextlib.AbstractContextManager[Preconditioner]:
        """The preconditioner, ready to be applied."""
        made = self.preconditioner
        trace.name = f"conjugate gradients, {made.description}"
        return made.open(self.workspace, store) if isinstance(made, Openable) else contextlib.nullcontext(made)

    def _when_ready(self, product: OperatorProduct) -> Callable[[FloatMatrix], FloatMatrix]:
        """The product, whose tiles are there when it is first called."""

        def multiply(v: FloatMatrix) -> FloatMatrix:
            self.ready()
            return product(v)

        return multiply

    def _plane(self) -> Plane:
        root = self.operator.root_weights()
        return Plane(np.ones(self.operator.grid.n) if root is None else root)

    def _fingerprint(self, values: FloatMatrix, alpha: FloatVector) -> dict[str, Any]:
        settings = self.solver.settings
        return self.fields | {
            "alpha": alpha.tolist(),
            "tol": settings.tol,
            "precision": self.solver.precision,
            "gram": "on_the_fly" if self.operator.gram is None else "stored",
            "rhs": hashlib.sha256(np.ascontiguousarray(values).data.cast("B")).hexdigest(),
        }

    def _report(self, num_columns: int, trace: ResidualTrace) -> Callable[[int, FloatVector], None]:
        """Residuals for the trace, progress in iterations, and the end of an iteration that another way outruns."""
        settings, work = self.solver.settings, self.workspace
        flops = 2.0 * self.operator.grid.n**2 * num_columns
        forecast = Forecast(settings.tol, settings.iterations, work.foreseen)

        def report(iteration: int, relative: FloatVector) -> None:
            trace.add(iteration, relative)
            forecast.add(iteration, float(relative.max()))
            if forecast.too_slow(iteration, work.other_seconds):
                assert forecast.foreseen is not None  # noqa: S101  (narrows the type)
                raise too_slow(relative, iteration, forecast.foreseen.high, forecast.seconds_left)
            if work.progress is not None:
                total = forecast.total
                work.progress(forecast.phase, iteration, total, iteration * flops, total * flops)

        return report

    def _solution(
        self, result: CGResult, backward: FloatVector, num_products: int, preconditioner: Deferred
    ) -> Solution:
        converged = bool(result.converged.all())
        missing = int((~result.converged).sum())
        message = (
            f"conjugate gradients, {result.num_iterations:,} iterations and {num_products:,} products, "
            f"preconditioner: {preconditioner.description}, "
            f"largest relative residual {result.relative_residual.max():.1e}"
        )
        begun = float(result.history[0].max())
        if 0 < begun < 1:
            message += f", from earlier coefficients whose residual was {begun:.1e}"
        if converged and begun and not result.num_iterations and preconditioner.made is None:
            message = f"conjugate gradients, {num_products:,} product: {already_good(begun)}"
        above = result.converged & (result.relative_residual > self.solver.settings.tol)
        if above.any():
            message += (
                f": above {self.solver.settings.tol:.1e} in {above.sum()} of {len(backward)} targets and the limit of "
                f"float64, backward error {backward[above].max():.1e}"
            )
        if not converged:
            message += (
                f"; NOT CONVERGED to {self.solver.settings.tol:.1e} in {missing} of {len(backward)} targets, "
                "which was allowed"
            )
        return Solution(
            solver="cg",
            precision=self.solver.precision,
            converged=converged,
            num_iterations=result.num_iterations,
            relative_residual=result.relative_residual.tolist(),
            backward_error=backward.tolist(),
            seconds={phase: summary.seconds for phase, summary in self.workspace.phases.items()},
            message=message,
        )


def already_good(relative_residual: float) -> str:
    """What a solution says of a start that was the answer."""
    return f"the start already has residual {relative_residual:.1e}; nothing was built"


class ExactProduct:
    """A float64 product that also sums up the rows of |S K S|, for the norm of the matrix, unless it has ``row_sums``.

    Parameters
    ----------
    product
        In float64 and from the kernel.
    always
        In every pass, not only in the first one: for a product that is not the one of the iterations, whose bits must
        not depend on whether a process was killed in between.
    """

    def __init__(self, product: OperatorProduct, *, always: bool) -> None:
        self.product, self.always = product, always

    def __call__(self, v: FloatMatrix) -> FloatMatrix:
        if self.product.row_sums is not None and not self.always:
            return self.product(v)
        result, self.product.row_sums = self.product.with_row_sums(v)
        return np.ascontiguousarray(result)


def backward_errors(
    product: OperatorProduct, alpha: FloatVector, rhs: FloatMatrix, x: FloatMatrix, largest_residual: FloatVector
) -> FloatVector:
    """|R| / (|A| |u| + |S Y|) per column in the infinity norm, (t,), from the last true residual.

    |A| is the largest sum of |k_pq| over a row, plus alpha; from some rows, and so perhaps smaller, where products of
    the iterations are approximate, see :func:`~dkrr.linalg.residual.sampled_row_sums`.
    """
    return ratio(largest_residual, (product.norm() + alpha) * largest(x) + largest(rhs))
