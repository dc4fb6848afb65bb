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
from dkrr.linalg.catalogue import factor_fields, gram_fields
from dkrr.linalg.operators import RidgeOperator
from dkrr.store.chunks import ChunkArray
from dkrr.tiles import TileGrid, TileMatrix


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


def test_ingest_says_what_it_made(source: Path, tmp_path: Path) -> None:
    result = run("ingest", source, tmp_path / "d.zarr", "--target", "z", "--target", 2, "--weight", "a")
    assert result.exit_code == 0, result.stderr
    made = open_dataset(tmp_path / "d.zarr")
    assert (made.num_rows, made.feature_names, made.target_names) == (30, ("b",), ("z", "y"))
    assert made.weight_name == "a"
    assert "30" in result.stdout
    assert "z, y" in result.stdout


def test_ingest_reads_as_it_is_told_and_appends(tmp_path: Path) -> None:
    path, dest = tmp_path / "x.csv", tmp_path / "d.zarr"
    path.write_text("1;2;3\n4;5;6\n")
    for more in ([], ["--append"]):
        result = run("ingest", path, dest, "--no-header", "--delimiter", ";", "--features", 0, *more)
        assert result.exit_code == 0, result.stderr
    assert open_dataset(dest).read(0, 4).tolist() == [[1.0], [4.0], [1.0], [4.0]]


def test_bad_data_ends_with_4_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n3,nan\n")
    result = run("ingest", path, tmp_path / "d.zarr")
    assert result.exit_code == 4
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "d.zarr").exists()


def test_info_of_a_data_set(dataset: Path) -> None:
    result = run("info", dataset)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"data set {dataset}\n")
    assert "3 (a, b, z)" in result.stdout
    facts = json.loads(run("info", dataset, "--json").stdout)
    assert (facts["kind"], facts["rows"]) == ("data set", 30)
    assert "verified" in run("info", dataset, "--verify").stdout


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


@pytest.fixture(params=["Gram matrix", "factor"])
def matrix(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, TileMatrix]:
    grid = TileGrid(250, 100)
    operator = RidgeOperator(grid=grid, alpha=0.5, kernel=None, rows=None)
    if request.param == "factor":
        fields = factor_fields(operator, "float64", None, "openblas", source_digest="d" * 64)
    else:
        fields = gram_fields(operator, "float64", source_digest="d" * 64)
    tiles = TileMatrix.create(str(tmp_path / "m.zarr"), grid, dtype="float64", attributes=fields)
    for i, j in grid.lower():
        tile = np.ones(grid.shape(i, j))
        if i == j:
            tile[np.triu_indices(len(tile), 1)] = np.nan  # never read
        tiles.write(i, j, tile)
    return request.param, tmp_path / "m.zarr", tiles


def test_info_finds_every_problem_of_tiles(matrix: tuple[str, Path, TileMatrix]) -> None:
    kind, path, tiles = matrix
    whole = run("info", path, "--verify")
    assert (whole.exit_code, whole.stdout.splitlines()[0]) == (0, f"{kind} {path}")
    assert "6 of 6, 100 rows each" in whole.stdout
    assert "verified" in whole.stdout
    tiles.delete(1, 0)
    (path / "c" / "1" / "1").write_bytes(b"short")
    flipped = bytearray((path / "c" / "2" / "0").read_bytes())
    flipped[-1] ^= 1
    (path / "c" / "2" / "0").write_bytes(flipped)
    infinite = np.ones(tiles.grid.shape(2, 1))
    infinite[49, 3] = np.inf
    tiles.write(2, 1, infinite)
    (path / "c" / "0" / "0.abc.partial").write_bytes(b"")
    (path / "c" / "0" / "1").write_bytes(b"")
    result = run("info", path, "--verify")
    assert result.exit_code == 4
    lines = result.stdout.splitlines()
    problems = sorted(line.removeprefix("  problem: ") for line in lines if line.startswith("  problem: "))
    assert [problem.split(" is ")[0].split(" holds ")[0] for problem in problems] == [
        "c/0/0.abc.partial",
        "c/0/1",
        "tile (1, 0)",
        "tile (1, 1)",
        "tile (2, 0)",
        "tile (2, 1)",
    ]
    assert problems[2] == "tile (1, 0) is damaged (missing)"
    assert problems[5].endswith("at row 249, column 103")
    assert "5 of 6" not in result.stdout  # one is missing, one has the wrong size
    assert "4 of 6, 100 rows each" in result.stdout


def test_info_of_something_else(tmp_path: Path) -> None:
    assert "no zarr.json" in run("info", tmp_path).stderr
    ChunkArray.create(str(tmp_path / "x.zarr"), "", shape=(2,), chunks=(2,))
    result = run("info", tmp_path / "x.zarr")
    assert result.exit_code == 4
    assert "was not written by dkrr" in result.stderr
