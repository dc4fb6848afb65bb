"""``[model] fit_intercept``: from a job file to a model, its record, and what is shown of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.predict import predict_job
from dkrr.jobs.run import fit_job
from tests.jobs.helpers import Make, job_maker
from tests.reference import dense_bordered

N = 300


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, 3))
    table = np.column_stack([x, np.sin(x[:, 0]) + 70, rng.uniform(0.1, 3, N)])
    np.savetxt(tmp_path / "rows.csv", table, delimiter=",")
    np.savetxt(tmp_path / "new.csv", rng.standard_normal((20, 3)), delimiter=",")

    document: dict[str, Any] = {
        "data": {"path": "rows.csv", "target": [3], "weight": 4, "header": False},
        "model": {"kernel": "rbf", "gamma": 0.3, "alpha": 0.1, "fit_intercept": True},
        "solver": {"tile_size": 100},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a")},
    }
    return job_maker(document, tmp_path)


@pytest.mark.parametrize("solver", [{}, {"name": "cg"}, {"name": "nystrom", "num_centers": N}], ids=str)
def test_from_file_to_predictions(solver: dict[str, Any], make: Make, tmp_path: Path) -> None:
    summary = fit_job(make(solver=solver))
    model = load_model(summary.model_path)
    table = np.loadtxt(tmp_path / "rows.csv", delimiter=",")
    x, y, weight = table[:, :3], table[:, 3], table[:, 4]
    dual_coef, b = dense_bordered(model.kernel(x, x), y, 0.1, weight)
    new = np.loadtxt(tmp_path / "new.csv", delimiter=",")
    expected = model.kernel(new, x) @ dual_coef + b
    np.testing.assert_allclose(model.predict(new), expected, rtol=0, atol=1e-5)
    assert predict_job(summary.model_path, str(tmp_path / "new.csv"), str(tmp_path / "out.npy")).num_rows == 20
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), model.predict(new), rtol=1e-12)
    assert summary.intercept == model.intercept.tolist()
    assert json.loads((tmp_path / "runs/a/result.json").read_text())["intercept"] == summary.intercept
    assert model.provenance["fit_intercept"] is True
    facts = describe(summary.model_path).facts
    assert facts["intercept"] == f"{model.intercept[0]:.6g}"
    assert f"{model.intercept[0]:.5g}" in _text(summary.table())
    assert not verify(summary.model_path)


def test_of_whitened_targets(make: Make, tmp_path: Path) -> None:
    summary = fit_job(make(data={"standardize": True}))
    model = load_model(summary.model_path)
    assert describe(summary.model_path).facts["intercept"].endswith("(of the whitened target)")
    y = np.loadtxt(tmp_path / "rows.csv", delimiter=",")[:, 3]
    found = model.predict(np.full((1, 3), 1e6))  # far from every row f is zero
    assert found[0] == pytest.approx(y.mean() + y.std() * model.intercept[0], rel=1e-12)


def _text(table: Any) -> str:
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(width=200, file=text).print(table)
    return text.getvalue()
