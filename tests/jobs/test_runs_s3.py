"""Runs at addresses: leases by conditional puts, events in objects that are written once, readers elsewhere."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.errors import CancelledError
from dkrr.jobs import driver as monitor_module
from dkrr.jobs.driver import driving
from dkrr.jobs.run_directory import RunDirectory, look_once, read_events, read_status
from dkrr.store.files import list_keys, read_key
from tests.faults import wait_until
from tests.s3 import CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture(autouse=True)
def _quick_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BEAT_SECONDS_REMOTE", "POLL_SECONDS_REMOTE"):
        monkeypatch.setattr(monitor_module, name, 0.1)


@pytest.fixture
def run(bucket: Bucket) -> RunDirectory:
    directory = RunDirectory(bucket.url("runs", "a"))
    directory.write("job.json", {})
    directory.write("plan.json", {})
    return directory


def test_a_run_is_watched_and_cancelled(run: RunDirectory, bucket: Bucket) -> None:
    with pytest.raises(CancelledError), driving(run) as monitor:  # noqa: PT012  (any of them may be what raises)
        monitor("factorise", 3, 10, 0.0, 0.0)
        wait_until(lambda: read_status(run).tasks_done == 3)
        assert CliRunner().invoke(main, ["cancel", run.location]).exit_code == 0
        wait_until(monitor.is_cancelled)
        monitor.check()
    assert look_once(run).state == "cancelled"
    assert "cancelled" in CliRunner().invoke(main, ["status", run.location]).stdout
    assert CliRunner().invoke(main, ["wait", run.location]).exit_code == 75
    assert {"driver 1 started", "cancel requested"} <= {event["message"] for _, event in read_events(run)}
    segments = [key for key in bucket.puts() if "/events/" in key]
    assert len(segments) == len(set(segments)), "a segment was written twice"
    keys = list_keys(bucket.url("runs"))
    assert len(keys) > 5
    for key in keys:
        assert CANARY_SECRET.encode() not in (read_key(bucket.url("runs"), key) or b"")
