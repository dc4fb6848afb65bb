"""Intervals of jobs: what a fit keeps, and the shares of rows that a fit and a command count inside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import ingest, load_model
from dkrr.jobs.predict import evaluate_job
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from tests.jobs.retrain.project import in_process
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


def test_a_job_with_intervals_counts_held_out_rows_and_keeps_quantiles(tmp_path: Path, cluster_client: Any) -> None:
    rng = np.random.default_rng(3)
    x, weight, held_out = (
        rng.standard_normal((260, 3)) * [1, 10, 0.1],
        rng.uniform(0.5, 2, 260),
        np.arange(260) % 4 == 0,
    )
    y = np.sin(x[:, 0]) + 0.1 * x[:, 1] + 0.1 * rng.standard_normal(260) + 7
    table, form = np.column_stack([x, weight, held_out, y]), {"delimiter": ",", "fmt": "%.17g", "comments": ""}
    np.savetxt(tmp_path / "rows.csv", table, header="a,b,c,w,held,y", **form)
    data = {"path": "rows.csv", "target": ["y"], "features": ["a", "b", "c"], "weight": "w", "standardize": True}
    document = {
        "data": data,
        "evaluate": {"mask": "held", "intervals": 0.8},
        "model": {"kernel": "rbf", "gamma": 0.3, "alpha": 0.05, "fit_intercept": True},
        "solver": {"name": "cholesky", "precision": "float64", "tile_size": 64},
        "cluster": {"scheduler": cluster_client.scheduler.address},
    }
    summary = fit_job(JobSpec.from_dict(document, base=tmp_path))
    lower, upper = (np.ravel(end) for end in load_model(summary.model_path).predict_interval(x[held_out], 0.8))
    inside = float(np.mean((lower <= y[held_out]) & (y[held_out] <= upper)))
    assert summary.score is not None
    assert (summary.score.intervals, summary.score.coverage) == (0.8, [pytest.approx(inside)])
    assert 0.6 < inside < 0.95
    # the command counts 90 % unless told
    np.savetxt(tmp_path / "new.csv", np.column_stack([x, y]), header="a,b,c,y", **form)
    assert 0.8 < evaluate_job(summary.model_path, str(tmp_path / "new.csv"))["inside 90.0% intervals"] <= 1


def test_a_model_at_an_address_that_is_too_large_for_memory_gets_its_quantiles(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    monkeypatch.setattr("dkrr.models.model.IN_MEMORY_BYTES", 0)
    X = np.random.default_rng(3).standard_normal((120, 3))
    ingest(X, tmp_path / "d.zarr", y=X[:, 0])
    document = {
        "data": {"path": "d.zarr"},
        "evaluate": {"intervals": 0.9, "leave_one_out": True},
        "model": {"kernel": "rbf", "gamma": 0.3, "alpha": 0.05},
        "solver": {"name": "cholesky", "tile_size": 64},
        "storage": bucket.storage(),
        "output": {"directory": bucket.plain("runs/a")},
    }
    summary = fit_job(JobSpec.from_dict(document, base=tmp_path))
    lower, upper = load_model(summary.model_path).predict_interval(X, 0.9)
    assert (lower < upper).all()
