"""Nights in any order: a row that was held out is never trained on, one that was trained on never held out."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest

import dkrr
from dkrr.errors import DkrrError
from tests.faults import failing_at
from tests.jobs.retrain.project import Project, in_process, rows_of

pytestmark = pytest.mark.timeout(280)

EVENTS = ("new", "new", "again", "mixed", "drop", "drift", "lost ledger", "lost data", "interrupted", "holdout")


def keys(rows: np.ndarray) -> set[tuple[float, ...]]:
    return set(map(tuple, np.round(rows, 6)))


@pytest.mark.parametrize("window", [None, {"generations": 2}, {"rows": 100}])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_keeps_its_answer(
    seed: int, window: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    gate = {"tolerance": 9.0, "min_r2": -99.0, "min_rows": 1}
    project = Project(tmp_path / "p", gate=gate, data={"standardize": False})
    if window is not None:
        project.document["window"] = window
    random, data = np.random.default_rng(seed), project.folder / "rows.zarr"
    batches: list[np.ndarray] = []
    trained: set[tuple[float, ...]] = set()
    held_out: set[tuple[float, ...]] = set()

    def deliver(night: int, rows: np.ndarray) -> None:
        project.deliver(f"n{night:02d}", seed=0, num_rows=len(rows), change=lambda _: rows)
        batches.append(rows)

    for night in range(14):
        event = EVENTS[int(random.integers(len(EVENTS)))] if night else "new"
        old = batches[int(random.integers(len(batches)))] if batches else None
        visit = ""
        if event == "again" and old is not None:
            deliver(night, random.permutation(old))
        elif event == "mixed" and old is not None:
            deliver(night, np.concatenate([old[:20], rows_of(100 * seed + night, 30)]))
        elif event == "drop" and len(numbers := [item.number for item in dkrr.open_dataset(data).generations]) > 1:
            dkrr.dataset.drop_generations(data, [int(random.choice(numbers))])
        elif event == "drift":
            project.document["drift"] = {"shift": 1.0 + 0.1 * night}
        elif event == "lost ledger":
            (Path(project.spec.directory) / "batches.json").unlink(missing_ok=True)
        elif event == "lost data":
            shutil.rmtree(data)
        elif event == "holdout":
            project.document["holdout"] = {"fraction": float(random.choice([0.1, 0.3, 0.5]))}
        else:
            deliver(night, rows_of(100 * seed + night, 40))
            visit = str(random.choice(["@1", "@2", "@3"]))
        faults = failing_at(f"write*/batches.json:{visit}:eio") if event == "interrupted" else contextlib.nullcontext()
        with faults, contextlib.suppress(DkrrError, OSError):
            project.run()
        with contextlib.suppress(DkrrError):
            project.run()
        assert project.run().outcome == "nothing new"
        dataset = dkrr.open_dataset(data)
        rows = keys(dataset.read(0, dataset.num_rows))
        assert len(rows) == dataset.num_rows, "rows are there twice"
        versions = project.model.versions()
        model = dkrr.load_model(versions[-1].model_path)
        assert model.x_fit is not None
        if versions[-1].facts["rows_digest"] == dataset.digest:
            now = keys(model.x_fit.read(0, model.num_rows))
            trained |= now
            held_out |= rows - now
        assert not trained & held_out
    assert len(trained) > 60
