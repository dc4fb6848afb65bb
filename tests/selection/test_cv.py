"""KernelRidgeCV: equal to scikit-learn's RidgeCV and GridSearchCV, and to refitting without the rows held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import RidgeCV
from sklearn.metrics import get_scorer
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, ShuffleSplit, TimeSeriesSplit, check_cv
from sklearn.utils.estimator_checks import estimator_checks_generator

import dkrr.selection.cv
from dkrr import KernelRidge, KernelRidgeCV, load_model
from dkrr.errors import DataError, NotPositiveDefiniteError, ParameterError
from tests.sampling import one_of

RNG = np.random.default_rng(3)
N = 120
X = RNG.standard_normal((N, 6))
Y = X @ RNG.standard_normal((6, 3)) + np.array([0.3, 1.5, 6.0]) * RNG.standard_normal((N, 3)) + 2.0
Z = RNG.standard_normal((15, 6))
WEIGHT = RNG.uniform(0.1, 2.0, N)
GROUPS = RNG.integers(0, 7, N)
ALPHAS = np.logspace(-2, 3, 8)

intercept = pytest.mark.parametrize("fit_intercept", [False, True], ids=["plain", "intercept"])
weighted = pytest.mark.parametrize("weight", [None, WEIGHT], ids=["equal", "weighted"])


# --- scikit-learn's own checks -------------------------------------------------------------------------------------

CHECKED = {
    "default": KernelRidgeCV(),
    "folds": KernelRidgeCV(kernel="rbf", fit_intercept=True, cv=3, scoring="neg_mean_squared_error"),
    "precomputed": KernelRidgeCV(kernel="precomputed"),
}
WHOLE = {"default"}  # of the others the fast tier runs one check in five
INDEFINITE = ("check_positive_only_tag_during_fit", "check_estimators_dtypes")


def checks() -> Iterator[Any]:
    for name, estimator in CHECKED.items():
        for instance, check in estimator_checks_generator(estimator):
            function = getattr(check, "func", check).__name__
            if function == "check_array_api_input":
                continue
            marks: list[pytest.MarkDecorator] = []
            if name == "precomputed" and function in INDEFINITE:
                marks = [pytest.mark.xfail(reason="the check hands over an indefinite matrix", strict=True)]
            case = f"{name}-{function}"
            if name not in WHOLE and not one_of(5, case):
                marks.append(pytest.mark.thorough)
            yield pytest.param(instance, check, id=case, marks=marks)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.DataConversionWarning", "ignore:X does not have valid feature")
@pytest.mark.whole
@pytest.mark.parametrize(("estimator", "check"), list(checks()))
def test_scikit_learn_checks(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


# --- leave-one-out -------------------------------------------------------------------------------------------------


@intercept
@weighted
@pytest.mark.parametrize("scoring", [None, "neg_mean_absolute_error", "r2"])
@pytest.mark.parametrize("per_target", [False, True], ids=["one", "per_target"])
@pytest.mark.parametrize("num_targets", [1, 3])
@pytest.mark.parametrize("method", ["cholesky", "eigen"])
def test_equals_ridge_cv(
    monkeypatch: pytest.MonkeyPatch,
    fit_intercept: bool,
    weight: Any,
    scoring: Any,
    per_target: bool,
    num_targets: int,
    method: str,
) -> None:
    monkeypatch.setattr(dkrr.selection.cv, "ALPHAS_A_CORE", 5 if method == "eigen" else 8)
    y = Y[:, 1] if num_targets == 1 else Y
    ours = KernelRidgeCV(ALPHAS, fit_intercept=fit_intercept, scoring=scoring, alpha_per_target=per_target)
    theirs = RidgeCV(ALPHAS, fit_intercept=fit_intercept, scoring=scoring, alpha_per_target=per_target)
    if num_targets == 1:
        per_target = False
        theirs.set_params(alpha_per_target=False)
    ours.set_params(store_cv_results=True).fit(X, y, sample_weight=weight)
    theirs.set_params(store_cv_results=True).fit(X, y, sample_weight=weight)
    assert ours.solution_.solver == method
    np.testing.assert_array_equal(ours.alpha_, theirs.alpha_)
    np.testing.assert_allclose(ours.best_score_, theirs.best_score_, rtol=1e-8)
    np.testing.assert_allclose(ours.predict(Z), theirs.predict(Z), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(ours.cv_results_, theirs.cv_results_, rtol=1e-7, atol=1e-9)
    if per_target:
        assert len(set(ours.alpha_)) > 1, "the targets want different alphas"


@intercept
@pytest.mark.parametrize("kernel", ["rbf", "laplacian", "poly"])
@pytest.mark.parametrize("method", ["cholesky", "eigen"])
def test_leave_one_out_is_refitting(
    monkeypatch: pytest.MonkeyPatch, fit_intercept: bool, kernel: str, method: str
) -> None:
    monkeypatch.setattr(dkrr.selection.cv, "ALPHAS_A_CORE", 0 if method == "eigen" else 8)
    weight = WEIGHT.copy()
    weight[::9] = 0.0
    fitted = KernelRidgeCV([0.5], kernel=kernel, fit_intercept=fit_intercept, store_cv_results=True)
    fitted.set_params(scoring="neg_mean_squared_error").fit(X, Y, sample_weight=weight)
    assert fitted.cv_results_.shape == (N, 3, 1)
    for i in (0, 1, 9, 50, N - 1):
        rest = np.delete(np.arange(N), i)
        one = KernelRidge(0.5, kernel=kernel, fit_intercept=fit_intercept).fit(X[rest], Y[rest], weight[rest])
        np.testing.assert_allclose(fitted.cv_results_[i, :, 0], one.predict(X[i : i + 1])[0], rtol=1e-8, atol=1e-9)
    squares = weight[:, None] * (fitted.cv_results_[:, :, 0] - Y) ** 2
    assert fitted.best_score_ == pytest.approx(-squares.sum() / weight.sum() / 3, rel=1e-10)


# --- folds ---------------------------------------------------------------------------------------------------------

SPLITTERS: dict[str, Any] = {
    "number": 4,
    "shuffled": KFold(5, shuffle=True, random_state=0),
    "pairs": list(KFold(3).split(X)),
    "time": TimeSeriesSplit(4),
    "subsets": ShuffleSplit(3, train_size=0.4, test_size=0.3, random_state=1),
    "groups": list(GroupKFold(3).split(X, Y, GROUPS)),
}


@intercept
@pytest.mark.parametrize("name", SPLITTERS)
@pytest.mark.parametrize("scoring", [None, "neg_root_mean_squared_error"])
def test_folds_are_refits(name: str, fit_intercept: bool, scoring: Any) -> None:
    cv, alphas = SPLITTERS[name], ALPHAS[::3]
    weight = WEIGHT.copy()
    weight[::7] = 0.0
    base = {"kernel": "rbf", "gamma": 0.05, "fit_intercept": fit_intercept}
    fitted = KernelRidgeCV(alphas, **base, cv=cv, scoring=scoring).fit(X, Y, sample_weight=weight)
    splits = list(check_cv(cv).split(X, Y))
    scorer = get_scorer("r2" if scoring is None else scoring)
    for number, alpha in enumerate(alphas):
        scores = []
        for train, test in splits:
            one = KernelRidge(alpha, **base).fit(X[train], Y[train], sample_weight=weight[train])
            scores.append(scorer(one, X[test], Y[test], sample_weight=weight[test]))
        assert fitted.scores_[number] == pytest.approx(np.mean(scores), rel=1e-8, abs=1e-10)
    best = alphas[np.argmax(fitted.scores_)]
    assert fitted.alpha_ == best
    plain = KernelRidge(best, **base).fit(X, Y, sample_weight=weight)
    np.testing.assert_allclose(fitted.predict(Z), plain.predict(Z), rtol=1e-8, atol=1e-8)


@intercept
def test_rows_of_weight_zero_are_predicted_without_their_fold(fit_intercept: bool) -> None:
    weight = WEIGHT.copy()
    weight[::4] = 0.0
    base = {"kernel": "rbf", "gamma": 0.05, "fit_intercept": fit_intercept}
    fitted = KernelRidgeCV([0.3], **base, cv=GROUPS, scoring="r2", store_cv_results=True)
    fitted.fit(X, Y, sample_weight=weight)
    for group in np.unique(GROUPS):
        test = group == GROUPS
        one = KernelRidge(0.3, **base).fit(X[~test], Y[~test], sample_weight=weight[~test])
        np.testing.assert_allclose(fitted.cv_results_[test, :, 0], one.predict(X[test]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("scoring", [None, "neg_mean_absolute_error"])
def test_folds_equal_grid_search(scoring: Any) -> None:
    base = {"kernel": "rbf", "gamma": 0.05}
    ours = KernelRidgeCV(ALPHAS, **base, cv=4, scoring=scoring).fit(X, Y)
    theirs = GridSearchCV(KernelRidge(**base), {"alpha": ALPHAS}, cv=4, scoring=scoring).fit(X, Y)
    assert ours.alpha_ == theirs.best_params_["alpha"]
    assert ours.best_score_ == pytest.approx(theirs.best_score_, rel=1e-9)
    np.testing.assert_allclose(ours.scores_, theirs.cv_results_["mean_test_score"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("cv", "error", "words"),
    [
        (1, ParameterError, "cv is 1"),
        (2.5, ParameterError, "cv is 2.5"),
        ("five", ParameterError, "cv is 'five'"),
        (True, ParameterError, "cv is True"),
        (GroupKFold(3), ParameterError, "groups"),
        (np.zeros(N), DataError, "one label"),
        (np.zeros(5), DataError, "5 labels for 120 rows"),
        ([(np.arange(5), np.array([N]))], DataError, "from 120 to 120"),
        ([(np.arange(5), np.array([], dtype=int))], DataError, "no test rows"),
        ([], DataError, "no folds"),
    ],
)
def test_folds_that_cannot_be_are_refused(cv: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        KernelRidgeCV(cv=cv).fit(X, Y)


def test_a_fold_must_leave_rows_with_a_weight() -> None:
    weight = np.zeros(N)
    weight[:10] = 1.0
    first, rest = np.arange(20), np.arange(20, N)
    with pytest.raises(DataError, match="fold 0 leaves no training row"):
        KernelRidgeCV(cv=[(rest, first)]).fit(X, Y, sample_weight=weight)
    with pytest.raises(DataError, match="fold 0 holds out no row"):
        KernelRidgeCV(cv=[(first, rest)]).fit(X, Y, sample_weight=weight)


# --- the estimator -------------------------------------------------------------------------------------------------


def test_is_a_fitted_kernel_ridge(tmp_path: Any) -> None:
    fitted = KernelRidgeCV(np.repeat(ALPHAS, 4), kernel="rbf", fit_intercept=True, alpha_per_target=True)
    fitted.fit(X, Y, sample_weight=WEIGHT)
    plain = KernelRidge(fitted.alpha_, kernel="rbf", fit_intercept=True).fit(X, Y, sample_weight=WEIGHT)
    np.testing.assert_allclose(fitted.dual_coef_, plain.dual_coef_, rtol=1e-7, atol=1e-10)
    assert fitted.solution_.solver == "eigen"
    assert max(fitted.solution_.backward_error) < 1e-14
    assert fitted.score(X, Y) == pytest.approx(plain.score(X, Y))
    fitted.save(tmp_path / "model.zarr")
    np.testing.assert_array_equal(load_model(tmp_path / "model.zarr").predict(Z), fitted.predict(Z))
    assert "alpha" not in fitted.get_params()
    assert clone(fitted).get_params()["alpha_per_target"] is True


def test_a_precomputed_matrix() -> None:
    K = np.exp(-0.1 * ((X[:, None] - X[None]) ** 2).sum(axis=2))
    given = KernelRidgeCV(ALPHAS, kernel="precomputed", cv=3).fit(K, Y, sample_weight=WEIGHT)
    rows = KernelRidgeCV(ALPHAS, kernel="rbf", gamma=0.1, cv=3).fit(X, Y, sample_weight=WEIGHT)
    assert given.alpha_ == rows.alpha_
    np.testing.assert_allclose(given.scores_, rows.scores_, rtol=1e-8)
    np.testing.assert_allclose(given.predict(K), rows.predict(X), rtol=1e-8)


def test_an_alpha_that_is_too_small_is_named() -> None:
    doubled = np.vstack([X, X])
    for alphas in ([0.0, 1.0], np.linspace(0, 1, 30)):
        with pytest.raises(NotPositiveDefiniteError, match="alpha 0"):
            KernelRidgeCV(alphas, kernel="rbf").fit(doubled, np.vstack([Y, Y]))


@pytest.mark.parametrize("scoring", [lambda estimator, X, y: float("nan")])
def test_a_score_must_be_a_number(scoring: Any) -> None:
    with pytest.raises(DataError, match="leave-one-out predictions is nan"):
        KernelRidgeCV(scoring=scoring).fit(X, Y)


@pytest.mark.parametrize(
    "parameters",
    [{"alphas": []}, {"alphas": [-1.0]}, {"alphas": "small"}, {"alpha_per_target": 1}, {"precision": "float32"}],
)
def test_parameters_are_checked(parameters: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        KernelRidgeCV(**parameters).fit(X, Y)
