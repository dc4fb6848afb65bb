"""A run whose directory was moved: everything that looks at it says where things are now, and it goes on there."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import dkrr
from dkrr.jobs.run import drive
from tests.contract.helpers import run

JOB = """
[data]
path = "t.csv"
target = ["y"]
[model]
kernel = "rbf"
gamma = 0.5
alpha = 0.1
[solver]
tile_size = 64
[cluster]
workers = 1
[output]
directory = "runs/t"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, job and its finished run; to be moved away, or copied."""
    folder = tmp_path_factory.mktemp("made") / "first"
    folder.mkdir()
    rows = np.random.default_rng(0).random((150, 3))
    np.savetxt(folder / "t.csv", rows, delimiter=",", header="a,b,y", comments="")
    (folder / "job.toml").write_text(JOB)
    run("fit", folder / "job.toml")
    shutil.move(folder, folder.parent / "kept")
    return folder.parent / "kept"


def said(*arguments: object) -> str:
    return run(*arguments).output


def test_what_is_shown_of_a_moved_folder_are_its_present_paths(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = finished.parent / "first", tmp_path / "second"
    shutil.copytree(finished, new)
    monkeypatch.chdir(new)
    folder = new / "runs" / "t"
    model = str(folder / "model.zarr")
    assert model in said("status", "t")
    assert model in said("status", "t", "--json")
    assert model in said("resume", "t")
    assert str(folder / "report.html") in said("resume", "t")
    information = said("info", folder, "--verify")
    assert model in information
    assert str(new / "t.csv") in information
    assert str(new / "runs" / "store" / "factors") in information
    said("report", "t")
    for output in (said("list"), said("list", "--json"), information, (folder / "report.html").read_text()):
        assert str(old) not in output
    assert str(old) not in repr(dkrr.load_model(model))
    assert str(old) not in said("info", model)


def test_a_job_goes_on_in_the_moved_folder(finished: Path, tmp_path: Path) -> None:
    new = tmp_path / "second"
    shutil.copytree(finished, new)
    output = said("fit", new / "job.toml")
    assert "3 of 64 x 64" not in output
    assert "0 computed" in output  # tiles of the factor are found where they are now
    assert str(new / "runs" / "t" / "model.zarr") in output
    assert str(finished.parent / "first") not in output
    assert not (finished.parent / "first").exists()


def test_a_run_that_was_moved_alone_uses_the_store_that_stayed(finished: Path, tmp_path: Path) -> None:
    folder, new = finished.parent / "first", tmp_path / "elsewhere" / "t"
    shutil.copytree(finished, folder)
    try:
        new.parent.mkdir()
        shutil.move(folder / "runs" / "t", new)
        for name in ("result.json", "status.json"):
            (new / name).unlink()
        shutil.rmtree(new / "model.zarr")
        assert drive(str(new)) == 0
        assert sorted(path.name for path in folder.joinpath("runs").iterdir()) == ["store"]
        assert sorted(path.name for path in new.parent.iterdir()) == ["t"]  # no second store
        assert str(new / "model.zarr") in said("status", new)
        assert str(folder / "runs" / "store") in said("info", new)
        assert dkrr.load_model(new / "model.zarr").num_rows == 150
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("named", ["relative", "absolute"])
@pytest.mark.parametrize("way", ["fit", "resume"])
def test_a_copied_folder_has_its_own_files_while_the_first_is_there(
    way: str, named: str, finished: Path, tmp_path: Path
) -> None:
    first, second = finished.parent / "first", tmp_path / "second"
    shutil.copytree(finished, first)
    try:
        if named == "absolute":
            for path in (first / "job.toml", first / "runs/t/job.toml"):
                path.write_text(path.read_text().replace('"t.csv"', f'"{first / "t.csv"}"'))
        shutil.copytree(first, second)
        before = {path: path.stat().st_mtime_ns for path in first.rglob("*") if path.is_file()}
        lines = (second / "t.csv").read_text().splitlines()
        (second / "t.csv").write_text("\n".join(lines[:101]) + "\n")
        if way == "fit":
            said("fit", second / "job.toml")
        else:
            for name in ("result.json", "status.json"):
                (second / "runs/t" / name).unlink()
            shutil.rmtree(second / "runs/t/model.zarr")
            assert drive(str(second / "runs/t")) == 0
        of = first if named == "absolute" else second  # the path in job.toml says which file is meant
        assert dkrr.load_model(second / "runs/t/model.zarr").num_rows == (150 if of == first else 100)
        assert str(of / "t.csv") in said("info", second / "runs/t")
        assert {path: path.stat().st_mtime_ns for path in before} == before
    finally:
        shutil.rmtree(first)
