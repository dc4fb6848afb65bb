"""The marginal likelihood and its gradient against dense formulas and differences; leave-one-out in three ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.stats import multivariate_normal

from dkrr.errors import NotPositiveDefiniteError
from dkrr.selection.choice import FAMILIES, Explained, family_kernel, kernel_keys
from dkrr.selection.search import Trial, minimise

N, D, T = 90, 4, 2
Array = NDArray[np.float64]


def rows(*, weighted: bool = False, intercept: bool = False, n: int = N) -> Explained:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, D)) * [1.0, 2.0, 0.5, 1.0] + [3.0, 0.0, -1.0, 0.0]
    y = np.column_stack([np.sin(x[:, 0]) + 0.3 * x[:, 1], np.cos(2 * x[:, 2])]) + 0.1 * rng.standard_normal((n, T)) + 2
    x[1] = x[0]  # a row that is there twice
    weight = rng.uniform(0.2, 3.0, n) if weighted else None
    return Explained(x=x, y=y, weight=weight, intercept=intercept)


CASES = pytest.mark.parametrize(("weighted", "intercept"), [(False, False), (True, False), (False, True), (True, True)])


@CASES
def test_the_loss_is_the_density_of_a_gaussian(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alpha = np.array([2.0]), 0.3
    noise = np.diag(alpha / data.root**2)
    covariance = family_kernel("matern32", widths)(data.x, data.x) + noise
    factor = cho_factor(covariance)
    mean = np.average(data.y, axis=0, weights=data.weight)
    deviation = np.sqrt(np.average((data.y - mean) ** 2, axis=0, weights=data.weight))
    centred = np.empty_like(data.y)
    for k, y in enumerate(data.y.T):
        shift = 0.0
        if intercept:  # generalised least squares
            solved = cho_solve(factor, np.ones(N))
            shift = float(solved @ y / solved.sum())
        centred[:, k] = y - shift
    variance = float(np.mean(np.sum(centred * cho_solve(factor, centred), axis=0) / deviation**2)) / N
    total = 0.0
    for y, c in zip(centred.T, deviation, strict=True):
        total -= multivariate_normal(mean=np.zeros(N), cov=variance * c**2 * covariance).logpdf(y) / (N * T)
    assert data.evaluate("matern32", widths, alpha).loss == pytest.approx(total, rel=1e-10)


@CASES
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_the_gradient_is_that_of_differences(family: str, shared: bool, weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    at = np.log(np.append([2.5] if shared else [2.0, 4.0, 1.0, 3.0], 0.2))
    found = data.evaluate(family, np.exp(at[:-1]), float(np.exp(at[-1])), gradient=True)
    h = 1e-5
    differences = []
    for step in h * np.eye(len(at)):
        high, low = (data.evaluate(family, np.exp(p[:-1]), float(np.exp(p[-1]))).loss for p in (at + step, at - step))
        differences.append((high - low) / (2 * h))
    assert found.gradient is not None
    np.testing.assert_allclose(found.gradient, differences, rtol=2e-6, atol=1e-8)


@CASES
def test_leave_one_out_is_that_of_a_path_and_of_refined_alphas(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alphas = np.array([1.5, 3.0, 1.0, 2.0]), [0.02, 0.5]
    expected = [data.evaluate("matern52", widths, alpha).loo_rmse for alpha in alphas]
    squares = data.path("matern52", widths, np.array(alphas))
    np.testing.assert_allclose(np.sqrt(squares.mean(axis=0)), expected, rtol=1e-8)
    for alpha, of_rows in data.refine("matern52", widths, 0.02, 5).items():
        assert np.sqrt(of_rows.mean()) == pytest.approx(data.evaluate("matern52", widths, alpha).loo_rmse, rel=1e-8)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shared", [True, False])
def test_the_keys_of_a_family_build_its_kernel(family: str, shared: bool) -> None:
    x = np.random.default_rng(0).standard_normal((20, D))
    widths = np.array([1.7]) if shared else np.array([0.5, 1.0, 2.0, 4.0])
    difference = np.abs(x[:, None] - x[None]) / widths
    r = np.sqrt((difference**2).sum(-1))
    expected = {
        "rbf": np.exp(-(r**2) / 2),
        "laplacian": np.exp(-difference.sum(-1)),
        "matern12": np.exp(-r),
        "matern32": (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
        "matern52": (1 + np.sqrt(5) * r + 5 * r**2 / 3) * np.exp(-np.sqrt(5) * r),
    }[family]
    np.testing.assert_allclose(family_kernel(family, widths)(x, x), expected, atol=1e-12)
    assert ("kernel_params" in kernel_keys(family, widths)) == (not shared or family.startswith("matern"))


def test_rows_that_coincide_without_noise_are_named() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="of 90 rows is not positive definite at row 1 "):
        rows().evaluate("rbf", np.ones(1), 0.0)


def test_a_search_ends_where_the_gradient_is_small() -> None:
    data = rows(n=200)

    def search(widths: Array, alpha: float) -> dict[str, Any]:
        fields = {"family": "rbf", "widths": tuple(widths), "alphas": (alpha,), "num_rows": 200, "num_evaluations": 60}
        return minimise(data, Trial(stage="", kind="search", **fields))

    found = search(np.array([3.0]), 0.5)
    at = data.evaluate("rbf", np.array(found["widths"]), found["alpha"], gradient=True)
    assert np.abs(at.gradient).max() < 5e-3
    assert (found["loss"], found["loo_rmse"]) == (at.loss, at.loo_rmse)
    assert found["num_evaluations"] < 60
    # one width for each feature explains more: two of the four features do not matter for each target
    assert search(np.full(D, found["widths"][0]), found["alpha"])["loss"] < found["loss"] - 0.05
