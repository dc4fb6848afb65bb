"""``retrain`` on the command line: what is printed, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.jobs import toml
from tests.jobs.retrain.project import Project, in_process


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_from_the_first_batch_to_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p")
    path = project.folder / "RETRAIN.toml"
    path.write_text(toml.dumps(project.document))
    nothing = run("retrain", path)
    assert "outcome     nothing new" in nothing.stdout
    project.deliver("n1", seed=1)
    first = run("retrain", path)
    assert first.exit_code == 0, first.stderr
    assert "outcome               promoted" in first.stdout
    again = json.loads(run("retrain", path, "--json").stdout)
    assert (again["outcome"], again["production"]) == ("nothing new", project.production)
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    refused = run("retrain", path)
    assert refused.exit_code == 7
    assert "n2.csv: refused at validate" in refused.stdout
    assert "\nerror: demo: " in refused.stderr
    assert "hint: demo@production is 0001-" in refused.stderr
    assert "rmse 0." in run("models", "list", "demo", "--registry", tmp_path / "p/models").stdout
    assert "retrain  candidate: " in run("models", "show", "demo", "--registry", tmp_path / "p/models").stdout
