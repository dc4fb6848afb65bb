"""Regression in feature space against dense algebra, in memory and from disk, and its leave-one-out against n fits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import DamagedChunkError, DataError, NotPositiveDefiniteError, ParameterError, ResidualError
from dkrr.kernels import make_kernel
from dkrr.kernels.features import feature_map
from dkrr.linalg import primal
from dkrr.linalg.primal import (
    Equations,
    PrimalResult,
    array_source,
    fit_primal,
    fit_primal_arrays,
    leave_one_out_errors,
    primal_leave_one_out,
    solve_primal,
    stored_source,
)
from dkrr.linalg.workspace import Workspace
from dkrr.models.estimator import KernelRidge

KERNELS: dict[str, dict[str, Any]] = {
    "linear": {"kernel": "linear"},
    "poly 2": {"kernel": "poly", "degree": 2},
    "poly 3, homogeneous": {"kernel": "poly", "degree": 3, "gamma": 0.3, "coef0": 0},
}


def kernel_of(name: str, d: int) -> Any:
    values = dict(KERNELS[name])
    return make_kernel(values.pop("kernel"), **values).resolve(d)


def data(n: int = 300, d: int = 4, t: int = 2, weights: bool = False, seed: int = 0, mean: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d)) + mean * rng.standard_normal(d)
    y = x[:, :1] ** 2 + rng.standard_normal((n, t)) + 5 * np.arange(t)
    weight = rng.uniform(0.2, 2, n) * (np.arange(n) % 7 > 0) if weights else None
    return x, y, weight


def exact(f: np.ndarray, y: np.ndarray, alpha: Any, weight: Any, intercept: bool) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients (D, t) and intercepts (t,) by a least squares solve without normal equations."""
    w = np.ones(len(f)) if weight is None else weight
    mean, y_mean = (w @ f / w.sum(), w @ y / w.sum()) if intercept else (np.zeros(f.shape[1]), np.zeros(y.shape[1]))
    root, columns = np.sqrt(w)[:, None], []
    for target, a in enumerate(np.broadcast_to(alpha, y.shape[1])):
        left = np.vstack([root * (f - mean), np.sqrt(a) * np.eye(f.shape[1])])
        right = np.concatenate([root[:, 0] * (y[:, target] - y_mean[target]), np.zeros(f.shape[1])])
        columns.append(np.linalg.lstsq(left, right, rcond=None)[0])
    coef = np.stack(columns, axis=1)
    return coef, y_mean - mean @ coef


def fitted(
    dataset: Dataset, kernel: Any, alpha: Any, folder: Path, executor: Any = None, **options: Any
) -> PrimalResult:
    workspace = Workspace(store=str(folder / "store"), executor=executor or InProcessExecutor())
    return fit_primal(dataset, kernel, np.atleast_1d(alpha).tolist(), workspace, **options)


@pytest.fixture
def many_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task for every 1,024 rows."""
    monkeypatch.setattr("dkrr.linalg.primal_passes.TASK_SECONDS", 1e-9)


def test_means_that_are_a_million_deviations_away_cost_no_digits(tmp_path: Path) -> None:
    x, y, weight = data(weights=True, mean=0.0)
    x = np.round(x, 6)
    far, y_far = x + 2.0**20 * np.array([1, -2, 3, 0]), np.round(y, 6) + 2.0**20
    coef, _ = exact(x, np.round(y, 6), 0.5, weight, True)
    dataset = ingest(far, tmp_path / "rows.zarr", y=y_far, sample_weight=weight)
    for found in (
        fit_primal_arrays(far, y_far, kernel_of("linear", 4), [0.5], weight=weight, fit_intercept=True),
        fitted(dataset, kernel_of("linear", 4), 0.5, tmp_path, fit_intercept=True),
    ):
        np.testing.assert_allclose(found.coef, coef, rtol=0, atol=2e-9 * np.abs(coef).max())


def test_a_wrong_answer_is_found_however_far_from_zero_rows_and_targets_are(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, _ = data(mean=0.0)
    monkeypatch.setattr(Equations, "solve", lambda self, right, alphas: np.zeros_like(right))
    with pytest.raises(ResidualError, match="backward error"):
        fit_primal_arrays(x + 1e8, y + 1e8, kernel_of("linear", 4), [0.5], fit_intercept=True)


def test_a_shift_that_was_a_bad_guess_is_made_better(caplog: pytest.LogCaptureFixture) -> None:
    x, y, _ = data(mean=0.0)
    outliers = np.vstack([x + 1e5, np.full((300, 4), -3e7)])  # what has no weight moves the mean that is known
    targets, weight = np.vstack([y, y]), np.repeat([1.0, 0.0], 300)
    with caplog.at_level(logging.INFO, "dkrr.linalg.primal"):
        found = fit_primal_arrays(outliers, targets, kernel_of("linear", 4), [0.5], weight=weight, fit_intercept=True)
    assert "formed again" in caplog.text
    coef, _ = exact(x, y, 0.5, None, True)
    np.testing.assert_allclose(found.coef, coef, rtol=0, atol=1e-9 * np.abs(coef).max())


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["linear", "poly 3, homogeneous"])
def test_fewer_rows_than_features_and_an_alpha_that_is_nearly_nothing(
    name: str, weights: bool, intercept: bool, where: str, tmp_path: Path
) -> None:
    """K + alpha I has a small condition; in the directions that the rows do not have there is nothing but alpha."""
    x, y, weight = data(n=30, d=200 if name == "linear" else 8, weights=weights, mean=0.0)
    kernel, alpha = kernel_of(name, x.shape[1]), 2e-12
    w = np.ones(30) if weight is None else weight
    f = feature_map(kernel, x.shape[1]).design(x)
    mean, y_mean = (w @ f / w.sum(), w @ y / w.sum()) if intercept else (0.0, 0.0)
    root = np.sqrt(w)[:, None]
    square = root * ((f - mean) @ (f - mean).T) * root.T + alpha * np.eye(30)
    # with an intercept, and of rows without weight, there is a direction with alpha alone, which the targets have not
    square += root @ root.T if intercept else 0.0
    expected = (root * (f - mean)).T @ np.linalg.lstsq(square, root * (y - y_mean), rcond=1e-13)[0]
    with source(where, x, y, kernel, weight, intercept, tmp_path) as rows:
        found = solve_primal(rows, np.full(y.shape[1], alpha), intercept)
    np.testing.assert_allclose(found.coef, expected, rtol=0, atol=1e-11 * np.abs(expected).max())


def test_corrections_bring_back_what_the_square_of_the_condition_takes() -> None:
    rng = np.random.default_rng(3)
    u, v = np.linalg.qr(rng.standard_normal((400, 8)))[0], np.linalg.qr(rng.standard_normal((8, 8)))[0]
    x = u * np.logspace(0, -6, 8) @ v
    y = x @ rng.standard_normal((8, 1)) * 1e3 + 1e-9 * rng.standard_normal((400, 1))
    found = fit_primal_arrays(x, y, kernel_of("linear", 8), [1e-14])
    plain = np.linalg.solve(x.T @ x + 1e-14 * np.eye(8), x.T @ y)
    coef, _ = exact(x, y, 1e-14, None, False)
    error, plain_error = (np.abs(c - coef).max() / np.abs(coef).max() for c in (found.coef, plain))
    assert ", 0 corrections" not in found.solution.message
    assert error < 1e-8
    assert plain_error > 30 * error


@pytest.mark.parametrize("name", KERNELS)
def test_panels_and_ranges_change_nothing_but_rounding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_ranges: None
) -> None:
    x, y, weight = data(n=3500, d=9, weights=True)
    kernel = kernel_of(name, 9)
    whole = fit_primal_arrays(x, y, kernel, [0.1], weight=weight, fit_intercept=True)
    monkeypatch.setattr("dkrr.linalg.primal_passes.PANEL", 4)
    dataset = ingest(x, tmp_path / "rows.zarr", y=y, sample_weight=weight)
    tiled = fitted(dataset, kernel, 0.1, tmp_path, fit_intercept=True)
    np.testing.assert_allclose(tiled.coef, whole.coef, rtol=0, atol=1e-12 * np.abs(whole.coef).max())
    assert ", 0 corrections" in tiled.solution.message  # which would hide that the sums are wrong
    assert not list((tmp_path / "store/solves").glob("*"))


@pytest.mark.parametrize("part", ["X", "y", "weight"])
def test_chunks_that_changed_places_are_found(part: str, tmp_path: Path) -> None:
    x, y, weight = data(n=4096, weights=True)
    dataset = ingest(x, tmp_path / "rows.zarr", y=y, sample_weight=weight, rows_per_chunk=1024)
    a, b = (tmp_path / f"rows.zarr/{part}/c/{number}/0" for number in (1, 3))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    with pytest.raises(DamagedChunkError, match=f"{part} is damaged"):
        fitted(dataset, kernel_of("linear", 4), 0.1, tmp_path)
    a.write_bytes(first)
    b.write_bytes(second)
    assert fitted(dataset, kernel_of("linear", 4), 0.1, tmp_path).solution.converged


X, Y, _ = data()
LINEAR = {"kernel": "linear"}
REFUSED: list[tuple[type[Exception], str, Any, dict[str, Any], Any]] = [
    (
        ParameterError,
        r"176,851 features of 100 inputs \(300 rows\)",
        np.ones((300, 100)),
        {"kernel": "poly"},
        1.0,
    ),
    (ParameterError, "'rbf' has no finite number", X, {"kernel": "rbf"}, 1.0),
    (ParameterError, "at least 0", X, LINEAR, -1.0),
    (ParameterError, "3 values of alpha for 2 targets", X, LINEAR, [1.0] * 3),
    (DataError, "not finite", np.vstack([X[1:], np.full(4, 1e160)]), {"kernel": "poly", "degree": 2}, 1.0),
    (NotPositiveDefiniteError, "at feature 3", X[:, [0, 1, 2, 1]] * 2.0**-3, LINEAR, 0.0),
]


@pytest.mark.parametrize(("error", "message", "x", "kernel", "alpha"), REFUSED)
def test_what_cannot_be_done_is_refused_in_memory_and_on_disk(
    error: type[Exception], message: str, x: Any, kernel: Any, alpha: Any, tmp_path: Path
) -> None:
    made, dataset = make_kernel(**kernel), ingest(x, tmp_path / "rows.zarr", y=Y)
    with pytest.raises(error, match=message):
        fit_primal_arrays(x, Y, made, np.atleast_1d(alpha))
    with pytest.raises(error, match=message):
        fitted(dataset, made, alpha, tmp_path)


def test_rows_without_any_weight_are_refused_in_memory_and_on_their_way_to_the_disk(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all weights of X are zero"):
        ingest(X, tmp_path / "rows.zarr", y=Y, sample_weight=np.zeros(len(X)))
    with pytest.raises(DataError, match="every row has weight zero"):
        fit_primal_arrays(X, Y, make_kernel(**LINEAR), np.ones(1), weight=np.zeros(len(X)))


ALPHAS = [0.5, 2.0]


@contextmanager
def source(where: str, x: Any, y: Any, kernel: Any, weight: Any, intercept: bool, folder: Path) -> Iterator[Any]:
    if where == "memory":
        yield array_source(x, y, kernel, weight)
        return
    dataset = ingest(x, folder / "rows.zarr", y=y, sample_weight=weight)
    workspace = Workspace(store=str(folder), executor=InProcessExecutor())
    with stored_source(dataset, kernel, workspace, fit_intercept=intercept) as rows:
        yield rows


def left_out(f: np.ndarray, y: np.ndarray, alphas: Any, weight: Any, intercept: bool) -> np.ndarray:
    """Residuals of n fits."""
    found = np.empty(y.shape)
    for i in range(len(f)):
        others = np.arange(len(f)) != i
        coef, constant = exact(f[others], y[others], alphas, None if weight is None else weight[others], intercept)
        found[i] = y[i] - f[i] @ coef - constant
    return found


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["linear", "poly 2"])
def test_leave_one_out_is_n_fits(name: str, weights: bool, intercept: bool, where: str, tmp_path: Path) -> None:
    x, y, weight = data(n=60, d=3, weights=weights)
    kernel = kernel_of(name, 3)
    with source(where, x, y, kernel, weight, intercept, tmp_path) as rows:
        found = primal_leave_one_out(rows, ALPHAS, fit_intercept=intercept)
    brute = left_out(feature_map(kernel, 3).design(x), y, ALPHAS, weight, intercept)
    np.testing.assert_allclose(found.residuals, brute, rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("name", ["linear", "poly 3, homogeneous"])
def test_leave_one_out_of_fewer_rows_than_features(
    name: str, weights: bool, intercept: bool, where: str, tmp_path: Path
) -> None:
    """alpha is 1e-10 of the eigenvalues that the rows decide, and 1 - h_i as small."""
    x, y, weight = data(n=9, d=15, weights=weights)
    if name == "linear" and intercept:
        x += 1e5
    kernel, alphas = kernel_of(name, 15), [1e-9, 1e-8]
    with source(where, x, y, kernel, weight, intercept, tmp_path) as rows:
        found = primal_leave_one_out(rows, alphas, fit_intercept=intercept)
        errors = leave_one_out_errors(rows, alphas, fit_intercept=intercept)
    brute = left_out(feature_map(kernel, 15).design(x), y, alphas, weight, intercept)
    np.testing.assert_allclose(found.residuals, brute, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(errors.diagonal(), found.mean_squared_error, rtol=1e-12)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("intercept", [False, True])
def test_errors_of_many_alphas_are_those_of_leave_one_out_for_each(
    name: str, intercept: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.linalg.primal_passes.TASK_SECONDS", 1e-9)
    monkeypatch.setattr("dkrr.linalg.primal_passes.PANEL", 4)
    x, y, weight = data(n=2300, weights=True)
    kernel, alphas = kernel_of(name, 4), [0.01, 1.0, 100.0]
    with source(where, x, y, kernel, weight, intercept, tmp_path) as rows:
        errors = leave_one_out_errors(rows, alphas, fit_intercept=intercept)
    memory = array_source(x, y, kernel, weight)
    for found, alpha in zip(errors, alphas, strict=True):
        loo = primal_leave_one_out(memory, [alpha], fit_intercept=intercept)
        np.testing.assert_allclose(found, loo.mean_squared_error, rtol=1e-11)


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    ("value", "rows", "others"),
    [(1e5, [4], 0.0), (1e6, [4, 9], 0.0), (1e8, [4], 1.0), (1e7, [4, 9, 15, 29], 1.0), (1e5, list(range(1, 30)), 0.0)],
)
def test_rows_that_decide_a_direction_are_left_out_too(
    value: float, rows: list[int], others: float, weights: bool, intercept: bool, where: str, tmp_path: Path
) -> None:
    """1 - h_i is below 1e-10: the fit of the other rows says what it would have been."""
    x, y, weight = data(n=60, d=max(4, len(rows) + 2), weights=weights)
    x[:, -len(rows) :] *= others
    for column, row in enumerate(rows, start=1):
        x[row, -column] = value
        y[row] += 100
        weight = None if weight is None else np.where(np.arange(60) == row, 1.0, weight)
    alphas = [0.01, 1.0]
    with source(where, x, y, kernel_of("linear", x.shape[1]), weight, intercept, tmp_path) as given:
        found = primal_leave_one_out(given, alphas, fit_intercept=intercept)
        errors = leave_one_out_errors(given, alphas, fit_intercept=intercept)
    brute = left_out(x, y, alphas, weight, intercept)
    np.testing.assert_allclose(found.residuals, brute, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(errors.diagonal(), found.mean_squared_error, rtol=1e-9)
    # w_i D_i, of which intervals are made
    dense = KernelRidge(kernel="linear", alpha=0.01, fit_intercept=intercept, solver="cholesky")
    wanted = dense.fit(x, y[:, 0], weight).leave_one_out()
    np.testing.assert_allclose(found.inverse_diagonal[:, 0], wanted.inverse_diagonal[:, 0], rtol=1e-6)


@pytest.mark.parametrize("intercept", [False, True])
def test_rows_that_decide_every_direction_are_left_out_too(intercept: bool) -> None:
    """Beside alpha nothing is known of a direction without the row that has it."""
    x, y, _ = data(n=25, d=24)
    weight = (np.arange(25) != 7) * 1.0 if not intercept else None
    alphas = [1e-8, 1e-7]
    found = primal_leave_one_out(array_source(x, y, kernel_of("linear", 24), weight), alphas, fit_intercept=intercept)
    seen = np.ones(25) if weight is None else weight
    brute = left_out(x, y, alphas, weight, intercept)[seen > 0]
    np.testing.assert_allclose(found.residuals[seen > 0], brute, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [35, 105])
def test_a_point_that_the_others_do_not_span_cannot_be_left_out(seed: int) -> None:
    """d + 1 points of d features, the last one measured once; rounding alone makes the others span it."""
    rng = np.random.default_rng(seed)
    d = int(rng.integers(2, 9))
    points = rng.standard_normal((d + 1, d)) * [1, 10, 0.1, 5, 1, 2, 3, 1][:d]
    x, y = points[np.r_[np.repeat(np.arange(d), 4), d]], rng.standard_normal((4 * d + 1, 1))
    with pytest.raises(DataError, match=f"row {4 * d} decides its own prediction"):
        primal_leave_one_out(array_source(x, y, kernel_of("linear", d)), 0.0, fit_intercept=True)


def test_rows_that_decide_nearly_the_same_are_left_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together their matrix may be singular to rounding, alone never."""
    x, y, _ = data(n=60, d=22)
    x[:, 2:] = 0.0
    x[np.arange(20), np.arange(2, 22)] = 1e6
    given = array_source(x, y, kernel_of("linear", 22))
    wanted, factor, sizes = primal_leave_one_out(given, 0.1), primal.cho_factor, list[int]()

    def singular(matrix: np.ndarray) -> Any:
        sizes.append(len(matrix))
        if len(matrix) > 1:
            raise np.linalg.LinAlgError
        return factor(matrix)

    monkeypatch.setattr(primal, "cho_factor", singular)
    found = primal_leave_one_out(given, 0.1)
    assert sizes == [10, 10, *[1] * 20]
    np.testing.assert_allclose(found.residuals, wanted.residuals, rtol=1e-9)


def test_leave_one_out_that_cannot_be() -> None:
    x, y, _ = data(n=30)
    alone = array_source(x, y, kernel_of("linear", 4), (np.arange(30) == 4) * 1.0)
    with pytest.raises(DataError, match="row 4 decides its own prediction"):
        primal_leave_one_out(alone, 1.0, fit_intercept=True)
    x[:, 3] = 1e6 * (np.arange(30) == 4)
    decided = array_source(x, y, kernel_of("linear", 4))
    with pytest.raises(DataError, match="row 4 decides its own prediction"):
        primal_leave_one_out(decided, 0.0)
    assert np.isinf(leave_one_out_errors(decided, [0.0, 1.0])).tolist() == [[True] * y.shape[1], [False] * y.shape[1]]
    x[:, 3] = x[:, 2]
    with pytest.raises(NotPositiveDefiniteError, match="raise alpha to at least"):
        leave_one_out_errors(array_source(x, y, kernel_of("linear", 4)), [1.0, 0.0])
