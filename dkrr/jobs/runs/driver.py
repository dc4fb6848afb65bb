"""The driver of a submitted run: ``python -m dkrr.jobs.runs.driver RUN`` runs or resumes it, in the foreground.

It reads the job from the run's directory, and ends with the exit codes of the command line. Its output is the run's
``driver.log`` (on an object store: from its end on).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from dkrr.errors import DkrrError, LockedError, StoreError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.events import utc_now
from dkrr.jobs.runs.monitor import report_at_end
from dkrr.jobs.runs.status import read_status, write_status
from dkrr.store.interruption import resumable

__all__ = ["drive", "main"]


def drive(run: str) -> int:
    """Run or resume the run at ``run``; the exit code. Errors are printed on stderr and stand in the status."""
    directory = RunDirectory(run)
    try:
        with resumable():
            _drive(directory)
    except DkrrError as exc:
        _say(f"error: {exc.message}" + (f"\nhint: {exc.hint}" if exc.hint else ""))
        _note_early_end(directory, exc, exc.exit_code)
        return exc.exit_code
    except Exception as exc:
        traceback.print_exc()
        _note_early_end(directory, exc, 1)
        return 1
    _say("finished")
    return 0


def _drive(directory: RunDirectory) -> None:
    document = directory.read("job.json")
    if document is None:
        raise StoreError(f"{directory.location} has no job.json", hint="submit the job, or check the path")
    _say(f"driver of {directory.location}")
    from dkrr.jobs.run import drive_job
    from dkrr.jobs.spec import JobSpec

    drive_job(JobSpec.from_run(document), directory, kind="here")


def _note_early_end(directory: RunDirectory, error: Exception, code: int) -> None:
    """Say in the status what ended this driver before it had the run; what ended it later stands there already."""
    if isinstance(error, LockedError):
        return  # the run, and its status, belong to somebody else
    with contextlib.suppress(OSError, DkrrError):
        status = read_status(directory)
        if status.state == "starting":
            status.state, status.exit_code = "failed", code
            message, hint = (error.message, error.hint) if isinstance(error, DkrrError) else (repr(error), "")
            status.error = {"type": type(error).__name__, "message": message, "hint": hint}
            report_at_end(directory, status)
            write_status(directory, status)


def _say(text: str) -> None:
    print(f"{utc_now()} {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command itself."""
    parser = argparse.ArgumentParser(prog="dkrr-driver", description="Run or resume a run in the foreground.")
    parser.add_argument("run", help="directory of the run, a path or a URL")
    parser.add_argument("--log", help="local file with this process' output, for a run that is not on a file system")
    options = parser.parse_args(arguments)
    code = drive(options.run)
    if options.log is not None:
        with contextlib.suppress(OSError, StoreError):
            RunDirectory(options.run).write_bytes("driver.log", Path(options.log).read_bytes())
            Path(options.log).unlink()
    return code


if __name__ == "__main__":
    sys.exit(main())
