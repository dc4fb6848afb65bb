"""The machines beside a general convex solver, which works in float64 as they do.

Objectives are written down once more here, with the Gram matrix of scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy
import numpy as np
import pytest
from sklearn.metrics.pairwise import pairwise_kernels

from dkrr import (
    KernelHuberRegressor,
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


# libsvm takes 12 s for the tube and the polynomials at C = 100


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
