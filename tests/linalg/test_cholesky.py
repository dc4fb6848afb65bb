"""The tile factor against LAPACK's bar, its schedule, and what it does on resume, on damage and on bad matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import NotPositiveDefiniteError
from dkrr.linalg.factor.cholesky import CholeskyTask, factor_tile, factorise
from dkrr.linalg.factor.schedule import Split, cholesky_nodes
from dkrr.linalg.gram import build_gram
from dkrr.tiles import TileGrid, TileMatrix
from tests.linalg.helpers import assembled, dense, operator, rows, snapshot


def factor_of(system, folder: Path, dtype: str = "float64") -> TileMatrix:
    factor = TileMatrix.create(folder / "L.zarr", system.grid, dtype=dtype)
    factorise(system, factor, InProcessExecutor())
    return factor


@pytest.mark.parametrize("n", [1, 63, 64, 65, 250])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("weights", [False, True])
def test_factor_residual_is_below_the_bar_of_lapack(tmp_path: Path, n: int, dtype: str, weights: bool) -> None:
    dataset = rows(tmp_path, n=n, weights=weights and n > 1)
    system = operator(dataset)
    lower = assembled(factor_of(system, tmp_path, dtype))
    a = dense(system, dataset)
    eps = np.finfo(dtype).eps
    assert not np.triu(lower, 1).any()
    assert np.linalg.norm(a - lower @ lower.T, 1) / (n * np.linalg.norm(a, 1) * eps) < 30


def test_the_tile_size_does_not_matter(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    factors = []
    for b in (40, 64, 250, 300):
        folder = tmp_path / str(b)
        factors.append(assembled(factor_of(operator(dataset, tile_size=b), folder)))
    for other in factors[1:]:
        np.testing.assert_allclose(other, factors[0], atol=1e-12)


def test_a_stored_gram_matrix_gives_the_same_factor(tmp_path: Path) -> None:
    from dataclasses import replace

    dataset = rows(tmp_path, weights=True)
    system = operator(dataset)
    gram = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
    summary = build_gram(system, gram, InProcessExecutor())
    assert summary.num_computed == system.grid.num_lower
    stored = factor_of(replace(system, gram=gram), tmp_path / "stored")
    fresh = factor_of(system, tmp_path / "fresh")
    np.testing.assert_array_equal(assembled(stored), assembled(fresh))


@pytest.mark.parametrize("row", [0, 63, 64, 100, 127, 249])
def test_the_failing_row_is_named_also_at_tile_borders(tmp_path: Path, row: int) -> None:
    dataset = rows(tmp_path, n=250)
    system = operator(dataset, alpha=0.0)
    gram = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
    rng = np.random.default_rng(0)
    a = np.eye(250) * 4 + 0.01 * (lambda m: m + m.T)(rng.standard_normal((250, 250)))
    a[row, row] = -1.5
    for i, j in system.grid.lower():
        gram.write(i, j, np.ascontiguousarray(a[system.grid.span(i), system.grid.span(j)]))
    from dataclasses import replace

    given = replace(system, kernel=None, rows=None, gram=gram)
    with pytest.raises(NotPositiveDefiniteError, match=f"not positive definite at row {row}") as caught:
        factor_of(given, tmp_path)
    error = caught.value
    schur = a[row, row] - (a[row, :row] @ np.linalg.solve(a[:row, :row], a[:row, row]) if row else 0)
    assert error.row == row
    assert error.pivot == pytest.approx(schur, rel=1e-8)
    factor_of(given.with_alpha(error.suggested_alpha), tmp_path / "again")


def test_an_indefinite_kernel_has_no_factor(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    with pytest.raises(NotPositiveDefiniteError, match="indefinite kernel"):
        factor_of(operator(dataset, kernel="sigmoid", gamma=2.0, alpha=1e-6), tmp_path)


def test_resume_computes_only_what_is_missing_and_gives_the_same_bytes(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset)
    factor = factor_of(system, tmp_path)
    before = snapshot(tmp_path / "L.zarr")
    # a hole in the middle of a row whose later tile is kept
    factor.delete(3, 1)
    factor.delete(2, 2)
    summary = factorise(system, factor, InProcessExecutor())
    assert summary.num_computed == 2
    after = snapshot(tmp_path / "L.zarr")
    assert {key: value[0] for key, value in after.items()} == {key: value[0] for key, value in before.items()}
    rewritten = {key for key in after if after[key][1] != before[key][1]}
    assert rewritten == {"c/3/1", "c/2/2"}


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_a_damaged_tile_that_is_needed_is_computed_again(tmp_path: Path, damage: str) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset)
    factor = factor_of(system, tmp_path)
    before = snapshot(tmp_path / "L.zarr")
    path = tmp_path / "L.zarr/c/2/1"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-1])
    factor.delete(3, 2)  # its recomputation reads (2, 1)
    factorise(system, factor, InProcessExecutor())
    after = snapshot(tmp_path / "L.zarr")
    assert {key: value[0] for key, value in after.items()} == {key: value[0] for key, value in before.items()}


class ManyThreads(InProcessExecutor):
    """Says that it runs several tasks at once, so that the last columns are split."""

    num_threads = 3


def contents(folder: Path) -> dict[str, str]:
    return {key: value[0] for key, value in snapshot(folder).items()}


SPLITS = [
    None,
    Split(),
    Split(num_columns=4),
    Split(num_columns=4, num_last=2),
    Split(num_columns=40, num_last=2),
    Split(num_columns=40, num_last=3),
    Split(num_columns=40, num_last=9),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("n", [150, 250, 420])
def test_partial_sums_change_no_byte_and_leave_nothing(tmp_path: Path, n: int, split: Split | None, dtype: str) -> None:
    dataset = rows(tmp_path, n=n)
    system = operator(dataset)
    factor_of(system, tmp_path / "whole", dtype)
    factor = TileMatrix.create(tmp_path / "split/L.zarr", system.grid, dtype=dtype)
    summary = factorise(system, factor, ManyThreads(), split=split)
    assert summary.num_computed == summary.num_tasks == system.grid.num_lower
    assert contents(tmp_path / "whole/L.zarr") == contents(tmp_path / "split/L.zarr")
    assert [path.name for path in (tmp_path / "split").iterdir()] == ["L.zarr"]


def test_sums_of_another_split_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = rows(tmp_path, n=420)
    system = operator(dataset)
    factor = factor_of(system, tmp_path)
    before = contents(tmp_path / "L.zarr")
    for row in range(4, 7):
        factor.delete(6, row)
    wrong = Split(num_columns=7, num_last=3)
    sums = TileMatrix.create(
        tmp_path / "L-sums.zarr", system.grid, dtype="float64", attributes={"num_last": wrong.num_last}
    )
    for key in ((6, 5), (6, 6)):
        assert factor_tile(CholeskyTask(system, factor, sums, wrong), *key, 1)
        assert sums.is_valid(*key)
    factorise(system, factor, InProcessExecutor(), split=Split(num_columns=7, num_last=1))
    assert contents(tmp_path / "L.zarr") == before
    assert "again" not in caplog.text  # a wrong tile would be found and repaired
    assert not (tmp_path / "L-sums.zarr").exists()


def test_a_damaged_partial_sum_is_computed_again(tmp_path: Path) -> None:
    dataset = rows(tmp_path, n=420)
    system = operator(dataset)
    factor = factor_of(system, tmp_path)
    before = snapshot(tmp_path / "L.zarr")
    factor.delete(6, 6)
    sums = TileMatrix.create(tmp_path / "L-sums.zarr", system.grid, dtype="float64", attributes={"num_last": 1})
    sums.write(6, 6, np.zeros(system.grid.shape(6, 6)))
    path = tmp_path / "L-sums.zarr/c/6/6"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    factorise(system, factor, ManyThreads())
    after = snapshot(tmp_path / "L.zarr")
    assert {key: value[0] for key, value in after.items()} == {key: value[0] for key, value in before.items()}


@pytest.mark.parametrize("num_columns", [0, 1, 3, 40])
@pytest.mark.parametrize("num_last", [1, 2, 4])
def test_split_columns_wait_for_what_they_read(num_columns: int, num_last: int) -> None:
    grid, split = TileGrid(75, 10), Split(num_columns=num_columns, num_last=num_last)
    nodes = {node.key: node for node in cholesky_nodes(grid, split)}
    position = {key: rank for rank, key in enumerate(nodes)}

    def before(key: tuple[int, ...]) -> set[tuple[int, ...]]:
        found: set[tuple[int, ...]] = set()
        for dependency in nodes[key].dependencies:
            assert position[dependency] < position[key]
            found |= {dependency} | before(dependency)
        return found

    for key in nodes:
        i, j = key[:2]
        last = j - num_last if len(key) == 3 else j
        needed = {(row, k) for k in range(last) for row in (i, j)}
        if len(key) == 2 and i != j:
            needed.add((j, j))
        assert needed <= before(key)
    flops = sum(node.flops for node in nodes.values())
    assert flops == pytest.approx(sum(node.flops for node in cholesky_nodes(grid)))
