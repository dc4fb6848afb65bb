"""Leave-one-out from an estimated diagonal: residuals and mean squared error, each with its standard error.

    e_i = u_i / (s_i D_i)                           standard error |e_i| tau_i / D_i, tau_i that of D_i

    mean squared error = sum_i u_i^2 / D_i^2 / sum_i w_i = sum_i u_i^2 M_1(D_i, tau_i) / sum_i w_i

1 / D_i^2 is replaced by its unbiased estimate M_1 (:func:`dkrr.linalg.inference.probes.unbiased_powers`): each term is
too large by 3 tau^2 / D^2 on average, and a mean over many rows has a standard error far below that. D_i is bounded
from below only: moved down to its upper bound it would be biased.

Both rest on tau_i well below D_i. Where it is above a third of it, as at rows of large weight among rows of small
weight, whose D_i is far below the noise that all others make, D_i may be three tau_i less, but never below its lower
bound: e_i with that D_i is the standard error of such a row, and u_i^2 / D_i^2 with one tau_i less that of its term.

The standard error of the mean is that of the sum of the influences of a probe, -u_i^2 M_2 (D_qi - D_i): one probe is in
all rows, so rows are not independent. Where the correction itself is large (leverages near 1 and few probes) the
estimate rests on the noise being normal, and a quarter of the correction counts as error, too.

Cost: O(n m t).

References
----------
Efron, The jackknife, the bootstrap and other resampling plans, SIAM 1982, chapter 6, for the influences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.inference.leave_one_out import LeaveOneOut, loo_from_diagonal
from dkrr.linalg.inference.probes import unbiased_powers
from dkrr.linalg.inference.stochastic_diagonal import StochasticDiagonal

__all__ = ["stochastic_leave_one_out"]

logger = logging.getLogger("dkrr.linalg")

FloatArray = NDArray[np.float64]
FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

# the part of the correction for noise that is not trusted
DOUBT = 0.25
# tau_i / D_i up to which an expansion in it is one
MAX_NOISE = 1 / 3
# how many tau_i less a D_i may have: of one row among many, and of the sum over them
BELOW_ROW, BELOW_MEAN = 3.0, 1.0


def stochastic_leave_one_out(
    *,
    y: FloatMatrix,
    u: FloatMatrix,
    diagonals: Sequence[StochasticDiagonal],
    alpha: FloatVector,
    root: FloatVector | None = None,
    predictions: FloatMatrix | None = None,
) -> LeaveOneOut:
    """Leave-one-out of the solution of conjugate gradients.

    Parameters
    ----------
    y, u : (n, t)
        Targets, and the solution of A u = S y, or of the bordered system with an intercept.
    diagonals
        One for each distinct alpha, in the order in which these come.
    alpha : (t,)
    root : (n,), optional
        s, the square roots of the weights.
    predictions : (k, t), optional
        As in :func:`~dkrr.linalg.inference.leave_one_out.loo_from_diagonal`.
    """
    which = {diagonal.alpha: number for number, diagonal in enumerate(diagonals)}
    number = np.array([which[value] for value in alpha.tolist()])
    inverse = np.column_stack([diagonal.inverse_diagonal for diagonal in diagonals])[:, number]
    error = np.column_stack([diagonal.standard_error for diagonal in diagonals])[:, number]
    lower = np.column_stack([diagonal.lower for diagonal in diagonals])[:, number]
    error = np.where(
        error > MAX_NOISE * inverse, np.maximum(error, inverse * (_span(inverse, error, lower, BELOW_ROW) - 1)), error
    )
    loo = loo_from_diagonal(y=y, u=u, inverse_diagonal=inverse, alpha=alpha, root=root, predictions=predictions)
    seen = np.ones(len(y), np.bool_) if root is None else root > 0
    trace = np.array([diagonal.trace for diagonal in diagonals])[number]
    mean, mean_se = _mean_squares(u, diagonals, number, float(seen.sum() if root is None else root @ root))
    logger.info(
        "leave-one-out with %d probes: standard error of the mean squared error %.1e of it; %d estimates moved onto "
        "their bounds",
        diagonals[0].num_probes,
        float((mean_se / np.where(mean > 0, mean, 1.0)).max()),
        sum(diagonal.num_projected for diagonal in diagonals),
    )
    return replace(
        loo,
        method="stochastic",
        standard_error=np.where(seen[:, None], np.abs(np.nan_to_num(loo.residuals)) * error / inverse, 0.0),
        degrees_of_freedom=seen.sum() - alpha * trace,
        gcv=seen.sum() * np.square(u / trace).sum(axis=0),
        mean_squared_error=mean,
        mean_squared_error_se=mean_se,
        num_projected=sum(diagonal.num_projected for diagonal in diagonals),
    )


def _mean_squares(
    u: FloatMatrix, diagonals: Sequence[StochasticDiagonal], number: NDArray[np.int64], total: float
) -> tuple[FloatVector, FloatVector]:
    """Sum of u_i^2 / D_i^2 over the total weight (t,), and its standard error."""
    mean, error = np.zeros(u.shape[1]), np.zeros(u.shape[1])
    for k, diagonal in enumerate(diagonals):
        targets = np.flatnonzero(number == k)
        value = np.maximum(diagonal.unbounded, diagonal.lower)
        # in units in which u and D are about 1: powers of them leave float64 where alpha is large, or targets small
        unit, size = _power_of_two(value.max()), _power_of_two(np.abs(u[:, targets]).max(axis=0))
        value, tau, lower = value / unit, diagonal.standard_error / unit, diagonal.lower / unit
        _, second, third = unbiased_powers(value, tau)
        squares = np.square(u[:, targets] / size).T / total
        mean[targets] = squares @ second
        m = diagonal.num_probes
        influence = (squares * third) @ (diagonal.deviations / unit)
        sampled = np.square(influence).sum(axis=1) / (m * (m - 1))
        left = (squares * third) @ (diagonal.solver_error / unit)
        doubted = DOUBT * (squares @ (1 / value**2) - mean[targets])
        noisy = tau > MAX_NOISE * value
        largest = _span(value, tau, lower, BELOW_MEAN)[noisy] / value[noisy]
        spans = np.linalg.norm(squares[:, noisy] * np.square(largest), axis=1)
        error[targets] = np.sqrt(sampled + left**2 + doubted**2 + spans**2)
        mean[targets] *= np.square(size / unit)
        error[targets] *= np.square(size / unit)
    return mean, error


def _power_of_two(value: Any) -> Any:
    """The nearest one, by which numbers are divided without rounding; 1 for 0."""
    return 2.0 ** np.round(np.log2(np.where(value > 0, value, 1.0)))


def _span(value: FloatArray, error: FloatArray, lower: FloatArray, below: float) -> FloatArray:
    """How many times as large as D says a residual may be: D over the least D that is expected."""
    return np.asarray(value / np.maximum(value - below * error, lower))
