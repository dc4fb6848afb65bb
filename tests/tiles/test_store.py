from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from dkrr.errors import ParameterError
from dkrr.tiles import TileGrid, TileMatrix


def filled(store: object, n: int, b: int, dtype: str = "float64") -> tuple[TileMatrix, np.ndarray]:
    matrix = TileMatrix.create(store, TileGrid(n, b), dtype=dtype)
    values = np.random.default_rng(1).standard_normal((n, n)).astype(dtype)
    for i, j in matrix.grid.lower():
        matrix.write(i, j, np.ascontiguousarray(values[matrix.grid.span(i), matrix.grid.span(j)]))
    return matrix, values


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("n", "b"), [(10, 4), (3, 4), (4, 4)])
def test_tiles_round_trip_without_their_padding(tmp_path: Path, n: int, b: int, dtype: str) -> None:
    store = str(tmp_path)
    matrix, values = filled(store, n, b, dtype)
    for i, j in matrix.grid.lower():
        np.testing.assert_array_equal(matrix.read(i, j), values[matrix.grid.span(i), matrix.grid.span(j)])
    assert matrix.missing() == []
    plain = zarr.open_array(store, mode="r", zarr_format=3)[:]
    lower = np.tril(np.ones((n, n), dtype=bool))
    np.testing.assert_array_equal(plain[lower], values[lower])
    stored = matrix.array.read((matrix.grid.num_tiles - 1,) * 2)  # ragged, full size, and NaN where no row is
    assert stored.shape == (b, b)
    assert np.isnan(stored[-(-n % b) or b :]).all()
    assert TileMatrix.open(store) == matrix


@given(n=st.integers(1, 60), b=st.integers(1, 70))
def test_a_grid_covers_every_row_once_and_tiles_follow_what_they_need(n: int, b: int) -> None:
    grid = TileGrid(n, b)
    assert [row for i in range(grid.num_tiles) for row in range(n)[grid.span(i)]] == list(range(n))
    assert all(grid.rows(i) == b for i in range(grid.num_tiles - 1))
    position = {key: rank for rank, key in enumerate(grid.lower())}
    assert len(position) == grid.num_lower
    for (i, j), rank in position.items():
        assert position[j, j] <= rank
        assert not j or position[i, j - 1] < rank


@pytest.mark.parametrize(("n", "b"), [(0, 1), (5, 0), (5, 16_385)])
def test_impossible_grids(n: int, b: int) -> None:
    with pytest.raises(ParameterError, match="expected"):
        TileGrid(n, b)
