"""Arrays that callers hand over: read as they are meant or refused, never changed, and theirs to change afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.metrics import r2_score

import dkrr
from dkrr.errors import DataError, ParameterError

N = 40


@pytest.fixture
def rows() -> tuple[Any, Any, Any]:
    """X (n, 3), y (n,) and weights (n,), in the form that needs no conversion."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((N, 3)), rng.standard_normal(N), rng.uniform(0.5, 2.0, N)


@pytest.mark.parametrize("options", [{}, {"tile_size": 16}])
def test_weights_are_numbers_and_all_there(options: dict[str, Any], rows: tuple[Any, Any, Any]) -> None:
    X, y, w = rows
    estimator = dkrr.KernelRidge(kernel="rbf", **options)
    with pytest.raises(DataError, match="sample_weight is nan in row 2"):
        estimator.fit(X, y, np.ma.masked_array(w, mask=np.arange(N) == 2))
    for wrong in (np.arange(N).astype("M8[D]"), np.arange(N).astype("m8[s]"), w.astype(str), w.astype(complex)):
        with pytest.raises(DataError, match="sample_weight has dtype"):
            estimator.fit(X, y, wrong)
    whole = estimator.fit(X, y, np.ma.masked_array(w)).predict(X)
    assert np.array_equal(whole, estimator.fit(X, y, pd.Series(w)).predict(X))


@pytest.mark.parametrize("kind", ["M8[D]", "m8[s]", str, complex, "text in objects"])
def test_a_mask_makes_no_numbers_of_what_are_none(kind: Any, rows: tuple[Any, Any, Any], tmp_path: Path) -> None:
    X, y, _ = rows
    given = (
        np.arange(N).astype(str).astype(object) if isinstance(kind, str) and " " in kind else np.arange(N).astype(kind)
    )
    values, table = np.ma.masked_array(given), np.ma.masked_array(np.column_stack([given] * 3))
    estimator = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    for use in (
        lambda: dkrr.KernelRidge().fit(X, values),
        lambda: dkrr.KernelRidge(tile_size=16).fit(table, y),
        lambda: estimator.fit(X, y, values),
        lambda: estimator.predict(table),
        lambda: estimator.score(X, values),
        lambda: dkrr.ingest(table, tmp_path / "d.zarr"),
    ):
        with pytest.raises((DataError, ValueError, TypeError)):
            use()


class Variable:
    """What netCDF4 reads: an array with a mask, from something that is no array."""

    def __init__(self, values: Any) -> None:
        self.values, self.shape, self.ndim, self.dtype = values, values.shape, values.ndim, values.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


def test_what_is_masked_in_a_variable_of_a_file_is_missing(rows: tuple[Any, Any, Any], tmp_path: Path) -> None:
    X, y, w = rows
    covered = np.ma.masked_array(X, mask=np.arange(N)[:, None] == [2, -1, -1])
    np.save(tmp_path / "X.npy", X)
    uses = {
        "X": lambda: dkrr.ingest(Variable(covered), tmp_path / "d.zarr", y=y),
        "y": lambda: dkrr.ingest(X, tmp_path / "d.zarr", y=Variable(hidden(y))),
        "weight": lambda: dkrr.ingest(X, tmp_path / "d.zarr", y=y, sample_weight=Variable(hidden(w))),
        "y of a fit": lambda: dkrr.KernelRidge(store=tmp_path / "s").fit(str(tmp_path / "X.npy"), Variable(hidden(y))),
    }
    for use in uses.values():
        with pytest.raises(DataError, match="nan"):
            use()
    found = dkrr.ingest(Variable(covered), tmp_path / "d.zarr", y=y, missing="drop")
    assert found.num_dropped == 1


def hidden(values: Any, at: int = 2) -> Any:
    """A copy in which one value (of each column) is masked."""
    return np.ma.masked_array(
        np.array(values), mask=np.zeros(np.shape(values), bool) | (np.arange(N) == at)[: len(values)]
    )


def test_what_is_masked_is_missing_wherever_it_is_given(rows: tuple[Any, Any, Any], tmp_path: Path) -> None:
    X, y, w = rows
    covered = np.ma.masked_array(X, mask=np.zeros(X.shape, bool))
    covered[2, 1] = np.ma.masked
    fitted = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    machine = dkrr.KernelSVC().fit(X, y > 0)
    fitted.save(tmp_path / "model.zarr")
    model = dkrr.load_model(tmp_path / "model.zarr")
    in_row_2: dict[str, Callable[[], object]] = {
        "X in a list to a model": lambda: model.predict(list(covered)),
        "X in a list for deviations": lambda: model.predict_std(list(covered)),
        "weights of a score of classes": lambda: machine.score(X, y > 0, hidden(w)),
        "X in a list": lambda: dkrr.KernelRidge().fit(list(covered), y),
        "X in a list, in tiles": lambda: dkrr.KernelRidge(tile_size=16).fit(tuple(covered), y),
        "X in a list to predict": lambda: fitted.predict(list(covered)),
        "X in a list for a data set": lambda: dkrr.ingest(list(covered), tmp_path / "data.zarr"),
        "targets of a score": lambda: fitted.score(X, hidden(y)),
        "targets in a list of a score": lambda: fitted.score(X, list(hidden(y))),
        "weights of a score": lambda: fitted.score(X, y, hidden(w)),
    }
    for name, use in in_row_2.items():
        with pytest.raises(DataError, match=r"(?i)nan.* row 2"):
            pytest.fail(f"{name}: {use()}")
    assert [path.name for path in tmp_path.iterdir()] == ["model.zarr"]
    for covered_rows in ((covered, X), (X, covered)):
        with pytest.raises(DataError, match="under a mask"):
            dkrr.kernels.make_kernel("rbf", gamma=1.0)(*covered_rows)
    numbers = np.arange(N)
    for split in (
        (hidden(numbers[:20]), numbers[20:]),
        (numbers[:20], hidden(numbers[20:])),
        (hidden(numbers < 9), numbers > 8),
    ):
        with pytest.raises(DataError, match="fold 1 of cv has masked"):
            dkrr.KernelRidgeCV(kernel="rbf", cv=[(numbers[:10], numbers[10:]), split]).fit(X, y)


def test_a_score_is_that_of_the_targets_and_weights_of_its_rows(rows: tuple[Any, Any, Any]) -> None:
    X, y, w = rows
    fitted = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    predicted = fitted.predict(X)
    assert fitted.score(X, y, w) == r2_score(y, predicted, sample_weight=w)
    assert fitted.score(X, y[:, None]) == fitted.score(X, pd.Series(y)) == r2_score(y, predicted)
    for targets in (y[:-1], np.column_stack([y, y]), np.where(y > 1, np.nan, y), y.astype(str)):
        with pytest.raises(DataError, match="y"):
            fitted.score(X, targets)


def test_parameters_are_not_uncovered(rows: tuple[Any, Any, Any]) -> None:
    X, y, _ = rows
    masked = np.ma.masked_array([0.1], mask=[True])
    with pytest.raises(ParameterError, match=r"(?s)alpha is .*finite values"):
        dkrr.KernelRidge(alpha=masked).fit(X, y)
    with pytest.raises(ParameterError, match=r"(?s)alpha.* is .*finite values"):
        dkrr.KernelRidgeCV(alphas=masked).fit(X, y)
    fitted = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    for wrong in (masked, "a", np.array(["0.1"])):
        with pytest.raises(ParameterError, match="sigma2 is"):
            fitted.predict(X, return_std=True, sigma2=wrong)


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda: np.empty(N, np.uint8), "uint8"),
        (lambda: np.empty(N, bool), "bool"),
        (lambda: np.empty(N, object), "object"),
        (lambda: np.empty(N, complex), "complex128"),
        (lambda: np.empty(N, np.float16), "float16"),
        (lambda: np.ma.masked_array(np.empty(N), mask=True), "MaskedArray"),
        (lambda: [0.0] * N, "list"),
        (lambda: np.broadcast_to(0.0, N), "read-only"),
        (lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (N,), (0,)), "more than once"),
    ],
)
def test_predictions_go_only_where_each_has_a_place(
    make: Callable[[], Any], seen: str, rows: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    X, y, _ = rows
    dkrr.KernelRidge(kernel="rbf").fit(X, y).save(tmp_path / "m.zarr")
    model = dkrr.load_model(tmp_path / "m.zarr")
    with pytest.raises(ParameterError, match=f"out .*{seen}.* expected"):
        model.predict(X, out=make())


@pytest.mark.parametrize("dtype", ["f4", ">f8"])
@pytest.mark.parametrize("step", [1, 2, -1])
def test_predictions_in_any_array_of_floats(dtype: str, step: int, rows: tuple[Any, Any, Any], tmp_path: Path) -> None:
    X, y, _ = rows
    dkrr.KernelRidge(kernel="rbf").fit(X, y).save(tmp_path / "m.zarr")
    model = dkrr.load_model(tmp_path / "m.zarr")
    out = np.empty(N * abs(step), dtype)[::step]
    assert model.predict(X, out=out) is out
    assert np.allclose(out, model.predict(X), rtol=1e-6)


def test_predictions_that_out_cannot_hold_are_not_infinite(rows: tuple[Any, Any, Any], tmp_path: Path) -> None:
    X, y, _ = rows
    dkrr.KernelRidge(kernel="rbf").fit(X, 1e60 * y).save(tmp_path / "m.zarr")
    with pytest.raises(ParameterError, match="beyond the range of out, float32"):
        dkrr.load_model(tmp_path / "m.zarr").predict(X, out=np.empty(N, np.float32))


@pytest.mark.filterwarnings("ignore:A column-vector y")
@pytest.mark.parametrize("dtype", ["Int64", "int64[pyarrow]", "int64"])
@pytest.mark.parametrize("form", ["series", "frame", "dask frame"])
def test_whole_numbers_beyond_doubles_are_classes_of_their_own(
    form: str, dtype: str, rows: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    X, labels = rows[0], pd.Series(np.tile([2**60 + 1, 2**60 + 2, 5, 5], N // 4), dtype=dtype)
    classes = [5, 2**60 + 1, 2**60 + 2]
    if form == "dask frame":
        frame = dd.from_pandas(pd.DataFrame({"a": X[:, 0], "y": labels.astype("int64")}), npartitions=3)
        assert dkrr.ingest(frame, tmp_path / "data.zarr", target="y", one_hot=True).classes == tuple(classes)
        return
    y = labels if form == "series" else pd.DataFrame({"y": labels})
    machine = dkrr.KernelSVC().fit(X, y)
    assert machine.classes_.tolist() == classes
    assert machine.score(X, y) == machine.score(X, labels.to_numpy("int64"))


def _answers(estimator: Any, Z: Any, folder: Path) -> list[Any]:
    """All that a fitted estimator says, also as a copy and once it is saved."""
    estimator.save(folder, overwrite=True)
    found = [estimator.predict(Z), dkrr.load_model(folder).predict(Z), pickle.loads(pickle.dumps(estimator)).predict(Z)]
    if estimator.solver != "nystrom":
        found.append(estimator.leave_one_out().residuals)
    if estimator.solver == "auto" and estimator.kernel != "precomputed":
        found += estimator.predict(Z, return_std=True)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"kernel": "rbf"},
        {"kernel": "rbf", "tile_size": 16},
        {"kernel": "rbf", "solver": "cg"},
        {"kernel": "rbf", "solver": "nystrom", "solver_params": {"num_centers": 10}},
        {"kernel": "linear", "solver": "primal"},
        {"kernel": "precomputed"},
        {"kernel": "precomputed", "tile_size": 16},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["array", "frame", "fortran"])
def test_arrays_that_change_after_a_fit_do_not_change_it(
    options: dict[str, Any], form: str, rows: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    X, y, w = rows
    Z = X + 0.1
    if options["kernel"] == "precomputed":
        X = X @ X.T + np.eye(N)
        Z = X
    Z = Z.copy()
    given = {"array": X, "frame": pd.DataFrame(X, copy=False), "fortran": np.asfortranarray(X)}[form]
    targets, weights = (pd.Series(y, copy=False), pd.Series(w, copy=False)) if form == "frame" else (y, w)
    wanted = _answers(dkrr.KernelRidge(**options).fit(X.copy(), y.copy(), w.copy()), Z, tmp_path / "wanted.zarr")
    estimator = dkrr.KernelRidge(**options).fit(given, targets, weights)
    for array in (X, y, w) if form != "fortran" else (given, y, w):
        array *= 3.0
        array += 1.0
    found = _answers(estimator, Z, tmp_path / "found.zarr")
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_many_rows_of_a_primal_fit_are_not_copied_and_not_taken_for_others(
    rows: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.models.estimator.IN_MEMORY_BYTES", 8 * N)
    X, y, _ = rows
    estimator = dkrr.KernelRidge(kernel="linear", solver="primal").fit(X, y)
    assert np.shares_memory(estimator.X_fit_, X)
    before, residuals = estimator.predict(X), estimator.leave_one_out().residuals
    kept = X.copy()
    X[3, 1] += 1.0
    assert np.array_equal(estimator.predict(kept), before)
    with pytest.raises(DataError, match=r"X .*changed since the fit"):
        estimator.leave_one_out()
    X[...] = kept
    assert np.array_equal(estimator.leave_one_out().residuals, residuals)


def scaled(A: Any, B: Any, scale: Any) -> Any:
    """A kernel with an array as its parameter."""
    return (A * scale) @ B.T + 1.0


@pytest.mark.parametrize("solver", ["auto", "nystrom"])
def test_parameters_of_a_kernel_function_are_those_of_the_fit(solver: str, rows: tuple[Any, Any, Any]) -> None:
    X, y, _ = rows
    scale = [1.0, 2.0, 3.0] if solver == "nystrom" else np.array([1.0, 2.0, 3.0])
    estimator = dkrr.KernelRidge(kernel=scaled, kernel_params={"scale": scale}, solver=solver).fit(X, y)
    wanted = estimator.predict(X)
    scale[0] = 5.0
    assert np.array_equal(estimator.predict(X), wanted)


ESTIMATORS = {
    "in memory": dkrr.KernelRidge(kernel="rbf"),
    "tiles": dkrr.KernelRidge(kernel="rbf", tile_size=16),
    "cg": dkrr.KernelRidge(kernel="rbf", solver="cg"),
    "nystrom": dkrr.KernelRidge(kernel="rbf", solver="nystrom", solver_params={"num_centers": 10}),
    "primal": dkrr.KernelRidge(solver="primal"),
    "folds": dkrr.KernelRidgeCV(kernel="rbf", cv=3),
    "score": dkrr.KernelRidgeCV(kernel="rbf", scoring="r2"),
    "path": dkrr.KernelRidgeCV(kernel="rbf", tile_size=16),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_target_that_is_missing_is_named(name: str, rows: tuple[Any, Any, Any]) -> None:
    X, y, _ = rows
    for missing in (None, np.nan, np.inf):
        targets = y.astype(object)
        targets[3] = missing
        with pytest.raises(DataError, match=r"input y has 1 value that is NaN or infinity; .* at row 3"):
            clone(ESTIMATORS[name]).fit(X, targets)
    clone(ESTIMATORS[name]).fit(X, y.astype(object))


@pytest.mark.parametrize("name", [*ESTIMATORS, "on disk", "on disk, precomputed"])
def test_targets_whose_squares_are_no_numbers_are_refused(
    name: str, rows: tuple[Any, Any, Any], tmp_path: Path
) -> None:
    X, y, _ = rows
    given: Any = X
    estimator = ESTIMATORS["tiles"] if name.startswith("on disk") else ESTIMATORS[name]
    if name.startswith("on disk"):
        np.save(tmp_path / "X.npy", X @ X.T + np.eye(N) if "precomputed" in name else X)
        given = str(tmp_path / "X.npy")
    estimator = clone(estimator).set_params(kernel="precomputed" if "precomputed" in name else estimator.kernel)
    for factor in (1e-170, 1e160):
        targets = np.column_stack([y, np.zeros(N), factor * y])
        with pytest.raises(DataError, match=r"target 2 is of size .*, whose squares"):
            estimator.fit(given, targets)
    estimator.fit(given, 1e-100 * y)


def test_sizes_of_targets_do_not_matter(rows: tuple[Any, Any, Any]) -> None:
    X, y, _ = rows
    for size in (1e-130, 1e130):
        small, wanted = (dkrr.KernelRidgeCV([100, 1, 0.01, 0.1], kernel="rbf").fit(X, s * y) for s in (size, 1.0))
        assert small.alpha_ == wanted.alpha_
        for one, other in zip(small.predict(X, return_std=True), wanted.predict(X, return_std=True), strict=True):
            np.testing.assert_allclose(one, other * size, rtol=1e-10)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tol": "x"}, "tol = 'x'"),
        ({"tol": None}, "tol = None"),
        ({"tol": np.array([1e-3])}, "tol = "),
        ({"max_iter": "x"}, "max_iter = 'x'"),
        ({"max_iter": 2.5}, "max_iter = 2.5"),
        ({"max_iter": True}, "max_iter = True"),
    ],
    ids=str,
)
def test_limits_of_iterations_are_numbers(wrong: dict[str, Any], message: str, rows: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ParameterError, match=message):
        dkrr.KernelRidge(**wrong).fit(*rows[:2])


WRONG: dict[str, Callable[[Any, Any, Path], object]] = {
    "warm_start is 'yes'": lambda X, y, _: dkrr.KernelRidge(warm_start="yes").fit(X, y),  # type: ignore[arg-type]
    "kernel_params is 'x'": lambda X, y, _: dkrr.KernelRidge(kernel="rbf", kernel_params="x").fit(X, y),  # type: ignore[arg-type]
    "kernel_params is 3": lambda X, y, _: dkrr.make_kernel("rbf", kernel_params=3),  # type: ignore[arg-type]
    "store is True": lambda X, y, _: dkrr.KernelRidge(store=True).fit(X, y),
    "store is ''": lambda X, y, _: dkrr.KernelRidgeCV(store="").fit(X, y),
    "store is b'x'": lambda X, y, _: dkrr.gram_matrix(X, store=b"x"),
    "scoring is 'x'": lambda X, y, _: dkrr.KernelRidgeCV(scoring="x").fit(X, y),
    "scoring is 3": lambda X, y, _: dkrr.KernelRidgeCV(scoring=3, tile_size=16).fit(X, y),
    "return_std is 'x'": lambda X, y, _: dkrr.KernelRidge().fit(X, y).predict(X, return_std="x"),  # type: ignore[arg-type]
    "noise is 'x'": lambda X, y, _: dkrr.KernelRidge().fit(X, y).predict(X, True, noise="x"),  # type: ignore[arg-type]
    "tile_size is 'auto'": lambda X, y, path: dkrr.gram_matrix(X, store=path / "s", tile_size="auto"),  # type: ignore[arg-type]
    "tile_size is 1.5": lambda X, y, path: dkrr.gram_matrix(X, store=path / "s", tile_size=1.5),  # type: ignore[arg-type]
    "tile_size is 0": lambda X, y, path: dkrr.gram_matrix(X, store=path / "s", tile_size=0),
    "features is 1.5": lambda X, y, path: dkrr.ingest(X, path / "d", features=1.5),  # type: ignore[arg-type]
    "rows_per_chunk is 1.5": lambda X, y, path: dkrr.ingest(X, path / "d", rows_per_chunk=1.5),  # type: ignore[arg-type]
    "path is None": lambda X, y, _: dkrr.KernelRidge().fit(X, y).save(None),
    "path is 3": lambda X, y, _: dkrr.load_model(3),
    "path is ''": lambda X, y, _: dkrr.open_dataset(""),
    "dest is None": lambda X, y, _: dkrr.ingest(X, None),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_no_value_of_a_parameter_is_named(
    said: str, rows: tuple[Any, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParameterError, match=said):
        WRONG[said](*rows[:2], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_other_parameters_are_numbers_and_labels(rows: tuple[Any, Any, Any]) -> None:
    X, y, _ = rows
    fitted = dkrr.KernelRidge(kernel="rbf").fit(X, y)
    for wrong in ("x", None, [0.9], True, np.nan):
        with pytest.raises(ParameterError, match="coverage is"):
            fitted.predict_interval(X, coverage=wrong)  # type: ignore[arg-type]
    labels = np.array(["a", "b"] * (N // 2), dtype=object)
    dkrr.KernelRidgeCV(kernel="rbf", cv=labels).fit(X, y)
    for missing in (None, np.nan):
        labels[3] = missing
        with pytest.raises(DataError, match="cv has labels"):
            dkrr.KernelRidgeCV(kernel="rbf", cv=labels).fit(X, y)
    with pytest.raises(DataError, match="cv has labels"):
        dkrr.KernelRidgeCV(kernel="rbf", cv=np.ma.masked_array(np.arange(N) % 4, mask=np.arange(N) == 3)).fit(X, y)
    with pytest.raises(DataError, match="cv has labels"):
        dkrr.KernelRidgeCV(kernel="rbf", cv=np.where(np.arange(N) == 3, np.nan, np.arange(N) % 4)).fit(X, y)


@pytest.mark.parametrize("form", ["csr_matrix", "csc_matrix", "coo_matrix", "csr_array", "coo_array"])
def test_a_model_predicts_sparse_rows_as_its_estimator_does(form: str, tmp_path: Path) -> None:
    from scipy import sparse

    rng = np.random.default_rng(0)
    X = rng.random((300, 3)) * (rng.random((300, 3)) < 0.5)
    path = dkrr.KernelRidge(0.1, kernel="rbf", tile_size=128).fit(X, X.sum(axis=1)).save(tmp_path / "m.zarr")
    model = dkrr.load_model(tmp_path / "m.zarr")
    np.testing.assert_array_equal(model.predict(getattr(sparse, form)(X)), model.predict(X), err_msg=str(path))


def test_kernels_are_added_by_sum() -> None:
    one, two = dkrr.make_kernel("rbf", gamma=1.0), dkrr.make_kernel("linear")
    assert sum([one, two]) == one + two
