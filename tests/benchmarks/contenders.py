"""The programs that are compared. Each runs in a process of its own and times its work alone, imports left out.

Fits get the same X, y, gamma and alpha and return dual_coef, products get the same X and v and return K v, so that
answers can be compared before a time counts. The factorisation is set beside the gemm of its own workers:

rate of the factorisation    n^3 / 3 over the wall time of the phase: Gram tiles evaluated or read, tiles written, all
rate of gemm                 C -= A B^T on fresh random tiles of the same edge, on all workers at once; the mean of one
                             measurement before and one after the factorisation
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.engine.machine import CORETYPE, ONE_THREAD, worker_environment
from tests.benchmarks.harness import Contender, Problem

__all__ = ["FACTORISATION", "LAPLACIAN", "PRODUCTS", "RBF", "contenders"]

WORKERS = 2
SMALL_ROWS = 8192
GEMM_SECONDS = 3.0
# rows of a tile of a product, rows of a block of torch's, and what a product is repeated for
TILE_SIZE, TORCH_ROWS, TIMED_SECONDS = 5000, 1024, 1.0


def contenders() -> dict[str, Contender]:
    """All of them by name.

    Where dkrr's workers use the BLAS kernel as shipped, so does "as shipped", and there is no other variant of it.
    """
    if CORETYPE in os.environ:
        raise RuntimeError(f"{CORETYPE} is set to {os.environ[CORETYPE]}: unset it, contenders get their own values")
    coretype = worker_environment().get(CORETYPE)
    same = {} if coretype is None else {CORETYPE: coretype}
    found = [
        Contender(name="dkrr", family="dkrr", function=f"{__name__}:dkrr_ridge"),
        # the same answer to a residual of 1e-9, by whatever solver the planner takes
        Contender(
            name="dkrr auto",
            family="dkrr auto",
            function=f"{__name__}:dkrr_ridge",
            overrides={"solver": "auto", "precision": "auto"},
        ),
        _sklearn("scikit-learn as shipped", {}),
        _sklearn("scikit-learn, one BLAS thread", ONE_THREAD),
        _sklearn("scikit-learn, Haswell kernels", {CORETYPE: "Haswell"}),
        # the same BLAS kernel as dkrr's workers: what differs is the algorithm
        Contender(name="dask.array.linalg.solve", family="dask", function=f"{__name__}:dask_solve", environment=same),
    ]
    if same:
        found.insert(2, _sklearn(f"scikit-learn, {coretype} kernels", same))
    return {contender.name: contender for contender in found}


def _sklearn(name: str, environment: dict[str, str]) -> Contender:
    return Contender(name=name, family="sklearn", function=f"{__name__}:sklearn_ridge", environment=environment)


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
    from dkrr.linalg.workspace import choose_tile_size

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
    from dkrr.dataset import ingest
    from dkrr.engine.cluster import memory_limit_of, start_local
    from dkrr.kernels import make_kernel
    from dkrr.linalg.direct import factorise
    from dkrr.linalg.gram import build_gram
    from dkrr.linalg.operators import RidgeOperator, rows_of
    from dkrr.linalg.workspace import choose_tile_size
    from dkrr.tiles import TileGrid, TileMatrix

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
        "ratio": dataset.num_rows**3 / 3 / seconds / ((before + after) / 2),
        "gemm_before": before,
        "gemm_after": after,
        "busy_seconds": summary.busy_seconds,
        "gram": gram,
        "blas": f"{WORKERS} x ({blas})",
    }


FACTORISATION = Contender(name="factorisation", function=f"{__name__}:factorisation_rate")


RBF = Problem(n=20_000, d=10, gamma=0.05)
LAPLACIAN = Problem(n=10_000, d=20, gamma=0.05)
# of the largest entry of K v, against dkrr in float64
MAX_ERROR = {"float32": 1e-4, "float64": 1e-9}
ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def _contender(name: str, function: str, precision: str, environment: dict[str, str] | None = None) -> Contender:
    return Contender(
        name=f"{name} {precision}",
        family=name,
        function=f"{__name__}:{function}",
        environment=environment or {},
        overrides={"precision": precision},
        tolerance=MAX_ERROR[precision],
    )


PRODUCTS: dict[str, list[Contender]] = {
    "rbf": [
        # the first one is what the answers of all others are compared with
        *(_contender("dkrr", "dkrr_rbf", precision, ONE_BLAS_THREAD) for precision in ("float64", "float32")),
        *(_contender("pykeops", "keops_rbf", precision) for precision in ("float64", "float32")),
        *(_contender("torch", "torch_rbf", precision) for precision in ("float64", "float32")),
    ],
    "laplacian": [
        _contender("dkrr", "dkrr_laplacian", "float64", ONE_BLAS_THREAD),
        _contender("sklearn", "sklearn_laplacian", "float64"),
    ],
}


def _timed(product: Callable[[], Any]) -> dict[str, Any]:
    """The best of at least three calls and a second: a call of 60 ms is soon disturbed by other programs."""
    answer, seconds = product(), []
    while len(seconds) < 3 or sum(seconds) < TIMED_SECONDS:
        began = time.perf_counter()
        answer = product()
        seconds.append(time.perf_counter() - began)
    return {"answer": answer, "seconds": min(seconds)}


def symmetric_product(kernel: Any, x: Any, v: Any, precision: str, threads: int) -> Any:
    """k(X, X) V (n, t) from the lower tiles, each used twice; a thread takes the next one and adds to its own sum.

    As a fit does it: with tiles dealt out beforehand the slower core decides, 0.148 against 0.114 s where one was busy.
    """
    from dkrr.linalg.products import kernel_product

    spans = [slice(start, start + TILE_SIZE) for start in range(0, len(x), TILE_SIZE)]
    pairs = iter([(rows, columns) for i, rows in enumerate(spans) for columns in spans[: i + 1]])

    def part(_: int) -> Any:
        total = np.zeros_like(v)
        for rows, columns in pairs:
            if rows == columns:
                kernel_product(kernel, x[rows], x[rows], v[rows], total[rows], same=True, precision=precision)  # type: ignore[arg-type]
            else:
                out, out_t = total[rows], total[columns]
                kernel_product(
                    kernel,
                    x[rows],
                    x[columns],
                    v[columns],
                    out,
                    u=v[rows],
                    out_t=out_t,
                    precision=precision,  # type: ignore[arg-type]
                )
        return total

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(part, range(threads)))


def _dkrr(folder: str, gamma: float, precision: str, kernel: str) -> dict[str, Any]:
    from dkrr.engine.machine import cpu_count
    from dkrr.kernels import make_kernel

    x, v = _rows(folder)
    x = x - x.mean(axis=0)
    resolved = make_kernel(kernel, gamma=gamma).resolve(x.shape[1])
    return _timed(lambda: symmetric_product(resolved, x, v[:, None], precision, cpu_count())[:, 0])


def dkrr_rbf(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """:func:`dkrr.linalg.products.kernel_product` on tile pairs, one thread a core."""
    return _dkrr(folder, gamma, precision, "rbf")


def dkrr_laplacian(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """The same with the 1-norm."""
    return _dkrr(folder, gamma, precision, "laplacian")


def sklearn_laplacian(*, folder: str, gamma: float, **_: Any) -> dict[str, Any]:
    """``laplacian_kernel(X, X) @ v``, in blocks of rows that fit into memory."""
    from sklearn.metrics.pairwise import laplacian_kernel

    x, v = _rows(folder)
    spans = [slice(start, start + TILE_SIZE) for start in range(0, len(x), TILE_SIZE)]
    return _timed(lambda: np.concatenate([laplacian_kernel(x[rows], x, gamma=gamma) @ v for rows in spans]))


def keops_rbf(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """``pykeops.numpy.LazyTensor`` on the CPU, all cores by OpenMP."""
    from pykeops.numpy import LazyTensor

    x, v = (np.ascontiguousarray(array, dtype=precision) for array in _rows(folder))
    left, right = LazyTensor(x[:, None, :]), LazyTensor(x[None, :, :])
    factor = np.array([-gamma], dtype=precision)

    def product() -> Any:
        return ((((left - right) ** 2).sum(-1) * factor).exp() @ v[:, None])[:, 0]

    return _timed(product)


def torch_rbf(*, folder: str, gamma: float, precision: str, **_: Any) -> dict[str, Any]:
    """torch in blocks of rows: one augmented product for the exponent, exp in place, times v; all cores."""
    import torch

    x, v = (torch.as_tensor(array.astype(precision)) for array in _rows(folder))
    squares = (x * x).sum(1, keepdim=True)
    ones = torch.ones_like(squares)
    left = torch.cat([2 * gamma * x, -gamma * squares, ones], 1)
    right = torch.cat([x, ones, -gamma * squares], 1).T.contiguous()
    block = torch.empty((TORCH_ROWS, len(x)), dtype=x.dtype)

    def product() -> Any:
        out = torch.empty_like(v)
        for start in range(0, len(x), TORCH_ROWS):
            rows = left[start : start + TORCH_ROWS]
            values = torch.mm(rows, right, out=block[: len(rows)]).exp_()
            out[start : start + TORCH_ROWS] = values @ v
        return out.numpy()

    return _timed(product)
