"""The two numbers of a solution against the dense residual, for kernels of one sign and of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.gram import build_gram
from dkrr.linalg.matmul import residual_norms, sampled_row_sums
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileMatrix
from tests.linalg.helpers import dense, operator, rows


def work() -> Workspace:
    return Workspace(store="", executor=InProcessExecutor())


def on_disk(folder: Path, name: str, system: Any, values: np.ndarray, dtype: str = "float64") -> BlockColumns:
    blocks = BlockColumns.create(str(folder / "solve"), name, system.grid, values.shape[1], dtype)
    for i, panel in blocks.blocks():
        blocks.write(i, panel, values[system.grid.span(i), blocks.columns(panel)].astype(dtype))
    return blocks


def expected_norms(a: np.ndarray, rhs: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """|R| / |Y| in 2-norms, and |R| / (|A| |u| + |Y|) in infinity norms."""
    r = rhs - a @ u
    bound = np.abs(a).sum(axis=1).max() * np.abs(u).max(axis=0) + np.abs(rhs).max(axis=0)
    return np.linalg.norm(r, axis=0) / np.linalg.norm(rhs, axis=0), np.abs(r).max(axis=0) / bound


def negative_definite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Its diagonal is negative, so that |A| is not |K| + alpha I."""
    return -1.0 - a @ b.T


FORMS = ["rbf", "matern", "linear", "poly", "sigmoid", "negative", "given", "given, indefinite"]


def system_of(folder: Path, form: str, weights: bool, n: int = 250) -> tuple[Any, np.ndarray]:
    """An operator with alpha 0.3, and its dense matrix."""
    dataset = rows(folder, n=n, weights=weights)
    name = form if form in ("rbf", "matern", "poly", "sigmoid") else "linear"
    system = operator(dataset, alpha=0.3, kernel=name)
    if form in ("negative", "given, indefinite"):
        kernel = make_kernel(negative_definite).resolve(4)
        system = replace(system, kernel=kernel, rows=replace(system.rows, center=None))
    a = dense(system, dataset)
    if form.startswith("given"):
        gram = TileMatrix.create(str(folder / "K.zarr"), system.grid, dtype="float64")
        build_gram(system, gram, InProcessExecutor())
        system = replace(system, kernel=None, gram=gram)
    return system, a


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weights", [False, True])
def test_both_numbers(tmp_path: Path, form: str, weights: bool) -> None:
    system, a = system_of(tmp_path, form, weights)
    rng = np.random.default_rng(0)
    rhs, u = rng.standard_normal((250, 3)), rng.standard_normal((250, 3))
    u[:, 1] *= 1e-6
    workspace = work()
    norms = residual_norms(
        system, on_disk(tmp_path, "rhs", system, rhs), on_disk(tmp_path, "u", system, u), workspace, ""
    )
    relative, backward = expected_norms(a, rhs, u)
    np.testing.assert_allclose(norms.relative_residual, relative, rtol=1e-10)
    np.testing.assert_allclose(norms.backward_error, backward, rtol=1e-10)
    assert set(workspace.phases) == {"residual"}


@pytest.mark.parametrize("form", ["rbf", "linear", "negative"])
def test_one_alpha_for_each_column(tmp_path: Path, form: str) -> None:
    system, a = system_of(tmp_path, form, weights=True)
    k = a - 0.3 * np.eye(250)
    rng = np.random.default_rng(0)
    rhs, u = rng.standard_normal((250, 3)), rng.standard_normal((250, 3))
    alpha = np.array([0.0, 1e-3, 1e4])
    blocks = on_disk(tmp_path, "rhs", system, rhs), on_disk(tmp_path, "u", system, u)
    found = residual_norms(system, *blocks, work(), "", alpha=alpha)
    for column in range(3):
        part = slice(column, column + 1)
        relative, backward = expected_norms(k + alpha[column] * np.eye(250), rhs[:, part], u[:, part])
        assert found.relative_residual[column] == pytest.approx(relative[0], rel=1e-10)
        assert found.backward_error[column] == pytest.approx(backward[0], rel=1e-10)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("form", ["rbf", "poly", "sigmoid"])
def test_sums_of_some_rows_bound_the_norm_from_below(tmp_path: Path, form: str, weights: bool) -> None:
    n, rng = 1500, np.random.default_rng(3)
    x = rng.standard_normal((n, 4))
    x[1001] *= 30.0  # one row of an unbounded kernel is the norm
    weight = rng.uniform(0.5, 2.0, n) if weights else None
    dataset = ingest(x, tmp_path / "far.zarr", y=x[:, 0], sample_weight=weight)
    system = operator(dataset, alpha=0.3, kernel=form)
    norm = np.abs(dense(system, dataset) - 0.3 * np.eye(n)).sum(axis=1).max()
    found = sampled_row_sums(system)
    assert len(found) <= 256
    assert norm / 2 <= found.max() <= norm * (1 + 1e-12)


def test_a_residual_near_rounding_and_zero_targets(tmp_path: Path) -> None:
    system, a = system_of(tmp_path, "rbf", weights=True)
    rhs = np.random.default_rng(0).standard_normal((250, 2))
    rhs[:, 1] = 0
    u = np.linalg.solve(a, rhs)
    norms = residual_norms(system, on_disk(tmp_path, "rhs", system, rhs), on_disk(tmp_path, "u", system, u), work(), "")
    assert norms.relative_residual[0] < 1e-12
    assert norms.backward_error[0] < 1e-14
    assert norms.relative_residual[1] == norms.backward_error[1] == 0
    u[3, 1] = 1.0
    norms = residual_norms(system, on_disk(tmp_path, "rhs", system, rhs), on_disk(tmp_path, "v", system, u), work(), "")
    assert norms.relative_residual[1] == np.inf
