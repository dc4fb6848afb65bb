"""The machines beside libsvm, a general convex solver, and LogisticRegression.

libsvm minimises in float64 over entries of K that it keeps in float32. Over a matrix of numbers that float32 has there
is nothing to round, and the two agree as closely as is promised, on both sides and whatever C is: objectives to 1e-8
(2e-10 was measured), decision functions to 1e-5 (8e-10), and the same support vectors (not one differs). Over K a
convex solver in float64 agrees with us, on both sides.

Objectives are written down once more here, with the Gram matrix of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.svm import SVC, SVR

from dkrr import (
    KernelHuberRegressor,
    KernelLogisticRegression,
    KernelQuantileRegressor,
    KernelSVC,
    KernelSVR,
)

Floats = np.ndarray
D = 4
EPSILON, DELTA = 0.1, 0.5
KERNELS: dict[str, dict[str, Any]] = {
    "rbf": {"gamma": 0.3},
    "poly": {"gamma": 0.25, "degree": 3, "coef0": 1.0},
    "linear": {},
}
LOSSES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "hinge": lambda y, u: np.maximum(0, 1 - y * u),
    "epsilon_insensitive": lambda y, u: np.maximum(0, np.abs(y - u) - EPSILON),
    "pinball": lambda y, u: np.maximum(0.9 * (y - u), -0.1 * (y - u)),
    "huber": lambda y, u: np.where(np.abs(y - u) <= DELTA, (y - u) ** 2, 2 * DELTA * np.abs(y - u) - DELTA**2),
}


@dataclass(frozen=True)
class Task:
    """One decision function: K (n, n), targets or labels of -1 and +1, C_i (n,), and the loss of an estimator."""

    K: Floats
    y: Floats
    C: Floats
    loss: Callable[[Floats, Floats], Floats]

    def objective(self, a: Floats, b: float) -> float:
        f = self.K @ a
        return float(0.5 * a @ f + self.C @ self.loss(self.y, f + b))


def rows(n: int) -> tuple[Floats, Floats, Floats]:
    """X (n, 4), targets with noise, weights."""
    rng = np.random.default_rng(5)
    X = rng.standard_normal((n, D))
    return X, np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * rng.standard_normal(n), rng.uniform(0.2, 3.0, n)


def gram(X: Floats, kernel: str) -> Floats:
    return np.asarray(pairwise_kernels(X, metric=kernel, **KERNELS[kernel]))


def of_float32(K: Floats) -> Floats:
    """K + a little of the identity, of numbers that float32 has, and positive definite."""
    shifted = K + 1e-4 * K.trace() / len(K) * np.eye(len(K))
    return shifted.astype(np.float32).astype(np.float64)


def coefficients(machine: Any, n: int) -> tuple[Floats, float]:
    a = np.zeros(n)
    a[machine.support_] = machine.dual_coef_[0]
    return a, float(machine.intercept_[0])


def problem_of(name: str, n: int, C: float, *, weighted: bool, K: Floats) -> Task:
    _, y, weight = rows(n)
    y = np.where(y > 0.2, 1.0, -1.0) if name == "hinge" else y
    return Task(K, y, C * (weight if weighted else np.ones(n)), LOSSES[name])


def both(name: str, task: Task, X: Floats, kernel: dict[str, Any]) -> tuple[Any, Any]:
    """Ours and libsvm's, as near to the minimum as they come."""
    ours, theirs, more = (KernelSVC, SVC, {}) if name == "hinge" else (KernelSVR, SVR, {"epsilon": EPSILON})
    options: dict[str, Any] = {"tol": 1e-13, "solver_params": {"allow_unconverged": True}}
    mine = ours(1.0, **kernel, **more, **options).fit(X, task.y, task.C)
    return mine, theirs(C=1.0, tol=1e-10, cache_size=500, **kernel, **more).fit(X, task.y, task.C)


# libsvm takes 12 s for the tube and the polynomials at C = 100
LARGEST = {("epsilon_insensitive", "rbf"): 10.0, ("epsilon_insensitive", "poly"): 1.0}
CASES = [
    (name, kernel, C, weighted)
    for name in ("hinge", "epsilon_insensitive")
    for kernel in KERNELS
    for C in (0.1, LARGEST.get((name, kernel), 100.0))
    for weighted in (False, True)
]


def check_same(task: Task, ours: Any, theirs: Any) -> None:
    """Objective, decision function and support vectors, as closely as is promised."""
    n = len(task.y)
    (a, b), (other, c) = coefficients(ours, n), coefficients(theirs, n)
    assert ours.solution_.certificates[0].gap <= 1e-10
    assert task.objective(a, b) == pytest.approx(task.objective(other, c), rel=1e-8)
    u, v = task.K @ a + b, task.K @ other + c
    assert np.abs(u - v).max() <= 1e-5 * np.abs(v).max()
    # rows that only one of them has, and rows that only one of them has at the upper bound
    size, theirs_size = np.abs(a) / task.C, np.abs(other) / task.C
    differ = (a != 0) != (other != 0)
    assert np.all(np.maximum(size, theirs_size)[differ] <= 1e-6)
    differ = (size >= 1) != (theirs_size >= 1)
    assert np.all(np.minimum(size, theirs_size)[differ] >= 1 - 1e-6)


@pytest.mark.whole
@pytest.mark.parametrize(("name", "kernel", "C", "weighted"), CASES)
def test_libsvm_of_the_same_matrix(name: str, kernel: str, C: float, weighted: bool) -> None:
    K = of_float32(gram(rows(300)[0], kernel))
    task = problem_of(name, 300, C, weighted=weighted, K=K)
    check_same(task, *both(name, task, K, {"kernel": "precomputed"}))


# --- a general solver, in float64 ------------------------------------------------------------------------------------

CONVEX: dict[str, tuple[Any, Callable[[Floats, Floats], Floats], Callable[[Floats, Any], Any]]] = {
    "hinge": (KernelSVC, LOSSES["hinge"], lambda y, u: cvxpy.pos(1 - cvxpy.multiply(y, u))),
    "epsilon insensitive": (
        KernelSVR, LOSSES["epsilon_insensitive"], lambda y, u: cvxpy.pos(cvxpy.abs(u - y) - EPSILON)
    ),
    "huber": (KernelHuberRegressor, LOSSES["huber"], lambda y, u: cvxpy.huber(u - y, DELTA)),
    "pinball": (
        KernelQuantileRegressor, LOSSES["pinball"], lambda y, u: cvxpy.maximum(0.9 * (y - u), -0.1 * (y - u))
    ),
}  # fmt: skip


def solved(task: Task, loss: Callable[[Floats, Any], Any]) -> tuple[float, Floats]:
    """The least objective and its predictions: u = G z + b with G G^T = K and |z|^2 = a^T K a."""
    values, vectors = np.linalg.eigh(task.K)
    kept = values > 1e-13 * values.max()
    G = vectors[:, kept] * np.sqrt(values[kept])
    z, b, u = cvxpy.Variable(G.shape[1]), cvxpy.Variable(), cvxpy.Variable(len(G))
    objective = cvxpy.Minimize(0.5 * cvxpy.sum_squares(z) + task.C @ loss(task.y, u))
    problem = cvxpy.Problem(objective, [u == G @ z + b])
    problem.solve(solver=cvxpy.CLARABEL, tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
    found = G @ z.value + b.value
    return float(0.5 * z.value @ z.value + task.C @ task.loss(task.y, found)), found


@pytest.mark.whole
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CONVEX)
def test_a_convex_solver(name: str, kernel: str) -> None:
    (X, y, weight), C = rows(300), 30.0
    machine, loss, expression = CONVEX[name]
    y = np.where(y > 0.2, 1.0, -1.0) if name == "hinge" else y
    more = {"huber": {"epsilon": DELTA}, "pinball": {"quantile": 0.9}}.get(name)
    given = {"C": C} if more is None else {"alpha": 0.5 / C, **more}
    task = Task(gram(X, kernel), y, C * weight, loss)
    ours = machine(kernel=kernel, tol=1e-12, **given, **KERNELS[kernel]).fit(X, y, weight)
    least, predicted = solved(task, expression)
    found = ours.decision_function(X) if name == "hinge" else ours.predict(X)
    assert ours.solution_.certificates[0].primal == pytest.approx(least, rel=1e-8)
    assert np.abs(found - predicted).max() <= (1e-6 if name == "huber" else 1e-5) * np.abs(predicted).max()


# --- linear models, and the square -----------------------------------------------------------------------------------


@pytest.mark.whole
@pytest.mark.parametrize("C", [0.1, 1.0, 100.0])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_logistic_regression(fit_intercept: bool, C: float) -> None:
    X, y, weight = rows(300)
    options: dict[str, Any] = {"C": C, "fit_intercept": fit_intercept}
    theirs = LogisticRegression(solver="newton-cholesky", tol=1e-12, **options).fit(X, y > 0.2, weight)
    ours = KernelLogisticRegression(kernel="linear", tol=1e-14, **options).fit(X, y > 0.2, weight)
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-6)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-6)
    np.testing.assert_allclose(ours.intercept_, theirs.intercept_, atol=1e-6)
