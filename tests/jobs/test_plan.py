"""A plan counts what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dkrr.jobs.plan import plan
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec


def job(folder: Path, **tables: Any) -> dict[str, Any]:
    document: dict[str, Any] = {
        "data": {"path": "generate:friedman?n=700&d=5&seed=0"},
        "model": {"kernel": "rbf", "alpha": 0.1},
        "solver": {"tile_size": 100},
        "cluster": {"workers": 2, "memory_limit": "1GiB"},
        "output": {"directory": str(folder / "runs/a")},
    }
    for name, table in tables.items():
        document[name] = document.get(name, {}) | table
    return document


def test_what_is_there_is_counted(tmp_path: Path) -> None:
    document = job(tmp_path)
    before = plan(document)
    assert before.disk_present_bytes == 0
    fit_job(JobSpec.from_dict(document))
    after = plan(document)
    assert after.disk_present_bytes == before.disk_bytes["factor"]
    assert after.disk_needed_bytes < before.disk_needed_bytes
    # the factor of another ridge or kernel has the same shape, and saves this job nothing
    assert plan(document | {"model": {"kernel": "rbf", "alpha": 0.2}}).disk_present_bytes == 0
    assert plan(document | {"model": {"kernel": "rbf", "alpha": 0.1, "gamma": 0.7}}).disk_present_bytes == 0
