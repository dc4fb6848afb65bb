"""Every alpha from one eigendecomposition: against dense solves, refits, and the formulas of one alpha."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.errors import NotPositiveDefiniteError
from dkrr.linalg.dense import EigenRidge
from tests.reference import reference_kernel

RNG = np.random.default_rng(5)
N, T = 90, 3
X = RNG.standard_normal((N, 4))
Z = RNG.standard_normal((7, 4))
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2], 3 + X[:, 3]], axis=1) + 0.1 * RNG.standard_normal((N, T))
WEIGHT = RNG.uniform(0.2, 3, N)
ALPHAS = np.array([1e-4, 0.03, 1.0, 40.0])
KERNEL = {"kernel": "rbf", "gamma": 0.3}
K = reference_kernel(KERNEL, X, X)
K_Z = reference_kernel(KERNEL, Z, X)

CASES = [(weighted, border) for weighted in (False, True) for border in (False, True)]
case = pytest.mark.parametrize(("weighted", "border"), CASES, ids=lambda flag: "yes" if flag else "no")


def ridge(weighted: bool, border: bool) -> EigenRidge:
    root = np.sqrt(WEIGHT) if weighted else None
    s = np.ones(N) if root is None else root
    return EigenRidge(s[:, None] * K * s, Y, root, fit_intercept=border, positive_semidefinite=True)


def bordered(K: np.ndarray, weight: np.ndarray, alpha: float, border: bool) -> np.ndarray:
    """The inverse of [[A, s], [s^T, 0]], or of A."""
    s = np.sqrt(weight)
    matrix = s[:, None] * K * s + alpha * np.eye(len(K))
    if border:
        matrix = np.block([[matrix, s[:, None]], [s[None], np.zeros((1, 1))]])
    return np.linalg.inv(matrix)


def brute(
    rows: np.ndarray, at: np.ndarray, weight: np.ndarray, alpha: float, border: bool, alphas: np.ndarray | None = None
) -> np.ndarray:
    """Predictions at K[:, rows] = ``at`` of the fit of some rows, solved densely."""
    s = np.sqrt(weight[rows])
    inverse = bordered(K[np.ix_(rows, rows)], weight[rows], alpha, border)
    right = s[:, None] * Y[rows]
    if border:
        right = np.vstack([right, np.zeros((1, T))])
    solution = inverse @ right
    values = at[:, rows] @ (s[:, None] * solution[: len(rows)])
    return values + solution[len(rows)] if border else values


@case
def test_solutions_equal_dense_solves(weighted: bool, border: bool) -> None:
    system = ridge(weighted, border)
    weight = WEIGHT if weighted else np.ones(N)
    u, intercept = system.solve(ALPHAS)
    predictions = system.predict(system.project(K_Z), ALPHAS)
    assert u.shape == (N, T, 4)
    for number, alpha in enumerate(ALPHAS):
        expected = brute(np.arange(N), K_Z, weight, alpha, border)
        values = K_Z @ (np.sqrt(weight)[:, None] * u[:, :, number]) + intercept[:, number]
        np.testing.assert_allclose(values, expected, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(predictions[:, :, number], expected, rtol=1e-8, atol=1e-9)
    assert border or not intercept.any()
    place = [2, 0, 2]
    each = system.solve_each(ALPHAS[place])
    for target, number in enumerate(place):  # one alpha for each target
        np.testing.assert_allclose(each[:, target], u[:, target, number], rtol=1e-9, atol=1e-12)


@case
@pytest.mark.parametrize("size", [1, 60])
def test_a_fold_equals_refitting(weighted: bool, border: bool, size: int) -> None:
    system = ridge(weighted, border)
    weight = WEIGHT if weighted else np.ones(N)
    rows = RNG.permutation(N)[:size]
    rest = np.setdiff1d(np.arange(N), rows)
    residual = system.leave_fold_out(rows, ALPHAS)
    if size == 1:
        np.testing.assert_allclose(residual, system.leave_one_out(ALPHAS)[rows], rtol=1e-8, atol=1e-9)
    for number, alpha in enumerate(ALPHAS):
        expected = Y[rows] - brute(rest, K[rows], weight, alpha, border)
        np.testing.assert_allclose(residual[:, :, number], expected, rtol=1e-7, atol=1e-9)


def test_an_alpha_for_which_the_matrix_is_not_positive_definite_is_named() -> None:
    system = EigenRidge(K - 0.5 * np.eye(N), Y)
    with pytest.raises(NotPositiveDefiniteError, match=r"smallest eigenvalue is -0\.5.*alpha 0\.1") as caught:
        system.solve(np.array([1.0, 0.1]))
    assert caught.value.suggested_alpha == pytest.approx(0.5, rel=1e-3)
