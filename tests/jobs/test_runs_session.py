"""A driver from its lease to its last word: what the status says, what is left, and what it must not write."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dkrr.errors import CancelledError, InterruptedRunError, LockedError, NumericalError
from dkrr.jobs.runs import monitor as monitor_module
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import read_events
from dkrr.jobs.runs.lease import DriverLease
from dkrr.jobs.runs.monitor import Monitor
from dkrr.jobs.runs.session import driving
from dkrr.jobs.runs.status import read_status
from dkrr.store.files import write_json
from dkrr.store.interruption import resumable
from tests.faults import wait_until


@pytest.fixture(autouse=True)
def _quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(monitor_module, "GRACE_SECONDS", 0.2)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs/a")
    directory.write("job.json", {})
    directory.write("plan.json", {})
    return directory


def drive(run: RunDirectory, body: Callable[[Monitor], None], **options: Any) -> None:
    with resumable(), driving(run, **options) as monitor:
        body(monitor)


def files(run: RunDirectory) -> dict[str, bytes]:
    """Everything in the run but what a writer is about to give up."""
    found = {}
    for path in Path(run.location).rglob("*"):
        if path.is_file() and path.suffix != ".partial":
            found[str(path)] = path.read_bytes()
    return found


def kinds(run: RunDirectory) -> list[tuple[str, str]]:
    return [(event["kind"], event["message"]) for _, event in read_events(run)]


def test_a_run_that_finishes(run: RunDirectory) -> None:
    seen: list[Any] = []
    with driving(run, progress=lambda *figures: seen.append(figures)) as monitor:
        monitor.phase("prepare")
        monitor.working(lambda: {"scheduler": "tcp://127.0.0.1:1", "num_workers": 2, "num_threads": 2})
        monitor.progress("factorise", 0, 10, 0.0, 100e9)
        time.sleep(0.1)
        monitor.progress("factorise", 4, 10, 40e9, 100e9)
        status = wait_until(lambda: (s := read_status(run)).heartbeat > 2 and s.tasks_done == 4 and s)
        assert (status.state, status.phase, status.tasks_total, status.num_workers) == ("running", "factorise", 10, 2)
        assert status.flops_per_second > 0
        assert 0 < status.phase_seconds_left < 60
        assert (run.read("driver.json") or {})["counter"] > 0
        monitor.note(model="m")
    status = read_status(run)
    assert (status.state, status.exit_code, status.error, status.model) == ("finished", 0, None, "m")
    assert set(status.seconds) == {"prepare", "factorise"}
    assert seen == [("factorise", 0, 10, 0.0, 100e9), ("factorise", 4, 10, 40e9, 100e9)]
    assert (run.read("driver.json") or {})["released"] is True
    assert kinds(run) == [
        ("state", "driver 1 started"),
        ("phase", "prepare began"),
        ("cluster", "2 workers, 2 threads"),
        ("phase", "factorise began"),
        ("state", "finished"),
    ]


@pytest.mark.parametrize(
    ("error", "state", "code", "message"),
    [
        (NumericalError("row 3", hint="raise alpha"), "failed", 5, "row 3"),
        (LockedError("factor.zarr is being written"), "failed", 8, "factor.zarr is being written"),
        (InterruptedRunError("interrupted"), "interrupted", 75, "interrupted"),
        (KeyboardInterrupt(), "interrupted", 75, "KeyboardInterrupt"),
        (ValueError("of ours"), "failed", 1, "ValueError: of ours"),
    ],
)
def test_a_run_that_fails(error: BaseException, state: str, code: int, message: str, run: RunDirectory) -> None:
    with pytest.raises(type(error)), driving(run):
        raise error
    status = read_status(run)
    assert (status.state, status.exit_code) == (state, code)
    assert (status.error or {})["message"] == message
    assert (status.error or {})["hint"] == ("raise alpha" if code == 5 else "")
    assert kinds(run)[-1] == ("state", f"{state}: {message}")
    with driving(run) as monitor:
        assert monitor.lease.epoch == 2
    assert read_status(run).state == "finished"
    assert read_status(run).error is None


def cancel(run: RunDirectory) -> None:
    run.write("cancel.json", {"requested_at": "now"})


def test_cancel_stops_at_the_next_task(run: RunDirectory) -> None:
    def body(monitor: Monitor) -> None:
        cancel(run)
        wait_until(monitor.is_cancelled)
        wait_until(lambda: read_status(run).state == "cancelling")
        monitor.progress("factorise", 1, 2, 0.0, 0.0)

    with pytest.raises(CancelledError, match="cancelled on request") as error:
        drive(run, body)
    assert error.value.exit_code == 75
    assert (read_status(run).state, read_status(run).exit_code) == ("cancelled", 75)
    with driving(run):  # the request was for the attempt before
        pass
    assert not run.has("cancel.json")


def test_a_request_made_before_a_detached_driver_began_is_for_it(run: RunDirectory) -> None:
    def body(monitor: Monitor) -> None:
        wait_until(monitor.is_cancelled)
        monitor.phase("prepare")

    cancel(run)
    with pytest.raises(CancelledError):
        drive(run, body, kind="here", detached=True)


def test_cancel_interrupts_what_does_not_look(run: RunDirectory) -> None:
    def body(_: Monitor) -> None:
        cancel(run)
        time.sleep(30)

    with pytest.raises(CancelledError):
        drive(run, body)
    assert read_status(run).state == "cancelled"


def test_without_handlers_nobody_is_interrupted(run: RunDirectory) -> None:
    before = signal.getsignal(signal.SIGINT)
    with driving(run) as monitor:
        cancel(run)
        wait_until(monitor.is_cancelled)
        time.sleep(0.5)
    assert signal.getsignal(signal.SIGINT) is before
    assert read_status(run).state == "finished"  # it was done before it came by


@pytest.fixture
def thief(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Takes the run over from a driver that is here and alive, as if that one had been stopped for a minute."""

    def act() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("dkrr.jobs.runs.lease._refuse_if_alive", lambda *_: None)
            lease = DriverLease.acquire(run, "here")
        run.write("status.json", {"state": "running", "epoch": lease.epoch, "phase": "theirs"})

    def take_over() -> None:
        with ThreadPoolExecutor(1) as thread:  # not behind the fence of the one that is replaced
            thread.submit(act).result()

    return take_over


def test_a_driver_that_was_replaced_ends_with_8(run: RunDirectory, thief: Any, tmp_path: Path) -> None:
    before: dict[str, bytes] = {}

    def body(_: Monitor) -> None:
        thief()
        before.update(files(run))
        write_json(str(tmp_path / "runs/store"), "pointer.json", {})

    with pytest.raises(LockedError, match="was taken over by") as error:
        drive(run, body)
    assert error.value.exit_code == 8
    assert files(run) == before
    assert not (tmp_path / "runs/store").exists() or not os.listdir(tmp_path / "runs/store")
    assert read_status(run).phase == "theirs"


@pytest.mark.parametrize("finds_out", ["task", "cancellation", "heartbeat", "end"])
def test_however_it_finds_out(finds_out: str, run: RunDirectory, thief: Any) -> None:
    def body(monitor: Monitor) -> None:
        thief()
        if finds_out != "end":
            wait_until(lambda: monitor.lost)
        if finds_out == "task":
            monitor.progress("factorise", 1, 2, 0.0, 0.0)
        if finds_out == "cancellation":
            assert monitor.is_cancelled()
            raise CancelledError("the executor was asked and said so")
        if finds_out == "heartbeat":
            time.sleep(30)

    with pytest.raises(LockedError, match="was taken over by"):
        drive(run, body)
    assert read_status(run).phase == "theirs"


@pytest.mark.parametrize("was_there", [True, False])
def test_a_new_run_that_came_to_nothing_leaves_nothing(was_there: bool, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "new/runs/a")
    if was_there:
        run.write("job.json", {})
    with pytest.raises(NumericalError), driving(run):
        raise NumericalError("before there was a plan")
    assert (tmp_path / "new").exists() == was_there
    if was_there:
        assert read_status(run).state == "failed"


def test_what_was_submitted_stays_whatever_happens(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs/a")
    with pytest.raises(NumericalError), driving(run, kind="here", detached=True):
        raise NumericalError("before there was a plan")
    assert read_status(run).state == "failed"


def test_warnings_become_events_and_are_printed_as_before(run: RunDirectory, capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("dkrr.somewhere")
    root = logging.getLogger()
    taken, root.handlers = root.handlers, []
    try:
        with driving(run):
            logger.warning("disk %s", "slow")
            logger.info("nothing to say")
    finally:
        root.handlers = taken
    assert ("warning", "disk slow") in kinds(run)
    assert all("nothing" not in message for _, message in kinds(run))
    assert capfd.readouterr().err.count("disk slow") == 1
    assert not [h for h in logging.getLogger("dkrr").handlers if type(h).__name__ == "_Warnings"]


def test_a_worker_that_gets_no_task_is_named_once(run: RunDirectory) -> None:
    refused: list[dict[str, str]] = []
    with driving(run) as monitor:
        monitor.working(lambda: {"scheduler": "s", "refused_workers": list(refused)})
        refused.append({"address": "tcp://late", "reason": "numpy 1.0"})
        wait_until(lambda: read_status(run).refused_workers)
        time.sleep(0.2)
    assert [message for _, message in kinds(run)].count("worker tcp://late gets no task: numpy 1.0") == 1


def test_a_heartbeat_survives_a_disk_that_was_full(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    with driving(run):
        full = True
        write = RunDirectory.write

        def sometimes(self: RunDirectory, name: str, document: dict[str, Any]) -> None:
            if full:
                raise OSError(28, "No space left on device")
            write(self, name, document)

        monkeypatch.setattr(RunDirectory, "write", sometimes)
        time.sleep(0.2)
        before, full = read_status(run).heartbeat, False
        wait_until(lambda: read_status(run).heartbeat > before)
    assert read_status(run).state == "finished"


def test_progress_costs_little(run: RunDirectory) -> None:
    with driving(run) as monitor:
        monitor.progress("factorise", 0, 10**5, 0.0, 1.0)
        started = time.perf_counter()
        for done in range(20_000):
            monitor.progress("factorise", done, 10**5, 0.0, 1.0)
        assert (time.perf_counter() - started) / 20_000 < 100e-6  # far below a task


def test_documents_are_json_without_surprises(run: RunDirectory) -> None:
    with driving(run) as monitor:
        assert isinstance(monitor, Monitor)
        monitor.progress("cg, residual 1e-3", 3, 40, 0.0, 0.0)
    text = (Path(run.location) / "status.json").read_text()
    assert json.loads(text)["phase"] == "cg, residual 1e-3"
    assert "cg" in json.loads(text)["seconds"]
