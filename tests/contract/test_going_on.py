"""A fit that stopped short of its tolerance goes on from where it stopped, when it is given more iterations."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dkrr
from dkrr.jobs.facts import Findings, reused_rows
from dkrr.jobs.prepare import prepare
from dkrr.jobs.run_directory import RunDirectory, Status, read_status
from dkrr.jobs.spec import JobSpec
from dkrr.linalg.cg import Checkpoint
from dkrr.linalg.workspace import MAKER
from tests.contract.helpers import run
from tests.jobs.report.runs import fit_here, write_rows
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


@pytest.mark.parametrize(
    "parameters", [{}, {"precision": "mixed", "solver": "cholesky", "alpha": 1e-9}], ids=["cg", "mixed"]
)
def test_an_iteration_goes_on_where_the_machine_has_another_blas_kernel(
    parameters: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 1 if parameters else FEW
    whole = estimator(**parameters, store=str(tmp_path / "other")).fit(X, Y)
    with pytest.raises(dkrr.ConvergenceError):
        estimator(**parameters, store=str(tmp_path / "store"), max_iter=few).fit(X, Y)
    caplog.clear()
    monkeypatch.setattr("dkrr.models.tiled.blas_of", lambda _: "another")
    found = estimator(**parameters, store=str(tmp_path / "store"), max_iter=1000).fit(X, Y)
    assert begun_at(caplog) == [few]
    np.testing.assert_allclose(found.predict(X), whole.predict(X), rtol=0, atol=1e-7)


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


@pytest.mark.parametrize("keep", ["model", "factor"])
def test_a_factor_stays_until_the_run_has_its_result(
    keep: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.run.score_dataset", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit_here(tmp_path, output={"keep": keep})
    result = fit_here(tmp_path, output={"keep": keep}).read("result.json") or {}
    assert (result["tiles_computed"], result["tiles_total"]) == (0, 6)
    assert bool(result["kept"]) == (keep == "factor")


def test_an_intercept_in_the_units_of_the_solver_says_so(tmp_path: Path) -> None:
    for name, standardize in (("white", True), ("plain", False)):
        found = fit_here(tmp_path, name, data={"standardize": standardize}, model={"fit_intercept": True})
        text = run("info", found.path("model.zarr")).output
        assert ("of the whitened target" in text) == standardize
        assert (found.read("result.json") or {})["targets_whitened"] == standardize


def test_other_names_of_the_same_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    table = np.random.default_rng(0).random((60, 3))
    (tmp_path / "job.toml").write_text('[data]\npath = "rows.zarr"\n[model]\nkernel = "rbf"\n')
    for names in ("aby", "bay"):
        shutil.rmtree(tmp_path / "rows.zarr", ignore_errors=True)
        dkrr.ingest(pd.DataFrame(table, columns=list(names)), tmp_path / "rows.zarr", target="y")
        if names == "bay":
            run("resume", tmp_path / "runs/job", said="with other names of columns or classes")
        run("fit", tmp_path / "job.toml")
        assert dkrr.load_model(tmp_path / "runs/job/model.zarr").feature_names == list(names[:2])


def test_a_state_that_was_saved_between_two_checks_is_checked_where_nothing_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = np.random.default_rng(0).random((400, 4))
    y, K = np.sin(6 * X[:, 0]), np.exp(-5.0 * np.square(X[:, None] - X[None]).sum(axis=-1))
    given: dict[str, Any] = {
        "kernel": "rbf",
        "gamma": 5.0,
        "alpha": 1e-3,
        "solver": "cg",
        "tol": 1e-9,
        "tile_size": 128,
    }
    given |= {"precision": "float64", "store": str(tmp_path)}
    save = Checkpoint.save

    def killed(self: Any, state: Any) -> None:
        save(self, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "is_due", lambda _, iteration: iteration >= 37)
        patch.setattr(Checkpoint, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            dkrr.KernelRidge(**given, solver_params={"preconditioner": "none"}).fit(X, y)
    least = {"preconditioner": "none", "allow_unconverged": True}
    found = dkrr.KernelRidge(**given, max_iter=20, solver_params=least).fit(X, y)
    residual = y - K @ found.dual_coef_ - 1e-3 * found.dual_coef_
    size = (K.sum(axis=1).max() + 1e-3) * np.abs(found.dual_coef_).max() + np.abs(y).max()
    assert found.solution_.num_iterations == 37
    assert found.solution_.relative_residual[0] == pytest.approx(np.linalg.norm(residual) / np.linalg.norm(y))
    assert found.solution_.backward_error[0] == pytest.approx(np.abs(residual).max() / size)


def test_of_an_interrupted_factor_only_what_was_done_is_reused(tmp_path: Path) -> None:
    table = np.random.default_rng(0).random((440, 4))
    dkrr.ingest(table[:400], tmp_path / "d.zarr", target=3)
    given: dict[str, Any] = {"data": {"path": str(tmp_path / "d.zarr")}, "evaluate": None, "solver": {"tile_size": 64}}

    def stop(phase: str, done: int, *_: Any) -> None:
        if phase == "factorise" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit_here(tmp_path, progress=stop, **given)
    dkrr.ingest(table[400:], tmp_path / "d.zarr", append=True)
    result = fit_here(tmp_path, **given).read("result.json") or {}
    assert result["tiles_computed"] == result["tiles_total"] - 2
    assert result["reused"]["factor"]["rows"] == 400
    assert 0 < result["reused"]["factor"]["share"] < 0.02
    assert result["reused"]["factor"]["seconds"] < 1


@pytest.mark.parametrize("killed", ["after it was marked", "after its metadata was removed"])
def test_rows_that_a_killed_collection_left_half_removed_are_made_anew(killed: str, tmp_path: Path) -> None:
    X = np.random.default_rng(0).random((100, 3))
    np.save(tmp_path / "x.npy", X)

    def fit() -> Any:
        model = dkrr.KernelRidge(kernel="rbf", tile_size=64, store=tmp_path / "store")
        return model.fit(str(tmp_path / "x.npy"), X[:, 0]).dual_coef_

    wanted = fit()
    (rows,) = (tmp_path / "store/rows").glob("*.zarr")
    document = json.loads((rows / "zarr.json").read_text())
    document["attributes"]["complete"] = False
    (rows / "zarr.json").write_text(json.dumps(document))
    if killed != "after it was marked":
        (rows / "zarr.json").unlink()
    shutil.rmtree(rows / "X")
    np.testing.assert_array_equal(fit(), wanted)


@pytest.mark.parametrize("alpha", [0.25, [0.25, 0.5]], ids=["one alpha", "several"])
def test_the_figures_of_a_model_stay_as_long_as_it_does(
    alpha: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"model": {"loss": "huber", "alpha": alpha}, "solver": None}
    first = fit_here(tmp_path, **given).read("result.json")
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.models.model.put_in_place", lambda *_: 1 / 0)
        patch.setattr("dkrr.models.model.Model._write", lambda *_: 1 / 0)
        write_rows(tmp_path / "rows.csv", 420)
        with pytest.raises(ZeroDivisionError):
            fit_here(tmp_path, **given)
    found = RunDirectory(str(tmp_path / "runs/run"))
    assert found.read("result.json") == first
    assert "earlier attempt" in run("info", found.location).output


@pytest.mark.parametrize("place", ["nystrom", "primal", "several alphas"])
def test_what_was_solved_stays_until_the_run_has_its_result(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: dict[str, Any] = {
        "nystrom": {"solver": {"name": "nystrom", "num_centers": 30}},
        "primal": {"solver": {"name": "primal", "tile_size": "auto"}, "model": {"kernel": "poly"}},
        "several alphas": {"solver": None, "model": {"loss": "huber", "alpha": [0.25, 0.5]}},
    }
    given, scorer = ways[place], "dkrr.jobs.run.score_dataset"
    with monkeypatch.context() as patch:
        patch.setattr(scorer, lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fit_here(tmp_path, **given)
    pattern = "runs/run/loss-*.npy" if place == "several alphas" else "runs/store/solves/*.zarr"
    assert list(tmp_path.glob(pattern))
    fit_here(tmp_path, **given)
    assert not list(tmp_path.glob(pattern))


@pytest.mark.parametrize("target", range(4))
def test_the_frozen_scaling_is_that_of_the_same_targets(
    target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = np.random.default_rng(0).standard_normal((400, 6))
    table[200:, 2:] += 3.0

    def prepared(n: int, target: int) -> Any:
        path = tmp_path / f"{target}.csv"
        np.savetxt(path, table[:n, [0, 1, 2 + target]], delimiter=",")
        document = {"data": {"path": str(path), "target": -1, "standardize": True}, "model": {"kernel": "rbf"}}
        return prepare(JobSpec.from_dict(document, base=tmp_path), str(tmp_path / "store"))

    for each in range(4):
        prepared(200, each)
    assert prepared(400, target).earlier.scaling is None


def test_rows_that_were_read_by_other_rules_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("x,y\n1,2\n3,4\n5,7\n")
    spec = JobSpec.from_dict({"data": {"path": "t.csv", "target": "y"}, "model": {"kernel": "rbf"}}, base=tmp_path)
    for reading in (1, 2):
        monkeypatch.setattr("dkrr.jobs.prepare.READING", reading)
        prepare(spec, str(tmp_path / "store"))
    assert len(list((tmp_path / "store/data").glob("*.zarr"))) == 2


def test_a_centre_without_a_limit_is_told() -> None:
    drift = {"value": 0.0, "column": "", "rows": 4}
    ((name, text),) = reused_rows({"center": {"center": "anew", "rows": 9, "drift": drift, "limit": None}})
    assert name == "centre"
    assert "limit" not in text


# --- copies of rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["data", "rows"])
@pytest.mark.parametrize("damage", ["a flipped bit", "a chunk is gone"])
def test_a_damaged_copy_of_rows_is_made_again(
    kind: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    pd.DataFrame(X).assign(y=Y).to_csv(tmp_path / "rows.csv", index=False)
    job = tmp_path / "job.toml"
    job.write_text(
        '[data]\npath = "rows.csv"\ntarget = "y"\nstandardize = true\n[model]\nkernel = "rbf"\ngamma = 2.0\n'
        '[evaluate]\nfraction = 0.2\n[solver]\nname = "cholesky"\n'
    )
    run("fit", job)
    model, store = tmp_path / "runs/job/model.zarr", tmp_path / "runs/store"
    wanted = dkrr.load_model(model).predict(X)
    shutil.rmtree(store / "factors")
    for chunk in (store / kind).glob("*/X/c/0/0"):
        octets = bytearray(chunk.read_bytes())
        octets[5] ^= 1
        chunk.unlink() if damage == "a chunk is gone" else chunk.write_bytes(octets)
    run("fit", job)
    np.testing.assert_array_equal(dkrr.load_model(model).predict(X), wanted)
    assert all(dkrr.open_dataset(path).verify() is None for path in store.glob("[dr]*/*.zarr"))


def test_a_damaged_copy_does_not_take_the_place_of_a_new_one(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    fit = estimator(store=str(tmp_path / "store"), solver="cholesky")
    wanted = fit.fit(str(tmp_path / "x.npy"), Y).dual_coef_
    (chunk,) = tmp_path.glob("store/rows/*/X/c/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    np.testing.assert_array_equal(fit.fit(str(tmp_path / "x.npy"), Y).dual_coef_, wanted)


def test_the_hint_of_damaged_rows_does_not_say_that_they_should_be_deleted(tmp_path: Path) -> None:
    dkrr.ingest(X, tmp_path / "rows.zarr", y=Y)
    (tmp_path / "rows.zarr/X/c/0/0").write_bytes(b"")
    with pytest.raises(dkrr.DamagedChunkError) as caught:
        estimator().fit(dkrr.open_dataset(tmp_path / "rows.zarr"))
    assert "delete" not in caught.value.hint
    assert "restore" in caught.value.hint


def test_events_go_on_behind_those_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    job = tmp_path / "job.toml"
    pd.DataFrame(X).assign(y=Y).to_csv(tmp_path / "rows.csv", index=False)
    job.write_text('[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "rbf"\n')
    run("fit", job)
    events = tmp_path / "runs/job/events"
    shutil.copy(events / "000000.jsonl", events / "000000 (conflicted copy).jsonl")
    (tmp_path / "rows.csv").write_text("y\n1\nnan\n")
    run("fit", job, exits=None)
    said = run("logs", tmp_path / "runs/job").output
    assert "failed" in said.splitlines()[-1]


@pytest.mark.parametrize("weighted", [False, True])
def test_a_job_of_a_given_matrix_in_mixed_precision_ends(
    weighted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    matrix, weight = np.exp(-2 * ((X[:, None] - X) ** 2).sum(-1)), 0.5 + X[:, 2]
    columns = [matrix, *([weight[:, None]] if weighted else []), Y[:, None]]
    np.save(tmp_path / "k.npy", np.concatenate(columns, axis=1))
    job = tmp_path / "job.toml"
    job.write_text(
        f'[data]\npath = "k.npy"\ntarget = [-1]\n{"weight = -2" if weighted else ""}\n'
        '[model]\nkernel = "precomputed"\nalpha = 0.1\n[solver]\nprecision = "mixed"\ntile_size = 100\n'
    )
    run("fit", job)
    wanted = np.linalg.solve(matrix + np.diag(0.1 / (weight if weighted else np.ones(len(X)))), Y)
    model = dkrr.load_model(tmp_path / "runs/job/model.zarr")
    np.testing.assert_allclose(model.predict(matrix)[:, 0], matrix @ wanted, rtol=1e-6, atol=1e-7)
    assert (tmp_path / "runs/job/result.json").exists()


def test_a_damaged_note_of_who_made_a_matrix_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    pd.DataFrame(X).assign(y=Y).to_csv(tmp_path / "rows.csv", index=False)
    for alpha in (0.1, 0.2):
        job = tmp_path / f"of-{alpha}.toml"
        job.write_text(
            f'[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "rbf"\ngamma = 2.0\nalpha = {alpha}\n'
            '[solver]\nname = "cholesky"\ngram = "stored"\n[output]\nkeep = "all"\n'
        )
        run("fit", job)
        for folder in tmp_path.glob("runs/store/[fg]*/*.zarr"):
            (folder / MAKER).write_text('{"maker": "somebody", "crc32c": "00000000"}')
    assert len(list(tmp_path.glob("runs/store/grams/*.zarr"))) == 1
    matrix = np.exp(-2 * ((X[:, None] - X) ** 2).sum(-1))
    wanted = matrix @ np.linalg.solve(matrix + 0.2 * np.eye(len(X)), Y)
    np.testing.assert_allclose(dkrr.load_model(tmp_path / "runs/of-0.2/model.zarr").predict(X)[:, 0], wanted, rtol=1e-9)


def test_a_direction_that_cannot_be_squared_is_an_error_that_says_so() -> None:
    with pytest.raises(dkrr.NotPositiveDefiniteError, match="too small to be squared: scale the features"):
        dkrr.KernelRidge(kernel="linear", alpha=1.0, solver="cg").fit(X * 1e120, Y)


def test_a_factor_of_a_given_matrix_is_no_preconditioner(tmp_path: Path) -> None:
    matrix = np.exp(-2 * ((X[:, None] - X) ** 2).sum(-1))
    options: dict[str, Any] = {
        "kernel": "precomputed",
        "alpha": 0.1,
        "tile_size": 100,
        "store": str(tmp_path / "store"),
    }
    dkrr.KernelRidge(**options, solver="cholesky").fit(matrix, Y)
    with pytest.raises(dkrr.ParameterError, match="'factor' with a precomputed matrix"):
        dkrr.KernelRidge(**options, solver="cg", solver_params={"preconditioner": "factor"}).fit(matrix, Y)


def test_a_search_does_not_choose_what_the_solver_cannot_fit(tmp_path: Path) -> None:
    pd.DataFrame(X).assign(y=Y).to_csv(tmp_path / "rows.csv", index=False)
    job = tmp_path / "job.toml"
    text = '[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "KERNEL"\n[solver]\nname = "primal"\n'
    job.write_text(text.replace("KERNEL", "linear"))
    run("tune", job, "-o", tmp_path / "best.toml", exits=2, said="kernels with a width have no features")
    job.write_text(text.replace("KERNEL", "rbf"))
    run("fit", job, exits=2, said="no finite number of explicit features")
    retrain = tmp_path / "R.toml"
    retrain.write_text(
        text.replace("KERNEL", "linear").replace('path = "rows.csv"\n', "")
        + '[retrain]\nname = "m"\ndata = "rows.zarr"\nincoming = "in"\nsearch_every = 2\n[holdout]\nfraction = 0.2\n'
    )
    run("retrain", retrain, exits=2, said="kernels of a search")


@pytest.fixture
def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that stopped after three iterations, as it was allowed to; beside it ``job.toml``."""
    in_process(monkeypatch)
    pd.DataFrame(X).assign(y=Y).to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "rows.csv"\ntarget = "y"\n[model]\nkernel = "rbf"\ngamma = 2.0\n'
        '[solver]\nname = "cg"\npreconditioner = "none"\nmax_iter = 3\nallow_unconverged = true\n'
    )
    run("fit", tmp_path / "job.toml")
    return RunDirectory(str(tmp_path / "runs/job"))


def test_a_submission_that_could_not_start_is_not_done(
    finished: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace("max_iter = 3", "max_iter = 500"))
    started: list[Any] = []

    def fails(directory: RunDirectory) -> dict[str, Any]:
        started.append(directory)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dkrr.jobs.driver.start_driver", fails)
    for count in (1, 2):
        run("submit", job, exits=None)
        assert len(started) == count
    assert (finished.read("job.json") or {})["solver"]["max_iter"] == 3
    assert (finished.read("status.json") or {})["state"] == "finished"


def test_the_page_of_a_driver_that_has_not_begun_shows_nothing_of_the_one_before(finished: RunDirectory) -> None:
    before = Findings(finished, read_status(finished))
    assert before.figures
    assert before.attempt
    found = Findings(finished, Status(state="starting", epoch=before.status.epoch))
    assert (found.figures, found.attempt, found.status.epoch) == ({}, {}, before.status.epoch + 1)


def test_the_picture_of_a_search_goes_with_its_figures(finished: RunDirectory, tmp_path: Path) -> None:
    job, best = tmp_path / "job.toml", tmp_path / "best.toml"
    job.write_text(job.read_text() + '[tune]\nkernels = ["rbf"]\nwidths = "shared"\nrows = 60\nsearch_rows = [40]\n')
    run("tune", job, "-o", best)
    assert (tmp_path / "best.search.png").exists()
    best.unlink()
    run("tune", job, "-o", best, "--seed", 3, "--no-picture")
    assert not (tmp_path / "best.search.png").exists()
    best.unlink()
    run("tune", job, "-o", best)
