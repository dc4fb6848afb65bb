"""Jobs with each solver: from a file to a model, its record, what is shown of it, and what a later attempt goes by."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dkrr import load_model
from dkrr.errors import ConvergenceError, StoreMismatchError
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.plan import plan as make_plan
from dkrr.jobs.predict import evaluate_job, predict_job
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from tests.jobs.helpers import Make, job_maker
from tests.reference import brute_leave_one_out, dense_bordered, dense_krr, reference_kernel

N, D = 300, 3
RNG = np.random.default_rng(5)
X = RNG.standard_normal((N, D))
Y = np.stack([7 + 3 * np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1) + 0.1 * RNG.standard_normal((N, 2))
WEIGHT = RNG.uniform(0.5, 2, N) * (np.arange(N) % 8 > 0)
WHITE, TARGETS = (X - X.mean(0)) / X.std(0), (Y - Y.mean(0)) / Y.std(0)


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    """A weighted job of two targets on whitened rows, by the workers that the module shares."""
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, WEIGHT, Y]), delimiter=",", fmt="%.17g")
    document: dict[str, Any] = {
        "data": {"path": "rows.csv", "target": [4, 5], "weight": 3, "header": False, "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1},
        "solver": {"tile_size": 128},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a"), "store": str(tmp_path / "store")},
    }
    return job_maker(document, tmp_path)


WAYS = {
    "auto": ({"name": "auto"}, {}, ("cholesky", "float64")),
    "mixed": ({"name": "cholesky", "precision": "mixed"}, {}, ("cholesky", "mixed")),
    "cg, mixed": ({"name": "cg", "precision": "mixed", "rank": 60}, {}, ("cg", "mixed")),
    "cg, stored": ({"name": "cg", "gram": "stored", "preconditioner": "none"}, {}, ("cg", "float64")),
    "intercept": ({"name": "cholesky"}, {"fit_intercept": True}, ("cholesky", "float64")),
    "primal": ({"name": "primal", "tile_size": "auto"}, {"kernel": "poly", "gamma": 0.3}, ("primal", "float64")),
    "nystrom": (
        {"name": "nystrom", "num_centers": int((WEIGHT > 0).sum())},
        {"fit_intercept": True},
        ("nystrom", "float64"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_solver_gives_the_answer_and_its_record(way: str, make: Make, tmp_path: Path) -> None:
    solver, model_keys, recorded = WAYS[way]
    has_intervals = {"intervals": 0.8} if way == "intercept" else {}
    job = make(solver=solver, model=model_keys, evaluate={"path": "rows.csv"} | has_intervals)
    phases: set[str] = set()
    summary = fit_job(job, progress=lambda phase, *_: phases.add(phase.partition(" ")[0]))
    planned, model = summary.plan, load_model(summary.model_path)
    K = model.kernel(WHITE, WHITE)
    intercept = np.zeros(2)
    if "fit_intercept" in model_keys:
        dual_coef, intercept = dense_bordered(K, TARGETS, 0.1, WEIGHT)
        np.testing.assert_allclose(summary.intercept, intercept, rtol=1e-4)
        assert f"{intercept[0]:.4g}" in repr(summary)
        assert "(of the whitened target)" in describe(summary.model_path)[1]["intercept"]
    else:
        dual_coef = dense_krr(K, TARGETS, 0.1, WEIGHT)
        assert summary.intercept is None
    expected = (K @ dual_coef + intercept) * Y.std(0) + Y.mean(0)
    np.testing.assert_allclose(model.predict(X), expected, rtol=0, atol=1e-4)
    assert (summary.solver, summary.precision) == recorded == (planned.solver, planned.precision)
    assert describe(summary.model_path)[1]["solver"].startswith(recorded[0])
    assert ("approximation" in repr(summary)) == (way == "nystrom")
    run = tmp_path / "runs/a"
    documents = ["driver", "figures", "job", "plan", "result", "samples", "status"]
    others = ["events", "job.toml", "model.zarr", "report.html"]
    assert {path.name for path in run.iterdir()} == {*(f"{name}.json" for name in documents), *others}
    assert JobSpec.load(run / "job.toml") == job
    assert all(peak > 10**7 for peak in summary.peak_rss_bytes.values())
    result = json.loads((run / "result.json").read_text())
    if recorded == ("cholesky", "float64"):
        np.testing.assert_allclose(model.dual_coef.read(0, model.num_rows), dual_coef, rtol=1e-9)
        assert result["tiles_computed"] == summary.tiles_total == 6
        assert max(summary.backward_error) < 1e-12
        assert set(summary.seconds) >= {"prepare", "start", "factorise", "solve", "residual", "total"}
        assert phases >= {"factorise", "solve", "residual"}
    if has_intervals:
        lower, upper = model.predict_interval(X, 0.8)
        inside = np.mean((lower <= Y) & (upper >= Y), axis=0)
        assert (summary.score.intervals, summary.score.coverage) == (0.8, pytest.approx(inside))
        # the command counts 90 % unless told
        assert 0.8 < evaluate_job(summary.model_path, str(tmp_path / "rows.csv"))["inside 90.0% intervals"] <= 1
    if recorded[0] in ("cholesky", "cg"):  # each phase that took time has its estimate beside it
        others = {"prepare", "total", "apply", "gram", "evaluate"}
        assert set(result["seconds"]) - others <= set(result["plan"]["estimated_seconds"])
    assert result["score"]["rmse"] == pytest.approx(np.sqrt(((expected - Y) ** 2).mean(0)), rel=1e-3)
    assert not verify(str(run))
    np.save(tmp_path / "new.npy", X[:20])
    assert predict_job(summary.model_path, str(tmp_path / "new.npy"), str(tmp_path / "out.npy")).num_rows == 20
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), model.predict(X[:20]), rtol=1e-9)


def test_what_is_there_already(make: Make, tmp_path: Path) -> None:
    job = make(solver={"name": "cholesky"})
    assert make_plan(job).disk_present_bytes == 0
    fit_job(job)
    after = make_plan(job)
    assert after.disk_present_bytes == after.disk_bytes["factor"] > after.disk_needed_bytes
    # the factor of another ridge or kernel has the same shape, and saves this job nothing
    for other in ({"alpha": 0.2}, {"gamma": 0.7}):
        assert make_plan(make(solver={"name": "cholesky"}, model=other)).disk_present_bytes == 0
    said = "[model] alpha: 0.1 there, 3.0 wanted"
    with pytest.raises(StoreMismatchError, match=rf"holds another job .*{re.escape(said)}") as error:
        fit_job(make(solver={"name": "cholesky"}, model={"alpha": 3.0}))
    assert error.value.fields == [said]
    # where it runs is not what it is
    fit_job(make(solver={"name": "cholesky"}, cluster={"workers": 1}))


@pytest.mark.parametrize(
    "solver",
    [{"precision": "mixed", "tol": 1e-12}, {"name": "cg", "tol": 1e-12}],
    ids=["mixed", "cg"],
)
def test_a_job_leaves_out_every_row(make: Make, tmp_path: Path, solver: dict[str, Any]) -> None:
    keys = {"evaluate": {"leave_one_out": True}, "model": {"fit_intercept": True}}
    summary = fit_job(make(solver={"name": "cholesky"} | solver, **keys))
    assert summary.plan.seconds["leave_one_out"] > 0
    K = reference_kernel({"kernel": "rbf", "gamma": 0.2}, WHITE, WHITE)
    residuals = Y.std(0) * brute_leave_one_out(K, TARGETS, 0.1, WEIGHT, intercept=True)
    figures = json.loads((tmp_path / "runs/a/result.json").read_text())["leave_one_out"]
    np.testing.assert_allclose(figures["rmse"], np.sqrt(WEIGHT @ residuals**2 / WEIGHT.sum()), rtol=1e-6)
    group: Any = zarr.open_group(tmp_path / "runs/a/leave_one_out.zarr", mode="r")
    np.testing.assert_allclose(group["residuals"][...], residuals, rtol=1e-6, atol=1e-7)
    assert group.attrs["gcv"] == figures["gcv"]
    assert "generalised cross validation" in repr(summary)
    # the fit's own factor where it has one
    assert len(list((tmp_path / "store/factors").glob("*.zarr"))) == 1 + ("mixed" in solver.values())


def test_an_answer_that_did_not_converge_is_refused_or_named(make: Make, tmp_path: Path) -> None:
    solver = {"name": "cg", "preconditioner": "none", "max_iter": 3}
    with pytest.raises(ConvergenceError):
        fit_job(make(solver=solver))
    assert not (tmp_path / "runs/a/model.zarr").exists()
    summary = fit_job(make(solver=solver | {"allow_unconverged": True}))
    assert not summary.converged
    facts = describe(summary.model_path)[1]
    assert "NOT CONVERGED" in facts["solver"]
    assert facts["allow unconverged"] is True
    assert "not converged" in repr(summary)
