"""Why a plan is as it is: a sentence for the solver, the precision, the rank and the tile size, in a reader's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.fit.rates import nominal_machine

JOB = """
[data]
path = "generate:friedman?n={n}&d=5&seed=0"
[model]
kernel = "{kernel}"
alpha = 1.0
[solver]
{solver}
[cluster]
workers = 2
memory_limit = "{memory}"
"""


def planned(
    folder: Path, *, n: int = 400, kernel: str = "rbf", solver: str = "", memory: str = "1GiB"
) -> tuple[Any, str]:
    path = folder / "job.toml"
    path.write_text(JOB.format(n=n, kernel=kernel, solver=solver, memory=memory))
    shown, document = (CliRunner().invoke(main, ["plan", str(path), *more]) for more in ([], ["--json"]))
    assert shown.exit_code == document.exit_code == 0, shown.output
    return json.loads(document.stdout)["reasons"], " ".join(shown.stdout.split())


def test_a_small_plan_says_why(tmp_path: Path) -> None:
    reasons, shown = planned(tmp_path)
    assert set(reasons) == {"solver", "precision", "tile_size"}
    assert "the rows are few" in reasons["solver"]
    assert "16 digits" in reasons["precision"]
    assert "worth a task" in reasons["tile_size"]
    for name, text in (("cholesky", "solver"), ("float64", "precision"), ("tiles of 256", "tile_size")):
        assert f"why {name} {reasons[text]}" in shown


def test_a_choice_among_many_says_what_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.jobs.plan.measure_machine", lambda *_, **__: nominal_machine(2))
    reasons, shown = planned(tmp_path, n=12_000)
    assert set(reasons) == {"solver", "precision", "rank"}  # conjugate gradients have no tiles to speak of
    assert "the fastest exact way" in reasons["solver"]
    assert "digits" in reasons["precision"]
    assert "preconditioner" in reasons["rank"]
    assert f"why cg {reasons['solver']}" in shown


def test_what_was_asked_for_is_said_so(tmp_path: Path) -> None:
    asked = 'name = "cg"\nrank = 50\nprecision = "mixed"'
    assert planned(tmp_path, solver=asked)[0] == dict.fromkeys(("solver", "precision", "rank"), "asked for")
    asked = 'name = "cholesky"\ntile_size = 128'
    assert planned(tmp_path, solver=asked)[0]["tile_size"] == "asked for"


def test_memory_that_bounds_the_tiles_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.jobs.plan.measure_machine", lambda *_, **__: nominal_machine(2))
    solver = 'name = "cholesky"\nprecision = "float64"'
    assert "80 % of a worker's memory" in planned(tmp_path, n=12_000, solver=solver, memory="340MiB")[0]["tile_size"]


def test_few_features_of_a_kernel_are_counted(tmp_path: Path) -> None:
    assert "linear in 5 features" in planned(tmp_path, n=7_000, kernel="linear")[0]["solver"]
