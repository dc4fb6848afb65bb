"""The map of tiles: what is done, what runs, whatever the number of tiles."""

from __future__ import annotations

import pytest

from dkrr.jobs.runs.tilemap import MOST_CELLS, TileMap


def triangle(side: int) -> list[tuple[int, ...]]:
    return [(i, j) for j in range(side) for i in range(j, side)]


def test_each_tile_is_a_cell() -> None:
    tiles = TileMap()
    tiles.begin("factorise", [*triangle(4), (3, 3, 1)])
    tiles.finished((0, 0))
    tiles.finished((1, 0))
    tiles.running([(1, 1), (3, 3, 1), (9, 9)])
    found = tiles.to_dict()
    assert found == {
        "phase": "factorise", "side": 4, "cells": 4, "done": "9900000000", "running": [2, 9], "num_running": 2,
    }  # fmt: skip


def test_what_is_finished_does_not_run_any_more() -> None:
    tiles = TileMap()
    tiles.begin("gram", triangle(2))
    tiles.started((0, 0))
    tiles.finished((0, 0))
    tiles.finished((0, 0))  # a receipt that came twice
    tiles.running([(0, 0), (1, 0)])
    assert (tiles.to_dict() or {})["running"] == [1]
    assert (tiles.to_dict() or {})["done"] == "900"


def test_what_is_next_in_line_runs_when_nothing_was_heard() -> None:
    tiles = TileMap()
    tiles.begin("factorise", triangle(3))
    assert (tiles.to_dict(2) or {})["running"] == [0]  # everything waits for the first tile
    tiles.finished((0, 0))
    assert (tiles.to_dict(2) or {})["running"] == [1, 3]
    tiles.running([(2, 0)])
    tiles.finished((1, 0))
    assert (tiles.to_dict(2) or {})["running"] == [2, 3]  # (1, 1) is ready: its left neighbour is done
    assert (tiles.to_dict(1) or {})["num_running"] == 1
    tiles.begin("gram", triangle(3))
    assert (tiles.to_dict(4) or {})["num_running"] == 4


def test_a_part_of_a_sum_is_no_tile() -> None:
    tiles = TileMap()
    tiles.begin("factorise", [*triangle(3), (2, 2, 1)])
    tiles.finished((2, 2, 1))
    assert (tiles.to_dict() or {})["done"] == "000000"


@pytest.mark.parametrize("side", [MOST_CELLS, MOST_CELLS + 1, 200])
def test_the_map_is_bounded_and_counts_every_tile(side: int) -> None:
    tiles = TileMap()
    keys = triangle(side)
    tiles.begin("factorise", keys)
    missing = (side - 1, 0)
    for key in keys:
        if key != missing:
            tiles.finished(key)
    found = tiles.to_dict() or {}
    cells = found["cells"]
    assert cells <= MOST_CELLS
    assert len(found["done"]) == cells * (cells + 1) // 2
    place = cells * (cells - 1) // 2
    assert found["done"][place] != "9"  # one tile is missing: never shown as all
    assert set(found["done"][:place] + found["done"][place + 1 :]) == {"9"}
    tiles.finished(missing)
    assert set((tiles.to_dict() or {})["done"]) == {"9"}


def test_a_graph_that_is_no_triangle_has_no_map() -> None:
    tiles = TileMap()
    tiles.begin("factorise", triangle(3))
    tiles.begin("solve", [(0, 1), (1, 5)])
    assert tiles.to_dict() is None
    tiles.finished((0, 0))
    tiles.running([(0, 0)])
    assert tiles.to_dict() is None
    tiles.begin("gram", [])
    assert tiles.to_dict() is None
