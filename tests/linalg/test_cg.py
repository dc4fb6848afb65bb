"""Conjugate gradients in memory against dense solves, and every way in which they can fail."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from dkrr.errors import ConvergenceError, DataError, NotPositiveDefiniteError, PreconditionerError
from dkrr.linalg.cg import Identity, conjugate_gradients
from dkrr.linalg.solution import IterativeSettings


class System:
    """K of smooth random rows, right-hand sides, and products that count columns."""

    def __init__(self, n: int = 300, t: int = 5, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((n, 3))
        self.matrix = np.exp(-0.2 * np.square(x[:, None] - x[None]).sum(axis=-1))
        self.rhs = rng.standard_normal((n, t))
        self.columns: list[int] = []
        self.true_columns: list[int] = []

    def multiply(self, p: np.ndarray) -> np.ndarray:
        self.columns.append(p.shape[1])
        return self.matrix @ p

    def single(self, p: np.ndarray) -> np.ndarray:
        self.columns.append(p.shape[1])
        return (self.matrix.astype(np.float32) @ p.astype(np.float32)).astype(np.float64)

    def exact(self, p: np.ndarray) -> np.ndarray:
        self.true_columns.append(p.shape[1])
        return self.matrix @ p

    def solution(self, alpha: np.ndarray) -> np.ndarray:
        n = len(self.matrix)
        columns = [np.linalg.solve(self.matrix + a * np.eye(n), self.rhs[:, k]) for k, a in enumerate(alpha)]
        return np.stack(columns, axis=1)

    def residual(self, x: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        r = self.rhs - self.matrix @ x - alpha * x
        return np.linalg.norm(r, axis=0) / np.linalg.norm(self.rhs, axis=0)


class Spectral:
    """The inverse of the best approximation of a given rank, plus alpha."""

    inexact = False

    def __init__(self, matrix: np.ndarray, rank: int) -> None:
        w, v = np.linalg.eigh(matrix)
        self.w, self.v, self.description = w[-rank:, None], v[:, -rank:], f"eigenvectors, rank {rank}"

    def apply(self, r: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        return (r - self.v @ (self.w / (self.w + alpha) * (self.v.T @ r))) / alpha


ALPHA = np.array([1e-2, 1.0, 0.1, 10.0, 0.3])


@pytest.mark.parametrize("rank", [0, 40])
@pytest.mark.parametrize("n", [1, 300])
def test_each_column_has_its_own_alpha(n: int, rank: int) -> None:
    system = System(n)
    preconditioner = Spectral(system.matrix, min(n, rank)) if rank else Identity()
    result = conjugate_gradients(system.multiply, system.rhs, ALPHA, preconditioner, IterativeSettings(tol=1e-11))
    np.testing.assert_allclose(result.x, system.solution(ALPHA), rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(result.relative_residual, system.residual(result.x, ALPHA), rtol=0.05, atol=1e-14)
    assert result.converged.all()
    assert (result.relative_residual <= 1e-11).all()
    assert len(result.history) == result.num_iterations + 1
    assert result.num_iterations == result.iterations.max()
    largest = np.abs(system.rhs - system.matrix @ result.x - ALPHA * result.x).max(axis=0)
    np.testing.assert_allclose(result.largest_residual, largest, rtol=0.05, atol=1e-13)


def test_the_tolerance_is_relative_to_each_column() -> None:
    system = System(t=3)
    system.rhs *= [1e-120, 1.0, 1e120]
    alpha = np.full(3, 0.1)
    result = conjugate_gradients(system.multiply, system.rhs, alpha, Identity(), IterativeSettings(tol=1e-6))
    assert (system.residual(result.x, alpha) <= 1e-6).all()
    # not much further than was asked for: nobody goes on for the sake of another column
    assert (system.residual(result.x, alpha) > 1e-9).all()


def test_zero_targets_are_done_at_once() -> None:
    system = System()
    system.rhs[:, [1, 3]] = 0.0
    result = conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), IterativeSettings())
    assert not result.x[:, [1, 3]].any()
    assert not result.relative_residual[[1, 3]].any()
    assert result.iterations[[1, 3]].tolist() == [0, 0]
    assert max(system.columns) == 3
    nothing = System()
    nothing.rhs[:] = 0.0
    result = conjugate_gradients(nothing.multiply, nothing.rhs, ALPHA, Identity(), IterativeSettings())
    assert result.converged.all()
    assert nothing.columns == []


# --- true residuals ---------------------------------------------------------------------------------------------------


def test_an_approximate_product_gives_the_exact_answer() -> None:
    system = System()
    settings = IterativeSettings(tol=1e-11)
    result = conjugate_gradients(system.single, system.rhs, ALPHA, Identity(), settings, true_multiply=system.exact)
    assert (system.residual(result.x, ALPHA) <= 1e-11).all()
    np.testing.assert_allclose(result.x, system.solution(ALPHA), rtol=1e-8, atol=1e-8)
    assert len(system.true_columns) < len(system.columns) / 8


def test_a_product_that_errs_once_is_found_by_the_true_residual() -> None:
    system = System()

    def multiply(p: np.ndarray) -> np.ndarray:
        product = system.multiply(p)
        if len(system.columns) == 30:
            product[7] *= 1.0 + 1e-3
        return product

    settings = IterativeSettings(tol=1e-9)
    result = conjugate_gradients(multiply, system.rhs, ALPHA, Identity(), settings)
    assert (system.residual(result.x, ALPHA) <= 1e-9).all()


def test_a_tolerance_out_of_reach_says_what_is_in_reach() -> None:
    system = System()
    with pytest.raises(ConvergenceError, match=r"stays at .* out of reach \(. of 5 targets\)") as caught:
        conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), IterativeSettings(tol=1e-16))
    error = caught.value
    assert error.stagnated
    assert 1e-16 < error.relative_residual.max() < 1e-10
    assert error.num_iterations < 1000
    assert "set tol to at least" in error.hint
    wanted = float(error.hint.split("at least ")[1].split(",")[0])
    again = conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), IterativeSettings(tol=wanted))
    assert again.converged.all()


# --- ways to fail -----------------------------------------------------------------------------------------------------


def test_too_few_iterations_raise_with_the_history() -> None:
    system = System()
    settings = IterativeSettings(tol=1e-10, max_iter=12)
    with pytest.raises(ConvergenceError, match=r"did not converge in 12 iterations.*target 0.*tol = 1e-10") as caught:
        conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), settings)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.num_iterations == 12
    assert len(error.history) == 13
    assert error.history[0].tolist() == [1.0] * 5
    assert not error.stagnated
    assert error.converged.tolist() == (error.relative_residual <= 1e-10).tolist()
    for word in ("max_iter", "rank", "tol", "alpha", "allow_unconverged"):
        assert word in error.hint
    assert error.exit_code == 5
    allowed = replace(settings, allow_unconverged=True)
    result = conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), allowed)
    assert not result.converged.all()
    np.testing.assert_allclose(result.relative_residual, system.residual(result.x, ALPHA), rtol=1e-6)


class Negative:
    description, inexact = "minus one", False

    def apply(self, r: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        return -r


def spoil(what: str, system: System) -> None:
    if what == "indefinite":
        system.matrix -= 2.0 * np.eye(len(system.matrix))
    elif what == "nan":
        system.matrix[3, 4] = np.nan
    elif what != "preconditioner":
        system.rhs[:, 2] = float(what)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("indefinite", NotPositiveDefiniteError, r"CG: p\^T A p = -.* <= 0 at iteration \d+ of target"),
        ("nan", NotPositiveDefiniteError, "not finite"),
        ("inf", DataError, "norm of target 2"),
        ("1e-200", DataError, "norm of target 2"),
        ("preconditioner", PreconditionerError, r"r\^T z = -.*preconditioner \(minus one\) is not positive definite"),
    ],
)
def test_what_cannot_be_solved_is_named(what: str, error: type[Exception], message: str) -> None:
    system = System()
    spoil(what, system)
    precondition = Negative() if what == "preconditioner" else Identity()
    with pytest.raises(error, match=message) as caught:
        conjugate_gradients(system.multiply, system.rhs, np.full(5, 0.1), precondition, IterativeSettings())
    if what == "indefinite":
        found = pickle.loads(pickle.dumps(caught.value))
        assert found.curvature < 0
        assert 0.1 < found.suggested_alpha <= 2.0, "not beyond the smallest eigenvalue"


# --- where to begin ---------------------------------------------------------------------------------------------------


def test_a_good_start_saves_products() -> None:
    system = System()
    settings = IterativeSettings(tol=1e-8)
    first = conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), settings)
    cold = len(system.columns)
    start = first.x * (1 + 1e-5 * np.random.default_rng(0).standard_normal(first.x.shape))
    system.columns.clear()
    kept = start.copy()
    second = conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), settings, start=start)
    assert len(system.columns) < 0.8 * cold
    assert np.array_equal(start, kept), "the start is the caller's"
    assert (system.residual(second.x, ALPHA) <= 1e-8).all()
    system.columns.clear()
    third = conjugate_gradients(system.multiply, system.rhs, ALPHA, Identity(), settings, start=first.x)
    assert len(system.columns) == 1, "a start that is the answer costs one product"
    assert np.array_equal(third.x, first.x)
