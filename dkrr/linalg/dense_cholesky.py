"""The same system in memory, for small n: one potrf in this process, milliseconds, no cluster.

:class:`FactorRidge` is for a few alphas of one Gram matrix, where an eigendecomposition would cost more than their
factors: half of its flops are products of a matrix and a vector, and at n = 3,000 with one thread it took 8.2 to 9.8
times as long as a factor and its inverse's diagonal. What it answers, it answers as
:class:`dkrr.linalg.eigen.EigenRidge` does.

Cost
----
n^3 / 3 flops with one BLAS thread, 8 n^2 bytes; of an alpha of FactorRidge twice as much.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs

from dkrr.errors import DataError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import Floats, FloatVector
from dkrr.linalg.leave_one_out import bordered_diagonal
from dkrr.linalg.matmul import system_norms
from dkrr.linalg.predict import ArrayRows, check_training_rows
from dkrr.linalg.solution import Solution, no_factor
from dkrr.linalg.targets import best_intercept, offset_of, solve_bordered, without_means
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import is_finite, leading_minor_pivot, potrf, rounded_pivot

STRIP_ROWS = 512


@dataclass(frozen=True)
class DenseFactor:
    """L (n, n) of A = S K S + alpha I in memory, as one tile."""

    lower: NDArray[Any]

    @classmethod
    def of(cls, kernel: Kernel | None, x: Any, root: Any, alpha: float, precision: str = "float64") -> DenseFactor:
        """Factorise for centred rows x (n, d), or the matrix K itself (n, n) without a kernel.

        Raises
        ------
        DataError
            K is not finite.
        NotPositiveDefiniteError
            A is not positive definite in this precision.

        Cost
        ----
        n^3 / 3 flops, 8 n^2 bytes.
        """

        def system() -> NDArray[Any]:
            a = np.array(x, dtype=np.float64, order="C") if kernel is None else kernel.block(x, x, same=True)
            if root is not None:
                a *= root[:, None]
                a *= root[None, :]
            a[np.diag_indices_from(a)] += alpha
            return a.astype(precision, copy=False)

        with np.errstate(over="ignore"):  # what float32 cannot hold is named on the next lines
            a = system()
        if not is_finite(a):
            raise DataError(f"the Gram matrix is not finite in {precision}", hint="scale the features")
        n, diagonal = len(a), a.diagonal().astype(np.float64)
        info = potrf(a)
        order = 0 if info else rounded_pivot(a, diagonal, alpha, n)
        if not info and not order:
            return cls(a)
        order, pivot = leading_minor_pivot(system(), info) if info else (order, float(a[order - 1, order - 1]) ** 2)
        where = f"the matrix of {n:,} rows"
        raise no_factor(where, order - 1, pivot, alpha, precision, n, float(np.abs(diagonal).max()))

    @property
    def grid(self) -> TileGrid:
        return TileGrid(len(self.lower), len(self.lower))

    def read(self, i: int, j: int) -> NDArray[Any]:
        """The whole factor."""
        return self.lower

    def solve(self, rhs: Floats) -> Floats:
        """A^-1 rhs (n, c)."""
        (potrs,) = get_lapack_funcs(("potrs",), dtype=self.lower.dtype)
        solved, _ = potrs(self.lower.T, rhs.astype(self.lower.dtype, copy=False), lower=0)
        return np.ascontiguousarray(solved, dtype=np.float64)

    def inverse_diagonal(self) -> FloatVector:
        """The diagonal of A^-1 (n,); L is overwritten by its inverse. n^3 / 3 flops."""
        (trtri,) = get_lapack_funcs(("trtri",), (self.lower,))
        # L in C order is the upper triangle L^T in Fortran order
        inverse, _ = trtri(self.lower.T, lower=0, overwrite_c=1)
        squares: FloatVector = np.einsum("cr,cr->c", inverse, inverse, dtype=np.float64)
        return squares


@dataclass(frozen=True)
class DenseFit:
    """Coefficients (n, t), how good they are, and the intercepts (t,) or None."""

    dual_coef: Floats
    solution: Solution
    intercept: Floats | None = None


def fit_dense(
    kernel: Kernel | None,
    x: Floats,
    y: Floats,
    alpha: Floats,
    weight: Floats | None,
    precision: str,
    *,
    fit_intercept: bool = False,
) -> DenseFit:
    """dual_coef (n, t) of (K + alpha I) dual_coef = y, weighted, with one factor per distinct alpha.

    Parameters
    ----------
    kernel
        A resolved kernel, or None when ``x`` (n, n) is the Gram matrix itself.
    x : (n, d), y : (n, t), alpha : (1,) or (t,), weight : (n,) or None
    precision
        "float64" or "float32" (of the factor and the answer).
    fit_intercept
        Solve the bordered system of :mod:`dkrr.linalg.targets`, with one more right-hand side.
    """
    started, alphas = time.perf_counter(), np.broadcast_to(alpha, (y.shape[1],))
    root = None if weight is None else np.sqrt(weight)
    ridge = FactorRidge(kernel, x, y, root, fit_intercept=fit_intercept, precision=precision)
    message = f"Cholesky factor of {len(y):,} rows in memory"
    return judge_dense(
        kernel, x, root, alphas, ridge.rhs, ridge.solve_each(alphas), ridge.offset if fit_intercept else None,
        solver="cholesky", precision=precision, started=started, message=message,
    )  # fmt: skip


def judge_dense(
    kernel: Kernel | None,
    x: Floats,
    root: Floats | None,
    alphas: Floats,
    rhs: Floats,
    u: Floats,
    offset: Floats | None,
    *,
    solver: str,
    precision: str,
    started: float,
    message: str,
) -> DenseFit:
    """An answer u (n, t) with its true residual, evaluated from the kernel and the rows in one pass for all targets.

    Parameters
    ----------
    alphas : (t,)
    rhs : (n, t)
        S Y, of centred targets when there is an intercept.
    offset : (t,) or None
        What was subtracted from the targets; None means no intercept.
    solver, precision, started, message
        Of the solution: what solved, when it began by ``time.perf_counter``, and in words.

    Raises
    ------
    ResidualError
        The backward error exceeds 30 n eps, or predictions of training rows are others than those of the system.
    """
    n = len(x)
    residual, row_sums, diagonal = _product(kernel, x, root, u)
    residual += alphas * u
    size = (row_sums[:, None] + np.abs(diagonal[:, None] + alphas) - np.abs(diagonal[:, None])).max(axis=0)
    normal = None if offset is None else np.ones(n) if root is None else root
    norms = system_norms(residual, size, rhs, u, normal)
    solution = Solution.direct(
        n, norms.relative_residual, norms.backward_error, solver=solver, precision=precision, message=message,
        seconds={"total": time.perf_counter() - started}, hint="raise alpha, or scale the targets",
    )  # fmt: skip
    dual_coef = u if root is None else root[:, None] * u
    if kernel is not None:
        weight = None if root is None else ArrayRows(np.square(root)[:, None])
        y = rhs if root is None else np.divide(rhs, root[:, None], out=np.zeros_like(rhs), where=root[:, None] > 0)
        check_training_rows(
            kernel, ArrayRows(x), ArrayRows(dual_coef), None, y=ArrayRows(y), weight=weight, alpha=alphas,
            intercept=None if offset is None else norms.intercept, residual_norm=np.linalg.norm(residual, axis=0),
        )  # fmt: skip
    return DenseFit(dual_coef, solution, None if offset is None else offset + norms.intercept)


def dense_diagonals(
    kernel: Kernel | None,
    x: Floats,
    alphas: Floats,
    root: Floats | None,
    precision: str,
    *,
    fit_intercept: bool,
) -> tuple[Floats, Floats | None]:
    """The diagonals of A^-1 (n, t) and, for an intercept, A^-1 s (n, t); 2 n^3 / 3 flops for each distinct alpha.

    Parameters
    ----------
    kernel, x, root, precision
        As for :func:`fit_dense`; ``root`` are the square roots of the weights.
    alphas : (t,)
    """
    n, t = len(x), len(alphas)
    diagonal, ones = np.empty((n, t)), np.empty((n, t)) if fit_intercept else None
    for value in dict.fromkeys(alphas.tolist()):
        targets, factor = alphas == value, DenseFactor.of(kernel, x, root, value, precision)
        if ones is not None:
            ones[:, targets] = factor.solve(np.ones((n, 1)) if root is None else root[:, None])
        diagonal[:, targets] = factor.inverse_diagonal()[:, None]
    return diagonal, ones


def _product(kernel: Kernel | None, x: Any, root: Any, u: Any) -> tuple[Floats, Floats, Floats]:
    """S K S u (n, t) from the kernel, a strip at a time; sums of |S K S| over its rows (n,), and its diagonal (n,)."""
    product, row_sums, diagonal = np.empty(u.shape), np.empty(len(x)), np.empty(len(x))
    for start in range(0, len(x), STRIP_ROWS):
        rows = slice(start, min(start + STRIP_ROWS, len(x)))
        strip = np.array(x[rows], dtype=np.float64) if kernel is None else kernel.block(x[rows], x)
        index = np.arange(rows.start, rows.stop)
        if kernel is not None:
            strip[index - start, index] = kernel.diag(x[rows])
        if root is not None:
            strip *= root[rows, None]
            strip *= root[None, :]
        diagonal[rows] = strip[index - start, index]
        product[rows], row_sums[rows] = strip @ u, np.abs(strip).sum(axis=1)
    return product, row_sums, diagonal


class FactorRidge:
    """Kernel ridge regression for some alphas, each by a factor of S K S + alpha I.

    Parameters
    ----------
    kernel, x
        As for :func:`fit_dense`.
    y : (m, t)
    root : (m,), optional
        s, the square roots of the weights; None means 1.
    fit_intercept
        Solve the bordered system of :mod:`dkrr.linalg.targets`.
    precision
        Of the factors.
    """

    def __init__(
        self,
        kernel: Kernel | None,
        x: Floats,
        y: Floats,
        root: Floats | None = None,
        *,
        fit_intercept: bool = False,
        precision: str = "float64",
    ) -> None:
        self.kernel, self.x, self.scale, self.precision = kernel, x, root, precision
        self.root = np.ones(len(y)) if root is None else root
        y, self.centring = without_means(y, None if root is None else np.square(root), fit_intercept)
        self.offset = np.zeros(y.shape[1]) + offset_of(self.centring)
        self.rhs = self.root[:, None] * y
        self._known: dict[float, Floats] = {}

    def _factor(self, alpha: float) -> DenseFactor:
        return DenseFactor.of(self.kernel, self.x, self.scale, alpha, self.precision)

    def _multiply(self, u: Floats, alpha: float) -> Floats:
        """A u (m, c)."""
        return _product(self.kernel, self.x, self.scale, u)[0] + alpha * u

    def _solve(self, alpha: float, factor: DenseFactor, targets: Any = slice(None)) -> Floats:
        """u (m, c) of some targets."""
        if self.centring is None:
            return factor.solve(self.rhs[:, targets])
        return solve_bordered(factor.solve, lambda u: self._multiply(u, alpha), self.rhs[:, targets], self.root)

    def leave_one_out(self, alphas: Floats) -> Floats:
        """Residuals y_i - f^(-i)(x_i) (m, t, k) = u_i / (s_i D_i)."""
        residuals = np.empty((*self.rhs.shape, len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            factor = self._factor(alpha)
            u = self._known[alpha] = self._solve(alpha, factor)
            ones = factor.solve(self.root[:, None]) if self.centring else None
            diagonal = factor.inverse_diagonal()[:, None]
            if ones is not None:
                diagonal = bordered_diagonal(diagonal, ones, self.root)
            np.divide(u, self.root[:, None] * diagonal, out=residuals[:, :, number])
        return residuals

    def solve_each(self, alphas: Floats) -> Floats:
        """u (m, t) with one alpha for each target, ``alphas`` (t,)."""
        u = np.empty(self.rhs.shape)
        for alpha in dict.fromkeys(alphas.tolist()):
            targets, known = np.flatnonzero(alphas == alpha), self._known.get(alpha)
            u[:, targets] = self._solve(alpha, self._factor(alpha), targets) if known is None else known[:, targets]
        return u

    def project(self, block: Floats) -> Floats:
        """k(z, X) S (z, m) for a block k(z, X) (z, m) of the kernel."""
        projected: Floats = block * self.root
        return projected

    def predict(self, projected: Floats, alphas: Floats) -> Floats:
        """Predictions (z, t, k) for points z given by :meth:`project`."""
        predictions = np.empty((len(projected), self.rhs.shape[1], len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            if alpha not in self._known:
                self._known[alpha] = self._solve(alpha, self._factor(alpha))
            u = self._known[alpha]
            predictions[:, :, number] = projected @ u + self.offset
            if self.centring is not None:
                predictions[:, :, number] += best_intercept(self.rhs - self._multiply(u, alpha), self.root)
        return predictions
