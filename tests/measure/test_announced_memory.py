"""What workers and the driver take beside what the plan announced, for every kind of solver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import job_document, read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600), pytest.mark.whole]

MIB = 2**20
MOST, LEAST = 1.2, 0.6
CG: dict[str, Any] = {"name": "cg", "precision": "float64", "gram": "on_the_fly", "tol": 1e-2}
ROOM = {"memory_limit": "6GiB"}
CUBIC = {"kernel": "polynomial", "degree": 3, "gamma": 0.1, "alpha": 1.0}

CELLS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "cg": (40_000, {"solver": CG | {"preconditioner": "none"}, "model": {"alpha": 10.0}}),
    "cg, rank 1,000": (40_000, {"solver": CG | {"rank": 1000}, "cluster": ROOM}),
    "cg, rank 4,000": (20_000, {"solver": CG | {"rank": 4000}, "cluster": ROOM}),
    "cg mixed, rank 2,000": (20_000, {"solver": CG | {"rank": 2000, "precision": "mixed"}}),
    "cg, stored": (10_000, {"solver": CG | {"rank": 500, "gram": "stored", "tile_size": 1024}}),
    "cholesky": (20_000, {"solver": {"precision": "float64"}}),
    "cholesky, float32": (20_000, {"solver": {"precision": "float32"}, "model": {"alpha": 10.0}}),
    "cholesky mixed, stored": (10_000, {"solver": {"precision": "mixed", "gram": "stored", "tile_size": 2048}}),
    "cholesky, left out": (10_000, {"solver": {"precision": "float64"}, "evaluate": {"leave_one_out": True}}),
    "nystrom": (40_000, {"solver": {"name": "nystrom", "precision": "float64", "num_centers": 2000}}),
    "primal": (40_000, {"solver": {"name": "primal", "precision": "float64"}, "model": CUBIC}),
}


@pytest.mark.parametrize("name", CELLS)
def test_measure_announced_memory(judge: Judge, folder: Path, name: str) -> None:
    num_rows, tables = CELLS[name]
    n = scaled(num_rows, least=4000)
    tables = {**tables, "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 0.1} | tables.get("model", {})}
    job = write_job(folder, job_document(n, **tables, output={"keep": "model"}))
    done = run_fit(job)
    assert done.status == "ok", done.stderr
    result = read_result(job)
    announced = {"worker": result["plan"]["task_bytes"], "client": result["plan"]["client_bytes"]}
    came = {"worker": max(result["peak_rss_bytes"].values()), "client": result["client_peak_rss_bytes"]}
    shares = {who: came[who] / announced[who] for who in announced}
    judge(
        f"memory as announced: {name}",
        ", ".join(f"{who} {came[who] / MIB:.0f} of {announced[who] / MIB:.0f} MiB" for who in announced),
        f"n = {n:,}: at most {MOST} of it, at least {LEAST}",
        max(shares.values()) <= MOST and (SCALE != 1 or min(shares.values()) >= LEAST),
    )
