"""Held-out rows: decided once, for every row, and never in a fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr import load_model, open_dataset
from dkrr.dataset import row_hash_fraction
from dkrr.errors import RefusedError
from tests.jobs.retrain.project import Project, in_process, rows_of

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


def fitted(project: Project) -> np.ndarray:
    """The rows that the model in production was fitted on, as they came."""
    model = load_model(project.model.resolve().model_path)
    assert model.x_fit is not None
    assert model.scaling is not None
    return model.x_fit.read(0, model.num_rows) * model.scaling.x_std + model.scaling.x_mean


def has(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """For each of ``wanted``, whether it is among ``rows``."""
    return np.array([bool(np.isclose(rows, row, rtol=1e-9, atol=1e-9).all(axis=1).any()) for row in wanted])


def test_a_fraction_is_decided_once(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1)
    project.run()
    project.document["holdout"] = {"fraction": 0.5}
    project.deliver("n2", seed=2)
    project.run()
    rows = np.concatenate([rows_of(1, 120), rows_of(2, 120)])[:, :3]
    held_out = np.concatenate([row_hash_fraction(0, 120, 0.2), row_hash_fraction(120, 240, 0.5)])
    assert np.array_equal(has(fitted(project), rows), ~held_out)


def test_a_window_slides_and_rows_keep_their_answers(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", window={"generations": 2}, gate={"tolerance": 1.0})
    for night in (1, 2, 3):
        project.deliver(f"n{night}", seed=night)
        assert project.run().outcome == "promoted"
    assert open_dataset(project.folder / "rows.zarr").num_rows == 240
    rows = np.concatenate([rows_of(2, 120), rows_of(3, 120)])[:, :3]
    assert np.array_equal(has(fitted(project), rows), ~row_hash_fraction(120, 360, 0.2))
    # in the middle of a generation
    project.document["window"] = {"rows": 150}
    project.run()
    assert np.array_equal(has(fitted(project), rows[90:]), ~row_hash_fraction(210, 360, 0.2))
    assert project.run().outcome == "nothing new"


def test_a_column_of_the_batches(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", holdout={"mask": "c"}, data={"features": ["a", "b"]})
    del project.document["holdout"]["fraction"]

    def marked(rows: np.ndarray) -> np.ndarray:
        rows[:, 2] = np.arange(len(rows)) % 4 == 0
        return rows

    for night in (1, 2):
        project.deliver(f"n{night}", seed=night, change=marked)
        assert project.run().outcome == "promoted"
    rows = np.concatenate([rows_of(1, 120), rows_of(2, 120)])[:, :2]
    assert np.array_equal(has(fitted(project), rows), np.arange(240) % 4 != 0)
    project.deliver("n3", seed=3)  # its column c holds numbers
    with pytest.raises(RefusedError, match=r"mask .*; 0 or 1 expected|0, 1, true or false expected"):
        project.run()
