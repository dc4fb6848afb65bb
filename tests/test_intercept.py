"""The estimator with an intercept: every solver, every way in and out, and how it differs from a constant feature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge

import dkrr
from dkrr import KernelRidge
from tests.reference import dense_bordered

RNG = np.random.default_rng(5)
N = 300
X = RNG.standard_normal((N, 4))
Y = np.stack([np.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 9, X[:, 3] ** 2 - 40], axis=1) + 0.05 * RNG.standard_normal((N, 2))
Z = RNG.standard_normal((50, 4))
WEIGHT = RNG.uniform(0.2, 2, N) * (np.arange(N) % 7 > 0)
RBF: dict[str, Any] = {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1, "fit_intercept": True}
KERNEL = dkrr.make_kernel("rbf", gamma=0.2)

# options of each way, and how well it meets the dense solve
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "memory": ({}, 1e-10),
    "float32": ({"precision": "float32"}, 1e-4),
    "tiles": ({"tile_size": 90}, 1e-10),
    "mixed": ({"tile_size": 90, "precision": "mixed", "tol": 1e-11}, 1e-8),
    "cg": ({"solver": "cg", "tol": 1e-11}, 1e-8),
    "nystrom": ({"solver": "nystrom", "tol": 1e-11, "solver_params": {"num_centers": 257}}, 1e-7),
}


def expected(weight: np.ndarray | None, alpha: Any = 0.1, y: np.ndarray = Y) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and predictions at Z of a dense solve."""
    dual_coef, b = dense_bordered(KERNEL(X, X), y, alpha, weight)
    return dual_coef, KERNEL(Z, X) @ dual_coef + b


@pytest.mark.parametrize("alphas", [0.1, [0.1, 3.0]], ids=str)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "nystrom"])
def test_every_way_agrees_with_the_dense_bordered_system(way: str, alphas: Any) -> None:
    options, tolerance = WAYS[way]
    weight = None if alphas == 0.1 else WEIGHT
    est = KernelRidge(**RBF | {"alpha": alphas}, **options).fit(X, Y, sample_weight=weight)
    coefficients, values = expected(weight, alphas)
    np.testing.assert_allclose(est.dual_coef_, coefficients, rtol=0, atol=tolerance * np.abs(coefficients).max())
    np.testing.assert_allclose(est.predict(Z), values, rtol=0, atol=100 * tolerance)
    # s^T u is the sum of the coefficients, with weights and without
    sums = est.dual_coef_.sum(axis=0)
    assert np.abs(sums).max() < (1e-6 if way == "float32" else 1e-13) * np.abs(est.dual_coef_).sum(axis=0).min()
    assert weight is None or not est.dual_coef_[weight == 0].any()
    assert max(est.solution_.backward_error) <= (1e-6 if way == "float32" else 1e-11)
    # a number that is added to the targets is added to the intercept; the sum rounds 7e-9 of y away
    again = KernelRidge(**RBF | {"alpha": alphas}, **options).fit(X, Y + 2.0**26, sample_weight=weight)
    np.testing.assert_allclose(
        again.dual_coef_, coefficients, rtol=0, atol=max(tolerance, 1e-6) * np.abs(coefficients).max()
    )
    np.testing.assert_allclose(again.intercept_, est.intercept_ + 2.0**26, rtol=0, atol=100 * tolerance)


@pytest.mark.parametrize("options", [{}, {"tile_size": 90}, {"solver": "cg"}], ids=str)
def test_a_precomputed_matrix(options: dict[str, Any]) -> None:
    est = KernelRidge(alpha=0.1, kernel="precomputed", fit_intercept=True, **options)
    est.fit(KERNEL(X, X), Y, sample_weight=WEIGHT)
    np.testing.assert_allclose(est.predict(KERNEL(Z, X)), expected(WEIGHT)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{"solver": "cg"}, {"precision": "mixed", "tile_size": 90}], ids=str)
def test_a_warm_start_begins_where_the_last_fit_ended(options: dict[str, Any]) -> None:
    est = KernelRidge(**RBF, **options, warm_start=True).fit(X[:280], Y[:280])
    assert est.fit(X[:280], Y[:280]).solution_.num_iterations == 0
    est.fit(X, Y)  # appended rows: the coefficients of the first ones are where it begins
    np.testing.assert_allclose(est.predict(Z), expected(None)[1], rtol=0, atol=1e-5)
    # fewer rows, or other targets: nothing to begin with
    assert est.fit(X[:200], Y[:200]).dual_coef_.shape == (200, 2)
    assert est.fit(X[:200], Y[:200, 0]).dual_coef_.shape == (200,)


# --- what an intercept is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alpha", [1e-5, 1e5])
def test_ones_are_predicted_as_one_whatever_alpha_and_weights(way: str, alpha: float) -> None:
    # alone, and beside a target that is not constant
    weight = 10.0 ** RNG.uniform(-2, 2, N) * (np.arange(N) % 7 > 0)
    y = np.column_stack([np.ones(N), Y[:, 0]])
    parameters = {} if way in ("memory", "float32", "tiles") else {"allow_unconverged": True}
    options = WAYS[way][0] | {"tol": 1e-6, "max_iter": 30}
    options["solver_params"] = options.get("solver_params", {}) | parameters
    est = KernelRidge(**RBF | {"alpha": alpha, "gamma": 2.0}, **options).fit(X, y, sample_weight=weight)
    assert np.abs(est.predict(Z)[:, 0] - 1).max() < 1e-10
    assert est.intercept_[0] == pytest.approx(1, abs=1e-14)


def test_an_intercept_is_not_shrunk_and_the_weight_of_a_constant_feature_is() -> None:
    """With a linear kernel: the intercept is that of ridge regression; Welling's bias is the weight of a feature."""
    y = X @ np.array([1.0, -2.0, 0.5, 0.0]) + 9.0
    ones = np.hstack([X, np.ones((N, 1))])
    there = np.hstack([Z, np.ones((50, 1))])
    for alpha in (1e-3, 10.0, 1e3, 1e9):
        ridge = Ridge(alpha=alpha).fit(X, y, sample_weight=WEIGHT)
        est = KernelRidge(alpha=alpha, kernel="linear", fit_intercept=True).fit(X, y, sample_weight=WEIGHT)
        assert est.intercept_ == pytest.approx(ridge.intercept_, rel=1e-9)
        np.testing.assert_allclose(est.predict(Z), ridge.predict(Z), rtol=1e-8)
        shrunk = Ridge(alpha=alpha, fit_intercept=False).fit(ones, y, sample_weight=WEIGHT)
        bias = KernelRidge(alpha=alpha, kernel="linear").fit(ones, y, sample_weight=WEIGHT)
        np.testing.assert_allclose(bias.predict(there), shrunk.predict(there), rtol=1e-7, atol=1e-12)
