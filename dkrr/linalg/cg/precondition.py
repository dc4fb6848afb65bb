"""What a preconditioner is: an approximate inverse of A = S K S + alpha I, symmetric positive definite.

The low-rank ones and the one made of a tile factor live in modules of their own.

Conjugate gradients with an intercept: the same iteration in the plane s^T u = 0.

    P A P u = P S Y,    P = I - s s^T / s^T s,    b = s^T (S Y - A u) / s^T s

is the bordered system of :mod:`dkrr.linalg.targets` with b eliminated, and P A P is positive definite in the plane,
its eigenvalues within those of A. The residual of an iterate is P (S Y - A u) = S Y - A u - b s with the best b for
this u: the residual of the bordered system itself. So ``tol``, restarts, checkpoints and warm starts mean what they
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
from numpy.typing import NDArray

from dkrr.errors import DataError
from dkrr.linalg.blocks import FloatMatrix, FloatVector, row_blocks


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


class Deferred:
    """A preconditioner that is made when it is first applied: never, where every column is good to begin with.

    ``inexact`` is that of the preconditioner to come.
    """

    def __init__(self, make: Callable[[], Preconditioner], *, inexact: bool) -> None:
        self.make, self.inexact = make, inexact
        self.made: Preconditioner | None = None

    @property
    def description(self) -> str:
        """That of the preconditioner, once there is one."""
        return "none was needed" if self.made is None else self.made.description

    def apply(self, r: FloatMatrix, alpha: NDArray[np.float64]) -> FloatMatrix:
        if self.made is None:
            self.made = self.make()
        return self.made.apply(r, alpha)


Multiply = Callable[[FloatMatrix], FloatMatrix]


class Plane:
    """All u (n,) with s^T u = 0.

    Parameters
    ----------
    normal : (n,)
        s.

    Raises
    ------
    DataError
        s is zero.
    """

    def __init__(self, normal: FloatVector) -> None:
        self.normal = normal
        self.square = float(normal @ normal)
        if not self.square:
            raise DataError("all weights are zero", hint="give at least one row a positive weight")

    def sums(self, u: FloatMatrix) -> FloatVector:
        """s^T U (t,)."""
        total = np.zeros(u.shape[1])
        for rows in row_blocks(len(u)):
            total += self.normal[rows] @ u[rows]
        return total

    def project(self, u: FloatMatrix) -> FloatMatrix:
        """P U in place; U itself is returned."""
        return self.subtract(u, self.normal[:, None], self.sums(u) / self.square)

    def subtract(self, u: FloatMatrix, m: FloatMatrix, factors: FloatVector) -> FloatMatrix:
        """u_k -= factors_k m_k in place, for m (n, t) or one column for all."""
        for rows in row_blocks(len(u)):
            u[rows] -= m[rows] * factors
        return u


def within(plane: Plane | None, multiply: Multiply) -> Multiply:
    """V -> P K_s V; the product itself without a plane."""
    return multiply if plane is None else lambda v: plane.project(multiply(v))


class PlanePreconditioner:
    """A preconditioner of A, made one of P A P."""

    def __init__(self, plane: Plane, inner: Preconditioner) -> None:
        self.plane, self.inner, self.inexact = plane, inner, inner.inexact
        self.columns: dict[float, FloatMatrix] = {}

    @property
    def description(self) -> str:
        """That of the inner one."""
        return self.inner.description

    def apply(self, r: FloatMatrix, alpha: FloatVector) -> FloatMatrix:
        """Z = M^-1 R - m b (n, c), in the plane."""
        self._prepare(alpha)
        z = self.inner.apply(r, alpha)
        values = alpha.tolist()
        # one alpha is the usual case: its column serves all
        m = np.hstack([self.columns[value] for value in (values if len(set(values)) > 1 else values[:1])])
        self.plane.subtract(z, m, self.plane.sums(z) / self.plane.sums(m))
        # rounding of M^-1 R leaves the plane by more than rounding of Z does
        return self.plane.project(z)

    def _prepare(self, alpha: FloatVector) -> None:
        """m for every alpha that is new."""
        missing = [value for value in dict.fromkeys(alpha.tolist()) if value not in self.columns]
        if not missing:
            return
        normal = np.repeat(self.plane.normal[:, None], len(missing), axis=1)
        found = self.inner.apply(normal, np.array(missing))
        for number, value in enumerate(missing):
            self.columns[value] = np.ascontiguousarray(found[:, [number]])
