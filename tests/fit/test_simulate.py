"""The simulated schedule: known figures, bounds that every schedule keeps, and what is chosen by it."""

from __future__ import annotations

import pytest

from dkrr.fit.schedule import TileSeconds, choose_split, choose_tiles, nominal_machine, simulate
from dkrr.linalg.cholesky import Split
from dkrr.linalg.direct import cholesky_nodes
from dkrr.linalg.workspace import choose_tile_size, task_bytes
from dkrr.tiles import TileGrid

# tiles for which only arithmetic counts, a product taking a second
FLOPS = TileSeconds(gemm=1.0, syrk=0.5, trsm=0.5, potrf=1 / 6, make=0.0, read=0.0, write=0.0, task=0.0)
WAY = ("float64", "on_the_fly")


def grid_of(side: int, b: int = 128) -> TileGrid:
    return TileGrid(side * b, b)


def longest_path(grid: TileGrid, split: Split, seconds: TileSeconds) -> float:
    """Of the graph, one node after the other."""
    ends: dict[tuple[int, ...], float] = {}
    for node in cholesky_nodes(grid, split):
        began = max((ends[key] for key in node.dependencies), default=0.0)
        ends[node.key] = began + seconds.of_task(node.key, grid, split)
    return max(ends.values())


@pytest.mark.parametrize(
    ("side", "workers", "num_last", "without", "with_it"),
    [(10, 2, 1, 0.92, 0.98), (20, 32, 2, 0.15, 0.52), (122, 100, 4, 0.27, 0.92)],
)
def test_figures_of_the_design(side: int, workers: int, num_last: int, without: float, with_it: float) -> None:
    grid, split = grid_of(side, 2048), Split(num_columns=side, num_last=num_last)
    assert simulate(grid, Split(), workers, FLOPS).efficiency == pytest.approx(without, abs=0.02)
    assert simulate(grid, split, workers, FLOPS).efficiency == pytest.approx(with_it, abs=0.02)


def test_a_schedule_keeps_its_bounds() -> None:
    grid, split = grid_of(15, 2048), Split(num_columns=20, num_last=2)
    alone, many = (simulate(grid, split, workers, FLOPS, window=10**6) for workers in (1, 500))
    path = longest_path(grid, split, FLOPS)
    assert alone.seconds == pytest.approx(alone.work_seconds)
    assert many.seconds == pytest.approx(path)
    three = simulate(grid, split, 3, FLOPS, window=10**6)
    assert max(path, three.work_seconds / 3) * (1 - 1e-12) <= three.seconds <= three.work_seconds / 3 + path


@pytest.mark.parametrize(("n", "b", "workers"), [(20_000, 1024, 32), (8_000, 1024, 6)])
def test_a_split_is_used_where_it_pays(n: int, b: int, workers: int) -> None:
    grid, split = TileGrid(n, b), choose_split(n, b, workers, *WAY)
    seconds = TileSeconds.of(nominal_machine(workers), b, *WAY)
    chosen, plain = simulate(grid, split, workers, seconds), simulate(grid, Split(), workers, seconds)
    assert split.num_columns
    assert chosen.seconds < 0.99 * plain.seconds


def test_tiles_for_many_workers() -> None:
    n, workers = 30_000, 32
    usual = choose_tile_size(n, 10, None, 8, workers)
    b = choose_tiles(n, 10, None, workers, *WAY, usual)

    def seconds(edge: int) -> float:
        tile = TileSeconds.of(nominal_machine(workers), edge, *WAY)
        return simulate(TileGrid(n, edge), choose_split(n, edge, workers, *WAY), workers, tile).seconds

    assert seconds(b) <= seconds(usual)
    assert seconds(b) < 0.8 * seconds(2048)
    limit = int(task_bytes(384, 10) / 0.8)
    assert choose_tiles(n, 10, limit, workers, *WAY, 256) <= 384


def test_the_table_of_the_readme_has_a_row_for_each_number_of_workers() -> None:
    from tests.benchmarks.schedule import table

    lines = table((20_000,), (8, 16))
    assert len(lines) == 4
    assert lines[2].startswith("| 20,000 | 8 |")
    assert {line.count("|") for line in lines} == {9}
