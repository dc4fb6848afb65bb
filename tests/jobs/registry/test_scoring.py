"""Predictions through an alias: one version from beginning to end, and the output says which."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import zarr

from dkrr import load_model
from dkrr.errors import DkrrError, LockedError, ParameterError, StoreError
from dkrr.jobs.registry import ModelRegistry, NamedModel, Reference, prune_versions
from dkrr.jobs.scoring import predict_registered
from dkrr.jobs.uncertain import Asked
from dkrr.store.documents import content_digest
from dkrr.store.lease import hold_lock
from tests.faults import failing_at
from tests.jobs.registry.helpers import ROWS, make_model

PRODUCTION = Reference("demo", "production")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("saved")
    return [make_model(folder / f"{alpha}.zarr", alpha) for alpha in (0.1, 10.0)]


@pytest.fixture
def model(tmp_path: Path, saved: list[str], monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """Two versions, of which the first is in production; rows to predict in rows.npy."""
    np.save(tmp_path / "rows.npy", ROWS)
    monkeypatch.setenv("DKRR_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    named = ModelRegistry().open("demo")
    for path in reversed(saved):
        named.add(path)
        named.promote()
    return named


def answers(saved: list[str]) -> list[np.ndarray]:
    return [load_model(path).predict(ROWS) for path in saved]


def test_the_output_is_stamped(model: NamedModel, saved: list[str]) -> None:
    version = model.resolve()
    for name in ("out.npy", "out.csv", "out.parquet", "out.zarr"):
        done = predict_registered(PRODUCTION, "rows.npy", name)
        assert (done.num_rows, done.version.id) == (40, version.id)
        beside = json.loads(Path(f"{name}.json").read_text())
        assert {key: beside[key] for key in ("model", "selector", "version", "num_rows")} == {
            "model": "demo", "selector": "production", "version": version.id, "num_rows": 40
        }  # fmt: skip
        assert beside["model_digest"] == version.model_digest
        assert beside["sha256"] == content_digest(name)
        if name != "out.zarr":
            assert beside["sha256"] == hashlib.sha256(Path(name).read_bytes()).hexdigest()
    assert np.array_equal(np.load("out.npy"), answers(saved)[0])
    table = pyarrow.parquet.read_table("out.parquet")
    assert np.array_equal(table.column(0).to_numpy(), answers(saved)[0])
    array = zarr.open_array("out.zarr", mode="r")
    assert np.array_equal(array[:, 0], answers(saved)[0])
    outputs = {"out.npy", "out.csv", "out.parquet", "out.zarr"}
    assert {path.name for path in Path().glob("out*")} == outputs | {f"{name}.json" for name in outputs}


@pytest.mark.parametrize("site", ["predict.block.after_compute", "predict.before_pointer", "predict.after_pointer"])
def test_an_interrupted_prediction_goes_on_with_its_version(site: str, model: NamedModel, saved: list[str]) -> None:
    first = model.resolve().id
    with failing_at(f"{site}:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_registered(PRODUCTION, "rows.npy", "out.npy")
    assert Path("out.npy").exists() == (site == "predict.after_pointer")
    assert Path("out.npy.json").exists() == (site == "predict.after_pointer")
    model.rollback()
    assert predict_registered(PRODUCTION, "rows.npy", "out.npy").version.id == first
    assert np.array_equal(np.load("out.npy"), answers(saved)[0])
    assert predict_registered(PRODUCTION, "rows.npy", "out.npy").version.id != first
    assert np.array_equal(np.load("out.npy"), answers(saved)[1])


@pytest.mark.parametrize("kind", ["no such file", "refused", "killed before a row was predicted"])
def test_a_prediction_that_never_began_holds_no_version(kind: str, model: NamedModel, saved: list[str]) -> None:
    first = model.resolve().id
    if kind == "no such file":
        with pytest.raises(DkrrError, match=r"nosuch\.npy does not exist"):
            predict_registered(PRODUCTION, "nosuch.npy", "out.npy")
    elif kind == "refused":
        with pytest.raises(DkrrError):
            predict_registered(PRODUCTION, "rows.npy", "out.npy", asked=Asked(interval=0.9))
    else:
        with failing_at("dataset.before_pointer:1:eio"), pytest.raises((OSError, DkrrError)):
            predict_registered(PRODUCTION, "rows.npy", "out.npy")
    model.rollback()
    done = predict_registered(PRODUCTION, "rows.npy", "out.npy")
    assert done.version.id == model.resolve().id != first
    assert np.array_equal(np.load("out.npy"), answers(saved)[1])
    assert not Path("out.npy.work").exists()


def test_a_version_that_was_pruned_since_is_replaced(model: NamedModel, saved: list[str], tmp_path: Path) -> None:
    first = model.resolve()
    with failing_at("predict.block.after_compute:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_registered(PRODUCTION, "rows.npy", "out.npy")
    for alpha in (20.0, 30.0):
        model.add(make_model(tmp_path / f"{alpha}.zarr", alpha))
        model.promote()
    assert first.id in {version.id for version in prune_versions(model.location, keep=0, grace_seconds=0)}
    done = predict_registered(PRODUCTION, "rows.npy", "out.npy")
    assert done.version == model.resolve()
    assert np.array_equal(np.load("out.npy"), load_model(done.version.model_path).predict(ROWS))


def test_rows_that_changed_are_predicted_anew(model: NamedModel, saved: list[str]) -> None:
    with failing_at("predict.before_pointer:@1:eio"), pytest.raises(StoreError, match="error"):
        predict_registered(PRODUCTION, "rows.npy", "out.npy")
    np.save("rows.npy", ROWS[:30] + 1)
    assert predict_registered(PRODUCTION, "rows.npy", "out.npy").num_rows == 30
    assert np.array_equal(np.load("out.npy"), load_model(saved[0]).predict(ROWS[:30] + 1))


def test_one_process_an_output_and_mistakes_leave_nothing(model: NamedModel, tmp_path: Path) -> None:
    with hold_lock(str(tmp_path / "out.npy.work")), pytest.raises(LockedError):
        predict_registered(PRODUCTION, "rows.npy", str(tmp_path / "out.npy"))
    with pytest.raises(StoreError, match="has no versions"):
        predict_registered(Reference("other", "production"), "rows.npy", "out.npy")
    with pytest.raises(ParameterError, match="ends in"):
        predict_registered(PRODUCTION, "rows.npy", "out.txt")
    assert {path.name for path in tmp_path.iterdir()} == {"models", "rows.npy"}
