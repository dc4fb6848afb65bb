"""The kernels: every formula, with its parameters and what is known of it.

A kernel of one distance or inner product is a few lines: a name, the number x of two rows, the factor c of that number
if it is not gamma, the parameters, and f(v, x), see :mod:`dkrr.kernels.pairwise`. Blocks in NumPy, compiled products in
float64 and float32, checks of parameters and rows, sums, products and dictionaries follow from it. For names, formulas
and defaults of :mod:`sklearn.metrics.pairwise`, list it in :data:`dkrr.kernels.make.NAMED`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from dkrr.errors import ParameterError
from dkrr.kernels.base import LIMIT, Checks, Fill, FloatArray, Kernel, one_of, overflow, positive, require_nonnegative
from dkrr.kernels.pairwise import Formula, Pairwise, exponential, square_norms

# Elements of NumPy's buffer in broadcast operations. With the default of 8,192 every operand of rows shorter than that
# is copied through the buffer, which doubles the time.
BUFFER_SIZE = 256

# Up to here x^p by repeated multiplication (0.2 ns an entry each) beats pow (2.3 ns).
MAX_REPEATED = 8


def identity(v: Any, x: Any) -> Any:
    """x"""
    return x


@cache
def power(degree: float) -> Formula:
    """x^degree"""

    def repeated(v: Any, x: Any) -> Any:
        power = x
        for _ in range(int(degree) - 1):
            power = power * x
        return power

    if not isinstance(degree, int) or degree > MAX_REPEATED:
        return lambda v, x: v.power(x, degree, out=x)
    repeated.__name__ = f"power{degree}"
    return repeated


def _whole_if_integer(kernel: str, name: str, value: Any) -> float:
    number = positive(kernel, name, value)
    return int(number) if number.is_integer() else number


@dataclass(frozen=True, kw_only=True, repr=False)
class Linear(Pairwise):
    """k(a, b) = a.b

    Ridge regression without an intercept.
    """

    name = "linear"
    distance = "inner"
    formula = staticmethod(identity)
    positive_semidefinite = True
    compiled = True


@dataclass(frozen=True, kw_only=True, repr=False)
class Polynomial(Pairwise):
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
    distance = "inner"
    checks: ClassVar[Checks] = {**Pairwise.checks, "degree": _whole_if_integer}
    gamma: float | None = None
    degree: float = 3
    coef0: float = 1.0

    @property
    def formula(self) -> Formula:
        return power(self.degree)

    @property
    def positive_semidefinite(self) -> bool:
        return isinstance(self.degree, int) and self.coef0 >= 0

    @property
    def compiled(self) -> bool:
        return isinstance(self.degree, int) and self.degree <= MAX_REPEATED


@dataclass(frozen=True, kw_only=True, repr=False)
class Sigmoid(Pairwise):
    """k(a, b) = tanh(gamma a.b + coef0)

    Indefinite in general, so that a Cholesky solve may fail. gamma=None means 1 / d.
    """

    name = "sigmoid"
    distance = "inner"
    bounded = True  # tanh would turn an overflow into a plausible 1
    gamma: float | None = None
    coef0: float = 1.0

    @staticmethod
    def formula(v: Any, x: Any) -> Any:
        return v.tanh(x, out=x)


@dataclass(frozen=True, kw_only=True, repr=False)
class Cosine(Pairwise):
    """k(a, b) = a.b / (|a| |b|), and 0 where a or b is 0"""

    name = "cosine"
    distance = "inner"
    formula = staticmethod(identity)
    positive_semidefinite = True
    bounded = True

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        if not self._is_proved(square_norms(A), square_norms(B)):
            raise overflow(self.describe(), A, B)
        return super()._fill(self._units(A), self._units(B), entries)

    @staticmethod
    def _units(rows: FloatArray) -> FloatArray:
        # times a power of two, which changes no digit, the squares of no row underflow
        _, exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True))
        rows = np.ldexp(rows, -exponents)
        norms = np.sqrt(square_norms(rows))
        return rows / np.where(norms == 0, 1.0, norms)[:, np.newaxis]

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.where(A.any(axis=1), 1.0, 0.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Exponential(Pairwise):
    """k(a, b) = exp(-gamma distance): the matrix product yields the exponent itself."""

    positive_semidefinite = True
    formula = staticmethod(exponential)
    length_scale: float | tuple[float, ...] = 1.0
    gamma: float | None = None

    @property
    def c(self) -> float:
        return -(self.gamma or 1.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class RBF(_Exponential):
    """k(a, b) = exp(-gamma |(a - b) / length_scale|^2)

    gamma=None means 1 / d.
    """

    name = "rbf"
    distance = "squared"


@dataclass(frozen=True, kw_only=True, repr=False)
class Laplacian(_Exponential):
    """k(a, b) = exp(-gamma |(a - b) / length_scale|_1)

    The 1-norm, as in scikit-learn (elsewhere "laplacian" is the 2-norm, here matern with nu = 0.5). gamma=None means
    1 / d.
    """

    name = "laplacian"
    distance = "manhattan"


def matern12(v: Any, x: Any) -> Any:
    """exp(-r) of x = r^2"""
    return v.exp(-v.sqrt(x, out=x), out=x)


def matern32(v: Any, x: Any) -> Any:
    """(1 + r) exp(-r) of x = r^2"""
    r = v.sqrt(x, out=x)
    return v.exp(-r) * (r + 1.0)


def matern52(v: Any, x: Any) -> Any:
    """(1 + r + r^2 / 3) exp(-r) of x = r^2"""
    r = v.sqrt(x)
    return v.exp(-r) * (x * (1.0 / 3.0) + r + 1.0)


@dataclass(frozen=True, kw_only=True, repr=False)
class Matern(Pairwise):
    """k(a, b) = exp(-r), (1 + r) exp(-r) or (1 + r + r^2 / 3) exp(-r) for nu = 0.5, 1.5, 2.5

    with r = sqrt(2 nu) |(a - b) / length_scale|_2, as in :class:`sklearn.gaussian_process.kernels.Matern`.

    For nu = 1.5 and 2.5 the kernel is 1 - O(r^2), smooth in the squared distance, so that the rounding error of r^2
    from the matrix product enters with a factor of about a half, harmless although that of r itself is large. For
    nu = 0.5 the slope in r^2 is infinite at 0, and r comes from exact differences.

    References
    ----------
    Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, section 4.2.1.
    """

    name = "matern"
    distance = "squared"
    positive_semidefinite = True
    checks: ClassVar[Checks] = {**Pairwise.checks, "nu": one_of(0.5, 1.5, 2.5)}
    length_scale: float | tuple[float, ...] = 1.0
    nu: float = 1.5

    @property
    def c(self) -> float:
        return 2.0 * self.nu

    @property
    def exact(self) -> bool:
        return self.nu == 0.5

    @property
    def formula(self) -> Formula:
        return {0.5: matern12, 1.5: matern32, 2.5: matern52}[self.nu]


@dataclass(frozen=True, kw_only=True, repr=False)
class Precomputed(Kernel):
    """K itself is given. A marker: the matrix belongs to an operator, there is nothing to evaluate on rows."""

    name = "precomputed"

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        raise ParameterError(
            "kernel 'precomputed' has no values on rows", hint="hand over the kernel matrix, or name another kernel"
        )

    _diag = _fill  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Chi2(Kernel):
    """k(a, b) = exp(-gamma sum_f (a_f - b_f)^2 / (a_f + b_f)), with 0 / 0 = 0; features >= 0

    gamma=None means 1.0 here, not 1 / d, as in :func:`sklearn.metrics.pairwise.chi2_kernel`. There is no
    matrix product in it: every feature costs five passes over a strip, 1.5 ns an entry and feature (a third of the
    time of scikit-learn's own loop), so that one entry with d = 10 costs as much as ten of rbf.

    References
    ----------
    Zhang, Marszalek, Lazebnik and Schmid, Local features and kernels for classification of texture and object
    categories, International Journal of Computer Vision 73, 2007.
    """

    name = "chi2"
    positive_semidefinite = True
    bounded = True
    checks: ClassVar[Checks] = {"gamma": lambda *given: 1.0 if given[2] is None else positive(*given)}
    gamma: float = 1.0

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        require_nonnegative(self.name, A=A, B=B)
        if not all(square_norms(rows).max() < LIMIT for rows in (A, B)):
            raise overflow(self.describe(), A, B)
        # 0 / 0 counts as 0: with the smallest normal number in place of 0 on one side it is, and no other term changes
        left = np.ascontiguousarray(np.maximum(A, np.finfo(np.float64).tiny).T)
        right = np.ascontiguousarray(B.T)
        scratch = np.empty((2, entries))

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            total = scratch[0, : strip.size].reshape(strip.shape)
            term = scratch[1, : strip.size].reshape(strip.shape)
            strip.fill(0.0)
            previous = np.setbufsize(BUFFER_SIZE)
            try:
                for a, b in zip(left, right, strict=True):
                    column, row = a[rows, np.newaxis], b[columns]
                    np.add(column, row, out=total)
                    np.subtract(column, row, out=term)
                    np.divide(term, total, out=total)  # in this order no square of small features underflows
                    np.multiply(term, total, out=term)
                    np.subtract(strip, term, out=strip)
            finally:
                np.setbufsize(previous)
            np.multiply(strip, self.gamma, out=strip)
            np.exp(strip, out=strip)

        return fill

    def _diag(self, A: FloatArray) -> FloatArray:
        require_nonnegative(self.name, A=A)
        return np.ones(len(A))
