"""Intervals and standard deviations of jobs: what a fit keeps, and the columns and shares that commands give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import KernelRidge, load_model
from dkrr.jobs.predict import evaluate_job
from dkrr.jobs.run import fit_job
from tests.jobs.helpers import Make, job_maker

N = 260
RNG = np.random.default_rng(3)
X = RNG.standard_normal((N, 3)) * [1, 10, 0.1]
Y = np.sin(X[:, 0]) + 0.1 * X[:, 1] + 0.1 * RNG.standard_normal(N) + 7
WEIGHT = RNG.uniform(0.5, 2, N)
HELD_OUT = np.arange(N) % 4 == 0


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    """A weighted, whitened job whose held-out rows are counted against 80 % intervals."""
    columns = np.column_stack([X, WEIGHT, HELD_OUT, Y])
    np.savetxt(tmp_path / "rows.csv", columns, delimiter=",", fmt="%.17g", header="a,b,c,w,held,y", comments="")

    document: dict[str, Any] = {
        "data": {
            "path": str(tmp_path / "rows.csv"),
            "target": ["y"],
            "features": ["a", "b", "c"],
            "weight": "w",
            "standardize": True,
        },
        "evaluate": {"mask": "held", "intervals": 0.8},
        "model": {"kernel": "rbf", "gamma": 0.3, "alpha": 0.05, "fit_intercept": True},
        "solver": {"name": "cholesky", "precision": "float64", "tile_size": 64},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a"), "store": str(tmp_path / "store")},
    }
    return job_maker(document, tmp_path)


def reference() -> tuple[KernelRidge, float, float]:
    """The same fit in memory on rows whitened by hand, with mean and standard deviation of y."""
    x, y = X[~HELD_OUT], Y[~HELD_OUT]
    model = KernelRidge(alpha=0.05, kernel="rbf", gamma=0.3, fit_intercept=True)
    model.fit((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std(), sample_weight=WEIGHT[~HELD_OUT])
    return model, float(y.mean()), float(y.std())


def whitened(rows: np.ndarray) -> np.ndarray:
    x = X[~HELD_OUT]
    return (rows - x.mean(0)) / x.std(0)


def test_a_job_with_intervals_counts_held_out_rows_and_keeps_quantiles(make: Make, tmp_path: Path) -> None:
    summary = fit_job(make())
    model, mean, std = reference()
    lower, upper = model.predict_interval(whitened(X[HELD_OUT]), 0.8)
    expected = float(np.mean((lower * std + mean <= Y[HELD_OUT]) & (Y[HELD_OUT] <= upper * std + mean)))
    assert summary.score is not None
    assert (summary.score.intervals, summary.score.coverage) == (0.8, [expected])
    assert 0.6 < expected < 0.95
    saved = load_model(summary.model_path)
    found = np.stack(saved.predict_interval(X[HELD_OUT], 0.8))
    np.testing.assert_allclose(found[:, :, 0] if found.ndim == 3 else found, np.stack([lower, upper]) * std + mean)
    # the command counts 90 % unless told
    np.savetxt(tmp_path / "new.csv", np.column_stack([X, Y]), delimiter=",", header="a,b,c,y", comments="")
    assert 0.8 < evaluate_job(summary.model_path, str(tmp_path / "new.csv"))["inside 90.0% intervals"] <= 1
