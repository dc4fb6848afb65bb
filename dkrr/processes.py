"""Which process owns something, whether it is gone, and how long a silent owner is believed to live.

A pid means something in one pid namespace of one running kernel alone: containers often share a host name, and each
counts its own processes. So a record names the host, the boot and the namespace, and only where all three agree is the
pid looked up. Of any other owner nothing but its heartbeat tells whether it lives.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from dkrr.errors import ParameterError

__all__ = ["ABANDONED", "STALE_VARIABLE", "is_gone", "is_here", "is_stopped", "process_record", "stale_seconds"]

STALE_VARIABLE = "DKRR_STALE_SECONDS"
STALE_SECONDS = 60.0

# Tokens of locks and leases that this process could not give back (a full disk): it lives, but it owns them no more.
ABANDONED: set[str] = set()


def process_record(pid: int | None = None) -> dict[str, Any]:
    """Where a process that is seen from here runs (this one by default), its pid and start: enough to know it again."""
    process = psutil.Process(pid)
    return {**_here(), "pid": process.pid, "started": process.create_time()}


def _here() -> dict[str, Any]:
    """Host name, boot of the kernel and pid namespace of this process; "" where the system has no such thing."""
    boot, namespace = "", ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
    return {"host": socket.gethostname(), "boot": boot, "pid_namespace": namespace}


def is_here(record: dict[str, Any]) -> bool:
    """Whether the pid of the record means a process that is, or was, seen from here; False where that is not known."""
    return all(record.get(name) == value for name, value in _here().items())


def is_gone(record: dict[str, Any]) -> bool:
    """Whether the process is one that would be seen from here and does not exist any more; False for all others.

    With the "token" of a lock or lease, also whether this process is done with that and could only not say so.
    """
    if not is_here(record):
        return False
    if record.get("token") in ABANDONED:
        return True
    try:
        process = psutil.Process(int(record["pid"]))
        # a pid is given to another process sooner or later
        return bool(abs(process.create_time() - float(record["started"])) > 1 or process.status() == "zombie")
    except psutil.NoSuchProcess:
        return True


def is_stopped(record: dict[str, Any]) -> bool:
    """Whether the process is one that is seen from here and stands still (SIGSTOP)."""
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
