"""What is chosen by simulation: the edge of the tiles, and which sums are split, for as many workers as there are.

The choice is made on nominal cores (:func:`nominal_machine`), not by rates that were measured a moment ago: the tile
size is part of a factor's key, and the same job has to find its factor again. What is expected of the choice is
simulated with the rates of the machine (:mod:`dkrr.fit.prices`).

Cost: less than 1 s for n = 20,000, some seconds for n = 1,000,000 on hundreds of workers; nothing for up to 4 workers.

Simulation of a factorisation: how long the tasks of a tile Cholesky take on W workers, and how busy these are.

    efficiency = work / (W makespan),    work = seconds of all tasks without a split

The graph is the engine's own: its nodes, their order as priorities, what travels in one message, and how many messages
the scheduler knows. A free worker takes the first of them. Each task takes the seconds of its products, of its solve,
of the tile of A, and of what it reads and writes.

You need it where few tiles meet many workers: it says what to expect of more workers, and what splitting sums
(:mod:`dkrr.linalg.direct`) saves. It knows no network: on several machines the rates of reading and writing
have to be those of the store that they share.

Cost: about 10 microseconds a task; 0.1 s for 100 tiles a side, 1 s for 250.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from dkrr.engine.tasks import WINDOW, Bundle, Key, Queue
from dkrr.fit.rates import Machine, itemsize
from dkrr.linalg.cholesky import Split
from dkrr.linalg.direct import cholesky_nodes, usual_split
from dkrr.linalg.workspace import task_bytes
from dkrr.tiles import TileGrid

__all__ = [
    "FEW_WORKERS",
    "Simulation",
    "TileSeconds",
    "at_most",
    "choose_split",
    "choose_tiles",
    "nominal_machine",
    "simulate",
]


# What a task costs its worker beside the work: message, receipt, two looks into the store.
WORKER_TASK_SECONDS = 4e-3

# What a message costs client and scheduler: they cannot hand out more.
DRIVER_TASK_SECONDS = 2e-3


@dataclass(frozen=True, kw_only=True)
class TileSeconds:
    """Seconds of one worker for each part of a task on full tiles.

    Parameters
    ----------
    gemm, syrk
        One term of a sum, off and on the diagonal.
    trsm, potrf
        The end of a task, off and on the diagonal.
    make
        A tile of A: evaluated from the kernel, or read from a stored Gram matrix and copied.
    read, write
        One tile.
    task
        Everything else: message, receipt, finding out what is there.
    """

    gemm: float
    syrk: float
    trsm: float
    potrf: float
    make: float
    read: float
    write: float
    task: float = WORKER_TASK_SECONDS

    @classmethod
    def of(cls, machine: Machine, tile_size: int, precision: str, gram: str) -> TileSeconds:
        """From the rates of a machine; mixed precision has a float32 factor."""
        b, threads, size = float(tile_size), machine.threads, itemsize(precision)
        rate = machine.gemm("float64" if size == 8 else "float32") / threads
        one_read = b * b * threads / machine.mapped_read
        make = 2 * 8 * one_read if gram == "stored" else b * b * machine.block_entry * threads
        return cls(
            gemm=2 * b**3 / rate,
            syrk=b**3 / (machine.syrk_share * rate),
            trsm=b**3 / (machine.trsm_share * rate),
            potrf=b**3 / 3 / (machine.potrf_share * rate),
            make=make,
            read=size * one_read,
            write=size * b * b / machine.write_memory,
        )

    def of_task(self, key: Key, grid: TileGrid, split: Split) -> float:
        """Seconds of one task; a ragged tile has fewer rows, and is read and written whole."""
        i, j = key[:2]
        rows, columns = grid.rows(i) / grid.tile_size, grid.rows(j) / grid.tile_size
        first = split.first_rest(grid, j)
        if len(key) == 3:
            terms, seconds = first, self.make * rows * columns + self.write + self.task
        else:
            terms = j - first
            seconds = (self.read if first else self.make * rows * columns) + self.write + self.task
            if i == j:
                seconds += self.potrf * columns**3
            else:
                seconds += self.trsm * rows * columns**2 + self.read
        if i == j:
            return seconds + terms * (self.syrk * columns**2 + self.read)
        return seconds + terms * (self.gemm * rows * columns + 2 * self.read)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a simulated factorisation takes. ``work_seconds`` is the sum over all tasks without a split."""

    seconds: float
    work_seconds: float
    num_workers: int

    @property
    def efficiency(self) -> float:
        """The share of the workers' time in which they do what has to be done, split or not."""
        return self.work_seconds / (self.num_workers * self.seconds)


def simulate(
    grid: TileGrid, split: Split, num_workers: int, seconds: TileSeconds, *, window: int | None = None
) -> Simulation:
    """Simulate the factorisation of a matrix in the tiles of a grid.

    Parameters
    ----------
    grid
        The tiles.
    split
        Which sums are split.
    num_workers
        Tasks that run at once.
    seconds
        What the parts of a task take.
    window
        Messages that the scheduler knows at once; that of the engine unless given.

    Cost
    ----
    10 microseconds for each of the N (N + 1) / 2 tasks, twice that where every sum is split.
    """
    queue = Queue(cholesky_nodes(grid, split), num_workers)
    makespan, num_messages = _makespan(queue, grid, split, num_workers, seconds, window)
    whole = Split()
    return Simulation(
        seconds=max(makespan, num_messages * DRIVER_TASK_SECONDS),
        work_seconds=sum(seconds.of_task(key, grid, whole) for key in grid.lower()),
        num_workers=num_workers,
    )


def _makespan(
    queue: Queue, grid: TileGrid, split: Split, num_workers: int, seconds: TileSeconds, window: int | None
) -> tuple[float, int]:
    """List scheduling: free workers take, of the messages that have been sent, the first of the list.

    Returns the seconds, and the number of messages.
    """
    window = WINDOW * num_workers if window is None else window
    sent: list[tuple[int, Bundle]] = []
    running: list[tuple[float, int, Bundle]] = []
    count, now = 0, 0.0
    while True:
        while len(sent) + len(running) < window and (bundle := queue.take()):
            heapq.heappush(sent, (queue.rank[bundle[0].key], bundle))
            count += 1
        while sent and len(running) < num_workers:
            rank, bundle = heapq.heappop(sent)
            took = sum(seconds.of_task(node.key, grid, split) for node in bundle)
            heapq.heappush(running, (now + took, rank, bundle))
        if not running:
            return now, count
        now, _, bundle = heapq.heappop(running)
        queue.finished(bundle)


EDGES = (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 2560, 3072, 4096)

# Larger matrices are not simulated where something is chosen: they keep workers busier than those of this side.
MOST_TILES = 192

LAST_TERMS = (1, 2, 3, 4, 6, 8, 12)

# Up to so many workers the rule of thumb for tiles has been measured, and is kept.
FEW_WORKERS = 4

# A split, or another edge than the rule's, has to save this share of the time.
LEAST_GAIN, LEAST_EDGE_GAIN = 0.01, 0.03


def nominal_machine(threads: int) -> Machine:
    """Rates of a usual core, times ``threads``: what is chosen by them does not change with what else a machine does.

    60 GF/s in float64 and 125 in float32 as NumPy and SciPy come, 5 ns for an entry of the kernel, mapped files.
    """
    return Machine(
        threads=threads,
        gemm_float64=60e9 * threads,
        gemm_float32=125e9 * threads,
        block_entry=5e-9 / threads,
        product_float64=1e-9 / threads,
        product_float32=8e-10 / threads,
        column_float64=3e-11 / threads,
        column_float32=2e-11 / threads,
        exact_factor=1.2,
        disk_write=1e9,
        disk_read=1e9,
        mapped_read=5e9 * threads,
        task_seconds=2e-3,
        round_seconds=0.02,
        start_seconds=2.0,
        first_product_seconds=0.5,
        end_seconds=1.5,
        cache_bytes=1e12,
    )


def at_most(grid: TileGrid) -> TileGrid:
    """The grid, or one of as many equal tiles as are simulated where a choice is made, 192 a side."""
    return TileGrid(min(grid.n, MOST_TILES * grid.tile_size), grid.tile_size)


@lru_cache(maxsize=64)
def choose_split(n: int, tile_size: int, num_workers: int, precision: str, gram: str) -> Split:
    """The split with the least simulated time on nominal cores; none where it saves less than 1 %.

    For a few workers it is the usual one. Where workers are few against the tiles a side, only the last columns are
    split, one more than there are workers: the others are busy anyway, and a split costs a tile written and read.
    """
    grid = TileGrid(n, tile_size)
    if num_workers <= FEW_WORKERS:
        return usual_split(grid.num_tiles, num_workers)
    best = _best_split(at_most(grid), num_workers, precision, gram)
    every = best.num_columns == at_most(grid).num_tiles
    return replace(best, num_columns=grid.num_tiles) if every else best


def _best_split(grid: TileGrid, num_workers: int, precision: str, gram: str) -> Split:
    """The one with the least seconds of those with w = 1 to 12 last terms apart, and of none."""
    seconds = TileSeconds.of(nominal_machine(num_workers), grid.tile_size, precision, gram)
    columns = grid.num_tiles if 4 * num_workers > grid.num_tiles else num_workers + 1
    splits = [Split(num_columns=columns, num_last=w) for w in LAST_TERMS if w + 2 < grid.num_tiles]
    times = {split: simulate(grid, split, num_workers, seconds).seconds for split in (Split(), *splits)}
    best = min(times, key=times.__getitem__)
    return best if times[best] <= (1 - LEAST_GAIN) * times[Split()] else Split()


@lru_cache(maxsize=64)
def choose_tiles(
    n: int, num_features: int, memory_bytes: int | None, num_workers: int, precision: str, gram: str, usual: int
) -> int:
    """The tile edge with the least simulated time on nominal cores; ``usual`` unless another saves 3 %.

    Parameters
    ----------
    memory_bytes
        Of one task; an edge whose task needs more than 80 % of it is not looked at.
    usual
        The edge of the rule of thumb, which is kept for up to 4 workers.

    Cost
    ----
    A simulation for each edge, of at most 19,000 tiles: less than 1 s for n = 20,000.
    """
    if num_workers <= FEW_WORKERS:
        return usual
    size = itemsize(precision)
    room = inf if memory_bytes is None else 0.8 * memory_bytes
    fitting = [edge for edge in EDGES if task_bytes(edge, num_features, size) <= room]
    grids = [grid for edge in fitting if 1 < (grid := TileGrid(n, edge)).num_tiles <= MOST_TILES]
    is_large = TileGrid(n, usual).num_tiles > MOST_TILES
    if not grids:  # hardly any matrix, or one so large that the largest tiles keep all workers busy
        return max([usual, *fitting]) if is_large else usual

    def seconds(grid: TileGrid) -> float:
        tile = TileSeconds.of(nominal_machine(num_workers), grid.tile_size, precision, gram)
        return simulate(grid, usual_split(grid.num_tiles, num_workers), num_workers, tile).seconds

    best = min(grids, key=seconds)
    is_better = is_large or seconds(best) < (1 - LEAST_EDGE_GAIN) * seconds(TileGrid(n, usual))
    return best.tile_size if is_better else usual
