"""A Dask cluster of processes on this machine: the scheduler in this process, workers and nannies as subprocesses.

Dask's ``LocalCluster`` starts workers through :mod:`multiprocessing`, which runs the user's script once more in every
worker and fails without an ``if __name__ == "__main__"`` guard. Here each nanny is a fresh interpreter that gets the
import path, the Dask configuration and the BLAS environment of this process through environment variables.

Cost (2 cores, 2 workers): 0.7 s from the call to the last worker's registration, nearly all of it the two imports of
``distributed`` one after the other, in nanny and worker; 0.2 s to close.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from typing import Any

import dask
from distributed import Scheduler
from distributed.deploy.spec import SpecCluster
from distributed.deploy.subprocess import SubprocessWorker
from distributed.security import Security

from dkrr.engine.configuration import PARENT_PID
from dkrr.engine.machine import subprocess_environment, worker_environment
from dkrr.errors import ClusterError

HOST = "127.0.0.1"
ALLOWED_FAILURES = 3
PRELOAD = "dkrr.engine.configuration"
GRACE_SECONDS = 1.0
POLL_SECONDS = 0.01

# Dask's worker command without the console script, which would load the command line plugins of every package.
_COMMAND = "from distributed.cli.dask_spec import main; main()"

_SCHEDULER_CONFIG: dict[str, Any] = {
    "distributed.comm.default-scheme": "tcp",
    "distributed.comm.require-encryption": False,  # loopback only
    "distributed.scheduler.idle-timeout": None,
    "distributed.scheduler.no-workers-timeout": None,
    "distributed.scheduler.work-stealing-interval": "10ms",
    "distributed.scheduler.http.routes": [],
}
_WORKER_CONFIG: dict[str, Any] = {
    "distributed.comm.default-scheme": "tcp",
    "distributed.comm.require-encryption": False,
    "distributed.worker.multiprocessing-method": "spawn",  # zarr deadlocks after a fork
    # Tasks return receipts of a few numbers, so there is nothing to spill, and a paused worker holds nothing that it
    # could give back: pausing could only delay, or hang. A worker above its limit is killed and its task run again.
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": 0.95,
    "distributed.worker.profile.enabled": False,
    "distributed.worker.http.routes": [],
}
# Dask's default reports every start and stop, and each failed or cancelled task, whose error the caller gets anyway.
_QUIET = {"distributed": "warning", "distributed.worker": "critical"}
_LOGGING = {"logging", "logging-file-config"}
_DASK_FOLDERS = {"DASK_CONFIG", "DASK_ROOT_CONFIG"}


class LocalWorker(SubprocessWorker):
    """One nanny, and the worker that it looks after, as a subprocess of this process."""

    def __init__(
        self, scheduler: str, *, name: Any, worker_kwargs: dict[str, Any], environment: dict[str, str]
    ) -> None:
        super().__init__(scheduler, name=f"local-{name}", worker_kwargs=worker_kwargs)
        self.environment = environment

    async def _start(self) -> None:
        specification = {"cls": self.worker_class, "opts": {**self.worker_kwargs, "name": self.name}}
        self.process = await asyncio.create_subprocess_exec(
            # -P: a file numpy.py in the current folder must not become NumPy
            *(sys.executable, "-P", "-c", _COMMAND, self.scheduler, "--spec", json.dumps(specification)),
            env=self.environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C on the terminal is for this process, which then decides about its workers
        )

    async def close(self) -> None:
        """End nanny and worker: politely, which removes their scratch folders, then by force."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), GRACE_SECONDS)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()  # its worker dies with it
                await process.wait()
        await super().close()


def _process_environment() -> dict[str, str]:
    """The environment of a nanny, and so of its worker: our own, with Dask's configuration in one variable."""
    # a copy without what JSON cannot carry, and without the scheduler of this process
    config = json.loads(json.dumps(dask.config.config, default=lambda value: None, skipkeys=True))
    for name in ("scheduler", "shuffle"):
        config.pop(name, None)
    for kind in ("worker", "nanny"):
        preloads = dask.config.get(f"distributed.{kind}.preload", config=config)
        preloads = [preloads] if isinstance(preloads, str) else list(preloads)
        dask.config.set({f"distributed.{kind}.preload": [*preloads, PRELOAD]}, config=config)
    dask.config.set(_WORKER_CONFIG, config=config)
    section = config["distributed"] if _LOGGING & config["distributed"].keys() else config
    if not _LOGGING & section.keys():
        section["logging"] = dict(_QUIET)
    # Variables such as DASK_DISTRIBUTED__... are part of ``config`` already and would win over it in the child.
    environment = {
        name: value
        for name, value in subprocess_environment().items()
        if not name.startswith("DASK_") or name in _DASK_FOLDERS
    }
    # A killed worker leaves its semaphores to their resource tracker, which removes them, and warns.
    filters = [os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker"]
    return {
        **environment,
        **worker_environment(),
        PARENT_PID: str(os.getpid()),
        "DASK_INTERNAL_INHERIT_CONFIG": dask.config.serialize(config),
        "PYTHONWARNINGS": ",".join(filter(None, filters)),
    }


class LocalProcesses(SpecCluster):
    """What :func:`dkrr.local_cluster` returns: all its workers are running.

    Parameters
    ----------
    workers, threads_per_worker, memory_limit_bytes
        Number of worker processes, threads of each, bytes of memory that each may use.
    timeout
        Seconds within which all workers must have registered.
    """

    def __init__(self, workers: int, threads_per_worker: int, memory_limit_bytes: int, timeout: float) -> None:
        security = Security(require_encryption=False)
        scheduler = {
            "cls": Scheduler,
            "options": {
                "host": HOST,
                "protocol": "tcp://",
                "security": security,
                "allowed_failures": ALLOWED_FAILURES,
                "dashboard": False,
                "dashboard_address": f"{HOST}:0",
            },
        }
        worker = {
            "cls": LocalWorker,
            "options": {
                "worker_kwargs": {
                    "host": HOST,
                    "nthreads": threads_per_worker,
                    "memory_limit": memory_limit_bytes,
                    "dashboard": False,
                    "dashboard_address": f"{HOST}:0",
                },
                "environment": _process_environment(),
            },
        }
        # The scheduler reads its configuration while it is made; the caller's configuration is restored after that.
        with dask.config.set(_SCHEDULER_CONFIG):
            super().__init__(  # type: ignore[no-untyped-call]
                workers=dict.fromkeys(range(workers), worker),
                scheduler=scheduler,
                worker=worker,
                security=security,
                silence_logs=logging.WARNING,
                name="dkrr",
            )
        try:
            self._wait_until_running(workers, timeout)
        except BaseException:
            self.close()
            raise

    def _wait_until_running(self, num_workers: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while (num_running := len(self.scheduler_info["workers"])) < num_workers:
            ended = [w.process.returncode for w in self.workers.values() if w.process.returncode is not None]
            if ended:
                raise ClusterError(
                    f"a local worker process ended with status {ended[0]} while it started",
                    hint="its messages are on stderr",
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"{num_running} of {num_workers} local workers are running after {timeout:g} s",
                    hint="start fewer workers, or free memory and CPU time for them",
                )
            time.sleep(POLL_SECONDS)
