"""What workers that others run are left with."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import dkrr
from tests.jobs.retrain.project import rows_of


def trace() -> None:
    tracemalloc.start()


def array_bytes() -> int:
    """Bytes of NumPy's arrays that were allocated since and are alive; arrays that are mapped are not counted."""
    import gc

    import numpy as np

    gc.collect()
    domain = np.lib.tracemalloc_domain
    taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.DomainFilter(True, domain)])
    return sum(item.size for item in taken.traces)


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_workers_keep_no_arrays_after_a_fit(
    solver: str, cluster_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.linalg.preconditioner.HELD_BYTES", 0)  # as where they are large
    monkeypatch.setattr("dkrr.linalg.preconditioner.cpu_count", lambda: 1)  # and on other machines
    rows = rows_of(0, 1000)
    options = {"preconditioner": "rpcholesky", "rank": 100} if solver == "cg" else None
    est = dkrr.KernelRidge(kernel="rbf", gamma=0.2, alpha=0.1, solver=solver, tile_size=512, store=tmp_path / "store")
    cluster_client.run(trace)
    try:
        est.set_params(solver_params=options).fit(rows[:, :3], rows[:, 3])
        kept = cluster_client.run(array_bytes)
    finally:
        cluster_client.run(tracemalloc.stop)
    assert max(kept.values()) < 100_000, kept
