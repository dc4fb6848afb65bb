"""A machine: its report, its memory under control groups, and a BLAS that is recommended only when proved right."""

from __future__ import annotations

import json
import platform
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from threadpoolctl import OpenBLASController, threadpool_info, threadpool_limits

from dkrr.engine import machine
from dkrr.engine.machine import free_memory_bytes, machine_report, single_blas_thread, total_memory_bytes

MiB = 2**20
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REPORT_DISK_BYTES", 16 * MiB)
    monkeypatch.setattr(machine, "GEMM_EDGE", 256)


@pytest.mark.usefixtures("small")
def test_report_is_plain_and_complete(tmp_path: Path) -> None:
    report = machine_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert json.loads(json.dumps(report)) == report
    assert report["num_cpus"] >= 1
    assert report["self_test_failures"] == []
    assert 0 < report["free_memory_bytes"] <= report["total_memory_bytes"] <= psutil.virtual_memory().total
    assert report["worker_environment"]["OPENBLAS_NUM_THREADS"] == "1"
    assert {"dkrr", "python", "numpy", "scipy", "zarr", "dask", "distributed"} <= set(report["versions"])
    assert all(rate > 0 and np.isfinite(rate) for rate in report["speed"].values())


# --- memory -----------------------------------------------------------------------------------------------------------


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {cache}\n")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def test_the_tightest_control_group_counts(cgroups: Path) -> None:
    (cgroups / "membership").write_text("0::/job/step\n")
    group(cgroups / "cgroup/job/step", "max", 10, 0)
    group(cgroups / "cgroup/job", str(100 * MiB), 70 * MiB, 20 * MiB)
    group(cgroups / "cgroup", str(200 * MiB), 190 * MiB, 0)
    # the root has 10 left, the job 100 - (70 - 20)
    assert (total_memory_bytes(), free_memory_bytes()) == (100 * MiB, 10 * MiB)
    (cgroups / "membership").write_text("5:cpu,cpuacct:/a\n4:memory:/a\n")
    group(cgroups / "cgroup/memory/a", str(100 * MiB), 30 * MiB, 10 * MiB, version=1)
    group(cgroups / "cgroup/memory", str(2**63 - 4096), 2**40, 0, version=1)
    assert (total_memory_bytes(), free_memory_bytes()) == (100 * MiB, 80 * MiB)


AVX512 = frozenset({"fpu", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def library(architecture: str | None, internal_api: str = "openblas") -> dict[str, Any]:
    return {"user_api": "blas", "internal_api": internal_api, "architecture": architecture, "num_threads": 1}


HASWELL, SKYLAKEX = library("Haswell"), library("SkylakeX")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    machine.recommended_coretype.cache_clear()
    yield
    machine.recommended_coretype.cache_clear()


@pytest.mark.parametrize(
    ("flags", "libraries", "problem", "expected"),
    [
        (AVX512, [SKYLAKEX, HASWELL], "", "SkylakeX"),  # NumPy's OpenBLAS is newer than SciPy's
        (AVX512, [SKYLAKEX, SKYLAKEX], "", None),
        (AVX512, [library(None, "mkl")], "", None),
        (AVX512 - {"avx512vl"}, [HASWELL], "", None),
        (AVX512, [HASWELL], "wrong numbers", None),
    ],
)
def test_recommended_coretype(
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str],
    libraries: list[dict[str, Any]],
    problem: str,
    expected: str | None,
) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    monkeypatch.setattr(machine, "blas_libraries", lambda: libraries)
    monkeypatch.setattr(machine, "_problem_with", lambda coretype: problem)
    assert machine.recommended_coretype() == expected
    variables = dict(ONE_THREAD) if expected is None else {**ONE_THREAD, "OPENBLAS_CORETYPE": expected}
    assert machine.worker_environment() == variables


# --- the test in a process of its own ---------------------------------------------------------------------------------

x86 = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="needs an x86-64 CPU")


@x86
def test_a_core_type_that_openblas_does_not_take_is_named() -> None:
    assert "instead" in machine._problem_with("Pentium9")


# --- one thread of BLAS -----------------------------------------------------------------------------------------------


def test_blocks_of_several_threads_have_one_blas_thread_and_restore_the_setting() -> None:
    def limits() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    held, entered, leave, inside = threading.Event(), threading.Event(), threading.Event(), []
    holds = threading.Thread(target=lambda: (threadpool_limits(2, user_api="blas"), held.set(), leave.wait(10)))

    def other() -> None:
        with single_blas_thread():
            entered.set()
            leave.wait(10)
            inside.append(limits())

    with threadpool_limits(2, user_api="blas"):
        OpenBLASController.clear_controlling_thread(force=True)
        holds.start()
        held.wait(10)  # the setting is that thread's from now on, as threadpoolctl has it
        before = limits()
        thread = threading.Thread(target=other)
        with single_blas_thread():
            thread.start()
            entered.wait(10)
        leave.set()  # the first block has ended, the second one has not
        thread.join()
        holds.join()
        assert inside == [{1}]
        assert limits() == before == {2}
