"""Sweeps: against dense solves, and the same bits however they are cut and whoever runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dkrr.engine.cluster import start_local
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import DamagedChunkError
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.factor import triangular
from dkrr.linalg.factor.triangular import SweepsTask, SweepTask, substitute, sweep_nodes, sweeps
from dkrr.tiles import TileGrid, TileMatrix

N, TILE = 310, 48  # seven tiles a side, the last one ragged


def factor_of(folder: Path, n: int = N, tile_size: int = TILE, dtype: str = "float64") -> TileMatrix:
    """A well-conditioned triangular matrix in tiles."""
    rng = np.random.default_rng(1)
    lower = np.tril(rng.standard_normal((n, n)) / n) + np.diag(rng.uniform(1, 2, n))
    factor = TileMatrix.create(str(folder / f"L-{dtype}"), TileGrid(n, tile_size), dtype=dtype)
    for i, j in factor.grid.lower():
        factor.write(i, j, np.ascontiguousarray(lower[factor.grid.span(i), factor.grid.span(j)], dtype=dtype))
    return factor


def dense_of(factor: TileMatrix) -> np.ndarray:
    full = np.zeros((factor.grid.n,) * 2)
    for i, j in factor.grid.lower():
        full[factor.grid.span(i), factor.grid.span(j)] = factor.read(i, j)
    return full


def both_ways(folder: Path, factor: TileMatrix, num_columns: int) -> tuple[SweepTask, SweepTask]:
    """Forward and backward, from random right-hand sides."""
    values = np.random.default_rng(0).standard_normal((factor.grid.n, num_columns))
    store = str(folder)
    rhs, z, u = (BlockColumns.create(store, name, factor.grid, num_columns, factor.array.dtype) for name in "rzu")
    for i, panel in rhs.blocks():
        rhs.write(i, panel, values[factor.grid.span(i), rhs.columns(panel)].astype(factor.dtype))
    return SweepTask(factor, rhs, z, "forward"), SweepTask(factor, z, u, "backward")


def values_of(blocks: BlockColumns) -> np.ndarray:
    return np.vstack([blocks.read_rows(i) for i in range(blocks.grid.num_tiles)])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("num_columns", [1, 3, 16, 17, 300])
@pytest.mark.parametrize(("n", "tile_size"), [(N, TILE), (1, 1), (48, 48), (49, 48), (300, 290)])
def test_sweeps_match_a_dense_solve(n: int, tile_size: int, num_columns: int, dtype: str, tmp_path: Path) -> None:
    factor = factor_of(tmp_path, n, tile_size, dtype)
    forward, backward = both_ways(tmp_path, factor, num_columns)
    sweeps("solve", (forward, backward), InProcessExecutor())
    lower = dense_of(factor)
    z = np.linalg.solve(lower, values_of(forward.source).astype(np.float64))
    tolerance = 1e-12 if dtype == "float64" else 1e-4
    np.testing.assert_allclose(values_of(forward.result), z, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(values_of(backward.result), np.linalg.solve(lower.T, z), rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module")
def executors() -> Iterator[dict[str, Executor]]:
    with start_local(workers=1) as one, start_local(workers=2) as two:
        yield {"in-process": InProcessExecutor(), "one worker": one, "two workers": two}


@pytest.mark.parametrize("num_columns", [1, 300])
def test_neither_steps_nor_workers_change_a_bit(
    num_columns: int, executors: dict[str, Executor], tmp_path: Path
) -> None:
    factor = factor_of(tmp_path, dtype="float32")
    found = []
    for number, (num_steps, executor) in enumerate(
        (steps, executor) for executor in executors.values() for steps in (1, 2, 3, 5, 7)
    ):
        (folder := tmp_path / str(number)).mkdir()
        forward, backward = both_ways(folder, factor, num_columns)
        sweeps("solve", (forward, backward), executor, num_steps=num_steps)
        found.append((values_of(forward.result), values_of(backward.result)))
        assert not [path for path in folder.rglob("*-sums-*/**/*") if path.is_file()], "sums stay behind"
    for z, u in found[1:]:
        assert np.array_equal(z, found[0][0])
        assert np.array_equal(u, found[0][1])


class Counting(InProcessExecutor):
    """Stops before task ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        super().run(phase, function, payload, nodes[: self.limit], progress)
        raise KeyboardInterrupt


@pytest.mark.parametrize("other_steps", [4, 7, 1])
def test_an_interrupted_sweep_goes_on_where_it_stopped(other_steps: int, tmp_path: Path) -> None:
    factor = factor_of(tmp_path)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = both_ways(tmp_path / "whole", factor, 2)
    sweeps("solve", whole, InProcessExecutor(), num_steps=4)
    cut = both_ways(tmp_path / "cut", factor, 2)
    with pytest.raises(KeyboardInterrupt):
        sweeps("solve", cut, Counting(5), num_steps=4)
    done = [i for i, _ in cut[0].result.blocks() if cut[0].result.is_valid(i, 0)]
    assert 0 < len(done) < factor.grid.num_tiles
    with mock.patch.object(triangular._Chain, "finish", autospec=True, side_effect=triangular._Chain.finish) as finish:
        sweeps("solve", cut, InProcessExecutor(), num_steps=other_steps)
    assert finish.call_count == 2 * factor.grid.num_tiles - len(done)
    assert np.array_equal(values_of(cut[1].result), values_of(whole[1].result))
    again = sweeps("solve", cut, InProcessExecutor(), num_steps=other_steps)
    assert again.num_computed == 0


@pytest.mark.parametrize("damage", ["deleted", "flipped"])
def test_a_lost_sum_is_computed_again_by_its_reader(damage: str, tmp_path: Path) -> None:
    factor = factor_of(tmp_path)
    forward, _ = both_ways(tmp_path, factor, 2)
    task = SweepsTask((forward,), 4)
    for node in sweep_nodes(task):
        if node.key == (0, 0, 3, 3):
            sums = [path for path in (tmp_path / "z-sums-4").rglob("*") if path.is_file()]
            assert len(sums) > 4
            for path in sums:
                if damage == "deleted":
                    path.unlink()
                else:
                    content = bytearray(path.read_bytes())
                    content[7] ^= 1
                    path.write_bytes(content)
        substitute(task, *node.key)
    expected = np.linalg.solve(dense_of(factor), values_of(forward.source))
    np.testing.assert_allclose(values_of(forward.result), expected, rtol=1e-12)


@pytest.mark.parametrize("num_columns", [1, 40])
@pytest.mark.parametrize("index", [(3, 1), (2, 2)])
def test_a_damaged_tile_is_named_before_anything_is_written(
    index: tuple[int, int], num_columns: int, tmp_path: Path
) -> None:
    factor = factor_of(tmp_path)
    path = tmp_path / "L-float64" / factor.array.chunk_key(index)
    content = bytearray(path.read_bytes())
    content[8 * (5 * TILE + 2) + 7] ^= 0x40  # an exponent
    path.write_bytes(content)
    forward, _ = both_ways(tmp_path, factor, num_columns)
    with pytest.raises(DamagedChunkError, match="crc32c") as caught:
        sweeps("solve", (forward,), InProcessExecutor())
    assert caught.value.index == index
    assert not forward.result.is_valid(index[0], 0)
