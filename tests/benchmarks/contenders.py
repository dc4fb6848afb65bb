"""The programs that are compared. Each runs in a process of its own and times its work alone, imports left out.

Fits get the same X, y, gamma and alpha and return dual_coef, products get the same X and v and return K v, so that
answers can be compared before a time counts. The factorisation is set beside the gemm of its own workers:

rate of the factorisation    n^3 / 3 over the wall time of the phase: Gram tiles evaluated, tiles written, all
rate of gemm                 C -= A B^T on fresh random tiles of the same edge, on all workers at once; the mean of one
                             measurement before and one after the factorisation
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dkrr.engine.machine import CORETYPE, ONE_THREAD
from tests.benchmarks.harness import Contender, Problem

WORKERS, MEMORY_LIMIT = 2, "2GiB"
# rows of a tile of a product, rows of a block of torch's, and what a product is repeated for
TILE_SIZE, TORCH_ROWS, TIMED_SECONDS = 5000, 1024, 1.0
# below so many rows a fit would not take tiles by itself; they are as large as those of "auto"
SMALL_ROWS, SMALL_TILE = 8192, 256
GEMM_SECONDS = 3.0


def sklearn_ridge(problem: Problem, _: str) -> dict[str, Any]:
    """``sklearn.kernel_ridge.KernelRidge``."""
    from sklearn.kernel_ridge import KernelRidge

    x, y = problem.rows()
    began = time.perf_counter()
    estimator = KernelRidge(kernel="rbf", gamma=problem.gamma, alpha=problem.alpha).fit(x, y)
    return {"seconds": time.perf_counter() - began, "answer": estimator.dual_coef_}


def dkrr_ridge(problem: Problem, scratch: str, **options: Any) -> dict[str, Any]:
    """``dkrr.KernelRidge`` on tiles: a cluster of two one-thread workers is started, used and closed."""
    import dask
    from distributed import Client

    import dkrr

    x, y = problem.rows()
    options |= {"tile_size": SMALL_TILE} if len(x) <= SMALL_ROWS else {}
    with dask.config.set({"temporary-directory": scratch}):  # the factor's place: a disk, not memory
        estimator = dkrr.KernelRidge(kernel="rbf", gamma=problem.gamma, alpha=problem.alpha, tol=1e-9, **options)
        began = time.perf_counter()
        with dkrr.local_cluster(workers=WORKERS, memory_limit=MEMORY_LIMIT) as cluster, Client(cluster) as client:
            client.wait_for_workers(WORKERS, timeout=60)
            started = time.perf_counter()
            estimator.fit(x, y)
        seconds, solution = time.perf_counter() - began, estimator.solution_
        told = {"start_seconds": started - began, "residual": max(solution.relative_residual)}
        return {"seconds": seconds, "answer": estimator.dual_coef_, "message": solution.message, **told}


FLOAT64 = Contender(name="dkrr", function=dkrr_ridge, options={"solver": "cholesky", "precision": "float64"})
# the same answer to a residual of 1e-9, by whatever solver the planner takes
AUTO = Contender(name="dkrr auto", function=dkrr_ridge)
SKLEARN = [
    Contender(name="scikit-learn as shipped", function=sklearn_ridge),
    Contender(name="scikit-learn, one BLAS thread", function=sklearn_ridge, environment=ONE_THREAD),
    Contender(name="scikit-learn, Haswell kernels", function=sklearn_ridge, environment={CORETYPE: "Haswell"}),
]


# --- the factorisation ------------------------------------------------------------------------------------------------


def gemm_rate(tile_size: int, start_at: float, seed: int) -> float:
    """Flops a second of gemm on three fresh tiles, from ``start_at`` (wall clock) for some seconds."""
    from dkrr.tiles.blas import gemm_nt

    c, a, b = np.random.default_rng(seed).standard_normal((3, tile_size, tile_size))
    gemm_nt(c, a, b)  # BLAS maps its buffers on the first call
    time.sleep(max(0.0, start_at - time.time()))
    began, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < GEMM_SECONDS or not count:
        gemm_nt(c, a, b)
        count += 1
    return 2.0 * tile_size**3 * count / elapsed


def factorisation(problem: Problem, scratch: str) -> dict[str, Any]:
    """Factorise K + alpha I on two workers; ``ratio`` to the rate of their gemm before and after."""
    from dkrr.dataset import ingest
    from dkrr.engine.cluster import memory_limit_of, start_local
    from dkrr.kernels import make_kernel
    from dkrr.linalg.direct import factorise
    from dkrr.linalg.operators import RidgeOperator, rows_of
    from dkrr.linalg.workspace import Workspace, choose_tile_size
    from dkrr.tiles import TileGrid, TileMatrix

    n, d = problem.n, problem.d
    dataset, kernel = ingest(problem.rows()[0], f"{scratch}/rows.zarr"), make_kernel("rbf", gamma=problem.gamma)
    with start_local(WORKERS, 1, MEMORY_LIMIT) as executor:
        b = choose_tile_size(n, d, memory_limit_of(executor))
        rows = rows_of(dataset, kernel := kernel.resolve(d))
        operator = RidgeOperator(grid=TileGrid(n, b), alpha=problem.alpha, kernel=kernel, rows=rows)
        factor = TileMatrix.create(f"{scratch}/factor.zarr", operator.grid, dtype="float64")
        client = executor.client

        def rate() -> float:
            # time for every worker to fill its tiles and to run one product at 20 GF/s; then all start together
            start_at = time.time() + 0.3 + 1e-7 * b**2 + 1e-10 * b**3
            futures = [
                client.submit(gemm_rate, b, start_at, seed, workers=[address], pure=False)
                for seed, address in enumerate(sorted(client.nthreads()))
            ]
            return float(sum(client.gather(futures)))

        before, began = rate(), time.perf_counter()
        factorise(operator, factor, Workspace("", executor))
        seconds = time.perf_counter() - began
        gemm, own = (before + rate()) / 2, n**3 / 3 / seconds
    assert not factor.missing()
    return {"seconds": seconds, "answer": [1.0], "ratio": own / gemm, "rate": own, "gemm": gemm, "tile_size": b}


# --- products ---------------------------------------------------------------------------------------------------------


def _timed(product: Callable[[], Any]) -> dict[str, Any]:
    """The best of at least three calls and a second: a call of 60 ms is soon disturbed by other programs."""
    answer, seconds = product(), list[float]()
    while len(seconds) < 3 or sum(seconds) < TIMED_SECONDS:
        began = time.perf_counter()
        answer = product()
        seconds.append(time.perf_counter() - began)
    return {"answer": answer, "seconds": min(seconds)}


def symmetric_product(kernel: Any, x: Any, v: Any, precision: Any, threads: int) -> Any:
    """k(X, X) V (n, t) from the lower tiles, each used twice; a thread takes the next one and adds to its own sum.

    As a fit does it: with tiles dealt out beforehand the slower core decides, 0.148 against 0.114 s where one was busy.
    """
    from dkrr.linalg.products import kernel_product

    spans = [slice(start, start + TILE_SIZE) for start in range(0, len(x), TILE_SIZE)]
    pairs = iter([(rows, columns) for i, rows in enumerate(spans) for columns in spans[: i + 1]])

    def part(_: int) -> Any:
        total = np.zeros_like(v)
        for rows, columns in pairs:
            is_same = rows == columns
            other: dict[str, Any] = {"same": True} if is_same else {"u": v[rows], "out_t": total[columns]}
            kernel_product(kernel, x[rows], x[columns], v[columns], total[rows], precision=precision, **other)
        return total

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(part, range(threads)))


def dkrr_product(problem: Problem, _: str, *, kernel: str, precision: str) -> dict[str, Any]:
    """:func:`dkrr.linalg.products.kernel_product` on tile pairs, one thread a core."""
    from dkrr.engine.machine import cpu_count
    from dkrr.kernels import make_kernel

    x, v = problem.rows()
    resolved = make_kernel(kernel, gamma=problem.gamma).resolve(problem.d)
    return _timed(lambda: symmetric_product(resolved, x - x.mean(axis=0), v[:, None], precision, cpu_count())[:, 0])


def sklearn_product(problem: Problem, _: str) -> dict[str, Any]:
    """``laplacian_kernel(X, X) @ v``, in blocks of rows that fit into memory."""
    from sklearn.metrics.pairwise import laplacian_kernel

    x, v = problem.rows()
    spans = [slice(start, start + TILE_SIZE) for start in range(0, len(x), TILE_SIZE)]
    return _timed(lambda: np.concatenate([laplacian_kernel(x[rows], x, gamma=problem.gamma) @ v for rows in spans]))


def keops_product(problem: Problem, _: str, *, precision: str) -> dict[str, Any]:
    """``pykeops.numpy.LazyTensor`` on the CPU, all cores by OpenMP."""
    from pykeops.numpy import LazyTensor

    x, v = (np.ascontiguousarray(array, dtype=precision) for array in problem.rows())
    left, right = LazyTensor(x[:, None, :]), LazyTensor(x[None, :, :])
    factor = np.array([-problem.gamma], dtype=precision)
    return _timed(lambda: ((((left - right) ** 2).sum(-1) * factor).exp() @ v[:, None])[:, 0])


def torch_product(problem: Problem, _: str, *, precision: str) -> dict[str, Any]:
    """torch in blocks of rows: one augmented product for the exponent, exp in place, times v; all cores."""
    import torch

    (x, v), gamma = (torch.as_tensor(array.astype(precision)) for array in problem.rows()), problem.gamma
    squares = (x * x).sum(1, keepdim=True)
    ones = torch.ones_like(squares)
    left = torch.cat([2 * gamma * x, -gamma * squares, ones], 1)
    right = torch.cat([x, ones, -gamma * squares], 1).T.contiguous()
    block = torch.empty((TORCH_ROWS, len(x)), dtype=x.dtype)

    def product() -> Any:
        out = torch.empty_like(v)
        for start in range(0, len(x), TORCH_ROWS):
            rows = left[start : start + TORCH_ROWS]
            out[start : start + TORCH_ROWS] = torch.mm(rows, right, out=block[: len(rows)]).exp_() @ v
        return out.numpy()

    return _timed(product)


# of the largest entry of K v, against dkrr in float64
MAX_ERROR = {"float64": 1e-9, "float32": 1e-4}


def _products(name: str, function: Callable[..., dict[str, Any]], **options: Any) -> list[Contender]:
    own = {"environment": {"OPENBLAS_NUM_THREADS": "1"}} if name == "dkrr" else {}
    return [
        Contender(name=f"{name} {precision}", function=function, tolerance=most, **own,
                  options=options | {"precision": precision})
        for precision, most in MAX_ERROR.items()
    ]  # fmt: skip


RBF_PRODUCTS = {
    "dkrr": _products("dkrr", dkrr_product, kernel="rbf"),
    "pykeops": _products("pykeops", keops_product),
    "torch": _products("torch", torch_product),
}
LAPLACIAN_PRODUCTS = [
    _products("dkrr", dkrr_product, kernel="laplacian")[0],
    Contender(name="sklearn float64", function=sklearn_product, tolerance=MAX_ERROR["float64"]),
]
