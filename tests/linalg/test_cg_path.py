"""Many alphas by conjugate gradients with the leave-one-out error of each, against dense solves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import DaskExecutor, InProcessExecutor
from dkrr.linalg.cg import column_solves
from dkrr.linalg.cg.solver import CGSolver, PreparedCG
from dkrr.linalg.inference.cg_path import PathPoint, cg_path, probe_diagonals
from dkrr.linalg.inference.leave_one_out import loo_from_diagonal
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.workspace import Workspace
from tests.faults import failing_at
from tests.linalg.helpers import dense, operator, rows

N = 300
ALPHAS = [1.0, 0.03, 10.0, 1.0]


def targets(dataset: Any) -> np.ndarray:
    """Y (n, t)."""
    return np.asarray(dataset.y.read(0, N))


def path(folder: Path, dataset: Any, **parameters: Any) -> list[PathPoint]:
    system = operator(dataset)
    workspace = Workspace(store=str(folder / "store"), executor=InProcessExecutor(), blas="test")
    solver = CGSolver(settings=IterativeSettings(rank=40))
    return list(cg_path(system, workspace, targets(dataset), ALPHAS, solver, **parameters))


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_every_point_is_the_dense_solution_with_its_error(
    tmp_path: Path, weights: bool, intercept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_solves, "MAX_COLUMNS", 45)
    dataset = rows(tmp_path, N, weights=weights)
    x, y, system = dataset.X.read(0, N), targets(dataset), operator(dataset)
    root = np.ones(N) if dataset.weight is None else np.sqrt(dataset.weight.read(0, N)[:, 0])
    points = path(tmp_path, dataset, fit_intercept=intercept, num_probes=24)
    assert [point.alpha for point in points] == ALPHAS
    np.testing.assert_array_equal(points[0].u, points[3].u)
    best = []
    for point in points:
        inverse = np.linalg.inv(dense(system.with_alpha(point.alpha), dataset))
        u, v, diagonal = inverse @ (root[:, None] * y), inverse @ root, inverse.diagonal()[:, None]
        if intercept:
            b = (root @ u) / (root @ v)
            u, diagonal = u - np.outer(v, b), diagonal - (v**2 / (root @ v))[:, None]
            assert point.intercept is not None
            np.testing.assert_allclose(point.intercept, b, atol=1e-4)
        else:
            assert point.intercept is None
        np.testing.assert_allclose(point.u, u, atol=2e-5 * np.abs(u).max())
        truth = loo_from_diagonal(y=y, u=u, inverse_diagonal=diagonal, alpha=point.alpha, root=root)
        loo = point.leave_one_out
        assert loo.mean_squared_error_se is not None
        off = np.abs(loo.mean_squared_error - truth.mean_squared_error)
        assert (off <= 3.5 * loo.mean_squared_error_se).all()
        assert (point.relative_residual <= 1e-6).all()
        offset = b if intercept else 0.0
        outside = (y - system.kernel(x, x) @ (root[:, None] * u) - offset)[root == 0]
        np.testing.assert_allclose(loo.residuals[root == 0], outside, atol=1e-4)
        best.append((truth.mean_squared_error, loo.mean_squared_error))
    truth_of, found = np.array(best)[:, 0], np.argmin(np.array(best)[:, 1], axis=0)
    assert (truth_of[found, np.arange(3)] <= 1.05 * truth_of.min(axis=0)).all(), "the alpha that would be chosen"
    assert not list((tmp_path / "store/solves").iterdir()), "columns, preconditioner, lock"


def test_an_interrupted_path_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = rows(tmp_path, N)
    monkeypatch.setattr(column_solves, "MAX_COLUMNS", 16)
    with failing_at("columns.block.after_mark:@3:enospc"), pytest.raises(OSError, match="space"):
        path(tmp_path, dataset, num_probes=8)
    solved, solve = [], PreparedCG.solve

    def counted(self: PreparedCG, *arguments: Any, **keywords: Any) -> Any:
        solved.append(1)
        return solve(self, *arguments, **keywords)

    monkeypatch.setattr(PreparedCG, "solve", counted)
    points = path(tmp_path, dataset, num_probes=8)
    assert not solved, "33 columns in three blocks, all marked"
    whole = path(tmp_path / "whole", dataset, num_probes=8)
    assert len(solved) == 3
    for point, other in zip(points, whole, strict=True):
        np.testing.assert_array_equal(point.u, other.u)
        np.testing.assert_array_equal(point.leave_one_out.residuals, other.leave_one_out.residuals)


def test_workers_give_the_same_diagonal(tmp_path: Path, cluster_client: Any) -> None:
    dataset = rows(tmp_path, N)
    found = []
    for name, executor in (("here", InProcessExecutor()), ("workers", DaskExecutor(cluster_client))):
        workspace = Workspace(store=str(tmp_path / name), executor=executor, blas="test")
        solver = CGSolver(settings=IterativeSettings(rank=20))
        found += probe_diagonals(operator(dataset), workspace, [0.1], solver, num_probes=8)
    np.testing.assert_allclose(found[0].unbounded, found[1].unbounded, rtol=1e-8)
