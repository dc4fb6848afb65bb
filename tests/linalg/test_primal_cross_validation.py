"""Leave-one-out in feature space, of one alpha and of many, against fits that leave one row out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DataError, NotPositiveDefiniteError
from dkrr.kernels.features import feature_map
from dkrr.linalg.primal.passes import FeatureRows
from dkrr.linalg.primal.solver import array_source, leave_one_out_errors, primal_leave_one_out, stored_source
from dkrr.linalg.workspace import Workspace
from tests.linalg.test_primal import KERNELS, data, exact, kernel_of

ALPHAS = [0.5, 2.0]


@contextmanager
def source(
    where: str, x: Any, y: Any, kernel: Any, weight: Any, intercept: bool, folder: Path
) -> Iterator[FeatureRows]:
    if where == "memory":
        yield array_source(x, y, kernel, weight)
        return
    dataset = ingest(x, folder / "rows.zarr", y=y, sample_weight=weight)
    workspace = Workspace(store=str(folder), executor=InProcessExecutor())
    with stored_source(dataset, kernel, workspace, fit_intercept=intercept) as rows:
        yield rows


def left_out(f: np.ndarray, y: np.ndarray, alphas: Any, weight: Any, intercept: bool) -> np.ndarray:
    """Residuals of n fits."""
    found = np.empty(y.shape)
    for i in range(len(f)):
        others = np.arange(len(f)) != i
        coef, constant = exact(f[others], y[others], alphas, None if weight is None else weight[others], intercept)
        found[i] = y[i] - f[i] @ coef - constant
    return found


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["linear", "poly 2"])
def test_leave_one_out_is_n_fits(name: str, weights: bool, intercept: bool, where: str, tmp_path: Path) -> None:
    x, y, weight = data(n=60, d=3, weights=weights)
    kernel = kernel_of(name, 3)
    with source(where, x, y, kernel, weight, intercept, tmp_path) as rows:
        found = primal_leave_one_out(rows, ALPHAS, fit_intercept=intercept)
    brute = left_out(feature_map(kernel, 3).design(x), y, ALPHAS, weight, intercept)
    np.testing.assert_allclose(found.residuals, brute, rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("intercept", [False, True])
def test_errors_of_many_alphas_are_those_of_leave_one_out_for_each(
    name: str, intercept: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.linalg.primal.passes.TASK_SECONDS", 1e-9)
    monkeypatch.setattr("dkrr.linalg.primal.passes.PANEL", 4)
    x, y, weight = data(n=2300, weights=True)
    kernel, alphas = kernel_of(name, 4), [0.01, 1.0, 100.0]
    with source(where, x, y, kernel, weight, intercept, tmp_path) as rows:
        errors = leave_one_out_errors(rows, alphas, fit_intercept=intercept)
    memory = array_source(x, y, kernel, weight)
    for found, alpha in zip(errors, alphas, strict=True):
        loo = primal_leave_one_out(memory, [alpha], fit_intercept=intercept)
        np.testing.assert_allclose(found, loo.mean_squared_error, rtol=1e-11)


def test_a_row_that_decides_its_own_prediction() -> None:
    x, y, _ = data(n=30)
    x[:, 3] = 0
    x[4, 3] = 1e6
    rows = array_source(x, y, kernel_of("linear", 4))
    with pytest.raises(DataError, match="row 4 decides its own prediction"):
        primal_leave_one_out(rows, 1e-3)
    assert np.isinf(leave_one_out_errors(rows, [1e-3])).all()


def test_an_alpha_that_is_lost_beside_the_eigenvalues() -> None:
    x, y, _ = data(n=30)
    x[:, 3] = x[:, 2]
    with pytest.raises(NotPositiveDefiniteError, match="raise alpha to at least"):
        leave_one_out_errors(array_source(x, y, kernel_of("linear", 4)), [1.0, 0.0])
