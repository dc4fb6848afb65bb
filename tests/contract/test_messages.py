"""What the commands say when something is wrong: what was seen, what was expected, what to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import dkrr
from dkrr.cli import main
from dkrr.selection import tune


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_search_for_a_constant_target_names_it(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((60, 3))
    rows[:, 2] = 7.0
    np.savetxt(tmp_path / "t.csv", rows, delimiter=",", header="a,b,yield", comments="")
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "t.csv"\ntarget = ["yield"]\nstandardize = true\n[cluster]\nworkers = 1\n'
    )
    result = run("tune", tmp_path / "job.toml", "-o", tmp_path / "best.toml")
    assert result.exit_code == 4
    assert "target 'yield' is the same in all 60 rows" in result.stderr
    assert "hint: " in result.stderr
    assert not (tmp_path / "best.toml").exists()


def test_one_of_two_targets_may_be_constant_in_a_search() -> None:
    rows = np.random.default_rng(0).random((60, 3))
    with pytest.raises(dkrr.DataError, match="targets 'y0', 'y1' are the same in all 60 rows"):
        tune(rows, np.ones((60, 2)))
    assert np.isfinite(tune(rows, np.c_[rows.sum(axis=1), np.ones(60)]).best.loo_rmse)


def test_a_refusal_says_what_the_reserve_of_the_disk_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.toml").write_text('[data]\npath = "generate:friedman?n=300&d=5&seed=0"\n')
    monkeypatch.setattr("dkrr.jobs.plan.free_bytes", lambda store: 200 * 2**20)
    result = run("plan", tmp_path / "job.toml")
    assert result.exit_code == 3
    said = " ".join(result.stderr.split())
    assert "256 MiB" in said
    assert "kept free" in said
    assert "200 MiB are free" in said
    assert "hint: free " in said
