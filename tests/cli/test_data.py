"""``dkrr init``, ``ingest`` and ``info``, as people use them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.dataset import open_dataset
from dkrr.jobs.spec import JobSpec


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).standard_normal((30, 4))
    values[:, 0] = abs(values[:, 0])  # also a weight
    lines = ["a,b,y,z", *(",".join(map(str, row)) for row in values)]
    path = tmp_path / "train.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def dataset(source: Path, tmp_path: Path) -> Path:
    assert run("ingest", source, tmp_path / "data.zarr", "--target", "y").exit_code == 0
    return tmp_path / "data.zarr"


def test_init_writes_a_job_file_and_overwrites_none(source: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    job = tmp_path / "jobs" / "job.toml"
    job.write_text(run("init", source, "--target", "y").stdout)
    assert JobSpec.load(job).data.target == ["y"]
    job.unlink()
    result = run("init", source, "--target", -1, "-o", job)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert JobSpec.load(job).data.target == [-1]
    assert JobSpec.load(job).data.path == str(source)
    again = run("init", source, "-o", job)
    assert again.exit_code == 2
    assert f"error: {job} exists" in again.stderr


def test_ingest_reads_as_it_is_told_and_appends(tmp_path: Path) -> None:
    path, dest = tmp_path / "x.csv", tmp_path / "d.zarr"
    path.write_text("1;2;3\n4;5;6\n")
    for more in ([], ["--append"]):
        result = run("ingest", path, dest, "--no-header", "--delimiter", ";", "--features", 0, *more)
        assert result.exit_code == 0, result.stderr
    assert open_dataset(dest).read(0, 4).tolist() == [[1.0], [4.0], [1.0], [4.0]]


def test_info_finds_a_damaged_data_set(dataset: Path) -> None:
    chunk = dataset / "X" / "c" / "0" / "0"
    content = bytearray(chunk.read_bytes())
    content[5] ^= 1
    chunk.write_bytes(content)
    assert run("info", dataset).exit_code == 0
    result = run("info", dataset, "--verify")
    assert result.exit_code == 4
    assert "problem: chunk (0, 0)" in result.stdout
    assert "has 1 problem\nhint: " in result.stderr
    assert json.loads(run("info", dataset, "--verify", "--json").stdout)["problems"]
