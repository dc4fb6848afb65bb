"""The diagonal of the inverse through tiles against a dense inverse, its resume, and its repairs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import NumericalError
from dkrr.linalg.factor.direct import CholeskyFactor, CholeskySolver
from dkrr.linalg.inference.inverse_diagonal import (
    inverse_diagonal,
    inverse_diagonal_dense,
    panel_bytes,
    panel_width,
)
from dkrr.linalg.workspace import Workspace
from dkrr.tiles.blas import potrf
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


@pytest.mark.parametrize("tile_size", [33, 64, 128, 300])
@pytest.mark.parametrize("n", [1, 64, 65, 250])
def test_the_diagonal_is_that_of_the_inverse(tmp_path: Path, n: int, tile_size: int) -> None:
    factor, matrix = factored(tmp_path, n=n, tile_size=tile_size, weights=n > 1)
    expected = np.diag(np.linalg.inv(matrix))
    np.testing.assert_allclose(inverse_diagonal(factor), expected, rtol=1e-11)


@pytest.mark.parametrize("columns", [64, 128, 256])
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
    (Path(factor.factor.location) / "inverse_diagonal/c/1/1").unlink()  # the second half of a panel
    other = again(factor)
    np.testing.assert_array_equal(inverse_diagonal(other), first)
    assert other.workspace.phases["invert"].num_computed == 1


def test_a_damaged_tile_is_computed_again(tmp_path: Path) -> None:
    factor, matrix = factored(tmp_path)
    path = Path(factor.factor.location) / "c/2/1"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    np.testing.assert_allclose(inverse_diagonal(factor), np.diag(np.linalg.inv(matrix)), rtol=1e-11)


def test_a_damaged_sum_is_computed_again(tmp_path: Path) -> None:
    factor, _ = factored(tmp_path)
    first = inverse_diagonal(factor)
    path = Path(factor.factor.location) / "inverse_diagonal/c/2/0"
    path.write_bytes(b"\0" * path.stat().st_size)
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


CHILD = """
import sys
from pathlib import Path
from tests.linalg.test_inverse_diagonal import factored
from dkrr.linalg.inference.inverse_diagonal import inverse_diagonal
factor, _ = factored(Path(sys.argv[1]))
inverse_diagonal(factor)
"""


@pytest.mark.parametrize("site", ["inverse.panel.after_compute:@3", "inverse.panel.after_write:@3", "chunk.*:@30"])
def test_a_killed_computation_goes_on(tmp_path: Path, site: str) -> None:
    factor, matrix = factored(tmp_path)
    rows_before = snapshot(tmp_path / "store")
    (tmp_path / "rows.zarr").rename(tmp_path / "moved")  # the child makes the same rows again
    environment = {**os.environ, "DKRR_FAILPOINTS": f"{site}:sigkill"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    after = snapshot(tmp_path / "store")
    assert {key: after[key] for key in rows_before} == rows_before
    np.testing.assert_allclose(inverse_diagonal(factor), np.diag(np.linalg.inv(matrix)), rtol=1e-11)
    if site.startswith("inverse.panel.after_write"):
        assert factor.workspace.phases["invert"].num_computed == 1  # of four panels


def test_the_dense_diagonal() -> None:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((100, 100))
    a = a @ a.T + np.eye(100)
    lower = a.copy()
    assert potrf(lower) == 0
    np.testing.assert_allclose(inverse_diagonal_dense(lower), np.diag(np.linalg.inv(a)), rtol=1e-10)
