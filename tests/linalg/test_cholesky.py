"""The tile factor against LAPACK's bar, its schedule, and what it does on resume, on damage and on bad matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import NotPositiveDefiniteError
from dkrr.linalg.cholesky import Split
from dkrr.linalg.direct import cholesky_nodes, factorise
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import chunk_files, flip, truncate
from tests.linalg.helpers import assembled, dense, factor_of, operator, rows, snapshot


@pytest.mark.parametrize("n", [1, 64, 65, 250])
@pytest.mark.parametrize(("dtype", "weights"), [("float64", False), ("float32", True)])
def test_factor_residual_is_below_the_bar_of_lapack(tmp_path: Path, n: int, dtype: str, weights: bool) -> None:
    dataset = rows(tmp_path, n=n, weights=weights and n > 1)
    system = operator(dataset)
    lower = assembled(factor_of(system, tmp_path / "L.zarr", dtype))
    a = dense(system, dataset)
    eps = np.finfo(dtype).eps
    assert not np.triu(lower, 1).any()
    assert np.linalg.norm(a - lower @ lower.T, 1) / (n * np.linalg.norm(a, 1) * eps) < 30


@pytest.mark.parametrize("row", [0, 63, 64, 249])
def test_the_failing_row_is_named_also_at_tile_borders(tmp_path: Path, row: int) -> None:
    dataset = rows(tmp_path, n=250)
    system = operator(dataset, alpha=0.0)
    gram = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
    rng = np.random.default_rng(0)
    a = np.eye(250) * 4 + 0.01 * (lambda m: m + m.T)(rng.standard_normal((250, 250)))
    a[row, row] = -1.5
    for i, j in system.grid.lower():
        gram.write(i, j, np.ascontiguousarray(a[system.grid.span(i), system.grid.span(j)]))
    given = replace(system, kernel=None, rows=None, gram=gram)
    with pytest.raises(NotPositiveDefiniteError, match=f"not positive definite at row {row}") as caught:
        factor_of(given, tmp_path / "L.zarr")
    error = caught.value
    schur = a[row, row] - (a[row, :row] @ np.linalg.solve(a[:row, :row], a[:row, row]) if row else 0)
    assert error.row == row
    assert error.pivot == pytest.approx(schur, rel=1e-8)
    factor_of(given.with_alpha(error.suggested_alpha), tmp_path / "again.zarr")


class Workers(InProcessExecutor):
    """Says that it runs several tasks at once, so that sums are split; stops before task ``limit``."""

    def __init__(self, limit: int | None = None) -> None:
        self.num_threads, self.limit = 3, limit

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        summary = super().run(phase, function, payload, nodes[: self.limit], progress)
        if self.limit is not None:
            raise KeyboardInterrupt
        return summary


def contents(folder: Path) -> dict[str, bytes]:
    return {key: value[0] for key, value in snapshot(folder).items()}


SPLITS = [None, Split(num_columns=4, num_last=2), Split(num_columns=40, num_last=1)]


@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize(("n", "dtype"), [(150, "float64"), (420, "float64"), (420, "float32")])
def test_split_sums_change_no_byte_and_leave_nothing(tmp_path: Path, n: int, split: Split | None, dtype: str) -> None:
    system = operator(rows(tmp_path, n=n))
    factor_of(system, tmp_path / "whole/L.zarr", dtype)
    factor = TileMatrix.create(tmp_path / "split/L.zarr", system.grid, dtype=dtype)
    summary = factorise(system, factor, Workers(), split=split)
    assert summary.num_computed == summary.num_tasks == system.grid.num_lower
    assert contents(tmp_path / "whole/L.zarr") == contents(tmp_path / "split/L.zarr")
    assert [path.name for path in (tmp_path / "split").iterdir()] == ["L.zarr"]


@pytest.mark.parametrize("damage", [flip, truncate])
@pytest.mark.parametrize("num_last", [1, 3])
def test_what_an_attempt_left_is_used_unless_it_is_damaged_or_of_another_split(
    tmp_path: Path, damage: Callable[[Path], None], num_last: int, caplog: pytest.LogCaptureFixture
) -> None:
    system = operator(rows(tmp_path, n=420))
    factor_of(system, tmp_path / "whole/L.zarr")
    factor = TileMatrix.create(tmp_path / "L.zarr", system.grid, dtype="float64")
    with pytest.raises(KeyboardInterrupt):
        factorise(system, factor, Workers(limit=20), split=Split(num_columns=40, num_last=3))
    left = chunk_files(tmp_path / "L-sums.zarr")
    assert left
    damage(left[0])
    factorise(system, factor, Workers(), split=Split(num_columns=40, num_last=num_last))
    assert contents(tmp_path / "L.zarr") == contents(tmp_path / "whole/L.zarr")
    assert ("again" in caplog.text) == (num_last == 3 and damage is flip)
    assert not (tmp_path / "L-sums.zarr").exists()


@pytest.mark.parametrize("split", [Split(), Split(num_columns=3, num_last=4), Split(num_columns=40), Split(new_from=5)])
@pytest.mark.parametrize("num_finished", [0, 20, 54])
def test_tasks_wait_for_what_they_read(split: Split, num_finished: int) -> None:
    """Every task comes behind all tiles that it reads, by way of its dependencies."""
    grid, reached = TileGrid(78, 10), dict[tuple[int, ...], set[tuple[int, ...]]]()
    for node in cholesky_nodes(grid, split, num_finished):
        reached[node.key] = set(node.dependencies).union(*(reached[key] for key in node.dependencies))
        i, j, *part = node.key
        terms = split.num_first(grid, i, j) if part else j
        needed = {(row, k) for k in range(terms) for row in (i, j)} | ({(j, j)} if i != j and not part else set())
        assert needed <= reached[node.key], node
