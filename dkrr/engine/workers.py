"""The workers of a cluster: what they are, whether they may work together, which may get tasks, what memory they take.

Dask compares the versions of a few packages and only warns. Tiles written by workers of different NumPy builds or BLAS
kernels differ in their last bits, and a pickle of one Dask version may fail in another one, so differences are errors.
So is a store that a worker cannot see, write, read or delete from: a path that exists on every machine and is another
disk on each of them would swallow tiles that the next task looks for.

The scheduler hands tasks to whoever is there, so on a scheduler that dkrr did not start every task names the workers
that may run it. A worker that joins late (or was restarted by its nanny, which gives it another address) is described
as at the start: an equal one takes part from then on, another one is named in ``refused`` and gets no task.

Cost: one call on every worker at once, with three operations on the store; 0.2 s on the first call, when the workers
load SciPy, 0.03 s later. While a graph runs, one small message a second to the scheduler, which also tells that the
scheduler is alive; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import platform
import socket
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dkrr import __version__
from dkrr.engine.configuration import timeout_seconds
from dkrr.engine.machine import (
    MISSING,
    blas_kernel,
    blas_libraries,
    cpu_count,
    cpu_model,
    limit_blas,
    self_test,
    total_memory_bytes,
    versions,
)
from dkrr.engine.tasks import DaskExecutor, Executor
from dkrr.errors import ClusterError, DkrrError, StoreError
from dkrr.store.files import delete_key, read_json, write_json

if TYPE_CHECKING:
    from distributed import Client

Challenge = dict[str, Any]

"""``{"store": path or URL, "key": name of an object, "token": what it holds}``"""


def leave_challenge(store: Any) -> Challenge:
    """Leave a small object in ``store`` for workers to find.

    Raises
    ------
    StoreError
        The store cannot be written from here.
    """
    asked = {"store": store, "key": f"probe-{uuid.uuid4().hex}.json", "token": uuid.uuid4().hex}
    try:
        write_json(store, asked["key"], {"token": asked["token"]})
    except OSError as exc:
        raise StoreError(f"{store} cannot be written ({exc})", hint="choose another [output] store") from exc
    return asked


def answer_challenge(asked: Challenge) -> str:
    """What is wrong with the store in this process; "" when all is well."""
    store, key, wanted = asked["store"], asked["key"], {"token": asked["token"]}
    mine = f"{key.removesuffix('.json')}-{uuid.uuid4().hex}.json"
    step = "see what was written elsewhere"
    try:
        if read_json(store, key) != wanted:
            return f"cannot {step}: it is not the same place"
        step = "write"
        write_json(store, mine, wanted)
        step = "read"
        if read_json(store, mine) != wanted:
            return "cannot read what it has just written"
        step = "delete"
        delete_key(store, mine)
    except Exception as exc:
        return f"cannot {step} ({type(exc).__name__}: {exc})"
    return ""


logger = logging.getLogger("dkrr.engine.workers")

_COMPARED = ("python", "numpy", "scipy", "zarr", "dask", "distributed", "dkrr")

_KERNEL = "BLAS kernel"

_SHOWN_WORKERS = 8

_EXPORT_HINT = 'start workers with the lines that "dkrr doctor --env" prints on their machine'

_HINTS = {
    _KERNEL: _EXPORT_HINT,
    "BLAS uses": _EXPORT_HINT,
    "BLAS computes": "unset OPENBLAS_CORETYPE there, or install another build of NumPy and SciPy",
    "the store": "give a store that every worker reaches: a shared file system or s3://",
}


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What one worker process is.

    ``versions`` are those of Python, dkrr and packages as installed where the worker runs, and ``blas``
    describes each loaded BLAS library as ``threadpoolctl.threadpool_info`` does (``internal_api``, ``architecture``,
    ``version``, ``num_threads``, ...), after the limit to one thread. ``failures`` are wrong answers of the BLAS,
    ``store_problem`` says what it cannot do with the store; both are empty when all is well.
    """

    address: str
    name: str
    host: str
    pid: int
    threads: int
    memory_limit_bytes: int | None
    versions: Mapping[str, str]
    blas: tuple[dict[str, Any], ...]
    blas_threads_before: int = 1
    failures: tuple[str, ...] = ()
    store_problem: str = ""

    @property
    def blas_kernel(self) -> str:
        """Names of the BLAS kernels in use, e.g. "openblas-SkylakeX"."""
        return blas_kernel(self.blas) or "unknown"

    @property
    def bytes_per_thread(self) -> int | None:
        """Memory that a task may take; None where there is no limit."""
        return self.memory_limit_bytes // max(1, self.threads) if self.memory_limit_bytes else None

    def too_small(self, needed: int) -> str:
        """Why it cannot hold a task of so many bytes; "" when it can."""
        limit = self.bytes_per_thread
        is_enough = limit is None or limit >= needed
        return "" if is_enough else f"it may use {limit:,} bytes a thread, a task needs {needed:,}"

    @property
    def matters(self) -> dict[str, str]:
        """What must be the same on all workers."""
        return _compared(self.versions) | {_KERNEL: self.blas_kernel}


def _compared(found: Mapping[str, str]) -> dict[str, str]:
    """The versions that must be the same everywhere; of Python, whose patches do not matter, 3.11 and not 3.11.9."""
    there = {name: found.get(name, MISSING) for name in _COMPARED}
    return there | {"python": ".".join(there["python"].split(".")[:2])}


async def describe_worker(dask_worker: Any, **request: Any) -> dict[str, Any]:
    """What :func:`check_workers` runs on every worker: describe its process, put it in order, and look at the store.

    BLAS is limited to one thread, then tested. On the event loop, so that a busy worker answers as well; the store in a
    thread, for it may be slow. The answer is made of plain values, which any version of dkrr can read; what another
    version asks for besides is ignored.
    """
    from threadpoolctl import ThreadpoolController

    libraries, asked = blas_libraries(), request.get("challenge")
    threads_before = max((int(library["num_threads"]) for library in libraries), default=1)
    # OpenMP keeps the limit of each thread apart: it cannot be set here for the threads that will run the tasks
    per_thread = any(library.get("threading_layer") == "openmp" for library in libraries)
    if threads_before > 1 and not per_thread:
        limit_blas(ThreadpoolController())
        libraries = blas_libraries()
    return {
        "versions": versions(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "name": str(dask_worker.name),
        "threads": int(dask_worker.state.nthreads),
        "memory_limit_bytes": dask_worker.memory_manager.memory_limit,
        "blas": libraries,
        "blas_threads_before": threads_before,
        "failures": self_test(),
        "store_problem": "" if asked is None else await asyncio.to_thread(answer_challenge, asked),
    }


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
    workers: list[WorkerInfo] = client.sync(describe_workers, client, addresses, timeout, store)
    # the BLAS of this process takes no part in the work
    kernel, _ = Counter(worker.blas_kernel for worker in workers).most_common(1)[0]
    expected, found = _compared(versions()) | {_KERNEL: kernel}, defaultdict[str, list[str]](list)
    for worker in workers:
        for text in differences(expected, worker):
            found[text].append(worker.address)
    if found:
        lines = [f"  {text} on {_some(addresses)}" for text, addresses in sorted(found.items())]
        hints = [hint for start, hint in _HINTS.items() if any(text.startswith(start) for text in found)]
        raise ClusterError(
            "\n".join(["the workers and this process differ", *lines, ""]),
            hint=", and ".join(dict.fromkeys(hints)) or "install the same versions everywhere",
        )
    limited = [worker.address for worker in workers if worker.blas_threads_before > 1]
    if limited:
        logger.warning(
            "BLAS used up to %d threads on %s; dkrr limited it to one: %s",
            max(worker.blas_threads_before for worker in workers),
            _some(limited),
            _EXPORT_HINT,
        )
    return workers


def differences(expected: Mapping[str, str], worker: WorkerInfo) -> list[str]:
    """Why a worker must not work beside others with these versions and this BLAS kernel; none when it may."""
    there = worker.matters
    found = [f"{name} {there[name]} instead of {value}" for name, value in expected.items() if there[name] != value]
    if worker.failures:
        found.append(f"BLAS computes wrong numbers ({'; '.join(worker.failures)})")
    if any(int(library["num_threads"]) > 1 for library in worker.blas):
        found.append("BLAS uses several threads")
    if worker.store_problem:
        found.append(f"the store: {worker.store_problem}")
    return found


async def describe_workers(client: Client, addresses: Sequence[str], timeout: float, store: Any) -> list[WorkerInfo]:
    """Run :func:`describe_worker` on workers, all at once; to be awaited on the client's loop.

    Raises
    ------
    ClusterError
        One does not answer within ``timeout`` seconds, or dkrr does not run there.
    """
    # the object for the workers to find is written in a thread: a slow store must not hold up this client
    asked = None if store is None else await asyncio.to_thread(leave_challenge, store)
    try:
        tasks = {
            address: asyncio.ensure_future(
                client.run(describe_worker, workers=[address], on_error="return", asynchronous=True, challenge=asked)
            )
            for address in addresses
        }
        _, late = await asyncio.wait(tasks.values(), timeout=timeout)
        for task in late:
            task.cancel()
    finally:
        if asked is not None:
            with contextlib.suppress(OSError, StoreError):
                await asyncio.to_thread(delete_key, asked["store"], asked["key"])
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
    """What a process of any version of dkrr answers."""
    fields = {name: answer[name] for name in WorkerInfo.__dataclass_fields__ if name in answer}
    lists = {name: tuple(answer.get(name, ())) for name in ("blas", "failures")}
    return WorkerInfo(**{"versions": {}, **fields, **lists, "address": address})


def _some(addresses: Sequence[str]) -> str:
    shown = ", ".join(addresses[:_SHOWN_WORKERS])
    return f"{len(addresses)} worker{'s' * (len(addresses) > 1)} ({shown}{', ...' * (len(addresses) > _SHOWN_WORKERS)})"


def roster(client: Any, seconds: float | None = None) -> dict[str, dict[str, Any]]:
    """``{address: what the scheduler knows of the worker}``; one round trip, of so many seconds at most.

    Raises
    ------
    OSError, TimeoutError
        The scheduler does not answer.
    """
    identity = client.sync(client.scheduler.identity, n_workers=-1, callback_timeout=seconds)
    workers: dict[str, dict[str, Any]] = identity["workers"]
    return workers


SURVEY_SECONDS = 1.0

SILENT_SECONDS = 20.0

AWAY_SECONDS = 5.0

ANSWER_SECONDS = 30.0

NOBODY = "tcp://127.0.0.1:1"  # where no worker is


class Admission:
    """The workers of a scheduler that others run, as far as a fit may use them.

    Parameters
    ----------
    client
        A synchronous ``distributed.Client``.
    workers
        Those that passed the start-up check, one at least.
    store
        Where late workers must be able to read and write, as in :func:`dkrr.engine.workers.check_workers`.

    Attributes
    ----------
    workers : list of WorkerInfo
        Admitted; also those that have left since, as the last survey may be a second old.
    refused : list of dict
        ``{"address", "name", "reason"}`` of workers that are there and get no task.
    needed_bytes : int
        Memory of a task; smaller workers are refused, for they would be killed again and again.
    """

    def __init__(self, client: Any, workers: Sequence[WorkerInfo], *, store: Any = None) -> None:
        self.client, self.store, self.needed_bytes = client, store, 0
        self._admitted = {worker.address: worker for worker in workers}
        self._refused: dict[str, dict[str, str]] = {}
        self._expected = workers[0].matters
        self._empty_seconds = timeout_seconds("no-workers")
        self._there: dict[str, int] = {worker.address: worker.threads for worker in workers}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._survey: concurrent.futures.Future[None] | None = None
        self._surveyed = self._answered = self._looked = self._last_worker = time.monotonic()

    @property
    def workers(self) -> list[WorkerInfo]:
        return list(self._admitted.values())

    @property
    def refused(self) -> list[dict[str, str]]:
        return list(self._refused.values())

    @property
    def num_threads(self) -> int:
        """Tasks that the admitted workers run at once, as of the last survey; at least 1."""
        return max(1, sum(self._there.get(address, 0) for address in self._admitted))

    def choose(self) -> list[str]:
        """Addresses that the next task may run on; never none, which would mean any."""
        return list(self._admitted) or [NOBODY]

    def can_run(self, addresses: Iterable[str]) -> bool:
        """Whether a task that names ``addresses`` can still be run, as of the last survey."""
        return any(address in self._there for address in addresses)

    @property
    def present(self) -> list[str]:
        """Addresses of the admitted workers that are there, as of the last survey."""
        return [address for address in self._admitted if address in self._there]

    def look(self) -> None:
        """Keep up with who is there; never waits. To be called now and then while tasks run.

        Raises
        ------
        ClusterError
            The scheduler has not answered for 20 s, or no worker that may be used has been there for as long as
            ``dkrr.timeouts.no-workers`` says, a minute where it says nothing.
        """
        now = time.monotonic()
        if now - self._looked > AWAY_SECONDS:  # this process was busy elsewhere, or stopped: that is no silence
            self._answered = self._last_worker = now
        self._looked = now
        if self.present:
            self._last_worker = now
        elif now - self._last_worker > self._empty_seconds:
            refused = "; ".join(f"{entry['address']}: {entry['reason']}" for entry in self.refused)
            raise ClusterError(
                f"no worker that may be used has been there for {self._empty_seconds:.0f} s"
                + (f" (refused: {refused})" if refused else ""),
                hint="start workers, then start the same job again; every finished tile is kept",
            )
        if self._survey is None or self._survey.done():
            if now - self._surveyed >= SURVEY_SECONDS:
                self._surveyed = now
                self._survey = asyncio.run_coroutine_threadsafe(self._look(), self.client.loop.asyncio_loop)
        elif now - self._answered > SILENT_SECONDS:
            raise ClusterError(
                f"the scheduler {self.client.scheduler.address} has not answered for {now - self._answered:.0f} s",
                hint="look at its process and the network; start the same job again, every finished tile is kept",
            )

    async def _look(self) -> None:
        there: dict[str, int] = await self.client.nthreads(asynchronous=True)
        self._answered, self._there = time.monotonic(), there
        # a worker that comes back is another process, even at its old address
        self._admitted = {address: worker for address, worker in self._admitted.items() if address in there}
        self._refused = {address: entry for address, entry in self._refused.items() if address in there}
        for address in there.keys() - self._admitted.keys() - self._refused.keys() - self._asking.keys():
            self._asking[address] = asyncio.ensure_future(self._ask(address))

    async def _ask(self, address: str) -> None:
        name = ""
        try:
            (worker,) = await describe_workers(self.client, [address], ANSWER_SECONDS, self.store)
            name = worker.name
            reason = "; ".join(differences(self._expected, worker)) or worker.too_small(self.needed_bytes)
        except DkrrError as exc:
            reason = exc.message
        except OSError as exc:  # the scheduler is gone: the next survey says so
            logger.debug("worker %s could not be asked (%s)", address, exc)
            return
        finally:
            self._asking.pop(address, None)
        if reason:
            logger.warning("worker %s (%s) gets no task: %s", address, name, reason)
            self._refused[address] = {"address": address, "name": name, "reason": reason}
        elif address in self._there:
            logger.info("worker %s takes part", address)
            self._admitted = {**self._admitted, address: worker}  # another one: it is read in other threads


MOST_SHOWN = 16


def worker_memory(executor: Executor) -> dict[str, int]:
    """Resident bytes of workers by address, as their scheduler knows them; none where it does not answer soon."""
    if isinstance(executor, DaskExecutor) and executor.client.status == "running":
        with contextlib.suppress(Exception):  # whatever a scheduler answers, the work does not depend on it
            found = roster(executor.client, 1.0)
            return {address: int(worker["metrics"].get("memory", 0)) for address, worker in found.items()}
    return {}


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
        "versions": versions(),
        "blas": [_library(item) for item in blas_libraries()],
    }
    groups: dict[str, dict[str, Any]] = {}
    for worker in executor.workers:
        entry = {name: getattr(worker, name) for name in ("host", "threads", "memory_limit_bytes", "blas_kernel")}
        entry |= dict(worker.versions) | {"blas": [_library(item) for item in worker.blas]}
        groups.setdefault(repr(entry), {**entry, "num_workers": 0, "addresses": []})
        group = groups[repr(entry)]
        group["num_workers"] += 1
        group["addresses"] = [*group["addresses"], worker.address][:MOST_SHOWN]
    return {"driver": driver, "workers": list(groups.values())[:MOST_SHOWN], "num_workers": len(executor.workers)}


def _library(item: dict[str, Any]) -> dict[str, Any]:
    """A BLAS library without the path of its file."""
    return {name: item.get(name) for name in ("internal_api", "version", "architecture", "num_threads")}
