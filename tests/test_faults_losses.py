"""Jobs with other losses than the square, killed by SIGKILL half-way and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model
from dkrr.kernels import make_kernel
from dkrr.linalg.loss import make_loss
from dkrr.linalg.loss_problem import GramColumns, LossProblem, certify, root_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(200)]

N, D = 3000, 5
RNG = np.random.default_rng(8)
X = RNG.standard_normal((N, D))
Y = np.where(np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.5 * RNG.standard_normal(N) > 0, 1.0, -1.0)
TOL, C, GAMMA = 1e-9, 10.0, 0.2
# jobs of this size are over before the ten seconds after which coefficients are saved
PROGRAM = (
    "import sys\nimport dkrr.jobs.loss_fit as fit\nfit.CHECKPOINT_SECONDS = 0.0\n"
    "from dkrr.cli import main\nmain(sys.argv[1:])\n"
)


def write(folder: Path, loss: str) -> Path:
    """A job for two workers of 2 GiB, with its rows."""
    folder.mkdir()
    lines = [",".join(map(repr, row)) for row in np.column_stack([X, Y]).tolist()]
    (folder / "rows.csv").write_text("\n".join(lines))
    (folder / "job.toml").write_text(
        f'[data]\npath = "rows.csv"\nheader = false\ntarget = [-1]\none_hot = true\n'
        f'[model]\nloss = "{loss}"\nC = {C}\nkernel = "rbf"\ngamma = {GAMMA}\n[solver]\ntol = {TOL}\n'
        '[cluster]\nworkers = 2\nmemory_limit = "2GiB"\n[output]\ndirectory = "run"\n'
    )
    return folder


def fit(folder: Path, failpoints: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DKRR_FAILPOINTS": failpoints}
    command = [sys.executable, "-c", PROGRAM, "fit", str(folder / "job.toml"), "--json"]
    return subprocess.run(command, env=environment, timeout=100, check=False, capture_output=True, text=True)


def result_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def gap_of(loss: str, a: np.ndarray) -> float:
    columns = GramColumns(make_kernel("rbf", gamma=GAMMA), X - X.mean(axis=0), 2)
    task = LossProblem(columns, Y, np.full(N, C), make_loss(loss))
    f = columns.product(a)
    return certify(task, a, root_of(lambda b: float(task.C @ task.loss.derivative(Y, f + b)), 0.0, 2.0), f).gap


@pytest.mark.parametrize("loss", [pytest.param("hinge", marks=pytest.mark.short), "logistic"])
def test_a_killed_fit_goes_on_where_it_was(loss: str, tmp_path: Path) -> None:
    """Two kills, each right after a checkpoint: what came before the last one is not done again."""
    whole = result_of(fit(write(tmp_path / "whole", loss)))
    folder, gaps, kills = write(tmp_path / "killed", loss), [1.0], 2
    for _ in range(kills):
        done = fit(folder, "written*/loss-*.npy:@3:sigkill")
        assert done.returncode == -signal.SIGKILL, done.stderr
        (left,) = (folder / "run").glob("loss-*.npy")
        gaps.append(gap_of(loss, np.load(left)[:, -1]))
    again = result_of(fit(folder))
    assert again["reused"]["start"] == {"rows": N, "source": left.name}
    assert not list((folder / "run").glob("loss-*.npy"))
    # the first coefficients that are saved are those that a fit begins with: two iterations to each kill
    assert gaps[0] > gaps[1] > gaps[2] > TOL
    assert again["history"][-1][0][1] <= 1.01 * gaps[2]  # a fit's intercept is nearly the best one
    assert whole["num_iterations"] > 2 * kills
    # at most one iteration of each kill is done again: a fit that goes on has to find its working set
    assert again["num_iterations"] <= whole["num_iterations"] - 2 * kills + kills < whole["num_iterations"]
    for name in ("primal", "dual"):
        first, second = (result["certificates"][-1][name] for result in (whole, again))
        assert second == pytest.approx(first, rel=TOL)
    assert max(certificate["gap"] for certificate in again["certificates"]) <= TOL
    found, expected = (load_model(result["model_path"]).predict(X[:500]) for result in (again, whole))
    np.testing.assert_allclose(found, expected, atol=1e-3 * np.abs(expected).max())
