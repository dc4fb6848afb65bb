"""A lock has one owner, outlives none, and is taken over by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dkrr.errors import LockedError
from dkrr.store import lease as lock
from dkrr.store.interruption import fenced
from dkrr.store.lease import hold_lock, process_record
from tests.faults import failing_at, stopped, wait_until


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, Path]:
    """A location and its lock."""
    return str(tmp_path / "factors/a.zarr"), tmp_path / "factors/a.zarr.lock"


def a_process(code: str) -> subprocess.Popen[str]:
    """An interpreter that runs ``code``, says "ready", and waits."""
    code += "\nprint('ready', flush=True)\nimport time\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def owner_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    return process_record(process.pid)


def leave(path: Path, owner: dict[str, Any], epoch: int = 3, counter: int = 7) -> None:
    """A lock as another process left it."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"token": "other", "epoch": epoch, "counter": counter, "owner": owner}))


def test_it_is_there_while_the_block_runs(place: tuple[str, Path]) -> None:
    location, path = place
    with hold_lock(location):
        found = read(path)
        assert (found["epoch"], found["owner"]["pid"]) == (1, os.getpid())
    with pytest.raises(ZeroDivisionError), hold_lock(location):
        raise ZeroDivisionError
    assert list(path.parent.iterdir()) == []


def test_a_second_holder_is_told_who_has_it(place: tuple[str, Path]) -> None:
    location, path = place
    with hold_lock(location):
        before = read(path)
        with (
            pytest.raises(LockedError, match=f"is being written by process {os.getpid()} on ") as caught,
            hold_lock(location),
        ):
            pytest.fail("two owners")
        assert caught.value.exit_code == 8
        assert caught.value.owner["pid"] == os.getpid()
        assert read(path) == before
    with hold_lock(location):
        pass


@pytest.mark.parametrize("end", ["killed", "zombie", "its number belongs to another process"])
def test_the_lock_of_a_process_that_is_gone_is_taken_over_at_once(place: tuple[str, Path], end: str) -> None:
    location, path = place
    process = a_process("")
    owner = owner_of(process)
    try:
        if end == "its number belongs to another process":
            owner["started"] -= 100
        else:
            process.kill()
            if end == "killed":
                process.wait()
            else:
                wait_until(lambda: psutil.Process(process.pid).status() == "zombie")
        leave(path, owner)
        started = time.monotonic()
        with hold_lock(location):
            assert read(path)["epoch"] == 4
            assert read(path)["owner"]["pid"] == os.getpid()
        assert time.monotonic() - started < 5
        assert not path.exists()
    finally:
        process.kill()
        process.communicate()


def test_a_process_keeps_its_lock_until_it_is_gone(place: tuple[str, Path]) -> None:
    location, path = place
    process = a_process(f"from dkrr.store.lease import hold_lock\nholder = hold_lock({location!r})\nholder.__enter__()")
    try:
        with pytest.raises(LockedError), hold_lock(location):
            pytest.fail("two owners")
        process.send_signal(signal.SIGKILL)
        process.wait()
        with hold_lock(location):
            assert read(path)["epoch"] == 2
    finally:
        process.kill()
        process.communicate()


def test_the_counter_goes_up(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    location, path = place
    with hold_lock(location):
        wait_until(lambda: read(path)["counter"] > 3)
    assert not path.exists()


def test_a_full_disk_does_not_end_the_heartbeat(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    location, path = place
    with hold_lock(location):
        with failing_at("chunk.mid_write:1:enospc") as points:
            wait_until(lambda: points.rules[0].visits > 2)
            counter = read(path)["counter"]
        wait_until(lambda: read(path)["counter"] > counter)
    assert list(path.parent.iterdir()) == []


ELSEWHERE = {"host": "another-host", "pid": 1, "started": 0.0}


def test_the_lock_of_another_host_is_stale_when_its_counter_stands_still(place: tuple[str, Path]) -> None:
    location, path = place
    leave(path, ELSEWHERE)
    started = time.monotonic()
    with hold_lock(location, stale_seconds=0.3):
        assert time.monotonic() - started >= 0.3
        assert read(path)["epoch"] == 4


def test_the_lock_of_another_host_that_counts_is_respected(place: tuple[str, Path]) -> None:
    location, path = place
    leave(path, ELSEWHERE)
    stop = threading.Event()

    def count() -> None:
        counter = 7
        while not stop.wait(0.02):
            counter += 1
            draft = path.with_name("draft")
            draft.write_text(json.dumps({**read(path), "counter": counter}))
            draft.replace(path)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(LockedError, match="on another-host"), hold_lock(location, stale_seconds=0.5):
            pytest.fail("two owners")
    finally:
        stop.set()
        thread.join()
    assert read(path)["token"] == "other"


def test_a_lock_that_was_lost_is_not_touched_any_more(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat ends, and leaving the block removes nothing."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    location, path = place
    with hold_lock(location):
        leave(path, ELSEWHERE, epoch=2, counter=1)
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "dkrr-lock"])
        assert read(path)["counter"] == 1
    assert read(path)["token"] == "other"


class Elsewhere(set[str]):
    """Of locks that this process holds: none, so that its threads are to each other as processes are."""

    def __contains__(self, token: object) -> bool:
        return False


def test_one_of_many_takes_a_stale_lock_over(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All have seen the same stale lock, however long each of them then waits."""
    location, path = place
    process = a_process("")
    owner = owner_of(process)
    process.kill()
    process.communicate()
    leave(path, owner)
    judged = threading.Barrier(8)
    is_gone = lock.is_gone
    seen = threading.local()

    def slowly(found: dict[str, Any]) -> bool:
        gone = is_gone(found)
        if not getattr(seen, "once", False):
            seen.once = True
            judged.wait(10)
            time.sleep(0.1 * (threading.get_ident() % 3))
        return gone

    monkeypatch.setattr(lock, "is_gone", slowly)
    monkeypatch.setattr(lock, "_HELD", Elsewhere())
    ends: list[str] = []
    entered = threading.Barrier(8)

    def contend() -> None:
        try:
            with hold_lock(location):
                ends.append("owner")
                entered.wait(10)
        except LockedError:
            ends.append("locked")
            entered.wait(10)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == ["locked"] * 7 + ["owner"]
    assert list(path.parent.iterdir()) == []


def test_processes_that_contend_for_a_lock_never_hold_it_together(tmp_path: Path) -> None:
    """Each that gets it makes a folder, which fails when another one is inside."""
    code = (
        "import os, sys\nfrom dkrr.errors import LockedError\nfrom dkrr.store.lease import hold_lock\n"
        "held = 0\n"
        "for _ in range(300):\n"
        "    try:\n"
        "        with hold_lock(sys.argv[1]):\n"
        "            os.mkdir(sys.argv[2])\n"
        "            held += 1\n"
        "            os.rmdir(sys.argv[2])\n"
        "    except LockedError:\n"
        "        pass\n"
        "print(held)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "a.zarr"), str(tmp_path / "inside")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert min(counts) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_an_earlier_driver_of_the_same_run_is_void(place: tuple[str, Path]) -> None:
    """The run was taken over from a process that is stopped: its locks must not hold up the next driver."""
    location, path = place
    code = (
        "from dkrr.store.interruption import fenced\nfrom dkrr.store.lease import hold_lock\n"
        "fence = fenced(lambda: None, holder={'run': 'runs/a', 'epoch': 3}); fence.__enter__()\n"
        f"lock = hold_lock({location!r}); lock.__enter__()"
    )
    process = a_process(code)
    try:
        for holder in ({"run": "runs/b", "epoch": 4}, {"run": "runs/a", "epoch": 3}, None):
            with fenced(lambda: None, holder=holder), pytest.raises(LockedError), hold_lock(location):
                pass
        with fenced(lambda: None, holder={"run": "runs/a", "epoch": 4}), hold_lock(location):
            assert read(path)["owner"]["epoch"] == 4
    finally:
        process.kill()
        process.communicate()


def test_the_heartbeat_keeps_the_run_of_the_owner(place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    location, path = place
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.01)
    with fenced(lambda: None, holder={"run": "runs/a", "epoch": 3}), hold_lock(location):
        wait_until(lambda: read(path)["counter"] > 1)
        assert read(path)["owner"]["run"] == "runs/a"


def test_the_lock_of_a_process_that_is_stopped_is_watched(place: tuple[str, Path]) -> None:
    location, path = place
    process = a_process(f"from dkrr.store.lease import hold_lock\nlock = hold_lock({location!r}); lock.__enter__()")
    try:
        with stopped(process.pid):
            wait_until(lambda: psutil.Process(process.pid).status() == "stopped")
            with hold_lock(location, stale_seconds=0.5):
                assert read(path)["epoch"] == 2
    finally:
        process.kill()
        process.communicate()
