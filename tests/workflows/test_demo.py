"""The demonstration leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "workflows" / "demo.py"


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
