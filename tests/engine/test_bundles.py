"""Bundles of short tasks: which nodes go together, and that they change nothing but the number of messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dkrr.engine.bundles import BUNDLE_FLOPS, Outbox, bundles
from dkrr.engine.tasks import DaskExecutor, InProcessExecutor, Node
from dkrr.errors import DataError


def nodes(count: int, flops: float) -> list[Node]:
    return [Node((i,), flops=flops) for i in range(count)]


def sizes(found: list[Node], threads: int = 2) -> list[int]:
    return [len(bundle) for bundle in bundles(found, threads)]


@pytest.mark.parametrize("count", [1, 2, 36, 500])
@pytest.mark.parametrize("threads", [1, 2, 64])
def test_every_node_is_in_one_bundle_in_the_order_of_the_list(count: int, threads: int) -> None:
    found = nodes(count, 1e7)
    assert [node for bundle in bundles(found, threads) for node in bundle] == found


def test_short_tasks_share_a_message_and_the_last_ones_do_not() -> None:
    found = sizes(nodes(36, 2e8))
    assert found[0] == 9  # a quarter of all
    assert found[-1] == 1
    assert found == sorted(found, reverse=True)
    assert len(found) < 15


def test_a_bundle_is_short() -> None:
    assert max(sizes(nodes(1000, BUNDLE_FLOPS / 8))) == 8
    assert set(sizes(nodes(50, 2 * BUNDLE_FLOPS))) == {1}


def test_every_thread_gets_something() -> None:
    assert len(sizes(nodes(16, 1e3), threads=16)) == 16


@pytest.mark.parametrize("flops", [0.0, -1.0])
def test_tasks_of_unknown_length_go_alone(flops: float) -> None:
    assert set(sizes([*nodes(20, 1.0), Node((99,), flops=flops)])) == {1}


def test_tasks_that_wait_go_alone() -> None:
    assert set(sizes([*nodes(20, 1.0), Node((99,), ((0,),), 1.0)])) == {1}


def leave_a_mark(folder: Any, i: int) -> tuple[bool, dict[str, Any]]:
    path = Path(folder) / str(i)
    computed = not path.exists()
    path.write_text(str(i))
    if i == 30 and (Path(folder) / "bad").exists():
        raise DataError("row 30 is bad", hint="mend it")
    return computed, {"i": i}


def test_receipts_and_progress_are_those_of_single_tasks(cluster_client: Any, tmp_path: Path) -> None:
    reports: list[Any] = []
    found = []
    for executor, name in ((DaskExecutor(cluster_client), "a"), (InProcessExecutor(), "b")):
        (tmp_path / name).mkdir()
        found.append(
            executor.run("mark", leave_a_mark, str(tmp_path / name), nodes(40, 1e6), lambda *r: reports.append(r))
        )
    dask, here = found
    assert dask.num_tasks == dask.num_computed == 40
    assert dask.flops_computed == here.flops_computed == 4e7
    assert dask.values == here.values
    assert [report[1] for report in reports] == [*range(41), *range(41)]


def test_what_a_bundle_wrote_before_an_error_stays(cluster_client: Any, tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    executor = DaskExecutor(cluster_client)
    with pytest.raises(DataError, match="row 30"):
        executor.run("mark", leave_a_mark, str(tmp_path), nodes(40, 1e6))
    written = {int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()}
    assert 30 in written
    (tmp_path / "bad").unlink()
    again = executor.run("mark", leave_a_mark, str(tmp_path), nodes(40, 1e6))
    assert again.num_computed == 40 - len(written)


def test_what_is_held_back_lets_others_pass_until_its_turn() -> None:
    first, second, third = Node((0,)), Node((1,), ((0,),), held_back=True), Node((2,))
    outbox = Outbox([first, second, third], 2)
    assert outbox.next() == (0, (first,))
    assert outbox.next() == (2, (third,))
    assert outbox.next() is None
    assert not outbox.is_empty
    outbox.finished((first,))
    assert outbox.next() == (1, (second,))
    assert outbox.next() is None
    assert outbox.is_empty


def hold(folder: Any, i: int) -> tuple[bool, dict[str, Any]]:
    """Both tasks that wait for task 0 run at once: each waits for the mark of the other."""
    (Path(folder) / str(i)).touch()
    end = time.monotonic() + 20
    while i and not (Path(folder) / str(3 - i)).exists():
        assert time.monotonic() < end, "the other one was not sent to the other worker"
        time.sleep(0.01)
    return True, {}


def test_tasks_held_back_for_the_same_one_run_at_once(cluster_client: Any, tmp_path: Path) -> None:
    graph = [Node((0,)), *(Node((i,), ((0,),), held_back=True) for i in (1, 2))]
    assert DaskExecutor(cluster_client).run("hold", hold, str(tmp_path), graph).num_tasks == 3
