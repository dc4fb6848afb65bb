"""precision="mixed" gives the float64 answer, or an error that is right about why, and soon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dkrr

N = 120
RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal(N)
ROWS = RNG.standard_normal((N, 3))
MIXED: dict[str, Any] = {"tile_size": 64, "precision": "mixed"}


def matrix_of(values: np.ndarray) -> np.ndarray:
    """A symmetric matrix with these eigenvalues."""
    q, _ = np.linalg.qr(np.random.default_rng(1).standard_normal((len(values), len(values))))
    a = (q * values) @ q.T
    return (a + a.T) / 2


@pytest.mark.parametrize("targets", ["smooth", "noise"])
def test_what_float64_solves_mixed_solves(targets: str) -> None:
    """The residual that can be reached is cond eps |u|; the iterations stop there and do not move away again."""
    condition = 1e11
    matrix = matrix_of(np.logspace(0, -np.log10(condition), N))
    y = NOISE if targets == "noise" else matrix @ NOISE
    exact = dkrr.KernelRidge(0.0, kernel="precomputed").fit(matrix, y)
    mixed = dkrr.KernelRidge(0.0, kernel="precomputed", **MIXED).fit(matrix, y)
    assert mixed.solution_.converged
    assert mixed.solution_.num_iterations < 1000
    if targets == "noise":
        off = np.linalg.norm(mixed.dual_coef_ - exact.dual_coef_) / np.linalg.norm(exact.dual_coef_)
        assert off < 100 * condition * np.finfo(float).eps
    else:  # the residual, which tol is about, is what can be told of the coefficients
        assert np.linalg.norm(mixed.predict(matrix) - y) <= 2e-8 * np.linalg.norm(y)


def test_what_float32_cannot_precondition_says_what_can() -> None:
    matrix = matrix_of(np.logspace(0, -13, N))
    dkrr.KernelRidge(0.0, kernel="precomputed").fit(matrix, NOISE)
    with pytest.raises(
        dkrr.ConvergenceError, match=r'no preconditioner at this .*: set precision = "float64"'
    ) as caught:
        dkrr.KernelRidge(0.0, kernel="precomputed", **MIXED).fit(matrix, NOISE)
    assert caught.value.num_iterations <= 400


SINGULAR: dict[str, Any] = {
    "duplicates": (np.vstack([ROWS[: N // 2]] * 2), {"kernel": "rbf"}),
    "low rank": (ROWS, {"kernel": "linear"}),
    "zeros": (0 * ROWS, {"kernel": "linear"}),
    "indefinite": (matrix_of(np.append(np.logspace(0, -3, N - 1), -1e-6)), {"kernel": "precomputed"}),
}


@pytest.mark.parametrize("targets", ["in the range", "noise"])
@pytest.mark.parametrize("name", SINGULAR)
def test_what_float64_refuses_mixed_refuses(name: str, targets: str) -> None:
    X, options = SINGULAR[name]
    y = X[:, 0] if targets == "in the range" else NOISE
    for way in ({"tile_size": 64}, MIXED):
        with pytest.raises(dkrr.NotPositiveDefiniteError, match="raise alpha"):
            dkrr.KernelRidge(0.0, **options, **way).fit(X, y)


@pytest.mark.parametrize("name", ["duplicates", "zeros"])
def test_a_small_ridge_is_enough(name: str) -> None:
    X, options = SINGULAR[name]
    y = np.sin(X[:, 0])
    exact = dkrr.KernelRidge(1e-9, **options).fit(X, y)
    mixed = dkrr.KernelRidge(1e-9, **options, **MIXED).fit(X, y)
    assert mixed.predict(X) == pytest.approx(exact.predict(X), abs=1e-6)


def test_what_leaves_a_tenth_of_the_targets_is_no_answer() -> None:
    """A linear kernel of three columns and a ridge of 1e-12: huge coefficients make any backward error small."""
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((247, 3)), rng.standard_normal(247)
    est = dkrr.KernelRidge(1e-12, kernel="linear", solver="cholesky", precision="mixed", tile_size=128)
    hint, residual = "", np.inf
    try:  # rounding decides, and so does the kernel of the BLAS
        residual = max(est.fit(x, y).solution_.relative_residual)
    except dkrr.ConvergenceError as error:
        hint = error.hint
    assert residual < 0.1 or 'set precision = "float64"' in hint
