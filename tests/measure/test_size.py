"""Size: the whole protein set, from its compressed CSV to the error on its test rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.measure.figures import SCALE, Judge
from tests.measure.jobs import read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

MAX_RMSE = 0.515
TRAINING_ROWS = 41_157


def test_measure_size_protein(judge: Judge, folder: Path, data_folder: Path) -> None:
    if SCALE < 1:
        pytest.skip(f"the protein set has one size; DKRR_MEASURE_SCALE is {SCALE:g}")
    job = write_job(
        folder,
        {
            "data": {
                "path": str(data_folder / "protein" / "data.csv.gz"),
                "target": [-1],
                "header": False,
                "standardize": True,
            },
            "evaluate": {"mask": str(data_folder / "protein" / "test_mask.csv.gz"), "mask_column": 0, "metric": "rmse"},
            "model": {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}, "alpha": 0.1},
            "cluster": {"workers": 2, "memory_limit": "2GiB"},
            "output": {"directory": "run", "store": "store", "keep": "model"},
        },
    )
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    result = read_result(job)
    assert result["plan"]["num_rows"] == TRAINING_ROWS
    (rmse,) = result["score"]["rmse_whitened"]
    peaks = done.memory.peak_by_kind()
    judge(
        "size: protein",
        f"test RMSE {rmse:.4f} (whitened) on {result['score']['num_rows']:,} rows, {done.seconds:.0f} s in all, "
        f"worker {peaks['worker'] / 2**20:.0f} MiB",
        f"{TRAINING_ROWS:,} training rows on two workers of 2 GiB: at most {MAX_RMSE}",
        rmse <= MAX_RMSE and peaks["worker"] < 2 * 2**30,
    )
