"""The rate of the factorisation against the rate of its own gemm, in the same worker processes.

rate of the factorisation    n^3 / 3 over the wall time of the phase: Gram tiles evaluated or read, tiles written, all
rate of gemm                 C -= A B^T on fresh random tiles of the same edge, on all workers at once; the mean of one
                             measurement before and one after the factorisation
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.contenders import WORKERS, blas_in_use

__all__ = ["factorisation_rate", "gemm_rate"]

GEMM_SECONDS = 3.0


def gemm_rate(tile_size: int, dtype: str, start_at: float, seconds: float, seed: int) -> float:
    """Flops a second of gemm on three fresh tiles, from ``start_at`` (wall clock) for about ``seconds``."""
    from dkrr.tiles.blas import gemm_nt

    random = np.random.default_rng(seed)
    c, a, b = (random.standard_normal((tile_size, tile_size)).astype(dtype) for _ in range(3))
    gemm_nt(c, a, b)  # BLAS maps its buffers on the first call
    time.sleep(max(0.0, start_at - time.time()))
    began = time.perf_counter()
    count = 0
    while (elapsed := time.perf_counter() - began) < seconds or not count:
        gemm_nt(c, a, b)
        count += 1
    return 2.0 * tile_size**3 * count / elapsed


def gemm_rate_of_workers(client: Any, tile_size: int, dtype: str, seconds: float = GEMM_SECONDS) -> float:
    """Sum of the rates of all workers, which run at the same time."""
    # time for every worker to fill its tiles and to run one product at 20 GF/s; then all start together
    start_at = time.time() + 0.3 + 1e-7 * tile_size**2 + 1e-10 * tile_size**3
    futures = [
        client.submit(gemm_rate, tile_size, dtype, start_at, seconds, seed, workers=[address], pure=False)
        for seed, address in enumerate(sorted(client.nthreads()))
    ]
    return float(sum(client.gather(futures)))


def factorisation_rate(
    *,
    folder: str,
    scratch: str,
    gamma: float,
    alpha: float,
    tile_size: Any,
    memory_limit: str,
    gram: str = "on_the_fly",
    precision: str = "float64",
    gemm_seconds: float = GEMM_SECONDS,
    **_: Any,
) -> dict[str, Any]:
    """Factorise K + alpha I of the rows in a folder on two workers, with gemm measured before and after."""
    import dkrr
    from dkrr.dataset import ingest
    from dkrr.engine.cluster import memory_limit_of, start_local
    from dkrr.kernels import make_kernel
    from dkrr.linalg.factor.cholesky import factorise
    from dkrr.linalg.gram import build_gram, rows_of
    from dkrr.linalg.operators import RidgeOperator
    from dkrr.linalg.sizes import choose_tile_size
    from dkrr.tiles import TileGrid, TileMatrix

    assert dkrr.__version__
    dataset = ingest(str(Path(folder) / "X.npy"), f"{scratch}/rows.zarr")
    kernel = make_kernel("rbf", gamma=gamma).resolve(dataset.num_features)
    with start_local(WORKERS, 1, memory_limit) as executor:
        if tile_size == "auto":
            limit = memory_limit_of(executor)
            tile_size = choose_tile_size(dataset.num_rows, dataset.num_features, limit, np.dtype(precision).itemsize)
        grid = TileGrid(dataset.num_rows, tile_size)
        operator = RidgeOperator(grid=grid, alpha=alpha, kernel=kernel, rows=rows_of(dataset, kernel))
        if gram == "stored":
            stored = TileMatrix.create(f"{scratch}/gram.zarr", grid, dtype="float64")
            build_gram(operator, stored, executor)
            operator = RidgeOperator(grid=grid, alpha=alpha, kernel=kernel, rows=operator.rows, gram=stored)
        factor = TileMatrix.create(f"{scratch}/factor.zarr", grid, dtype=precision)
        before = gemm_rate_of_workers(executor.client, tile_size, precision, gemm_seconds)
        began = time.perf_counter()
        summary = factorise(operator, factor, executor)
        seconds = time.perf_counter() - began
        after = gemm_rate_of_workers(executor.client, tile_size, precision, gemm_seconds)
        (blas,) = set(executor.client.run(blas_in_use).values())
        missing = len(factor.missing())
    shutil.rmtree(f"{scratch}/factor.zarr")
    if missing or summary.num_computed != grid.num_lower:
        raise AssertionError(f"{summary.num_computed} of {grid.num_lower} tiles computed, {missing} are missing")
    return {
        "seconds": seconds,
        "tile_size": tile_size,
        "flops_per_second": dataset.num_rows**3 / 3 / seconds,
        "gemm_flops_per_second": (before + after) / 2,
        "gemm_before": before,
        "gemm_after": after,
        "busy_seconds": summary.busy_seconds,
        "gram": gram,
        "blas": f"{WORKERS} x ({blas})",
    }
