"""What workers are, and their memory, heard without waiting."""

from __future__ import annotations

from typing import Any

from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import InProcessExecutor
from dkrr.engine.workers import WorkerMemory, describe_executor
from tests.faults import wait_until


def test_memory_of_every_worker(cluster_client: Any) -> None:
    memory = WorkerMemory(checked_executor(cluster_client))
    found = wait_until(lambda: len(now := memory.poll()) == 2 and now, 30)
    assert all(10**7 < size < 2**31 for size in found.values())


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
