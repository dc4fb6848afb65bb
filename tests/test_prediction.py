"""Predicting and scoring a data set on workers: the same bytes whoever runs it, continued where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, r2_score

import dkrr.models.prediction
from dkrr import KernelRidge, Model, ingest, load_model
from dkrr.dataset import Dataset
from dkrr.engine.cluster import checked_executor
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DataError, StoreError, StoreMismatchError
from dkrr.models.prediction import predict_dataset, score_dataset

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


def chunks(folder: Path) -> dict[str, tuple[bytes, int]]:
    found = sorted((folder / "predictions/c").rglob("*/0"))
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def test_same_as_the_model(model: Model, dataset: Dataset, tmp_path: Path) -> None:
    result, summary = predict_dataset(model, dataset, str(tmp_path / "out"), InProcessExecutor())
    assert (summary.num_tasks, summary.num_computed) == (5, 5)
    np.testing.assert_allclose(result.read(0, 400), model.predict(Z), rtol=1e-12, atol=1e-13)


def test_the_same_bytes_whatever_the_executor(
    model: Model, dataset: Dataset, tmp_path: Path, cluster_client: Any
) -> None:
    executor = checked_executor(cluster_client)
    contents = []
    for number, runner in enumerate((executor, executor, InProcessExecutor())):
        folder = tmp_path / f"out-{number}"
        predict_dataset(model, dataset, str(folder), runner)
        contents.append([octets for octets, _ in chunks(folder).values()])
    assert contents[0] == contents[1]
    if blas_kernels(cluster_client) == blas_kernels(None):
        assert contents[0] == contents[2]
    np.testing.assert_allclose(np.frombuffer(contents[0][0][:-4]), np.frombuffer(contents[2][0][:-4]), rtol=1e-12)


def blas_kernels(client: Any) -> Any:
    """Name of the BLAS kernel in this process, or in the workers."""
    from dkrr.engine.cluster import blas_of

    return blas_of(InProcessExecutor() if client is None else checked_executor(client))


def test_a_deleted_block_alone_is_predicted_again(model: Model, dataset: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result, _ = predict_dataset(model, dataset, str(folder), InProcessExecutor())
    before = chunks(folder)
    _, summary = predict_dataset(model, dataset, str(folder), InProcessExecutor())
    assert summary.num_computed == 0
    assert chunks(folder) == before
    result.array.delete((2, 0))
    _, summary = predict_dataset(model, dataset, str(folder), InProcessExecutor())
    assert summary.num_computed == 1
    after = chunks(folder)
    assert [name for name in after if after[name] != before[name]] == ["predictions/c/2/0"]
    assert {name: octets for name, (octets, _) in after.items()} == {n: octets for n, (octets, _) in before.items()}


def test_predictions_of_another_model_are_never_continued(model: Model, dataset: Dataset, tmp_path: Path) -> None:
    predict_dataset(model, dataset, str(tmp_path / "out"), InProcessExecutor())
    other = saved(tmp_path / "other.zarr", alpha=10.0)
    with pytest.raises(StoreMismatchError, match=r"model: '[0-9a-f]+' there, '[0-9a-f]+' wanted"):
        predict_dataset(other, dataset, str(tmp_path / "out"), InProcessExecutor())
    rows = ingest(Z + 1, tmp_path / "Z1.zarr")
    with pytest.raises(StoreMismatchError, match=r"rows_digest: '[0-9a-f]+' there"):
        predict_dataset(model, rows, str(tmp_path / "out"), InProcessExecutor())


def test_a_model_that_is_replaced_meanwhile_is_refused(model: Model, dataset: Dataset, tmp_path: Path) -> None:
    class Replacing(InProcessExecutor):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            saved(tmp_path / "model.zarr", overwrite=True, alpha=10.0)
            return super().run(*args, **kwargs)

    with pytest.raises(StoreError, match="replaced by another model"):
        predict_dataset(model, dataset, str(tmp_path / "out"), Replacing())


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


def test_accuracy_of_classes(tmp_path: Path) -> None:
    labels = np.where(X[:, 0] > 0.3, 2, np.where(X[:, 0] > -0.3, 1, 0))
    train = ingest(np.column_stack([X, labels]), tmp_path / "train.zarr", target=-1, one_hot=True)
    fit = KernelRidge(kernel="rbf", alpha=0.1, tile_size=64, store=tmp_path / "s").fit(train)
    fit.save(tmp_path / "model.zarr")
    model = load_model(tmp_path / "model.zarr")
    truth = np.where(Z[:, 0] > 0.3, 2, np.where(Z[:, 0] > -0.3, 1, 0))
    test = ingest(np.column_stack([Z, truth]), tmp_path / "test.zarr", target=-1, one_hot=True)
    score, _ = score_dataset(model, test, InProcessExecutor())
    assert score.accuracy == accuracy_score(truth, model.predict(Z).argmax(axis=1))
    assert 0.7 < score.value("accuracy") < 1
    assert model.classes == [0, 1, 2]


def test_what_does_not_fit_is_refused(model: Model, dataset: Dataset, tmp_path: Path) -> None:
    narrow = ingest(Z[:, :3], tmp_path / "narrow.zarr", y=TRUTH)
    for function in (predict_dataset, score_dataset):
        arguments = [str(tmp_path / "out")] if function is predict_dataset else []
        with pytest.raises(DataError, match="has 3 features, the model was fitted with 4"):
            function(model, narrow, *arguments, InProcessExecutor())
    assert not (tmp_path / "out").exists()
    for rows, number in ((ingest(Z, tmp_path / "none.zarr"), 0), (ingest(Z, tmp_path / "one.zarr", y=Z[:, 0]), 1)):
        with pytest.raises(DataError, match=f"has {number} targets, the model 2"):
            score_dataset(model, rows, InProcessExecutor())
