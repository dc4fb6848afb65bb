"""What `dkrr tune` chooses, what it says of the choice, and what its last line is."""

from __future__ import annotations

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
from click.testing import CliRunner, Result

import dkrr
from dkrr.cli import main
from dkrr.engine.tasks import InProcessExecutor
from dkrr.jobs.spec import JobSpec
from tests.contract.helpers import contents

N = 240


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("dkrr.jobs.tune.job_executor", lambda *_: contextlib.nullcontext(InProcessExecutor()))
    monkeypatch.setattr("dkrr.jobs.run.job_executor", lambda *_: contextlib.nullcontext(InProcessExecutor()))


def write_job(noise: float) -> None:
    rng = np.random.default_rng(3)
    x = rng.uniform(-2, 2, (N, 2))
    y = np.sin(2 * x[:, 0]) + 0.3 * x[:, 1] + noise * rng.standard_normal(N)
    np.save("data.npy", np.column_stack([x, y]))
    Path("job.toml").write_text(
        '[data]\npath = "data.npy"\ntarget = [-1]\nstandardize = true\n'
        '[tune]\nkernels = ["matern32", "rbf"]\nsearch_rows = [60]\nrows = 240\n'
        '[output]\ndirectory = "runs/first"\n'
    )


def without_each_row(candidate: dict[str, Any]) -> np.ndarray:
    """The squared leave-one-out errors of a candidate on all rows, one refit for each of them by its definition."""
    data = np.load("data.npy")
    x, y = data[:, :-1], data[:, -1]
    x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
    z = x / np.array(candidate["widths"])
    r = np.sqrt(((z[:, None] - z[None]) ** 2).sum(-1))
    s = np.sqrt(3) * r
    gram = np.exp(-(r**2) / 2) if candidate["kernel"] == "rbf" else (1 + s) * np.exp(-s)
    found = np.empty(N)
    for i in range(N):
        rest = np.arange(N) != i
        a = gram[np.ix_(rest, rest)] + candidate["alpha"] * np.eye(N - 1)
        found[i] = y[i] - gram[i, rest] @ np.linalg.solve(a, y[rest])
    return found**2


def test_of_trials_as_good_the_best_conditioned_is_chosen() -> None:
    write_job(noise=0.3)
    result = run("tune", "job.toml", "-o", "best.toml", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    best, least = document["best"], document["least_error"]
    squares = {json.dumps(item): without_each_row(item) for item in document["candidates"]}
    of_least = squares[json.dumps(least)]
    good = []
    for item in document["candidates"]:
        errors = squares[json.dumps(item)]
        difference = errors - of_least
        error = difference.std(ddof=1) / np.sqrt(N)
        assert item["loo_rmse"] == pytest.approx(np.sqrt(errors.mean()), rel=1e-6)
        assert item["excess_error"] == pytest.approx(error / (2 * least["loo_rmse"]), rel=1e-4, abs=1e-9)
        if difference.mean() <= error or item["loo_rmse"] <= 1.002 * least["loo_rmse"]:
            good.append(item)
    assert least["loo_rmse"] == min(item["loo_rmse"] for item in document["candidates"])
    assert best["condition"] == min(item["condition"] for item in good)
    assert best["condition"] < least["condition"]  # there is something to gain here
    assert best["alpha"] > least["alpha"]
    assert set(document["foreseen_seconds"]) == {"best", "least_error"}
    assert json.loads(Path("best.search.json").read_text())["least_error"] == least
    assert f"alpha = {best['alpha']}" in Path("best.toml").read_text()


def test_what_a_search_says_and_leaves() -> None:
    write_job(noise=0.3)
    result = run("tune", "job.toml", "-o", "best.toml")
    assert result.exit_code == 0, result.output
    search = json.loads(Path("best.search.json").read_text())
    best, least = search["best"], search["least_error"]
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    for found, mark in ((least, "smallest error"), (best, "chosen")):
        (line,) = [line for line in lines if line.rstrip().endswith(mark)]
        assert f"{found['alpha']:.3g}" in line
        assert f"{found['condition']:.1e}" in line
        assert sum(mark in line for line in Path("best.toml").read_text().splitlines()) == 1
    rows = {line.split()[0]: line for line in lines}
    assert f"error +{100 * (best['loo_rmse'] / least['loo_rmse'] - 1):.2f} %" in rows["cost"]
    assert f"condition {best['condition']:.1e} instead of {least['condition']:.1e}" in rows["saved"]
    chosen, other = (f"about {search['foreseen_seconds'][name]:.0f} s" for name in ("best", "least_error"))
    assert f"a fit of {chosen} {'either way' if chosen == other else f'instead of {other}'}" in rows["saved"]
    # the last line says where the run will be
    assert lines[-1].startswith(f"dkrr fit {Path('best.toml').absolute()}: ")
    assert str(Path("runs/best").absolute()) in lines[-1]
    assert f"[output] directory of the job that was tuned is {Path('runs/first').absolute()}" in lines[-1]
    written, job = tomllib.loads(Path("best.toml").read_text()), JobSpec.load("best.toml")
    assert (written["data"]["path"], job.tune) == ("data.npy", None)  # seen from its folder
    assert job.output.store == JobSpec.load("job.toml").store
    assert run("fit", "best.toml").exit_code == 0
    assert dkrr.load_model("runs/best/model.zarr").num_rows == N
    # a picture is drawn unless it is declined; this search is read from the store
    assert Path("best.search.png").read_bytes().startswith(b"\x89PNG")
    assert run("tune", "job.toml", "-o", "plain.toml", "--no-picture").exit_code == 0
    assert not Path("plain.search.png").exists()


def test_an_array_of_a_check_that_is_lost_is_computed_again() -> None:
    write_job(noise=0.1)
    assert run("tune", "job.toml", "-o", "best.toml", "--no-picture").exit_code == 0
    before = json.loads(Path("best.search.json").read_text())
    lost = list(Path("runs/store/tune").rglob("c/0/0"))
    checks = [path for path in lost if "trials" in path.parts]
    assert checks
    checks[0].unlink()
    assert run("tune", "job.toml", "-o", "again.toml", "--no-picture").exit_code == 0
    assert json.loads(Path("again.search.json").read_text())["candidates"] == before["candidates"]


def test_fewer_rows_in_the_job_make_a_smaller_search_as_on_the_command_line(tmp_path: Path) -> None:
    document: dict[str, Any] = {"data": {"path": "generate:friedman?n=600&d=5&seed=0"}, "tune": {"rows": 250}}
    tune = JobSpec.from_dict(document, tmp_path).tune
    assert tune is not None
    assert tune.settings().search_rows == (250,)
    again = JobSpec.from_dict(JobSpec.from_dict(document, tmp_path).to_dict(), tmp_path).tune
    assert again is not None
    assert again.settings() == tune.settings()
    document["tune"]["search_rows"] = [1000, 2000]  # what was written down is meant
    with pytest.raises(dkrr.JobFileError, match="search_rows"):
        JobSpec.from_dict(document, tmp_path)


def test_what_the_configuration_of_this_place_says_is_in_no_job_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(noise=0.1)
    with Path("job.toml").open("a") as file:
        file.write("[cluster]\nworkers = 1\n")
    with dask.config.set({"dkrr.cluster": {"scheduler": "local", "workers": 2, "memory_limit": "1GiB"}}):
        assert run("tune", "job.toml", "-o", "best.toml", "--no-picture").exit_code == 0
    assert tomllib.loads(Path("best.toml").read_text())["cluster"] == {"workers": 1}


def test_the_columns_of_a_precomputed_matrix_are_not_whitened(tmp_path: Path) -> None:
    document = {"data": {"path": "K.npy", "standardize": True}, "model": {"kernel": "precomputed"}}
    with pytest.raises(dkrr.JobFileError, match="standardize with a precomputed matrix"):
        JobSpec.from_dict(document, tmp_path)


def test_a_picture_is_not_drawn_through_a_link(tmp_path: Path) -> None:
    write_job(noise=0.1)
    assert run("tune", "job.toml", "-o", "best.toml").exit_code == 0
    Path("best.toml").unlink()
    Path("best.search.png").unlink()
    Path("photo.png").write_text("mine")
    Path("best.search.png").symlink_to("photo.png")
    assert run("tune", "job.toml", "-o", "best.toml").exit_code == 0
    assert Path("photo.png").read_text() == "mine"


def test_a_search_leaves_what_another_one_left_beside_its_job(tmp_path: Path) -> None:
    write_job(noise=0.1)
    assert run("tune", "job.toml", "-o", "best.1").exit_code == 0
    before = contents(tmp_path)
    assert {"best.1", "best.1.search.json", "best.1.search.png", "best.1.trials.jsonl"} <= before.keys()
    assert run("tune", "job.toml", "-o", "best.2", "--seed", "2").exit_code == 0
    after = contents(tmp_path)
    assert {name: after[name] for name in before if name.startswith("best")} == {
        name: data for name, data in before.items() if name.startswith("best")
    }
