"""A job from its file to model, predictions and scores: what is written, what is found again, what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import StoreMismatchError, load_model, make_kernel
from dkrr.jobs.plan import plan as make_plan
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from tests.jobs.helpers import Make, job_maker
from tests.reference import dense_krr

N = 230
RNG = np.random.default_rng(11)
X = RNG.standard_normal((N, 4)) * [1, 10, 0.1, 1] + [0, 5, 0, 0]
Y = np.sin(X[:, 0]) + 0.1 * X[:, 1] + 0.05 * RNG.standard_normal(N) + 7


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows as a CSV file without a header; the last column is the target, the one before it the mask."""
    mask = (np.arange(N) % 5 == 0).astype(float)
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, mask, Y]), delimiter=",", fmt="%.17g")
    return tmp_path / "rows.csv"


@pytest.fixture
def make(tmp_path: Path, table: Path, cluster_client: Any) -> Make:
    """A job on the rows of ``table``, run by the workers that the module shares."""

    document: dict[str, Any] = {
        "data": {"path": str(table), "target": [-1], "features": [0, 1, 2, 3], "header": False},
        "model": {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1},
        "solver": {"tile_size": 64},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a")},
    }
    return job_maker(document, tmp_path)


def dual_coef(job: JobSpec) -> np.ndarray:
    model = load_model(Path(job.output.directory) / "model.zarr")
    return model.dual_coef.read(0, model.num_rows)


def rbf(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return make_kernel("rbf", gamma=0.2)(a, b)


def test_a_job_writes_its_run(make: Make, tmp_path: Path) -> None:
    job = make()
    phases: list[str] = []
    summary = fit_job(job, progress=lambda phase, *_: phases.append(phase))
    run = tmp_path / "runs/a"
    documents = ["driver", "figures", "job", "plan", "result", "samples", "status"]
    others = ["events", "job.toml", "model.zarr", "report.html"]
    assert {path.name for path in run.iterdir()} == {*(f"{name}.json" for name in documents), *others}
    np.testing.assert_allclose(dual_coef(job)[:, 0], dense_krr(rbf(X, X), Y, 0.1), rtol=1e-9)
    assert JobSpec.load(run / "job.toml") == job
    assert json.loads((run / "result.json").read_text())["tiles_computed"] == summary.tiles_total == 10
    assert max(summary.backward_error) < 1e-12
    assert set(summary.seconds) >= {"prepare", "start", "factorise", "solve", "residual", "total"}
    assert {phase.partition(" ")[0] for phase in phases} >= {"factorise", "solve", "residual"}
    assert all(peak > 10**7 for peak in summary.peak_rss_bytes.values())


def test_a_directory_of_another_job_is_refused(make: Make, tmp_path: Path) -> None:
    fit_job(make())
    with pytest.raises(
        StoreMismatchError, match=r"holds another job .*\[model\] alpha: 0\.1 there, 3\.0 wanted"
    ) as error:
        fit_job(make(model={"alpha": 3.0}))
    assert error.value.fields == ["[model] alpha: 0.1 there, 3.0 wanted"]
    # where it runs is not what it is
    fit_job(make(cluster={"workers": 1}))


def test_a_plan_counts_what_is_there(make: Make) -> None:
    before = make_plan(make())
    assert before.disk_present_bytes == 0
    fit_job(make())
    after = make_plan(make())
    assert after.disk_present_bytes == before.disk_bytes["factor"] > after.disk_needed_bytes
    # the factor of another ridge or kernel has the same shape, and saves this job nothing
    for other in ({"alpha": 0.2}, {"gamma": 0.7}):
        assert make_plan(make(model=other)).disk_present_bytes == 0
