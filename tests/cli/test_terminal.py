"""``fit`` and ``status --watch`` on real terminals of 80 and 200 columns, which tmux provides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dkrr.jobs.run_directory import RunDirectory, read_status
from tests.faults import wait_until

pytestmark = pytest.mark.system

# tiles that take a third of a second each, so that there is something to look at
SLOW = "compute.cholesky.tile:1:sleep=0.2"
JOB = """
[data]
path = "generate:friedman?n=2000&d=5&seed=0"
[evaluate]
fraction = 0.1
[model]
kernel = "rbf"
alpha = 0.1
[solver]
name = "cholesky"
tile_size = 128
[cluster]
workers = 2
"""
SIZES = {80: 24, 200: 50}


@pytest.fixture
def tmux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """A tmux server of its own, in the folder of a job."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    for name in ("TMUX", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (tmp_path / "job.toml").write_text(JOB)

    def call(*arguments: str) -> str:
        command = ["tmux", "-u", "-f", "/dev/null", "-S", str(tmp_path / "socket"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    yield call
    subprocess.run(["tmux", "-S", str(tmp_path / "socket"), "kill-server"], capture_output=True, check=False)


@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.short), 200])
def test_a_fit_and_somebody_who_watches_it(tmux: Callable[..., str], tmp_path: Path, width: int) -> None:
    def start(name: str, command: str) -> None:
        """In a new terminal, which stays when the command ends."""
        options = ["-x", str(width), "-y", str(SIZES[width]), f"-eDKRR_FAILPOINTS={SLOW}", "-c", str(tmp_path)]
        tmux("new-session", "-d", "-s", name, *options, f"{sys.executable} -m dkrr.cli {command}; exec sleep 600")

    def text(name: str) -> str:
        return tmux("capture-pane", "-p", "-t", name)

    start("fit", "fit job.toml")
    run = RunDirectory(tmp_path / "runs/job")
    wait_until(lambda: run.exists() and read_status(run).tasks_done > 2 and read_status(run).phase == "factorise", 120)
    start("watch", "status runs/job --watch")
    wait_until(lambda: all("GF/s" in text(name) for name in ("fit", "watch")), 60)
    for name in ("fit", "watch"):
        shown = text(name)
        assert max(len(line) for line in shown.splitlines()) <= width
        # 120 tiles, and sums of the last columns that are tasks of their own; a phase that is over has its line
        facts = ("factorise", "of 126", "GF/s", "left", "2, 2 threads", "prepare: ")
        assert [fact for fact in facts if fact not in shown] == []
    wait_until(lambda: read_status(run).is_ended, 180)
    wait_until(lambda: "held-out" in text("fit") and "finished" in text("watch"), 60)
    for name in ("fit", "watch"):
        whole = tmux("capture-pane", "-p", "-S", "-", "-t", name)
        assert all(fact in whole for fact in ("factorise: 126 tasks in ", "evaluate: "))
        assert " left" not in whole  # the board is gone, the lines stay
    assert (read_status(run).state, run.has("report.html")) == ("finished", True)
