"""Newton's method against direct solves, scikit-learn, and both objectives written down again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from dkrr.errors import NotPositiveDefiniteError
from dkrr.kernels import make_kernel
from dkrr.linalg import newton as module
from dkrr.linalg.loss import make_loss
from dkrr.linalg.loss_problem import GramColumns, LossProblem, certify
from dkrr.linalg.newton import newton
from tests.linalg.losses import gap

SMOOTH = ["square", "squared_hinge", "logistic", "squared_epsilon_insensitive", "huber"]
EPSILON, DELTA = 0.1, 1.35  # the defaults


def data(name: str, n: int, noise: float = 0.5, d: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and labels or targets of which some are far off."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, d))
    y = np.sin(2 * x[:, 0]) + x[:, 1] + noise * rng.standard_normal(n)
    if make_loss(name).is_for_labels:
        return x, np.where(y > 0, 1.0, -1.0)
    y[::13] += 6.0
    return x, y


def problem(
    name: str, x: np.ndarray, y: np.ndarray, C: Any, *, kernel: str = "rbf", fit_intercept: bool = True
) -> LossProblem:
    gamma = {"gamma": 0.5} if kernel == "rbf" else {}
    columns = GramColumns(make_kernel(kernel, **gamma).resolve(x.shape[1]), x)
    return LossProblem(
        columns, y, np.broadcast_to(np.asarray(C, float), y.shape).copy(), make_loss(name), fit_intercept
    )


def gram(task: LossProblem) -> np.ndarray:
    return task.columns.block(np.arange(len(task.y)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("C", [1e-2, 1.0, 1e4])
def test_the_square_is_the_direct_solve(fit_intercept: bool, weighted: bool, C: float) -> None:
    x, y = data("square", 120)
    weight = np.random.default_rng(1).uniform(0.2, 3.0, 120) if weighted else np.ones(120)
    task = problem("square", x, y, C * weight, fit_intercept=fit_intercept)
    n, one = 120, float(fit_intercept)
    whole = np.block([[gram(task) + np.diag(0.5 / task.C), np.full((n, 1), one)], [np.full((1, n), one), 1 - one]])
    expected = np.linalg.solve(whole, np.append(y, 0.0))
    found = newton(task, tol=1e-12)
    np.testing.assert_allclose(found.a, expected[:n], atol=1e-10 * np.abs(expected).max())
    assert found.b == pytest.approx(expected[n], abs=1e-10)
    np.testing.assert_allclose(found.f, gram(task) @ found.a, atol=1e-12)
    assert found.num_iterations <= 2


@pytest.mark.parametrize("C", [1e-6, 1e-2, 1.0, 1e2, 1e6])
@pytest.mark.parametrize("kernel", ["rbf", "linear"])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_the_gap(name: str, fit_intercept: bool, kernel: str, C: float) -> None:
    x, y = data(name, 150)
    task = problem(name, x, y, C, kernel=kernel, fit_intercept=fit_intercept)
    found = newton(task, tol=1e-12)
    assert -1e-13 < found.certificate.gap <= 1e-12
    assert abs(gap(task, found)) <= 1e-10
    assert found.certificate == certify(task, found.a, found.b, found.f)
    assert found.num_iterations <= (40 if C > 1e4 else 12)


@pytest.mark.parametrize("C", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_logistic_regression(fit_intercept: bool, C: float) -> None:
    x, y = data("logistic", 300)
    weight = np.random.default_rng(3).uniform(0.1, 2.0, 300)
    theirs = LogisticRegression(C=C, tol=1e-12, solver="newton-cholesky", fit_intercept=fit_intercept)
    theirs.fit(x, y, weight)
    found = newton(problem("logistic", x, y, C * weight, kernel="linear", fit_intercept=fit_intercept), tol=1e-15)
    np.testing.assert_allclose(found.f + found.b, theirs.decision_function(x), atol=1e-6)


@pytest.mark.parametrize("name", SMOOTH)
def test_weights_are_repeated_rows(name: str) -> None:
    x, y = data(name, 50)
    count = np.arange(50) % 3 + 1
    once = newton(problem(name, x, y, 2.0 * count), tol=1e-13)
    often = newton(problem(name, np.repeat(x, count, axis=0), np.repeat(y, count), 2.0), tol=1e-13)
    np.testing.assert_allclose(np.repeat(once.f + once.b, count), often.f + often.b, atol=1e-7)
    np.testing.assert_allclose(once.a, np.add.reduceat(often.a, np.cumsum(count) - count), atol=1e-6)


@pytest.mark.parametrize("C", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("rows", ["twice", "equal", "zero"])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_singular_gram_matrix(name: str, rows: str, C: float) -> None:
    x, y = data(name, 60)
    x = {"twice": np.repeat(x[:30], 2, axis=0), "equal": np.ones_like(x), "zero": np.zeros_like(x)}[rows]
    for fit_intercept in (False, True):
        task = problem(name, x, y, C, kernel="rbf" if rows == "twice" else "linear", fit_intercept=fit_intercept)
        assert abs(gap(task, newton(task, tol=1e-12))) <= 1e-10


@pytest.mark.parametrize("name", ["squared_hinge", "logistic"])
@pytest.mark.parametrize("C", [1e-6, 1.0, 1e6])
def test_separable_labels(name: str, C: float) -> None:
    x = np.random.default_rng(4).standard_normal((200, 2))
    y = np.where(x[:, 0] > 0, 1.0, -1.0)
    x[:, 0] += 3 * y
    for fit_intercept in (False, True):
        task = problem(name, x, y, C, kernel="linear", fit_intercept=fit_intercept)
        found = newton(task, tol=1e-12)
        assert abs(gap(task, found)) <= 1e-10
        assert np.isfinite(found.certificate.kkt)
        assert found.num_iterations <= 25


def test_rows_beyond_the_margin_have_no_coefficient() -> None:
    x, y = data("squared_hinge", 300)
    found = newton(problem("squared_hinge", x, y, 100.0), tol=1e-12)
    margin = y * (found.f + found.b)
    assert 20 < np.count_nonzero(margin > 1) < 280
    np.testing.assert_array_equal(found.a != 0, margin < 1)
    np.testing.assert_allclose(found.a, 200.0 * y * np.maximum(0, 1 - margin), atol=1e-9)


def test_all_rows_on_linear_pieces() -> None:
    """Without a second derivative anywhere a is the dual candidate; C times an end, over C, may be beyond that end."""
    x, y = data("huber", 40)
    task = problem("huber", x, np.sign(y) * 1e5, np.linspace(1e-3, 2e-3, 40), fit_intercept=False)
    found = newton(task, tol=1e-12)
    np.testing.assert_array_equal(found.a, np.sign(y) * 2 * DELTA * task.C)
    assert found.certificate.gap <= 1e-12
    assert found.certificate.kkt == 0
    assert found.num_iterations == 0


@pytest.mark.parametrize("name", ["square", "squared_epsilon_insensitive", "huber"])
def test_constant_targets_leave_rounding_only(name: str) -> None:
    x, _ = data(name, 30)
    found = newton(problem(name, x, np.full(30, 0.7), 100.0), tol=1e-9)
    assert found.b == pytest.approx(0.7, abs=EPSILON)
    assert abs(found.certificate.gap) <= 1e-9


@pytest.mark.parametrize("C", [1e2, 1e4, 1e6])
def test_tiny_coefficients_of_the_logistic_loss_have_their_size(C: float) -> None:
    """A rough gap allows any tiny number for them, 0 among them, which no prediction would be right for."""
    x, y = data("logistic", 150, noise=0.0)
    found = newton(problem("logistic", x, y, C), tol=1e-3)
    assert np.all(y * found.a > 0)
    assert found.certificate.kkt < 5


@pytest.mark.parametrize("name", SMOOTH)
def test_feasible_coefficients(name: str) -> None:
    x, y = data(name, 60)
    rng = np.random.default_rng(6)
    task = problem(name, x, y, rng.uniform(0.5, 2.0, 60))
    low, high = task.bounds
    for a in (rng.standard_normal(60) * 1e-2, rng.standard_normal(60) * 9, y.copy(), np.abs(y), np.zeros(60)):
        a[::4] = 0.0
        found = task.feasible(a)
        assert abs(found.sum()) <= 1e-13 * np.abs(found).sum()
        assert np.all((low <= found) & (found <= high) & (found[::4].any() == 0))
        np.testing.assert_array_equal(task.feasible(found) == 0, found == 0)
        np.testing.assert_allclose(task.feasible(found), found, rtol=1e-12, atol=1e-300)
    near = task.feasible(np.clip(np.where(np.arange(60) % 3, y, 1e9 * y), low, high))
    moved = near + 1e-12 * near[5] * (np.arange(60) == 5)
    np.testing.assert_array_equal(
        task.feasible(moved)[(near == low) | (near == high)], near[(near == low) | (near == high)]
    )


@pytest.mark.parametrize("name", ["squared_hinge", "squared_epsilon_insensitive", "huber"])
def test_large_c_goes_by_way_of_smaller_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data(name, 300, noise=0.1)
    task = problem(name, x, y, 1e6, fit_intercept=False)
    found = newton(task, tol=1e-8)
    monkeypatch.setattr(module, "MAX_STIFFNESS", np.inf)
    without = newton(task, tol=1e-8)
    assert found.certificate.gap <= 1e-8
    assert found.num_iterations <= 35
    assert found.num_iterations <= 1.1 * without.num_iterations


@pytest.mark.parametrize("name", SMOOTH)
def test_a_start(name: str) -> None:
    x, y = data(name, 100)
    task = problem(name, x, y, 10.0)
    cold = newton(task, tol=1e-10)
    again = newton(task, tol=1e-10, start=cold.a)
    assert again.num_iterations <= 1
    near = newton(replace(task, C=1.01 * task.C), tol=1e-10, start=cold.a)
    assert near.certificate.gap <= 1e-10
    assert near.num_iterations <= cold.num_iterations
    wrong = newton(task, tol=1e-10, start=np.random.default_rng(5).standard_normal(100) * 1e3)
    np.testing.assert_allclose(wrong.f + wrong.b, cold.f + cold.b, atol=1e-4)
    assert abs(gap(task, wrong)) <= 1e-9


def test_a_start_at_which_second_derivatives_underflow(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data("logistic", 100)
    start = np.where(np.arange(100) < 50, 1e2 * y, 0.0)
    task = problem("logistic", x, y, 1e2, fit_intercept=False)
    curvature = task.loss.second(y, task.columns.product(start))
    assert 0 < curvature[curvature > 0].min() < 1e-200
    for rows in (6000, 10):
        monkeypatch.setattr(module, "MAX_DENSE", rows)
        assert newton(task, tol=1e-8, start=start).certificate.gap <= 1e-8


def test_the_dual_candidate_has_the_best_intercept() -> None:
    """With C small one step is nearly enough; from another intercept the candidate's gap is 3e-6."""
    x, y = data("squared_epsilon_insensitive", 150)
    assert newton(problem("squared_epsilon_insensitive", x, y, 1e-2), max_iter=1).certificate.gap < 2e-6


def test_too_few_steps_are_said() -> None:
    x, y = data("squared_hinge", 200)
    task = problem("squared_hinge", x, y, 50.0)
    said: list[tuple[int, float]] = []
    coefficients: list[np.ndarray] = []

    def progress(number: int, gap: float, now: Callable[[], np.ndarray]) -> None:
        said.append((number, gap))
        coefficients.append(now())

    found = newton(task, tol=1e-9, max_iter=1, progress=progress)
    np.testing.assert_array_equal(coefficients, [found.a])
    assert found.num_iterations == 1
    assert 1e-9 < found.certificate.gap < np.inf
    assert found.certificate.gap == pytest.approx(gap(task, found), rel=1e-9)
    whole = newton(task, tol=1e-9)
    assert said == [(1, found.certificate.gap)]
    assert [row[0] for row in whole.history] == list(range(whole.num_iterations + 1))
    assert whole.history[-1] == (whole.num_iterations, whole.certificate.gap, whole.certificate.kkt)
    assert all(a[1] >= b[1] for a, b in zip(whole.history, whole.history[1:], strict=False))


@pytest.mark.parametrize("name", SMOOTH)
def test_a_tolerance_below_rounding_ends(name: str) -> None:
    x, y = data(name, 100)
    found = newton(problem(name, x, y, 10.0), tol=-1.0)
    assert abs(found.certificate.gap) <= 1e-14
    assert found.num_iterations <= 15


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("name", SMOOTH)
def test_systems_that_are_too_large_for_a_factor(
    name: str, fit_intercept: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data(name, 200)
    task = problem(name, x, y, np.linspace(1.0, 30.0, 200), fit_intercept=fit_intercept)
    expected = newton(task, tol=1e-12)
    if given:
        task = replace(task, columns=GramColumns(None, gram(task)))
    monkeypatch.setattr(module, "MAX_DENSE", 10)
    monkeypatch.setattr(module, "MAX_RANK", 40)
    monkeypatch.setattr(GramColumns, "block", None)
    found = newton(task, tol=1e-10)
    assert found.certificate.gap <= 1e-10
    np.testing.assert_allclose(found.f + found.b, expected.f + expected.b, atol=1e-4)
    assert found.num_iterations <= expected.num_iterations + 4


@pytest.mark.parametrize("given", [False, True])
def test_a_low_rank_preconditioner_saves_products(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a singular matrix, too."""
    x, y = data("square", 300)
    x = np.repeat(x[:50], 6, axis=0) if given else x
    products: list[int] = []
    product = GramColumns.product
    monkeypatch.setattr(GramColumns, "product", lambda self, values: products.append(1) or product(self, values))
    monkeypatch.setattr(module, "MAX_DENSE", 10)
    needed = []
    for rank in (1, 300):
        monkeypatch.setattr(module, "MAX_RANK", rank)
        products.clear()
        task = problem("square", x, y, 100.0)
        task = replace(task, columns=GramColumns(None, gram(task))) if given else task
        assert newton(task, tol=1e-8).certificate.gap <= 1e-8
        needed.append(len(products))
    assert needed[1] < 0.5 * needed[0]


def test_a_preconditioner_in_which_the_ridge_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data("square", 200)
    monkeypatch.setattr(module, "MAX_DENSE", 10)
    found = newton(problem("square", x, y, 1e15), tol=1e-6, max_iter=2)
    assert np.isfinite(found.certificate.primal)
    assert found.certificate.gap > 0


def test_a_gap_between_rounding_errors_is_small() -> None:
    x, _ = data("square", 31)
    task = problem("square", x, np.full(31, 0.7), 100.0)
    a = np.random.default_rng(7).standard_normal(31) * 1e-30
    assert abs(certify(task, a - a.mean(), 0.7).gap) <= 1e-6


def test_a_matrix_of_zeros_needs_no_preconditioner(monkeypatch: pytest.MonkeyPatch) -> None:
    _, y = data("logistic", 30)
    monkeypatch.setattr(module, "MAX_DENSE", 10)
    task = problem("logistic", np.zeros((30, 2)), y, 1.0, kernel="linear")
    found = newton(task, tol=1e-10)
    assert found.b == pytest.approx(np.log((y > 0).sum() / (y < 0).sum()), abs=1e-9)
    assert found.certificate.gap <= 1e-10


@pytest.mark.parametrize("rows", [6000, 10])
def test_an_indefinite_matrix_is_refused(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data("squared_hinge", 30)
    monkeypatch.setattr(module, "MAX_DENSE", rows)
    task = replace(problem("squared_hinge", x, y, 10.0), columns=GramColumns(None, -np.eye(30)))
    with pytest.raises(NotPositiveDefiniteError, match="negative eigenvalues"):
        newton(task)
