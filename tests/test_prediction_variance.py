"""Variances on workers: the same numbers, blocks that are kept, faults that are survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr import ingest, load_model
from dkrr.engine.tasks import DaskExecutor, InProcessExecutor
from dkrr.errors import DataError, StoreError
from dkrr.models import prediction
from dkrr.models.prediction import predict_variance

N, M = 180, 90


@pytest.fixture
def fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dkrr.KernelRidge, np.ndarray]:
    """A model with a factor in a store, and rows for which it shall have 3 blocks of 32."""
    monkeypatch.setattr(prediction, "TASKS_PER_THREAD", 3)
    rng = np.random.default_rng(0)
    x, z = rng.standard_normal((N, 3)), rng.standard_normal((M, 3))
    y = np.stack([np.sin(x[:, 0]), x[:, 1] ** 2], axis=1) + 0.1 * rng.standard_normal((N, 2))
    weight = rng.uniform(0.5, 2, N)
    model = dkrr.KernelRidge(
        alpha=[0.01, 0.1], kernel="rbf", gamma=0.3, fit_intercept=True, solver="cholesky", precision="float64",
        tile_size=64, store=tmp_path / "store",
    )  # fmt: skip
    return model.fit(x, y, sample_weight=weight), z


def saved(model: dkrr.KernelRidge, folder: Path) -> Any:
    model.save(folder / "model.zarr", overwrite=True)
    return load_model(folder / "model.zarr")


def test_blocks_that_are_there_are_kept(
    fitted: tuple[dkrr.KernelRidge, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, z = fitted
    expected = model._model.variance(z)
    rows = ingest(z, tmp_path / "z.zarr")
    stored = saved(model, tmp_path)
    work = str(tmp_path / "work.zarr")
    written: list[str] = []

    def stop(site: str, block: Any = None) -> None:
        written.extend([site] if site == "variance.block.after_write" else [])
        if len(written) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as faults:
        faults.setattr(prediction, "failpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            predict_variance(stored, rows, work, InProcessExecutor())
    result, summary = predict_variance(stored, rows, work, InProcessExecutor())
    assert (summary.num_computed, summary.num_tasks) == (1, 3)
    np.testing.assert_allclose(result.read(0, M), expected, rtol=1e-12)
    # a damaged block is computed again, and what is not finite is not written
    path = next((tmp_path / "work.zarr").glob("variances-*/c/1/0"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    result, summary = predict_variance(stored, rows, work, InProcessExecutor())
    assert summary.num_computed == 1
    np.testing.assert_allclose(result.read(0, M), expected, rtol=1e-12)

    def spoil(site: str, block: Any = None) -> None:
        if site == "variance.block.after_compute":
            block[0, 0] = np.nan

    monkeypatch.setattr(prediction, "failpoint", spoil)
    with pytest.raises(DataError, match="are not finite"):
        predict_variance(stored, rows, str(tmp_path / "other.zarr"), InProcessExecutor())


def test_workers_give_the_same_and_share_the_work(
    fitted: tuple[dkrr.KernelRidge, np.ndarray], tmp_path: Path, cluster_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, z = fitted
    values, expected = model.predict(z, return_std=True, noise=True)
    monkeypatch.setattr(prediction, "MAX_IN_PROCESS_FLOPS", 0)
    ran: list[Any] = []

    def observed(*arguments: Any) -> Any:
        result = predict_variance(*arguments)
        ran.append((type(arguments[3]), result[1].num_computed, len(result[1].peak_rss_bytes)))
        return result

    monkeypatch.setattr(prediction, "predict_variance", observed)
    np.testing.assert_allclose(model.predict(z, return_std=True, noise=True)[1], expected, rtol=1e-12)
    np.save(tmp_path / "z.npy", z)
    found = model.predict(str(tmp_path / "z.npy"), return_std=True, noise=True)
    np.testing.assert_allclose(found[1], expected, rtol=1e-12)
    np.testing.assert_allclose(found[0], values, rtol=1e-12)
    assert [(kind, computed) for kind, computed, _ in ran] == [(DaskExecutor, 3)] * 2


def test_a_lost_tile_is_named_and_a_new_fit_repairs_it(
    fitted: tuple[dkrr.KernelRidge, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.models.uncertainty.MAX_DENSE_ROWS", 10)
    model, z = fitted
    expected = model.predict(z, return_std=True)[1]
    tile = sorted((tmp_path / "store" / "factors").glob("*.zarr/c/2/1"))[0]
    tile.write_bytes(bytes(len(tile.read_bytes())))
    with pytest.raises(StoreError, match=r"chunk \(2, 1\) of .* is damaged"):
        model.predict(z, return_std=True)
    tile.unlink()
    training = model._training
    again = dkrr.KernelRidge(**model.get_params()).fit(training.X, training.y, sample_weight=training.weight)
    np.testing.assert_allclose(again.predict(z, return_std=True)[1], expected, rtol=1e-9)
