"""Conjugate gradients in memory against dense solves, every way in which they can fail, and what they say."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from itertools import count
from typing import Any

import numpy as np
import pytest

from dkrr.errors import ConvergenceError, DataError, NotPositiveDefiniteError, PreconditionerError
from dkrr.linalg.cg import Preconditioner, conjugate_gradients
from dkrr.linalg.cg_solver import Forecast
from dkrr.linalg.solution import Foreseen, IterativeSettings
from dkrr.linalg.workspace import MOST_POINTS, ResidualTrace

ALPHA = np.array([1e-2, 1.0, 0.1, 10.0, 0.3])


class System:
    """K of smooth random rows, right-hand sides, and products that count columns."""

    def __init__(self, n: int = 300, t: int = 5) -> None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((n, 3))
        self.matrix, self.rhs = np.exp(-0.2 * np.square(x[:, None] - x[None]).sum(axis=-1)), rng.standard_normal((n, t))
        self.columns: list[int] = []

    def multiply(self, p: np.ndarray) -> np.ndarray:
        self.columns.append(p.shape[1])
        return self.matrix @ p

    def solve(self, alpha: np.ndarray = ALPHA, precondition: Any = None, multiply: Any = None, **options: Any) -> Any:
        names = ("tol", "max_iter", "allow_unconverged")
        settings = IterativeSettings(**{name: options.pop(name) for name in names if name in options})
        precondition, multiply = precondition or Preconditioner(), multiply or self.multiply
        return conjugate_gradients(multiply, self.rhs, alpha, precondition, settings, **options)

    def residual(self, x: np.ndarray, alpha: np.ndarray = ALPHA) -> np.ndarray:
        return np.linalg.norm(self.rhs - self.matrix @ x - alpha * x, axis=0) / np.linalg.norm(self.rhs, axis=0)


@pytest.mark.parametrize("n", [1, 300])
def test_each_column_has_its_own_alpha(n: int) -> None:
    system = System(n)
    result = system.solve(tol=1e-11)
    for k, alpha in enumerate(ALPHA):
        expected = np.linalg.solve(system.matrix + alpha * np.eye(n), system.rhs[:, k])
        np.testing.assert_allclose(result.x[:, k], expected, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(result.relative_residual, system.residual(result.x), rtol=0.05, atol=1e-14)
    assert result.converged.all()
    assert (result.relative_residual <= 1e-11).all()
    assert len(result.history) == result.num_iterations + 1 == result.iterations.max() + 1
    largest = np.abs(system.rhs - system.matrix @ result.x - ALPHA * result.x).max(axis=0)
    np.testing.assert_allclose(result.largest_residual, largest, rtol=0.05, atol=1e-13)


def test_the_tolerance_is_relative_to_each_column() -> None:
    system, alpha = System(t=3), np.full(3, 0.1)
    system.rhs *= [1e-120, 1.0, 1e120]
    found = system.residual(system.solve(alpha, tol=1e-6).x, alpha)
    # not much further than was asked for: nobody goes on for the sake of another column
    assert ((found <= 1e-6) & (found > 1e-9)).all()


# --- true residuals ---------------------------------------------------------------------------------------------------


def test_an_approximate_product_gives_the_exact_answer() -> None:
    system, single = System(), []

    def multiply(p: np.ndarray) -> np.ndarray:
        single.append(p.shape[1])
        return (system.matrix.astype(np.float32) @ p.astype(np.float32)).astype(np.float64)

    result = system.solve(multiply=multiply, true_multiply=system.multiply, tol=1e-11)
    assert (system.residual(result.x) <= 1e-11).all()
    assert len(system.columns) < len(single) / 8


def test_a_tolerance_out_of_reach_says_what_is_in_reach() -> None:
    system = System()
    with pytest.raises(ConvergenceError, match=r"stays at .* out of reach \(. of 5 targets\)") as caught:
        system.solve(tol=1e-16)
    assert caught.value.stagnated
    assert 1e-16 < caught.value.relative_residual.max() < 1e-10
    assert caught.value.num_iterations < 1000
    assert system.solve(tol=float(caught.value.hint.split("set tol to at least ")[1].split(",")[0])).converged.all()


# --- ways to fail -----------------------------------------------------------------------------------------------------


def test_too_few_iterations_raise_with_the_history() -> None:
    system = System()
    with pytest.raises(ConvergenceError, match=r"did not converge in 12 iterations.*target 0.*tol = 1e-10") as caught:
        system.solve(tol=1e-10, max_iter=12)
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.num_iterations, len(error.history), error.stagnated, error.exit_code) == (12, 13, False, 5)
    assert error.converged.tolist() == (error.relative_residual <= 1e-10).tolist()
    assert all(word in error.hint for word in ("max_iter", "rank", "tol", "alpha", "allow_unconverged"))
    result = system.solve(tol=1e-10, max_iter=12, allow_unconverged=True)
    assert not result.converged.all()
    np.testing.assert_allclose(result.relative_residual, system.residual(result.x), rtol=1e-6)


class Negative:
    description, inexact = "minus one", False

    def apply(self, r: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        return -r


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
    system.matrix -= 2.0 * np.eye(300) * (what == "indefinite")
    if what == "nan":
        system.matrix[3, 4] = np.nan
    if what in ("inf", "1e-200"):
        system.rhs[:, 2] = float(what)
    with pytest.raises(error, match=message) as caught:
        system.solve(np.full(5, 0.1), Negative() if what == "preconditioner" else None)
    if what == "indefinite":
        found = pickle.loads(pickle.dumps(caught.value))
        assert found.curvature < 0
        assert 0.1 < found.suggested_alpha <= 2.0, "not beyond the smallest eigenvalue"


# --- where to begin ---------------------------------------------------------------------------------------------------


def forecast(residuals: list[float], foreseen: Foreseen | None = None, limit: int = 1000) -> Forecast:
    found = Forecast(1e-8, limit, foreseen, count(0, 2).__next__)  # two seconds an iteration
    for number, value in enumerate(residuals, 1):
        found.add(number, value)
    return found


PLAN = Foreseen(low=2, high=8)


def falling(number: int, rate: float = 0.5) -> list[float]:
    return [rate**k for k in range(1, number + 1)]


def test_the_plan_speaks_before_the_residuals() -> None:
    plan = Foreseen(low=8, high=29)
    found = forecast([0.9, 0.8], plan)
    assert (found.phase, found.total) == ("cg, 8 to 29 foreseen", 29)
    assert forecast([0.9] * 6, plan).total == 29
    assert forecast(falling(6, 0.99), plan).total == 58  # not 1,800: it is early
    assert forecast(falling(6, 0.001), plan).total <= 8
    assert forecast(falling(40, 0.9), plan).total == pytest.approx(175, abs=2)
    assert forecast(falling(40, 0.9), plan, limit=100).total == 100


@pytest.mark.parametrize(
    ("residuals", "plan", "price", "slow"),
    [
        (falling(17, 0.9), PLAN, 300.0, True),  # about 158 more, 316 s
        (falling(17, 0.9), PLAN, 330.0, False),
        (falling(16, 0.9), PLAN, 0.1, False),  # not yet twice the upper end
        (falling(17, 0.9), PLAN, None, False),
        (falling(17, 0.9), None, 0.1, False),
        ([0.5] * 17, PLAN, 1e6, True),
    ],
)
def test_an_iteration_is_slow_when_another_way_is_done_sooner(
    residuals: list[float], plan: Foreseen | None, price: float | None, slow: bool
) -> None:
    with pytest.raises(ConvergenceError, match="at most 8 were foreseen") if slow else nullcontext():
        forecast(residuals, plan).check(len(residuals), np.array(residuals[-1:]), lambda: price)


@pytest.mark.parametrize("count", [1, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_a_long_history_is_thinned(count: int) -> None:
    trace = ResidualTrace("cg", 1e-8, [0.1])
    trace.add(7, np.array([0.5]))  # resumed: the first six were in another process
    trace.replace([np.array([1.0 / (k + 1)]) for k in range(count)])
    found = trace.to_dict()
    assert count > MOST_POINTS or found["iterations"] == list(range(count))
    assert len(found["iterations"]) <= MOST_POINTS
    assert (found["iterations"][0], found["iterations"][-1]) == (0, count - 1)
    assert found["relative_residual"] == [[1.0 / (k + 1)] for k in found["iterations"]]
    assert len(set(np.diff(found["iterations"][:-1]).tolist())) <= 1  # evenly spaced but for the last one
