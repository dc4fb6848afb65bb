"""Jobs for clusters that are started by hand, and what tests of the templates need."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import Command, contents, finish, times, wait_until
from tests.servers import import_path

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
            f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(import_path())}\n"
            f'exec {shlex.quote(sys.executable)} {module}"$@"\n'
        )
        command.chmod(0o755)
    return folder


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

    @property
    def model(self) -> Path:
        return self.folder / "runs/job/model.zarr"

    def command(self) -> Command:
        return Command(["fit", str(self.file)], environment=self.environment or {})

    def fit(self, seconds: float = 120.0) -> Any:
        ended = self.command().run(seconds)
        assert ended.code == 0, ended.err
        return ended

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

    def predictions(self) -> bytes:
        """What the model says of new rows, as the bytes of the file that `dkrr predict` writes."""
        out = self.folder / "out.npy"
        rows = "generate:friedman?n=300&d=5&seed=1"
        ended = Command(["predict", str(self.model), rows, "-o", str(out)]).run(120)
        assert ended.code == 0, ended.err
        return out.read_bytes()

    def fewer_than_all(self, least: int) -> dict[str, int]:
        """The tiles that an interrupted run has left: at least so many, and not all."""
        found, num_rows = self.tiles(), -(-self.n * 9 // 10 // self.tile_size)
        assert least <= len(found) < num_rows * (num_rows + 1) // 2, f"{len(found)} tiles"
        return found


def is_identical(first: ByHandJob, second: ByHandJob) -> bool:
    """Whether factor, model and predictions are the same to the last bit."""
    factors = [contents(job.folder / "runs/store/factors") for job in (first, second)]
    models = [contents(job.model) for job in (first, second)]
    assert factors[0]
    assert models[0]
    return factors[0] == factors[1] and models[0] == models[1] and first.predictions() == second.predictions()
