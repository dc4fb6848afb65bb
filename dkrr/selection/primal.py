"""A grid of alphas in feature space (:mod:`dkrr.linalg.primal.solver`): two passes over the rows for all."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.primal.passes import FeatureRows
from dkrr.linalg.primal.solver import leave_one_out_errors, primal_leave_one_out
from dkrr.selection.path import Chosen, choose
from dkrr.selection.scoring import Scoring, held_out

__all__ = ["primal_search"]

Floats = NDArray[np.float64]


def primal_search(
    source: FeatureRows,
    y: Floats,
    grid: Floats,
    scoring: Scoring,
    *,
    fit_intercept: bool,
    stored: Literal["errors", "predictions"] | None = None,
) -> Chosen:
    """The alpha with the best leave-one-out score.

    Parameters
    ----------
    source
        Rows, targets and weights as a primal fit reads them.
    y : (n, t)
        The targets.
    grid : (k,)
    scoring, stored
        See :meth:`dkrr.selection.path.AlphaPath.search`.

    Cost
    ----
    Two passes for mean squared errors; a scorer, or what is stored, needs every residual: three passes for each alpha.
    """
    t, weight = y.shape[1], source.rows.weights()
    if scoring.scorer is None and stored is None:
        errors = leave_one_out_errors(source, grid.tolist(), fit_intercept=fit_intercept).T  # (t, k)
        return choose(scoring.of_errors(errors, weight), t)
    scores, values = [], []
    for alpha in grid.tolist():
        loo = primal_leave_one_out(source, alpha, fit_intercept=fit_intercept)
        scores.append(scoring.of_left_out(loo, y, weight))
        values.append(held_out(loo, y, weight, stored))
    return choose(np.stack(scores, axis=-1), t, None if stored is None else np.stack(values, axis=-1))
