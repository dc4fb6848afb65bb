"""Where the driver of a submitted run is started: ``[cluster] driver``.

A driver is the command ``python -m dkrr.jobs.runs.driver RUN``, wherever it is; a placement only starts it and says
where. A new placement is one function ``(run, job) -> record`` and one line in the table.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dkrr.errors import ParameterError
from dkrr.jobs.runs.directory import RunDirectory
from dkrr.processes import process_record

if TYPE_CHECKING:
    from dkrr.jobs.spec import JobSpec

__all__ = ["driver_command", "start_driver", "start_here"]

MODULE = "dkrr.jobs.runs.driver"
_PLACEMENTS = {
    "here": "dkrr.jobs.placement:start_here",
    "cluster": "dkrr.jobs.placement_cluster:start_on_cluster",
    "slurm": "dkrr.jobs.placement_slurm:start_with_sbatch",
}


def start_driver(run: str, job: JobSpec) -> dict[str, Any]:
    """Start the driver of a run where its job says, and return without waiting for it.

    Parameters
    ----------
    run
        Path or URL of the run's directory.

    Returns
    -------
    record : dict
        ``kind``, ``host``, and one of ``pid``, ``worker``, ``slurm_job``; plain values.

    Raises
    ------
    ParameterError
        There is no such placement.
    """
    kind = job.cluster.driver
    module, _, name = _PLACEMENTS[kind].partition(":")
    try:
        start: Callable[[str, JobSpec], dict[str, Any]] = getattr(import_module(module), name)
    except ModuleNotFoundError as exc:
        raise ParameterError(f"[cluster] driver = {kind!r} is not available ({exc})", hint='use "here"') from exc
    return start(run, job)


def driver_command(run: str, kind: str, python: str = sys.executable) -> list[str]:
    """The command line of a driver."""
    # -P: a file numpy.py in the current folder must not become NumPy
    return [python, "-P", "-m", MODULE, run, "--kind", kind]


def start_here(run: str, job: JobSpec) -> dict[str, Any]:
    """Start a detached process on this machine; it outlives the shell, and stops when the machine sleeps.

    It has a session of its own (no terminal, no SIGHUP), nothing on stdin, and its output in the run's ``driver.log``;
    that of a run on an object store goes to a temporary file of this machine, which the record names.
    """
    from dkrr.engine.environment import subprocess_environment

    directory = RunDirectory(run)
    log = _log_file(directory)
    write = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    pid = os.posix_spawn(
        sys.executable,
        driver_command(directory.location, "here") + ([] if directory.folder is not None else ["--log", log]),
        subprocess_environment(),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, write, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP],  # a shell's background jobs ignore SIGINT
    )
    return {"kind": "here", **process_record(pid), "log": log}


def _log_file(directory: RunDirectory) -> str:
    if directory.folder is not None:
        return directory.path("driver.log")
    import tempfile

    descriptor, path = tempfile.mkstemp(prefix=f"dkrr-{directory.name}-", suffix=".log")
    os.close(descriptor)
    return path
