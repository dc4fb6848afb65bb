"""Garbage: what nothing refers to is found, what anything refers to is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dkrr.jobs.garbage import find_garbage

KEYS = [character * 40 for character in "abcdef"]
DRAWN = "0f" * 16


def make_array(store: Path, kind: str, key: str, size: int = 100) -> Path:
    array = store / kind / f"{key}.zarr"
    (array / "c" / "0").mkdir(parents=True)
    document = {
        "shape": [500, 500],
        "chunk_grid": {"configuration": {"chunk_shape": [64, 64]}},
        "attributes": {"rows_digest": KEYS[5]},
    }
    (array / "zarr.json").write_text(json.dumps(document))
    (array / "c" / "0" / "0").write_bytes(bytes(size))
    return array


def make_old(root: Path) -> None:
    hour_ago = time.time() - 7200
    for parent, folders, names in os.walk(root):
        for name in [*folders, *names]:
            os.utime(Path(parent) / name, (hour_ago, hour_ago))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "runs" / "store"
    make_array(store, "factors", KEYS[0])
    make_array(store, "factors", KEYS[1], size=5000)
    make_array(store, "grams", KEYS[2])
    make_array(store, "rows", f"{KEYS[3]}-train")
    return store


def names(store: Path, runs: tuple[Path, ...] = ()) -> set[str]:
    return {Path(item.location).name for item in find_garbage(store, runs)}


def test_what_an_unfinished_run_may_resume_is_kept(store: Path) -> None:
    run = store.parent / "demo"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps({"num_rows": 500, "tile_size": 64}))
    make_old(store.parent)
    assert names(store) == set()
    (run / "plan.json").write_text(json.dumps({"num_rows": 500, "tile_size": 128}))
    make_old(store.parent)
    assert names(store) == {f"{key}.zarr" for key in KEYS[:3]}
    (run / "result.json").write_text("{}")
    make_old(store.parent)
    assert names(store) == {f"{key}.zarr" for key in KEYS[:3]} | {f"{KEYS[3]}-train.zarr"}


def test_scratch_of_a_factor_is_kept_for_who_goes_on_with_it(store: Path) -> None:
    for key in (KEYS[0], KEYS[4]):
        make_array(store, "factors", f"{key}-sums")
    run = store.parent / "demo"
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"kept": {f"store/factors/{key}.zarr": 100 for key in KEYS[:5]}}))
    make_old(store.parent)
    # the factor is needed, and whole; of the other one nothing else is left
    assert names(store) == {f"{key}-sums.zarr" for key in (KEYS[0], KEYS[4])}
    assert {item.reason for item in find_garbage(store)} == {"scratch of a factor that no run goes on with"}
    (run / "plan.json").write_text(json.dumps({"num_rows": 500, "tile_size": 64}))
    assert names(store) == {f"{KEYS[4]}-sums.zarr"}
    (store / "factors" / f"{KEYS[4]}-sums.zarr" / "c" / "0" / "1").write_bytes(bytes(10))
    assert names(store) == set()


def test_what_iterations_leave_behind(store: Path) -> None:
    make_array(store, "preconditioners", KEYS[0])
    make_array(store, "solves", KEYS[4])
    make_array(store, "scratch", DRAWN)
    run = store.parent / "demo"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps({"num_rows": 9, "tile_size": 9}))
    make_old(store.parent)
    found = {str(Path(item.location).relative_to(store)) for item in find_garbage(store)}
    kept = {f"preconditioners/{KEYS[0]}.zarr", f"solves/{KEYS[4]}.zarr"}
    assert f"scratch/{DRAWN}.zarr" in found
    assert not found & kept  # the run may go on with them
    (run / "result.json").write_text("{}")
    make_old(store.parent)
    assert kept <= {str(Path(item.location).relative_to(store)) for item in find_garbage(store)}


@pytest.mark.parametrize("phase", ["", "prepare", "plan", "start"])  # in the last the plan came after the list
def test_what_a_run_may_find_that_is_being_planned_is_kept(store: Path, phase: str) -> None:
    make_old(store.parent)
    everything = names(store)
    assert len(everything) == 4
    run = store.parent / "demo"
    run.mkdir()
    (run / "status.json").write_text(json.dumps({"state": "running", "phase": phase}))
    assert names(store) == set()
    (run / "status.json").write_text(json.dumps({"state": "failed", "phase": phase}))
    assert names(store) == everything
    (run / "status.json").write_text(json.dumps({"state": "running", "phase": phase}))
    make_old(store.parent)  # its driver has said nothing for hours
    assert names(store) == everything
    for text in ('{"state": ["running"]}', "[1]", "no JSON", ""):  # what others call so
        (run / "status.json").write_text(text)
        assert names(store) == everything
