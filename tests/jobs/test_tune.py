"""A job in, a job with kernel, widths and alpha out: what is written, what it says, and that it can be fitted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune import tune_job


def test_the_job_that_is_written(tmp_path: Path, cluster_client: Any) -> None:
    rng = np.random.default_rng(4)
    x = rng.uniform(-2, 2, (300, 3)) * [1, 10, 0.1] + [0, 5, 0]
    y = 50 + 7 * np.sin(2 * x[:, 0]) + 0.2 * x[:, 1] + 0.5 * rng.standard_normal(300)
    table = np.column_stack([x, np.arange(300) % 5 == 0, y])
    np.savetxt(tmp_path / "rows.csv", table, delimiter=",", fmt="%.17g", header="a,b,c,held,y", comments="")
    document = {
        "data": {"path": "rows.csv", "target": ["y"], "features": ["a", "b", "c"], "standardize": True},
        "evaluate": {"mask": "held", "metric": "rmse"},
        "solver": {"tile_size": 64},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": "runs/first"},
        "tune": {"kernels": ["rbf"], "search_rows": [60, 120], "rows": 200},
    }
    job = JobSpec.from_dict(document, base=tmp_path)
    chosen = tune_job(job, tmp_path / "best.toml").result.best
    text, best = (tmp_path / "best.toml").read_text(), JobSpec.load(tmp_path / "best.toml")
    assert (best.data, best.evaluate, best.solver, best.tune) == (job.data, job.evaluate, job.solver, None)
    assert (best.model.alpha, best.model.kernel) == (chosen.alpha, "rbf")
    assert (best.output.directory, best.output.store) == (str(tmp_path / "runs/best"), job.store)
    found = tomllib.loads(text)
    assert found["data"]["path"] == "rows.csv"  # seen from its folder
    assert chosen.kind == "shared" or found["model"]["kernel_params"]["length_scale"] == chosen.widths.tolist()
    assert "# Chosen by dkrr tune (seed 0) for 240 training rows" in text
    (line,) = [line for line in text.splitlines() if line.endswith("chosen")]
    assert f"{chosen.loo_rmse:.4f}" in line
    score = fit_job(best).score
    assert score is not None
    assert score.value("rmse") < 0.8  # the noise is 0.5, the deviation of the target about 5
    assert score.rmse_whitened == pytest.approx([chosen.loo_rmse], abs=0.06)
