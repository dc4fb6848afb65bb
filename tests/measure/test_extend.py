"""Extending a fit: the protein set grows by 1 % and by 10 %, on a running cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.dataset import append, drop_generations, open_dataset
from dkrr.jobs.run import FitSummary, fit_job
from dkrr.jobs.spec import JobSpec
from dkrr.models.model import load_model
from tests.measure.figures import SCALE, Judge, scaled
from tests.measure.jobs import tile_files

pytestmark = [pytest.mark.measure, pytest.mark.timeout(1800)]

N = scaled(30_000, least=1024)
TILE_SIZE: Any = "auto" if SCALE == 1 else 128
NUM_PREDICTED = 2000


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    """The address of a cluster of two workers that is there before anything is timed."""
    with dkrr.local_cluster(workers=2) as cluster:
        yield str(cluster.scheduler_address)


@pytest.fixture(scope="module")
def rows(data_folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Shuffled rows of the protein set: features and target."""
    table = np.loadtxt(data_folder / "protein" / "data.csv.gz", delimiter=",")
    table = np.random.default_rng(0).permutation(table)
    return np.ascontiguousarray(table[:, :-1]), table[:, -1]


def job_of(folder: Path, scheduler: str, run: str, store: str) -> JobSpec:
    return JobSpec.from_dict(
        {
            "data": {"path": "data.zarr", "standardize": True},
            "model": {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}, "alpha": 0.1},
            "solver": {"name": "cholesky", "precision": "float64", "tile_size": TILE_SIZE},
            "cluster": {"scheduler": scheduler, "workers": 2},
            "output": {"directory": run, "store": store},
        },
        base=folder,
    )


def refit(folder: Path, scheduler: str, name: str) -> FitSummary:
    """The same rows with the same scaling, and nothing else, in a store of their own."""
    shutil.copytree(folder / "store/rows", folder / name / "rows")
    return fit_job(job_of(folder, scheduler, f"run-{name}", name))


def said(summary: FitSummary) -> str:
    phases = (f"{phase} {seconds:.2f}" for phase, seconds in summary.seconds.items() if phase != "total")
    return f"{summary.seconds['total']:.2f} s ({', '.join(phases)})"


def test_measure_extend(judge: Judge, folder: Path, scheduler: str, rows: tuple[np.ndarray, np.ndarray]) -> None:
    X, y = rows
    data, store = folder / "data.zarr", folder / "store"
    append(X[:N], data, y=y[:N], label="first")
    first = fit_job(job_of(folder, scheduler, "run", "store"))
    print(f"{N:,} rows: {said(first)}")
    old = next(iter(first.kept))
    files = {key: path.stat() for key, path in tile_files(store).items()}
    b = first.plan.tile_size
    full = {f"{i}/{j}" for i in range(N // b) for j in range(i + 1)}
    position = N
    for percent, bar in ((1, 12), (10, 3)):
        if percent == 10:
            drop_generations(data, [2])
        added = N * percent // 100
        append(X[position : position + added], data, y=y[position : position + added], label=f"{percent} %")
        position += added
        extended = fit_job(job_of(folder, scheduler, "run", "store"))
        again = refit(folder, scheduler, f"refit-{percent}")
        print(f"{percent} % appended: {said(extended)}\nrefit: {said(again)}")
        assert open_dataset(data).num_rows == N + added
        assert extended.reused["factor"]["rows"] == N
        seconds, whole = extended.seconds["total"], again.seconds["total"]
        judge(
            f"extend: {N:,} protein rows and {percent} % more, time of the extended fit",
            f"{seconds:.2f} s, refit {whole:.2f} s: 1/{whole / seconds:.1f}",
            f"at most 1/{bar}",
            seconds * bar <= whole,
            at_full_size=True,
        )
        models = [load_model(item.model_path) for item in (extended, again)]
        ends = [model.predict(X[-NUM_PREDICTED:].copy()) for model in models]
        difference = float(np.abs(ends[0] - ends[1]).max() / np.abs(ends[1]).max())
        judge(
            f"extend: {percent} % more, predictions against a refit",
            f"{difference:.1e} of the largest",
            "at most 1e-9",
            difference <= 1e-9 and models[0].scaling == models[1].scaling,
        )
        new = Path(next(iter(extended.kept)))
        same = sum(
            (new / "c" / tile).stat().st_ino == files[f"{Path(old).name}/{tile}"].st_ino
            and (new / "c" / tile).stat().st_mtime_ns == files[f"{Path(old).name}/{tile}"].st_mtime_ns
            for tile in full
        )
        judge(
            f"extend: {percent} % more, files of full old tiles",
            f"{same} of {len(full)} are the same file, unchanged",
            "all",
            same == len(full),
        )
        shutil.rmtree(folder / f"refit-{percent}")
