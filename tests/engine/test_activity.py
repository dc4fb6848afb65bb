"""What workers are doing: their memory and the tasks that run, heard without waiting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dkrr.engine.activity import Activity, Reading, describe_executor
from dkrr.engine.session import checked_executor
from dkrr.engine.tasks import InProcessExecutor, Node
from tests.faults import wait_until


def wait_for_file(payload: str, i: int, j: int) -> bool:
    deadline = time.monotonic() + 60
    while not Path(payload).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return True


def test_memory_and_running_tasks(cluster_client: Any, tmp_path: Path) -> None:
    executor = checked_executor(cluster_client)
    activity = Activity(executor)
    seen: list[Reading] = []

    def progress(*_: Any) -> None:
        """Called when the graph begins: look until the scheduler has heard that both tasks run."""

    import threading

    go = tmp_path / "go"

    def look() -> None:
        def heard() -> bool:
            found = activity.poll()
            if found is not None and len(found.running) == 2:
                seen.append(found)
                return True
            return False

        try:
            wait_until(heard, 30)
        finally:
            go.touch()

    thread = threading.Thread(target=look)
    thread.start()
    nodes = [Node((1, 0)), Node((1, 1)), Node((2, 0))]
    executor.run("factorise", wait_for_file, str(go), nodes, progress)
    thread.join()
    (found,) = seen
    assert {phase for phase, _ in found.running} == {"factorise"}
    assert {key for _, key in found.running} < {(1, 0), (1, 1), (2, 0)}
    assert len(found.memory_bytes) == 2
    assert all(10**7 < size < 2**31 for size in found.memory_bytes.values())


def test_asking_never_waits(cluster_client: Any) -> None:
    activity = Activity(checked_executor(cluster_client))
    began = time.perf_counter()
    first = activity.poll()
    assert time.perf_counter() - began < 5
    assert first is None
    assert wait_until(activity.poll, 20)


def test_a_process_without_a_scheduler_has_nothing_to_tell() -> None:
    assert Activity(InProcessExecutor()).poll() is None


def test_a_scheduler_that_fails_to_answer(cluster_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = checked_executor(cluster_client)
    activity = Activity(executor)

    async def broken(*_: Any, **__: Any) -> Any:
        raise OSError("gone")

    monkeypatch.setattr("dkrr.engine.activity._ask", broken)
    activity.poll()
    wait_until(lambda: activity._asked is not None and activity._asked.done(), 20)
    assert activity.poll() is None


def test_workers_that_are_alike_are_one_entry(cluster_client: Any) -> None:
    found = describe_executor(checked_executor(cluster_client))
    (group,) = found["workers"]
    assert group["num_workers"] == found["num_workers"] == 2
    assert len(group["addresses"]) == 2
    assert group["blas_kernel"].startswith("openblas")
    assert group["numpy"] == found["driver"]["versions"]["numpy"]
    assert all("filepath" not in library for library in [*group["blas"], *found["driver"]["blas"]])
    alone = describe_executor(InProcessExecutor())
    assert alone["workers"] == []
    assert alone["driver"]["num_cpus"] >= 1
