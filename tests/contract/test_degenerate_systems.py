"""Matrices of zeros, of rank one, of one row, and targets of zeros: every way gives the answer, or says why not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.errors import ConvergenceError, DataError, DkrrError, NumericalError
from tests.reference import dense_bordered, dense_krr

RNG = np.random.default_rng(0)
N = 40
Y = RNG.standard_normal((N, 2))
ZEROS = np.zeros((N, 3))
ONES = np.outer(np.ones(N), [1.0, 2.0, 3.0])
HALF = np.vstack([np.zeros((N // 2, 3)), np.ones((N // 2, 3))])
UNSEEN = np.repeat([1.0, 0.0], N // 2)  # the rows of ones have no weight: what is left is a matrix of zeros

WAYS: dict[str, dict[str, Any]] = {
    "memory": {},
    "tiles": {"tile_size": 16},
    "mixed": {"tile_size": 16, "precision": "mixed"},
    "cg": {"solver": "cg"},
    "cg, mixed": {"solver": "cg", "precision": "mixed"},
    "cg, uniform columns": {"solver": "cg", "solver_params": {"preconditioner": "nystrom"}},
    "cg, none": {"solver": "cg", "solver_params": {"preconditioner": "none"}},
    "primal": {"solver": "primal"},
}
CASES: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray | None]] = {
    "zeros": (ZEROS, Y, None),
    "zeros where there is weight": (HALF, Y, UNSEEN),
    "zeros, weighted": (ZEROS, Y, RNG.uniform(0.1, 2.0, N)),
    "rank one": (ONES, Y, None),
    "one row that is not zero": (np.eye(N, 3, k=2), Y, None),
    "a target of zeros": (RNG.standard_normal((N, 3)), Y * [0.0, 1.0], None),
    "zeros on both sides": (ZEROS, 0 * Y, None),
    "one row": (np.array([[2.0]]), np.array([[1.0, 0.0]]), None),
}


@pytest.mark.parametrize(
    ("case", "intercept"),
    [
        ("zeros", False),
        ("zeros, weighted", True),
        ("zeros where there is weight", False),
        ("rank one", True),
        ("one row that is not zero", False),
        ("a target of zeros", True),
        ("zeros on both sides", False),
        ("one row", True),
    ],
)
def test_every_way_gives_the_answer(case: str, intercept: bool) -> None:
    X, y, weight = CASES[case]
    K = X @ X.T
    expected = dense_bordered(K, y, 0.5, weight) if intercept else (dense_krr(K, y, 0.5, weight), np.zeros(2))
    for way, options in WAYS.items():
        est = dkrr.KernelRidge(0.5, fit_intercept=intercept, **options).fit(X, y, sample_weight=weight)
        assert est.dual_coef_ == pytest.approx(expected[0], abs=1e-7), way
        assert est.intercept_ == pytest.approx(expected[1], abs=1e-7), way
        assert est.predict(X) == pytest.approx(K @ expected[0] + expected[1], abs=1e-7), way


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("columns", [[0, 1], [1, 0], [1]])
def test_coefficients_that_are_no_numbers_are_refused(columns: list[int]) -> None:
    y = np.arange(1.0, 6.0)[:, None] * np.array([1.0, 1e139])[columns]
    with pytest.raises(DkrrError):
        dkrr.KernelRidge(0.0, kernel="precomputed").fit(1e-200 * np.eye(5), y)


@pytest.mark.parametrize("shape", [(30, 30), (5, 9), (30, 3)])
def test_constant_features_beside_an_intercept_are_none(shape: tuple[int, int]) -> None:
    y = np.random.default_rng(0).standard_normal(len(X := np.full(shape, 0.1)))
    for solver in ("primal", "cholesky"):
        fitted = dkrr.KernelRidge(0.7, kernel="linear", solver=solver, fit_intercept=True).fit(X, y)
        np.testing.assert_allclose(fitted.predict(X), y.mean(), rtol=1e-12)


@pytest.mark.parametrize("options", [{}, {"preconditioner": "nystrom"}], ids=str)
def test_a_given_matrix_of_zeros(options: dict[str, Any]) -> None:
    est = dkrr.KernelRidge([0.5, 2.0], kernel="precomputed", solver="cg", solver_params=options)
    assert est.fit(np.zeros((N, N)), Y).dual_coef_ == pytest.approx(Y / [0.5, 2.0], rel=1e-12)


def test_an_interrupted_solve_of_zeros_goes_on(tmp_path: Any) -> None:
    """The preconditioner of rank 0 is found again in its store."""
    for _ in range(2):
        est = dkrr.KernelRidge(0.5, solver="cg", store=tmp_path).fit(ZEROS, Y)
        assert est.dual_coef_ == pytest.approx(Y / 0.5, rel=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_without_a_ridge_nothing_is_made_up(way: str) -> None:
    with pytest.raises(dkrr.NotPositiveDefiniteError) as caught:
        dkrr.KernelRidge(0.0, **WAYS[way]).fit(ZEROS, Y)
    suggested = getattr(caught.value, "suggested_alpha", None)
    assert suggested is None or suggested > 0 or "more than" in str(caught.value)


@pytest.mark.parametrize("centers", ["uniform", "rpcholesky"])
def test_centres_of_zeros_are_refused(centers: str) -> None:
    est = dkrr.KernelRidge(0.5, solver="nystrom", solver_params={"num_centers": 10, "centers": centers})
    with pytest.raises(dkrr.DataError, match="is zero on all"):
        est.fit(ZEROS, Y)


@pytest.mark.parametrize("centers", ["uniform", "rpcholesky"])
def test_centres_that_an_intercept_explains_need_a_ridge(centers: str) -> None:
    """All rows are one: beside the intercept nothing is left to estimate."""
    params = {"num_centers": 10, "centers": centers}
    est = dkrr.KernelRidge(0.0, solver="nystrom", fit_intercept=True, solver_params=params)
    with pytest.raises(dkrr.NotPositiveDefiniteError, match="raise alpha"):
        est.fit(ONES, Y)


@pytest.mark.timeout(100)
def test_a_fit_that_rounding_keeps_from_its_end_ends_all_the_same() -> None:
    rng = np.random.default_rng(0)
    rows = rng.random((60, 2)) + 1e5  # entries of K of 1e21 for targets of 1
    y = np.sin(5 * rows[:, 0]) + 0.3 * rng.standard_normal(60)
    with pytest.raises(NumericalError):
        dkrr.KernelSVR(C=1e4, epsilon=0.1, kernel="poly", gamma=1.0, degree=2).fit(rows, y)


@pytest.mark.parametrize(("estimator", "large_c"), [(dkrr.KernelSVC, 1e6), (dkrr.KernelLogisticRegression, 1e4)])
def test_more_iterations_are_advised_only_where_they_help(estimator: Any, large_c: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((60, 2))
    labels = rows[:, 0] + 0.5 * rng.standard_normal(60) > 0
    with pytest.raises(ConvergenceError, match="raise max_iter") as stopped:
        estimator(max_iter=1, tol=1e-12, C=1e3).fit(rows, labels)
    with pytest.raises(ConvergenceError, match="rounding allows no better") as stalled:
        estimator(tol=1e-14, C=large_c, kernel="linear").fit(rows + 1e5, labels)
    assert (stopped.value.stagnated, stalled.value.stagnated) == (False, True)
    assert stalled.value.history


@pytest.mark.parametrize("seed", range(3))
def test_a_linear_fit_that_is_nearly_constant_is_no_indefinite_matrix(seed: int) -> None:
    random = np.random.default_rng(seed)
    X = random.standard_normal((121, 4))
    rare = (random.random(121) < 0.3).astype(float)
    model = dkrr.KernelQuantileRegressor(quantile=[0.5], alpha=0.01, kernel="linear", tol=1e-6).fit(X, rare)
    np.testing.assert_allclose(model.predict(X), 0.0, atol=1e-9)  # the median of every row
    ordered = np.digitize(X @ [1, 2, 0, 1], [-1.0, 1.0])  # the middle class against the rest
    assert dkrr.KernelSVC(C=10.0, kernel="linear").fit(X, ordered).score(X, ordered) > 0.8


@pytest.mark.parametrize("centers", ["uniform", "rpcholesky"])
def test_centres_of_an_indefinite_kernel_are_not_in_the_span_of_one(centers: str) -> None:
    """k(x, z) is 1 or -1: the diagonal that one row leaves is zero, what is beside it is not."""
    rng = np.random.default_rng(0)
    X, params = 1e6 * rng.standard_normal((60, 4)), {"num_centers": 50, "centers": centers}
    est = dkrr.KernelRidge(alpha=0.1, kernel="sigmoid", gamma=1e-3, solver="nystrom", solver_params=params)
    with pytest.raises(dkrr.NotPositiveDefiniteError, match="not positive semi-definite"):
        est.fit(X, X[:, 0])
    linear = est.set_params(kernel="linear").fit(X / 1e6, X[:, 0])  # of which any four are enough
    assert "in their span left out" in linear.solution_.message or "4 of 60" in linear.solution_.message


@pytest.mark.parametrize("options", [{}, {"tile_size": 32}], ids=str)
def test_means_of_tiny_targets_with_tiny_weights(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    rows, weight = rng.standard_normal((80, 2)), rng.random(80) + 0.1
    y = np.sin(rows[:, 0]) + 0.1 * rng.standard_normal(80)
    whole, tiny = (
        dkrr.KernelRidge(alpha=0.1 * by, kernel="rbf", **options).fit(rows, of * y, by * weight).leave_one_out()
        for by, of in ((1.0, 1.0), (1e-100, 1e-120))
    )
    for name in ("mean_squared_error", "gcv"):
        np.testing.assert_allclose(getattr(tiny, name) * 1e120 * 1e120, getattr(whole, name), rtol=1e-9)
    search = dkrr.KernelRidgeCV(alphas=np.array([1e3, 0.1, 10.0]) * 1e-100, kernel="rbf", **options)
    with pytest.raises(DataError, match="multiply the weights, and alpha"):
        search.fit(rows, 1e-120 * y, 1e-100 * weight)
