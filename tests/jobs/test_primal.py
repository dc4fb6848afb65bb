"""Jobs in feature space: by name and by "auto", scored, left out, described; a model without training rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model
from dkrr.dataset.sources import open_table
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.plan import plan
from dkrr.jobs.run import fit_job
from tests.jobs.helpers import Make, job_maker
from tests.reference import dense_krr

SOURCE = "generate:friedman?n=600&d=5&seed=0"


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    document: dict[str, Any] = {
        "data": {"path": SOURCE, "standardize": True},
        "evaluate": {"path": "generate:friedman?n=200&d=5&seed=1"},
        "model": {"kernel": "poly", "degree": 2, "alpha": 0.1},
        "solver": {"name": "primal"},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a")},
    }
    return job_maker(document, tmp_path)


def test_a_job_and_its_model(make: Make, tmp_path: Path) -> None:
    summary = fit_job(make(evaluate={"leave_one_out": True}))
    summary.table()
    table = open_table(SOURCE)
    features = [column for column in range(len(table.names)) if column not in (table.target or ())]
    x, y = (np.concatenate([b for b, _ in table.blocks(list(c))]) for c in (features, table.target or ()))
    whitened, target = (x - x.mean(0)) / x.std(0), (y - y.mean(0)) / y.std(0)
    path = str(tmp_path / "runs/a/model.zarr")
    model = load_model(path)
    assert model.kernel is not None
    k = model.kernel(whitened, whitened)
    dual = k @ dense_krr(k, target, 0.1) * y.std(0) + y.mean(0)
    np.testing.assert_allclose(model.predict(x).reshape(dual.shape), dual, rtol=1e-9)
    assert model.num_rows == 21
    assert (summary.solver, summary.precision, summary.converged) == ("primal", "float64", True)
    assert summary.score is not None
    assert summary.score.value("r2") > 0.5
    assert summary.leave_one_out is not None
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert result["plan"]["solver"] == "primal"
    assert result["leave_one_out"]["rmse"]
    facts = describe(path).facts
    assert facts["solver"] == "primal, float64"
    assert facts["num explicit features"] == 21
    assert verify(path) == []
    assert not list((tmp_path / "runs/store").glob("solves/*.zarr"))


def test_auto_becomes_primal_and_says_why(make: Make) -> None:
    found = plan(make(solver={"name": "auto"}, model={"kernel": "linear", "degree": None}))
    assert found.solver == "primal"
    assert "arithmetic" in found.reasons["solver"]
    assert found.estimated_seconds["primal"] > 0
    assert "explicit features" in str(found)
    assert plan(make(solver={"name": "auto", "tile_size": 128})).solver == "cholesky"
