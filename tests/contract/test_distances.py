"""Rows that lie far apart for their kernel: near neighbours among them count, and every path finds the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.linalg import solve
from sklearn.gaussian_process import kernels

import dkrr
from dkrr import KernelRidge
from dkrr.errors import ResidualError
from dkrr.kernels import kernel_from_dict

N, ALPHA = 240, 0.01


def distances(spec: dict[str, Any], A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """Squared distances, or 1-norms for laplacian, of differences in extended precision."""
    scale = np.asarray(spec.get("length_scale", 1.0), np.longdouble)
    differences = (A.astype(np.longdouble)[:, None] - B.astype(np.longdouble)[None]) / scale
    return np.abs(differences).sum(-1) if spec["kernel"] == "laplacian" else np.square(differences).sum(-1)


def reference(spec: dict[str, Any], A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """k(A, B) in extended precision, straight from the formula."""
    match spec["kernel"]:
        case "sum":
            return sum((reference(part, A, B) for part in spec["terms"]), start=np.zeros((len(A), len(B))))
        case "product":
            return np.prod([reference(part, A, B) for part in spec["factors"]], axis=0)
        case "linear":
            return A.astype(np.longdouble) @ B.T.astype(np.longdouble)
        case "constant":
            return np.full((len(A), len(B)), np.longdouble(spec["value"]))
        case "rbf" | "laplacian":
            return np.exp(-spec["gamma"] * distances(spec, A, B))
        case _:
            r = np.sqrt(2 * spec["nu"] * distances(spec, A, B))
            return {0.5: 1.0, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}[spec["nu"]] * np.exp(-r)


def pairs(scale: float, n: int = N, d: int = 3) -> np.ndarray:
    """Rows spread over ``scale``, each with a neighbour nearby."""
    rng = np.random.default_rng(int(np.log10(scale)))
    return np.repeat(scale * rng.standard_normal((n // 2, d)), 2, axis=0) + 0.3 * rng.standard_normal((n, d))


def two_groups(n: int = N, d: int = 3) -> np.ndarray:
    rng = np.random.default_rng(1)
    return 1e6 * rng.choice([-1.0, 1.0], (n, 1)) + 1.5 * rng.standard_normal((n, d))


ROWS = {"1e5": pairs(1e5), "1e8": pairs(1e8), "groups": two_groups()}
Y = np.sin(np.arange(N)) + 0.5
NEAR = np.random.default_rng(2).standard_normal((20, 3)) * 0.2
RBF = {"kernel": "rbf", "gamma": 1.0}
ARD = {"kernel": "rbf", "gamma": 0.7, "length_scale": [0.7, 1.3, 3.1]}
KERNELS = {
    "ard": ARD,
    "matern12": {"kernel": "matern", "nu": 0.5, "length_scale": 1.7},
    "matern32": {"kernel": "matern", "nu": 1.5, "length_scale": 0.7},
    "matern52": {"kernel": "matern", "nu": 2.5, "length_scale": [0.7, 1.3, 3.1]},
    "laplacian": {"kernel": "laplacian", "gamma": 0.3, "length_scale": [0.7, 1.3, 3.1]},
    "sum": {"kernel": "sum", "terms": [RBF, {"kernel": "matern", "nu": 1.5, "length_scale": 0.7}]},
    "product": {"kernel": "product", "factors": [ARD, {"kernel": "constant", "value": 2.0}]},
    "mixture": {
        "kernel": "sum",
        "terms": [
            RBF,
            {"kernel": "product", "factors": [{"kernel": "constant", "value": 1e-16}, {"kernel": "linear"}]},
        ],
    },
}
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "memory": ({}, 1e-11),
    "tiles": ({"solver": "cholesky", "tile_size": 64}, 1e-11),
    "cg": ({"solver": "cg", "tile_size": 64, "tol": 1e-11}, 1e-8),
    "mixed": ({"precision": "mixed", "tile_size": 64, "tol": 1e-11}, 1e-8),
    "mixed cg": ({"solver": "cg", "precision": "mixed", "tile_size": 64, "tol": 1e-11}, 1e-8),
    "float32": ({"solver": "cholesky", "precision": "float32", "tile_size": 64}, 1e-3),
}


def check(X: np.ndarray, spec: dict[str, Any], options: dict[str, Any], bar: float) -> KernelRidge:
    """Fit, and compare predictions at training rows and near them with a dense solve."""
    K = reference(spec, X, X).astype(float)
    coefficients = solve(K + ALPHA * np.eye(len(X)), Y[: len(X)], assume_a="pos")
    new = X[: len(NEAR)] + NEAR
    est = KernelRidge(alpha=ALPHA, kernel=kernel_from_dict(spec), **options).fit(X, Y[: len(X)])
    np.testing.assert_allclose(est.predict(X), K @ coefficients, rtol=0, atol=bar)
    np.testing.assert_allclose(est.predict(new), reference(spec, new, X).astype(float) @ coefficients, rtol=0, atol=bar)
    return est


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_solver_finds_near_rows_among_far_ones(rows: str, way: str) -> None:
    check(ROWS[rows], RBF, *WAYS[way])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("rows", "way"), [("1e8", "memory"), ("groups", "tiles"), ("groups", "mixed")])
def test_every_kernel_finds_near_rows_among_far_ones(rows: str, way: str, name: str) -> None:
    check(ROWS[rows], KERNELS[name], *WAYS[way])


@pytest.mark.parametrize("name", ["laplacian", "matern52"])
def test_compiled_blocks_take_differences_too(name: str) -> None:
    X = two_groups(1100)
    y = np.sin(np.arange(1100.0))
    K = reference(KERNELS[name], X, X).astype(float)
    coefficients = solve(K + np.eye(1100), y, assume_a="pos")
    for options in ({"solver": "cholesky"}, {"solver": "cg", "precision": "mixed", "tol": 1e-11}):
        est = KernelRidge(alpha=1.0, tile_size=1100, kernel=kernel_from_dict(KERNELS[name]), **options).fit(X, y)
        np.testing.assert_allclose(est.predict(X), K @ coefficients, rtol=0, atol=1e-8)


@pytest.mark.parametrize("rows", ["1e8", "groups"])
def test_deviations_and_left_out_rows_are_those_of_the_kernel(rows: str, tmp_path: Path) -> None:
    X, new = ROWS[rows], ROWS[rows][:20] + NEAR
    K, across = reference(RBF, X, X).astype(float), reference(RBF, new, X).astype(float)
    inverse = np.linalg.inv(K + ALPHA * np.eye(N))
    variance = 1 - np.einsum("ij,jk,ik->i", across, inverse, across)
    for options in ({}, {"solver": "cholesky", "tile_size": 64, "store": str(tmp_path / "store")}):
        est = KernelRidge(kernel="rbf", gamma=1.0, alpha=ALPHA, **options).fit(X, Y)
        _, deviations = est.predict(new, return_std=True, sigma2=1.0)
        np.testing.assert_allclose(deviations, np.sqrt(variance), rtol=0, atol=1e-9)
        left_out = est.leave_one_out()
        np.testing.assert_allclose(np.ravel(left_out.residuals), inverse @ Y / np.diag(inverse), rtol=0, atol=1e-10)


def test_kernels_of_scikit_learn_are_given_such_rows_as_they_are() -> None:
    X, kernel = ROWS["groups"], kernels.RBF() + 0.5 * kernels.RationalQuadratic()
    expected = kernel(X) @ solve(kernel(X) + ALPHA * np.eye(N), Y)
    est = KernelRidge(kernel=kernel, alpha=ALPHA).fit(X, Y)
    np.testing.assert_allclose(est.predict(X), expected, rtol=0, atol=1e-11)


def test_nystrom_regression_takes_the_same_distances() -> None:
    X = ROWS["groups"]
    exact = KernelRidge(kernel="rbf", gamma=1.0, alpha=ALPHA).fit(X, Y).predict(X)
    est = KernelRidge(kernel="rbf", gamma=1.0, alpha=ALPHA, solver="nystrom", solver_params={"num_centers": N})
    np.testing.assert_allclose(est.fit(X, Y).predict(X), exact, rtol=0, atol=1e-6)


def test_rows_far_from_all_earlier_ones_are_appended(tmp_path: Path) -> None:
    near = np.random.default_rng(3).standard_normal((150, 3))
    for number, shift in enumerate((1e4, 1e8)):
        X = np.vstack([near, near[:50] + shift])
        store, path = str(tmp_path / f"store{number}"), tmp_path / f"{number}.zarr"
        est = KernelRidge(kernel="rbf", gamma=1.0, alpha=ALPHA, solver="cholesky", tile_size=64, store=store)
        est.fit(dkrr.ingest(X[:150], path, y=Y[:150]))
        est.fit(dkrr.ingest(X[150:], path, y=Y[150:200], append=True))
        K = reference(RBF, X, X).astype(float)
        expected = K @ solve(K + ALPHA * np.eye(200), Y[:200], assume_a="pos")
        np.testing.assert_allclose(np.ravel(est.predict(X)), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"solver": "cholesky", "tile_size": 64}, {"solver": "cg", "tile_size": 64}])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_kernel_that_is_another_one_in_predictions_is_an_error(options: dict[str, Any], intercept: bool) -> None:
    X = np.random.default_rng(4).standard_normal((N, 2))
    weight = np.linspace(0.5, 2, N)
    est = KernelRidge(kernel=short_of_itself, alpha=1.0, fit_intercept=intercept, **options)
    with pytest.raises(ResidualError, match="is predicted as"):
        est.fit(X, Y, sample_weight=weight)


def short_of_itself(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """exp(-|a - b|^2), 0.7 in place of 1 for a row and itself wherever the two sides are not of one length."""
    K = np.exp(-np.square(A[:, None] - B[None]).sum(-1))
    return np.where((K == 1.0) & (len(A) != len(B)), 0.7, K)


@pytest.mark.parametrize("unit", [2.0**-600, 1e-165, 1e-310, 1e140])
@pytest.mark.parametrize("options", [{}, {"tile_size": 64}, {"solver": "cg"}], ids=str)
def test_the_length_of_rows_does_not_matter_to_cosine(options: dict[str, Any], unit: float) -> None:
    rng = np.random.default_rng(0)
    X = rng.random((N, 3)) + 0.1
    y = np.sin(3 * X[:, 0]) + X[:, 1]
    X[5] = 0.0
    plain, other = (KernelRidge(0.1, kernel="cosine", **options).fit(X * scale, y) for scale in (1.0, unit))
    tolerance = 1e-5 if unit == 1e-310 else 1e-7 if unit != 2.0**-600 else 0.0  # of numbers that have fewer digits
    np.testing.assert_allclose(other.predict(X * unit), plain.predict(X), rtol=0, atol=tolerance)
