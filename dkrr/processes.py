"""Which process owns something, whether it is gone, and how long a silent owner is believed to live."""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil

from dkrr.errors import ParameterError

__all__ = ["STALE_VARIABLE", "is_gone", "is_here", "is_stopped", "process_record", "stale_seconds"]

STALE_VARIABLE = "DKRR_STALE_SECONDS"
STALE_SECONDS = 60.0


def process_record(pid: int | None = None) -> dict[str, Any]:
    """Host, pid and start of a process of this machine (this one by default): enough to know it again."""
    process = psutil.Process(pid)
    return {"host": socket.gethostname(), "pid": process.pid, "started": process.create_time()}


def is_here(record: dict[str, Any]) -> bool:
    """Whether the process is, or was, one of this machine."""
    return record.get("host") == socket.gethostname()


def is_gone(record: dict[str, Any]) -> bool:
    """Whether the process is one of this machine and does not exist any more; False for all others."""
    if not is_here(record):
        return False
    try:
        process = psutil.Process(int(record["pid"]))
        # a pid is given to another process sooner or later
        return bool(abs(process.create_time() - float(record["started"])) > 1 or process.status() == "zombie")
    except psutil.NoSuchProcess:
        return True


def is_stopped(record: dict[str, Any]) -> bool:
    """Whether the process is one of this machine that stands still (SIGSTOP)."""
    if not is_here(record):
        return False
    try:
        return str(psutil.Process(int(record["pid"])).status()) == "stopped"
    except psutil.NoSuchProcess:
        return False


def stale_seconds() -> float:
    """Seconds of the observer's own clock after which a counter that stands still means a dead owner.

    60, or what the environment variable ``DKRR_STALE_SECONDS`` says. All processes that share a run should agree; less
    than 10 is for tests.

    Raises
    ------
    ParameterError
        The variable is not a positive number.
    """
    text = os.environ.get(STALE_VARIABLE)
    if text is None:
        return STALE_SECONDS
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ParameterError(f"{STALE_VARIABLE} is {text!r}", hint="give a positive number of seconds, or unset it")
    return value
