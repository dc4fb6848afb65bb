"""What a preconditioner is: an approximate inverse of A = S K S + alpha I, symmetric positive definite.

One is made of a low-rank factor (:mod:`dkrr.linalg.lowrank.preconditioner`) or of a Cholesky factor
(:mod:`dkrr.linalg.cg.factor_precondition`). With an intercept conjugate gradients are the same iteration in the plane
s^T u = 0:

    P A P u = P S Y,    P = I - s s^T / s^T s,    b = s^T (S Y - A u) / s^T s

This is the bordered system of :mod:`dkrr.linalg.targets` with b eliminated, and P A P is positive definite in the
plane, its eigenvalues within those of A. The residual of an iterate is P (S Y - A u) = S Y - A u - b s with the best b
for this u: the residual of the bordered system itself. So ``tol``, restarts, checkpoints and warm starts mean what they
mean without an intercept, and no column is solved for besides the targets. (With v = A^-1 s as one more column its
error would enter that of every target, times b.)

The preconditioner M of A becomes that of the bordered system with M in place of A,

    r -> z - b m,   z = M^-1 r,   m = M^-1 s,   b = s^T z / s^T m,

which is exact where M is.

Cost
----
4 n t flops a product and an application; M^-1 s once for each distinct alpha, which is kept: 8 n bytes.

References
----------
Gould, Hribar and Nocedal, On the solution of equality constrained quadratic programming problems arising in
optimization, SIAM J. Sci. Comput. 23 (2001).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from dkrr.errors import DataError
from dkrr.linalg.blocks import FloatMatrix, FloatVector, row_blocks

Multiply = Callable[[FloatMatrix], FloatMatrix]


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

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed."""
        ...


class Identity:
    """No preconditioner."""

    description, inexact = "none", False

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        return r.copy()


class Deferred:
    """A preconditioner that is made when it is first applied: never, where every column is good to begin with.

    Parameters
    ----------
    make
        Makes it.
    inexact
        That of the preconditioner to come.
    normal : (n,), optional
        s, where it shall precondition P A P instead of A.
    """

    def __init__(self, make: Callable[[], Preconditioner], *, inexact: bool, normal: FloatVector | None = None) -> None:
        self.make, self.inexact, self.normal = make, inexact, normal
        self.made: Preconditioner | None = None
        self.columns: dict[float, FloatMatrix] = {}

    @property
    def description(self) -> str:
        """That of the preconditioner, once there is one."""
        return "none was needed" if self.made is None else self.made.description

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z = M^-1 R (n, c); with an intercept Z - m b, in the plane."""
        if self.made is None:
            self.made = self.make()
        if self.normal is None:
            return self.made.apply(r, alpha)
        # one alpha is the usual case: its column m serves all
        values = alpha.tolist() if len(set(alpha.tolist())) > 1 else alpha.tolist()[:1]
        missing = [value for value in dict.fromkeys(values) if value not in self.columns]
        if missing:
            found = self.made.apply(np.repeat(self.normal[:, None], len(missing), axis=1), np.array(missing))
            self.columns |= {value: np.ascontiguousarray(found[:, [k]]) for k, value in enumerate(missing)}
        z, m = self.made.apply(r, alpha), np.hstack([self.columns[value] for value in values])
        subtract(z, m, sums(self.normal, z) / sums(self.normal, m))
        # rounding of M^-1 R leaves the plane by more than rounding of Z does
        return project(self.normal, z)


def sums(normal: FloatVector, u: FloatMatrix) -> FloatVector:
    """s^T U (t,)."""
    total = np.zeros(u.shape[1])
    for rows in row_blocks(len(u)):
        total += normal[rows] @ u[rows]
    return total


def subtract(u: FloatMatrix, m: FloatMatrix, factors: FloatVector) -> FloatMatrix:
    """u_k -= factors_k m_k in place, for m (n, t) or one column for all."""
    for rows in row_blocks(len(u)):
        u[rows] -= m[rows] * factors
    return u


def project(normal: FloatVector, u: FloatMatrix) -> FloatMatrix:
    """P U in place; U itself is returned.

    Raises
    ------
    DataError
        s is zero.
    """
    square = float(normal @ normal)
    if not square:
        raise DataError("all weights are zero", hint="give at least one row a positive weight")
    return subtract(u, normal[:, None], sums(normal, u) / square)
