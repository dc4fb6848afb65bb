"""Nystrom regression: f = sum_j c_j k(z_j, .) over m centres instead of n rows. An approximation, and named as one.

    minimise  sum_i w_i |y_i - f(x_i)|^2 + alpha |f|^2
    (B^T S^2 B + alpha K) c = B^T S^2 Y        B = k(X, Z) (n, m),  K = k(Z, Z) (m, m),  S^2 = diag(w)

Use it where n^2 entries are too many: a pass costs n m of them, and nothing larger than m^2 is kept. With every row a
centre it is kernel ridge regression. alpha is raw as everywhere (Falkon's penalty times n).

The m x m system is never formed: that would square the condition of B. Conjugate gradients multiply by B and B^T, in
the coordinates of a preconditioner that makes some 20 iterations enough (:mod:`dkrr.linalg.nystrom.precondition`), and
stop on the relative residual in these coordinates,

    |R^-1 L^-1 (B^T S^2 (Y - B c) - alpha K c)|  <=  tol |R^-1 L^-1 B^T S^2 Y|,

which bounds the error of f: up to the factor by which the preconditioner misses, the left side is
(sum_i w_i |f(x_i) - f*(x_i)|^2 + alpha |f - f*|^2)^1/2, for the minimiser f*. (The residual of c itself says little:
a nearly singular K leaves c undetermined where f is not.) Where K is nearly singular and alpha is small, rounding may
keep the left side above tol. An answer whose backward error is that of rounding c, eps, counts as converged then: it is
the exact solution of a system that no one could tell from this one. The message says so.

With an intercept b = 1^T S^2 (Y - B c) / 1^T S^2 1 the rows of B and Y are taken less their weighted means. That mean
of B c is q^T c / 1^T S^2 1 with q = B^T S^2 1, which one more column of the first pass gives: no pass is added.

Cost
----
About (iterations + 4) n m kernel entries, :mod:`dkrr.linalg.nystrom.row_pass`. The m x m part is in the driver:
24 m^2 bytes and about 5 m^2 t flops an iteration; at most 10,000 centres. Memory:
:func:`~dkrr.linalg.nystrom.limits.nystrom_bytes`.

References
----------
Rudi, Carratino and Rosasco, FALKON: an optimal large scale kernel method, 2017, arXiv 1705.10958.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.dataset.destination import storage_errors
from dkrr.engine.tasks import RunSummary
from dkrr.errors import ConvergenceError, DamagedChunkError, DataError
from dkrr.kernels import Kernel
from dkrr.linalg.cg.checkpoint import StoredCheckpoint
from dkrr.linalg.cg.iteration import CGResult, conjugate_gradients
from dkrr.linalg.gram import rows_of
from dkrr.linalg.intercept import centre_dataset, total_weight
from dkrr.linalg.keys import FORMAT_VERSION, KERNEL_VERSION, key_of
from dkrr.linalg.nystrom.centers import ChosenRows, choose_rows, read_rows
from dkrr.linalg.nystrom.limits import NystromFit, checked_problem
from dkrr.linalg.nystrom.pass_task import can_compile
from dkrr.linalg.nystrom.precondition import CenterFactor, independent_centers
from dkrr.linalg.nystrom.result import NystromResult, describe
from dkrr.linalg.nystrom.row_pass import RowPass
from dkrr.linalg.nystrom.sample import SampleGram
from dkrr.linalg.nystrom.system import Border, NystromSystem
from dkrr.linalg.operators import Rows
from dkrr.linalg.precondition import Identity
from dkrr.linalg.settings import IterativeSettings, NystromSettings
from dkrr.linalg.solution import Solution
from dkrr.linalg.trace import ResidualTrace
from dkrr.linalg.workspace import Workspace
from dkrr.lock import hold_lock
from dkrr.stores import place, remove_array
from dkrr.threads import single_blas_thread

__all__ = ["DEFAULT_TOL", "NystromResult", "fit_nystrom"]

logger = logging.getLogger("dkrr.linalg.nystrom.solver")

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

DEFAULT_TOL = 1e-7
CHECKPOINT_SECONDS = 20.0
# a backward error of this size is that of a solution rounded to float64
ROUNDING = float(np.finfo(np.float64).eps)


def fit_nystrom(
    dataset: Dataset,
    settings: NystromFit,
    nystrom: NystromSettings,
    iterative: IterativeSettings | None,
    workspace: Workspace,
) -> NystromResult:
    """Fit m coefficients to the n rows of a data set.

    An interrupted fit goes on from its last checkpoint when the same fit runs again on the same store.

    Parameters
    ----------
    dataset
        Training rows X, targets Y, optional weights, as the kernel shall see them.
    settings
        ``kernel`` (resolved), ``alpha`` (one, or one per target), ``precision``: "float64", or "mixed" for products in
        float32 and true residuals in float64; the same answer by the residual.
    nystrom
        Number and choice of the centres.
    iterative
        ``tol``, ``max_iter``, ``seed``, ``allow_unconverged``; the preconditioner and its rank play no part. None means
        a ``tol`` of 1e-7. Targets that share an alpha share every pass; each distinct alpha is a run of its own.
    workspace
        Where, and on whom.

    Raises
    ------
    ParameterError
        More centres than usable rows, or than 10,000; no kernel; float32.
    PlanRefusedError
        The workers have too little memory for so many centres.
    ConvergenceError
        The residual did not reach ``tol``, unless that is allowed.
    NotPositiveDefiniteError
        The kernel is not positive semi-definite.
    DamagedChunkError
        A chunk of the rows is missing or damaged.
    LockedError
        Another process does the same fit on the same store.
    """
    iterative = IterativeSettings(tol=DEFAULT_TOL) if iterative is None else iterative
    kernel, alphas = checked_problem(dataset, settings, nystrom, workspace)
    fields = {
        "format_version": FORMAT_VERSION,
        "kernel_version": KERNEL_VERSION,
        "kernel": kernel.to_dict(),
        "rows": [dataset.digest, dataset.digest_y, dataset.digest_weight],
        "alpha": list(alphas),
        "nystrom": nystrom.to_dict(),
        "seed": iterative.seed,
        "tol": iterative.tol,
        "precision": settings.precision,
        "blas": workspace.blas,
    }
    if settings.fit_intercept:  # absent without one: what began before there were intercepts keeps its key
        fields["fit_intercept"] = True
    key = key_of(fields)
    location = place(workspace.store, "solves", key + ".zarr")
    with hold_lock(location), storage_errors(workspace.store), single_blas_thread():
        # two chunks of rows that changed places pass their checksums, and every residual after that
        dataset.verify()
        try:
            fit = _Fit(dataset, kernel, alphas, settings, nystrom, iterative, workspace, location, key)
            result = fit.run()
        except (DamagedChunkError, DataError):
            remove_array(location)
            raise
        remove_array(location)
    return result


class _Fit:
    """One fit: the parts that its methods share."""

    def __init__(
        self,
        dataset: Dataset,
        kernel: Kernel,
        alphas: tuple[float, ...],
        settings: NystromFit,
        nystrom: NystromSettings,
        iterative: IterativeSettings,
        workspace: Workspace,
        location: str,
        key: str,
    ) -> None:
        self.dataset, self.kernel, self.alphas = dataset, kernel, np.asarray(alphas)
        self.precision = settings.precision
        self.centring = centre_dataset(dataset) if settings.fit_intercept else None
        self.nystrom, self.iterative = nystrom, iterative
        self.workspace, self.location, self.key = workspace, location, key
        self.border: Border | None = None
        self.rows: Rows = rows_of(dataset, kernel)

    @property
    def num_columns(self) -> int:
        """The most columns of a pass: the targets, and one of ones for an intercept."""
        return self.dataset.num_targets + (self.centring is not None)

    def run(self) -> NystromResult:
        dataset, t = self.dataset, self.dataset.num_targets
        started = time.perf_counter()
        chosen = choose_rows(dataset, self.kernel, self.rows.center, self.nystrom, self.iterative.seed)
        numbers, points = self._prepare(chosen)
        self.row_pass = RowPass(
            self.kernel, self.rows, dataset.num_rows, points, self.num_columns, self.workspace, self._below("rows")
        )
        self._record("prepare", started)
        row_sums = self._first_pass()
        m = len(points)
        coefficients, converged, iterations = np.zeros((m, t)), np.zeros(t, np.bool_), 0
        relative, backward = np.zeros(t), np.zeros(t)
        history: list[FloatVector] = []
        intercept = None if self.centring is None else self.centring.offset
        out = np.empty(self.sample.shape)
        for number, alpha in enumerate(dict.fromkeys(self.alphas.tolist())):
            targets = np.flatnonzero(self.alphas == alpha)
            factor = self.sample.factor(alpha, out)
            system = NystromSystem(self.row_pass, self.triangle, alpha, factor, self.border)
            result = self._solve(system, targets, number)
            found = system.to_coefficients(result.x)
            coefficients[:, targets], converged[targets] = found, result.converged
            iterations += result.num_iterations
            history += result.history
            if intercept is not None and self.border is not None:
                intercept[targets] -= self.border.means(found)
            relative[targets], backward[targets] = self._norms(system, targets, found, row_sums)
            if result.num_iterations < self.iterative.iterations:
                # conjugate gradients gave up before the limit: rounding stands between the residual and tol
                converged[targets] |= backward[targets] <= ROUNDING
        message = describe(
            self.nystrom, dataset.num_rows, len(self.triangle), relative, converged, iterations,
            self.row_pass.num_passes, self.iterative.tol,
        )  # fmt: skip
        solution = Solution(
            solver="nystrom",
            precision=self.precision,
            converged=bool(converged.all()),
            num_iterations=iterations,
            relative_residual=relative.tolist(),
            backward_error=backward.tolist(),
            seconds={phase: summary.seconds for phase, summary in self.workspace.phases.items()},
            message=message,
        )
        if not solution.converged and not self.iterative.allow_unconverged:
            raise ConvergenceError(
                solution.message,
                hint='raise max_iter (the same fit goes on), alpha or tol, or set precision = "float64"',
                history=history,
                relative_residual=relative,
                converged=converged,
                num_iterations=iterations,
                stagnated=iterations < self.iterative.iterations,
            )
        order = np.argsort(numbers)
        return NystromResult(
            centres=read_rows(dataset.X, numbers[order]),
            dual_coef=coefficients[order],
            rows=numbers[order],
            center=None if self.rows.center is None else np.asarray(self.rows.center),
            solution=solution,
            intercept=intercept,
        )

    def _first_pass(self) -> FloatVector:
        """B^T S^2 Y and, for an intercept, B^T S^2 1; sums of |B|^T S^2 |B| over its rows (m,)."""
        t = self.dataset.num_targets
        targets = tuple(range(t))
        if self.centring is None:
            sums = self.row_pass(targets=targets, absolute_last=True)
            self.rhs = np.ascontiguousarray(sums[:, :t])
            return sums[:, -1]
        shifts = np.append(-self.centring.mean, 0.0), np.append(-self.centring.rest, 1.0)
        sums = self.row_pass(targets=(*targets, -1), shifts=shifts, absolute_last=True)
        self.rhs = np.ascontiguousarray(sums[:, :t])
        self.rhs[:, self.centring.constant] = 0.0
        self.border = Border(sums[:, t].copy(), total_weight(self.dataset))
        return sums[:, -1]

    def _below(self, name: str) -> str:
        return place(self.location, name)

    def _record(self, phase: str, started: float) -> None:
        self.workspace.record(phase, RunSummary(seconds=time.perf_counter() - started))

    def _prepare(self, chosen: ChosenRows) -> tuple[NDArray[np.int64], FloatMatrix]:
        """L and the sampled estimate of G; numbers and rows of the centres that are not in the span of others."""
        dataset = self.dataset
        candidates = read_rows(dataset.X, chosen.centers, self.rows.center)
        kept = independent_centers(self.kernel, candidates)
        if len(kept) < len(candidates):
            logger.info("%d of %d centres are in the span of the others", len(candidates) - len(kept), len(candidates))
        points = candidates[kept]
        self.single = self.precision == "mixed" and can_compile(self.kernel, len(points), self.num_columns)
        precision: Literal["float64", "float32"] = "float32" if self.single else "float64"
        self.triangle = CenterFactor(self.kernel, points, dataset.num_rows, float(self.alphas.min()), precision)
        numbers = np.concatenate([chosen.centers, chosen.sample])
        factors = np.where(np.arange(len(numbers)) < len(chosen.centers), 1.0, chosen.factor)
        if dataset.weight is not None:
            weight = [read_rows(dataset.weight, part)[:, 0] for part in (chosen.centers, chosen.sample)]
            factors = factors * np.concatenate(weight)
        rows = np.concatenate([candidates, read_rows(dataset.X, chosen.sample, self.rows.center)])
        self.sample = SampleGram(
            self.kernel,
            self.triangle,
            points,
            rows,
            np.sqrt(factors),
            self.workspace,
            self._below("sample"),
            centred=self.centring is not None,
        )
        return chosen.centers[kept], points

    def _solve(self, system: NystromSystem, targets: NDArray[np.int64], number: int) -> CGResult:
        """Conjugate gradients for the targets that share an alpha; an unconverged result is judged by the caller."""
        checkpoint = StoredCheckpoint(
            self._below(f"state-{number}"),
            f"{self.key}-{number}",
            every_seconds=CHECKPOINT_SECONDS,
            durable=self.workspace.durable,
        )
        alpha = self.alphas[targets].tolist()
        trace = self.workspace.trace(
            f"conjugate gradients on {len(self.triangle):,} centres", self.iterative.tol, alpha
        )
        result = conjugate_gradients(
            system.approximate if self.single else system.exact,
            system.to_coordinates(self.rhs[:, targets]),
            np.zeros(len(targets)),
            Identity(),
            # not converged: the message is about other equations than those of conjugate gradients on K
            replace(self.iterative, allow_unconverged=True),
            true_multiply=system.exact if self.single else None,
            checkpoint=checkpoint,
            on_iteration=self._report(trace),
        )
        trace.replace(result.history)
        return result

    def _report(self, trace: ResidualTrace) -> Callable[[int, FloatVector], None]:
        def report(iteration: int, relative: FloatVector) -> None:
            trace.add(iteration, relative)
            logger.info("iteration %d: relative residual %.2e", iteration, float(relative.max()))

        return report

    def _norms(
        self,
        system: NystromSystem,
        targets: NDArray[np.int64],
        c: FloatMatrix,
        row_sums: FloatVector,
    ) -> tuple[FloatVector, FloatVector]:
        """Relative residual and backward error of each target, from Y - B c - b itself, in float64."""
        shifts: tuple[FloatVector, ...] = ()
        if self.centring is not None and self.border is not None:
            shifts = -self.centring.mean[targets], self.border.means(c) - self.centring.rest[targets]
        misfit, rhs = self.row_pass(c, targets=tuple(targets.tolist()), shifts=shifts), self.rhs[:, targets]
        size = np.linalg.norm(system.to_coordinates(misfit) - system.penalty(c), axis=0)
        whole = np.linalg.norm(system.to_coordinates(rhs), axis=0)
        residual = misfit - system.alpha * self.triangle.multiply(c)
        largest = float((row_sums + system.alpha * self.triangle.row_sums).max())
        bound = largest * np.abs(c).max(axis=0) + np.abs(rhs).max(axis=0)
        error = np.abs(residual).max(axis=0)
        relative = np.divide(size, whole, out=np.zeros_like(size), where=whole > 0)
        return relative, np.divide(error, bound, out=np.zeros_like(error), where=bound > 0)
