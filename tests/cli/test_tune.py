"""``tune``: what goes to which stream, the options, and the exit codes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.engine.tasks import InProcessExecutor
from dkrr.jobs.spec import JobSpec


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[data]\npath = "generate:friedman?n=200&d=5&seed=0"\nstandardize = true\n'
        '[tune]\nkernels = ["rbf"]\nsearch_rows = [50]\nrows = 100\n'
        '[cluster]\nworkers = 1\nmemory_limit = "1GiB"\n'
    )
    return path


class FakeSummary:
    """What ``tune_job`` returns, as far as the command line cares."""

    where = "where it will be"

    def table(self) -> Any:
        return "the table"

    def to_dict(self) -> dict[str, Any]:
        return {"answer": 42}


def test_the_options_arrive(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def fake(spec: JobSpec, output: Path, *, progress: Any, **options: Any) -> FakeSummary:
        assert spec == JobSpec.load(job)
        seen.update(options, output=output)
        progress._last_line -= 11
        progress("tune shared width", 1, 4, 1e9, 4e9)
        return FakeSummary()

    monkeypatch.setattr("dkrr.jobs.tune.tune_job", fake)
    best = tmp_path / "best.toml"
    result = run("tune", job, "-o", best, "--rows", 500, "--time", 60, "--seed", 7, "--no-picture")
    assert (result.exit_code, result.stdout) == (0, "the table\nwhere it will be\n")
    assert "tune shared width: 1 of 4 trials" in result.stderr
    assert seen == {"output": best, "rows": 500, "budget_seconds": 60.0, "seed": 7, "picture": False}
    result = run("tune", job, "-o", best, "--json")
    assert json.loads(result.stdout) == {"answer": 42}
    assert result.stderr.endswith("where it will be\n")
    assert seen["picture"]


def test_the_whole_way(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.jobs.tune.job_executor", lambda _: nullcontext(InProcessExecutor()))
    best = tmp_path / "best.toml"
    result = run("tune", job, "-o", best)
    assert result.exit_code == 0, result.stderr
    assert "per feature" in result.stdout
    assert JobSpec.load(best).model.kernel == "rbf"
    result = run("tune", job, "-o", best)
    assert result.exit_code == 2
    assert f"{best} exists" in result.stderr


def test_a_mistake_in_the_job(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[data]\npath = "x.csv"\n[tune]\nrow = 5\n')
    result = run("tune", path, "-o", tmp_path / "best.toml")
    assert result.exit_code == 2
    assert f"{path}:4: unknown key 'row' in [tune]" in result.stderr
