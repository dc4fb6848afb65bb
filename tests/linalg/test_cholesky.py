"""The tile factor against LAPACK's bar, its schedule, and what it does on resume, on damage and on bad matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import DaskExecutor, InProcessExecutor
from dkrr.errors import NotPositiveDefiniteError, NumericalError
from dkrr.linalg import triangular
from dkrr.linalg.direct import CholeskyFactor, Split, cholesky_nodes, factorise
from dkrr.linalg.operators import BlockColumns
from dkrr.linalg.triangular import inverse_diagonal, panel_bytes, substitute
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import Spoiling, chunk_files, delete, flip, truncate
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
    summary = factorise(system, factor, Workspace("", Workers(), split=split))
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
        factorise(system, factor, Workspace("", Workers(limit=20), split=Split(num_columns=40, num_last=3)))
    left = chunk_files(tmp_path / "L-sums.zarr")
    assert left
    damage(left[0])
    factorise(system, factor, Workspace("", Workers(), split=Split(num_columns=40, num_last=num_last)))
    assert contents(tmp_path / "L.zarr") == contents(tmp_path / "whole/L.zarr")
    assert ("again" in caplog.text) == (num_last == 3 and damage is flip)
    assert not (tmp_path / "L-sums.zarr").exists()


@pytest.mark.parametrize("split", [Split(), Split(num_columns=3, num_last=4), Split(num_columns=40)])
@pytest.mark.parametrize("num_finished", [0, 20, 54])
def test_tasks_wait_for_what_they_read(split: Split, num_finished: int) -> None:
    """Every task comes behind all tiles that it reads, by way of its dependencies."""
    grid, reached = TileGrid(78, 10), dict[tuple[int, ...], set[tuple[int, ...]]]()
    for node in cholesky_nodes(grid, split, num_finished):
        reached[node.key] = set(node.dependencies).union(*(reached[key] for key in node.dependencies))
        i, j, *part = node.key
        terms = split.num_first(grid, j) if part else j
        needed = {(row, k) for k in range(terms) for row in (i, j)} | ({(j, j)} if i != j and not part else set())
        assert needed <= reached[node.key], node


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
    substitute("solve", factor, blocks, Workspace("", InProcessExecutor()), {})
    check(factor, blocks)


@pytest.mark.parametrize("num_columns", [1, 300])
def test_neither_steps_nor_workers_change_a_bit(
    num_columns: int, cluster_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    factor, found = lower_of(tmp_path, dtype="float32"), []
    executors = InProcessExecutor(), DaskExecutor(cluster_client)
    for number, (num_steps, executor) in enumerate((steps, each) for each in executors for steps in (1, 3, 7)):
        (folder := tmp_path / str(number)).mkdir()
        blocks = blocks_of(folder, factor, num_columns)
        monkeypatch.setattr(triangular, "choose_num_steps", lambda *_, number=num_steps: number)
        substitute("solve", factor, blocks, Workspace("", executor), {})
        found.append(blocks[2].whole())
        assert not list(folder.rglob("*-sums-*")), "sums stay behind"
    assert all(np.array_equal(u, found[0]) for u in found[1:])


@pytest.mark.parametrize("damage", [delete, flip])
def test_a_lost_sum_is_computed_again_by_its_reader(
    damage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triangular, "choose_num_steps", lambda *_: 4)
    factor = lower_of(tmp_path)
    blocks = blocks_of(tmp_path, factor, 2)

    def spoil() -> None:
        for path in chunk_files(tmp_path / "z-sums-4"):
            damage(path)

    executor = Spoiling("solve", (0, 0, 3, 3), spoil)
    substitute("solve", factor, blocks, Workspace("", executor), {})
    assert executor.done
    check(factor, blocks)


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
