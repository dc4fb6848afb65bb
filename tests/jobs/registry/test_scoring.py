"""Predictions through an alias: one version from beginning to end, and the output says which."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr import load_model
from dkrr.errors import DkrrError
from dkrr.jobs.predict import predict_job
from dkrr.jobs.registry import ModelRegistry, NamedModel, Reference
from tests.faults import failing_at
from tests.jobs.registry.helpers import ROWS

PRODUCTION = Reference("demo", "production")


@pytest.fixture
def model(tmp_path: Path, saved: list[str], monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """Two versions, of which the first is in production; rows to predict in rows.npy."""
    np.save(tmp_path / "rows.npy", ROWS)
    monkeypatch.setenv("DKRR_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    named = ModelRegistry().open("demo")
    for path in (saved[1], saved[0]):
        named.add(path)
        named.promote()
    return named


@pytest.mark.parametrize("site", ["compute.predict.block", "sync{folder}"])
def test_an_interrupted_prediction_goes_on_with_its_version(site: str, model: NamedModel, saved: list[str]) -> None:
    first = model.resolve().id
    with failing_at(f"{site.format(folder=Path.cwd())}:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert Path("out.npy").exists() == site.startswith("sync")
    assert Path("out.npy.json").exists() == site.startswith("sync")
    model.rollback()
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id == first
    assert np.array_equal(np.load("out.npy"), load_model(saved[0]).predict(ROWS))
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id != first
    assert np.array_equal(np.load("out.npy"), load_model(saved[1]).predict(ROWS))


def test_a_version_that_was_pruned_since_is_replaced(model: NamedModel, saved: list[str]) -> None:
    first = model.resolve()
    with failing_at("compute.predict.block:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    for path in (saved[2], saved[1]):
        model.promote(model.add(path).id)
    assert first.id in {version.id for version in model.prune(keep=0, grace_seconds=0)}
    done = predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert done.version == model.resolve()
    assert np.array_equal(np.load("out.npy"), load_model(done.version.model_path).predict(ROWS))
