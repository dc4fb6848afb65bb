"""What workers can do to a fit: die, stand still, come back. The same fit then finishes.

B: the final bytes are those of an undisturbed run. E: a typed error; the same fit, run once more, gives B.
Always: no tile that was valid is written again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from distributed import Client

from dkrr.dataset import ingest, open_dataset
from dkrr.engine.cluster import blas_of, checked_executor, local_cluster
from dkrr.errors import ClusterError, DkrrError, WorkerLostError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset
from tests.faults import contents, times
from tests.linalg.helpers import operator, rows

pytestmark = pytest.mark.system

N, TILE, NEW = 1500, 128, 500
NUM_TILES = 78


class Fit:
    """A fit with a stored Gram matrix, and a prediction, on a client's workers; the rows are written once."""

    def __init__(self, rows_folder: Path, folder: Path) -> None:
        self.rows, self.store, self.folder = rows_folder, folder / "store", folder
        self.model = folder / "model.zarr"

    def run(self, client: Any, progress: Any = None) -> None:
        train = open_dataset(str(self.rows / "rows.zarr"))
        kernel = operator(train).kernel
        executor = checked_executor(client)
        executor.stall_seconds = 60.0
        settings = FitSettings(kernel=kernel, alpha=(1e-2,), tile_size=TILE, gram="stored")
        work = Workspace(store=str(self.store), executor=executor, progress=progress, blas=blas_of(executor))
        with fit_rows(train, settings, work) as result:
            assert result.operator.rows is not None
            center = np.asarray(result.operator.rows.center)
            solution = result.solution.__class__(**result.solution.to_dict() | {"seconds": {}, "reused": {}})
            model = Model(
                kernel=kernel, x_fit=train.X, dual_coef=result.dual_coef, solution=solution, center=center
            )  # fmt: skip
            model.save(str(self.model), overwrite=True)
        new = open_dataset(str(self.rows / "new.zarr"))
        predict_dataset(load_model(str(self.model)), new, str(self.folder / "p.zarr"), executor)

    def state(self) -> dict[str, bytes]:
        """Every tile, the model, the predictions. A zombie may have left a partial sum beside the factor."""
        found = contents(self.folder)
        assert len([key for key in found if "/factors/" in key and "-sums" not in key]) == NUM_TILES
        return {key: value for key, value in found.items() if "-sums.zarr" not in key}

    @property
    def factor(self) -> Path:
        (found,) = [path for path in (self.store / "factors").glob("*.zarr") if "-sums" not in path.name]
        return found


@pytest.fixture(scope="module")
def rows_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    rows(folder, n=N, d=4, t=2)
    ingest(np.random.default_rng(5).standard_normal((NEW, 4)), folder / "new.zarr")
    return folder


@contextmanager
def cluster(failpoints: str = "", once: Path | None = None, workers: int = 2) -> Iterator[Any]:
    """A client of workers with failpoints; this process has none."""
    variables = {"DKRR_FAILPOINTS": failpoints, "DKRR_FAILPOINTS_ONCE": str(once or "")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with (
            local_cluster(workers=workers, memory_limit="1GiB") as processes,
            Client(processes, set_as_default=False) as client,
        ):
            client.wait_for_workers(workers, timeout=60)
            yield client


@pytest.fixture(scope="module")
def undisturbed(rows_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    fit = Fit(rows_folder, tmp_path_factory.mktemp("undisturbed"))
    with cluster() as client:
        fit.run(client)
    return fit.state()


def once_at(phase: str, done: int, action: Callable[[], Any]) -> tuple[Callable[..., None], threading.Event]:
    """A progress callback that calls ``action`` once, when ``done`` tasks of ``phase`` have finished; and whether."""
    happened = threading.Event()

    def progress(name: str, finished: int, total: int, *_: float) -> None:
        if (name, finished) == (phase, done) and not happened.is_set():
            happened.set()
            action()

    return progress, happened


@pytest.mark.short
def test_a_worker_is_killed_in_every_phase(rows_folder: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """SIGKILL between two writes, before the temporary file takes its name, and while a block is predicted."""
    sites = ["compute.gram.tile", "write*/c/*", "compute.cholesky.tile", "compute.solve.block"]
    fit, once = Fit(rows_folder, tmp_path / "fit"), tmp_path / "once"
    with cluster(";".join(f"{site}:@9:sigkill" for site in sites) + ";compute.predict.*:1:sigkill", once) as client:
        fit.run(client)
    # a worker comes by the ninth block of a solve only where it has had most of them
    assert {path.name for path in once.iterdir()} >= {"0", "1", "2", "4"}
    assert fit.state() == undisturbed


def test_a_worker_that_stands_still_is_replaced(
    rows_folder: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Stopped right before it writes a tile; the scheduler gives it up and its nanny starts another one."""
    fit, once = Fit(rows_folder, tmp_path / "fit"), tmp_path / "once"
    with (
        dask.config.set({"distributed.scheduler.worker-ttl": "2s"}),
        cluster("compute.cholesky.tile:@10:sigstop", once) as client,
    ):
        fit.run(client)
        assert list(once.iterdir())
    assert fit.state() == undisturbed


def test_restarting_the_client_in_the_middle_ends_with_a_type(
    rows_folder: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    fit = Fit(rows_folder, tmp_path / "fit")
    with cluster() as client:
        progress, happened = once_at("factorise", 40, lambda: client.restart(timeout=30))
        with pytest.raises(ClusterError, match="start the same job again"):
            fit.run(client, progress)
        assert happened.is_set()
        written = times(fit.factor)
        fit.run(client)
        assert fit.state() == undisturbed
        assert written.items() <= times(fit.factor).items()


def test_a_task_that_kills_every_worker_is_given_up(
    rows_folder: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """As a task does whose memory is too small."""
    fit = Fit(rows_folder, tmp_path / "fit")
    with cluster("compute.cholesky.tile:1:sigkill") as client, pytest.raises(WorkerLostError) as caught:
        fit.run(client)
    assert caught.value.key == (0, 0)
    assert "lower tile_size or raise memory_limit" in caught.value.hint
    assert caught.value.exit_code == 6
    with cluster() as client:
        fit.run(client)
    assert fit.state() == undisturbed


@pytest.mark.parametrize("seed", [1, 2])
def test_faults_at_random(seed: int, rows_folder: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Whatever happens ends in B or in a typed error, and a few more attempts end in B."""
    fit = Fit(rows_folder, tmp_path / "fit")
    rules = "*/c/*:0.002:eio;write*/c/*:0.005:enospc;compute.cholesky.*:0.005:memoryerror;*/c/*:0.0005:sigkill"
    ends = []
    for number in range(20):
        with cluster(f"seed={100 * seed + number};{rules}") as client:
            try:
                fit.run(client)
            except DkrrError as exc:
                ends.append(repr(exc))
            else:
                break
    else:
        pytest.fail(f"seed {seed}: {ends}")
    assert fit.state() == undisturbed, (seed, ends)
