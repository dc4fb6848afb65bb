"""Exact leave-one-out: at most 1.3 times the factorisation's time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dkrr.dataset import ingest
from dkrr.engine.cluster import blas_of, checked_executor, local_cluster, memory_limit_of
from dkrr.fit.fitting import FitSettings, ridge_operator
from dkrr.kernels import make_kernel
from dkrr.linalg.direct import CholeskySolver
from dkrr.linalg.triangular import inverse_diagonal, inverse_room
from dkrr.linalg.workspace import Workspace, choose_tile_size
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

MAX_RATIO = 1.3
MEMORY = 2**30


@pytest.fixture
def client() -> Iterator[Any]:
    """Two workers of 1 GiB."""
    with local_cluster(workers=2, memory_limit=MEMORY) as cluster, Client(cluster) as found:
        found.wait_for_workers(2, timeout=60)
        yield found


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_measure_exact_leave_one_out_through_tiles(judge: Judge, folder: Path, client: Any, precision: Any) -> None:
    n = scaled(20_480)
    x = np.random.default_rng(0).standard_normal((n, 10))
    dataset = ingest(x, folder / "rows.zarr", y=np.sin(x[:, 0]))
    executor = checked_executor(client)
    limit = memory_limit_of(executor)
    assert limit is not None
    kernel = make_kernel("rbf", gamma=0.1).resolve(10)
    b = choose_tile_size(n, 10, limit, np.dtype(precision).itemsize)
    settings = FitSettings(kernel=kernel, alpha=(1e-2,), tile_size=b)
    work = Workspace(store=str(folder / "store"), executor=executor, blas=blas_of(executor))
    factor = CholeskySolver(precision=precision).prepare(ridge_operator(dataset, settings, 1e-2), work)
    diagonal = inverse_diagonal(factor, memory_bytes=inverse_room(limit))
    assert ((diagonal > 0) & (diagonal <= 1e2 * (1 + 1e-3))).all()
    made, inverted = work.phases["factorise"], work.phases["invert"]
    peak = max(inverted.peak_rss_bytes.values())
    ratio = inverted.seconds / made.seconds
    judge(
        f"leave-one-out through tiles, {precision}",
        f"{ratio:.2f} x the factorisation ({inverted.seconds:.1f} s, {made.seconds:.1f} s; "
        f"{inverted.flops_computed / inverted.seconds / 1e9:.0f} and {made.flops_computed / made.seconds / 1e9:.0f} "
        f"GF/s; worker {peak / 2**20:.0f} MiB)",
        f"n = {n:,}, tiles of {b}, two workers of 1 GiB: at most {MAX_RATIO}",
        ratio <= MAX_RATIO and peak < MEMORY,
        at_full_size=True,
    )
