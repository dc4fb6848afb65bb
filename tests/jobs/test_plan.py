"""The plan: its sums against the definitions, what it refuses, and that it counts what is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dkrr.errors import PlanRefusedError
from dkrr.jobs.plan import make_plan, plan
from dkrr.jobs.prepare import prepare
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from dkrr.linalg.sizes import task_bytes


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


def test_sums(tmp_path: Path) -> None:
    result = plan(job(tmp_path, evaluate={"fraction": 0.2}, solver={"gram": "stored"}))
    n = result.num_rows
    assert n + result.num_test_rows == 700
    side = -(-n // 100)
    lower = side * (side + 1) // 2
    assert result.num_tiles_per_side == side
    assert result.disk_bytes["factor"] == result.disk_bytes["gram"] == lower * (100 * 100 * 8 + 4)
    assert result.flops == pytest.approx(n**3 / 3)
    assert result.num_tasks == 2 * lower + 3 * side
    assert result.task_bytes == task_bytes(100, 5)
    assert result.kernel["gamma"] == pytest.approx(1 / 5)
    assert not result.refusal
    assert "float64" in str(result)


def test_the_schedule_is_said_and_fixed(tmp_path: Path) -> None:
    result = plan(job(tmp_path))
    assert result.split == {"num_columns": 3, "num_last": 1}
    assert 0 < result.expected_efficiency <= 1
    said = " ".join(str(result).split())
    assert "2 workers busy" in said
    assert "the last 3 columns are split before the last 1 term" in said
    spec = JobSpec.from_dict(job(tmp_path, cluster={"workers": 16}))
    store = spec.store
    again = make_plan(spec, prepare(spec, store), store, result.to_dict())
    assert (again.workers, again.split) == (16, result.split)
    assert make_plan(spec, prepare(spec, store), store).split != result.split


def test_memory_is_refused_with_what_would_fit(tmp_path: Path) -> None:
    result = plan(job(tmp_path, cluster={"memory_limit": "600MiB"}, solver={"precision": "float64", "tile_size": 4000}))
    assert "tiles of 4000" in result.refusal
    assert "600 MiB" in result.refusal
    assert "tile_size" in result.hint
    with pytest.raises(PlanRefusedError) as caught:
        result.check()
    assert caught.value.exit_code == 3
    fits = int(result.hint.split()[-1])
    assert task_bytes(fits, 5) <= 600 * 2**20 < task_bytes(4000, 5)


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
