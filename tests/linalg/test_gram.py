"""Tiles of K and of A = S K S + alpha I against the formula, and the lazy matrix that computes its tiles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest

import dkrr
from dkrr.errors import StoreError
from tests.linalg.helpers import dense, gram_of, operator, rows, snapshot


@pytest.mark.parametrize("form", ["rbf", "laplacian", "stored", "given"])
@pytest.mark.parametrize(("n", "b"), [(1, 64), (64, 64), (65, 64), (700, 300)])
def test_tiles(tmp_path: Path, form: str, n: int, b: int) -> None:
    dataset = rows(tmp_path, n=n, weights=n > 1)
    system = operator(dataset, tile_size=b, alpha=0.3, kernel="rbf" if form in ("stored", "given") else form)
    a, grid = dense(system, dataset), system.grid
    if form in ("stored", "given"):
        gram = gram_of(system, tmp_path / "K.zarr")
        system = replace(system, gram=gram, kernel=system.kernel if form == "stored" else None)
    for i, j in grid.lower():
        tile = system.tile(i, j, np.empty(grid.shape(i, j)))
        np.testing.assert_allclose(tile, a[grid.span(i), grid.span(j)], atol=1e-13)
        np.testing.assert_allclose(system.tile(i, j, np.empty(tile.shape, np.float32)), tile, rtol=3e-7)
    np.testing.assert_allclose(system.diagonal_from(0) + 0.3, np.diag(a), atol=1e-13)


def test_rows_that_changed_are_not_the_rows_that_were_meant(tmp_path: Path) -> None:
    system = operator(rows(tmp_path))
    other = replace(system, rows=replace(system.rows, digest="0" * 64))
    with pytest.raises(StoreError, match="other rows"):
        other.gram_tile(0, 0)


def test_a_lazy_symmetric_matrix_whose_tiles_are_stored_once(tmp_path: Path) -> None:
    def stored() -> dict[str, tuple[bytes, int]]:
        return {name: value for name, value in snapshot(tmp_path).items() if name.startswith("grams")}

    x = np.random.default_rng(0).standard_normal((210, 4))
    lazy = dkrr.gram_matrix(da.from_array(x, chunks=(50, 4)), kernel="rbf", gamma=0.3, store=tmp_path, tile_size=64)
    assert lazy.chunks == ((64, 64, 64, 18),) * 2
    assert not stored()
    with dask.config.set(scheduler="synchronous"):
        corner = lazy[:64, 64:128].compute()
        assert [name[-5:] for name in stored()] == ["c/1/0"]
        full, first = lazy.compute(), stored()
        assert len(first) == 10
        again = lazy.compute()
    assert stored() == first
    np.testing.assert_array_equal(full, full.T)
    np.testing.assert_array_equal(full, again)
    np.testing.assert_array_equal(corner, full[:64, 64:128])
    np.testing.assert_allclose(full, dkrr.make_kernel("rbf", gamma=0.3)(x, x), atol=1e-13)
