"""A graph ends on its workers as well: when it is cancelled, when it fails; other people's tasks go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dkrr.engine import stopping
from dkrr.engine.stopping import stop_graph, stop_here, task_of
from dkrr.engine.tasks import DaskExecutor, Node
from dkrr.errors import CancelledError, DataError
from dkrr.store.interruption import check_cancelled
from tests.faults import wait_until

PRODUCT_SECONDS = 0.1
PRODUCTS = 600


def long_task(folder: str, i: int) -> bool:
    """A minute of products of a tenth of a second each, with a look before every one."""
    (Path(folder) / f"begun-{i}").touch()
    for _ in range(PRODUCTS):
        check_cancelled()
        time.sleep(PRODUCT_SECONDS)
    (Path(folder) / f"ended-{i}").touch()
    return True


def failing_task(folder: str, i: int) -> bool:
    if i == 1:
        wait_until(lambda: (Path(folder) / "begun-0").exists())
        raise DataError("row 3 is bad")
    return long_task(folder, i)


def running(client: Any) -> int:
    """Tasks of graphs that are running on all workers."""

    def count() -> int:
        return sum(stopping._running.values())

    return sum(client.run(count).values())


def known_keys(dask_scheduler: Any) -> list[str]:
    return list(dask_scheduler.tasks)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_cancelled_graph_leaves_the_workers_at_once_and_others_go_on(cluster_client: Any, tmp_path: Path) -> None:
    executor = DaskExecutor(cluster_client)
    executor.cancelled = lambda: (tmp_path / "begun-0").exists()
    with Client(cluster_client.scheduler.address, set_as_default=False) as other:
        kept = other.submit(pow, 2, 10, key="kept")
        assert kept.result() == 1024
        waiting = other.submit(time.sleep, 0.5, key="waiting", priority=-1000)
        began = time.monotonic()
        with pytest.raises(CancelledError, match="resume"):
            executor.run("long", long_task, str(tmp_path), [Node((i,)) for i in range(100)])
        assert time.monotonic() - began < 15
        assert running(cluster_client) == 0
        before = names(tmp_path)
        assert not any(name.startswith("ended") for name in before)
        assert waiting.result(timeout=30) is None
        assert kept.result() == 1024
        wait_until(lambda: set(other.run_on_scheduler(known_keys)) == {"kept", "waiting"})
        assert names(tmp_path) == before
    executor.cancelled = None
    assert executor.run("short", lambda _, i: True, None, [Node((0,))]).num_tasks == 1


def test_a_graph_that_fails_ends_on_the_other_workers_too(cluster_client: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 3"):
        DaskExecutor(cluster_client).run("fail", failing_task, str(tmp_path), [Node((0,)), Node((1,))])
    wait_until(lambda: running(cluster_client) == 0, 20)
    assert names(tmp_path) == {"begun-0"}


def test_a_task_that_arrives_after_the_stop_does_not_begin() -> None:
    assert stop_here("late") == 0
    with pytest.raises(CancelledError), task_of("late"):
        pytest.fail("it began")
    with task_of("another"):
        check_cancelled()
        assert stop_here("another") == 1
        with pytest.raises(CancelledError):
            check_cancelled()
    assert stop_here("another") == 0


def test_the_list_of_stopped_graphs_is_bounded() -> None:
    for number in range(3000):
        stop_here(f"graph-{number}")
    assert len(stopping._stopped) <= 1000
    with pytest.raises(CancelledError), task_of("graph-2999"):
        pytest.fail("it began")


def test_workers_that_cannot_be_asked_do_not_hold_us_up() -> None:
    class Gone:
        status = "running"

        def run(self, *_: Any, **__: Any) -> Any:
            raise OSError("gone")

    began = time.monotonic()
    assert stop_graph(Gone(), "g", None, 0.5) == -1
    assert time.monotonic() - began < 5
