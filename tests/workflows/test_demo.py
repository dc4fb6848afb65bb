"""The demonstration refuses a small disk before it starts, ends with its table, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "workflows" / "demo.py"
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", DEMO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the demonstration works; empty before and after."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def write_job(path: Path, num_rows: int = 600, tile_size: int = 200) -> Path:
    path.write_text(
        f'[data]\npath = "generate:friedman?n={num_rows}&d=5&seed=0"\nstandardize = true\n'
        '[evaluate]\nfraction = 0.2\nmetric = "r2"\n'
        '[model]\nkernel = "rbf"\ngamma = 0.05\nalpha = 0.01\n'
        # tiles of a factor are what an interrupted fit leaves, and what the tests look at
        f'[solver]\nname = "cholesky"\nprecision = "float64"\ntile_size = {tile_size}\n'
        '[cluster]\nworkers = 1\nmemory_limit = "1GiB"\n'
    )
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path / "small.toml")


def never(*_: Any, **__: Any) -> None:
    pytest.fail("a fit was started")


@pytest.mark.thorough
def test_the_table_comes_last_and_the_folder_is_removed(
    demo: ModuleType, job: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo.main(["--folder", str(folder), str(job)]) == 0
    out, err = capfd.readouterr()
    assert [*folder.iterdir()] == []
    lines = out.rstrip("\n").splitlines()
    assert lines[0].strip() == "exact kernel ridge regression, out of core"
    assert "small.toml" in lines[2]
    labels = [line.split("  ")[1].strip() for line in lines[4:]]
    assert labels == [
        "training rows", "kernel", "ridge alpha", "Gram matrix", "tiles on disk", "workers", "peak worker memory",
        "start of workers", "factorisation", "whole fit", "relative residual", "held-out rows", "held-out score",
        "without a model",
    ]  # fmt: skip
    assert re.search(r"r2 0\.9\d*$", lines[-2].rstrip())
    assert lines[-1].endswith("r2 0, by the mean")
    assert "1 x 1 GiB" in out
    assert err.index("disk: ") < err.index("[1/1] dkrr fit small.toml")


@pytest.mark.system
@pytest.mark.short
def test_ctrl_c_in_the_middle_of_a_real_fit(folder: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path / "middle.toml", num_rows=12_000, tile_size=256)
    process = subprocess.Popen(
        [sys.executable, str(DEMO), "--folder", str(folder), str(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not any(folder.glob(".demo-*/runs/store/factors/*/c/*/*")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "no tile of the factor appeared"
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "there are worker processes"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, ""), err
    assert err.endswith("interrupted; everything that was written is removed again\n")
    assert [*folder.iterdir()] == []
    _, alive = psutil.wait_procs(children, timeout=5)
    assert alive == []
