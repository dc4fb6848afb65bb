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
from dkrr.store.files import read_json
from tests.jobs.retrain.project import in_process

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
    assert result == read_json(folder, "result.json") | {"plan": result["plan"]}
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


def test_a_list_of_one_quantile_is_scored_on_the_column_of_the_target(tmp_path: Path) -> None:
    result, model, folder = run(write(tmp_path, Y, 'loss = "pinball"\nquantile = [0.12345678]'))
    assert model.target_names == ["answer q0.12345678"]
    expected = mean_pinball_loss(Y[N:], model.predict(X[N:]), alpha=0.12345678)
    assert result["score"]["pinball"] == pytest.approx([expected], rel=1e-6)
    scores = json.loads(call("evaluate", folder, tmp_path / "test.csv", "--json").stdout)
    assert scores["pinball loss"] == pytest.approx(expected, rel=1e-5)


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
    data, model = {"target": ["y", "z"]}, {"kernel": "rbf", "gamma": 0.4, "loss": "epsilon_insensitive"}
    fit_job(job_of(tmp_path, "rows.csv", data=data, model=model, solver={"tol": TOL}))
    found = dkrr.load_model(tmp_path / "run/model.zarr").predict(X[N:])
    expected = dkrr.KernelSVR(**COMMON).fit(X[:N], np.column_stack([Y, Y**2])[:N]).predict(X[N:])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    model |= {"loss": "pinball", "quantile": [0.1, 0.9]}
    with pytest.raises(JobFileError, match="2 targets; one target expected"):
        dkrr.plan(job_of(tmp_path, "rows.csv", data=data, model=model))


class Stop(Exception):
    """What a test raises in the place of a signal."""


def stopped_after(monkeypatch: pytest.MonkeyPatch, saves: int) -> Callable[[], int]:
    """The fit stops right after so many checkpoints; the number of those that were made."""
    made = 0

    save = dkrr.jobs.loss_fit._Progress.save

    def reached(progress: Any) -> None:
        nonlocal made
        if progress._coefficients is None:
            return
        save(progress)
        made += 1
        if made == saves:
            raise Stop

    monkeypatch.setattr(dkrr.jobs.loss_fit, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(dkrr.jobs.loss_fit._Progress, "save", reached)
    return lambda: made


def stop(monkeypatch: pytest.MonkeyPatch, path: Path, saves: int) -> None:
    """Fit a job, and stop after so many checkpoints."""
    with monkeypatch.context() as patch:
        stopped_after(patch, saves)
        with pytest.raises(Stop):
            fit_job(path)


@pytest.mark.parametrize(
    "case", ["hinge", "hinge, three classes", "quantiles", "logistic, three classes", "squared hinge", "huber"]
)
def test_an_interrupted_fit_goes_on(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.decomposition.WORKING_SET", 16)  # so that there are rounds
    model_text, y, _ = CASES[case]
    with monkeypatch.context() as patch:
        num_saves = stopped_after(patch, 0)
        apart = write(tmp_path, y, model_text, name="whole", more='[output]\nstore = "apart"')
        whole = json.loads(call("fit", apart, "--json").stdout)
    assert num_saves() >= 4
    path = write(tmp_path, y, model_text)
    stop(monkeypatch, path, num_saves() - 1)
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    kept = np.load(left)
    assert kept.any()
    (mine := tmp_path / "runs/job/loss-curve.npy").write_bytes(b"a figure of somebody")
    with monkeypatch.context() as patch:
        num_again = stopped_after(patch, 0)
        result, model, folder = run(path)
    # where it began, what was left, and one checkpoint
    assert num_again() <= max(num_saves() // 2, 3) < num_saves()
    assert result["reused"]["start"]["rows"] == N
    assert list(folder.glob("loss-*.npy")) == [mine]
    assert all(item["gap"] <= TOL for item in result["certificates"])
    expected = dkrr.load_model(whole["model_path"]).predict(X[N:])
    np.testing.assert_allclose(model.predict(X[N:]), expected, atol=1e-5 * np.abs(expected).max())
    # coefficients of other rows, or of another job, are none of this one
    other = write(tmp_path, y, model_text + "\nfit_intercept = false", name="other")
    stop(monkeypatch, other, 2)
    assert left.name not in [item.name for item in (tmp_path / "runs/other").glob("loss-*.npy")]


@pytest.mark.parametrize("column", ["a", "answer", "w"])
def test_coefficients_of_other_rows_are_none_of_these(
    column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, Y, 'loss = "epsilon_insensitive"', data='weight = "w"')
    stop(monkeypatch, path, 2)
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    frame = pd.read_csv(tmp_path / "train.csv")
    frame.loc[3, column] += 1.0
    frame.to_csv(tmp_path / "train.csv", index=False)
    stop(monkeypatch, path, 2)
    assert {left.name} < {item.name for item in (tmp_path / "runs/job").glob("loss-*.npy")}
    result, _, folder = run(path)
    assert result["converged"]
    assert not list(folder.glob("loss-*.npy"))


@pytest.mark.parametrize("spoiled", [b"", b"no array", b"\x93NUMPY"])
def test_a_damaged_checkpoint_costs_time_alone(spoiled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, TWO, 'loss = "hinge"')
    stop(monkeypatch, path, 1)
    (left,) = (tmp_path / "runs/job").glob("loss-*.npy")
    left.write_bytes(spoiled)
    result, _, _ = run(path)
    assert "start" not in result["reused"]
    assert result["converged"]


def test_a_request_to_stop_is_heard_between_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.decomposition.WORKING_SET", 16)
    monkeypatch.setattr("dkrr.jobs.driver.Monitor.is_cancelled", lambda self: False)
    seen: list[str] = []

    def cancelling(phase: str, done: int, *rest: Any) -> None:
        seen.append(phase)
        if done == 2:
            (tmp_path / "runs/job/cancel.json").write_text("{}")

    from dkrr.jobs.driver import Monitor

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
    monkeypatch.setattr("dkrr.linalg.decomposition.WORKING_SET", 16)
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
    "quantile -0.1": ({"model": 'loss = "pinball"\nquantile = -0.1', "y": "number"}, r"\d: \[model\] quantile"),
    "quantile 1.5": ({"model": 'loss = "pinball"\nquantile = 1.5', "y": "number"}, r"\d: \[model\] quantile"),
    "quantile nan": ({"model": 'loss = "pinball"\nquantile = nan', "y": "number"}, r"\d: \[model\] quantile"),
    "quantile as text": (
        {"model": 'loss = "pinball"\nquantile = "0.5"', "y": "number"},
        r"\d: \[model\] quantile",
    ),
    "one below 0": (
        {"model": 'loss = "pinball"\nquantile = [-0.1, 0.5]', "y": "number"},
        r"\d: \[model\] quantile",
    ),
    "one above 1": (
        {"model": 'loss = "pinball"\nquantile = [0.1, 1.5]', "y": "number"},
        r"\d: \[model\] quantile",
    ),
    "falling": ({"model": 'loss = "pinball"\nquantile = [0.9, 0.1]', "y": "number"}, r"increasing order"),
    "empty": ({"model": 'loss = "pinball"\nquantile = []', "y": "number"}, r"\d: \[model\] quantile"),
    "quantile of hinge": ({"model": 'loss = "hinge"\nquantile = 0.5'}, r"\d: \[model\] quantile is for loss = pinball"),
    "epsilon of hinge": ({"model": 'loss = "hinge"\nepsilon = 0.5'}, r"\d: \[model\] epsilon is for loss = huber and"),
    "epsilon of 0": ({"model": 'loss = "huber"\nepsilon = 0', "y": "number"}, r"\d: \[model\] epsilon = 0"),
    "epsilon below 0": ({"model": 'loss = "huber"\nepsilon = -1', "y": "number"}, r"\d: \[model\] epsilon = -1"),
    "C of the square": ({"model": "C = 1.0", "y": "number"}, r"\d: \[model\] C is for other losses"),
    "C and alpha": ({"model": 'loss = "hinge"\nC = 1.0\nalpha = 0.5'}, r"\d: \[model\] C and alpha are both given"),
    "C of 0": ({"model": 'loss = "hinge"\nC = 0'}, r"\d: \[model\] C = 0"),
    "C below 0": ({"model": 'loss = "hinge"\nC = -1.5'}, r"\d: \[model\] C = -1.5"),
    "C is nan": ({"model": 'loss = "hinge"\nC = nan'}, r"\d: \[model\] C = nan"),
    "C is inf": ({"model": 'loss = "hinge"\nC = inf'}, r"\d: \[model\] C = inf"),
    "C as text": ({"model": 'loss = "hinge"\nC = "1"'}, r"\d: \[model\] C = '1'"),
    "alpha of 0": ({"model": 'loss = "hinge"\nalpha = 0'}, r"\d: \[model\] alpha = 0.0; a number above 0"),
    "an alpha of 0": ({"model": 'loss = "hinge"\nalpha = [1, 0]'}, r"\d: \[model\] alpha = \[1.0, 0.0\]; a number"),
    "an alpha twice": ({"model": 'loss = "hinge"\nalpha = [1, 1]'}, r"\d: \[model\] alpha = .*list of different ones"),
    "falling C": ({"model": 'loss = "hinge"\nC = [2, 1]'}, r"\d: \[model\] C = \[2, 1\]: .*increasing order"),
    "no C": ({"model": 'loss = "hinge"\nC = []'}, r"\d: \[model\] C = \[\]: a number above 0"),
    "text as C": ({"model": 'loss = "hinge"\nC = [1, "b"]'}, r"\d: \[model\] C = .*a number above 0"),
    "C to tune the square": ({"model": "", "y": "number", "more": "[tune]\nC = [1.0]"}, r"\d: \[tune\] C is for other"),
    "folds of the square": ({"model": "", "y": "number", "more": "[tune]\nfolds = 3"}, r"\d: \[tune\] folds is for"),
    "one fold": ({"more": "[tune]\nfolds = 1"}, r"\d: \[tune\] folds = 1"),
    "C of 0 to tune": ({"more": "[tune]\nC = [0.0, 1.0]"}, r"\d: \[tune\] C = \[0.0, 1.0\]: a number above 0"),
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
        more=given.get("more", ""),
    )
    text = path.read_text()
    if "precomputed" in given.get("model", ""):
        text = text.replace('kernel = "rbf"\ngamma = 0.4\n', 'loss = "hinge"\n')
    path.write_text(text.replace("[solver]\n", f"[solver]\n{given.get('solver', '')}\n"))
    for command in ("plan", "fit"):
        said = " ".join(call(command, path, code=2).stderr.split())
        assert re.search(pattern, said), said


def job_of(folder: Path, file: str, **tables: Any) -> JobSpec:
    own = {"path": str(folder / file), **tables.pop("data", {})}
    document = {"data": own, "model": {"loss": "hinge"}, "output": {"directory": str(folder / "run")}, **tables}
    return JobSpec.from_dict(document)


def test_data_sets_of_numbers_are_refused_and_those_of_classes_need_no_one_hot(tmp_path: Path) -> None:
    for name, y in (("numbers", Y), ("classes", THREE)):
        table(tmp_path, y, 0, N, f"{name}.csv")
        one_hot = ["--one-hot"] if name == "classes" else []
        call("ingest", tmp_path / f"{name}.csv", tmp_path / f"{name}.zarr", "--target", "answer", *one_hot)
    with pytest.raises(JobFileError, match=r"is for classes; the targets of .* are numbers"):
        dkrr.plan(job_of(tmp_path, "numbers.zarr"))
    fit_job(job_of(tmp_path, "classes.zarr"))
    assert dkrr.load_model(tmp_path / "run/model.zarr").classes == ["low", "middle", "up"]


@pytest.mark.parametrize("loss", ["hinge", "logistic"])
@pytest.mark.parametrize(
    ("y", "label", "data", "evaluate", "said"),
    [
        (THREE, "up", {}, {"mask": "w"}, "class 'up' has no training row"),
        (TWO, "yes", {"weight": "w"}, None, "weights of class 'no' are all zero"),
        (
            np.full(N, "yes"),
            "yes",
            {},
            None,
            r"all 180 .* of \S*rows.csv are of class 'yes'; at least two.*\[data\] target",
        ),
    ],
)
def test_a_class_without_rows_or_weights_is_named(
    y: Any, label: str, data: dict[str, Any], evaluate: Any, said: str, loss: str, tmp_path: Path
) -> None:
    table(tmp_path, y, 0, N, "rows.csv")
    frame = pd.read_csv(tmp_path / "rows.csv")
    frame.assign(w=(frame["answer"] == label).astype(int)).to_csv(tmp_path / "rows.csv", index=False)
    data |= {"target": "answer", "one_hot": True}
    with pytest.raises(dkrr.DataError, match=said) as caught:
        fit_job(job_of(tmp_path, "rows.csv", data=data, evaluate=evaluate, model={"loss": loss}))
    assert caught.value.exit_code == 4
    assert "[data]" in str(caught.value) or evaluate
    assert not list(tmp_path.rglob("model.zarr"))


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


# --- several values of C in one run -----------------------------------------------------------------------------------

PATHS: dict[str, tuple[str, Any, str]] = {
    "hinge": ('loss = "hinge"', TWO, "balanced_accuracy"),
    "logistic, three classes": ('loss = "logistic"', THREE, "log_loss"),
    "quantiles": ('loss = "pinball"\nquantile = [0.1, 0.9]', Y, "pinball"),
    "huber": ('loss = "huber"\nepsilon = 0.4', Y, "rmse"),
}
SEVERAL = [0.03, 0.5, 8.0, 128.0]


@pytest.mark.parametrize("case", PATHS)
def test_a_path_is_one_fit_and_a_model_for_each_C(case: str, tmp_path: Path) -> None:
    text, y, metric = PATHS[case]
    evaluate = f'metric = "{metric}"'
    result, model, folder = run(write(tmp_path, y, f"{text}\nC = {SEVERAL}", evaluate=evaluate))
    path = result["path"]
    assert [point["C"] for point in path] == SEVERAL
    assert [point["alpha"] for point in path] == [[0.5 / C] for C in SEVERAL]
    assert result["plan"]["loss"]["C"] == SEVERAL
    for number, (C, point) in enumerate(zip(SEVERAL, path, strict=True)):
        apart = f'[output]\nstore = "store-{C}"'
        alone = write(tmp_path, y, f"{text}\nC = {C}", evaluate=evaluate, name="alone", more=apart)
        alone.write_text(alone.read_text().replace("[output]", f'[output]\ndirectory = "runs/alone-{C}"'))
        expected, own, _ = run(alone)
        of_path = dkrr.load_model(point["model_path"])
        assert Path(point["model_path"]) == folder / f"path-{number:03}.zarr"
        assert of_path.provenance["C"] == C
        values = own.predict(X[N:])
        np.testing.assert_allclose(of_path.predict(X[N:]), values, atol=1e-5 * np.abs(values).max())
        assert point["num_support"] == expected["num_support"] == of_path.num_rows
        assert point["gap"] <= TOL
        assert point["converged"]
        score = expected["score"][metric]
        assert point["score"] == pytest.approx(np.mean(score), rel=1e-5)
    scores = [point["score"] for point in path]
    best = scores.index(max(scores) if metric == "balanced_accuracy" else min(scores))
    assert [point["chosen"] for point in path] == [number == best for number in range(len(path))]
    assert model.provenance["C"] == result["loss"]["C"] == SEVERAL[best]
    assert np.mean(result["score"][metric]) == pytest.approx(scores[best])
    assert len(result["certificates"]) == model.num_targets == len(result["history"])
    np.testing.assert_array_equal(model.predict(X[N:]), dkrr.load_model(path[best]["model_path"]).predict(X[N:]))
    page = (folder / "report.html").read_text()
    assert "Path over C" in page
    assert "could not be made" not in page
    assert "chosen" in call("fit", tmp_path / "job.toml").output


def test_a_score_that_is_no_number_does_not_choose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = f'loss = "huber"\nC = {SEVERAL}'
    same = np.concatenate([Y[:N], np.full(M, 0.4)])  # no r2 where all held-out targets are one number
    result, _, _ = run(write(tmp_path, same, text, evaluate='metric = "r2"'))
    assert {point["metric"] for point in result["path"]} == {"rmse"}
    scores = [point["score"] for point in result["path"]]
    assert [point["chosen"] for point in result["path"]] == [score == min(scores) for score in scores]
    assert "r2 of the held-out rows is no number: C is chosen by rmse" in caplog.text


def test_a_list_of_alpha_is_the_same_path(tmp_path: Path) -> None:
    alphas = [0.5 / C for C in SEVERAL]
    given, _, _ = run(write(tmp_path, TWO, f'loss = "hinge"\nalpha = {alphas}'))
    assert [point["alpha"][0] for point in given["path"]] == alphas
    assert [point["C"] for point in given["path"]] == pytest.approx(SEVERAL)


def test_a_path_that_is_interrupted_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.linalg.decomposition.WORKING_SET", 16)
    path = write(tmp_path, TWO, f'loss = "hinge"\nC = {SEVERAL}')
    stop(monkeypatch, path, 12)
    assert np.load(next((tmp_path / "runs/job").glob("loss-*.npy"))).shape == (N, len(SEVERAL))
    result, _, folder = run(path)
    assert result["reused"]["start"]["rows"] == N
    assert all(point["gap"] <= TOL for point in result["path"])
    assert not list(folder.glob("loss-*.npy"))


def test_a_path_needs_rows_to_choose_by(tmp_path: Path) -> None:
    for key in ("C", "alpha"):
        path = write(tmp_path, TWO, f'loss = "hinge"\n{key} = [1.0, 2.0]')
        path.write_text(path.read_text().replace('[evaluate]\npath = "test.csv"\n', ""))
        said = " ".join(call("plan", path, code=2).stderr.split())
        assert re.search(rf"job.toml:\d+: \[model\] {key} is a list, and no rows are held out", said), said


def test_the_plan_of_a_path_has_all_its_values(tmp_path: Path) -> None:
    one = json.loads(call("plan", write(tmp_path, TWO, 'loss = "logistic"', name="one"), "--json").stdout)
    some = json.loads(call("plan", write(tmp_path, TWO, f'loss = "logistic"\nC = {SEVERAL}'), "--json").stdout)
    assert (len(one["alpha"]), len(some["alpha"])) == (1, 4)
    assert some["disk_bytes"]["checkpoint"] == 4 * one["disk_bytes"]["checkpoint"]
    assert some["disk_bytes"]["model"] == 4 * one["disk_bytes"]["model"]
    assert some["flops"] > one["flops"]


# --- search by folds --------------------------------------------------------------------------------------------------

TUNED: dict[str, tuple[str, Any, str]] = {
    "hinge": ('loss = "hinge"', TWO, "accuracy"),
    "hinge, three classes": ('loss = "hinge"', THREE, "balanced_accuracy"),
    "logistic": ('loss = "logistic"\nfit_intercept = false', TWO, "log_loss"),
    "logistic, three classes": ('loss = "logistic"', THREE, "log_loss"),
    "quantiles": ('loss = "pinball"\nquantile = [0.1, 0.5]', Y, "pinball"),
    "huber": ('loss = "huber"\nepsilon = 0.4', Y, "huber"),
    "epsilon insensitive": ('loss = "epsilon_insensitive"\nepsilon = 0.2', Y, "rmse"),
}
GRID = [0.02, 0.5, 10.0]


def lost(case: str, candidate: dict[str, Any]) -> np.ndarray:
    """What each training row loses when it is held out in one of three folds, in the order of the search (n,)."""
    text, y, metric = TUNED[case]
    order = np.random.default_rng(0).permutation(N)  # of the subset of all rows, seed 0
    rows, truth = X[:N][order], np.asarray(y)[:N][order]
    C = 0.5 / candidate["alpha"]
    kernel = {"kernel": "rbf", "gamma": 0.5 / candidate["widths"][0] ** 2, "tol": 1e-9}
    machine: Any = {
        "hinge": lambda: dkrr.KernelSVC(C, **kernel),
        "logistic": lambda: dkrr.KernelLogisticRegression(C, fit_intercept="fit_intercept" not in text, **kernel),
        "pinball": lambda: dkrr.KernelQuantileRegressor(quantile=[0.1, 0.5], alpha=0.5 / C, **kernel),
        "huber": lambda: dkrr.KernelHuberRegressor(epsilon=0.4, alpha=0.5 / C, **kernel),
        "epsilon_insensitive": lambda: dkrr.KernelSVR(C, epsilon=0.2, **kernel),
    }[text.split('"')[1]]()
    labels, codes = np.unique(truth, return_inverse=True) if truth.dtype.kind == "U" else ([0], np.zeros(N, int))
    fold = np.empty(N, dtype=int)
    for code in range(len(labels)):
        own = np.flatnonzero(codes == code)
        fold[own] = (np.arange(len(own)) + code) % 3
    found = np.empty(N)
    for number in range(3):
        test = fold == number
        machine.fit(rows[~test], truth[~test])
        if metric == "log_loss":
            found[test] = -machine.predict_log_proba(rows[test])[np.arange(test.sum()), codes[test]]
        else:
            predicted = machine.predict(rows[test])
            if metric == "pinball":
                r = truth[test][:, None] - predicted
                found[test] = np.maximum(np.array([0.1, 0.5]) * r, (np.array([0.1, 0.5]) - 1) * r).mean(axis=1)
            elif metric == "huber":
                r = np.abs(truth[test] - predicted)
                found[test] = np.where(r <= 0.4, r**2, 0.8 * r - 0.16)
            else:
                found[test] = (truth[test] - predicted) ** 2 if metric == "rmse" else predicted != truth[test]
    return found * (N / (len(labels) * np.bincount(codes))[codes]) if metric == "balanced_accuracy" else found


@pytest.mark.parametrize("case", TUNED)
def test_a_search_judges_by_folds_and_takes_the_smallest_C_that_is_as_good(case: str, tmp_path: Path) -> None:
    text, y, metric = TUNED[case]
    asked = f'metric = "{metric}"' if metric in ("rmse", "balanced_accuracy") else ""
    tune = f'[tune]\nkernels = ["rbf"]\nwidths = "shared"\nsearch_rows = [80]\nfolds = 3\nC = {GRID}'
    path, best = write(tmp_path, y, text, evaluate=asked, more=tune), tmp_path / "best.toml"
    document = json.loads(call("tune", path, "-o", best, "--json").stdout)
    found = {json.dumps(item): lost(case, item) for item in document["candidates"]}
    least = found[json.dumps(document["least_error"])]
    good = []
    for item in document["candidates"]:
        rows = found[json.dumps(item)]
        error = np.sqrt(rows.mean()) if metric == "rmse" else rows.mean()
        assert item["metric"] == metric
        assert "loo_rmse" not in item
        assert item["num_rows"] == N
        # fits within the search are to a gap of 1e-3: a row or two may be of another class
        loose = {"abs": 0.02} if "accuracy" in metric else {"rel": 0.02}
        assert item["error"] == pytest.approx(error, **loose)
        difference = rows - least
        if difference.mean() <= difference.std(ddof=1) / np.sqrt(N) + 1e-9:
            good.append(item)
    assert document["least_error"]["error"] == min(item["error"] for item in document["candidates"])
    chosen = document["best"]
    same = [item for item in good if item["widths"] == chosen["widths"]]
    assert chosen["alpha"] == max(item["alpha"] for item in [*same, chosen])
    job = JobSpec.load(best)
    assert job.model.loss in text
    assert job.model.C in GRID
    assert pytest.approx(0.5 / chosen["alpha"]) == job.model.C
    assert job.model.fit_intercept == ("fit_intercept" not in text)
    assert "less is better" in " ".join(call("tune", path, "-o", tmp_path / "again.toml").output.split())
    said = best.read_text()
    assert "# kernel" in said
    assert f" of 3 folds on {N} rows" in " ".join(said.split())
    result, model, _ = run(best)
    assert model.provenance["C"] == job.model.C
    assert result["converged"]


def test_a_search_takes_the_list_of_the_model_or_its_own(tmp_path: Path) -> None:
    few = '[tune]\nkernels = ["rbf"]\nwidths = "shared"\nsearch_rows = [60]\nfolds = 2\nrows = 80'
    path = write(tmp_path, TWO, f'loss = "hinge"\nC = {GRID}', more=few)
    document = json.loads(call("tune", path, "-o", tmp_path / "best.toml", "--json", "--no-picture").stdout)
    search = json.loads((tmp_path / "best.search.json").read_text())
    assert search["slices"][0]["alphas"] == [0.5 / C for C in reversed(GRID)]
    assert 0.5 / document["best"]["alpha"] in GRID
    again = write(tmp_path, TWO, 'loss = "hinge"', more=few, name="again")
    call("tune", again, "-o", tmp_path / "other.toml", "--no-picture")
    slices = json.loads((tmp_path / "other.search.json").read_text())["slices"]
    assert (len(slices[0]["alphas"]), slices[0]["factors"]) == (11, [0.5, 1.0, 2.0])
    # finished trials are read, not run again
    trials = [json.loads(line) for line in (tmp_path / "other.trials.jsonl").read_text().splitlines()]
    call("tune", again, "-o", tmp_path / "third.toml", "--no-picture")
    assert [json.loads(line) for line in (tmp_path / "third.trials.jsonl").read_text().splitlines()] == trials


def test_a_search_needs_two_rows_of_each_class(tmp_path: Path) -> None:
    labels = THREE.copy()
    labels[labels == "up"] = "low"
    labels[3] = "up"
    path = write(tmp_path, labels, 'loss = "hinge"', more='[tune]\nkernels = ["rbf"]\nsearch_rows = [180]\nrows = 180')
    said = call("tune", path, "-o", tmp_path / "best.toml", code=4).stderr
    assert "a class has one of the 180 rows" in " ".join(said.split())


def test_a_search_for_numbers_refuses_classes(tmp_path: Path) -> None:
    table(tmp_path, Y, 0, N, "rows.csv")
    call("ingest", tmp_path / "rows.csv", tmp_path / "rows.zarr", "--target", "answer")
    (tmp_path / "job.toml").write_text('[data]\npath = "rows.zarr"\n[model]\nloss = "hinge"\n')
    said = call("tune", tmp_path / "job.toml", "-o", tmp_path / "best.toml", code=2).stderr
    assert "is for classes" in " ".join(said.split())


# --- retraining -------------------------------------------------------------------------------------------------------


class Nightly:
    """RETRAIN.toml of a model with a loss, and batches of rows for it."""

    def __init__(self, folder: Path, model: str, *, y: Any, more: str = "") -> None:
        self.folder, self.y = folder, np.asarray(y)
        (folder / "incoming").mkdir()
        self.path = folder / "again.toml"
        one_hot = "one_hot = true\n" if self.y.dtype.kind == "U" else ""
        self.path.write_text(
            '[retrain]\nname = "demo"\ndata = "rows.zarr"\nincoming = "incoming/*.csv"\n'
            f'[holdout]\npath = "test.csv"\n{more}\n'
            f'[data]\ntarget = "answer"\nfeatures = ["a", "b", "c"]\n{one_hot}'
            f'[model]\nkernel = "rbf"\ngamma = 0.4\n{model}\n[solver]\ntol = {TOL}\n[cluster]\nworkers = 1\n'
        )
        table(folder, y, N, N + M, "test.csv")

    def night(self, start: int, stop: int, code: int = 0) -> dict[str, Any]:
        """These rows are delivered, and the job runs."""
        table(self.folder / "incoming", self.y, start, stop, f"{start:04}.csv")
        return self.retrain(code)

    def retrain(self, code: int = 0) -> dict[str, Any]:
        result = call("retrain", self.path, "--json", code=code)
        return dict(json.loads(result.stdout))

    def production(self) -> dkrr.Model:
        from dkrr.jobs.registry import ModelRegistry

        return dkrr.load_model(ModelRegistry(str(self.folder / "models")).open("demo").resolve().model_path)


NIGHTLY: dict[str, tuple[str, str, str]] = {
    "hinge": ("", "hinge", "accuracy"),
    "hinge, balanced": ('metric = "balanced_accuracy"', "hinge", "balanced_accuracy"),
    "hinge, three classes": ("", "hinge, three classes", "accuracy"),
    "logistic": ("", "logistic", "log_loss"),
    "quantiles": ("", "quantiles", "pinball"),
    "epsilon insensitive": ("", "epsilon insensitive", "rmse"),
    "huber": ("", "huber", "rmse"),
}


@pytest.mark.parametrize("name", NIGHTLY)
def test_a_batch_is_fitted_from_the_coefficients_of_the_version_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.linalg.decomposition.WORKING_SET", 16)  # so that there are rounds
    gate, case, metric = NIGHTLY[name]
    text, y, estimator = CASES[case]
    nightly = Nightly(tmp_path, text, y=y, more=f"[gate]\nmin_rows = 20\ntolerance = 0.5\n{gate}")
    first = nightly.night(0, 170)
    assert (first["outcome"], first["num_rows"]) == ("promoted", 170), first["reasons"]
    assert nightly.retrain()["outcome"] == "nothing new"
    second = nightly.night(170, N)
    assert (second["outcome"], second["num_rows"]) == ("promoted", N), second["reasons"]
    start = second["fit"]["reused"]["start"]
    assert (start["rows"], start["of_rows"]) == (170, N)
    assert max(second["fit"]["gap"]) <= TOL
    checks = {check["name"]: check["sentence"] for check in second["checks"]}
    assert checks["score"].startswith(f"{metric} ")
    assert checks["residual"].startswith("duality gap ")
    assert "better than a constant" in checks or metric == "rmse"
    found, expected = nightly.production().predict(X[N:]).reshape(M, -1), decisions(estimator.fit(X[:N], y[:N]), X[N:])
    np.testing.assert_allclose(found[:, -expected.shape[1] :], expected, atol=1e-5 * np.abs(expected).max())
    (folder,) = (tmp_path / "models/demo/retrain/runs").iterdir()
    again = json.loads((folder / "result.json").read_text())["num_iterations"]
    anew, _, _ = run(write(tmp_path, y, text, name="anew"))
    # a decomposition that begins anew begins with what a part of the rows predicts, which may be as good, to a round
    assert again <= anew["num_iterations"] + 1 if name == "quantiles" else again < anew["num_iterations"]


def test_whitened_rows_are_recognised_in_the_version_before(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, 'loss = "hinge"', y=TWO, more="[gate]\nmin_rows = 20\ntolerance = 0.5")
    nightly.path.write_text(nightly.path.read_text().replace("[data]", "[data]\nstandardize = true"))
    nightly.night(0, 120)
    second = nightly.night(120, N)
    assert second["fit"]["reused"]["start"]["rows"] == 120
    assert second["fit"]["reused"]["scaling"]["scaling"] == "frozen"


def test_a_version_that_is_worse_by_the_metric_of_the_loss_is_not_promoted(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, 'loss = "logistic"\nC = 3.0', y=TWO, more="[gate]\nmin_rows = 20\ntolerance = 0.0")
    first = nightly.night(0, 120)
    nightly.path.write_text(nightly.path.read_text().replace("C = 3.0", "C = 0.05"))
    second = nightly.retrain(code=7)
    assert second["outcome"] == "refused"
    (reason,) = second["reasons"]
    assert re.match(r"log_loss 0\.\d+ on 60 held-out rows, 0\.\d+ of .* in production, at most 0\.\d+ allowed", reason)
    assert second["production"] == first["version"]


def test_a_version_that_learnt_nothing_is_not_promoted(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, 'loss = "hinge"\nC = 1e-6', y=TWO, more="[gate]\nmin_rows = 20")
    (reason,) = nightly.night(0, 120, code=7)["reasons"]
    assert re.search(r"accuracy 0\.\d+ on held-out rows, 0\.\d+ of the best constant", reason)


def test_a_retrain_job_searches_C_again(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, 'loss = "hinge"\nC = 0.5', y=TWO, more="[gate]\nmin_rows = 20")
    text = nightly.path.read_text().replace('name = "demo"', 'name = "demo"\nsearch_every = 2')
    few = 'kernels = ["rbf"]\nwidths = "shared"\nsearch_rows = [60]\nrows = 120\nfolds = 2\nC = [1.0, 8.0]'
    nightly.path.write_text(f"{text}[tune]\n{few}\n")
    assert not nightly.night(0, 120)["searched"]
    assert nightly.night(120, N)["searched"]
    assert nightly.production().provenance["C"] in (1.0, 8.0)


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("C = [1.0, 2.0]", "[evaluate]\nfraction = 0.1", r"again.toml:\d+: \[model\] C is a list; a retrain"),
        ("alpha = [1.0, 2.0]", "[evaluate]\nfraction = 0.1", r"again.toml:\d+: \[model\] alpha is a list; a"),
        ("", '[gate]\nmetric = "rmse"', r"again.toml:\d+: \[gate\] metric = 'rmse' with loss = 'hinge'"),
        ("", '[gate]\nmetric = "log_loss"', r"again.toml:\d+: \[gate\] metric = 'log_loss' with loss = 'hinge'"),
    ],
)
def test_what_a_loss_does_not_allow_of_a_retrain_job(model: str, more: str, said: str, tmp_path: Path) -> None:
    nightly = Nightly(tmp_path, f'loss = "hinge"\n{model}', y=TWO, more=more)
    if "[evaluate]" in more:
        nightly.path.write_text(nightly.path.read_text().replace('[holdout]\npath = "test.csv"\n', ""))
    found = " ".join(call("retrain", nightly.path, code=2).stderr.split())
    assert re.search(said, found), found


def test_a_square_job_does_not_begin_from_a_model_of_another_loss(tmp_path: Path) -> None:
    run(write(tmp_path, Y, 'loss = "huber"\nfit_intercept = false', name="first"))
    path = write(tmp_path, Y, "", name="second")
    path.write_text(path.read_text().replace("[solver]\ntol = 1e-11", '[solver]\nname = "cg"\ntol = 1e-8'))
    result, model, _ = run(path)
    assert "start" not in result["reused"]
    assert "loss" not in model.provenance


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


def test_a_machine_of_two_classes_that_was_saved_is_scored_by_its_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    X = rng.standard_normal((200, 2))
    label = np.where(X[:, 0] + 0.3 * rng.standard_normal(200) > 0, "up", "down")
    frame = pd.DataFrame(X, columns=["a", "b"])
    machine = dkrr.KernelSVC(C=5.0).fit(frame[:120], label[:120])
    machine.save(tmp_path / "model.zarr")
    frame.assign(label=label)[120:].to_csv(tmp_path / "new.csv", index=False)
    shown = call("evaluate", tmp_path / "model.zarr", tmp_path / "new.csv", "--json")
    assert json.loads(shown.stdout)["accuracy"] == np.mean(machine.predict(frame[120:]) == label[120:])


@pytest.mark.parametrize("estimator", [dkrr.KernelLogisticRegression, dkrr.KernelSVC])
def test_a_saved_classifier_says_the_same_bits(estimator: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.random((100, 2)) + 1e6  # so far from the origin that every order of sums has its own rounding
    y = np.where(X[:, 0] - 1e6 + 0.2 * rng.standard_normal(100) > 0.5, "b", "a")
    fitted = estimator(C=1e-3, kernel="linear").fit(X, y)
    fitted.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(
        dkrr.load_model(tmp_path / "model.zarr").predict(X)[:, 1], fitted.decision_function(X)
    )
