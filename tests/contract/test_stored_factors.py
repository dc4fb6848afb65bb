"""Standard deviations rest on the factor of these rows and this kernel, whatever lies in the store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr

RNG = np.random.default_rng(0)
X, Z = RNG.standard_normal((50, 3)), RNG.standard_normal((7, 3))
Y, WEIGHT = np.sin(X[:, 0]), RNG.uniform(0.5, 2.0, 50)
FACTORISED: dict[str, Any] = {"solver": "cholesky", "precision": "float64", "tile_size": 16}
SCALE = 1.0


def edited(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A kernel function whose module changes between two fits."""
    return np.asarray(np.exp(-SCALE * np.square(A[:, None] - B[None]).sum(axis=2)))


@pytest.mark.parametrize("alpha", [0.1, 1e-5])
def test_a_tile_of_another_factor_changes_no_standard_deviation(
    tmp_path: Path, alpha: float, caplog: pytest.LogCaptureFixture
) -> None:
    parameters: dict[str, Any] = {"kernel": "rbf", "gamma": 0.5, "fit_intercept": True}
    tiled = parameters | FACTORISED | {"store": str(tmp_path / "store")}
    dkrr.KernelRidge(2 * alpha, **tiled).fit(X, Y, WEIGHT)
    (other,) = (tmp_path / "store" / "factors").glob("*.zarr")
    model = dkrr.KernelRidge(alpha, **tiled).fit(X, Y, WEIGHT)
    model.predict_interval(Z)
    model.save(tmp_path / "model.zarr")
    (factor,) = set((tmp_path / "store" / "factors").glob("*.zarr")) - {other}
    in_memory = dkrr.KernelRidge(alpha, **parameters).fit(X, Y, WEIGHT)
    std = in_memory.predict(Z, return_std=True)[1]
    lower, upper = in_memory.predict_interval(Z, 0.9, "normalised")
    tiles = [path.relative_to(factor) for path in sorted(factor.glob("c/*/*"))]
    assert len(tiles) == 10
    for tile in tiles:
        right = (factor / tile).read_bytes()
        shutil.copyfile(other / tile, factor / tile)
        caplog.clear()
        found = dkrr.load_model(tmp_path / "model.zarr")
        np.testing.assert_allclose(found.predict_std(Z), std, rtol=1e-6, err_msg=str(tile))
        np.testing.assert_allclose(found.predict_interval(Z, 0.9, "normalised"), (lower, upper), rtol=1e-6)
        assert "does not give back the matrix" in caplog.text
        (factor / tile).write_bytes(right)
    caplog.clear()
    np.testing.assert_allclose(dkrr.load_model(tmp_path / "model.zarr").predict_std(Z), std, rtol=1e-6)
    assert not caplog.records


@pytest.mark.parametrize("options", [{"solver": "cg"}, {"precision": "mixed"}])
def test_a_factor_of_a_kernel_function_as_it_was_is_not_taken(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters: dict[str, Any] = {"kernel": edited, "alpha": 0.1}
    tiled = parameters | FACTORISED | {"store": str(tmp_path / "store")}
    dkrr.KernelRidge(**tiled).fit(X, Y)
    monkeypatch.setitem(globals(), "SCALE", 1.2)
    expected = dkrr.KernelRidge(**parameters).fit(X, Y).predict(Z, return_std=True)
    found = dkrr.KernelRidge(**tiled | options).fit(X, Y).predict(Z, return_std=True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_factor_of_an_earlier_version_is_taken_if_it_is_that_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("dkrr.linalg.catalogue.KERNEL_VERSION", 3)
        est = dkrr.KernelRidge(0.1, kernel="rbf", gamma=0.5, store=str(tmp_path / "store"), **FACTORISED).fit(X, Y)
        est.save(tmp_path / "model.zarr")
    std = est.predict(Z, return_std=True)[1]
    monkeypatch.setattr("dkrr.models.model.MAX_DENSE_ROWS", 10)  # none is made in memory
    np.testing.assert_allclose(dkrr.load_model(tmp_path / "model.zarr").predict_std(Z), std, rtol=1e-9)
