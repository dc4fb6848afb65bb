"""``cluster/slurm/dkrr.sbatch`` under Slurm itself: stopped by its time limit, requeued, finished to the same bytes.

Slurm runs on this machine for the test: munged, slurmctld and slurmd as processes of our own, with a slurm.conf of our
own. It needs root and Debian's slurm-wlm and munge, and neither systemd, nor control groups, nor an accounting
database.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.helpers import CLUSTER, ByHandJob, free_port, is_identical, need, programs
from tests.faults import wait_until

SCRIPT = CLUSTER / "slurm/dkrr.sbatch"
START_SECONDS = 60.0
# Slurm lets a requeued job wait until the credentials of its first start have expired: 120 s, also where less than 5 is
# asked for
CREDENTIAL_SECONDS = 5

CONFIGURATION = """\
ClusterName=dkrr
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=16000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A controller and one node of four processors, of which this machine may have fewer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[subprocess.Popen[bytes]]()
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        foreign = ("SLURM_", "SBATCH_", "DASK_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**kept, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until the node is idle."""
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "plugstack.conf").touch()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=self.folder,
                host=socket.gethostname().partition(".")[0],
                controller_port=free_port(),
                node_port=free_port(),
                credential_seconds=CREDENTIAL_SECONDS,
            )
        )
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", f"--log-file={self.folder / 'munge.log'}", *options)
        wait_until((self.folder / "munge.socket").exists, START_SECONDS)
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D")
        wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T"), START_SECONDS)

    def _start(self, *command: Any) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as log:
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.processes.append(subprocess.Popen(command, env=self.environment, cwd=self.folder, **streams))

    def run(self, *command: str, cwd: Path | None = None, **environment: str) -> str:
        """The output of one of Slurm's commands."""
        variables = {**self.environment, **environment}
        done = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job: ``JobState``, ``Restarts``, ``ExitCode``, ..."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(entry.split("=", 1) for entry in text.split() if "=" in entry)

    def close(self) -> None:
        """End jobs, then daemons, then whatever was started with our configuration and is still there."""
        with contextlib.suppress(subprocess.TimeoutExpired, FileNotFoundError):
            self.run("scancel", "--user=root")
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        for left in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if left.pid != os.getpid() and left.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    left.send_signal(signal.SIGKILL)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    need("slurmctld", "slurmd", "munged", "sbatch", package="slurm-wlm munge")
    found = Slurm(tmp_path / "slurm")
    try:
        found.start()
        yield found
    finally:
        found.close()


OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


@pytest.mark.system
@pytest.mark.short
@pytest.mark.timeout(300)
def test_told_to_stop_it_is_requeued_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = ByHandJob(tmp_path / "job", "", n=700)
    command = ["sbatch", "--parsable", "--mem-per-cpu=1100M", str(SCRIPT), job.file.name]
    options = {"DKRR_BIN": str(programs(tmp_path / "bin")), "DKRR_MEMORY": "1GiB"}
    slowly = "compute.cholesky.tile:1:sleep=0.1"
    number = slurm.run(*command, cwd=job.folder, DKRR_FAILPOINTS=slowly, **options)
    log = job.folder / f"dkrr-{number}.log"
    wait_until(lambda: len(job.tiles()) >= 5 or slurm.job(number).get("JobState") in OVER, 120)
    slurm.run("scancel", "--signal=USR1", "--batch", number)  # as Slurm does before the time limit
    wait_until(lambda: "driver ended with status 75" in log.read_text(), 60)
    written = job.fewer_than_all(5)
    wait_until(lambda: slurm.job(number).get("JobState") in OVER, 120)
    said, ended = log.read_text(), slurm.job(number)
    assert (ended["JobState"], ended["Restarts"], ended["ExitCode"]) == ("COMPLETED", "1", "0:0"), said
    assert written.items() <= job.tiles().items()  # no valid tile was written again
    assert re.findall(r"start \d|status \d+", said) == ["start 0", "status 75", "start 1", "status 0"]
    # a scheduler file for each start, and none is left; everything was on TLS
    starts, left = [f"{number}-{start}" for start in (0, 1)], {path.name for path in (job.folder / ".dkrr").iterdir()}
    logs = {f"{kind}-{start}{end}.log" for start in starts for kind, end in (("scheduler", ""), ("worker", "-1"))}
    assert left >= {*logs, "tls"}
    assert not [name for name in left if name.endswith(".json")]
    heard = (job.folder / f".dkrr/scheduler-{number}-1.log").read_text()
    assert "tls://" in heard
    assert "tcp://" not in heard
    local = ByHandJob(tmp_path / "local", n=700)
    local.fit()
    assert is_identical(local, job)


NO_FILE = "one job file that exists expected"
ELSEWHERE = "job.toml names a [cluster] scheduler"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], NO_FILE), (["missing.toml"], NO_FILE), (["a", "b"], NO_FILE), (["job/job.toml"], ELSEWHERE)],
)
def test_without_a_job_file_that_it_can_use_it_says_so(tmp_path: Path, arguments: list[str], said: str) -> None:
    ByHandJob(tmp_path / "job", "tcp://127.0.0.1:8786")
    command = [str(SCRIPT), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, said in done.stdout) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["job"]
