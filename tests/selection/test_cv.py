"""KernelRidgeCV: equal to scikit-learn's RidgeCV and GridSearchCV, and to refitting without the rows held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV
from sklearn.metrics import get_scorer
from sklearn.model_selection import GroupKFold, KFold, LeaveOneGroupOut, ShuffleSplit, TimeSeriesSplit, check_cv

import dkrr.selection.cv
from dkrr import KernelRidge, KernelRidgeCV, ingest
from dkrr.errors import DataError, NotPositiveDefiniteError, ParameterError

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
    "labels": GROUPS,
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
    splits = list(LeaveOneGroupOut().split(X, Y, GROUPS) if name == "labels" else check_cv(cv).split(X, Y))
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


@pytest.mark.parametrize(
    ("cv", "error", "words"),
    [
        (1, ParameterError, "cv is 1"),
        (2.5, ParameterError, "cv is 2.5"),
        ("five", ParameterError, "cv is 'five'"),
        (True, ParameterError, "cv is True"),
        (GroupKFold(3), ParameterError, "groups"),
        (np.zeros(N), DataError, "cv has labels .* fewer than 2"),
        (np.zeros(5), DataError, "cv has labels .*120, 5"),
        ([(np.arange(5), np.array([N]))], DataError, "index 120 is out of bounds"),
        ([(np.arange(5), np.array([], dtype=int))], DataError, "no training or no test rows"),
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


def test_an_alpha_that_is_too_small_is_named() -> None:
    doubled = np.vstack([X, X])
    for alphas in ([0.0, 1.0], np.linspace(0, 1, 30)):
        with pytest.raises(NotPositiveDefiniteError, match="alpha 0"):
            KernelRidgeCV(alphas, kernel="rbf").fit(doubled, np.vstack([Y, Y]))


# --- through tiles, and in feature space ---------------------------------------------------------------------------

GRID = [1.0, 0.01, 300.0, 0.1]
KERNEL: dict[str, Any] = {"kernel": "rbf", "gamma": 0.05}
OTHER = np.where(np.arange(N) % 10, WEIGHT, 0.0)


@pytest.mark.parametrize(
    ("weight", "fit_intercept", "per_target"),
    [(None, False, False), (OTHER, True, True)],
    ids=["plain", "weighted-intercept-per_target"],
)
def test_tiles_choose_what_memory_chooses(tmp_path: Path, weight: Any, fit_intercept: bool, per_target: bool) -> None:
    options: dict[str, Any] = {**KERNEL, "fit_intercept": fit_intercept, "alpha_per_target": per_target}
    memory, tiles = (
        KernelRidgeCV(GRID, store_cv_results=True, **options, **more).fit(X, Y, sample_weight=weight)
        for more in ({}, {"tile_size": 64, "store": tmp_path, "solver": "cholesky"})
    )
    np.testing.assert_array_equal(tiles.alpha_, memory.alpha_)
    np.testing.assert_allclose(tiles.scores_, memory.scores_, rtol=1e-8)
    np.testing.assert_allclose(tiles.cv_results_, memory.cv_results_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(tiles.predict(Z), memory.predict(Z), rtol=1e-7, atol=1e-9)
    assert tiles.solution_.solver == "cholesky"
    factors = [path for path in tmp_path.glob("factors/*.zarr") if path.is_dir()]
    assert len(factors) == len(set(np.ravel(tiles.alpha_)))


def test_a_factor_that_was_there_stays(tmp_path: Path) -> None:
    KernelRidge(300.0, **KERNEL, tile_size=64, store=tmp_path).fit(X, Y)
    before = set(tmp_path.glob("factors/*.zarr"))
    fitted = KernelRidgeCV(GRID, **KERNEL, tile_size=64, store=tmp_path).fit(X, Y)
    assert fitted.alpha_ != 300.0
    assert before <= set(tmp_path.glob("factors/*.zarr"))


def test_an_alpha_that_stands_twice_in_the_grid_keeps_its_factor(tmp_path: Path) -> None:
    once, twice = (
        KernelRidgeCV(alphas, **KERNEL, tile_size=64, store=tmp_path / str(len(alphas))).fit(X, Y)
        for alphas in ([0.1, 300.0], [0.1, 0.1, 300.0])
    )
    assert once.alpha_ == twice.alpha_ == 0.1
    assert [len(list(tmp_path.glob(f"{k}/factors/*.zarr"))) for k in (2, 3)] == [1, 1]


@pytest.mark.parametrize("num_alphas", [2, 10], ids=["cholesky", "eigen"])
def test_a_row_that_decides_its_own_prediction_is_named(num_alphas: int) -> None:
    weight = np.full(N, 1e-17)
    weight[:2], weight[4] = 0.0, 1.0
    with pytest.raises(DataError, match="row 4 decides its own prediction"):
        KernelRidgeCV(np.logspace(-2, 0, num_alphas), **KERNEL, fit_intercept=True).fit(X, Y, sample_weight=weight)


def test_a_precomputed_matrix_and_a_data_set(tmp_path: Path) -> None:
    memory = KernelRidgeCV(GRID, **KERNEL).fit(X, Y)
    K = np.exp(-0.05 * ((X[:, None] - X[None]) ** 2).sum(axis=2))
    given = KernelRidgeCV(GRID, kernel="precomputed", tile_size=64).fit(K, Y)
    np.testing.assert_allclose(given.scores_, memory.scores_, rtol=1e-8)
    dataset = ingest(X, tmp_path / "data.zarr", y=Y)
    stored = KernelRidgeCV(GRID, **KERNEL, tile_size=64).fit(dataset)
    np.testing.assert_allclose(stored.scores_, memory.scores_, rtol=1e-8)
    np.testing.assert_allclose(stored.predict(Z), memory.predict(Z), rtol=1e-7)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"cv": 3, "tile_size": 64}, "no formula for folds"),
        ({"cv": 3, "solver": "primal"}, "cv with solver 'primal'"),
        ({"solver": "nystrom"}, "nystrom"),
        ({"solver": "cg"}, "cholesky"),
    ],
)
def test_what_tiles_cannot_do_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        KernelRidgeCV(GRID, **parameters).fit(X, Y)


@pytest.mark.parametrize("kernel", ["linear", "poly"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "stored"])
@pytest.mark.parametrize("scoring", [None, "neg_mean_absolute_error"])
def test_primal_chooses_what_the_dual_chooses(tmp_path: Path, kernel: str, in_memory: bool, scoring: Any) -> None:
    shared: dict[str, Any] = {"kernel": kernel, "degree": 2, "fit_intercept": True, "scoring": scoring}
    dual = KernelRidgeCV(GRID, **shared, alpha_per_target=True).fit(X, Y, sample_weight=OTHER)
    primal = KernelRidgeCV(
        GRID, **shared, alpha_per_target=True, solver="primal", store=None if in_memory else tmp_path
    ).fit(X, Y, sample_weight=OTHER)
    assert primal.solution_.solver == "primal"
    np.testing.assert_array_equal(primal.alpha_, dual.alpha_)
    np.testing.assert_allclose(primal.scores_, dual.scores_, rtol=1e-8)
    np.testing.assert_allclose(primal.predict(Z), dual.predict(Z), rtol=1e-7, atol=1e-9)
