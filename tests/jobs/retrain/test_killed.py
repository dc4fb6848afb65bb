"""Real retrain jobs that are killed with SIGKILL, in every stage and at random, and run once more each time."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dkrr.jobs import toml
from tests.faults import Command, Run, descendants, end_commands
from tests.jobs.retrain.project import Project, check_production, state

pytestmark = [pytest.mark.system, pytest.mark.timeout(290)]

STALE = {"DKRR_STALE_SECONDS": "6"}
WHOLE = ("before", "before_record", "after_record")

# where the job is killed, four times in a row in each stage: the site, and the how-many-th time it comes by
KILLS = {
    "stage": [f"retrain.stage.{moment}:@1" for moment in (*WHOLE, "before")],
    "validate": [f"retrain.validate.{moment}:@1" for moment in (*WHOLE, "before")],
    "append": [
        "retrain.append.before:@1",
        "dataset.before_pointer:@1",  # the draft of the batch is whole by then
        "retrain.append.before_record:@1",
        "retrain.append.after_record:@1",
    ],
    "fit": [
        "retrain.fit.before:@1",
        "registry.version.mid_copy:@2",
        "registry.version.before_pointer:@1",
        "retrain.fit.before_record:@1",
    ],
    "evaluate": [f"retrain.evaluate.{moment}:@1" for moment in ("before", "before", "before_record", "after_record")],
    "gate": [f"retrain.gate.{moment}:@1" for moment in ("before", "before", "before_record", "after_record")],
    "promote": [
        "retrain.promote.before:@1",
        "retrain.promote.before:@1",
        "registry.before_pointer:@2",  # the first is the fence
        "registry.after_pointer:@2",
    ],
}


def prepared(folder: Path) -> Project:
    """A project with its RETRAIN.toml, before the first night."""
    project = Project(folder, cluster={"workers": 1, "memory_limit": "1GiB"})
    (folder / "RETRAIN.toml").write_text(toml.dumps(project.document))
    return project


def dkrr_retrain(project: Project, failpoints: str = "", seconds: float = 120.0) -> Run:
    command = ["retrain", str(project.folder / "RETRAIN.toml")]
    return Command(command, failpoints=failpoints, environment=STALE).run(seconds)


def deliver_second_night(project: Project) -> None:
    project.deliver("night-2a", seed=2, num_rows=90)
    project.deliver("night-2b", seed=3, num_rows=90)


@pytest.fixture(scope="module")
def one_night(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A folder in which the first night is over."""
    project = prepared(tmp_path_factory.mktemp("one") / "p")
    project.deliver("night-1", seed=1, num_rows=150)
    done = dkrr_retrain(project)
    assert done.code == 0, done.err
    return project


@pytest.fixture(scope="module")
def undisturbed(one_night: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The second night as it should be."""
    project = one_night.copied(tmp_path_factory.mktemp("undisturbed") / "p")
    deliver_second_night(project)
    done = dkrr_retrain(project)
    assert done.code == 0, done.err
    return project


@pytest.fixture
def project(one_night: Project, tmp_path: Path) -> Iterator[Project]:
    """The same, before the second night's job."""
    project = one_night.copied(tmp_path / "p")
    deliver_second_night(project)
    yield project
    end_commands()


@pytest.mark.parametrize(
    "stage", [pytest.param("promote", marks=pytest.mark.short), *sorted(KILLS.keys() - {"promote"})]
)
def test_four_kills_in_a_stage(stage: str, project: Project, undisturbed: Project) -> None:
    for kill in KILLS[stage]:
        done = dkrr_retrain(project, f"{kill}:sigkill")
        assert done.code == -signal.SIGKILL, f"{kill}: {done.err}"
        check_production(project, {found.id for found in undisturbed.model.versions()})
    done = dkrr_retrain(project)
    assert done.code == 0, done.err
    assert state(project) == state(undisturbed)
    again = dkrr_retrain(project)
    assert (again.code, "nothing new" in again.out) == (0, True)


def test_four_kills_at_random(project: Project, undisturbed: Project) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    draws = random.Random(seed)
    command = Command(["retrain", str(project.folder / "RETRAIN.toml")], environment=STALE)
    for _ in range(4):
        process = command.start()
        time.sleep(draws.uniform(0.5, 6.0))
        children = descendants(process.pid)
        process.kill()
        process.communicate()
        for child in children:  # they end with their parent, a moment later
            if child.is_running():
                child.wait(30)
        check_production(project, {found.id for found in undisturbed.model.versions()})
    done = dkrr_retrain(project)
    assert done.code == 0, done.err
    assert state(project) == state(undisturbed)
    assert os.path.exists(project.folder / "models/demo/retrain/report.txt")
