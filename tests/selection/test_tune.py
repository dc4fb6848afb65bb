"""The search: what it chooses, that it is the same again, that it continues, and what a budget leaves out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import DataError, Dataset, KernelRidge, ParameterError, ingest
from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import InterruptedRunError
from dkrr.selection import search as trials_module
from dkrr.selection.choice import TuneResult, TuneSettings
from dkrr.selection.search import draw_subset
from dkrr.selection.tuning import tune

N, D = 400, 4
SMALL = TuneSettings(kernels=("rbf", "matern32"), search_rows=(60, 120), rows=240, seed=3)


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Four features of which one does not matter and one matters most."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((N, D))
    y = np.sin(3 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * x[:, 2] + 0.1 * rng.standard_normal(N)
    return x, y


@pytest.fixture(scope="module")
def dataset(arrays: tuple[np.ndarray, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    x, y = arrays
    return ingest(x, str(tmp_path_factory.mktemp("data") / "rows.zarr"), y=y)


def search(dataset: Dataset, store: Path, settings: TuneSettings = SMALL, **options: Any) -> TuneResult:
    return tune(dataset, settings=settings, store=str(store), executor=InProcessExecutor(), **options)


@pytest.fixture(scope="module")
def result(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    return search(dataset, tmp_path_factory.mktemp("store"))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key != "seconds"}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def test_widths_follow_what_matters(result: TuneResult) -> None:
    best = result.best
    assert best.kind == "per_feature"
    assert list(np.argsort(best.widths)) == [0, 1, 2, 3]
    assert best.widths[3] > 20 * best.widths[0]
    assert best.num_rows == 240
    errors = [candidate.loo_rmse for candidate in result.candidates]
    assert errors == sorted(errors)
    assert {candidate.kind for candidate in result.candidates} == {"shared", "per_feature"}
    shared = min(candidate.loo_rmse for candidate in result.candidates if candidate.kind == "shared")
    assert best.loo_rmse < 0.8 * shared
    assert not result.notes


def test_the_choice_predicts_new_rows(result: TuneResult, arrays: tuple[np.ndarray, np.ndarray]) -> None:
    rng = np.random.default_rng(2)
    z = rng.standard_normal((500, D))
    truth = np.sin(3 * z[:, 0]) + 0.5 * z[:, 1] + 0.1 * z[:, 2]
    predicted = KernelRidge(**result.parameters()).fit(*arrays).predict(z)
    assert np.sqrt(np.mean((predicted - truth) ** 2)) < 0.1


def test_the_same_seed_gives_the_same_bytes(result: TuneResult, dataset: Dataset, tmp_path: Path) -> None:
    again = search(dataset, tmp_path)
    assert json.dumps(without_times(again.to_dict())) == json.dumps(without_times(result.to_dict()))
    other = search(dataset, tmp_path, replace(SMALL, seed=4))
    assert other.best.widths.tolist() != result.best.widths.tolist()


def test_an_interrupted_search_continues(
    result: TuneResult, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visits = 0

    write_json = trials_module.write_json

    def stop(folder: str, name: str, found: Any) -> None:
        nonlocal visits
        visits += "/trials" in folder
        if visits == 12:
            raise InterruptedRunError("stopped")
        write_json(folder, name, found)

    monkeypatch.setattr(trials_module, "write_json", stop)
    with pytest.raises(InterruptedRunError):
        search(dataset, tmp_path)
    monkeypatch.undo()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("tune/*.zarr/trials/*.json")}
    assert len(before) == 11
    assert without_times(search(dataset, tmp_path).to_dict()) == without_times(result.to_dict())
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.parametrize(("widths", "kinds"), [("shared", {"shared"}), ("per_feature", {"per_feature"})])
def test_only_the_widths_that_are_asked_for(dataset: Dataset, tmp_path: Path, widths: Any, kinds: set[str]) -> None:
    settings = replace(SMALL, kernels=("laplacian",), widths=widths, search_rows=(60,), rows=60)
    found = search(dataset, tmp_path, settings)
    assert {candidate.kind for candidate in found.candidates} == kinds


def test_weights_several_targets_an_intercept_and_a_constant_feature(
    arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    x, y = arrays
    weight = np.where(np.arange(N) % 4 == 0, 0.0, 1.0 + np.arange(N) % 3)
    targets = np.column_stack([y, 100 * np.cos(x[:, 1]) + 1000])
    targets[weight == 0] = 1e6  # rows that do not count
    data = ingest(np.column_stack([x, np.full(N, 7.0)]), str(tmp_path / "rows.zarr"), y=targets, sample_weight=weight)
    found = search(data, tmp_path, replace(SMALL, kernels=("rbf",)), fit_intercept=True)
    assert np.isfinite(found.best.widths).all()
    assert found.best.loo_rmse < 0.4
    subset = draw_subset(data, N, 3, str(tmp_path / "all.zarr"))
    assert subset.num_rows == np.count_nonzero(weight)
    assert sorted(subset.weight.read(0, subset.num_rows)[:, 0]) == sorted(weight[weight > 0])


def test_a_budget_leaves_out_and_says_so(dataset: Dataset, tmp_path: Path) -> None:
    found = search(dataset, tmp_path, replace(SMALL, budget_seconds=1e-6))
    assert {record["stage"] for record in found.records} == {"shared width", "width per feature"}
    assert found.best.num_rows == 60
    assert [note.partition(":")[0] for note in found.notes] == [
        "width per feature", "search on 120 rows", "slice", "no check",
    ]  # fmt: skip
    assert not found.slices


def test_rows_without_targets_are_refused(arrays: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    data = ingest(arrays[0], str(tmp_path / "rows.zarr"))
    with pytest.raises(DataError, match="no target"):
        search(data, tmp_path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kernels": ("rbf", "cubic")}, "kernels = .*'cubic'"),
        ({"kernels": ("rbf", "rbf")}, "each once"),
        ({"widths": "some"}, "widths = 'some'"),
        ({"search_rows": (2000, 1000)}, "ascending"),
        ({"search_rows": (5,)}, "from 20"),
        ({"budget_seconds": 0.0}, "budget_seconds = 0.0"),
    ],
)
def test_settings_that_are_not_allowed(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(ParameterError, match=expected):
        TuneSettings(**change)


def test_workers_find_the_same(dataset: Dataset, tmp_path: Path, cluster_client: Any) -> None:
    settings = replace(SMALL, kernels=("rbf",))
    found = tune(dataset, settings=settings, store=str(tmp_path), executor=checked_executor(cluster_client))
    alone = search(dataset, tmp_path / "alone", settings)
    np.testing.assert_allclose(found.best.widths, alone.best.widths, rtol=1e-3)
    assert found.best.loo_rmse == pytest.approx(alone.best.loo_rmse, rel=1e-4)
