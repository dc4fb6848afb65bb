"""Runs: found by name, driven by one at a time, watched from anywhere; what their documents say, and when it ends.

Of what is in a store, what nothing refers to is found, and what anything refers to is kept.
"""

from __future__ import annotations

import json
import logging
import os
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
from dkrr.jobs.inspection import find_garbage
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


JOB = dict[str, Any].fromkeys(("data", "model", "solver", "output"), {})


def undriven(location: Path | str) -> RunDirectory:
    """A run with a job and a plan, which nobody drives."""
    directory = RunDirectory(location)
    directory.write("job.json", JOB)
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


def test_a_watch_goes_by_its_own_clock(run: RunDirectory) -> None:
    now = [100.0]  # seconds of the reader
    driven(run, FAR)
    ahead = (datetime.now(UTC) + timedelta(seconds=5000)).isoformat()  # the clock of the writer changes nothing
    run.write("status.json", {**(run.read("status.json") or {}), "updated_at": ahead})
    watch = Watch(run, lambda: now[0])
    assert watch.look().state == "running"
    for has_moved in (False, True, False):  # the counter moved within the last look but one
        if has_moved:
            driven(run, FAR, counter=1)
        now[0] += 59
        assert watch.look().state == "running"
    now[0] += 2
    assert (watch.look().state, watch.look().lost_because) == ("lost", "no heartbeat for 61 s")
    driven(run, FAR, counter=2)  # it was only slow
    assert watch.look().state == "running"


def test_a_driver_that_was_started_and_never_began(run: RunDirectory) -> None:
    write_status(run, Status(state="starting"))
    now = [100.0]
    with subprocess.Popen(["sleep", "60"]) as process:
        run.write("placement.json", {"kind": "here", **process_record(process.pid)})
        watch = Watch(run, lambda: now[0])
        assert watch.look().state == "starting"
        now[0] += 1000  # its process is there, however slow its imports are
        assert watch.look().state == "starting"
        process.kill()
    view = look_once(run)
    assert (view.state, "ended before it began; see driver.log" in view.lost_because) == ("lost", True)
    run.write("placement.json", {"kind": "here"})
    for seconds, state in ((0, "starting"), (100, "starting"), (100, "lost")):
        now[0] += seconds
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
        run.write("job.json", JOB)
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


# --- garbage ----------------------------------------------------------------------------------------------------------

KEYS = [character * 40 for character in "abcdef"]
DRAWN = "0f" * 16


def make_array(store: Path, kind: str, key: str, size: int = 100) -> Path:
    array = store / kind / f"{key}.zarr"
    (array / "c" / "0").mkdir(parents=True)
    document = {
        "shape": [500, 500],
        "chunk_grid": {"configuration": {"chunk_shape": [64, 64]}},
        "attributes": {"rows_digest": KEYS[5]},
    }
    (array / "zarr.json").write_text(json.dumps(document))
    (array / "c" / "0" / "0").write_bytes(bytes(size))
    return array


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "runs" / "store"
    make_array(store, "factors", KEYS[0])
    make_array(store, "factors", KEYS[1], size=5000)
    make_array(store, "grams", KEYS[2])
    make_array(store, "rows", f"{KEYS[3]}-train")
    return store


def names(store: Path) -> set[str]:
    return {str(Path(item.location).relative_to(store)) for item in find_garbage(store)}


def leave(store: Path, *, is_old: bool = True, **documents: Any) -> set[str]:
    """Leave documents of a run beside the store; what is garbage then."""
    (store.parent / "demo").mkdir(exist_ok=True)
    for name, document in documents.items():
        text = document if isinstance(document, str) else json.dumps(document)
        (store.parent / "demo" / f"{name}.json").write_text(text)
    for path in [store.parent, *store.parent.rglob("*")] if is_old else []:
        os.utime(path, (time.time() - 7200,) * 2)
    return names(store)


TILED = {f"factors/{KEYS[0]}.zarr", f"factors/{KEYS[1]}.zarr", f"grams/{KEYS[2]}.zarr"}
EVERYTHING = TILED | {f"rows/{KEYS[3]}-train.zarr"}


PLANNING = [
    {"state": state, "phase": phase}
    for state in ("starting", "running")
    for phase in ("", "prepare", "plan", "start")  # in the last the plan came after the list
]
LEFT: list[tuple[dict[str, Any], bool, set[str]]] = [
    ({}, True, EVERYTHING),
    ({"plan": {"num_rows": 500, "tile_size": 64}}, True, set()),
    ({"plan": {"num_rows": 500, "tile_size": 128}}, True, set()),  # leave-one-out has tiles of its own
    ({"plan": {"num_rows": 501, "tile_size": 64}}, True, TILED),
    ({"plan": {"num_rows": 500, "tile_size": 64}, "result": {}}, True, EVERYTHING),
    *(({"status": status}, False, set()) for status in PLANNING),
    *(({"status": status}, True, EVERYTHING) for status in PLANNING),  # its driver has said nothing for hours
    *(({"status": status | {"state": "failed"}}, False, EVERYTHING) for status in PLANNING),
    # what others call so
    *(({"status": text}, False, EVERYTHING) for text in ('{"state": ["running"]}', "[1]", "no JSON", "")),
]


@pytest.mark.parametrize(("documents", "is_old", "garbage"), LEFT)
def test_what_an_unfinished_run_may_resume_is_kept(
    store: Path, documents: dict[str, Any], is_old: bool, garbage: set[str]
) -> None:
    leave(store)
    assert leave(store, is_old=is_old, **documents) == garbage


def test_scratch_of_a_factor_is_kept_for_who_goes_on_with_it(store: Path) -> None:
    scratch = {f"factors/{key}-sums.zarr" for key in (KEYS[0], KEYS[4])}
    for key in (KEYS[0], KEYS[4]):
        make_array(store, "factors", f"{key}-sums")
    # the factor is needed, and whole; of the other one nothing else is left
    assert leave(store, result={"kept": {f"store/factors/{key}.zarr": 100 for key in KEYS[:5]}}) == scratch
    assert {item.reason for item in find_garbage(store)} == {"scratch of a factor that no run goes on with"}
    assert leave(store, is_old=False, plan={"num_rows": 500, "tile_size": 64}) == {f"factors/{KEYS[4]}-sums.zarr"}
    (store / "factors" / f"{KEYS[4]}-sums.zarr" / "c" / "0" / "1").write_bytes(bytes(10))
    assert names(store) == set()


def test_what_iterations_leave_behind(store: Path) -> None:
    for kind, key in (("preconditioners", KEYS[0]), ("solves", KEYS[4]), ("scratch", DRAWN)):
        make_array(store, kind, key)
    kept = {f"preconditioners/{KEYS[0]}.zarr", f"solves/{KEYS[4]}.zarr"}
    found = leave(store, plan={"num_rows": 9, "tile_size": 9})
    assert f"scratch/{DRAWN}.zarr" in found
    assert not found & kept  # the run may go on with them
    assert kept <= leave(store, result={})
