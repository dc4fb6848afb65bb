"""The job files that are shipped are accepted, fit into what they ask for, and say what they do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.jobs.plan import Plan, plan
from dkrr.jobs.spec import JobSpec

ROOT = Path(__file__).parent.parent.parent
JOBS = sorted([*ROOT.glob("workflows/*.toml"), *ROOT.glob("cluster/*.toml")])


def planned(job: str, folder: Path) -> Plan:
    return plan(JobSpec.load(shutil.copy(ROOT / job, folder)))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_a_job_is_accepted_by_the_plan(job: Path, tmp_path: Path) -> None:
    result = planned(str(job), tmp_path)
    result.check()
    assert result.refusal == ""
    assert result.task_bytes <= 0.8 * result.memory_limit_bytes
    assert result.num_test_rows > 0


def test_digits_is_what_it_says(tmp_path: Path) -> None:
    result = planned("workflows/digits.toml", tmp_path)
    assert result.num_rows + result.num_test_rows == 1_797
    assert (result.num_features, result.num_targets, result.tile_size) == (64, 10, 256)
    assert result.num_tiles_per_side == 6


def test_large_is_what_it_says(tmp_path: Path) -> None:
    result = planned("workflows/large.toml", tmp_path)
    assert (result.num_rows, result.num_features) == (20_480, 10)
    assert result.num_tiles_per_side >= 5
    assert (result.workers, result.memory_limit_bytes) == (2, 2**30)
    assert 8 * result.num_rows**2 == pytest.approx(3.4e9, rel=0.02)
    # the matrix is larger than all workers together may hold, and exists as files
    assert 8 * result.num_rows**2 > result.workers * result.memory_limit_bytes
    assert result.gram == "stored"
    assert 3.3e9 < sum(result.disk_bytes.values()) < 4e9


@pytest.mark.system
@pytest.mark.short
def test_digits_end_to_end(tmp_path: Path) -> None:
    job = shutil.copy(ROOT / "workflows/digits.toml", tmp_path)
    done = CliRunner().invoke(main, ["fit", str(job), "--json"])
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["score"]["accuracy"] >= 0.97
    assert max(summary["backward_error"]) <= 30 * 1_451 * 2.0**-52
    assert max(summary["peak_rss_bytes"].values()) < 2**30
    assert summary["tiles_computed"] == summary["tiles_total"] >= 21
    again = json.loads(CliRunner().invoke(main, ["fit", str(job), "--json"]).stdout)
    assert again["tiles_computed"] == 0, "the factor was kept, and found"
    assert again["score"] == summary["score"]
