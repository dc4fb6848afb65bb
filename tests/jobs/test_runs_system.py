"""A real driver: submitted by a shell that ends, killed, and replaced by another one that goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dkrr.jobs.inspection import verify
from dkrr.jobs.run_directory import RunDirectory, read_status
from dkrr.store.lease import is_gone
from tests.faults import Command, Run, descendants, end_commands, finish, times, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

NUM_TILES = 55
CANARY = "canary-5f1c9e07"
STALE = {"DKRR_STALE_SECONDS": "6"}
JOB = """[data]
path = "generate:friedman?n=640&d=5&seed=0"
standardize = true
[model]
kernel = "rbf"
gamma = 0.05
alpha = 0.01
[solver]
name = "cholesky"
tile_size = 64
[cluster]
workers = 2
memory_limit = "1GiB"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a job; whatever drives its run ends with the test."""
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DKRR_RUNS", raising=False)
    yield tmp_path
    end_commands()
    for path in tmp_path.glob("runs/job/placement.json"):
        record = json.loads(path.read_text())
        if "pid" in record and not is_gone(record):
            os.kill(record["pid"], signal.SIGKILL)


def dkrr(*arguments: str, seconds: float = 60.0) -> Run:
    return Command([*arguments], environment=STALE).run(seconds)


def tiles(folder: Path) -> dict[str, Any]:
    """When each tile of the factor was written; sums that wait for their last terms are none."""
    return {key: found for key, found in times(folder / "runs/store/factors").items() if "-sums" not in key}


@pytest.mark.short
def test_a_run_outlives_the_shell_and_the_driver(folder: Path) -> None:
    run = RunDirectory(folder / "runs/job")
    secrets = {"AWS_SECRET_ACCESS_KEY": CANARY, "DKRR_CANARY": CANARY, "DKRR_FAILPOINTS": "draft*/c/*:1:sleep=1"}
    environment = {**os.environ, **STALE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **secrets}
    script = f"{sys.executable} -m dkrr.cli submit job.toml; echo code $?"
    shell = subprocess.Popen(
        ["sh", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    out, _ = shell.communicate(timeout=60)
    assert out == "job\ncode 0\n"
    with contextlib.suppress(ProcessLookupError):  # what a terminal does to its programs when it is closed
        os.killpg(shell.pid, signal.SIGHUP)
    wait_until(lambda: len(tiles(folder)) >= 5 and read_status(run).tasks_done > 0, 90)
    status = read_status(run)
    assert (status.state, status.phase, status.num_workers) == ("running", "factorise", 2)
    driver = psutil.Process((status.driver or {})["pid"])
    assert os.getsid(driver.pid) == driver.pid
    assert "job is running already" in dkrr("submit", "job.toml").err
    assert dkrr("fit", "job.toml").code == 8
    (folder / "other.toml").write_text(JOB)  # another run, the same store
    refused = dkrr("fit", "other.toml")
    assert (refused.code, f"is being written by process {driver.pid}" in refused.err) == (8, True), refused.err
    driver.kill()
    waited = dkrr("wait", "job")
    assert (waited.code, "is gone" in waited.err, "`dkrr resume job` continues it" in waited.err) == (75, True, True)
    assert json.loads(dkrr("status", "job", "--json").out)["state"] == "lost"
    before = tiles(folder)
    assert len(before) < NUM_TILES
    assert dkrr("resume", "job").out == "job\n"
    waited = dkrr("wait", "job", seconds=120)
    assert waited.code == 0, waited.err
    after = tiles(folder)
    assert {key: after[key] for key in before} == before, "valid tiles were written again"
    assert (run.read("result.json") or {})["tiles_computed"] == NUM_TILES - len(before)
    assert (read_status(run).epoch, run.read_bytes("job.toml")) == (2, JOB.encode())
    assert verify(str(folder / "runs/job")) == []
    for path in folder.rglob("*"):
        assert ".partial" not in path.name
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert dkrr("submit", "job.toml").out.splitlines()[1].split() == ["state", "finished"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.short)])
def test_a_command_that_is_told_to_end_says_how_it_goes_on(number: signal.Signals, folder: Path) -> None:
    """Its workers end with it, and the next one finds every valid tile."""
    process = Command(["fit", "job.toml"], failpoints="compute.cholesky.tile:1:sleep=0.2").start()
    wait_until(lambda: process.poll() is not None or len(tiles(folder)) >= 20, 60)
    workers = descendants(process.pid)
    process.send_signal(number)
    ended = finish(process)
    assert (ended.code, "Traceback" in ended.err) == (75, False), ended.err
    assert re.search("interrupted.*start the same command again", " ".join(ended.err.split()))
    _, alive = psutil.wait_procs(workers, 30)
    assert not alive
    before = tiles(folder)
    assert 20 <= len(before) < NUM_TILES
    again = dkrr("fit", "job.toml", seconds=120)
    assert (again.code, f"{NUM_TILES - len(before)} computed" in again.out) == (0, True), again.err
    assert before.items() <= tiles(folder).items(), "valid tiles were written again"
