"""A fit that stopped short of its tolerance goes on from where it stopped, when it is given more iterations."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

X = np.random.default_rng(1).uniform(size=(300, 4))
Y = np.sin(6 * X[:, 0]) + X[:, 1]
FEW = 100


def estimator(**parameters: Any) -> dkrr.KernelRidge:
    given: dict[str, Any] = {"kernel": "rbf", "gamma": 2.0, "alpha": 1e-3, "solver": "cg", "tile_size": 100}
    return dkrr.KernelRidge(**given | parameters)


def chunks(store: Path) -> dict[str, int]:
    """When each chunk of a preconditioner or a factor was written."""
    return {
        str(path.relative_to(store)): path.stat().st_mtime_ns
        for path in store.rglob("c/*/*")
        if path.is_file() and ("preconditioner" in str(path) or "factors" in str(path))
    }


def begun_at(caplog: pytest.LogCaptureFixture) -> list[int]:
    """At which iterations fits went on."""
    said = [message for message in caplog.messages if message.startswith("going on from the checkpoint")]
    return [int(message.rpartition(" ")[2]) for message in said]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dkrr")


@pytest.mark.parametrize(
    "parameters",
    [{}, {"precision": "mixed", "solver": "cholesky", "alpha": 1e-9}],
    ids=["cg", "mixed"],
)
def test_a_fit_in_the_same_store_goes_on(
    parameters: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few, store = 1 if parameters else FEW, tmp_path / "store"
    whole = estimator(**parameters, store=str(tmp_path / "other")).fit(X, Y)
    assert whole.n_iter_ > few
    caplog.clear()
    with pytest.raises(dkrr.ConvergenceError) as caught:
        estimator(**parameters, store=str(store), max_iter=few).fit(X, Y)
    assert caught.value.num_iterations == few
    assert "max_iter" in caught.value.hint
    before = chunks(store)
    assert before
    with pytest.raises(dkrr.ConvergenceError):
        estimator(**parameters, store=str(store), max_iter=few).fit(X, Y)
    assert chunks(store) == before  # the preconditioner, or the factor it is, was found
    assert begun_at(caplog) == [few]
    caplog.clear()
    found = estimator(**parameters, store=str(store), max_iter=1000).fit(X, Y)
    assert begun_at(caplog) == [few]
    assert few < found.n_iter_ <= 1.1 * whole.n_iter_  # the true residual at the limit takes the place of another
    np.testing.assert_allclose(found.predict(X), whole.predict(X), rtol=0, atol=1e-7)
    assert not list((store / "solves").iterdir())


def test_the_same_estimator_goes_on_without_a_store(caplog: pytest.LogCaptureFixture) -> None:
    whole = estimator().fit(X, Y)
    found = estimator(max_iter=FEW)
    with pytest.raises(dkrr.ConvergenceError):
        found.fit(X, Y)
    with pytest.raises(dkrr.ConvergenceError):
        found.fit(X, Y)  # at once: the limit was reached before
    found.set_params(max_iter=1000).fit(X, Y)
    assert begun_at(caplog) == [FEW, FEW]
    np.testing.assert_allclose(found.predict(X), whole.predict(X), rtol=0, atol=1e-7)
    caplog.clear()
    found.set_params(max_iter=FEW)
    with pytest.raises(dkrr.ConvergenceError):
        found.fit(X, Y)
    found.set_params(max_iter=1000).fit(X[:200], Y[:200])  # other rows begin anew
    assert begun_at(caplog) == []
    whole = estimator().fit(X[:200], Y[:200])
    np.testing.assert_array_equal(found.dual_coef_, whole.dual_coef_)


def test_a_tolerance_out_of_reach_leaves_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(dkrr.ConvergenceError) as caught:
        estimator(store=str(tmp_path), tol=1e-17, max_iter=2000).fit(X, Y)
    assert caught.value.stagnated
    assert not list((tmp_path / "solves").iterdir())


def test_a_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    np.save("data.npy", np.column_stack([X, Y]))
    text = (
        '[data]\npath = "data.npy"\ntarget = [-1]\n[model]\nkernel = "rbf"\ngamma = 2.0\nalpha = 1e-3\n'
        '[solver]\nname = "cg"\ntile_size = 100\nmax_iter = {}\n[output]\ndirectory = "runs/a"\n'
    )
    Path("job.toml").write_text(text.format(FEW))
    run("fit", "job.toml", exits=5, said="raise max_iter")
    before = chunks(tmp_path / "runs" / "store")
    Path("job.toml").write_text(text.format(1000))
    run("fit", "job.toml")
    assert begun_at(caplog) == [FEW]
    assert before
    assert dkrr.load_model("runs/a/model.zarr").solution.num_iterations > FEW


GOOD_STARTS: dict[str, dict[str, Any]] = {
    "cg": {},
    "cg, mixed": {"precision": "mixed"},
    "cg, two alphas": {"alpha": [1e-3, 1e-2]},
    "cg, uniform columns": {"solver_params": {"preconditioner": "nystrom", "rank": 50}},
    "mixed factor": {"solver": "cholesky", "precision": "mixed"},
    "mixed factors": {"solver": "cholesky", "precision": "mixed", "alpha": [1e-3, 1e-2]},
}
BUILT = {"precondition", "factorise", "gram", "apply"}


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("parameters", GOOD_STARTS.values(), ids=GOOD_STARTS)
def test_a_start_that_is_good_is_seen_before_anything_is_built(
    parameters: dict[str, Any], intercept: bool, tmp_path: Path
) -> None:
    y = np.column_stack([Y, np.cos(Y)])
    weight = np.linspace(0, 2, len(y))
    found = estimator(**parameters, store=str(tmp_path / "one"), warm_start=True, fit_intercept=intercept)
    found.fit(X, y, weight)
    assert BUILT & set(found.solution_.seconds)
    before = found.predict(X)
    # another store, in which nothing of the first fit can be found
    found.set_params(store=str(tmp_path / "two")).fit(X, y, weight)
    assert found.solution_.num_iterations == 0, found.solution_.message
    assert found.solution_.converged
    assert not BUILT & set(found.solution_.seconds), found.solution_.seconds
    assert not chunks(tmp_path / "two")
    assert not [path for name in ("factors", "grams", "solves") for path in (tmp_path / "two" / name).glob("*.zarr")]
    assert "the start already has residual" in found.solution_.message
    assert "nothing was built" in found.solution_.message
    np.testing.assert_allclose(found.predict(X), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("unit", [1e-3, 1e-6, 1e-9, 1e-12])
def test_a_start_for_targets_in_another_unit_is_no_worse_than_zero(
    unit: float, intercept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rng = np.random.default_rng(8)
    rows = rng.random((80, 3))
    y = np.sin(4 * rows[:, 0])
    options: dict[str, Any] = {"kernel": "linear", "solver": "cg", "tile_size": 16, "tol": 1e-11}
    cold = dkrr.KernelRidge(0.1, fit_intercept=intercept, **options).fit(rows, unit * y)
    found = dkrr.KernelRidge(0.1, fit_intercept=intercept, warm_start=True, **options).fit(rows, y)
    found.fit(rows, unit * y)
    assert found.solution_.num_iterations <= cold.solution_.num_iterations
    assert found.solution_.given_up == []
    np.testing.assert_allclose(found.predict(rows), cold.predict(rows), rtol=1e-8)
    assert not [record for record in caplog.records if "broke down" in record.getMessage()]


def test_a_start_that_is_good_for_some_targets_is_no_end(tmp_path: Path) -> None:
    y = np.column_stack([Y, np.cos(Y)])
    found = estimator(warm_start=True).fit(X, y)
    y[:, 1] = np.sin(2 * Y)
    found.fit(X, y)
    assert found.n_iter_ > 0
    assert "precondition" in found.solution_.seconds
    np.testing.assert_allclose(found.predict(X), estimator().fit(X, y).predict(X), rtol=0, atol=1e-6)


def test_a_job_whose_start_is_good_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_process(monkeypatch)
    np.save("data.npy", np.column_stack([X, Y]))
    text = (
        '[data]\npath = "data.npy"\ntarget = [-1]\n[model]\nkernel = "rbf"\ngamma = 2.0\nalpha = 1e-3\n'
        '[solver]\nname = "{}"\nprecision = "{}"\ntile_size = 100\n'
        '[output]\ndirectory = "runs/{}"\nstore = "store"\nkeep = "{}"\n'
    )
    Path("job.toml").write_text(text.format("cholesky", "mixed", "a", "factor"))
    run("fit", "job.toml")
    factors = chunks(tmp_path / "store")
    assert factors
    for name, keep in (("b", "factor"), ("c", "model")):
        Path("job.toml").write_text(text.format("cholesky", "mixed", name, keep))
        run("fit", "job.toml")
        assert "nothing was built" in dkrr.load_model(f"runs/{name}/model.zarr").solution.message
        assert chunks(tmp_path / "store") == factors
    # what is kept is what the run rests on, whoever made it
    (kept,) = dkrr.load_model("runs/b/model.zarr").provenance["factors"]
    assert Path(kept).exists()
    Path("job.toml").write_text(text.format("cg", "auto", "d", "model"))
    run("fit", "job.toml")
    document = json.loads(Path("runs/d/result.json").read_text())
    assert document["num_iterations"] == 0
    assert not BUILT & set(document["seconds"]), document["seconds"]
