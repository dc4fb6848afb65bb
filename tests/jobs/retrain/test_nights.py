"""Which model comes into production and which batch is refused; where else versions and data may be."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import Dataset, ingest
from dkrr.errors import RefusedError, StoreError
from dkrr.jobs import gate, mlflow_log
from dkrr.jobs.history import Reference, compare_rows
from dkrr.jobs.predict import predict_job
from dkrr.jobs.registry import Reference as Named
from dkrr.jobs.retrain_spec import DriftSpec, deliveries
from dkrr.store.objects import put_file
from tests.jobs.retrain.project import COLUMNS, Project, in_process, rows_of
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]

pytestmark = pytest.mark.timeout(280)

PROBE = rows_of(99, 50)[:, :3]

MEMORISING = {"kernel": "rbf", "gamma": 1e4, "alpha": 1e-6}


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


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
