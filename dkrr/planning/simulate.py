"""Simulation of a factorisation: how long the tasks of a tile Cholesky take on W workers, and how busy these are.

    efficiency = work / (W makespan),    work = seconds of all tasks without a split

The graph is the engine's own: its nodes, their order as priorities, what travels in one message, and how many messages
the scheduler knows. A free worker takes the first of them. Each
task takes the seconds of its products, of its solve, of the tile of A, and of what it reads and writes.

You need it where few tiles meet many workers: it says what to expect of more workers, and what splitting sums
(:mod:`dkrr.linalg.factor.schedule`) saves. It knows no network: on several machines the rates of reading and writing
have to be those of the store that they share.

Cost: about 10 microseconds a task; 0.1 s for 100 tiles a side, 1 s for 250.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields, replace

from dkrr.engine.tasks import WINDOW, Bundle, Key, Queue
from dkrr.linalg.factor.schedule import Split, cholesky_nodes
from dkrr.planning.costs import Machine, itemsize
from dkrr.tiles import TileGrid

__all__ = ["Simulation", "TileSeconds", "simulate"]

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

    def scaled(self, factor: float) -> TileSeconds:
        """All seconds times a factor: what was measured on a small matrix over what was simulated for it."""
        return replace(self, **{item.name: factor * getattr(self, item.name) for item in fields(self)})

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
    num_tasks: int
    num_messages: int

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
    nodes = cholesky_nodes(grid, split)
    makespan, num_messages = _makespan(Queue(nodes, num_workers), grid, split, num_workers, seconds, window)
    whole = Split()
    return Simulation(
        seconds=max(makespan, num_messages * DRIVER_TASK_SECONDS),
        work_seconds=sum(seconds.of_task(key, grid, whole) for key in grid.lower()),
        num_workers=num_workers,
        num_tasks=len(nodes),
        num_messages=num_messages,
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
