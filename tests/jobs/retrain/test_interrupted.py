"""A retrain job that is interrupted anywhere: production stays whole, and one more run does exactly what is missing."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from dkrr import load_model, open_dataset
from dkrr.errors import DkrrError, RefusedError
from dkrr.jobs.registry import check_version
from tests.faults import contents, failing_at
from tests.jobs.retrain.project import Project, in_process, rows_of

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
PROBE = rows_of(99, 50)[:, :3]


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


def state(project: Project) -> dict[str, object]:
    """What must not depend on how it came about."""
    model = project.model
    retrain = Path(project.spec.directory)
    return {
        "rows": {key: data for key, data in contents(project.folder / "rows.zarr").items() if "/c/" in key},
        "generations": [found.label for found in open_dataset(project.folder / "rows.zarr").generations],
        "aliases": model.aliases().targets,
        "versions": [version.id for version in model.versions()],
        "records": sorted(str(path.relative_to(retrain)) for path in retrain.glob("records/*/*.json")),
        "answers": np.asarray(load_model(model.resolve().model_path).predict(PROBE)).tobytes(),
    }


def check_production(project: Project, allowed: set[str]) -> None:
    version = project.model.resolve()
    assert version.id in allowed
    check_version(version)
    load_model(version.model_path)


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


def test_an_append_that_was_abandoned_leaves_nothing(project: Project) -> None:
    """Killed in the middle of its append; then the batch is exchanged for a corrected one."""
    project.deliver("night-2", seed=2, num_rows=60)
    with failing_at("dataset.before_pointer:@2:eio"), pytest.raises((OSError, DkrrError)):
        project.run()
    assert open_dataset(project.folder / "rows.zarr").num_rows == 60
    project.deliver("night-2", seed=5, num_rows=50)
    assert project.run().outcome == "promoted"
    dataset = open_dataset(project.folder / "rows.zarr")
    dataset.verify()
    expected = np.concatenate([rows_of(1, 60), rows_of(5, 50)])[:, :3]
    np.testing.assert_allclose(dataset.read(0, dataset.num_rows), expected, rtol=1e-15)
