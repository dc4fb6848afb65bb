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

from dkrr.engine import workers as checks
from dkrr.engine.cluster import checked_executor, local_cluster
from dkrr.engine.tasks import InProcessExecutor
from dkrr.engine.workers import (
    WorkerInfo,
    WorkerMemory,
    answer_challenge,
    challenge,
    check_workers,
    describe_executor,
    roster,
)
from dkrr.errors import ClusterError
from tests.faults import wait_until


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        local_cluster(workers=2, memory_limit="1GiB") as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def addresses(client: Client) -> list[str]:
    return sorted(roster(client))


@contextmanager
def patched(client: Client, module: str, name: str, make: Callable[[Any], Any], workers: list[str]) -> Iterator[None]:
    """Replace ``module.name`` on some workers by ``make(original)``."""

    def patch() -> None:
        import importlib

        owner: Any = importlib.import_module(module)
        owner.original = getattr(owner, name)
        setattr(owner, name, make(owner.original))

    def restore() -> None:
        import importlib

        owner: Any = importlib.import_module(module)
        setattr(owner, name, owner.original)

    client.run(patch, workers=workers)
    try:
        yield
    finally:
        client.run(restore, workers=workers)


def other_versions(**versions: str) -> Callable[[Any], Any]:
    return lambda original: lambda: {**original(), **versions}


def test_equal_workers_pass(client: Client) -> None:
    workers = check_workers(client)
    assert [worker.address for worker in workers] == addresses(client)
    assert {worker.pid for worker in workers} == set(client.run(os.getpid).values())
    for worker in workers:
        assert isinstance(worker, WorkerInfo)
        assert (worker.threads, worker.memory_limit_bytes) == (1, 2**30)
        assert worker.name.startswith("local-")
        here = checks.process_versions()
        assert worker.versions == here
        assert worker.blas
        assert {library["num_threads"] for library in worker.blas} == {1}
        assert worker.blas_kernel not in {"", "unknown"}


@pytest.mark.parametrize("name", ["python", "numpy", "dkrr"])
def test_one_worker_with_another_version(client: Client, name: str) -> None:
    odd, _ = addresses(client)
    with (
        patched(client, "dkrr.engine.workers", "process_versions", other_versions(**{name: "0.0"}), [odd]),
        pytest.raises(ClusterError) as caught,
    ):
        check_workers(client)
    assert f"  {name} 0.0 instead of {checks.process_versions()[name]} on 1 worker ({odd})\n" in caught.value.message


def kernel(name: str) -> Callable[[Any], Any]:
    return lambda original: lambda: [{**library, "architecture": name} for library in original()]


def test_another_blas_kernel_on_one_worker(client: Client) -> None:
    odd = addresses(client)[0]
    with (
        patched(client, "dkrr.engine.workers", "blas_libraries", kernel("Prescott"), [odd]),
        pytest.raises(ClusterError, match=r"BLAS kernel .*openblas-Prescott") as caught,
    ):
        check_workers(client)
    assert "dkrr doctor --env" in caught.value.hint


def test_wrong_numbers_on_one_worker(client: Client) -> None:
    odd = addresses(client)[1]

    def wrong(original: Any) -> Any:
        return lambda *arguments, **keywords: original(*arguments, **keywords) + 1.0

    with (
        patched(client, "scipy.linalg.blas", "dgemm", wrong, [odd]),
        pytest.raises(ClusterError, match=rf"wrong numbers \(float64 gemm.* on 1 worker \({odd}"),
    ):
        check_workers(client)


def set_threads(number: int) -> None:
    import scipy.linalg  # noqa: F401
    import threadpoolctl

    threadpoolctl.threadpool_limits(number, user_api="blas")


def num_threads() -> set[int]:
    import threadpoolctl

    return {item["num_threads"] for item in threadpoolctl.threadpool_info() if item["user_api"] == "blas"}


def test_several_blas_threads_are_limited_for_good(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    odd = addresses(client)[0]
    client.run(set_threads, 2, workers=[odd])
    assert client.run(num_threads, workers=[odd]) == {odd: {2}}
    workers = check_workers(client)
    assert {library["num_threads"] for worker in workers for library in worker.blas} == {1}
    assert client.submit(num_threads, workers=[odd], pure=False).result() == {1}  # also where tasks run
    assert f"up to 2 threads on 1 worker ({odd})" in caplog.text
    caplog.clear()
    check_workers(client)
    assert caplog.text == ""


def test_a_stopped_worker(client: Client) -> None:
    odd = addresses(client)[0]
    pid = client.run(os.getpid)[odd]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(ClusterError, match=rf"1 worker \({odd}\) did not answer within 0.4 s"):
            check_workers(client, timeout=0.4)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(check_workers(client)) == 2


def test_a_store_that_can_be_used(tmp_path: Path) -> None:
    with challenge(str(tmp_path / "new" / "store")) as asked:
        assert asked is not None
        assert answer_challenge(asked) == ""
    assert list((tmp_path / "new" / "store").iterdir()) == []


def test_the_same_path_on_another_disk(tmp_path: Path) -> None:
    with challenge(str(tmp_path / "here")) as asked:
        assert asked is not None
        elsewhere = {**asked, "store": str(tmp_path / "there")}
        assert "not the same place" in answer_challenge(elsewhere)
        assert "not the same place" in answer_challenge({**asked, "token": "another"})
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(("name", "step"), [("write_json", "write"), ("delete_key", "delete")])
def test_what_cannot_be_done_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, step: str) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with challenge(str(tmp_path)) as asked, monkeypatch.context() as patch:
        patch.setattr(checks, name, denied)
        problem = answer_challenge(asked)
    assert problem.startswith(f"cannot {step} (PermissionError")


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
