"""Who runs the tasks: the Dask client that is found, a cluster that is started or reached, or this process.

``distributed`` is imported when a cluster is needed: a process without it has no client to find.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dkrr.engine.configuration import parsed, timeout_seconds
from dkrr.engine.machine import blas_kernel, blas_libraries, cpu_count, total_memory_bytes
from dkrr.engine.tasks import DaskExecutor, Executor, InProcessExecutor
from dkrr.engine.workers import Admission, check_workers, roster
from dkrr.errors import ClusterError, ParameterError, check_whole

if TYPE_CHECKING:
    from distributed import Client
    from distributed.security import Security

    from dkrr.engine.local import LocalProcesses

CONNECT_SECONDS = 30.0


def local_cluster(
    workers: int | None = None,
    threads_per_worker: int = 1,
    memory_limit: int | str = "auto",
    *,
    timeout: float = 60.0,
) -> LocalProcesses:
    """Start a Dask cluster of worker processes on this machine, for ``with`` and for ``distributed.Client``.

    The scheduler runs in this process; everything listens on the loopback interface only. Works from a script without
    an ``if __name__ == "__main__"`` guard, from ``python -`` and from a notebook. Worker processes have one BLAS
    thread and the best BLAS kernel that passed a self-test, do not spill or pause, are restarted by their nannies when
    they die, and die with this process.

    Parameters
    ----------
    workers
        Number of worker processes; None means one per usable CPU.
    threads_per_worker
        Tasks that a worker runs at once. Processes are faster than threads.
    memory_limit
        Memory of each worker: bytes, a string such as "2GiB", or "auto", the machine's memory (or this process'
        control group's) divided by the number of workers. A worker above 95 % of it is restarted.
    timeout
        Seconds within which all workers must be running.

    Returns
    -------
    cluster : distributed.deploy.SpecCluster
        Running, with all its workers. Close it, or use it in a ``with`` statement.

    Raises
    ------
    ParameterError
        A number is not positive or the memory limit cannot be read.
    ClusterError
        A worker did not start within ``timeout``.

    Examples
    --------
    >>> with local_cluster(workers=2, memory_limit="2GiB") as cluster, Client(cluster) as client:  # doctest: +SKIP
    ...     client.submit(sum, [1, 2]).result()
    3
    """
    from dask.utils import parse_bytes

    from dkrr.engine.local import LocalProcesses

    num_workers = cpu_count() if workers is None else check_whole("workers", workers)
    threads = check_whole("threads_per_worker", threads_per_worker)
    limit = total_memory_bytes() // num_workers if memory_limit == "auto" else int(parsed(parse_bytes, memory_limit))
    if limit < 1:
        raise ParameterError(f"memory_limit is {memory_limit!r}", hint='give bytes, a size such as "2GiB", or "auto"')
    return LocalProcesses(num_workers, threads, limit, timeout)


def runs_in_process() -> bool:
    """Whether work belongs into this process: inside a task of a Dask worker, in a daemonic process, in joblib's pool.

    A task that waited for tasks on its own cluster could wait for itself, and a daemonic process may have no children.
    The siblings of a process of joblib's pool use the other processors already.
    """
    process = multiprocessing.current_process()
    if process.daemon or type(process).__name__ == "LokyProcess":
        return True
    if "distributed" not in sys.modules:
        return False
    from distributed import get_worker

    try:
        get_worker()
    except ValueError:
        return False
    return True


def find_client() -> Client | None:
    """The client that Dask itself would use here; None when there is none or work :func:`runs_in_process`.

    Raises
    ------
    ClusterError
        The client is asynchronous.
    """
    if "distributed" not in sys.modules or runs_in_process():
        return None
    from distributed import Client

    try:
        client: Client = Client.current()
    except ValueError:
        return None
    if client.status in {"closing", "closed"}:
        return None
    if client.asynchronous:
        raise ClusterError(
            f"the current Dask client {client!r} is asynchronous",
            hint="create one with Client(address), or call dkrr from another thread",
        )
    return client


def connect(
    scheduler: str | os.PathLike[str],
    *,
    workers: int = 1,
    timeout: float | None = None,
    security: Security | None = None,
    insecure: bool = False,
) -> Client:
    """Connect to a scheduler that others run, and wait for its workers.

    Parameters
    ----------
    scheduler
        ``tcp://host:port``, ``tls://host:port``, or the path of a scheduler file.
    workers
        Number of workers to wait for.
    timeout
        Seconds for the whole call; the connection itself must succeed within 30 s. None means what
        ``dkrr.timeouts.workers`` says, 30 s where it says nothing.
    security
        Certificates; None means those of Dask's configuration (``distributed.comm.tls``).
    insecure
        Allow plain tcp to another machine. Whoever reaches an open scheduler runs code on it and on its clients.

    Returns
    -------
    client : distributed.Client
        Not the default client of this process. Close it, or use it in a ``with`` statement.

    Raises
    ------
    ClusterError
        No scheduler answers, it refuses, too few workers appear, a TLS file is missing or wrong, or the connection
        would be neither encrypted nor local.
    """
    address = _address(scheduler)
    _check_encryption(address, insecure)

    from distributed import Client
    from distributed.security import Security

    timeout = timeout_seconds("workers") if timeout is None else timeout
    deadline = time.monotonic() + timeout
    security = Security() if security is None else security
    _check_certificates(address, security)
    seconds = min(timeout, CONNECT_SECONDS)
    try:
        _shake_hands(address, security, seconds)
        client = Client(address, timeout=seconds, security=security, set_as_default=False)
    except (OSError, TimeoutError, ImportError, RuntimeError, TypeError, ValueError) as exc:
        raise ClusterError(
            f"no connection to the scheduler at {address} within {seconds:g} s ({str(exc) or type(exc).__name__})",
            hint="start the scheduler, or correct the address",
        ) from exc
    try:
        client.wait_for_workers(workers, timeout=max(0.1, deadline - time.monotonic()))
    except TimeoutError as exc:
        there = 0
        with contextlib.suppress(OSError):  # it may have gone while workers were waited for
            there = len(roster(client))
        client.close()
        raise ClusterError(
            f"the scheduler at {address} has {there} workers after {timeout:g} s, {workers} expected",
            hint="start workers, ask for fewer, or set dkrr.timeouts.workers where they take longer",
        ) from exc
    except BaseException:
        client.close()
        raise
    return client


def _address(scheduler: str | os.PathLike[str]) -> str:
    text = os.fspath(scheduler)
    if "://" not in text:
        path = Path(text)
        try:
            address = json.loads(path.read_text())["address"]
        except FileNotFoundError as exc:
            raise ClusterError(
                f"the scheduler file {path} does not exist", hint='give "tcp://host:port", "tls://host:port" or a file'
            ) from exc
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise ClusterError(
                f"{path} is no scheduler file ({exc!r})", hint="give the file that the scheduler wrote"
            ) from exc
        text = str(address)
    if not text.startswith(("tcp://", "tls://")):
        raise ParameterError(f"the scheduler address is {text!r}", hint='give "tcp://host:port" or "tls://host:port"')
    return text


def _check_encryption(address: str, insecure: bool) -> None:
    host = urlsplit(address).hostname or ""
    with contextlib.suppress(ValueError):  # a name; it may mean another machine tomorrow
        insecure = insecure or host == "localhost" or ipaddress.ip_address(host).is_loopback
    if not insecure and not address.startswith("tls://"):
        raise ClusterError(
            f"{address} is plain tcp to another machine: whoever reaches such a scheduler can run code on it",
            hint="use tls://, or insecure = true on a network you trust",
        )


def _shake_hands(address: str, security: Any, seconds: float) -> None:
    """Open and close a connection in bounded time: Client() waits for ever for a process that accepts and is silent."""
    from distributed.comm.core import connect as open_comm

    async def shake() -> None:
        async with asyncio.timeout(seconds):
            comm = await open_comm(address, timeout=seconds, **security.get_connection_args("client"))
        await comm.close()

    # a thread of its own, for the caller may be inside an event loop
    with ThreadPoolExecutor(1, thread_name_prefix="dkrr-connect") as executor:
        executor.submit(asyncio.run, shake()).result()


def _check_certificates(address: str, security: Any) -> None:
    """Say which file is missing or wrong, before a connection fails with less to say."""
    if not address.startswith("tls://"):
        return
    files = {
        "ca-file": security.tls_ca_file,
        "client.cert": security.tls_client_cert,
        "client.key": security.tls_client_key,
    }
    shown = ", ".join(f"{name} {_shown(value)}" for name, value in files.items())
    try:
        problem = "" if security.get_connection_args("client")["ssl_context"] else f"{address} needs TLS files"
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        problem = f"TLS files for {address} cannot be used ({exc})"
    if problem:
        raise ClusterError(f"{problem}: {shown}", hint="correct distributed.comm.tls in Dask's configuration")


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return "given in memory" if "\n" in value else value


@contextmanager
def executor_for(store: Any = None) -> Iterator[Executor]:
    """An executor found by the usual Dask rules.

    A client of the caller is used and left open; its workers give back what they kept in memory. Inside a Dask worker
    or a daemonic process tasks run in this process. Otherwise a local cluster of one-thread worker processes is started
    and closed at the end. Workers must be able to use ``store`` (a path or URL), where one is given.
    """
    if runs_in_process():
        yield InProcessExecutor()
        return
    client = find_client()
    with start_local(store=store) if client is None else _lent(client, store) as executor:
        yield executor


@contextmanager
def start_local(
    workers: int | None = None, threads_per_worker: int = 1, memory_limit: Any = "auto", *, store: Any = None
) -> Iterator[DaskExecutor]:
    """An executor on a local cluster that lives as long as the block."""
    from distributed import Client

    with (
        local_cluster(workers=workers, threads_per_worker=threads_per_worker, memory_limit=memory_limit) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
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
    workers = check_workers(client, store=store)
    local = sys.modules.get("dkrr.engine.local")
    if local is not None and isinstance(client.cluster, local.LocalProcesses):
        return DaskExecutor(client, workers=workers)
    return DaskExecutor(client, admission=Admission(client, workers, store=store))


def require_memory(executor: Executor, bytes_per_thread: int) -> None:
    """Refuse workers that could not hold a task of so many bytes, now and when they join later.

    Raises
    ------
    ClusterError
        A worker is too small.
    """
    for worker in executor.workers:
        if reason := worker.too_small(bytes_per_thread):
            raise ClusterError(
                f"worker {worker.address}: {reason}",
                hint="start workers with more memory, or set [cluster] memory_limit or [solver] tile_size",
            )
    if isinstance(executor, DaskExecutor) and executor.admission is not None:
        executor.admission.needed_bytes = bytes_per_thread


def memory_limit_of(executor: Executor) -> int | None:
    """The smallest memory limit of the workers in bytes, per task that runs at once; None when there is none."""
    limits = (worker.bytes_per_thread for worker in executor.workers)
    return min((limit for limit in limits if limit is not None), default=None)


def blas_of(executor: Executor) -> str:
    """Name of the BLAS kernel the tasks use, e.g. "openblas-SkylakeX"; the same bits need the same kernel."""
    return executor.workers[0].blas_kernel if executor.workers else blas_kernel(blas_libraries())


@contextmanager
def connect_executor(
    scheduler: str, *, workers: int | None = None, insecure: bool = False, store: Any = None
) -> Iterator[DaskExecutor]:
    """An executor on a scheduler that is already there: tcp://..., tls://..., or a scheduler file.

    ``workers`` is the number to wait for; all that are there then are checked, and use ``store``.
    """
    with connect(scheduler, workers=workers or 1, insecure=insecure) as client, _lent(client, store) as executor:
        yield executor


def executor_facts(executor: Executor) -> dict[str, Any]:
    """What a status says about an executor: scheduler, numbers of workers and threads, refused workers.

    Asks nobody: it is called every few seconds, also while a scheduler is gone.
    """
    if not isinstance(executor, DaskExecutor):
        return {"scheduler": "this process", "num_workers": 0, "num_threads": executor.num_threads}
    workers = list(executor.workers)
    return {
        "scheduler": getattr(executor.client.scheduler, "address", None) or "",
        "num_workers": len(workers),
        "num_threads": sum(int(worker.threads) for worker in workers),
        "refused_workers": [dict(worker) for worker in executor.refused],
    }
