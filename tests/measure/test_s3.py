"""Object stores: what a tile costs in requests, and what reading and writing one costs in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import dkrr
from dkrr.dataset import ingest
from dkrr.tiles import TileGrid
from tests.measure.figures import Judge, scaled
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = [pytest.mark.measure, pytest.mark.timeout(900)]

TILE_SIZE = 64
MIB = 2**20

ONE_TILE = """
import sys
import numpy as np
from dkrr.store.chunks import ChunkArray

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024

tile = np.random.default_rng(0).standard_normal((2048, 2048))
small = ChunkArray.create(sys.argv[1] + "/small" + sys.argv[2], "", shape=(8, 8), chunks=(8, 8))
small.write((0, 0), tile[:8, :8].copy())
small.read((0, 0))  # what the library itself takes
array = ChunkArray.create(sys.argv[1] + "/large" + sys.argv[2], "", shape=(4096, 2048), chunks=(2048, 2048))
start = peak()
array.write((0, 0), tile)
array.write((1, 0), tile)
written = peak()
a = array.read((0, 0))
b = array.read((1, 0))
for i in range(6):
    del a, b
    a, b = array.read((i % 2, 0)), array.read((1 - i % 2, 0))
print(written - start, peak() - written)
"""


def test_measure_memory_of_a_tile(judge: Judge, bucket: Bucket) -> None:
    base, _, query = bucket.url("memory").partition("?")
    done = subprocess.run(
        [sys.executable, "-c", ONE_TILE, base, "?" + query],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    written, read = (int(text) for text in done.stdout.split())
    judge(
        "object store: peak memory beside a tile of 32 MiB that is written, and of two that are read",
        f"{written / MIB:.1f} MiB, {read / MIB:.1f} MiB",
        "at most 8 MiB, 80 MiB (their buffers, used again and again, and 16 MiB)",
        written <= 8 * MIB and read <= 80 * MIB,
    )


def test_measure_requests_of_a_fit(judge: Judge, bucket: Bucket) -> None:
    n = scaled(1024, least=256)
    X = np.random.default_rng(0).standard_normal((n, 5))
    data = ingest(X, bucket.url("d.zarr"), y=np.sin(X[:, 0]))
    before = len(bucket.server.log())
    model = dkrr.KernelRidge(kernel="rbf", gamma=0.2, alpha=0.1, solver="cholesky", tile_size=TILE_SIZE)
    model.set_params(store=bucket.url("store")).fit(data)
    log = bucket.server.log()[before:]
    grid = TileGrid(n, TILE_SIZE)
    tile = re.compile(r"/factors/[0-9a-f]+\.zarr/c/")
    counts = Counter((item["method"], bool(tile.search(item["path"]))) for item in log)
    # left-looking: tile (i, j) takes 2 j operands and its diagonal tile; two sweeps read each tile once more
    operands = sum(2 * j + 1 if i != j else j for i, j in grid.lower()) + 2 * grid.num_lower
    read, others = counts["GET", True], sum(count for (_, is_tile), count in counts.items() if not is_tile)
    judge(
        f"object store: requests of a fit with {grid.num_lower} tiles",
        f"{counts['PUT', True]} puts, {read} gets, {counts['HEAD', True]} looks at tiles; "
        f"{others / grid.num_lower:.1f} other requests a tile",
        f"one put and one look a tile, at most {operands} gets; at most 12 others a tile",
        counts["PUT", True] == grid.num_lower
        and counts["HEAD", True] <= grid.num_lower
        and read <= operands
        and others <= 12 * grid.num_lower,
    )
