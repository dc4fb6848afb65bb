"""Kernels that are a function of one distance or inner product of two rows, evaluated by NumPy or by compiled code.

A subclass of :class:`Pairwise` says which number x of two rows it takes and writes its formula, f(v, x), once: for
strips (``v`` is NumPy) and for the vectors of compiled code (``v`` is :class:`~dkrr.kernels.compiled.Vectors`, with
sqrt and exp of numbers <= 0). x takes +, * and the minus sign. A formula may overwrite x, and should: a strip then
stays in the cache.

Squared distances come from one matrix product of augmented rows,

    c |a - b|^2 = [-2c a, c |a|^2, 1] . [b, 1, c |b|^2],

so that a strip is written once, already scaled, and the formula finishes it. The sum cancels for rows that are
close to each other and far from the origin: absolute error about eps |c| (|a|^2 + |b|^2). The caller centres the rows;
the remaining error, up to 100 eps, is clipped at 0. Where the rows of B reach beyond ``MAX_EXTENT`` lengths from the
origin it would be more, and the block is evaluated by exact differences,

    |c| |a - b|^2 = sum_k (w_k (a_k - b_k))^2,   w_k = sqrt(|c|) / length_scale_k,

compiled for blocks of many columns, else ``cdist``. They are differences of rows as they were given: a point that was
subtracted, or a length that was divided by, would round coordinates of 1e8 lengths by 1e-8 of one. So rows that
reach so far are not centred either, see :meth:`Kernel.center`.

:func:`pack` scales, checks and packs rows for :mod:`dkrr.kernels.compiled`, which it imports, and Numba with it, on its
first use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from dkrr.errors import ParameterError
from dkrr.kernels.base import (
    LIMIT,
    MAX_EXTENT,
    Checks,
    Fill,
    FloatArray,
    Kernel,
    finite,
    overflow,
    positive,
    positive_or_vector,
)

# Columns from which compiled code is used. Below, a product takes milliseconds with NumPy, Numba's import 0.3 s. It is
# the columns that decide (in a prediction: the training rows), so that one row is predicted like a thousand.
MIN_COLUMNS = 1024
# Features up to which compiled code beats a matrix product and NumPy's elementwise passes; 1-norms have no product.
MAX_FEATURES = 64
# Of numbers that are multiplied in float32.
LIMIT_SINGLE = 1e36
# Terms of an exponent from which float32 takes the differences of two rows instead of their inner product: the sum
# c |a|^2 + c |b|^2 - 2 c a.b is off by about 6e-8 of the largest of its terms.
MAX_TERM_SINGLE = 6.0
# Terms up to which 2^(2 c a.b) may be evaluated by itself: far from overflow, as exact as the whole exponent.
MAX_TERM_SPLIT = {"float32": MAX_TERM_SINGLE, "float64": 50.0}
# MAX_EXTENT of float32 entries: every one is rounded more than by the limit of float64, and this is where they would
# say nothing.
MAX_EXTENT_SINGLE = 48.0
LOG2E = 1.4426950408889634

# f(v, x): the kernel of x
Formula = Callable[[Any, Any], Any]


def exponential(v: Any, x: Any) -> Any:
    """exp(x). Compiled code takes log2(e) x from the distances at once."""
    return v.exp(x, out=x)


class Pairwise(Kernel):
    """k(a, b) = formula(x) of one number x for each pair of rows

    "squared": x = c |a - b|^2; "manhattan": x = c |a - b|_1, both of rows divided by ``length_scale``, and k(a, a) = 1;
    "inner": x = c a.b + coef0. The factor c is gamma, or whatever a subclass says; it may be negative.

    ``gamma``: None means 1 / d. ``length_scale``: a number or one per feature, by which features are divided before
    anything else. A formula whose slope in the squared distance is infinite at 0 would turn eps into sqrt(eps), so that
    it says ``exact``.
    """

    distance: ClassVar[Literal["squared", "manhattan", "inner"]]
    formula: ClassVar[Any]
    checks: ClassVar[Checks] = {"gamma": positive, "length_scale": positive_or_vector, "coef0": finite}
    # parameters that a subclass may have
    gamma: float | None = 1.0
    length_scale: float | tuple[float, ...] = 1.0
    coef0: float = 0.0
    degree: float = 1

    @property
    def compiled(self) -> bool:
        """Whether compiled code has all functions of the formula, for every x that there may be."""
        return self.stationary

    @property
    def exact(self) -> bool:
        """Whether squared distances are always summed from differences."""
        return False

    @property
    def c(self) -> float:
        """The factor of the distance or inner product of a resolved kernel."""
        return self.gamma or 1.0

    @property
    def stationary(self) -> bool:
        return self.distance != "inner"

    @property
    def bounded(self) -> bool:
        return self.stationary

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        if isinstance(self.length_scale, tuple) and len(self.length_scale) != num_features:
            raise ParameterError(
                f"length_scale of kernel {self.name!r} has {len(self.length_scale)} values, "
                f"the rows have {num_features} features",
                hint="give a number, or one per feature",
            )
        return self if self.gamma is not None else dataclasses.replace(self, gamma=1.0 / num_features)  # type: ignore[type-var]

    def extent(self, rows: FloatArray) -> float:
        if not rows.size:
            return 0.0
        with np.errstate(all="ignore"):  # infinity is far, too
            return self.resolve(rows.shape[1]).reach(*self.scaled(rows))

    def reach(self, scaled: FloatArray, squares: FloatArray) -> float:
        """Largest distance from the origin, sqrt(|x|) or for 1-norms |x|, of rows divided by ``length_scale``."""
        if self.distance == "squared":
            return float(np.sqrt(abs(self.c) * squares.max()))
        return abs(self.c) * float(np.abs(scaled).sum(axis=1).max()) if self.stationary else 0.0

    def weights(self, num_features: int, unit: float) -> FloatArray:
        """What differences of features (d,) are multiplied with, so that |x| is a sum of squares or magnitudes."""
        root = abs(unit) if self.distance == "manhattan" else np.sqrt(abs(unit))
        return np.broadcast_to(root / np.asarray(self.length_scale), num_features)

    def scaled(self, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Rows divided by ``length_scale``, and |x|^2 of each."""
        rows = rows if self.length_scale == 1.0 else rows / np.asarray(self.length_scale)
        return rows, square_norms(rows)

    def _is_proved(self, *squares: FloatArray) -> bool:
        """Whether no sum of terms c |a|^2, c |b|^2 and c a.b overflows, as |a.b| <= max(|a|^2, |b|^2); NaN fails."""
        return all(bool(each.max() * max(1.0, abs(self.c)) < LIMIT) for each in squares)

    def _finish(self, x: FloatArray) -> FloatArray:
        """The formula of x, in place."""
        values = self.formula(np, x)
        if values is not x:
            x[...] = values
        return x

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.ones(len(A)) if self.stationary else self._finish(self.c * square_norms(A) + self.coef0)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        (rows_a, squares_a), (rows_b, squares_b) = self.scaled(A), self.scaled(B)
        if self.bounded and not self._is_proved(squares_a, squares_b):
            raise overflow(self.describe(), A, B)
        (m, d), n, c, sign = A.shape, len(B), self.c, 0.0
        if self.distance == "inner" and c == 1.0 and self.coef0 == 0.0:
            left, right = A, np.ascontiguousarray(B.T)  # with few features, a product is a third faster in C order
        elif self.distance == "inner":
            left, right = np.full((m, d + 1), self.coef0), np.ones((d + 1, n))
            np.multiply(A, c, out=left[:, :d])
            right[:d] = B.T
        elif self.distance == "squared" and not self.exact and self.reach(rows_b, squares_b) <= MAX_EXTENT:
            left, right, sign = np.ones((m, d + 2)), np.ones((d + 2, n)), np.sign(c)
            np.multiply(rows_a, -2.0 * c, out=left[:, :d])
            left[:, d], right[:d], right[d + 1] = c * squares_a, rows_b.T, c * squares_b
        else:
            return self._differences(A, B)

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            np.matmul(left[rows], right[:, columns], out=strip)
            # a reduction costs half of a pass that writes, and few strips need the pass
            if sign and (strip.min() < 0.0 if sign > 0 else strip.max() > 0.0):
                np.clip(strip, *((0.0, None) if sign > 0 else (None, 0.0)), out=strip)
            self._finish(strip)

        return fill

    def _differences(self, A: FloatArray, B: FloatArray) -> Fill:
        """Fill strips from exact differences: compiled for many columns, and packed once."""
        if len(B) >= MIN_COLUMNS:
            from dkrr.kernels.compiled import fill_function

            packed = pack(self, A, B, np.float64)
            assert packed is not None  # noqa: S101  (distances in float64 either fit or raise)
            function = fill_function(packed.kind, packed.width)
            return lambda rows, columns, strip: function(*packed.sides, strip, packed.factor, rows.start, columns.start)
        # powers of two do not round; the rest of a weight is in [1/2, 1)
        weights, powers = np.frexp(self.weights(A.shape[1], self.c))
        left, right = np.ldexp(A, powers), np.ldexp(B, powers)
        metric, weights = ("sqeuclidean", weights**2) if self.distance == "squared" else ("cityblock", weights)
        sign, first = np.sign(self.c), weights[0]
        options, factor = ({}, sign * first) if (weights == first).all() else ({"w": weights}, sign)

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            cdist(left[rows], right[columns], metric, out=strip, **options)
            np.multiply(strip, factor, out=strip)
            self._finish(strip)

        return fill


def square_norms(rows: FloatArray) -> FloatArray:
    """|a|^2 of each row."""
    norms: FloatArray = np.einsum("ij,ij->i", rows, rows)
    return norms


@dataclass(frozen=True)
class Packed:
    """Rows of both sides as compiled code takes them.

    ``sides`` are its first four arguments: rows (blocks, d, ROWS) and their offsets, columns (panels, d, panel) and
    their offsets; zeros where there is no row. With ``row_factors`` (m,) and ``column_factors`` (n,) an entry is the
    evaluated one times both.
    """

    kind: str
    width: int
    sides: tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]
    factor: NDArray[Any]
    row_factors: FloatArray | None = None
    column_factors: FloatArray | None = None


def compiled_form(kernel: Kernel | None) -> Pairwise | None:
    """The kernel itself if it is resolved and compiled code has its formula, else None."""
    return kernel if isinstance(kernel, Pairwise) and kernel.compiled and kernel.gamma is not None else None


def worth_compiling(form: Pairwise, num_columns: int, num_features: int) -> bool:
    """Whether compiled code is used for products with that many columns."""
    return num_columns >= MIN_COLUMNS and (num_features <= MAX_FEATURES or form.distance == "manhattan")


def pack(form: Pairwise, A: FloatArray, B: FloatArray, dtype: Any, *, split: bool = False) -> Packed | None:
    """Scale, check and pack rows A (m, d) and B (n, d).

    Parameters
    ----------
    split
        exp(c |a - b|^2) may become exp(c |a|^2) exp(-2 c a.b) exp(c |b|^2) where all rows are near the origin: the
        outer factors go to whoever uses the entries, and an entry takes four instructions of 27 less (d = 10).
    dtype
        Of the packed rows, and of whatever is made of them; float64 in any case where B reaches beyond
        ``MAX_EXTENT_SINGLE``: the differences of rows that were rounded to float32 say nothing there.

    Returns
    -------
    None where an intermediate value could leave the range of ``dtype``: the caller then evaluates in blocks, which
    check every value.

    Raises
    ------
    DataError
        A feature is not finite, or distances overflow.
    """
    from dkrr.kernels import compiled

    (left, squares_a), (right, squares_b), size = form.scaled(A), form.scaled(B), abs(form.c)
    if not form._is_proved(squares_a, squares_b):
        if not form.bounded:
            return None
        raise overflow(form.describe(), A, B)
    largest = float(max(squares_a.max(), squares_b.max()))
    single = np.dtype(dtype) == np.float32
    far = form.reach(right, squares_b) > (MAX_EXTENT_SINGLE if single else MAX_EXTENT)
    single = single and not far
    dtype, limit = (np.float32, LIMIT_SINGLE) if single else (np.float64, LIMIT)
    # in logarithms: a power itself may overflow
    magnitude = size * largest + abs(form.coef0) if form.distance == "inner" else largest * max(1.0, size)
    if form.degree * np.log(max(magnitude, 1.0)) >= np.log(limit):
        return None
    is_exponential = form.formula is exponential
    unit = form.c * (LOG2E if is_exponential else 1.0)
    term = abs(unit) * largest
    distance, factor, weights = str(form.distance), np.sign(form.c), np.empty(0)
    offset_a, offset_b = np.full(len(A), form.coef0), np.zeros(len(B))
    factors: tuple[FloatArray | None, FloatArray | None] = None, None
    scale_a = scale_b = 1.0
    if far:
        left, right, distance = A, B, f"weighted_{distance}"
        weights = form.weights(A.shape[1], unit)
    elif distance == "inner":
        scale_a = form.c
    elif distance == "manhattan":
        factor = unit
    elif form.exact or (single and term > MAX_TERM_SINGLE):
        scale_a = scale_b = np.sqrt(abs(unit))
    else:
        offset_a, offset_b, scale_a = unit * squares_a, unit * squares_b, -2.0 * unit
        distance = "expanded-" if unit < 0 else "expanded+"
        if split and is_exponential and term <= MAX_TERM_SPLIT[np.dtype(dtype).name]:
            distance, factors = "split", (np.exp2(offset_a), np.exp2(offset_b))
    width = compiled.vector_width(dtype)
    panel = compiled.PANEL_VECTORS * width
    return Packed(
        kind=compiled.kind_of(distance, form.formula),
        width=width,
        sides=(
            pack_rows(left if scale_a == 1.0 else left * scale_a, compiled.ROWS, dtype),
            pack_rows(offset_a[:, np.newaxis], compiled.ROWS, dtype).ravel(),
            pack_rows(right if scale_b == 1.0 else right * scale_b, panel, dtype),
            pack_rows(offset_b[:, np.newaxis], panel, dtype).ravel(),
        ),
        factor=np.append(factor, weights).astype(dtype),
        row_factors=factors[0],
        column_factors=factors[1],
    )


def pack_rows(rows: NDArray[Any], group: int, dtype: Any) -> NDArray[Any]:
    """Rows (n, k) as (groups, k, group), the last group filled up with zeros."""
    n, k = rows.shape
    groups, full = -(-n // group), n // group
    packed = np.zeros((groups, k, group), dtype) if groups > full else np.empty((groups, k, group), dtype)
    packed[:full] = rows[: full * group].reshape(full, group, k).transpose(0, 2, 1)
    if groups > full:
        packed[full, :, : n - full * group] = rows[full * group :].T
    return packed


def pack_sums(packed: NDArray[Any], n: int) -> NDArray[Any]:
    """The inverse of :func:`pack_rows`: (groups, k, group) as (n, k)."""
    groups, k, group = packed.shape
    return packed.transpose(0, 2, 1).reshape(groups * group, k)[:n]
