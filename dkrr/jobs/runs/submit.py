"""Submit a job, resume a run, ask it to stop. All three return at once; the driver is another process."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dkrr.errors import LockedError, StoreError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import utc_now
from dkrr.jobs.runs.lease import current_driver, described
from dkrr.jobs.runs.monitor import CANCEL
from dkrr.jobs.runs.status import Status, View, look_once, read_status, write_status
from dkrr.store.lease import process_record

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec

__all__ = ["Submitted", "cancel_run", "resume_run", "submit_job"]


@dataclass(frozen=True)
class Submitted:
    """What became of a submission: ``started`` is a record of the new driver's process, None when none was needed.

    ``note`` says what a finished run, which was not started again, leaves to do.
    """

    directory: RunDirectory
    view: View
    started: dict[str, Any] | None = None
    note: str = ""


def submit_job(job: JobSpec, source: bytes) -> Submitted:
    """Make the run of a job and start its driver; nothing is started when the run is on its way, or finished.

    A run that is finished begins once more when its data set holds other rows since, or a file that it reads was
    written since: it continues with what it has.

    Parameters
    ----------
    job
        The checked job.
    source
        Its file, byte for byte.

    Raises
    ------
    StoreMismatchError
        The directory holds another job; the differing fields are listed.
    """
    from dkrr.jobs.claim import check_claim, run_id

    directory = RunDirectory(job.output.run_directory(run_id(job)))
    document = check_claim(job, directory.location)
    if directory.exists():
        view = look_once(directory)
        if not view.is_over or (view.state == "finished" and not _has_changed(job, directory)):
            return Submitted(directory, view)
    directory.write("job.json", document)  # first: it is what makes the folder a run
    directory.write_bytes("job.toml", source)
    return _start(directory)


def _has_changed(job: JobSpec, directory: RunDirectory) -> bool:
    from dkrr.jobs.prepare import has_changed

    return has_changed(job, directory.read("result.json") or {})


def resume_run(directory: RunDirectory) -> Submitted:
    """Start a new driver for a run that has ended without being finished; nothing for a finished one.

    Where a finished one reads other rows by now, ``note`` says so: a run is resumed for the rows that it was made for,
    and only its job begins with others.

    Raises
    ------
    LockedError
        Its driver is alive.
    StoreError
        The run has no job.
    """
    from dkrr.jobs.spec import JobSpec

    document = directory.read("job.json")
    if document is None:
        raise StoreError(f"{directory.location} has no job.json", hint="submit its job again")
    job, view = JobSpec.from_run(document), look_once(directory)
    if view.state == "finished":
        from dkrr.jobs.prepare import changed_since

        return Submitted(directory, view, note=changed_since(job, directory.read("result.json") or {}))
    if not view.is_over:
        who = current_driver(directory)
        raise LockedError(
            f"{directory.shown} is {view.state}" + ("" if who is None else f", driven by {described(who)}"),
            hint=f"`dkrr wait {directory.shown}`, or `dkrr cancel {directory.shown}` and resume it then",
        )
    return _start(directory)


def _start(directory: RunDirectory) -> Submitted:
    directory.remove(CANCEL)
    # the process of the last driver says nothing about this one
    directory.write("placement.json", {"kind": "here"})
    before, last = read_status(directory), current_driver(directory)
    epoch = 0 if last is None else int(last["epoch"])
    try:
        write_status(directory, Status(state="starting", epoch=epoch, started_at=utc_now()))
        record = start_driver(directory)
    except BaseException:
        if directory.has("status.json"):
            before.state = before.state if before.is_ended else "interrupted"
            write_status(directory, before)
        raise
    directory.write("placement.json", record)
    return Submitted(directory, look_once(directory), record)


def start_driver(directory: RunDirectory) -> dict[str, Any]:
    """Start a detached driver of a run on this machine; it outlives the shell, and stops when the machine sleeps.

    It has a session of its own (no terminal, no SIGHUP), nothing on stdin, and its output in the run's ``driver.log``;
    that of a run on an object store goes to a temporary file of this machine, which the record names.

    Returns
    -------
    record : dict
        ``kind`` ("here"), ``log``, and what :func:`dkrr.store.lease.process_record` says; plain values.
    """
    from dkrr.engine.machine import subprocess_environment

    # -P: a file numpy.py in the current folder must not become NumPy
    command = [sys.executable, "-P", "-m", "dkrr.jobs.runs.driver", directory.location]
    log = directory.path("driver.log")
    if directory.folder is None:
        descriptor, log = tempfile.mkstemp(prefix=f"dkrr-{directory.name}-", suffix=".log")
        os.close(descriptor)
        command += ["--log", log]
    pid = os.posix_spawn(
        sys.executable,
        command,
        subprocess_environment(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP],  # a shell's background jobs ignore SIGINT
    )
    return {"kind": "here", **process_record(pid), "log": log}


def cancel_run(directory: RunDirectory) -> View:
    """Leave a request to stop; the run as it was seen then. Nothing is written for one that has ended.

    The driver looks for it every two seconds, starts no new task, and ends; what is finished is kept. A lost run gets
    the request too: should its driver wake up, it stops.
    """
    view = look_once(directory)
    if not view.status.is_ended:
        directory.write(CANCEL, {"requested_at": utc_now(), "by": process_record()})
    return view
