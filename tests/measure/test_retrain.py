"""Retraining on the protein set: nights that are good, poisoned, memorised, worse, and one with nothing new."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model, open_dataset
from dkrr.jobs import toml
from dkrr.jobs.registry import ModelRegistry
from tests.benchmarks.processes import run_sampled
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

N = scaled(30_000, least=2000)
BATCH = scaled(300, least=200)
MODEL = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}, "alpha": 0.1}
MEMORISING = {"kernel": "rbf", "gamma": 1e6, "alpha": 1e-6}
NOTHING_NEW_SECONDS = 5.0


@dataclass
class Tick:
    """What a command said, how long it took, and how many processes it was."""

    code: int
    report: dict[str, Any]
    seconds: float
    num_processes: int


class Protein:
    """A folder with a retrain job of the protein set."""

    def __init__(self, folder: Path, table: np.ndarray) -> None:
        self.folder, self.table, self.used = folder, table, 0
        (folder / "incoming").mkdir()
        self.write(MODEL)

    def write(self, model: dict[str, Any]) -> None:
        document = {
            "retrain": {"name": "protein", "data": "rows.zarr", "incoming": "incoming"},
            "holdout": {"fraction": 0.1},
            "data": {"target": [-1], "header": False, "standardize": True},
            "model": model,
            "solver": {"name": "cholesky"},
            "cluster": {"workers": 2, "memory_limit": "3GiB"},
        }
        (self.folder / "RETRAIN.toml").write_text(toml.dumps(document))

    def deliver(self, name: str, num_rows: int, change: Any = None) -> np.ndarray:
        """The next rows of the set as a batch; what is refused is delivered again by the next good night."""
        rows = self.table[self.used : self.used + num_rows].copy()
        if change is None:
            self.used += num_rows
        else:
            change(rows)
        np.savetxt(self.folder / f"incoming/{name}.csv", rows, delimiter=",", fmt="%.17g")
        return rows

    def tick(self) -> Tick:
        """`dkrr retrain`, as a scheduler runs it."""
        command = [sys.executable, "-m", "dkrr.cli", "retrain", str(self.folder / "RETRAIN.toml"), "--json"]
        done = run_sampled(command, folder=self.folder)
        report = json.loads(done.stdout) if done.stdout.strip() else {}
        return Tick(done.returncode, report, done.seconds, len(done.memory.tree))

    @property
    def production(self) -> str | None:
        return ModelRegistry(str(self.folder / "models")).open("protein").aliases().targets.get("production")


def poison_nan(rows: np.ndarray) -> None:
    rows[len(rows) // 2, 3] = np.nan


def poison_targets(rows: np.ndarray) -> None:
    rows[:, -1] *= 100


def poison_columns(rows: np.ndarray) -> None:
    rows[:, [2, 4]] = rows[:, [4, 2]]


def test_measure_retrain_protein(judge: Judge, folder: Path, data_folder: Path) -> None:
    table = np.loadtxt(data_folder / "protein" / "data.csv.gz", delimiter=",")
    protein = Protein(folder, table[np.random.default_rng(0).permutation(len(table))])
    protein.deliver("night-1", N)
    first = protein.tick()
    assert first.code == 0, first.report
    production = protein.production
    judge("retrain: protein, first night", f"{first.seconds:.1f} s for {N:,} rows", "promoted", production is not None)

    nothing = protein.tick()
    judge(
        "retrain: protein with nothing new",
        f"{nothing.seconds:.2f} s for the whole command, outcome {nothing.report.get('outcome')!r}",
        f"at most {NOTHING_NEW_SECONDS:g} s",
        nothing.report.get("outcome") == "nothing new" and nothing.seconds <= NOTHING_NEW_SECONDS,
        at_full_size=True,
    )

    for name, change in (("NaN", poison_nan), ("targets times 100", poison_targets), ("swapped", poison_columns)):
        before = open_dataset(folder / "rows.zarr").digest
        protein.deliver(f"poisoned-{name.replace(' ', '-')}", BATCH, change)
        tick = protein.tick()
        (batch,) = tick.report["batches"]
        judge(
            f"retrain: a night poisoned ({name})",
            f"exit {tick.code} at {batch['stage']}: {batch['reasons'][0]}",
            "refused at validate (7), data set and production as before",
            (tick.code, batch["stage"]) == (7, "validate")
            and open_dataset(folder / "rows.zarr").digest == before
            and protein.production == production,
        )

    protein.deliver("night-2", BATCH)
    good = protein.tick()
    reused = good.report["fit"]["reused"]["factor"]
    judge(
        "retrain: the good night after them",
        f"{good.report['outcome']} in {good.seconds:.1f} s, {reused['rows']:,} of {reused['of_rows']:,} rows reused",
        "promoted, every old row reused",
        good.code == 0 and reused["rows"] == first.report["num_rows"],
    )
    second = protein.production

    for name, model in (("by heart", MEMORISING), ("alpha 1000", {**MODEL, "alpha": 1000.0})):
        protein.write(model)
        tick = protein.tick()
        failed = [check["sentence"] for check in tick.report["checks"] if not check["passed"]]
        judge(
            f"retrain: a model that is worse ({name})",
            f"exit {tick.code}: {failed[-1] if failed else 'nothing'}",
            "refused (7), production as before",
            tick.code == 7 and bool(failed) and protein.production == second,
        )
    assert load_model(ModelRegistry(str(folder / "models")).open("protein").resolve().model_path).num_rows > 0


def test_measure_nothing_new_starts_nobody(judge: Judge, folder: Path, data_folder: Path) -> None:
    """The same with fewer rows, watched: no process besides the command itself."""
    table = np.loadtxt(data_folder / "protein" / "data.csv.gz", delimiter=",", max_rows=3000)
    protein = Protein(folder, table)
    protein.deliver("night-1", 3000)
    first = protein.tick()
    assert first.num_processes > 2, "the watch sees no workers"
    tiles = {str(path): path.stat().st_mtime_ns for path in folder.rglob("factors/*.zarr/c/*/*")}
    nothing = protein.tick()
    after = {str(path): path.stat().st_mtime_ns for path in folder.rglob("factors/*.zarr/c/*/*")}
    judge(
        "retrain: nothing new, processes",
        f"{nothing.num_processes} process, {len(after) - len(tiles)} tiles computed",
        "the command alone, no tile",
        nothing.num_processes == 1 and after == tiles and nothing.code == 0,
    )
