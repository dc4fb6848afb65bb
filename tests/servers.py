"""A scheduler and workers as a person starts them by hand, each a process of its own; all of them end with the test."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults import descendants, wait_until

START_SECONDS = 60.0
HOST = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


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

    ``roles`` are the folders of TLS configurations by role ("scheduler", "worker"); None means plain tcp.
    """

    folder: Path
    environment: dict[str, str]
    roles: Path | None = None
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    scheduler: subprocess.Popen[bytes] | None = None
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{'tcp' if self.roles is None else 'tls'}://{HOST}:{self.port}"

    def start_scheduler(self) -> None:
        """Start the scheduler, at the same address every time, and wait until it listens."""
        self.scheduler = scheduler = self._start("scheduler", "--port", str(self.port))

        def listens() -> bool:
            assert scheduler.poll() is None, self.logs()
            connections = psutil.Process(scheduler.pid).net_connections()
            return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in connections)

        wait_until(listens, START_SECONDS)

    def start_worker(self) -> None:
        """Start one worker of one thread and 1 GiB with its nanny; it registers a second or two later."""
        options = ["--nthreads", "1", "--memory-limit", "1GiB", "--death-timeout", "60"]
        self.workers.append(self._start("worker", self.address, *options, "--local-directory", str(self.folder)))

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
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def _start(self, kind: str, *arguments: str) -> subprocess.Popen[bytes]:
        variables = {**os.environ, **self.environment, "PYTHONPATH": import_path()}
        if self.roles is not None:
            variables["DASK_CONFIG"] = str(self.roles / kind)
        host = HOST if self.roles is None else f"tls://{HOST}"
        options = [*arguments, "--host", host, "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
        with open(self.folder / f"{kind}-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", kind, *options],
                cwd=self.folder,  # what lies where the tests are run must not be imported in place of PYTHONPATH
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process


@contextmanager
def by_hand(folder: Path, *, roles: Path | None = None, **environment: str) -> Iterator[ByHand]:
    """A scheduler and workers on the loopback interface, started with what ``dkrr doctor --env`` prints."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = ByHand(folder, {**doctor_environment(), **environment}, roles)
    try:
        cluster.start_scheduler()
        for _ in range(2):
            cluster.start_worker()
        yield cluster
    finally:
        cluster.close()
