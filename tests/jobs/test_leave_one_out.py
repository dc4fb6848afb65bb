"""``[evaluate] leave_one_out``: figures in result and table, residuals in the run's folder, one factorisation."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from rich.console import Console

from dkrr.jobs.plan import plan
from dkrr.jobs.run import fit_job
from tests.jobs.helpers import Make, job_maker
from tests.reference import brute_leave_one_out, reference_kernel

N, GAMMA, ALPHA = 90, 0.2, 0.1
RNG = np.random.default_rng(5)
X = RNG.standard_normal((N, 3))
Y = np.stack([7 + 3 * np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1) + 0.1 * RNG.standard_normal((N, 2))
WEIGHT = RNG.uniform(0.5, 2, N) * (np.arange(N) % 8 > 0)


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    """A weighted job on whitened rows, with an intercept, that holds out nothing."""
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, WEIGHT, Y]), delimiter=",", fmt="%.17g")

    document: dict[str, Any] = {
        "data": {
            "path": str(tmp_path / "rows.csv"),
            "target": [4, 5],
            "weight": 3,
            "header": False,
            "standardize": True,
        },
        "evaluate": {"leave_one_out": True},
        "model": {"kernel": "rbf", "gamma": GAMMA, "alpha": ALPHA, "fit_intercept": True},
        "solver": {"name": "cholesky", "precision": "float64", "tile_size": 32},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a"), "store": str(tmp_path / "store")},
    }
    return job_maker(document, tmp_path)


def expected() -> np.ndarray:
    """Refits on the whitened rows, in the units of y."""
    rows, scale = (X - X.mean(axis=0)) / X.std(axis=0), Y.std(axis=0)
    K = reference_kernel({"kernel": "rbf", "gamma": GAMMA}, rows, rows)
    residuals = brute_leave_one_out(K, (Y - Y.mean(axis=0)) / scale, ALPHA, WEIGHT, intercept=True)
    return np.asarray(scale * residuals)


@pytest.mark.parametrize(
    "solver",
    [{}, {"precision": "mixed", "tol": 1e-12}, {"name": "cg", "precision": "float64", "tol": 1e-12}],
    ids=["cholesky", "mixed", "cg"],
)
def test_a_job_leaves_out_every_row(make: Make, tmp_path: Path, solver: dict[str, Any]) -> None:
    job = make(solver=solver)
    planned = plan(job)
    assert planned.estimated_seconds["leave_one_out"] > 0
    assert ("float64 factor" in planned.disk_bytes) == bool(solver)
    summary = fit_job(job)
    figures = json.loads((tmp_path / "runs/a/result.json").read_text())["leave_one_out"]
    residuals = expected()
    mean = WEIGHT @ residuals**2 / WEIGHT.sum()
    np.testing.assert_allclose(figures["rmse"], np.sqrt(mean), rtol=1e-6)
    group: Any = zarr.open_group(tmp_path / "runs/a/leave_one_out.zarr", mode="r")
    np.testing.assert_allclose(group["residuals"][...], residuals, rtol=1e-6, atol=1e-7)
    assert group.attrs["gcv"] == figures["gcv"]
    text = io.StringIO()
    Console(file=text, width=160).print(summary.table())
    assert "leave-one-out" in text.getvalue()
    assert "generalised cross validation" in text.getvalue()
    if not solver:  # the fit's own factor: no tile more, and none computed twice
        assert summary.tiles_computed == summary.tiles_total == 6
        assert len(list((tmp_path / "store/factors").glob("*.zarr"))) == 1
