"""Ingest: a 4 GB .npy file becomes a data set within 1 GiB."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dkrr.dataset import open_dataset
from tests.benchmarks.processes import run_sampled
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1800)]

GIB = 2**30
NUM_COLUMNS = 65
FILE_BYTES = 4_000_000_000

READS_AT_ONCE = "import sys, numpy as np; print(np.load(sys.argv[1]).sum())"


def test_measure_ingest_memory(judge: Judge, folder: Path) -> None:
    n = scaled(-(-FILE_BYTES // (8 * NUM_COLUMNS)))
    source = folder / "big.npy"
    matrix = np.lib.format.open_memmap(source, mode="w+", dtype=np.float64, shape=(n, NUM_COLUMNS))
    random = np.random.default_rng(0)
    for start in range(0, n, 65_536):
        rows = slice(start, min(start + 65_536, n))
        matrix[rows] = random.random(NUM_COLUMNS)  # a row repeated 65,536 times is quick to make
    last = np.array(matrix[-1])
    matrix.flush()
    del matrix
    size = source.stat().st_size
    command = [sys.executable, "-m", "dkrr.cli", "ingest", str(source), str(folder / "rows.zarr"), "--target", "-1"]
    done = run_sampled(command, folder=folder)
    assert done.status == "ok", done.stderr
    dataset = open_dataset(str(folder / "rows.zarr"))
    assert (dataset.num_rows, dataset.num_features, dataset.num_targets) == (n, NUM_COLUMNS - 1, 1)
    assert dataset.y is not None
    np.testing.assert_array_equal(dataset.read(n - 1, n)[0], last[:-1])
    np.testing.assert_array_equal(dataset.y.read(n - 1, n)[0], last[-1:])
    peak = done.memory.peak_by_kind()["command"]
    judge(
        "memory: ingest",
        f"{peak / 2**20:.0f} MiB for {size / 1e9:.2f} GB in {done.seconds:.0f} s",
        "below 1 GiB",
        peak < GIB,
    )
    at_once = run_sampled([sys.executable, "-c", READS_AT_ONCE, str(source)], folder=folder)
    judge(
        "memory: ingest, control",
        f"read at once: {at_once.memory.total_peak_bytes / 2**20:.0f} MiB ({at_once.status})",
        "above 1 GiB",
        at_once.memory.total_peak_bytes > GIB,
        at_full_size=True,
    )
