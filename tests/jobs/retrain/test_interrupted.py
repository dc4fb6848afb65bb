"""A retrain job that is interrupted anywhere: production stays whole, and one more run does exactly what is missing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dkrr.errors import DkrrError, RefusedError
from tests.faults import failing_at
from tests.jobs.retrain.project import Project, check_production, in_process, state

pytestmark = pytest.mark.timeout(280)

STAGES = ("stage", "validate", "append", "fit", "evaluate", "gate")
MOMENTS = ("before", "before_record", "after_record")
OTHERS = (
    "retrain.append.before_window",
    "retrain.promote.before",
    "retrain.promote.after",
    "retrain.report.before",
    "retrain.report.after",
    "dataset.before_pointer",
    "dataset.after_pointer",
    "model.before_pointer",
    "model.after_pointer",
    "registry.version.before_write",
    "registry.version.mid_copy",
    "registry.version.before_pointer",
    "registry.version.after_write",
    "registry.before_pointer",
    "registry.after_pointer",
)
SITES = [f"retrain.{stage}.{moment}" for stage in STAGES for moment in MOMENTS] + list(OTHERS)
# the other sites take a minute together
QUICK = (
    "retrain.stage.after_record",
    "retrain.append.before_record",
    "retrain.fit.before_record",
    "retrain.gate.after_record",
    "registry.before_pointer",
    "registry.after_pointer",
)


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


def make(folder: Path) -> Project:
    return Project(folder, window={"generations": 2})


def second_night(project: Project) -> None:
    """A poisoned batch and a good one."""
    project.deliver("night-2a", seed=2, num_rows=60, change=lambda rows: rows * 100)
    project.deliver("night-2b", seed=3, num_rows=60)
    with contextlib.suppress(RefusedError):
        project.run()


@pytest.fixture(scope="module")
def one_night(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The first night is over."""
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch)
        project = make(tmp_path_factory.mktemp("one") / "p")
        project.deliver("night-1", seed=1, num_rows=60)
        project.run()
    return project


@pytest.fixture(scope="module")
def undisturbed(one_night: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The second night as it should be."""
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch)
        project = one_night.copied(tmp_path_factory.mktemp("undisturbed") / "p")
        second_night(project)
    return project


@pytest.fixture
def project(one_night: Project, tmp_path: Path) -> Project:
    return one_night.copied(tmp_path / "p")


@pytest.mark.parametrize(
    "site", [site if site in QUICK else pytest.param(site, marks=pytest.mark.system) for site in SITES]
)
def test_an_error_anywhere(site: str, project: Project, undisturbed: Project) -> None:
    first = project.production
    assert first is not None
    final = state(undisturbed)
    second = undisturbed.production
    assert second is not None
    with failing_at(f"{site}:@1:eio") as points:
        with contextlib.suppress(OSError, DkrrError):
            second_night(project)
        assert points.rules[0].visits > 0, "the failpoint is not on the way"
    check_production(project, {first, second})
    with contextlib.suppress(RefusedError):
        project.run()
    check_production(project, {second})
    assert state(project) == final
    assert project.run().outcome == "nothing new"
    assert not [path for path in project.folder.rglob("*.partial") if "store" not in path.parts]


def test_a_refusal_is_told_although_it_was_interrupted(project: Project) -> None:
    project.deliver("night-2", seed=2, num_rows=60, change=lambda rows: rows * 100)
    with failing_at("retrain.validate.after_record:@1:eio"), pytest.raises(OSError, match="error"):
        project.run()
    with pytest.raises(RefusedError, match="night-2"):
        project.run()
    assert project.run().outcome == "nothing new"
