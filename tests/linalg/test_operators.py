"""RidgeOperator: its tiles and its product against the dense matrix, in every form that it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import StoreError
from dkrr.linalg.gram import build_gram
from dkrr.tiles import TileMatrix
from tests.linalg.helpers import dense, operator, rows


@pytest.mark.parametrize("form", ["matrix-free", "stored", "given"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("n", "b"), [(1, 64), (64, 64), (65, 64), (700, 300)])
def test_tiles(tmp_path: Path, form: str, weights: bool, n: int, b: int) -> None:
    dataset = rows(tmp_path, n=n, weights=weights and n > 1)
    system = operator(dataset, tile_size=b, alpha=0.3)
    a = dense(system, dataset)
    if form != "matrix-free":
        gram = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
        build_gram(system, gram, InProcessExecutor())
        system = replace(system, gram=gram, kernel=system.kernel if form == "stored" else None)
    grid = system.grid
    for i, j in grid.lower():
        tile = system.tile(i, j, np.empty(grid.shape(i, j)))
        np.testing.assert_allclose(tile, a[grid.span(i), grid.span(j)], atol=1e-13)
    np.testing.assert_allclose(system.diagonal_from(0) + 0.3, np.diag(a), atol=1e-13)


def test_an_operator_without_entries_is_refused(tmp_path: Path) -> None:
    system = replace(operator(rows(tmp_path)), kernel=None)
    with pytest.raises(StoreError, match="no kernel to evaluate"):
        system.known()


def test_float32_tiles_are_rounded_float64_tiles(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset)
    for i, j in system.grid.lower():
        shape = system.grid.shape(i, j)
        single = system.tile(i, j, np.empty(shape, np.float32))
        double = system.tile(i, j, np.empty(shape))
        np.testing.assert_allclose(single, double, rtol=3e-7)


def test_rows_that_changed_are_not_the_rows_that_were_meant(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset)
    other = replace(system, rows=replace(system.rows, digest="0" * 64))
    with pytest.raises(StoreError, match="other rows"):
        other.gram_tile(0, 0)
