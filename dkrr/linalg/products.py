"""Products with a kernel that is never stored: out += k(A, B) V, and its transpose from the same entries.

Kernels that are a function of one distance or inner product run in compiled code: an entry is made in registers and
used at once in both sums. All others (sums, products, functions, histograms) are evaluated by ``Kernel.block`` in
strips, which two matrix products use while they are in the cache.

Exactness
---------
float64 entries are those of ``Kernel.block`` up to rounding. float32 entries come from rows that are rounded after
centring and scaling; where the terms of a squared distance are large, from differences instead of inner products.
Rows that reach so far that differences of rounded rows say nothing are evaluated in float64 whatever was asked for,
which takes two to three times as long (:mod:`dkrr.kernels.pairwise`).
Within a strip of at most STRIP_COLUMNS columns (RUN_ROWS rows) a float32 sum is kept in float32, one for each place of
a vector; everything beyond is float64. Entries below 2^-1000 (float32: 2^-100) count as 0. Columns of V and U are
scaled to a largest magnitude near 1 in float32 (by powers of two), so that their size does not matter.

In compiled code without ``u``, and with at most MAX_FUSED_COLUMNS columns in V, a row of ``out`` has the same bits
whatever other rows A has; elsewhere it depends on them by rounding, as in matrix products. The choice between compiled
code and blocks depends on the number of rows of B and of features alone, beside the kernel.

Cost
----
m n kernel entries, half as many with ``same``, and 2 m n t flops for each of the two sums. In compiled code 0.5 ns an
entry in float32 and 1.1 ns in float64 (rbf, d = 10, t = 1, both sums, one core with AVX-512).

Pairs of super-blocks of rows: the unit of work of a product with K, each entry evaluated once and used twice.

    out_I += K[I, J] V_J,    out_J += K[I, J]^T V_I        for every pair I >= J

A super-block holds thousands of rows, so that a pair is a tenth of a second of work; inside, a pair is walked over in
blocks of 3,072 to 6,144 rows that nobody ever stores. The partition and the order of the walk depend on the problem
alone, not on who computes it, and so does every sum.

Predictions k(Z, X) dual_coef are products of this kind, in blocks of training rows: memory for a strip, however many
rows train and test have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.rows import RowArray
from dkrr.errors import ResidualError
from dkrr.kernels import RBF, Chi2, Constant, Kernel, Laplacian, Matern, Product, Sum
from dkrr.kernels.base import both_sides
from dkrr.kernels.pairwise import Packed, compiled_form, pack, pack_rows, pack_sums, worth_compiling
from dkrr.linalg.operators import FloatMatrix, row_blocks
from dkrr.store.chunks import buffer
from dkrr.tiles import MAX_TILE_SIZE, TileGrid

STRIP_ROWS = 256

# Of a strip's packed columns, their coefficients and sums: they stay in an L1 of 32 KiB next to a block of rows.
STRIP_BYTES = 24 * 1024

STRIP_COLUMNS = 512

MIN_PANELS = 8

# Columns of V up to which the sums are made with the entries, in registers; beyond, matrix products are faster.
MAX_FUSED_COLUMNS = 32

# Rows whose terms a column adds before they go to its float64 sum.
RUN_ROWS = 64


def is_compiled(kernel: Kernel | None, num_columns: int, num_features: int) -> bool:
    """Whether compiled code evaluates products with so many rows of B; rows that are far apart are, in any case."""
    form = compiled_form(kernel)
    return form is not None and worth_compiling(form, num_columns, num_features)


def kernel_product(
    kernel: Kernel,
    a: FloatMatrix,
    b: FloatMatrix,
    v: FloatMatrix,
    out: FloatMatrix,
    *,
    u: FloatMatrix | None = None,
    out_t: FloatMatrix | None = None,
    same: bool = False,
    precision: Literal["float64", "float32"] = "float64",
) -> None:
    """out += k(A, B) V and, from the same entries, out_t += k(A, B)^T U.

    Parameters
    ----------
    kernel
        Resolved.
    a, b : (m, d), (n, d) float64
        Rows, centred if the kernel is stationary.
    v, out : (n, t), (m, t) float64
    u, out_t : (m, s), (n, s) float64, optional
        The other half of a symmetric pair of tiles.
    same
        A and B are the same rows (a diagonal tile): entries (i, i) are exactly ``kernel.diag``, and only the lower
        triangle is evaluated; no ``u`` then.
    precision
        Of the kernel entries; sums over more than a strip are always float64.

    Raises
    ------
    DataError
        A feature or a value of the kernel is not finite.
    """
    a, b = both_sides(a, b, same=same)
    if not len(a) or not len(b):
        return
    # with one sum only (a prediction) the form must not depend on what other rows A has
    packed = _packed(kernel, a, b, precision, split=same or u is not None)
    if packed is None:
        add_strips(block_strips(kernel, a, b, same=same, precision=precision), v, out, u=u, out_t=out_t)
    elif same:
        out += kernel.diag(a)[:, np.newaxis] * v
        _compiled(packed, v, out, v, out, triangle=True)
    else:
        _compiled(packed, v, out, u, out_t)


def kernel_block(
    kernel: Kernel, a: FloatMatrix, b: FloatMatrix, out: FloatMatrix, *, same: bool = False
) -> FloatMatrix:
    """out (m, n) = k(A, B) in float64, its entries those of :func:`kernel_product`."""
    packed = _packed(kernel, a, b, "float64")
    if packed is None:
        return kernel.block(a, b, out, same=same)
    from dkrr.kernels.compiled import fill_function

    fill_function(packed.kind, packed.width)(*packed.sides, out, packed.factor, 0, 0)
    if same:
        np.einsum("ii->i", out)[...] = kernel.diag(a)
    return out


def _packed(kernel: Kernel, a: FloatMatrix, b: FloatMatrix, precision: str, *, split: bool = False) -> Packed | None:
    """Rows as compiled code takes them; None where blocks are evaluated."""
    form = compiled_form(kernel)
    if form is None or not worth_compiling(form, len(b), b.shape[1]):
        return None
    return pack(form, a, b, np.dtype(precision), split=split)


def _compiled(
    packed: Packed,
    v: FloatMatrix,
    out: FloatMatrix,
    u: FloatMatrix | None,
    out_t: FloatMatrix | None,
    *,
    triangle: bool = False,
) -> None:
    """The products with all entries, or with those strictly below the diagonal."""
    factors, factors_t = packed.row_factors, packed.column_factors
    if factors is not None and factors_t is not None:
        v = factors_t[:, np.newaxis] * v
        u = None if u is None else factors[:, np.newaxis] * u
    dtype, sums_t = packed.sides[2].dtype, None
    right, scale = _scaled(v, dtype)
    left, scale_t = (None, None) if u is None else _scaled(u, dtype)
    if v.shape[1] > MAX_FUSED_COLUMNS:
        sums, sums_t = np.zeros(out.shape), None if out_t is None else np.zeros(out_t.shape)
        add_strips(_compiled_strips(packed, len(out), len(v), triangle), right, sums, u=left, out_t=sums_t)
    else:
        from dkrr.kernels.compiled import product_function

        (blocks, _, rows), (panels, d, panel) = packed.sides[0].shape, packed.sides[2].shape
        t, s = v.shape[1], 0 if left is None else left.shape[1]
        sums, packed_sums = np.zeros((blocks * rows, t)), np.zeros((panels if s else 0, s, panel))
        strip_bytes = (
            (d + 2 * t) * panel * dtype.itemsize
        )  # of t alone: the product with V is the same with and without U
        product_function(packed.kind, packed.width)(
            *packed.sides,
            pack_rows(right, panel, dtype),
            np.empty((blocks, 0, rows), dtype) if left is None else pack_rows(left, rows, dtype),
            sums,
            packed_sums,
            packed.factor,
            int(triangle),
            int(np.clip(STRIP_BYTES // strip_bytes, MIN_PANELS, STRIP_COLUMNS // panel)),
            RUN_ROWS // rows,
        )
        sums, sums_t = sums[: len(out)], None if out_t is None or not s else pack_sums(packed_sums, len(out_t))
    for part, by, of_rows, target in ((sums, scale, factors, out), (sums_t, scale_t, factors_t, out_t)):
        if part is not None and target is not None:
            part = part if by is None else part * by
            target += part if of_rows is None else of_rows[:, np.newaxis] * part


def _scaled(v: FloatMatrix, dtype: np.dtype[Any]) -> tuple[NDArray[Any], FloatMatrix | None]:
    """In float32 columns scaled by powers of two to a largest magnitude near 1, and the scales."""
    if dtype == np.float64:
        return v, None
    largest = np.abs(v).max(axis=0)
    exponent = np.frexp(np.where(np.isfinite(largest), largest, 1.0))[1]
    scale = np.ldexp(1.0, np.clip(exponent, -1000, 1000))
    return (v / scale).astype(dtype), scale


Strips = Iterable[tuple[slice, slice, Any]]
"""Rows, columns and entries of parts of a matrix, each in a buffer that the next one may overwrite."""


def add_strips(
    strips: Strips,
    v: FloatMatrix,
    out: FloatMatrix,
    *,
    u: FloatMatrix | None = None,
    out_t: FloatMatrix | None = None,
    absolute_last: bool = False,
) -> None:
    """out += K V and out_t += K^T U for K given in strips; with |K| for the last column where asked for."""
    parts = (slice(0, -1), slice(-1, None)) if absolute_last else (slice(None),)
    for rows, columns, strip in strips:
        for part in parts:
            if part.start == -1:
                strip = np.abs(strip, out=buffer("strip", strip.shape, strip.dtype))
            out[rows, part] += strip @ v[columns, part].astype(strip.dtype, copy=False)
            if u is not None and out_t is not None:
                out_t[columns, part] += strip.T @ u[rows, part].astype(strip.dtype, copy=False)


def _compiled_strips(packed: Packed, m: int, n: int, triangle: bool) -> Strips:
    """Compiled entries, or those strictly below the diagonal: with many columns, products are most of the work."""
    from dkrr.kernels.compiled import fill_function

    function = fill_function(packed.kind, packed.width)
    for rows in row_blocks(m, STRIP_ROWS):
        for columns in row_blocks(min(n, rows.stop) if triangle else n, STRIP_COLUMNS):
            shape = rows.stop - rows.start, columns.stop - columns.start
            strip: Any = buffer("strip", shape, packed.sides[2].dtype)
            function(*packed.sides, strip, packed.factor, rows.start, columns.start)
            if triangle and columns.stop > rows.start:
                strip[np.arange(rows.start, rows.stop)[:, np.newaxis] <= np.arange(columns.start, columns.stop)] = 0.0
            yield rows, columns, strip


def block_strips(
    kernel: Kernel,
    a: FloatMatrix,
    b: FloatMatrix,
    *,
    same: bool = False,
    precision: str = "float64",
    num_rows: int = STRIP_ROWS,
) -> Strips:
    """Strips of k(A, B) from ``Kernel.block``.

    In float32 entries are evaluated in float64 and rounded once. With ``same`` entries (i, i) are exactly
    ``kernel.diag``.
    """
    for rows in row_blocks(len(a), num_rows):
        strip: Any = buffer("strip", (rows.stop - rows.start, len(b)), np.dtype(precision))
        kernel.block(a[rows], b, strip)
        if same:
            index = np.arange(rows.start, rows.stop)
            strip[index - rows.start, index] = kernel.diag(a[rows])
        yield rows, slice(0, len(b)), strip


# Compiled products take blocks of 1,024 columns and more; even cuts of at most 6,144 rows leave no shorter rest. What a
# block costs besides its entries is a seventh of 2,500 x 2,500 of them in float32, a thirtieth of 6,144 x 6,144.
BLOCK_ROWS = 6144

# A pair takes at least the second; there are 36 pairs as soon as each takes the first. An even number of super-blocks
# divides evenly among two and more workers: diagonal pairs are half as long.
SHORT_PAIR_NANOSECONDS = 6e7

LONG_PAIR_NANOSECONDS = 1.5e8

MIN_SIDE, MAX_SIDE = 8, 64

Precision = Literal["float64", "float32"]


def entry_nanoseconds(kernel: Kernel | None, num_features: int) -> float:
    """About what one entry costs on one core, for the size of tasks only: 1 + d / 30 where a matrix product does it.

    A stored entry (kernel None) counts as 1, a foreign function as 1,000.
    """
    if kernel is None:
        return 1.0
    if isinstance(kernel, Sum | Product):
        return sum(entry_nanoseconds(part, num_features) for part in kernel.parts)
    if kernel.name in ("function", "sklearn"):
        return 1000.0
    per_feature = 0.5 if kernel.name in ("laplacian", "chi2") else 1 / 30
    return 1.0 + per_feature * num_features


def is_nonnegative(kernel: Kernel | None) -> bool:
    """Whether no entry is negative, as far as is known: then the sums of |K| over rows are products with K."""
    if isinstance(kernel, Sum | Product):
        return all(is_nonnegative(part) for part in kernel.parts)
    return isinstance(kernel, RBF | Laplacian | Matern | Chi2 | Constant)


def super_blocks(n: int, entry_ns: float, tile_size: int | None = None) -> TileGrid:
    """Partition of n rows into S super-blocks of equal size (the last one is smaller).

    S is 2, 4, 6 or 8 while pairs last 15 ms and more, and up to 64 while they last 150 ms; super-blocks have at most
    16,384 rows.

    Parameters
    ----------
    entry_ns
        From :func:`entry_nanoseconds`.
    tile_size
        Super-blocks are whole numbers of tiles of this edge.
    """
    short = n * math.sqrt(entry_ns / SHORT_PAIR_NANOSECONDS)
    few = min(MIN_SIDE, 2 * math.ceil(short / 2)) if short > 1 else 1
    many = min(MAX_SIDE, round(n * math.sqrt(entry_ns / LONG_PAIR_NANOSECONDS)))
    side = min(n, max(1, few, many, -(-n // MAX_TILE_SIZE)))
    if tile_size is None:
        return TileGrid(n, min(-(-n // side), MAX_TILE_SIZE))
    num_tiles = -(-n // tile_size)
    return TileGrid(n, tile_size * max(1, min(-(-num_tiles // side), MAX_TILE_SIZE // tile_size)))


def spans(rows: slice, most: int) -> Iterator[slice]:
    """Parts of nearly equal length, at most ``most``."""
    count = rows.stop - rows.start
    parts = -(-count // most)
    for part in range(parts):
        yield slice(rows.start + count * part // parts, rows.start + count * (part + 1) // parts)


TRAIN_ROWS = 2048
CHECKED_ROWS = 16
# Of an entry; distances are exact to a tenth of it.
CHECK_TOLERANCE = 1e-11


@dataclass(frozen=True)
class ArrayRows:
    """Rows in memory."""

    array: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        return len(self.array)

    @property
    def num_columns(self) -> int:
        return int(self.array.shape[1])

    def read(self, start: int, stop: int) -> NDArray[np.float64]:
        """A view of rows ``start:stop``."""
        return self.array[start:stop]


RowSource = RowArray | ArrayRows
"""Rows that can be read a slice at a time, on disk or in memory."""


def predict_block(
    kernel: Kernel, z: NDArray[np.float64], x: RowSource, dual_coef: RowSource, center: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """k(z, X) @ dual_coef (m, t) for rows z (m, d) that fit into memory.

    The order of the sum is that of the training rows in equal blocks of at most 2,048, whatever the number of rows in
    ``z``. Where :func:`~dkrr.linalg.products.kernel_product` is compiled (known kernels, at most 64 features and 32
    targets, at least 1,024 training rows) a row's prediction has the same bits however ``z`` is cut into calls;
    elsewhere it depends on the cut by rounding, because matrix products do.
    """
    result = np.zeros((len(z), dual_coef.num_columns))
    if center is not None:
        z = z - center
    for rows, coefficients in _training_blocks(x, dual_coef, center):
        kernel_product(kernel, z, rows, coefficients, result)
    return result


def _training_blocks(
    x: RowSource, dual_coef: RowSource, center: NDArray[np.float64] | None
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Centred rows and coefficients, in equal blocks of at most 2,048."""
    num_blocks = max(1, -(-x.num_rows // TRAIN_ROWS))
    for i in range(num_blocks):
        start, stop = i * x.num_rows // num_blocks, (i + 1) * x.num_rows // num_blocks
        rows = x.read(start, stop)
        yield rows if center is None else rows - center, dual_coef.read(start, stop)


def check_training_rows(
    kernel: Kernel,
    x: RowSource,
    dual_coef: RowSource,
    center: NDArray[np.float64] | None,
    *,
    y: RowSource,
    weight: RowSource | None,
    alpha: NDArray[np.float64],
    intercept: NDArray[np.float64] | None,
    residual_norm: NDArray[np.float64],
) -> None:
    """Predict 16 training rows as any rows are predicted, and compare with what the system says of them.

        f(x_p) = y_p - alpha dual_coef_p / w_p - r_p / sqrt(w_p),   |r_p| <= |R|

    The residual R alone proves nothing of predictions: it knows the diagonal of K, and meets other rows in each block.

    Parameters
    ----------
    y, dual_coef : (n, t)
    weight : (n, 1) or None
    alpha, residual_norm : (t,)
        The ridge of each target, and the 2-norm of its R = S Y - S b - A u.
    intercept : (t,) or None

    Raises
    ------
    ResidualError
        A prediction differs by more than |R| and 1e-11 of the terms that it is the sum of.

    Cost
    ----
    16 n kernel entries, 32 n of a kernel that is not positive semi-definite, and one pass over the rows.
    """
    wanted = np.unique(np.linspace(0, x.num_rows - 1, CHECKED_ROWS).astype(int)).tolist()

    def read(source: RowSource) -> NDArray[np.float64]:
        return np.concatenate([source.read(p, p + 1) for p in wanted])

    if weight is not None:
        wanted = [p for p in wanted if weight.read(p, p + 1)[0, 0] > 0]
        if not wanted:
            return
    z, c, target = read(x), read(dual_coef), read(y)
    w = np.ones((len(z), 1)) if weight is None else read(weight)
    if center is not None:
        z = z - center
    found, terms = np.zeros(c.shape), np.abs(target) + alpha * np.abs(c) / w
    scale = np.sqrt(np.abs(kernel.diag(z)))[:, None]
    for rows, coefficients in _training_blocks(x, dual_coef, center):
        kernel_product(kernel, z, rows, coefficients, found)
        # inner products may be much smaller than what they are sums of; by Cauchy and Schwarz they are not larger
        entries = scale * np.sqrt(np.abs(kernel.diag(rows)))
        if not kernel.positive_semidefinite:
            entries = np.maximum(np.abs(kernel.block(z, rows)), entries)
        terms += entries @ np.abs(coefficients)
    if intercept is not None:
        found += intercept
    expected = target - alpha * c / w
    off, allowed = np.abs(found - expected), residual_norm / np.sqrt(w) + CHECK_TOLERANCE * terms
    if not (off <= allowed).all():
        worst, column = np.unravel_index(np.argmax(np.where(off <= allowed, -1.0, off)), off.shape)
        raise ResidualError(
            f"training row {wanted[worst]:,} is predicted as {found[worst, column]:.6g} for target {column}, while the "
            f"system that was solved gives {expected[worst, column]:.6g} (off by {off[worst, column]:.1g}, "
            f"{allowed[worst, column]:.1g} allowed)",
            hint="the kernel has another value for the same two rows when they are predicted: a function must depend "
            "on its two rows alone; else scale the features",
        )
