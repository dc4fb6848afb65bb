"""Extending by commands: one that was killed half-way, and other rows after it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dkrr.dataset import append, drop_generations, ingest
from dkrr.jobs.inspection import verify
from dkrr.models.model import load_model
from tests.faults import Command, end_commands, wait_until
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
