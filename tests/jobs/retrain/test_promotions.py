"""Which model comes into production: by the gate, by hand, and never by who lost the lease."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.errors import RefusedError
from tests.jobs.retrain.project import Project, rows_of

pytestmark = pytest.mark.timeout(280)

PROBE = rows_of(99, 50)[:, :3]

MEMORISING = {"kernel": "rbf", "gamma": 1e4, "alpha": 1e-6}


def test_a_model_that_knows_its_rows_by_heart_does_not_pass(project: Project, tmp_path: Path) -> None:
    first, answers = project.production, project.predict(PROBE)
    project.document["model"] = MEMORISING
    project.deliver("night-2", seed=2)
    with pytest.raises(RefusedError, match=r"r2 .* more than 0 needed") as caught:
        project.run()
    assert project.production == first
    assert np.array_equal(project.predict(PROBE), answers)
    assert {check["name"] for check in caught.value.summary.checks if not check["passed"]} == {
        "better than the mean", "score"
    }  # fmt: skip
    assert "0 needed" in Path(caught.value.report).read_text()
    # with nothing to compare with, either
    alone = Project(tmp_path / "alone", model=MEMORISING)
    alone.deliver("night-1", seed=1)
    with pytest.raises(RefusedError, match="r2"):
        alone.run()
    assert alone.production is None


def test_a_rollback_by_hand_lasts_until_there_are_new_rows(project: Project) -> None:
    first = project.production
    project.deliver("night-2", seed=2)
    second = project.run().version
    project.model.rollback()
    assert project.run().outcome == "nothing new"
    assert project.production == first
    project.deliver("night-3", seed=3)
    assert project.run().outcome == "promoted"
    assert project.model.aliases().targets["previous"] == first
    assert project.production not in (first, second)


def test_what_came_into_production_meanwhile_is_what_counts(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first = project.production
    project.deliver("night-2", seed=2)
    second = project.run().version
    project.deliver("night-3", seed=3)
    from dkrr.jobs import gate as module

    judge = module.judge
    seen = []

    def judged(*arguments: Any) -> Any:
        seen.append(arguments[3])
        if len(seen) == 1:
            project.model.rollback()  # a person, between the gate and the promotion
        return judge(*arguments)

    monkeypatch.setattr(module, "judge", judged)
    assert project.run().outcome == "promoted"
    assert seen == [second, first]
    assert project.model.aliases().targets["previous"] == first
