"""Support vector machines, logistic, quantile and Huber regression as scikit-learn and people use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cvxpy
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from sklearn.base import clone
from sklearn.metrics import d2_pinball_score
from sklearn.metrics.pairwise import pairwise_kernels, rbf_kernel
from sklearn.svm import SVC
from sklearn.utils import get_tags
from sklearn.utils.class_weight import compute_sample_weight

from dkrr import (
    ConvergenceError,
    DataError,
    DkrrError,
    KernelHuberRegressor,
    KernelLogisticRegression,
    KernelQuantileRegressor,
    KernelRidgeCV,
    KernelSVC,
    KernelSVR,
    ParameterError,
    load_model,
)
from dkrr.cli import main

RNG = np.random.default_rng(0)
N = 48
X = RNG.standard_normal((N, 3))
Z = RNG.standard_normal((17, 3))
Y = np.sin(2 * X[:, 0]) + 0.3 * RNG.standard_normal(N)
TWO = np.where(Y + 0.3 * RNG.standard_normal(N) > 0, "yes", "no")
THREE = np.digitize(X[:, 0] + 0.5 * RNG.standard_normal(N), [-0.5, 0.5]) * 10
WEIGHT = RNG.integers(0, 4, N).astype(float)
TIGHT = 1e-10  # of gaps
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # of two answers with such gaps: f is known to about the root of a gap

CLASSIFIERS = {"svc": KernelSVC(tol=TIGHT), "logistic": KernelLogisticRegression(tol=TIGHT)}
REGRESSORS = {
    "svr": KernelSVR(tol=TIGHT),
    "quantile": KernelQuantileRegressor(quantile=0.3, alpha=0.1, tol=TIGHT),
    "huber": KernelHuberRegressor(epsilon=0.4, alpha=0.1, tol=TIGHT),
}
ALL = CLASSIFIERS | REGRESSORS


def targets(name: str) -> np.ndarray:
    return TWO if name in CLASSIFIERS else Y


def values(estimator: Any, rows: Any = Z) -> np.ndarray:
    """f + b."""
    method = getattr(estimator, "decision_function", estimator.predict)
    return np.asarray(method(rows))


# --- names and shapes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["rbf", "linear", "precomputed"])
def test_two_classes_have_the_shapes_of_svc(kernel: str) -> None:
    rows, new = (rbf_kernel(X), rbf_kernel(Z, X)) if kernel == "precomputed" else (X, Z)
    ours = KernelSVC(kernel=kernel, gamma="auto", tol=TIGHT).fit(rows, TWO)
    theirs = SVC(kernel=kernel, gamma="auto", tol=1e-10).fit(rows, TWO)
    for name in ("classes_", "support_", "n_support_", "class_weight_"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for name in ("support_vectors_", "dual_coef_", "intercept_", *(["coef_"] if kernel == "linear" else [])):
        assert getattr(ours, name).shape == getattr(theirs, name).shape
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-3)
    assert hasattr(ours, "coef_") == hasattr(theirs, "coef_")
    np.testing.assert_allclose(ours.decision_function(new), theirs.decision_function(new), atol=1e-3)
    np.testing.assert_array_equal(ours.predict(new), theirs.predict(new))
    assert ours.score(new, theirs.predict(new)) == 1.0
    assert ours.n_features_in_ == rows.shape[1]
    assert set(ours.get_params()) >= {"C", "kernel", "degree", "gamma", "coef0", "tol", "class_weight", "max_iter"}


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_several_classes_are_one_against_the_rest(name: str) -> None:
    estimator = clone(CLASSIFIERS[name]).fit(X, THREE, WEIGHT + 1)
    decision = estimator.decision_function(Z)
    for column, label in enumerate(estimator.classes_):
        alone = clone(CLASSIFIERS[name]).fit(X, label == THREE, WEIGHT + 1)
        np.testing.assert_allclose(decision[:, column], alone.decision_function(Z), **CLOSE)
    np.testing.assert_array_equal(estimator.predict(Z), np.array([0, 10, 20])[np.argmax(decision, axis=1)])
    # support vectors are sorted and counted by class, as SVC's are
    np.testing.assert_array_equal(THREE[estimator.support_], np.repeat([0, 10, 20], estimator.n_support_))
    assert estimator.dual_coef_.shape == (3, len(estimator.support_))


def test_probabilities() -> None:
    two, three = (KernelLogisticRegression(10.0).fit(X, y) for y in (TWO, THREE))
    p = 1 / (1 + np.exp(-two.decision_function(Z)))
    np.testing.assert_allclose(two.predict_proba(Z), np.stack([1 - p, p], axis=1), rtol=1e-12)
    p = 1 / (1 + np.exp(-three.decision_function(Z)))
    np.testing.assert_allclose(three.predict_proba(Z), p / p.sum(axis=1, keepdims=True), rtol=1e-12)
    # far from all rows of a linear fit every probability underflows before it is normalised
    far = KernelLogisticRegression(100.0, kernel="linear").fit(X, THREE).predict_log_proba(1e6 * Z)
    np.testing.assert_allclose(np.logaddexp.reduce(far, axis=1), 0.0, atol=1e-12)


@pytest.mark.parametrize("name", REGRESSORS)
def test_targets_are_columns(name: str) -> None:
    both = clone(REGRESSORS[name]).fit(X, np.stack([Y, X[:, 1]], axis=1), WEIGHT)
    assert both.dual_coef_.shape == (2, len(both.support_))
    for column, y in enumerate((Y, X[:, 1])):
        alone = clone(REGRESSORS[name]).fit(X, y, WEIGHT)
        np.testing.assert_allclose(both.predict(Z)[:, column], alone.predict(Z), **CLOSE)
    assert clone(REGRESSORS[name]).fit(X, Y[:, None]).predict(Z).shape == (17, 1)


def test_quantiles_are_columns() -> None:
    levels = (0.9, 0.1, 0.5)
    options = {"alpha": 0.1, "gamma": 0.1, "tol": TIGHT}
    estimator = KernelQuantileRegressor(quantile=levels, **options).fit(X, Y)
    predicted = estimator.predict(X)
    scores = []
    for column, level in enumerate(levels):
        alone = KernelQuantileRegressor(quantile=level, **options).fit(X, Y)
        np.testing.assert_allclose(predicted[:, column], alone.predict(X), **CLOSE)
        scores.append(d2_pinball_score(Y, predicted[:, column], alpha=level, sample_weight=WEIGHT))
        assert alone.score(X, Y, WEIGHT) == pytest.approx(scores[-1], abs=1e-4)
        # with an intercept the shares of rows below and above are at most q and 1 - q
        assert np.mean(predicted[:, column] > Y + 1e-3) <= level <= np.mean(predicted[:, column] > Y - 1e-3)
    assert estimator.score(X, Y, WEIGHT) == pytest.approx(np.mean(scores))
    assert estimator.num_crossing(X) == np.count_nonzero((np.diff(predicted[:, [1, 2, 0]], axis=1) < 0).any(axis=1))
    assert KernelQuantileRegressor(quantile=(0.5, 0.5, 0.5), alpha=0.1, gamma=0.3).fit(X, Y).num_crossing(X) == 0
    assert not get_tags(estimator).target_tags.multi_output


# --- what the parameters mean ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_weight", ["balanced", {"yes": 3.0}, {"yes": 0.5, "no": 2.0}])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_class_weights_are_weights_of_rows(name: str, class_weight: Any) -> None:
    ours = clone(CLASSIFIERS[name]).set_params(class_weight=class_weight).fit(X, TWO)
    weight = compute_sample_weight(class_weight, TWO)
    expected = clone(CLASSIFIERS[name]).fit(X, TWO, weight)
    np.testing.assert_allclose(values(ours), values(expected), **CLOSE)
    np.testing.assert_allclose(ours.class_weight_[(TWO == "yes").astype(int)], weight)


def test_gamma() -> None:
    rows = 3.0 * X
    for gamma, number in (("scale", 1 / (3 * rows.var())), ("auto", 1 / 3), (None, 1 / 3)):
        found = KernelSVC(gamma=gamma).fit(rows, TWO)._model.kernel
        assert found is not None
        assert found.to_dict()["gamma"] == pytest.approx(number, rel=1e-14)


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_model_holds_support_rows_only_and_is_saved_whole(name: str, tmp_path: Path) -> None:
    estimator = clone(ALL[name]).fit(X, targets(name))
    model, t = estimator._model, len(estimator.dual_coef_)
    assert np.array_equal(model.x_fit.read(0, model.num_rows), X[estimator.support_])
    assert np.array_equal(model.dual_coef.read(0, model.num_rows)[:, -t:], estimator.dual_coef_.T)
    assert (estimator.dual_coef_ != 0).any(axis=0).all()
    estimator.save(tmp_path / "model.zarr")
    saved = load_model(tmp_path / "model.zarr")
    predicted = saved.predict(Z)
    assert np.array_equal(predicted[:, 1] if name in CLASSIFIERS else predicted, values(estimator))
    assert saved.classes == (estimator.classes_.tolist() if name in CLASSIFIERS else None)
    assert saved.solution.certificates[0].gap <= TIGHT
    assert saved.provenance == model.provenance
    assert f"{model.provenance['loss']} loss" in repr(saved)
    assert "duality gap" in CliRunner().invoke(main, ["info", str(tmp_path / "model.zarr")]).output
    with pytest.raises(ParameterError, match="standard deviations are those of the square loss"):
        saved.predict_std(Z)


def test_dask_in_lazy_dask_out() -> None:
    lazy = da.from_array(Z, chunks=(5, 2))
    some = lazy[da.from_array(Z[:, 0] > 0, chunks=5)]  # chunks of unknown size
    for y in (TWO, THREE):
        logistic = KernelLogisticRegression().fit(X, y)
        for method in ("decision_function", "predict", "predict_log_proba"):
            found, expected = getattr(logistic, method)(lazy), getattr(logistic, method)(Z)
            assert isinstance(found, da.Array)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            same = np.testing.assert_array_equal if method == "predict" else np.testing.assert_allclose
            same(found.compute(), expected)
            same(getattr(logistic, method)(some).compute(), expected[Z[:, 0] > 0])


# --- where the work runs, and what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_what_did_not_converge_is_an_error_unless_allowed(name: str) -> None:
    estimator = clone(ALL[name]).set_params(max_iter=1, gamma=2.0, tol=1e-20)
    with pytest.raises(ConvergenceError, match="duality gap"):
        estimator.fit(X, targets(name))
    estimator.set_params(solver_params={"allow_unconverged": True}).fit(X, targets(name))
    assert not estimator.solution_.converged
    assert "NOT converged" in repr(estimator.solution_)
    assert np.isfinite(values(estimator)).all()


def missing(value: Any) -> np.ndarray:
    labels = TWO.astype(object)
    labels[3] = value
    return labels


def missing_number(array: np.ndarray, place: Any) -> np.ndarray:
    array = array.copy()
    array[place] = np.nan
    return array


ZERO_CLASS = np.where(TWO == "no", 0.0, 1.0)
BAD: dict[str, tuple[Any, tuple[Any, ...], type[DkrrError], str]] = {
    "one class": (KernelSVC(), (X, ["yes"] * N), DataError, "y has one class, 'yes'; at least two"),
    "label NaN": (KernelSVC(), (X, missing(np.nan)), DataError, "the label in row 3 of y is nan"),
    "label None": (KernelSVC(), (X, missing(None)), DataError, "the label in row 3 of y is None"),
    "label NA": (KernelSVC(), (X, missing(pd.NA)), DataError, "the label in row 3 of y is <NA>"),
    "label masked": (KernelSVC(), (X, np.ma.masked_equal(THREE, THREE[0])), DataError, "the label in row 0 of y is"),
    "number NaN": (KernelSVC(), (X, missing_number(THREE * 1.0, 3)), DataError, "the label in row 3"),
    "fractions": (KernelSVC(), (X, Y), DataError, "Unknown label type: continuous"),
    "two labels a row": (KernelSVC(), (X, np.c_[TWO, TWO]), DataError, "y should be a 1d array"),
    "C zero": (KernelSVC(C=0.0), (X, TWO), ParameterError, "C is 0.0; a finite number above 0"),
    "C negative": (KernelSVR(C=-1), (X, Y), ParameterError, "C is -1; a finite number above 0"),
    "C text": (KernelLogisticRegression(C="1"), (X, TWO), ParameterError, "C is '1'; a finite number"),
    "C infinite": (KernelSVC(C=np.inf), (X, TWO), ParameterError, "C is inf; a finite number"),
    "C several": (KernelSVC(C=[1.0, 2.0]), (X, TWO), ParameterError, r"C is \[1.0, 2.0\]; a finite number"),
    "C too large": (KernelSVC(C=1e308), (X, TWO, 100 * WEIGHT), DataError, "beyond float64"),
    "alpha zero": (KernelHuberRegressor(alpha=0), (X, Y), ParameterError, "alpha is 0; a finite number above 0"),
    "alpha negative": (KernelQuantileRegressor(alpha=-1), (X, Y), ParameterError, "alpha is -1; a finite number"),
    "quantile 0": (KernelQuantileRegressor(quantile=0.0), (X, Y), ParameterError, "quantile = 0.0; a number between"),
    "quantile 1": (KernelQuantileRegressor(quantile=[0.5, 1.0]), (X, Y), ParameterError, "quantile = 1.0; a number"),
    "no quantile": (KernelQuantileRegressor(quantile=[]), (X, Y), ParameterError, "at least one number between"),
    "quantiles and targets": (
        KernelQuantileRegressor(quantile=[0.1, 0.9]), (X, np.c_[Y, Y]), DataError, r"shape \(48, 2\) for a sequence"
    ),
    "epsilon negative": (KernelSVR(epsilon=-0.1), (X, Y), ParameterError, "epsilon = -0.1; a number of at least 0"),
    "epsilon zero": (KernelHuberRegressor(epsilon=0), (X, Y), ParameterError, "epsilon = 0; a number above 0"),
    "loss unknown": (KernelSVC(loss="logistic"), (X, TWO), ParameterError, "'hinge' or 'squared_hinge' expected"),
    "loss of others": (KernelSVR(loss="hinge"), (X, Y), ParameterError, "'epsilon_insensitive' or"),
    "weights zero": (KernelSVC(), (X, TWO, np.zeros(N)), DataError, "all sample weights are zero"),
    "weights zero, regression": (KernelSVR(), (X, Y, np.zeros(N)), DataError, "all sample weights are zero"),
    "a class without weight": (KernelSVC(), (X, TWO, ZERO_CLASS), DataError, "the weights of class 'no' are all zero"),
    "balanced without weight": (
        KernelSVC(class_weight="balanced"), (X, TWO, ZERO_CLASS), DataError, "the weights of class 'no' are all zero"
    ),
    "weights negative": (KernelSVC(), (X, TWO, WEIGHT - 1), DataError, "sample_weight is -1.0 in row"),
    "class weight zero": (KernelSVC(class_weight={"no": 0}), (X, TWO), DataError, "the weights of class 'no'"),
    "class weight negative": (KernelSVC(class_weight={"no": -1}), (X, TWO), ParameterError, "of at least 0"),
    "class weight unknown": (KernelSVC(class_weight="auto"), (X, TWO), ParameterError, "'balanced', a dict of class"),
    "class weight of no class": (KernelSVC(class_weight={"x": 1}), (X, TWO), ParameterError, "not in class_weight"),
    "X NaN": (KernelSVR(), (missing_number(X, (5, 2)), Y), DataError, "at row 5, column 2"),
    "y NaN": (KernelSVR(), (X, missing_number(Y, 5)), DataError, "input y has 1 value"),
    "y text": (KernelSVR(), (X, TWO), DataError, "y has dtype <U3; numbers expected"),
    "X on disk": (KernelSVC(), (da.from_array(X), TWO), DataError, "X is of type Array; rows in memory expected"),
    "not square": (KernelSVC(kernel="precomputed"), (X, TWO), DataError, r"shape \(48, 3\); a square one"),
    "not symmetric": (KernelSVC(kernel="precomputed"), (RNG.random((N, N)), TWO), DataError, "not symmetric"),
    "negative features": (KernelSVC(kernel="chi2"), (X, TWO), DataError, "Negative values in data"),
    "kernel unknown": (KernelSVC(kernel="rbff"), (X, TWO), ParameterError, "did you mean 'rbf'"),
    "gamma unknown": (KernelSVC(gamma="scaled"), (X, TWO), ParameterError, "gamma = 'scaled'"),
    "tol zero": (KernelSVC(tol=0.0), (X, TWO), ParameterError, "tol = 0.0"),
    "max_iter zero": (KernelSVC(max_iter=0), (X, TWO), ParameterError, "max_iter = 0"),
    "solver_params": (KernelSVC(solver_params={"rank": 3}), (X, TWO), ParameterError, "no parameter 'rank'"),
    "fit_intercept": (KernelSVC(fit_intercept="no"), (X, TWO), ParameterError, "fit_intercept is 'no'"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    estimator, given, error, message = BAD[name]
    with pytest.raises(error, match=message):
        clone(estimator).fit(*given)


# --- beside a general convex solver, which works in float64 as they do -----------------------------------------------

Floats = np.ndarray
D = 4
EPSILON, DELTA = 0.1, 0.5
KERNELS: dict[str, dict[str, Any]] = {
    "rbf": {"gamma": 0.3},
    "poly": {"gamma": 0.25, "degree": 3, "coef0": 1.0},
    "linear": {},
}


def rows(n: int) -> tuple[Floats, Floats, Floats]:
    """X (n, 4), targets with noise, weights."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((n, D))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.standard_normal(n), rng.uniform(0.2, 3.0, n)


CONVEX: dict[str, tuple[Any, Callable[[Floats, Any], Any]]] = {
    "hinge": (KernelSVC, lambda y, u: cvxpy.pos(1 - cvxpy.multiply(y, u))),
    "epsilon insensitive": (KernelSVR, lambda y, u: cvxpy.pos(cvxpy.abs(u - y) - EPSILON)),
    "huber": (KernelHuberRegressor, lambda y, u: cvxpy.huber(u - y, DELTA)),
    "pinball": (KernelQuantileRegressor, lambda y, u: cvxpy.maximum(0.9 * (y - u), -0.1 * (y - u))),
}


def solved(K: Floats, y: Floats, C: Floats, loss: Callable[[Floats, Any], Any]) -> tuple[float, Floats]:
    """The least objective and its predictions: u = G z + b with G G^T = K and |z|^2 = a^T K a."""
    values, vectors = np.linalg.eigh(K)
    kept = values > 1e-13 * values.max()
    G = vectors[:, kept] * np.sqrt(values[kept])
    z, b = cvxpy.Variable(G.shape[1]), cvxpy.Variable()
    u = cvxpy.Variable(len(G))
    problem = cvxpy.Problem(cvxpy.Minimize(0.5 * cvxpy.sum_squares(z) + C @ loss(y, u)), [u == G @ z + b])
    problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    return float(problem.value), G @ z.value + b.value


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CONVEX)
def test_a_convex_solver(name: str, kernel: str) -> None:
    (X, y, weight), C = rows(300), 30.0
    machine, loss = CONVEX[name]
    y = np.where(y > 0.2, 1.0, -1.0) if name == "hinge" else y
    more = {"huber": {"epsilon": DELTA}, "pinball": {"quantile": 0.9}}.get(name)
    given = {"C": C} if more is None else {"alpha": 0.5 / C, **more}
    ours = machine(kernel=kernel, tol=1e-12, **given, **KERNELS[kernel]).fit(X, y, weight)
    K = np.asarray(pairwise_kernels(X, metric=kernel, **KERNELS[kernel]))
    least, predicted = solved(K, y, C * weight, loss)
    found = ours.decision_function(X) if name == "hinge" else ours.predict(X)
    assert ours.solution_.certificates[0].primal == pytest.approx(least, rel=1e-8)
    assert np.abs(found - predicted).max() <= (1e-6 if name == "huber" else 1e-5) * np.abs(predicted).max()


@pytest.mark.parametrize(
    "machine",
    [
        KernelHuberRegressor(alpha=5e-7, gamma=0.5),
        KernelHuberRegressor(alpha=5e-7, gamma=0.5, fit_intercept=False),
        KernelSVR(C=1e6, gamma=0.5),
        KernelSVR(C=1e6, loss="squared_epsilon_insensitive", gamma=0.5),
        KernelQuantileRegressor(alpha=5e-7, gamma=0.5),
        KernelSVC(C=1e6, gamma=0.5),
    ],
    ids=repr,
)
def test_a_row_of_great_weight_does_not_hide_the_others(machine: Any) -> None:
    """The objective at f = 0, times eps, is more than that of all other rows together."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 2))
    y = np.sin(2 * x[:, 0]) + 0.1 * rng.standard_normal(60)
    if isinstance(machine, KernelSVC):
        y = np.where(x[:, 0] + 0.5 * rng.standard_normal(60) > 0, 1, -1)
    # the row is met exactly in both; C w is 1 in the others
    weights = np.full((2, 60), 1e-6)
    weights[:, 3] = 1e8, 1e13
    found = [clone(machine).fit(x, y, weight) for weight in weights]
    values = [one.decision_function(x) if isinstance(one, KernelSVC) else one.predict(x) for one in found]
    assert np.ptp(values[0]) > 1
    np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("C", [1e8, 1e16])
def test_a_great_C_hides_no_gap(C: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((60, 2))
    machine = KernelSVC(C=C, kernel="laplacian", gamma=0.5)
    with contextlib.suppress(ConvergenceError):  # rounding alone, times C, is more than tol
        (found,) = machine.fit(x, np.where(x[:, 0] + 0.3 * x[:, 1] > 0, 1, -1)).solution_.certificates
        assert 0 < found.dual <= found.primal <= found.dual * (1 + 2e-6)


@pytest.mark.parametrize("dtype", ["int64", "Int64", "UInt64", "int64[pyarrow]"])
def test_labels_and_folds_that_are_large_integers_stay_apart(dtype: str) -> None:
    X = np.random.default_rng(0).standard_normal((60, 2))
    labels = pd.Series(np.array([5, 2**53, 2**53 + 1])[np.digitize(X[:, 0], [-0.5, 0.5])], dtype=dtype)
    est = KernelSVC(C=100.0).fit(X, labels)
    assert est.classes_.tolist() == [5, 2**53, 2**53 + 1]
    found = KernelRidgeCV(kernel="rbf", alphas=[0.1], cv=labels).fit(X, X[:, 1]).scores_
    assert found == KernelRidgeCV(kernel="rbf", alphas=[0.1], cv=labels.to_numpy(np.int64)).fit(X, X[:, 1]).scores_
