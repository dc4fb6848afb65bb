"""Kernels of the difference a - b: rbf, laplacian, matern. They may be centred, and should be.

Squared distances come from one matrix product of augmented rows,

    c |a - b|^2 = [-2c a, c |a|^2, 1] . [b, 1, c |b|^2],

so that a strip is written once, already scaled, and two elementwise passes finish it. The sum cancels for rows that are
close to each other and far from the origin: absolute error about eps c (|a|^2 + |b|^2). The caller centres the rows;
the remaining error is clipped at 0. Kernels whose slope in |a - b|^2 is infinite at 0 (laplacian, matern with nu = 0.5)
would turn eps into sqrt(eps) and take exact differences instead: compiled for blocks of many columns, else ``cdist``.

Every kernel takes ``length_scale``, a number or one per feature, by which features are divided before anything else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from scipy.spatial.distance import cdist

from dkrr.errors import ParameterError
from dkrr.kernels.base import Kernel
from dkrr.kernels.checks import LIMIT, overflow, positive, positive_or_vector, rescale
from dkrr.kernels.pairwise import Pairwise, compiled_fill, worth_compiling
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["RBF", "Laplacian", "Matern"]


@dataclass(frozen=True, kw_only=True, repr=False)
class _Stationary(Kernel):
    """k(a, b) depends on (a - b) / length_scale only, is positive semi-definite, and k(a, a) = 1."""

    length_scale: float | tuple[float, ...] = 1.0

    def __post_init__(self) -> None:
        scale = positive_or_vector(self.name, "length_scale", self.length_scale)
        object.__setattr__(self, "length_scale", scale)

    @property
    def stationary(self) -> bool:
        return True

    @property
    def positive_semidefinite(self) -> bool:
        return True

    @property
    def bounded(self) -> bool:
        return True

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        if isinstance(self.length_scale, tuple) and len(self.length_scale) != num_features:
            raise ParameterError(
                f"length_scale of kernel {self.name!r} has {len(self.length_scale)} values, "
                f"the rows have {num_features} features",
                hint="give a number, or one per feature",
            )
        return self

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.ones(len(A))

    def _squared_distances(self, A: FloatArray, B: FloatArray, c: float) -> tuple[FloatArray, FloatArray]:
        """Operands (m, d + 2) and (d + 2, n) with the product c |(a - b) / length_scale|^2, proved not to overflow."""
        d = A.shape[1]
        left, right = np.empty((len(A), d + 2)), np.empty((d + 2, len(B)))
        left[:, d + 1] = 1.0
        right[d] = 1.0
        for source, operand, norm in ((A, left, d), (B, right.T, d + 1)):
            rows = rescale(source, self.length_scale, out=operand[:, :d])
            operand[:, norm] = np.einsum("ij,ij->i", rows, rows)
            operand[:, norm] *= c
            # |a.b| <= max(|a|^2, |b|^2), so nothing in the product is larger than a few of these; NaN fails, too
            if not np.abs(operand[:, norm]).max() < LIMIT:
                raise overflow(self.describe(), A, B)
        left[:, :d] *= -2.0 * c
        return left, right

    def _distances(self, A: FloatArray, B: FloatArray, metric: str) -> Fill:
        """Fill strips with exact distances of the scaled rows, proved to be free of overflow."""
        left, right = rescale(A, self.length_scale), rescale(B, self.length_scale)
        for rows in (left, right):
            if not np.einsum("ij,ij->i", rows, rows).max() < LIMIT:
                raise overflow(self.describe(), A, B)

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            cdist(left[rows], right[columns], metric, out=strip)

        return fill


@dataclass(frozen=True, kw_only=True, repr=False)
class _WithGamma(_Stationary):
    gamma: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma is not None:
            object.__setattr__(self, "gamma", positive(self.name, "gamma", self.gamma))

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        return self if self.gamma is not None else dataclasses.replace(self, gamma=1.0 / num_features)


@dataclass(frozen=True, kw_only=True, repr=False)
class RBF(_WithGamma):
    """k(a, b) = exp(-gamma |(a - b) / length_scale|^2)

    gamma=None means 1 / d. The matrix product yields the exponent itself.
    """

    name = "rbf"

    @property
    def pairwise(self) -> Pairwise | None:
        if self.gamma is None:
            return None
        return Pairwise(distance="squared", profile="exp", c=self.gamma, length_scale=self.length_scale)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        left, right = self._squared_distances(A, B, -(self.gamma or 1.0 / A.shape[1]))

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            np.matmul(left[rows], right[:, columns], out=strip)
            # a reduction costs half of a pass that writes, and few strips need the pass
            if strip.max() > 0.0:
                np.minimum(strip, 0.0, out=strip)
            np.exp(strip, out=strip)

        return fill


@dataclass(frozen=True, kw_only=True, repr=False)
class Laplacian(_WithGamma):
    """k(a, b) = exp(-gamma |(a - b) / length_scale|_1)

    The 1-norm, as in scikit-learn (elsewhere "laplacian" is the 2-norm, here matern with nu = 0.5). gamma=None means
    1 / d.
    """

    name = "laplacian"

    @property
    def pairwise(self) -> Pairwise | None:
        if self.gamma is None:
            return None
        return Pairwise(distance="manhattan", profile="exp", c=self.gamma, length_scale=self.length_scale)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        form = self.pairwise
        if form is not None and worth_compiling(form, len(B), A.shape[1]):
            return compiled_fill(form, A, B, self.describe())
        gamma = self.gamma or 1.0 / A.shape[1]
        distances = self._distances(A, B, "cityblock")

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            distances(rows, columns, strip)
            np.multiply(strip, -gamma, out=strip)
            np.exp(strip, out=strip)

        return fill


@dataclass(frozen=True, kw_only=True, repr=False)
class Matern(_Stationary):
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
    nu: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.nu, bool) or self.nu not in (0.5, 1.5, 2.5):
            raise ParameterError(f"nu = {self.nu!r} for kernel {self.name!r}", hint="0.5, 1.5 or 2.5 is expected")
        object.__setattr__(self, "nu", float(self.nu))

    @property
    def pairwise(self) -> Pairwise | None:
        profiles: dict[float, Literal["matern12", "matern32", "matern52"]]
        profiles = {0.5: "matern12", 1.5: "matern32", 2.5: "matern52"}
        return Pairwise(
            distance="squared",
            profile=profiles[self.nu],
            c=2.0 * self.nu,
            length_scale=self.length_scale,
            exact=self.nu == 0.5,
        )

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        if self.nu == 0.5:
            return self._exponential(A, B)
        left, right = self._squared_distances(A, B, 2.0 * self.nu)
        scratch = np.empty(entries)

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            np.matmul(left[rows], right[:, columns], out=strip)
            if strip.min() < 0.0:
                np.maximum(strip, 0.0, out=strip)
            r = scratch[: strip.size].reshape(strip.shape)
            np.sqrt(strip, out=r)
            if self.nu == 1.5:
                np.add(r, 1.0, out=strip)
            else:
                np.multiply(strip, 1.0 / 3.0, out=strip)
                np.add(strip, r, out=strip)
                np.add(strip, 1.0, out=strip)
            np.negative(r, out=r)
            np.exp(r, out=r)
            np.multiply(strip, r, out=strip)

        return fill

    def _exponential(self, A: FloatArray, B: FloatArray) -> Fill:
        form = self.pairwise
        if form is not None and worth_compiling(form, len(B), A.shape[1]):
            return compiled_fill(form, A, B, self.describe())
        distances = self._distances(A, B, "euclidean")

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            distances(rows, columns, strip)
            np.negative(strip, out=strip)
            np.exp(strip, out=strip)

        return fill
