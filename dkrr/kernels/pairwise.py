"""Kernels whose entries compiled code evaluates: a function of one distance or one inner product of two rows.

A kernel says so with a :class:`Pairwise`. Here its rows are scaled, checked and packed; :mod:`dkrr.kernels.compiled`
does the rest. That module, and Numba with it, is imported on the first use of :func:`pack`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.kernels.checks import LIMIT, overflow, rescale
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["MAX_EXTENT", "Packed", "Pairwise", "compiled_fill", "pack", "pack_rows", "pack_sums", "worth_compiling"]

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
# Distance from the origin, in the kernel's own lengths, up to which rows may be scaled, and squared distances may come
# from products: x = c |a|^2 + c |b|^2 - 2 c a.b is off by at most 2 eps 24^2 = 3e-13, and was by 100 eps at 48 lengths.
# Beyond, differences are taken first, of rows as they are. The rows of one side decide: if only the others are far,
# their entries are nearly 0. In float32 every entry is rounded more than that, and the limit is where it says nothing.
MAX_EXTENT = 24.0
MAX_EXTENT_SINGLE = 48.0
LOG2E = 1.4426950408889634


@dataclass(frozen=True, kw_only=True)
class Pairwise:
    """profile(x) of one number x a pair of rows.

    Parameters
    ----------
    distance
        "squared": x = c |a - b|^2; "manhattan": x = c |a - b|_1, both of rows divided by ``length_scale``;
        "inner": x = c a.b + coef0.
    profile
        "exp": exp(-x). "matern12", "matern32", "matern52": with r = sqrt(x) exp(-r), (1 + r) exp(-r),
        (1 + r + r^2 / 3) exp(-r). "power": x^degree.
    exact
        A squared distance is always summed from differences, also in float64: the slope of the profile is infinite at
        0.
    """

    distance: Literal["squared", "manhattan", "inner"]
    profile: Literal["exp", "matern12", "matern32", "matern52", "power"]
    c: float
    length_scale: float | tuple[float, ...] = 1.0
    coef0: float = 0.0
    degree: int = 1
    exact: bool = False

    def extent(self, rows: FloatArray) -> float:
        """Largest distance of a row from the origin, sqrt(x) or for 1-norms x; 0 of an inner product."""
        if not rows.size:
            return 0.0
        with np.errstate(all="ignore"):  # infinity is far, too
            scaled = rescale(rows, self.length_scale)
            return self._extent(scaled, np.einsum("ij,ij->i", scaled, scaled))

    def is_far(self, scaled: FloatArray, squares: FloatArray, limit: float = MAX_EXTENT) -> bool:
        """Whether some row is beyond ``limit``, for rows divided by ``length_scale`` and their squares."""
        return self._extent(scaled, squares) > limit

    def _extent(self, scaled: FloatArray, squares: FloatArray) -> float:
        if self.distance == "inner":
            return 0.0
        if self.distance == "squared":
            return float(np.sqrt(self.c * squares.max()))
        return self.c * float(np.abs(scaled).sum(axis=1).max())

    def weights(self, num_features: int) -> FloatArray:
        """What the difference of each feature (d,) is multiplied with: x is the sum of squares, or of magnitudes."""
        unit = self.c if self.distance == "manhattan" else np.sqrt(self.c)
        return np.broadcast_to(unit / np.asarray(self.length_scale), num_features)


@dataclass(frozen=True)
class Packed:
    """Rows of both sides as compiled code takes them.

    ``rows`` (blocks, d, ROWS) with ``row_offsets``, ``columns`` (panels, d, panel) with ``column_offsets``; zeros where
    there is no row. With ``row_factors`` (m,) and ``column_factors`` (n,) an entry is the evaluated one times both.
    """

    distance: str
    profile: str
    width: int
    rows: NDArray[Any]
    row_offsets: NDArray[Any]
    columns: NDArray[Any]
    column_offsets: NDArray[Any]
    factor: NDArray[Any]
    degree: int
    row_factors: FloatArray | None = None
    column_factors: FloatArray | None = None

    @property
    def panel(self) -> int:
        """Columns in a panel."""
        return int(self.columns.shape[2])


def worth_compiling(form: Pairwise, num_columns: int, num_features: int, *, far: bool = False) -> bool:
    """Whether compiled code is used for blocks with that many columns; ``far`` if differences must be taken."""
    return num_columns >= MIN_COLUMNS and (num_features <= MAX_FEATURES or form.distance == "manhattan" or far)


def pack(
    form: Pairwise,
    A: FloatArray,
    B: FloatArray,
    dtype: Any,
    description: str,
    *,
    same: bool = False,
    split: bool = False,
) -> Packed | None:
    """Scale, check and pack rows A (m, d) and B (n, d).

    Parameters
    ----------
    split
        exp(-c |a - b|^2) may become exp(-c |a|^2) exp(2 c a.b) exp(-c |b|^2) where all rows are near the origin: the
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

    given, A, B = (A, B), rescale(A, form.length_scale), rescale(B, form.length_scale)
    with np.errstate(all="ignore"):  # overflow is checked on the next lines
        squares_a = np.einsum("ij,ij->i", A, A)
        squares_b = squares_a if same else np.einsum("ij,ij->i", B, B)
        largest = max(float(squares_a.max()), float(squares_b.max())) * max(1.0, form.c)
        if not np.isfinite(squares_a).all() or not np.isfinite(squares_b).all() or not largest < LIMIT:
            if form.distance == "inner" and np.isfinite(A).all() and np.isfinite(B).all():
                return None
            raise overflow(description, A, B)
    far = form.is_far(B, squares_b, MAX_EXTENT_SINGLE if np.dtype(dtype) == np.float32 else MAX_EXTENT)
    dtype = np.float64 if far else dtype
    single = np.dtype(dtype) == np.float32
    limit = LIMIT_SINGLE if single else LIMIT
    if form.distance == "inner":
        # in logarithms: the power itself may overflow
        if form.degree * np.log(max(form.c * largest / max(1.0, form.c) + abs(form.coef0), 1.0)) >= np.log(limit):
            return None
    elif largest >= limit:
        return None
    kind: str = form.distance
    scaled, factor = 1.0, form.c
    norms: float | None = None
    weights = np.empty(0)
    if far:
        A, B = given
        kind, weights, factor = f"weighted_{form.distance}", form.weights(A.shape[1]), -1.0
        if form.profile == "exp":
            weights = weights * (LOG2E if form.distance == "manhattan" else np.sqrt(LOG2E))
    elif form.distance == "squared":
        unit = form.c * (LOG2E if form.profile == "exp" else 1.0)
        term = unit * max(float(squares_a.max()), float(squares_b.max()))
        if form.exact or (single and term > MAX_TERM_SINGLE):
            scaled = float(np.sqrt(unit))
        else:
            # -unit |a - b|^2 for exp, else unit |a - b|^2
            kind, norms = "inner", -unit if form.profile == "exp" else unit
    elif form.distance == "manhattan":
        factor = -form.c * LOG2E
    width = compiled.vector_width(dtype)
    left, right = (A, B) if scaled == 1.0 else (A * scaled, B * scaled)
    factors: tuple[FloatArray | None, FloatArray | None] = None, None
    if norms is not None:
        offset_a, offset_b = norms * squares_a, norms * squares_b
        left = A * (-2.0 * norms)
        if split and form.profile == "exp" and term <= MAX_TERM_SPLIT[np.dtype(dtype).name]:
            kind, factors = "product", (np.exp2(offset_a), np.exp2(offset_b))
    elif form.distance == "inner":
        offset_a, offset_b = np.full(len(A), form.coef0), np.zeros(len(B))
        left = A * form.c
    else:
        offset_a, offset_b = np.zeros(len(A)), np.zeros(len(B))
    panel = compiled.PANEL_VECTORS * width
    return Packed(
        distance=kind,
        profile=form.profile,
        width=width,
        rows=pack_rows(left, compiled.ROWS, dtype),
        row_offsets=_padded(offset_a, compiled.ROWS, dtype),
        columns=pack_rows(right, panel, dtype),
        column_offsets=_padded(offset_b, panel, dtype),
        factor=np.append(factor, weights).astype(dtype),
        degree=form.degree,
        row_factors=factors[0],
        column_factors=factors[1],
    )


def compiled_fill(form: Pairwise, A: FloatArray, B: FloatArray, description: str) -> Fill:
    """What fills strips of a block k(A, B) whose distances are summed from differences; packed once."""
    from dkrr.kernels.compiled import fill_function

    packed = pack(form, A, B, np.float64, description)
    assert packed is not None  # noqa: S101  (distances in float64 either fit or raise)
    sides = packed.rows, packed.row_offsets, packed.columns, packed.column_offsets
    function = fill_function(packed.distance, packed.profile, packed.width)

    def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
        function(*sides, strip, packed.factor, packed.degree, rows.start, columns.start)

    return fill


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


def _padded(values: NDArray[Any], group: int, dtype: Any) -> NDArray[Any]:
    padded = np.zeros(-(-len(values) // group) * group, dtype)
    padded[: len(values)] = values
    return padded
