"""The recipes of workflows/retrain: all run one command, and it retrains a model."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from dkrr.jobs.retrain.spec import RetrainSpec
from tests.jobs.retrain.project import Project

FOLDER = Path(__file__).parent.parent.parent / "workflows" / "retrain"
RECIPES = [
    "systemd/dkrr-retrain.service", "crontab", "cronjob.yaml", "scrontab", "airflow_dag.py", "dagster_asset.py",
]  # fmt: skip


def words(name: str) -> str:
    """A recipe without what belongs to its language."""
    return " ".join(re.findall(r"[\w./=]+", (FOLDER / name).read_text()))


def test_the_example_is_accepted() -> None:
    spec = RetrainSpec.from_dict(tomllib.loads((FOLDER / "RETRAIN.toml").read_text()), base="/srv/demo")
    assert spec.directory == "/srv/demo/models/demo/retrain"


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_runs_the_same_command(recipe: str) -> None:
    assert re.search(r"(/opt/dkrr/bin/dkrr|DKRR|dkrr) retrain RETRAIN\.toml", words(recipe))
    assert ("/srv/demo" in words(recipe)) == (recipe != "cronjob.yaml")


def test_only_what_another_attempt_can_mend_is_retried() -> None:
    for name in ("airflow_dag.py", "dagster_asset.py", "prefect_flow.py"):
        assert "RETRIED = 6 75" in words(name)
    assert "RestartPreventExitStatus=1 2 3 4 5 7 8" in words("systemd/dkrr-retrain.service")
    assert re.search(r"operator NotIn values 0 6 75", words("cronjob.yaml"))


@pytest.mark.system
@pytest.mark.short
def test_the_command_retrains(project: Project, program: Path) -> None:
    done = subprocess.run(
        [str(program), "retrain", "RETRAIN.toml"], cwd=project.folder, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "promoted" in done.stdout
    assert project.production is not None
