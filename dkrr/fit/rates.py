"""Rates of this machine for one kernel: what turns flops, entries and bytes into seconds; and a schedule of a factor.

Everything is measured while as many threads are busy as there will be workers, for cores that share a cache, a memory
bus or a power budget are slower together than alone. Where workers will run another BLAS kernel than this process
(``OPENBLAS_CORETYPE``), a process with their environment measures: about half a second, once per process for the same
kernel, number of features and folder.

:func:`simulate` says how long the tasks of a tile Cholesky take on W workers, and how busy these are.

    efficiency = work / (W makespan),    work = seconds of all tasks without a split

The graph is the engine's own: its nodes, their order as priorities, what travels in one message, and how many messages
the scheduler knows. A free worker takes the first of them. Each task takes the seconds of its products, of its solve,
of the tile of A, and of what it reads and writes. You need it where few tiles meet many workers: it says what to expect
of more workers, and what splitting sums (:mod:`dkrr.linalg.direct`) saves. It knows no network: on several
machines the rates of reading and writing have to be those of the store that they share.

The edge of the tiles, and which sums are split, are chosen by simulation on nominal cores (:func:`nominal_machine`),
not by rates that were measured a moment ago: the tile size is part of a factor's key, and the same job has to find its
factor again. What is expected of the choice is simulated with the rates of the machine (:mod:`dkrr.fit.prices`).

Cost: about 10 microseconds a task; 0.1 s for 100 tiles a side, 1 s for 250. A choice takes less than 1 s for n =
20,000, some seconds for n = 1,000,000 on hundreds of workers, and nothing for up to 4 workers.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from crc32c import crc32c

from dkrr.engine.machine import (
    CORETYPE,
    best_seconds,
    cpu_count,
    disk_rates,
    free_memory_bytes,
    gemm_rate,
    single_blas_thread,
    subprocess_environment,
    worker_environment,
)
from dkrr.engine.tasks import WINDOW, Bundle, Key, Queue
from dkrr.errors import DkrrError, StorageFullError
from dkrr.kernels import Kernel, kernel_from_dict, make_kernel
from dkrr.linalg.direct import Split, cholesky_nodes, usual_split
from dkrr.linalg.products import is_nonnegative, kernel_product
from dkrr.linalg.workspace import task_bytes
from dkrr.store.files import delete_key, is_url, join, name_of, parent_of, read_key, write_key
from dkrr.tiles import TileGrid


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates of all workers together, for one kernel and number of features.

    Parameters
    ----------
    threads
        Tasks that run at once.
    gemm_float64, gemm_float32
        Flops a second while all workers are busy.
    block_entry
        Seconds for one entry of a Gram tile.
    product_float64, product_float32
        Seconds for one entry that a product evaluates and uses, with one column.
    column_float64, column_float32
        Seconds for each further column of such an entry.
    exact_factor
        What a product with sums of absolute entries, for the norm of the matrix, costs against one without.
    disk_write, disk_read
        Bytes a second.
    mapped_read
        Bytes a second of files that are in the page cache.
    task_seconds
        What one task costs beside its work, divided by the tasks that run at once.
    round_seconds
        What a graph of tasks costs beside them: until the first begins and after the last has ended.
    start_seconds
        Until the workers are there and have imported what their first task needs.
    first_product_seconds
        Until they have loaded the compiled code of their first product.
    end_seconds
        Until the model is written and the workers are gone.
    cache_bytes
        Memory in which files stay after they were written.
    driver_threads
        Cores of the driver that can read the store as fast as workers do.
    """

    threads: int
    gemm_float64: float
    gemm_float32: float
    block_entry: float
    product_float64: float
    product_float32: float
    column_float64: float
    column_float32: float
    exact_factor: float
    disk_write: float
    disk_read: float
    mapped_read: float
    task_seconds: float
    round_seconds: float
    start_seconds: float
    first_product_seconds: float
    end_seconds: float
    cache_bytes: float
    driver_threads: int = 1

    def gemm(self, precision: str) -> float:
        """Flops a second in a precision."""
        return self.gemm_float64 if precision == "float64" else self.gemm_float32

    def entry(self, precision: str, num_columns: float = 1) -> float:
        """Seconds for one evaluated entry of a product with ``num_columns`` columns, used in both triangles."""
        double, single = (self.product_float64, self.column_float64), (self.product_float32, self.column_float32)
        first, further = double if precision == "float64" else single
        return first + further * (num_columns - 1)

    def read(self, num_bytes: float, working_set: float) -> float:
        """Seconds to read bytes of files that need ``working_set`` bytes of cache to stay in memory."""
        missing = 0.0 if working_set <= self.cache_bytes else 1 - self.cache_bytes / working_set
        return num_bytes * (1 / self.mapped_read + missing / self.disk_read)

    def write(self, num_bytes: float, while_busy: float = 0.0) -> float:
        """Seconds to wait for bytes to reach the disk, when it could begin ``while_busy`` seconds earlier."""
        return max(0.0, num_bytes / self.disk_write - while_busy)


def itemsize(precision: str) -> int:
    """Bytes of a factor's number: mixed precision has a float32 factor."""
    return 8 if precision == "float64" else 4


BLOCK_EDGE = 1024

PRODUCT_EDGE = 1792  # smaller ones may take another way

NUM_COLUMNS = 9

CHECKSUM_BYTES = 16 * 2**20

NETWORK_BYTES = 8 * 2**20

# a page of a mapped file that is in memory: its table entry and the walk through the cache
PAGE_BYTES_PER_SECOND = 8e9

# 2.1 s until two workers are there and 0.6 s for the imports of their first task; medians of a dozen fits
CLUSTER_START_SECONDS, FIRST_PRODUCT_SECONDS, CLUSTER_END_SECONDS = 2.7, 0.5, 1.5

DASK_TASK_SECONDS, DASK_ROUND_SECONDS = 2e-3, 0.02

OWN_TASK_SECONDS, OWN_ROUND_SECONDS = 2e-4, 1e-3

# entries of both signs are evaluated in blocks, so that their absolute values can be summed
SIGNED_FACTOR = 4.0

CHILD_SECONDS = 60.0

DISK_SECONDS = 0.1

ASSUMED_DISK_RATE = 5e8


def measure_machine(
    kernel: Kernel | None,
    num_features: int,
    folder: Path | str,
    *,
    threads: int,
    where: Literal["new cluster", "client", "in process"] = "new cluster",
) -> Machine:
    """Rates of all workers together.

    Parameters
    ----------
    kernel
        Resolved; None for a given matrix, whose entries cost next to nothing.
    folder
        Where the store is or will be, a folder or an address.
    threads
        Tasks that will run at once. Those beyond the CPUs of this machine are taken to be as fast as its own.
    where
        Whether workers are to be started, are there, or are this process.
    """
    text = None if kernel is None else json.dumps(kernel.to_dict(), sort_keys=True)
    busy = min(threads, cpu_count())
    try:
        rates = dict(_rates(text, num_features, busy))
    except (DkrrError, ImportError, AttributeError, TypeError):  # a kernel that only exists in this process
        rates = _measure(kernel, num_features, busy)
    mapped = threads / (1 / rates.pop("checksum") + 1 / PAGE_BYTES_PER_SECOND)
    if is_url(folder):
        # every worker has a connection of its own, and nothing that was read once is in memory the next time
        write, read = (threads * rate for rate in _network(str(folder)))
        mapped = min(mapped, read)
    else:
        path = Path(folder).absolute()
        write, read = _disk(str(next(known for known in (path, *path.parents) if known.exists())))
    in_process = where == "in process"
    return Machine(
        threads=threads,
        **{name: rate * threads if name.startswith("gemm") else rate / threads for name, rate in rates.items()},
        exact_factor=1.2 if kernel is None or is_nonnegative(kernel) else SIGNED_FACTOR,
        disk_write=write,
        disk_read=read,
        mapped_read=mapped,
        task_seconds=OWN_TASK_SECONDS if in_process else DASK_TASK_SECONDS,
        round_seconds=OWN_ROUND_SECONDS if in_process else DASK_ROUND_SECONDS,
        start_seconds=CLUSTER_START_SECONDS if where == "new cluster" else 0.0,
        first_product_seconds=FIRST_PRODUCT_SECONDS if where == "new cluster" else 0.0,
        end_seconds=CLUSTER_END_SECONDS if where == "new cluster" else 0.1,
        cache_bytes=0.8 * free_memory_bytes(),
        driver_threads=1 if in_process else cpu_count(),
    )


@lru_cache(maxsize=8)
def _network(url: str) -> tuple[float, float]:
    """Bytes a second of one connection to an object store: a put and a get of 8 MiB, the object is removed."""
    location, data = join(url, f".dkrr-speed-{uuid.uuid4().hex}"), np.random.default_rng(0).bytes(NETWORK_BYTES)
    parent, key = parent_of(location), name_of(location)
    try:
        start = time.perf_counter()
        write_key(parent, key, data)
        middle = time.perf_counter()
        read_key(parent, key)
        return NETWORK_BYTES / (middle - start), NETWORK_BYTES / (time.perf_counter() - middle)
    finally:
        delete_key(parent, key)


@lru_cache(maxsize=8)
def _disk(folder: str) -> tuple[float, float]:
    try:
        return disk_rates(folder, seconds=DISK_SECONDS)
    except StorageFullError:
        return ASSUMED_DISK_RATE, ASSUMED_DISK_RATE  # too full to be measured: the plan will say how much is missing


@lru_cache(maxsize=32)
def _rates(kernel: str | None, num_features: int, threads: int) -> dict[str, float]:
    """Rates of one of ``threads`` busy threads; in another process where workers will use another BLAS kernel."""
    resolved = None if kernel is None else kernel_from_dict(json.loads(kernel))
    if CORETYPE in worker_environment():
        with contextlib.suppress(subprocess.SubprocessError, ValueError):
            done = subprocess.run(
                [sys.executable, "-P", "-m", "dkrr.fit.rates"],
                env={**subprocess_environment(), **worker_environment()},
                input=json.dumps([kernel, num_features, threads]).encode(),
                capture_output=True,
                timeout=CHILD_SECONDS,
                check=True,
            )
            return dict(json.loads(done.stdout))
    return _measure(resolved, num_features, threads)


def _measure(kernel: Kernel | None, num_features: int, threads: int) -> dict[str, float]:
    """Rates of one thread while as many as there will be workers do the same."""

    def one(_: int) -> dict[str, float]:
        rates = {"gemm_float64": gemm_rate(np.float64), "gemm_float32": gemm_rate(np.float32)}
        data = np.random.default_rng(0).bytes(CHECKSUM_BYTES)
        rates["checksum"] = CHECKSUM_BYTES / best_seconds(lambda: crc32c(data))
        return rates | _kernel_rates(kernel, num_features)

    with single_blas_thread(), ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(one, range(threads)))
    return {name: float(np.median([rates[name] for rates in found])) for name in found[0]}


def _kernel_rates(kernel: Kernel | None, d: int) -> dict[str, float]:
    """Seconds an entry of a Gram block, of a product in both triangles, and of each further column."""
    shown = make_kernel("linear").resolve(d) if kernel is None else kernel
    edge, product_edge = BLOCK_EDGE, PRODUCT_EDGE
    if shown.name in ("function", "sklearn"):
        edge = product_edge = 96  # may take microseconds an entry
    a, b = np.abs(np.random.default_rng(0).standard_normal((2, product_edge, d)))
    out = np.empty((edge, edge))
    rates = {"block_entry": best_seconds(lambda: shown.block(a[:edge], b[:edge], out)) / edge**2}

    def product_seconds(t: int, precision: Any) -> float:
        (v, u), (out, out_t) = np.ones((2, product_edge, t)), np.zeros((2, product_edge, t))
        product = partial(kernel_product, shown, a, b, v, out, u=u, out_t=out_t, precision=precision)
        return best_seconds(product) / product_edge**2

    for precision in ("float64", "float32"):
        one, many = (product_seconds(t, precision) for t in (1, NUM_COLUMNS))
        rates |= {f"product_{precision}": one, f"column_{precision}": max(0.0, (many - one) / (NUM_COLUMNS - 1))}
    return rates


# --- a schedule -------------------------------------------------------------------------------------------------------


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
        # the other routines reach these shares of the rate of gemm; 2 GB/s to files in the page cache, with checksums
        return cls(
            gemm=2 * b**3 / rate,
            syrk=b**3 / (0.9 * rate),
            trsm=b**3 / (0.85 * rate),
            potrf=b**3 / 3 / (0.6 * rate),
            make=make,
            read=size * one_read,
            write=size * b * b / 2e9,
        )

    def of_task(self, key: Key, grid: TileGrid, split: Split) -> float:
        """Seconds of one task; a ragged tile has fewer rows, and is read and written whole."""
        i, j = key[:2]
        rows, columns = grid.rows(i) / grid.tile_size, grid.rows(j) / grid.tile_size
        first = split.num_first(grid, j)
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


class Simulation(NamedTuple):
    """What a simulated factorisation takes.

    ``efficiency`` is the share of the workers' time in which they do what has to be done, split or not.
    """

    seconds: float
    efficiency: float


def simulate(grid: TileGrid, split: Split, num_workers: int, seconds: TileSeconds) -> Simulation:
    """Simulate the factorisation of a matrix in the tiles of a grid, by list scheduling: free workers take, of the
    messages that have been sent, the first of the list.

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

    Cost
    ----
    10 microseconds for each of the N (N + 1) / 2 tasks, twice that where every sum is split.
    """
    queue, window = Queue(cholesky_nodes(grid, split), num_workers), WINDOW * num_workers
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
            break
        now, _, bundle = heapq.heappop(running)
        queue.finished(bundle)
    makespan, work = (
        max(now, count * DRIVER_TASK_SECONDS),
        sum(seconds.of_task(key, grid, Split()) for key in grid.lower()),
    )
    return Simulation(makespan, work / (num_workers * makespan))


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
    whole = TileGrid(n, tile_size)
    if num_workers <= FEW_WORKERS:
        return usual_split(whole.num_tiles, num_workers)
    grid, seconds = at_most(whole), TileSeconds.of(nominal_machine(num_workers), tile_size, precision, gram)
    columns = grid.num_tiles if 4 * num_workers > grid.num_tiles else num_workers + 1
    splits = [Split(num_columns=columns, num_last=w) for w in LAST_TERMS if w + 2 < grid.num_tiles]
    times = {split: simulate(grid, split, num_workers, seconds).seconds for split in (Split(), *splits)}
    best = min(times, key=times.__getitem__)
    if times[best] > (1 - LEAST_GAIN) * times[Split()]:
        return Split()
    return replace(best, num_columns=whole.num_tiles) if best.num_columns == grid.num_tiles else best


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


if __name__ == "__main__":
    _text, _features, _threads = json.load(sys.stdin)
    _kernel = None if _text is None else kernel_from_dict(json.loads(_text))
    sys.stdout.write(json.dumps(_measure(_kernel, _features, _threads)))
