"""Hyperparameters are searched again every k-th fit, and kept until then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dkrr import load_model
from dkrr.jobs.spec import JobSpec
from tests.faults import failing_at
from tests.jobs.retrain.project import Project, in_process

pytestmark = pytest.mark.timeout(280)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each search finds another gamma."""
    in_process(monkeypatch)
    done: list[int] = []

    def search(job: JobSpec, progress: Any) -> dict[str, Any]:
        assert job.evaluate is not None
        assert job.evaluate.mask is not None, "the search would see held-out rows"
        done.append(len(done))
        return {"model": {"kernel": "rbf", "gamma": 0.3 + 0.01 * len(done), "alpha": 0.05}}

    monkeypatch.setattr("dkrr.jobs.gate._search", search)
    return done


def gamma(project: Project) -> float:
    model = load_model(project.model.versions()[-1].model_path)
    assert model.kernel is not None
    return float(model.kernel.to_dict()["gamma"])


@pytest.mark.thorough
def test_every_third_fit(tmp_path: Path, searches: list[int]) -> None:
    project = Project(tmp_path / "p", retrain={"search_every": 3}, gate={"tolerance": 1.0})
    found = []
    for night in range(1, 8):
        project.deliver(f"n{night}", seed=night, num_rows=80)
        if night == 3:
            with failing_at("write*/records/fit/*:@1:eio"), pytest.raises(OSError, match="error"):
                project.run()
        project.run()
        found.append(round(gamma(project), 6))
    # counted from the first fit, which takes what the file says
    assert found == [0.2, 0.2, 0.31, 0.31, 0.31, 0.32, 0.32]
    assert len(searches) == 2, "an interruption after the search costs no other search"
    # other parameters in the file end what was found
    project.document["model"] = {"kernel": "rbf", "gamma": 0.25, "alpha": 0.05}
    project.run()
    assert gamma(project) == 0.25
