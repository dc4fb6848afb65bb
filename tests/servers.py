"""A scheduler and workers as a person starts them by hand, each a process of its own; all of them end with the test."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.faults import descendants, wait_until

__all__ = ["ByHand", "by_hand", "doctor_environment", "free_port", "import_path", "listening_ports"]

START_SECONDS = 60.0
HOST = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listening_ports(pid: int) -> set[int]:
    """TCP ports that a process listens on, whatever network namespace it is in (psutil looks into our own)."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(descriptor))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [line for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets]
    return {int(line[1].rpartition(":")[2], 16) for line in listening}


def import_path() -> str:
    """What a child process needs as PYTHONPATH to import what this one can."""
    return os.pathsep.join(filter(None, sys.path))


def doctor_environment() -> dict[str, str]:
    """The variables that ``dkrr doctor --env`` prints."""
    command = [sys.executable, "-m", "dkrr.cli", "doctor", "--env"]
    environment = {**os.environ, "PYTHONPATH": import_path()}
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    pairs = (shlex.split(line)[1].partition("=") for line in lines.splitlines())
    return {name: value for name, _, value in pairs}


@dataclass
class ByHand:
    """What :func:`by_hand` gives: start, kill and end the processes of one cluster.

    ``roles`` are the folders of TLS configurations by role ("scheduler", "worker"); None means plain tcp. ``host`` is
    the address of the scheduler, and ``prefix`` what stands before its command.
    """

    folder: Path
    environment: dict[str, str]
    roles: Path | None = None
    port: int = field(default_factory=free_port)
    host: str = HOST
    prefix: Sequence[str] = ()
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    scheduler: subprocess.Popen[bytes] | None = None
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{'tcp' if self.roles is None else 'tls'}://{self.host}:{self.port}"

    def start_scheduler(self) -> None:
        """Start the scheduler, at the same address every time, and wait until it listens."""
        host = self._host(self.host)
        self.scheduler = self._start("scheduler", "--host", host, "--port", str(self.port), prefix=self.prefix)
        wait_until(lambda: self._listens(self.scheduler), START_SECONDS)

    def start_worker(
        self,
        *arguments: str,
        threads: int = 1,
        memory: str = "1GiB",
        host: str = HOST,
        prefix: Sequence[str] = (),
        **environment: str,
    ) -> None:
        """Start one worker with its nanny; it registers a second or two later."""
        self.workers.append(
            self._start(
                "worker", self.address, "--host", self._host(host), "--nthreads", str(threads),
                "--memory-limit", memory, "--death-timeout", "60", "--local-directory", str(self.folder), *arguments,
                prefix=prefix, **environment,
            )
        )  # fmt: skip

    def kill_scheduler(self) -> None:
        """SIGKILL."""
        assert self.scheduler is not None
        self.scheduler.kill()
        self.scheduler.wait()

    def wait_for_the_end_of_workers(self, seconds: float = 60.0) -> None:
        """Workers that lose their scheduler close, and so do their nannies."""
        wait_until(lambda: all(worker.poll() is not None for worker in self.workers), seconds)
        self.workers.clear()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def close(self) -> None:
        """End everything: politely, then by force."""
        children = [child for process in self.processes for child in descendants(process.pid)]
        for process in reversed(self.processes):  # the scheduler last: workers would try to reach it
            process.terminate()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def _host(self, host: str) -> str:
        return host if self.roles is None else f"tls://{host}"

    def _listens(self, process: Any) -> bool:
        assert process.poll() is None, self.logs()
        return self.port in listening_ports(process.pid)

    def _start(
        self, kind: str, *arguments: str, prefix: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        variables = {**os.environ, **self.environment, "PYTHONPATH": import_path(), **environment}
        if self.roles is not None:
            variables["DASK_CONFIG"] = str(self.roles / kind)
        command = [
            *prefix,
            sys.executable,
            "-m",
            "dask",
            kind,
            *arguments,
            "--no-dashboard",
            "--dashboard-address",
            "127.0.0.1:0",
        ]
        with open(self.folder / f"{kind}-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,  # what lies where the tests are run must not be imported in place of PYTHONPATH
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process


@contextmanager
def by_hand(folder: Path, *, workers: int = 2, roles: Path | None = None, **environment: str) -> Iterator[ByHand]:
    """A scheduler and workers on the loopback interface, started with what ``dkrr doctor --env`` prints."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = ByHand(folder, {**doctor_environment(), **environment}, roles)
    try:
        cluster.start_scheduler()
        for _ in range(workers):
            cluster.start_worker()
        yield cluster
    finally:
        cluster.close()
