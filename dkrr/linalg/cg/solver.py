"""How many iterations are left: from the residuals so far, and, before they tell, from what the plan foresaw.

    log |r_k| is about a - s k    =>    (log |r_k| - log tol) / s  iterations more

s is the median of the slopes between all pairs of the last points (Theil and Sen), so that a residual that jumps when
the true one takes its place does not turn it. Up to the upper end of the plan's range the number stays between its
lower end and twice its upper end.

References
----------
Sen (1968), Estimates of the regression coefficient based on Kendall's tau.

The iterative solver: conjugate gradients around products that run on the workers.

The same two verbs as the direct solver: ``prepare`` sees only the matrix and says what the preconditioner is, ``solve``
takes the right-hand sides, with an alpha for each. The preconditioner is made when it is first applied: a start that is
good already is seen by its residual, before anything is built. There is no factor, and nothing in the store is as large
as n^2, unless the iterations read a stored Gram matrix.

Cost
----
An iteration is one pass over n^2 / 2 kernel entries for all columns and alphas. The driver holds about 8 n t doubles.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from math import ceil, inf, log
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.blocks import BlockColumns, FloatMatrix, FloatVector, largest, ratio
from dkrr.linalg.catalogue import key_of, short_name
from dkrr.linalg.cg.checkpoint import EVERY_SECONDS, StoredCheckpoint
from dkrr.linalg.cg.factor_precondition import find_earlier_factor
from dkrr.linalg.cg.iteration import CGResult, CGState, conjugate_gradients, too_slow
from dkrr.linalg.cg.precondition import Deferred, Identity, Plane, PlanePreconditioner, Preconditioner, within
from dkrr.linalg.lowrank.keys import low_rank_fields, low_rank_location
from dkrr.linalg.lowrank.preconditioner import build_low_rank
from dkrr.linalg.lowrank.rpcholesky import choose_rank
from dkrr.linalg.matmul import OperatorProduct, sampled_row_sums
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.solution import Foreseen, IterativeSettings, Solution, is_limit
from dkrr.linalg.workspace import ResidualTrace, Workspace
from dkrr.store.files import place

# fewer points tell nothing, more are of an earlier stage of the iteration
LEAST_POINTS, MOST_POINTS = 5, 40


class Forecast:
    """The iterations and seconds that one call of conjugate gradients still needs.

    Parameters
    ----------
    tol, limit
        Relative residual to reach, and iterations allowed.
    foreseen
        What a plan says; None where there is none.
    clock
        Seconds that never run backwards.
    """

    def __init__(
        self, tol: float, limit: int, foreseen: Foreseen | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.tol, self.limit, self.clock = tol, limit, clock
        self.foreseen = foreseen if foreseen is not None and foreseen.high else None
        self._points: deque[tuple[int, float, float]] = deque(maxlen=MOST_POINTS)

    def add(self, iteration: int, relative: float) -> None:
        """The largest relative residual of all columns after an iteration."""
        self._points.append((iteration, log(max(relative, 1e-300)), self.clock()))

    @property
    def has_trend(self) -> bool:
        """Whether the residuals tell anything yet."""
        return len(self._points) >= LEAST_POINTS

    @property
    def iterations_left(self) -> float:
        """By the trend alone; infinite where the residual does not fall."""
        number, level, _ = self._points[-1]
        missing = level - log(self.tol)
        if missing <= 0:
            return 0.0
        # the later half: what went before is another stage
        later = [point for point in self._points if point[0] >= number // 2]
        points = np.array([point[:2] for point in (later if len(later) >= LEAST_POINTS else self._points)])
        first, second = np.triu_indices(len(points), 1)
        slopes = (points[second, 1] - points[first, 1]) / (points[second, 0] - points[first, 0])
        slope = -float(np.median(slopes))
        return missing / slope if slope > 0 else inf

    @property
    def seconds_left(self) -> float:
        """By the trend, and at the pace of the last iterations."""
        (first, _, begun), (last, _, now) = self._points[0], self._points[-1]
        return self.iterations_left * (now - begun) / max(1, last - first)

    @property
    def phase(self) -> str:
        """The phase's name, with what the plan foresees until the residuals tell more."""
        if self.foreseen is None or self.has_trend or round(self.foreseen.low) >= round(self.foreseen.high):
            return "cg"
        return f"cg, {self.foreseen.low:,.0f} to {self.foreseen.high:,.0f} foreseen"

    @property
    def total(self) -> int:
        """Iterations in all, as far as is known; 0 where nothing is."""
        number = self._points[-1][0]
        if self._points[-1][1] <= log(self.tol):
            return number
        found = number + self.iterations_left if self.has_trend else inf
        if self.foreseen is not None and number <= self.foreseen.high:
            found = self.foreseen.high if found == inf else min(max(found, self.foreseen.low), 2 * self.foreseen.high)
        return 0 if found == inf else min(self.limit, max(number, ceil(found)))

    def too_slow(self, iteration: int, other_seconds: Callable[[], float | None] | None) -> bool:
        """Whether another way is done sooner: after twice the iterations foreseen, by the trend so far."""
        if self.foreseen is None or other_seconds is None or iteration <= 2 * self.foreseen.high or not self.has_trend:
            return False
        left = self.seconds_left
        if left == 0:
            return False
        price = other_seconds()
        return price is not None and left > price


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
        factor's answer, see :func:`~dkrr.linalg.solution.is_limit`; else it is a ConvergenceError.
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
        inexact = False
        location = low_rank_location(workspace.store if store is None else store, fields)

        @cache
        def built() -> Preconditioner:
            digests = {"weight_digest": weight_digest, "source_digest": source_digest}
            return build_low_rank(operator, workspace, location, self.settings, rank=rank, **digests)  # type: ignore[arg-type]

        def make(scratch: Any) -> Preconditioner:
            return built() if rank else Identity()

        if self.settings.preconditioner == "factor":
            earlier = find_earlier_factor(operator, workspace)
            inexact, fields = earlier.inexact, {**fields, "factor": earlier.key}
            workspace.reused["preconditioner"] = {
                "rows": earlier.factor.grid.n,
                "of_rows": operator.grid.n,
                "alpha": earlier.alpha,
                "sources": [short_name(earlier.factor.location)],
            }

            def make(scratch: Any) -> Preconditioner:
                return earlier.open(workspace, scratch)

        return PreparedCG(
            solver=self,
            operator=operator,
            workspace=workspace,
            make=make,
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

    ``make`` gives the preconditioner, whose vectors pass below a scratch folder; ``inexact`` is what it will be.
    ``ready`` is called before a stored Gram matrix of the operator is read.
    """

    solver: CGSolver
    operator: RidgeOperator
    workspace: Workspace
    make: Callable[[Any], Preconditioner]
    fields: dict[str, Any]
    inexact: bool = False
    ready: Callable[[], object] = lambda: None

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
            Solve for an intercept b as well: A u + b s = S Y with s^T u = 0, see :mod:`dkrr.linalg.cg.precondition`.

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
        values = rhs.whole()
        alpha = np.broadcast_to(np.asarray(alpha, np.float64), (rhs.num_columns,))
        plane = Plane(self.operator.normal()) if in_plane else None
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
        product = OperatorProduct(self.operator, work, store, phase="residual" if inexact else "multiply", quiet=True)
        precision: Literal["float64", "float32"] = "float32" if mixed else "float64"
        approximate = OperatorProduct(self.operator, work, store, precision=precision, use_gram=stored, quiet=True)

        def make() -> Preconditioner:
            made = self.make(store)
            trace.name = f"conjugate gradients, {made.description}"
            return made

        preconditioner = Deferred(make, inexact=self.inexact)
        if inexact and self.operator.kernel is not None:
            # a column of sums in every true residual would be a tenth of it; four times as much with signed entries
            product.row_sums = sampled_row_sums(self.operator)
        exact = within(plane, partial(product.exact, always=inexact and self.operator.kernel is None))

        def judged(state: CGState) -> NDArray[np.bool_]:
            backward = backward_errors(product, alpha, values, state.x, state.largest)
            return is_limit(len(values), state.relative, backward)

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
            is_limit=judged if solver.accept_limit else None,
        )
        trace.replace(result.history)
        num_products = product.num_products + approximate.num_products
        u = BlockColumns.create(store, "u", rhs.grid, rhs.num_columns, "float64").fill(result.x)
        backward = backward_errors(product, alpha, values, result.x, result.largest_residual)
        if start is not None:
            work.reused.setdefault("start", {})["relative_residual"] = float(result.history[0].max())
        return u, self._solution(result, backward, num_products, preconditioner)

    def _when_ready(self, product: OperatorProduct) -> Callable[[FloatMatrix], FloatMatrix]:
        """The product, whose tiles are there when it is first called."""

        def multiply(v: FloatMatrix) -> FloatMatrix:
            self.ready()
            return product(v)

        return multiply

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
            message = (
                f"conjugate gradients, {num_products:,} product: the start already has residual {begun:.1e}; "
                "nothing was built"
            )
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


def backward_errors(
    product: OperatorProduct, alpha: FloatVector, rhs: FloatMatrix, x: FloatMatrix, largest_residual: FloatVector
) -> FloatVector:
    """|R| / (|A| |u| + |S Y|) per column in the infinity norm, (t,), from the last true residual.

    |A| is the largest sum of |k_pq| over a row, plus alpha; from some rows, and so perhaps smaller, where products of
    the iterations are approximate, see :func:`~dkrr.linalg.matmul.sampled_row_sums`.
    """
    return ratio(largest_residual, (product.norm() + alpha) * largest(x) + largest(rhs))
