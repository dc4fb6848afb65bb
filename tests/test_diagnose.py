"""``KernelRidge.leave_one_out`` against refitting n times, for every solver, with weights and with an intercept."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from tests.reference import brute_leave_one_out, dense_bordered, dense_krr, reference_kernel

N, M = 90, 20
ALPHAS = np.array([0.3, 2.0, 0.3])
KERNEL = {"kernel": "rbf", "gamma": 0.3}
NYSTROM = {"num_centers": M, "seed": 3}

SOLVERS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "tiles": {"tile_size": 32},
    "given, tiles": {"kernel": "precomputed", "tile_size": 32},
    "given": {"kernel": "precomputed"},
    "mixed": {"tile_size": 32, "precision": "mixed", "tol": 1e-13},
    "cg": {"solver": "cg", "tol": 1e-13, "tile_size": 32},
    "nystrom": {"solver": "nystrom", "tol": 1e-13, "solver_params": NYSTROM},
}


def data(weighted: bool, n: int = N) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((n, 3))
    y = np.stack([np.sin(x[:, 0] * k) + 2 * k + 0.1 * rng.standard_normal(n) for k in (1, 2, 3)], axis=1)
    return x, y, rng.uniform(0.2, 2, n) * (np.arange(n) % 9 > 0) if weighted else None


def fitted(x: np.ndarray, y: np.ndarray, weight: Any, **parameters: Any) -> dkrr.KernelRidge:
    rows = reference_kernel(KERNEL, x, x) if parameters.get("kernel") == "precomputed" else x
    return dkrr.KernelRidge(**{"alpha": ALPHAS, **KERNEL, **parameters}).fit(rows, y, sample_weight=weight)


def kernel_of_centres(x: np.ndarray, z: np.ndarray) -> np.ndarray:
    """F F^T with whitened features F of centres z: least squares on them is ridge regression with this kernel."""
    lower = np.linalg.cholesky(reference_kernel(KERNEL, z, z))
    features = np.linalg.solve(lower, reference_kernel(KERNEL, z, x)).T
    return features @ features.T


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_leave_one_out_is_refitting(name: str, weighted: bool, intercept: bool) -> None:
    x, y, weight = data(weighted)
    estimator = fitted(x, y, weight, **SOLVERS[name], fit_intercept=intercept)
    found = estimator.leave_one_out()
    K = kernel_of_centres(x, estimator.X_fit_) if name == "nystrom" else reference_kernel(KERNEL, x, x)
    expected = brute_leave_one_out(K, y, ALPHAS, weight, intercept=intercept)
    np.testing.assert_allclose(found.residuals, expected, rtol=1e-8, atol=1e-8)
    w = np.ones(N) if weight is None else weight
    np.testing.assert_allclose(found.mean_squared_error, w @ expected**2 / w.sum(), rtol=1e-7)
    # the hat matrix is what becomes of targets that are 1 in one row
    seen = w > 0
    hat, b = dense_bordered(K, np.eye(N), 0.3, w) if intercept else (dense_krr(K, np.eye(N), 0.3, w), np.zeros(N))
    freedom, values = np.diag(K @ hat + b)[seen].sum(), (K @ hat + b) @ y
    gcv = seen.sum() ** 2 * (w @ (y - values) ** 2) / w.sum() / (seen.sum() - freedom) ** 2
    np.testing.assert_allclose(found.degrees_of_freedom[[0, 2]], freedom, rtol=1e-7)
    np.testing.assert_allclose(found.gcv[[0, 2]], gcv[[0, 2]], rtol=1e-7)


def test_a_row_that_is_all_there_is_cannot_be_left_out() -> None:
    x, y, _ = data(False, 3)
    for options in ({}, {"tile_size": 2}):
        estimator = fitted(x, y, np.array([0.0, 2.0, 0.0]), fit_intercept=True, **options)
        with pytest.raises(dkrr.DataError, match="row 1 decides its own prediction"):
            estimator.leave_one_out()


def test_a_stored_factor_is_used_and_its_result_kept(tmp_path: Path) -> None:
    x, y, weight = data(True)
    estimator = fitted(x, y, weight, tile_size=32, store=tmp_path, fit_intercept=True)
    first = estimator.leave_one_out()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("factors/**/c/*/*")}
    assert len([path for path in before if "inverse_diagonal" in path.parts]) == 2 * 3  # two alphas, three blocks
    again = pickle.loads(pickle.dumps(estimator)).leave_one_out()
    np.testing.assert_array_equal(again.residuals, first.residuals)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("factors/**/c/*/*")} == before
    assert not list(tmp_path.glob("scratch/*"))
