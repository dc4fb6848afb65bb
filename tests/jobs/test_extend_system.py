"""Extending on real workers: strips on both of them, a worker killed on the way, and a command killed half-way."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import append, drop_generations, ingest
from dkrr.engine.tasks import DaskExecutor
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.jobs.inspection import verify
from dkrr.kernels import make_kernel
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import load_model
from tests.faults import Command, end_commands, kill_worker, wait_until, worker_pids
from tests.measure.jobs import tile_files

pytestmark = [pytest.mark.system, pytest.mark.timeout(280)]

RNG = np.random.default_rng(2)
X = RNG.standard_normal((1200, 5))
Y = np.sin(X[:, 0]) + X[:, 1] ** 2 + 0.1 * RNG.standard_normal(len(X))

JOB = """[data]
path = "{data}"
standardize = true
[model]
kernel = "rbf"
gamma = 0.05
alpha = 0.1
[solver]
name = "cholesky"
precision = "float64"
tile_size = 64
[cluster]
workers = 2
memory_limit = "1GiB"
[output]
directory = "{run}"
store = "{store}"
"""


def fit(
    dataset: Any, store: Path, client: Any, progress: Any = None, center: Any = None
) -> tuple[np.ndarray, Any, Any]:
    settings = FitSettings(kernel=make_kernel("rbf").resolve(5), alpha=(1e-2,), tile_size=128, center=center)
    workspace = Workspace(str(store), DaskExecutor(client, stall_seconds=60.0), progress, blas="test")
    with fit_rows(dataset, settings, workspace) as result:
        return result.dual_coef.read(0, dataset.num_rows), result, workspace


@pytest.mark.short
def test_strips_are_shared_by_the_workers(tmp_path: Path, cluster_client: Any) -> None:
    fit(append(X[:1000], tmp_path / "a.zarr", y=Y[:1000]), tmp_path / "store", cluster_client)
    made = append(X[1000:1100], tmp_path / "a.zarr", y=Y[1000:1100])
    seen: set[str] = set()

    def look() -> None:
        while not ended.wait(0.005):
            seen.update(path.name for path in (tmp_path / "store/factors").glob("*-strips.zarr/c/*"))

    ended = threading.Event()
    thread = threading.Thread(target=look)
    thread.start()
    try:
        found, result, workspace = fit(made, tmp_path / "store", cluster_client)
    finally:
        ended.set()
        thread.join()
    assert len(seen) >= 2, "the new rows were not cut into strips"
    assert result.solution.reused["factor"]["rows"] == 1000
    # 104 rows of tile row 7 were there: that row block and the next are computed
    assert workspace.phases["factorise"].num_computed == 8 + 9
    wanted = fit(made, tmp_path / "fresh", cluster_client, center=result.operator.rows.center)[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())
    assert not list((tmp_path / "store/factors").glob("*-strips*"))


def test_a_worker_dies_in_an_extension(tmp_path: Path, cluster_client: Any) -> None:
    fit(append(X[:1000], tmp_path / "a.zarr", y=Y[:1000]), tmp_path / "store", cluster_client)
    made = append(X[1000:1100], tmp_path / "a.zarr", y=Y[1000:1100])
    killed = threading.Event()

    def progress(phase: str, done: int, *_: Any) -> None:
        if phase == "factorise" and done > 45 and not killed.is_set():
            killed.set()
            kill_worker(next(iter(pids.values())))

    pids = worker_pids(cluster_client)
    found, result, _ = fit(made, tmp_path / "store", cluster_client, progress)
    assert killed.is_set()
    cluster_client.wait_for_workers(2, timeout=60)
    wanted = fit(made, tmp_path / "fresh", cluster_client, center=result.operator.rows.center)[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * np.abs(wanted).max())


@pytest.fixture
def commands() -> Iterator[None]:
    yield
    end_commands()


def test_a_command_killed_half_way_then_other_rows(tmp_path: Path, commands: None) -> None:
    """Nothing of the abandoned rows remains: predictions are those of a refit on what the data set now holds."""
    data = tmp_path / "data.zarr"
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(data="data.zarr", run="run", store="store"))
    ingest(X[:700], data, y=Y[:700])
    done = Command(["fit", str(job)]).run(120)
    assert done.code == 0, done.err
    append(X[700:800], data, y=Y[700:800])
    before = len(tile_files(tmp_path / "store"))
    # 55 tiles of ten whole row blocks get a second name, then tiles are computed
    process = Command(["fit", str(job)], failpoints="chunk.before_write:1:sleep=0.2").start()
    wait_until(lambda: len(tile_files(tmp_path / "store")) > before + 55 + 4, 120)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    drop_generations(data, [2])
    append(X[900:990], data, y=Y[900:990])
    done = Command(["fit", str(job)]).run(120)
    assert done.code == 0, done.err
    model = load_model(str(tmp_path / "run/model.zarr"))
    assert model.solution.reused["factor"]["rows"] == 700
    # the same scaling, and nothing else that is there
    shutil.copytree(tmp_path / "store/rows", tmp_path / "other/rows")
    (tmp_path / "refit.toml").write_text(JOB.format(data="data.zarr", run="refit", store="other"))
    done = Command(["fit", str(tmp_path / "refit.toml")]).run(120)
    assert done.code == 0, done.err
    again = load_model(str(tmp_path / "refit/model.zarr"))
    assert "factor" not in again.solution.reused
    assert again.scaling == model.scaling
    one, two = model.predict(X[:300].copy()), again.predict(X[:300].copy())
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-9 * np.abs(two).max())
    assert verify(str(tmp_path / "refit")) == []
