"""Nystrom regression: f = sum_j c_j k(z_j, .) over m centres instead of n rows. An approximation, and named as one.

    minimise  sum_i w_i |y_i - f(x_i)|^2 + alpha |f|^2
    (B^T S^2 B + alpha K) c = B^T S^2 Y        B = k(X, Z) (n, m),  K = k(Z, Z) (m, m),  S^2 = diag(w)

Use it where n^2 entries are too many: a pass costs n m of them, and nothing larger than m^2 is kept. With every row a
centre it is kernel ridge regression. alpha is raw as everywhere (Falkon's penalty times n).

The m x m system is never formed: that would square the condition of B. Conjugate gradients multiply by B and B^T, in
the coordinates of a preconditioner that makes some 20 iterations enough, and stop on the relative residual in these
coordinates,

    |R^-1 L^-1 (B^T S^2 (Y - B c) - alpha K c)|  <=  tol |R^-1 L^-1 B^T S^2 Y|,

which bounds the error of f: up to the factor by which the preconditioner misses, the left side is
(sum_i w_i |f(x_i) - f*(x_i)|^2 + alpha |f - f*|^2)^1/2, for the minimiser f*. (The residual of c itself says little:
a nearly singular K leaves c undetermined where f is not.) Where K is nearly singular and alpha is small, rounding may
keep the left side above tol. An answer whose backward error is that of rounding c, eps, counts as converged then: it is
the exact solution of a system that no one could tell from this one. The message says so. The bound is in the norm of
the weights, though: it must not leave more than a twentieth of the targets where rows count alike.

The preconditioner is that of Falkon: two triangles, the second one from more rows than the centres.

    H = B^T S^2 B + alpha K                     B = k(X, Z) (n, m),  K = k(Z, Z) (m, m)
    K + j I = L L^T
    G = L^-1 (B^T S^2 B) L^-T + alpha I         estimated from a sample of the rows,  G = R R^T
    R^-1 L^-1 H L^-T R^-T beta = R^-1 L^-1 B^T S^2 Y,   c = L^-T R^-T beta

Falkon takes the centres themselves as the sample, which gives (n / m) L^T D L + alpha I with the weights D of the
centres; that is good when alpha is large. Here the centres enter with factor one, and q m other rows, drawn uniformly,
with factor (n - m) / (q m). The eigenvalues of the preconditioned matrix are then within about (1 +- q^-1/2)^2 for any
alpha and any choice of centres.
On 41,157 rows of a regression set with 800 centres and alpha 0.1 the sample of the centres took 80 iterations to
1e-7, q = 8 took 29 and q = 16 took 19; on 100,000 generated rows with 500 centres 43 became 18 and 13.

With an intercept b = 1^T S^2 (Y - B c) / 1^T S^2 1 the rows of B and Y are taken less their weighted means. That mean
of B c is q^T c / 1^T S^2 1 with q = B^T S^2 1, which one more column of the first pass gives: no pass is added.
Coefficients whose function is constant on the rows are held by alpha alone: in that direction the condition is that of
G, and rounding of Y may be all that the right-hand side has. Where it could be more than tol, eps cond(G) > tol, the
answer is refined by its residual, from V = Y - B c - b without the mean that rounding left in it.

Leave-one-out is exact, with the centres as they are: it is that of a ridge regression in the features
phi(x) = L^-1 k(Z, x), :mod:`dkrr.linalg.primal`. A row that is left out stays a centre where it was one: this is
what a fit with the same centres would say. Two passes, and one more for each further alpha; 4 n m^2 flops. An
interrupted computation begins anew.

Centres are rows with a positive weight: drawn without replacement, or chosen by randomly pivoted Cholesky from a random
part of the rows, which covers the kernel's range with fewer centres when it is far from uniform.

Cost
----
About (iterations + 4) n m kernel entries, :mod:`dkrr.linalg.centres`. The m x m part is in the driver: m^3 / 3
flops for L and for each R, 24 m^2 bytes and about 5 m^2 t flops an iteration; at most 10,000 centres. G takes (q + 1) m
rows times 2 m^2 flops, on the workers. Memory: :func:`nystrom_bytes`.

References
----------
Rudi, Carratino and Rosasco, FALKON: an optimal large scale kernel method, 2017, arXiv 1705.10958.
Chen, Epperly, Tropp and Webber, Randomly pivoted Cholesky, 2022, arXiv 2207.06503. Avron, Clarkson and Woodruff, Faster
kernel ridge regression using sketching and preconditioning, 2017, arXiv 1611.03220.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import RunSummary
from dkrr.errors import ConvergenceError, DataError, NotPositiveDefiniteError, ParameterError
from dkrr.kernels import Kernel
from dkrr.linalg.catalogue import FORMAT_VERSION, KERNEL_VERSION, key_of
from dkrr.linalg.centres import (
    CenterFactor,
    CentreProducts,
    can_compile,
    independent_centers,
    product_task_bytes,
    solve_lower,
)
from dkrr.linalg.cg import CGState, Checkpoint, Preconditioner, conjugate_gradients
from dkrr.linalg.leave_one_out import LeaveOneOut
from dkrr.linalg.operators import (
    Centring,
    FloatMatrix,
    FloatVector,
    Indices,
    centre_dataset,
    offset_of,
    ratio,
    read_rows,
    rows_of,
    target_alphas,
    total_weight,
)
from dkrr.linalg.preconditioner import pivot_rows
from dkrr.linalg.primal import Equations, left_out, left_out_of_few
from dkrr.linalg.primal_passes import CentreFeatures, DatasetRows, FeatureRows, MemoryRows
from dkrr.linalg.products import Precision, is_nonnegative
from dkrr.linalg.solution import LIMIT_RESIDUAL, IterativeSettings, NystromSettings, Solution
from dkrr.linalg.workspace import BARE_BYTES, BASELINE_BYTES, Workspace, check_task_memory, resumable_folder
from dkrr.store.files import place, storage_errors
from dkrr.tiles.blas import potrf

CANDIDATE_BYTES = 1 << 30

# fewer candidates than this many times m leave pivoting nothing to choose
MIN_CANDIDATES = 2


def choose_rows(
    dataset: Dataset,
    kernel: Kernel,
    center: tuple[float, ...] | None,
    nystrom: NystromSettings,
    seed: int,
) -> tuple[Indices, Indices, float]:
    """Choose centres and sample; the same for the same rows, weights and seed, whatever the chunks.

    Returns
    -------
    centers : (m,) int
    sample : (s,) int
        Other rows with a positive weight, drawn uniformly.
    factor
        Rows with a positive weight that are no centres, for each one in the sample.

    Raises
    ------
    ParameterError
        More centres than rows with a positive weight.
    DataError
        The kernel is zero on all rows that centres are chosen from.
    """
    n, m = dataset.num_rows, nystrom.num_centers
    used = np.arange(n)
    if dataset.weight is not None:
        used = np.flatnonzero(dataset.weight.read(0, n)[:, 0] > 0)
    if m > len(used):
        kind = "" if len(used) == n else " with a positive weight"
        raise ParameterError(
            f"{m:,} centres of {len(used):,} rows{kind}", hint=f"set num_centers to at most {len(used):,}"
        )
    random = np.random.default_rng([seed, 1])
    if nystrom.centers == "uniform":
        centers = np.sort(random.choice(used, m, replace=False))
    else:
        # as many as 1 GiB holds columns of, at least 2 m
        most = max(MIN_CANDIDATES * m, CANDIDATE_BYTES // (8 * (m + dataset.num_features)))
        count = min(len(used), most)
        candidates = np.sort(random.choice(used, count, replace=False))
        rows = read_rows(dataset.X, candidates, center)
        # fewer than m where the rows left over are in the span of those that were chosen
        found = pivot_rows(kernel, rows, m, seed, max_bytes=max(CANDIDATE_BYTES, 8 * m * count))
        if len(found) and not kernel.positive_semidefinite:  # a diagonal of zeros alone does not show that
            found = np.concatenate([found, np.setdiff1d(np.arange(count), found)[: m - len(found)]])
        centers = np.sort(candidates[found])
        if not len(centers):
            raise DataError(f"{kernel.describe()} is zero on all {count:,} candidates", hint="use another kernel")
    others = np.setdiff1d(used, centers, assume_unique=True)
    size = sample_size(len(used), len(centers))
    sample = np.sort(np.random.default_rng([seed, 2]).choice(others, size, replace=False))
    return centers, sample, len(others) / size if size else 0.0


logger = logging.getLogger("dkrr.linalg.nystrom")


MAX_CENTERS = 10_000

MIN_OVERSAMPLING, MAX_OVERSAMPLING = 4, 16

DEFAULT_TOL = 1e-7

CHECKPOINT_SECONDS = 20.0

REFINEMENT = 1e-4  # of the residual that an answer is refined by

EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, kw_only=True)
class NystromResult:
    """The regression and how good it is as a solution of its own system.

    Parameters
    ----------
    centres : (m, d)
        Rows of the data set, not centred: the ``x_fit`` of a model. Fewer than were asked for where some are in the
        span of the others, as duplicated rows are: these would not change f.
    dual_coef : (m, t)
    rows : (m,) int
        Their numbers, ascending.
    center : (d,), optional
        Subtracted from rows and centres before a translation-invariant kernel is evaluated.
    solution
        ``relative_residual``: that of the preconditioned normal equations, the last one true and in float64.
        ``backward_error``: |r| / (|H| |c| + |B^T S^2 y|) in the infinity norm, r = B^T S^2 (y - B c) - alpha K c, with
        |H| bounded by that of |B|^T S^2 |B| + alpha |K|, which it is when no entry of the kernel is negative.
    intercept : (t,), optional
        b of f(z) + b.
    """

    centres: FloatMatrix
    dual_coef: FloatMatrix
    rows: NDArray[np.int64]
    center: FloatVector | None
    solution: Solution
    intercept: FloatVector | None = None


def _evenness(dataset: Dataset) -> float:
    """(min_i w_i / mean_i w_i)^1/2 of the rows with a positive weight, 1 without weights.

    An error whose weighted root mean square is e has one of at most e divided by this without the weights.
    """
    if dataset.weight is None:
        return 1.0
    weight = dataset.weight.read(0, dataset.num_rows)[:, 0]
    used = weight[weight > 0]
    return float(np.sqrt(used.min() / used.mean())) if len(used) else 1.0


def sample_size(n: int, m: int) -> int:
    """Rows of the sample besides the centres, q m of the n - m others: q = n / (25 m), but from 4 to 16.

    A sampled row costs 2 m^2 flops once, a row of a pass m kernel entries an iteration, so more passes ask for a better
    preconditioner.
    """
    q = min(max(n / (25 * m), MIN_OVERSAMPLING), MAX_OVERSAMPLING)
    return int(min(n - m, np.ceil(q * m)))


def nystrom_bytes(n: int, m: int, num_features: int, num_targets: int) -> tuple[int, int]:
    """Peak memory besides the interpreter's of a task, and of the driver.

    A task makes a part of the preconditioner, 16 m^2 + 16,384 m bytes, or a pass, see
    :func:`~dkrr.linalg.centres.product_task_bytes`. The driver holds 24 m^2, the sample of at most (q + 1) m
    rows twice, about ten (m, t) arrays of conjugate gradients, and 24 n bytes while the rows are chosen.
    """
    task = max(16 * m * m + 16_384 * m, product_task_bytes(m, num_features, num_targets))
    sample = 16 * (sample_size(n, m) + m) * (num_features + 1)
    return task, 24 * m * m + sample + 80 * m * num_targets + 24 * n


def nystrom_baseline(kernel: Kernel | None, m: int, num_targets: int) -> int:
    """What a worker has before a task: with Numba where passes go through compiled code."""
    return BASELINE_BYTES if kernel is not None and can_compile(kernel, m, num_targets) else BARE_BYTES


def fit_nystrom(
    dataset: Dataset,
    kernel: Kernel | None,
    alpha: Sequence[float],
    nystrom: NystromSettings,
    iterative: IterativeSettings | None,
    workspace: Workspace,
    *,
    precision: str = "float64",
    fit_intercept: bool = False,
) -> NystromResult:
    """Fit m coefficients to the n rows of a data set.

    An interrupted fit goes on from its last checkpoint when the same fit runs again on the same store.

    Parameters
    ----------
    dataset
        Training rows X, targets Y, optional weights, as the kernel shall see them.
    kernel
        Resolved.
    alpha
        One, or one per target.
    nystrom
        Number and choice of the centres.
    iterative
        ``tol``, ``max_iter``, ``seed``, ``allow_unconverged``; the preconditioner and its rank play no part. None means
        a ``tol`` of 1e-7. Targets that share an alpha share every pass; each distinct alpha is a run of its own.
    workspace
        Where, and on whom.
    precision
        "float64", or "mixed" for products in float32 and true residuals in float64; the same answer by the residual.

    Raises
    ------
    ParameterError
        More centres than usable rows, or than 10,000; no kernel; no target; a negative alpha.
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
    n, t, m = dataset.num_rows, dataset.num_targets, nystrom.num_centers
    alphas = target_alphas(alpha, t)
    if kernel is None:
        raise ParameterError("Nystrom regression of a precomputed matrix", hint="give the rows and a kernel")
    if m > MAX_CENTERS:
        raise ParameterError(
            f"{m:,} centres; at most {MAX_CENTERS:,} are factored in one process",
            hint=f"set num_centers to at most {MAX_CENTERS:,}",
        )
    needed = nystrom_baseline(kernel, m, t) + nystrom_bytes(n, min(m, n), dataset.num_features, t)[0]
    what = f"{m:,} centres and {t} targets"
    check_task_memory(workspace, what, needed, "raise memory_limit, or lower num_centers")
    fields = {
        "format_version": FORMAT_VERSION,
        "kernel_version": KERNEL_VERSION,
        "kernel": kernel.to_dict(),
        "rows": [dataset.digest, dataset.digest_y, dataset.digest_weight],
        "alpha": alphas.tolist(),
        "nystrom": nystrom.to_dict(),
        "seed": iterative.seed,
        "tol": iterative.tol,
        "precision": precision,
        "fit_intercept": fit_intercept,
        "blas": workspace.blas,
    }
    # two chunks of rows that changed places pass their checksums, and every residual after that
    with storage_errors(workspace.store):
        dataset.check_still_there()
    key = key_of(fields)
    with resumable_folder(workspace, key) as location:
        centring, given = centre_dataset(dataset) if fit_intercept else None, (dataset, kernel, alphas, nystrom)
        return _Fit(*given, iterative, workspace, location, key, precision, centring).run()


@dataclass
class _Fit:
    """One fit: the parts that its methods share."""

    dataset: Dataset
    kernel: Kernel
    alphas: FloatVector
    nystrom: NystromSettings
    iterative: IterativeSettings
    workspace: Workspace
    location: str
    key: str
    precision: str
    centring: Centring | None
    # for an intercept: q = B^T S^2 1 (m,) and 1^T S^2 1
    border: tuple[FloatVector, float] | None = None
    history: list[FloatVector] = field(default_factory=list)

    def run(self) -> NystromResult:
        """Choose centres and sample, factorise, and solve for each alpha."""
        dataset, t = self.dataset, self.dataset.num_targets
        numbers = self._prepare()
        row_sums = self._first_pass()
        coefficients, converged, iterations = np.zeros((len(numbers), t)), np.zeros(t, np.bool_), 0
        relative, backward = np.zeros(t), np.zeros(t)
        intercept = None if self.centring is None else self.centring.offset
        factor = np.empty_like(self.estimate)
        for number, alpha in enumerate(dict.fromkeys(self.alphas.tolist())):
            targets = np.flatnonzero(self.alphas == alpha)
            _factorise(self.estimate, alpha, factor)
            system = _System(self.products, self.triangle, alpha, factor, self.border)
            result = self._solve(system, targets, number)
            found = system.to_coefficients(result.x)
            iterations += result.num_iterations
            if self.border is not None and EPS * system.condition > self.iterative.tol:
                rest = self._misfit(system, targets, found)
                settings = replace(self.iterative, tol=REFINEMENT, allow_unconverged=True)
                rest = system.to_coordinates(rest) - system.penalty(found)
                more = conjugate_gradients(system.product, rest, np.zeros(len(targets)), Preconditioner(), settings)
                found = found + system.to_coefficients(more.x)
                iterations += more.num_iterations
            coefficients[:, targets], converged[targets] = found, result.converged
            self.history += result.history
            if intercept is not None:
                intercept[targets] -= system.means(found)
            relative[targets], backward[targets] = self._norms(system, targets, found, row_sums)
            if result.num_iterations < self.iterative.iterations and not result.converged.all():
                # conjugate gradients gave up before the limit: rounding stands between the residual and tol
                is_rounded = backward[targets] <= EPS  # that of a solution rounded to float64
                converged[targets] |= is_rounded & (relative[targets] <= LIMIT_RESIDUAL * _evenness(dataset))
        solution = Solution(
            solver="nystrom",
            precision=self.precision,
            converged=bool(converged.all()),
            num_iterations=iterations,
            relative_residual=relative.tolist(),
            backward_error=backward.tolist(),
            seconds={phase: summary.seconds for phase, summary in self.workspace.phases.items()},
            message=self._message(relative, converged, iterations),
        )
        if not solution.converged and not self.iterative.allow_unconverged:
            raise ConvergenceError(
                solution.message,
                hint='raise max_iter (the same fit goes on), alpha or tol, or set precision = "float64"',
                history=self.history,
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

    def _prepare(self) -> NDArray[np.int64]:
        """L and the sampled estimate of G; numbers of the centres that are not in the span of others."""
        dataset, started = self.dataset, time.perf_counter()
        self.rows = rows_of(dataset, self.kernel)
        centers, others, factor = choose_rows(dataset, self.kernel, self.rows.center, self.nystrom, self.iterative.seed)
        candidates = self.rows.take(centers)
        kept = independent_centers(self.kernel, candidates)
        if len(kept) < len(candidates):
            logger.info("%d of %d centres are in the span of the others", len(candidates) - len(kept), len(candidates))
        points = candidates[kept]
        # the most columns of a pass: the targets, and one of ones for an intercept
        columns = dataset.num_targets + (self.centring is not None)
        self.single = self.precision == "mixed" and can_compile(self.kernel, len(points), columns)
        precision: Precision = "float32" if self.single else "float64"
        self.triangle = CenterFactor(self.kernel, points, dataset.num_rows, float(self.alphas.min()), precision)
        weight = np.repeat([1.0, factor], [len(centers), len(others)])
        if dataset.weight is not None:
            weight *= read_rows(dataset.weight, np.concatenate([centers, others]))[:, 0]
        rows = np.concatenate([candidates, self.rows.take(others)])
        sample = MemoryRows(rows, np.empty((len(rows), 0)), weight)
        features = CentreFeatures(self.kernel, points, self.triangle.square)
        source = FeatureRows(features, sample, self.workspace, self.location, phase="precondition")
        rows_below, below = DatasetRows(self.rows, in_place=False), place(self.location, "rows")
        self.products = CentreProducts(self.kernel, rows_below, points, columns, self.workspace, below)
        self.workspace.record("prepare", RunSummary(seconds=time.perf_counter() - started))
        self.estimate, cross, squares = source.sums()
        for i in range(len(cross) if self.centring is not None and squares[0] else 0):
            self.estimate[i] -= cross[i] * (cross[:, 0] / squares[0])
        return centers[kept]

    def _first_pass(self) -> FloatVector:
        """B^T S^2 Y and, for an intercept, B^T S^2 1; sums of |B|^T S^2 |B| over its rows (m,)."""
        t, m, shifts = self.dataset.num_targets, len(self.triangle), list[FloatVector]()
        targets, minus = [*range(t)], np.full((m, 1), -1.0)
        if self.centring is not None:
            targets.append(-1)
            shifts = [np.append(-self.centring.mean, 0.0), np.append(-self.centring.rest, 1.0)]
        if is_nonnegative(self.kernel):
            # B 1 = 0 - B (-1), a column like the others
            p, shifts = np.hstack([np.zeros((m, len(targets))), minus]), [np.append(shift, 0.0) for shift in shifts]
            sums, totals = self.products([*targets, -1], p, shifts=shifts)
            row_sums = sums[:, -1]
        else:
            sums, totals = self.products(targets, shifts=shifts)
            row_sums = self.products([-1], minus, absolute=True)[0][:, 0]
        self.rhs = np.ascontiguousarray(sums[:, :t])
        if self.centring is not None:
            self.border = sums[:, t].copy(), total_weight(self.dataset)
            self.rhs -= np.outer(self.border[0], totals[:t] / self.border[1])
            self.rhs[:, self.centring.constant] = 0.0
        return row_sums

    def _solve(self, system: _System, targets: NDArray[np.int64], number: int) -> CGState:
        """Conjugate gradients for the targets that share an alpha; an unconverged result is judged by the caller."""
        checkpoint = Checkpoint(
            place(self.location, f"state-{number}"),
            f"{self.key}-{number}",
            every_seconds=CHECKPOINT_SECONDS,
            durable=self.workspace.durable,
        )
        alpha = self.alphas[targets].tolist()
        name = f"conjugate gradients on {len(self.triangle):,} centres"
        trace = self.workspace.trace(name, self.iterative.tol, alpha, targets.tolist())

        def report(iteration: int, relative: FloatVector) -> None:
            trace.add(iteration, relative)
            logger.info("iteration %d: relative residual %.2e", iteration, float(relative.max()))

        result = conjugate_gradients(
            partial(system.product, precision="float32") if self.single else system.product,
            system.to_coordinates(self.rhs[:, targets]),
            np.zeros(len(targets)),
            Preconditioner(),
            # not converged: the message is about other equations than those of conjugate gradients on K
            replace(self.iterative, allow_unconverged=True),
            true_multiply=system.product if self.single else None,
            checkpoint=checkpoint,
            on_iteration=report,
        )
        trace.replace(result.history)
        return result

    def _misfit(self, system: _System, targets: NDArray[np.int64], c: FloatMatrix) -> FloatMatrix:
        """B^T S^2 (Y - B c - b) (m, t), in float64."""
        shifts: list[FloatVector] = []
        if self.centring is not None:
            shifts = [-self.centring.mean[targets], system.means(c) - self.centring.rest[targets]]
        return system.centred(*self.products(targets.tolist(), c, shifts=shifts))

    def _norms(
        self, system: _System, targets: NDArray[np.int64], c: FloatMatrix, row_sums: FloatVector
    ) -> tuple[FloatVector, FloatVector]:
        """Relative residual and backward error of each target, from Y - B c - b itself, in float64."""
        misfit, rhs = self._misfit(system, targets, c), self.rhs[:, targets]
        size = np.linalg.norm(system.to_coordinates(misfit) - system.penalty(c), axis=0)
        residual = misfit - system.alpha * self.triangle.multiply(c)
        largest = float((row_sums + system.alpha * self.triangle.row_sums).max())
        bound = largest * np.abs(c).max(axis=0) + np.abs(rhs).max(axis=0)
        relative = ratio(size, np.linalg.norm(system.to_coordinates(rhs), axis=0))
        return relative, ratio(np.abs(residual).max(axis=0), bound)

    def _message(self, relative: FloatVector, converged: NDArray[np.bool_], iterations: int) -> str:
        """That the solution is an approximation, of what, and how well its own equations are solved."""
        how = "drawn uniformly" if self.nystrom.centers == "uniform" else "by randomly pivoted Cholesky"
        left_out, tol = self.nystrom.num_centers - len(self.triangle), self.iterative.tol
        message = (
            f"approximation: {len(self.triangle):,} of {self.dataset.num_rows:,} rows as centres ({how}"
            f"{f', {left_out:,} in their span left out' if left_out else ''}); {iterations:,} iterations and "
            f"{self.products.num_passes:,} passes over the rows, largest relative residual of the preconditioned "
            f"normal equations {relative.max():.1e}"
        )
        rounded = int((converged & (relative > 2.0 * tol)).sum())
        if rounded:
            message += f" (as small as rounding allows in {rounded} of {len(converged)} targets: tol = {tol:.1e})"
        if not converged.all():
            message += f"; NOT CONVERGED to {tol:.1e} in {int((~converged).sum())} of {len(converged)} targets"
        return message


@dataclass(frozen=True)
class _System:
    """The matrix of one alpha in the coordinates of its preconditioner, with products by passes over the rows.

        R^-1 L^-1 (B^T S^2 B + alpha K) L^-T R^-T
        R^-1 L^-1 (B^T S^2 P B + alpha K) L^-T R^-T      with an intercept, P = I - 1 (1^T S^2) / (1^T S^2 1)

    P takes the weighted mean of B c away. It is known before the pass, from q = B^T S^2 1, so a pass subtracts it row
    by row, where it loses no digits, instead of q q^T from the sums.

    Parameters
    ----------
    products, triangle
        B and L.
    alpha
        The ridge.
    factor : (m, m)
        R, below and on the diagonal.
    border
        q and 1^T S^2 1, for an intercept.

    Cost
    ----
    One pass and 4 m^2 t flops a product.
    """

    products: CentreProducts
    triangle: CenterFactor
    alpha: float
    factor: FloatMatrix
    border: tuple[FloatVector, float] | None

    def means(self, c: FloatMatrix) -> FloatVector:
        """q^T c / 1^T S^2 1 (t,): the weighted means of B c over the rows; zeros without an intercept."""
        if self.border is None:
            return np.zeros(c.shape[1])
        sums, weight = self.border
        return np.asarray(sums @ c / weight)

    def product(self, beta: FloatMatrix, precision: Precision = "float64") -> FloatMatrix:
        """The product, with entries of B in that precision."""
        c = self.to_coefficients(beta)
        # V = means - B c
        shifts = [] if self.border is None else [self.means(c)]
        negative = self.products([-1] * c.shape[1], c, shifts=shifts, precision=precision)
        return self.penalty(c) - self.to_coordinates(self.centred(*negative))

    def centred(self, sums: FloatMatrix, totals: FloatVector) -> FloatMatrix:
        """B^T S^2 P V from B^T S^2 V and 1^T S^2 V, which is what rounding left of a mean that is zero."""
        return sums if self.border is None else sums - np.outer(self.border[0], totals / self.border[1])

    @property
    def condition(self) -> float:
        """An estimate of cond(G) from the diagonal of R."""
        diagonal = self.factor.diagonal()
        return float(diagonal.max() / diagonal.min()) ** 2

    def penalty(self, c: FloatMatrix) -> FloatMatrix:
        """alpha R^-1 L^-1 K c."""
        return solve_lower(self.factor, self.alpha * self.triangle.reduced(c), transposed=False)

    def to_coefficients(self, beta: FloatMatrix) -> FloatMatrix:
        """c = L^-T R^-T beta."""
        return self.triangle.solve(solve_lower(self.factor, beta, transposed=True), transposed=True)

    def to_coordinates(self, w: FloatMatrix) -> FloatMatrix:
        """R^-1 L^-1 w."""
        return solve_lower(self.factor, self.triangle.solve(w, transposed=False), transposed=False)


def _factorise(estimate: FloatMatrix, alpha: float, out: FloatMatrix) -> None:
    """R (m, m) lower with R R^T = G + alpha I.

    G is positive semi-definite but for rounding: the preconditioner, and only it, has an alpha above that.
    """
    np.copyto(out, estimate)
    out[np.diag_indices_from(out)] += max(alpha, len(out) * EPS * float(estimate.diagonal().max()))
    info = potrf(out)
    if info:
        raise NotPositiveDefiniteError(
            f"the preconditioner of the centres is not positive definite at row {info - 1:,}",
            hint="use a positive semi-definite kernel, or raise alpha",
            row=info - 1,
        )


def nystrom_leave_one_out(
    dataset: Dataset,
    kernel: Kernel,
    points: FloatMatrix,
    coefficients: FloatMatrix,
    alphas: Sequence[float],
    workspace: Workspace,
    *,
    center: FloatVector | None,
    intercept: FloatVector | None,
) -> LeaveOneOut:
    """Leave-one-out of a regression f = k(., Z) c + b on fixed centres.

    Parameters
    ----------
    dataset
        The rows it was fitted to.
    kernel
        Resolved.
    points : (m, d), coefficients : (m, t)
        Z, not centred, and c.
    alphas
        One, or one for each target.
    workspace
        Where, and on whom.
    center : (d,), optional
        Subtracted from rows and centres.
    intercept : (t,), optional
        b.

    Raises
    ------
    NotPositiveDefiniteError
        alpha is 0, or lost in rounding, and the rows do not determine the coefficients.
    """
    wanted = target_alphas(alphas, dataset.num_targets)
    points = points if center is None else points - center
    order = independent_centers(kernel, points)
    rows = DatasetRows(rows_of(dataset, kernel), in_place=False)
    if len(order) == dataset.num_rows:  # all of them: the regression itself
        whole = rows.whole()
        x = whole.x if center is None else whole.x - center
        with single_blas_thread():
            return left_out_of_few(kernel.block(x, x, same=True), whole, wanted, intercept is not None)
    triangle = CenterFactor(kernel, points[order], dataset.num_rows, float(wanted.min()), "float64")
    # f does not change when a centre in the span of the others is left out, but its coefficient has to go somewhere
    if len(order) == len(points):
        coef = triangle.reduced(coefficients[order])
    else:
        coef = triangle.solve(kernel.block(points[order], points) @ coefficients, transposed=False)
    features = CentreFeatures(kernel, points[order], triangle.square)
    with workspace.scratch() as scratch, single_blas_thread():
        source = FeatureRows(features, rows, workspace, scratch, phase="leverage")
        equations = Equations.of(source, intercept is not None)
        shift, centring = equations.source.shift, equations.source.centring
        about = (np.zeros(coef.shape[1]) if intercept is None else intercept) - offset_of(centring)
        return left_out(equations, coef, about if shift is None else about + shift @ coef, wanted)
