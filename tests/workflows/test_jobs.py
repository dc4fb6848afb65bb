"""The job files that are shipped are accepted, fit into what they ask for, and say what they do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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
