"""Nights of a retrain job: good ones, poisoned ones, and what becomes of the batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
