"""The simulated schedule: known figures, bounds that every schedule keeps, and what is chosen by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dkrr.errors import ParameterError
from dkrr.fit.schedule import TileSeconds, choose_split, choose_tiles, nominal_machine, simulate
from dkrr.linalg.factor.schedule import Split, cholesky_nodes, usual_split
from dkrr.linalg.sizes import choose_tile_size, task_bytes
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


@pytest.mark.parametrize("split", [Split(), Split(num_columns=3), Split(num_columns=20, num_last=2)])
@pytest.mark.parametrize("side", [1, 2, 7, 15])
@pytest.mark.parametrize("workers", [1, 3, 500])
def test_no_schedule_is_faster_than_its_bounds_or_slower_than_the_bound_of_graham(
    side: int, workers: int, split: Split
) -> None:
    grid = grid_of(side, 2048)
    found = simulate(grid, split, workers, FLOPS, window=10**6)
    path, work = longest_path(grid, split, FLOPS), found.work_seconds
    assert found.seconds >= max(path, work / workers) * (1 - 1e-12)
    assert found.seconds <= work / workers + (1 - 1 / workers) * path + 1e-9
    if workers == 1:
        assert found.seconds == pytest.approx(work)
        assert found.efficiency == pytest.approx(1.0)
    if workers == 500:
        assert found.seconds == pytest.approx(path)


def test_work_is_that_of_the_factorisation() -> None:
    side = 30
    found = simulate(grid_of(side, 2048), Split(), 4, FLOPS)
    assert found.work_seconds == pytest.approx(side**3 / 6, rel=1e-9)  # n^3 / 3 flops, 2 b^3 a second
    assert found.num_tasks == found.num_messages == side * (side + 1) // 2


def test_a_narrow_window_costs_time() -> None:
    grid, split = grid_of(20, 2048), Split(num_columns=20, num_last=2)
    seconds = [simulate(grid, split, 8, FLOPS, window=size).seconds for size in (1, 8, 32, 10**6)]
    assert all(wide <= narrow for narrow, wide in pairwise(seconds))
    assert seconds[0] == pytest.approx(simulate(grid, split, 1, FLOPS, window=1).seconds)
    assert seconds[2] < 1.05 * seconds[3]


def test_a_ragged_tile_takes_less_and_a_split_takes_a_tile_written_and_read() -> None:
    full, ragged = TileGrid(1024, 256), TileGrid(900, 256)
    assert simulate(ragged, Split(), 1, FLOPS).seconds == pytest.approx((900 / 256) ** 3 / 6, rel=1e-9)
    assert simulate(full, Split(), 1, FLOPS).seconds == pytest.approx(4**3 / 6, rel=1e-9)
    seconds = replace(FLOPS, make=3.0, read=0.5, write=0.25, task=0.125)
    split = Split(num_columns=1, num_last=1)
    whole = seconds.of_task((3, 3), full, Split())
    parts = seconds.of_task((3, 3), full, split) + seconds.of_task((3, 3, 1), full, split)
    assert parts == pytest.approx(whole + seconds.read + seconds.write + seconds.task)


def test_rates_become_seconds() -> None:
    machine = nominal_machine(4)
    seconds = TileSeconds.of(machine, 1000, "float64", "on_the_fly")
    assert seconds.gemm == pytest.approx(2e9 / 60e9)
    assert seconds.make == pytest.approx(5e-3)
    assert seconds.read == pytest.approx(8e6 / 5e9)
    assert seconds.syrk > seconds.gemm / 2
    single = TileSeconds.of(machine, 1000, "mixed", "stored")
    assert single.gemm == pytest.approx(2e9 / 125e9)
    assert single.read == pytest.approx(seconds.read / 2)
    assert seconds.scaled(2).gemm == pytest.approx(2 * seconds.gemm)


def test_a_few_workers_keep_what_was_measured() -> None:
    for workers in (1, 2, 4):
        assert choose_split(20_480, 2048, workers, *WAY) == usual_split(10, workers)
        assert choose_tiles(20_480, 10, None, workers, *WAY, 2048) == 2048
    assert not choose_split(20_480, 2048, 1, *WAY).num_columns


@pytest.mark.parametrize(("n", "b", "workers"), [(20_000, 1024, 32), (50_000, 1024, 8), (8_000, 1024, 6)])
def test_a_split_is_used_where_it_pays(n: int, b: int, workers: int) -> None:
    grid, split = TileGrid(n, b), choose_split(n, b, workers, *WAY)
    seconds = TileSeconds.of(nominal_machine(workers), b, *WAY)
    chosen, plain = simulate(grid, split, workers, seconds), simulate(grid, Split(), workers, seconds)
    assert split.num_columns
    assert chosen.seconds < 0.99 * plain.seconds
    for num_last in (1, 2, 4):
        other = simulate(grid, Split(num_columns=split.num_columns, num_last=num_last), workers, seconds)
        assert chosen.seconds <= 1.001 * other.seconds


def test_a_split_is_not_used_where_it_does_not_pay() -> None:
    assert choose_split(2_000, 1024, 32, *WAY) == Split()  # two tiles a side
    assert choose_split(1_000, 1024, 32, *WAY) == Split()


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


@pytest.mark.parametrize("values", [{"num_columns": -1}, {"num_columns": 3, "num_last": 0}])
def test_a_split_that_makes_no_sense_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ParameterError, match="split"):
        Split(**values)


def test_the_table_of_the_readme_has_a_row_for_each_number_of_workers() -> None:
    from tests.benchmarks.schedule import table

    lines = table((20_000,), (8, 16))
    assert len(lines) == 4
    assert lines[2].startswith("| 20,000 | 8 |")
    assert {line.count("|") for line in lines} == {9}
