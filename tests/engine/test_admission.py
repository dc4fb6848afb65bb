"""Late workers take part when they are equal and get no task when they are not; workers may all be replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import dask
import pytest
from distributed import Client

from dkrr.engine.cluster import checked_executor, local_cluster, memory_limit_of, require_memory
from dkrr.engine.tasks import DaskExecutor, Node
from dkrr.engine.workers import Admission, WorkerInfo, check_workers, roster
from dkrr.errors import ClusterError
from tests.faults import wait_until


@pytest.fixture(scope="module")
def shared_client() -> Iterator[Client]:
    with (
        local_cluster(workers=2, memory_limit="1GiB") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


@pytest.fixture
def client(shared_client: Client) -> Client:
    """Two workers, whatever the test before has left."""
    shared_client.cluster.scale(2)
    wait_until(lambda: len(roster(shared_client)) == 2)
    return shared_client


@pytest.fixture
def worker() -> WorkerInfo:
    return WorkerInfo(
        address="tcp://127.0.0.1:1", name="w", host="h", pid=1, threads=2, memory_limit_bytes=2**30,
        versions={"python": "3.11", "numpy": "2.0"},
        blas=({"internal_api": "openblas", "architecture": "SkylakeX", "num_threads": 1},),
    )  # fmt: skip


def slow_task(folder: str, i: int) -> bool:
    time.sleep(0.1)
    (Path(folder) / str(i)).touch()
    return True


def graph(n: int) -> list[Node]:
    """Two chains, so that few tasks can run at once."""
    return [Node((i,), ((i - 2,),) if i > 1 else ()) for i in range(n)]


# --- who joins late ---------------------------------------------------------------------------------------------------


def test_a_worker_that_differs_is_named_and_gets_no_task(client: Client, tmp_path: Path) -> None:
    executor = DaskExecutor(client, admission=Admission(client, check_workers(client)))
    assert executor.admission is not None
    executor.admission._expected = {**executor.workers[0].matters, "dkrr": "0.0", "numpy": "1.0"}
    first = {worker.address for worker in executor.workers}
    client.cluster.scale(3)
    client.wait_for_workers(3, timeout=60)
    used: set[str] = set()

    def refused() -> bool:
        used.update(executor.run("slow", slow_task, str(tmp_path), graph(8)).peak_rss_bytes)
        return bool(executor.refused)

    wait_until(refused, 60)
    used.update(executor.run("slow", slow_task, str(tmp_path), [Node((i,)) for i in range(30)]).peak_rss_bytes)
    assert used == first == {worker.address for worker in executor.workers}
    (entry,) = executor.refused
    assert entry["address"] not in first
    assert entry["name"].startswith("local-")
    assert "numpy" in entry["reason"]
    assert "instead of 0.0" in entry["reason"]


@pytest.mark.system
@pytest.mark.short
def test_all_workers_are_replaced_in_the_middle(client: Client, tmp_path: Path) -> None:
    executor = checked_executor(client)
    assert executor.admission is None  # a cluster of our own: nobody else joins it
    executor = DaskExecutor(client, admission=Admission(client, check_workers(client)))
    first = {worker.address for worker in executor.workers}
    seen: list[int] = []

    def progress(phase: str, done: int, total: int, *_: float) -> None:
        if done >= 4 and max(seen) < 4:
            for pid in client.run(os.getpid).values():
                os.kill(pid, signal.SIGKILL)
        seen.append(done)

    summary = executor.run("slow", slow_task, str(tmp_path), graph(16), progress)
    assert summary.num_tasks == 16
    assert seen == sorted(seen)
    assert seen[-1] == 16
    assert {path.name for path in tmp_path.iterdir()} == {str(i) for i in range(16)}
    assert not first & {worker.address for worker in executor.workers}


# --- the scheduler ----------------------------------------------------------------------------------------------------


def test_no_worker_for_too_long(client: Client, tmp_path: Path) -> None:
    with dask.config.set({"dkrr.timeouts.no-workers": "1s"}):
        executor = DaskExecutor(client, admission=Admission(client, check_workers(client)))
    client.cluster.scale(0)
    with pytest.raises(ClusterError, match="no worker that may be used has been there for 1 s"):
        executor.run("slow", slow_task, str(tmp_path), graph(1000))


# --- what is compared, and how many are named -------------------------------------------------------------------------


def test_a_worker_that_is_too_small(worker: WorkerInfo) -> None:
    small = replace(worker, address="tcp://127.0.0.1:2", memory_limit_bytes=2**28)
    admission = Admission(None, [worker, small])
    executor = DaskExecutor(None, admission=admission)
    require_memory(executor, 2**26)
    with pytest.raises(ClusterError, match=r"tcp://127.0.0.1:2: it may use 134,217,728 bytes a thread, a task needs"):
        require_memory(executor, 2**28)
    assert (executor.num_threads, memory_limit_of(executor)) == (4, 2**27)
