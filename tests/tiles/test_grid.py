from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dkrr.errors import ParameterError
from dkrr.tiles import TileGrid


@given(n=st.integers(1, 500), b=st.integers(1, 520))
def test_spans_cover_every_row_once(n: int, b: int) -> None:
    grid = TileGrid(n, b)
    rows = [row for i in range(grid.num_tiles) for row in range(n)[grid.span(i)]]
    assert rows == list(range(n))
    assert sum(grid.rows(i) for i in range(grid.num_tiles)) == n
    assert all(grid.rows(i) == b for i in range(grid.num_tiles - 1))


@given(n=st.integers(1, 60), b=st.integers(1, 20))
def test_lower_tiles_follow_their_dependencies(n: int, b: int) -> None:
    grid = TileGrid(n, b)
    order = list(grid.lower())
    assert len(order) == len(set(order)) == grid.num_lower
    position = {key: rank for rank, key in enumerate(order)}
    for i, j in order:
        assert i >= j
        if j:
            assert position[i, j - 1] < position[i, j]
        assert position[j, j] <= position[i, j]


@pytest.mark.parametrize(("n", "b"), [(0, 1), (5, 0), (5, 16_385), (-1, 4)])
def test_impossible_grids(n: int, b: int) -> None:
    with pytest.raises(ParameterError, match="expected"):
        TileGrid(n, b)


def test_row_block_out_of_range() -> None:
    with pytest.raises(IndexError):
        TileGrid(10, 4).span(3)
