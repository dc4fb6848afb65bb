"""Standard deviations against scikit-learn's, and what 90 % intervals cover on the test rows of the four sets."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern

import dkrr
from dkrr.kernels import make_kernel
from dkrr.linalg.leave_one_out import coverage
from tests.benchmarks.processes import run_sampled
from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

MAX_DIFFERENCE = 1e-8
COVERAGE = (0.87, 0.93)
KERNELS: dict[str, tuple[Any, Any]] = {
    "rbf": (make_kernel("rbf", gamma=0.125), RBF(2.0)),
    "matern 3/2": (make_kernel("matern", kernel_params={"nu": 1.5, "length_scale": 1.5}), Matern(1.5, nu=1.5)),
    "rbf + 2 matern 5/2": (
        make_kernel("rbf", gamma=0.125) + 2 * make_kernel("matern", kernel_params={"nu": 2.5, "length_scale": 0.8}),
        RBF(2.0) + 2 * Matern(0.8, nu=2.5),
    ),
}
# Matern 3/2 on whitened rows: width and alpha
SETS = {"pol": (2.0, 0.03), "elevators": (2.0, 0.1), "bike": (2.0, 0.03), "protein": (0.75, 0.1)}


@pytest.mark.parametrize("name", list(KERNELS))
def test_measure_std_against_scikit_learn(judge: Judge, folder: Path, name: str) -> None:
    kernel, theirs = KERNELS[name]
    rng = np.random.default_rng(0)
    n = scaled(2_000)
    x, z = 3 + rng.standard_normal((n, 6)), 3 + rng.standard_normal((500, 6))
    y = np.sin(x[:, 0]) + x[:, 1] ** 2 + 0.1 * rng.standard_normal(n)
    worst, ours, process_seconds = 0.0, 0.0, 0.0
    for alpha in (1e-4, 1e-2, 1.0):
        began = time.perf_counter()
        process = GaussianProcessRegressor(theirs, alpha=alpha, optimizer=None).fit(x, y)
        expected = process.predict(z, return_std=True)[1]
        process_seconds += time.perf_counter() - began
        for options in ({}, {"tile_size": 256, "solver": "cholesky", "precision": "float64", "store": folder}):
            began = time.perf_counter()
            model = dkrr.KernelRidge(alpha=alpha, kernel=kernel, **options).fit(x, y)
            found = model.predict(z, return_std=True, sigma2=1.0)[1]
            ours += (time.perf_counter() - began) * (not options)
            worst = max(worst, float(np.max(np.abs(found - expected))))
    judge(
        f"standard deviation: {name}",
        f"{worst:.1e} from scikit-learn's ({ours:.1f} s, {process_seconds:.1f} s)",
        f"n = {n:,}, alpha 1e-4 to 1, in memory and in tiles: at most {MAX_DIFFERENCE:g}",
        worst <= MAX_DIFFERENCE,
    )


def set_rows(name: str, data_folder: Path, folder: Path) -> tuple[np.ndarray, Path, Path]:
    """The test rows of split 0, and the files of all rows and of the mask; fewer training rows at another scale."""
    data, masks = (data_folder / name / file for file in ("data.csv.gz", "test_mask.csv.gz"))
    table = np.loadtxt(data, delimiter=",")
    is_test = np.loadtxt(masks, delimiter=",", usecols=0) == 1
    test = table[is_test]
    if SCALE != 1:
        kept = np.concatenate([np.flatnonzero(~is_test)[: scaled(int(np.sum(~is_test)))], np.flatnonzero(is_test)])
        data, masks = folder / "data.csv", folder / "mask.csv"
        np.savetxt(data, table[kept], delimiter=",", fmt="%.17g")
        np.savetxt(masks, is_test[kept], fmt="%d")
    return test, data, masks


@pytest.mark.parametrize("name", list(SETS))
def test_measure_intervals(judge: Judge, folder: Path, data_folder: Path, name: str) -> None:
    test, data, masks = set_rows(name, data_folder, folder)
    length_scale, alpha = SETS[name]
    job = write_job(
        folder,
        {
            "data": {"path": str(data), "target": [-1], "header": False, "standardize": True},
            "evaluate": {"mask": str(masks), "mask_column": 0, "intervals": 0.9},
            "model": {
                "kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": length_scale}, "alpha": alpha,
            },
            "solver": {"name": "cholesky", "precision": "float64"},
            "cluster": {"workers": 2, "memory_limit": "2GiB"},
            "output": {"directory": "run", "store": "store"},
        },
    )  # fmt: skip
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    result = read_result(job)
    (jackknife,) = result["score"]["coverage"]
    np.savetxt(folder / "test.csv", test[:, :-1], delimiter=",", fmt="%.17g")
    command = [sys.executable, "-m", "dkrr.cli", "predict", *(str(folder / file) for file in ("run", "test.csv"))]
    command += ["-o", str(folder / "out.npy")]
    predicted = run_sampled([*command, "--interval", "0.9", "--method", "normalised", "--std"], folder=folder)
    assert predicted.status == "ok", predicted.stderr
    out = np.load(folder / "out.npy")
    normalised = float(coverage(out[:, 2], out[:, 3], test[:, -1]))
    seconds = {phase: round(value, 1) for phase, value in result["seconds"].items()}
    print(seconds)
    judge(
        f"90 % intervals: {name}",
        f"{jackknife:.1%} (jackknife), {normalised:.1%} (normalised); RMSE {result['score']['rmse_whitened'][0]:.3f}; "
        f"factor {seconds.get('factorise', 0)} s, leave-one-out {seconds.get('leave_one_out', 0)} s, "
        f"std of {len(test):,} rows {predicted.seconds:.1f} s",
        f"{result['plan']['num_rows']:,} training rows: {COVERAGE[0]:.0%} to {COVERAGE[1]:.0%}",
        all(COVERAGE[0] <= share <= COVERAGE[1] for share in (jackknife, normalised)),
    )
