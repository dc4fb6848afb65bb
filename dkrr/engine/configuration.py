"""Where Dask and dkrr meet: Dask's configuration of a place, and the preload of local nannies and workers.

The namespace ``dkrr:`` of Dask's configuration is for what belongs to a place and not to a job.

You need it where one job file is to run on a laptop, under Slurm and on Kubernetes: ``dkrr.cluster`` holds what
``[cluster]`` of a job file that names no scheduler leaves out, under the same names (with dashes or underscores), and
``dkrr.timeouts`` how long that place may take. Dask finds it in its YAML files (``DASK_CONFIG``, ``~/.config/dask``,
``/etc/dask``) and in the environment (``DASK_DKRR__CLUSTER__SCHEDULER=tls://scheduler:8786``).
`cluster/dask/dkrr.yaml` is a sample with every key.

A preload is code that Dask runs in a nanny or worker before it accepts work. Ours lets a process die with the process
that started it: a worker that outlived a killed command would go on writing tiles into a store that the next command
is using. On Linux the kernel sends SIGKILL to a process when its parent is gone (PR_SET_PDEATHSIG), whatever the
process is busy with; the chain is client process, nanny, worker. Elsewhere a worker notices only that it lost its
scheduler. The signal is tied to the *thread* that started the process. Nannies are started by the event loop thread of
the cluster, which ends after they do, and a nanny starts its worker from a thread that waits for the worker's exit.

Costs the import of Dask, 0.1 s once; a nanny and its worker import nothing else for it, NumPy least of all.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

from dkrr.errors import ParameterError

TIMEOUTS = {"workers": 30.0, "no-workers": 60.0, "stall": 600.0}
"""Seconds, by name: for the workers of a job to be there when it starts; without any worker that may be used before the
run ends; without a finished task before the run ends."""

_WHERE = "in Dask's configuration"


def timeout_seconds(name: str) -> float:
    """Seconds that ``dkrr.timeouts.NAME`` gives, else those of :data:`TIMEOUTS`.

    Raises
    ------
    ParameterError
        It is no time above 0, or there is an unknown key beside it.
    """
    from dask.utils import parse_timedelta

    value = _table("timeouts", TIMEOUTS).get(name.replace("-", "_"), TIMEOUTS[name])
    seconds = parsed(parse_timedelta, value)
    if not 0 < seconds < float("inf"):
        raise ParameterError(f"dkrr.timeouts.{name} is {value!r} {_WHERE}", hint='give a time such as "90s" or "10m"')
    return seconds


def parsed(parse: Callable[[Any], Any], value: Any) -> float:
    """What one of Dask's parsers makes of a text with a unit; 0 where it makes nothing of it."""
    try:
        return 0.0 if isinstance(value, bool) else float(parse(value))
    except (AttributeError, KeyError, TypeError, ValueError):  # what they raise on None, lists, other units
        return 0.0


def cluster_defaults(known: Iterable[str]) -> dict[str, Any]:
    """What ``dkrr.cluster`` says, for keys that a job file does not have; names with underscores.

    Parameters
    ----------
    known
        The keys of ``[cluster]``.

    Raises
    ------
    ParameterError
        There is a key that ``[cluster]`` does not have, or a scheduler file whose path is not absolute.
    """
    table = _table("cluster", known)
    scheduler = table.get("scheduler")
    if isinstance(scheduler, str) and scheduler != "local" and "://" not in scheduler:
        path = os.path.expanduser(scheduler)
        if not os.path.isabs(path):  # relative to what? a job's paths mean its own folder
            raise ParameterError(
                f"dkrr.cluster.scheduler is {scheduler!r} {_WHERE}",
                hint='give "local", tcp://host:port, tls://host:port, or the whole path of a scheduler file',
            )
        table["scheduler"] = path
    return table


def _table(name: str, known: Iterable[str]) -> dict[str, Any]:
    """The table ``dkrr.NAME``; Dask takes dashes and underscores for the same."""
    import dask

    table: Any = {"dkrr": dask.config.get("dkrr", None)}
    for path, part, names in (("dkrr", "dkrr", {"cluster", "timeouts"}), (f"dkrr.{name}", name, {*known})):
        table = table.get(part) or {}
        listed = ", ".join(sorted(each.replace("_", "-") for each in names))
        if not isinstance(table, dict):
            raise ParameterError(f"{path} is {table!r} {_WHERE}", hint=f"give a table with some of {listed}")
        for key in table:
            if str(key).replace("_", "-") not in listed.split(", "):
                raise ParameterError(f"unknown key {path}.{key} {_WHERE}", hint=f"known: {listed}")
    return {key.replace("-", "_"): value for key, value in table.items()}


PARENT_PID = "DKRR_PARENT_PID"
"""Environment variable that tells a nanny the process id of the process that started it."""

_PR_SET_PDEATHSIG = 1


def dask_setup(server: Any) -> None:
    """Called by Dask before ``server`` (a nanny or a worker) accepts work: it dies with its parent from then on."""
    if not sys.platform.startswith("linux"):
        return
    parent = multiprocessing.parent_process()  # a nanny's worker has one, a nanny has none
    pid = parent.pid if parent is not None else int(os.environ.get(PARENT_PID, os.getppid()))
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # A parent that died before the call above sends no signal; its children have another parent by now.
    if os.getppid() != pid:
        os._exit(1)
