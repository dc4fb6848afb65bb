"""Substitutions, residuals and the direct solver against dense solves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.dense import fit_dense
from dkrr.linalg.direct import CholeskySolver
from dkrr.linalg.workspace import Workspace
from tests.linalg.helpers import dense, operator, rows


def workspace(folder: Path) -> Workspace:
    return Workspace(store=str(folder / "store"), executor=InProcessExecutor(), blas="test")


def right_hand_sides(folder: Path, grid, values: np.ndarray) -> BlockColumns:
    return BlockColumns.create(str(folder / "rhs.zarr"), "rhs", grid, values.shape[1], "float64").fill(values)


@pytest.mark.parametrize(("n", "num_targets"), [(1, 1), (64, 5), (250, 300)])
def test_solution_matches_a_dense_solve(tmp_path: Path, n: int, num_targets: int) -> None:
    dataset = rows(tmp_path, n=n)
    system = operator(dataset, alpha=0.1)
    values = np.random.default_rng(0).standard_normal((n, num_targets))
    work = workspace(tmp_path)
    factor = CholeskySolver().prepare(system, work)
    u, solution, _ = factor.solve(right_hand_sides(tmp_path, system.grid, values))
    expected = np.linalg.solve(dense(system, dataset), values)
    np.testing.assert_allclose(u.whole(), expected, rtol=1e-9, atol=1e-9)
    assert max(solution.relative_residual) < 1e-12
    assert len(solution.backward_error) == num_targets


def test_a_zero_target_has_zero_coefficients_and_residual() -> None:
    x = np.random.default_rng(0).standard_normal((30, 2))
    y = np.stack([np.zeros(30), x[:, 0]], axis=1)
    found = fit_dense(make_kernel("rbf", gamma=1.0), x, y, np.array([0.1]), None, "float64")
    assert not found.dual_coef[:, 0].any()
    assert found.solution.relative_residual[0] == found.solution.backward_error[0] == 0
