"""The formulas of leave-one-out against refits, on dense matrices."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.errors import DataError
from dkrr.linalg.leave_one_out import loo_from_diagonal, loo_from_leverages
from tests.reference import brute_leave_one_out, reference_kernel

N = 60


def problem(weighted: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """K (n, n), Y (n, 3), and weights, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((N, 3))
    y = np.stack([np.sin(x[:, 0] * k) + 3 * k + 0.1 * rng.standard_normal(N) for k in (1, 2, 3)], axis=1)
    weight = rng.uniform(0.2, 2, N) * (np.arange(N) % 7 > 0) if weighted else None
    return reference_kernel({"kernel": "rbf", "gamma": 0.3}, x, x), y, weight


def bordered(K: np.ndarray, root: np.ndarray, alpha: float) -> np.ndarray:
    """[[S K S + alpha I, s], [s^T, 0]]."""
    a = root[:, None] * K * root + alpha * np.eye(len(K))
    return np.block([[a, root[:, None]], [root[None, :], np.zeros((1, 1))]])


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_residuals_are_those_of_refits(weighted: bool, intercept: bool) -> None:
    K, y, weight = problem(weighted)
    alphas = np.array([0.1, 2.0, 0.1])
    root = np.ones(N) if weight is None else np.sqrt(weight)
    u, diagonal, ones, predictions = (np.empty((N, 3)) for _ in range(4))
    dof = np.empty(3)
    for k, alpha in enumerate(alphas):
        whole = bordered(K, root, alpha)
        a = whole[:N, :N]
        diagonal[:, k], ones[:, k] = np.diag(np.linalg.inv(a)), np.linalg.solve(a, root)
        inverse = np.linalg.inv(whole)[:N, :N] if intercept else np.linalg.inv(a)
        u[:, k] = inverse @ (root * y[:, k])
        b = (root @ np.linalg.solve(a, root * y[:, k])) / (root @ ones[:, k]) if intercept else 0.0
        predictions[:, k] = K @ (root * u[:, k]) + b
        # of S Y -> S f: rows without weight add nothing
        dof[k] = np.trace(np.eye(N)[root > 0][:, root > 0] - alpha * inverse[root > 0][:, root > 0])
    found = loo_from_diagonal(
        y=y,
        u=u,
        inverse_diagonal=diagonal,
        alpha=alphas,
        root=None if weight is None else root,
        ones=ones if intercept else None,
        predictions=predictions[root == 0],
    )
    expected = brute_leave_one_out(K, y, alphas, weight, intercept=intercept)
    np.testing.assert_allclose(found.residuals, expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(found.degrees_of_freedom, dof, rtol=1e-10)
    weights, seen = root**2, int((root > 0).sum())
    np.testing.assert_allclose(found.mean_squared_error, weights @ expected**2 / weights.sum(), rtol=1e-9)
    gcv = seen**2 * (weights @ (y - predictions) ** 2) / weights.sum() / (seen - dof) ** 2
    np.testing.assert_allclose(found.gcv, gcv, rtol=1e-9)
    assert found.inverse_diagonal.shape == (N, 2)
    # the same from leverages
    leverages = np.where(root[:, None] > 0, 1 - alphas * found.inverse_diagonal[:, [0, 1, 0]], 0.0)
    other = loo_from_leverages(residuals=y - predictions, leverages=leverages, alpha=alphas, root=root)
    for name in ("residuals", "degrees_of_freedom", "gcv", "mean_squared_error", "inverse_diagonal"):
        np.testing.assert_allclose(getattr(other, name), getattr(found, name), rtol=1e-8, atol=1e-9)


def test_a_row_that_is_all_there_is_cannot_be_left_out() -> None:
    root = np.array([0.0, 2.0, 0.0])
    with pytest.raises(DataError, match="row 1 decides its own prediction"):
        loo_from_diagonal(
            y=np.ones((3, 1)),
            u=np.zeros((3, 1)),
            inverse_diagonal=np.array([[1.0], [0.2], [1.0]]),
            alpha=1.0,
            root=root,
            ones=0.2 * root[:, None],
        )
    with pytest.raises(DataError, match="row 2 decides"):
        loo_from_leverages(residuals=np.zeros((3, 1)), leverages=np.array([[0.1], [0.2], [1.0]]), alpha=1.0)
    with pytest.raises(DataError, match="weight zero"):
        loo_from_leverages(residuals=np.zeros((3, 1)), leverages=np.zeros((3, 1)), alpha=1.0, root=np.zeros(3))
