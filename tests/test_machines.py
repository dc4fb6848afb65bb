"""Support vector machines, logistic, quantile and Huber regression as scikit-learn and people use them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from scipy import sparse
from sklearn.base import clone
from sklearn.metrics import d2_pinball_score
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.svm import SVC, SVR
from sklearn.utils import get_tags
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.estimator_checks import estimator_checks_generator

import dkrr.models.machines
from dkrr import (
    ConvergenceError,
    DataError,
    DkrrError,
    KernelHuberRegressor,
    KernelLogisticRegression,
    KernelQuantileRegressor,
    KernelRidge,
    KernelSVC,
    KernelSVR,
    ParameterError,
    load_model,
)
from dkrr.cli import main
from tests.sampling import one_of

pytestmark = pytest.mark.whole

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


# --- scikit-learn's own checks -------------------------------------------------------------------------------------

CHECKED = {
    "svc": KernelSVC(),
    "svr": KernelSVR(),
    "logistic": KernelLogisticRegression(),
    "quantile": KernelQuantileRegressor(),
    "huber": KernelHuberRegressor(),
    "squared hinge": KernelSVC(loss="squared_hinge"),
    "squared epsilon insensitive": KernelSVR(loss="squared_epsilon_insensitive"),
    "precomputed": KernelSVC(kernel="precomputed"),
}
WHOLE = {"svc", "svr", "logistic", "quantile", "huber"}  # of the others the fast tier runs one check in ten


def checks() -> Iterator[Any]:
    for name, estimator in CHECKED.items():
        for instance, check in estimator_checks_generator(estimator):
            function = getattr(check, "func", check).__name__
            if function == "check_array_api_input":
                continue  # for estimators that keep arrays on their device; it skips itself
            if "sample_weight_equivalence" in function:
                instance = clone(instance).set_params(tol=1e-13)  # it compares to 1e-7, about the root of the gap
            case = f"{name}-{function}"
            marks = [] if name in WHOLE or one_of(10, case) else [pytest.mark.thorough]
            yield pytest.param(instance, check, id=case, marks=marks)


# the checks fit on data of one column with feature names and without; the warnings are what they test
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning", "ignore:X does not have valid feature")
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_scikit_learn_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


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


def test_regression_has_the_shapes_of_svr() -> None:
    ours = KernelSVR(2.0, epsilon=0.2, gamma="scale", tol=TIGHT).fit(X, Y)
    theirs = SVR(C=2.0, epsilon=0.2, gamma="scale", tol=1e-10).fit(X, Y)
    for name in ("support_", "n_support_"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    for name in ("support_vectors_", "dual_coef_", "intercept_"):
        assert getattr(ours, name).shape == getattr(theirs, name).shape
    np.testing.assert_allclose(ours.predict(Z), theirs.predict(Z), atol=1e-3)
    assert ours.score(X, Y) == pytest.approx(theirs.score(X, Y), abs=1e-3)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_several_classes_are_one_against_the_rest(name: str) -> None:
    estimator = clone(CLASSIFIERS[name]).fit(X, THREE, WEIGHT + 1)
    decision = estimator.decision_function(Z)
    assert decision.shape == (17, 3)
    assert estimator.dual_coef_.shape == (3, len(estimator.support_))
    assert estimator.intercept_.shape == (3,)
    assert len(estimator.solution_.certificates) == 3
    for column, label in enumerate(estimator.classes_):
        alone = clone(CLASSIFIERS[name]).fit(X, label == THREE, WEIGHT + 1)
        np.testing.assert_allclose(decision[:, column], alone.decision_function(Z), **CLOSE)
    np.testing.assert_array_equal(estimator.predict(Z), np.array([0, 10, 20])[np.argmax(decision, axis=1)])
    # support vectors are sorted and counted by class, as SVC's are
    np.testing.assert_array_equal(THREE[estimator.support_], np.repeat([0, 10, 20], estimator.n_support_))


def test_probabilities() -> None:
    two, three = (KernelLogisticRegression(10.0).fit(X, y) for y in (TWO, THREE))
    p = 1 / (1 + np.exp(-two.decision_function(Z)))
    np.testing.assert_allclose(two.predict_proba(Z), np.stack([1 - p, p], axis=1), rtol=1e-12)
    p = 1 / (1 + np.exp(-three.decision_function(Z)))
    np.testing.assert_allclose(three.predict_proba(Z), p / p.sum(axis=1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(np.exp(three.predict_log_proba(Z)), three.predict_proba(Z), rtol=1e-12)
    # far from all rows of a linear fit every probability underflows before it is normalised
    far = KernelLogisticRegression(100.0, kernel="linear").fit(X, THREE).predict_log_proba(1e6 * Z)
    assert np.isfinite(far).all()
    np.testing.assert_allclose(np.logaddexp.reduce(far, axis=1), 0.0, atol=1e-12)


@pytest.mark.parametrize("name", REGRESSORS)
def test_targets_are_columns(name: str) -> None:
    both = clone(REGRESSORS[name]).fit(X, np.stack([Y, X[:, 1]], axis=1), WEIGHT)
    assert both.predict(Z).shape == (17, 2)
    assert both.dual_coef_.shape == (2, len(both.support_))
    for column, y in enumerate((Y, X[:, 1])):
        alone = clone(REGRESSORS[name]).fit(X, y, WEIGHT)
        assert alone.predict(Z).shape == (17,)
        np.testing.assert_allclose(both.predict(Z)[:, column], alone.predict(Z), **CLOSE)
    assert clone(REGRESSORS[name]).fit(X, Y[:, None]).predict(Z).shape == (17, 1)


def test_quantiles_are_columns() -> None:
    levels = (0.9, 0.1, 0.5)
    options = {"alpha": 0.1, "gamma": 0.1, "tol": TIGHT}
    estimator = KernelQuantileRegressor(quantile=levels, **options).fit(X, Y)
    predicted = estimator.predict(X)
    assert predicted.shape == (N, 3)
    assert estimator.intercept_.shape == (3,)
    scores = []
    for column, level in enumerate(levels):
        alone = KernelQuantileRegressor(quantile=level, **options).fit(X, Y)
        np.testing.assert_allclose(predicted[:, column], alone.predict(X), **CLOSE)
        assert alone.num_crossing(X) == 0
        scores.append(d2_pinball_score(Y, predicted[:, column], alpha=level, sample_weight=WEIGHT))
        assert alone.score(X, Y, WEIGHT) == pytest.approx(scores[-1], abs=1e-4)
        # with an intercept the shares of rows below and above are at most q and 1 - q
        assert np.mean(predicted[:, column] > Y + 1e-3) <= level <= np.mean(predicted[:, column] > Y - 1e-3)
    assert estimator.score(X, Y, WEIGHT) == pytest.approx(np.mean(scores))
    assert KernelQuantileRegressor(quantile=[0.5]).fit(X, Y).predict(Z).shape == (17, 1)
    assert not get_tags(estimator).target_tags.multi_output
    assert get_tags(KernelQuantileRegressor(quantile=0.5)).target_tags.multi_output


def test_crossing_rows_are_counted() -> None:
    rows = np.linspace(0, 2, N)[:, None]  # the spread grows with them, so straight lines meet where it would be zero
    estimator = KernelQuantileRegressor(quantile=[0.9, 0.1, 0.5], alpha=0.01, kernel="linear")
    estimator.fit(rows, rows[:, 0] * np.tile([-1.0, 0.0, 1.0], N // 3))
    new = np.array([[-3.0], [-2.0], [1.0], [1.5], [2.0]])
    assert estimator.num_crossing(rows[5:]) == 0
    assert estimator.num_crossing(new) == 2
    estimator.set_params(quantile=0.5)  # the model has what it was fitted with
    assert estimator.num_crossing(new) == 2


# --- what the parameters mean ----------------------------------------------------------------------------------------


def test_alpha_is_that_of_kernel_ridge() -> None:
    ridge = KernelRidge(0.3, kernel="rbf", fit_intercept=True).fit(X, Y, WEIGHT)
    huber = KernelHuberRegressor(epsilon=1e6, alpha=0.3, tol=TIGHT).fit(X, Y, WEIGHT)
    np.testing.assert_allclose(huber.predict(Z), ridge.predict(Z), **CLOSE)
    ridge = KernelRidge(0.25, kernel="rbf", fit_intercept=True).fit(X, Y)
    squared = KernelSVR(2.0, epsilon=0.0, loss="squared_epsilon_insensitive", tol=TIGHT).fit(X, Y)  # C = 1 / (2 alpha)
    np.testing.assert_allclose(squared.predict(Z), ridge.predict(Z), **CLOSE)
    assert squared._model.provenance["alpha"] == [0.25]


@pytest.mark.parametrize("name", ALL)
def test_no_intercept(name: str) -> None:
    estimator = clone(ALL[name]).set_params(fit_intercept=False).fit(X, targets(name))
    assert np.all(estimator.intercept_ == 0)
    expected = rbf_kernel(Z, estimator.support_vectors_, gamma=1 / 3) @ estimator.dual_coef_[0]
    np.testing.assert_allclose(values(estimator), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_a_weight_of_zero_leaves_a_row_out(name: str) -> None:
    estimator, kept = clone(ALL[name]).fit(X, targets(name), WEIGHT), WEIGHT > 0
    assert not np.isin(np.flatnonzero(~kept), estimator.support_).any()
    without = clone(ALL[name]).fit(X[kept], targets(name)[kept], WEIGHT[kept])
    np.testing.assert_allclose(values(estimator), values(without), **CLOSE)
    assert not np.allclose(values(estimator), values(clone(ALL[name]).fit(X, targets(name))), atol=1e-2)


@pytest.mark.parametrize("quantile", [0.05, 0.3, 0.7])
def test_bounds_that_are_rounded_are_bounds(quantile: float) -> None:
    # C_i q / C_i is not q for one weight in ten, and most coefficients are at such a bound
    weight = np.random.default_rng(1).uniform(0.1, 9.0, N)
    estimator = KernelQuantileRegressor(quantile=quantile, alpha=0.3, tol=TIGHT).fit(X, Y, weight)
    residual = Y - estimator.predict(X)
    assert weight[residual < -1e-4].sum() <= quantile * weight.sum()
    assert weight[residual > 1e-4].sum() <= (1 - quantile) * weight.sum()


@pytest.mark.parametrize("class_weight", ["balanced", {"yes": 3.0}, {"yes": 0.5, "no": 2.0}])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_class_weights_are_weights_of_rows(name: str, class_weight: Any) -> None:
    ours = clone(CLASSIFIERS[name]).set_params(class_weight=class_weight).fit(X, TWO)
    weight = compute_sample_weight(class_weight, TWO)
    expected = clone(CLASSIFIERS[name]).fit(X, TWO, weight)
    np.testing.assert_allclose(values(ours), values(expected), **CLOSE)
    np.testing.assert_allclose(ours.class_weight_[(TWO == "yes").astype(int)], weight)


def test_balanced_classes_have_the_same_weight() -> None:
    estimator = KernelSVC(class_weight="balanced").fit(X, THREE, WEIGHT)
    total = np.array([WEIGHT[label == THREE].sum() for label in (0, 10, 20)])
    np.testing.assert_allclose(estimator.class_weight_ * total, WEIGHT.sum() / 3)


def test_gamma() -> None:
    rows = 3.0 * X
    for gamma, number in (("scale", 1 / (3 * rows.var())), ("auto", 1 / 3), (None, 1 / 3)):
        found = KernelSVC(gamma=gamma).fit(rows, TWO)._model.kernel
        assert found is not None
        assert found.to_dict()["gamma"] == pytest.approx(number, rel=1e-14)


@pytest.mark.parametrize(
    "labels",
    [TWO, TWO.astype(object), TWO == "yes", np.where(TWO == "yes", 2.0, -1.0), pd.Categorical(TWO), pd.Series(TWO)],
    ids=["text", "objects", "booleans", "floats", "categories", "series"],
)
def test_labels_of_every_kind(labels: Any, tmp_path: Path) -> None:
    estimator = KernelSVC(tol=TIGHT).fit(X, labels)
    np.testing.assert_array_equal(
        estimator.predict(X) == estimator.classes_[1], KernelSVC().fit(X, TWO).predict(X) == "yes"
    )
    assert set(estimator.predict(X)) <= set(np.asarray(labels).tolist())
    estimator.save(tmp_path / "model.zarr")
    assert load_model(tmp_path / "model.zarr").provenance["classes"] == estimator.classes_.tolist()


def test_rows_of_every_kind(tmp_path: Path) -> None:
    expected = KernelSVC().fit(X, TWO).decision_function(Z)
    np.save(tmp_path / "X.npy", X)
    for rows in (np.load(tmp_path / "X.npy", mmap_mode="r"), sparse.csr_array(X), X.tolist(), np.asfortranarray(X)):
        np.testing.assert_allclose(KernelSVC().fit(rows, TWO).decision_function(Z), expected, rtol=1e-9, atol=1e-10)


def test_frames_keep_their_names() -> None:
    frame = pd.DataFrame(X, columns=list("abc"))
    estimator = KernelSVC().fit(frame, pd.Series(TWO))
    assert list(estimator.feature_names_in_) == estimator._model.feature_names == list("abc")
    with pytest.raises(ValueError, match="same order"):
        estimator.predict(frame[["c", "b", "a"]])
    assert not hasattr(estimator.fit(X, TWO), "feature_names_in_")


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_model_holds_support_rows_only_and_is_saved_whole(name: str, tmp_path: Path) -> None:
    estimator = clone(ALL[name]).fit(X, targets(name))
    model = estimator._model
    assert model.x_fit is not None
    assert np.array_equal(model.x_fit.read(0, model.num_rows), X[estimator.support_])
    assert np.array_equal(model.dual_coef.read(0, model.num_rows), estimator.dual_coef_.T)
    assert (estimator.dual_coef_ != 0).any(axis=0).all()
    assert model.num_rows == estimator.solution_.certificates[0].num_support == estimator.n_support_.sum()
    estimator.save(tmp_path / "model.zarr")
    saved = load_model(tmp_path / "model.zarr")
    if list(getattr(estimator, "classes_", [])) and len(estimator.classes_) == 2:
        columns = np.stack((-values(estimator), values(estimator)), axis=1)
        np.testing.assert_allclose(saved.predict(Z), columns, rtol=0, atol=1e-13 * np.abs(columns).max())
        assert saved.classes == list(estimator.classes_)
        assert saved.solution.certificates == 2 * estimator.solution_.certificates
    else:
        assert np.array_equal(saved.predict(Z), values(estimator))
        assert saved.solution == estimator.solution_
    assert saved.solution.certificates[0].gap <= TIGHT
    assert saved.provenance == model.provenance
    assert f"{model.provenance['loss']} loss" in repr(saved)
    shown = CliRunner().invoke(main, ["info", str(tmp_path / "model.zarr")])
    assert shown.exit_code == 0, shown.output
    assert "duality gap" in shown.output
    with pytest.raises(ParameterError, match="standard deviations are those of the square loss"):
        saved.predict_std(Z)


def test_what_a_model_remembers() -> None:
    quantile = KernelQuantileRegressor(quantile=[0.1, 0.9], alpha=0.5).fit(X, Y)._model
    assert quantile.provenance == {
        "alpha": [0.5], "C": 1.0, "loss": "pinball", "solver": "decomposition", "quantile": [0.1, 0.9]
    }  # fmt: skip
    several = KernelLogisticRegression(5.0).fit(X, THREE)._model
    assert several.classes == several.provenance["classes"] == [0, 10, 20]
    # a column is a class for those who read the model, and of two classes there is one column
    assert KernelSVC().fit(X, TWO)._model.classes is None
    huber = KernelHuberRegressor(epsilon=0.5, alpha=0.7).fit(X, Y)._model
    assert (huber.provenance["epsilon"], huber.provenance["alpha"]) == (0.5, [0.7])


def test_no_support_vectors(tmp_path: Path) -> None:
    estimator = KernelSVR(epsilon=10.0).fit(X, Y)  # a constant is within the tube
    assert estimator.support_.shape == (0,)
    assert estimator.dual_coef_.shape == (1, 0)
    estimator.save(tmp_path / "model.zarr")
    predicted = load_model(tmp_path / "model.zarr").predict(Z)
    assert np.array_equal(predicted, estimator.predict(Z))
    np.testing.assert_allclose(predicted, estimator.intercept_[0])
    assert np.abs(Y - estimator.intercept_).max() <= 10.0


def test_precomputed() -> None:
    gram, new = rbf_kernel(X, gamma=1 / 3), rbf_kernel(Z, X, gamma=1 / 3)
    for name, estimator in ALL.items():
        given = clone(estimator).set_params(kernel="precomputed").fit(gram, targets(name), WEIGHT)
        expected = clone(estimator).fit(X, targets(name), WEIGHT)
        np.testing.assert_allclose(values(given, new), values(expected), **CLOSE)
        assert given.support_vectors_.shape == (0, 0)
        assert given.n_features_in_ == N


def test_dask_in_lazy_dask_out() -> None:
    lazy = da.from_array(Z, chunks=(5, 2))
    some = lazy[da.from_array(Z[:, 0] > 0, chunks=5)]  # chunks of unknown size
    for y in (TWO, THREE):
        logistic = KernelLogisticRegression().fit(X, y)
        for method in ("decision_function", "predict", "predict_proba", "predict_log_proba"):
            found, expected = getattr(logistic, method)(lazy), getattr(logistic, method)(Z)
            assert isinstance(found, da.Array)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            same = np.testing.assert_array_equal if method == "predict" else np.testing.assert_allclose
            same(found.compute(), expected)
            same(getattr(logistic, method)(some).compute(), expected[Z[:, 0] > 0])
    quantile = KernelQuantileRegressor(quantile=[0.2, 0.8]).fit(X, Y)
    np.testing.assert_allclose(quantile.predict(lazy).compute(), quantile.predict(Z))
    assert quantile.num_crossing(lazy) == quantile.num_crossing(Z)


def test_predictions_of_rows_on_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "Z.npy", Z)
    estimator = KernelSVC().fit(X, THREE)
    np.testing.assert_array_equal(estimator.predict(tmp_path / "Z.npy"), estimator.predict(Z))


@pytest.mark.parametrize("name", ALL)
def test_copies(name: str) -> None:
    estimator = clone(ALL[name]).fit(X, targets(name))
    assert not hasattr(clone(estimator), "support_")
    for copied in (pickle.loads(pickle.dumps(estimator)), copy.deepcopy(estimator)):
        assert np.array_equal(copied.predict(Z), estimator.predict(Z))
        assert copied.solution_ == estimator.solution_


def test_grid_search() -> None:
    search = GridSearchCV(KernelQuantileRegressor(quantile=[0.2, 0.8]), {"alpha": [0.01, 100.0]}, cv=2).fit(X, Y)
    assert search.best_params_ == {"alpha": 0.01}
    search = GridSearchCV(KernelLogisticRegression(), {"C": [1e-4, 1.0]}, cv=3, scoring="neg_log_loss").fit(X, TWO)
    assert search.best_params_ == {"C": 1.0}


def test_the_solution_says_the_gap() -> None:
    solution = KernelSVC().fit(X, THREE).solution_
    assert solution.worst == ("duality gap", max(item.gap for item in solution.certificates))
    assert solution.worst[1] <= 1e-6
    text = repr(solution)
    assert text.startswith("Solution: decomposition, float64, converged\n  3 targets; ")
    assert "largest duality gap" in text
    assert "largest KKT violation" in text
    assert "residual" not in text
    assert "duality gap" in solution._repr_html_()


# --- where the work runs, and what goes wrong -------------------------------------------------------------------------


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, int]]:
    """The rows that the kernel sees and the number of threads of each fit."""
    found = []
    real = dkrr.linalg.losses.fit.GramColumns

    def spy(kernel: Any, rows: np.ndarray, num_threads: int) -> Any:
        found.append((rows, num_threads))
        return real(kernel, rows, num_threads)

    monkeypatch.setattr(dkrr.linalg.losses.fit, "GramColumns", spy)
    return found


def test_a_worker_uses_one_thread(solved: list[tuple[np.ndarray, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dkrr.models.machines, "cpu_count", lambda: 7)
    KernelSVC().fit(X, TWO)
    monkeypatch.setattr(dkrr.models.machines, "runs_in_process", lambda: True)
    KernelSVC().fit(X, TWO)
    assert [threads for _, threads in solved] == [7, 1]


@pytest.mark.parametrize("kernel", ["rbf", "linear"])
def test_rows_are_centred_for_stationary_kernels(kernel: str, solved: list[tuple[np.ndarray, int]]) -> None:
    rows = X + 100.0
    center = KernelSVC(kernel=kernel, C=0.01).fit(rows, TWO)._model.center
    assert (center is not None) == (kernel == "rbf")
    if center is not None:
        np.testing.assert_allclose(center, rows.mean(axis=0))
    np.testing.assert_array_equal(solved[0][0], rows if center is None else rows - center)


@pytest.mark.parametrize("name", ALL)
def test_what_did_not_converge_is_an_error_unless_allowed(name: str) -> None:
    estimator = clone(ALL[name]).set_params(max_iter=1, gamma=2.0, tol=1e-20)
    with pytest.raises(ConvergenceError, match="duality gap"):
        estimator.fit(X, targets(name))
    estimator.set_params(solver_params={"allow_unconverged": True}).fit(X, targets(name))
    assert not estimator.solution_.converged
    assert "NOT converged" in repr(estimator.solution_)
    assert np.isfinite(values(estimator)).all()


@pytest.mark.parametrize("name", ALL)
def test_a_failed_refit_leaves_the_fit_that_was_there(name: str) -> None:
    frame = pd.DataFrame(X, columns=list("abc"))
    estimator = clone(ALL[name]).set_params(kernel="linear").fit(frame, targets(name))
    before, predicted = dict(vars(estimator)), estimator.predict(frame)
    labels = np.where(TWO == "yes", "other", "more") if name in CLASSIFIERS else 2 * Y
    with pytest.raises(DataError, match="at row 7, column 1"):
        estimator.fit(missing_number(X, (7, 1)), labels)
    with pytest.raises(ConvergenceError):
        estimator.set_params(kernel="rbf", gamma=2.0, max_iter=1).fit(X[:, :2], labels)
    estimator.set_params(kernel="linear", gamma=None, max_iter=None)
    assert vars(estimator).keys() == before.keys()
    assert all(vars(estimator)[key] is before[key] for key in before)
    assert np.array_equal(estimator.predict(frame), predicted)
    assert not hasattr(estimator.set_params(kernel="rbf").fit(X, labels), "coef_")


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


def test_bad_rows_to_predict(tmp_path: Path) -> None:
    estimator = KernelSVC().fit(X, TWO)
    with pytest.raises(ValueError, match="X has 2 features, but KernelSVC is expecting 3"):
        estimator.predict(X[:, :2])
    with pytest.raises(DataError, match="row 0, column 1"):
        estimator.decision_function([[0.0, np.nan, 0.0]])
    with pytest.raises(ValueError, match="not fitted"):
        KernelSVC().save(tmp_path / "model.zarr")
    quantile = KernelQuantileRegressor(quantile=[0.1, 0.9]).fit(X, Y)
    with pytest.raises(DataError, match=r"y has shape \(48, 2\)"):
        quantile.score(X, np.c_[Y, Y])
