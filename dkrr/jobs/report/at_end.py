"""The report that every run leaves when it ends, in whatever way. Loads what makes it only then."""

from __future__ import annotations

import logging

from dkrr.jobs.runs.directory import RunDirectory
from dkrr.jobs.runs.status import Status, View

__all__ = ["report_at_end"]

logger = logging.getLogger("dkrr.jobs.report")


def report_at_end(directory: RunDirectory, status: Status) -> None:
    """Make the page of a run that ends with ``status``.

    Never raises, not even when it is interrupted: the run is over, its model is written, and a page is no reason to
    call that a failure. What went wrong is a warning that names the command that makes the page again.
    """
    try:
        from dkrr.jobs.report.page import write_report

        write_report(directory, view=View(status, status.state))
    except (Exception, KeyboardInterrupt) as exc:
        reason = f"{type(exc).__name__}: {exc}".rstrip(": ")
        logger.warning(
            "the report of the run could not be made (%s); `dkrr report %s` makes it again", reason, directory.shown
        )
