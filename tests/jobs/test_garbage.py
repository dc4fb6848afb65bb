"""Garbage: what nothing refers to is found, what anything refers to is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dkrr.jobs.inspection import find_garbage

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


def names(store: Path) -> set[str]:
    return {str(Path(item.location).relative_to(store)) for item in find_garbage(store)}


def leave(store: Path, *, is_old: bool = True, **documents: Any) -> set[str]:
    """Leave documents of a run beside the store; what is garbage then."""
    (store.parent / "demo").mkdir(exist_ok=True)
    for name, document in documents.items():
        text = document if isinstance(document, str) else json.dumps(document)
        (store.parent / "demo" / f"{name}.json").write_text(text)
    if is_old:
        make_old(store.parent)
    return names(store)


TILED = {f"factors/{KEYS[0]}.zarr", f"factors/{KEYS[1]}.zarr", f"grams/{KEYS[2]}.zarr"}
EVERYTHING = TILED | {f"rows/{KEYS[3]}-train.zarr"}


def test_what_an_unfinished_run_may_resume_is_kept(store: Path) -> None:
    assert leave(store, plan={"num_rows": 500, "tile_size": 64}) == set()
    assert leave(store, plan={"num_rows": 500, "tile_size": 128}) == TILED
    assert leave(store, result={}) == EVERYTHING


def test_scratch_of_a_factor_is_kept_for_who_goes_on_with_it(store: Path) -> None:
    scratch = {f"factors/{key}-sums.zarr" for key in (KEYS[0], KEYS[4])}
    for key in (KEYS[0], KEYS[4]):
        make_array(store, "factors", f"{key}-sums")
    # the factor is needed, and whole; of the other one nothing else is left
    assert leave(store, result={"kept": {f"store/factors/{key}.zarr": 100 for key in KEYS[:5]}}) == scratch
    assert {item.reason for item in find_garbage(store)} == {"scratch of a factor that no run goes on with"}
    assert leave(store, is_old=False, plan={"num_rows": 500, "tile_size": 64}) == {f"factors/{KEYS[4]}-sums.zarr"}
    (store / "factors" / f"{KEYS[4]}-sums.zarr" / "c" / "0" / "1").write_bytes(bytes(10))
    assert names(store) == set()


def test_what_iterations_leave_behind(store: Path) -> None:
    for kind, key in (("preconditioners", KEYS[0]), ("solves", KEYS[4]), ("scratch", DRAWN)):
        make_array(store, kind, key)
    kept = {f"preconditioners/{KEYS[0]}.zarr", f"solves/{KEYS[4]}.zarr"}
    found = leave(store, plan={"num_rows": 9, "tile_size": 9})
    assert f"scratch/{DRAWN}.zarr" in found
    assert not found & kept  # the run may go on with them
    assert kept <= leave(store, result={})


@pytest.mark.parametrize("state", ["starting", "running"])
@pytest.mark.parametrize("phase", ["", "prepare", "plan", "start"])  # in the last the plan came after the list
def test_what_a_run_may_find_that_is_being_planned_is_kept(store: Path, state: str, phase: str) -> None:
    assert leave(store) == EVERYTHING
    planning = {"state": state, "phase": phase}
    assert leave(store, is_old=False, status=planning) == set()
    assert leave(store, status=planning) == EVERYTHING  # its driver has said nothing for hours
    for text in (planning | {"state": "failed"}, '{"state": ["running"]}', "[1]", "no JSON", ""):  # what others call so
        assert leave(store, is_old=False, status=text) == EVERYTHING
