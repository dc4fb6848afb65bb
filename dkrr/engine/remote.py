"""Start a process on the machine of a worker that offers itself for that.

A worker that declares the resource ``dkrr-driver`` (``dask worker ADDRESS --resources dkrr-driver=1``) is asked on its
event loop, never in a thread that runs tiles: it starts the process at once, however busy it is, and has no more to do
with it. The process is in a session of its own and outlives the worker. It ends with the machine, or with the service
manager that ends everything a worker has started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from dkrr.engine.checks import DRIVER_RESOURCE, describe_workers, difference_of_versions
from dkrr.engine.environment import subprocess_environment
from dkrr.engine.probe import answer_challenge, challenge, remove_object
from dkrr.engine.roster import roster
from dkrr.errors import ClusterError
from dkrr.stores import read_json, write_json

__all__ = ["start_where_declared"]

ANSWER_SECONDS = 30.0
OFFER_SECONDS = 20.0
SEEN_SECONDS = 10.0


def start_where_declared(client: Any, arguments: Sequence[str], directory: str, log: str) -> dict[str, Any]:
    """Start ``python ARGUMENTS...`` on a worker that declares ``dkrr-driver``, once both see ``directory``.

    Parameters
    ----------
    client
        A synchronous ``distributed.Client``.
    arguments
        Of the Python interpreter there, e.g. ``["-m", "package.module", "argument"]``.
    directory
        Path or URL that this process and the worker must both read and write.
    log
        File for the process' output, appended to; "" for a temporary one of that machine, which the process is told
        with two more arguments, ``--log FILE``.

    Returns
    -------
    record : dict
        ``worker`` (address), ``host``, ``pid`` and ``log``.

    Raises
    ------
    ClusterError
        No worker declares the resource, or the one that does has another dkrr, does not answer, or does not see what
        is written here (or the reverse). Nothing was started.
    """
    address = _offered(client)
    (worker,) = client.sync(describe_workers, client, [address], ANSWER_SECONDS, None)
    problem = difference_of_versions(worker)
    if problem:
        raise ClusterError(f"the worker {address} cannot run a driver: {problem}", hint="install the same versions")
    _meet(client, address, directory)
    options = {"workers": [address], "callback_timeout": ANSWER_SECONDS}
    record: dict[str, Any] = client.run(start_detached, list(arguments), log, **options)[address]
    return {"worker": address, **record}


def _offered(client: Any) -> str:
    """Address of a worker that declares the resource; one that is just being started is waited for."""
    deadline = time.monotonic() + OFFER_SECONDS
    while True:
        workers = roster(client)
        offered = [address for address, worker in workers.items() if worker.get("resources", {}).get(DRIVER_RESOURCE)]
        if offered:
            return str(min(offered))
        if time.monotonic() > deadline:
            raise ClusterError(
                f"none of the {len(workers)} workers declares the resource {DRIVER_RESOURCE}",
                hint=f"start one with `dask worker ADDRESS --resources {DRIVER_RESOURCE}=1` where drivers may run",
            )
        time.sleep(0.2)


def _meet(client: Any, address: str, directory: str) -> None:
    """Both sides write an object that the other one has to read."""
    hint = "give a directory that both machines reach: a shared file system or s3://"
    with challenge(directory) as asked:
        assert asked is not None  # noqa: S101  (narrows the type)
        reply = asked["key"].replace("probe-", "probe-reply-")
        problem = client.run(answer_here, asked, reply, workers=[address], callback_timeout=ANSWER_SECONDS)[address]
        if problem:
            raise ClusterError(f"the worker {address} cannot use {directory}: it {problem}", hint=hint)
        deadline = time.monotonic() + SEEN_SECONDS  # a network file system may show a new name a little later
        while read_json(directory, reply) != {"token": asked["token"]}:
            if time.monotonic() > deadline:
                raise ClusterError(f"what the worker {address} writes to {directory} is not seen here", hint=hint)
            time.sleep(0.2)
        remove_object(directory, reply)


def answer_here(asked: dict[str, Any], reply: str) -> str:
    """Run by the worker: look at the directory, and leave an object for the one who asks."""
    problem = answer_challenge(asked)
    if not problem:
        write_json(asked["store"], reply, {"token": asked["token"]})
    return problem


def start_detached(arguments: Sequence[str], log: str) -> dict[str, Any]:
    """Start a Python process in a session of its own; where it runs and where its output goes."""
    if not log:
        descriptor, log = tempfile.mkstemp(prefix="dkrr-driver-", suffix=".log")
        os.close(descriptor)
        arguments = [*arguments, "--log", log]
    with open(log, "ab") as file:
        process = subprocess.Popen(  # noqa: S603  (our own interpreter)
            [sys.executable, "-P", *arguments],
            env=subprocess_environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # somebody has to take note of its end, or it stays in the table of processes for as long as the worker lives
    threading.Thread(target=process.wait, daemon=True, name="dkrr-driver").start()
    return {"host": socket.gethostname(), "pid": process.pid, "log": log}
