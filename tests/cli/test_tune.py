"""``tune``: what goes to which stream, the options, and the exit codes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

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
