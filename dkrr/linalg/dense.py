"""The same system in memory, for small n: one potrf in this process, milliseconds, no cluster.

:class:`FactorRidge` is for a few alphas of one Gram matrix, where an eigendecomposition would cost more than their
factors: half of its flops are products of a matrix and a vector, and at n = 3,000 with one thread it took 8.2 to 9.8
times as long as a factor and its inverse's diagonal. What it answers, it answers as
:class:`dkrr.linalg.dense.EigenRidge` does.

Cost
----
n^3 / 3 flops with one BLAS thread, 8 n^2 bytes; of an alpha of FactorRidge twice as much.

One eigendecomposition S K S = Q diag(lam) Q^T, after which every alpha costs O(m^2).

    u = Q (lam + alpha)^-1 Q^T S y        diag(A^-1) = (Q * Q) (lam + alpha)^-1        A = S K S + alpha I

You need it where alpha is chosen: leave-one-out, folds and degrees of freedom of a whole grid of alphas cost less than
one more factor. It is for rows of positive weight in memory; a row of weight zero takes no part in the system and is
predicted by :meth:`EigenRidge.predict` like any other point.

Cost of the spectrum
--------------------
9 m^3 flops at most with one BLAS thread, in place: 24 m^2 bytes at the peak, 8 m^2 after it. On kernel matrices the
divide-and-conquer driver ("evd") is as fast as MRRR ("evr": 1.75 s against 1.95 s at m = 2,000), its eigenvectors are
orthogonal to 3e-15 instead of 1e-13, on which the leave-one-out errors rest; of a matrix in Fortran order it returns
them in the same memory.

References
----------
Rifkin and Lippert, Notes on regularized least squares, MIT-CSAIL-TR-2007-025, 2007.
An, Liu and Venkatesh, Fast cross-validation algorithms for least squares support vector machine and kernel ridge
regression, Pattern Recognition 40, 2007 (the errors of a fold).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, blas, cho_factor, cho_solve, eigh, get_lapack_funcs

from dkrr.errors import DataError, NotPositiveDefiniteError, NumericalError
from dkrr.kernels import Kernel
from dkrr.linalg.leave_one_out import LeaveOneOut, bordered_diagonal, check_shares, loo_from_diagonal, unscaled
from dkrr.linalg.matmul import system_norms
from dkrr.linalg.operators import (
    Floats,
    FloatVector,
    best_intercept,
    offset_of,
    row_blocks,
    solve_bordered,
    weighted,
    without_means,
)
from dkrr.linalg.products import STRIP_ROWS, ArrayRows, Strips, add_strips, block_strips, check_training_rows
from dkrr.linalg.solution import Solution, no_factor
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import is_finite, lost_pivot, potrf


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
            weighted(a, root)
            a[np.diag_indices_from(a)] += alpha
            return a.astype(precision, copy=False)

        with np.errstate(over="ignore"):  # what float32 cannot hold is named on the next lines
            a = system()
        if not is_finite(a):
            raise DataError(f"the Gram matrix is not finite in {precision}", hint="scale the features")
        n, diagonal = len(a), a.diagonal().astype(np.float64)
        lost = lost_pivot(a, potrf(a), diagonal, alpha, n, system)
        if lost is None:
            return cls(a)
        raise no_factor(f"the matrix of {n:,} rows", 0, lost, alpha, precision, n, diagonal)

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

    def diagonals(self, root: Floats | None = None, numbers: Any = None) -> FloatVector:
        """The diagonal of A^-1 (n,), or of the inverse bordered by ``root``; L is overwritten. n^3 / 3 flops.

        ``numbers`` are those of the rows in an error.
        """
        ones = None if root is None else self.solve(root[:, None])
        (trtri,) = get_lapack_funcs(("trtri",), (self.lower,))
        # L in C order is the upper triangle L^T in Fortran order
        inverse, _ = trtri(self.lower.T, lower=0, overwrite_c=1)
        squares: FloatVector = np.einsum("cr,cr->c", inverse, inverse, dtype=np.float64)
        if ones is None or root is None:
            return squares
        diagonal = bordered_diagonal(squares[:, None], ones, root)
        check_shares(diagonal / squares[:, None], np.arange(len(diagonal)) if numbers is None else numbers)
        return diagonal[:, 0]


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
        Solve the bordered system of :mod:`dkrr.linalg.operators`, with one more right-hand side.
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
        check_training_rows(
            kernel, ArrayRows(x), ArrayRows(dual_coef), None, y=ArrayRows(unscaled(rhs, root)), weight=weight,
            alpha=alphas, intercept=None if offset is None else norms.intercept,
            residual_norm=np.linalg.norm(residual, axis=0),
        )  # fmt: skip
    return DenseFit(dual_coef, solution, None if offset is None else offset + norms.intercept)


def dense_leave_one_out(
    kernel: Kernel | None,
    x: Floats,
    y: Floats,
    alphas: Floats,
    weight: Floats | None,
    dual_coef: Floats,
    predict: Callable[[NDArray[np.bool_]], Floats],
    *,
    precision: str = "float64",
    fit_intercept: bool = False,
) -> LeaveOneOut:
    """Leave-one-out of a fit, from the diagonal of A^-1; 2 n^3 / 3 flops for each distinct alpha.

    Parameters
    ----------
    kernel, x, y, weight, precision, fit_intercept
        As for :func:`fit_dense`.
    alphas : (t,)
    dual_coef : (n, t)
        Of the fit.
    predict
        f of the rows of a mask: of those of weight zero.
    """
    n, t = y.shape
    root = None if weight is None else np.sqrt(weight)
    diagonal, ones = np.empty((n, t)), np.empty((n, t)) if fit_intercept else None
    for value in dict.fromkeys(alphas.tolist()):
        targets, factor = alphas == value, DenseFactor.of(kernel, x, root, value, precision)
        if ones is not None:
            ones[:, targets] = factor.solve(np.ones((n, 1)) if root is None else root[:, None])
        diagonal[:, targets] = factor.diagonals()[:, None]
    unseen = np.zeros(n, np.bool_) if root is None else root == 0
    return loo_from_diagonal(
        y=y,
        u=unscaled(dual_coef, root),
        inverse_diagonal=diagonal,
        alpha=alphas,
        root=root,
        ones=ones,
        predictions=predict(unseen) if unseen.any() else None,
    )


def _product(kernel: Kernel | None, x: Any, root: Any, u: Any) -> tuple[Floats, Floats, Floats]:
    """S K S u (n, t) from the kernel, a strip at a time; sums of |S K S| over its rows (n,), and its diagonal (n,)."""
    s = np.ones((len(x), 1)) if root is None else root[:, None]
    given: Strips = (
        (rows, slice(None), np.asarray(x[rows], dtype=np.float64)) for rows in row_blocks(len(x), STRIP_ROWS)
    )
    result = np.zeros((len(x), u.shape[1] + 1))
    strips = given if kernel is None else block_strips(kernel, x, x, same=True)
    add_strips(strips, s * np.hstack([u, np.ones((len(x), 1))]), result, absolute_last=True)
    result *= s
    return result[:, :-1], result[:, -1], (x.diagonal() if kernel is None else kernel.diag(x)) * np.square(s[:, 0])


class DenseRidge:
    """Kernel ridge regression of rows in memory for some alphas, which are the last axis of whatever depends on them.

    Parameters
    ----------
    y : (m, t)
    root : (m,), optional
        s, the square roots of the weights; None means 1.
    fit_intercept
        Solve the bordered system [[A, s], [s^T, 0]] [u; b] = [S y; 0] of :mod:`dkrr.linalg.operators`.
    """

    def __init__(self, y: Floats, root: Floats | None = None, *, fit_intercept: bool = False) -> None:
        self.root = np.ones(len(y)) if root is None else root
        self.numbers = np.arange(len(y))  # of the rows in an error
        y, self.centring = without_means(y, None if root is None else np.square(root), fit_intercept)
        self.offset = np.zeros(y.shape[1]) + offset_of(self.centring)
        self.rhs = self.root[:, None] * y

    def solve(self, alphas: Floats, targets: Any = slice(None)) -> Floats:
        """u (m, c, k) of some targets."""
        raise NotImplementedError

    def multiply(self, u: Floats, alpha: float) -> Floats:
        """A u (m, c)."""
        raise NotImplementedError

    def solve_with_diagonals(self, alphas: Floats) -> tuple[Floats, Floats]:
        """u (m, t, k) and diag(A^-1) (m, k), that of the bordered inverse with an intercept."""
        raise NotImplementedError

    def solve_each(self, alphas: Floats) -> Floats:
        """u (m, t) with one alpha for each target, ``alphas`` (t,)."""
        u = np.empty(self.rhs.shape)
        for alpha in dict.fromkeys(alphas.tolist()):
            targets = np.flatnonzero(alphas == alpha)
            u[:, targets] = self.solve(np.array([alpha]), targets)[:, :, 0]
        return u

    def leave_one_out(self, alphas: Floats) -> Floats:
        """Residuals y_i - f^(-i)(x_i) (m, t, k) = u_i / (s_i D_i)."""
        u, diagonals = self.solve_with_diagonals(alphas)
        u /= (self.root[:, None] * diagonals)[:, None, :]
        return u

    def predict(self, block: Floats, alphas: Floats) -> Floats:
        """Predictions (z, t, k) for points z with a block k(z, X) (z, m) of the kernel."""
        return self.values(block, alphas, self.solve(alphas), self.rhs[:, :, None])

    def values(self, block: Floats, alphas: Floats, u: Floats, rhs: Floats) -> Floats:
        """Predictions (z, t, k) of solutions u (m, t, k) for right-hand sides (m, t, 1 or k)."""
        shape = len(block), *u.shape[1:]
        values: Floats = ((block * self.root) @ u.reshape(len(u), -1)).reshape(shape) + self.offset[:, None]
        if self.centring is not None:
            for number, alpha in enumerate(alphas.tolist()):
                left = rhs[:, :, min(number, rhs.shape[2] - 1)] - self.multiply(u[:, :, number], alpha)
                values[:, :, number] += best_intercept(left, self.root)
        return values


class FactorRidge(DenseRidge):
    """By a factor of S K S + alpha I for each alpha.

    Parameters
    ----------
    kernel, x
        As for :func:`fit_dense`.
    y, root, fit_intercept
        See :class:`DenseRidge`.
    precision
        Of the factors.
    """

    def __init__(
        self, kernel: Kernel | None, x: Floats, y: Floats, root: Floats | None = None, *, fit_intercept: bool = False,
        precision: str = "float64",
    ) -> None:  # fmt: skip
        super().__init__(y, root, fit_intercept=fit_intercept)
        self.kernel, self.x, self.scale, self.precision = kernel, x, root, precision
        self._known: dict[float, Floats] = {}

    def multiply(self, u: Floats, alpha: float) -> Floats:
        return _product(self.kernel, self.x, self.scale, u)[0] + alpha * u

    def _factor(self, alpha: float, targets: Any = slice(None)) -> tuple[DenseFactor, Floats]:
        """The factor, and u (m, c) of some targets."""
        factor = DenseFactor.of(self.kernel, self.x, self.scale, alpha, self.precision)
        if self.centring is None:
            return factor, factor.solve(self.rhs[:, targets])
        multiply = partial(self.multiply, alpha=alpha)
        return factor, solve_bordered(factor.solve, multiply, self.rhs[:, targets], self.root)

    def solve(self, alphas: Floats, targets: Any = slice(None)) -> Floats:
        known = [self._known.get(alpha) for alpha in alphas.tolist()]
        parts = [
            self._factor(alpha, targets)[1] if u is None else u[:, targets]
            for alpha, u in zip(alphas.tolist(), known, strict=True)
        ]
        return np.stack(parts, axis=2)

    def solve_with_diagonals(self, alphas: Floats) -> tuple[Floats, Floats]:
        diagonals = np.empty((len(self.rhs), len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            factor, self._known[alpha] = self._factor(alpha)
            diagonals[:, number] = factor.diagonals(self.root if self.centring else None, self.numbers)
        return self.solve(alphas), diagonals


EIGEN_STRIP_ROWS = 64


def eigen_bytes(m: int) -> int:
    """Peak memory of :func:`decompose`: the matrix and 2 m^2 numbers of work."""
    return 24 * m * m


def decompose(a: Floats, *, positive_semidefinite: bool = False) -> tuple[Floats, Floats]:
    """Eigenvalues (m,), ascending, and eigenvectors (m, m), a column each, of a symmetric matrix, which is overwritten.

    Parameters
    ----------
    positive_semidefinite
        The matrix is known to have no negative eigenvalue; those of rounding become 0.

    Raises
    ------
    DataError
        An entry is not finite.
    """
    if not is_finite(a):
        raise DataError("the Gram matrix is not finite", hint="scale the features")
    try:
        # symmetric: the transpose of a C-order matrix is the Fortran order in which the driver works in place
        values, vectors = eigh(a if a.flags.f_contiguous else a.T, driver="evd", overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise NumericalError(
            f"the eigendecomposition of {len(a):,} rows did not converge: {error}", hint="use solver='cholesky'"
        ) from error
    return np.maximum(values, 0.0) if positive_semidefinite else values, vectors


class EigenRidge(DenseRidge):
    """For every alpha, from the spectrum of S K S.

    Parameters
    ----------
    matrix
        S K S (m, m), which is overwritten.
    y, root, fit_intercept
        See :class:`DenseRidge`; all weights are positive.
    positive_semidefinite
        See :func:`decompose`.

    Notes
    -----
    In the basis Q the system is diagonal: with q_y = Q^T S y, q_s = Q^T s and g = (lam + alpha)^-1,
    b = sum(q_s q_y g) / sigma, where sigma = s^T A^-1 s = sum(q_s^2 g), and u = Q (g (q_y - b q_s)).
    """

    def __init__(
        self, matrix: Floats, y: Floats, root: Floats | None = None, *, fit_intercept: bool = False,
        positive_semidefinite: bool = False,
    ) -> None:  # fmt: skip
        self.eigenvalues, self.vectors = decompose(matrix, positive_semidefinite=positive_semidefinite)
        super().__init__(y, root, fit_intercept=fit_intercept)
        self.ones = self.vectors.T @ self.root if fit_intercept else None  # q_s (m,)

    def multiply(self, u: Floats, alpha: float) -> Floats:
        return np.asarray(self.vectors @ ((self.eigenvalues + alpha)[:, None] * (self.vectors.T @ u)))

    def solve(self, alphas: Floats, targets: Any = slice(None)) -> Floats:
        """u (m, c, k) of some targets. 2 m^2 c (k + 1) flops."""
        return self._solved(self.inverse(alphas), self.rhs[:, targets, None])

    def _solved(self, inverse: Floats, rhs: Floats) -> Floats:
        """u (m, c, k) for right-hand sides (m, c, 1 or k)."""
        shape = (*rhs.shape[:2], inverse.shape[1])
        g = np.broadcast_to(inverse[:, None], shape).reshape(len(rhs), -1)
        basis = (self.vectors.T @ rhs.reshape(len(rhs), -1)).reshape(rhs.shape)
        q: Floats = np.broadcast_to(basis, shape).reshape(len(rhs), -1)
        inner = g * q if self.ones is None else solve_bordered(lambda r: g * r, lambda u: u / g, q, self.ones)
        return np.asarray((self.vectors @ inner).reshape(shape))

    def inverse(self, alphas: Floats) -> Floats:
        """(lam + alpha)^-1 (m, k).

        Raises
        ------
        NotPositiveDefiniteError
            For an alpha, S K S + alpha I is not positive definite beyond rounding: lam_min + alpha <= eps |lam|_max.
        """
        smallest, largest = float(self.eigenvalues[0]), float(np.abs(self.eigenvalues[[0, -1]]).max())
        rounding = float(np.finfo(np.float64).eps) * largest
        bad = np.flatnonzero(smallest + alphas <= rounding)
        if len(bad):
            alpha = float(alphas[bad[0]])
            suggested = len(self.eigenvalues) * rounding + max(0.0, -smallest)
            raise NotPositiveDefiniteError(
                f"the matrix of {len(self.eigenvalues):,} rows is not positive definite: its smallest eigenvalue is "
                f"{smallest:.2g} (largest {largest:.2g}) with alpha {alpha:.3g}",
                hint=f"leave out every alpha below {suggested:.1g}, or remove duplicated rows",
                row=None,
                pivot=smallest + alpha,
                alpha=alpha,
                suggested_alpha=suggested,
            )
        return 1.0 / (self.eigenvalues[:, None] + alphas)

    def solve_with_diagonals(self, alphas: Floats) -> tuple[Floats, Floats]:
        inverse = self.inverse(alphas)
        diagonals = np.empty((len(self.rhs), len(alphas)))
        for rows in row_blocks(len(self.rhs), EIGEN_STRIP_ROWS):
            diagonals[rows] = np.square(self.vectors[rows]) @ inverse
        border = np.square(self._border(inverse))
        check_shares(1.0 - border / diagonals, self.numbers)
        return self.solve(alphas), diagonals - border

    def _border(self, inverse: Floats) -> Floats:
        """v / sigma^1/2 (m, k), v = A^-1 s and sigma = s^T v; zeros without an intercept."""
        if self.ones is None:
            return np.zeros_like(inverse)
        weighted = self.ones[:, None] * inverse
        return np.asarray((self.vectors @ weighted) / np.sqrt(self.ones @ weighted))

    def leave_fold_out(self, rows: NDArray[np.intp], alphas: Floats) -> Floats:
        """Residuals (f, t, k) of rows F by fits without them.

        With c = ((A^-1)_FF)^-1 u_F they are c / s_F. With an intercept (A^-1)_FF is a block of the bordered inverse,
        less v_F v_F^T / sigma.

        Cost
        ----
        m f^2 + f^3 / 3 flops for each alpha; 16 f m + 8 f^2 bytes.
        """
        inverse, removed = self.inverse(alphas), np.empty((len(rows), self.rhs.shape[1], len(alphas)))
        u, border, vectors = self.solve(alphas), self._border(inverse), np.ascontiguousarray(self.vectors[rows])
        scaled = np.empty_like(vectors)
        for number, alpha in enumerate(alphas.tolist()):
            np.multiply(vectors, np.sqrt(inverse[:, number]), out=scaled)
            inside = blas.dsyrk(1.0, scaled.T, trans=1, lower=1)  # Q_F g Q_F^T
            if self.ones is not None:
                inside -= np.outer(border[rows, number], border[rows, number])
            removed[:, :, number] = _solve_block(inside, u[rows, :, number], alpha)
        return np.asarray(removed / self.root[rows][:, None, None])


def _solve_block(block: Floats, rhs: Floats, alpha: float) -> Any:
    """c of block c = rhs for a positive definite block whose lower triangle is given."""
    try:
        factor = cho_factor(block, lower=True, overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise NotPositiveDefiniteError(
            f"the rows that remain without a fold of {len(rhs):,} rows have no positive definite matrix with alpha "
            f"{alpha:.3g}",
            hint="leave out the smallest alphas, or remove duplicated rows",
            row=None,
            pivot=0.0,
            alpha=alpha,
            suggested_alpha=10 * alpha,
        ) from error
    return cho_solve(factor, rhs, check_finite=False)
