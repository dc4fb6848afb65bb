"""A lock with an owner: one process at a time factors into an array.

The lock is a small JSON file beside the array. Its owner raises a counter every few seconds. A lock is stale when its
process is known to be gone (same host, no such process), or when a reader saw the counter unchanged for 60 s of the
reader's own clock; clocks of different machines are never compared. Taking over raises the epoch by one.
"""

from __future__ import annotations

import contextlib
import contextvars
import fcntl
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dkrr.errors import LockedError, StoreError
from dkrr.fence import fence_holder
from dkrr.processes import is_gone as _is_gone
from dkrr.processes import is_here, is_stopped, process_record
from dkrr.processes import stale_seconds as default_stale_seconds
from dkrr.stores import local_root, read_json, write_json

__all__ = ["hold_lock"]

logger = logging.getLogger("dkrr.lock")

HEARTBEAT_SECONDS = 5.0


def _me() -> dict[str, Any]:
    """This process, and the run that it drives, if any."""
    return {**process_record(), **fence_holder()}


def _is_void(owner: dict[str, Any]) -> bool:
    """Whether the owner drove the run that this process drives now: it was replaced, and writes nothing any more."""
    mine = fence_holder()
    return bool(mine) and owner.get("run") == mine["run"] and int(owner.get("epoch", 0)) < int(mine["epoch"])


@contextlib.contextmanager
def hold_lock(location: str, *, stale_seconds: float | None = None) -> Iterator[None]:
    """Hold ``location``.lock while the block runs; a local path only (other stores are not locked).

    The lock of a process that is stopped, or on another host, is watched for ``stale_seconds``
    (:func:`dkrr.processes.stale_seconds` by default) and taken over when its counter stands still. That of an earlier
    driver of the same run is void.

    Raises
    ------
    LockedError
        Another process holds it; names host and process.
    """
    root = local_root(location)
    if root is None:
        yield
        return
    path = root.with_name(root.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    epoch = _acquire(path, token, default_stale_seconds() if stale_seconds is None else stale_seconds)
    stop = threading.Event()
    beat = contextvars.copy_context().run  # behind the same fence as the block
    thread = threading.Thread(target=beat, args=(_beat, path, token, epoch, stop), daemon=True, name="dkrr-lock")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        # a lock that cannot be removed is stale as soon as this process ends; its error must not hide another
        with contextlib.suppress(OSError, StoreError):
            if _owned(path, token):
                path.unlink()


def _record(token: str, epoch: int, counter: int) -> dict[str, Any]:
    return {"token": token, "epoch": epoch, "counter": counter, "owner": _me()}


def _acquire(path: Path, token: str, stale_seconds: float) -> int:
    while True:
        if _create(path, _record(token, 1, 0)):
            return 1
        found = read_json(str(path.parent), path.name)
        if found is None:
            continue
        owner = found["owner"]
        may_be_dead = not is_here(owner) or is_stopped(owner)
        free = _is_void(owner) or _is_gone(owner)
        if not free and not (may_be_dead and _stands_still(path, found, stale_seconds)):
            raise LockedError(
                f"{path.with_suffix('')} is being written by process {owner['pid']} on {owner['host']}",
                hint="wait for it, or stop it and start again",
                owner=owner,
            )
        epoch = _take_over(path, token, found)
        if epoch is not None:
            return epoch


def _take_over(path: Path, token: str, stale: dict[str, Any]) -> int | None:
    """Replace a stale lock; None when it is not the one that was seen any more.

    Two processes may have seen the same stale lock. The kernel lets one of them at a time compare and replace; the
    folder is what they lock, so that no file is left behind.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system that cannot; the comparison alone has to do
            fcntl.flock(folder, fcntl.LOCK_EX)
        found = read_json(str(path.parent), path.name)
        if found is None or (found["token"], found["counter"]) != (stale["token"], stale["counter"]):
            return None
        epoch = int(found["epoch"]) + 1
        write_json(str(path.parent), path.name, _record(token, epoch, 0))
        return epoch
    finally:
        os.close(folder)


def _create(path: Path, record: dict[str, Any]) -> bool:
    """Create the file whole, or not at all when it exists (a link never replaces)."""
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    draft.write_text(json.dumps(record))
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _stands_still(path: Path, seen: dict[str, Any], stale_seconds: float) -> bool:
    deadline = time.monotonic() + stale_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, stale_seconds / 10))
        now = read_json(str(path.parent), path.name)
        if now is None or (now["counter"], now["token"]) != (seen["counter"], seen["token"]):
            return False
    return True


def _owned(path: Path, token: str) -> bool:
    found = read_json(str(path.parent), path.name)
    return isinstance(found, dict) and found.get("token") == token


def _beat(path: Path, token: str, epoch: int, stop: threading.Event) -> None:
    counter = 0
    while not stop.wait(HEARTBEAT_SECONDS):
        counter += 1
        try:
            if not _owned(path, token):
                logger.warning("%s was taken over by another process", path)
                return
            write_json(str(path.parent), path.name, _record(token, epoch, counter))
        except LockedError:
            return  # another driver has the run, and may take this lock
        except (OSError, StoreError) as exc:
            # a full disk now may have room in a few seconds; without a heartbeat the lock would be lost for good
            logger.warning("%s cannot be renewed (%s)", path, exc)
