"""Versions in MLflow: one run each, and a model that loads without pickle. Needs ``dkrr[mlflow]``."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from dkrr import load_model
from dkrr.jobs import mlflow_log
from tests.jobs.retrain.project import COLUMNS, Project, in_process, rows_of

pytestmark = pytest.mark.timeout(280)

PROBE = rows_of(99, 30)[:, :3]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    in_process(monkeypatch)
    uri = f"sqlite:///{tmp_path}/mlflow.db" if find_spec("sqlalchemy") else f"file://{tmp_path}/mlruns"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    project = Project(tmp_path / "p", mlflow={"tracking_uri": uri, "experiment": "tests"})
    project.deliver("n1", seed=1)
    return project


@pytest.mark.filterwarnings("ignore")  # of a library that is not ours
def test_each_version_is_logged_once(project: Project) -> None:
    mlflow = pytest.importorskip("mlflow")
    first = project.run()
    project.deliver("n2", seed=2)
    second = project.run()
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
    expected = load_model(project.model.resolve().model_path).predict(PROBE)
    assert np.array_equal(model.predict(PROBE), expected)
    pandas = pytest.importorskip("pandas")
    shuffled = pandas.DataFrame(PROBE, columns=list(COLUMNS[:3]))[["c", "a", "b"]]
    assert np.array_equal(model.predict(shuffled), expected)
    folder = Path(mlflow.artifacts.download_artifacts(logged[0].model_uri))
    assert not [path for path in folder.rglob("*") if path.suffix in (".pkl", ".pickle")]
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
