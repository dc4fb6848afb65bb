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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, blas, cho_factor, cho_solve, eigh, get_lapack_funcs

from dkrr.errors import DataError, NotPositiveDefiniteError, NumericalError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import Floats, FloatVector, best_intercept, offset_of, solve_bordered, without_means
from dkrr.linalg.leave_one_out import bordered_diagonal
from dkrr.linalg.matmul import system_norms
from dkrr.linalg.products import ArrayRows, check_training_rows
from dkrr.linalg.solution import Solution, no_factor
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
        Solve the bordered system of :mod:`dkrr.linalg.blocks`, with one more right-hand side.
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
        Solve the bordered system of :mod:`dkrr.linalg.blocks`.
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


class EigenRidge:
    """Kernel ridge regression for every alpha, from the spectrum of S K S.

    Parameters
    ----------
    matrix
        S K S (m, m), which is overwritten.
    y : (m, t)
    root : (m,), optional
        s, the square roots of the weights, all positive; None means 1.
    fit_intercept
        Solve the bordered system [[A, s], [s^T, 0]] [u; b] = [S y; 0].
    positive_semidefinite
        See :func:`decompose`.

    Notes
    -----
    In the basis Q the system is diagonal: with q_y = Q^T S y, q_s = Q^T s and g = (lam + alpha)^-1,
    b = sum(q_s q_y g) / sigma, where sigma = s^T A^-1 s = sum(q_s^2 g), and u = Q (g (q_y - b q_s)).
    Arrays that depend on alpha have it as their last axis, of length k.
    """

    def __init__(
        self,
        matrix: Floats,
        y: Floats,
        root: Floats | None = None,
        *,
        fit_intercept: bool = False,
        positive_semidefinite: bool = False,
    ) -> None:
        self.values, self.vectors = decompose(matrix, positive_semidefinite=positive_semidefinite)
        self.root = np.ones(len(y)) if root is None else root
        y, self.centring = without_means(y, np.square(self.root), fit_intercept)
        self.offset = np.zeros(y.shape[1]) + offset_of(self.centring)
        self.ones = self.vectors.T @ self.root if fit_intercept else None  # q_s (m,)
        self.rhs = (self.vectors.T @ (self.root[:, None] * y))[:, :, None]  # q_y (m, t, 1)

    @property
    def num_rows(self) -> int:
        """m."""
        return len(self.root)

    def inverse(self, alphas: Floats) -> Floats:
        """(lam + alpha)^-1 (m, k).

        Raises
        ------
        NotPositiveDefiniteError
            For an alpha, S K S + alpha I is not positive definite beyond rounding: lam_min + alpha <= eps |lam|_max.
        """
        smallest, largest = float(self.values[0]), float(np.abs(self.values[[0, -1]]).max())
        rounding = float(np.finfo(np.float64).eps) * largest
        bad = np.flatnonzero(smallest + alphas <= rounding)
        if len(bad):
            alpha = float(alphas[bad[0]])
            suggested = len(self.values) * rounding + max(0.0, -smallest)
            raise NotPositiveDefiniteError(
                f"the matrix of {len(self.values):,} rows is not positive definite: its smallest eigenvalue is "
                f"{smallest:.2g} (largest {largest:.2g}) with alpha {alpha:.3g}",
                hint=f"leave out every alpha below {suggested:.1g}, or remove duplicated rows",
                row=None,
                pivot=smallest + alpha,
                alpha=alpha,
                suggested_alpha=suggested,
            )
        return 1.0 / (self.values[:, None] + alphas)

    def solve(self, alphas: Floats) -> tuple[Floats, Floats]:
        """u (m, t, k) and the intercepts (t, k), which are 0 without one. 2 m^2 t k flops."""
        inner, intercept = self._inner(self.inverse(alphas), self.rhs)
        u = self.vectors @ inner.reshape(self.num_rows, -1)
        return u.reshape(inner.shape), intercept + self.offset[:, None]

    def solve_each(self, alphas: Floats) -> Floats:
        """u (m, t) with one alpha for each target, ``alphas`` (t,). 2 m^2 t flops."""
        inner, _ = self._solved(self.inverse(alphas), self.rhs[:, :, 0])
        found: Floats = self.vectors @ inner
        return found

    def _inner(self, inverse: Floats, rhs: Floats) -> tuple[Floats, Floats]:
        """Q^T u (m, t, k) and b (t, k) for right-hand sides (m, t, 1 or k) in the basis Q."""
        shape = (*rhs.shape[:2], inverse.shape[1])
        columns = np.broadcast_to(inverse[:, None], shape).reshape(len(rhs), -1)
        inner, intercept = self._solved(columns, np.broadcast_to(rhs, shape).reshape(len(rhs), -1))
        return inner.reshape(shape), intercept.reshape(shape[1:])

    def _solved(self, inverse: Floats, rhs: Floats) -> tuple[Floats, Floats]:
        """Q^T u (m, c) and b (c,) for right-hand sides and an alpha a column in the basis Q."""
        if self.ones is None:
            return inverse * rhs, np.zeros(rhs.shape[1])
        inner = solve_bordered(lambda r: inverse * r, lambda u: u / inverse, rhs, self.ones)
        return inner, best_intercept(rhs - inner / inverse, self.ones)

    def _border(self, inverse: Floats) -> tuple[Floats, Floats]:
        """v = A^-1 s (m, k) and sigma = s^T v (k,); zeros without an intercept."""
        if self.ones is None:
            return np.zeros_like(inverse), np.ones(inverse.shape[1])
        weighted = self.ones[:, None] * inverse
        return self.vectors @ weighted, self.ones @ weighted

    def inverse_diagonals(self, alphas: Floats) -> Floats:
        """diag(A^-1) (m, k), that of the bordered inverse, D_i - v_i^2 / sigma, with an intercept. 2 m^2 k flops."""
        inverse = self.inverse(alphas)
        v, sigma = self._border(inverse)
        result = -v * (v / sigma)
        for start in range(0, self.num_rows, EIGEN_STRIP_ROWS):
            rows = slice(start, start + EIGEN_STRIP_ROWS)
            result[rows] += np.square(self.vectors[rows]) @ inverse
        return result

    def leave_one_out(self, alphas: Floats) -> Floats:
        """Residuals y_i - f^(-i)(x_i) (m, t, k) = u_i / (s_i D_i). 2 m^2 (t + 1) k flops."""
        u, _ = self.solve(alphas)
        u /= (self.root[:, None] * self.inverse_diagonals(alphas))[:, None, :]
        return u

    def project(self, block: Floats) -> Floats:
        """k(z, X) S Q (z, m) for a block k(z, X) (z, m) of the kernel. 2 z m^2 flops."""
        return (block * self.root) @ self.vectors

    def predict(self, projected: Floats, alphas: Floats) -> Floats:
        """Predictions (z, t, k) for points z given by :meth:`project`. 2 z m t k flops."""
        inner, intercept = self._inner(self.inverse(alphas), self.rhs)
        values = projected @ inner.reshape(self.num_rows, -1)
        shifted: Floats = values.reshape(len(projected), *intercept.shape) + (intercept + self.offset[:, None])
        return shifted

    def leave_fold_out(self, rows: NDArray[np.intp], alphas: Floats) -> Floats:
        """Residuals (f, t, k) of rows F by fits without them.

        With c = ((A^-1)_FF)^-1 u_F they are c / s_F. With an intercept (A^-1)_FF is a block of the bordered inverse,
        less v_F v_F^T / sigma.

        Cost
        ----
        m f^2 + f^3 / 3 flops for each alpha; 16 f m + 8 f^2 bytes.
        """
        inverse = self.inverse(alphas)
        u, _ = self.solve(alphas)
        v, sigma = self._border(inverse)
        vectors = np.ascontiguousarray(self.vectors[rows])
        scaled = np.empty_like(vectors)
        removed = np.empty((len(rows), *u.shape[1:]))
        for number, alpha in enumerate(alphas.tolist()):
            np.multiply(vectors, np.sqrt(inverse[:, number]), out=scaled)
            block = blas.dsyrk(1.0, scaled.T, trans=1, lower=1)  # Q_F g Q_F^T
            if self.ones is not None:
                border = v[rows, number] / np.sqrt(sigma[number])
                block -= np.outer(border, border)
            removed[:, :, number] = _solve_block(block, u[rows, :, number], alpha)
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
