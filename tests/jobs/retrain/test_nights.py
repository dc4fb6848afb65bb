"""Which model comes into production and which batch is refused; where else versions and data may be.

Nights in any order, interrupted anywhere: every row keeps its answer, and one more run does what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import Dataset, ingest, load_model
from dkrr.dataset import drop_generations
from dkrr.errors import DkrrError, RefusedError, StoreError
from dkrr.jobs import gate, mlflow_log
from dkrr.jobs.history import Reference, compare_rows
from dkrr.jobs.predict import predict_job
from dkrr.jobs.registry import Reference as Named
from dkrr.jobs.retrain_spec import DriftSpec, deliveries
from dkrr.jobs.run_directory import RunDirectory, read_status
from dkrr.store.objects import put_file
from tests.contract.helpers import run as dkrr
from tests.faults import failing_at
from tests.jobs.retrain.project import COLUMNS, Project, check_production, in_process, rows_of, state
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = pytest.mark.timeout(280)

PROBE = rows_of(99, 50)[:, :3]

MEMORISING = {"kernel": "rbf", "gamma": 1e4, "alpha": 1e-6}


@pytest.fixture(scope="module", autouse=True)
def _in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch)
        yield


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """One night is over: a model is in production."""
    project = Project(tmp_path / "p")
    project.nights(1)
    return project


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
    alone.is_refused("r2")
    assert alone.production is None


def test_a_rollback_by_hand_lasts_until_there_are_new_rows(project: Project) -> None:
    first, second = project.production, project.nights(2).version
    project.model.rollback()
    assert project.run().outcome == "nothing new"
    assert project.production == first
    assert project.nights(3).outcome == "promoted"
    assert project.model.aliases().targets["previous"] == first
    assert project.production not in (first, second)


def test_a_rollback_by_hand_outlasts_another_gate(project: Project) -> None:
    first, second = project.production, project.nights(2).version
    project.model.rollback()
    project.document["gate"]["min_rows"] = 11
    project.is_refused(f"{second} was in production, and {first} was put there instead")
    assert project.production == first
    assert project.is_done()
    assert project.nights(3).outcome == "promoted"


def test_a_night_that_refuses_ends_so_for_who_waits(project: Project) -> None:
    project.deliver("bad", seed=2, change=lambda rows: rows + 100)
    project.is_refused("bad")
    run = RunDirectory(project.spec.directory)
    assert (read_status(run).state, read_status(run).exit_code) == ("failed", RefusedError.exit_code)
    dkrr("wait", run.location, exits=RefusedError.exit_code, said="`dkrr retrain` with its job")
    dkrr("resume", run.location, exits=4, said="`dkrr retrain` with its job")


def test_what_came_into_production_meanwhile_is_what_counts(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = project.production, project.nights(2).version
    project.deliver("night-3", seed=3)
    judge, seen = gate.judge, []

    def judged(*arguments: Any) -> Any:
        seen.append(arguments[3])
        if len(seen) == 1:
            project.model.rollback()  # a person, between the gate and the promotion
        return judge(*arguments)

    monkeypatch.setattr(gate, "judge", judged)
    assert project.run().outcome == "promoted"
    assert seen == [second, first]
    assert project.model.aliases().targets["previous"] == first


# --- what the statistics of new rows show, and what is chance ---------------------------------------------------------

LIMITS = DriftSpec()


def dataset(folder: Path, rows: np.ndarray, name: str = "batch") -> Dataset:
    return ingest(rows[:, :-1], folder / f"{name}.zarr", y=rows[:, -1])


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return Reference.of(dataset(tmp_path, rows_of(0, 3000), "reference"))


@pytest.mark.parametrize("num_rows", [1, 5, 30, 300, 3000])
def test_rows_of_the_same_kind_pass(num_rows: int, reference: Reference, tmp_path: Path) -> None:
    for seed in range(1, 11):
        batch = dataset(tmp_path, rows_of(seed, num_rows), f"{num_rows}-{seed}")
        assert compare_rows(reference, batch, LIMITS) == []


@pytest.mark.parametrize("num_rows", [100, 1000])
def test_what_is_wrong_is_named(num_rows: int, reference: Reference, tmp_path: Path) -> None:
    changes = {
        "shift": lambda rows: rows + np.array([0, 9, 0, 0]),
        "scale": lambda rows: rows * [20, 1, 1, 1],
        "distance": lambda rows: np.column_stack([np.sign(rows[:, 0]), rows[:, 1:]]),
        "correlation": lambda rows: np.column_stack([rows[:, 0], 20 - rows[:, 1], rows[:, 2:]]),
    }
    for statistic, change in changes.items():
        limits = LIMITS if statistic != "distance" else DriftSpec(distance=0.1)
        found = compare_rows(reference, dataset(tmp_path, change(rows_of(1, num_rows)), statistic), limits)
        assert statistic in {finding.statistic for finding in found}
        assert {finding.column for finding in found} == {{"shift": "x1", "correlation": "x1"}.get(statistic, "x0")}


def test_alike_columns_that_are_exchanged_differ_in_what_they_do(tmp_path: Path) -> None:
    random = np.random.default_rng(5)

    def rows(m: int) -> np.ndarray:
        X = random.random((m, 2))
        return np.column_stack([X, 10 * X[:, 0] + random.standard_normal(m)])

    reference = Reference.of(dataset(tmp_path, rows(2000), "reference"))
    found = compare_rows(reference, dataset(tmp_path, rows(400)[:, [1, 0, 2]]), LIMITS)
    assert {(finding.column, finding.statistic) for finding in found} == {
        ("x0", "correlation"), ("x1", "correlation")
    }  # fmt: skip


# --- MLflow, which needs dkrr[mlflow] ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # of a library that is not ours
def test_each_version_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run each, and a model that loads without pickle."""
    mlflow, pandas = pytest.importorskip("mlflow"), pytest.importorskip("pandas")
    uri = f"sqlite:///{tmp_path}/mlflow.db" if find_spec("sqlalchemy") else f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path / "p", mlflow={"tracking_uri": uri, "experiment": "tests"})
    first, second = project.nights(1), project.nights(2)
    assert project.run().outcome == "nothing new"
    spec = project.spec.mlflow
    assert spec is not None
    again = mlflow_log.log_tick(spec, second, project.model)
    mlflow.set_tracking_uri(spec.tracking_uri)
    runs = mlflow.search_runs(experiment_names=["tests"], output_format="list")
    assert {run.data.tags["dkrr_version"] for run in runs} == {first.version, second.version}
    (run,) = [run for run in runs if run.info.run_id == again]
    assert run.data.metrics["num_rows"] == second.num_rows
    assert run.data.params["model.alpha"] == "0.05"
    logged = mlflow.search_logged_models(
        experiment_ids=[run.info.experiment_id], filter_string=f"source_run_id = '{again}'", output_format="list"
    )
    model = mlflow.pyfunc.load_model(logged[0].model_uri)
    expected = project.predict(PROBE)
    assert np.array_equal(model.predict(PROBE), expected)
    shuffled = pandas.DataFrame(PROBE, columns=list(COLUMNS[:3]))[["c", "a", "b"]]
    assert np.array_equal(model.predict(shuffled), expected)
    folder = Path(mlflow.artifacts.download_artifacts(logged[0].model_uri))
    assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".pickle")]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


# --- an object store --------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_two_nights_at_addresses(bucket: Bucket, tmp_path: Path) -> None:
    places = {
        "data": bucket.plain("rows.zarr"),
        "incoming": bucket.plain("incoming") + "/n*.csv",
        "registry": bucket.plain("models"),
    }
    project = Project(tmp_path / "p", retrain=places, storage=bucket.storage())

    def deliver(name: str, seed: int, **options: object) -> None:
        path = project.deliver(name, seed, 80, **options)  # type: ignore[arg-type]
        put_file(bucket.url("incoming"), f"{name}.csv", path)

    deliver("other", 9)
    deliver("n1", 1)
    assert [found.name for found in deliveries(project.spec.retrain.incoming)] == ["n1.csv"]
    first = project.run().version
    model = project.model
    assert model.aliases().targets == {"production": first}
    assert project.is_done()
    deliver("n2", 2, change=lambda rows: rows * 100)
    project.is_refused(r"n2.csv: ")
    assert project.is_done()
    deliver("n3", 3)
    for document in ("retrain/batches.json", "version.json", "aliases.json"):
        bucket.server.fail({"method": "PUT", "path": document, "status": 403})
        with pytest.raises(StoreError, match="cannot be written"):
            project.run()
        assert model.resolve().id
    second = project.run().production
    assert second != first
    assert model.aliases().targets == {"production": second, "previous": first}
    np.save(tmp_path / "x.npy", PROBE)
    files = [str(tmp_path / name) for name in ("x.npy", "out.npy")]
    assert predict_job(Named("demo", "production"), *files, registry=bucket.url("models")).version.id == second
    assert np.array_equal(np.load(files[1]), project.predict(PROBE))


# --- nights in any order ----------------------------------------------------------------------------------------------

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
    random = np.random.default_rng(seed)
    batches: list[np.ndarray] = []
    trained: set[tuple[float, ...]] = set()
    held_out: set[tuple[float, ...]] = set()

    def deliver(night: int, rows: np.ndarray) -> None:
        project.deliver(f"n{night:02d}", seed=0, num_rows=len(rows), change=lambda _: rows)
        batches.append(rows)

    for night in range(14):
        event = EVENTS[int(random.integers(len(EVENTS)))] if night else "new"
        old = batches[int(random.integers(len(batches)))] if batches else None
        if event == "again" and old is not None:
            deliver(night, random.permutation(old))
        elif event == "mixed" and old is not None:
            deliver(night, np.concatenate([old[:20], rows_of(100 * seed + night, 30)]))
        elif event == "drop" and len(numbers := [item.number for item in project.dataset.generations]) > 1:
            drop_generations(project.rows, [int(random.choice(numbers))])
        elif event == "drift":
            project.document["drift"] = {"shift": 1.0 + 0.1 * night}
        elif event == "lost ledger":
            (Path(project.spec.directory) / "batches.json").unlink(missing_ok=True)
        elif event == "lost data":
            shutil.rmtree(project.rows)
        elif event == "holdout":
            project.document["holdout"] = {"fraction": float(random.choice([0.1, 0.3, 0.5]))}
        else:
            deliver(night, rows_of(100 * seed + night, 40))
        fault = f"write*/batches.json:@{random.integers(1, 4)}:eio"
        faults = failing_at(fault) if event == "interrupted" else contextlib.nullcontext()
        with faults, contextlib.suppress(DkrrError, OSError):
            project.run()
        with contextlib.suppress(DkrrError):
            project.run()
        assert project.run().outcome == "nothing new"
        dataset = project.dataset
        rows = keys(dataset.read(0, dataset.num_rows))
        assert len(rows) == dataset.num_rows, "rows are there twice"
        versions = project.model.versions()
        model = load_model(versions[-1].model_path)
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
