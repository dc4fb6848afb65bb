"""Check the workers of a cluster before work is given to them: versions, BLAS, known answers, the store.

Dask compares the versions of a few packages and only warns. Tiles written by workers of different NumPy builds or BLAS
kernels differ in their last bits, and a pickle of one Dask version may fail in another one, so differences are errors.
So is a store that a worker cannot see, write, read or delete from.

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
from dkrr.engine.probe import Challenge, answer_challenge, challenge
from dkrr.engine.roster import roster
from dkrr.errors import ClusterError

if TYPE_CHECKING:
    from distributed import Client

__all__ = [
    "WorkerInfo",
    "check_workers",
    "describe_process",
    "describe_workers",
    "difference",
    "process_versions",
]

logger = logging.getLogger("dkrr.engine.checks")

PACKAGES = ("numpy", "scipy", "zarr", "dask", "distributed", "crc32c")
MISSING = "missing"
_COMPARED = ("python", "numpy", "scipy", "zarr", "dask", "distributed", "dkrr")
_MATTERS = (*_COMPARED, "blas_kernel")
_SHOWN_WORKERS = 8
_EXPORT_HINT = 'start workers with the lines that "dkrr doctor --env" prints on their machine'
_HINTS = {"BLAS kernel": _EXPORT_HINT, "store": "give a store that every worker reaches: a shared file system or s3://"}


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What one worker process is.

    ``python`` is the minor version ("3.11"), the packages' versions are those installed where the worker runs, and
    ``blas`` describes each loaded BLAS library as ``threadpoolctl.threadpool_info`` does (``internal_api``,
    ``architecture``, ``version``, ``num_threads``, ...), after the limit to one thread. ``failures`` are wrong answers
    of the BLAS, ``store_problem`` says what it cannot do with the store; both are empty when all is well.
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
    blas_threads_before: int = 1
    failures: tuple[str, ...] = ()
    store_problem: str = ""

    @property
    def blas_kernel(self) -> str:
        """Names of the BLAS kernels in use, e.g. "openblas-SkylakeX"."""
        kernels = {f"{library['internal_api']}-{library.get('architecture', 'unknown')}" for library in self.blas}
        return "+".join(sorted(kernels)) or "unknown"


def describe_process(dask_worker: Any = None) -> dict[str, Any]:
    """Describe this process and put it in order.

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
        **process_versions(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "name": "" if dask_worker is None else str(dask_worker.name),
        "threads": 1 if dask_worker is None else int(dask_worker.state.nthreads),
        "memory_limit_bytes": None if dask_worker is None else dask_worker.memory_manager.memory_limit,
        "blas": libraries,
        "blas_threads_before": threads_before,
        "failures": self_test(),
    }


async def describe_worker(dask_worker: Any = None, **request: Any) -> dict[str, Any]:
    """What :func:`check_workers` runs on every worker: :func:`describe_process`, and a look at the store.

    On the event loop, so that a busy worker answers as well; the store in a thread, for it may be slow. What another
    version of dkrr asks for besides is ignored.
    """
    description = describe_process(dask_worker)
    description["store_problem"] = await asyncio.to_thread(answer_challenge, request.get("challenge"))
    return description


def process_versions() -> dict[str, str]:
    """Versions of Python (minor), dkrr and the packages that matter, as installed here."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "dkrr": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = MISSING
    return versions


def check_workers(client: Client, timeout: float = 30.0, *, store: Any = None) -> list[WorkerInfo]:
    """Describe, put in order and test every worker of a cluster.

    A worker whose BLAS uses several threads is limited to one, and a warning is logged.

    Parameters
    ----------
    client
        A synchronous client.
    timeout
        Seconds within which every worker must answer.
    store
        Path or URL where every worker must see what this process writes, and write, read and delete.

    Returns
    -------
    workers : list of WorkerInfo
        In the order of their addresses.

    Raises
    ------
    ClusterError
        There are no workers; one does not answer, lacks dkrr, fails the self-test or cannot use the store; or Python's
        minor version, NumPy, SciPy, Zarr, Dask, distributed, dkrr or the BLAS kernel are not the same everywhere. One
        table names them all.
    StoreError
        The store cannot be written from here.
    """
    addresses = sorted(roster(client))
    if not addresses:
        where = client.scheduler.address if client.scheduler is not None else "no address"
        raise ClusterError(f"the scheduler at {where} has no workers", hint="start some first")
    with challenge(store) as asked:
        workers: list[WorkerInfo] = client.sync(describe_workers, client, addresses, timeout, asked)
    _compare(workers)
    wrong = [f"{worker.address}: {text}" for worker in workers for text in worker.failures]
    if wrong:
        raise ClusterError(
            f"BLAS computes wrong numbers on {len(wrong)} counts: {'; '.join(wrong[:_SHOWN_WORKERS])}",
            hint="unset OPENBLAS_CORETYPE there, or install another build of NumPy and SciPy",
        )
    _report_threads(workers)
    return workers


def difference(reference: WorkerInfo, worker: WorkerInfo) -> str:
    """Why a worker must not work beside ``reference``, one that passed the check; "" when it may."""
    differing = [
        f"{label} {getattr(worker, name)}, {getattr(reference, name)} on the others"
        for label, name in ((("BLAS kernel" if name == "blas_kernel" else name), name) for name in _MATTERS)
        if getattr(worker, name) != getattr(reference, name)
    ]
    if worker.failures:
        differing.append(f"BLAS computes wrong numbers ({'; '.join(worker.failures)})")
    if any(int(library["num_threads"]) > 1 for library in worker.blas):
        differing.append("BLAS uses several threads")
    if worker.store_problem:
        differing.append(f"the store: {worker.store_problem}")
    return "; ".join(differing)


async def describe_workers(
    client: Client, addresses: Sequence[str], timeout: float, asked: Challenge | None
) -> list[WorkerInfo]:
    """Run :func:`describe_worker` on workers, all at once; to be awaited on the client's loop.

    Raises
    ------
    ClusterError
        One does not answer within ``timeout`` seconds, or dkrr does not run there.
    """
    tasks = {
        address: asyncio.ensure_future(
            client.run(describe_worker, workers=[address], on_error="return", asynchronous=True, challenge=asked)
        )
        for address in addresses
    }
    _, late = await asyncio.wait(tasks.values(), timeout=timeout)
    for task in late:
        task.cancel()
    if late:
        silent = [address for address, task in tasks.items() if task in late]
        raise ClusterError(
            f"{_some(silent)} did not answer within {timeout:g} s",
            hint="restart these workers, or look at what their processes wait for",
        )
    # a worker that left meanwhile is absent from its own answer
    answers = {address: task.result().get(address, "it left the cluster") for address, task in tasks.items()}
    bad = {address: answer for address, answer in answers.items() if not isinstance(answer, dict)}
    if bad:
        address, reason = next(iter(bad.items()))
        raise ClusterError(
            f"dkrr does not run on {_some(list(bad))} (on {address}: {reason})",
            hint=f"install dkrr {__version__} there",
        ) from (reason if isinstance(reason, BaseException) else None)
    return [_worker_info(address, answers[address]) for address in addresses]


def _worker_info(address: str, answer: Mapping[str, Any]) -> WorkerInfo:
    fields = {name: answer[name] for name in WorkerInfo.__dataclass_fields__ if name in answer}
    missing = {name: MISSING for name in (*_COMPARED, "crc32c") if name not in answer}
    lists = {name: tuple(answer.get(name, ())) for name in ("blas", "failures")}
    return WorkerInfo(**{**fields, **missing, **lists, "address": address})


def _compare(workers: Sequence[WorkerInfo]) -> None:
    here = process_versions()
    rows, hints = [], []
    for label, name in (*((name, name) for name in _COMPARED), ("BLAS kernel", "blas_kernel"), ("store", "")):
        groups: dict[str, list[str]] = defaultdict(list)
        for worker in workers:
            groups[getattr(worker, name) if name else worker.store_problem or "usable"].append(worker.address)
        # the BLAS of this process takes no part in the work
        expected = "usable" if not name else here.get(name, "")
        if len(groups) > 1 or (expected and expected not in groups):
            values = [f"{value} on {_some(addresses)}" for value, addresses in sorted(groups.items())]
            rows.append((label, expected, "; ".join(values)))
            hints.append(_HINTS.get(label, "install the same versions everywhere"))
    if rows:
        table = [("", "here", "workers"), *rows]
        widths = [max(len(row[column]) for row in table) for column in (0, 1)]
        lines = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in table]
        raise ClusterError(
            "\n".join(["the workers and this process differ", *lines, ""]), hint=", and ".join(dict.fromkeys(hints))
        )


def _report_threads(workers: Sequence[WorkerInfo]) -> None:
    unlimited = [w.address for w in workers if any(int(library["num_threads"]) > 1 for library in w.blas)]
    if unlimited:
        raise ClusterError(
            f"BLAS uses several threads on {_some(unlimited)} and could not be limited to one",
            hint=_EXPORT_HINT,
        )
    limited = [worker.address for worker in workers if worker.blas_threads_before > 1]
    if limited:
        logger.warning(
            "BLAS used up to %d threads on %s; dkrr limited it to one: %s",
            max(worker.blas_threads_before for worker in workers),
            _some(limited),
            _EXPORT_HINT,
        )


def _some(addresses: Sequence[str]) -> str:
    shown = ", ".join(addresses[:_SHOWN_WORKERS])
    return f"{len(addresses)} worker{'s' * (len(addresses) > 1)} ({shown}{', ...' * (len(addresses) > _SHOWN_WORKERS)})"
