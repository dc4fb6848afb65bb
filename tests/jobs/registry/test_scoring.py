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
from dkrr.errors import DkrrError
from dkrr.jobs.predict import predict_job
from dkrr.jobs.registry import ModelRegistry, NamedModel, Reference
from dkrr.store.documents import content_digest
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
        done = predict_job(PRODUCTION, "rows.npy", name)
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
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert Path("out.npy").exists() == (site == "predict.after_pointer")
    assert Path("out.npy.json").exists() == (site == "predict.after_pointer")
    model.rollback()
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id == first
    assert np.array_equal(np.load("out.npy"), answers(saved)[0])
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id != first
    assert np.array_equal(np.load("out.npy"), answers(saved)[1])


def test_a_version_that_was_pruned_since_is_replaced(model: NamedModel, saved: list[str], tmp_path: Path) -> None:
    first = model.resolve()
    with failing_at("predict.block.after_compute:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    for alpha in (20.0, 30.0):
        model.add(make_model(tmp_path / f"{alpha}.zarr", alpha))
        model.promote()
    assert first.id in {version.id for version in model.prune(keep=0, grace_seconds=0)}
    done = predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert done.version == model.resolve()
    assert np.array_equal(np.load("out.npy"), load_model(done.version.model_path).predict(ROWS))
