"""Job files, their runs as subprocesses, their tiles, and an observer of their workers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dkrr.engine.workers import roster
from dkrr.jobs import toml
from tests.benchmarks.processes import Completed, MemorySampler, run_sampled

__all__ = [
    "ClusterObserver",
    "Tile",
    "fit_command",
    "job_document",
    "read_result",
    "run_fit",
    "run_observed_fit",
    "tile_files",
    "tiles",
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


@dataclass
class ClusterObserver:
    """Connects to the scheduler of a running command and notes the state of its workers twice a second.

    The scheduler's address stands in the command line of its nannies.
    """

    sampler: MemorySampler
    num_looks: int = 0
    statuses: set[str] = field(default_factory=set)
    spilled_bytes: int = 0

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._observe, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _address(self) -> str | None:
        for line in self.sampler.command_lines():
            found = re.search(r"tcp://127\.0\.0\.1:\d+", " ".join(line))
            if found and "dask_spec" in " ".join(line):
                return found[0]
        return None

    def _observe(self) -> None:
        from distributed import Client

        while (address := self._address()) is None:
            if self._stopped.wait(0.2):
                return
        # the command closes its scheduler when it is done, whatever this client is doing then
        ended = contextlib.suppress(OSError, TimeoutError, RuntimeError)
        with ended, Client(address, set_as_default=False, timeout=30) as client:
            while not self._stopped.is_set() and client.status == "running":
                for worker in roster(client).values():
                    self.num_looks += 1
                    self.statuses.add(str(worker["status"]))
                    spilled = worker.get("metrics", {}).get("spilled_bytes", {})
                    self.spilled_bytes = max(self.spilled_bytes, sum(spilled.values()))
                self._stopped.wait(0.5)


def run_fit(job: Path, *, timeout: float = 3600.0, prefix: tuple[str, ...] = ()) -> Completed:
    """Run ``dkrr fit JOB`` to its end in a fresh process, sampled."""
    done = run_sampled([*prefix, *fit_command(job)], folder=job.parent, timeout=timeout)
    print(done.stdout)
    return done


def run_observed_fit(job: Path, *, timeout: float = 3600.0) -> tuple[Completed, ClusterObserver]:
    """The same, observed through its scheduler as well."""
    observers: list[ClusterObserver] = []
    try:
        done = run_sampled(
            fit_command(job),
            folder=job.parent,
            timeout=timeout,
            on_start=lambda sampler: observers.append(ClusterObserver(sampler)),
        )
    finally:
        for observer in observers:
            observer.stop()
    print(done.stdout)
    return done, observers[0]


@dataclass(frozen=True)
class Tile:
    """A tile's file: when it was written, and what it holds."""

    mtime_ns: int
    sha256: str


def tile_files(store: Path, kind: str = "factors") -> dict[str, Path]:
    """Finished chunks of the tile matrices in a store by "array/i/j".

    What is being written is not one, and scratch matrices are not looked at.
    """
    return {
        "/".join((path.parents[2].name, path.parent.name, path.name)): path
        for path in (store / kind).glob("*.zarr/c/*/*")
        if path.name.isdigit() and not path.parents[2].name.endswith("-sums.zarr")
    }


def tiles(store: Path, kind: str = "factors") -> dict[str, Tile]:
    """Every finished tile with its modification time and the digest of its bytes."""
    return {
        key: Tile(path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for key, path in sorted(tile_files(store, kind).items())
    }
