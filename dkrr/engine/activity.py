"""What workers are, and how much memory they take: the one while a graph runs, versions and BLAS once.

The scheduler knows their memory from heartbeats, half a second old. It is asked by one small message, and nobody waits
for the answer: :meth:`WorkerMemory.poll` hands out the last one. A scheduler that does not answer, or does not run
functions, costs a line in the log.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import platform
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from dkrr.engine.checks import PACKAGES, WorkerInfo, process_versions
from dkrr.engine.doctor import cpu_model
from dkrr.engine.environment import cpu_count
from dkrr.engine.memory import total_memory_bytes
from dkrr.engine.selftest import blas_libraries
from dkrr.engine.tasks import DaskExecutor, Executor

__all__ = ["WorkerMemory", "describe_executor"]

logger = logging.getLogger("dkrr.engine.activity")

MOST_WORKERS = 1000
MOST_SHOWN = 16


class WorkerMemory:
    """Asks a scheduler now and then how much memory its workers take.

    Parameters
    ----------
    executor
        Whose workers; one without a scheduler has nothing to tell.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor if isinstance(executor, DaskExecutor) else None
        self._asked: concurrent.futures.Future[Any] | None = None
        self._last: dict[str, int] = {}

    def poll(self) -> dict[str, int]:
        """Resident bytes by address, as of the last answer, and ask again; never waits.

        Empty until there was an answer, and when the scheduler is gone.
        """
        executor = self._executor
        if executor is None or executor.client.status != "running":
            return {}
        if self._asked is not None and self._asked.done():
            try:
                self._last = {address: size for address, size in self._asked.result() if size}
            except Exception as exc:  # whatever a scheduler answers, the work does not depend on it
                self._last = {}
                logger.debug("the scheduler does not say what its workers take (%r)", exc)
            self._asked = None
        if self._asked is None:
            self._asked = asyncio.run_coroutine_threadsafe(_ask(executor.client), executor.client.loop.asyncio_loop)
        return self._last


async def _ask(client: Any) -> Any:
    return await client.run_on_scheduler(_question(), most=MOST_WORKERS, asynchronous=True)


def _question() -> Callable[..., Any]:
    """A function that travels as its code: a scheduler need not have dkrr installed."""

    def workers_now(most: int, dask_scheduler: Any = None) -> Any:
        found = list(dask_scheduler.workers.values())[:most]
        return [(w.address, int(w.metrics.get("memory", 0))) for w in found]

    return workers_now


def describe_executor(executor: Executor) -> dict[str, Any]:
    """Versions, processor and BLAS of this process and of the workers, as plain values.

    Workers that are alike in everything but their address are one entry, with their number; at most 16 entries.
    """
    driver = {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_model(),
        "num_cpus": cpu_count(),
        "memory_bytes": total_memory_bytes(),
        "versions": process_versions() | {"python": platform.python_version()},
        "blas": [_library(item) for item in blas_libraries()],
    }
    workers = list(executor.workers) if isinstance(executor, DaskExecutor) else []
    groups: dict[str, dict[str, Any]] = {}
    for worker in workers:
        entry = _described(worker)
        groups.setdefault(repr(entry), {**entry, "num_workers": 0, "addresses": []})
        group = groups[repr(entry)]
        group["num_workers"] += 1
        group["addresses"] = [*group["addresses"], worker.address][:MOST_SHOWN]
    return {"driver": driver, "workers": list(groups.values())[:MOST_SHOWN], "num_workers": len(workers)}


def _described(worker: WorkerInfo) -> dict[str, Any]:
    names = ("host", "threads", "memory_limit_bytes", "python", "dkrr", *PACKAGES)
    known = asdict(worker)
    libraries = [_library(item) for item in worker.blas]
    return {name: known[name] for name in names} | {"blas": libraries, "blas_kernel": worker.blas_kernel}


def _library(item: dict[str, Any]) -> dict[str, Any]:
    """A BLAS library without the path of its file."""
    return {name: item.get(name) for name in ("internal_api", "version", "architecture", "num_threads")}
