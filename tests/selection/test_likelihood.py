"""The marginal likelihood and its gradient against dense formulas and differences; leave-one-out against refitting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.stats import multivariate_normal

from dkrr.errors import NotPositiveDefiniteError, ParameterError
from dkrr.selection import likelihood
from dkrr.selection.likelihood import FAMILIES, Explained, family_kernel, kernel_keys
from dkrr.selection.search import alpha_path, minimise, refine_alpha

N, D, T = 90, 4, 2
Array = NDArray[np.float64]


def rows(*, weighted: bool = False, intercept: bool = False, n: int = N) -> Explained:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((n, D)) * [1.0, 2.0, 0.5, 1.0] + [3.0, 0.0, -1.0, 0.0]
    y = np.column_stack([np.sin(x[:, 0]) + 0.3 * x[:, 1], np.cos(2 * x[:, 2])]) + 0.1 * rng.standard_normal((n, T)) + 2
    x[1] = x[0]  # a row that is there twice
    weight = rng.uniform(0.2, 3.0, n) if weighted else None
    return Explained(x=x, y=y, weight=weight, intercept=intercept)


def system(data: Explained, family: str, widths: Array, alpha: float) -> Array:
    gram = family_kernel(family, widths)(data.x, data.x)
    return data.root[:, None] * gram * data.root + alpha * np.eye(len(gram))


def brute_leave_one_out(data: Explained, family: str, widths: Array, alpha: float) -> Array:
    """y_i minus the prediction of a fit without row i, by refitting n times."""
    gram = family_kernel(family, widths)(data.x, data.x)
    weight = data.root**2
    residuals = np.empty_like(data.y)
    for i in range(len(gram)):
        keep = np.arange(len(gram)) != i
        m = int(keep.sum())
        border = np.ones((m, 1)) if data.intercept else np.zeros((m, 0))
        k = border.shape[1]
        left = np.block(
            [[gram[np.ix_(keep, keep)] + alpha * np.diag(1 / weight[keep]), border], [border.T, np.zeros((k, k))]]
        )
        solved = np.linalg.solve(left, np.vstack([data.y[keep], np.zeros((k, T))]))
        residuals[i] = data.y[i] - gram[i, keep] @ solved[:m] - solved[m:].sum(axis=0)
    return residuals


def brute_rmse(data: Explained, residuals: Array) -> float:
    weight = data.root**2
    mean = np.average(data.y, axis=0, weights=weight)
    variance = np.average((data.y - mean) ** 2, axis=0, weights=weight)
    return float(np.sqrt(np.mean(np.average(residuals**2, axis=0, weights=weight) / variance)))


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


def test_strips_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows(weighted=True, intercept=True)
    widths = np.array([2.0, 4.0, 1.0, 3.0])
    whole = [data.evaluate(family, widths, 0.1, gradient=True, slope=True) for family in FAMILIES]
    monkeypatch.setattr(likelihood, "STRIP_ROWS", 7)
    for family, expected in zip(FAMILIES, whole, strict=True):
        found = data.evaluate(family, widths, 0.1, gradient=True, slope=True)
        assert found.gradient is not None
        assert expected.gradient is not None
        np.testing.assert_allclose(found.gradient, expected.gradient, rtol=1e-9)
        assert found.loo_slope == pytest.approx(expected.loo_slope, rel=1e-9)


@CASES
def test_leave_one_out_is_refitting(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alphas = np.array([1.5, 3.0, 1.0, 2.0]), np.array([0.02, 0.5])
    expected = [brute_rmse(data, brute_leave_one_out(data, "matern52", widths, alpha)) for alpha in alphas]
    found = [data.evaluate("matern52", widths, float(alpha)).loo_rmse for alpha in alphas]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    np.testing.assert_allclose(alpha_path(data, "matern52", widths, alphas), expected, rtol=1e-8)


@CASES
def test_the_slope_of_leave_one_out(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alpha, h = np.array([2.0]), 0.07, 1e-4
    high, low = (data.evaluate("rbf", widths, alpha * np.exp(s * h)).loo_rmse for s in (1, -1))
    found = data.evaluate("rbf", widths, alpha, slope=True)
    assert found.loo_slope == pytest.approx((high - low) / (2 * h), rel=1e-5)


@CASES
def test_degrees_of_freedom(weighted: bool, intercept: bool) -> None:
    data = rows(weighted=weighted, intercept=intercept)
    widths, alpha = np.array([2.0]), 0.3
    inverse = np.linalg.inv(system(data, "rbf", widths, alpha))
    trace = np.trace(inverse)
    if intercept:
        v = inverse @ data.root
        trace -= v @ v / (data.root @ v)
    assert data.evaluate("rbf", widths, alpha).degrees_of_freedom == pytest.approx(N - alpha * trace)


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


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ParameterError, match=r"periodic.*matern12"):
        kernel_keys("periodic", np.ones(1))


def test_rows_that_coincide_without_noise_are_named() -> None:
    with pytest.raises(NotPositiveDefiniteError, match="of 90 rows is not positive definite at row 1 "):
        rows().evaluate("rbf", np.ones(1), 0.0)


def test_a_search_ends_where_the_gradient_is_small() -> None:
    data = rows(n=200)
    found = minimise(data, "rbf", np.array([3.0]), 0.5, data.x.std(axis=0), 60)
    at = data.evaluate("rbf", found.widths, found.alpha, gradient=True)
    assert at.gradient is not None
    assert np.abs(at.gradient).max() < 5e-3
    assert found.loss == min(loss for _, loss, _ in found.evaluations) == at.loss
    assert len(found.evaluations) < 60
    # one width for each feature explains more: two of the four features do not matter for each target
    wider = minimise(data, "rbf", np.full(D, found.widths[0]), found.alpha, data.x.std(axis=0), 60)
    assert wider.loss < found.loss - 0.05


def test_a_search_stops_after_the_evaluations_it_may_make() -> None:
    data = rows()
    assert len(minimise(data, "rbf", np.array([30.0]), 5.0, data.x.std(axis=0), 4).evaluations) == 4


def test_an_alpha_that_rounding_defeats_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    data = rows()
    evaluate = Explained.evaluate

    def fail_below(self: Explained, family: str, widths: Array, alpha: float, **options: bool) -> Any:
        if alpha < 5e-3:
            raise NotPositiveDefiniteError("rounding")
        return evaluate(self, family, widths, alpha, **options)

    monkeypatch.setattr(Explained, "evaluate", fail_below)
    assert refine_alpha(data, "rbf", np.ones(1), 1e-3, 3).alpha >= 5e-3
    found = minimise(data, "rbf", np.array([3.0]), 0.1, data.x.std(axis=0), 40)
    assert found.alpha >= 5e-3
    with pytest.raises(NotPositiveDefiniteError, match="rounding"):
        refine_alpha(data, "rbf", np.ones(1), 1e-6, 2)


def test_alpha_is_refined_towards_the_smallest_error() -> None:
    data = rows(n=150)
    widths = np.array([2.0])
    grid = np.geomspace(1e-4, 10, 200)
    errors = alpha_path(data, "rbf", widths, grid)
    best = float(grid[np.argmin(errors)])
    for start in (best * 4, best / 4):
        found = refine_alpha(data, "rbf", widths, start, 5)
        tried = {value: error for value, _, error in found.evaluations}
        assert min(tried.values()) <= errors.min() * 1.004
        assert abs(np.log(found.alpha / best)) < 1.0
        # the largest alpha whose error is not above the smallest by more than the standard error of the difference
        squares = {value: data.evaluate("rbf", widths, value).loo_squares for value in tried}
        least = min(tried, key=lambda value: tried[value])
        differences = {value: squares[value] - squares[least] for value in tried}
        good = [v for v, d in differences.items() if d.mean() <= d.std(ddof=1) / np.sqrt(len(d))]
        assert found.alpha == max(good)


def test_the_slope_of_the_error_has_a_standard_error() -> None:
    """Both from differences of the squared errors of the rows, with several targets and weights."""
    data = rows(n=150, weighted=True)
    at = [data.evaluate("rbf", np.array([2.0]), alpha, slope=True) for alpha in (0.01, 0.01 * np.exp(1e-5))]
    assert at[0].loo_squares.mean() == pytest.approx(at[0].loo_rmse ** 2, rel=1e-12)
    changes = (at[1].loo_squares - at[0].loo_squares) / 1e-5 / (2 * at[0].loo_rmse)
    assert at[0].loo_slope == pytest.approx(changes.mean(), rel=1e-3)
    assert at[0].loo_slope_error == pytest.approx(changes.std(ddof=1) / np.sqrt(150), rel=1e-3)


def test_of_alphas_that_are_as_good_the_largest_is_taken() -> None:
    x = np.linspace(0, 6, 60)[:, None]
    data = Explained(x=x, y=np.abs(np.sin(x)))  # no noise, and a kernel to which every small alpha is the same
    errors = {value: data.evaluate("matern12", np.ones(1), value).loo_rmse for value in (1e-6, 8e-6, 6.4e-5)}
    assert errors[6.4e-5] < 1.002 * errors[1e-6]
    assert refine_alpha(data, "matern12", np.ones(1), 1e-6, 3).alpha == 6.4e-5
