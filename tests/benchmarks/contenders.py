"""The programs that are compared. Each runs in a process of its own and times its fit alone, imports left out.

Every one gets the same X, y, gamma and alpha, and returns dual_coef, so that answers can be compared before a time
counts.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["blas_in_use", "dask_solve", "dkrr_ridge", "sklearn_ridge"]

WORKERS = 2
SMALL_ROWS = 8192


def blas_in_use() -> str:
    """Kernel and threads of the BLAS libraries of this process, e.g. "SkylakeX x2"."""
    import scipy.linalg  # noqa: F401  (loads SciPy's own BLAS)
    from threadpoolctl import threadpool_info

    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    names = {f"{item.get('architecture', item['internal_api'])} x{item['num_threads']}" for item in libraries}
    return " + ".join(sorted(names))


def _rows(folder: str) -> tuple[Any, Any]:
    return np.load(Path(folder) / "X.npy"), np.load(Path(folder) / "y.npy")


def sklearn_ridge(*, folder: str, gamma: float, alpha: float, **_: Any) -> dict[str, Any]:
    """``sklearn.kernel_ridge.KernelRidge``."""
    from sklearn.kernel_ridge import KernelRidge

    x, y = _rows(folder)
    estimator = KernelRidge(kernel="rbf", gamma=gamma, alpha=alpha)
    blas = blas_in_use()
    began = time.perf_counter()
    estimator.fit(x, y)
    seconds = time.perf_counter() - began
    return {"answer": estimator.dual_coef_, "seconds": seconds, "blas": blas}


def dkrr_ridge(
    *,
    folder: str,
    gamma: float,
    alpha: float,
    tile_size: Any,
    memory_limit: str,
    scratch: str,
    solver: str = "cholesky",
    precision: str = "float64",
    tol: float = 1e-9,
    **_: Any,
) -> dict[str, Any]:
    """``dkrr.KernelRidge`` on the tiled path: a cluster of two one-thread workers is started, used and closed."""
    import dask
    from distributed import Client

    import dkrr
    from dkrr.linalg.sizes import choose_tile_size

    x, y = _rows(folder)
    if tile_size == "auto" and len(x) <= SMALL_ROWS:
        # a small fit would run in this process; the same rule as "auto", said explicitly, keeps it on the tiled path
        tile_size = choose_tile_size(*x.shape, dask.utils.parse_bytes(memory_limit))
    with dask.config.set({"temporary-directory": scratch}):  # the factor's place: a disk, not memory
        estimator = dkrr.KernelRidge(
            kernel="rbf", gamma=gamma, alpha=alpha, tile_size=tile_size, solver=solver, precision=precision, tol=tol
        )
        began = time.perf_counter()
        with dkrr.local_cluster(workers=WORKERS, memory_limit=memory_limit) as cluster, Client(cluster) as client:
            client.wait_for_workers(WORKERS, timeout=60)
            started = time.perf_counter()
            estimator.fit(x, y)
            fitted = time.perf_counter()
            (blas,) = set(client.run(blas_in_use).values())
            asked = time.perf_counter()
        seconds = time.perf_counter() - began - (asked - fitted)
        return {
            "answer": estimator.dual_coef_,
            "seconds": seconds,
            "start_seconds": started - began,
            "blas": f"{WORKERS} x ({blas})",
            "phases": dict(estimator.solution_.seconds),
            "relative_residual": max(estimator.solution_.relative_residual),
            "message": estimator.solution_.message,
        }


def _gram_block(folder: str, gamma: float, alpha: float, edge: int, block_id: tuple[int, int] | None = None) -> Any:
    from sklearn.metrics.pairwise import rbf_kernel

    i, j = block_id or (0, 0)
    rows = np.load(Path(folder) / "X.npy", mmap_mode="r")
    block = rbf_kernel(rows[i * edge : (i + 1) * edge], rows[j * edge : (j + 1) * edge], gamma=gamma)
    if i == j:
        block[np.diag_indices(edge)] += alpha
    return block


def chunk_edge(n: int) -> int:
    """The divisor of n nearest to n / 10: ``dask.array.linalg`` takes equal square chunks only."""
    divisors = {divisor for k in range(1, math.isqrt(n) + 1) if n % k == 0 for divisor in (k, n // k)}
    return min(divisors, key=lambda divisor: (abs(math.log(10 * divisor / n)), divisor))


def dask_solve(
    *, folder: str, gamma: float, alpha: float, scratch: str, memory_fraction: float = 0.4, **_: Any
) -> dict[str, Any]:
    """``dask.array.linalg.solve(assume_a="pos")`` on a ``LocalCluster`` of two one-thread workers.

    Each worker may use 40 % of the memory that is free; beyond that Dask spills to disk, as it does by default.
    """
    import dask
    import dask.array as da
    import psutil
    from dask.distributed import Client, LocalCluster

    n = len(np.load(Path(folder) / "X.npy", mmap_mode="r"))
    y = np.load(Path(folder) / "y.npy")
    edge = chunk_edge(n)
    limit = int(memory_fraction * psutil.virtual_memory().available)
    options: dict[str, Any] = {"n_workers": WORKERS, "threads_per_worker": 1, "memory_limit": limit}
    with dask.config.set({"temporary-directory": scratch}):
        began = time.perf_counter()
        with LocalCluster(**options, dashboard_address=None) as cluster, Client(cluster) as client:
            client.wait_for_workers(WORKERS, timeout=60)
            started = time.perf_counter()
            chunks = (edge,) * (n // edge)
            matrix = da.map_blocks(
                _gram_block,
                folder=folder,
                gamma=gamma,
                alpha=alpha,
                edge=edge,
                chunks=(chunks, chunks),
                dtype=np.float64,
                meta=np.empty((0, 0)),
            )
            answer = da.linalg.solve(matrix, da.from_array(y, chunks=edge), assume_a="pos").compute()
            solved = time.perf_counter()
            (blas,) = set(client.run(blas_in_use).values())
            asked = time.perf_counter()
        seconds = time.perf_counter() - began - (asked - solved)
    return {
        "answer": answer,
        "seconds": seconds,
        "start_seconds": started - began,
        "blas": f"{WORKERS} x ({blas})",
        "chunk_edge": edge,
    }
