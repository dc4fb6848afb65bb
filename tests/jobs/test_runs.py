"""Runs: found by name, driven by one at a time, watched from anywhere; what their documents say, and when it ends."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dkrr.errors import CancelledError, InterruptedRunError, LockedError, NumericalError
from dkrr.jobs import driver as monitor_module
from dkrr.jobs.driver import MOST_SAMPLES, Monitor, Samples, driving
from dkrr.jobs.run_directory import RunDirectory, Status, Watch, look_once, read_events, read_status, write_status
from dkrr.store.files import list_keys, read_key, write_json
from dkrr.store.interruption import resumable
from dkrr.store.lease import process_record
from tests.contract.helpers import run as dkrr
from tests.faults import wait_until
from tests.s3 import CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

FAR = {"host": "far-away", "pid": 1, "started": 0.0}


@pytest.fixture(autouse=True)
def _quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"BEAT_SECONDS": 0.05, "GRACE_SECONDS": 0.2, "BEAT_SECONDS_REMOTE": 0.1, "POLL_SECONDS_REMOTE": 0.1}
    for name, value in seconds.items():
        monkeypatch.setattr(monitor_module, name, value)
    monkeypatch.setattr("dkrr.store.lease.HEARTBEAT_SECONDS", 0.05)


def undriven(location: Path | str) -> RunDirectory:
    """A run with a job and a plan, which nobody drives."""
    directory = RunDirectory(location)
    directory.write("job.json", {})
    directory.write("plan.json", {})
    return directory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return undriven(tmp_path / "runs/a")


def driven(run: RunDirectory, owner: dict[str, Any], counter: int = 0, epoch: int = 1, **values: Any) -> None:
    """A driver that has written its status."""
    record = {**owner, "epoch": epoch, "token": "t", "kind": "here", "counter": counter}
    run.write("driver.json", record)
    write_status(run, Status(**{"state": "running", "epoch": epoch, **values}))


def messages(run: RunDirectory) -> list[str]:
    return [event["message"] for _, event in read_events(run)]


# --- what a reader sees -----------------------------------------------------------------------------------------------


class Clock:
    """Seconds of the reader, set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_watch_goes_by_its_own_clock(run: RunDirectory) -> None:
    clock = Clock()
    driven(run, FAR)
    ahead = (datetime.now(UTC) + timedelta(seconds=5000)).isoformat()  # the clock of the writer changes nothing
    run.write("status.json", {**(run.read("status.json") or {}), "updated_at": ahead})
    watch = Watch(run, clock)
    assert watch.look().state == "running"
    for has_moved in (False, True, False):  # the counter moved within the last look but one
        if has_moved:
            driven(run, FAR, counter=1)
        clock.now += 59
        assert watch.look().state == "running"
    clock.now += 2
    assert (watch.look().state, watch.look().lost_because) == ("lost", "no heartbeat for 61 s")
    driven(run, FAR, counter=2)  # it was only slow
    assert watch.look().state == "running"


def test_a_driver_that_was_started_and_never_began(run: RunDirectory) -> None:
    write_status(run, Status(state="starting"))
    clock = Clock()
    with subprocess.Popen(["sleep", "60"]) as process:
        run.write("placement.json", {"kind": "here", **process_record(process.pid)})
        watch = Watch(run, clock)
        assert watch.look().state == "starting"
        clock.now += 1000  # its process is there, however slow its imports are
        assert watch.look().state == "starting"
        process.kill()
    view = look_once(run)
    assert (view.state, "ended before it began; see driver.log" in view.lost_because) == ("lost", True)
    run.write("placement.json", {"kind": "here"})
    for seconds, state in ((0, "starting"), (100, "starting"), (100, "lost")):
        clock.now += seconds
        assert watch.look().state == state


# --- a driver from its lease to its last word -------------------------------------------------------------------------


def drive(run: RunDirectory, body: Callable[[Monitor], None], **options: Any) -> None:
    with resumable(), driving(run, **options) as monitor:
        body(monitor)


def test_a_run_that_finishes(run: RunDirectory) -> None:
    seen: list[Any] = []
    refused: list[dict[str, str]] = []
    facts = {"scheduler": "tcp://127.0.0.1:1", "num_workers": 2, "num_threads": 2}
    with driving(run, progress=lambda *figures: seen.append(figures)) as monitor:
        monitor.phase("prepare")
        monitor.working(lambda: {**facts, "refused_workers": list(refused)}, lambda: {"w": 12345})
        monitor("factorise", 0, 10, 0.0, 100e9)
        time.sleep(0.1)
        monitor("factorise", 4, 10, 40e9, 100e9)
        refused.append({"address": "tcp://late", "reason": "numpy 1.0"})
        status = wait_until(lambda: (s := read_status(run)).refused_workers and s.tasks_done == 4 and s)
        assert (status.state, status.phase, status.tasks_total, status.num_workers) == ("running", "factorise", 10, 2)
        assert 0 < status.phase_seconds_left < 60
        monitor.note(model="m")
    status = read_status(run)
    assert (status.state, status.exit_code, status.error, status.model) == ("finished", 0, None, "m")
    assert (set(status.seconds), status.memory_bytes) == ({"prepare", "factorise"}, 12345)
    assert status.phases["factorise"]["tasks"] == 4
    assert [done for _, done, *_ in seen] == [0, 4]
    assert messages(run) == [
        "driver 1 started", "prepare began", "2 workers, 2 threads", "factorise began",
        "worker tcp://late gets no task: numpy 1.0", "finished",
    ]  # fmt: skip
    assert max((run.read("samples.json") or {})["memory_bytes"]["w"]) == 12345


@pytest.mark.parametrize(
    ("error", "state", "code", "message"),
    [
        (NumericalError("row 3", hint="raise alpha"), "failed", 5, "row 3"),
        (LockedError("factor.zarr is being written"), "failed", 8, "factor.zarr is being written"),
        (KeyboardInterrupt(), "interrupted", 75, "interrupted"),
        (InterruptedRunError("interrupted"), "interrupted", 75, "interrupted"),
        (ValueError("of ours"), "failed", 1, "ValueError: of ours"),
    ],
)
def test_a_run_that_fails(error: BaseException, state: str, code: int, message: str, run: RunDirectory) -> None:
    with pytest.raises(type(error)), driving(run):
        raise error
    status = read_status(run)
    assert (status.state, status.exit_code, (status.error or {})["message"]) == (state, code, message)
    assert code != 5 or (status.error or {})["hint"] == "raise alpha"
    assert messages(run)[-1] == f"{state}: {message}"
    with driving(run) as monitor:
        assert monitor.lease.epoch == 2
    assert (read_status(run).state, read_status(run).error) == ("finished", None)


@pytest.mark.parametrize("how", ["at the next task", "before it began", "while it does not look"])
def test_cancel(how: str, run: RunDirectory) -> None:
    before, request = how == "before it began", {"requested_at": "now"}

    def body(monitor: Monitor) -> None:
        if not before:
            run.write("cancel.json", request)
        if how == "while it does not look":
            time.sleep(30)
        wait_until(monitor.is_cancelled)
        wait_until(lambda: read_status(run).state == "cancelling")
        monitor("factorise", 1, 2, 0.0, 0.0)

    if before:
        run.write("cancel.json", request)
    with pytest.raises(CancelledError, match="cancelled on request") as error:
        drive(run, body, kind="here" if before else "fit")
    assert error.value.exit_code == 75
    assert (read_status(run).state, read_status(run).exit_code) == ("cancelled", 75)
    with driving(run):  # the request was for the attempt before
        pass
    assert not run.has("cancel.json")


@pytest.mark.parametrize("finds_out", ["writing", "task", "cancellation", "heartbeat", "end"])
def test_a_driver_that_was_replaced_ends_with_8(finds_out: str, run: RunDirectory, tmp_path: Path) -> None:
    """As if it had been stopped for a minute."""

    def take_over() -> None:
        driven(run, FAR, epoch=2, phase="theirs")

    def body(monitor: Monitor) -> None:
        with ThreadPoolExecutor(1) as thread:  # not behind the fence of the one that is replaced
            thread.submit(take_over).result()
        if finds_out == "writing":
            write_json(str(tmp_path / "runs/store"), "pointer.json", {})
        if finds_out != "end":
            wait_until(lambda: monitor.lost)
        if finds_out == "task":
            monitor("factorise", 1, 2, 0.0, 0.0)
        if finds_out == "cancellation":
            raise CancelledError("the executor was asked and said so")
        if finds_out == "heartbeat":
            time.sleep(30)

    with pytest.raises(LockedError, match="was taken over by") as error:
        drive(run, body)
    assert error.value.exit_code == 8
    assert (read_status(run).phase, run.has("report.html")) == ("theirs", False)
    assert not list((tmp_path / "runs").glob("store/*"))


@pytest.mark.parametrize("why", ["new", "was there", "detached", "keep"])
def test_a_new_run_that_came_to_nothing_leaves_nothing(why: str, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new/runs/a")
    if why == "was there":
        run.write("job.json", {})
    with pytest.raises(NumericalError), driving(run, kind={"detached": "here", "keep": "retrain"}.get(why, "fit")):
        raise NumericalError("before there was a plan")
    assert (tmp_path / "new").exists() == (why != "new")
    if why != "new":
        assert read_status(run).state == "failed"


def test_warnings_become_events_and_are_printed_as_before(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    logger, root = logging.getLogger("dkrr.somewhere"), logging.getLogger()
    taken, root.handlers = root.handlers, []
    try:
        with driving(run):
            logger.warning("disk %s", "slow")
            logger.info("nothing to say")
    finally:
        root.handlers = taken
    assert ("disk slow" in messages(run), "nothing to say" in messages(run)) == (True, False)
    assert capfd.readouterr().err.count("disk slow") == 1


@pytest.mark.parametrize("count", [3, 10 * MOST_SAMPLES + 7])
def test_samples_are_bounded_and_no_peak_is_lost(count: int) -> None:
    samples = Samples()
    for k in range(1, count + 1):
        samples.add(2.0 * k, 2e9 * k, {"a": 10**6 if k == count // 3 else 1000 + k % 7})
    found = samples.to_dict()
    assert min(count, MOST_SAMPLES // 2) <= len(found["seconds"]) <= MOST_SAMPLES
    assert (found["seconds"][-1], max(found["memory_bytes"]["a"])) == (2.0 * count, 10**6)
    assert set(found["flops_per_second"]) == {1e9}


def test_a_run_at_an_address_is_watched_and_cancelled(bucket: Bucket) -> None:
    """Leases by conditional puts, events in objects that are written once, readers elsewhere."""
    run = undriven(bucket.url("runs", "a"))
    with pytest.raises(CancelledError), driving(run) as monitor:  # noqa: PT012  (any of them may be what raises)
        monitor("factorise", 3, 10, 0.0, 0.0)
        wait_until(lambda: read_status(run).tasks_done == 3)
        dkrr("cancel", run.location)
        wait_until(monitor.is_cancelled)
        monitor.check()
    assert look_once(run).state == "cancelled"
    dkrr("status", run.location, said="cancelled")
    dkrr("wait", run.location, exits=75)
    assert {"driver 1 started", "cancel requested"} <= {*messages(run)}
    segments = [key for key in bucket.puts() if "/events/" in key]
    assert len(segments) == len(set(segments)), "a segment was written twice"
    keys = list_keys(bucket.url("runs"))
    assert len(keys) > 5
    for key in keys:
        assert CANARY_SECRET.encode() not in (read_key(bucket.url("runs"), key) or b"")
