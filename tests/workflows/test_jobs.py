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
