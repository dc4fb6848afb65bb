"""Sweeps: against dense solves, and the same bits however they are cut and whoever runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.cluster import start_local
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import DamagedChunkError
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.triangular import substitute
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import Spoiling, chunk_files, delete, flip
from tests.linalg.helpers import assembled

N, TILE = 310, 48  # seven tiles a side, the last one ragged
Blocks = tuple[BlockColumns, BlockColumns, BlockColumns]


def factor_of(folder: Path, n: int = N, tile_size: int = TILE, dtype: str = "float64") -> TileMatrix:
    """A well-conditioned triangular matrix in tiles."""
    rng = np.random.default_rng(1)
    lower = np.tril(rng.standard_normal((n, n)) / n) + np.diag(rng.uniform(1, 2, n))
    factor = TileMatrix.create(str(folder / "L"), TileGrid(n, tile_size), dtype=dtype)
    for i, j in factor.grid.lower():
        factor.write(i, j, np.ascontiguousarray(lower[factor.grid.span(i), factor.grid.span(j)], dtype=dtype))
    return factor


def blocks_of(folder: Path, factor: TileMatrix, num_columns: int) -> Blocks:
    """Random right-hand sides, and the places of z and u."""
    values = np.random.default_rng(0).standard_normal((factor.grid.n, num_columns)).astype(factor.dtype)
    made = (BlockColumns.create(str(folder), name, factor.grid, num_columns, factor.array.dtype) for name in "rzu")
    rhs, z, u = made
    return rhs.fill(values), z, u


def check(factor: TileMatrix, blocks: Blocks) -> None:
    """Against a dense solve."""
    lower, (rhs, z, u) = assembled(factor), (each.whole() for each in blocks)
    tolerance = 1e-12 if factor.array.dtype == "float64" else 1e-4
    expected = np.linalg.solve(lower, rhs)
    np.testing.assert_allclose(z, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(u, np.linalg.solve(lower.T, expected), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("num_columns", "dtype"), [(1, "float64"), (17, "float32"), (300, "float64")])
@pytest.mark.parametrize(("n", "tile_size"), [(N, TILE), (1, 1), (48, 48), (300, 290)])
def test_sweeps_match_a_dense_solve(n: int, tile_size: int, num_columns: int, dtype: str, tmp_path: Path) -> None:
    factor = factor_of(tmp_path, n, tile_size, dtype)
    blocks = blocks_of(tmp_path, factor, num_columns)
    substitute("solve", factor, blocks, InProcessExecutor())
    check(factor, blocks)


@pytest.fixture(scope="module")
def executors() -> Iterator[list[Executor]]:
    with start_local(workers=2) as two:
        yield [InProcessExecutor(), two]


@pytest.mark.parametrize("num_columns", [1, 300])
def test_neither_steps_nor_workers_change_a_bit(num_columns: int, executors: list[Executor], tmp_path: Path) -> None:
    factor = factor_of(tmp_path, dtype="float32")
    found = []
    for number, (num_steps, executor) in enumerate((steps, each) for each in executors for steps in (1, 3, 7)):
        (folder := tmp_path / str(number)).mkdir()
        blocks = blocks_of(folder, factor, num_columns)
        substitute("solve", factor, blocks, executor, num_steps=num_steps)
        found.append(blocks[2].whole())
        assert not list(folder.rglob("*-sums-*")), "sums stay behind"
    assert all(np.array_equal(u, found[0]) for u in found[1:])


class Stopping(InProcessExecutor):
    """Stops before task 25."""

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        super().run(phase, function, payload, nodes[:25], progress)
        raise KeyboardInterrupt


@pytest.mark.parametrize("num_steps", [4, 7, 1])
def test_an_interrupted_sweep_goes_on_where_it_stopped(num_steps: int, tmp_path: Path) -> None:
    factor = factor_of(tmp_path)
    blocks = blocks_of(tmp_path, factor, 2)
    with pytest.raises(KeyboardInterrupt):
        substitute("solve", factor, blocks, Stopping(), num_steps=7)
    before = {path: path.stat().st_mtime_ns for path in chunk_files(tmp_path / "z")}
    assert len(before) > 3
    substitute("solve", factor, blocks, InProcessExecutor(), num_steps=num_steps)
    check(factor, blocks)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert substitute("solve", factor, blocks, InProcessExecutor(), num_steps=num_steps).num_computed == 0


@pytest.mark.parametrize("damage", [delete, flip])
def test_a_lost_sum_is_computed_again_by_its_reader(damage: Any, tmp_path: Path) -> None:
    factor = factor_of(tmp_path)
    blocks = blocks_of(tmp_path, factor, 2)

    def spoil() -> None:
        for path in chunk_files(tmp_path / "z-sums-4"):
            damage(path)

    executor = Spoiling("solve", (0, 0, 3, 3), spoil)
    substitute("solve", factor, blocks, executor, num_steps=4)
    assert executor.done
    check(factor, blocks)


@pytest.mark.parametrize("num_columns", [1, 40])
@pytest.mark.parametrize("index", [(3, 1), (2, 2)])
def test_a_damaged_tile_is_named_before_anything_is_written(
    index: tuple[int, int], num_columns: int, tmp_path: Path
) -> None:
    factor = factor_of(tmp_path)
    flip(tmp_path / "L" / factor.array.chunk_key(index))
    blocks = blocks_of(tmp_path, factor, num_columns)
    with pytest.raises(DamagedChunkError, match="crc32c") as caught:
        substitute("solve", factor, blocks, InProcessExecutor())
    assert caught.value.index == index
    assert not blocks[1].is_valid(index[0], 0)
