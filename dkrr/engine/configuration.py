"""What Dask's configuration says about dkrr: the namespace ``dkrr:``, for what belongs to a place and not to a job.

You need it where one job file is to run on a laptop, under Slurm and on Kubernetes: ``dkrr.cluster`` holds what
``[cluster]`` of a job file that names no scheduler leaves out, under the same names (with dashes or underscores), and
``dkrr.timeouts`` how long that place may take. Dask finds it in its YAML files (``DASK_CONFIG``, ``~/.config/dask``,
``/etc/dask``) and in the environment (``DASK_DKRR__CLUSTER__SCHEDULER=tls://scheduler:8786``).
`cluster/dask/dkrr.yaml` is a sample with every key.

Costs the import of Dask, 0.1 s once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from dkrr.errors import ParameterError

__all__ = ["TIMEOUTS", "cluster_defaults", "timeout_seconds"]

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
    table = _table("timeouts", TIMEOUTS)
    value = table.get(name.replace("-", "_"), TIMEOUTS[name])
    from dask.utils import parse_timedelta

    try:
        if isinstance(value, bool):
            raise ValueError
        seconds = float(parse_timedelta(value))
    except (AttributeError, KeyError, TypeError, ValueError):  # what parse_timedelta raises on None, lists, other units
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ParameterError(f"dkrr.timeouts.{name} is {value!r} {_WHERE}", hint='give a time such as "90s" or "10m"')
    return seconds


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
