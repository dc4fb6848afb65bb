"""Garbage: what nothing refers to is found, what anything refers to is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dkrr.errors import StoreError
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


def test_the_sizes_and_the_deletion(store: Path) -> None:
    make_old(store.parent)
    items = {item.path.name: item for item in find_garbage(store)}
    document = len((store / "factors" / f"{KEYS[1]}.zarr" / "zarr.json").read_bytes())
    assert items[f"{KEYS[1]}.zarr"].num_bytes == 5000 + document
    assert delete_garbage([items[f"{KEYS[1]}.zarr"]], lambda: find_garbage(store)) == (5000 + document, [])
    assert not (store / "factors" / f"{KEYS[1]}.zarr").exists()
    assert (store / "factors" / f"{KEYS[0]}.zarr" / "c" / "0" / "0").exists()


def test_documents_of_the_store_itself_do_not_count(store: Path) -> None:
    make_array(store, "grams", KEYS[5])  # named by the attributes of every array
    make_old(store.parent)
    assert f"{KEYS[5]}.zarr" in names(store)


def test_runs_elsewhere_count_when_they_are_named(store: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "run").mkdir(parents=True)
    (elsewhere / "run" / "status.json").write_text(json.dumps({"factor": KEYS[1]}))
    make_old(tmp_path)
    assert f"{KEYS[1]}.zarr" in names(store)
    assert f"{KEYS[1]}.zarr" not in names(store, (elsewhere,))


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
    for kind in ("sums", "strips"):
        make_array(store, "factors", f"{KEYS[0]}-{kind}")
        make_array(store, "factors", f"{KEYS[4]}-{kind}")
    run = store.parent / "demo"
    run.mkdir()
    (run / "result.json").write_text(json.dumps({"kept": {f"store/factors/{key}.zarr": 100 for key in KEYS[:5]}}))
    make_old(store.parent)
    # the factor is needed, and whole; of the other one nothing else is left
    assert names(store) == {f"{key}-{kind}.zarr" for key in (KEYS[0], KEYS[4]) for kind in ("sums", "strips")}
    assert {item.reason for item in find_garbage(store)} == {"scratch of a factor that no run goes on with"}
    (run / "plan.json").write_text(json.dumps({"num_rows": 500, "tile_size": 64}))
    assert names(store) == {f"{KEYS[4]}-{kind}.zarr" for kind in ("sums", "strips")}
    strip = store / "factors" / f"{KEYS[4]}-strips.zarr" / "c" / "0" / "1"
    strip.write_bytes(bytes(10))
    assert names(store) == {f"{KEYS[4]}-sums.zarr"}


def test_partial_files_of_interrupted_writes(store: Path) -> None:
    run = store.parent / "demo"
    run.mkdir()
    (run / "job.json").write_text(json.dumps({"data": KEYS, "model": {}, "solver": {}, "output": {}}))
    partial = store / "factors" / f"{KEYS[0]}.zarr" / "c" / "0" / f"7.{DRAWN}.partial"
    partial.write_bytes(bytes(10))
    (run / f"model.zarr.{DRAWN}.partial").mkdir()
    (run / f"model.zarr.{DRAWN}.partial" / "zarr.json").write_bytes(bytes(20))
    assert names(store) == set()
    make_old(store.parent)
    found = {item.path.name: item.num_bytes for item in find_garbage(store)}
    assert found == {f"7.{DRAWN}.partial": 10, f"model.zarr.{DRAWN}.partial": 20}
    delete(store)
    assert not partial.exists()
    assert not (run / f"model.zarr.{DRAWN}.partial").exists()
    assert names(store) == set()


def test_what_is_no_store_is_refused(tmp_path: Path, store: Path) -> None:
    with pytest.raises(StoreError, match="is not a store"):
        find_garbage(tmp_path)
    with pytest.raises(StoreError, match="is not a folder"):
        find_garbage(store, [tmp_path / "none"])


def test_what_iterations_leave_behind(store: Path) -> None:
    make_array(store, "preconditioners", KEYS[0])
    make_array(store, "solves", KEYS[4])
    make_array(store, "scratch", DRAWN)
    (store / "breakdowns").mkdir()
    (store / "breakdowns" / f"{KEYS[2]}.json").write_text("{}")
    run = store.parent / "demo"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps({"num_rows": 9, "tile_size": 9}))
    make_old(store.parent)
    found = {str(item.path.relative_to(store)) for item in find_garbage(store)}
    kept = {f"preconditioners/{KEYS[0]}.zarr", f"solves/{KEYS[4]}.zarr", f"breakdowns/{KEYS[2]}.json"}
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
