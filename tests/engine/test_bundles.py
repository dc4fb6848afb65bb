"""Bundles of short tasks: which nodes go together, and that they change nothing but the number of messages."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from dkrr.engine.bundles import BUNDLE_FLOPS, BUNDLE_TASKS, Outbox, bundles
from dkrr.engine.tasks import DaskExecutor, InProcessExecutor, Node
from dkrr.errors import ClusterError, DataError
from dkrr.linalg.factor.schedule import Split, cholesky_nodes
from dkrr.tiles import TileGrid


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


def test_in_a_graph_with_dependencies_tasks_go_alone_unless_they_share() -> None:
    assert set(sizes([*nodes(20, 1.0), Node((99,), ((0,),), 1.0)])) == {1}


def layers(count: int, width: int, flops: float = 1e6) -> list[Node]:
    """Layers of ``width`` nodes; a node waits for the one above it and for the first of its layer."""
    found = []
    for layer in range(count):
        for i in range(width):
            above = ((layer - 1, i),) if layer else ()
            first = ((layer, 0),) if i else ()
            found.append(Node((layer, i), above + first, flops, shares=True))
    return found


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "graph", [layers(6, 20), cholesky_nodes(TileGrid(1920, 64), Split(num_columns=30, num_last=2))]
)
def test_bundles_of_a_graph_wait_for_earlier_ones_only(graph: list[Node], threads: int) -> None:
    found = list(bundles(graph, threads))
    assert [node for bundle in found for node in bundle] == graph
    assert max(map(len, found)) > 1
    outbox, sent = Outbox(graph, threads), set()
    first_of = {node.key: bundle[0].key for bundle in found for node in bundle}
    for bundle in found:
        inside = {node.key for node in bundle}
        assert not any(inside & set(node.dependencies) for node in bundle)
        waits_for = {first_of[key] for node in bundle for key in node.dependencies}
        assert set(outbox.waits_for(bundle)) == waits_for <= sent
        sent.add(bundle[0].key)


def test_a_run_is_cut_for_all_threads_and_a_long_task_goes_alone() -> None:
    assert [len(bundle) for bundle in bundles(layers(2, 21), 2)] == [1, 5, 5, 5, 5, 1, 5, 5, 5, 5]
    assert set(sizes(layers(3, 20, BUNDLE_FLOPS))) == {1}


def test_a_message_names_a_bounded_number_of_tasks() -> None:
    assert max(sizes(nodes(5000, 1.0))) == BUNDLE_TASKS
    assert max(sizes(layers(2, 5000, 1.0))) == BUNDLE_TASKS


def test_five_thousand_small_tiles_travel_in_a_few_hundred_messages() -> None:
    graph = cholesky_nodes(TileGrid(6400, 64), Split(num_columns=3))
    assert len(graph) > 5050
    assert len(list(bundles(graph, 2))) < 800
    large = cholesky_nodes(TileGrid(20_480, 2048), Split(num_columns=3))
    assert len(list(bundles(large, 2))) == len(large)  # a tile of a second goes alone


def wait_for_marks(folder: Any, layer: int, i: int) -> tuple[bool, dict[str, Any]]:
    before = [(layer - 1, i)] * bool(layer) + [(layer, 0)] * bool(i)
    assert all((Path(folder) / f"{row}-{column}").exists() for row, column in before)
    (Path(folder) / f"{layer}-{i}").touch()
    return True, {"sum": layer + i}


def test_bundles_that_wait_run_after_what_they_wait_for(cluster_client: Any, tmp_path: Path) -> None:
    graph = layers(12, 30)
    summary = DaskExecutor(cluster_client).run("marks", wait_for_marks, str(tmp_path), graph)
    assert summary.num_computed == len(graph)
    assert summary.values == {node.key: {"sum": sum(node.key)} for node in graph}


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
    assert again.num_computed <= 40 - len(written)  # a bundle that was running beside the bad row went on for a while
    assert again.num_tasks == 40


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


def test_a_graph_whose_held_back_tasks_can_never_be_sent_is_an_error(cluster_client: Any, tmp_path: Path) -> None:
    graph = [Node((0,)), Node((1,), ((0,),), held_back=True), Node((2,), ((7,),), held_back=True)]
    with pytest.raises(ClusterError, match=r"1 tasks wait .*\(2,\), which waits for \(7,\)"):
        DaskExecutor(cluster_client).run("hold", leave_a_mark, str(tmp_path), graph)


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
