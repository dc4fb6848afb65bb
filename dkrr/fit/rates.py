"""Rates of this machine for one kernel: what turns flops, entries and bytes into seconds.

Everything is measured while as many threads are busy as there will be workers, for cores that share a cache, a memory
bus or a power budget are slower together than alone. Where workers will run another BLAS kernel than this process
(``OPENBLAS_CORETYPE``), a process with their environment measures.

Cost: about half a second; once per process for the same kernel, number of features and folder.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

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
from dkrr.errors import DkrrError, StorageFullError
from dkrr.kernels import Kernel, kernel_from_dict, make_kernel
from dkrr.linalg.products import is_nonnegative, kernel_product
from dkrr.store.files import delete_key, is_url, join, name_of, parent_of, read_key, write_key
from dkrr.tiles.blas import gemm_nt

__all__ = ["Machine", "itemsize", "measure_machine"]


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
    syrk_share, trsm_share, potrf_share
        Rates of the other routines on tiles against that of gemm.
    write_memory
        Bytes a second that one worker writes to files in the page cache, checksum included.
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
    syrk_share: float = 0.9
    trsm_share: float = 0.85
    potrf_share: float = 0.6
    write_memory: float = 2e9

    def gemm(self, precision: str) -> float:
        """Flops a second in a precision."""
        return self.gemm_float64 if precision == "float64" else self.gemm_float32

    def entry(self, precision: str, num_columns: float = 1) -> float:
        """Seconds for one evaluated entry of a product with ``num_columns`` columns, used in both triangles."""
        if precision == "float64":
            return self.product_float64 + self.column_float64 * (num_columns - 1)
        return self.product_float32 + self.column_float32 * (num_columns - 1)

    def read(self, num_bytes: float, working_set: float) -> float:
        """Seconds to read bytes of files that need ``working_set`` bytes of cache to stay in memory."""
        missing = 0.0 if working_set <= self.cache_bytes else 1 - self.cache_bytes / working_set
        return num_bytes * (1 / self.mapped_read + missing / self.disk_read)

    def write(self, num_bytes: float, while_busy: float = 0.0) -> float:
        """Seconds to wait for bytes to reach the disk, when it could begin ``while_busy`` seconds earlier."""
        return max(0.0, num_bytes / self.disk_write - while_busy)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def itemsize(precision: str) -> int:
    """Bytes of a factor's number: mixed precision has a float32 factor."""
    return 8 if precision == "float64" else 4


GEMM_EDGE = 768

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

Where = Literal["new cluster", "client", "in process"]


def measure_machine(
    kernel: Kernel | None, num_features: int, folder: Path | str, *, threads: int, where: Where = "new cluster"
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
    with single_blas_thread(), _load(threads - 1):
        rates = {"gemm_float64": gemm_rate(np.float64), "gemm_float32": gemm_rate(np.float32)}
        rates |= _kernel_rates(kernel, num_features)
        data = np.random.default_rng(0).bytes(CHECKSUM_BYTES)
        rates["checksum"] = CHECKSUM_BYTES / best_seconds(lambda: crc32c(data))
    return rates


@contextlib.contextmanager
def _load(num_threads: int) -> Iterator[None]:
    """Keep other threads busy with products of matrices."""
    stopped = threading.Event()
    a = 1e-3 * np.random.default_rng(1).standard_normal((GEMM_EDGE, GEMM_EDGE))

    def work() -> None:
        c = np.zeros((GEMM_EDGE, GEMM_EDGE))
        while not stopped.is_set():
            gemm_nt(c, a, a)  # without the interpreter lock

    with ThreadPoolExecutor(max(1, num_threads)) as others:
        for _ in range(num_threads):
            others.submit(work)
        try:
            yield
        finally:
            stopped.set()


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


if __name__ == "__main__":
    _text, _features, _threads = json.load(sys.stdin)
    _kernel = None if _text is None else kernel_from_dict(json.loads(_text))
    sys.stdout.write(json.dumps(_measure(_kernel, _features, _threads)))
