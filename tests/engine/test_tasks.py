"""Graphs of tasks: order, messages, receipts, retries, errors, the watchdog, the end; here and on workers the same."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dkrr.engine import tasks
from dkrr.engine.tasks import (
    BUNDLE_FLOPS,
    BUNDLE_TASKS,
    Bundle,
    DaskExecutor,
    InProcessExecutor,
    Node,
    Queue,
    run_task,
)
from dkrr.errors import CancelledError, ClusterError, MemoryBudgetError, StorageFullError, StoreError
from dkrr.linalg.direct import Split, cholesky_nodes
from dkrr.store.interruption import check_cancelled
from dkrr.tiles import TileGrid
from tests.faults import wait_until


def independent(count: int, flops: float) -> list[Node]:
    return [Node((i,), flops=flops) for i in range(count)]


def layers(count: int, width: int, flops: float = 1e6) -> list[Node]:
    """Layers of ``width`` nodes; a node waits for the one above it and for the first of its layer."""
    found = []
    for layer in range(count):
        for i in range(width):
            above = ((layer - 1, i),) if layer else ()
            first = ((layer, 0),) if i else ()
            found.append(Node((layer, i), above + first, flops))
    return found


def messages(nodes: list[Node], threads: int = 2, *, ended: bool = False) -> list[Bundle]:
    """All messages; with ``ended`` each is sent when those before it have run."""
    queue, found = Queue(nodes, threads), []
    while bundle := queue.take():
        found.append(bundle)
        queue.finished(bundle if ended else ())
    return found


def sizes(nodes: list[Node], threads: int = 2) -> list[int]:
    return [len(bundle) for bundle in messages(nodes, threads)]


# --- what is sent, and what goes together -----------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 64])
@pytest.mark.parametrize(
    "graph",
    [
        independent(1, 1e7),
        independent(500, 1e7),
        layers(6, 20),
        cholesky_nodes(TileGrid(1920, 64), Split(num_columns=9)),
    ],
    ids=["one", "independent", "layers", "cholesky"],
)
def test_every_task_is_sent_once_after_what_it_waits_for(graph: list[Node], threads: int) -> None:
    seen: set[Any] = set()
    for bundle in messages(graph, threads, ended=True):
        assert all(key in seen for node in bundle for key in node.dependencies)
        seen.update(node.key for node in bundle)
    assert seen == {node.key for node in graph}


def test_short_tasks_share_a_message_and_the_last_ones_do_not() -> None:
    found = sizes(independent(36, 2e8))
    assert found[0] == 9  # a quarter of all
    assert found[-1] == 1
    assert found == sorted(found, reverse=True)
    assert len(sizes(independent(16, 1e3), threads=16)) == 16
    assert max(sizes(independent(1000, BUNDLE_FLOPS / 8))) == 8
    assert set(sizes(independent(50, 2 * BUNDLE_FLOPS))) == {1}
    assert max(sizes(independent(5000, 1.0))) == BUNDLE_TASKS


# --- every executor ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["in process", "dask"])
def executor(request: pytest.FixtureRequest) -> Any:
    if request.param == "in process":
        return InProcessExecutor()
    return DaskExecutor(request.getfixturevalue("cluster_client"))


def mark(folder: Any, layer: int, i: int) -> tuple[bool, dict[str, Any]]:
    """Leave a mark, where those are that it waits for."""
    before = [(layer - 1, i)] * bool(layer) + [(layer, 0)] * bool(i)
    assert all((Path(folder) / f"{row}-{column}").exists() for row, column in before)
    path = Path(folder) / f"{layer}-{i}"
    computed = not path.exists()
    path.touch()
    return computed, {"sum": layer + i}


def test_every_task_runs_once_after_its_dependencies(executor: Any, tmp_path: Path) -> None:
    graph, seen = layers(8, 20, 10.0), []
    summary = executor.run("mark", mark, str(tmp_path), graph, lambda *report: seen.append(report))
    assert summary.num_tasks == summary.num_computed == 160
    assert summary.flops_computed == 1600
    assert summary.values == {node.key: {"sum": sum(node.key)} for node in graph}
    assert [report[1] for report in seen] == list(range(161))
    assert seen[-1] == ("mark", 160, 160, 1600.0, 1600.0)
    assert all(peak > 2**20 for peak in summary.peak_rss_bytes.values())
    again = executor.run("mark", mark, str(tmp_path), graph)
    assert (again.num_tasks, again.num_computed, again.flops_computed) == (160, 0, 0)


def fail(how: str, i: int) -> bool:
    if i == 3:
        if how == "memory":
            raise MemoryError
        raise OSError(errno.ENOSPC, "No space left on device")
    return True


@pytest.mark.parametrize(
    ("how", "kind", "message"), [("memory", MemoryBudgetError, "tile_size"), ("disk", StorageFullError, "space")]
)
def test_errors_keep_their_type(executor: Any, how: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        executor.run("fail", fail, how, independent(10, 10.0))


def flaky(folder: str, i: int) -> bool:
    """Fails twice with an input error, then works."""
    attempts = Path(folder) / f"attempts-{i}"
    attempts.write_text(attempts.read_text() + "x" if attempts.exists() else "x")
    if len(attempts.read_text()) < 3:
        raise OSError(errno.EIO, "Input/output error")
    return True


def broken(_: Any, i: int) -> bool:
    raise OSError(errno.EIO, "Input/output error")


def test_input_errors_are_tried_again(executor: Any, tmp_path: Path) -> None:
    assert executor.run("flaky", flaky, str(tmp_path), [Node((0,))]).num_computed == 1
    assert (tmp_path / "attempts-0").read_text() == "xxx"
    with pytest.raises(StoreError, match="Input/output"):
        run_task(broken, None, (0,))


# --- on workers -------------------------------------------------------------------------------------------------------


def sleepy(seconds: float, i: int) -> bool:
    time.sleep(seconds)
    return True


def test_the_watchdog_names_what_is_stuck(cluster_client: Any) -> None:
    executor = DaskExecutor(cluster_client, stall_seconds=1.5)
    with pytest.raises(ClusterError, match=r"no task of sleepy finished for .*sleepy-") as caught:
        executor.run("sleepy", sleepy, 6.0, [Node((0,))])
    assert "start the same job again" in caught.value.hint


def die_once(folder: str, i: int) -> bool:
    token = Path(folder) / "died"
    if i == 7 and not token.exists():
        token.touch()
        os._exit(1)
    return True


def test_a_worker_that_dies_is_replaced_and_its_task_run_again(cluster_client: Any, tmp_path: Path) -> None:
    graph = [Node((i,), ((i - 1,),) if i % 5 else ()) for i in range(30)]
    summary = DaskExecutor(cluster_client).run("die", die_once, str(tmp_path), graph)
    assert summary.num_tasks == 30
    assert (tmp_path / "died").exists()


# --- a graph ends on its workers as well ------------------------------------------------------------------------------


def long_task(folder: str, i: int) -> bool:
    """A minute of products of a tenth of a second each, with a look before every one."""
    (Path(folder) / f"begun-{i}").touch()
    for _ in range(600):
        check_cancelled()
        time.sleep(0.1)
    (Path(folder) / f"ended-{i}").touch()
    return True


def running(client: Any) -> int:
    """Tasks of graphs that are running on all workers."""

    def count() -> int:
        return sum(tasks._running.values())

    return sum(client.run(count).values())


def known_keys(dask_scheduler: Any) -> list[str]:
    return list(dask_scheduler.tasks)


def test_a_cancelled_graph_leaves_the_workers_at_once_and_others_go_on(cluster_client: Any, tmp_path: Path) -> None:
    executor = DaskExecutor(cluster_client)
    executor.cancelled = lambda: any(tmp_path.glob("begun-*"))  # a worker that was just started may have task 0
    with Client(cluster_client.scheduler.address, set_as_default=False) as other:
        kept = other.submit(pow, 2, 10, key="kept")
        assert kept.result() == 1024
        waiting = other.submit(time.sleep, 0.5, key="waiting", priority=-1000)
        began = time.monotonic()
        with pytest.raises(CancelledError, match="resume"):
            executor.run("long", long_task, str(tmp_path), [Node((i,)) for i in range(100)])
        assert time.monotonic() - began < 15
        assert running(cluster_client) == 0
        before = {path.name for path in tmp_path.iterdir()}
        assert not any(name.startswith("ended") for name in before)
        assert waiting.result(timeout=30) is None
        assert kept.result() == 1024
        wait_until(lambda: set(other.run_on_scheduler(known_keys)) == {"kept", "waiting"})
        assert {path.name for path in tmp_path.iterdir()} == before
    executor.cancelled = None
    assert executor.run("short", lambda _, i: True, None, [Node((0,))]).num_tasks == 1
