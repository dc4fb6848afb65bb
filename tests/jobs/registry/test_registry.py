"""Versions never change, aliases move whole, what may be needed is not pruned; predictions are of one version."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import ingest, load_model
from dkrr.errors import DkrrError, LockedError, StoreError
from dkrr.jobs.inspection import verify
from dkrr.jobs.predict import predict_job
from dkrr.jobs.registry import ModelRegistry, NamedModel, Reference
from dkrr.store.files import list_keys, read_json, read_key, write_json
from tests.faults import failing_at, flip
from tests.jobs.registry.helpers import ROWS, make_model
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three models."""
    folder = tmp_path_factory.mktemp("saved")
    return [make_model(folder / f"{alpha}.zarr", alpha) for alpha in (0.1, 1.0, 10.0)]


@pytest.fixture
def model(tmp_path: Path) -> NamedModel:
    return ModelRegistry(str(tmp_path / "models")).open("demo")


def contents(location: str) -> dict[str, bytes | None]:
    return {key: read_key(location, key) for key in list_keys(location)}


@pytest.mark.parametrize("place", ["folder", "address"])
def test_what_is_published_is_promoted_and_rolled_back(
    place: str, saved: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    registry = ModelRegistry(str(tmp_path / "models"))
    if place == "address":
        there: Bucket = request.getfixturevalue("bucket")
        registry = ModelRegistry(there.url("models"))
        there.server.fail({"method": "PUT", "path": "version.json", "status": 403})
        with pytest.raises(StoreError, match="cannot be written"):
            registry.open("demo").add(saved[0])
    model = registry.open("demo")
    assert model.versions() == []
    version = model.add(saved[0], facts={"why": "first", "score": np.float64(0.5)})
    assert version.id.startswith("0001-")
    assert version.num_rows == len(ROWS)
    assert version.facts == {"why": "first", "score": 0.5}
    assert contents(version.model_path) == contents(saved[0])
    assert model.aliases().targets == {"candidate": version.id}
    # the same model again, and others
    assert model.add(saved[0]) == version
    second = model.add(saved[1], key="ab" * 32)
    assert second.id == "0002-abababababab"
    assert [found.id for found in model.versions()] == [version.id, second.id]
    for selector in (second.id, "2", "candidate"):
        assert model.resolve(selector) == second
    assert not [key for key in list_keys(model.location) if ".partial" in key]

    a, b, c = version.id, second.id, model.add(saved[2]).id
    assert model.promote(a).targets == {"production": a, "candidate": c}
    epoch = model.aliases().epoch
    assert model.promote(a).epoch == epoch, "nothing changed, and yet something was written"
    assert model.promote().targets == {"production": c, "previous": a}
    assert model.rollback().targets == {"production": a, "previous": c}
    assert model.rollback().targets == {"production": c, "previous": a}
    assert model.promote(a).targets == {"production": a, "previous": c}
    assert model.promote(b, expected=a).targets == {"production": b, "previous": a}
    history = model.aliases().history
    assert [entry["epoch"] for entry in history] == list(range(1, model.aliases().epoch + 1))
    assert history[-1]["changed"] == {"production": [a, b], "previous": [c, a]}
    with pytest.raises(LockedError, match=f"production is {b}, and was {a}"):
        model.promote(c, expected=a)
    found = load_model(model.resolve().model_path).predict(ROWS)
    assert np.array_equal(found, load_model(saved[1]).predict(ROWS))
    assert [version.id for version in model.prune(keep=0, grace_seconds=0)] == [c]
    assert registry.names() == ["demo"]
    assert not [key for key in list_keys(model.location) if c in key]


def test_a_folder_of_another_name_is_no_model(model: NamedModel, saved: list[str]) -> None:
    model.add(saved[0])
    (Path(model.root) / "Old Stuff/versions/x").mkdir(parents=True)
    assert ModelRegistry(model.root).names() == [model.name]


def test_a_damaged_version_is_neither_published_nor_promoted(
    model: NamedModel, saved: list[str], tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(saved[0], tmp_path / "bad.zarr"))
    flip(next(bad.glob("dual_coef/c/*/*")))
    with pytest.raises(StoreError, match="damaged"):
        model.add(str(bad))
    version = model.add(saved[0])
    flip(next(Path(version.model_path).glob("dual_coef/c/*/*")))
    with pytest.raises(StoreError, match="damaged"):
        model.promote(version.id)
    # a whole model that is another one than was published
    shutil.rmtree(version.model_path)
    shutil.copytree(saved[1], version.model_path)
    with pytest.raises(StoreError, match="another model than was published"):
        model.promote(version.id)
    assert "production" not in model.aliases().targets


def test_a_version_without_its_document_is_a_problem(model: NamedModel, saved: list[str]) -> None:
    versions = [model.add(location) for location in saved]
    assert verify(model.location) == []
    (Path(versions[0].location) / "version.json").unlink()
    assert [
        problem for problem in verify(model.location) if f"versions/{versions[0].id} has no version.json" in problem
    ]


def test_of_many_changes_at_once_none_is_lost(model: NamedModel, saved: list[str]) -> None:
    version = model.add(saved[0], candidate=False).id

    def work(alias: str) -> None:
        for _ in range(5):
            model.change(lambda aliases: aliases.moved(**{alias: version}), why="test")
            model.change(lambda aliases: aliases.moved(**{alias: None}), why="test")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, "abcdef"))
    done = model.change(lambda aliases: aliases, why="look")
    assert done.epoch == 60
    assert [entry["epoch"] for entry in done.history] == list(range(1, 61))
    assert (list(done.targets), list(done.released)) == ([], [version])


def test_prune_keeps_what_may_be_needed(model: NamedModel, saved: list[str]) -> None:
    a, b, c = (model.add(path, candidate=False).id for path in saved)
    assert model.prune(keep=0) == [], "younger than the grace"
    assert [version.id for version in model.prune(keep=2, grace_seconds=0)] == [a]
    model.promote(b)
    model.promote(c)
    model.rollback()
    assert model.prune(keep=0, grace_seconds=0) == [], "production and previous"
    a = model.add(saved[0]).id
    model.promote(a)  # c loses its alias
    now = time.time()
    for version in model.versions():  # published long ago
        record = read_json(version.location, "version.json")
        write_json(version.location, "version.json", record | {"created_at": "2020-01-01T00:00:00Z"})
    assert model.prune(keep=0, grace_seconds=100) == [], "a reader may hold c"
    model.change(
        lambda aliases: aliases.model_copy(update={"released": dict.fromkeys(aliases.released, now - 200)}),
        why="time passes",
    )
    assert [version.id for version in model.prune(keep=0, grace_seconds=100)] == [c]
    assert {version.id for version in model.versions()} == {a, b}
    assert model.aliases().removing == ()


def test_a_model_of_which_a_version_was_being_removed_is_published_as_another_one(
    model: NamedModel, saved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = model.add(saved[0], candidate=False)
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.registry.remove_parts", lambda *_: 1 / 0)  # killed
        with pytest.raises(ZeroDivisionError):
            model.prune(keep=0, grace_seconds=0)
    again = model.add(saved[0])
    assert again.number != a.number
    model.promote(again.id)
    model.prune(keep=5)
    assert [version.id for version in model.versions()] == [again.id]


def test_a_promotion_between_listing_and_deleting_saves_the_version(
    model: NamedModel, saved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = (model.add(path, candidate=False).id for path in saved[:2])
    model.promote(b)
    listing, once = NamedModel.versions, [True]

    def listed(self: NamedModel) -> Any:
        found = listing(self)
        if once:
            once.clear()
            model.promote(a)
        return found

    monkeypatch.setattr(NamedModel, "versions", listed)
    model.prune(keep=0, grace_seconds=0)
    assert model.resolve("production").id == a
    load_model(model.resolve("production").model_path)


# --- predictions through an alias -------------------------------------------------------------------------------------

PRODUCTION = Reference("demo", "production")


@pytest.fixture
def scoring(model: NamedModel, tmp_path: Path, saved: list[str], monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """Two versions, of which the first is in production; rows to predict in rows.npy."""
    np.save(tmp_path / "rows.npy", ROWS)
    monkeypatch.setenv("DKRR_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    for path in (saved[1], saved[0]):
        model.add(path)
        model.promote()
    return model


@pytest.mark.parametrize("site", ["compute.predict.block", "sync{folder}"])
def test_an_interrupted_prediction_goes_on_with_its_version(site: str, scoring: NamedModel, saved: list[str]) -> None:
    first = scoring.resolve().id
    with failing_at(f"{site.format(folder=Path.cwd())}:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert Path("out.npy").exists() == site.startswith("sync")
    assert Path("out.npy.json").exists() == site.startswith("sync")
    scoring.rollback()
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id == first
    assert np.array_equal(np.load("out.npy"), load_model(saved[0]).predict(ROWS))
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id != first
    assert np.array_equal(np.load("out.npy"), load_model(saved[1]).predict(ROWS))


def test_an_interrupted_prediction_of_a_data_set_that_grew_begins_anew(scoring: NamedModel) -> None:
    ingest(ROWS, "rows.zarr")
    with failing_at(f"sync{Path.cwd()}:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.zarr", "out.npy")
    scoring.rollback()
    ingest(ROWS, "rows.zarr", append=True)
    assert predict_job(PRODUCTION, "rows.zarr", "out.npy").version == scoring.resolve()


def test_a_version_that_was_pruned_since_is_replaced(scoring: NamedModel, saved: list[str]) -> None:
    first = scoring.resolve()
    with failing_at("compute.predict.block:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    for path in (saved[2], saved[1]):
        scoring.promote(scoring.add(path).id)
    assert first.id in {version.id for version in scoring.prune(keep=0, grace_seconds=0)}
    done = predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert done.version == scoring.resolve()
    assert np.array_equal(np.load("out.npy"), load_model(done.version.model_path).predict(ROWS))
