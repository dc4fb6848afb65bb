"""What 90 % intervals cover on the test rows of the four sets."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dkrr.linalg.leave_one_out import coverage
from tests.benchmarks.processes import run_sampled
from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

COVERAGE = (0.87, 0.93)
# Matern 3/2 on whitened rows: width and alpha
SETS = {"pol": (2.0, 0.03), "elevators": (2.0, 0.1), "bike": (2.0, 0.03), "protein": (0.75, 0.1)}


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
