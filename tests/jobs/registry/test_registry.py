"""Versions never change, aliases move whole, and what may be needed is not pruned."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model
from dkrr.errors import LockedError, ParameterError, StoreError
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.registry import ModelRegistry, NamedModel
from tests.faults import contents, failing_at
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


def test_a_version_is_the_model_that_was_published(model: NamedModel, saved: list[str]) -> None:
    version = model.add(saved[0], facts={"why": "first", "score": np.float64(0.5)})
    assert version.id.startswith("0001-")
    assert version.num_rows == len(ROWS)
    assert version.facts == {"why": "first", "score": 0.5}
    assert contents(Path(version.model_path)) == contents(Path(saved[0]))
    assert model.aliases().targets == {"candidate": version.id}
    # the same model again, and a second one
    assert model.add(saved[0]) == version
    second = model.add(saved[1], key="ab" * 32)
    assert second.id == "0002-abababababab"
    assert [found.id for found in model.versions()] == [version.id, second.id]
    for selector in (second.id, "2", "candidate"):
        assert model.resolve(selector) == second
    assert not list(Path(model.location).rglob("*.partial"))


def test_promote_and_roll_back(model: NamedModel, saved: list[str]) -> None:
    a, b, c = (model.add(path).id for path in saved)
    assert model.promote(a).targets == {"production": a, "candidate": c}
    epoch = model.aliases().epoch
    assert model.promote(a).epoch == epoch, "nothing changed, and yet something was written"
    assert model.promote().targets == {"production": c, "previous": a}
    assert model.rollback().targets == {"production": a, "previous": c}
    assert model.rollback().targets == {"production": c, "previous": a}
    assert model.promote(a).targets == {"production": a, "previous": c}
    assert model.promote(b).targets == {"production": b, "previous": a}
    history = model.aliases().history
    assert [entry["epoch"] for entry in history] == list(range(1, model.aliases().epoch + 1))
    assert history[-1]["changed"] == {"production": [a, b], "previous": [c, a]}
    with pytest.raises(LockedError, match=f"production is {b}, and was {a}"):
        model.promote(c, expected=a)


def test_what_is_not_there(model: NamedModel, saved: list[str], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has no versions"):
        model.resolve()
    with pytest.raises(StoreError, match="no previous version"):
        model.rollback()
    version = model.add(saved[0])
    with pytest.raises(StoreError, match=r"no alias 'production' .*candidate, 0001-"):
        model.resolve()
    with pytest.raises(StoreError, match="neither alias nor version '0007'"):
        model.resolve("0007")
    with pytest.raises(StoreError, match="not a model"):
        model.add(str(tmp_path / "nothing"))
    shutil.rmtree(version.location)
    with pytest.raises(StoreError, match="which is not in"):
        model.resolve("candidate")
    with pytest.raises(ParameterError, match="not the name of a model"):
        ModelRegistry(str(tmp_path)).open("../other")


def test_a_damaged_version_is_neither_published_nor_promoted(
    model: NamedModel, saved: list[str], tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(saved[0], tmp_path / "bad.zarr"))
    chunk = next(path for path in bad.glob("dual_coef/c/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    with pytest.raises(StoreError, match="damaged"):
        model.add(str(bad))
    version = model.add(saved[0])
    chunk = next(Path(version.model_path).glob("dual_coef/c/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    with pytest.raises(StoreError, match="damaged"):
        model.promote(version.id)
    # a whole model that is another one than was published
    shutil.rmtree(version.model_path)
    shutil.copytree(saved[1], version.model_path)
    with pytest.raises(StoreError, match="another model than was published"):
        model.promote(version.id)
    assert "production" not in model.aliases().targets


@pytest.mark.parametrize("site", ["version.before_write", "version.mid_copy", "version.before_pointer"])
def test_an_interrupted_publication_leaves_no_version(site: str, model: NamedModel, saved: list[str]) -> None:
    with failing_at(f"registry.{site}:@1:enospc"), pytest.raises(OSError, match="No space"):
        model.add(saved[0])
    assert model.versions() == []
    assert model.aliases().epoch == 0
    assert model.add(saved[0]).number == 1


def test_of_many_changes_at_once_none_is_lost(tmp_path: Path) -> None:
    model = ModelRegistry(str(tmp_path)).open("m")
    names = [f"{number:04d}-{'0' * 12}" for number in range(6)]

    def work(name: str) -> None:
        for _ in range(5):
            model.change(lambda aliases: aliases.moved(**{f"a{name[:4]}": name}), why="test")
            model.change(lambda aliases: aliases.moved(**{f"a{name[:4]}": None}), why="test")

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    done = model.change(lambda aliases: aliases, why="look")
    assert done.epoch == 60
    assert [entry["epoch"] for entry in done.history] == list(range(1, 61))
    assert sorted(done.released) == names


def test_an_earlier_holder_of_the_lease_changes_nothing(model: NamedModel, saved: list[str]) -> None:
    a, b = (model.add(path).id for path in saved[:2])
    model.promote(a, lease_epoch=3)
    model.fence(5)
    with pytest.raises(LockedError, match="belong to epoch 5 of its lease; ours was 3"):
        model.promote(b, lease_epoch=3)
    assert model.promote(b, lease_epoch=5).targets["production"] == b
    model.rollback()  # a person needs no lease


def test_a_promotion_that_was_overtaken_is_judged_by_what_is_there(model: NamedModel, saved: list[str], monkeypatch):
    a, b, c = (model.add(path).id for path in saved)
    model.promote(a)
    from dkrr.jobs import registry as module

    swap = module.swap_json

    def overtaken(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(module, "swap_json", swap)
        model.promote(c)  # another process, between reading and writing
        return swap(*arguments, **options)

    monkeypatch.setattr(module, "swap_json", overtaken)
    with pytest.raises(LockedError, match=f"production is {c}, and was {a}"):
        model.promote(b, expected=a)
    assert model.aliases().targets["production"] == c


def test_prune_keeps_what_may_be_needed(model: NamedModel, saved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
        record = Path(version.location, "version.json")
        record.write_text(json.dumps(json.loads(record.read_text()) | {"created_at": "2020-01-01T00:00:00Z"}))
    assert model.prune(keep=0, grace_seconds=100) == [], "a reader may hold c"
    model.change(
        lambda aliases: aliases.model_copy(update={"released": dict.fromkeys(aliases.released, now - 200)}),
        why="time passes",
    )
    assert [version.id for version in model.prune(keep=0, grace_seconds=100)] == [c]
    assert {version.id for version in model.versions()} == {a, b}
    assert model.aliases().removing == ()
    with pytest.raises(ParameterError, match="keep is -1"):
        model.prune(keep=-1)


def test_a_version_that_is_being_removed_takes_no_alias_and_goes_at_last(model: NamedModel, saved: list[str]) -> None:
    a, b = (model.add(path, candidate=False).id for path in saved[:2])
    model.promote(b)
    with failing_at("registry.prune.before_delete:@1:eio"), pytest.raises(OSError, match="error"):
        model.prune(keep=0, grace_seconds=0)
    with pytest.raises(StoreError, match="is being removed"):
        model.promote(a)
    model.prune(keep=5, grace_seconds=1e9)
    assert [version.id for version in model.versions()] == [b]


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


def test_the_same_on_an_object_store(bucket: Bucket, saved: list[str]) -> None:
    model = ModelRegistry(bucket.url("models")).open("demo")
    with failing_at("registry.version.before_pointer:@1:eio"), pytest.raises(OSError, match="error"):
        model.add(saved[0])
    assert model.versions() == []
    a, b = (model.add(path).id for path in saved[:2])
    assert model.add(saved[0]).id == a
    model.promote(a)
    model.promote(b, expected=a)
    assert model.rollback().targets == {"production": a, "previous": b}
    found = load_model(model.resolve().model_path).predict(ROWS)
    assert np.array_equal(found, load_model(saved[0]).predict(ROWS))
    c = model.add(saved[2], candidate=False).id
    assert [version.id for version in model.prune(keep=0, grace_seconds=0)] == [c]
    assert ModelRegistry(bucket.url("models")).names() == ["demo"]
    assert not bucket.listing("models", "demo", "versions", c)


def test_a_foreign_or_newer_document_is_refused(model: NamedModel, saved: list[str]) -> None:
    model.add(saved[0])
    path = Path(model.location) / "aliases.json"
    document = json.loads(path.read_text())
    for change, message in (
        ({"format": "other"}, "not written by dkrr"),
        ({"format_version": 2}, "format version 2; 1 expected"),
        ({"epoch": "many"}, "is unreadable"),
    ):
        path.write_text(json.dumps(document | change))
        with pytest.raises(StoreError, match=message):
            model.aliases()


def test_what_is_there_and_whether_it_is_whole(model: NamedModel, saved: list[str]) -> None:
    a, b = (model.add(path).id for path in saved[:2])
    model.promote(a)
    found = describe(model.location)
    assert (found.kind, found.facts["aliases"]) == ("registered model", f"candidate {b}, production {a}")
    assert verify(model.location) == []
    chunk = next(Path(model.resolve(a).model_path).glob("dual_coef/c/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\0")
    shutil.rmtree(model.resolve(b).location)
    (Path(model.location) / "versions/0009-x.partial").mkdir()
    (Path(model.location) / "versions/0009-x.partial/version.json").touch()
    problems = verify(model.location)
    assert len(problems) == 3
    assert f"candidate is version {b}, which is missing or not complete" in problems
