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


@pytest.mark.parametrize("site", ["compute.predict.block", "sync{folder}"])
def test_an_interrupted_prediction_goes_on_with_its_version(site: str, model: NamedModel, saved: list[str]) -> None:
    first = model.resolve().id
    with failing_at(f"{site.format(folder=Path.cwd())}:1:eio"), pytest.raises((OSError, DkrrError)):
        predict_job(PRODUCTION, "rows.npy", "out.npy")
    assert Path("out.npy").exists() == site.startswith("sync")
    assert Path("out.npy.json").exists() == site.startswith("sync")
    model.rollback()
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id == first
    assert np.array_equal(np.load("out.npy"), answers(saved)[0])
    assert predict_job(PRODUCTION, "rows.npy", "out.npy").version.id != first
    assert np.array_equal(np.load("out.npy"), answers(saved)[1])
