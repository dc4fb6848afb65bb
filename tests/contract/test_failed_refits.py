"""A refit that fails leaves the fit that was there, whole: attributes, predictions, leave-one-out, intervals.

A run says so to whoever uses its model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dkrr
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

RNG = np.random.default_rng(0)
X = RNG.standard_normal((60, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RNG.standard_normal(60)
TWICE = np.repeat(RNG.standard_normal((30, 5)), 2, axis=0)  # no factor without a ridge
STOPPED = {"solver": "cg", "max_iter": 1, "tol": 1e-14, "solver_params": {"preconditioner": "none"}}

ESTIMATORS: dict[str, Any] = {
    "memory": lambda: dkrr.KernelRidge(0.1),
    "tiles": lambda: dkrr.KernelRidge(0.1, tile_size=16),
    "primal": lambda: dkrr.KernelRidge(0.1, solver="primal"),
    "grid": lambda: dkrr.KernelRidgeCV([0.1, 1.0], store_cv_results=True),
    "grid through tiles": lambda: dkrr.KernelRidgeCV([0.1, 1.0], tile_size=16),
}
FAILURES: dict[str, tuple[dict[str, Any], np.ndarray, np.ndarray, type[Exception]]] = {
    "no factor": ({"solver": "cholesky"}, TWICE, np.ones(60), dkrr.NotPositiveDefiniteError),
    "not a number": ({}, X * np.nan, Y, dkrr.DataError),
    "not converged": (STOPPED, np.exp(TWICE), np.ones(60), dkrr.ConvergenceError),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_earlier_fit_stays_whole(name: str, failure: str) -> None:
    options, rows, targets, error = FAILURES[failure]
    est = ESTIMATORS[name]().fit(pd.DataFrame(X, columns=["a", "b", "c"]), Y)
    frame, given = pd.DataFrame(X, columns=["a", "b", "c"]), est.get_params()
    X_before = est.predict(frame)
    before = {key: value for key, value in vars(est).items() if key not in given and key != "_unfinished"}
    left_out = est.leave_one_out().residuals
    ridge = {"alphas": [0.0, 1e-16]} if "alphas" in given else {"alpha": 0.0}
    is_refused = "alphas" in given and options is STOPPED  # no grid by iterations
    with pytest.raises(dkrr.ParameterError if is_refused else error):
        est.set_params(**(ridge | options)).fit(rows, targets)
    est.set_params(**given)
    after = {key: value for key, value in vars(est).items() if key not in given and key != "_unfinished"}
    assert after.keys() == before.keys()
    assert all(after[key] is before[key] for key in before)
    assert np.array_equal(est.predict(frame), X_before)
    assert np.array_equal(est.leave_one_out().residuals, left_out)
    assert est.interval_coverage(frame, Y, 0.8) == pytest.approx(0.8, abs=0.1)


def test_a_first_fit_that_fails_leaves_nothing() -> None:
    est = dkrr.KernelRidge(0.0, solver="cholesky")
    with pytest.raises(dkrr.NotPositiveDefiniteError):
        est.fit(TWICE, np.ones(60))
    assert not [name for name in vars(est) if name.endswith("_")]
    with pytest.raises(ValueError, match="not fitted"):
        est.predict(TWICE)


def test_a_refit_that_works_takes_the_place_of_all() -> None:
    est = dkrr.KernelRidgeCV([0.1, 1.0], store_cv_results=True).fit(pd.DataFrame(X, columns=["a", "b", "c"]), Y)
    est.set_params(store_cv_results=False).fit(TWICE, np.ones(60))
    assert not hasattr(est, "cv_results_")
    assert not hasattr(est, "feature_names_in_")
    assert est.n_features_in_ == 5
    assert est.leave_one_out().residuals.shape == (60, 1)


JOB = """
[data]
path = "d.csv"
target = "y"
[evaluate]
fraction = 0.2
[model]
kernel = "rbf"
gamma = 50.0
alpha = 0.0
[solver]
name = "cholesky"
precision = "float64"
"""


def write_rows(number: int, *, twice: int = 0) -> None:
    rows = np.random.default_rng(number).random((number, 4))
    again = rows[:twice] + np.array([0, 0, 0, 1])
    np.savetxt("d.csv", np.vstack([rows, again]), delimiter=",", header="a,b,c,y", comments="")


def other_rows_without_a_factor(_: pytest.MonkeyPatch) -> None:
    write_rows(100, twice=20)
    run("fit", "job.toml", exits=5)


def other_rows_that_are_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(120)
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.run.solve_and_save", _interrupted)
        run("fit", "job.toml", exits=75)


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run of 100 rows, and rows to predict."""
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    Path("job.toml").write_text(JOB)
    write_rows(50)
    Path("d.csv").rename("new.csv")
    write_rows(100)
    run("fit", "job.toml")
    return tmp_path


@pytest.mark.parametrize(
    "fail", [other_rows_without_a_factor, other_rows_that_are_interrupted], ids=lambda fail: fail.__name__
)
def test_who_uses_the_model_of_a_run_whose_refit_failed_is_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, fail: Any
) -> None:
    fail(monkeypatch)
    state = "failed" if fail is other_rows_without_a_factor else "interrupted"
    for command in (
        ["predict", "job", "new.csv", "-o", "p.csv"],
        ["predict", "runs/job", "new.csv", "-o", "p.csv"],
        ["evaluate", "job", "new.csv"],
        ["models", "add", "demo", "job"],
    ):
        result = run(*command)
        assert f"job is {state}" in result.stderr
        assert "the model of an earlier attempt" in result.stderr
    assert "job is" not in run("predict", "runs/job/model.zarr", "new.csv", "-o", "p.csv").stderr, "it was named"
    run("models", "add", "demo", "job", "--promote", exits=4, said=(f"job is {state}", "hint: `dkrr resume job`"))
    assert "production" not in run("models", "list", "demo").stdout
    said = run("info", "runs/job").stdout
    assert state in said
    assert "relative residual" not in said, "that of an earlier fit"


def test_a_model_of_another_day_is_not_that_of_the_run(place: Path) -> None:
    shutil.copytree("runs/job/model.zarr", "old.zarr")
    write_rows(120)
    run("fit", "job.toml")
    run("info", "runs/job", "--verify")
    shutil.rmtree("runs/job/model.zarr")
    shutil.copytree("old.zarr", "runs/job/model.zarr")
    another = "another model than the one that"
    assert another in run("info", "runs/job", "--verify", exits=4).stdout
    run("predict", "runs/job", "new.csv", "-o", "p.csv", exits=4, said=another)
    run("models", "add", "demo", "job", "--promote", exits=4, said=another)
    run("predict", "runs/job/model.zarr", "new.csv", "-o", "p.csv")


def test_a_finished_run_is_used_without_a_word(place: Path) -> None:
    write_rows(120)
    run("fit", "job.toml")
    assert "job is" not in run("predict", "job", "new.csv", "-o", "p.csv").stderr
    run("models", "add", "demo", "job", "--promote")
    assert "relative residual" in run("info", "runs/job").stdout


def test_a_model_that_could_not_be_evaluated_has_no_figures_of_an_earlier_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(120)
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.run.score_dataset", _interrupted)
        run("fit", "job.toml", exits=75)
    model = dkrr.load_model("runs/job/model.zarr")
    assert 90 < model.num_rows < 110
    assert not Path("runs/job/result.json").exists()
    result = run("predict", "job", "new.csv", "-o", "p.csv")
    assert "job is interrupted" in result.stderr
    assert "not been evaluated" in result.stderr
    run("models", "add", "demo", "job", "--promote", exits=4)
    run("fit", "job.toml")
    assert Path("runs/job/result.json").exists()
