"""The two numbers of a solution against the dense residual, for kernels of one sign and of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dkrr.dataset import ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg.matmul import residual_norms, sampled_row_sums
from dkrr.linalg.operators import BlockColumns
from dkrr.linalg.workspace import Workspace
from tests.linalg.helpers import dense, gram_of, operator, rows

ALPHAS = np.array([0.3, 0.3, 1e4, 0.0])


def negative_definite(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Its diagonal is negative, so that |A| is not |K| + alpha I."""
    return -1.0 - a @ b.T


@pytest.mark.parametrize("form", ["rbf", "linear", "sigmoid", "negative", "given", "given, indefinite"])
@pytest.mark.parametrize("bordered", [False, True])
def test_both_numbers(tmp_path: Path, form: str, bordered: bool) -> None:
    dataset = rows(tmp_path, weights=True)
    system = operator(dataset, alpha=0.0, kernel=form if form in ("rbf", "sigmoid") else "linear")
    if form in ("negative", "given, indefinite"):
        kernel = make_kernel(negative_definite).resolve(4)
        system = replace(system, kernel=kernel, rows=replace(system.rows, center=None))
    k = dense(system, dataset)
    if form.startswith("given"):
        system = replace(system, gram=gram_of(system, tmp_path / "K.zarr"), kernel=None)
    rng = np.random.default_rng(0)
    rhs, u = rng.standard_normal((250, 4)), rng.standard_normal((250, 4))
    u[:, 1] *= 1e-6
    s = system.normal()
    if bordered:
        u[:, 0] -= s * (s @ u[:, 0]) / (s @ s)
    blocks = (BlockColumns.create(str(tmp_path / "solve"), name, system.grid, 4, "float64") for name in ("rhs", "u"))
    work = Workspace(store="", executor=InProcessExecutor())
    right, answer = (part.fill(values) for part, values in zip(blocks, (rhs, u), strict=True))
    found = residual_norms(system, right, answer, work, "", alpha=ALPHAS, normal=s if bordered else None)
    for column, alpha in enumerate(ALPHAS):
        a, y, x = k + alpha * np.eye(250), rhs[:, column], u[:, column]
        b = s @ (y - a @ x) / (s @ s) if bordered else 0.0
        r = y - a @ x - b * s
        backward = np.abs(r).max() / (np.abs(a).sum(axis=1).max() * np.abs(x).max() + np.abs(y - b * s).max())
        if bordered:
            backward = max(backward, abs(s @ x) / (s.sum() * np.abs(x).max()))
            assert found.intercept[column] == pytest.approx(b, rel=1e-10)
        assert found.relative_residual[column] == pytest.approx(np.linalg.norm(r) / np.linalg.norm(y), rel=1e-10)
        assert found.backward_error[column] == pytest.approx(backward, rel=1e-10)


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
