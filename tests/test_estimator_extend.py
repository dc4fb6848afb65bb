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


def test_more_rows_continue_the_factor(tmp_path: Path) -> None:
    est = dkrr.KernelRidge(alpha=0.1, kernel="rbf", gamma=0.2, solver="cholesky", store=str(tmp_path / "store"))
    est.set_params(tile_size=100).fit(X[:600], Y[:600])
    # an edge that is left open becomes that of the factor
    est.set_params(tile_size="auto").fit(X[:620], Y[:620])
    assert est.solution_.reused["factor"]["rows"] == 600
    fresh = dkrr.KernelRidge(alpha=0.1, kernel="rbf", gamma=0.2).fit(X[:620], Y[:620])
    np.testing.assert_allclose(est.predict(X[600:]), fresh.predict(X[600:]), rtol=1e-9)
    wanted = fresh.predict(X[600:], return_std=True)
    np.testing.assert_allclose(est.predict(X[600:], return_std=True), wanted, rtol=1e-6)
    # fewer rows again: a prefix of both, whose end no append marked, is not a proof
    again = est.fit(X[:610], Y[:610])
    np.testing.assert_allclose(again.predict(X[600:]), fresh.fit(X[:610], Y[:610]).predict(X[600:]), rtol=1e-9)


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
    fresh = dkrr.KernelRidge(alpha=0.1, kernel="matern", kernel_params={"nu": 1.5}).fit(X[:560], Y[:560])
    np.testing.assert_allclose(est.predict(X[560:]), fresh.predict(X[560:]), rtol=1e-7)
