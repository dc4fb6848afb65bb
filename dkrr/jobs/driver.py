"""Submit a job, resume a run, ask it to stop: all three return at once, for the driver is another process.

``python -m dkrr.jobs.driver RUN`` is that process: it runs or resumes the run in the foreground, reads the job
from its directory, and ends with the exit codes of the command line. Its output is the run's ``driver.log`` (on an
object store: from its end on).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkrr.errors import DkrrError, LockedError, StoreError, told
from dkrr.jobs.monitor import CANCEL, error_facts, report_at_end
from dkrr.jobs.run_directory import RunDirectory, utc_now
from dkrr.jobs.status import Status, current_driver, look_once, read_status, write_status
from dkrr.store.interruption import resumable
from dkrr.store.lease import described, process_record

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec


@dataclass(frozen=True)
class Submitted:
    """What became of a submission: ``started`` is a record of the new driver's process, None when none was needed.

    ``note`` says what a finished run, which was not started again, leaves to do.
    """

    directory: RunDirectory
    status: Status
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

    directory = RunDirectory(job.directory)
    job.check_claim(directory.location)
    if directory.exists():
        from dkrr.jobs.prepare import changed_since

        status = look_once(directory)
        is_finished = status.state == "finished" and not changed_since(job, directory.read("result.json") or {})
        if is_finished or not status.is_over:
            return Submitted(directory, status)
    directory.write("job.json", job.to_dict())  # first: it is what makes the folder a run
    directory.write_bytes("job.toml", source)
    return _start(directory)


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
    job, status = _job_of(directory), look_once(directory)
    if status.state == "finished":
        from dkrr.jobs.prepare import changed_since

        return Submitted(directory, status, note=changed_since(job, directory.read("result.json") or {}))
    if not status.is_over:
        who = current_driver(directory)
        raise LockedError(
            f"{directory.shown} is {status.state}" + ("" if who is None else f", driven by {described(who)}"),
            hint=f"`dkrr wait {directory.shown}`, or `dkrr cancel {directory.shown}` and resume it then",
        )
    return _start(directory)


def _job_of(directory: RunDirectory) -> JobSpec:
    from dkrr.jobs.spec import JobSpec

    document = directory.read("job.json")
    if document is None:
        raise StoreError(f"{directory.location} has no job.json", hint="submit its job again, or check the path")
    return JobSpec.from_dict(document)


def _start(directory: RunDirectory) -> Submitted:
    directory.remove(CANCEL)
    # the process of the last driver says nothing about this one
    directory.write("placement.json", {"kind": "here"})
    before, epoch = read_status(directory), int((current_driver(directory) or {"epoch": 0})["epoch"])
    try:
        write_status(directory, Status(state="starting", epoch=epoch, started_at=utc_now()))
        record = start_driver(directory)
    except BaseException:
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
    command = [sys.executable, "-P", "-m", "dkrr.jobs.driver", directory.location]
    log = directory.path("driver.log")
    if directory.folder is None:
        descriptor, log = tempfile.mkstemp(prefix=f"dkrr-{directory.name}-", suffix=".log")
        os.close(descriptor)
        command.append(log)
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


def cancel_run(directory: RunDirectory) -> Status:
    """Leave a request to stop; the run as it was seen then. Nothing is written for one that has ended.

    The driver looks for it every two seconds, starts no new task, and ends; what is finished is kept. A lost run gets
    the request too: should its driver wake up, it stops.
    """
    status = look_once(directory)
    if not status.is_ended:
        directory.write(CANCEL, {"requested_at": utc_now(), "by": process_record()})
    return status


def drive(run: str, log: str | None = None) -> int:
    """Run or resume the run at ``run``; the exit code. Errors are printed on stderr and stand in the status.

    ``log`` is the local file with this process' output, for a run that is not on a file system.
    """
    directory, code = RunDirectory(run), 0
    try:
        with resumable():
            from dkrr.jobs.run import drive_job

            _say(f"driver of {directory.location}")
            drive_job(_job_of(directory), directory, kind="here")
        _say("finished")
    except Exception as exc:
        error, code = told(exc), told(exc).exit_code
        if error is not exc:
            traceback.print_exc()
        _say(f"error: {error.message}" + (f"\nhint: {error.hint}" if error.hint else ""))
        if not isinstance(exc, LockedError):  # then the run, and its status, belong to somebody else
            _note_early_end(directory, exc, code)
    if log is not None:
        with contextlib.suppress(OSError, StoreError):
            directory.write_bytes("driver.log", Path(log).read_bytes())
            Path(log).unlink()
    return code


def _note_early_end(directory: RunDirectory, error: Exception, code: int) -> None:
    """Say in the status what ended this driver before it had the run; what ended it later stands there already."""
    with contextlib.suppress(OSError, DkrrError):
        status = read_status(directory)
        if status.state == "starting":
            status.state, status.exit_code, status.error = "failed", code, error_facts(error)
            report_at_end(directory, status)
            write_status(directory, status)


def _say(text: str) -> None:
    print(f"{utc_now()} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(drive(*sys.argv[1:]))
