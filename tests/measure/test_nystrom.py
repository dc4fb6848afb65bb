"""Nystrom regression: two million rows in minutes, and the error of the published method on the protein set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import cho_solve, cholesky, solve_triangular

from dkrr.dataset import ingest
from dkrr.kernels import make_kernel
from dkrr.models.model import load_model
from tests.measure.figures import Judge, scaled
from tests.measure.jobs import read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

NUM_CENTERS = scaled(5_000, least=1_100)
MAX_SECONDS = 480.0
MAX_RMSE_RATIO = 1.01
BLOCK_ROWS = 2_048


def fit(folder: Path, data: dict[str, Any], evaluate: dict[str, Any], model: dict[str, Any]) -> tuple[Any, Any]:
    """Run the job on two workers of 2 GiB; how it ended, and its result."""
    document = {
        "data": {"standardize": True} | data,
        "evaluate": {"metric": "rmse"} | evaluate,
        "model": model,
        "solver": {"name": "nystrom", "num_centers": NUM_CENTERS, "precision": "mixed", "tol": 1e-7},
        "cluster": {"workers": 2, "memory_limit": "2GiB"},
        "output": {"directory": "run", "store": "store", "keep": "model"},
    }
    job = write_job(folder, document)
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    return done, read_result(job)


def test_measure_nystrom_size(judge: Judge, folder: Path) -> None:
    n = scaled(2_000_000)
    ingest(f"generate:friedman?n={n}&d=20&seed=0", folder / "rows.zarr")
    ingest("generate:friedman?n=20000&d=20&seed=1", folder / "test.zarr")
    done, result = fit(
        folder,
        {"path": str(folder / "rows.zarr")},
        {"path": str(folder / "test.zarr")},
        {"kernel": "rbf", "gamma": 0.02, "alpha": 1.0},
    )
    peaks = done.memory.peak_by_kind()
    print(result["message"], result["seconds"])
    judge(
        "nystrom: size",
        f"{done.seconds:.0f} s in all, relative residual {max(result['relative_residual']):.1e}, test RMSE "
        f"{result['score']['rmse_whitened'][0]:.4f} (whitened), worker {peaks['worker'] / 2**20:.0f} MiB",
        f"n = {n:,}, d = 20, {NUM_CENTERS:,} centres, two workers of 2 GiB: at most {MAX_SECONDS:.0f} s",
        done.seconds <= MAX_SECONDS and peaks["worker"] < 2 * 2**30,
        at_full_size=True,
    )


def test_measure_nystrom_protein(judge: Judge, folder: Path, data_folder: Path) -> None:
    parameters = {"nu": 1.5, "length_scale": 0.75}
    alpha = 0.1
    mask = data_folder / "protein" / "test_mask.csv.gz"
    done, result = fit(
        folder,
        {"path": str(data_folder / "protein" / "data.csv.gz"), "target": [-1], "header": False},
        {"mask": str(mask), "mask_column": 0},
        {"kernel": "matern", "kernel_params": parameters, "alpha": alpha},
    )
    (rmse,) = result["score"]["rmse_whitened"]
    table = np.loadtxt(data_folder / "protein" / "data.csv.gz", delimiter=",")
    held_out = np.loadtxt(mask, delimiter=",", usecols=0) != 0
    table = (table - table[~held_out].mean(axis=0)) / table[~held_out].std(axis=0)
    train, test = np.ascontiguousarray(table[~held_out]), np.ascontiguousarray(table[held_out])
    model = load_model(folder / "run" / "model.zarr")
    assert model.x_fit is not None
    centres = model.x_fit.read(0, model.num_rows)
    kernel = make_kernel("matern", kernel_params=parameters).resolve(centres.shape[1])
    c = published(kernel, train, centres, alpha)
    predictions = [kernel.block(np.ascontiguousarray(part), centres) @ c for part in np.array_split(test[:, :-1], 8)]
    expected = float(np.sqrt(np.mean((np.concatenate(predictions) - test[:, -1]) ** 2)))
    judge(
        "nystrom: protein",
        f"test RMSE {rmse:.5f} (whitened), dense {expected:.5f}, ratio {rmse / expected:.5f}; {done.seconds:.0f} s, "
        f"{result['message']}",
        f"{len(train):,} rows, {NUM_CENTERS:,} centres: within 1 %",
        rmse <= MAX_RMSE_RATIO * expected,
    )


def published(kernel: Any, train: np.ndarray, centres: np.ndarray, alpha: float) -> np.ndarray:
    """Falkon's estimator c = L^-T (L^-1 B^T B L^-T + alpha I)^-1 L^-1 B^T y, L L^T = K + eps m I, solved densely."""
    m = len(centres)
    lower = cholesky(kernel.block(centres, centres, same=True) + np.finfo(float).eps * m * np.eye(m), lower=True)
    gram, right = alpha * np.eye(m), np.zeros(m)
    for start in range(0, len(train), BLOCK_ROWS):
        part = train[start : start + BLOCK_ROWS]
        b = kernel.block(np.ascontiguousarray(part[:, :-1]), centres)
        reduced = solve_triangular(lower, b.T, lower=True, overwrite_b=True)
        gram += reduced @ reduced.T
        right += reduced @ part[:, -1]
    c = solve_triangular(lower, cho_solve((cholesky(gram, lower=True), True), right), lower=True, trans="T")
    return np.asarray(c)
