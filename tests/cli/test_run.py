"""``plan``, ``fit``, ``predict`` and ``evaluate``: what goes to which stream, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dkrr.cli import main


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
