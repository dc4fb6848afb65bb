"""The factorisation through Dask against the same graph in a plain process pool, without barriers.

pool     one process a worker and one pipe for each; the parent keeps a heap of the tasks that may run, and hands the
         first of them, in the same order of priorities, to whoever is free. No scheduler, no heartbeats, no window.
Dask     what dkrr does.

Both run the same functions on the same nodes, with the same split, and give the same bytes. What differs is the price
of Dask.
"""

from __future__ import annotations

import hashlib
import heapq
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dkrr.engine.machine import worker_environment
from dkrr.engine.tasks import InProcessExecutor, Node, Progress, RunSummary, run_task
from tests.benchmarks.contenders import WORKERS
from tests.benchmarks.factorisation import GEMM_SECONDS, gemm_rate_of_workers

__all__ = ["PoolExecutor", "dask_against_pool"]


def serve(pipe: Connection) -> None:
    """Answer each key with a receipt, and take another graph, (function, payload), in its place; None is the end."""
    function, payload = None, None
    while (message := pipe.recv()) is not None:
        if callable(message[0]):
            function, payload = message
        else:
            pipe.send(run_task(function, payload, message))


class PoolExecutor(InProcessExecutor):
    """Runs graphs on fresh processes; ``num_threads`` of them."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        context = multiprocessing.get_context("spawn")
        saved = {name: os.environ.get(name) for name in worker_environment()}
        os.environ.update(worker_environment())  # the BLAS environment of a worker
        self.pipes: list[Connection] = []
        self.processes = []
        for _ in range(num_threads):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there,), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    def run(
        self,
        phase: str,
        function: Any,
        payload: Any,
        nodes: Sequence[Node],
        progress: Progress | None = None,
    ) -> RunSummary:
        position = {node.key: rank for rank, node in enumerate(nodes)}
        waits = [len(node.dependencies) for node in nodes]
        followers: list[list[int]] = [[] for _ in nodes]
        for rank, node in enumerate(nodes):
            for key in node.dependencies:
                followers[position[key]].append(rank)
        ready = [rank for rank, count in enumerate(waits) if not count]
        heapq.heapify(ready)
        for pipe in self.pipes:
            pipe.send((function, payload))
        started, summary = time.perf_counter(), RunSummary()
        free, running = list(self.pipes), {}
        while ready or running:
            while ready and free:
                pipe, rank = free.pop(), heapq.heappop(ready)
                pipe.send(nodes[rank].key)
                running[pipe] = rank
            for pipe in wait(list(running)):
                receipt, rank = pipe.recv(), running.pop(pipe)  # type: ignore[union-attr,arg-type]
                free.append(pipe)  # type: ignore[arg-type]
                summary.add(receipt, nodes[rank])
                for follower in followers[rank]:
                    waits[follower] -= 1
                    if not waits[follower]:
                        heapq.heappush(ready, follower)
        summary.seconds = time.perf_counter() - started
        return summary

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join(10)
            process.kill()


def digest_of(folder: str) -> str:
    """One digest of all tiles."""
    total = hashlib.sha256()
    for path in sorted(Path(folder).glob("c/*/*")):
        total.update(f"{path.parent.name}/{path.name}".encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def dask_against_pool(
    *,
    folder: str,
    scratch: str,
    gamma: float,
    alpha: float,
    tile_size: Any,
    memory_limit: str,
    repeats: int = 3,
    gemm_seconds: float = GEMM_SECONDS,
    **_: Any,
) -> dict[str, Any]:
    """Factorise in turns, Dask first; seconds of every turn, the rate of gemm in between, and whether bytes agree."""
    from dkrr.dataset import ingest
    from dkrr.engine.cluster import start_local
    from dkrr.kernels import make_kernel
    from dkrr.linalg.factor.cholesky import factorise
    from dkrr.linalg.gram import rows_of
    from dkrr.linalg.operators import RidgeOperator
    from dkrr.linalg.sizes import choose_tile_size
    from dkrr.tiles import TileGrid, TileMatrix

    dataset = ingest(str(Path(folder) / "X.npy"), f"{scratch}/rows.zarr")
    kernel = make_kernel("rbf", gamma=gamma).resolve(dataset.num_features)
    if tile_size == "auto":
        tile_size = choose_tile_size(dataset.num_rows, dataset.num_features, None)
    grid = TileGrid(dataset.num_rows, tile_size)
    operator = RidgeOperator(grid=grid, alpha=alpha, kernel=kernel, rows=rows_of(dataset, kernel))
    seconds: dict[str, list[float]] = {"dask": [], "pool": []}
    digests, rates = set(), []
    with start_local(WORKERS, 1, memory_limit) as executor:
        for _ in range(repeats):
            for name in seconds:
                factor = TileMatrix.create(f"{scratch}/factor.zarr", grid, dtype="float64")
                pool = PoolExecutor(WORKERS) if name == "pool" else None
                if pool is not None:  # its processes import what they need before the clock starts
                    warm_up(pool)
                seconds[name].append(factorise(operator, factor, pool or executor).seconds)
                if pool is not None:
                    pool.close()
                digests.add(digest_of(f"{scratch}/factor.zarr"))
                shutil.rmtree(f"{scratch}/factor.zarr")
            rates.append(gemm_rate_of_workers(executor.client, tile_size, "float64", gemm_seconds))
    return {
        "seconds": min(seconds["dask"]),
        "dask_seconds": seconds["dask"],
        "pool_seconds": seconds["pool"],
        "gemm_flops_per_second": rates,
        "flops": dataset.num_rows**3 / 3,
        "tile_size": tile_size,
        "num_factors": len(digests),
    }


def nothing(payload: Any, i: int) -> bool:
    """Loads what tasks load."""
    import dkrr.linalg.factor.cholesky  # noqa: F401

    return bool(payload is None)


def warm_up(pool: PoolExecutor) -> None:
    """One empty task on each process."""
    for pipe in pool.pipes:
        pipe.send((nothing, None))
        pipe.send((0,))
    for pipe in pool.pipes:
        pipe.recv()
