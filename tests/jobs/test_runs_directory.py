"""A run's directory: documents that appear whole, names that find it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dkrr.errors import LockedError, StoreError
from dkrr.jobs.runs.directory import RunDirectory, runs_folder
from dkrr.jobs.runs.facts import find_run, list_runs
from dkrr.store.interruption import fenced


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs below ./runs, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DKRR_RUNS", raising=False)
    for name in ("digits", "large"):
        RunDirectory(f"runs/{name}").write("status.json", {"state": "running"})
    (tmp_path / "runs/store").mkdir()
    return tmp_path / "runs"


def test_documents_and_bytes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs/a/")
    assert (run.name, run.location, run.exists()) == ("a", str(tmp_path / "runs/a"), False)
    assert run.read("plan.json") is None
    assert run.read_bytes("job.toml") is None
    run.write("job.json", {"x": 1})
    run.write_bytes("events/000000.jsonl", b"{}\n")
    assert run.exists()
    assert (run.read("job.json"), run.read_bytes("events/000000.jsonl")) == ({"x": 1}, b"{}\n")
    assert run.has("events/000000.jsonl")
    run.remove("job.json")
    run.remove("job.json")
    assert not run.has("job.json")
    assert sorted(os.listdir(tmp_path / "runs/a")) == ["events"]
    run.remove_all()
    assert not (tmp_path / "runs/a").exists()


def test_a_document_that_is_no_object_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("[1]")
    with pytest.raises(StoreError, match=r"status\.json of .* is not an object"):
        RunDirectory(tmp_path).read("status.json")


def test_creating_succeeds_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        created = list(threads.map(lambda number: run.create("drivers/000001.json", b"%d" % number), range(32)))
    assert created.count(True) == 1
    assert run.read_bytes("drivers/000001.json") == b"%d" % created.index(True)
    assert os.listdir(tmp_path / "drivers") == ["000001.json"]  # no drafts


def test_creating_and_removing_are_fenced(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write("cancel.json", {})

    def refuse() -> None:
        raise LockedError("taken over")

    with fenced(refuse):
        for write in (lambda: run.create("a", b""), lambda: run.remove("cancel.json"), run.remove_all):
            with pytest.raises(LockedError):
                write()
    assert os.listdir(tmp_path) == ["cancel.json"]


def test_a_run_is_found_by_name_path_and_folder(runs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in ("digits", "runs/digits", str(runs / "digits")):
        assert find_run(text).location == str(runs / "digits")
    assert find_run("digits").shown == "digits"
    assert [run.name for run in list_runs()] == ["digits", "large"]
    monkeypatch.setenv("DKRR_RUNS", str(tmp_path / "elsewhere"))
    assert runs_folder() == str(tmp_path / "elsewhere")
    assert list_runs() == []
    assert find_run("runs/digits").shown == str(runs / "digits")
    RunDirectory(tmp_path / "elsewhere/far").write("job.json", {})
    assert find_run("far").location == str(tmp_path / "elsewhere/far")
    assert [run.name for run in list_runs(str(runs))] == ["digits", "large"]


def test_a_run_that_does_not_exist_names_the_nearest(runs: Path) -> None:
    with pytest.raises(StoreError, match=r"no run 'digit' in .*/runs: did you mean 'digits'\?"):
        find_run("digit")
    with pytest.raises(StoreError, match="`dkrr list` shows what there is; DKRR_RUNS names the folder"):
        find_run("qqq")
    with pytest.raises(StoreError, match="no run 'store' in"):
        find_run(str(runs / "store"))
