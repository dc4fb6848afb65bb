"""Kernels of the difference a - b: rbf, laplacian, matern. They may be centred, and mostly should be.

Squared distances come from one matrix product of augmented rows,

    c |a - b|^2 = [-2c a, c |a|^2, 1] . [b, 1, c |b|^2],

so that a strip is written once, already scaled, and two elementwise passes finish it. The sum cancels for rows that are
close to each other and far from the origin: absolute error about eps c (|a|^2 + |b|^2). The caller centres the rows;
the remaining error, up to 3e-13, is clipped at 0. Where the rows of B reach beyond ``MAX_EXTENT`` lengths from the
origin it would be more, and the block is evaluated by exact differences,

    c |a - b|^2 = sum_k (w_k (a_k - b_k))^2,   w_k = sqrt(c) / length_scale_k,

compiled for blocks of many columns, else ``cdist``. They are differences of rows as they were given: a point that was
subtracted, or a length that was divided by, would round coordinates of 1e8 lengths by 1e-8 of one. So rows that
reach so far are not centred either, see :meth:`Kernel.center`. Kernels whose slope in |a - b|^2 is infinite at 0
(laplacian, matern with nu = 0.5) would turn eps into sqrt(eps) and always take differences.

Every kernel takes ``length_scale``, a number or one per feature, by which features are divided before anything else.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from scipy.spatial.distance import cdist

from dkrr.errors import ParameterError
from dkrr.kernels.base import Kernel
from dkrr.kernels.checks import LIMIT, overflow, positive, positive_or_vector, rescale
from dkrr.kernels.pairwise import MAX_EXTENT, Pairwise, compiled_fill, worth_compiling
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["RBF", "Laplacian", "Matern"]


@dataclass(frozen=True, kw_only=True, repr=False)
class _Stationary(Kernel):
    """k(a, b) depends on (a - b) / length_scale only, is positive semi-definite, and k(a, a) = 1."""

    # of x in the number that a profile is computed from: exp(-x) takes -x at once
    sign: ClassVar[float] = 1.0
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

    def extent(self, rows: FloatArray) -> float:
        form = self.resolve(rows.shape[1]).pairwise
        assert form is not None  # noqa: S101  (it is resolved)
        return form.extent(rows)

    @abstractmethod
    def _profile(self, x: FloatArray, scratch: FloatArray) -> None:
        """Turn x = c |a - b|^2, or c |a - b|_1, times ``sign``, into entries, in place."""

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        form = self.pairwise
        assert form is not None  # noqa: S101  (it is resolved)
        if not form.exact and form.distance == "squared":
            operands = self._squared_distances(A, B, self.sign * form.c)
            if operands is not None:
                return self._fill_products(*operands, np.empty(entries))
        if worth_compiling(form, len(B), A.shape[1]):
            return compiled_fill(form, A, B, self.describe())
        return self._fill_differences(form, A, B, np.empty(entries))

    def _fill_products(self, left: FloatArray, right: FloatArray, scratch: FloatArray) -> Fill:
        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            np.matmul(left[rows], right[:, columns], out=strip)
            # a reduction costs half of a pass that writes, and few strips need the pass
            if self.sign > 0.0:
                if strip.min() < 0.0:
                    np.maximum(strip, 0.0, out=strip)
            elif strip.max() > 0.0:
                np.minimum(strip, 0.0, out=strip)
            self._profile(strip, scratch[: strip.size].reshape(strip.shape))

        return fill

    def _squared_distances(self, A: FloatArray, B: FloatArray, c: float) -> tuple[FloatArray, FloatArray] | None:
        """Operands (m, d + 2) and (d + 2, n) with the product c |(a - b) / length_scale|^2, proved not to overflow.

        None where B reaches too far for products.
        """
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
        if np.abs(right[d + 1]).max() > MAX_EXTENT**2:
            return None
        left[:, :d] *= -2.0 * c
        return left, right

    def _fill_differences(self, form: Pairwise, A: FloatArray, B: FloatArray, scratch: FloatArray) -> Fill:
        """Fill strips from exact differences, proved to be free of overflow."""
        left, right = rescale(A, self.length_scale), rescale(B, self.length_scale)
        for rows in (left, right):
            squares = np.einsum("ij,ij->i", rows, rows)
            if not squares.max() < LIMIT:
                raise overflow(self.describe(), A, B)
        squared = form.distance == "squared"
        metric, c = "sqeuclidean" if squared else "cityblock", form.c
        options: dict[str, Any] = {}
        if form.is_far(right, squares):
            left, right = A, B  # the scaled ones are not needed any more
            if worth_compiling(form, len(B), A.shape[1], far=True):
                return compiled_fill(form, A, B, self.describe())
            # powers of two do not round; the rest of a weight is in [1/2, 1)
            weights, powers = np.frexp(form.weights(A.shape[1]))
            left, right = np.ldexp(left, powers), np.ldexp(right, powers)
            options, c = {"w": weights**2 if squared else weights}, 1.0

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            cdist(left[rows], right[columns], metric, out=strip, **options)
            np.multiply(strip, self.sign * c, out=strip)
            self._profile(strip, scratch[: strip.size].reshape(strip.shape))

        return fill


@dataclass(frozen=True, kw_only=True, repr=False)
class _WithGamma(_Stationary):
    sign = -1.0
    gamma: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma is not None:
            object.__setattr__(self, "gamma", positive(self.name, "gamma", self.gamma))

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        return self if self.gamma is not None else dataclasses.replace(self, gamma=1.0 / num_features)

    def _profile(self, x: FloatArray, scratch: FloatArray) -> None:
        np.exp(x, out=x)


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

    def _profile(self, x: FloatArray, scratch: FloatArray) -> None:
        if self.nu == 0.5:
            np.sqrt(x, out=x)
            np.negative(x, out=x)
            np.exp(x, out=x)
            return
        np.sqrt(x, out=scratch)
        if self.nu == 1.5:
            np.add(scratch, 1.0, out=x)
        else:
            np.multiply(x, 1.0 / 3.0, out=x)
            np.add(x, scratch, out=x)
            np.add(x, 1.0, out=x)
        np.negative(scratch, out=scratch)
        np.exp(scratch, out=scratch)
        np.multiply(x, scratch, out=x)
