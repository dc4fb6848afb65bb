"""What processes can do to a fit: die, stand still, come back, be told to end. The same command then finishes it.

B: the final bytes are those of an undisturbed run. E: a typed error; the same command, run once more, gives B.
Always: no tile that was valid is written again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import psutil
import pytest
from distributed import Client

from dkrr.dataset import ingest, open_dataset
from dkrr.engine.cluster import blas_of, checked_executor, local_cluster
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import ClusterError, DkrrError, WorkerLostError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg.direct import factorise
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model, load_model
from dkrr.models.prediction import predict_dataset
from dkrr.tiles import TileMatrix
from tests.faults import (
    Command,
    contents,
    descendants,
    end_commands,
    finish,
    times,
    wait_until,
)
from tests.linalg.helpers import operator, rows

pytestmark = pytest.mark.system

N, TILE, NEW = 1500, 128, 500
NUM_TILES = 78
SLOWLY = "compute.cholesky.tile:1:sleep=0.1"
"""Four seconds on two workers: time to interfere with a factorisation."""


@pytest.fixture(autouse=True)
def no_command_is_left() -> Iterator[None]:
    yield
    end_commands()


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


# --- on the workers of a client ---------------------------------------------------------------------------------------


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
            solution = result.solution.__class__(**result.solution.to_dict() | {"seconds": {}})
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


def test_all_workers_are_killed_and_come_back(rows_folder: Path, undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    fit = Fit(rows_folder, tmp_path / "fit")
    with cluster() as client:
        before = set(client.run(os.getpid).values())
        progress, happened = once_at("factorise", 30, lambda: [os.kill(pid, signal.SIGKILL) for pid in before])
        fit.run(client, progress)
        assert happened.is_set()
        assert not before & set(client.run(os.getpid).values())
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


@pytest.mark.short
def test_a_writer_that_wakes_up_after_all_is_done_writes_the_same_bytes(tmp_path: Path) -> None:
    """The tile and its temporary file are ready, only the name is missing; somebody else has finished the factor."""
    data = rows(tmp_path, n=300)
    system = operator(data)
    code = (
        "import sys\nfrom pathlib import Path\nfrom dkrr.dataset import open_dataset\n"
        "from dkrr.engine.tasks import InProcessExecutor\nfrom dkrr.linalg.direct import factorise\n"
        "from dkrr.linalg.workspace import Workspace\nfrom dkrr.tiles import TileMatrix\n"
        "from tests.linalg.helpers import operator\n"
        "system = operator(open_dataset(sys.argv[1]))\n"
        "factor = TileMatrix.create(sys.argv[2], system.grid, dtype='float64')\n"
        "factorise(system, factor, Workspace('', InProcessExecutor()))\n"
    )
    factor = TileMatrix.create(str(tmp_path / "L"), system.grid, dtype="float64")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    zombie = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "rows.zarr"), factor.location],
        env=environment | {"DKRR_FAILPOINTS": "write*/c/*:@7:sigstop"},
    )
    try:
        _, status = os.waitpid(zombie.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        factorise(system, factor, Workspace("", InProcessExecutor()))
        written, whole = times(tmp_path / "L"), contents(tmp_path / "L")
        zombie.send_signal(signal.SIGCONT)
        assert zombie.wait(30) == 0
    finally:
        zombie.kill()
        zombie.wait()
    assert contents(tmp_path / "L") == whole
    changed = {key for key, when in times(tmp_path / "L").items() if written[key] != when}
    assert len(changed) == 1  # what it was about to write; nothing else


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


# --- the command ------------------------------------------------------------------------------------------------------


class Job:
    """A job file in a folder of its own, and what it leaves."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.file, self.folder = folder / "job.toml", folder
        self.file.write_text(
            f'[data]\npath = "generate:friedman?n={N}&d=5&seed=0"\nstandardize = true\n'
            '[model]\nkernel = "rbf"\ngamma = 0.05\nalpha = 0.01\n'
            f'[solver]\ntile_size = {TILE}\n[cluster]\nworkers = 2\nmemory_limit = "1GiB"\n'
        )

    def command(self, **options: Any) -> Command:
        return Command(["fit", str(self.file)], **options)

    def tiles(self) -> dict[str, int]:
        """Times of the factor's tiles; partial sums are scratch."""
        store = self.folder / "runs/store"
        return {key: when for key, when in times(store).items() if key.startswith("factors/") and "-sums" not in key}

    def state(self) -> tuple[dict[str, bytes], list[bytes]]:
        """The factor, and the model's arrays; no lock and no scratch may be left over."""
        runs = self.folder / "runs"
        left = [str(path) for path in runs.rglob("*") if path.name.endswith((".lock", "-sums.zarr"))]
        assert left == []
        factors = contents(runs / "store/factors")
        assert len(factors) == NUM_TILES
        return factors, list(contents(runs / "job/model.zarr").values())

    def wait_for_tiles(self, count: int, process: subprocess.Popen[str]) -> None:
        wait_until(lambda: process.poll() is not None or len(self.tiles()) >= count, 60)
        assert process.poll() is None, finish(process)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every job must end with."""
    job = Job(tmp_path_factory.mktemp("expected") / "job")
    ended = job.command().run()
    assert ended.code == 0, ended.err
    return job.state()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGKILL, marks=pytest.mark.short), signal.SIGTERM, signal.SIGINT]
)
def test_a_command_that_ends_in_the_middle_is_continued(number: signal.Signals, expected: Any, tmp_path: Path) -> None:
    """Its workers end with it; the next one finds every valid tile, and one that was told to end says so."""
    job = Job(tmp_path / "job")
    process = job.command(failpoints=SLOWLY).start()
    job.wait_for_tiles(25, process)
    workers = descendants(process.pid)
    process.send_signal(number)
    ended = finish(process)
    if number != signal.SIGKILL:
        assert ended.code == 75
        assert "interrupted" in ended.err
        assert "start the same command again" in ended.err
    assert "Traceback" not in ended.err
    wait_until(lambda: gone(workers))
    written = job.tiles()
    assert 25 <= len(written) < NUM_TILES
    again = job.command().run()
    assert again.code == 0, again.err
    assert job.state() == expected
    assert written.items() <= job.tiles().items()
    assert f"{NUM_TILES - len(written)} computed" in again.out


def test_a_command_may_be_told_to_end_at_any_moment(expected: Any, tmp_path: Path) -> None:
    """Also while its rows are prepared, its workers start, its model is saved: 75, or it was faster."""
    job = Job(tmp_path / "job")
    codes = []
    for tenths in (10, 15, 20, 25):
        process = job.command().start()
        time.sleep(tenths / 10)
        process.terminate()
        ended = finish(process)
        codes.append(ended.code)
        assert "Traceback" not in ended.err, ended.err
        if ended.code == 0:
            break
    assert set(codes) <= {0, 75, -signal.SIGTERM}
    ended = job.command().run()
    assert ended.code == 0, ended.err
    assert job.state() == expected


def test_of_two_fits_at_once_the_second_is_locked_out(expected: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    first = job.command(failpoints="compute.cholesky.tile:1:sleep=5").start()
    job.wait_for_tiles(1, first)
    second = job.command().run()
    assert second.code == 8, second.err
    assert f"is driven by process {first.pid} on {socket.gethostname()}" in second.err
    other = job.folder / "other.toml"  # another run, the same store
    other.write_bytes(job.file.read_bytes())
    third = Command(["fit", str(other)]).run()
    assert third.code == 8, third.err
    assert f"is being written by process {first.pid} on {socket.gethostname()}" in third.err
    first.terminate()
    assert finish(first).code == 75
    third = job.command().run()
    assert third.code == 0, third.err
    assert job.state() == expected


def test_a_stopped_command_is_replaced_and_then_ends_with_8(expected: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    stale = {"DKRR_STALE_SECONDS": "5"}
    first = job.command(failpoints=SLOWLY, environment=stale).start()
    job.wait_for_tiles(1, first)
    first.send_signal(signal.SIGSTOP)
    second = job.command(environment=stale).run(120)
    assert second.code == 0, second.err
    written = job.state()
    assert written == expected
    first.send_signal(signal.SIGCONT)
    ended = finish(first)
    assert ended.code == 8, ended.err
    assert job.state() == written


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("enospc", f"about {NUM_TILES * (8 * TILE**2 + 4):,} bytes are still to be written"),
        ("memoryerror", f"tiles of {TILE}: set tile_size = {TILE // 2}"),
    ],
)
def test_what_does_not_suffice_ends_with_3_and_what_would(fault: str, said: str, expected: Any, tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    ended = job.command(failpoints=f"compute.cholesky.tile:1:{fault}").run()
    assert ended.code == 3, ended.err
    assert said in ended.err
    ended = job.command().run()
    assert ended.code == 0, ended.err
    assert job.state() == expected


def test_an_interrupted_prediction_publishes_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path / "job")
    assert job.command().run().code == 0
    output = tmp_path / "p.npy"
    arguments = ["predict", str(job.folder / "runs/job"), "generate:friedman?n=300&d=5&seed=1", "-o", str(output)]
    process = Command(arguments, failpoints="compute.predict.block:1:sleep=20").start()
    wait_until(
        lambda: process.poll() is not None or list(tmp_path.glob("p.npy.work/result.zarr/predictions-*/zarr.json"))
    )
    process.terminate()
    ended = finish(process)
    assert ended.code == 75, ended.err
    assert not output.exists()
    ended = Command(arguments).run()
    assert ended.code == 0, ended.err
    assert np.load(output).shape == (300, 1) or np.load(output).shape == (300,)
    assert list(tmp_path.glob("p.npy*")) == [output]
