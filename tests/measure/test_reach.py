"""Cancel in the middle of a factorisation, and what it costs to name the workers of every task."""

from __future__ import annotations

import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from distributed import Client

from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import DaskExecutor, Executor, Node
from dkrr.engine.workers import Admission, check_workers
from dkrr.errors import CancelledError
from dkrr.linalg.direct import factorise
from dkrr.linalg.gram import build_gram
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import times
from tests.linalg.helpers import operator, rows
from tests.measure.figures import SCALE, Judge, scaled
from tests.servers import by_hand

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1800)]

LARGE_TILES = 2048 if SCALE == 1 else 256
SMALL_TILES = 512 if SCALE == 1 else 128


def tiles_matrix(folder: Path, name: str, n: int, tile_size: int) -> TileMatrix:
    return TileMatrix.create(str(folder / f"{name}.zarr"), TileGrid(n, tile_size), dtype="float64")


def others_task(i: int) -> int:
    time.sleep(0.05)
    return i * i


def test_measure_cancel(judge: Judge, folder: Path) -> None:
    n = scaled(16384, least=2048)
    system = operator(rows(folder, n, d=10, t=1), LARGE_TILES, kernel="rbf", gamma=0.05)
    factor = tiles_matrix(folder, "factor", n, LARGE_TILES)
    half_way = len(list(factor.grid.lower())) // 2
    with (
        by_hand(folder / "servers") as cluster,
        Client(cluster.address, set_as_default=False) as client,
        Client(cluster.address, set_as_default=False) as other,
    ):
        client.wait_for_workers(2, timeout=60)
        kept = other.submit(np.arange, 1000, key="kept")
        executor = checked_executor(client, store=str(folder))
        asked: list[float] = []

        def cancelled() -> bool:
            if not asked and len(times(folder / "factor.zarr")) >= half_way:
                asked.append(time.time())
            return bool(asked)

        executor.cancelled = cancelled
        # a second user's job, while the tiles are computed
        results: list[int] = []
        thread = threading.Thread(
            target=lambda: results.extend(other.gather(other.map(others_task, range(60), priority=10)))
        )
        thread.start()
        with pytest.raises(CancelledError):
            factorise(system, factor, executor)
        seconds = time.time() - asked[0]
        written = times(folder / "factor.zarr")
        thread.join(60)
        time.sleep(15)
        later = times(folder / "factor.zarr")
        last = max(max(later.values()) / 1e9 - asked[0], 0.0)
        line = f"cancel in mid-factorisation, b = {LARGE_TILES:,}"
        judge(line, f"returned after {seconds:.1f} s", "at most 10 s", seconds <= 10)
        judge(
            line, f"last tile written {last:.1f} s after the request", "at most 10 s", last <= 10 and later == written
        )
        untouched = results == [i * i for i in range(60)] and np.array_equal(kept.result(), np.arange(1000))
        judge(line, "a second user's 60 tasks and kept future", "untouched", untouched)
        executor.cancelled = None
        factorise(system, factor, executor)
        assert later.items() <= times(folder / "factor.zarr").items()


def no_work(_: None, i: int) -> bool:
    return True


@pytest.mark.parametrize(("name", "bar", "repeats"), [("factorise", 1.05, 3), ("gram", 1.10, 9), ("messages", 1.25, 3)])
def test_measure_what_naming_workers_costs(judge: Judge, folder: Path, name: str, bar: float, repeats: int) -> None:
    """A graph with dependencies, one without, and 2,000 messages without work."""
    n = scaled(8192, least=1024)
    system = operator(rows(folder, n, d=10, t=1), SMALL_TILES, kernel="rbf", gamma=0.05)
    with by_hand(folder / "servers") as cluster, Client(cluster.address, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
        workers = check_workers(client)
        count = iter(range(1000))

        def seconds_of(work: str, restricted: bool) -> float:
            admission = Admission(client, workers) if restricted else None
            executor: Executor = DaskExecutor(client, admission=admission, workers=workers)
            matrix = tiles_matrix(folder, f"{work}-{next(count)}", n, SMALL_TILES)
            began = time.perf_counter()
            if work == "factorise":
                factorise(system, matrix, executor)
            elif work == "gram":
                build_gram(system, matrix, executor)
            else:
                executor.run("nothing", no_work, None, [Node((i,)) for i in range(2000)])
            return time.perf_counter() - began

        seconds_of("gram", True)  # everything is loaded
        pairs = [(seconds_of(name, True), seconds_of(name, False)) for _ in range(repeats)]
        named, free = (statistics.median(column) for column in zip(*pairs, strict=True))
        judge(
            f"naming the workers of every task: {name}",
            f"{named:.2f} s against {free:.2f} s, ratio {named / free:.3f}",
            f"at most {bar}",
            named / free <= bar,
            at_full_size=True,
        )
