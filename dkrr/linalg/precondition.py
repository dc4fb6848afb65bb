"""What a preconditioner is: an approximate inverse of A = S K S + alpha I, symmetric positive definite.

The low-rank ones and the one made of a tile factor live in modules of their own.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Identity", "Preconditioner"]

FloatMatrix = NDArray[np.float64]


class Preconditioner(Protocol):
    """P_alpha^-1 for any alpha, applied to many columns at once.

    ``inexact`` says that rounding in an application is far above that of float64, so that it is not quite symmetric:
    directions are then made conjugate to the last one by its product instead of by r^T z.
    """

    inexact: bool

    @property
    def description(self) -> str:
        """A few words for messages and records, e.g. "randomly pivoted Cholesky of rank 1,000"."""
        ...

    def apply(self, r: FloatMatrix, alpha: NDArray[np.float64]) -> FloatMatrix:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed."""
        ...


class Identity:
    """No preconditioner."""

    description, inexact = "none", False

    def apply(self, r: FloatMatrix, alpha: NDArray[np.float64]) -> FloatMatrix:
        return r.copy()
