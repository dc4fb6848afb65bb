"""``KernelRidge.leave_one_out`` against refitting n times, for every solver, with weights and with an intercept."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.errors import ResidualError
from dkrr.store.chunks import ChunkArray
from tests.reference import brute_leave_one_out, reference_kernel

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


def brute_nystrom(x: np.ndarray, y: np.ndarray, z: np.ndarray, weight: Any, intercept: bool) -> np.ndarray:
    """Refits with the same centres: least squares on whitened features of the centres."""
    lower = np.linalg.cholesky(reference_kernel(KERNEL, z, z))
    features = np.linalg.solve(lower, reference_kernel(KERNEL, z, x)).T
    if intercept:
        features = np.hstack([features, np.ones((len(x), 1))])
    root = np.sqrt(np.ones(len(x)) if weight is None else weight)
    residuals = np.empty(y.shape)
    for i in range(len(x)):
        rest = np.arange(len(x)) != i
        for k, alpha in enumerate(ALPHAS):
            penalty = np.sqrt(alpha) * np.eye(features.shape[1])
            if intercept:
                penalty[-1] = 0
            left = np.vstack([root[rest, None] * features[rest], penalty])
            right = np.concatenate([root[rest] * y[rest, k], np.zeros(len(penalty))])
            residuals[i, k] = y[i, k] - features[i] @ np.linalg.lstsq(left, right, rcond=None)[0]
    return residuals


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_leave_one_out_is_refitting(name: str, weighted: bool, intercept: bool) -> None:
    x, y, weight = data(weighted)
    estimator = fitted(x, y, weight, **SOLVERS[name], fit_intercept=intercept)
    found = estimator.leave_one_out()
    if name == "nystrom":
        expected = brute_nystrom(x, y, estimator.X_fit_, weight, intercept)
    else:
        K = reference_kernel(KERNEL, x, x)
        expected = brute_leave_one_out(K, y, ALPHAS, weight, intercept=intercept)
    np.testing.assert_allclose(found.residuals, expected, rtol=1e-8, atol=1e-8)
    w = np.ones(N) if weight is None else weight
    np.testing.assert_allclose(found.mean_squared_error, w @ expected**2 / w.sum(), rtol=1e-7)
    assert ((found.degrees_of_freedom > intercept) & (found.degrees_of_freedom < (w > 0).sum())).all()


def test_a_stored_factor_is_used_and_its_result_kept(tmp_path: Path) -> None:
    x, y, weight = data(True)
    estimator = fitted(x, y, weight, tile_size=32, store=tmp_path, fit_intercept=True)
    tiles = {path: path.stat().st_mtime_ns for path in tmp_path.glob("factors/*.zarr/c/*/*")}
    assert tiles
    first = estimator.leave_one_out()
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("factors/*.zarr/inverse_diagonal/c/*/*")}
    assert len(results) == 2 * 3  # of two alphas, three row blocks
    again = pickle.loads(pickle.dumps(estimator)).leave_one_out()
    np.testing.assert_array_equal(again.residuals, first.residuals)
    for before in (tiles, results):
        assert {path: path.stat().st_mtime_ns for path in before} == before
    assert set(tmp_path.glob("factors/*.zarr/c/*/*")) == set(tiles)
    assert not list(tmp_path.glob("scratch/*"))


def test_sums_of_another_factor_are_found(tmp_path: Path) -> None:
    x, y, _ = data(False)
    estimators = [fitted(x, y[:, 0], None, alpha=alpha, tile_size=32, store=tmp_path) for alpha in (0.3, 2.0)]
    expected = [estimator.leave_one_out().residuals for estimator in estimators]
    first, second = (path / "inverse_diagonal" for path in tmp_path.glob("factors/*.zarr"))
    for name in ("0/0", "2/0"):
        (second / "c" / name).write_bytes((first / "c" / name).read_bytes())
    failures = 0
    for estimator, residuals in zip(estimators, expected, strict=True):
        try:
            found = estimator.leave_one_out()
        except ResidualError:
            failures += 1
            found = estimator.leave_one_out()  # forgotten, and right again
        np.testing.assert_array_equal(found.residuals, residuals)
    assert failures == 1


def test_a_damaged_leverage_is_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = data(True)
    estimator = fitted(x, y, weight, fit_intercept=True, **SOLVERS["nystrom"])
    expected = estimator.leave_one_out()
    write, spoiled = ChunkArray.write, []

    def spoil(array: ChunkArray, index: Any, block: Any) -> None:
        write(array, index, block)
        name = array.path.rpartition("/")[2]
        if name in ("factor", "result", "triangles") and array.path not in spoiled:
            spoiled.append(array.path)
            path = Path(array.store) / array.chunk_key(index)
            path.write_bytes(b"\0" * path.stat().st_size)

    monkeypatch.setattr(ChunkArray, "write", spoil)
    monkeypatch.setattr("dkrr.linalg.passes.is_here", lambda workspace: workspace is None)  # as on workers
    np.testing.assert_array_equal(estimator.leave_one_out().residuals, expected.residuals)
    assert len(spoiled) == 5


def test_rows_from_disk_and_targets_of_one_dimension(tmp_path: Path) -> None:
    x, y, _ = data(False)
    dataset = dkrr.ingest(x, tmp_path / "data.zarr", y=y[:, 0])
    parameters: dict[str, Any] = {"alpha": 0.3, "tile_size": 32, "fit_intercept": True, **KERNEL}
    found = dkrr.KernelRidge(store=tmp_path / "store", **parameters).fit(dataset).leave_one_out()
    expected = dkrr.KernelRidge(**parameters).fit(x, y[:, 0]).leave_one_out()
    np.testing.assert_array_equal(found.residuals, expected.residuals)
    assert found.residuals.shape == (N, 1)


def test_single_precision_is_single_precision() -> None:
    x, y, _ = data(False)
    for parameters in ({}, {"tile_size": 32}):
        found = fitted(x, y, None, precision="float32", **parameters).leave_one_out()
        exact = fitted(x, y, None).leave_one_out()
        error = np.abs(found.residuals - exact.residuals).max()
        assert 1e-9 < error < 1e-3


def test_on_workers(cluster_client: Any) -> None:
    x, y, weight = data(True, 130)
    for parameters in ({"tile_size": 64}, SOLVERS["nystrom"]):
        found = fitted(x, y, weight, fit_intercept=True, **parameters).leave_one_out()
        assert np.isfinite(found.residuals).all()
        if "tile_size" in parameters:
            expected = fitted(x, y, weight, fit_intercept=True).leave_one_out()
            np.testing.assert_allclose(found.residuals, expected.residuals, rtol=1e-9, atol=1e-9)
