"""Predicting and scoring a data set on workers: the same bytes whoever runs it, continued where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import r2_score

import dkrr.models.prediction
from dkrr import KernelRidge, Model, ingest, load_model
from dkrr.dataset import Dataset
from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DataError, StoreError
from dkrr.models.prediction import predict_dataset, score_dataset
from tests.faults import failing_at, swap

RNG = np.random.default_rng(2)
X = RNG.standard_normal((150, 4))
Y = np.stack([np.sin(X[:, 0]), 3 * X[:, 1] + 5], axis=1)
Z = RNG.standard_normal((400, 4))
TRUTH = np.stack([np.sin(Z[:, 0]), 3 * Z[:, 1] + 5], axis=1) + 0.1 * RNG.standard_normal((400, 2))
BLOCK = 90  # five blocks, the last one ragged


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dkrr.models.prediction, "BLOCK_ROWS", BLOCK)


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return saved(tmp_path / "model.zarr")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return ingest(Z, tmp_path / "Z.zarr", y=TRUTH)


def saved(path: Path, *, overwrite: bool = False, **parameters: Any) -> Model:
    KernelRidge(**{"kernel": "rbf", "alpha": 0.1} | parameters).fit(X, Y).save(path, overwrite=overwrite)
    return load_model(path)


def test_workers_give_the_same(model: Model, dataset: Dataset, tmp_path: Path, cluster_client: Any) -> None:
    here, there = (
        predict_dataset(model, dataset, str(tmp_path / name), runner)[0].read(0, 400)
        for name, runner in {"here": InProcessExecutor(), "there": checked_executor(cluster_client)}.items()
    )
    np.testing.assert_allclose(there, here, rtol=1e-12)
    np.testing.assert_allclose(here, model.predict(Z), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("phase", ["predict", "variance"])
def test_a_block_that_is_lost_or_damaged_alone_is_computed_again(
    phase: Any, model: Model, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dkrr.models.prediction, "TASKS_PER_THREAD", 5)

    def run() -> tuple[Any, int]:
        result, summary = predict_dataset(model, dataset, str(tmp_path / "out"), InProcessExecutor(), phase=phase)
        return result, summary.num_computed

    result, count = run()
    expected = result.read(0, 400)
    assert run()[1] == 0
    lost, damaged = (next((tmp_path / "out").glob(f"*/c/{number}/0")) for number in (0, 2))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/c/*/0")}
    assert len(before) == count >= 5
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert run()[1] == 2
    np.testing.assert_array_equal(result.read(0, 400), expected)
    assert {path for path, time in before.items() if path.stat().st_mtime_ns != time} == {lost, damaged}

    with failing_at(f"compute.{phase}.block:1:nan"), pytest.raises(DataError, match="are not finite"):
        predict_dataset(model, dataset, str(tmp_path / "other"), InProcessExecutor(), phase=phase)


def test_blocks_that_changed_places_are_computed_again(model: Model, dataset: Dataset, tmp_path: Path) -> None:
    wanted = predict_dataset(model, dataset, str(tmp_path / "out"), InProcessExecutor())[0].read(0, 400)
    swap(*(next((tmp_path / "out").glob(f"predictions-*/c/{i}/0")) for i in (0, 2)))
    result, summary = predict_dataset(model, dataset, str(tmp_path / "out"), InProcessExecutor())
    assert summary.num_computed == 2
    np.testing.assert_array_equal(result.read(0, 400), wanted)


def test_scores_are_those_of_scikit_learn(model: Model, dataset: Dataset) -> None:
    score, summary = score_dataset(model, dataset, InProcessExecutor())
    predicted = model.predict(Z)
    assert summary.num_tasks == 5
    assert score.num_rows == 400
    np.testing.assert_allclose(score.rmse, np.sqrt(np.mean((predicted - TRUTH) ** 2, axis=0)), rtol=1e-10)
    np.testing.assert_allclose(score.r2, r2_score(TRUTH, predicted, multioutput="raw_values"), rtol=1e-10)
    assert score.value("rmse") == pytest.approx(np.mean(score.rmse))
    assert score.value("r2") == pytest.approx(r2_score(TRUTH, predicted))
    assert score.rmse_whitened is None
    with pytest.raises(DataError, match="accuracy needs a one-hot target"):
        score.value("accuracy")


def test_deviations_on_workers_and_a_lost_tile(
    tmp_path: Path, cluster_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {
        "solver": "cholesky",
        "precision": "float64",
        "tile_size": 64,
        "store": tmp_path / "store",
    }
    est = KernelRidge(alpha=[0.01, 0.1], kernel="rbf", gamma=0.3, fit_intercept=True, **options).fit(X, Y)
    values, expected = est.predict(Z, return_std=True, noise=True)
    monkeypatch.setattr(dkrr.models.prediction, "MAX_IN_PROCESS_FLOPS", 0)
    np.save(tmp_path / "z.npy", Z)
    for rows in (Z, str(tmp_path / "z.npy")):
        np.testing.assert_allclose(est.predict(rows, return_std=True, noise=True), (values, expected), rtol=1e-12)
    monkeypatch.undo()
    monkeypatch.setattr("dkrr.models.model.MAX_DENSE_ROWS", 10)
    tile = sorted((tmp_path / "store" / "factors").glob("*.zarr/c/2/1"))[0]
    tile.write_bytes(bytes(len(tile.read_bytes())))
    with pytest.raises(StoreError, match=r"chunk \(2, 1\) of .* is damaged"):
        est.predict(Z, return_std=True)
    tile.unlink()
    again = KernelRidge(**est.get_params()).fit(X, Y)
    np.testing.assert_allclose(again.predict(Z, return_std=True, noise=True)[1], expected, rtol=1e-9)
