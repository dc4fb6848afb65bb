"""Minimising the loss of a family of kernels over its widths and alpha, and the path of alphas of one kernel.

L-BFGS-B in log l_1, ..., log l_p, log alpha (p = 1 or d) with the exact gradient of :mod:`dkrr.selection.likelihood`;
the best point that was evaluated is the answer. It is a local minimum, so start it from more than one place.

Cost: of one evaluation, times the number of evaluations, which is bounded.

References
----------
Byrd, Lu, Nocedal, Zhu (1995), A limited memory algorithm for bound constrained optimization.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse.linalg import eigsh
from scipy.spatial.distance import pdist

from dkrr.errors import NotPositiveDefiniteError
from dkrr.linalg.inference.eigen import EigenRidge, decompose
from dkrr.selection.choice import is_as_good
from dkrr.selection.likelihood import Evaluation, Explained

__all__ = ["ALPHA_BOUNDS", "Found", "alpha_path", "largest_eigenvalue", "minimise", "refine_alpha", "start_width"]

FloatArray = NDArray[np.float64]

ALPHA_BOUNDS = (1e-6, 1e3)
# widths, in standard deviations of their feature: a feature that is wider than the upper bound has no influence
WIDTH_BOUNDS = (1e-2, 1e4)
MEDIAN_ROWS = 1_000
# relative change of the loss, and largest component of its gradient, at which a search ends
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """The best point of a search: widths (1,) or (d,), alpha, loss, leave-one-out error, and (alpha, loss, error) of
    every evaluation in order; where alpha was refined, also the squared errors of the rows (n, evaluations)."""

    widths: FloatArray
    alpha: float
    loss: float
    loo_rmse: float
    degrees_of_freedom: float
    evaluations: list[tuple[float, float, float]]
    squares: FloatArray | None = None


def start_width(x: FloatArray) -> float:
    """The median distance of rows (of at most 1,000 of them): half of all pairs are closer than one width."""
    rows = x[:MEDIAN_ROWS]
    median = float(np.median(pdist(rows))) if len(rows) > 1 else 0.0
    return median if median > 0 else float(np.sqrt(x.shape[1]))


def minimise(
    rows: Explained, family: str, widths: FloatArray, alpha: float, scale: FloatArray, max_evaluations: int
) -> Found:
    """The best widths and alpha that at most ``max_evaluations`` evaluations find.

    Parameters
    ----------
    widths : (1,) or (d,)
        Where to begin; the result has as many.
    scale : (d,)
        Standard deviations of the features; bounds on the widths are multiples of them.
    """
    scales = scale if len(widths) > 1 else np.array([float(np.sqrt(np.mean(scale**2)))])
    bounds = [(float(np.log(WIDTH_BOUNDS[0] * s)), float(np.log(WIDTH_BOUNDS[1] * s))) for s in scales]
    bounds.append((float(np.log(ALPHA_BOUNDS[0])), float(np.log(ALPHA_BOUNDS[1]))))
    start = np.clip(np.log(np.append(widths, alpha)), *np.array(bounds).T)
    evaluations: list[tuple[float, float, float]] = []
    best: Found | None = None

    def loss(parameters: FloatArray) -> tuple[float, FloatArray]:
        nonlocal best
        if len(evaluations) >= max_evaluations:  # a line search may ask for more than maxfun
            raise _EnoughError
        at = np.exp(parameters[:-1]), float(np.exp(parameters[-1]))
        found = rows.evaluate(family, *at, gradient=True)
        evaluations.append((at[1], found.loss, found.loo_rmse))
        if best is None or found.loss < best.loss:
            best = Found(
                widths=at[0],
                alpha=at[1],
                loss=found.loss,
                loo_rmse=found.loo_rmse,
                degrees_of_freedom=found.degrees_of_freedom,
                evaluations=evaluations,
            )
        assert found.gradient is not None  # noqa: S101  (narrows the type)
        return found.loss, found.gradient

    try:
        minimize(
            loss,
            start,
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"ftol": LOSS_TOLERANCE, "gtol": GRADIENT_TOLERANCE, "maxfun": max_evaluations},
        )
    except _EnoughError:
        pass
    except NotPositiveDefiniteError:
        # rounding put an end to the way towards small alphas; what was found before it stands
        if best is None:
            raise
    assert best is not None  # noqa: S101  (narrows the type: the first evaluation is always made)
    return best


class _EnoughError(Exception):
    """Raised inside a search to end it."""


def refine_alpha(rows: Explained, family: str, widths: FloatArray, alpha: float, num_evaluations: int) -> Found:
    """The alpha of the smallest leave-one-out error among a few, by the secant method on its slope in log alpha.

    Every alpha that is considered is evaluated, and has four digits; steps are at most a factor of 8. Where errors are
    as good as the same (:func:`~dkrr.selection.choice.is_as_good`), the largest alpha is taken: the fit is better
    conditioned, and an iterative one quicker. What is left of the evaluations after the secant method ended goes into
    larger alphas. So does the last one, where the minimum is not a factor of 2 from what was evaluated: with slope
    c x at log alpha = minimum + x, of standard error s, the error there is one standard error above the least at
    x = 2 s / c.
    """
    low, high = (float(np.log(bound)) for bound in ALPHA_BOUNDS)
    at = float(np.clip(np.log(alpha), low, high))
    points: list[tuple[float, float, float]] = []
    found: list[tuple[float, Evaluation]] = []
    raising = False
    for number in range(1, max(1, num_evaluations) + 1):
        value = float(f"{np.exp(at):.4g}")
        try:
            evaluation = rows.evaluate(family, widths, value, slope=number < num_evaluations and not raising)
        except NotPositiveDefiniteError:
            if number == num_evaluations and not found:
                raise
            # too small for rounding on so many rows: half-way back to the last that was not, or ten times as much
            at = 0.5 * (at + points[-1][0]) if points else min(at + np.log(10.0), high)
            continue
        found.append((value, evaluation))
        if number == num_evaluations:
            break
        if raising:
            if as_good(found)[0] < value:
                break
            following = at
        else:
            points.append((at, evaluation.loo_slope or 0.0, evaluation.loo_slope_error or 0.0))
            step = _secant_step(points, last=number == num_evaluations - 1)
            following = float(np.clip(at + step, low, high))
        if abs(following - at) < 0.02:
            raising = True
            following = max(np.log(other) for other, _ in found) + np.log(8.0)
            if following > high:
                break
        at = float(following)
    value, best = as_good(found)
    return Found(
        widths=widths,
        alpha=value,
        loss=best.loss,
        loo_rmse=best.loo_rmse,
        degrees_of_freedom=best.degrees_of_freedom,
        evaluations=[(other, evaluation.loss, evaluation.loo_rmse) for other, evaluation in found],
        squares=np.column_stack([evaluation.loo_squares for _, evaluation in found]),
    )


def as_good(found: list[tuple[float, Evaluation]]) -> tuple[float, Evaluation]:
    """The largest alpha whose error is as good as the smallest."""
    least = min((evaluation for _, evaluation in found), key=lambda evaluation: evaluation.loo_rmse)
    good = [item for item in found if is_as_good(item[1].loo_squares, least.loo_squares)]
    return max(good, key=lambda item: item[0])


def _secant_step(points: list[tuple[float, float, float]], *, last: bool) -> float:
    """A step in log alpha to where the slope would be 0; downhill by a factor of 2 where that has no meaning.

    The ``last`` step goes further up, by one standard error, where the error at its minimum is as good as known.
    """
    at, slope, error = points[-1]
    downhill = float(-np.sign(slope) * np.log(2.0))
    if len(points) < 2:
        return downhill
    before, slope_before, _ = points[-2]
    curvature = (slope - slope_before) / (at - before)
    step = -slope / curvature if curvature > 0 else 3.0 * downhill
    if last and curvature > 0 and min(abs(step), abs(at + step - before)) <= np.log(2.0):
        step += 2.0 * error / curvature
    return float(np.clip(step, -np.log(8.0), np.log(8.0)))


def alpha_path(rows: Explained, family: str, widths: FloatArray, alphas: FloatArray) -> FloatArray:
    """The leave-one-out error for every alpha (number of alphas,), from one eigendecomposition of S K S.

    Notes
    -----
    Cost: about 9 n^3 flops, then 2 n^2 (t + 1) for each alpha; 24 n^2 bytes.
    """
    spectrum = decompose(rows.matrix(family, widths), positive_semidefinite=True)
    ridge = EigenRidge(spectrum, rows.y / rows.deviation, rows.root, fit_intercept=rows.intercept)
    errors: FloatArray = np.sqrt(np.einsum("it,itk->k", rows.share, ridge.leave_one_out(alphas) ** 2))
    return errors


def largest_eigenvalue(matrix: FloatArray) -> float:
    """Of a symmetric matrix (n, n), to 1 %, by a few products."""
    if len(matrix) < 3:
        return float(np.linalg.norm(matrix, 2))
    start = np.ones(len(matrix))
    (found,) = eigsh(matrix, k=1, v0=start, tol=1e-2, return_eigenvectors=False)
    return float(found)
