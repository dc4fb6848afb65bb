"""A lock has one owner, outlives none, and is taken over by one; on a path and at an address."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dkrr.errors import LockedError, ParameterError
from dkrr.store import lease
from dkrr.store.files import children, join, read_json, write_json
from dkrr.store.interruption import fenced
from dkrr.store.lease import hold_lock, process_record, stale_seconds
from tests.faults import failing_at, stopped, wait_until
from tests.s3 import bucket, s3_server

__all__ = ["bucket", "s3_server"]

ELSEWHERE = {"host": "another-host", "pid": 1, "started": 0.0}


class Place:
    """A folder or prefix, something in it, and its lock."""

    def __init__(self, folder: str) -> None:
        self.folder, self.location = folder, join(folder, "a.zarr")

    def read(self) -> dict[str, Any]:
        return dict(read_json(self.folder, "a.zarr.lock") or {})

    def leave(self, owner: dict[str, Any], epoch: int = 3, counter: int = 7) -> None:
        """A lock as another process left it."""
        document = {"token": "other", "epoch": epoch, "counter": counter, "owner": owner}
        write_json(self.folder, "a.zarr.lock", document)

    def is_free(self) -> bool:
        """A file is removed in the end, an object says that it was released."""
        return not children(self.folder) or ("://" in self.folder and bool(self.read()["released"]))


@pytest.fixture(params=["path", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    on_path = request.param == "path"
    return Place(str(tmp_path / "factors") if on_path else request.getfixturevalue("bucket").url("factors"))


@pytest.fixture
def local(tmp_path: Path) -> Place:
    return Place(str(tmp_path / "factors"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setenv("DKRR_STALE_SECONDS", "0.4")


@contextmanager
def a_process(code: str = "") -> Iterator[subprocess.Popen[str]]:
    """An interpreter that runs ``code``, says "ready", and waits."""
    code += "\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def holding(place: Place) -> str:
    return f"from dkrr.store.lease import hold_lock\nholder = hold_lock({place.location!r})\nholder.__enter__()"


def heartbeats() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dkrr-lock"]


def test_an_owner_lives_on_when_the_clock_of_the_machine_is_set(local: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        local.leave(process_record(process.pid))
        ahead = psutil.boot_time() + 3600  # which is what the system says then
        for module in (psutil, psutil._pslinux):
            monkeypatch.setattr(module, "boot_time", lambda: ahead)
        with pytest.raises(LockedError, match=f"process {process.pid}"), hold_lock(local.location):
            pass
        process.kill()
    with hold_lock(local.location):  # it is gone
        pass


def test_it_is_there_while_the_block_runs(place: Place) -> None:
    with hold_lock(place.location):
        before = place.read()
        assert (before["epoch"], before["owner"]["pid"]) == (1, os.getpid())
        refused = pytest.raises(LockedError, match=rf"a\.zarr.* is being written by process {os.getpid()} on ")
        with refused as caught, hold_lock(place.location):
            pytest.fail("two owners")
        assert (caught.value.exit_code, caught.value.owner["pid"]) == (8, os.getpid())
        wait_until(lambda: place.read()["counter"] > 2)
        assert "released" not in place.read()
    with pytest.raises(ZeroDivisionError), hold_lock(place.location):
        raise ZeroDivisionError
    assert place.is_free()
    assert heartbeats() == []


def test_the_lock_of_another_host_is_stale_when_its_counter_stands_still(place: Place) -> None:
    place.leave(ELSEWHERE)
    started = time.monotonic()
    with hold_lock(place.location):
        assert time.monotonic() - started >= 0.4
        assert place.read()["epoch"] == 4
        # and it is lost to one who thinks the same of us: the heartbeat ends, and leaving the block changes nothing
        place.leave(ELSEWHERE, epoch=5, counter=0)
        wait_until(lambda: not heartbeats())
    assert (place.read()["token"], place.read()["counter"]) == ("other", 0)


def test_processes_that_contend_for_a_lock_never_hold_it_together(tmp_path: Path) -> None:
    """Each that gets it makes a folder, which fails when another one is inside; all of them find a stale lock first."""
    code = (
        "import os, sys\nfrom dkrr.errors import LockedError\nfrom dkrr.store.lease import hold_lock\n"
        "held = 0\n"
        "for _ in range(150):\n"
        "    try:\n"
        "        with hold_lock(sys.argv[1]):\n"
        "            os.mkdir(sys.argv[2])\n"
        "            held += 1\n"
        "            os.rmdir(sys.argv[2])\n"
        "    except LockedError:\n"
        "        pass\n"
        "print(held)"
    )
    with a_process() as process:
        gone = process_record(process.pid)
    Place(str(tmp_path)).leave(gone)
    arguments = [sys.executable, "-c", code, str(tmp_path / "a.zarr"), str(tmp_path / "inside")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert min(counts) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_an_earlier_driver_of_the_same_run_is_void(local: Place) -> None:
    """The run was taken over from a process that is stopped: its locks must not hold up the next driver."""
    fence = "fence = fenced(lambda: None, holder={'run': 'runs/a', 'epoch': 3}); fence.__enter__()"
    with a_process(f"from dkrr.store.interruption import fenced\n{fence}\n{holding(local)}"):
        for holder in ({"run": "runs/b", "epoch": 4}, {"run": "runs/a", "epoch": 3}, None):
            with fenced(lambda: None, holder=holder), pytest.raises(LockedError), hold_lock(local.location):
                pass
        with fenced(lambda: None, holder={"run": "runs/a", "epoch": 4}), hold_lock(local.location):
            wait_until(lambda: local.read()["counter"] > 1)
            assert (local.read()["owner"]["run"], local.read()["owner"]["epoch"]) == ("runs/a", 4)


def test_the_lock_of_a_process_that_is_stopped_is_watched(local: Place) -> None:
    with a_process(holding(local)) as process, stopped(process.pid):
        wait_until(lambda: psutil.Process(process.pid).status() == "stopped")
        with hold_lock(local.location):
            assert local.read()["epoch"] == 2


def test_the_lock_of_a_process_that_is_gone_is_taken_over_at_once(
    local: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", "30")
    with a_process(holding(local)) as process:
        process.kill()
        process.wait()
        started = time.monotonic()
        with hold_lock(local.location), failing_at("write*.lock:@2:enospc"):
            assert (local.read()["epoch"], local.read()["owner"]["pid"]) == (2, os.getpid())
            wait_until(lambda: local.read()["counter"] > 3)  # a full disk does not end the heartbeat
        assert time.monotonic() - started < 5
    assert local.is_free()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf"])
def test_how_long_a_silent_owner_is_believed_to_live(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DKRR_STALE_SECONDS", text)
    with pytest.raises(ParameterError, match="DKRR_STALE_SECONDS is"):
        stale_seconds()
