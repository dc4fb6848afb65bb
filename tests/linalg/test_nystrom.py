"""Nystrom regression against dense least squares with the same centres, and what must not matter."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import lstsq

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import (
    ConvergenceError,
    ParameterError,
    PlanRefusedError,
)
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg import centres
from dkrr.linalg import nystrom as nystrom
from dkrr.linalg import workspace as passes
from dkrr.linalg.nystrom import NystromResult, fit_nystrom
from dkrr.linalg.solution import IterativeSettings, NystromSettings
from dkrr.linalg.workspace import Workspace
from tests.linalg.helpers import rows
from tests.reference import reference_kernel

RBF = make_kernel("rbf", gamma=0.3).resolve(4)
KERNELS: dict[str, dict[str, Any]] = {
    "rbf": {"gamma": 0.3},
    "matern": {"kernel_params": {"nu": 1.5, "length_scale": 1.2}},
    "laplacian": {"gamma": 0.2},
    "poly": {"degree": 3, "gamma": 0.5, "coef0": 1.0},
}


@pytest.fixture
def many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of 256 rows and parts of few sampled rows, so that small data sets have several."""
    monkeypatch.setattr(passes, "MIN_TASK_ENTRIES", 1)
    monkeypatch.setattr("dkrr.linalg.primal_passes.TASK_SECONDS", 1e-9)


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code also for few centres."""
    monkeypatch.setattr(centres, "MIN_COLUMNS", 1)


def fit(
    folder: Path,
    dataset: Dataset,
    m: int,
    kernel: Kernel | None = RBF,
    alpha: tuple[float, ...] = (1e-2,),
    precision: str = "float64",
    centers: Any = "uniform",
    progress: Any = None,
    **iterative: Any,
) -> NystromResult:
    work = Workspace(str(folder / "store"), InProcessExecutor(), progress, blas="test")
    chosen, settings = NystromSettings(num_centers=m, centers=centers), IterativeSettings(**{"tol": 1e-10} | iterative)
    return fit_nystrom(dataset, kernel, alpha, chosen, settings, work, precision=precision)


def values(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    n = dataset.num_rows
    assert dataset.y is not None
    weight = np.ones(n) if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
    return dataset.X.read(0, n), dataset.y.read(0, n), weight


def dense_predictions(dataset: Dataset, kernel: Kernel, alpha: float, centres: np.ndarray) -> np.ndarray:
    """B c with c the least squares solution of [S B; alpha^1/2 Q] c = [S Y; 0], Q^T Q = K: a few dense lines."""
    x, y, weight = values(dataset)
    b, k = (reference_kernel(kernel.to_dict(), a, centres) for a in (x, centres))
    eigenvalues, vectors = np.linalg.eigh(k)
    q = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * vectors.T
    s = np.sqrt(weight)[:, None]
    c, *_ = lstsq(np.vstack([s * b, np.sqrt(alpha) * q]), np.vstack([s * y, np.zeros((len(k), y.shape[1]))]))
    return b @ c


def predictions(dataset: Dataset, kernel: Kernel, result: NystromResult) -> np.ndarray:
    return reference_kernel(kernel.to_dict(), values(dataset)[0], result.centres) @ result.dual_coef


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_predictions_are_those_of_dense_least_squares(
    tmp_path: Path, many_tasks: None, name: str, weights: bool, precision: str
) -> None:
    dataset = rows(tmp_path, n=900, t=3, weights=weights)
    kernel = make_kernel(name, **KERNELS[name]).resolve(4)
    alphas = (1e-2, 10.0, 1e-2)
    result = fit(tmp_path, dataset, 60, kernel, alphas, precision)
    found = predictions(dataset, kernel, result)
    for target, alpha in enumerate(alphas):
        expected = dense_predictions(dataset, kernel, alpha, result.centres)[:, target]
        assert difference(found[:, target], expected) < 1e-8
    solution = result.solution
    assert (solution.solver, solution.precision, solution.converged) == ("nystrom", precision, True)
    assert max(solution.relative_residual) <= 2e-10
    assert max(solution.backward_error) < 1e-11
    assert 5 < solution.num_iterations < 120
    assert "of 900 rows as centres" in solution.message


# --- centres ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("centers", ["uniform", "rpcholesky"])
def test_centres_are_rows_with_a_weight_by_seed(tmp_path: Path, centers: str) -> None:
    dataset = rows(tmp_path, n=500, weights=True)
    result = fit(tmp_path, dataset, 70, centers=centers, tol=1e-3)
    x, _, weight = values(dataset)
    assert np.array_equal(result.centres, x[result.rows])
    assert (weight[result.rows] > 0).all()
    assert len(result.rows) == 70
    assert (np.diff(result.rows) > 0).all()
    again = fit(tmp_path, dataset, 70, centers=centers, tol=1e-3)
    assert np.array_equal(result.rows, again.rows)
    assert np.array_equal(result.dual_coef, again.dual_coef)
    other = fit(tmp_path, dataset, 70, centers=centers, tol=1e-3, seed=1)
    assert not np.array_equal(result.rows, other.rows)


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize("alpha", [1e-4, 1.0])
def test_centres_in_the_span_of_others_are_left_out(tmp_path: Path, precision: str, alpha: float) -> None:
    x = np.random.default_rng(0).standard_normal((200, 4))
    x = np.tile(x, (4, 1))
    dataset = ingest(x, tmp_path / "rows.zarr", y=np.sin(x[:, 0]) + np.repeat([0.0, 0.1, 0.2, 0.3], 200))
    result = fit(tmp_path, dataset, 300, RBF, (alpha,), precision)
    assert len(result.centres) == len(np.unique(result.centres, axis=0)) < 200
    expected = dense_predictions(dataset, RBF, alpha, result.centres)
    assert difference(predictions(dataset, RBF, result), expected) < 1e-7
    assert f"{300 - len(result.centres)} in their span left out" in result.solution.message


@pytest.mark.parametrize("gamma", [1e-2, 1e-3])
@pytest.mark.parametrize("alpha", [1e-6, 1e-2])
def test_a_smooth_kernel_whose_matrix_is_numerically_singular(tmp_path: Path, gamma: float, alpha: float) -> None:
    dataset = rows(tmp_path, n=1000, t=1)
    kernel = make_kernel("rbf", gamma=gamma).resolve(4)
    result = fit(tmp_path, dataset, 250, kernel, (alpha,), tol=1e-8)
    assert len(result.centres) < 250
    expected = dense_predictions(dataset, kernel, alpha, result.centres)
    # rounding of K moves both answers: by about (alpha eps)^1/2 |c| / |y|
    assert difference(predictions(dataset, kernel, result), expected) < 1e-4
    # no one could do better: |R^-1 L^-1 r| is rounding that the two triangles amplify
    assert result.solution.converged
    assert max(result.solution.backward_error) < 2.2e-16
    assert ("as small as rounding allows" in result.solution.message) == (max(result.solution.relative_residual) > 2e-8)


def test_what_rounding_leaves_to_rows_of_little_weight_is_no_answer(tmp_path: Path) -> None:
    """Where a residual is the best that float64 allows, it is so in the norm of the weights."""
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((60, 2)), np.ones(60)
    weight[[3, 9]] = 1e12
    dataset = ingest(x, tmp_path / "rows.zarr", y=np.sin(2 * x[:, 0]), sample_weight=weight)
    kernel = make_kernel("rbf", gamma=0.5).resolve(2)
    with pytest.raises(ConvergenceError, match="largest relative residual"):
        fit(tmp_path, dataset, 60, kernel, (1.0,), tol=1e-8)


# --- what must not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "mixed"])
def test_chunks_do_not_matter(tmp_path: Path, many_tasks: None, precision: str) -> None:
    x, y, weight = values(rows(tmp_path, n=700, weights=True))
    found = []
    for size in (256, 300, 1000):
        dataset = ingest(x, tmp_path / f"{size}.zarr", y=y, sample_weight=weight, rows_per_chunk=size)
        found.append(fit(tmp_path, dataset, 50, precision=precision).dual_coef)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_no_convergence_is_an_error_or_recorded(tmp_path: Path) -> None:
    dataset = rows(tmp_path, n=900, t=2)
    with pytest.raises(ConvergenceError, match=r"NOT CONVERGED to 1\.0e-10 in 2 of 2 targets") as raised:
        fit(tmp_path, dataset, 60, max_iter=3)
    assert (raised.value.num_iterations, len(raised.value.history)) == (3, 4)
    result = fit(tmp_path, dataset, 60, max_iter=3, allow_unconverged=True)
    assert not result.solution.converged
    assert 1e-10 < max(result.solution.relative_residual) < 1


def test_an_interrupted_fit_goes_on(
    tmp_path: Path, many_tasks: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nystrom, "CHECKPOINT_SECONDS", 0.0)
    dataset = rows(tmp_path, n=900, t=2)
    undisturbed = fit(tmp_path, dataset, 60)
    passes = 0

    def interrupt(phase: str, done: int, *_: Any) -> None:
        nonlocal passes
        passes += phase == "nystrom" and done == 0
        if passes == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, dataset, 60, progress=interrupt)
    passes = 100
    with caplog.at_level(logging.INFO, "dkrr.linalg.cg"):
        resumed = fit(tmp_path, dataset, 60, progress=interrupt)
    assert "going on from the checkpoint" in caplog.text
    assert passes - 100 < undisturbed.solution.num_iterations - 5
    assert resumed.solution.num_iterations == undisturbed.solution.num_iterations
    assert np.array_equal(resumed.dual_coef, undisturbed.dual_coef)
    assert not list((tmp_path / "store" / "solves").iterdir()), "a finished fit leaves nothing"


@pytest.mark.parametrize(
    ("m", "parameters", "message"),
    [
        (901, {}, "901 centres of 900 rows"),
        (10_001, {}, "10,001 centres; at most 10,000"),
        (50, {"kernel": None}, "precomputed"),
        (50, {"alpha": (1.0, 2.0, 3.0)}, "3 values of alpha for 2 targets"),
        (50, {"alpha": (-1.0,)}, "alpha = -1.0"),
    ],
)
def test_parameters_that_cannot_be(tmp_path: Path, m: int, parameters: dict[str, Any], message: str) -> None:
    dataset = rows(tmp_path, n=900, t=2)
    with pytest.raises(ParameterError, match=message):
        fit(tmp_path, dataset, m, **parameters)


def test_workers_that_are_too_small_are_refused_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "memory_limit_of", lambda executor: 300 << 20)
    dataset = rows(tmp_path, n=3000, t=1)
    with pytest.raises(PlanRefusedError, match="a task with 2,900 centres and 1 targets takes"):
        fit(tmp_path, dataset, 2900)
    assert not list((tmp_path / "store").rglob("*.zarr")) if (tmp_path / "store").exists() else True
