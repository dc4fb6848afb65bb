"""The diagonal of the inverse through tiles against a dense inverse, its resume, and its repairs."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import MemoryBudgetError, NumericalError
from dkrr.linalg.direct import CholeskyFactor, CholeskySolver
from dkrr.linalg.triangular import inverse_diagonal, panel_bytes, panel_width
from dkrr.linalg.workspace import Workspace
from tests.faults import failing_at, flip
from tests.linalg.helpers import dense, operator, rows, snapshot


def factored(folder: Path, precision: Any = "float64", executor: Any = None, **parameters: Any) -> tuple[Any, Any]:
    """A factor on disk, and its matrix."""
    alpha, tile_size = parameters.pop("alpha", 0.1), parameters.pop("tile_size", 64)
    dataset = rows(folder, **parameters)
    system = operator(dataset, alpha=alpha, tile_size=tile_size)
    work = Workspace(store=str(folder / "store"), executor=executor or InProcessExecutor(), blas="test")
    return CholeskySolver(precision=precision).prepare(system, work), dense(system, dataset)


def again(factor: CholeskyFactor) -> CholeskyFactor:
    """The same factor for another phase of figures."""
    return replace(factor, workspace=replace(factor.workspace, phases={}))


@pytest.mark.parametrize(("n", "tile_size"), [(1, 64), (65, 64), (250, 33), (250, 128), (250, 300)])
def test_the_diagonal_is_that_of_the_inverse(tmp_path: Path, n: int, tile_size: int) -> None:
    factor, matrix = factored(tmp_path, n=n, tile_size=tile_size, weights=n > 1)
    expected = np.diag(np.linalg.inv(matrix))
    np.testing.assert_allclose(inverse_diagonal(factor), expected, rtol=1e-11)


@pytest.mark.parametrize("columns", [64, 256])
def test_the_width_of_a_panel_does_not_matter(tmp_path: Path, columns: int) -> None:
    factor, matrix = factored(tmp_path, n=700, tile_size=256)
    limit = panel_bytes(factor.factor.grid, columns)
    assert panel_width(factor.factor.grid, 8, 1, limit) == min(columns, 128)
    found = inverse_diagonal(factor, memory_bytes=limit)
    np.testing.assert_allclose(found, np.diag(np.linalg.inv(matrix)), rtol=1e-11)


def test_a_float32_factor_gives_single_accuracy(tmp_path: Path) -> None:
    factor, matrix = factored(tmp_path, "float32", alpha=1.0)
    error = inverse_diagonal(factor) / np.diag(np.linalg.inv(matrix)) - 1
    assert 1e-9 < np.abs(error).max() < 1e-4


def test_on_workers(tmp_path: Path, cluster_client: Any) -> None:
    factor, matrix = factored(tmp_path, executor=checked_executor(cluster_client), n=400)
    np.testing.assert_allclose(inverse_diagonal(factor), np.diag(np.linalg.inv(matrix)), rtol=1e-11)
    assert factor.workspace.phases["invert"].num_computed > 2


def test_what_is_there_is_not_computed_again(tmp_path: Path) -> None:
    factor, _ = factored(tmp_path, n=700, tile_size=256)
    first = inverse_diagonal(factor)
    chunks = snapshot(Path(factor.factor.location))
    other = again(factor)
    np.testing.assert_array_equal(inverse_diagonal(other), first)
    assert other.workspace.phases["invert"].num_computed == 0
    assert snapshot(Path(factor.factor.location)) == chunks
    (Path(factor.factor.location) / "inverse_diagonal/c/5/0").unlink()  # the second half of a panel
    other = again(factor)
    np.testing.assert_array_equal(inverse_diagonal(other), first)
    assert other.workspace.phases["invert"].num_computed == 1


def test_damaged_tiles_and_sums_are_computed_again(tmp_path: Path) -> None:
    factor, _ = factored(tmp_path)
    first = inverse_diagonal(factor)
    flip(Path(factor.factor.location) / "inverse_diagonal/c/2/0")
    flip(Path(factor.factor.location) / "c/2/1")
    np.testing.assert_array_equal(inverse_diagonal(again(factor)), first)


def test_what_is_not_finite_is_blamed_on_its_tile_or_refused(tmp_path: Path) -> None:
    factor, matrix = factored(tmp_path)
    tile = np.array(factor.factor.read(2, 1))
    tile[3, 4] = np.nan
    factor.factor.write(2, 1, tile)  # with a checksum that is right
    np.testing.assert_allclose(inverse_diagonal(factor), np.diag(np.linalg.inv(matrix)), rtol=1e-11)
    (tmp_path / "other").mkdir()
    factor, _ = factored(tmp_path / "other")
    tile = np.array(factor.factor.read(1, 1))
    tile[3, 3] = 1e-200  # finite, and its inverse squared is not
    factor.factor.write(1, 1, tile)
    with pytest.raises(NumericalError, match="not finite and positive in rows 0 to 64"):
        inverse_diagonal(factor)


@pytest.mark.parametrize("site", ["inverse.panel.after_compute:@3:eio", "inverse.panel.after_write:@3:memoryerror"])
def test_an_interrupted_computation_goes_on(tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)
    factor, matrix = factored(tmp_path)
    with failing_at(site), contextlib.suppress(MemoryBudgetError):
        inverse_diagonal(factor)
    other = again(factor)
    np.testing.assert_allclose(inverse_diagonal(other), np.diag(np.linalg.inv(matrix)), rtol=1e-11)
    assert other.workspace.phases["invert"].num_computed == (1 if "after_write" in site else 0)  # of four panels
