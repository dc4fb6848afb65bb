"""Solves of few rows in memory: an intercept costs no digits, and a matrix that has no factor is named as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_regression
from sklearn.linear_model import Ridge, RidgeCV

import dkrr

WAYS: dict[str, Any] = {
    "one alpha": lambda alpha: dkrr.KernelRidge(alpha, fit_intercept=True),
    "tiles": lambda alpha: dkrr.KernelRidge(alpha, fit_intercept=True, tile_size=32),
    "factors": lambda alpha: dkrr.KernelRidgeCV([alpha, 1.0], fit_intercept=True),
    "eigenvalues": lambda alpha: dkrr.KernelRidgeCV(np.append(alpha, np.logspace(0, 2, 40)), fit_intercept=True),
    "folds": lambda alpha: dkrr.KernelRidgeCV([alpha, 1.0], fit_intercept=True, cv=5),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alpha", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("way", WAYS)
def test_an_intercept_costs_no_digits_where_the_fit_is_close(way: str, alpha: float, weighted: bool) -> None:
    """f + b goes through the targets, f alone could not: the two parts of the answer are far larger than it."""
    X, y = make_regression(50, 10, random_state=0)
    weight = np.random.default_rng(1).uniform(0.1, 3.0, len(y)) if weighted else None
    est = WAYS[way](alpha).fit(X, y, sample_weight=weight)
    assert est.alpha == alpha
    expected = Ridge(alpha, solver="svd").fit(X, y, sample_weight=weight)
    assert np.abs(est.predict(X) - expected.predict(X)).max() <= 1e-14 * np.abs(y).max()
    assert est.intercept_ == pytest.approx(expected.intercept_, abs=1e-14 * np.abs(y).max())
    assert np.sum(est.dual_coef_) == pytest.approx(0, abs=1e-13 * np.abs(est.dual_coef_).sum())


@pytest.mark.parametrize("count", [1, 30], ids=["factors", "eigenvalues"])
def test_leave_one_out_with_an_intercept_keeps_its_digits(count: int) -> None:
    X, y = make_regression(50, 10, random_state=0)
    found = dkrr.KernelRidgeCV([1e-4] * count, fit_intercept=True, store_cv_results=True).fit(X, y)
    expected = RidgeCV([1e-4], store_cv_results=True, gcv_mode="svd").fit(X, y)
    assert found.cv_results_[:, 0] == pytest.approx(expected.cv_results_[:, 0], rel=1e-5)
    held_out = [y[i] - Ridge(1e-4).fit(np.delete(X, i, 0), np.delete(y, i)).predict(X[i : i + 1])[0] for i in range(50)]
    assert found.cv_results_[:, 0] == pytest.approx(np.square(held_out), rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"tile_size": 64}, {"tile_size": 32}], ids=str)
@pytest.mark.parametrize("seed", [0, 42])
def test_a_pivot_of_rounding_is_named_as_such(options: dict[str, Any], seed: int) -> None:
    """100 rows of 50 features: every pivot beyond the fiftieth is 0 to rounding."""
    X, y = make_regression(100, 50, bias=10, random_state=seed)
    with pytest.raises(dkrr.NotPositiveDefiniteError) as caught:
        dkrr.KernelRidge(0.0, **options).fit(X, y)
    error = caught.value
    assert -1e-11 < error.pivot <= 0
    assert error.row >= 50
    assert error.suggested_alpha < 1e-9
    fitted = dkrr.KernelRidge(error.suggested_alpha, **options).fit(X, y)
    assert fitted.solution_.backward_error[0] < 1e-14


@pytest.mark.parametrize("options", [{}, {"tile_size": 64}], ids=str)
def test_the_pivot_of_an_indefinite_matrix_is_the_one_that_stops(options: dict[str, Any]) -> None:
    root = np.random.default_rng(0).standard_normal((100, 100))
    matrix = root @ root.T
    matrix[70, 70] = -2.0
    schur = -2.0 - matrix[70, :70] @ np.linalg.solve(matrix[:70, :70], matrix[:70, 70])
    with pytest.raises(dkrr.NotPositiveDefiniteError) as caught:
        dkrr.KernelRidge(0.0, kernel="precomputed", **options).fit(matrix, np.ones(100))
    assert caught.value.row == 70
    assert caught.value.pivot == pytest.approx(schur, rel=1e-6)


@pytest.mark.parametrize("tiles", [{}, {"tile_size": 16}], ids=["in memory", "tiles"])
@pytest.mark.parametrize("gamma", [0.5, 3.0, 30.0])
def test_a_row_that_stands_twice_has_no_answer_without_alpha(gamma: float, tiles: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    X, y = rng.standard_normal((40, 2)), rng.standard_normal(40)
    X[5] = X[3]
    est = dkrr.KernelRidge(alpha=0.0, kernel="rbf", gamma=gamma, **tiles)
    with pytest.raises(dkrr.NotPositiveDefiniteError, match="raise alpha to at least") as caught:
        est.fit(X, y)
    assert caught.value.details["row"] <= 5
    est.set_params(alpha=caught.value.details["suggested_alpha"]).fit(X, y)
    alone = np.arange(40) != 5
    est.set_params(alpha=0.0).fit(X[alone][:12], y[alone][:12])
    np.testing.assert_allclose(est.predict(X[:3]), y[:3], rtol=1e-3)
