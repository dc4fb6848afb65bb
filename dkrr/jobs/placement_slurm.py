"""``[cluster] driver = "slurm"``: the driver of a run is a batch job.

With ``scheduler = "local"`` the whole run is that job: one task with a CPU for every worker thread and the memory of
all workers. With another scheduler the job is the driver alone. Partition, account, time limit and everything else that
a site wants are sbatch's own environment variables (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT, ...).

Two minutes before its time limit the driver is told to stop; the run is interrupted then and can be resumed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from dkrr.address import name_of
from dkrr.engine.environment import subprocess_environment
from dkrr.errors import ClusterError
from dkrr.jobs.placement_cluster import DRIVER_MODULE
from dkrr.jobs.spec import JobSpec
from dkrr.stores import local_root

__all__ = ["batch_options", "batch_script", "start_with_sbatch"]

SUBMIT_SECONDS = 30.0
QUEUED_SECONDS = 5.0
STARTED_SECONDS = 30.0
POLL_SECONDS = 0.25
OVERHEAD_BYTES = 2 * 2**30
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}


def start_with_sbatch(run: str, job: JobSpec) -> dict[str, Any]:
    """Submit the driver of ``run`` to Slurm.

    The job first looks for a file that is written here, and answers with another one. When it is started within a few
    seconds, the answer is waited for; a job that stays in the queue is trusted, and ends with a message in its log when
    its node does not see the run directory.

    Parameters
    ----------
    run
        Path or URL of the run directory.
    job
        Its ``[cluster]`` says how many workers of what size a local cluster has.

    Returns
    -------
    record : dict
        ``kind`` ("slurm"), ``slurm_job`` (its number), ``checked`` (whether the job has seen the run directory).

    Raises
    ------
    ClusterError
        sbatch is not there or refuses, or the job's node does not see the run directory.
    """
    if shutil.which("sbatch") is None:
        raise ClusterError("sbatch is not on the PATH", hint='submit where Slurm is installed, or use driver = "here"')
    folder = local_root(run)
    run = run if folder is None else os.path.abspath(folder)
    token = f"probe-{uuid.uuid4().hex}" if folder is not None else ""
    if token:
        (Path(run) / token).touch()
    try:
        number = _submit(batch_options(run, job), batch_script(run, token))
        checked = bool(token) and _is_seen(run, token, number)
    finally:
        if token:
            _forget(run, token)
    return {"kind": "slurm", "slurm_job": number, "checked": checked}


def batch_options(run: str, job: JobSpec) -> list[str]:
    """The options of sbatch for the driver of a run."""
    cluster, options = job.cluster, []
    if cluster.scheduler == "local" and cluster.workers is not None:
        options.append(f"--cpus-per-task={cluster.workers * cluster.threads_per_worker}")
        if cluster.memory_limit != "auto":
            num_bytes = cluster.workers * _bytes(cluster.memory_limit) + OVERHEAD_BYTES
            options.append(f"--mem={-(-num_bytes // 2**20)}M")
    if local_root(run) is not None:
        # %: sbatch would replace %j and its like
        options += [f"--output={os.path.join(run, 'driver.log').replace('%', '%%')}", "--open-mode=append"]
    name = re.sub(r"[^A-Za-z0-9._-]", "-", name_of(run))
    return [
        f"--job-name=dkrr-{name}",
        "--ntasks=1",
        "--no-requeue",  # `dkrr resume` is what starts it again
        "--signal=B:TERM@120",
        *options,
    ]


def batch_script(run: str, token: str = "") -> str:
    """The batch script of the driver of a run; with a token, it first looks for that file and answers."""
    lines = ["#!/bin/bash"]
    if token:
        seen, reply = (shlex.quote(os.path.join(run, name)) for name in (token, f"{token}-reply"))
        lines += [
            f"if ! [ -d {shlex.quote(run)} ]; then",
            f'    echo "error: $(hostname) does not see" {shlex.quote(run)} >&2',
            "    exit 6",
            "fi",
            f"if [ -e {seen} ]; then touch {reply}; fi",
        ]
    lines += [
        f"export PYTHONPATH={shlex.quote(subprocess_environment()['PYTHONPATH'])}",
        # exec: the signal before the time limit is for the driver
        f"exec {shlex.quote(sys.executable)} -P -m {DRIVER_MODULE} {shlex.quote(run)} --kind slurm",
    ]
    return "\n".join(lines) + "\n"


def _submit(options: list[str], script: str) -> str:
    command = ["sbatch", "--parsable", *options]
    try:
        done = subprocess.run(  # noqa: S603
            command, input=script, capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ClusterError(
            f"sbatch did not answer within {SUBMIT_SECONDS:.0f} s",
            hint="look at Slurm's controller with `scontrol ping`",
        ) from exc
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise ClusterError(f"sbatch refused the job: {reason}", hint="SBATCH_* variables set partition, account, time")
    # "123", "123;cluster", or without --parsable (a wrapper of the site) "Submitted batch job 123"
    found = re.search(r"^(?:Submitted batch job )?(\d+)(?:;\S*| on cluster \S+)?\s*$", done.stdout, re.MULTILINE)
    if found is None:
        raise ClusterError(f"sbatch answered {done.stdout.strip()!r}, the number of a job expected")
    return found[1]


def _is_seen(run: str, token: str, number: str) -> bool:
    """Whether the job has answered; False while it waits in the queue."""
    reply = Path(run) / f"{token}-reply"
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        state = _state(number)
        os.listdir(run)  # has a network file system look again
        if reply.exists():
            return True
        if (state in _WAITING and seconds > QUEUED_SECONDS) or seconds > STARTED_SECONDS:
            return False
        if not state and seconds > QUEUED_SECONDS:
            raise ClusterError(
                f"the Slurm job {number} ended without an answer: its node does not see {run}, or could not start it",
                hint=f"give a directory that all nodes reach; its driver.log and `scontrol show job {number}` say more",
            )
        time.sleep(POLL_SECONDS)


def _state(number: str) -> str:
    """State of a job as squeue names it; "" when it is not in the queue (any more)."""
    command = ["squeue", "--noheader", "--format=%T", f"--jobs={number}"]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=SUBMIT_SECONDS, check=False
    )
    return done.stdout.strip()


def _forget(run: str, token: str) -> None:
    for name in (token, f"{token}-reply"):
        (Path(run) / name).unlink(missing_ok=True)


def _bytes(value: int | str) -> int:
    from dask.utils import parse_bytes

    return int(parse_bytes(value))
