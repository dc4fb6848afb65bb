"""The stored Gram matrix and its lazy dask array."""

from __future__ import annotations

from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import dkrr
from dkrr.engine.tasks import InProcessExecutor
from dkrr.linalg.gram import build_gram
from dkrr.tiles import TileMatrix
from tests.linalg.helpers import assembled, operator, rows, snapshot
from tests.reference import reference_kernel


@pytest.mark.parametrize(("n", "kernel", "parameters"), [(65, "rbf", {"gamma": 0.3}), (200, "laplacian", {})])
def test_tiles_against_the_formula(tmp_path: Path, n: int, kernel: str, parameters: dict) -> None:
    dataset = rows(tmp_path, n=n)
    system = operator(dataset, kernel=kernel, **parameters)
    gram = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
    summary = build_gram(system, gram, InProcessExecutor())
    x = dataset.X.read(0, n)
    expected = reference_kernel(system.kernel.to_dict(), x, x)
    lower = np.tril(np.ones((n, n), dtype=bool))
    np.testing.assert_allclose(assembled(gram)[lower], expected[lower], rtol=1e-12, atol=1e-13)
    assert summary.num_computed == system.grid.num_lower
    assert build_gram(system, gram, InProcessExecutor()).num_computed == 0


def test_a_lazy_symmetric_matrix_whose_tiles_are_stored_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((210, 4))
    lazy = dkrr.gram_matrix(da.from_array(x, chunks=(50, 4)), kernel="rbf", gamma=0.3, store=tmp_path, tile_size=64)
    assert isinstance(lazy, da.Array)
    assert lazy.shape == (210, 210)
    assert lazy.chunks == ((64, 64, 64, 18),) * 2
    assert not [name for name in snapshot(tmp_path) if name.startswith("grams")]
    corner = lazy[:64, 64:128].compute(scheduler="synchronous")
    stored = [name for name in snapshot(tmp_path) if name.startswith("grams")]
    assert len(stored) == 1
    assert stored[0].endswith("c/1/0")
    with dask.config.set(scheduler="synchronous"):
        full = lazy.compute()
        first = {name: value for name, value in snapshot(tmp_path).items() if name.startswith("grams")}
        assert len(first) == 10
        again = lazy.compute()
    assert {name: value for name, value in snapshot(tmp_path).items() if name.startswith("grams")} == first
    np.testing.assert_array_equal(full, full.T)
    np.testing.assert_array_equal(full, again)
    np.testing.assert_array_equal(corner, full[:64, 64:128])
    np.testing.assert_allclose(full, dkrr.make_kernel("rbf", gamma=0.3)(x, x), atol=1e-13)
    np.testing.assert_array_equal(np.diag(full), np.ones(210))
