"""``plan``, ``fit``, ``predict`` and ``evaluate``: what goes to which stream, and the exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main
from dkrr.cli.models import model_location
from dkrr.errors import PlanRefusedError
from dkrr.jobs.spec import JobSpec


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(
        '[data]\npath = "generate:friedman?n=300&d=5&seed=0"\nstandardize = true\n'
        '[evaluate]\nfraction = 0.2\nmetric = "r2"\n'
        '[model]\nkernel = "rbf"\ngamma = 0.05\nalpha = 0.01\n'
        "[solver]\ntile_size = 100\n"
        '[cluster]\nworkers = 1\nmemory_limit = "1GiB"\n'
    )
    return path


@dataclass
class FakeResult:
    """What ``plan`` and ``fit_job`` return, as far as the command line cares."""

    refusal: str = ""

    def table(self) -> Any:
        return "the table"

    def to_dict(self) -> dict[str, Any]:
        return {"answer": 42}

    def check(self) -> None:
        if self.refusal:
            raise PlanRefusedError(self.refusal, hint="buy memory")


def fake_fit(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr("dkrr.jobs.run.fit_job", function)


def test_a_refused_plan_is_shown_and_ends_with_3(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dkrr.jobs.plan.plan", lambda spec: FakeResult(refusal="too large"))
    result = run("plan", job)
    assert result.exit_code == 3
    assert result.stdout == "the table\n"
    assert result.stderr == "error: too large\nhint: buy memory\n"


def test_fit_reports_progress_on_stderr_and_the_result_on_stdout(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(spec: JobSpec, *, progress: Any, source: bytes) -> FakeResult:
        assert spec == JobSpec.load(job)
        assert source == job.read_bytes()
        progress._last_line -= 11
        progress("factorise", 3, 6, 1e9, 2e9)
        return FakeResult()

    fake_fit(monkeypatch, fit)
    result = run("fit", job)
    assert (result.exit_code, result.stdout) == (0, "the table\n")
    assert result.stderr == "factorise: 3 of 6 tasks\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_fit_ends_with_75(job: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    def fit(spec: JobSpec, *, progress: Any, source: bytes) -> FakeResult:
        signal.raise_signal(number)
        return FakeResult()

    fake_fit(monkeypatch, fit)
    result = run("fit", job)
    assert result.exit_code == 75
    assert result.stderr.startswith("error: interrupted\nhint: start the same command again")


def test_a_wrong_job_file_ends_with_2(job: Path) -> None:
    job.write_text(job.read_text().replace("kernel", "kernal"))
    for command in ("plan", "fit"):
        result = run(command, job)
        assert result.exit_code == 2
        assert result.stderr.startswith(
            f"error: {job}:8: unknown key 'kernal' in [model]; nearest right name: 'kernel'"
        )


def test_the_model_of_a_run_is_found_by_its_directory(tmp_path: Path) -> None:
    (tmp_path / "run" / "model.zarr").mkdir(parents=True)
    assert model_location(str(tmp_path / "run")) == str(tmp_path / "run" / "model.zarr")
    assert model_location(str(tmp_path / "run" / "model.zarr")) == str(tmp_path / "run" / "model.zarr")
    assert model_location("s3://bucket/model.zarr") == "s3://bucket/model.zarr"


def test_from_a_job_file_to_predictions(job: Path, tmp_path: Path) -> None:
    planned = json.loads(run("plan", job, "--json").stdout)
    assert planned["num_tiles_per_side"] == 3
    fitted = run("fit", job, "--json")
    assert fitted.exit_code == 0, fitted.stderr
    summary = json.loads(fitted.stdout)
    assert max(summary["relative_residual"]) < 1e-10

    data = "generate:friedman?n=50&d=5&seed=0"
    scored = run("evaluate", tmp_path / "runs" / "job", data, "--json")
    assert scored.exit_code == 0, scored.stderr
    assert json.loads(scored.stdout)["r2"] > 0.9

    predicted = run("predict", tmp_path / "runs" / "job", data, "-o", tmp_path / "p.npy")
    assert predicted.exit_code == 0, predicted.stderr
    assert np.load(tmp_path / "p.npy").shape[0] == 50
    assert "50" in predicted.stdout

    shown = run("info", tmp_path / "runs" / "job" / "model.zarr", "--verify")
    assert shown.exit_code == 0
    assert "verified" in shown.stdout
