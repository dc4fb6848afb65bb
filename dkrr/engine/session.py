"""Who runs the tasks: the Dask client that is found, a local cluster started for the occasion, or this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from threadpoolctl import threadpool_info

from dkrr.engine.roster import roster
from dkrr.engine.tasks import DaskExecutor, Executor, InProcessExecutor
from dkrr.errors import ClusterError

__all__ = [
    "blas_of",
    "checked_executor",
    "connect_executor",
    "executor_facts",
    "executor_for",
    "memory_limit_of",
    "require_memory",
    "start_local",
]


@contextmanager
def executor_for(store: Any = None) -> Iterator[Executor]:
    """An executor found by the usual Dask rules.

    A client of the caller is used and left open; its workers give back what they kept in memory. Inside a Dask worker
    or a daemonic process tasks run in this process. Otherwise a local cluster of one-thread worker processes is started
    and closed at the end. Workers must be able to use ``store`` (a path or URL), where one is given.
    """
    from dkrr.engine.cluster import find_client, runs_in_process

    if runs_in_process():
        yield InProcessExecutor()
        return
    client = find_client()
    if client is not None:
        with _lent(client, store) as executor:
            yield executor
        return
    with start_local(store=store) as executor:
        yield executor


@contextmanager
def start_local(
    workers: int | None = None, threads_per_worker: int = 1, memory_limit: Any = "auto", *, store: Any = None
) -> Iterator[DaskExecutor]:
    """An executor on a local cluster that lives as long as the block."""
    from distributed import Client

    from dkrr.engine.cluster import local_cluster

    with (
        local_cluster(workers=workers, threads_per_worker=threads_per_worker, memory_limit=memory_limit) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(len(cluster.worker_spec), timeout=60)
        yield checked_executor(client, store=store)


@contextmanager
def _lent(client: Any, store: Any) -> Iterator[DaskExecutor]:
    """An executor on workers that go on when this is over; they keep no memory then."""
    executor = checked_executor(client, store=store)
    try:
        yield executor
    finally:
        executor.release()


def checked_executor(client: Any, *, store: Any = None) -> DaskExecutor:
    """An executor on a client whose workers passed the start-up check, ``store`` included where it is given.

    Only workers that passed it get tasks, except on a cluster of :func:`dkrr.local_cluster`, where all are equal.

    Raises
    ------
    ClusterError
        Workers differ in what matters, or cannot use the store; one table names them.
    """
    from dkrr.engine.admission import Admission
    from dkrr.engine.checks import check_workers

    workers = check_workers(client, store=store)
    if _is_ours(client):
        return DaskExecutor(client, workers=workers)
    return DaskExecutor(client, admission=Admission(client, workers, store=store))


def _is_ours(client: Any) -> bool:
    local = sys.modules.get("dkrr.engine.local")
    return local is not None and isinstance(client.cluster, local.LocalProcesses)


def require_memory(executor: Executor, bytes_per_thread: int) -> None:
    """Refuse workers that could not hold a task of so many bytes; see :meth:`Admission.require_memory`.

    Raises
    ------
    ClusterError
        A worker is too small.
    """
    if not isinstance(executor, DaskExecutor):
        return
    if executor.admission is not None:
        executor.admission.require_memory(bytes_per_thread)
        return
    limit = memory_limit_of(executor)
    if limit is not None and limit < bytes_per_thread:
        raise ClusterError(
            f"a worker may use {limit:,} bytes a thread, a task needs {bytes_per_thread:,}",
            hint="set [cluster] memory_limit or [solver] tile_size",
        )


def memory_limit_of(executor: Executor) -> int | None:
    """The smallest memory limit of the workers in bytes, per task that runs at once; None when there is none."""
    if not isinstance(executor, DaskExecutor):
        return None
    if executor.admission is not None:
        found = [(worker.memory_limit_bytes, worker.threads) for worker in executor.workers]
    else:
        workers = roster(executor.client).values()
        found = [(worker["memory_limit"], worker["nthreads"]) for worker in workers]
    limits = [limit // max(1, threads) for limit, threads in found if limit]
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
def connect_executor(
    scheduler: str, *, workers: int | None = None, insecure: bool = False, store: Any = None
) -> Iterator[DaskExecutor]:
    """An executor on a scheduler that is already there: tcp://..., tls://..., or a scheduler file.

    ``workers`` is the number to wait for; all that are there then are checked, and use ``store``.
    """
    from dkrr.engine.cluster import connect

    with connect(scheduler, workers=workers or 1, insecure=insecure) as client, _lent(client, store) as executor:
        yield executor


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
        "refused_workers": [dict(worker) for worker in executor.refused],
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
