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
    for path in [store.parent, *store.parent.rglob("*")] if is_old else []:
        os.utime(path, (time.time() - 7200,) * 2)
    return names(store)


TILED = {f"factors/{KEYS[0]}.zarr", f"factors/{KEYS[1]}.zarr", f"grams/{KEYS[2]}.zarr"}
EVERYTHING = TILED | {f"rows/{KEYS[3]}-train.zarr"}


PLANNING = [
    {"state": state, "phase": phase}
    for state in ("starting", "running")
    for phase in ("", "prepare", "plan", "start")  # in the last the plan came after the list
]
LEFT: list[tuple[dict[str, Any], bool, set[str]]] = [
    ({}, True, EVERYTHING),
    ({"plan": {"num_rows": 500, "tile_size": 64}}, True, set()),
    ({"plan": {"num_rows": 500, "tile_size": 128}}, True, TILED),
    ({"plan": {"num_rows": 500, "tile_size": 64}, "result": {}}, True, EVERYTHING),
    *(({"status": status}, False, set()) for status in PLANNING),
    *(({"status": status}, True, EVERYTHING) for status in PLANNING),  # its driver has said nothing for hours
    *(({"status": status | {"state": "failed"}}, False, EVERYTHING) for status in PLANNING),
    # what others call so
    *(({"status": text}, False, EVERYTHING) for text in ('{"state": ["running"]}', "[1]", "no JSON", "")),
]


@pytest.mark.parametrize(("documents", "is_old", "garbage"), LEFT)
def test_what_an_unfinished_run_may_resume_is_kept(
    store: Path, documents: dict[str, Any], is_old: bool, garbage: set[str]
) -> None:
    leave(store)
    assert leave(store, is_old=is_old, **documents) == garbage


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
