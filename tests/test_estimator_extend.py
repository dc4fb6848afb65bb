"""The estimator with a store that is kept: a fit of more rows continues the factor of the first ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dkrr
from dkrr.dataset import append

RNG = np.random.default_rng(8)
X = RNG.standard_normal((700, 4)) + 3
Y = np.sin(X[:, 0]) + 0.1 * RNG.standard_normal(700)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_a_data_set_that_grows(tmp_path: Path, precision: str) -> None:
    data = append(X[:500], tmp_path / "data.zarr", y=Y[:500])
    est = dkrr.KernelRidge(
        alpha=0.1, kernel="matern", kernel_params={"nu": 1.5}, precision=precision, store=str(tmp_path / "store"),
        tile_size=64, solver="cholesky",
    )  # fmt: skip
    est.fit(data, None)
    est.fit(append(X[500:560], tmp_path / "data.zarr", y=Y[500:560]), None)
    assert est.solution_.reused["factor"]["rows"] == 500
    loaded = tmp_path / "model.zarr"
    est.save(loaded)
    assert dkrr.load_model(loaded).solution.reused["factor"]["rows"] == 500
    fresh = dkrr.KernelRidge(alpha=0.1, kernel="matern", kernel_params={"nu": 1.5}).fit(X[:560], Y[:560])
    np.testing.assert_allclose(est.predict(X[560:]), fresh.predict(X[560:]), rtol=1e-7)
