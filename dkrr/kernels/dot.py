"""Kernels of the inner product: linear, polynomial, sigmoid, cosine. One matrix product a strip.

Names, formulas and defaults are those of :mod:`sklearn.metrics.pairwise`. None of them is translation-invariant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from dkrr.kernels.base import Kernel
from dkrr.kernels.checks import LIMIT, finite, overflow, positive
from dkrr.kernels.pairwise import Pairwise
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["Cosine", "Linear", "Polynomial", "Sigmoid"]

# Up to here x^p by repeated multiplication (0.2 ns an entry each) beats pow (2.3 ns).
MAX_REPEATED = 8
# Features up to which B is transposed.
MAX_TRANSPOSED = 32


def _affine_operands(A: FloatArray, B: FloatArray, gamma: float, coef0: float) -> tuple[FloatArray, FloatArray]:
    """Operands (m, d + 1) and (d + 1, n) with the product gamma a.b + coef0: a column instead of two passes."""
    d = A.shape[1]
    left = np.empty((len(A), d + 1))
    np.multiply(A, gamma, out=left[:, :d])
    left[:, d] = coef0
    right = np.empty((d + 1, len(B)))
    right[:d] = B.T
    right[d] = 1.0
    return left, right


def _product(left: FloatArray, right: FloatArray, then: Callable[[FloatArray], None] | None = None) -> Fill:
    def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
        np.matmul(left[rows], right[:, columns], out=strip)
        if then is not None:
            then(strip)

    return fill


def _transposed(B: FloatArray) -> FloatArray:
    """B.T, copied where that pays: a product over few features is a third faster with B.T in C order."""
    return np.ascontiguousarray(B.T) if B.shape[1] <= MAX_TRANSPOSED else B.T


def _square_norms(A: FloatArray) -> FloatArray:
    norms: FloatArray = np.einsum("ij,ij->i", A, A)
    return norms


@dataclass(frozen=True, kw_only=True)
class Linear(Kernel):
    """k(a, b) = a.b

    Ridge regression without an intercept.
    """

    name = "linear"

    @property
    def positive_semidefinite(self) -> bool:
        return True

    @property
    def pairwise(self) -> Pairwise | None:
        return Pairwise(distance="inner", profile="power", c=1.0)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        return _product(A, _transposed(B))

    def _diag(self, A: FloatArray) -> FloatArray:
        return _square_norms(A)


@dataclass(frozen=True, kw_only=True, repr=False)
class Polynomial(Kernel):
    """k(a, b) = (gamma a.b + coef0)^degree

    Parameters
    ----------
    gamma
        None means 1 / d.
    degree
        A number > 0. With a fraction, a negative base has no real power and raises DataError.
    coef0
        The constant term. A negative one makes the kernel indefinite.
    """

    name = "poly"
    gamma: float | None = None
    degree: float = 3
    coef0: float = 1.0

    def __post_init__(self) -> None:
        if self.gamma is not None:
            object.__setattr__(self, "gamma", positive(self.name, "gamma", self.gamma))
        degree = positive(self.name, "degree", self.degree)
        object.__setattr__(self, "degree", int(degree) if degree.is_integer() else degree)
        object.__setattr__(self, "coef0", finite(self.name, "coef0", self.coef0))

    @property
    def positive_semidefinite(self) -> bool:
        return isinstance(self.degree, int) and self.coef0 >= 0

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        return self if self.gamma is not None else dataclasses.replace(self, gamma=1.0 / num_features)

    @property
    def pairwise(self) -> Pairwise | None:
        if self.gamma is None or not isinstance(self.degree, int) or self.degree > MAX_REPEATED:
            return None
        return Pairwise(distance="inner", profile="power", c=self.gamma, coef0=self.coef0, degree=self.degree)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        scratch = np.empty(entries)

        def power(strip: FloatArray) -> None:
            if not isinstance(self.degree, int) or self.degree > MAX_REPEATED:
                np.power(strip, self.degree, out=strip)
                return
            base = scratch[: strip.size].reshape(strip.shape)
            base[...] = strip
            for _ in range(self.degree - 1):
                np.multiply(strip, base, out=strip)

        return _product(*_affine_operands(A, B, self.gamma or 1.0 / A.shape[1], self.coef0), power)

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.power((self.gamma or 1.0 / A.shape[1]) * _square_norms(A) + self.coef0, self.degree)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sigmoid(Kernel):
    """k(a, b) = tanh(gamma a.b + coef0)

    Indefinite in general, so that a Cholesky solve may fail. gamma=None means 1 / d.
    """

    name = "sigmoid"
    gamma: float | None = None
    coef0: float = 1.0

    def __post_init__(self) -> None:
        if self.gamma is not None:
            object.__setattr__(self, "gamma", positive(self.name, "gamma", self.gamma))
        object.__setattr__(self, "coef0", finite(self.name, "coef0", self.coef0))

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        return self if self.gamma is not None else dataclasses.replace(self, gamma=1.0 / num_features)

    @property
    def bounded(self) -> bool:
        return True

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        gamma = self.gamma or 1.0 / A.shape[1]
        # |a.b| <= max(|a|^2, |b|^2). tanh would turn an overflow into a plausible 1.
        for rows in (A, B):
            if not gamma * _square_norms(rows).max() < LIMIT:
                raise overflow(self.describe(), A, B)
        return _product(*_affine_operands(A, B, gamma, self.coef0), _tanh)

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.tanh((self.gamma or 1.0 / A.shape[1]) * _square_norms(A) + self.coef0)


def _tanh(strip: FloatArray) -> None:
    np.tanh(strip, out=strip)


@dataclass(frozen=True, kw_only=True)
class Cosine(Kernel):
    """k(a, b) = a.b / (|a| |b|), and 0 where a or b is 0"""

    name = "cosine"

    @property
    def positive_semidefinite(self) -> bool:
        return True

    @property
    def bounded(self) -> bool:
        return True

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        left, right = (self._units(rows, A, B) for rows in (A, B))
        return _product(left, _transposed(right))

    def _units(self, rows: FloatArray, A: FloatArray, B: FloatArray) -> FloatArray:
        if not _square_norms(rows).max() < np.inf:
            raise overflow(self.describe(), A, B)
        # times a power of two, which changes no digit, the squares of no row underflow
        _, exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True))
        rows = np.ldexp(rows, -exponents)
        norms = np.sqrt(_square_norms(rows))
        norms[norms == 0] = 1.0
        return rows / norms[:, np.newaxis]

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.where(A.any(axis=1), 1.0, 0.0)
