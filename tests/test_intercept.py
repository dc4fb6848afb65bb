"""The estimator with an intercept: every solver, every way in and out, and how it differs from a constant feature."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import cross_val_score

import dkrr
from dkrr import KernelRidge, load_model
from dkrr.errors import ParameterError, StoreError
from dkrr.store.files import read_json, write_json
from tests.reference import dense_bordered

RNG = np.random.default_rng(5)
N = 300
X = RNG.standard_normal((N, 4))
Y = np.stack([np.sin(X[:, 0]) + X[:, 1] * X[:, 2] + 9, X[:, 3] ** 2 - 40], axis=1) + 0.05 * RNG.standard_normal((N, 2))
Z = RNG.standard_normal((50, 4))
WEIGHT = RNG.uniform(0.2, 2, N) * (np.arange(N) % 7 > 0)
RBF: dict[str, Any] = {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1, "fit_intercept": True}
KERNEL = dkrr.make_kernel("rbf", gamma=0.2)

# options of each way, and how well it meets the dense solve
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "memory": ({}, 1e-10),
    "float32": ({"precision": "float32"}, 1e-4),
    "tiles": ({"tile_size": 90}, 1e-10),
    "mixed": ({"tile_size": 90, "precision": "mixed", "tol": 1e-11}, 1e-8),
    "cg": ({"solver": "cg", "tol": 1e-11}, 1e-8),
    "nystrom": ({"solver": "nystrom", "tol": 1e-11, "solver_params": {"num_centers": 257}}, 1e-7),
}


def expected(weight: np.ndarray | None, alpha: Any = 0.1, y: np.ndarray = Y) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients and predictions at Z of a dense solve."""
    dual_coef, b = dense_bordered(KERNEL(X, X), y, alpha, weight)
    return dual_coef, KERNEL(Z, X) @ dual_coef + b


@pytest.mark.parametrize("way", WAYS)
def test_every_solver(way: str, tmp_path: Path) -> None:
    alpha, (options, tolerance) = [0.1, 4.0], WAYS[way]
    est = KernelRidge(**RBF | {"alpha": alpha}, **options).fit(X, Y, sample_weight=WEIGHT)
    _, predictions = expected(WEIGHT, alpha)
    np.testing.assert_allclose(est.predict(Z), predictions, rtol=0, atol=tolerance)
    assert est.intercept_.shape == (2,)
    one = KernelRidge(**RBF, **options).fit(X, Y[:, 0], sample_weight=WEIGHT)
    assert isinstance(one.intercept_, float)
    assert one.intercept_ == pytest.approx(est.intercept_[0], abs=tolerance)
    assert one.predict(Z).shape == (50,)
    # the model carries it to disk and into dask
    est.save(tmp_path / "model.zarr")
    model = load_model(tmp_path / "model.zarr")
    np.testing.assert_array_equal(model.intercept, est.intercept_)
    np.testing.assert_array_equal(model.predict(Z), est.predict(Z))
    np.testing.assert_allclose(est.predict(da.from_array(Z, chunks=(20, 4))).compute(), est.predict(Z), rtol=1e-13)


@pytest.mark.parametrize("options", [{}, {"tile_size": 90}, {"solver": "cg"}], ids=str)
def test_a_precomputed_matrix(options: dict[str, Any]) -> None:
    est = KernelRidge(alpha=0.1, kernel="precomputed", fit_intercept=True, **options)
    est.fit(KERNEL(X, X), Y, sample_weight=WEIGHT)
    np.testing.assert_allclose(est.predict(KERNEL(Z, X)), expected(WEIGHT)[1], rtol=0, atol=1e-6)


def test_without_one_nothing_is_added() -> None:
    est = KernelRidge(**RBF | {"fit_intercept": False}).fit(X, Y)
    assert est.intercept_ == 0.0
    assert est._model.intercept is None
    assert "intercept" not in est._model._attributes()


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_what_is_neither_true_nor_false_is_refused(value: Any) -> None:
    with pytest.raises(ParameterError, match=r"fit_intercept is .*; True or False expected"):
        KernelRidge(fit_intercept=value).fit(X, Y)


def test_copies_and_searches_keep_it() -> None:
    est = KernelRidge(**RBF)
    assert clone(est).get_params()["fit_intercept"] is True
    est.fit(X, Y)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(est)).predict(Z), est.predict(Z))
    far = Y[:, 0] + 1000
    assert cross_val_score(est, X, far).min() > 0.9
    assert cross_val_score(est.set_params(fit_intercept=False), X, far).max() < 0.9


@pytest.mark.parametrize("options", [{"solver": "cg"}, {"precision": "mixed", "tile_size": 90}], ids=str)
def test_a_warm_start_begins_where_the_last_fit_ended(options: dict[str, Any]) -> None:
    est = KernelRidge(**RBF, **options, warm_start=True).fit(X[:280], Y[:280])
    assert est.fit(X[:280], Y[:280]).solution_.num_iterations == 0
    est.fit(X, Y)
    np.testing.assert_allclose(est.predict(Z), expected(None)[1], rtol=0, atol=1e-5)


def test_rows_on_disk_and_workers(tmp_path: Path, cluster_client: Any) -> None:
    data = dkrr.ingest(X, tmp_path / "rows.zarr", y=Y, sample_weight=WEIGHT)
    found = {}
    for name, options in {"cholesky": {}, "cg": {"solver": "cg", "tol": 1e-11}}.items():
        est = KernelRidge(**RBF, **options, tile_size=90, store=str(tmp_path / "store")).fit(data)
        found[name] = est.predict(Z)
    assert est.predict(data).shape == (N, 2)
    np.testing.assert_allclose(found["cholesky"], expected(WEIGHT)[1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(found["cg"], expected(WEIGHT)[1], rtol=0, atol=1e-8)
    single = {"solver": "nystrom", "tol": 1e-11, "solver_params": {"num_centers": 257}}
    est = KernelRidge(**RBF, **single).fit(data)
    np.testing.assert_allclose(est.predict(Z), expected(WEIGHT)[1], rtol=0, atol=1e-7)


def test_a_saved_intercept_is_checked(tmp_path: Path) -> None:
    est = KernelRidge(**RBF).fit(X, Y)
    path = tmp_path / "model.zarr"
    est.save(path)
    document: Any = read_json(str(path), "zarr.json")
    assert document["attributes"]["format_version"] == 1
    document["attributes"]["intercept"] = [1.0]
    write_json(str(path), "zarr.json", document)
    with pytest.raises(StoreError, match=r"intercept has shape \(1,\), \(2,\) expected"):
        load_model(path, verify=False)
    # as models were written before there were intercepts
    del document["attributes"]["intercept"]
    write_json(str(path), "zarr.json", document)
    assert load_model(path, verify=False).intercept is None


# --- what an intercept is ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("alpha", [1e-5, 1e5])
def test_ones_are_predicted_as_one_whatever_alpha_and_weights(way: str, alpha: float) -> None:
    # alone, and beside a target that is not constant
    weight = 10.0 ** RNG.uniform(-2, 2, N) * (np.arange(N) % 7 > 0)
    y = np.column_stack([np.ones(N), Y[:, 0]])
    parameters = {} if way in ("memory", "float32", "tiles") else {"allow_unconverged": True}
    options = WAYS[way][0] | {"tol": 1e-6, "max_iter": 30}
    options["solver_params"] = options.get("solver_params", {}) | parameters
    est = KernelRidge(**RBF | {"alpha": alpha, "gamma": 2.0}, **options).fit(X, y, sample_weight=weight)
    assert np.abs(est.predict(Z)[:, 0] - 1).max() < 1e-10
    assert est.intercept_[0] == pytest.approx(1, abs=1e-14)


def test_an_intercept_is_not_shrunk_and_the_weight_of_a_constant_feature_is() -> None:
    """With a linear kernel: the intercept is that of ridge regression; Welling's bias is the weight of a feature."""
    y = X @ np.array([1.0, -2.0, 0.5, 0.0]) + 9.0
    ones = np.hstack([X, np.ones((N, 1))])
    for alpha in (1e-3, 10.0, 1e3, 1e9):
        ridge = Ridge(alpha=alpha).fit(X, y, sample_weight=WEIGHT)
        est = KernelRidge(alpha=alpha, kernel="linear", fit_intercept=True).fit(X, y, sample_weight=WEIGHT)
        assert est.intercept_ == pytest.approx(ridge.intercept_, rel=1e-9)
        np.testing.assert_allclose(est.predict(Z), ridge.predict(Z), rtol=1e-8)
        shrunk = Ridge(alpha=alpha, fit_intercept=False).fit(ones, y, sample_weight=WEIGHT)
        bias = KernelRidge(alpha=alpha, kernel="linear").fit(ones, y, sample_weight=WEIGHT)
        there = np.hstack([Z, np.ones((50, 1))])
        np.testing.assert_allclose(bias.predict(there), shrunk.predict(there), rtol=1e-7, atol=1e-12)
    mean = WEIGHT @ y / WEIGHT.sum()
    # the last, largest alpha leaves nothing but the constant: all of it, or nearly nothing
    assert est.predict(Z[:1])[0] == pytest.approx(mean, rel=1e-5)
    assert abs(bias.predict(there[:1])[0]) < 1e-5
    # for a small alpha the two agree: there is hardly a penalty
    small = [
        KernelRidge(alpha=1e-6, kernel="linear", fit_intercept=True).fit(X, y).intercept_,
        float(KernelRidge(alpha=1e-6, kernel="linear").fit(ones, y).dual_coef_.sum()),
    ]
    np.testing.assert_allclose(small, 9.0, rtol=1e-6)
