"""``[cluster] driver = "cluster"``: the driver of a run lives on the machine of a worker, as a process of its own.

You need it where the machine you submit from sleeps, or cannot stay connected to the scheduler. The worker that
declares the resource ``dkrr-driver`` starts the driver and goes on computing tiles, if it is large enough for them.
"""

from __future__ import annotations

import os
from typing import Any

from dkrr.engine.cluster import connect
from dkrr.engine.remote import start_where_declared
from dkrr.errors import JobFileError
from dkrr.jobs.spec import JobSpec
from dkrr.stores import local_root

__all__ = ["DRIVER_MODULE", "start_on_cluster"]

DRIVER_MODULE = "dkrr.jobs.runs.driver"


def start_on_cluster(run: str, job: JobSpec) -> dict[str, Any]:
    """Start the driver of ``run`` on a worker of the job's scheduler that declares the resource ``dkrr-driver``.

    Parameters
    ----------
    run
        Path or URL of the run directory, which this machine and the worker's must both reach; that is tried first.
    job
        Its ``[cluster]`` names the scheduler.

    Returns
    -------
    record : dict
        ``kind`` ("cluster"), ``worker`` (address), ``host``, ``pid`` and ``log``.

    Raises
    ------
    JobFileError
        The job's scheduler is "local": there is no cluster.
    ClusterError
        The scheduler cannot be reached, no worker declares the resource, or it does not see the run directory.
    """
    cluster = job.cluster
    if cluster.scheduler == "local":
        raise JobFileError(
            'driver = "cluster" with scheduler = "local"', hint="name the scheduler of the cluster, or drop the driver"
        )
    folder = local_root(run)
    run = run if folder is None else os.path.abspath(folder)
    log = "" if folder is None else os.path.join(run, "driver.log")
    command = ["-m", DRIVER_MODULE, run, "--kind", "cluster"]
    with connect(cluster.scheduler, workers=1, insecure=cluster.insecure) as client:
        return {"kind": "cluster", **start_where_declared(client, command, run, log)}
