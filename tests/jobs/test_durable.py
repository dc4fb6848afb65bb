"""What a job leaves behind survives a power failure: every finished factor was given to fsync, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dkrr.models.leave_one_out
import dkrr.store.chunks
from dkrr.jobs.run import fit_job
from tests.faults import chunk_files
from tests.jobs.helpers import Make, job_maker


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    document: dict[str, Any] = {
        "data": {"path": "generate:friedman?n=120&d=5&seed=0", "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 0.1},
        "solver": {"name": "cholesky", "precision": "float64", "tile_size": 32},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a"), "store": str(tmp_path / "store")},
    }
    return job_maker(document, tmp_path)


@pytest.mark.parametrize(
    ("solver", "tables"),
    [
        ({}, {"model": {"fit_intercept": True}}),
        ({"precision": "mixed"}, {}),
        ({"precision": "mixed"}, {"evaluate": {"leave_one_out": True}}),
    ],
    ids=["float64", "mixed", "mixed, left out"],
)
def test_a_factor_is_durable(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solver: dict[str, Any], tables: dict[str, Any]
) -> None:
    synced: dict[Path, set[Path]] = {}

    def sync(folder: Path) -> None:
        real(folder)
        synced[Path(folder)] = set(chunk_files(folder))

    real = dkrr.store.chunks.sync_folder
    monkeypatch.setattr(dkrr.store.chunks, "sync_folder", sync)
    before: list[int] = []

    def inverse_diagonal(factor: Any, **options: Any) -> Any:
        before.append(sum("factors" in folder.parts for folder in synced))
        return inverse(factor, **options)

    inverse = dkrr.models.leave_one_out.inverse_diagonal
    monkeypatch.setattr(dkrr.models.leave_one_out, "inverse_diagonal", inverse_diagonal)
    fit_job(make(solver=solver, **tables))
    # as much work as the factor's follows: it is durable before
    assert before == ([2] if "evaluate" in tables else [])
    factors = list((tmp_path / "store/factors").glob("*.zarr"))
    assert len(factors) == 1 + ("evaluate" in tables)
    for factor in factors:
        assert chunk_files(factor)
        assert {chunk for folder, chunks in synced.items() if folder.is_relative_to(factor) for chunk in chunks} == set(
            chunk_files(factor)
        )
