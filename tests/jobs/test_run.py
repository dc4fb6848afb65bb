"""A job from its file to model, predictions and scores: what is written, what is found again, what is kept."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import StoreMismatchError, ingest, load_model, make_kernel
from dkrr.errors import InterruptedRunError, ParameterError, PlanRefusedError
from dkrr.jobs.predict import predict_job
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from tests.jobs.helpers import Make, job_maker
from tests.reference import dense_krr

N = 230
RNG = np.random.default_rng(11)
X = RNG.standard_normal((N, 4)) * [1, 10, 0.1, 1] + [0, 5, 0, 0]
Y = np.sin(X[:, 0]) + 0.1 * X[:, 1] + 0.05 * RNG.standard_normal(N) + 7


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Rows as a CSV file without a header; the last column is the target, the one before it the mask."""
    mask = (np.arange(N) % 5 == 0).astype(float)
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, mask, Y]), delimiter=",", fmt="%.17g")
    return tmp_path / "rows.csv"


@pytest.fixture
def make(tmp_path: Path, table: Path, cluster_client: Any) -> Make:
    """A job on the rows of ``table``, run by the workers that the module shares."""

    document: dict[str, Any] = {
        "data": {"path": str(table), "target": [-1], "features": [0, 1, 2, 3], "header": False},
        "model": {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1},
        "solver": {"tile_size": 64},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a")},
    }
    return job_maker(document, tmp_path)


def dual_coef(job: JobSpec) -> np.ndarray:
    model = load_model(Path(job.output.directory) / "model.zarr")
    return model.dual_coef.read(0, model.num_rows)


def rbf(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return make_kernel("rbf", gamma=0.2)(a, b)


def test_a_job_writes_its_run(make: Make, tmp_path: Path) -> None:
    job = make()
    phases: list[str] = []
    summary = fit_job(job, progress=lambda phase, *_: phases.append(phase))
    run = tmp_path / "runs/a"
    documents = ["driver", "figures", "job", "plan", "result", "samples", "status"]
    others = ["drivers", "events", "job.toml", "model.zarr", "report.html"]
    assert {path.name for path in run.iterdir()} == {*(f"{name}.json" for name in documents), *others}
    np.testing.assert_allclose(dual_coef(job)[:, 0], dense_krr(rbf(X, X), Y, 0.1), rtol=1e-9)
    assert JobSpec.load(run / "job.toml") == job
    assert json.loads((run / "result.json").read_text())["tiles_computed"] == summary.tiles_total == 10
    assert max(summary.backward_error) < 1e-12
    assert set(summary.seconds) >= {"prepare", "start", "factorise", "solve", "residual", "total"}
    assert {phase.partition(" ")[0] for phase in phases} >= {"factorise", "solve", "residual"}
    assert all(peak > 10**7 for peak in summary.peak_rss_bytes.values())


def test_standardised_rows_and_a_held_out_fraction(make: Make, tmp_path: Path) -> None:
    job = make(data={"standardize": True}, evaluate={"mask": 4, "metric": "rmse"}, model={"gamma": 0.2})
    summary = fit_job(job)
    held_out = np.arange(N) % 5 == 0
    train, test = X[~held_out], X[held_out]
    mean, std, y_mean, y_std = train.mean(0), train.std(0), Y[~held_out].mean(), Y[~held_out].std()
    a, b = (train - mean) / std, (test - mean) / std
    coefficients = dense_krr(rbf(a, a), (Y[~held_out] - y_mean) / y_std, 0.1)
    np.testing.assert_allclose(dual_coef(job)[:, 0], coefficients, rtol=1e-8)
    predicted = rbf(b, a) @ coefficients * y_std + y_mean
    np.testing.assert_allclose(load_model(tmp_path / "runs/a/model.zarr").predict(test)[:, 0], predicted, rtol=1e-9)
    rmse = float(np.sqrt(np.mean((predicted - Y[held_out]) ** 2)))
    assert summary.score is not None
    assert summary.metric == "rmse"
    assert summary.score.num_rows == held_out.sum()
    assert summary.score.value("rmse") == pytest.approx(rmse, rel=1e-8)
    assert summary.score.rmse_whitened == pytest.approx([rmse / y_std], rel=1e-8)


def test_a_mask_in_a_file(make: Make, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "mask.csv.gz", "wt") as file:
        file.writelines(f"0,{int(i % 5 == 0)}\n" for i in range(N))
    by_column = fit_job(make(evaluate={"mask": 4}))
    by_file = fit_job(
        make(evaluate={"mask": "mask.csv.gz", "mask_column": 1}, output={"directory": str(tmp_path / "runs/b")})
    )
    assert by_file.score == by_column.score


def test_a_ridge_per_target_from_one_gram_matrix(make: Make, tmp_path: Path) -> None:
    job = make(data={"target": [-1, 0], "features": [1, 2, 3]}, model={"alpha": [0.1, 2.0]}, output={"keep": "all"})
    fit_job(job)
    rows = X[:, 1:]
    for column, (y, alpha) in enumerate(((Y, 0.1), (X[:, 0], 2.0))):
        np.testing.assert_allclose(dual_coef(job)[:, column], dense_krr(rbf(rows, rows), y, alpha), rtol=1e-8)
    store = tmp_path / "runs/store"
    assert len(list(store.glob("factors/*.zarr"))) == 2
    assert len(list(store.glob("grams/*.zarr"))) == 1


def test_a_precomputed_matrix(make: Make, tmp_path: Path) -> None:
    alphas, targets = [0.1, 1.0], np.column_stack([Y, X[:, 0]])
    ingest(rbf(X, X), tmp_path / "K.zarr", y=targets)
    job = make(
        data={"path": "K.zarr", "target": None, "features": None, "header": "auto"},
        model={"kernel": "precomputed", "gamma": None, "alpha": alphas},
    )
    fit_job(job)
    np.testing.assert_allclose(dual_coef(job), dense_krr(rbf(X, X), targets, alphas), rtol=1e-8)
    store = tmp_path / "runs/store"
    assert not list(store.glob("grams/*"))  # no second copy of the matrix
    assert not list(store.glob("rows/*"))
    np.save(tmp_path / "K_test.npy", rbf(X[:7] + 1, X))
    predict_job(str(tmp_path / "runs/a/model.zarr"), str(tmp_path / "K_test.npy"), str(tmp_path / "p.npy"))
    np.testing.assert_allclose(np.load(tmp_path / "p.npy"), rbf(X[:7] + 1, X) @ dual_coef(job), rtol=1e-10)


@pytest.mark.parametrize("keep", ["all", "factor", "model"])
def test_what_is_kept(keep: str, make: Make, tmp_path: Path) -> None:
    summary = fit_job(make(output={"keep": keep}, solver={"gram": "stored"}))
    store = tmp_path / "runs/store"
    numbers = [len(list(store.glob(f"{kind}/*.zarr"))) for kind in ("grams", "factors", "solves")]
    assert numbers == {"all": [1, 1, 0], "factor": [0, 1, 0], "model": [0, 0, 0]}[keep]
    sizes = {path: sum(f.stat().st_size for f in Path(path).rglob("*") if f.is_file()) for path in summary.kept}
    assert summary.kept == sizes
    assert len(summary.kept) == sum(numbers)


def test_an_interrupted_job_continues(make: Make, tmp_path: Path) -> None:
    undisturbed = make(output={"directory": str(tmp_path / "other/a")})
    fit_job(undisturbed)

    def interrupt(phase: str, done: int, *_: Any) -> None:
        if (phase, done) == ("factorise", 4):
            raise InterruptedRunError("interrupted")

    with pytest.raises(InterruptedRunError):
        fit_job(make(), progress=interrupt)
    assert not (tmp_path / "runs/a/model.zarr").exists()
    summary = fit_job(make())
    assert summary.tiles_computed <= 10 - 4
    assert np.array_equal(dual_coef(make()), dual_coef(undisturbed))
    # the same again computes nothing, and another run of the same rows shares the factor
    again = [fit_job(make()), fit_job(make(output={"directory": str(tmp_path / "runs/b")}))]
    assert [one.tiles_computed for one in again] == [0, 0]


def test_a_directory_of_another_job_is_refused(make: Make, tmp_path: Path) -> None:
    fit_job(make())
    with pytest.raises(
        StoreMismatchError, match=r"holds another job .*\[model\] alpha: 0\.1 there, 3\.0 wanted"
    ) as error:
        fit_job(make(model={"alpha": 3.0}))
    assert error.value.fields == ["[model] alpha: 0.1 there, 3.0 wanted"]
    # where it runs is not what it is
    fit_job(make(cluster={"workers": 1}))


def test_a_refused_job_does_not_hold_its_directory(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="target 9 is not a column"):
        fit_job(make(data={"target": [9]}))
    cluster = {"scheduler": "local", "memory_limit": "1GiB"}
    with pytest.raises(PlanRefusedError, match="a task with tiles of 16000"):
        fit_job(make(solver={"tile_size": 16_000, "name": "cholesky"}, cluster=cluster))
    assert not (tmp_path / "runs/a").exists()
    fit_job(make())


# --- predictions and scores ------------------------------------------------------------------------------------------
