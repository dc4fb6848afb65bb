"""A lock with an owner: one process at a time factors into an array.

The lock is a small JSON document beside the array, a file or an object, that is compared and swapped
(:mod:`dkrr.swap`). Its owner raises a counter every few seconds. A lock is stale when its process is known to be gone
(same host, no such process), or when a reader saw the counter unchanged for 60 s of the reader's own clock; clocks of
different machines are never compared. Taking over raises the epoch by one.

A file is removed in the end. An object cannot be removed under a condition, so it stays and says that it was released:
the next owner goes on counting epochs from there, and ``dkrr gc`` removes what is old.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil

from dkrr.address import join, name_of, parent_of
from dkrr.errors import LockedError, StoreError
from dkrr.stores import is_url, local_root
from dkrr.swap import Versioned, create_json, discard_json, read_versioned, swap_json

__all__ = ["hold_lock"]

logger = logging.getLogger("dkrr.lock")

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0


def _me() -> dict[str, Any]:
    process = psutil.Process()
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner is a process of this host that does not exist any more."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        process = psutil.Process(int(owner["pid"]))
        return bool(abs(process.create_time() - float(owner["started"])) > 1 or process.status() == "zombie")
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def hold_lock(location: Any, *, stale_seconds: float = STALE_SECONDS) -> Iterator[None]:
    """Hold ``location``.lock, on a path or at an address, while the block runs; Zarr stores are not locked.

    The lock of a process on another host is watched for ``stale_seconds`` and taken over when its counter stands still.

    Raises
    ------
    LockedError
        Another process holds it; names host and process.
    StoreError
        An object store that does not honour conditional puts, see :func:`dkrr.swap.check_conditions`.
    """
    root = local_root(location)
    if root is None and not is_url(location):
        yield
        return
    where = location if root is None else str(root.absolute())
    lock = _Lock(parent_of(where), name_of(where) + ".lock", uuid.uuid4().hex)
    lock.acquire(stale_seconds)
    stop = threading.Event()
    thread = threading.Thread(target=lock.beat, args=(stop,), daemon=True, name="dkrr-lock")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        # a lock that cannot be released is stale as soon as this process ends; its error must not hide another
        with contextlib.suppress(OSError, StoreError):
            lock.release()


class _Lock:
    """One holder's view of a lock: the document ``key`` in ``folder``."""

    def __init__(self, folder: str, key: str, token: str) -> None:
        self.folder, self.key, self.token = folder, key, token
        self.epoch = 0

    def acquire(self, stale_seconds: float) -> None:
        while not self.epoch:
            if create_json(self.folder, self.key, self._record(1, 0)) is not None:
                self.epoch = 1
                return
            found = read_versioned(self.folder, self.key)
            if found is None:
                continue
            if not found.value.get("released"):
                self._refuse_if_alive(found, stale_seconds)
            # of two processes that have seen the same stale lock, one can swap it
            epoch = int(found.value["epoch"]) + 1
            if swap_json(self.folder, self.key, self._record(epoch, 0), found.version) is not None:
                self.epoch = epoch

    def _refuse_if_alive(self, found: Versioned, stale_seconds: float) -> None:
        owner = found.value["owner"]
        elsewhere = owner["host"] != socket.gethostname()
        if not _is_gone(owner) and not (elsewhere and self._stands_still(found, stale_seconds)):
            raise LockedError(
                f"{join(self.folder, self.key.removesuffix('.lock'))} is being written by process {owner['pid']} on "
                f"{owner['host']}",
                hint="wait for it, or stop it and start again",
                owner=owner,
            )

    def _stands_still(self, seen: Versioned, stale_seconds: float) -> bool:
        deadline = time.monotonic() + stale_seconds
        while time.monotonic() < deadline:
            time.sleep(min(1.0, stale_seconds / 10))
            now = read_versioned(self.folder, self.key)
            if now is None or now.version != seen.version:
                return False
        return True

    def beat(self, stop: threading.Event) -> None:
        """Raise the counter until told to stop, or until the lock is another's."""
        counter = 0
        while not stop.wait(HEARTBEAT_SECONDS):
            counter += 1
            try:
                # read anew each time: the answer to the last write may have been lost, and it was written all the same
                held = self._held()
                record = self._record(self.epoch, counter)
                if held is None or swap_json(self.folder, self.key, record, held.version) is None:
                    logger.warning("%s in %s was taken over by another process", self.key, self.folder)
                    return
            except (OSError, StoreError) as exc:
                # a full disk now may have room in a few seconds; without a heartbeat the lock would be lost for good
                logger.warning("%s in %s cannot be renewed (%s)", self.key, self.folder, exc)

    def release(self) -> None:
        """Give it back, unless it is another's by now."""
        held = self._held()
        if held is None:
            return
        if is_url(self.folder):
            swap_json(self.folder, self.key, {**held.value, "released": True}, held.version)
        else:
            discard_json(self.folder, self.key, held.version)

    def _held(self) -> Versioned | None:
        """The document while it is this holder's."""
        found = read_versioned(self.folder, self.key)
        is_ours = found is not None and isinstance(found.value, dict) and found.value.get("token") == self.token
        return found if is_ours else None

    def _record(self, epoch: int, counter: int) -> dict[str, Any]:
        return {"token": self.token, "epoch": epoch, "counter": counter, "owner": _me()}
