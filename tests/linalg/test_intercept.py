"""The intercept in every solver on tiles and in memory, against dense solves of the bordered system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from dkrr.dataset import Dataset, ingest
from dkrr.errors import DataError
from dkrr.fit.fitting import FitResult, FitSettings, fit_rows
from dkrr.kernels import make_kernel
from dkrr.linalg.blocks import centre_dataset, centre_targets, right_hand_sides
from dkrr.linalg.dense import fit_dense
from dkrr.linalg.matmul import residual_norms
from dkrr.linalg.nystrom import NystromResult, fit_nystrom
from dkrr.linalg.solution import IterativeSettings, NystromSettings
from tests.linalg.helpers import operator, rows
from tests.linalg.test_solve import workspace
from tests.reference import dense_bordered

N, TILE = 230, 64
MEANS = np.array([0.0, 40.0, -7.0])
TIGHT = IterativeSettings(tol=1e-11, rank=40, max_iter=2000)
# of each way: its settings, and how closely it meets the dense solve
EXACT: dict[str, tuple[dict[str, Any], float]] = {
    "cholesky": ({}, 1e-10),
    "stored": ({"gram": "stored"}, 1e-10),
    "float32": ({"precision": "float32"}, 2e-4),
    "mixed": ({"precision": "mixed"}, 1e-8),
    "cg": ({"solver": "cg"}, 1e-8),
    "cg stored": ({"solver": "cg", "gram": "stored"}, 1e-8),
    "cg mixed": ({"solver": "cg", "precision": "mixed"}, 1e-8),
}


def data(folder: Path, *, weights: bool, n: int = N) -> Dataset:
    """Three targets with means; some weights are zero."""
    folder.mkdir(exist_ok=True)
    plain = rows(folder, n=n, weights=weights)
    assert plain.y is not None
    weight = None if plain.weight is None else plain.weight.read(0, n)[:, 0]
    return ingest(plain.X.read(0, n), folder / "shifted.zarr", y=plain.y.read(0, n) + MEANS, sample_weight=weight)


def values(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    n = dataset.num_rows
    assert dataset.y is not None
    weight = None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
    return dataset.X.read(0, n), dataset.y.read(0, n), weight


def settings(dataset: Dataset, **parameters: Any) -> FitSettings:
    defaults = {"alpha": (0.1,), "tile_size": TILE, "iterative": TIGHT, "fit_intercept": True}
    return FitSettings(kernel=operator(dataset).kernel, **defaults | parameters)


def fit(folder: Path, dataset: Dataset, start: Any = None, **parameters: Any) -> tuple[np.ndarray, FitResult]:
    with fit_rows(dataset, settings(dataset, **parameters), workspace(folder), start=start) as result:
        return result.dual_coef.read(0, dataset.num_rows), result


def expected_of(dataset: Dataset, alpha: Any = 0.1) -> tuple[np.ndarray, np.ndarray]:
    x, y, weight = values(dataset)
    kernel = operator(dataset).kernel
    return dense_bordered(kernel(x, x), y, alpha, weight)


@pytest.mark.parametrize(
    ("way", "weights", "alpha"),
    [*((way, True, (0.1, 3.0, 0.1)) for way in EXACT), ("cholesky", False, (0.1,)), ("cg", False, (0.1,))],
)
def test_every_solver_agrees_with_the_dense_bordered_system(
    tmp_path: Path, way: str, weights: bool, alpha: tuple[float, ...]
) -> None:
    dataset = data(tmp_path, weights=weights)
    parameters, tolerance = EXACT[way]
    found, result = fit(tmp_path, dataset, alpha=alpha, **parameters)
    expected, intercept = expected_of(dataset, alpha)
    assert result.intercept is not None
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    np.testing.assert_allclose(result.intercept, intercept, rtol=0, atol=tolerance)
    weight = values(dataset)[2]
    # s^T u is the sum of the coefficients, with weights and without
    assert np.abs(found.sum(axis=0)).max() < 1e-13 * np.abs(found).sum(axis=0).min()
    if weight is not None:
        assert not found[weight == 0].any()
    assert max(result.solution.relative_residual) <= (1e-5 if way == "float32" else 1e-11)
    assert max(result.solution.backward_error) <= (1e-6 if way == "float32" else 1e-11)
    assert not list((tmp_path / "store/solves").iterdir())


@pytest.mark.parametrize("way", ["cholesky", "mixed", "cg"])
def test_a_number_added_to_a_target_is_added_to_its_intercept(tmp_path: Path, way: str) -> None:
    dataset = data(tmp_path / "a", weights=True)
    x, y, weight = values(dataset)
    shifted = ingest(x, tmp_path / "b.zarr", y=y + 2.0**26, sample_weight=weight)
    parameters, tolerance = EXACT[way]
    found, first = fit(tmp_path / "a", dataset, **parameters)
    again, second = fit(tmp_path, shifted, **parameters)
    # what the sum y + 2^26 rounds away is 7e-9 of y
    np.testing.assert_allclose(again, found, rtol=0, atol=max(tolerance, 1e-6) * np.abs(found).max())
    assert first.intercept is not None
    np.testing.assert_allclose(second.intercept, first.intercept + 2.0**26, rtol=0, atol=max(tolerance, 1e-7))
    assert max(second.solution.relative_residual) <= (1e-5 if way == "float32" else 1e-11)


# --- the residual of the whole ----------------------------------------------------------------------------------------


def test_the_residual_is_that_of_both_rows_of_the_system(tmp_path: Path) -> None:
    dataset = data(tmp_path, weights=True)
    system, work = operator(dataset, alpha=0.1), workspace(tmp_path)
    x, y, weight = values(dataset)
    assert weight is not None
    root = np.sqrt(weight)
    matrix = root[:, None] * system.kernel(x, x) * root + 0.1 * np.eye(N)
    rhs = right_hand_sides(dataset, system, [0, 1, 2], str(tmp_path / "solve"), centring=centre_dataset(dataset))
    u = type(rhs).create(str(tmp_path / "solve"), "u", rhs.grid, 3, "float64")
    guess = np.random.default_rng(0).standard_normal((N, 3))
    guess[:, 1] -= root * (root @ guess[:, 1]) / weight.sum()
    u.fill(guess)
    norms = residual_norms(system, rhs, u, work, str(tmp_path / "solve"), normal=system.normal())
    centred = root[:, None] * (y - weight @ y / weight.sum())
    left = centred - matrix @ guess
    b = root @ left / weight.sum()
    residual = left - root[:, None] * b
    np.testing.assert_allclose(norms.intercept, b, rtol=1e-10)
    relative = np.linalg.norm(residual, axis=0) / np.linalg.norm(centred, axis=0)
    np.testing.assert_allclose(norms.relative_residual, relative, rtol=1e-10)
    size = np.abs(matrix).sum(axis=1).max() * np.abs(guess).max(axis=0)
    first = np.abs(residual).max(axis=0) / (size + np.abs(centred - root[:, None] * b).max(axis=0))
    last = np.abs(root @ guess) / (root.sum() * np.abs(guess).max(axis=0))
    np.testing.assert_allclose(norms.backward_error, np.maximum(first, last), rtol=1e-8)
    assert last[1] < 1e-15


@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("weights", [False, True])
def test_digits_that_the_difference_loses_are_brought_back(tmp_path: Path, precision: str, weights: bool) -> None:
    """A function of the kernel's few features and a constant fits exactly: u is 1e-9 of b v at this alpha."""
    plain = rows(tmp_path, n=N, weights=weights)
    x, _, weight = values(plain)
    y = x @ np.array([[1.0], [-2.0], [0.5], [0.0]]) + 9
    dataset = ingest(x, tmp_path / "exact.zarr", y=y, sample_weight=weight)
    alpha = 1e-7 if precision == "float64" else 1e-2
    kernel = make_kernel("linear").resolve(4)
    chosen = FitSettings(kernel=kernel, alpha=(alpha,), tile_size=TILE, precision=precision, fit_intercept=True)
    with fit_rows(dataset, chosen, workspace(tmp_path)) as result:
        found = [(result.dual_coef.read(0, N), result.intercept, result.solution)]
    dense = fit_dense(kernel, x, y, np.array([alpha]), weight, precision, fit_intercept=True)
    ridge = Ridge(alpha=alpha, solver="cholesky").fit(x, y, sample_weight=weight)
    eps = np.finfo(precision).eps
    for dual_coef, intercept, solution in [*found, (dense.dual_coef, dense.intercept, dense.solution)]:
        assert solution.backward_error[0] <= eps
        np.testing.assert_allclose((x.T @ dual_coef).ravel(), np.ravel(ridge.coef_), rtol=0, atol=1e4 * eps)
        np.testing.assert_allclose(intercept, ridge.intercept_, rtol=0, atol=1e4 * eps)


def test_targets_that_cannot_be_centred(tmp_path: Path) -> None:
    y = np.full((5, 1), 1.5e308)
    with pytest.raises(DataError, match="weighted mean of target 0 is inf"):
        centre_targets(lambda: [(y, None)], 1)


# --- centres in place of rows -----------------------------------------------------------------------------------------


def nystrom(folder: Path, dataset: Dataset, chosen: FitSettings, num_centers: int, tol: float) -> NystromResult:
    return fit_nystrom(
        dataset,
        chosen.kernel,
        chosen.alpha,
        NystromSettings(num_centers=num_centers),
        IterativeSettings(tol=tol),
        workspace(folder),
        precision=chosen.precision,
        fit_intercept=chosen.fit_intercept,
    )


@pytest.mark.parametrize(("precision", "weights"), [("float64", False), ("mixed", True)])
@pytest.mark.parametrize("kernel", [("rbf", {"gamma": 0.3}), ("linear", {}), ("poly", {"degree": 2, "gamma": 0.3})])
def test_nystrom_is_dense_least_squares_with_a_constant(
    tmp_path: Path, precision: str, weights: bool, kernel: tuple[str, dict[str, Any]]
) -> None:
    dataset = data(tmp_path, weights=weights, n=700)
    x, y, weight = values(dataset)
    chosen = make_kernel(kernel[0], **kernel[1]).resolve(4)
    alphas = (1e-2, 5.0, 1e-2)
    chosen_settings = FitSettings(kernel=chosen, alpha=alphas, tile_size=TILE, precision=precision, fit_intercept=True)
    result = nystrom(tmp_path, dataset, chosen_settings, 50, 1e-10)
    assert result.intercept is not None
    centre = np.zeros(4) if result.center is None else result.center
    b = chosen(x - centre, result.centres - centre)
    square = chosen(result.centres - centre, result.centres - centre)
    w = np.ones(len(x)) if weight is None else weight
    lam, q = np.linalg.eigh(square)
    half = (np.sqrt(np.maximum(lam, 0))[:, None] * q.T)[lam > 0]
    for target, alpha in enumerate(alphas):
        # rows of weighted misfits above rows of the penalty; the last column is the constant
        above = np.sqrt(w)[:, None] * np.column_stack([b, np.ones(len(x))])
        below = np.sqrt(alpha) * np.column_stack([half, np.zeros(len(half))])
        right = np.concatenate([np.sqrt(w) * y[:, target], np.zeros(len(half))])
        c, *_ = np.linalg.lstsq(np.vstack([above, below]), right, rcond=1e-13)
        expected = b @ c[:-1] + c[-1]
        found = b @ result.dual_coef[:, target] + result.intercept[target]
        assert np.linalg.norm(found - expected) < 1e-7 * np.linalg.norm(expected - expected.mean())
    assert max(result.solution.relative_residual) <= 2e-10
    assert result.solution.num_iterations < 60
