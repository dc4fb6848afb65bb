"""Nights of a retrain job: good ones, poisoned ones, and what becomes of the batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import open_dataset
from dkrr.errors import RefusedError
from tests.faults import contents
from tests.jobs.retrain.project import Project, rows_of

pytestmark = pytest.mark.timeout(280)

PROBE = rows_of(99, 50)[:, :3]


def not_a_number(rows: np.ndarray) -> np.ndarray:
    rows[7, 1] = np.nan
    return rows


def hundredfold(rows: np.ndarray) -> np.ndarray:
    rows[:, 3] *= 100
    return rows


def swapped(rows: np.ndarray) -> np.ndarray:
    return rows[:, [2, 1, 0, 3]]


def test_nothing_new_does_nothing(project: Project, started: list[str]) -> None:
    first = project.production
    assert first is not None
    assert len(started) == 1
    before = contents(project.folder)
    summary = project.run()
    assert (summary.outcome, summary.production) == ("nothing new", first)
    assert len(started) == 1
    assert contents(project.folder) == before
    # the same bytes under another name are the same batch
    (project.folder / "incoming/again.csv").write_bytes((project.folder / "incoming/night-1.csv").read_bytes())
    assert project.run().outcome == "kept"
    assert len(started) == 1
    assert project.run().outcome == "nothing new"
    assert open_dataset(project.folder / "rows.zarr").num_rows == 120


@pytest.mark.parametrize(
    ("poison", "reason"),
    [
        (not_a_number, "1 value that is NaN or infinity; the first is nan at row 7, column 1"),
        (hundredfold, r"target y: its standard deviation is [\d.]+, \d+ times"),
        (swapped, "its values look like those of c"),
    ],
)
def test_a_poisoned_night_and_a_good_one(
    poison: Callable[[Any], Any], reason: str, project: Project, tmp_path: Path, started: list[str]
) -> None:
    first, before = project.production, contents(project.folder / "rows.zarr")
    project.deliver("night-2", seed=2, change=poison)
    with pytest.raises(RefusedError, match=reason) as caught:
        project.run()
    assert caught.value.exit_code == 7
    assert caught.value.summary.batches[0]["stage"] == "validate"
    assert Path(caught.value.report).read_text().count("refused at validate") == 1
    assert project.production == first
    assert contents(project.folder / "rows.zarr") == before
    assert len(started) == 1, "nothing was fitted"
    assert project.run().outcome == "nothing new", "a refusal is told once"

    project.deliver("night-3", seed=3)
    summary = project.run()
    assert (summary.outcome, summary.batches[0]["outcome"]) == ("promoted", "appended")
    assert summary.fit["reused"]["factor"]["rows"] == project.model.resolve(str(first)).num_rows
    assert project.model.aliases().targets == {"production": summary.version, "previous": first}

    undisturbed = Project(tmp_path / "undisturbed")
    for name, seed in (("night-1", 1), ("night-3", 3)):
        undisturbed.deliver(name, seed)
        undisturbed.run()
    assert contents(project.folder / "rows.zarr/X") == contents(undisturbed.folder / "rows.zarr/X")
    assert project.production == undisturbed.production
    assert np.array_equal(project.predict(PROBE), undisturbed.predict(PROBE))


def test_a_refused_batch_does_not_hold_up_a_good_one(project: Project) -> None:
    first = project.production
    project.deliver("night-2", seed=2, change=hundredfold)
    project.deliver("night-3", seed=3)
    with pytest.raises(RefusedError) as caught:
        project.run()
    assert [batch["outcome"] for batch in caught.value.summary.batches] == ["refused", "appended"]
    assert project.production not in (None, first)
    # other limits, another verdict
    project.document["drift"] = {"shift": 1e6, "scale": 1e6, "distance": 1.0, "correlation": 2.0}
    assert "night-2.csv" in {batch["name"] for batch in _judged(project)}


def _judged(project: Project) -> list[dict[str, Any]]:
    try:
        return project.run().batches
    except RefusedError as exc:  # the model that learnt such targets is another matter
        return list(exc.summary.batches)
