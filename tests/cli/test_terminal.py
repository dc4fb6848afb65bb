"""``fit`` and ``status --watch`` on real terminals of 80 and 200 columns, which tmux provides."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dkrr.jobs.run_directory import RunDirectory
from dkrr.jobs.status import read_status
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


@dataclass
class Screens:
    """A tmux server of its own, with terminals that run commands."""

    folder: Path

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-f", "/dev/null", "-S", str(self.folder / "socket"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def open(self, name: str, width: int, command: str, **environment: str) -> None:
        """Start a command in a new terminal; the terminal stays when the command ends."""
        size = ["-x", str(width), "-y", str(SIZES[width])]
        options = [f"-e{key}={value}" for key, value in environment.items()]
        self.tmux(
            "new-session", "-d", "-s", name, *size, *options, "-c", str(self.folder), f"{command}; exec sleep 600"
        )

    def lines(self, name: str) -> list[str]:
        """What is on the terminal now."""
        return self.tmux("capture-pane", "-p", "-t", name).splitlines()

    def text(self, name: str) -> str:
        return "\n".join(self.lines(name))


@pytest.fixture
def screens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Screens]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    for name in ("TMUX", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    (tmp_path / "job.toml").write_text(JOB)
    found = Screens(tmp_path)
    yield found
    subprocess.run(["tmux", "-S", str(tmp_path / "socket"), "kill-server"], capture_output=True, check=False)


@pytest.mark.parametrize("width", [pytest.param(80, marks=pytest.mark.short), 200])
def test_a_fit_and_somebody_who_watches_it(screens: Screens, width: int) -> None:
    dkrr = f"{sys.executable} -m dkrr.cli"
    screens.open("fit", width, f"{dkrr} fit job.toml", DKRR_FAILPOINTS=SLOW)
    run = RunDirectory(screens.folder / "runs/job")
    wait_until(lambda: run.exists() and read_status(run).tasks_done > 2 and read_status(run).phase == "factorise", 120)
    screens.open("watch", width, f"{dkrr} status runs/job --watch")

    wait_until(lambda: all("GF/s" in screens.text(name) for name in ("fit", "watch")), 60)
    for name in ("fit", "watch"):
        lines = screens.lines(name)
        assert max(len(line) for line in lines) <= width
        text = "\n".join(lines)
        assert "factorise" in text
        assert "of 126" in text  # 120 tiles, and sums of the last columns that are tasks of their own
        assert "GF/s" in text
        assert "left" in text
        assert "2, 2 threads" in text
        assert "prepare: " in text  # a phase that is over has its line
        keep(screens, name, width)
    wait_until(lambda: read_status(run).is_ended, 180)
    wait_until(lambda: "held-out" in screens.text("fit") and "finished" in screens.text("watch"), 60)
    for name in ("fit", "watch"):
        whole = screens.tmux("capture-pane", "-p", "-S", "-", "-t", name)
        assert "factorise: 126 tasks in " in whole
        assert "evaluate: " in whole
        assert " left" not in whole  # the board is gone, the lines stay
    assert read_status(run).state == "finished"
    assert run.has("report.html")


def keep(screens: Screens, name: str, width: int) -> None:
    """Leave the screen where DKRR_PICTURES names a folder, for people to look at."""
    target = os.environ.get("DKRR_PICTURES")
    if target:
        Path(target).mkdir(parents=True, exist_ok=True)
        Path(target, f"{name}-{width}.txt").write_text(screens.tmux("capture-pane", "-p", "-e", "-t", name))
