"""One driver at a time: leases, their epochs, and drivers that wake up too late."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dkrr.errors import LockedError, ParameterError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.lease import DriverLease, current_driver, epoch_name
from dkrr.store.interruption import fenced
from dkrr.store.lease import process_record, stale_seconds


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def stopped_process() -> Iterator[dict[str, Any]]:
    """A process of this machine that lives and does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process_record(process.pid)
    process.kill()
    process.wait()


def record_of(owner: dict[str, Any], epoch: int = 1, **values: Any) -> dict[str, Any]:
    return {**owner, "epoch": epoch, "token": "t", "kind": "here", "counter": 0, **values}


def leave_behind(run: RunDirectory, record: dict[str, Any]) -> None:
    """What a driver of that record has written."""
    run.create(epoch_name(record["epoch"]), json.dumps(record).encode())
    run.write("driver.json", record)


def test_a_lease_says_who_and_counts(run: RunDirectory) -> None:
    lease = DriverLease.acquire(run, "fit")
    assert lease.holder == {"run": run.location, "epoch": 1}
    lease.beat()
    lease.check()
    found = run.read("driver.json") or {}
    assert (found["epoch"], found["counter"], found["pid"], found["host"], found["kind"]) == (
        1, 1, os.getpid(), socket.gethostname(), "fit",
    )  # fmt: skip
    lease.release()
    again = DriverLease.acquire(run, "here")
    assert again.epoch == 2
    assert (current_driver(run) or {})["epoch"] == 2


def test_a_driver_that_beats_is_not_replaced(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", "20")
    lease = DriverLease.acquire(run, "fit")
    threading.Timer(0.3, lease.beat).start()
    started = time.monotonic()
    with pytest.raises(LockedError, match=rf"is driven by process {os.getpid()} on {socket.gethostname()}") as error:
        DriverLease.acquire(run, "fit")
    assert time.monotonic() - started < 10
    assert error.value.exit_code == 8
    assert error.value.owner["epoch"] == 1
    lease.check()


def test_a_process_that_is_gone_is_replaced_at_once(run: RunDirectory) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    record = process_record(process.pid)
    process.wait()
    leave_behind(run, record_of(record))
    started = time.monotonic()
    assert DriverLease.acquire(run, "fit").epoch == 2
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("elsewhere", [True, False], ids=["another host", "this host"])
def test_a_counter_that_stands_still_is_stale(
    elsewhere: bool, run: RunDirectory, stopped_process: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", "1")
    owner = {**stopped_process, "host": "far-away"} if elsewhere else stopped_process
    leave_behind(run, record_of(owner, epoch=4))
    started = time.monotonic()
    assert DriverLease.acquire(run, "fit").epoch == 5
    assert time.monotonic() - started >= 1


def test_a_driver_that_was_replaced_finds_out_and_changes_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.5")
    first = DriverLease.acquire(run, "here")
    second = DriverLease.acquire(run, "fit")  # the first did not beat
    assert second.epoch == 2
    before = run.read("driver.json")
    for act in (first.check, first.beat):
        with pytest.raises(LockedError, match=r"was taken over by process .* \(epoch 2, ours was 1\)"):
            act()
    first.release()
    with fenced(first.check), pytest.raises(LockedError):
        run.write("status.json", {})
    assert run.read("driver.json") == before
    assert not run.has("status.json")
    second.beat()


def test_a_name_that_is_remembered_as_missing_hides_nobody(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As network file systems do for a while; driver.json is read anew."""
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.5")
    first = DriverLease.acquire(run, "here")
    DriverLease.acquire(run, "fit")
    has = RunDirectory.has
    monkeypatch.setattr(RunDirectory, "has", lambda self, name: name != epoch_name(2) and has(self, name))
    with pytest.raises(LockedError, match="was taken over by"):
        first.check()


def test_a_record_that_was_overwritten_late_hides_nobody(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that slept between its check and its write overwrites driver.json once; the epoch decides."""
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.5")
    first = DriverLease.acquire(run, "here")
    second = DriverLease.acquire(run, "fit")
    run.write("driver.json", first.record)
    assert (current_driver(run) or {})["epoch"] == 2
    second.check()
    with pytest.raises(LockedError):
        first.check()
    second.beat()
    assert (run.read("driver.json") or {})["epoch"] == 2


def test_of_many_that_saw_a_stale_driver_one_takes_over(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.5")
    leave_behind(run, record_of({"host": "far-away", "pid": 1, "started": 0.0}))
    barrier = threading.Barrier(6)
    stop = threading.Event()

    def drive(_: int) -> DriverLease | None:
        barrier.wait()
        try:
            lease = DriverLease.acquire(run, "here")
        except LockedError:
            return None
        while not stop.wait(0.05):
            lease.beat()
        return lease

    with ThreadPoolExecutor(6) as threads:
        futures = [threads.submit(drive, number) for number in range(6)]
        deadline = time.monotonic() + 30
        while sum(future.done() for future in futures) < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        stop.set()
        leases = [lease for future in futures if (lease := future.result()) is not None]
    assert len(leases) == 1
    assert leases[0].epoch == 2


def test_a_run_that_was_removed_is_not_written_again(run: RunDirectory) -> None:
    lease = DriverLease.acquire(run, "fit")
    run.remove_all()
    with pytest.raises(LockedError, match="was removed while its driver was running"):
        lease.beat()
    assert not os.path.exists(run.location)


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan"])
def test_a_wrong_stale_time_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", text)
    with pytest.raises(ParameterError, match="DKRR_STALE_SECONDS is"):
        stale_seconds()
    monkeypatch.delenv("DKRR_STALE_SECONDS")
    assert stale_seconds() == 60.0
