"""Drive a run: take its lease, fence its writes, beat, and say at the end how it ended.

``dkrr fit`` in the foreground and detached drivers do the same, in the same directory, so either finds what the other
has done, and never both of them drive one run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dkrr.errors import CancelledError, DkrrError, InterruptedRunError, LockedError, StoreError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.lease import DriverLease
from dkrr.jobs.runs.monitor import CANCEL, Monitor, Progress, cancelled_error
from dkrr.store.files import full_disk
from dkrr.store.interruption import fenced
from dkrr.store.lease import ABANDONED

__all__ = ["driving"]


@contextlib.contextmanager
def driving(
    directory: RunDirectory,
    *,
    kind: str = "fit",
    progress: Progress | None = None,
    detached: bool = False,
    keep: bool = False,
) -> Iterator[Monitor]:
    """Be the driver of a run while the block runs.

    Parameters
    ----------
    kind
        What the driver is, for those who look: "fit", in the foreground, or "here", a detached process.
    progress
        Called for every finished task.
    detached
        Somebody else prepared this attempt: a request to cancel that is there already is meant for it, and the run
        stays whatever happens. Otherwise older requests are removed, and a run that was new and came to nothing before
        it had a plan (bad data, say) is removed with its directory.
    keep
        The directory stays whatever happens: it holds more than this run.

    Raises
    ------
    LockedError
        Another driver is alive, or has taken over since.
    CancelledError
        Somebody asked for it.
    """
    new = [] if detached else _new_folders(directory)
    was_there = directory.exists()
    with full_disk(directory.location):
        lease = DriverLease.acquire(directory, kind)
    ended = False
    with fenced(lease.check, holder=lease.holder):
        monitor = Monitor(directory, lease, progress)
        try:
            with full_disk(directory.location):
                if not detached:
                    directory.remove(CANCEL)
                try:
                    monitor.start()
                    yield monitor
                finally:
                    monitor.stop()
                monitor.finish("finished", 0)
            ended = True
        except BaseException as error:
            if monitor.lost is not None or (isinstance(error, LockedError) and not _is_ours(lease)):
                _raise_lost(lease, monitor, error)
            if not was_there and not detached and not keep and not directory.has("plan.json"):
                directory.remove_all()
                for folder in new:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                raise
            cancelled = monitor.cancel_requested and isinstance(error, InterruptedRunError | KeyboardInterrupt)
            state, code = _outcome(error, cancelled)
            with contextlib.suppress(OSError, StoreError):  # the error itself matters more than its record
                monitor.finish(state, code, error)
            if cancelled and not isinstance(error, CancelledError):
                raise cancelled_error(directory) from None
            raise
        finally:
            token = lease.record["token"]
            ABANDONED.add(token)  # first: wherever this is interrupted, the lease is nobody's
            with contextlib.suppress(OSError, StoreError, LockedError):
                if ended or directory.exists():
                    lease.release()
                ABANDONED.discard(token)


def _is_ours(lease: DriverLease) -> bool:
    try:
        lease.check()
    except LockedError:
        return False
    return True


def _raise_lost(lease: DriverLease, monitor: Monitor, error: BaseException) -> None:
    """The error of a driver that was replaced, whatever it stumbled over while it found out."""
    if isinstance(error, LockedError):
        raise error
    if monitor.lost is not None:
        raise monitor.lost from error
    lease.check()
    raise error


def _outcome(error: BaseException, cancelled: bool) -> tuple[str, int]:
    if cancelled:
        return "cancelled", CancelledError.exit_code
    if isinstance(error, InterruptedRunError | KeyboardInterrupt):
        return "interrupted", InterruptedRunError.exit_code
    return "failed", error.exit_code if isinstance(error, DkrrError) else 1


def _new_folders(directory: RunDirectory) -> list[Path]:
    """The folders that a local run needs and that are not there yet, innermost first."""
    folder = directory.folder
    return [] if folder is None else [path for path in folder.parents if not path.exists()]
