"""A refit that fails leaves the fit that was there, whole: attributes, predictions, leave-one-out, intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import dkrr

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RNG.standard_normal(60)
TWICE = np.repeat(RNG.standard_normal((30, 5)), 2, axis=0)  # no factor without a ridge
STOPPED = {"solver": "cg", "max_iter": 1, "tol": 1e-14, "solver_params": {"preconditioner": "none"}}

ESTIMATORS: dict[str, Any] = {
    "memory": lambda: dkrr.KernelRidge(0.1),
    "tiles": lambda: dkrr.KernelRidge(0.1, tile_size=16),
    "primal": lambda: dkrr.KernelRidge(0.1, solver="primal"),
    "grid": lambda: dkrr.KernelRidgeCV([0.1, 1.0], store_cv_results=True),
    "grid through tiles": lambda: dkrr.KernelRidgeCV([0.1, 1.0], tile_size=16),
}
FAILURES: dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray, type[Exception]]] = {
    "no factor": ({"solver": "cholesky"}, TWICE, np.ones(60), dkrr.NotPositiveDefiniteError),
    "not a number": ({}, X * np.nan, Y, dkrr.DataError),
    "not converged": (STOPPED, np.exp(TWICE), np.ones(60), dkrr.ConvergenceError),
}


@pytest.mark.whole
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_earlier_fit_stays_whole(name: str, failure: str) -> None:
    options, rows, targets, error = FAILURES[failure]
    est = ESTIMATORS[name]().fit(pd.DataFrame(X, columns=["a", "b", "c"]), Y)
    frame, given = pd.DataFrame(X, columns=["a", "b", "c"]), est.get_params()
    X_before = est.predict(frame)
    before = {key: value for key, value in vars(est).items() if key not in given and key != "_unfinished"}
    left_out = est.leave_one_out().residuals
    ridge = {"alphas": [0.0, 1e-16]} if "alphas" in given else {"alpha": 0.0}
    with pytest.raises(error):
        est.set_params(**(ridge | options)).fit(rows, targets)
    est.set_params(**given)
    after = {key: value for key, value in vars(est).items() if key not in given and key != "_unfinished"}
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)
    assert np.array_equal(est.predict(frame), X_before)
    assert np.array_equal(est.leave_one_out().residuals, left_out)
    assert est.interval_coverage(frame, Y, 0.8) == pytest.approx(0.8, abs=0.1)


def test_a_first_fit_that_fails_leaves_nothing() -> None:
    est = dkrr.KernelRidge(0.0, solver="cholesky")
    with pytest.raises(dkrr.NotPositiveDefiniteError):
        est.fit(TWICE, np.ones(60))
    assert not [name for name in vars(est) if name.endswith("_")]
    with pytest.raises(ValueError, match="not fitted"):
        est.predict(TWICE)


def test_a_refit_that_works_takes_the_place_of_all() -> None:
    est = dkrr.KernelRidgeCV([0.1, 1.0], store_cv_results=True).fit(pd.DataFrame(X, columns=["a", "b", "c"]), Y)
    est.set_params(store_cv_results=False).fit(TWICE, np.ones(60))
    assert not hasattr(est, "cv_results_")
    assert not hasattr(est, "feature_names_in_")
    assert est.n_features_in_ == 5
    assert est.leave_one_out().residuals.shape == (60, 1)
