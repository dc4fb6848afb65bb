"""What a reader sees of a run, and when it says "lost"."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.lease import DriverLease
from dkrr.jobs.runs.status import Status, Watch, look_once, read_status, write_status
from dkrr.store.lease import process_record

FAR = {"host": "far-away", "pid": 1, "started": 0.0}


class Clock:
    """Seconds of the reader, set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def gone() -> dict[str, Any]:
    """A process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    record = process_record(process.pid)
    process.wait()
    return record


@pytest.fixture
def living() -> Iterator[dict[str, Any]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process_record(process.pid)
    process.kill()
    process.wait()


def driven(run: RunDirectory, owner: dict[str, Any], counter: int = 0, **values: Any) -> None:
    """A driver of epoch 1 that has written its status."""
    record = {**owner, "epoch": 1, "token": "t", "kind": "here", "counter": counter}
    run.create("drivers/000001.json", json.dumps(record).encode())
    run.write("driver.json", record)
    write_status(run, Status(**{"state": "running", "epoch": 1, **values}))


def age(run: RunDirectory, seconds: float) -> None:
    """Have the status be written that long ago, by the clock of its writer."""
    document = run.read("status.json") or {}
    document["updated_at"] = (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()
    run.write("status.json", document)


def test_a_status_survives_the_disk_and_newer_fields(run: RunDirectory) -> None:
    status = Status(state="failed", phase="factorise", tasks_done=3, error={"type": "E", "message": "m", "hint": "h"})
    write_status(run, status)
    assert read_status(run) == status
    run.write("status.json", {**status.to_dict(), "colour": "blue"})
    assert read_status(run) == status


def test_a_run_without_a_status(run: RunDirectory) -> None:
    run.write("job.json", {})
    assert (read_status(run).state, look_once(run).exit_code) == ("interrupted", 75)
    run.write("result.json", {})
    assert (read_status(run).state, look_once(run).exit_code) == ("finished", 0)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 5), ("cancelled", 75), ("interrupted", 75)])
def test_what_ended_is_not_lost(state: str, code: int, run: RunDirectory, gone: dict[str, Any]) -> None:
    driven(run, gone, state=state, exit_code=code)
    age(run, 1e6)
    for view in (look_once(run), Watch(run).look()):
        assert (view.state, view.exit_code, view.is_over) == (state, code, True)


def test_a_process_that_is_gone_is_lost_at_once(run: RunDirectory, gone: dict[str, Any]) -> None:
    driven(run, gone)
    view = look_once(run)
    assert (view.state, view.exit_code) == ("lost", 75)
    assert view.reason == f"its driver, process {gone['pid']} on {gone['host']}, is gone"
    assert view.to_dict()["state"] == "lost"
    assert view.to_dict()["lost_because"] == view.reason


def test_a_watch_goes_by_its_own_clock(run: RunDirectory) -> None:
    clock = Clock()
    driven(run, FAR)
    age(run, -5000)  # a clock that is far ahead, or behind, changes nothing
    watch = Watch(run, clock)
    assert watch.look().state == "running"
    clock.now += 59
    assert watch.look().state == "running"
    driven(run, FAR, counter=1)
    clock.now += 59
    assert watch.look().state == "running"
    clock.now += 59
    assert watch.look().state == "running"  # the counter moved within the last look but one
    clock.now += 2
    view = watch.look()
    assert (view.state, view.reason) == ("lost", "no heartbeat for 61 s")
    driven(run, FAR, counter=2)  # it was only slow
    assert watch.look().state == "running"


def test_a_driver_that_was_started_and_never_began(
    run: RunDirectory, gone: dict[str, Any], living: dict[str, Any]
) -> None:
    write_status(run, Status(state="starting"))
    run.write("placement.json", {"kind": "here", **gone})
    view = look_once(run)
    assert (view.state, "ended before it began; see driver.log" in view.reason) == ("lost", True)
    run.write("placement.json", {"kind": "here", **living})
    clock = Clock()
    watch = Watch(run, clock)
    assert watch.look().state == "starting"
    clock.now += 1000  # its process is there, however slow its imports are
    assert watch.look().state == "starting"
    run.write("placement.json", {"kind": "slurm", "slurm_job": "7"})
    assert watch.look().state == "starting"
    clock.now += 100
    assert watch.look().state == "starting"
    clock.now += 100
    assert watch.look().state == "lost"


def test_one_look_at_a_fresh_heartbeat_is_quick(run: RunDirectory) -> None:
    driven(run, FAR)
    started = time.monotonic()
    assert look_once(run).state == "running"
    assert time.monotonic() - started < 0.5


def test_one_look_at_an_old_heartbeat_looks_again(run: RunDirectory) -> None:
    driven(run, FAR)
    age(run, 100)
    view = look_once(run, beat_seconds=0.2)
    assert (view.state, view.reason) == ("lost", "no heartbeat for 100 s")
    age(run, 100)
    threading.Timer(0.3, driven, (run, FAR, 1)).start()
    assert look_once(run, beat_seconds=5.0).state == "running"
    age(run, -100)  # a clock that is ahead proves nothing
    assert look_once(run, beat_seconds=0.2).state == "running"


def test_a_run_that_ends_between_two_looks_is_not_lost(
    run: RunDirectory, gone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    driven(run, gone)

    def end_meanwhile(record: dict[str, Any]) -> bool:
        write_status(run, Status(state="finished", exit_code=0))
        return record["pid"] == gone["pid"]

    monkeypatch.setattr("dkrr.jobs.runs.status.is_gone", end_meanwhile)
    assert look_once(run).state == "finished"


def test_a_lease_that_beats_is_seen(run: RunDirectory) -> None:
    lease = DriverLease.acquire(run, "fit")
    write_status(run, Status(state="running", epoch=1))
    clock = Clock()
    watch = Watch(run, clock)
    for _ in range(5):
        clock.now += 50
        lease.beat()
        assert watch.look().state == "running"
    assert os.path.exists(run.path("drivers/000001.json"))
