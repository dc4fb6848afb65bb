"""A request to cancel is seen between two tile products, wherever the tiles are read, and nowhere else."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor, Node
from dkrr.errors import CancelledError, InterruptedRunError
from dkrr.store.interruption import cancellable, check_cancelled
from dkrr.tiles import TileGrid, TileMatrix


def test_blocks_nest_and_belong_to_their_thread() -> None:
    seen: list[bool] = []
    check_cancelled()
    with cancellable(lambda: True):
        with cancellable(lambda: False), cancellable(None):
            check_cancelled()
        thread = threading.Thread(target=lambda: seen.append(check_cancelled() is None))
        thread.start()
        thread.join()
        with pytest.raises(CancelledError) as caught:
            check_cancelled()
    check_cancelled()
    assert seen == [True]
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), again.exit_code, again.hint) == (CancelledError, 75, caught.value.hint)
    assert isinstance(again, InterruptedRunError)


def test_every_read_of_a_tile_looks(tmp_path: Path) -> None:
    tiles = TileMatrix.create(str(tmp_path / "t.zarr"), TileGrid(8, 4), dtype="float64")
    tiles.write(0, 0, np.eye(4))
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    with cancellable(cancelled):
        tiles.read(0, 0)
        list(tiles.read_strips(0, 0))
        with pytest.raises(CancelledError):
            tiles.read(0, 0)
    assert asked == 3


def test_a_graph_in_this_process_ends_between_two_tasks_and_stays_cancelled() -> None:
    executor = InProcessExecutor()
    done: list[int] = []
    executor.cancelled = lambda: len(done) == 2

    def work(_: None, i: int) -> bool:
        done.append(i)
        return True

    nodes = [Node((i,)) for i in range(5)]
    with pytest.raises(CancelledError):
        executor.run("work", work, None, nodes)
    assert done == [0, 1]
    with pytest.raises(CancelledError):
        executor.run("work", work, None, nodes)
    executor.cancelled = None
    assert executor.run("work", work, None, nodes).num_tasks == 5
