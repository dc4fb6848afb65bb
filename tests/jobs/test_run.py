"""A job from its file to model, predictions and scores: what is written, what is found again, what is kept."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import zarr

import dkrr.jobs.serve
from dkrr import DataError, KernelRidge, StoreError, StoreMismatchError, ingest, load_model, make_kernel
from dkrr.errors import InterruptedRunError, NotPositiveDefiniteError, ParameterError, PlanRefusedError
from dkrr.jobs.run import fit_job
from dkrr.jobs.serve import evaluate_job, predict_job
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


def tiles(store: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in store.glob("factors/*.zarr/c/*/*")}


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
    result = json.loads((run / "result.json").read_text())
    assert result["tiles_computed"] == result["tiles_total"] == 10
    assert result["relative_residual"] == summary.relative_residual
    assert max(summary.backward_error) < 1e-12
    assert set(summary.seconds) >= {"prepare", "start", "factorise", "solve", "residual", "total"}
    assert {phase.partition(" ")[0] for phase in phases} >= {"factorise", "solve", "residual"}
    assert summary.score is None
    assert all(peak > 10**7 for peak in summary.peak_rss_bytes.values())
    assert "Cholesky" in summary.message
    model = load_model(run / "model.zarr")
    assert model.provenance["tile_size"] == 64
    assert model.feature_names == ["x0", "x1", "x2", "x3"]


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


def test_a_mask_in_a_file_and_rows_in_a_file(make: Make, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "mask.csv.gz", "wt") as file:
        file.writelines(f"0,{int(i % 5 == 0)}\n" for i in range(N))
    by_column = fit_job(make(evaluate={"mask": 4}))
    by_file = fit_job(
        make(evaluate={"mask": "mask.csv.gz", "mask_column": 1}, output={"directory": str(tmp_path / "runs/b")})
    )
    assert by_file.score == by_column.score
    held_out = np.arange(N) % 5 == 0
    for name, rows in (("train", ~held_out), ("test", held_out)):
        np.savetxt(tmp_path / f"{name}.csv", np.column_stack([X, np.zeros(N), Y])[rows], delimiter=",", fmt="%.17g")
    by_path = fit_job(
        make(data={"path": "train.csv"}, evaluate={"path": "test.csv"}, output={"directory": str(tmp_path / "runs/c")})
    )
    assert by_path.score is not None
    assert by_path.score.rmse == pytest.approx(by_column.score.rmse if by_column.score else None, rel=1e-9)


def test_a_ridge_per_target_from_one_gram_matrix(make: Make, tmp_path: Path) -> None:
    job = make(data={"target": [-1, 0], "features": [1, 2, 3]}, model={"alpha": [0.1, 2.0]}, output={"keep": "all"})
    fit_job(job)
    rows = X[:, 1:]
    for column, (y, alpha) in enumerate(((Y, 0.1), (X[:, 0], 2.0))):
        np.testing.assert_allclose(dual_coef(job)[:, column], dense_krr(rbf(rows, rows), y, alpha), rtol=1e-8)
    store = tmp_path / "runs/store"
    assert len(list(store.glob("factors/*.zarr"))) == 2
    assert len(list(store.glob("grams/*.zarr"))) == 1


def test_weights(make: Make, table: Path, tmp_path: Path) -> None:
    job = make(data={"weight": 4})
    fit_job(job)
    weight = (np.arange(N) % 5 == 0).astype(float)
    np.testing.assert_allclose(dual_coef(job)[:, 0], dense_krr(rbf(X, X), Y, 0.1, weight), rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("alphas", [0.1, [0.1, 1.0]], ids=["one alpha", "two alphas"])
def test_a_precomputed_matrix(make: Make, alphas: Any, tmp_path: Path) -> None:
    targets = np.column_stack([Y, X[:, 0]])
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


def test_the_same_job_again_computes_nothing(make: Make, tmp_path: Path) -> None:
    first = fit_job(make())
    before = tiles(tmp_path / "runs/store")
    again = fit_job(make())
    assert (first.tiles_computed, again.tiles_computed) == (10, 0)
    assert tiles(tmp_path / "runs/store") == before
    # another run of the same rows shares the factor
    other = fit_job(make(output={"directory": str(tmp_path / "runs/b")}))
    assert other.tiles_computed == 0


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


def test_a_lost_tile_alone_is_computed_again(make: Make, tmp_path: Path) -> None:
    fit_job(make())
    expected = dual_coef(make())
    (factor,) = (tmp_path / "runs/store/factors").glob("*.zarr")
    contents = (factor / "c/2/1").read_bytes()
    (factor / "c/2/1").unlink()
    assert fit_job(make()).tiles_computed == 1
    assert (factor / "c/2/1").read_bytes() == contents
    assert np.array_equal(dual_coef(make()), expected)


def test_auto_is_resolved_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(solver={"tile_size": "auto"})
    first = fit_job(job)
    monkeypatch.setattr("dkrr.fit.prices.choose_tile_size", lambda *arguments: 100)
    again = fit_job(job)
    assert again.plan.tile_size == first.plan.tile_size == 256
    assert again.tiles_computed == 0


def test_a_directory_of_another_job_is_refused(make: Make, tmp_path: Path) -> None:
    fit_job(make())
    model = (tmp_path / "runs/a/model.zarr/manifest.json").read_bytes()
    with pytest.raises(
        StoreMismatchError, match=r"holds another job .*\[model\] alpha: 0\.1 there, 3\.0 wanted"
    ) as error:
        fit_job(make(model={"alpha": 3.0}))
    assert error.value.fields == ["[model] alpha: 0.1 there, 3.0 wanted"]
    assert (tmp_path / "runs/a/model.zarr/manifest.json").read_bytes() == model
    # where it runs is not what it is
    fit_job(make(cluster={"workers": 1}))


def test_a_directory_of_something_else_is_refused(make: Make, tmp_path: Path) -> None:
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match="is not a run of dkrr"):
        fit_job(make())
    assert [path.name for path in (tmp_path / "runs/a").iterdir()] == ["thesis.txt"]
    (tmp_path / "runs/b").mkdir()
    fit_job(make(output={"directory": str(tmp_path / "runs/b")}))  # an empty one is as good as none


def test_a_refused_job_does_not_hold_its_directory(make: Make, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="target 9 is not a column"):
        fit_job(make(data={"target": [9]}))
    cluster = {"scheduler": "local", "memory_limit": "1GiB"}
    with pytest.raises(PlanRefusedError, match="a task with tiles of 16000"):
        fit_job(make(solver={"tile_size": 16_000, "name": "cholesky"}, cluster=cluster))
    assert not (tmp_path / "runs/a").exists()
    fit_job(make())


def test_rows_that_changed_are_read_again(make: Make, table: Path) -> None:
    fit_job(make())
    lines = table.read_text().splitlines(keepends=True)
    table.write_text("".join(reversed(lines)))
    summary = fit_job(make())
    assert summary.tiles_computed == 10
    np.testing.assert_allclose(dual_coef(make())[:, 0], dense_krr(rbf(X[::-1], X[::-1]), Y[::-1], 0.1), rtol=1e-8)


def test_a_matrix_that_is_not_positive_definite(make: Make, tmp_path: Path) -> None:
    job = make(model={"kernel": "sigmoid", "gamma": 2.0, "alpha": 1e-3})
    with pytest.raises(NotPositiveDefiniteError, match="indefinite kernel") as error:
        fit_job(job)
    assert error.value.exit_code == 5
    assert not (tmp_path / "runs/a/model.zarr").exists()


# --- predictions and scores ------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    KernelRidge(kernel="rbf", gamma=0.2, alpha=0.1).fit(X, np.column_stack([Y, -Y])).save(tmp_path / "m.zarr")
    return str(tmp_path / "m.zarr")


@pytest.fixture
def rows(tmp_path: Path) -> str:
    np.save(tmp_path / "rows.npy", X + 0.5)
    return str(tmp_path / "rows.npy")


def read_predictions(path: Path) -> np.ndarray:
    match path.suffix:
        case ".npy":
            return np.load(path)
        case ".zarr":
            return np.asarray(zarr.open_array(str(path), mode="r", zarr_format=3)[:])
        case ".csv":
            table = pyarrow.csv.read_csv(path)
        case _:
            table = pyarrow.parquet.read_table(path)
    assert table.column_names == ["prediction_0", "prediction_1"]
    return np.column_stack([column.to_numpy() for column in table.columns])


@pytest.mark.usefixtures("cluster_client")
@pytest.mark.parametrize("ending", [".npy", ".zarr", ".csv", ".parquet"])
def test_predictions_in_every_format(ending: str, model: str, rows: str, tmp_path: Path) -> None:
    expected = load_model(model).predict(X + 0.5)
    output = tmp_path / "new" / f"p{ending}"
    for _ in range(2):  # an older file is replaced
        assert predict_job(model, rows, str(output)) == N
        assert {path.name for path in output.parent.iterdir()} == {output.name, f"{output.name}.json"}
        np.testing.assert_allclose(read_predictions(output), expected, rtol=1e-10)


@pytest.mark.usefixtures("cluster_client")
def test_one_target_is_one_axis(tmp_path: Path, rows: str) -> None:
    KernelRidge(kernel="rbf").fit(X, Y).save(tmp_path / "one.zarr")
    predict_job(str(tmp_path / "one.zarr"), rows, str(tmp_path / "p.npy"))
    assert np.load(tmp_path / "p.npy").shape == (N,)


@pytest.mark.usefixtures("cluster_client")
def test_an_interrupted_prediction_continues_with_the_same_rows_only(
    model: str, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise InterruptedRunError("interrupted")

    output = str(tmp_path / "p.npy")
    monkeypatch.setattr(dkrr.jobs.serve, "export_predictions", interrupt)
    with pytest.raises(InterruptedRunError):
        predict_job(model, rows, output)
    assert Path(f"{output}.work").is_dir()
    monkeypatch.undo()
    # rows, or a model, that were exchanged meanwhile are not continued: what was left is made anew
    np.save(tmp_path / "other.npy", X - 3)
    other = str(tmp_path / "other.zarr")
    KernelRidge(kernel="rbf", gamma=0.2, alpha=5.0).fit(X, np.column_stack([Y, -Y])).save(other)
    work = tmp_path / "left"
    shutil.copytree(f"{output}.work", work)
    for predictor, source, inputs in ((model, str(tmp_path / "other.npy"), X - 3), (other, rows, X + 0.5)):
        predict_job(predictor, source, output)
        np.testing.assert_allclose(np.load(output), load_model(predictor).predict(inputs), rtol=1e-10)
        assert not Path(f"{output}.work").exists()
        shutil.copytree(work, f"{output}.work")
    predict_job(model, rows, output)
    np.testing.assert_allclose(np.load(output), load_model(model).predict(X + 0.5), rtol=1e-10)
    assert not Path(f"{output}.work").exists()


def test_what_cannot_be_predicted_leaves_nothing(model: str, tmp_path: Path) -> None:
    np.save(tmp_path / "narrow.npy", X[:, :2])
    np.save(tmp_path / "nan.npy", np.where(X > 20, np.nan, X))
    (tmp_path / "out").mkdir()
    for name, message in (("narrow", "has 2 features"), ("nan", "NaN or infinity")):
        with pytest.raises(DataError, match=message):
            predict_job(model, str(tmp_path / f"{name}.npy"), str(tmp_path / "out/p.npy"))
        assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(ParameterError, match=r"ends in '\.xls'; one of \.zarr, \.npy, \.parquet, \.csv expected"):
        predict_job(model, "no/such/file", str(tmp_path / "out/p.xls"))


@pytest.mark.usefixtures("cluster_client")
@pytest.mark.parametrize("form", ["data set", "names", "no names", "last columns"])
def test_evaluation_finds_the_targets(form: str, model: str, tmp_path: Path) -> None:
    targets = np.column_stack([Y, -Y])
    if form == "data set":
        ingest(X, tmp_path / "rows.zarr", y=targets)
        data = tmp_path / "rows.zarr"
    else:
        data = tmp_path / "rows.csv"
        header = {"names": "a,b,c,d,y0,y1", "no names": "", "last columns": "a,b,c,d,up,down"}[form]
        np.savetxt(data, np.column_stack([X, targets]), delimiter=",", fmt="%.17g", header=header, comments="")
        if form == "no names":
            data.write_text(data.read_text().lstrip("\n"))
    before = sorted(path.name for path in tmp_path.iterdir())
    facts = evaluate_job(model, str(data))
    errors = load_model(model).predict(X) - targets
    assert facts["rows"] == N
    assert facts["rmse"] == pytest.approx(np.sqrt((errors**2).mean(axis=0)).mean(), rel=1e-8)
    assert evaluate_job(model, str(data), metric="r2") == {"r2": facts["r2"], "rows": N}
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_model_of_a_run_whose_store_is_gone(make: Make, tmp_path: Path) -> None:
    fit_job(make())
    expected = load_model(tmp_path / "runs/a/model.zarr").predict(X)
    shutil.rmtree(tmp_path / "runs/store")
    shutil.copytree(tmp_path / "runs/a/model.zarr", tmp_path / "elsewhere.zarr")
    shutil.rmtree(tmp_path / "runs")
    assert np.array_equal(load_model(tmp_path / "elsewhere.zarr").predict(X), expected)
