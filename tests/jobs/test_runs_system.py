"""Real drivers: submitted by a shell that ends, killed, stopped and continued, cancelled; the bytes stay the same."""

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

import psutil
import pytest

from dkrr.jobs.inspection import verify
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.status import Status, read_status
from dkrr.store.lease import is_gone
from tests.faults import Command, Run, contents, end_commands, times, wait_until

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

NUM_TILES = 55
CANARY = "canary-5f1c9e07"
STALE = {"DKRR_STALE_SECONDS": "6"}
SLOW = "chunk.before_write:1:sleep=0.2"
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


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "job.toml").write_text(JOB)
    done = Command(["fit", str(folder / "job.toml")]).run(120)
    assert done.code == 0, done.err
    return folder


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


@pytest.fixture
def run(folder: Path) -> RunDirectory:
    return RunDirectory(folder / "runs/job")


def dkrr(*arguments: str, slow: bool = False, seconds: float = 60.0, **environment: str) -> Run:
    return Command([*arguments], failpoints=SLOW if slow else "", environment={**STALE, **environment}).run(seconds)


def in_mid_factorisation(run: RunDirectory, folder: Path) -> Status:
    """Wait until some tiles of the factor are there and others are not, and the status, a little later, says so."""
    found: list[Status] = []

    def is_there() -> bool:
        found[:] = [read_status(run)]
        return 5 <= len(tile_times(folder)) < 45 and found[0].phase == "factorise" and found[0].tasks_done > 0

    wait_until(is_there, 90)
    return found[0]


def tiles(folder: Path) -> dict[str, bytes]:
    """Every tile of the factor; sums that wait for their last terms are none."""
    return {key: data for key, data in contents(folder / "runs/store/factors").items() if "-sums" not in key}


def tile_times(folder: Path) -> dict[str, int]:
    """When each of them was written."""
    return {key: written for key, written in times(folder / "runs/store/factors").items() if "-sums" not in key}


def check_same(folder: Path, undisturbed: Path) -> None:
    """One factor, one model, and both as if nothing had happened."""
    assert tiles(folder) == tiles(undisturbed)
    for name in ("X_fit", "dual_coef"):
        assert contents(folder / "runs/job/model.zarr" / name) == contents(undisturbed / "runs/job/model.zarr" / name)
    assert verify(str(folder / "runs/job")) == []
    assert not list((folder / "runs").rglob("*.partial"))


@pytest.mark.short
def test_a_run_outlives_the_shell_that_submitted_it(folder: Path, run: RunDirectory, undisturbed: Path) -> None:
    environment = {
        **os.environ,
        **STALE,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DKRR_FAILPOINTS": SLOW,
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "DKRR_CANARY": CANARY,
    }
    script = f"{sys.executable} -m dkrr.cli submit job.toml; echo code $?"
    shell = subprocess.Popen(
        ["sh", "-c", script], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    out, _ = shell.communicate(timeout=60)
    assert out == "job\ncode 0\n"
    with contextlib.suppress(ProcessLookupError):  # what a terminal does to its programs when it is closed
        os.killpg(shell.pid, signal.SIGHUP)
    status = in_mid_factorisation(run, folder)
    assert (status.state, status.num_workers) == ("running", 2)
    assert 0 < status.tasks_done < status.tasks_total
    assert status.tasks_total >= NUM_TILES
    driver = psutil.Process((status.driver or {})["pid"])
    assert os.getsid(driver.pid) == driver.pid
    text = dkrr("status", "job").out
    assert re.search("^  phase +factorise: ", text, re.MULTILINE)
    assert f"of {status.tasks_total} tasks" in text
    again = dkrr("submit", "job.toml")
    assert (again.code, again.out) == (0, "job\n")
    assert "job is running already" in again.err
    assert dkrr("fit", "job.toml").code == 8
    waited = dkrr("wait", "job", seconds=120)
    assert waited.code == 0, waited.err
    assert re.search("^  state +finished$", dkrr("status", "job").out, re.MULTILINE)
    assert run.read_bytes("job.toml") == JOB.encode()
    check_same(folder, undisturbed)
    for path in folder.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    assert dkrr("submit", "job.toml").out.splitlines()[1].split() == ["state", "finished"]


def test_a_driver_that_is_killed_is_lost_and_resumed(folder: Path, run: RunDirectory, undisturbed: Path) -> None:
    assert dkrr("submit", "job.toml", slow=True).code == 0
    status = in_mid_factorisation(run, folder)
    os.kill((status.driver or {})["pid"], signal.SIGKILL)
    waited = dkrr("wait", "job")
    assert waited.code == 75
    assert "is gone" in waited.err
    assert "`dkrr resume job` continues it" in waited.err
    assert json.loads(dkrr("status", "job", "--json").out)["state"] == "lost"
    before = tile_times(folder)
    assert len(before) < NUM_TILES
    assert dkrr("resume", "job").out == "job\n"
    assert dkrr("wait", "job", seconds=120).code == 0
    after = tile_times(folder)
    assert {key: after[key] for key in before} == before, "valid tiles were written again"
    assert (run.read("result.json") or {})["tiles_computed"] == NUM_TILES - len(before)
    assert read_status(run).epoch == 2
    check_same(folder, undisturbed)
