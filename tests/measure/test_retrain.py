"""Retraining on the protein set: two nights with new rows, and one with nothing new."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.jobs import toml
from tests.benchmarks.processes import Completed, run_sampled
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

N = scaled(30_000, least=2000)
BATCH = scaled(300, least=200)
NOTHING_NEW_SECONDS = 5.0
JOB: dict[str, dict[str, Any]] = {
    "retrain": {"name": "protein", "data": "rows.zarr", "incoming": "incoming"},
    "holdout": {"fraction": 0.1},
    "data": {"target": [-1], "header": False, "standardize": True},
    "model": {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}, "alpha": 0.1},
    "solver": {"name": "cholesky"},
    "cluster": {"workers": 2, "memory_limit": "3GiB"},
}


def night(folder: Path, rows: Any = None) -> tuple[Completed, dict[str, Any]]:
    """``dkrr retrain``, as a scheduler runs it, after a delivery if there are ``rows``; how it ended and its report."""
    if rows is not None:
        np.savetxt(folder / f"incoming/{len(list((folder / 'incoming').iterdir()))}.csv", rows, "%.17g", ",")
    command = [sys.executable, "-m", "dkrr.cli", "retrain", str(folder / "RETRAIN.toml"), "--json"]
    done = run_sampled(command, folder=folder)
    return done, json.loads(done.stdout)


def test_measure_retrain_protein(judge: Judge, folder: Path, data_folder: Path) -> None:
    table = np.loadtxt(data_folder / "protein" / "data.csv.gz", delimiter=",")
    table = table[np.random.default_rng(0).permutation(len(table))]
    (folder / "incoming").mkdir()
    (folder / "RETRAIN.toml").write_text(toml.dumps(JOB))
    done, first = night(folder, table[:N])
    judge("retrain: protein, first night", f"{done.seconds:.1f} s for {N:,} rows", "promoted", done.returncode == 0)
    done, nothing = night(folder)
    judge(
        "retrain: protein with nothing new",
        f"{done.seconds:.2f} s, outcome {nothing['outcome']!r}, {len(done.memory.tree)} process",
        f"at most {NOTHING_NEW_SECONDS:g} s, the command alone",
        nothing["outcome"] == "nothing new" and done.seconds <= NOTHING_NEW_SECONDS and len(done.memory.tree) == 1,
        at_full_size=True,
    )
    done, good = night(folder, table[N : N + BATCH])
    reused = good["fit"]["reused"]["factor"]
    judge(
        f"retrain: a night with {BATCH:,} rows more",
        f"{good['outcome']} in {done.seconds:.1f} s, {reused['rows']:,} of {reused['of_rows']:,} rows reused",
        "promoted, every old row reused",
        done.returncode == 0 and reused["rows"] == first["num_rows"],
    )
