"""Slurm on this machine for a test: munged, slurmctld and slurmd as processes of our own, with a slurm.conf of our own.

It needs root and Debian's slurm-wlm and munge, and neither systemd, nor control groups, nor an accounting database.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.cluster.helpers import need
from tests.faults import wait_until
from tests.servers import free_port

__all__ = ["Slurm", "slurm_of_our_own"]

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


@dataclass
class Slurm:
    """A controller and one node of four processors, of which this machine may have fewer."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        foreign = ("SLURM_", "SBATCH_", "DASK_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

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
        wait_until(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%T", check=False), START_SECONDS)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, **environment: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            command, env={**self.environment, **environment}, cwd=cwd, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def submit(self, script: Path, *arguments: str, cwd: Path, options: list[str], **environment: str) -> str:
        """The number of a job."""
        return self.run("sbatch", "--parsable", *options, str(script), *arguments, cwd=cwd, **environment)

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job: ``JobState``, ``Restarts``, ``ExitCode``, ..."""
        text = self.run("scontrol", "--oneliner", "show", "job", number, check=False)
        return dict(entry.split("=", 1) for entry in text.split() if "=" in entry)

    def wait(self, number: str, seconds: float) -> dict[str, str]:
        """The job when it is over; one that is requeued is not."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
        found: dict[str, str] = {}

        def is_over() -> bool:
            found.update(self.job(number))
            return found.get("JobState") in over

        wait_until(is_over, seconds)
        return found

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.folder.glob("*.out")))

    def close(self) -> None:
        """End jobs, then daemons, then whatever was started with our configuration and is still there."""
        if len(self.processes) == 3:
            with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
                self.run("scancel", "--user=root", check=False)
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in self._ours():
            with contextlib.suppress(psutil.NoSuchProcess):
                left.send_signal(signal.SIGKILL)

    def _ours(self) -> list[psutil.Process]:
        found, own = [], os.getpid()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != own and process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return found

    def _start(self, *command: Any) -> None:
        with open(self.folder / f"{command[0]}.out", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    command, env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )


@contextmanager
def slurm_of_our_own(folder: Path) -> Iterator[Slurm]:
    """Slurm for as long as the block runs; the test is skipped, and counted, where it is not installed."""
    need("slurmctld", "slurmd", "munged", "sbatch", package="slurm-wlm munge")
    folder.mkdir(parents=True, exist_ok=True)
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.close()
