"""The same system in memory, for small n: one potrf in this process, milliseconds, no cluster.

Cost
----
n^3 / 3 flops with one BLAS thread; 8 n^2 bytes.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs

from dkrr.errors import DataError, NotPositiveDefiniteError, ResidualError
from dkrr.kernels import Kernel
from dkrr.linalg.residual import block_norms, combine_norms
from dkrr.linalg.solution import Solution, backward_error_bar
from dkrr.tiles.blas import is_finite, leading_minor_pivot, potrf

__all__ = ["solve_dense"]

STRIP_ROWS = 512


def solve_dense(
    kernel: Kernel | None,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    alpha: NDArray[np.float64],
    weight: NDArray[np.float64] | None,
    precision: str,
) -> tuple[NDArray[np.float64], Solution]:
    """dual_coef (n, t) of (K + alpha I) dual_coef = y, weighted, with one factor per distinct alpha.

    Parameters
    ----------
    kernel
        A resolved kernel, or None when ``x`` (n, n) is the Gram matrix itself.
    x : (n, d), y : (n, t), alpha : (1,) or (t,), weight : (n,) or None
    precision
        "float64" or "float32" (of the factor and the answer).
    """
    started = time.perf_counter()
    n, t = y.shape
    root = None if weight is None else np.sqrt(weight)
    rhs = y if root is None else root[:, None] * y
    alphas = np.broadcast_to(alpha, (t,))
    u = np.zeros((n, t))
    relative, backward = np.zeros(t), np.zeros(t)
    (potrs,) = get_lapack_funcs(("potrs",), dtype=np.dtype(precision))
    distinct = list(dict.fromkeys(alphas.tolist()))
    for value in distinct:
        targets = np.flatnonzero(alphas == value)
        a = _system(kernel, x, root, value).astype(precision, copy=False)
        if not is_finite(a):
            raise DataError("the Gram matrix is not finite", hint="scale the features")
        info = potrf(a)
        if info:
            raise _not_positive_definite(_system(kernel, x, root, value).astype(precision, copy=False), info, value)
        solved, _ = potrs(a.T, rhs[:, targets].astype(precision, copy=False), lower=0)
        u[:, targets] = solved
        del a
        norms = _residual(kernel, x, root, value, rhs[:, targets], u[:, targets])
        relative[targets], backward[targets] = norms
    bar = backward_error_bar(n, precision)
    if not max(backward) <= bar:
        raise ResidualError(
            f"backward error {max(backward):.2g} exceeds {bar:.2g} (30 n eps, {precision})",
            hint="raise alpha, or scale the targets",
        )
    solution = Solution(
        solver="cholesky",
        precision=precision,
        converged=True,
        num_iterations=0,
        relative_residual=relative.tolist(),
        backward_error=backward.tolist(),
        seconds={"total": time.perf_counter() - started},
        message=f"Cholesky factor of {n:,} rows in memory, largest relative residual {max(relative):.1e}",
    )
    return (u if root is None else root[:, None] * u), solution


def _system(kernel: Kernel | None, x: Any, root: Any, alpha: float) -> NDArray[np.float64]:
    """S K S + alpha I."""
    a = np.array(x, dtype=np.float64, order="C") if kernel is None else kernel.block(x, x, same=True)
    if root is not None:
        a *= root[:, None]
        a *= root[None, :]
    a[np.diag_indices_from(a)] += alpha
    return a


def _residual(
    kernel: Kernel | None, x: Any, root: Any, alpha: float, rhs: Any, u: Any
) -> tuple[list[float], list[float]]:
    parts = []
    for start in range(0, len(x), STRIP_ROWS):
        rows = slice(start, min(start + STRIP_ROWS, len(x)))
        strip = np.array(x[rows], dtype=np.float64) if kernel is None else kernel.block(x[rows], x)
        index = np.arange(rows.start, rows.stop)
        if kernel is not None:
            strip[index - start, index] = kernel.diag(x[rows])
        if root is not None:
            strip *= root[rows, None]
            strip *= root[None, :]
        strip[index - start, index] += alpha
        parts.append(block_norms(rhs[rows] - strip @ u, rhs[rows], u[rows], np.abs(strip).sum(axis=1)))
    return combine_norms(parts)


def _not_positive_definite(a: Any, info: int, alpha: float) -> NotPositiveDefiniteError:
    pivot = leading_minor_pivot(a, info)
    scale = float(np.max(np.abs(np.diag(a))))
    suggested = alpha + max(10 * abs(pivot), len(a) * float(np.finfo(a.dtype).eps) * scale)
    return NotPositiveDefiniteError(
        f"the matrix of {len(a):,} rows is not positive definite at row {info - 1:,} "
        f"(pivot {pivot:.2g}, alpha {alpha:.3g}, {a.dtype})",
        hint=f"raise alpha to at least {suggested:.1g}, or remove duplicated rows; an indefinite kernel has no "
        "Cholesky factor at small alpha",
        row=info - 1,
        pivot=pivot,
        alpha=alpha,
        suggested_alpha=suggested,
    )
