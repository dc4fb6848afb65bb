"""Job files that are shipped are accepted and fit into what they ask for; the demonstration leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dkrr.jobs.plan import plan
from dkrr.jobs.spec import JobSpec
from tests.cluster.helpers import ByHandJob

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "workflows" / "demo.py"
JOBS = sorted([*ROOT.glob("workflows/*.toml"), *ROOT.glob("cluster/*.toml")])


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_is_accepted_by_the_plan(job: Path, tmp_path: Path) -> None:
    result = plan(JobSpec.load(shutil.copy(job, tmp_path)))
    result.check()
    assert result.refusal == ""
    assert result.task_bytes <= 0.8 * result.memory_limit_bytes
    assert result.num_test_rows > 0


@pytest.mark.system
@pytest.mark.short
def test_ctrl_c_in_the_middle_of_a_real_fit(tmp_path: Path) -> None:
    job, folder = ByHandJob(tmp_path / "job", n=12_000, tile_size=256).file, tmp_path / "work"
    folder.mkdir()
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
