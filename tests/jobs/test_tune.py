"""A job in, a job with kernel, widths and alpha out: what is written, what it says, and that it can be planned."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune import TuneSummary, tune_job

N = 300
TUNE = {"kernels": ["rbf"], "search_rows": [60, 120], "rows": 200}
Make = Callable[..., JobSpec]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(4)
    x = rng.uniform(-2, 2, (N, 3)) * [1, 10, 0.1] + [0, 5, 0]
    y = 50 + 7 * np.sin(2 * x[:, 0]) + 0.2 * x[:, 1] + 0.5 * rng.standard_normal(N)
    root = tmp_path_factory.mktemp("job")
    mask = (np.arange(N) % 5 == 0).astype(float)
    table = np.column_stack([x, mask, y])
    np.savetxt(root / "rows.csv", table, delimiter=",", fmt="%.17g", header="a,b,c,held,y", comments="")
    return root


def document(folder: Path, address: str, **tables: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "data": {"path": str(folder / "rows.csv"), "target": ["y"], "features": ["a", "b", "c"], "standardize": True},
        "evaluate": {"mask": "held", "metric": "rmse"},
        "solver": {"tile_size": 64},
        "cluster": {"scheduler": address},
        "output": {"directory": str(folder / "runs/first")},
        "tune": TUNE,
    }
    for name, changed in tables.items():
        job[name] = job.get(name, {}) | changed
    return job


@pytest.fixture(scope="module")
def job(folder: Path, cluster_client: Any) -> JobSpec:
    return JobSpec.from_dict(document(folder, cluster_client.scheduler.address), base=folder)


@pytest.fixture(scope="module")
def summary(job: JobSpec, folder: Path) -> TuneSummary:
    return tune_job(job, folder / "best.toml", picture=True)


def test_the_job_that_is_written(summary: TuneSummary, folder: Path, job: JobSpec) -> None:
    best = JobSpec.load(folder / "best.toml")
    chosen = summary.result.best
    assert (best.data, best.evaluate, best.solver, best.tune) == (job.data, job.evaluate, job.solver, None)
    assert (best.model.alpha, best.model.kernel) == (chosen.alpha, "rbf")
    assert (best.output.directory, best.output.store) == (str(folder / "runs/best"), job.store)
    document = tomllib.loads((folder / "best.toml").read_text())
    assert document["data"]["path"] == "rows.csv"  # seen from its folder
    if chosen.kind == "per_feature":
        assert document["model"]["kernel_params"]["length_scale"] == chosen.widths.tolist()
    text = (folder / "best.toml").read_text()
    assert "# Chosen by dkrr tune (seed 0) for 240 training rows" in text
    (line,) = [line for line in text.splitlines() if line.endswith("chosen")]
    assert f"{chosen.loo_rmse:.4f}" in line


def test_the_job_can_be_fitted(summary: TuneSummary, folder: Path) -> None:
    fitted = fit_job(folder / "best.toml")
    assert fitted.score is not None
    assert fitted.score.value("rmse") < 0.8  # the noise is 0.5, the deviation of the target about 5
    assert fitted.score.rmse_whitened is not None
    assert abs(fitted.score.rmse_whitened[0] - summary.result.best.loo_rmse) < 0.06
