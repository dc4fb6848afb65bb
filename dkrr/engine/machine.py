"""This machine: its memory, its processors, its BLAS, what worker processes need for it, and how fast it is.

Memory counts as far as the control groups of this process allow it to be used.

A wrong BLAS kernel (a core type that does not suit the CPU, a broken build, threads that overwrite each other's
buffers) gives wrong numbers without an error, so every worker computes known answers when it is first used; 20 to 30
ms. ``python -m dkrr.engine.machine`` prints the outcome as JSON.

OpenBLAS reads its variables once, when it is loaded, so they must be set before a worker process starts. The wheels of
NumPy and SciPy fall back to AVX2 kernels on CPUs that are newer than their OpenBLAS, at about half the speed of the
AVX-512 kernels; ``OPENBLAS_CORETYPE=SkylakeX`` is recommended there, after a process that uses it has passed the
self-test: 0.3 s, once per process, and nothing where OpenBLAS already uses an AVX-512 kernel.

All rates are measured in this process with one BLAS thread, the way a worker runs.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from dkrr import __version__
from dkrr.errors import StorageFullError
from dkrr.store.files import free_bytes, storage_errors

_CGROUP = Path("/sys/fs/cgroup")

_MEMBERSHIP = Path("/proc/self/cgroup")


# finding the loaded libraries costs milliseconds; NumPy and SciPy are loaded by the time of the first call
_controller = lru_cache(maxsize=1)(ThreadpoolController)
# what restores the setting of before, and None for each block that wants one thread
_limits: list[Any] = []
_limited = threading.Lock()


def limit_blas(controller: ThreadpoolController | None = None) -> Callable[[], None]:
    """Limit BLAS to one thread for good; what is returned restores the setting of before.

    The setting is one of the process, which threadpoolctl leaves (from 3.8 on) to the thread that was the first to
    change it: what another one wants has no effect there, and no error. So whose it is, is forgotten before and after.
    """

    found = controller or _controller()

    def forget() -> None:
        for library in found.lib_controllers:
            getattr(library, "clear_controlling_thread", lambda **_: None)(force=True)

    def restore() -> None:
        forget()
        limit.restore_original_limits()
        forget()

    forget()
    limit = found.limit(limits=1, user_api="blas")
    forget()
    return restore


@contextlib.contextmanager
def single_blas_thread() -> Iterator[None]:
    """Limit BLAS to one thread inside the block; restores the caller's setting.

    Threaded OpenBLAS is slower per core on tiles, has returned wrong numbers when called from several Python threads,
    and crashes in potrf of large matrices on some kernels; dkrr's parallelism comes from tile tasks instead. The limit
    is one of the whole process: of blocks in several threads the first sets it, and the last restores.
    """
    with _limited:
        if not _limits:
            _limits.append(limit_blas())
        _limits.append(None)
    try:
        yield
    finally:
        with _limited:
            _limits.pop()
            if len(_limits) == 1:
                _limits.pop()()


def total_memory_bytes() -> int:
    """Installed memory, or the smallest memory limit of the control groups around this process."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroups())])


def free_memory_bytes() -> int:
    """Memory that can be had without swapping: available on the machine and left under every control group limit.

    Page cache counts as free, for the kernel gives it up.
    """
    return max(0, min([int(psutil.virtual_memory().available), *(limit - used for limit, used in _cgroups())]))


def peak_rss_bytes() -> int:
    """Largest resident memory that this process ever had.

    ``VmHWM`` where there is one: ``ru_maxrss`` of a child starts with the peak of the process that started it.
    """
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use (without inactive page cache) of the control groups that have a limit, from our own to the root."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root, names = _CGROUP, ("memory.max", "memory.current", "inactive_file")
        if controllers:  # version 1, where each controller has groups of its own
            root, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents) if not controllers or "memory" in controllers.split(",") else ():
            # no limit here ("max"), a folder that is not visible from inside a container, or one above the root
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text()) for name in names[:2])
                statistics = dict(entry.split() for entry in (folder / "memory.stat").read_text().splitlines())
                yield limit, max(0, used - int(statistics.get(names[2], 0)))


# neither is a multiple of a register block, so that the edges of the kernels are used as well
_ORDER, _DEPTH = 203, 67

_BAR = 30.0


def blas_libraries() -> list[dict[str, Any]]:
    """The BLAS libraries that NumPy and SciPy loaded, as ``threadpoolctl.threadpool_info`` describes them."""
    import scipy.linalg  # noqa: F401  (loads SciPy's own BLAS)
    from threadpoolctl import threadpool_info

    return [dict(library) for library in threadpool_info() if library["user_api"] == "blas"]


def blas_kernel(libraries: Iterable[Mapping[str, Any]]) -> str:
    """Names of the BLAS kernels in use, e.g. "openblas-SkylakeX"; the same bits need the same kernel."""
    return "+".join(sorted({f"{item['internal_api']}-{item.get('architecture', 'unknown')}" for item in libraries}))


def self_test() -> list[str]:
    """Check gemm, syrk, potrf and trsm in float64 and float32 against sums that use no BLAS.

    Returns
    -------
    failures : list of str
        One sentence for each routine whose residual is above 30 in units of n |A| |B| eps; empty when all is well.
    """
    return [*_test("d", np.float64), *_test("s", np.float32)]


def _test(letter: str, dtype: type[np.floating[Any]]) -> Iterator[str]:
    from scipy.linalg import blas, lapack

    gemm, syrk, trsm = (getattr(blas, letter + name) for name in ("gemm", "syrk", "trsm"))
    name, eps = np.dtype(dtype).name, float(np.finfo(dtype).eps)
    generator = np.random.default_rng(0)
    rows, right = generator.standard_normal((2, _ORDER, _DEPTH)).astype(dtype)
    gram = _plain_product(rows, rows)
    matrix = gram / dtype(_DEPTH) + np.eye(_ORDER, dtype=dtype)
    factor, info = getattr(lapack, letter + "potrf")(matrix, lower=1, clean=1)
    if info:
        yield f"{name} potrf: stopped at row {info} of a positive definite matrix"
    # L from a matrix that is known, so that trsm is judged apart from potrf
    lower = np.tril(matrix)
    solution = trsm(1.0, lower, right, lower=1)
    solved = _plain_product(lower, np.ascontiguousarray(solution.T))
    size, large = float(np.max(gram)), float(np.max(matrix)) * _ORDER
    for routine, found, expected, scale in (
        ("gemm", gemm(1.0, rows, rows, trans_b=1), gram, size),
        ("matmul", np.matmul(rows, right.T), _plain_product(rows, right), size),
        ("syrk", np.tril(syrk(1.0, rows, lower=1)), np.tril(gram), size),
        ("potrf", matrix if info else _plain_product(factor, factor), matrix, large),
        ("trsm", solved, right, large * float(np.max(np.abs(solution)))),
    ):
        residual = float(np.max(np.abs(found - expected))) / (scale * eps)
        if not residual < _BAR:  # NaN fails as well
            yield f"{name} {routine}: residual {residual:.1e} eps, at most {_BAR:.0f} expected"


def _plain_product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """A B^T summed in float64 by einsum's own loops."""
    wide: NDArray[Any] = np.einsum("ik,jk->ij", a.astype(np.float64), b.astype(np.float64), optimize=False)
    product: NDArray[Any] = wide.astype(a.dtype)
    return product


if __name__ == "__main__":
    libraries = [{key: library.get(key) for key in ("internal_api", "architecture")} for library in blas_libraries()]
    json.dump({"failures": self_test(), "libraries": libraries}, sys.stdout)

logger = logging.getLogger("dkrr.engine.machine")

CORETYPE = "OPENBLAS_CORETYPE"
MISSING = "missing"

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})  # what SkylakeX kernels use

_AVX2_KERNELS = frozenset({"haswell", "zen"})

_AVX512_KERNEL = "SkylakeX"

_CPUINFO = Path("/proc/cpuinfo")

_TEST_SECONDS = 30.0


def cpu_count() -> int:
    """CPUs that this process may use, as Dask counts them: affinity and control group quota respected."""
    from dask.system import CPU_COUNT

    return int(CPU_COUNT)


def _cpuinfo(name: str) -> str:
    """What Linux says of the first processor under a name; "" on other systems."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the CPU, as Linux names them; empty on other systems and other processors."""
    return frozenset(_cpuinfo("flags").split())


def cpu_model() -> str:
    """Name of this machine's processor."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python, dkrr and the packages that matter, as installed here; "missing" for what is not there."""
    found = {"python": platform.python_version(), "dkrr": __version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = MISSING
    return found


@lru_cache(maxsize=1)
def recommended_coretype() -> str | None:
    """The OpenBLAS core type that is worth setting on this CPU.

    Returns
    -------
    coretype : str or None
        "SkylakeX" where the CPU has AVX-512, an AVX2 kernel is in use without the variable, and a process with the
        variable set uses the kernel and computes right numbers; None otherwise.
    """
    # SciPy is loaded for the look at its BLAS only where the answer can matter
    libraries = blas_libraries() if cpu_flags() >= _AVX512 else []
    used = [str(item.get("architecture")) for item in libraries if item["internal_api"] == "openblas"]
    slow = [architecture for architecture in used if architecture.lower() in _AVX2_KERNELS]
    if slow and (problem := _problem_with(_AVX512_KERNEL)):
        text = "the CPU has AVX-512 but OpenBLAS uses %s kernels, and %s=%s is not usable: %s"
        logger.warning(text, slow[0], CORETYPE, _AVX512_KERNEL, problem)
        return None
    return _AVX512_KERNEL if slow else None


def _problem_with(coretype: str) -> str:
    """Run the self-test in a process that uses ``coretype``; "" when it is in use and right."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dkrr.engine.machine"],
            env={**subprocess_environment(), **ONE_THREAD, CORETYPE: coretype},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the self-test did not end within {_TEST_SECONDS:.0f} s"
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        return f"the self-test ended with status {done.returncode} {reason[0]}".rstrip()
    outcome = json.loads(done.stdout)
    if outcome["failures"]:
        return "; ".join(outcome["failures"])
    used = {str(item["architecture"]) for item in outcome["libraries"] if item["internal_api"] == "openblas"}
    return "" if used == {coretype} else f"OpenBLAS used {', '.join(sorted(used))} instead"


def worker_environment() -> dict[str, str]:
    """Variables to set before a worker process starts.

    One BLAS thread a process, whatever the caller's own setting: threaded OpenBLAS is slower per core on tiles and has
    returned wrong numbers. ``OPENBLAS_CORETYPE`` where :func:`recommended_coretype` says so; a value that the user set
    is left alone.
    """
    coretype = None if CORETYPE in os.environ else recommended_coretype()
    return ONE_THREAD | ({} if coretype is None else {CORETYPE: coretype})


def subprocess_environment() -> dict[str, str]:
    """The environment of this process, with its import path: a child imports what this process can import."""
    path = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)  # "" is the current folder
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def environment_lines() -> list[str]:
    """``worker_environment()`` as shell lines ``export NAME=value``, for workers that others start."""
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(worker_environment().items())]


GEMM_EDGE = 768

LEAST_RUNS, MOST_RUNS, MEASURE_SECONDS = 2, 20, 0.05

KERNEL_SHAPE = (1024, 1024, 10)

REPORT_DISK_BYTES = 256 * 2**20

CALIBRATION_DISK_BYTES = 32 * 2**20

BLOCK_BYTES = 8 * 2**20

PACKAGES = ("numpy", "scipy", "zarr", "dask", "distributed", "scikit-learn", "crc32c")


def machine_report(folder: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """Describe this machine and measure it; the disk in ``folder``, with a file of 256 MiB that is removed again.

    Returns
    -------
    report : dict
        What ``dkrr doctor`` shows, plain values throughout. ``speed`` is that of one worker process with one thread:
        ``kernel_entry_seconds`` the time of one entry of an rbf kernel block with 10 features, disk rates those of one
        writer, with fsync, and of one reader that does not find the file in the page cache.

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
    with single_blas_thread():
        double, single, entry = gemm_rate(np.float64), gemm_rate(np.float32), _kernel_entry_seconds()
    write, read = disk_rates(folder, REPORT_DISK_BYTES, seconds=float("inf"))
    return {
        "cpu": cpu_model(),
        "num_cpus": cpu_count(),
        "has_avx512": "avx512f" in cpu_flags(),
        "blas": blas_libraries(),
        "self_test_failures": self_test(),
        "worker_environment": worker_environment(),
        "total_memory_bytes": total_memory_bytes(),
        "free_memory_bytes": free_memory_bytes(),
        "folder": os.path.abspath(folder),
        "free_disk_bytes": free_bytes(folder),
        "speed": {
            "gemm_flops_per_second_float64": double,
            "gemm_flops_per_second_float32": single,
            "kernel_entry_seconds": entry,
            "disk_write_bytes_per_second": write,
            "disk_read_bytes_per_second": read,
        },
        "versions": versions(),
    }


def best_seconds(work: Callable[[], Any]) -> float:
    """Processor seconds of the best of many short runs of this thread.

    What other programs do on the machine at this moment says nothing about the time of the fit: time that they take the
    processor away is not counted, and the run that they disturbed least is.
    """
    work()  # loads code and touches memory
    best, started, runs = float("inf"), time.perf_counter(), 0
    while runs < LEAST_RUNS or (runs < MOST_RUNS and time.perf_counter() - started < MEASURE_SECONDS):
        start = time.thread_time()
        work()
        best, runs = min(best, time.thread_time() - start), runs + 1
    return max(best, 1e-9)


def gemm_rate(dtype: type[np.floating[Any]]) -> float:
    """Flops per second of the gemm that tiles use (SciPy's)."""
    from scipy.linalg.blas import dgemm, sgemm

    gemm = dgemm if dtype is np.float64 else sgemm
    a, b = np.random.default_rng(0).standard_normal((2, GEMM_EDGE, GEMM_EDGE)).astype(dtype)
    c = np.zeros((GEMM_EDGE, GEMM_EDGE), dtype, order="F")
    work = partial(gemm, -1.0, a.T, b.T, 1.0, c, trans_a=1, overwrite_c=1)
    return 2.0 * GEMM_EDGE**3 / best_seconds(work)


def _kernel_entry_seconds() -> float:
    from dkrr.kernels import make_kernel

    m, n, d = KERNEL_SHAPE
    a, b = np.random.default_rng(0).standard_normal((m + n, d)).reshape(2, m, d)
    kernel = make_kernel("rbf", gamma=1.0 / d)
    out = np.empty((m, n))
    return best_seconds(lambda: kernel.block(a, b, out)) / (m * n)


def disk_rates(
    folder: str | os.PathLike[str], num_bytes: int = CALIBRATION_DISK_BYTES, *, seconds: float = 0.25
) -> tuple[float, float]:
    """Bytes per second written (with fsync) and read back, with a file of so many bytes, fewer where that takes longer.

    Raises
    ------
    StoreError, StorageFullError
        The folder cannot be written, or has no room for even a small file.
    """
    free = free_bytes(folder)
    num_bytes = min(num_bytes, free // 4)
    if num_bytes < BLOCK_BYTES:
        raise StorageFullError(
            f"{free:,} bytes are free in {folder}, {4 * BLOCK_BYTES:,} needed to measure it", hint="free some space"
        )
    with storage_errors(folder), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        block = bytearray(np.random.default_rng().bytes(BLOCK_BYTES))  # random, for disks that compress
        start = time.perf_counter()
        _write_through(file, block, BLOCK_BYTES)
        rate = BLOCK_BYTES / (time.perf_counter() - start)
        # half of the time for the rest of the file, half for reading it
        written = int(min(num_bytes, BLOCK_BYTES + rate * max(0.0, seconds / 2)))
        _write_through(file, block, written)
        write_rate = written / (time.perf_counter() - start)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        file.seek(0)
        while file.readinto(block):
            continue
        return write_rate, written / (time.perf_counter() - start)


def _write_through(file: Any, block: bytearray, stop: int) -> None:
    """Fill the file from where it ends to ``stop``, and wait until the disk has it."""
    while (missing := stop - file.tell()) > 0:
        file.write(memoryview(block)[:missing])
    os.fsync(file.fileno())
