"""What may happen to a pass over rows, through the solvers that use it: the answer is the same bits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.direct import CholeskyFactor
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.nystrom import fit_nystrom, nystrom_leave_one_out
from dkrr.linalg.operators import BlockColumns
from dkrr.linalg.preconditioner import LowRank
from dkrr.linalg.primal import fit_primal, primal_leave_one_out, stored_source
from dkrr.linalg.solution import IterativeSettings, NystromSettings
from dkrr.linalg.triangular import inverse_diagonal
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid
from tests.faults import Spoiling, Twice, chunk_files, failing_at, flip, times
from tests.linalg.helpers import operator
from tests.linalg.test_primal import data

LINEAR, RBF = make_kernel("linear"), make_kernel("rbf", gamma=0.3).resolve(4)


def primal(dataset: Dataset, workspace: Workspace) -> Any:
    return fit_primal(dataset, LINEAR, [0.1], workspace, fit_intercept=True).coef


def leave_one_out(dataset: Dataset, workspace: Workspace) -> Any:
    with stored_source(dataset, LINEAR, workspace) as source:
        return primal_leave_one_out(source, 0.1).residuals


def nystrom(dataset: Dataset, workspace: Workspace) -> Any:
    settings = NystromSettings(num_centers=60), IterativeSettings(tol=1e-10)
    return fit_nystrom(dataset, RBF, [1e-2], *settings, workspace).dual_coef


def product(dataset: Dataset, workspace: Workspace) -> Any:
    scratch = f"{workspace.store}/solves"
    v = np.random.default_rng(1).standard_normal((dataset.num_rows, 3))
    return OperatorProduct(operator(dataset), workspace, scratch)(v)


def leverages(dataset: Dataset, workspace: Workspace) -> Any:
    rng = np.random.default_rng(3)
    points, coefficients = dataset.X.read(0, 60), rng.standard_normal((60, dataset.num_targets))
    found = nystrom_leave_one_out(dataset, RBF, points, coefficients, (1e-2,), workspace, center=None, intercept=None)
    return found.residuals


def factored(dataset: Dataset, workspace: Workspace) -> CholeskyFactor:
    return CholeskyFactor.prepare(operator(dataset, tile_size=500), workspace)


def cholesky(dataset: Dataset, workspace: Workspace) -> Any:
    made = factored(dataset, workspace)
    rhs = BlockColumns.create(f"{workspace.store}/solve", "rhs", made.factor.grid, dataset.num_targets, "float64")
    return made.solve(rhs.fill(dataset.targets.read(0, dataset.num_rows)))[0].whole()


def inverse(dataset: Dataset, workspace: Workspace) -> Any:
    return inverse_diagonal(factored(dataset, workspace))


def low_rank(dataset: Dataset, workspace: Workspace) -> Any:
    made = LowRank(operator(dataset), workspace, f"{workspace.store}/f.zarr", IterativeSettings(), 150)
    return made.apply(np.ones((dataset.num_rows, 1)), np.array([0.1]))


Solve = Callable[[Dataset, Workspace], Any]
# a solver, and a task of each of its phases that has others before it
PHASES: list[tuple[Solve, str, int]] = [
    (primal, "primal sums", 1),
    (primal, "primal residual", 1),
    (leave_one_out, "primal hat", 1),
    (nystrom, "nystrom", 3),
    (product, "multiply", 3),
    (leverages, "leverage", 1),
    (nystrom, "precondition", 2),
]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """Rows of which every pass has several ranges."""
    monkeypatch.setattr("dkrr.linalg.workspace.MIN_TASK_ENTRIES", 1)
    monkeypatch.setattr("dkrr.linalg.primal_passes.TASK_SECONDS", 1e-9)
    monkeypatch.setattr("dkrr.linalg.primal_passes.WHOLE_ROWS", 1)
    monkeypatch.setattr("dkrr.linalg.matmul.super_blocks", lambda n, *_: TileGrid(n, -(-n // 4)))
    # operands and parts travel through the store as they do to workers
    monkeypatch.setattr("dkrr.linalg.workspace.is_here", lambda workspace: workspace is None)
    x, y, weight = data(n=2100, weights=True)
    return ingest(x, tmp_path / "rows.zarr", y=y, sample_weight=weight, rows_per_chunk=1024)


def solved(solve: Solve, dataset: Dataset, folder: Path, executor: Any = None) -> Any:
    return solve(dataset, Workspace(str(folder / "store"), executor or InProcessExecutor(), blas="test"))


@pytest.mark.parametrize(("solve", "phase", "task"), PHASES)
def test_whatever_travels_is_made_again_when_it_is_damaged(
    solve: Solve, phase: str, task: int, dataset: Dataset, tmp_path: Path
) -> None:
    undisturbed = solved(solve, dataset, tmp_path)

    def spoil() -> None:
        for path in chunk_files(tmp_path / "store"):
            flip(path)

    executor = Spoiling(phase, (task,), spoil)
    assert np.array_equal(solved(solve, dataset, tmp_path, executor), undisturbed)
    assert executor.done


@pytest.mark.parametrize("solve", [cholesky, inverse, low_rank, primal, nystrom])
@pytest.mark.parametrize("fault", ["compute.*:@4:memoryerror", "written*/c/*:@9:memoryerror", "written*/c/*:@20:eio"])
def test_an_interrupted_fit_goes_on_to_the_same_bits(
    solve: Solve, fault: str, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk that it has left, but of vectors, is made again; a task tries again what a device refuses once."""
    monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)
    undisturbed = solved(solve, dataset, tmp_path / "whole")
    with failing_at(fault), contextlib.suppress(MemoryError, OSError):
        solved(solve, dataset, tmp_path)
    before = times(tmp_path / "store")
    assert np.array_equal(solved(solve, dataset, tmp_path), undisturbed)
    after = times(tmp_path / "store")
    assert [
        name
        for name in before.keys() & after.keys()
        if before[name] != after[name] and ("/f/c/" in name or "factors" in name)
    ] == []


@pytest.mark.parametrize("solve", [primal, leave_one_out, nystrom, product])
def test_every_task_may_run_twice(solve: Solve, dataset: Dataset, tmp_path: Path) -> None:
    executor = Twice()
    assert np.array_equal(solved(solve, dataset, tmp_path, executor), solved(solve, dataset, tmp_path))
    assert not executor.computed_again
