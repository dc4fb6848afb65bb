"""Memory: each process below its limit, a flat line over n, a hard limit on a job with its page cache, and ingest."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dkrr.dataset import open_dataset
from dkrr.tiles import TileGrid
from tests.benchmarks.processes import run_sampled
from tests.measure.cgroups import NoControlGroupError, limited_group
from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import job_document, read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

GIB = 2**30
MIB = 2**20


@pytest.mark.parametrize("gram", ["stored", "on_the_fly"])
def test_measure_memory(judge: Judge, folder: Path, gram: str) -> None:
    n = scaled(40_960)
    limit = 3 * GIB // 2
    job = write_job(
        folder,
        job_document(n, solver={"gram": gram}, cluster={"memory_limit": "1.5GiB"}, output={"keep": "model"}),
    )
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    assert read_result(job)["plan"]["gram"] == gram
    peaks = done.memory.peak_by_kind()
    shown = ", ".join(f"{kind} {peak / MIB:.0f} MiB" for kind, peak in sorted(peaks.items()))
    judge(
        f"memory: {gram}",
        f"{shown}; whole tree {done.memory.total_peak_bytes / MIB:.0f} MiB; {8e-9 * n * n:.1f} GB Gram matrix",
        f"n = {n:,}: workers below 1.5 GiB, client and scheduler below 1 GiB",
        peaks["worker"] < limit and peaks["nanny"] < limit and peaks["command"] < GIB,
    )
    assert sum(kind == "worker" for _, kind in done.memory.peaks) == 2, "a worker was started again"
    # what Dask's memory monitors say when they spill, pause, terminate or restart
    assert "memory" not in done.stderr.lower(), done.stderr


DENSE = """
import sys
import numpy as np
from sklearn.kernel_ridge import KernelRidge
n = int(sys.argv[1])
random = np.random.default_rng(0)
X = random.standard_normal((n, 10))
KernelRidge(kernel="rbf", gamma=0.1, alpha=1e-3).fit(X, X[:, 0])
print("done")
"""


def test_measure_memory_hard_limit(judge: Judge, folder: Path) -> None:
    n, tile_size = scaled(32_768), 1024 if SCALE == 1 else 128
    tile_bytes = 8 * tile_size**2 + 4
    matrices = 2 * TileGrid(n, tile_size).num_lower * tile_bytes
    limit = (matrices // 8 if SCALE == 1 else GIB) // 4096 * 4096
    job = write_job(
        folder,
        job_document(
            n,
            solver={"gram": "stored", "tile_size": tile_size},
            cluster={"memory_limit": "400MiB"},
            output={"keep": "all"},
        ),
    )
    try:
        with limited_group(limit) as group:
            done = run_fit(job, prefix=group.prefix)
            peak, kills = group.peak_bytes, group.num_kills
    except NoControlGroupError as exc:
        pytest.skip(str(exc))
    assert done.status == "ok", done.stderr
    result = read_result(job)
    kept = sum(result["kept"].values())
    judge(
        "memory: hard limit",
        f"done in {done.seconds:.0f} s (factorise {result['seconds']['factorise']:.0f} s) within {limit / MIB:.0f} "
        f"MiB, page cache included (peak {peak / MIB:.0f} MiB, {kills} killed); Gram and factor {kept / MIB:.0f} MiB, "
        f"{kept / limit:.2f} x the limit",
        f"n = {n:,}: done, at least 8 x",
        kept >= 8 * limit and peak <= limit and kills == 0,
        at_full_size=True,
    )
    # the limit is one: a dense fit of twice its size is killed, a small one is not
    with limited_group(limit) as group:
        small = run_sampled([*group.prefix, sys.executable, "-c", DENSE, "500"], folder=folder)
        assert (small.status, group.num_kills) == ("ok", 0)
    with limited_group(limit) as group:
        rows = int(np.sqrt(2 * limit / 8))
        dense = run_sampled([*group.prefix, sys.executable, "-c", DENSE, str(rows)], folder=folder)
        kills = group.num_kills
    judge(
        "memory: hard limit, control",
        f"scikit-learn at n = {rows:,} under the same limit: {dense.status}, {kills} killed",
        "killed",
        dense.status == "crashed (SIGKILL)" and kills >= 1,
    )


HOLDS_A_ROW = """
import sys, time
import numpy as np
from dkrr.tiles import TileMatrix
factor = TileMatrix.open(sys.argv[1])
last = factor.grid.num_tiles - 1
held = [np.array(factor.read(last, j)) for j in range(last)]
time.sleep(1.0)  # longer than the interval at which memory is looked at
"""


def test_measure_memory_flat(judge: Judge, folder: Path) -> None:
    sizes = [scaled(n) for n in (2048, 4096, 8192, 16_384)]
    tile_size = 512 if SCALE == 1 else 64
    peaks, wrong = [], []
    for n in sizes:
        job = write_job(folder / str(n), job_document(n, solver={"tile_size": tile_size}))
        done = run_fit(job)
        assert done.status == "ok", done.stderr
        peaks.append(done.memory.peak_by_kind()["worker"])
        (factor,) = read_result(job)["kept"]
        bad = run_sampled([sys.executable, "-c", HOLDS_A_ROW, factor], folder=folder)
        assert bad.status == "ok", bad.stderr
        wrong.append(bad.memory.peak_by_kind()["command"])
    grown = sizes[-1] - sizes[0]
    # X (d = 10), weights, right-hand side, z, u and two vectors of the residual; 16 MiB for what repeats do not repeat
    bar = 8 * grown * (10 + 6) + 16 * MIB
    judge(
        "memory: flat line",
        f"workers {', '.join(f'{peak / MIB:.1f}' for peak in peaks)} MiB, up {(max(peaks) - peaks[0]) / MIB:.1f} MiB",
        f"n = {', '.join(f'{n:,}' for n in sizes)} at b = {tile_size}: at most {bar / MIB:.1f} MiB",
        max(peaks) - peaks[0] <= bar,
    )
    judge(
        "memory: flat line, control",
        f"a process that holds a row of tiles grows by {(wrong[-1] - wrong[0]) / MIB:.1f} MiB",
        f"more than {bar / MIB:.1f} MiB",
        wrong[-1] - wrong[0] > bar,
        at_full_size=True,
    )


NUM_COLUMNS = 65
FILE_BYTES = 4_000_000_000


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
