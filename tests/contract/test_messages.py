"""What the commands say when something is wrong: what was seen, what was expected, what to do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import dkrr
from dkrr.selection.tuning import tune
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process


def test_a_search_for_a_constant_target_names_it(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((60, 3))
    rows[:, 2] = 7.0
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,yield", comments="")
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "t.csv"\ntarget = ["yield"]\nstandardize = true\n[cluster]\nworkers = 1\n'
    )
    run(
        "tune",
        tmp_path / "job.toml",
        "-o",
        tmp_path / "best.toml",
        exits=4,
        said=("target 'yield' is the same in all 60 rows", "hint: "),
    )
    assert not (tmp_path / "best.toml").exists()


def test_one_of_two_targets_may_be_constant_in_a_search() -> None:
    rows = np.random.default_rng(0).random((60, 3))
    with pytest.raises(dkrr.DataError, match="targets 'y0', 'y1' are the same in all 60 rows"):
        tune(rows, np.ones((60, 2)))
    assert np.isfinite(tune(rows, np.c_[rows.sum(axis=1), np.ones(60)]).best.loo_rmse)


@pytest.mark.parametrize("size", [1e-160, 1e-200, 1e155])
@pytest.mark.parametrize(
    "model", ['kernel = "rbf"', 'kernel = "rbf"\nloss = "epsilon_insensitive"'], ids=["ridge", "loss"]
)
def test_whitened_targets_of_no_usable_size_are_refused(
    model: str, size: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    rows = np.random.default_rng(0).random((40, 3)) * [1, 1, size]
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,y", comments="")
    (tmp_path / "job.toml").write_text(f'[data]\npath = "t.csv"\ntarget = "y"\nstandardize = true\n[model]\n{model}\n')
    run("fit", tmp_path / "job.toml", exits=4, said=("target 0 is of size", "measure it in another unit"))


@pytest.mark.parametrize("size", [1e-170, 1e170])
def test_scores_of_targets_whose_squares_are_no_numbers(size: float, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((40, 3))
    est = dkrr.KernelRidge(kernel="linear").fit(rows[:, :2], np.zeros(40))
    est.save(tmp_path / "model.zarr")  # which says 0 of all rows
    np.save(tmp_path / "t.npy", rows * [1, 1, size])
    said = json.loads(run("evaluate", tmp_path / "model.zarr", tmp_path / "t.npy", "--json").stdout)
    expected = float(np.sqrt(np.mean(rows[:, 2] ** 2)))
    assert said["rmse"] == pytest.approx(expected * size, rel=1e-9, abs=0)
    assert said["r2"] == pytest.approx(1 - expected**2 / rows[:, 2].var())


def test_a_refusal_says_what_the_reserve_of_the_disk_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text('[data]\npath = "generate:friedman?n=300&d=5&seed=0"\n')
    monkeypatch.setattr("dkrr.jobs.plan.free_bytes", lambda store: 200 * 2**20)
    result = run("plan", tmp_path / "job.toml", exits=3)
    said = " ".join(result.stderr.split())
    assert "256 MiB" in said
    assert "kept free" in said
    assert "200 MiB are free" in said
    assert "hint: free " in said


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a small table and an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    rows = np.random.default_rng(0).random((60, 3))
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,y", comments="")
    return tmp_path


@pytest.mark.parametrize("command", [("predict", "-o", "p.csv"), ("evaluate",)])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("runs/nope", "runs/nope does not exist"),
        ("nope", "nope does not exist"),
        ("t.csv", "t.csv is not a model"),
        ("empty", "empty is not a model"),
    ],
)
def test_what_is_no_model_is_named_for_what_it_is(
    folder: Path, command: tuple[str, ...], model: str, said: str
) -> None:
    name, *options = command
    run(
        name,
        model,
        "t.csv",
        *options,
        exits=4,
        said=(f"error: {said}", "hint: give a model.zarr, a run, or NAME@ALIAS"),
    )


def test_a_run_is_a_model_by_its_name_and_says_why_it_has_none(folder: Path) -> None:
    dkrr.KernelRidge(kernel="rbf").fit(np.eye(2), [1.0, 2.0]).save(folder / "runs" / "good" / "model.zarr")
    (folder / "runs" / "good" / "job.json").write_text('{"data": {}, "model": {}, "solver": {}, "output": {}}')
    np.savetxt(folder / "new.csv", np.eye(2), delimiter=",", header="x0,x1", comments="")
    run("predict", "good", "new.csv", "-o", "p.csv")
    (folder / "runs" / "bad").mkdir()
    (folder / "runs" / "bad" / "job.json").write_text('{"data": {}, "model": {}, "solver": {}, "output": {}}')
    for text in ("bad", "runs/bad"):
        run(
            "predict",
            text,
            "new.csv",
            "-o",
            "q.csv",
            exits=4,
            said=("has no model: it is interrupted", f"`dkrr resume {text}`"),
        )
    run("fit", "runs/bad", exits=2, said="runs/bad is a run, not a job file")


def test_information_about_nothing_says_so(folder: Path) -> None:
    run("info", "nope", exits=4, said="nope does not exist")
    run("info", "t.csv", exits=4, said=("t.csv is not a data set, model", "`dkrr ingest"))


@pytest.mark.parametrize("command", ["submit", "tune"])
def test_data_in_the_place_of_a_job_file_is_told_how_to_get_one(folder: Path, command: str) -> None:
    options = ["-o", "best.toml"] if command == "tune" else []
    run(command, "t.csv", *options, exits=2, said=("t.csv is not valid TOML", "`dkrr init DATA` writes one"))


def test_too_little_memory_is_told_in_sizes_and_how_much_would_do(folder: Path) -> None:
    (folder / "job.toml").write_text(
        '[data]\npath = "t.csv"\ntarget = ["y"]\n[model]\nkernel = "rbf"\n'
        '[cluster]\nworkers = 1\nmemory_limit = "100MiB"\n'
    )
    result = run("plan", "job.toml", exits=3)
    said = " ".join(result.stderr.split())
    assert "a worker of 100 MiB cannot hold a task" in said
    assert "260 MiB of it Python and its libraries" in said
    assert "336 MiB would do" in said
    (folder / "job.toml").write_text((folder / "job.toml").read_text().replace("100MiB", "336MiB"))
    run("plan", "job.toml")


def test_a_column_number_that_is_none_says_how_they_count(folder: Path) -> None:
    run("init", "t.csv", "--target", "7", exits=2, said="hint: columns count from 0 to 2; -1 is the last")


def test_words_as_a_target_in_python_are_named() -> None:
    with pytest.raises(dkrr.DataError, match="y has dtype <U1"):
        dkrr.KernelRidge().fit(np.eye(2), ["a", "b"])


def test_a_plan_before_the_first_fit_does_not_call_the_scaling_old(folder: Path) -> None:
    (folder / "job.toml").write_text(
        '[data]\npath = "t.csv"\ntarget = ["y"]\nstandardize = true\n[cluster]\nworkers = 1\n'
    )
    for _ in range(2):
        assert "frozen" not in run("plan", "job.toml").stdout


@pytest.mark.parametrize(
    ("model", "evaluate", "code", "said"),
    [
        ('kernel = "matern"\ngamma = 0.2', "", 2, "gamma is for rbf"),
        ('kernel = {sum = [{kernel = "rbf", coef0 = 1}, "linear"]}', "", 2, "coef0 is for poly"),
        ('kernel = "rbf"', 'metric = "accuracy"', 4, 'metric = "accuracy" is for classes; the targets of'),
    ],
)
def test_what_a_job_asks_and_would_not_get_is_refused(
    model: str, evaluate: str, code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("a,b,y\n" + "".join(f"{k / 7},{k % 5},{k / 3}\n" for k in range(60)))
    job = tmp_path / "job.toml"
    job.write_text(
        f'[data]\npath = "rows.csv"\ntarget = "y"\n[evaluate]\nfraction = 0.2\n{evaluate}\n[model]\n{model}\n'
    )
    run("plan", job, exits=code, said=said)


def test_scores_of_several_targets_say_that_they_are_means(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    X = rng.uniform(size=(60, 2))
    Y = np.column_stack([X[:, 0], X[:, 1], X.sum(axis=1)])
    dkrr.KernelRidge(0.1, kernel="rbf").fit(X, Y).save(tmp_path / "model.zarr")
    np.save(tmp_path / "new.npy", np.column_stack([X, Y]))
    for options in ([], ["--metric", "rmse"]):
        run(
            "evaluate",
            tmp_path / "model.zarr",
            tmp_path / "new.npy",
            *options,
            said="3; each score is the mean over them",
        )
    np.save(tmp_path / "still.npy", np.column_stack([X, Y[:, 0], np.full(60, 50.0), Y[:, 2]]))
    command = "evaluate", tmp_path / "model.zarr", tmp_path / "still.npy"
    run(*command, said="3; each score is the mean over them, r2 without the 1 of one value")
    assert "without" not in run(*command, "--metric", "rmse").output


@pytest.mark.parametrize("command", [("gc",), ("plan",), ("info",), ("fit", "--decimal", ".")])
def test_no_message_repeats_a_password(command: tuple[str, ...]) -> None:
    address = "tcp://user:hunter2secret@host:1/a.toml"
    shown = run(*command, address, exits=None)
    assert "hunter2" not in shown.output
