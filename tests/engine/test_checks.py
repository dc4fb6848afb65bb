"""Workers that differ, compute wrong numbers, cannot use the store or do not answer are found before they work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dkrr.engine.cluster import checked_executor
from dkrr.engine.machine import versions
from dkrr.engine.tasks import InProcessExecutor
from dkrr.engine.workers import check_workers, describe_executor, roster, worker_memory
from dkrr.errors import ClusterError


@pytest.fixture
def client(cluster_client: Client) -> Client:
    return cluster_client


@contextmanager
def patched(client: Client, name: str, make: Callable[[Any], Any], worker: str) -> Iterator[None]:
    """Replace something of a module on one worker by ``make(original)``."""

    def patch() -> None:
        import pkgutil

        owner: Any = pkgutil.resolve_name(name.rpartition(".")[0])
        owner.original = getattr(owner, name.rpartition(".")[2])
        setattr(owner, name.rpartition(".")[2], make(owner.original))

    def restore() -> None:
        import pkgutil

        owner: Any = pkgutil.resolve_name(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], owner.original)

    client.run(patch, workers=[worker])
    try:
        yield
    finally:
        client.run(restore, workers=[worker])


def test_equal_workers_pass(client: Client, tmp_path: Path) -> None:
    workers = check_workers(client, store=str(tmp_path / "new/store"))
    assert list((tmp_path / "new/store").iterdir()) == []
    assert [worker.address for worker in workers] == sorted(roster(client))
    for worker in workers:
        assert (worker.threads, worker.memory_limit_bytes, worker.versions) == (1, 2**30, versions())
        assert {library["num_threads"] for library in worker.blas} == {1}
        assert worker.blas_kernel not in {"", "unknown"}


def denied(original: Any) -> Any:
    def deny(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    return deny


ODD: dict[str, tuple[str, Callable[[Any], Any], str, str]] = {
    "another version": (
        "dkrr.engine.workers.versions",
        lambda original: lambda: {**original(), "numpy": "0.0"},
        r"\n  numpy 0\.0 instead of [\d.]+ on 1 worker \({odd}\)\n",
        "install the same versions",
    ),
    "another BLAS kernel": (
        "dkrr.engine.workers.blas_libraries",
        lambda original: lambda: [{**library, "architecture": "Prescott"} for library in original()],
        r"BLAS kernel .*openblas-Prescott",
        "dkrr doctor --env",
    ),
    "wrong numbers": (
        "scipy.linalg.blas.dgemm",
        lambda original: lambda *arguments, **keywords: original(*arguments, **keywords) + 1.0,
        r"wrong numbers \(float64 gemm.* on 1 worker \({odd}",
        "OPENBLAS_CORETYPE",
    ),
    "another disk": (
        "dkrr.engine.workers.read_json",
        lambda original: lambda *_: None,
        "the store: cannot see what was written elsewhere: it is not the same place",
        "that every worker reaches",
    ),
    "no permission": (
        "dkrr.engine.workers.write_json",
        denied,
        r"cannot write \(PermissionError",
        "every worker reaches",
    ),
    "no removal": (
        "dkrr.engine.workers.delete_key",
        denied,
        r"cannot delete \(PermissionError",
        "every worker reaches",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_one_worker_that_is_unlike_the_others(case: str, client: Client, tmp_path: Path) -> None:
    name, make, message, hint = ODD[case]
    odd = sorted(roster(client))[0]
    with (
        patched(client, name, make, odd),
        pytest.raises(ClusterError, match=message.replace("{odd}", odd)) as caught,
    ):
        check_workers(client, store=str(tmp_path))
    assert hint in caught.value.hint


def num_threads(limit: int | None = None) -> set[int]:
    import scipy.linalg  # noqa: F401
    import threadpoolctl

    threadpoolctl.threadpool_limits(limit, user_api="blas") if limit else None
    return {item["num_threads"] for item in threadpoolctl.threadpool_info() if item["user_api"] == "blas"}


def test_several_blas_threads_are_limited_for_good(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    odd = sorted(roster(client))[0]
    assert client.run(num_threads, 2, workers=[odd]) == {odd: {2}}
    workers = check_workers(client)
    assert {library["num_threads"] for worker in workers for library in worker.blas} == {1}
    assert client.submit(num_threads, workers=[odd], pure=False).result() == {1}  # also where tasks run
    assert f"up to 2 threads on 1 worker ({odd})" in caplog.text


def test_a_stopped_worker(client: Client) -> None:
    odd, pid = sorted(client.run(os.getpid).items())[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterError, match=rf"1 worker \({odd}\) did not answer within 0.4 s"):
            check_workers(client, timeout=0.4)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(check_workers(client)) == 2


def test_what_is_said_of_workers(cluster_client: Any) -> None:
    sizes = worker_memory(checked_executor(cluster_client))
    assert len(sizes) == 2
    assert all(10**7 < size < 2**31 for size in sizes.values())
    found = describe_executor(checked_executor(cluster_client))
    (group,) = found["workers"]  # they are alike
    assert group["num_workers"] == found["num_workers"] == len(group["addresses"]) == 2
    assert group["blas_kernel"].startswith("openblas")
    assert group["numpy"] == found["driver"]["versions"]["numpy"]
    assert describe_executor(InProcessExecutor())["workers"] == []
