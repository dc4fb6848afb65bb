"""Runs for reports: real fits of a few hundred rows, their tasks in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.jobs.run import fit_job
from dkrr.jobs.run_directory import RunDirectory
from tests.jobs.helpers import job_maker
from tests.jobs.retrain.project import in_process

HOSTILE = "<script>alert(1)</script>"


def write_rows(path: Path, num_rows: int = 400, num_features: int = 3, *, names: tuple[str, ...] = ()) -> Path:
    """A CSV file with a header; the last column is a smooth target of the others."""
    draws = np.random.default_rng(7)
    X = draws.standard_normal((num_rows, num_features))
    y = 40 + 5 * np.sin(X[:, 0]) + X[:, 1] * X[:, -1] + 0.1 * draws.standard_normal(num_rows)
    header = [*(names or [f"x{k}" for k in range(num_features)]), "target"]
    np.savetxt(path, np.column_stack([X, y]), fmt="%.9g", delimiter=",", header=",".join(header), comments="")
    return path


def fit_here(folder: Path, name: str = "run", progress: Any = None, **tables: Any) -> RunDirectory:
    """Fit rows of ``folder`` without a cluster; tables of the job can be changed."""
    rows = folder / "rows.csv"
    if not rows.exists():
        write_rows(rows)
    document: dict[str, Any] = {
        "data": {"path": str(rows), "target": [-1], "standardize": True},
        "evaluate": {"fraction": 0.25, "metric": "rmse"},
        "model": {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1},
        "solver": {"name": "cholesky", "tile_size": 128},
        "cluster": {"workers": 1},
        "output": {"directory": str(folder / "runs" / name)},
    }
    kept = {table: keys for table, keys in document.items() if tables.get(table, ()) is not None}
    job = job_maker(kept, folder)(**{table: keys for table, keys in tables.items() if keys is not None})
    with pytest.MonkeyPatch.context() as patch:
        in_process(patch)
        fit_job(job, progress=progress)
    return RunDirectory(job.directory)
