"""Jobs with each solver: from a file to a model, its record, what is shown of it, and what a later attempt goes by.

Of jobs whose data has grown: what is frozen, what is continued, what is said, and when all is fitted anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from dkrr import load_model
from dkrr.dataset import append, ingest, open_dataset, row_hash_fraction
from dkrr.errors import ConvergenceError, StoreMismatchError
from dkrr.jobs.facts import reused_rows
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.plan import plan as make_plan
from dkrr.jobs.predict import evaluate_job, predict_job
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from tests.fit.test_planner import MACHINE
from tests.jobs.helpers import Make, job_maker
from tests.jobs.retrain.project import in_process
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
    memory = {"workers": 1, "memory_limit": 3 * 2**30}
    fit_job(make(solver={"name": "cholesky"}, cluster=memory))
    assert json.loads((tmp_path / "runs/a/plan.json").read_text())["memory_limit_bytes"] == 3 * 2**30


@pytest.mark.parametrize(
    "solver",
    [{"precision": "mixed", "tol": 1e-12}, {"name": "cg", "tol": 1e-12}],
    ids=["mixed", "cg"],
)
@pytest.mark.parametrize("keep", ["factor", "model"])
def test_a_job_leaves_out_every_row(make: Make, tmp_path: Path, solver: dict[str, Any], keep: str) -> None:
    keys = {"evaluate": {"leave_one_out": True}, "model": {"fit_intercept": True}}
    spec = make(solver={"name": "cholesky"} | solver, **keys)
    summary = fit_job(spec.model_copy(update={"output": spec.output.model_copy(update={"keep": keep})}))
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
    factors = [str(path) for path in (tmp_path / "store/factors").glob("*.zarr")]
    assert len(factors) == (1 + ("mixed" in solver.values())) * (keep == "factor")
    assert sorted(factors) == sorted(summary.kept)


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


# --- data that has grown ----------------------------------------------------------------------------------------------

MORE_X = RNG.standard_normal((900, 4)) * [1, 10, 0.1, 3] + [0, 50, 0, -7]
MORE_Y = np.sin(MORE_X[:, 0]) + MORE_X[:, 1] / 20 + 0.1 * RNG.standard_normal(len(MORE_X))
KERNEL = {"kernel": "rbf", "gamma": 0.1}

DOCUMENT: dict[str, Any] = {
    "data": {"path": "data.zarr", "standardize": True},
    "evaluate": {"fraction": 0.2},
    "model": KERNEL | {"alpha": 0.1},
    "solver": {"name": "cholesky", "tile_size": 64, "precision": "float64"},
    "cluster": {"workers": 1},
    "output": {"directory": "run", "store": "store"},
}


@pytest.fixture
def grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Jobs whose tasks run in this process, planned for a machine that is not measured."""
    in_process(monkeypatch)
    monkeypatch.setattr("dkrr.jobs.plan.measure_machine", lambda *_, **__: MACHINE)
    return job_maker(DOCUMENT, tmp_path)


def grow(folder: Path, start: int, stop: int, shift: float = 0.0) -> None:
    append(MORE_X[start:stop] + shift, folder / "data.zarr", y=MORE_Y[start:stop])


def test_a_job_on_grown_data_continues(grown: Make, tmp_path: Path) -> None:
    grow(tmp_path, 0, 600)
    first = fit_job(grown())
    before = load_model(first.model_path)
    grow(tmp_path, 600, 640)
    again = fit_job(grown())
    model, scaling, rows = load_model(again.model_path), before.scaling, before.num_rows
    # the scaling is that of the first fit, and so are tiles and centre
    assert model.scaling == scaling
    factor, scaled = again.reused["factor"], again.reused["scaling"]
    assert (factor["rows"], factor["of_rows"], scaled["scaling"], scaled["rows"]) == (
        rows,
        model.num_rows,
        "frozen",
        600,
    )
    assert again.tiles_computed < first.tiles_computed
    train = np.flatnonzero(~row_hash_fraction(0, 640, 0.2))
    A, B = ((MORE_X[some] - scaling.x_mean) / scaling.x_std for some in (train, slice(200)))
    dual_coef = dense_krr(reference_kernel(KERNEL, A, A), (MORE_Y[train] - scaling.y_mean) / scaling.y_std, 0.1)
    expected = reference_kernel(KERNEL, B, A) @ dual_coef * scaling.y_std + scaling.y_mean
    np.testing.assert_allclose(model.predict(MORE_X[:200].copy()), expected, rtol=1e-9, atol=1e-9)
    # what is said is the same everywhere
    documents = [json.loads((tmp_path / f"run/{name}.json").read_text()) for name in ("result", "status", "plan")]
    assert [found["reused"]["factor"]["rows"] for found in documents] == [rows] * 3
    assert any("continues a factor of the first" in note for note in documents[-1]["notes"])
    assert any(f"{rows:,} of {model.num_rows:,} rows of the factor" in text for _, text in again.facts())
    shown = json.loads((tmp_path / "run/figures.json").read_text())["data"]
    np.testing.assert_allclose([item["mean"] for item in shown["features"]], MORE_X[train].mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose([item["std"] for item in shown["features"]], MORE_X[train].std(axis=0), rtol=1e-9)
    assert (
        "by the statistics of the training rows among the first 600 rows" in (tmp_path / "run/report.html").read_text()
    )
    assert fit_job(grown()).tiles_computed == 0


def test_drift_beyond_the_limit_fits_anew(grown: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    grow(tmp_path, 0, 500)
    before = load_model(fit_job(grown()).model_path).scaling
    grow(tmp_path, 500, 600, shift=1.3)  # column x2 has a spread of 0.1
    again = fit_job(grown())
    found = again.reused["scaling"]
    assert (found["scaling"], found["drift"]["column"], "factor" in again.reused) == ("anew", "x2", False)
    assert found["drift"]["value"] == pytest.approx(13, rel=0.1)
    assert "fitted anew with statistics of all rows" in caplog.text
    assert load_model(again.model_path).scaling != before
    # the lineage begins here
    grow(tmp_path, 600, 620)
    third = fit_job(grown()).reused
    assert (third["scaling"]["rows"], third["scaling"]["scaling"], "factor" in third) == (600, "frozen", True)


def test_rows_far_from_a_frozen_centre_are_fitted_anew(grown: Make, tmp_path: Path) -> None:
    document = {name: keys for name, keys in DOCUMENT.items() if name != "evaluate"} | {"data": {"path": "data.zarr"}}
    job = job_maker(document, tmp_path)(solver={"tile_size": 200})
    x = np.random.default_rng(8).standard_normal((900, 4))
    ingest(x[:500], tmp_path / "data.zarr", y=MORE_Y[:500])
    fit_job(job)
    append(x[500:800] + 10, tmp_path / "data.zarr", y=MORE_Y[500:800])
    again = fit_job(job)
    assert "factor" not in again.reused
    found = again.reused["center"]
    assert (found["center"], found["rows"], found["drift"]["rows"], found["limit"]) == ("anew", 500, 300, 1.0)
    assert found["drift"]["value"] == pytest.approx(10, rel=0.1)
    np.testing.assert_allclose(load_model(again.model_path).center, open_dataset(tmp_path / "data.zarr").x_mean)
    said = "fitted anew, with the centre of all rows: 300 newer rows drift by"
    assert any(said in note for note in json.loads((tmp_path / "run/plan.json").read_text())["notes"])
    assert "that of all rows, anew" in dict(reused_rows(again.reused))["centre"]
    # the lineage begins here: judged are all rows that came after these
    append(x[800:850] + 6, tmp_path / "data.zarr", y=MORE_Y[800:850])
    more = fit_job(job).reused
    assert (more["center"]["center"], more["center"]["rows"], more["factor"]["rows"]) == ("frozen", 800, 800)
