"""Jobs whose data has grown: what is frozen, what is continued, what is said, and when all is fitted anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import append, ingest, open_dataset, row_hash_fraction
from dkrr.jobs.facts import reused_rows
from dkrr.jobs.run import fit_job
from dkrr.models.model import load_model
from tests.fit.test_planner import MACHINE
from tests.jobs.helpers import Make, job_maker
from tests.jobs.retrain.project import in_process
from tests.reference import dense_krr, reference_kernel

RNG = np.random.default_rng(5)
X = RNG.standard_normal((900, 4)) * [1, 10, 0.1, 3] + [0, 50, 0, -7]
Y = np.sin(X[:, 0]) + X[:, 1] / 20 + 0.1 * RNG.standard_normal(len(X))
KERNEL = {"kernel": "rbf", "gamma": 0.1}

DOCUMENT: dict[str, Any] = {
    "data": {"path": "data.zarr", "standardize": True},
    "evaluate": {"fraction": 0.2},
    "model": KERNEL | {"alpha": 0.1},
    "solver": {"name": "cholesky", "tile_size": 64, "precision": "float64"},
    "cluster": {"workers": 1},
    "output": {"directory": "run", "store": "store"},
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Jobs whose tasks run in this process, planned for a machine that is not measured."""
    in_process(monkeypatch)
    monkeypatch.setattr("dkrr.jobs.plan.measure_machine", lambda *_, **__: MACHINE)
    return job_maker(DOCUMENT, tmp_path)


def grow(folder: Path, start: int, stop: int, shift: float = 0.0) -> None:
    append(X[start:stop] + shift, folder / "data.zarr", y=Y[start:stop])


def test_a_job_on_grown_data_continues(make: Make, tmp_path: Path) -> None:
    grow(tmp_path, 0, 600)
    first = fit_job(make())
    before = load_model(first.model_path)
    grow(tmp_path, 600, 640)
    again = fit_job(make())
    model, scaling, rows = load_model(again.model_path), before.scaling, before.num_rows
    # the scaling is that of the first fit, and so are tiles and centre
    assert model.scaling == scaling
    factor, scaled = again.reused["factor"], again.reused["scaling"]
    assert (factor["rows"], factor["of_rows"], scaled["scaling"], scaled["rows"]) == (
        rows,
        model.num_rows,
        "frozen",
        600,
    )
    assert again.tiles_computed < first.tiles_computed
    train = np.flatnonzero(~row_hash_fraction(0, 640, 0.2))
    A, B = ((X[some] - scaling.x_mean) / scaling.x_std for some in (train, slice(200)))
    dual_coef = dense_krr(reference_kernel(KERNEL, A, A), (Y[train] - scaling.y_mean) / scaling.y_std, 0.1)
    expected = reference_kernel(KERNEL, B, A) @ dual_coef * scaling.y_std + scaling.y_mean
    np.testing.assert_allclose(model.predict(X[:200].copy()), expected, rtol=1e-9, atol=1e-9)
    # what is said is the same everywhere
    documents = [json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("result", "status", "plan")]
    assert [found["reused"]["factor"]["rows"] for found in documents] == [rows] * 3
    assert any("continues a factor of the first" in note for note in documents[-1]["notes"])
    assert any(f"{rows:,} of {model.num_rows:,} rows of the factor" in text for _, text in again.facts())
    assert fit_job(make()).tiles_computed == 0


def test_drift_beyond_the_limit_fits_anew(make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grow(tmp_path, 0, 500)
    before = load_model(fit_job(make()).model_path).scaling
    grow(tmp_path, 500, 600, shift=1.3)  # column x2 has a spread of 0.1
    again = fit_job(make())
    found = again.reused["scaling"]
    assert (found["scaling"], found["drift"]["column"], "factor" in again.reused) == ("anew", "x2", False)
    assert found["drift"]["value"] == pytest.approx(13, rel=0.1)
    assert "fitted anew with statistics of all rows" in caplog.text
    assert load_model(again.model_path).scaling != before
    # the lineage begins here
    grow(tmp_path, 600, 620)
    third = fit_job(make()).reused
    assert (third["scaling"]["rows"], third["scaling"]["scaling"], "factor" in third) == (600, "frozen", True)


def test_rows_far_from_a_frozen_centre_are_fitted_anew(make: Make, tmp_path: Path) -> None:
    document = {name: keys for name, keys in DOCUMENT.items() if name != "evaluate"} | {"data": {"path": "data.zarr"}}
    job = job_maker(document, tmp_path)(solver={"tile_size": 200})
    x = np.random.default_rng(8).standard_normal((900, 4))
    ingest(x[:500], tmp_path / "data.zarr", y=Y[:500])
    fit_job(job)
    append(x[500:800] + 10, tmp_path / "data.zarr", y=Y[500:800])
    again = fit_job(job)
    assert "factor" not in again.reused
    found = again.reused["center"]
    assert (found["center"], found["rows"], found["drift"]["rows"], found["limit"]) == ("anew", 500, 300, 1.0)
    assert found["drift"]["value"] == pytest.approx(10, rel=0.1)
    np.testing.assert_allclose(load_model(again.model_path).center, open_dataset(tmp_path / "data.zarr").x_mean)
    said = "fitted anew, with the centre of all rows: 300 newer rows drift by"
    assert any(said in note for note in json.loads((tmp_path / "run/plan.json").read_text())["notes"])
    assert "that of all rows, anew" in dict(reused_rows(again.reused))["centre"]
    # the lineage begins here: judged are all rows that came after these
    append(x[800:850] + 6, tmp_path / "data.zarr", y=Y[800:850])
    more = fit_job(job).reused
    assert (more["center"]["center"], more["center"]["rows"], more["factor"]["rows"]) == ("frozen", 800, 800)
