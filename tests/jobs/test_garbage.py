"""Garbage: what nothing refers to is found, what anything refers to is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dkrr.jobs.garbage import Garbage, delete_garbage, find_garbage
from dkrr.store.files import note_user

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
    return {item.path.name for item in find_garbage(store, runs)}


def delete(store: Path) -> list[Garbage]:
    return delete_garbage(find_garbage(store), lambda: find_garbage(store))[1]


def test_what_runs_and_models_name_is_kept(store: Path) -> None:
    run = store.parent / "demo"
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"kept": {f"store/factors/{KEYS[0]}.zarr": 100}}))
    model = run / "model.zarr"
    model.mkdir()
    (model / "zarr.json").write_text(json.dumps({"attributes": {"provenance": {"gram": KEYS[2]}}}))
    make_old(store.parent)
    assert names(store) == {f"{KEYS[1]}.zarr", f"{KEYS[3]}-train.zarr"}


def test_what_changed_lately_is_left_alone(store: Path) -> None:
    make_old(store.parent)
    tile = store / "factors" / f"{KEYS[1]}.zarr" / "c" / "0" / "1"
    tile.write_bytes(bytes(10))  # a fit that is running writes one
    assert f"{KEYS[1]}.zarr" not in names(store)
    assert f"{KEYS[1]}.zarr" in {item.path.name for item in find_garbage(store, kept_seconds=-1)}


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
    found = {str(item.path.relative_to(store)) for item in find_garbage(store)}
    kept = {f"preconditioners/{KEYS[0]}.zarr", f"solves/{KEYS[4]}.zarr"}
    assert f"scratch/{DRAWN}.zarr" in found
    assert not found & kept  # the run may go on with them
    (run / "result.json").write_text("{}")
    make_old(store.parent)
    assert kept <= {str(item.path.relative_to(store)) for item in find_garbage(store)}
    delete(store)
    assert not any((store / name).exists() for name in kept)


def test_of_registered_versions_those_count_that_may_be_needed(store: Path, tmp_path: Path) -> None:
    registry = tmp_path / "models"
    versions = {}
    for number, (key, month) in enumerate(zip(KEYS[:3], ("01", "02", "03"), strict=True), start=1):
        name = f"{number:04d}-{key[:12]}"
        folder = registry / "demo/versions" / name
        (folder / "model.zarr").mkdir(parents=True)
        (folder / "model.zarr/zarr.json").write_text(json.dumps({"attributes": {"factor": key}}))
        record = {"format": "dkrr-model-version", "format_version": 1, "number": number, "key": "0" * 64}
        record |= {"model_digest": "", "created_at": f"2020-{month}-01T00:00:00.000Z", "num_rows": 1, "facts": {}}
        (folder / "version.json").write_text(json.dumps(record))
        versions[name] = key
    first, second, third = versions
    aliases = {"format": "dkrr-aliases", "format_version": 1, "epoch": 1, "fence": 0, "removing": [], "history": []}
    aliases |= {"aliases": {"production": third}, "released": {first: 0.0, second: time.time()}}
    (registry / "demo/aliases.json").write_text(json.dumps(aliases))
    make_old(store.parent)
    everything = {f"{key}.zarr" for key in KEYS[:3]} | {f"{KEYS[3]}-train.zarr"}
    assert names(store) == everything, "nobody said that there is a registry"
    # production needs its own, a reader may hold the second, and nobody needs the first
    assert names(store, (registry,)) == everything - {f"{KEYS[1]}.zarr", f"{KEYS[2]}.zarr"}
    note_user(store, registry)
    note_user(store, tmp_path / "a registry that is gone")
    assert names(store) == everything - {f"{KEYS[1]}.zarr", f"{KEYS[2]}.zarr"}
