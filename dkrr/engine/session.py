"""Who runs the tasks: the Dask client that is found, a local cluster started for the occasion, or this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from threadpoolctl import threadpool_info

from dkrr.engine.tasks import DaskExecutor, Executor, InProcessExecutor

__all__ = ["blas_of", "connect_executor", "executor_facts", "executor_for", "memory_limit_of", "start_local"]


@contextmanager
def executor_for() -> Iterator[Executor]:
    """An executor found by the usual Dask rules.

    A client of the caller is used and left open. Inside a Dask worker or a daemonic process tasks run in this process.
    Otherwise a local cluster of one-thread worker processes is started, and closed at the end.
    """
    from dkrr.engine.cluster import find_client, runs_in_process

    if runs_in_process():
        yield InProcessExecutor()
        return
    client = find_client()
    if client is not None:
        yield checked_executor(client)
        return
    with start_local() as executor:
        yield executor


@contextmanager
def start_local(
    workers: int | None = None, threads_per_worker: int = 1, memory_limit: Any = "auto"
) -> Iterator[DaskExecutor]:
    """An executor on a local cluster that lives as long as the block."""
    from distributed import Client

    from dkrr.engine.cluster import local_cluster

    with (
        local_cluster(workers=workers, threads_per_worker=threads_per_worker, memory_limit=memory_limit) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(len(cluster.worker_spec), timeout=60)
        yield checked_executor(client)


def checked_executor(client: Any) -> DaskExecutor:
    """An executor on a client whose workers passed the start-up check."""
    from dkrr.engine.checks import check_workers

    executor = DaskExecutor(client)
    executor.workers = check_workers(client)
    return executor


def memory_limit_of(executor: Executor) -> int | None:
    """The smallest memory limit of the workers in bytes, per task that runs at once; None when there is none."""
    if not isinstance(executor, DaskExecutor):
        return None
    workers = executor.client.scheduler_info(n_workers=-1)["workers"].values()
    limits = [worker["memory_limit"] // max(1, worker["nthreads"]) for worker in workers if worker["memory_limit"]]
    return min(limits) if limits else None


def blas_of(executor: Executor) -> str:
    """Name of the BLAS kernel the tasks use, e.g. "openblas-SkylakeX"; the same bits need the same kernel."""
    info = executor.workers[0].blas if isinstance(executor, DaskExecutor) and executor.workers else threadpool_info()
    names = sorted(
        {
            f"{library['internal_api']}-{library.get('architecture')}"
            for library in info
            if library.get("user_api") == "blas"
        }
    )
    return "+".join(names)


@contextmanager
def connect_executor(scheduler: str, *, workers: int | None = None, insecure: bool = False) -> Iterator[DaskExecutor]:
    """An executor on a scheduler that is already there: tcp://..., tls://..., or a scheduler file."""
    from dkrr.engine.cluster import connect

    with connect(scheduler, workers=workers or 1, insecure=insecure) as client:
        yield checked_executor(client)


def executor_facts(executor: Executor) -> dict[str, Any]:
    """What a status says about an executor: scheduler, dashboard, numbers of workers and threads, refused workers.

    Asks nobody: it is called every few seconds, also while a scheduler is gone.
    """
    if not isinstance(executor, DaskExecutor):
        return {"scheduler": "this process", "num_workers": 0, "num_threads": executor.num_threads}
    client, workers = executor.client, list(executor.workers)
    scheduler = getattr(client.scheduler, "address", None)
    return {
        "scheduler": scheduler or "",
        "dashboard": _dashboard(client),
        "num_workers": len(workers),
        "num_threads": sum(int(worker.threads) for worker in workers),
        "refused_workers": [dict(worker) for worker in getattr(executor, "refused", [])],
    }


def _dashboard(client: Any) -> str:
    """Link of the dashboard, from what the client knows already; empty where there is none.

    A cluster that was started for the occasion has a port too, with no pages behind it.
    """
    if client.cluster is not None:
        return ""
    info = getattr(client, "_scheduler_identity", None) or {}
    port = (info.get("services") or {}).get("dashboard")
    host = urlsplit(info.get("address") or "").hostname
    return f"http://{host}:{port}/status" if port and host else ""
