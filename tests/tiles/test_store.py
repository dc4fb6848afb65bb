from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from dkrr.errors import DamagedChunkError, StoreMismatchError
from dkrr.tiles import TileGrid, TileMatrix


def filled(store: object, n: int, b: int, dtype: str = "float64") -> tuple[TileMatrix, np.ndarray]:
    matrix = TileMatrix.create(store, TileGrid(n, b), dtype=dtype)
    values = np.random.default_rng(1).standard_normal((n, n)).astype(dtype)
    for i, j in matrix.grid.lower():
        matrix.write(i, j, np.ascontiguousarray(values[matrix.grid.span(i), matrix.grid.span(j)]))
    return matrix, values


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("n", "b"), [(10, 4), (8, 4), (3, 4), (4, 4), (5, 4), (1, 1)])
def test_tiles_round_trip_without_their_padding(tmp_path: Path, n: int, b: int, dtype: str) -> None:
    store = str(tmp_path)
    matrix, values = filled(store, n, b, dtype)
    for i, j in matrix.grid.lower():
        np.testing.assert_array_equal(matrix.read(i, j), values[matrix.grid.span(i), matrix.grid.span(j)])
    assert matrix.missing() == []
    plain = zarr.open_array(store, mode="r", zarr_format=3)[:]
    lower = np.tril(np.ones((n, n), dtype=bool))
    np.testing.assert_array_equal(plain[lower], values[lower])


def test_above_the_diagonal_blocks_is_nan(tmp_path: Path) -> None:
    filled(str(tmp_path), 10, 4)
    plain = zarr.open_array(str(tmp_path), mode="r", zarr_format=3)[:]
    assert np.isnan(plain[0, 4:]).all()


def test_a_ragged_tile_is_stored_full_size_with_nan(tmp_path: Path) -> None:
    matrix, _ = filled(str(tmp_path), 10, 4)
    stored = matrix.array.read((2, 2))
    assert stored.shape == (4, 4)
    assert np.isnan(stored[2:]).all()
    assert np.isnan(stored[:, 2:]).all()


def test_missing_tiles_are_named_and_never_zero(tmp_path: Path) -> None:
    matrix, _ = filled(str(tmp_path), 10, 4)
    matrix.delete(1, 0)
    assert matrix.missing() == [(1, 0)]
    assert not matrix.is_valid(1, 0)
    with pytest.raises(DamagedChunkError, match="missing"):
        matrix.read(1, 0)


def test_tiles_are_chunks_of_another_size_in_another_array(tmp_path: Path) -> None:
    TileMatrix.create(str(tmp_path), TileGrid(10, 4), dtype="float64")
    with pytest.raises(StoreMismatchError, match="chunks"):
        TileMatrix.create(str(tmp_path), TileGrid(10, 5), dtype="float64")
    assert TileMatrix.open(str(tmp_path)).grid == TileGrid(10, 4)


def test_a_tile_of_the_wrong_shape_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    matrix = TileMatrix.create(str(tmp_path), TileGrid(10, 4), dtype="float64")
    with pytest.raises(ValueError, match="expected"):
        matrix.write(2, 0, np.zeros((4, 4)))
