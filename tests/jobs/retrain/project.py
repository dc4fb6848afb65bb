"""Retrain jobs of tests: batches of a small problem, delivered as CSV files, fitted in this process."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model, open_dataset
from dkrr.dataset import Dataset
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import RefusedError
from dkrr.jobs.registry import ModelRegistry, NamedModel, check_version
from dkrr.jobs.retrain import RetrainSummary, retrain
from dkrr.jobs.retrain_spec import RetrainSpec
from tests.faults import contents

COLUMNS = ("a", "b", "c", "y")


def rows_of(seed: int, num_rows: int) -> np.ndarray:
    """Features of different spread, and a target that depends on all of them (m, 4)."""
    random = np.random.default_rng(seed)
    X = random.standard_normal((num_rows, 3)) * [1.0, 3.0, 0.2] + [0.0, 10.0, -1.0]
    y = np.sin(X[:, 0]) + 0.2 * (X[:, 1] - 10) + 2 * X[:, 2] + 0.05 * random.standard_normal(num_rows)
    return np.column_stack([X, y])


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the tasks of jobs in this process."""
    for module in ("run", "tune", "gate"):
        monkeypatch.setattr(f"dkrr.jobs.{module}.job_executor", lambda *_, **__: nullcontext(InProcessExecutor()))
    monkeypatch.setattr("os.fsync", lambda _: None)  # a hundred a night, and no power fails here


class Project:
    """A folder with RETRAIN.toml's document, incoming batches, a data set and a registry."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        self.folder = folder
        (folder / "incoming").mkdir(parents=True)
        self.document: dict[str, Any] = {
            "retrain": {"name": "demo", "data": "rows.zarr", "incoming": "incoming"},
            "holdout": {"fraction": 0.2},
            "gate": {"min_rows": 10},
            "data": {"target": "y", "standardize": True},
            "model": {"kernel": "rbf", "gamma": 0.2, "alpha": 0.05},
            "solver": {"name": "cholesky", "tile_size": 256},
        }
        for name, keys in tables.items():
            self.document[name] = {**self.document.get(name, {}), **keys}

    def copied(self, folder: Path) -> Project:
        """The same in another folder."""
        found = copy.copy(self)
        found.folder = Path(shutil.copytree(self.folder, folder))
        return found

    def deliver(self, name: str, seed: int, num_rows: int = 120, change: Callable[[Any], Any] | None = None) -> Path:
        """A batch as a CSV file with a header."""
        rows = rows_of(seed, num_rows)
        path = self.folder / "incoming" / f"{name}.csv"
        np.savetxt(
            path,
            rows if change is None else change(rows),
            delimiter=",",
            fmt="%.17g",
            header=",".join(COLUMNS),
            comments="",
        )
        return path

    def aside(self, name: str, seed: int, num_rows: int = 120, change: Callable[[Any], Any] | None = None) -> Path:
        """A file that is no batch, beside RETRAIN.toml."""
        return self.deliver(name, seed, num_rows, change).rename(self.folder / f"{name}.csv")

    @property
    def rows(self) -> Path:
        """Where the data set is."""
        return self.folder / "rows.zarr"

    @property
    def dataset(self) -> Dataset:
        return open_dataset(self.rows)

    @property
    def spec(self) -> RetrainSpec:
        return RetrainSpec.from_dict(self.document, base=self.folder)

    def run(self) -> RetrainSummary:
        return retrain(self.spec)

    def nights(self, *seeds: int) -> RetrainSummary:
        """A batch and a run for each night."""
        for seed in seeds:
            self.deliver(f"n{seed}", seed=seed)
            summary = self.run()
        return summary

    def is_refused(self, match: str) -> None:
        """The run ends with a refusal that says so."""
        with pytest.raises(RefusedError, match=match):
            self.run()

    def is_done(self) -> bool:
        """Whether a run finds nothing new."""
        return self.run().outcome == "nothing new"

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """What the model in production says."""
        return np.asarray(load_model(self.model.resolve().model_path).predict(rows))

    @property
    def model(self) -> NamedModel:
        return ModelRegistry(self.spec.retrain.registry).open("demo")

    @property
    def production(self) -> str | None:
        return self.model.aliases().targets.get("production")


def state(project: Project) -> dict[str, object]:
    """What must not depend on how it came about."""
    dataset, model, folder = project.dataset, project.model, Path(project.spec.directory)
    dataset.verify()
    return {
        "rows": {key: data for key, data in contents(project.rows).items() if "/c/" in key},
        "generations": [found.label for found in dataset.generations],
        "aliases": model.aliases().targets,
        "versions": [version.id for version in model.versions()],
        "steps": sorted(str(path.relative_to(folder)) for path in folder.glob("records/*/*.json")),
        "answers": project.predict(rows_of(99, 50)[:, :3]).tobytes(),
    }


def check_production(project: Project, allowed: set[str]) -> None:
    """A complete, verified version is in production, one of those that are allowed."""
    version = project.model.resolve()
    assert version.id in allowed
    check_version(version)
    load_model(version.model_path)
