"""Obvious, slow answers to compare with: dense kernel ridge regression, and kernels pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import solve
from scipy.spatial.distance import cdist


def dense_krr(K: np.ndarray, Y: np.ndarray, alpha: Any, weight: np.ndarray | None = None) -> np.ndarray:
    """dual_coef = S u with (S K S + alpha I) u = S Y and S = diag(sqrt(weight)), one solve per target."""
    n = len(K)
    s = np.ones(n) if weight is None else np.sqrt(weight)
    targets = np.asarray(Y, dtype=float).reshape(n, -1)
    alphas = np.broadcast_to(np.asarray(alpha, dtype=float), targets.shape[1])
    columns = [
        s * solve(s[:, None] * K * s + a * np.eye(n), s * y, assume_a="sym")
        for a, y in zip(alphas, targets.T, strict=True)
    ]
    return np.stack(columns, axis=1).reshape(np.shape(Y))


def dense_bordered(
    K: np.ndarray, Y: np.ndarray, alpha: Any, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """dual_coef = S u (n, t) and b (t,) of A u + b s = S Y, s^T u = 0: one solve of order n + 1 per target."""
    n = len(K)
    s = np.ones(n) if weight is None else np.sqrt(weight)
    targets = np.asarray(Y, dtype=float).reshape(n, -1)
    alphas = np.broadcast_to(np.asarray(alpha, dtype=float), targets.shape[1])
    columns = []
    for a, y in zip(alphas, targets.T, strict=True):
        whole = np.block([[s[:, None] * K * s + a * np.eye(n), s[:, None]], [s[None], np.zeros((1, 1))]])
        found = solve(whole, np.append(s * y, 0.0), assume_a="sym")
        columns.append(np.append(s * found[:-1], found[-1]))
    both = np.stack(columns, axis=1)
    return both[:-1], both[-1]


def _chi2(a: np.ndarray, b: np.ndarray) -> float:
    return -sum((p - q) ** 2 / (p + q) for p, q in zip(a, b, strict=True) if p + q > 0)


def _pairs(function: Any, A: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.array([[function(a, b) for b in B] for a in A]).reshape(len(A), len(B))


def reference_kernel(values: dict[str, Any], A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """k(A, B) (m, n) of a kernel given as a dictionary, straight from its formula."""
    p = dict(values)
    name = p.pop("kernel")
    gamma = 1.0 / A.shape[1] if p.get("gamma") is None else p["gamma"]
    scale = np.asarray(p.get("length_scale", 1.0))
    dot = A @ B.T
    match name:
        case "linear":
            return dot
        case "poly":
            return (gamma * dot + p["coef0"]) ** p["degree"]
        case "sigmoid":
            return np.tanh(gamma * dot + p["coef0"])
        case "cosine":
            norms = np.outer(np.sqrt((A * A).sum(1)), np.sqrt((B * B).sum(1)))
            return np.divide(dot, norms, out=np.zeros_like(dot), where=norms > 0)
        case "rbf":
            return np.exp(-gamma * cdist(A / scale, B / scale, "sqeuclidean"))
        case "laplacian":
            return np.exp(-gamma * cdist(A / scale, B / scale, "cityblock"))
        case "matern":
            r = np.sqrt(2 * p["nu"]) * cdist(A / scale, B / scale)
            return {0.5: 1.0, 1.5: 1 + r, 2.5: 1 + r + r**2 / 3}[p["nu"]] * np.exp(-r)
        case "chi2":
            return np.exp(gamma * _pairs(_chi2, A, B))
        case "constant":
            return np.full((len(A), len(B)), p["value"])
        case "sum":
            return np.sum([reference_kernel(term, A, B) for term in p["terms"]], axis=0)
        case "product":
            return np.prod([reference_kernel(factor, A, B) for factor in p["factors"]], axis=0)
    raise NotImplementedError(f"no reference for kernel {name!r}")


def brute_leave_one_out(
    K: np.ndarray, Y: np.ndarray, alpha: Any, weight: np.ndarray | None = None, *, intercept: bool = False
) -> np.ndarray:
    """y_i - f(x_i) (n, t) with f fitted to all rows but i, by one dense solve a row and distinct alpha."""
    n, t = Y.shape
    w = np.ones(n) if weight is None else weight
    s, alphas = np.sqrt(w), np.broadcast_to(np.asarray(alpha, dtype=float), t)
    residuals = np.empty((n, t))
    for i in range(n):
        rest = np.arange(n) != i
        for a in set(alphas.tolist()):
            columns = alphas == a
            system = s[rest, None] * K[np.ix_(rest, rest)] * s[rest] + a * np.eye(n - 1)
            rhs = s[rest, None] * Y[rest][:, columns]
            if intercept:
                system = np.block([[system, s[rest, None]], [s[None, rest], np.zeros((1, 1))]])
                rhs = np.vstack([rhs, np.zeros((1, rhs.shape[1]))])
            u = np.linalg.solve(system, rhs)
            b = u[-1] if intercept else 0.0
            residuals[i, columns] = Y[i, columns] - (K[i, rest] * s[rest]) @ u[: n - 1] - b
    return residuals
