"""Dask against a pool on a small problem: the same bytes from both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.harness import Contender, Problem, run_once


@pytest.mark.thorough
def test_both_give_the_same_bytes_and_take_their_time(tmp_path: Path) -> None:
    problem = Problem(n=700, tile_size=100)
    problem.write(tmp_path)
    overrides = {"repeats": 1, "gemm_seconds": 0.05}
    run = run_once(
        Contender(name="pool", function="tests.benchmarks.pool:dask_against_pool", overrides=overrides),
        problem,
        tmp_path,
    )
    assert run.status == "ok"
    assert run.facts["num_factors"] == 1
    assert len(run.facts["dask_seconds"]) == len(run.facts["pool_seconds"]) == 1
    assert min(run.facts["dask_seconds"] + run.facts["pool_seconds"]) > 0
