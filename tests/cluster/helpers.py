"""Jobs for clusters that are started by hand, and what two runs of one resolved job must have in common."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults import Command, chunk_files, contents, finish, times, wait_until
from tests.servers import ByHand

__all__ = ["ByHandJob", "byte_for_byte", "fit_again_on_new_servers", "is_identical"]


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
    failpoints: str = ""
    more: str = ""
    prefix: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(
            f'[data]\npath = "generate:friedman?n={self.n}&d=5&seed=0"\nstandardize = true\n'
            "[evaluate]\nfraction = 0.1\n"
            '[model]\nkernel = "rbf"\ngamma = 0.05\nalpha = 0.01\n'
            f'[solver]\nname = "cholesky"\nprecision = "float64"\ngram = "on_the_fly"\ntile_size = {self.tile_size}\n'
            + self.cluster()
        )

    def cluster(self) -> str:
        """The table ``[cluster]``, the one in which jobs of several places differ."""
        if not self.scheduler:
            return self.more
        return f'[cluster]\nscheduler = "{self.scheduler}"\nworkers = 2\nmemory_limit = "1GiB"\n{self.more}'

    @property
    def file(self) -> Path:
        return self.folder / "job.toml"

    @property
    def model(self) -> Path:
        return self.folder / "runs/job/model.zarr"

    def command(self, *arguments: str) -> Command:
        command = [*(arguments or ("fit", str(self.file)))]
        return Command(command, self.failpoints, environment=self.environment or {}, prefix=self.prefix)

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

    def forget(self) -> None:
        """Remove what the job has written."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)


def fit_again_on_new_servers(job: ByHandJob, cluster: ByHand, least: int) -> None:
    """Once nothing is left of a killed scheduler's cluster: another one, and a fit that keeps at least these tiles."""
    cluster.wait_for_the_end_of_workers()  # Dask's behaviour: nothing of them reconnects
    written = job.fewer_than_all(least)
    cluster.start_scheduler()
    cluster.start_worker()
    cluster.start_worker()
    job.fit()
    assert written.items() <= job.tiles().items()  # no valid tile was written again


def byte_for_byte(first: ByHandJob, second: ByHandJob) -> None:
    """Factor, model and predictions are the same to the last bit."""
    factors = [contents(job.folder / "runs/store/factors") for job in (first, second)]
    assert factors[0].keys() == factors[1].keys()
    assert factors[0]
    assert factors[0] == factors[1]
    models = [contents(job.model) for job in (first, second)]
    assert chunk_files(first.model)
    assert models[0] == models[1]
    assert first.predictions() == second.predictions()


def is_identical(first: ByHandJob, second: ByHandJob) -> bool:
    """Whether :func:`byte_for_byte` has nothing to say."""
    try:
        byte_for_byte(first, second)
    except AssertionError:
        return False
    return True
