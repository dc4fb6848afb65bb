"""What a Nystrom regression found: centres, coefficients, and a sentence that says what they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.settings import NystromSettings
from dkrr.linalg.solution import Solution

__all__ = ["NystromResult", "describe"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


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


def describe(
    nystrom: NystromSettings,
    num_rows: int,
    num_centers: int,
    relative: FloatVector,
    converged: NDArray[np.bool_],
    iterations: int,
    passes: int,
    tol: float,
) -> str:
    """The message of a solution: that it is an approximation, of what, and how well its own equations are solved."""
    how = "drawn uniformly" if nystrom.centers == "uniform" else "by randomly pivoted Cholesky"
    left_out = nystrom.num_centers - num_centers
    message = (
        f"approximation: {num_centers:,} of {num_rows:,} rows as centres ({how}"
        f"{f', {left_out:,} in their span left out' if left_out else ''}); {iterations:,} iterations and "
        f"{passes:,} passes over the rows, largest relative residual of the preconditioned normal equations "
        f"{relative.max():.1e}"
    )
    rounded = int((converged & (relative > 2.0 * tol)).sum())
    if rounded:
        message += f" (as small as rounding allows in {rounded} of {len(converged)} targets: tol = {tol:.1e})"
    if not converged.all():
        message += f"; NOT CONVERGED to {tol:.1e} in {int((~converged).sum())} of {len(converged)} targets"
    return message
