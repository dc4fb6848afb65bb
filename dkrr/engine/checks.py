"""Check the workers of a cluster before work is given to them: versions, BLAS, known answers.

Dask compares the versions of a few packages and only warns. Tiles written by workers of different NumPy builds or BLAS
kernels differ in their last bits, and a pickle of one Dask version may fail in another one, so differences are errors.

Cost: one call on every worker at once; 0.2 s on the first call, when the workers load SciPy, 0.03 s later.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dkrr._version import __version__
from dkrr.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["WorkerInfo", "check_workers", "describe_process"]

logger = logging.getLogger("dkrr.engine.checks")

PACKAGES = ("numpy", "scipy", "zarr", "dask", "distributed", "crc32c")
MISSING = "missing"
_COMPARED = ("python", "numpy", "scipy", "zarr", "dask", "distributed", "dkrr")
_SHOWN_WORKERS = 3
_EXPORT_HINT = 'start workers with the lines that "dkrr doctor --env" prints on their machine'


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What one worker process is.

    ``python`` is the minor version ("3.11"), the packages' versions are those installed where the worker runs, and
    ``blas`` describes each loaded BLAS library as ``threadpoolctl.threadpool_info`` does (``internal_api``,
    ``architecture``, ``version``, ``num_threads``, ...), after the limit to one thread.
    """

    address: str
    name: str
    host: str
    pid: int
    threads: int
    memory_limit_bytes: int | None
    python: str
    numpy: str
    scipy: str
    zarr: str
    dask: str
    distributed: str
    dkrr: str
    crc32c: str
    blas: tuple[dict[str, Any], ...]

    @property
    def blas_kernel(self) -> str:
        """Names of the BLAS kernels in use, e.g. "openblas-SkylakeX"."""
        kernels = {f"{library['internal_api']}-{library.get('architecture', 'unknown')}" for library in self.blas}
        return "+".join(sorted(kernels)) or "unknown"


def describe_process(dask_worker: Any = None) -> dict[str, Any]:
    """Describe this process and put it in order; what :func:`check_workers` runs on every worker.

    BLAS is limited to one thread, then tested. The answer is made of plain values, which any version can read.
    """
    from threadpoolctl import threadpool_limits

    from dkrr.engine.selftest import blas_libraries, self_test

    libraries = blas_libraries()
    threads_before = max((int(library["num_threads"]) for library in libraries), default=1)
    # OpenMP keeps the limit of each thread apart: it cannot be set here for the threads that will run the tasks
    per_thread = any(library.get("threading_layer") == "openmp" for library in libraries)
    if threads_before > 1 and not per_thread:
        threadpool_limits(limits=1, user_api="blas")
        libraries = blas_libraries()
        threads_after = max(int(library["num_threads"]) for library in libraries)
        logger.warning("BLAS used %d threads in this process; now %d", threads_before, threads_after)
    return {
        **_versions(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "name": "" if dask_worker is None else str(dask_worker.name),
        "threads": 1 if dask_worker is None else int(dask_worker.state.nthreads),
        "memory_limit_bytes": None if dask_worker is None else dask_worker.memory_manager.memory_limit,
        "blas": libraries,
        "blas_threads_before": threads_before,
        "failures": self_test(),
    }


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "dkrr": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = MISSING
    return versions


def check_workers(client: Client, timeout: float = 30.0) -> list[WorkerInfo]:
    """Describe, put in order and test every worker of a cluster.

    A worker whose BLAS uses several threads is limited to one, and a warning is logged.

    Parameters
    ----------
    client
        A synchronous client.
    timeout
        Seconds within which every worker must answer.

    Returns
    -------
    workers : list of WorkerInfo
        In the order of their addresses.

    Raises
    ------
    ClusterError
        There are no workers; one does not answer, lacks dkrr, or fails the self-test; or Python's minor version, NumPy,
        SciPy, Zarr, Dask, distributed, dkrr or the BLAS kernel are not the same everywhere. One table names them all.
    """
    cluster = client.scheduler_info(n_workers=-1)
    addresses = sorted(cluster["workers"])
    if not addresses:
        raise ClusterError(f"the scheduler at {cluster['address']} has no workers", hint="start some first")
    answers = _ask(client, addresses, timeout)
    workers = [_worker_info(address, answers[address]) for address in addresses]
    _compare(workers)
    wrong = [f"{address}: {text}" for address in addresses for text in answers[address]["failures"]]
    if wrong:
        raise ClusterError(
            f"BLAS computes wrong numbers on {len(wrong)} counts: {'; '.join(wrong[:_SHOWN_WORKERS])}",
            hint="unset OPENBLAS_CORETYPE there, or install another build of NumPy and SciPy",
        )
    _report_threads(workers, {address: answers[address]["blas_threads_before"] for address in addresses})
    return workers


def _ask(client: Client, addresses: Sequence[str], timeout: float) -> dict[str, dict[str, Any]]:
    """Run :func:`describe_process` on all workers at once, on their event loops: a busy worker answers as well."""

    async def ask() -> tuple[dict[str, Any], list[str]]:
        tasks = {
            address: asyncio.ensure_future(
                client.run(describe_process, workers=[address], on_error="return", asynchronous=True)
            )
            for address in addresses
        }
        _, late = await asyncio.wait(tasks.values(), timeout=timeout)
        for task in late:
            task.cancel()
        found: dict[str, Any] = {}
        for address, task in tasks.items():
            if task not in late:
                # a worker that left meanwhile is absent from its own answer
                found[address] = task.result().get(address, "it left the cluster")
        return found, [address for address, task in tasks.items() if task in late]

    answers: dict[str, Any]
    answers, silent = client.sync(ask)
    if silent:
        raise ClusterError(
            f"{_some(silent)} did not answer within {timeout:g} s",
            hint="restart these workers, or look at what their processes wait for",
        )
    bad = {address: answer for address, answer in answers.items() if not isinstance(answer, dict)}
    if bad:
        address, reason = next(iter(bad.items()))
        raise ClusterError(
            f"dkrr does not run on {_some(list(bad))} (on {address}: {reason})",
            hint=f"install dkrr {__version__} there",
        ) from (reason if isinstance(reason, BaseException) else None)
    return answers


def _worker_info(address: str, answer: Mapping[str, Any]) -> WorkerInfo:
    fields = {name: answer.get(name, MISSING) for name in WorkerInfo.__dataclass_fields__}
    return WorkerInfo(**{**fields, "address": address, "blas": tuple(answer["blas"])})


def _compare(workers: Sequence[WorkerInfo]) -> None:
    here = _versions()
    rows = []
    for name in (*_COMPARED, "BLAS kernel"):
        groups: dict[str, list[str]] = defaultdict(list)
        for worker in workers:
            groups[worker.blas_kernel if name == "BLAS kernel" else getattr(worker, name)].append(worker.address)
        # the BLAS of this process takes no part in the work
        expected = here.get(name, "")
        if len(groups) > 1 or (expected and expected not in groups):
            values = [f"{value} on {_some(addresses)}" for value, addresses in sorted(groups.items())]
            rows.append((name, expected, "; ".join(values)))
    if rows:
        table = [("", "here", "workers"), *rows]
        widths = [max(len(row[column]) for row in table) for column in (0, 1)]
        lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in table]
        hint = "install the same versions everywhere"
        if any(name == "BLAS kernel" for name, _, _ in rows):
            hint = f"{hint}, and {_EXPORT_HINT}" if len(rows) > 1 else _EXPORT_HINT
        raise ClusterError("\n".join(["the workers and this process differ", *lines, ""]), hint=hint)


def _report_threads(workers: Sequence[WorkerInfo], before: Mapping[str, int]) -> None:
    unlimited = [w.address for w in workers if any(int(library["num_threads"]) > 1 for library in w.blas)]
    if unlimited:
        raise ClusterError(
            f"BLAS uses several threads on {_some(unlimited)} and could not be limited to one",
            hint=_EXPORT_HINT,
        )
    limited = [address for address, threads in before.items() if threads > 1]
    if limited:
        logger.warning(
            "BLAS used up to %d threads on %s; dkrr limited it to one: %s",
            max(before.values()),
            _some(limited),
            _EXPORT_HINT,
        )


def _some(addresses: Sequence[str]) -> str:
    shown = ", ".join(addresses[:_SHOWN_WORKERS])
    return f"{len(addresses)} worker{'s' * (len(addresses) > 1)} ({shown}{', ...' * (len(addresses) > _SHOWN_WORKERS)})"
