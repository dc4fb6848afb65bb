"""Explicit features of the kernels that have finitely many: F(x).F(z) = k(x, z), exactly.

    linear   F(x) = x                                                                        D = d
    poly     F(x) = sqrt(p! / (k_0! k_1! ... k_d!)) coef0^(k_0 / 2) prod_i (gamma^(1/2) x_i)^k_i
             for all k_0 + k_1 + ... + k_d = p                                               D = C(d + p, p)
             with coef0 = 0 only those with k_0 = 0                                          D = C(d + p - 1, p)

by the multinomial theorem for (gamma x.z + coef0)^p. You need them where D is less than the number of rows: the Gram
matrix F F^T is then of rank D, and D x D algebra takes the place of n x n algebra.

Monomials are built degree by degree. Those of degree k, as sequences of variables i_1 <= ... <= i_k in lexicographic
order, that begin with variable i are x_i times those of degree k - 1 that begin with i or a later one, which lie next
to one another.

Cost: two multiplications a feature, D numbers a row.

References
----------
Shawe-Taylor and Cristianini, Kernel Methods for Pattern Analysis, 2004, section 9.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations_with_replacement
from math import comb, factorial
from typing import Any, ClassVar

import numpy as np

from dkrr.errors import DataError, ParameterError
from dkrr.kernels.base import FloatArray, Kernel
from dkrr.kernels.formulas import Linear, Polynomial

# factorials beyond this one are no float64 numbers
MAX_DEGREE = 170
STRIP_BYTES = 2 << 20

# Features whose mean is further from 0 than this many standard deviations are shifted before they are summed. Nearer
# ones lose a digit of the sums, which the residual brings back, and save a pass over every strip.
FAR = 4.0


def _parameters(kernel: Kernel | None) -> tuple[int, float, float] | None:
    """p, gamma and coef0 of a kernel (gamma x.z + coef0)^p with finitely many real features, else None."""
    if isinstance(kernel, Linear | Polynomial) and kernel.positive_semidefinite and kernel.degree <= MAX_DEGREE:
        return int(kernel.degree), kernel.c, kernel.coef0
    return None


def count_features(kernel: Kernel | None, num_inputs: int) -> int | None:
    """D for rows of ``num_inputs`` numbers; None for a kernel without finitely many features."""
    found = _parameters(kernel)
    return None if found is None else comb(num_inputs + found[0] - (found[2] == 0), found[0])


def feature_map(kernel: Kernel | None, num_inputs: int) -> FeatureMap:
    """The features of a kernel for rows of ``num_inputs`` numbers.

    Raises
    ------
    ParameterError
        The kernel has no finite number of real features; says which kernels have.
    """
    if kernel is not None and _parameters(kernel) is not None:
        return FeatureMap(kernel=kernel.resolve(num_inputs), num_inputs=num_inputs)
    if not isinstance(kernel, Polynomial):
        name = "a precomputed matrix" if kernel is None else f"kernel {kernel.name!r}"
        raise ParameterError(
            f"{name} has no finite number of explicit features",
            hint='kernel "linear", or "poly" with a whole degree and coef0 >= 0, has; or take another solver',
        )
    seen, help_ = f"coef0 = {kernel.coef0!r}", "take coef0 >= 0"
    if not isinstance(kernel.degree, int) or kernel.degree > MAX_DEGREE:
        seen, help_ = f"degree = {kernel.degree:,}", f"take a whole degree of at most {MAX_DEGREE}"
    raise ParameterError(f"poly with {seen} has no real finite features", hint=f"{help_}, or another solver")


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """F, for rows of one width. Made by :func:`feature_map`.

    Parameters
    ----------
    kernel
        Resolved; linear or poly.
    num_inputs
        d.
    """

    kernel: Kernel
    num_inputs: int

    has_panels: ClassVar[bool] = True

    @property
    def num_features(self) -> int:
        """D."""
        return count_features(self.kernel, self.num_inputs) or 0

    @property
    def is_linear(self) -> bool:
        """Whether F(x) = x."""
        return isinstance(self.kernel, Linear)

    @property
    def num_monomials(self) -> int:
        """Monomials that are built on the way: D, and those of lower degree too where coef0 = 0."""
        p, _, _ = _parameters(self.kernel) or (1, 1.0, 0.0)
        return self.num_inputs if self.is_linear else comb(self.num_inputs + p, p)

    def operands(self) -> dict[str, Any]:
        """What :meth:`design` needs beside the rows: nothing."""
        return {}

    def design(self, x: FloatArray, operands: Any = None, room: FloatArray | None = None) -> FloatArray:
        """F (q, D) of rows x (q, d), feature by feature in memory; x itself where F(x) = x. What overflows is inf.

        ``room`` (num_monomials, q) is where all monomials go that are built on the way.
        """
        if self.is_linear:
            return x
        variables, d = np.ascontiguousarray(x.T), self.num_inputs
        out = np.empty((self.num_monomials, len(x))) if room is None else room
        with np.errstate(over="ignore", invalid="ignore"):
            out[0] = 1.0
            before, start, k = 0, 1, 0
            while start < len(out):
                k, end = k + 1, start
                for i in range(d):
                    # where, among the monomials of degree k - 1, those begin whose variables are >= i
                    at = comb(d + k - 2, k - 1) - comb(d - i + k - 2, k - 1)
                    first, end = end, end + start - before - at
                    np.multiply(out[before + at : start], variables[i], out=out[first:end])
                before, start = start, end
            features = out[-self.num_features :]
            features *= _scale(d, *(_parameters(self.kernel) or (1, 1.0, 0.0)))[:, None]
        return features.T

    def typical(self, mean: FloatArray, std: FloatArray) -> FloatArray | None:
        """About the means of the features of rows with such means and deviations (d,); None: 0 is near enough."""
        if self.is_linear and (np.abs(mean) <= FAR * std).all():
            return None
        found = self.design(np.atleast_2d(mean))[0]
        return np.ascontiguousarray(found) if np.isfinite(found).all() else None

    def apply(self, x: FloatArray, coef: FloatArray) -> FloatArray:
        """F(x) coef (m, t) for rows x (m, d) and coefficients (D, t), in strips.

        Raises
        ------
        DataError
            A feature overflows.
        """
        result = np.empty((len(x), coef.shape[1]))
        rows = max(16, STRIP_BYTES // (8 * self.num_monomials))
        for start in range(0, len(x), rows):
            np.matmul(self.design(x[start : start + rows]), coef, out=result[start : start + rows])
        if not (self.is_linear or np.isfinite(result).all()):
            raise not_finite(self.kernel, x)
        return result


def not_finite(kernel: Kernel, x: FloatArray) -> DataError:
    """The error for features of rows, or sums of them, that are not finite."""
    largest = float(np.abs(x).max(initial=0.0))
    return DataError(
        f"the features of {kernel.describe()} are not finite on these rows (largest |x| {largest:.3g})",
        hint="scale the features",
    )


@lru_cache(maxsize=2)
def _scale(d: int, p: int, gamma: float, coef0: float) -> FloatArray:
    """The factor before each monomial."""
    parts = []
    for k in range(p + 1) if coef0 > 0 else (p,):
        variables = np.array(list(combinations_with_replacement(range(d), k)))
        # the product of the factorials of the exponents, one factor for each place in a run of equal variables
        products, run = np.ones(len(variables)), np.ones(len(variables))
        for j in range(1, k):
            run = np.where(variables[:, j] == variables[:, j - 1], run + 1, 1.0)
            products *= run
        constant = coef0 ** ((p - k) / 2) * gamma ** (k / 2)
        parts.append(constant * np.sqrt(float(factorial(p) // factorial(p - k)) / products))
    return np.concatenate(parts)
