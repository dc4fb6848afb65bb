"""The matrix of a Nystrom regression in the coordinates of its preconditioner, with products by passes over the rows.

    R^-1 L^-1 (B^T S^2 B + alpha K) L^-T R^-T
    R^-1 L^-1 (B^T S^2 P B + alpha K) L^-T R^-T      with an intercept, P = I - 1 (1^T S^2) / (1^T S^2 1)

P takes the weighted mean of B c away. It is known before the pass, from q = B^T S^2 1, so a pass subtracts it row by
row, where it loses no digits, instead of q q^T from the sums.

Cost
----
One pass and 4 m^2 t flops a product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.nystrom.precondition import CenterFactor, solve_lower
from dkrr.linalg.nystrom.row_pass import RowPass

__all__ = ["Border", "NystromSystem"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


@dataclass(frozen=True)
class Border:
    """q = B^T S^2 1 (m,) and 1^T S^2 1, the sum of the weights."""

    sums: FloatVector
    weight: float

    def means(self, c: FloatMatrix) -> FloatVector:
        """q^T c / 1^T S^2 1 (t,): the weighted means of B c over the rows."""
        found: FloatVector = self.sums @ c / self.weight
        return found


@dataclass(frozen=True)
class NystromSystem:
    """The system of one alpha.

    Parameters
    ----------
    row_pass, triangle
        B and L.
    alpha
        The ridge.
    factor : (m, m)
        R, below and on the diagonal.
    border
        For an intercept.
    """

    row_pass: RowPass
    triangle: CenterFactor
    alpha: float
    factor: FloatMatrix
    border: Border | None = None

    def exact(self, beta: FloatMatrix) -> FloatMatrix:
        """The product in float64."""
        return self._product(beta, "float64")

    def approximate(self, beta: FloatMatrix) -> FloatMatrix:
        """The product with entries of B in float32."""
        return self._product(beta, "float32")

    def _product(self, beta: FloatMatrix, precision: Literal["float64", "float32"]) -> FloatMatrix:
        c = self.to_coefficients(beta)
        if self.border is None:
            return self.to_coordinates(self.row_pass(c, precision=precision)) + self.penalty(c)
        # V = means - B c: a pass takes B P from what it is given
        nothing = (-1,) * c.shape[1]
        negative = self.row_pass(c, targets=nothing, shifts=(self.border.means(c),), precision=precision)
        return self.penalty(c) - self.to_coordinates(negative)

    def penalty(self, c: FloatMatrix) -> FloatMatrix:
        """alpha R^-1 L^-1 K c."""
        return solve_lower(self.factor, self.alpha * self.triangle.reduced(c), transposed=False)

    def to_coefficients(self, beta: FloatMatrix) -> FloatMatrix:
        """c = L^-T R^-T beta."""
        return self.triangle.solve(solve_lower(self.factor, beta, transposed=True), transposed=True)

    def to_coordinates(self, w: FloatMatrix) -> FloatMatrix:
        """R^-1 L^-1 w."""
        return solve_lower(self.factor, self.triangle.solve(w, transposed=False), transposed=False)
