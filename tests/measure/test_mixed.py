"""Mixed precision: the residual on real data against float64's own, time and disk against float64."""

from __future__ import annotations

import gzip
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest
from dkrr.engine.cluster import blas_of, start_local
from dkrr.engine.tasks import DaskExecutor
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.kernels import make_kernel
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace, choose_tile_size
from tests.measure.figures import Judge, scaled

REAL = ("pol", "elevators", "bike")


def whitened(folder: Path, num_train: int | None = None, num_test: int | None = None) -> tuple[np.ndarray, ...]:
    """Training and test rows of split 0, whitened with the training rows' statistics."""
    with gzip.open(folder / "data.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    with gzip.open(folder / "test_mask.csv.gz", "rt") as file:
        held_out = np.loadtxt(file, delimiter=",", usecols=0) == 1
    train, test = table[~held_out][:num_train], table[held_out][:num_test]
    std = train.std(axis=0)
    train, test = ((part - train.mean(axis=0)) / np.where(std > 0, std, 1) for part in (train, test))
    return train[:, :-1], train[:, -1:], test[:, :-1], test[:, -1:]


pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

MATERN: dict[str, Any] = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}}
RBF: dict[str, Any] = {"kernel": "rbf", "gamma": 0.05}
RESIDUAL = 1e-9
MAX_TIME_RATIO = 0.6
MAX_DISK_RATIO = 0.51
TILES_A_SIDE = 10


@pytest.fixture(scope="module")
def executor() -> Iterator[DaskExecutor]:
    with start_local(workers=2) as found:
        yield found


def fit(
    dataset: Dataset, kernel: dict[str, Any], alpha: float, precision: Any, folder: Path, executor: DaskExecutor
) -> tuple[float, int, Solution, Workspace]:
    """Wall seconds, bytes of the factor, the solution, and the workspace with figures of every phase."""
    n, d = dataset.num_rows, dataset.num_features
    settings = FitSettings(
        kernel=make_kernel(**kernel).resolve(d),
        alpha=(alpha,),
        # the same tiles for both, and several of them at any scale
        tile_size=choose_tile_size(n, d, None) if n > 256 * TILES_A_SIDE else -(-n // TILES_A_SIDE),
        precision=precision,
        iterative=IterativeSettings(tol=RESIDUAL / 2),
    )
    work = Workspace(store=str(folder / precision), executor=executor, blas=blas_of(executor))
    began = time.perf_counter()
    with fit_rows(dataset, settings, work) as result:
        seconds = time.perf_counter() - began
        solution = result.solution
    num_bytes = sum(path.stat().st_size for path in (folder / precision / "factors").rglob("*") if path.is_file())
    return seconds, num_bytes, solution, work


@pytest.mark.parametrize("name", REAL)
def test_measure_mixed_real_data(
    name: str, judge: Judge, data_folder: Path, folder: Path, executor: DaskExecutor
) -> None:
    x, y, *_ = whitened(data_folder / name)
    n = scaled(len(x))
    dataset = ingest(x[:n], folder / "rows.zarr", y=y[:n])
    for alpha in (1e-6, 1e-4, 1e-2, 1.0):
        double, _, reference, _ = fit(dataset, MATERN, alpha, "float64", folder, executor)
        mixed, _, solution, _ = fit(dataset, MATERN, alpha, "mixed", folder, executor)
        for precision in ("float64", "mixed"):
            shutil.rmtree(folder / precision)
        found, own = solution.relative_residual[0], reference.relative_residual[0]
        shifted = "shift: " if "broke down" in solution.message else ""
        judge(
            f"mixed: {name}, alpha {alpha:g}",
            f"residual {found:.1e} (float64 {own:.1e}), {solution.num_iterations} iterations, "
            f"{shifted}{mixed:.1f} s (float64 {double:.1f} s)",
            f"n = {n:,}: below 1e-9 or twice float64's",
            found < max(RESIDUAL, 2 * own),
        )


@pytest.mark.parametrize("alpha", [1e-3, 1e-2, 0.1, 1.0])
def test_measure_mixed_time_and_disk(alpha: float, judge: Judge, folder: Path, executor: DaskExecutor) -> None:
    n, d = scaled(24_576), 10
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, d))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(n)
    dataset = ingest(x, folder / "rows.zarr", y=y[:, None])
    double, double_bytes, reference, _ = fit(dataset, RBF, alpha, "float64", folder, executor)
    shutil.rmtree(folder / "float64")
    mixed, mixed_bytes, solution, work = fit(dataset, RBF, alpha, "mixed", folder, executor)
    phases = ", ".join(f"{name} {summary.seconds:.1f} s" for name, summary in work.phases.items())
    found, own = solution.relative_residual[0], reference.relative_residual[0]
    judge(
        f"mixed: time, alpha {alpha:g}",
        f"{mixed / double:.3f} of float64 ({mixed:.1f} of {double:.1f} s; {phases}; {solution.num_iterations} "
        f"iterations to {found:.1e}, float64 {own:.1e})",
        f"n = {n:,}: at most {MAX_TIME_RATIO}, residual below 1e-9",
        mixed <= MAX_TIME_RATIO * double and found < max(RESIDUAL, 2 * own),
        at_full_size=True,
    )
    judge(
        f"mixed: disk, alpha {alpha:g}",
        f"{mixed_bytes / double_bytes:.3f} of float64 ({mixed_bytes / 2**30:.2f} GiB)",
        f"at most {MAX_DISK_RATIO}",
        mixed_bytes <= MAX_DISK_RATIO * double_bytes,
    )
