"""Submission that scales: the price of a tile in the driver."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from dkrr.dataset import ingest
from dkrr.engine.cluster import start_local
from dkrr.kernels import make_kernel
from dkrr.linalg.direct import factorise
from dkrr.linalg.gram import build_gram
from dkrr.linalg.operators import RidgeOperator, rows_of
from dkrr.tiles import TileGrid, TileMatrix
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

MAX_TILE_SECONDS, MAX_SCHEDULER_BYTES = 1e-3, 500 * 2**20


def system_of(folder: Path, n: int, tile_size: int) -> RidgeOperator:
    """A small kernel on n standard normal rows of 10 features."""
    x = np.random.default_rng(0).standard_normal((n, 10))
    dataset = ingest(x, f"{folder}/rows-{n}.zarr")
    kernel = make_kernel("rbf", gamma=0.1).resolve(10)
    return RidgeOperator(grid=TileGrid(n, tile_size), alpha=1e-2, kernel=kernel, rows=rows_of(dataset, kernel))


@pytest.mark.parametrize("phase", ["gram", "factorise"])
def test_measure_scale_submission(judge: Judge, folder: Path, phase: str) -> None:
    """The scheduler of a local cluster lives in the process of the driver: one figure for both."""
    n = scaled(6400, 640)
    system = system_of(folder, n, 64)
    matrix = TileMatrix.create(f"{folder}/matrix.zarr", system.grid, dtype="float64")
    process = psutil.Process()
    with start_local(2, 1, "1GiB") as executor:
        began, clock = sum(process.cpu_times()[:2]), time.perf_counter()
        run = factorise(system, matrix, executor) if phase == "factorise" else build_gram(system, matrix, executor)
        spent, seconds = sum(process.cpu_times()[:2]) - began, time.perf_counter() - clock
        resident = process.memory_info().rss
    count = system.grid.num_lower
    assert run.num_computed == count
    judge(
        f"scale: submission, {phase}",
        f"{1e3 * spent / count:.2f} ms a tile for driver and scheduler ({count:,} tiles in {seconds:.1f} s), "
        f"RSS {resident / 2**20:.0f} MiB",
        f"{count:,} tiles, b = 64: below {1e3 * MAX_TILE_SECONDS:g} ms, {MAX_SCHEDULER_BYTES / 2**20:.0f} MiB",
        spent / count < MAX_TILE_SECONDS and resident < MAX_SCHEDULER_BYTES,
        at_full_size=True,
    )
