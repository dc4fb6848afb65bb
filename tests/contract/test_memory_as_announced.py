"""What a worker and the driver take is what the plan announced, at most a fifth more, whatever they are allowed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.jobs import toml

MIB = 2**20


@dataclass(frozen=True)
class Cell:
    """A way to solve, and what is allowed; ``least`` is the share of the announced memory that must be used."""

    name: str
    solver: dict[str, Any]
    num_rows: int = 6000
    memory_limit: str = "1GiB"
    least: float = 0.6
    model: dict[str, Any] = field(default_factory=dict)


CG = {"name": "cg", "gram": "on_the_fly", "tol": 1e-2}
CELLS = [
    # F has 259 MiB, more than the driver holds, and a worker could hold all of it
    Cell("a preconditioner, and room", CG | {"rank": 1000}, num_rows=34_000, memory_limit="6GiB"),
    Cell("large tiles", {"name": "cholesky", "precision": "float64", "tile_size": 2048}),
    Cell("a Gram matrix that is kept", {"name": "cholesky", "precision": "mixed", "tile_size": 1024, "gram": "stored"}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_fit_takes_the_memory_that_was_announced(cell: Cell, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    document = {
        "data": {"path": f"generate:friedman?n={cell.num_rows}&d=10&seed=0", "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 1.0} | cell.model,
        "solver": cell.solver,
        "cluster": {"workers": 2, "memory_limit": cell.memory_limit},
        "output": {"directory": "run", "store": "store", "keep": "model"},
    }
    job.write_text(toml.dumps(document))
    done = CliRunner().invoke(main, ["fit", str(job)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    announced, came = result["plan"]["task_bytes"], max(result["peak_rss_bytes"].values())
    print(f"{cell.name}: {announced / MIB:.0f} MiB announced, {came / MIB:.0f} came")
    assert cell.least * announced <= came <= 1.2 * announced
    assert result["client_peak_rss_bytes"] <= 1.2 * result["plan"]["client_bytes"]
