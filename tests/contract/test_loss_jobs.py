"""Jobs with other losses than the square: from a table to predictions, as the estimators have them, and interrupted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from sklearn.metrics import balanced_accuracy_score, log_loss, mean_pinball_loss, recall_score

import dkrr
import dkrr.jobs.loss_fit
from dkrr.cli import main
from dkrr.errors import JobFileError
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from tests.jobs.retrain.project import in_process

pytestmark = pytest.mark.whole

RNG = np.random.default_rng(5)
N, M, D = 180, 60, 3
X = RNG.standard_normal((N + M, D))
Y = np.sin(2 * X[:, 0]) + 0.5 * X[:, 1] + 0.3 * RNG.standard_normal(N + M)
TWO = np.where(Y + 0.3 * RNG.standard_normal(N + M) > 0.2, "yes", "no")
THREE = np.array(["low", "middle", "up"])[np.digitize(Y, [-0.5, 0.5])]
WEIGHT = RNG.integers(0, 4, N + M).astype(float)
TOL = 1e-11
COMMON: dict[str, Any] = {"kernel": "rbf", "gamma": 0.4, "tol": TOL}

# name: [model] of the job, its target, the estimator of the same
CASES: dict[str, tuple[str, Any, Any]] = {
    "hinge": ('loss = "hinge"\nC = 2.0', TWO, dkrr.KernelSVC(2.0, **COMMON)),
    "hinge, defaults": ('loss = "hinge"', TWO, dkrr.KernelSVC(**COMMON)),
    "hinge, three classes": ('loss = "hinge"\nalpha = 0.25', THREE, dkrr.KernelSVC(2.0, **COMMON)),
    "squared hinge": ('loss = "squared_hinge"', TWO, dkrr.KernelSVC(loss="squared_hinge", **COMMON)),
    "logistic": ('loss = "logistic"\nC = 3.0', TWO, dkrr.KernelLogisticRegression(3.0, **COMMON)),
    "logistic, three classes": ('loss = "logistic"', THREE, dkrr.KernelLogisticRegression(**COMMON)),
    "epsilon insensitive": (
        'loss = "epsilon_insensitive"\nC = 4.0\nepsilon = 0.2', Y, dkrr.KernelSVR(4.0, epsilon=0.2, **COMMON)
    ),
    "epsilon insensitive, no intercept": (
        'loss = "epsilon_insensitive"\nfit_intercept = false', Y, dkrr.KernelSVR(fit_intercept=False, **COMMON)
    ),
    "squared epsilon insensitive": (
        'loss = "squared_epsilon_insensitive"', Y, dkrr.KernelSVR(loss="squared_epsilon_insensitive", **COMMON)
    ),
    "median": ('loss = "pinball"\nalpha = 0.2', Y, dkrr.KernelQuantileRegressor(alpha=0.2, **COMMON)),
    "quantiles": (
        'loss = "pinball"\nalpha = 0.2\nquantile = [0.1, 0.5, 0.9]', Y,
        dkrr.KernelQuantileRegressor(quantile=[0.1, 0.5, 0.9], alpha=0.2, **COMMON),
    ),
    "huber": ('loss = "huber"\nepsilon = 0.4', Y, dkrr.KernelHuberRegressor(epsilon=0.4, **COMMON)),
}  # fmt: skip


@pytest.fixture
def with_workers() -> None:
    """The job starts its workers, as it does outside of tests."""


@pytest.fixture(autouse=True)
def _no_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "with_workers" not in request.fixturenames:
        in_process(monkeypatch)


def table(folder: Path, y: Any, start: int, stop: int, name: str) -> None:
    frame = pd.DataFrame(X[start:stop], columns=["a", "b", "c"])
    frame.assign(answer=y[start:stop], w=WEIGHT[start:stop]).to_csv(folder / name, index=False)


def write(
    folder: Path, y: Any, model: str, *, data: str = "", evaluate: str = "", more: str = "", name: str = "job"
) -> Path:
    """A job file with its rows: the first N to fit, the last M to predict."""
    table(folder, y, 0, N, "train.csv")
    table(folder, y, N, N + M, "test.csv")
    one_hot = "one_hot = true\n" if np.asarray(y).dtype.kind == "U" else ""
    path = folder / f"{name}.toml"
    path.write_text(
        f'[data]\npath = "train.csv"\ntarget = "answer"\nfeatures = ["a", "b", "c"]\n{one_hot}{data}\n'
        f'[evaluate]\npath = "test.csv"\n{evaluate}\n[model]\nkernel = "rbf"\ngamma = 0.4\n{model}\n'
        f'[solver]\ntol = {TOL}\n[cluster]\nworkers = 1\nmemory_limit = "1GiB"\n{more}\n'
    )
    return path


def call(*words: Any, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == code, result.output + str(result.exception)
    return result


def run(path: Path) -> tuple[dict[str, Any], dkrr.Model, Path]:
    """Result, model and directory of a job that is fitted."""
    result = json.loads(call("fit", path, "--json").stdout)
    folder = Path(result["run_directory"])
    assert result == json.loads((folder / "result.json").read_text()) | {"plan": result["plan"]}
    return result, dkrr.load_model(folder / "model.zarr"), folder


def decisions(estimator: Any, rows: Any) -> Any:
    values = (estimator.decision_function if hasattr(estimator, "classes_") else estimator.predict)(rows)
    return values.reshape(len(rows), -1)


@pytest.mark.parametrize("case", CASES)
def test_a_job_gives_what_the_estimator_gives(case: str, tmp_path: Path) -> None:
    model_text, y, estimator = CASES[case]
    estimator.fit(X[:N], y[:N])
    result, model, folder = run(write(tmp_path, y, model_text))
    coefficients = model.dual_coef.read(0, model.num_rows)
    expected = estimator.dual_coef_.T
    order = np.lexsort(estimator.support_vectors_.T)
    mine = np.lexsort(model.x_fit.read(0, model.num_rows).T)
    if len(set(y.tolist())) == 2:
        np.testing.assert_array_equal(coefficients[:, 0], -coefficients[:, 1])
        coefficients = coefficients[:, 1:]
    np.testing.assert_allclose(coefficients[mine], expected[order], atol=1e-6 * np.abs(expected).max())
    predicted = model.predict(X[N:]).reshape(M, -1)
    found = decisions(estimator, X[N:])
    np.testing.assert_allclose(predicted[:, -found.shape[1] :], found, atol=1e-6 * np.abs(found).max())
    assert result["num_support"] == len(estimator.support_)
    assert len(result["certificates"]) == model.num_targets == len(result["history"])
    assert all(certificate["gap"] <= TOL for certificate in result["certificates"])
    assert [points[-1][1] for points in result["history"]] == [item["gap"] for item in result["certificates"]]
    provenance = model.provenance
    assert provenance["loss"] == result["loss"]["loss"] in model_text
    assert provenance["C"] == pytest.approx(0.5 / provenance["alpha"][0])
    assert provenance["C"] == pytest.approx(estimator._model.provenance["C"])
    assert provenance.get("epsilon") == estimator._model.provenance.get("epsilon")
    # every command that shows a run or a model
    for words in (["info", folder], ["info", folder / "model.zarr"], ["status", folder], ["report", folder]):
        shown = call(*words).output
        assert "relative residual" not in shown
    page = (folder / "report.html").read_text()
    assert "could not be made" not in page
    assert "Duality gaps" in page
    assert "support vectors" in page
    assert "duality gap" in call("info", folder).output
    assert "duality gap" in call("fit", tmp_path / "job.toml").output  # a table
    assert not list(folder.glob("loss-*.npy"))


@pytest.mark.parametrize("y", [TWO, THREE], ids=["two", "three"])
def test_labels_come_back_as_text_and_are_scored(y: Any, tmp_path: Path) -> None:
    estimator = dkrr.KernelSVC(**COMMON).fit(X[:N], y[:N])
    path = write(tmp_path, y, 'loss = "hinge"', evaluate='metric = "balanced_accuracy"')
    result, _, folder = run(path)
    call("predict", folder, tmp_path / "test.csv", "-o", tmp_path / "out.csv")
    frame = pd.read_csv(tmp_path / "out.csv")
    classes = sorted(set(y))
    assert list(frame.columns) == [f"answer={label}" for label in classes] + ["answer"]
    expected = estimator.predict(X[N:])
    assert (frame["answer"] == expected).all()
    accuracy = float(np.mean(expected == y[N:]))
    balanced = balanced_accuracy_score(y[N:], expected)
    assert result["metric"] == "balanced_accuracy"
    assert result["score"]["accuracy"] == pytest.approx(accuracy)
    assert result["score"]["balanced_accuracy"] == pytest.approx(balanced)
    assert result["score"]["rmse"] == []
    scores = json.loads(call("evaluate", folder, tmp_path / "test.csv", "--json").stdout)
    assert scores == pytest.approx({"rows": M, "accuracy": accuracy, "balanced accuracy": balanced})
    some = y[N:] != classes[1]  # a class that no row has
    pd.read_csv(tmp_path / "test.csv")[some].to_csv(tmp_path / "some.csv", index=False)
    scores = json.loads(call("evaluate", folder, tmp_path / "some.csv", "--json").stdout)
    recalls = recall_score(y[N:][some], expected[some], labels=sorted(set(y[N:][some])), average=None)
    assert scores["balanced accuracy"] == pytest.approx(np.mean(recalls))
    assert "no rmse" in call("evaluate", folder, tmp_path / "test.csv", "--metric", "rmse", code=4).stderr


@pytest.mark.parametrize("y", [TWO, THREE], ids=["two", "three"])
def test_logistic_models_have_a_log_loss(y: Any, tmp_path: Path) -> None:
    estimator = dkrr.KernelLogisticRegression(**COMMON).fit(X[:N], y[:N])
    result, _, folder = run(write(tmp_path, y, 'loss = "logistic"', evaluate='metric = "log_loss"'))
    expected = log_loss(y[N:], estimator.predict_proba(X[N:]))
    assert result["score"]["log_loss"] == pytest.approx(expected, rel=1e-6)
    call("predict", folder, tmp_path / "test.csv", "-o", tmp_path / "out.csv", "--proba")
    frame = pd.read_csv(tmp_path / "out.csv")
    np.testing.assert_allclose(frame.iloc[:, :-1].to_numpy(), estimator.predict_proba(X[N:]), atol=1e-6)
    assert (frame["answer"] == estimator.predict(X[N:])).all()
    scores = json.loads(call("evaluate", folder, tmp_path / "test.csv", "--metric", "log_loss", "--json").stdout)
    assert scores["log_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("with_workers")
def test_quantiles_are_columns_with_names_and_are_scored(tmp_path: Path) -> None:
    levels = [0.05, 0.5, 0.95]
    estimator = dkrr.KernelQuantileRegressor(quantile=levels, alpha=0.2, **COMMON).fit(X[:N], Y[:N])
    result, model, folder = run(write(tmp_path, Y, f'loss = "pinball"\nalpha = 0.2\nquantile = {levels}'))
    assert model.target_names == ["answer q0.05", "answer q0.5", "answer q0.95"]
    for output in ("out.csv", "out.parquet"):
        call("predict", folder, tmp_path / "test.csv", "-o", tmp_path / output)
    frame = pd.read_csv(tmp_path / "out.csv")
    assert list(frame.columns) == model.target_names
    expected = estimator.predict(X[N:])
    np.testing.assert_allclose(frame.to_numpy(), expected, atol=1e-6)
    losses = [mean_pinball_loss(Y[N:], column, alpha=q) for q, column in zip(levels, expected.T, strict=True)]
    inside = float(np.mean((expected[:, 0] <= Y[N:]) & (Y[N:] <= expected[:, 2])))
    assert result["metric"] == "pinball"
    assert result["score"]["pinball"] == pytest.approx(losses, rel=1e-5)
    assert (result["score"]["intervals"], result["score"]["coverage"]) == (0.9, [pytest.approx(inside)])
    scores = json.loads(call("evaluate", folder, tmp_path / "test.csv", "--json").stdout)
    assert scores["pinball loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert scores["inside 90.0% of the outer quantiles"] == pytest.approx(inside)
    assert "between the outer quantiles" in (folder / "report.html").read_text()


def test_one_quantile_keeps_the_name_of_the_target(tmp_path: Path) -> None:
    result, model, _ = run(write(tmp_path, Y, 'loss = "pinball"\nquantile = 0.25'))
    assert model.target_names == ["answer"]
    assert result["score"]["coverage"] is None
    expected = mean_pinball_loss(Y[N:], model.predict(X[N:]), alpha=0.25)
    assert result["score"]["pinball"] == pytest.approx([expected], rel=1e-6)


@pytest.mark.parametrize("case", ["hinge", "hinge, three classes", "quantiles", "epsilon insensitive"])
def test_weights_of_the_data_count(case: str, tmp_path: Path) -> None:
    model_text, y, estimator = CASES[case]
    estimator.fit(X[:N], y[:N], sample_weight=WEIGHT[:N])
    _, model, _ = run(write(tmp_path, y, model_text, data='weight = "w"'))
    found, expected = model.predict(X[N:]).reshape(M, -1), decisions(estimator, X[N:])
    np.testing.assert_allclose(found[:, -expected.shape[1] :], expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("case", ["hinge", "hinge, three classes", "quantiles", "epsilon insensitive"])
def test_standardized_rows(case: str, tmp_path: Path) -> None:
    model_text, y, estimator = CASES[case]
    mean, std = X[:N].mean(axis=0), X[:N].std(axis=0)
    result, model, folder = run(write(tmp_path, y, model_text, data="standardize = true"))
    if y.dtype.kind == "U":
        expected = decisions(estimator.fit((X[:N] - mean) / std, y[:N]), (X[N:] - mean) / std)
        assert model.scaling is not None
        assert set(model.scaling.y_std) == {1.0}
        assert result["score"]["accuracy"] == pytest.approx(np.mean(estimator.predict((X[N:] - mean) / std) == y[N:]))
    else:  # loss and alpha see whitened targets
        low, scale = y[:N].mean(), y[:N].std()
        estimator.fit((X[:N] - mean) / std, (y[:N] - low) / scale)
        expected = low + scale * decisions(estimator, (X[N:] - mean) / std)
    found = model.predict(X[N:]).reshape(M, -1)
    np.testing.assert_allclose(found[:, -expected.shape[1] :], expected, atol=1e-6 * np.abs(expected).max())
    call("evaluate", folder, tmp_path / "test.csv")


def test_several_targets(tmp_path: Path) -> None:
    frame = pd.DataFrame(X[:N], columns=["a", "b", "c"]).assign(y=Y[:N], z=Y[:N] ** 2)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    job = {
        "data": {"path": str(tmp_path / "rows.csv"), "target": ["y", "z"]},
        "model": {"kernel": "rbf", "gamma": 0.4, "loss": "epsilon_insensitive"},
        "solver": {"tol": TOL},
        "cluster": {"workers": 1},
        "output": {"directory": str(tmp_path / "run")},
    }
    fit_job(JobSpec.from_dict(job))
    found = dkrr.load_model(tmp_path / "run/model.zarr").predict(X[N:])
    expected = dkrr.KernelSVR(**COMMON).fit(X[:N], np.column_stack([Y, Y**2])[:N]).predict(X[N:])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    job["model"] |= {"loss": "pinball", "quantile": [0.1, 0.9]}
    with pytest.raises(JobFileError, match="2 targets; one target expected"):
        fit_job(JobSpec.from_dict(job | {"output": {"directory": str(tmp_path / "other")}}))


class Stop(Exception):
    """What a test raises in the place of a signal."""


def stopped_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> Callable[[], int]:
    """The fit stops right after so many checkpoints; the number of those that were made."""
    made = 0

    def reached(site: str, array: Any = None) -> None:
        nonlocal made
        made += 1
        if made == saves:
            raise Stop

    monkeypatch.setattr(dkrr.jobs.loss_fit, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(dkrr.jobs.loss_fit, "failpoint", reached)
    return lambda: made


@pytest.mark.parametrize(
    "case", ["hinge", "hinge, three classes", "quantiles", "logistic, three classes", "squared hinge", "huber"]
)
def test_an_interrupted_fit_goes_on(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.losses.decomposition.WORKING_SET", 16)  # so that there are rounds
    model_text, y, _ = CASES[case]
    with monkeypatch.context() as patch:
        num_saves = stopped_after(patch, 0)
        whole = json.loads(call("fit", write(tmp_path, y, model_text, name="whole"), "--json").stdout)
    assert num_saves() >= 4
    path = write(tmp_path, y, model_text)
    with monkeypatch.context() as patch:
        stopped_after(patch, num_saves() - 1)
        with pytest.raises(Stop):
            fit_job(path)
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    kept = np.load(left)
    assert kept.any()
    with monkeypatch.context() as patch:
        num_again = stopped_after(patch, 0)
        result, model, folder = run(path)
    assert num_again() <= num_saves() // 2
    assert result["reused"]["start"]["rows"] == N
    assert not list(folder.glob("loss-*.npy"))
    assert all(item["gap"] <= TOL for item in result["certificates"])
    expected = dkrr.load_model(whole["model_path"]).predict(X[N:])
    np.testing.assert_allclose(model.predict(X[N:]), expected, atol=1e-5 * np.abs(expected).max())
    # coefficients of other rows, or of another job, are none of this one
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        other = write(tmp_path, y, model_text + "\nfit_intercept = false", name="other")
        with pytest.raises(Stop):
            fit_job(other)
    assert not {item.name for item in (tmp_path / "runs/other").glob("loss-*.npy")} & {left.name}


@pytest.mark.parametrize("column", ["a", "answer", "w"])
def test_coefficients_of_other_rows_are_none_of_these(
    column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, Y, 'loss = "epsilon_insensitive"', data='weight = "w"')
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        with pytest.raises(Stop):
            fit_job(path)
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    frame = pd.read_csv(tmp_path / "train.csv")
    frame.loc[3, column] += 1.0
    frame.to_csv(tmp_path / "train.csv", index=False)
    with monkeypatch.context() as patch:
        stopped_after(patch, 2)
        with pytest.raises(Stop):
            fit_job(path)
    assert {left.name} < {item.name for item in (tmp_path / "runs/job").glob("loss-*.npy")}
    result, _, folder = run(path)
    assert result["converged"]
    assert not list(folder.glob("loss-*.npy"))


@pytest.mark.parametrize("spoiled", [b"", b"no array", b"\x93NUMPY"])
def test_a_damaged_checkpoint_costs_time_alone(spoiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, TWO, 'loss = "hinge"')
    with monkeypatch.context() as patch:
        stopped_after(patch, 1)
        with pytest.raises(Stop):
            fit_job(path)
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    left.write_bytes(spoiled)
    result, _, _ = run(path)
    assert "start" not in result["reused"]
    assert result["converged"]


def test_a_request_to_stop_is_heard_between_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.losses.decomposition.WORKING_SET", 16)
    monkeypatch.setattr("dkrr.jobs.runs.monitor.Monitor.is_cancelled", lambda self: False)
    seen: list[str] = []

    def cancelling(phase: str, done: int, *rest: Any) -> None:
        seen.append(phase)
        if done == 2:
            (tmp_path / "runs/job/cancel.json").write_text("{}")

    from dkrr.jobs.runs.monitor import Monitor

    check = Monitor.check

    def checked(self: Monitor) -> None:
        self._poll()  # as the heartbeat does every two seconds
        check(self)

    monkeypatch.setattr(Monitor, "check", checked)
    with pytest.raises(dkrr.DkrrError, match="cancelled on request"):
        fit_job(write(tmp_path, TWO, 'loss = "hinge"'), progress=cancelling)
    assert re.fullmatch(r"decomposition, iteration 2, gap \d\.\de[+-]\d\d", seen[-1])
    assert np.load(next((tmp_path / "runs/job").glob("loss-*.npy"))).any()
    assert "cancelled" in call("list", tmp_path / "runs").output


def test_too_few_iterations_are_an_error_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.losses.decomposition.WORKING_SET", 16)
    path = write(tmp_path, TWO, 'loss = "hinge"')
    text = path.read_text()
    path.write_text(text.replace("[solver]", "[solver]\nmax_iter = 2"))
    assert "duality gap" in call("fit", path, code=5).stderr
    assert "duality gap" in call("status", tmp_path / "runs/job").output
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    kept = left.read_bytes()
    path.write_text(text.replace("[solver]", "[solver]\nmax_iter = 2\nallow_unconverged = true"))
    result, model, folder = run(path)
    assert not result["converged"]
    assert not model.solution.converged
    assert "did NOT converge" in (folder / "report.html").read_text()
    assert "NOT CONVERGED" in call("info", folder / "model.zarr").output
    left.write_bytes(kept)
    path.write_text(text)
    result, _, _ = run(path)
    assert result["converged"]
    assert result["reused"]["start"]["source"] == left.name


def test_tol_is_that_of_gaps(tmp_path: Path) -> None:
    job: dict[str, Any] = {"data": {"path": "a.csv", "one_hot": True}, "model": {"loss": "hinge"}}
    spec = JobSpec.from_dict(job)
    assert (spec.solver.tol, spec.model.C, spec.model.alpha, spec.model.fit_intercept) == (1e-6, 1.0, 0.5, True)
    assert JobSpec.from_dict(job | {"solver": {"tol": 1e-3}}).solver.tol == 1e-3
    assert JobSpec.from_dict({"data": {"path": "a.csv"}}).solver.tol == 1e-8
    for model in ({"loss": "pinball"}, {"loss": "huber", "C": 2.0}, {"loss": "huber", "alpha": 2}, {"loss": "square"}):
        spec = JobSpec.from_dict({"data": {"path": "a.csv"}, "model": model})
        assert JobSpec.from_dict(spec.to_dict()) == spec
    assert "loss" not in spec.to_dict()["model"]


BAD: dict[str, tuple[dict[str, str], str]] = {
    "solver": ({"solver": 'name = "cg"'}, r"job.toml:15: \[solver\] name = 'cg'"),
    "precision": ({"solver": 'precision = "mixed"'}, r"\d: \[solver\] precision = 'mixed'"),
    "gram": ({"solver": 'gram = "stored"'}, r"\d: \[solver\] gram = 'stored'"),
    "rank": ({"solver": "rank = 10"}, r"\d: \[solver\]: rank is for solver 'cg'"),
    "leave one out": ({"evaluate": "leave_one_out = true"}, r"\d: \[evaluate\] leave_one_out"),
    "intervals": ({"evaluate": "intervals = 0.9"}, r"\d: \[evaluate\] intervals .*known of the square alone"),
    "precomputed": ({"model": 'kernel = "precomputed"'}, r"\d: \[model\] kernel = 'precomputed'.*have rows"),
    "unknown loss": ({"model": 'loss = "hing"'}, r"\d: \[model\] loss = 'hing' is not allowed"),
    "quantile of 0": ({"model": 'loss = "pinball"\nquantile = 0.0', "y": "number"}, r"\d: \[model\] quantile = 0.0"),
    "quantile of 1": ({"model": 'loss = "pinball"\nquantile = [0.1, 1]', "y": "number"}, r"\d: \[model\] quantile"),
    "falling": ({"model": 'loss = "pinball"\nquantile = [0.9, 0.1]', "y": "number"}, r"increasing order"),
    "empty": ({"model": 'loss = "pinball"\nquantile = []', "y": "number"}, r"\d: \[model\] quantile"),
    "quantile of hinge": ({"model": 'loss = "hinge"\nquantile = 0.5'}, r"\d: \[model\] quantile is for loss = pinball"),
    "epsilon of hinge": ({"model": 'loss = "hinge"\nepsilon = 0.5'}, r"\d: \[model\] epsilon is for loss = huber and"),
    "epsilon of 0": ({"model": 'loss = "huber"\nepsilon = 0', "y": "number"}, r"\d: \[model\] epsilon = 0"),
    "epsilon below 0": ({"model": 'loss = "huber"\nepsilon = -1', "y": "number"}, r"\d: \[model\] epsilon = -1"),
    "C of the square": ({"model": "C = 1.0", "y": "number"}, r"\d: \[model\] C is for other losses"),
    "C and alpha": ({"model": 'loss = "hinge"\nC = 1.0\nalpha = 0.5'}, r"\d: \[model\] C and alpha are both given"),
    "C of 0": ({"model": 'loss = "hinge"\nC = 0'}, r"\d: \[model\] C = 0"),
    "alpha of 0": ({"model": 'loss = "hinge"\nalpha = 0'}, r"\d: \[model\] alpha = 0.0; one number above 0"),
    "several alphas": ({"model": 'loss = "hinge"\nalpha = [1, 2]'}, r"\d: \[model\] alpha = \[1.0, 2.0\]; one number"),
    "labels without classes": ({"model": 'loss = "hinge"', "y": "number"}, r"\d: \[data\] one_hot is not true"),
    "classes for numbers": ({"model": 'loss = "huber"'}, r"\d: \[data\] one_hot = true.*for numbers"),
    "rmse of labels": ({"evaluate": 'metric = "rmse"'}, r"\d: \[evaluate\] metric = 'rmse' with loss = 'hinge'"),
    "log loss of hinge": ({"evaluate": 'metric = "log_loss"'}, r"metric = 'log_loss' with loss = 'hinge'"),
    "pinball of the square": ({"model": "", "evaluate": 'metric = "pinball"'}, r"metric = 'pinball' with loss = 'squa"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_combinations_are_named_with_their_line(name: str, tmp_path: Path) -> None:
    given, pattern = BAD[name]
    path = write(
        tmp_path,
        Y if given.get("y") else TWO,
        given.get("model", 'loss = "hinge"'),
        evaluate=given.get("evaluate", ""),
    )
    text = path.read_text()
    if "precomputed" in given.get("model", ""):
        text = text.replace('kernel = "rbf"\ngamma = 0.4\n', 'loss = "hinge"\n')
    path.write_text(text.replace("[solver]\n", f"[solver]\n{given.get('solver', '')}\n"))
    for command in ("plan", "fit"):
        said = " ".join(call(command, path, code=2).stderr.split())
        assert re.search(pattern, said), said


def test_data_sets_without_classes_are_refused(tmp_path: Path) -> None:
    table(tmp_path, Y, 0, N, "rows.csv")
    call("ingest", tmp_path / "rows.csv", tmp_path / "rows.zarr", "--target", "answer")
    job: dict[str, Any] = {
        "data": {"path": str(tmp_path / "rows.zarr")},
        "model": {"loss": "hinge"},
        "output": {"directory": str(tmp_path / "run")},
    }
    with pytest.raises(JobFileError, match=r"is for classes; the targets of .* are numbers"):
        dkrr.plan(JobSpec.from_dict(job))


def test_a_data_set_of_classes_needs_no_one_hot(tmp_path: Path) -> None:
    table(tmp_path, THREE, 0, N, "rows.csv")
    call("ingest", tmp_path / "rows.csv", tmp_path / "rows.zarr", "--target", "answer", "--one-hot")
    job: dict[str, Any] = {
        "data": {"path": str(tmp_path / "rows.zarr")},
        "model": {"loss": "hinge"},
        "output": {"directory": str(tmp_path / "run")},
    }
    fit_job(JobSpec.from_dict(job))
    assert dkrr.load_model(tmp_path / "run/model.zarr").classes == ["low", "middle", "up"]


def test_a_class_without_training_rows_is_named(tmp_path: Path) -> None:
    table(tmp_path, THREE, 0, N, "rows.csv")
    frame = pd.read_csv(tmp_path / "rows.csv")
    frame.assign(w=(frame["answer"] == "up").astype(int)).to_csv(tmp_path / "rows.csv", index=False)
    job: dict[str, Any] = {
        "data": {"path": str(tmp_path / "rows.csv"), "target": "answer", "one_hot": True},
        "evaluate": {"mask": "w"},
        "model": {"loss": "hinge"},
        "output": {"directory": str(tmp_path / "run")},
    }
    with pytest.raises(dkrr.DataError, match="class 'up' has no training row"):
        fit_job(JobSpec.from_dict(job))


def test_classes_need_rows_with_weights(tmp_path: Path) -> None:
    table(tmp_path, TWO, 0, N, "train.csv")
    frame = pd.read_csv(tmp_path / "train.csv")
    frame["w"] = (frame["answer"] == "yes").astype(float)
    frame.to_csv(tmp_path / "train.csv", index=False)
    job: dict[str, Any] = {
        "data": {"path": str(tmp_path / "train.csv"), "target": "answer", "weight": "w", "one_hot": True},
        "model": {"loss": "hinge"},
        "cluster": {"workers": 1},
        "output": {"directory": str(tmp_path / "run")},
    }
    with pytest.raises(dkrr.DataError, match="weights of class 'no' are all zero"):
        fit_job(JobSpec.from_dict(job))


def test_the_plan_says_what_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, TWO, 'loss = "hinge"\nC = 2.0')
    monkeypatch.setenv("COLUMNS", "200")
    said = " ".join(call("plan", path).output.split())
    assert "hinge loss, C 2, alpha 0.25" in said
    assert "decomposition, float64: rows in this process" in said
    assert "why decomposition the hinge loss has corners" in said
    assert "runs in the driver's process, with 1 thread; workers predict" in said
    assert "rough estimate" in said
    plan = json.loads(call("plan", path, "--json").stdout)
    assert (plan["solver"], plan["precision"], plan["loss"]) == (
        "decomposition",
        "float64",
        {"loss": "hinge", "C": 2.0},
    )
    assert plan["client_bytes"] > 8 * (2 * N * D + 26 * N + 3 * N**2)
    assert plan["task_bytes"] < 2**30
    assert set(plan["estimated_seconds"]) == {"start", "decomposition", "end"}
    smooth = json.loads(call("plan", write(tmp_path, TWO, 'loss = "logistic"', name="smooth"), "--json").stdout)
    assert smooth["solver"] == "newton"
    assert smooth["estimated_seconds"]["newton"] > 0
    monkeypatch.setattr("dkrr.jobs.plan.free_memory_bytes", lambda: 2**19)
    refused = call("fit", path, code=3)
    assert "decomposition needs" in refused.stderr
    assert "512 KiB are free" in " ".join(refused.stderr.split())


def test_search_and_retraining_say_that_they_know_the_square_alone(tmp_path: Path) -> None:
    path = write(tmp_path, TWO, 'loss = "hinge"', more="[tune]\nrows = 100")
    assert "not yet for loss = 'hinge'" in call("tune", path, "-o", tmp_path / "best.toml", code=2).stderr
    job = path.read_text().replace('path = "train.csv"\n', "", 1)
    (tmp_path / "again.toml").write_text(
        '[retrain]\nname = "a"\ndata = "rows.zarr"\nincoming = "new/*.csv"\n[holdout]\nfraction = 0.1\n'
        + job.replace('[evaluate]\npath = "test.csv"\n', "")
    )
    said = " ".join(call("retrain", tmp_path / "again.toml", code=2).stderr.split())
    assert re.search(r"again.toml:\d+: \[model\] loss: retraining is not yet for loss = 'hinge'", said)


def test_a_model_without_support_vectors_predicts_its_intercept(tmp_path: Path) -> None:
    result, model, folder = run(write(tmp_path, Y, 'loss = "epsilon_insensitive"\nepsilon = 1e6'))
    assert result["num_support"] == model.num_rows == 0
    np.testing.assert_array_equal(model.predict(X[N:]), np.full((M, 1), model.intercept[0]))
    call("predict", folder, tmp_path / "test.csv", "-o", tmp_path / "out.npy")


def test_standard_deviations_are_refused(tmp_path: Path) -> None:
    _, _, folder = run(write(tmp_path, Y, 'loss = "epsilon_insensitive"'))
    said = call("predict", folder, tmp_path / "test.csv", "-o", tmp_path / "out.csv", "--std", code=2).stderr
    assert "loss" in said
    said = call("predict", folder, tmp_path / "test.csv", "-o", tmp_path / "out.csv", "--proba", code=2).stderr
    assert "no probabilities" in said
