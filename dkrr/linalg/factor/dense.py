"""The same system in memory, for small n: one potrf in this process, milliseconds, no cluster.

Cost
----
n^3 / 3 flops with one BLAS thread; 8 n^2 bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs

from dkrr.errors import DataError, NotPositiveDefiniteError, ResidualError
from dkrr.kernels import Kernel
from dkrr.linalg.inference.inverse_diagonal import inverse_diagonal_dense
from dkrr.linalg.intercept import (
    best_intercept,
    bordered_norms,
    centre_targets,
    solve_bordered,
)
from dkrr.linalg.predict import ArrayRows, check_training_rows
from dkrr.linalg.residual import block_norms, combine_norms
from dkrr.linalg.solution import Solution, backward_error_bar
from dkrr.tiles.blas import is_finite, leading_minor_pivot, potrf, rounded_pivot

__all__ = ["DenseFit", "dense_diagonals", "dense_factor", "fit_dense", "judge_dense", "solve_dense", "substitute"]

STRIP_ROWS = 512


@dataclass(frozen=True)
class DenseFit:
    """Coefficients (n, t), how good they are, and the intercepts (t,) or None."""

    dual_coef: NDArray[np.float64]
    solution: Solution
    intercept: NDArray[np.float64] | None = None


def solve_dense(
    kernel: Kernel | None,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    alpha: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
    precision: str,
) -> tuple[NDArray[np.float64], Solution]:
    """:func:`fit_dense` without an intercept: dual_coef (n, t) and the solution."""
    fit = fit_dense(kernel, x, y, alpha, weight, precision)
    return fit.dual_coef, fit.solution


def fit_dense(
    kernel: Kernel | None,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    alpha: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
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
        Solve the bordered system of :mod:`dkrr.linalg.intercept`, with one more right-hand side.
    """
    started = time.perf_counter()
    n, t = y.shape
    root = None if weight is None else np.sqrt(weight)
    offset, normal = None, None
    if fit_intercept:
        centring = centre_targets(lambda: [(y, weight)], t)
        y, offset, normal = centring.apply(y), centring.offset, np.ones(n) if root is None else root
    rhs = y if root is None else root[:, None] * y
    alphas = np.broadcast_to(alpha, (t,))
    u = np.zeros((n, t))
    distinct = list(dict.fromkeys(alphas.tolist()))
    for value in distinct:
        targets = np.flatnonzero(alphas == value)
        a = dense_factor(kernel, x, root, value, precision)
        if normal is None:
            u[:, targets] = substitute(a, rhs[:, targets])
        else:
            u[:, targets] = solve_bordered(
                partial(substitute, a), partial(_multiply, kernel, x, root, value), rhs[:, targets], normal
            )
        del a
    return judge_dense(
        kernel, x, root, alphas, rhs, u, offset, solver="cholesky", precision=precision, started=started,
        message=f"Cholesky factor of {n:,} rows in memory",
    )  # fmt: skip


def judge_dense(
    kernel: Kernel | None,
    x: NDArray[np.float64],
    root: NDArray[np.float64] | None,
    alphas: NDArray[np.float64],
    rhs: NDArray[np.float64],
    u: NDArray[np.float64],
    offset: NDArray[np.float64] | None,
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
    norms = row_sums[:, None] + np.abs(diagonal[:, None] + alphas) - np.abs(diagonal[:, None])
    shifted = rhs
    if offset is None:
        intercept = None
        relative, backward = _norms(rhs, u, product, norms)
    else:
        normal = np.ones(n) if root is None else root
        found = best_intercept(rhs - product, normal)
        intercept, shifted = offset + found, rhs - normal[:, None] * found
        relative, backward = bordered_norms(*_norms(shifted, u, product, norms), rhs, shifted, u, normal)
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
            intercept=None if offset is None else found, residual_norm=np.linalg.norm(shifted - product, axis=0),
        )  # fmt: skip
    solution = Solution(
        solver=solver,
        precision=precision,
        converged=True,
        num_iterations=0,
        relative_residual=relative.tolist(),
        backward_error=backward.tolist(),
        seconds={"total": time.perf_counter() - started},
        message=f"{message}, largest relative residual {max(relative):.1e}",
    )
    return DenseFit(dual_coef, solution, intercept)


def substitute(factor: Any, rhs: NDArray[np.float64]) -> NDArray[np.float64]:
    """A^-1 S Y (n, t)."""
    (potrs,) = get_lapack_funcs(("potrs",), dtype=factor.dtype)
    solved, _ = potrs(factor.T, rhs.astype(factor.dtype, copy=False), lower=0)
    return np.ascontiguousarray(solved, dtype=np.float64)


def dense_diagonals(
    kernel: Kernel | None,
    x: NDArray[np.float64],
    alphas: NDArray[np.float64],
    root: NDArray[np.float64] | None,
    precision: str,
    *,
    fit_intercept: bool,
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
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
    if info:
        order, pivot = leading_minor_pivot(_system(kernel, x, root, alpha).astype(precision, copy=False), info)
        raise _not_positive_definite(precision, diagonal, order, pivot, alpha)
    if order := rounded_pivot(a, diagonal, alpha, len(a)):
        raise _not_positive_definite(precision, diagonal, order, float(a[order - 1, order - 1]) ** 2, alpha)
    return a


def _system(kernel: Kernel | None, x: Any, root: Any, alpha: float) -> NDArray[np.float64]:
    """S K S + alpha I."""
    a = np.array(x, dtype=np.float64, order="C") if kernel is None else kernel.block(x, x, same=True)
    if root is not None:
        a *= root[:, None]
        a *= root[None, :]
    a[np.diag_indices_from(a)] += alpha
    return a


def _multiply(kernel: Kernel | None, x: Any, root: Any, alpha: float, u: NDArray[np.float64]) -> NDArray[np.float64]:
    """(S K S + alpha I) u (n, t)."""
    return _product(kernel, x, root, u)[0] + alpha * u


def _product(
    kernel: Kernel | None, x: Any, root: Any, u: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
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


def _norms(
    rhs: NDArray[np.float64], u: NDArray[np.float64], product: NDArray[np.float64], row_sums: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Relative residual and backward error (t,)."""
    relative, backward = combine_norms([block_norms(rhs - product, rhs, u, row_sums)])
    return np.array(relative), np.array(backward)


def _not_positive_definite(
    precision: str, diagonal: NDArray[np.float64], order: int, pivot: float, alpha: float
) -> NotPositiveDefiniteError:
    eps = float(np.finfo(precision).eps)
    suggested = alpha + (10 * max(abs(pivot), len(diagonal) * eps * float(np.abs(diagonal).max())) or eps)
    return NotPositiveDefiniteError(
        f"the matrix of {len(diagonal):,} rows is not positive definite at row {order - 1:,} "
        f"(pivot {pivot:.2g}, alpha {alpha:.3g}, {precision})",
        hint=f"raise alpha to at least {suggested:.1g}, or remove duplicated rows; an indefinite kernel has no "
        "Cholesky factor at small alpha",
        row=order - 1,
        pivot=pivot,
        alpha=alpha,
        suggested_alpha=suggested,
    )
