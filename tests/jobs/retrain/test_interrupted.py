"""A retrain job that is interrupted anywhere: production stays whole, and one more run does exactly what is missing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dkrr.errors import DkrrError, RefusedError
from tests.faults import failing_at
from tests.jobs.retrain.project import Project, check_production, in_process, state

pytestmark = pytest.mark.timeout(280)

# documents that say what was decided, promoted and done; elsewhere a number of writes stands for all of them
DOCUMENTS = (
    "written*/batches.json:@1",
    "write*/batches.json:@4",
    "write*/records/fit/*:@1",
    "written*/records/gate/*:@1",
    "write*/aliases.json:@1",
    "written*/aliases.json:@1",
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


def check_after_an_error(fault: str, project: Project, undisturbed: Project) -> bool:
    """Production is whole after the error, and one more run ends where none was; whether there was one."""
    first, second, final = project.production, undisturbed.production, state(undisturbed)
    assert first is not None
    assert second is not None
    visit = int(fault.rpartition("@")[2])
    with failing_at(f"{fault}:eio") as points, contextlib.suppress(OSError, DkrrError):
        second_night(project)
    check_production(project, {first, second})
    with contextlib.suppress(RefusedError):
        project.run()
    check_production(project, {second})
    assert state(project) == final
    assert project.run().outcome == "nothing new"
    left = [path for path in project.folder.rglob("*.partial") if "store" not in path.parts]
    assert len(left) <= fault.startswith("written"), "a draft, other than one that could not be removed"
    return points.rules[0].visits >= visit


@pytest.mark.parametrize("fault", DOCUMENTS)
def test_an_error_at_a_document(fault: str, project: Project, undisturbed: Project) -> None:
    assert check_after_an_error(fault, project, undisturbed), "nothing of that name is written"


@pytest.mark.system
@pytest.mark.parametrize("verb", ["write", "written", "link"])
def test_an_error_anywhere(verb: str, one_night: Project, undisturbed: Project, tmp_path: Path) -> None:
    for number in range(1, 1000, 7):
        project = one_night.copied(tmp_path / f"p{number}")
        if not check_after_an_error(f"{verb}{project.folder}/*:@{number}", project, undisturbed):
            break
    assert 7 < number < 999
