"""What this machine is and how fast: for ``dkrr doctor``, and to turn a plan's flops and bytes into seconds.

All rates are measured in this process with one BLAS thread, the way a worker runs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dkrr._version import __version__
from dkrr.engine.environment import cpu_count, cpu_flags, worker_environment
from dkrr.engine.memory import free_memory_bytes, total_memory_bytes
from dkrr.engine.selftest import blas_libraries, self_test
from dkrr.errors import StorageFullError, StoreError
from dkrr.threads import single_blas_thread

__all__ = [
    "Calibration",
    "MachineReport",
    "calibrate",
    "cpu_model",
    "disk_rates",
    "free_memory_bytes",
    "machine_report",
]

GEMM_EDGE = 1024
KERNEL_SHAPE = (1024, 1024, 10)
REPORT_DISK_BYTES = 256 * 2**20
CALIBRATION_DISK_BYTES = 32 * 2**20
BLOCK_BYTES = 8 * 2**20
REPEATS = 3
_PACKAGES = ("numpy", "scipy", "zarr", "dask", "distributed", "scikit-learn", "crc32c")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How fast one worker process with one thread would be here.

    ``kernel_entry_seconds`` is the time of one entry of an rbf kernel block with 10 features. Disk rates are those of
    one writer, with fsync, and of one reader that does not find the file in the page cache.
    """

    gemm_flops_per_second_float64: float
    gemm_flops_per_second_float32: float
    kernel_entry_seconds: float
    disk_write_bytes_per_second: float
    disk_read_bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class MachineReport:
    """What ``dkrr doctor`` shows; plain values throughout, ``to_dict`` is ready for JSON."""

    cpu: str
    num_cpus: int
    has_avx512: bool
    blas: list[dict[str, Any]]
    self_test_failures: list[str]
    worker_environment: dict[str, str]
    total_memory_bytes: int
    free_memory_bytes: int
    folder: str
    free_disk_bytes: int
    speed: Calibration
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The report as nested dicts and lists of plain values."""
        return asdict(self)


def machine_report(folder: str | os.PathLike[str] = ".") -> MachineReport:
    """Describe this machine and measure it; the disk in ``folder``, with a file of 256 MiB that is removed again.

    Raises
    ------
    StoreError
        The folder does not exist or cannot be written.
    StorageFullError
        There is no room for even a small file.

    Cost
    ----
    One second, and the time to write and read 256 MiB (less where less than 1 GiB is free).
    """
    return MachineReport(
        cpu=cpu_model(),
        num_cpus=cpu_count(),
        has_avx512="avx512f" in cpu_flags(),
        blas=blas_libraries(),
        self_test_failures=self_test(),
        worker_environment=worker_environment(),
        total_memory_bytes=total_memory_bytes(),
        free_memory_bytes=free_memory_bytes(),
        folder=os.path.abspath(folder),
        free_disk_bytes=_free_disk_bytes(Path(folder)),
        speed=_measure(Path(folder), REPORT_DISK_BYTES),
        versions=_versions(),
    )


def calibrate(folder: str | os.PathLike[str], *, seconds: float = 0.5) -> Calibration:
    """Measure quickly what a plan needs, in about ``seconds`` (0.2 s are needed at least); see :func:`machine_report`.

    On a slow disk it takes longer: at least 8 MiB are written, and waited for.
    """
    return _measure(Path(folder), CALIBRATION_DISK_BYTES, seconds)


def disk_rates(folder: str | os.PathLike[str], *, seconds: float = 0.25) -> tuple[float, float]:
    """Bytes per second written (with fsync) and read back, in about ``seconds``; see :func:`calibrate`."""
    return _disk_rates(Path(folder), CALIBRATION_DISK_BYTES, seconds)


def _measure(folder: Path, disk_bytes: int, seconds: float = float("inf")) -> Calibration:
    start = time.perf_counter()
    with single_blas_thread():
        double, single = _gemm_rate(np.float64), _gemm_rate(np.float32)
        entry = _kernel_entry_seconds()
    left = max(0.0, seconds - (time.perf_counter() - start))
    write, read = _disk_rates(folder, disk_bytes, left)
    return Calibration(
        gemm_flops_per_second_float64=double,
        gemm_flops_per_second_float32=single,
        kernel_entry_seconds=entry,
        disk_write_bytes_per_second=write,
        disk_read_bytes_per_second=read,
    )


def _median_seconds(work: Callable[[], Any]) -> float:
    work()  # loads code and touches memory
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gemm_rate(dtype: type[np.floating[Any]]) -> float:
    """Flops per second of the gemm that tiles use (SciPy's), edge 1024."""
    from scipy.linalg.blas import dgemm, sgemm

    gemm = dgemm if dtype is np.float64 else sgemm
    a, b = np.random.default_rng(0).standard_normal((2, GEMM_EDGE, GEMM_EDGE)).astype(dtype)
    c = np.zeros((GEMM_EDGE, GEMM_EDGE), dtype, order="F")
    return 2.0 * GEMM_EDGE**3 / _median_seconds(lambda: gemm(-1.0, a.T, b.T, 1.0, c, trans_a=1, overwrite_c=1))


def _kernel_entry_seconds() -> float:
    from dkrr.kernels import make_kernel

    m, n, d = KERNEL_SHAPE
    a, b = np.random.default_rng(0).standard_normal((m + n, d)).reshape(2, m, d)
    kernel = make_kernel("rbf", gamma=1.0 / d)
    out = np.empty((m, n))
    return _median_seconds(lambda: kernel.block(a, b, out)) / (m * n)


def _free_disk_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError as exc:
        raise StoreError(f"{folder} cannot be measured ({exc.strerror})", hint="give an existing folder") from exc


def _disk_rates(folder: Path, num_bytes: int, seconds: float) -> tuple[float, float]:
    """Write and read rates in bytes per second of up to ``num_bytes``, fewer when they would take over ``seconds``."""
    free = _free_disk_bytes(folder)
    num_bytes = min(num_bytes, free // 4)
    if num_bytes < BLOCK_BYTES:
        raise StorageFullError(
            f"{free:,} bytes are free in {folder}, {4 * BLOCK_BYTES:,} needed to measure it", hint="free some space"
        )
    path = folder / f".dkrr-speed-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as exc:
        raise StoreError(f"{folder} cannot be written ({exc.strerror})", hint="give a folder that can be") from exc
    try:
        path.unlink()  # the file goes with its descriptor, however this ends
        block = bytearray(np.random.default_rng().bytes(BLOCK_BYTES))  # random, for disks that compress
        start = time.perf_counter()
        _write(descriptor, block, 0, BLOCK_BYTES)
        rate = BLOCK_BYTES / (time.perf_counter() - start)
        # half of the time for the rest of the file, half for reading it
        written = int(min(num_bytes, BLOCK_BYTES + rate * max(0.0, seconds / 2)))
        _write(descriptor, block, BLOCK_BYTES, written)
        write_rate = written / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        read = 0
        while read < written:
            read += os.preadv(descriptor, [block], read)
        return write_rate, written / (time.perf_counter() - start)
    finally:
        os.close(descriptor)


def _write(descriptor: int, block: bytearray, start: int, stop: int) -> None:
    """Fill the file from ``start`` to ``stop`` and wait until the disk has it."""
    view = memoryview(block)
    while start < stop:
        start += os.pwrite(descriptor, view[: stop - start], start)
    os.fsync(descriptor)


def cpu_model() -> str:
    """Name of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"dkrr": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return versions
