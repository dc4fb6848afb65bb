"""KernelRidge as scikit-learn and people use it: every kind of input, where the work runs, and what is left behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
import zarr
from scipy import sparse
from sklearn.kernel_ridge import KernelRidge as DenseKernelRidge
from sklearn.linear_model import Ridge
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV

import dkrr.engine.cluster
import dkrr.models.estimator
import dkrr.models.model
import dkrr.models.prediction
from dkrr import KernelRidge, ingest, make_kernel
from dkrr.errors import ClusterError, DataError, ParameterError, StorageFullError
from dkrr.fit.inputs import TemporaryStore, temporary_folder
from tests.reference import dense_bordered

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 5))
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1)
Z = RNG.standard_normal((37, 5))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Dask's temporary directory, empty again after every test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    with dask.config.set({"temporary-directory": str(folder)}):
        yield folder
    if list(folder.iterdir()):  # an estimator in a circle of references; a collection takes a quarter of a second
        gc.collect()
    assert list(folder.iterdir()) == []


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a cluster fails the test."""

    def start(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr(dkrr.engine.cluster, "start_local", start)


def fitted(**parameters: Any) -> KernelRidge:
    return KernelRidge(kernel="rbf", alpha=0.1, **parameters).fit(X, Y[:, 0])


def run_script(folder: Path, source: str, *, guard: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a plain file in a process of its own."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(source))
    environment = os.environ | {"PYTHONPATH": str(Path(dkrr.__file__).parents[1]), "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_grid_search_shares_a_store(num_jobs: int, tmp_path: Path) -> None:
    grid = {"alpha": [0.01, 0.1]}
    store = tmp_path / "store"
    search = GridSearchCV(
        KernelRidge(kernel="rbf", store=store, tile_size=64), grid, cv=2, n_jobs=num_jobs, return_train_score=True
    ).fit(X, Y[:, 0])
    dense = GridSearchCV(DenseKernelRidge(kernel="rbf"), grid, cv=2, return_train_score=True).fit(X, Y[:, 0])
    for name in ("mean_test_score", "mean_train_score"):
        np.testing.assert_allclose(search.cv_results_[name], dense.cv_results_[name], rtol=1e-8)
    assert search.best_params_ == dense.best_params_
    # 2 candidates on 2 halves and the best on all rows: a factor each, and no row or coefficient stays behind
    assert len(list((store / "factors").glob("*.zarr"))) == 5
    assert list((store / "rows").iterdir()) == []
    assert list((store / "solves").iterdir()) == []


# --- inputs --------------------------------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, tuple[Any, Any]]:
    """The same rows and targets in every form that is read a block at a time, and the targets that go with it."""
    y = Y[:, 0]
    np.save(folder / "X.npy", X)
    np.save(folder / "y.npy", y)
    np.save(folder / "Xf.npy", np.asfortranarray(X))
    with_targets = ingest(X, folder / "with.zarr", y=y)
    without = ingest(X, folder / "without.zarr")
    array = zarr.create_array(str(folder / "X.zarr"), data=X, chunks=(70, 3))
    lazy = da.from_array(X, chunks=(64, 2))
    return {
        ".npy": (folder / "X.npy", y),
        ".npy for both": (str(folder / "X.npy"), str(folder / "y.npy")),
        ".npy Fortran": (str(folder / "Xf.npy"), y),
        "memory map": (np.load(folder / "X.npy", mmap_mode="r"), y),
        "memory maps": (np.load(folder / "X.npy", mmap_mode="r"), np.load(folder / "y.npy", mmap_mode="r")),
        "zarr array": (array, y),
        "zarr path": (str(folder / "X.zarr"), y),
        "dask": (lazy, y),
        "dask for both": (lazy, da.from_array(y, chunks=50)),
        "data set": (with_targets, None),
        "data set path": (folder / "with.zarr", None),
        "data set, other targets": (with_targets, y),
        "data set without targets": (without, y),
    }


FORMS = (
    ".npy", ".npy for both", ".npy Fortran", "memory map", "memory maps", "zarr array", "zarr path", "dask",
    "dask for both", "data set", "data set path", "data set, other targets", "data set without targets",
)  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_rows_on_disk_in_every_form(name: str, tmp_path: Path, temporary: Path, no_cluster: None) -> None:
    expected = fitted(tile_size=64)
    source, y = stored(tmp_path)[name]
    estimator = KernelRidge(kernel="rbf", alpha=0.1, tile_size=64).fit(source, y)
    np.testing.assert_allclose(estimator.dual_coef_, expected.dual_coef_, rtol=1e-12, atol=1e-13)
    assert estimator.n_features_in_ == 5
    assert np.array_equal(np.asarray(estimator.X_fit_), X)
    for rows in (Z, da.from_array(Z, chunks=(10, 2))):
        predicted = estimator.predict(rows)
        assert predicted.shape == (37,)
        np.testing.assert_allclose(np.asarray(predicted), expected.predict(Z), rtol=1e-12, atol=1e-13)
    # only what predictions need stays on disk
    assert {path.name for path in temporary.glob("*/*")} <= {"rows"}


def test_predict_reads_every_form(tmp_path: Path) -> None:
    estimator = fitted()
    expected = estimator.predict(Z)
    np.save(tmp_path / "Z.npy", Z)
    ingest(Z, tmp_path / "Z.zarr", y=expected)
    forms = [
        str(tmp_path / "Z.npy"), tmp_path / "Z.npy", np.load(tmp_path / "Z.npy", mmap_mode="r"), Z.tolist(),
        zarr.create_array(str(tmp_path / "plain.zarr"), data=Z, chunks=(10, 5)), tmp_path / "Z.zarr",
        sparse.csr_array(Z), Z.astype(object), np.asfortranarray(Z), Z.astype(">f8"), Z[::-1][::-1],
    ]  # fmt: skip
    for form in forms:
        np.testing.assert_allclose(estimator.predict(form), expected, rtol=1e-13, atol=1e-14, err_msg=str(type(form)))


def test_dask_in_lazy_dask_out() -> None:
    for targets, shape in ((Y[:, 0], (37,)), (Y[:, :1], (37, 1)), (Y, (37, 2))):
        estimator = KernelRidge(kernel="rbf").fit(X, targets)
        lazy = estimator.predict(da.from_array(Z, chunks=(10, 2)))
        assert isinstance(lazy, da.Array)
        assert lazy.shape == shape
        assert lazy.chunks[0] == (10, 10, 10, 7)
        np.testing.assert_allclose(lazy.compute(), estimator.predict(Z), rtol=1e-13, atol=1e-14)
    filtered = da.from_array(Z, chunks=(10, 5))[da.from_array(Z[:, 0] > 0, chunks=10)]
    np.testing.assert_allclose(estimator.predict(filtered).compute(), estimator.predict(Z[Z[:, 0] > 0]), rtol=1e-12)
    assert estimator.score(da.from_array(X, chunks=100), Y) == pytest.approx(estimator.score(X, Y))


def test_lazy_predictions_outlive_the_estimator(temporary: Path) -> None:
    estimator = KernelRidge(kernel="rbf", alpha=0.1, tile_size=64).fit(da.from_array(X, chunks=64), Y[:, 0])
    expected = estimator.predict(Z)
    lazy, rows = estimator.predict(da.from_array(Z, chunks=10)), estimator.X_fit_
    del estimator
    gc.collect()
    np.testing.assert_allclose(lazy.compute(), expected, rtol=1e-12, atol=1e-14)
    assert np.array_equal(rows.compute(), X)


# --- where the work runs -------------------------------------------------------------------------------------------


def test_many_rows_run_on_the_client_that_is_found(cluster_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fitted(tile_size=64)
    monkeypatch.setattr(dkrr.models.estimator, "MAX_IN_PROCESS_ROWS", 10)
    estimator = fitted(tile_size=64)
    np.testing.assert_allclose(estimator.dual_coef_, expected.dual_coef_, rtol=1e-9, atol=1e-11)
    assert cluster_client.status == "running"
    with pytest.raises(ClusterError, match=r"tiles of 9000 needs .* bytes, a worker may use") as refused:
        KernelRidge(kernel="rbf", tile_size=9000).fit(RNG.standard_normal((9000, 1)), RNG.standard_normal(9000))
    assert refused.value.exit_code == 6


def test_inside_a_dask_worker_work_runs_in_process(cluster_client: Any) -> None:
    def fit(rows: Any, y: Any) -> Any:
        import dkrr.engine.cluster
        import dkrr.models.estimator

        def start(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError("a cluster was started")

        dkrr.models.estimator.MAX_IN_PROCESS_ROWS = 10
        dkrr.engine.cluster.start_local = start
        return dkrr.models.estimator.KernelRidge(kernel="rbf", alpha=0.1, tile_size=64).fit(rows, y).dual_coef_

    coefficients = cluster_client.submit(fit, X, Y[:, 0], pure=False).result(timeout=60)
    np.testing.assert_allclose(coefficients, fitted().dual_coef_, rtol=1e-9, atol=1e-11)


def test_large_predictions_run_on_workers(cluster_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = KernelRidge(kernel="rbf", alpha=0.1).fit(X, Y)
    rows = RNG.standard_normal((5000, 5))
    expected = estimator.predict(rows)
    local = KernelRidge(kernel=lambda a, b: a @ b.T).fit(X, Y)
    monkeypatch.setattr(dkrr.models.prediction, "MAX_IN_PROCESS_ENTRIES", 1)
    assert len(local.predict(rows)) == 5000  # a function without a name is known to this process alone
    monkeypatch.setattr(dkrr.models.model.Model, "compute", None)  # what this process would do
    np.save(tmp_path / "rows.npy", rows)
    ingest(rows, tmp_path / "rows.zarr", y=rows[:, 0])
    for form in (rows, str(tmp_path / "rows.npy"), tmp_path / "rows.zarr"):
        np.testing.assert_allclose(estimator.predict(form), expected, rtol=1e-9, atol=1e-11)


# --- stores, copies, what is left ------------------------------------------------------------------------------------


def test_rows_of_a_kept_store_are_there_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for _ in range(2):
        estimator = KernelRidge(kernel="rbf", store=store, tile_size=64).fit(da.from_array(X, chunks=64), Y)
    assert len(list((store / "rows").iterdir())) == 1
    KernelRidge(kernel="rbf", store=store, tile_size=64).fit(da.from_array(X, chunks=64), Y[:, 0])
    assert len(list((store / "rows").iterdir())) == 2
    copied = pickle.loads(pickle.dumps(estimator))
    np.testing.assert_array_equal(copied.predict(Z), estimator.predict(Z))


def test_a_temporary_store_lives_as_long_as_the_estimator(temporary: Path) -> None:
    estimator = KernelRidge(kernel="rbf", tile_size=64).fit(da.from_array(X, chunks=64), Y)
    assert len(list(temporary.iterdir())) == 1
    estimator.fit(da.from_array(X, chunks=64), Y)
    gc.collect()
    assert len(list(temporary.iterdir())) == 1
    del estimator
    gc.collect()
    assert list(temporary.iterdir()) == []
    fitted(tile_size=64)
    assert list(temporary.iterdir()) == []  # rows in memory need no store after the fit


def test_a_temporary_store_is_gone_at_exit(tmp_path: Path, temporary: Path) -> None:
    code = f"""
    import os, sys
    import dask, numpy as np, dask.array as da, dkrr
    dask.config.set({{"temporary-directory": {str(temporary)!r}}})
    X = da.from_array(np.random.default_rng(0).standard_normal((200, 3)), chunks=50)
    kept = dkrr.KernelRidge(kernel="rbf", tile_size=64).fit(X, X[:, 0])
    print(len(os.listdir({str(temporary)!r})))
    if os.fork() == 0:
        sys.exit()  # a child that ends must not take its parent's store away
    os.wait()
    print(kept.predict(np.zeros((2, 3))).shape, len(os.listdir({str(temporary)!r})))
    """
    result = run_script(tmp_path, code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["1", "(2,) 1"]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("source", ["memory", "dask"])
def test_copies_stand_on_their_own(source: str) -> None:
    estimator = KernelRidge(kernel="rbf", tile_size=64).fit(X if source == "memory" else da.from_array(X, chunks=64), Y)
    expected = estimator.predict(Z)
    copies = [pickle.loads(pickle.dumps(estimator)), copy.deepcopy(estimator)]
    del estimator
    gc.collect()
    for copied in copies:
        assert np.array_equal(copied.predict(Z), expected)
        assert np.array_equal(np.asarray(copied.X_fit_), X)


def test_a_temporary_folder_is_where_there_is_room(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    monkeypatch.setattr("dkrr.fit.inputs.free_memory_bytes", lambda: 1_000_000)
    kinds = {str(temporary): "tmpfs"}
    monkeypatch.setattr("dkrr.fit.inputs.file_system", lambda path: kinds.get(str(path), "ext4"))
    os.rmdir(temporary_folder(400_000))
    # what was configured is taken at its word, never silently replaced
    with pytest.raises(StorageFullError, match="temporary is in memory"):
        temporary_folder(600_000)  # more than half of the free memory
    kinds.clear()
    with pytest.raises(StorageFullError, match=r"needs 1(,000){6} bytes: ") as error:
        TemporaryStore(10**18)
    assert error.value.needed == 10**18


# --- solvers ---------------------------------------------------------------------------------------------------------

RBF: dict[str, Any] = {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "cg", "precision": "float32"}, "precision 'mixed'"),
        ({"solver_params": {"rank": 10}}, "rank is for solver 'cg'"),
        ({"solver": "cg", "solver_params": {"num_centers": 10}}, "num_centers is for solver 'nystrom'"),
        ({"solver_params": {"ranks": 10}}, "solver_params has 'ranks'; known: preconditioner, rank"),
        ({"solver_params": {"tol": 1e-3}}, "tol and max_iter are parameters of the estimator itself"),
        ({"solver_params": [1]}, "a dict expected"),
        ({"solver": "cg", "solver_params": {"rank": 0}}, "whole number above 0"),
        ({"solver": "cg", "solver_params": {"seed": -1}}, "at least 0"),
        ({"solver": "cg", "solver_params": {"allow_unconverged": 1}}, "True or False"),
        ({"tol": 0.0}, "tol = 0.0"),
        ({"max_iter": 0}, "max_iter = 0"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        KernelRidge(**RBF, **options).fit(X, Y)


# --- an intercept, with every solver ----------------------------------------------------------------------------------

WEIGHT = RNG.uniform(0.2, 2, 300) * (np.arange(300) % 7 > 0)
# options of each way, and how well it meets the dense solve
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "memory": ({}, 1e-10),
    "float32": ({"precision": "float32"}, 1e-4),
    "tiles": ({"tile_size": 90}, 1e-10),
    "mixed": ({"tile_size": 90, "precision": "mixed", "tol": 1e-11}, 1e-8),
    "cg": ({"solver": "cg", "tol": 1e-11}, 1e-8),
    "nystrom": ({"solver": "nystrom", "tol": 1e-11, "solver_params": {"num_centers": 257}}, 1e-7),
}


@pytest.mark.parametrize("alphas", [0.1, [0.1, 3.0]], ids=str)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "nystrom"])
def test_every_way_agrees_with_the_dense_bordered_system(way: str, alphas: Any) -> None:
    options, tolerance = WAYS[way]
    weight, kernel = None if alphas == 0.1 else WEIGHT, make_kernel("rbf", gamma=0.2)
    est = KernelRidge(**RBF | {"fit_intercept": True, "alpha": alphas}, **options).fit(X, Y, sample_weight=weight)
    coefficients, b = dense_bordered(kernel(X, X), Y, alphas, weight)
    size = np.abs(coefficients).max()
    np.testing.assert_allclose(est.dual_coef_, coefficients, rtol=0, atol=tolerance * size)
    np.testing.assert_allclose(est.predict(Z), kernel(Z, X) @ coefficients + b, rtol=0, atol=100 * tolerance)
    # s^T u is the sum of the coefficients, with weights and without
    sums = est.dual_coef_.sum(axis=0)
    assert np.abs(sums).max() < (1e-6 if way == "float32" else 1e-13) * np.abs(est.dual_coef_).sum(axis=0).min()
    assert weight is None or not est.dual_coef_[weight == 0].any()
    assert max(est.solution_.backward_error) <= (1e-6 if way == "float32" else 1e-11)
    # a number that is added to the targets is added to the intercept; the sum rounds 7e-9 of y away
    before = est.intercept_
    est.fit(X, Y + 2.0**26, sample_weight=weight)
    np.testing.assert_allclose(est.dual_coef_, coefficients, rtol=0, atol=max(tolerance, 1e-6) * size)
    np.testing.assert_allclose(est.intercept_, before + 2.0**26, rtol=0, atol=max(100 * tolerance, np.spacing(2.0**26)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alpha", [1e-5, 1e5])
def test_ones_are_predicted_as_one_whatever_alpha_and_weights(way: str, alpha: float) -> None:
    # alone, and beside a target that is not constant
    weight = 10.0 ** RNG.uniform(-2, 2, 300) * (np.arange(300) % 7 > 0)
    y = np.column_stack([np.ones(300), Y[:, 0]])
    parameters = {} if way in ("memory", "float32", "tiles") else {"allow_unconverged": True}
    options = WAYS[way][0] | {"tol": 1e-6, "max_iter": 30}
    options["solver_params"] = options.get("solver_params", {}) | parameters
    est = KernelRidge(**RBF | {"fit_intercept": True, "alpha": alpha, "gamma": 2.0}, **options).fit(
        X, y, sample_weight=weight
    )
    assert np.abs(est.predict(Z)[:, 0] - 1).max() < 1e-10
    assert est.intercept_[0] == pytest.approx(1, abs=1e-14)


# --- the primal solver ------------------------------------------------------------------------------------------------

N, D = 240, 5


def rows(n: int = N, t: int = 1) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D)) + 1
    y = x @ rng.standard_normal((D, t)) + rng.standard_normal((n, t)) + 3
    return x, y[:, 0] if t == 1 else y, rng.uniform(0.2, 2, n) * (np.arange(n) % 7 > 0)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_coefficients_are_those_of_ridge(t: int, intercept: bool, stored: bool, tmp_path: Path) -> None:
    x, y, weight = rows(t=t)
    store = str(tmp_path / "store") if stored else None
    found = dkrr.KernelRidge(alpha=0.5, kernel="linear", solver="primal", fit_intercept=intercept, store=store)
    found.fit(x, y, sample_weight=weight)
    ridge = Ridge(alpha=0.5, fit_intercept=intercept, solver="cholesky").fit(x, y, sample_weight=weight)
    np.testing.assert_allclose(found.coef_, ridge.coef_, rtol=1e-10)
    np.testing.assert_allclose(found.intercept_, ridge.intercept_, rtol=1e-10)
    np.testing.assert_allclose(found.predict(x), ridge.predict(x), rtol=1e-10)


def test_rows_on_disk_are_not_needed_any_more(tmp_path: Path) -> None:
    x, y, weight = rows()
    dataset = ingest(x, tmp_path / "rows.zarr", y=y, sample_weight=weight)
    found = dkrr.KernelRidge(alpha=0.5, kernel="poly", degree=2, solver="primal", store=str(tmp_path / "store"))
    found.fit(dataset)
    memory = dkrr.KernelRidge(alpha=0.5, kernel="poly", degree=2, solver="primal").fit(x, y, sample_weight=weight)
    assert not hasattr(found, "dual_coef_")
    assert not hasattr(found, "X_fit_")
    left_out = found.leave_one_out().residuals
    np.testing.assert_allclose(left_out, memory.leave_one_out().residuals, rtol=1e-9)
    found.save(tmp_path / "model.zarr")
    assert sum(path.stat().st_size for path in (tmp_path / "model.zarr").rglob("c/*/*")) < 8 * 4100
    model = dkrr.load_model(tmp_path / "model.zarr")
    np.testing.assert_allclose(model.predict(x), memory.predict(x), rtol=1e-11)
    lazy = model.predict(da.from_array(x, chunks=(50, D)))
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), model.predict(x), rtol=1e-13)


def test_auto_takes_it_for_many_rows_of_few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = rows(1500)
    plain = dkrr.KernelRidge(kernel="linear").fit(x, y, sample_weight=weight)
    monkeypatch.setattr("dkrr.models.estimator.MAX_IN_PROCESS_ROWS", 1000)
    auto = dkrr.KernelRidge(kernel="linear").fit(x, y, sample_weight=weight)
    assert (plain.solution_.solver, auto.solution_.solver) == ("cholesky", "primal")
    np.testing.assert_allclose(auto.dual_coef_, plain.dual_coef_, rtol=0, atol=1e-8 * np.abs(plain.dual_coef_).max())


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"kernel": "rbf"}, "no finite number"),
        ({"kernel": "poly", "degree": 2.5}, "whole degree"),
        ({"kernel": "poly", "coef0": -1}, "coef0"),
        ({"precision": "mixed"}, "all float64"),
        ({"solver_params": {"rank": 10}}, "rank is for solver 'cg'"),
    ],
    ids=str,
)
def test_what_has_no_features_is_refused(parameters: dict[str, Any], words: str) -> None:
    x, y, _ = rows()
    with pytest.raises(ParameterError, match=words):
        dkrr.KernelRidge(solver="primal", **parameters).fit(x, y)


# --- a precomputed matrix ---------------------------------------------------------------------------------------------

SIZE, TILE = 250, 64
OTHER = np.random.default_rng(1)
XK = OTHER.standard_normal((SIZE, 4))
YK = np.stack([np.sin(XK[:, 0]), XK[:, 1]], axis=1)
WK = OTHER.uniform(0, 2, SIZE) * (np.arange(SIZE) % 4 > 0)
K = rbf_kernel(XK)
K_TEST = rbf_kernel(OTHER.standard_normal((31, 4)), XK)


def npy(folder: Path, matrix: np.ndarray) -> Path:
    np.save(folder / "K.npy", matrix)
    return folder / "K.npy"


def zarr_path(folder: Path, matrix: np.ndarray) -> Path:
    zarr.create_array(str(folder / "K.zarr"), data=matrix, chunks=(90, 40), overwrite=True)
    return folder / "K.zarr"


MATRIX_FORMS: dict[str, Callable[[Path, np.ndarray], Any]] = {
    "array": lambda folder, matrix: matrix,
    "Fortran": lambda folder, matrix: np.asfortranarray(matrix),
    "dask": lambda folder, matrix: da.from_array(matrix, chunks=(70, 101)),
    "float32 dask": lambda folder, matrix: da.from_array(matrix, chunks=50).astype(np.float32),
    "zarr": lambda folder, matrix: zarr.open_array(str(zarr_path(folder, matrix))),
    "zarr path": zarr_path,
    ".npy": npy,
    "memory map": lambda folder, matrix: np.load(npy(folder, matrix), mmap_mode="r"),
}


@pytest.mark.parametrize("tile_size", ["auto", TILE])
@pytest.mark.parametrize("name", MATRIX_FORMS)
def test_every_form_of_the_matrix(name: str, tile_size: Any, tmp_path: Path) -> None:
    expected = DenseKernelRidge(kernel="precomputed", alpha=0.1).fit(K, YK, sample_weight=WK)
    rtol = 1e-5 if "float32" in name else 1e-9
    fit = KernelRidge(kernel="precomputed", alpha=0.1, tile_size=tile_size)
    fit.fit(MATRIX_FORMS[name](tmp_path, K), YK, sample_weight=WK)
    assert np.linalg.norm(fit.dual_coef_ - expected.dual_coef_) < rtol * np.linalg.norm(expected.dual_coef_)
    assert np.all(fit.dual_coef_[WK == 0] == 0)
    assert fit.n_features_in_ == SIZE
    assert fit.solution_.backward_error[0] < 1e-12
    for rows in (K_TEST, da.from_array(K_TEST, chunks=(10, 100))):
        predicted = fit.predict(rows)
        assert type(predicted) is type(rows)
        np.testing.assert_allclose(np.asarray(predicted), expected.predict(K_TEST), rtol=100 * rtol, atol=rtol)


def test_a_kept_store_holds_a_factor_and_no_copy_of_the_matrix(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for _ in range(2):
        KernelRidge(kernel="precomputed", alpha=0.1, tile_size=TILE, store=store).fit(da.from_array(K, chunks=99), YK)
    assert [len(list((store / name).glob("*.zarr"))) for name in ("factors", "grams", "rows")] == [1, 0, 0]
    # another matrix is another factor, whatever its row numbers
    KernelRidge(kernel="precomputed", alpha=0.1, tile_size=TILE, store=store).fit(rbf_kernel(XK, gamma=0.1), YK)
    assert len(list((store / "factors").glob("*.zarr"))) == 2


def spoiled(place: tuple[int, int], value: float) -> np.ndarray:
    matrix = K.copy()
    matrix[place] = value
    return matrix


BAD_MATRICES: dict[str, tuple[np.ndarray, str]] = {
    "not square": (K[:, :-1], r"\(250, 249\)"),
    "NaN below the diagonal": (spoiled((200, 3), np.nan), "row 200, column 3"),
    "infinity above the diagonal": (spoiled((3, 200), np.inf), "row 3, column 200"),
    "not symmetric": (spoiled((240, 70), 0.5), r"entry \(240, 70\) is 0\.5, its mirror image"),
    "not symmetric in the last tile": (spoiled((249, 248), -0.1), r"entry \(249, 248\) is -0\.1"),
}


@pytest.mark.parametrize("name", ["array", "dask", ".npy"])
@pytest.mark.parametrize("case", BAD_MATRICES)
def test_bad_matrices(case: str, name: str, tmp_path: Path) -> None:
    matrix, message = BAD_MATRICES[case]
    store = tmp_path / "store"
    for given in ({}, {"tile_size": TILE, "store": store}):
        estimator = KernelRidge(kernel="precomputed", **given)
        with pytest.raises(DataError, match=message) as error:
            estimator.fit(MATRIX_FORMS[name](tmp_path, matrix), YK)
        assert isinstance(error.value, ValueError)
        assert not store.exists()
