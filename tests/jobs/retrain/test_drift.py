"""What the statistics of new rows show, and what is chance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr import Dataset, ingest
from dkrr.jobs.history import Reference, compare_rows
from dkrr.jobs.retrain_spec import DriftSpec
from tests.jobs.retrain.project import rows_of

LIMITS = DriftSpec()


def dataset(folder: Path, rows: np.ndarray, name: str = "batch") -> Dataset:
    return ingest(rows[:, :-1], folder / f"{name}.zarr", y=rows[:, -1])


@pytest.fixture
def reference(tmp_path: Path) -> Reference:
    return Reference.of(dataset(tmp_path, rows_of(0, 3000), "reference"))


@pytest.mark.parametrize("num_rows", [1, 5, 30, 300, 3000])
def test_rows_of_the_same_kind_pass(num_rows: int, reference: Reference, tmp_path: Path) -> None:
    for seed in range(1, 11):
        batch = dataset(tmp_path, rows_of(seed, num_rows), f"{num_rows}-{seed}")
        assert compare_rows(reference, batch, LIMITS) == []


@pytest.mark.parametrize("num_rows", [100, 1000])
def test_what_is_wrong_is_named(num_rows: int, reference: Reference, tmp_path: Path) -> None:
    changes = {
        "shift": lambda rows: rows + np.array([0, 9, 0, 0]),
        "scale": lambda rows: rows * [20, 1, 1, 1],
        "distance": lambda rows: np.column_stack([np.sign(rows[:, 0]), rows[:, 1:]]),
        "correlation": lambda rows: np.column_stack([rows[:, 0], 20 - rows[:, 1], rows[:, 2:]]),
    }
    for statistic, change in changes.items():
        limits = LIMITS if statistic != "distance" else DriftSpec(distance=0.1)
        found = compare_rows(reference, dataset(tmp_path, change(rows_of(1, num_rows)), statistic), limits)
        assert statistic in {finding.statistic for finding in found}
        assert {finding.column for finding in found} == {{"shift": "x1", "correlation": "x1"}.get(statistic, "x0")}


def test_alike_columns_that_are_exchanged_differ_in_what_they_do(tmp_path: Path) -> None:
    random = np.random.default_rng(5)

    def rows(m: int) -> np.ndarray:
        X = random.random((m, 2))
        return np.column_stack([X, 10 * X[:, 0] + random.standard_normal(m)])

    reference = Reference.of(dataset(tmp_path, rows(2000), "reference"))
    found = compare_rows(reference, dataset(tmp_path, rows(400)[:, [1, 0, 2]]), LIMITS)
    assert {(finding.column, finding.statistic) for finding in found} == {
        ("x0", "correlation"), ("x1", "correlation")
    }  # fmt: skip
