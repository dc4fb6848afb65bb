"""The same system in memory, for small n: one potrf in this process, milliseconds, no cluster.

:class:`FactorRidge` is for a few alphas of one Gram matrix, where an eigendecomposition would cost more than their
factors: half of its flops are products of a matrix and a vector, and at n = 3,000 with one thread it took 8.2 to 9.8
times as long as a factor and its inverse's diagonal. What it answers, it answers as
:class:`dkrr.linalg.inference.eigen.EigenRidge` does.

Cost
----
n^3 / 3 flops with one BLAS thread, 8 n^2 bytes; of an alpha of FactorRidge twice as much.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs

from dkrr.errors import DataError, ResidualError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import Floats
from dkrr.linalg.inference.inverse_diagonal import inverse_diagonal_dense
from dkrr.linalg.inference.leave_one_out import bordered_diagonal
from dkrr.linalg.matmul import system_norms
from dkrr.linalg.predict import ArrayRows, check_training_rows
from dkrr.linalg.solution import Solution, backward_error_bar, no_factor
from dkrr.linalg.targets import best_intercept, offset_of, solve_bordered, without_means
from dkrr.tiles.blas import is_finite, leading_minor_pivot, potrf, rounded_pivot

STRIP_ROWS = 512


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
    started = time.perf_counter()
    n, t = y.shape
    root = None if weight is None else np.sqrt(weight)
    y, centring = without_means(y, weight, fit_intercept)
    offset = None if centring is None else centring.offset
    normal = np.ones(n) if root is None else root
    rhs = y if root is None else root[:, None] * y
    alphas = np.broadcast_to(alpha, (t,))
    u = np.zeros((n, t))
    distinct = list(dict.fromkeys(alphas.tolist()))
    for value in distinct:
        targets = np.flatnonzero(alphas == value)
        a = dense_factor(kernel, x, root, value, precision)
        if fit_intercept:

            def multiply(v: Floats, value: float = value) -> Floats:
                return _product(kernel, x, root, v)[0] + value * v

            u[:, targets] = solve_bordered(partial(substitute, a), multiply, rhs[:, targets], normal)
        else:
            u[:, targets] = substitute(a, rhs[:, targets])
        del a
    return judge_dense(
        kernel, x, root, alphas, rhs, u, offset, solver="cholesky", precision=precision, started=started,
        message=f"Cholesky factor of {n:,} rows in memory",
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
    product, row_sums, diagonal = _product(kernel, x, root, u)
    product += alphas * u
    size = (row_sums[:, None] + np.abs(diagonal[:, None] + alphas) - np.abs(diagonal[:, None])).max(axis=0)
    normal = None if offset is None else np.ones(n) if root is None else root
    residual = product
    norms = system_norms(residual, size, rhs, u, normal)
    relative, backward = norms.relative_residual, norms.backward_error
    bar = backward_error_bar(n, precision)
    if not max(backward) <= bar:
        raise ResidualError(
            f"backward error {max(backward):.2g} exceeds {bar:.2g} (30 n eps, {precision})",
            hint="raise alpha, or scale the targets",
        )
    dual_coef = u if root is None else root[:, None] * u
    if kernel is not None:
        weight = None if root is None else ArrayRows(np.square(root)[:, None])
        y = rhs if root is None else np.divide(rhs, root[:, None], out=np.zeros_like(rhs), where=root[:, None] > 0)
        check_training_rows(
            kernel, ArrayRows(x), ArrayRows(dual_coef), None, y=ArrayRows(y), weight=weight, alpha=alphas,
            intercept=None if offset is None else norms.intercept, residual_norm=np.linalg.norm(residual, axis=0),
        )  # fmt: skip
    solution = Solution(
        solver=solver,
        precision=precision,
        converged=True,
        num_iterations=0,
        relative_residual=relative,
        backward_error=backward,
        seconds={"total": time.perf_counter() - started},
        message=f"{message}, largest relative residual {max(relative):.1e}",
    )
    return DenseFit(dual_coef, solution, None if offset is None else offset + norms.intercept)


def substitute(factor: Any, rhs: Floats) -> Floats:
    """A^-1 S Y (n, t)."""
    (potrs,) = get_lapack_funcs(("potrs",), dtype=factor.dtype)
    solved, _ = potrs(factor.T, rhs.astype(factor.dtype, copy=False), lower=0)
    return np.ascontiguousarray(solved, dtype=np.float64)


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
    normal = np.ones((n, 1)) if root is None else root[:, None]
    for value in dict.fromkeys(alphas.tolist()):
        targets = alphas == value
        lower = dense_factor(kernel, x, root, value, precision)
        if ones is not None:
            ones[:, targets] = substitute(lower, normal)
        diagonal[:, targets] = inverse_diagonal_dense(lower)[:, None]
    return diagonal, ones


def dense_factor(kernel: Kernel | None, x: Any, root: Any, alpha: float, precision: str) -> NDArray[Any]:
    """L (n, n) of S K S + alpha I."""
    with np.errstate(over="ignore"):  # what float32 cannot hold is named on the next lines
        a = _system(kernel, x, root, alpha).astype(precision, copy=False)
    if not is_finite(a):
        raise DataError(f"the Gram matrix is not finite in {precision}", hint="scale the features")
    diagonal = a.diagonal().astype(np.float64)
    info = potrf(a)
    order = 0 if info else rounded_pivot(a, diagonal, alpha, len(a))
    if not info and not order:
        return a
    if info:
        order, pivot = leading_minor_pivot(_system(kernel, x, root, alpha).astype(precision, copy=False), info)
    else:
        pivot = float(a[order - 1, order - 1]) ** 2
    where = f"the matrix of {len(a):,} rows"
    raise no_factor(where, order - 1, pivot, alpha, precision, len(a), float(np.abs(diagonal).max()))


def _system(kernel: Kernel | None, x: Any, root: Any, alpha: float) -> Floats:
    """S K S + alpha I."""
    a = np.array(x, dtype=np.float64, order="C") if kernel is None else kernel.block(x, x, same=True)
    if root is not None:
        a *= root[:, None]
        a *= root[None, :]
    a[np.diag_indices_from(a)] += alpha
    return a


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
    """Kernel ridge regression for some alphas, from S K S.

    Parameters
    ----------
    matrix
        S K S (m, m).
    y : (m, t)
    root : (m,), optional
        s, the square roots of the weights, all positive; None means 1.
    fit_intercept
        Solve the bordered system of :mod:`dkrr.linalg.targets`.
    """

    def __init__(self, matrix: Floats, y: Floats, root: Floats | None = None, *, fit_intercept: bool = False):
        self.matrix = matrix
        self.root = np.ones(len(y)) if root is None else root
        y, self.centring = without_means(y, np.square(self.root), fit_intercept)
        self.offset = np.zeros(y.shape[1]) + offset_of(self.centring)
        self.rhs = self.root[:, None] * y
        self._solutions: dict[float, Floats] = {}

    def _solve(self, alpha: float, *, diagonal: bool = False) -> tuple[Floats, Floats]:
        """u (m, t), kept; and the diagonal (m,) of the inverse, or nothing, of one factor."""
        if alpha in self._solutions and not diagonal:
            return self._solutions[alpha], np.empty(0)
        factor = dense_factor(None, self.matrix, None, alpha, "float64")
        solve = partial(substitute, factor)
        if self.centring is None:
            u = solve(self.rhs)
        else:
            u = solve_bordered(solve, lambda u: self.matrix @ u + alpha * u, self.rhs, self.root)
        self._solutions[alpha] = u
        if not diagonal:
            return u, np.empty(0)
        ones = solve(self.root[:, None]) if self.centring else None
        found = inverse_diagonal_dense(factor)[:, None]
        return u, (found if ones is None else bordered_diagonal(found, ones, self.root))[:, 0]

    def leave_one_out(self, alphas: Floats) -> Floats:
        """Residuals y_i - f^(-i)(x_i) (m, t, k) = u_i / (s_i D_i)."""
        residuals = np.empty((*self.rhs.shape, len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            u, diagonal = self._solve(alpha, diagonal=True)
            np.divide(u, (self.root * diagonal)[:, None], out=residuals[:, :, number])
        return residuals

    def solve_each(self, alphas: Floats) -> tuple[Floats, Floats]:
        """u (m, t) and the intercepts (t,) with one alpha for each target, ``alphas`` (t,)."""
        u = np.empty(self.rhs.shape)
        for target, alpha in enumerate(alphas.tolist()):
            u[:, target] = self._solve(alpha)[0][:, target]
        return u, self._intercept(u, alphas)

    def _intercept(self, u: Floats, alphas: Floats) -> Floats:
        """b = s^T (S Y - A u) / s^T s (t,), and what was subtracted from the targets."""
        if self.centring is None:
            return self.offset
        return best_intercept(self.rhs - self.matrix @ u - alphas * u, self.root) + self.offset

    def project(self, block: Floats) -> Floats:
        """k(z, X) S (z, m) for a block k(z, X) (z, m) of the kernel."""
        projected: Floats = block * self.root
        return projected

    def predict(self, projected: Floats, alphas: Floats) -> Floats:
        """Predictions (z, t, k) for points z given by :meth:`project`."""
        predictions = np.empty((len(projected), self.rhs.shape[1], len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            u, _ = self._solve(alpha)
            predictions[:, :, number] = projected @ u + self._intercept(u, np.full(u.shape[1], alpha))
        return predictions
