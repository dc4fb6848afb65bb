"""The machine report is plain, complete and leaves nothing behind; memory limits of control groups are respected."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path

import numpy as np
import psutil
import pytest

from dkrr.engine import machine
from dkrr.engine.machine import free_memory_bytes, machine_report, total_memory_bytes
from dkrr.errors import StoreError

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


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing"):
        machine_report(tmp_path / "missing")


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
    assert total_memory_bytes() == 100 * MiB
    assert free_memory_bytes() == 10 * MiB  # the root has 10 left, the job 100 - (70 - 20)


def test_control_groups_of_version_one(cgroups: Path) -> None:
    (cgroups / "membership").write_text("5:cpu,cpuacct:/a\n4:memory:/a\n")
    group(cgroups / "cgroup/memory/a", str(100 * MiB), 30 * MiB, 10 * MiB, version=1)
    group(cgroups / "cgroup/memory", str(2**63 - 4096), 2**40, 0, version=1)
    assert total_memory_bytes() == 100 * MiB
    assert free_memory_bytes() == 80 * MiB
