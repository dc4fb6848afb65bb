"""A lease: one process at a time writes a data set, an array, or whatever else has a name; and who is alive.

The lock is a small JSON document beside the array, a file or an object, that is compared and swapped
(:mod:`dkrr.store.documents`). Its owner raises a counter every few seconds. A lock is stale when its process is known
to be gone, or when a reader saw the counter unchanged for 60 s of the reader's own clock; clocks of different machines
are never compared. Taking over raises the epoch by one, and who was taken over finds out before it writes: the block
runs behind a fence (:mod:`dkrr.store.interruption`).

A pid means something in one pid namespace of one running kernel alone: containers often share a host name, and each
counts its own processes. So a record names the host, the boot and the namespace, and only where all three agree is the
pid looked up. Of any other owner nothing but its heartbeat tells whether it lives.

A file is removed in the end. An object cannot be removed under a condition, so it stays and says that it was released:
the next owner goes on counting epochs from there, and ``dkrr gc`` removes what is old.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dkrr.errors import LockedError, ParameterError, StoreError
from dkrr.store.documents import Versioned, check_conditions, create_json, read_versioned, swap_json
from dkrr.store.files import is_url, name_of, parent_of, read_json, storage_errors
from dkrr.store.interruption import check_cancelled, fence_holder, fenced

logger = logging.getLogger("dkrr.lock")

STALE_VARIABLE = "DKRR_STALE_SECONDS"
STALE_SECONDS = 60.0
HEARTBEAT_SECONDS = 5.0
WAIT_SECONDS = 0.2

# Tokens of the locks and leases that this process holds, and of those among them that this thread does. A document with
# another one is of a lock that could not be given back (a full disk): the process lives, but it owns it no more.
_HELD: set[str] = set()
_mine: contextvars.ContextVar[frozenset[str]] = contextvars.ContextVar("dkrr_locks", default=frozenset())


# --- who is alive -----------------------------------------------------------------------------------------------------


def process_record(pid: int | None = None) -> dict[str, Any]:
    """Where a process that is seen from here runs (this one by default), its pid and start: enough to know it again."""
    process = psutil.Process(pid)
    return {**_here(), "pid": process.pid, "ticks": _ticks(process.pid)}


def _ticks(pid: int) -> int:
    """When a process of this machine started, in ticks since the boot: a date would move with the clock that is set."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        raise psutil.NoSuchProcess(pid) from None


def _here() -> dict[str, Any]:
    """Host name, boot of the kernel and pid namespace of this process; "" where the system has no such thing."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return {"host": socket.gethostname(), "boot": boot, "pid_namespace": namespace}


def is_here(record: dict[str, Any]) -> bool:
    """Whether the pid of the record means a process that is, or was, seen from here; False where that is not known."""
    return all(record.get(name) == value for name, value in _here().items())


def _status(record: dict[str, Any]) -> str:
    """What a process does that is, or was, seen from here: psutil's word for it, or "gone"; "" for all others.

    A system may hide the processes of other users (hidepid of /proc): what they do is not known.
    """
    if not is_here(record):
        return ""
    try:
        process = psutil.Process(int(record["pid"]))
        # a pid is given to another process sooner or later
        is_another = _ticks(process.pid) != record.get("ticks", _ticks(process.pid))
        return "gone" if is_another else str(process.status())
    except psutil.NoSuchProcess:
        return "" if _is_hidden(int(record["pid"])) else "gone"
    except (PermissionError, psutil.AccessDenied):
        return ""


def _is_hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def is_gone(record: dict[str, Any]) -> bool:
    """Whether the process is one that would be seen from here and does not exist any more; False for all others.

    With the "token" of a lock or lease, also whether this process is done with that and could only not say so.
    """
    is_given_up = record.get("token") not in _HELD | {None} and is_here(record) and record["pid"] == os.getpid()
    return is_given_up or _status(record) in ("gone", "zombie")


def described(record: dict[str, Any]) -> str:
    """``process 123 on host``."""
    return f"process {record.get('pid')} on {record.get('host')}"


def owner_of(document: dict[str, Any]) -> dict[str, Any]:
    """The process that holds what a document of a lease is about."""
    return dict(document.get("owner", document))


def is_stopped(record: dict[str, Any]) -> bool:
    """Whether the process is one that is seen from here and stands still (SIGSTOP)."""
    return _status(record) == "stopped"


def stale_seconds() -> float:
    """Seconds of the observer's own clock after which a counter that stands still means a dead owner.

    60, or what the environment variable ``DKRR_STALE_SECONDS`` says. All processes that share a run should agree; less
    than 10 is for tests.

    Raises
    ------
    ParameterError
        The variable is not a positive number.
    """
    text = os.environ.get(STALE_VARIABLE, str(STALE_SECONDS))
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise ParameterError(f"{STALE_VARIABLE} is {text!r}", hint="give a positive number of seconds, or unset it")


def watch(
    look: Callable[[], dict[str, Any] | None], seen: dict[str, Any] | None, seconds: float
) -> dict[str, Any] | None:
    """Wait until a record is another one than was ``seen``, or its process is gone, so many seconds at most.

    Returns
    -------
    record : dict or None
        What ``look()`` answered last; ``seen`` where it stood still.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.5, seconds / 10))
        now = look()
        if now != seen or is_gone(now or {}):
            return now
    return seen


# --- locks ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_lock(location: Any, *, wait: bool = False) -> Iterator[None]:
    """Hold ``location``.lock, on a path or at an address, while the block runs.

    The lock of a process that is stopped, or is not seen from here, is watched for :func:`stale_seconds` and taken over
    when its counter stands still. That of an earlier driver of the same run is void. That of another thread of this
    process is waited for.

    Parameters
    ----------
    wait
        Wait for an owner that is alive: for what others make in a short time, and can then be used as it is.

    Raises
    ------
    LockedError
        Another process holds it, or this thread does; names host and process. In the block: it was taken over
        meanwhile, nothing is written.
    StoreError
        A place where nothing can be locked, see :func:`dkrr.store.documents.check_conditions`.
    """
    # beside what a link means: what is reached by two names has one lock
    place = location if is_url(location) else os.path.realpath(location)
    with Lease(parent_of(place), name_of(place) + ".lock", place).held(wait):
        yield


class Lease:
    """One holder's view of a document that says who may write something.

    Parameters
    ----------
    folder, key
        Where the document is.
    what
        What it is about.
    kind
        Of the lease of a run: what its driver is. Its document stays and says that it was released, so that the next
        driver goes on counting epochs; a driver of this machine that stands still is watched as those of others are.
    above
        An epoch that was known before, of a document that is gone, say: this one's is a later one.
    """

    def __init__(self, folder: str, key: str, what: str, *, kind: str = "", above: int = 0) -> None:
        self.folder, self.key, self.what, self.kind, self.above = folder, key, what, kind, above
        self.token, self.epoch = uuid.uuid4().hex, 0

    @contextlib.contextmanager
    def held(self, wait: bool = False) -> Iterator[None]:
        """Hold it while the block runs, as :func:`hold_lock` says."""
        stop, mine, thread = threading.Event(), _mine.get(), None
        try:
            _HELD.add(self.token)
            with storage_errors(self.what):
                self.acquire(wait)
            _mine.set(mine | {self.token})
            run = contextvars.copy_context().run  # behind the same fence as the block
            thread = threading.Thread(target=run, args=(self.beat, stop), daemon=True, name="dkrr-lock")
            thread.start()
            with fenced(self.check, holder=self.holder):
                yield
        finally:
            _HELD.discard(self.token)  # first: wherever this is interrupted, the lock is nobody's
            _mine.set(mine)
            try:
                stop.set()
                if thread is not None and thread.ident is not None:
                    thread.join()
            finally:
                with contextlib.suppress(OSError, StoreError, LockedError):  # its error must not hide another
                    self.release()

    @property
    def holder(self) -> dict[str, Any]:
        """The run that is driven, and its epoch; {} where none is."""
        return {"run": self.folder, "epoch": self.epoch} if self.kind else fence_holder()

    def acquire(self, wait: bool) -> None:
        check_conditions(self.folder)  # or the heartbeat would find out
        while not self.epoch:
            if create_json(self.folder, self.key, self._record(self.above + 1, 0)) is not None:
                self.epoch = self.above + 1
                return
            found = read_versioned(self.folder, self.key)
            if found is None:
                continue
            if self._is_free(found):
                # of two processes that have seen the same stale lock, one can swap it
                epoch = max(int(found.value["epoch"]), self.above) + 1
                if swap_json(self.folder, self.key, self._record(epoch, 0), found.version) is not None:
                    self.epoch = epoch
                continue
            owner = owner_of(found.value)
            held = f"{self.what} is {'driven' if self.kind else 'being written'} by {described(owner)}"
            if not wait and (self.kind or not self._is_of_another_thread(found)):
                hint = "wait for it, or stop it and start again"
                if self.kind:
                    hint = "wait for it (`dkrr wait`), or stop it (`dkrr cancel`)"
                raise LockedError(held, hint=hint, owner=owner)
            logger.info("waiting: %s", held)
            check_cancelled()
            time.sleep(WAIT_SECONDS)

    def _is_free(self, found: Versioned) -> bool:
        """Whether nobody holds a lock any more; that of an owner that may be dead is watched."""
        owner, mine = owner_of(found.value), fence_holder()
        # an owner that drove the run that this process drives now was replaced, and writes nothing any more
        is_void = bool(mine) and owner.get("run") == mine["run"] and int(owner.get("epoch", 0)) < int(mine["epoch"])
        if found.value.get("released") or is_void or is_gone({**owner, "token": found.value.get("token")}):
            return True
        may_be_dead = bool(self.kind) or not is_here(owner) or is_stopped(owner)
        look = partial(read_json, self.folder, self.key)
        return may_be_dead and watch(look, found.value, stale_seconds()) == found.value

    def _is_of_another_thread(self, seen: Versioned) -> bool:
        """Whether it is held by a thread that will give it back without this one, or was until now."""
        owner = owner_of(seen.value)
        return is_here(owner) and owner["pid"] == os.getpid() and seen.value.get("token") not in _mine.get()

    def check(self) -> None:
        """Return while the lock is this holder's.

        Raises
        ------
        LockedError
            Another process has taken it over, or it was removed.
        """
        if self._held() is not None:
            return
        found, owner, why = read_versioned(self.folder, self.key), {}, f"{self.key} was removed"
        if found is not None:
            owner = owner_of(found.value)
            why = f"it was taken over by {described(owner)} (epoch {found.value.get('epoch')}, ours was {self.epoch})"
        goes_on = "nothing to do here: the other driver goes on with the run"
        hint = goes_on if self.kind and owner else "look who writes there now, and start again"
        raise LockedError(f"the lock of {self.what} was lost: {why}", hint=hint, owner=owner)

    def beat(self, stop: threading.Event) -> None:
        """Raise the counter until told to stop, or until the lock is another's."""
        counter = 0
        while not stop.wait(min(HEARTBEAT_SECONDS, stale_seconds() / 3)):
            counter += 1
            try:
                # read anew each time: the answer to the last write may have been lost, and it was written all the same
                held = self._held()
                record = self._record(self.epoch, counter)
                if held is None or swap_json(self.folder, self.key, record, held.version) is None:
                    logger.warning("%s in %s was taken over by another process", self.key, self.folder)
                    return
            except LockedError:
                return  # another driver has the run, and may take this lock
            except (OSError, StoreError) as exc:
                # a full disk now may have room in a few seconds; without a heartbeat the lock would be lost for good
                logger.warning("%s in %s cannot be renewed (%s)", self.key, self.folder, exc)

    def release(self) -> None:
        """Give it back, unless it is another's by now."""
        held = self._held()
        if held is not None:
            released = {**held.value, "released": True} if self.kind or is_url(self.folder) else None
            swap_json(self.folder, self.key, released, held.version)

    def _held(self) -> Versioned | None:
        """The document while it is this holder's."""
        found = read_versioned(self.folder, self.key)
        is_ours = found is not None and isinstance(found.value, dict) and found.value.get("token") == self.token
        return found if is_ours else None

    def _record(self, epoch: int, counter: int) -> dict[str, Any]:
        # this process, and what it drives: this run, or one that this lock belongs to
        owner = {**process_record(), **({"kind": self.kind} if self.kind else fence_holder())}
        return {"token": self.token, "epoch": epoch, "counter": counter, "owner": owner}
