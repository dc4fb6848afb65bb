"""``KernelRidge.leave_one_out`` by probes, for every way to fit, against refitting n times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from tests.reference import brute_leave_one_out, reference_kernel

N = 150
ALPHAS = np.array([0.3, 2.0])
KERNEL: dict[str, Any] = {"kernel": "rbf", "gamma": 0.3}

FITS: dict[str, dict[str, Any]] = {
    "cg": {"solver": "cg", "tile_size": 64, "solver_params": {"rank": 20}},
    "cg mixed": {"solver": "cg", "tile_size": 64, "precision": "mixed", "solver_params": {"preconditioner": "none"}},
    "cg given": {"solver": "cg", "kernel": "precomputed", "tile_size": 64, "solver_params": {"rank": 20}},
    "in memory": {},
}


def data(weighted: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((N, 3))
    y = np.stack([np.sin(x[:, 0] * k) + 2 * k + 0.1 * rng.standard_normal(N) for k in (1, 2)], axis=1)
    return x, y, rng.uniform(0.2, 2, N) * (np.arange(N) % 9 > 0) if weighted else None


@pytest.mark.parametrize(("weighted", "intercept"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", FITS)
def test_estimates_keep_to_their_standard_errors(name: str, weighted: bool, intercept: bool) -> None:
    x, y, weight = data(weighted)
    K = reference_kernel(KERNEL, x, x)
    rows = K if FITS[name].get("kernel") == "precomputed" else x
    estimator = dkrr.KernelRidge(**{"alpha": ALPHAS, **KERNEL, **FITS[name]}, fit_intercept=intercept)
    found = estimator.fit(rows, y, sample_weight=weight).leave_one_out("stochastic", num_probes=24, seed=5)
    assert found.method == "stochastic"
    assert found.standard_error is not None
    assert found.mean_squared_error_se is not None
    expected = brute_leave_one_out(K, y, ALPHAS, weight, intercept=intercept)
    assert np.mean(np.abs(found.residuals - expected) <= 4 * found.standard_error + 1e-6) >= 0.98
    w = np.ones(N) if weight is None else weight
    off = np.abs(found.mean_squared_error - w @ expected**2 / w.sum())
    assert (off <= 3 * found.mean_squared_error_se).all()
    assert (found.mean_squared_error_se < 0.1 * found.mean_squared_error).all()
    assert found.inverse_diagonal.shape == (N, 2)


def test_auto_follows_the_fit_and_leaves_nothing_behind(tmp_path: Path) -> None:
    x, y, _ = data(False)
    estimator = dkrr.KernelRidge(alpha=0.3, **KERNEL, solver="cg", store=tmp_path / "store").fit(x, y[:, 0])
    found, same = estimator.leave_one_out(num_probes=8), estimator.leave_one_out(num_probes=8)
    assert found.method == "stochastic"
    np.testing.assert_array_equal(found.residuals, same.residuals)
    other = estimator.leave_one_out(num_probes=8, seed=1)
    assert not np.array_equal(found.residuals, other.residuals)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file() and "solves" in str(path)]
    exact = estimator.leave_one_out("exact")
    assert exact.method == "exact"
    assert np.corrcoef(exact.residuals[:, 0], found.residuals[:, 0])[0, 1] > 0.98
