"""Graphs of tasks: order, window, receipts, retries, errors, the watchdog; the same in this process and on workers."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dkrr.engine.tasks import DaskExecutor, InProcessExecutor, Node, run_task
from dkrr.errors import ClusterError, DataError, MemoryBudgetError, StorageFullError, StoreError


def note(folder: Any, i: int) -> tuple[bool, dict[str, Any]]:
    """Write down when task i ran; fail when a dependency did not run before it."""
    if i and i % 5 and not (Path(folder) / str(i - 1)).exists():
        raise AssertionError(f"{i} ran before {i - 1}")
    path = Path(folder) / str(i)
    computed = not path.exists()
    path.write_text(str(time.time()))
    return computed, {"square": i * i}


def chain(n: int) -> list[Node]:
    """Chains of five tasks."""
    return [Node((i,), ((i - 1,),) if i % 5 else (), flops=10.0) for i in range(n)]


@pytest.fixture(params=["in process", "dask"])
def executor(request: pytest.FixtureRequest) -> Any:
    if request.param == "in process":
        return InProcessExecutor()
    return DaskExecutor(request.getfixturevalue("cluster_client"))


def test_every_task_runs_once_after_its_dependencies(executor: Any, tmp_path: Path) -> None:
    seen = []
    summary = executor.run("note", note, str(tmp_path), chain(150), lambda *report: seen.append(report))
    assert summary.num_tasks == summary.num_computed == 150
    assert summary.flops_computed == 1500
    assert {key: value["square"] for key, value in summary.values.items()} == {(i,): i * i for i in range(150)}
    assert [report[1] for report in seen] == list(range(151))
    assert seen[-1] == ("note", 150, 150, 1500.0, 1500.0)
    assert all(peak > 2**20 for peak in summary.peak_rss_bytes.values())
    again = executor.run("note", note, str(tmp_path), chain(150))
    assert again.num_computed == 0
    assert again.flops_computed == 0


def test_the_window_bounds_what_the_scheduler_knows(cluster_client: Any, tmp_path: Path) -> None:
    executor = DaskExecutor(cluster_client)
    alive, most = set(), 0
    submit = cluster_client.submit

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal most
        future = submit(*arguments, **options)
        alive.add(future.key)
        future.add_done_callback(lambda done: alive.discard(done.key))
        most = max(most, len(alive))
        return future

    cluster_client.submit = counted
    try:
        executor.run("note", note, str(tmp_path), chain(200))
    finally:
        cluster_client.submit = submit
    assert 8 < most <= 33


def fail(how: str, i: int) -> bool:
    if i == 3:
        if how == "data":
            raise DataError("row 3 is bad", hint="mend it", row=3)
        if how == "memory":
            raise MemoryError
        raise OSError(errno.ENOSPC, "No space left on device")
    return True


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("data", DataError, "row 3 is bad"),
        ("memory", MemoryBudgetError, "tile_size"),
        ("disk", StorageFullError, "space"),
    ],
)
def test_errors_keep_their_type_and_facts(executor: Any, how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        executor.run("fail", fail, how, chain(10))
    if how == "data":
        assert caught.value.row == 3
        assert caught.value.hint == "mend it"


def flaky(folder: str, i: int) -> bool:
    """Fails twice with an input error, then works."""
    attempts = Path(folder) / f"attempts-{i}"
    attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
    if len(attempts.read_text()) < 3:
        raise OSError(errno.EIO, "Input/output error")
    return True


def test_input_errors_are_tried_again(executor: Any, tmp_path: Path) -> None:
    summary = executor.run("flaky", flaky, str(tmp_path), [Node((0,))])
    assert summary.num_computed == 1
    assert (tmp_path / "attempts-0").read_text() == "xxx"


def broken(_: Any, i: int) -> bool:
    raise OSError(errno.EIO, "Input/output error")


def test_an_input_error_that_stays_is_raised() -> None:
    with pytest.raises(StoreError, match="Input/output"):
        run_task(broken, None, (0,))


def sleepy(seconds: float, i: int) -> bool:
    time.sleep(seconds)
    return True


def test_the_watchdog_names_what_is_stuck(cluster_client: Any) -> None:
    executor = DaskExecutor(cluster_client, stall_seconds=1.5)
    with pytest.raises(ClusterError, match=r"no task of sleepy finished for .*sleepy-") as caught:
        executor.run("sleepy", sleepy, 6.0, [Node((0,))])
    assert "resume" in caught.value.hint or "start the same job again" in caught.value.hint


def die_once(folder: str, i: int) -> bool:
    token = Path(folder) / "died"
    if i == 7 and not token.exists():
        token.touch()
        os._exit(1)
    return True


def test_a_worker_that_dies_is_replaced_and_its_task_run_again(cluster_client: Any, tmp_path: Path) -> None:
    summary = DaskExecutor(cluster_client).run("die", die_once, str(tmp_path), chain(30))
    assert summary.num_tasks == 30
    assert (tmp_path / "died").exists()
