"""``dkrr init``: a job file that is valid, fits its data, and has a gamma that means something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.jobs.init import median_gamma
from dkrr.jobs.spec import JobSpec


def init(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["init", *map(str, arguments)])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = np.random.default_rng(0).standard_normal((50, 3)) * [1, 100, 1]
    np.savetxt(tmp_path / "train.csv", rows, delimiter=",", header="a,b,y", comments="")
    return tmp_path / "train.csv"


def test_gamma_is_one_over_the_median_squared_distance() -> None:
    rows = np.array([[0.0, 5.0], [1.0, 5.0], [3.0, 5.0]])  # the constant column adds nothing
    scale = np.var([0.0, 1.0, 3.0])
    assert median_gamma(rows) == pytest.approx(1 / (4 / scale), rel=1e-14)  # distances 1, 4, 9


def test_it_writes_a_file_and_overwrites_none(table: Path) -> None:
    job = table.parent / "job.toml"
    result = init(table, "--target", -1, "-o", job)
    assert (result.exit_code, result.stdout) == (0, "")
    assert (JobSpec.load(job).data.target, JobSpec.load(job).data.path) == ([-1], str(table))
    again = init(table, "-o", job)
    assert again.exit_code == 2
    assert f"error: {job} exists" in again.stderr
