"""Job files, their runs as subprocesses, and their tiles."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dkrr.jobs import toml
from tests.benchmarks.processes import Completed, run_sampled

__all__ = [
    "fit_command",
    "job_document",
    "read_result",
    "run_fit",
    "tile_files",
    "write_job",
]


def job_document(n: int, **tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A job on ``n`` generated rows with two local workers; ``tables`` are merged into it."""
    document: dict[str, dict[str, Any]] = {
        "data": {"path": f"generate:friedman?n={n}&d=10&seed=0", "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 1e-3},
        "solver": {"name": "cholesky", "precision": "float64"},
        "cluster": {"workers": 2, "memory_limit": "1GiB"},
        "output": {"directory": "run", "store": "store"},
    }
    for name, table in tables.items():
        document[name] = {**document.get(name, {}), **table}
    return document


def write_job(folder: Path, document: dict[str, dict[str, Any]]) -> Path:
    """Write ``job.toml``; its run and store are in the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "job.toml"
    path.write_text(toml.dumps(document))
    return path


def fit_command(job: Path) -> list[str]:
    """The command that a person types."""
    return [sys.executable, "-m", "dkrr.cli", "fit", str(job)]


def read_result(job: Path) -> dict[str, Any]:
    """``result.json`` of the run of a job."""
    result: dict[str, Any] = json.loads((job.parent / "run" / "result.json").read_text())
    return result


def run_fit(job: Path, *, timeout: float = 3600.0, prefix: tuple[str, ...] = ()) -> Completed:
    """Run ``dkrr fit JOB`` to its end in a fresh process, sampled."""
    done = run_sampled([*prefix, *fit_command(job)], folder=job.parent, timeout=timeout)
    print(done.stdout)
    return done


def tile_files(store: Path, kind: str = "factors") -> dict[str, Path]:
    """Finished chunks of the tile matrices in a store by "array/i/j".

    What is being written is not one, and scratch matrices are not looked at.
    """
    return {
        "/".join((path.parents[2].name, path.parent.name, path.name)): path
        for path in (store / kind).glob("*.zarr/c/*/*")
        if path.name.isdigit() and not path.parents[2].name.endswith("-sums.zarr")
    }
