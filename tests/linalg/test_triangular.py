"""Sweeps, and the diagonal of the inverse: against dense solves, and the same bits however they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.cluster import start_local
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import DamagedChunkError, NumericalError
from dkrr.linalg.direct import CholeskyFactor
from dkrr.linalg.operators import BlockColumns
from dkrr.linalg.triangular import inverse_diagonal, panel_bytes, substitute
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import Spoiling, chunk_files, delete, flip
from tests.linalg.helpers import assembled, dense, operator, rows, snapshot

N, TILE = 310, 48  # seven tiles a side, the last one ragged
Blocks = tuple[BlockColumns, BlockColumns, BlockColumns]


def lower_of(folder: Path, n: int = N, tile_size: int = TILE, dtype: str = "float64") -> TileMatrix:
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
@pytest.mark.parametrize(("n", "tile_size"), [(N, TILE), (1, 1), (300, 290)])
def test_sweeps_match_a_dense_solve(n: int, tile_size: int, num_columns: int, dtype: str, tmp_path: Path) -> None:
    factor = lower_of(tmp_path, n, tile_size, dtype)
    blocks = blocks_of(tmp_path, factor, num_columns)
    substitute("solve", factor, blocks, InProcessExecutor())
    check(factor, blocks)


@pytest.fixture(scope="module")
def executors() -> Iterator[list[Executor]]:
    with start_local(workers=2) as two:
        yield [InProcessExecutor(), two]


@pytest.mark.parametrize("num_columns", [1, 300])
def test_neither_steps_nor_workers_change_a_bit(num_columns: int, executors: list[Executor], tmp_path: Path) -> None:
    factor, found = lower_of(tmp_path, dtype="float32"), []
    for number, (num_steps, executor) in enumerate((steps, each) for each in executors for steps in (1, 3, 7)):
        (folder := tmp_path / str(number)).mkdir()
        blocks = blocks_of(folder, factor, num_columns)
        substitute("solve", factor, blocks, executor, num_steps=num_steps)
        found.append(blocks[2].whole())
        assert not list(folder.rglob("*-sums-*")), "sums stay behind"
    assert all(np.array_equal(u, found[0]) for u in found[1:])


@pytest.mark.parametrize("damage", [delete, flip])
def test_a_lost_sum_is_computed_again_by_its_reader(damage: Any, tmp_path: Path) -> None:
    factor = lower_of(tmp_path)
    blocks = blocks_of(tmp_path, factor, 2)

    def spoil() -> None:
        for path in chunk_files(tmp_path / "z-sums-4"):
            damage(path)

    executor = Spoiling("solve", (0, 0, 3, 3), spoil)
    substitute("solve", factor, blocks, executor, num_steps=4)
    assert executor.done
    check(factor, blocks)


@pytest.mark.parametrize(("num_columns", "index"), [(1, (3, 1)), (40, (2, 2))])
def test_a_damaged_tile_is_named_before_anything_is_written(
    index: tuple[int, int], num_columns: int, tmp_path: Path
) -> None:
    factor = lower_of(tmp_path)
    flip(tmp_path / "L" / factor.array.chunk_key(index))
    blocks = blocks_of(tmp_path, factor, num_columns)
    with pytest.raises(DamagedChunkError, match="crc32c") as caught:
        substitute("solve", factor, blocks, InProcessExecutor())
    assert caught.value.index == index
    assert not blocks[1].is_valid(index[0], 0)


# --- the diagonal of the inverse --------------------------------------------------------------------------------------


def factored(folder: Path, precision: Any = "float64", **parameters: Any) -> tuple[CholeskyFactor, np.ndarray]:
    """A factor on disk, and the diagonal of the inverse of its matrix."""
    alpha, tile_size = parameters.pop("alpha", 0.1), parameters.pop("tile_size", 64)
    dataset = rows(folder, **parameters)
    system = operator(dataset, alpha=alpha, tile_size=tile_size)
    work = Workspace(store=str(folder / "store"), executor=InProcessExecutor(), blas="test")
    factor = CholeskyFactor.prepare(system, work, precision=precision)
    return factor, np.diag(np.linalg.inv(dense(system, dataset)))


def again(factor: CholeskyFactor) -> tuple[np.ndarray, int]:
    """The diagonal once more, and how many panels were computed for it."""
    other = replace(factor, workspace=replace(factor.workspace, phases={}))
    return inverse_diagonal(other), other.workspace.phases["invert"].num_computed


@pytest.mark.parametrize(
    ("n", "tile_size", "columns"), [(1, 64, None), (250, 33, None), (250, 300, 64), (700, 256, 256)]
)
def test_the_diagonal_is_that_of_the_inverse(tmp_path: Path, n: int, tile_size: int, columns: int | None) -> None:
    factor, expected = factored(tmp_path, n=n, tile_size=tile_size, weights=n > 1)
    limit = None if columns is None else panel_bytes(factor.factor.grid, columns)
    np.testing.assert_allclose(inverse_diagonal(factor, memory_bytes=limit), expected, rtol=1e-11)


def test_a_float32_factor_gives_single_accuracy(tmp_path: Path) -> None:
    factor, expected = factored(tmp_path, "float32", alpha=1.0)
    assert 1e-9 < np.abs(inverse_diagonal(factor) / expected - 1).max() < 1e-4


def test_only_what_is_lost_or_damaged_is_computed_again(tmp_path: Path) -> None:
    factor, _ = factored(tmp_path, n=700, tile_size=256)
    first, location = inverse_diagonal(factor), Path(factor.factor.location)
    chunks = snapshot(location)
    assert np.array_equal(again(factor)[0], first)
    assert snapshot(location) == chunks
    delete(location / "inverse_diagonal/c/5/0")  # the second half of a panel
    found, count = again(factor)
    assert (found.tolist(), count) == (first.tolist(), 1)
    flip(location / "inverse_diagonal/c/2/0")
    flip(location / "c/2/1")
    assert np.array_equal(again(factor)[0], first)


def test_what_is_not_finite_is_blamed_on_its_tile_or_refused(tmp_path: Path) -> None:
    factor, expected = factored(tmp_path)
    for (i, j), value in (((2, 1), np.nan), ((1, 1), 1e-200)):  # the latter is finite, its inverse squared is not
        tile = np.array(factor.factor.read(i, j))
        tile[3, 3] = value
        factor.factor.write(i, j, tile)  # with a checksum that is right
        if np.isnan(value):
            np.testing.assert_allclose(inverse_diagonal(factor), expected, rtol=1e-11)
    for path in chunk_files(Path(factor.factor.location) / "inverse_diagonal"):
        delete(path)
    with pytest.raises(NumericalError, match="not finite and positive in rows 0 to 64"):
        inverse_diagonal(factor)
