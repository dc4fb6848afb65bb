"""Nights in any order, interrupted anywhere: every row keeps its answer, and one more run does what is missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dkrr
from dkrr.errors import DkrrError, RefusedError
from tests.faults import failing_at
from tests.jobs.retrain.project import Project, check_production, in_process, rows_of, state

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module", autouse=True)
def _in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch)
        yield


EVENTS = ("new", "new", "again", "mixed", "drop", "drift", "lost ledger", "lost data", "interrupted", "holdout")


def keys(rows: np.ndarray) -> set[tuple[float, ...]]:
    return set(map(tuple, np.round(rows, 6)))


@pytest.mark.parametrize("window", [None, {"generations": 2}, {"rows": 100}])
@pytest.mark.parametrize("seed", range(3))
def test_every_row_keeps_its_answer(seed: int, window: dict[str, int] | None, tmp_path: Path) -> None:
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


# --- interrupted anywhere ---------------------------------------------------------------------------------------------

# documents that say what was decided, promoted and done; elsewhere a number of writes stands for all of them
DOCUMENTS = (
    "written*/batches.json:@1",
    "write*/batches.json:@4",
    "write*/records/fit/*:@1",
    "written*/records/gate/*:@1",
    "write*/aliases.json:@1",
    "written*/aliases.json:@1",
)


def second_night(project: Project) -> None:
    """A poisoned batch and a good one."""
    project.deliver("night-2a", seed=2, num_rows=60, change=lambda rows: rows * 100)
    project.deliver("night-2b", seed=3, num_rows=60)
    with contextlib.suppress(RefusedError):
        project.run()


@pytest.fixture(scope="module")
def one_night(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The first night is over."""
    project = Project(tmp_path_factory.mktemp("one") / "p", window={"generations": 2})
    project.deliver("night-1", seed=1, num_rows=60)
    project.run()
    return project


@pytest.fixture(scope="module")
def undisturbed(one_night: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The second night as it should be."""
    project = one_night.copied(tmp_path_factory.mktemp("undisturbed") / "p")
    second_night(project)
    return project


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
def test_an_error_at_a_document(fault: str, one_night: Project, undisturbed: Project, tmp_path: Path) -> None:
    project = one_night.copied(tmp_path / "p")
    assert check_after_an_error(fault, project, undisturbed), "nothing of that name is written"


@pytest.mark.system
@pytest.mark.parametrize("verb", ["write", "written", "link"])
def test_an_error_anywhere(verb: str, one_night: Project, undisturbed: Project, tmp_path: Path) -> None:
    for number in range(1, 1000, 7):
        project = one_night.copied(tmp_path / f"p{number}")
        if not check_after_an_error(f"{verb}{project.folder}/*:@{number}", project, undisturbed):
            break
    assert 7 < number < 999
