"""A few alphas of one Gram matrix in memory: a factor, and the diagonal of its inverse, for each.

You need it where an eigendecomposition would cost more than the factors: half of its flops are products of a matrix and
a vector, and at n = 3,000 with one thread it took 8.2 to 9.8 times as long as a factor and its inverse's diagonal. What
it answers, it answers as :class:`dkrr.linalg.inference.eigen.EigenRidge` does.

Cost
----
2/3 m^3 flops an alpha; 16 m^2 bytes.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.factor.dense import dense_factor, substitute
from dkrr.linalg.inference.inverse_diagonal import inverse_diagonal_dense
from dkrr.linalg.inference.leave_one_out import bordered_diagonal
from dkrr.linalg.intercept import Centring, best_intercept, centre_targets, solve_bordered

__all__ = ["FactorRidge"]

Floats = NDArray[np.float64]


class FactorRidge:
    """Kernel ridge regression for some alphas, from S K S.

    Parameters
    ----------
    matrix
        S K S (m, m).
    y : (m, t)
    root : (m,), optional
        s, the square roots of the weights, all positive; None means 1.
    fit_intercept
        Solve the bordered system of :mod:`dkrr.linalg.intercept`.
    """

    def __init__(self, matrix: Floats, y: Floats, root: Floats | None = None, *, fit_intercept: bool = False):
        self.matrix = matrix
        self.root = np.ones(len(y)) if root is None else root
        self.centring: Centring | None = None
        if fit_intercept:
            weight, given = np.square(self.root), y
            self.centring = centre_targets(lambda: [(given, weight)], y.shape[1])
            y = self.centring.apply(y)
        self.offset = np.zeros(y.shape[1]) if self.centring is None else self.centring.offset
        self.rhs = self.root[:, None] * y
        self._solutions: dict[float, Floats] = {}

    def _solve(self, alpha: float, *, diagonal: bool = False) -> tuple[Floats, Floats]:
        """u (m, t), kept; and the diagonal (m,) of the inverse, or nothing, of one factor."""
        if alpha in self._solutions and not diagonal:
            return self._solutions[alpha], np.empty(0)
        factor = dense_factor(None, self.matrix, None, alpha, "float64")
        solve = partial(substitute, factor)
        if self.centring is None:
            u = solve(self.rhs)
        else:
            u = solve_bordered(solve, lambda u: self.matrix @ u + alpha * u, self.rhs, self.root)
        self._solutions[alpha] = u
        if not diagonal:
            return u, np.empty(0)
        ones = None if self.centring is None else solve(self.root[:, None])
        found = inverse_diagonal_dense(factor)[:, None]
        return u, (found if ones is None else bordered_diagonal(found, ones, self.root))[:, 0]

    def leave_one_out(self, alphas: Floats) -> Floats:
        """Residuals y_i - f^(-i)(x_i) (m, t, k) = u_i / (s_i D_i)."""
        residuals = np.empty((*self.rhs.shape, len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            u, diagonal = self._solve(alpha, diagonal=True)
            np.divide(u, (self.root * diagonal)[:, None], out=residuals[:, :, number])
        return residuals

    def solve_each(self, alphas: Floats) -> tuple[Floats, Floats]:
        """u (m, t) and the intercepts (t,) with one alpha for each target, ``alphas`` (t,)."""
        u = np.empty(self.rhs.shape)
        for target, alpha in enumerate(alphas.tolist()):
            u[:, target] = self._solve(alpha)[0][:, target]
        return u, self._intercept(u, alphas)

    def _intercept(self, u: Floats, alphas: Floats) -> Floats:
        """b = s^T (S Y - A u) / s^T s (t,), and what was subtracted from the targets."""
        if self.centring is None:
            return self.offset
        return best_intercept(self.rhs - self.matrix @ u - alphas * u, self.root) + self.offset

    def project(self, block: Floats) -> Floats:
        """k(z, X) S (z, m) for a block k(z, X) (z, m) of the kernel."""
        projected: Floats = block * self.root
        return projected

    def predict(self, projected: Floats, alphas: Floats) -> Floats:
        """Predictions (z, t, k) for points z given by :meth:`project`."""
        predictions = np.empty((len(projected), self.rhs.shape[1], len(alphas)))
        for number, alpha in enumerate(alphas.tolist()):
            u, _ = self._solve(alpha)
            predictions[:, :, number] = projected @ u + self._intercept(u, np.full(u.shape[1], alpha))
        return predictions
