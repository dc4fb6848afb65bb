"""Clusters as a person starts them by hand, each process its own; jobs for them; what tests of the templates need."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dkrr.engine.machine import worker_environment
from tests.faults import Command, contents, descendants, finish, times, wait_until

CLUSTER = Path(__file__).parent.parent.parent / "cluster"


def need(*names: str, package: str) -> None:
    """Skip the test, loudly, where a Debian package is not installed."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in names if shutil.which(name, path=path) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not found: apt-get install {package}")
    if os.geteuid() != 0:
        pytest.skip("needs root")


def programs(folder: Path) -> Path:
    """A folder with commands that run this interpreter on the code under test."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in {"dkrr": "-m dkrr.cli ", "dask": "-m dask ", "python": ""}.items():
        command = folder / name
        command.write_text(
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(os.environ['PYTHONPATH'])}\n"
            f'exec {shlex.quote(sys.executable)} {module}"$@"\n'
        )
        command.chmod(0o755)
    return folder


def ended(*command: object, timeout: float = 120.0, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that came to its end."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False, **options)


def verified(folder: Path, units: list[Path], changes: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What systemd says of units in which some texts are replaced."""
    for unit in units:
        text = unit.read_text()
        for old, new in changes.items():
            text = text.replace(old, new)
        (folder / unit.name).write_text(text)
    return ended("systemd-analyze", "verify", "--man=no", *(folder / unit.name for unit in units))


def problem(document: dict[str, Any]) -> str:
    """What Kubernetes would not accept in an object, unknown fields included; "" for nothing."""
    validation = pytest.importorskip("kubernetes_validate")
    try:
        validation.validate(document, "1.31", strict=True)
    except validation.ValidationError as exc:
        return str(exc.message)
    return ""


@dataclass
class ByHandJob:
    """A job in a folder of its own; the same numbers wherever it runs, for all that could differ is said.

    With ``scheduler=""`` it names none: Dask's configuration of the place says where it runs.
    """

    folder: Path
    scheduler: str = "local"
    n: int = 1200
    tile_size: int = 100
    environment: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(
            f'[data]\npath = "generate:friedman?n={self.n}&d=5&seed=0"\nstandardize = true\n'
            "[evaluate]\nfraction = 0.1\n"
            '[model]\nkernel = "rbf"\ngamma = 0.05\nalpha = 0.01\n'
            f'[solver]\nname = "cholesky"\nprecision = "float64"\ngram = "on_the_fly"\ntile_size = {self.tile_size}\n'
            + f'[cluster]\nscheduler = "{self.scheduler}"\nworkers = 2\nmemory_limit = "1GiB"\n'
            * bool(self.scheduler)
        )

    @property
    def file(self) -> Path:
        return self.folder / "job.toml"

    def command(self) -> Command:
        return Command(["fit", str(self.file)], environment=self.environment or {})

    def fit(self) -> None:
        done = self.command().run(120.0)
        assert done.code == 0, done.err

    def start_until_tiles(self, count: int) -> subprocess.Popen[str]:
        """Start the command; it runs, and so many tiles of its factor are there."""
        process = self.command().start()
        wait_until(lambda: process.poll() is not None or len(self.tiles()) >= count, 120)
        assert process.poll() is None, finish(process)
        return process

    def tiles(self) -> dict[str, int]:
        """Times of the factor's tiles."""
        found = times(self.folder / "runs/store/factors")
        return {key: when for key, when in found.items() if "-sums" not in key}

    def fewer_than_all(self, least: int) -> dict[str, int]:
        """The tiles that an interrupted run has left: at least so many, and not all."""
        found, num_rows = self.tiles(), -(-self.n * 9 // 10 // self.tile_size)
        assert least <= len(found) < num_rows * (num_rows + 1) // 2, f"{len(found)} tiles"
        return found


def is_identical(first: ByHandJob, second: ByHandJob) -> bool:
    """Whether factor and model are the same to the last bit."""
    factors = [contents(job.folder / "runs/store/factors") for job in (first, second)]
    models = [contents(job.folder / "runs/job/model.zarr") for job in (first, second)]
    assert factors[0]
    assert models[0]
    return factors[0] == factors[1] and models[0] == models[1]


START_SECONDS = 60.0
HOST = "127.0.0.1"


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class ByHand:
    """What :func:`by_hand` gives: start, kill and end the processes of one cluster.

    ``roles`` are the folders of TLS configurations by role ("scheduler", "worker").
    """

    scheduler: subprocess.Popen[bytes]

    def __init__(self, folder: Path, roles: Path, environment: dict[str, str]) -> None:
        self.folder, self.roles, self.environment = folder, roles, environment
        self.port = free_port()
        self.address = f"tls://{HOST}:{self.port}"
        self.processes = list[subprocess.Popen[bytes]]()

    def start_scheduler(self) -> None:
        """Start the scheduler, at the same address every time, and wait until it listens."""
        self.scheduler = self._start("scheduler", "--port", str(self.port))

        def listens() -> bool:
            assert self.scheduler.poll() is None, "\n".join(path.read_text() for path in self.folder.glob("*.log"))
            connections = psutil.Process(self.scheduler.pid).net_connections()
            return any(c.status == psutil.CONN_LISTEN and c.laddr.port == self.port for c in connections)

        wait_until(listens, START_SECONDS)

    def start_workers(self) -> None:
        """Start two workers of one thread and 1 GiB with their nannies; they register a second or two later."""
        options = ["--nthreads", "1", "--memory-limit", "1GiB", "--death-timeout", "60"]
        for _ in range(2):
            self._start("worker", self.address, *options, "--local-directory", str(self.folder))

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
        environment = {**os.environ, **self.environment, "DASK_CONFIG": str(self.roles / kind)}
        options = ["--host", f"tls://{HOST}", "--no-dashboard", "--dashboard-address", "127.0.0.1:0"]
        with open(self.folder / f"{kind}-{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "dask", kind, *arguments, *options],
                cwd=self.folder,  # what lies where the tests are run must not be imported in place of PYTHONPATH
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process


@contextmanager
def by_hand(folder: Path, roles: Path, **environment: str) -> Iterator[ByHand]:
    """A scheduler and workers on the loopback interface, started with what ``dkrr doctor --env`` prints."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = ByHand(folder, roles, worker_environment() | environment)
    try:
        cluster.start_scheduler()
        cluster.start_workers()
        yield cluster
    finally:
        cluster.close()
