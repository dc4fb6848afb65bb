"""Pairs of super-blocks of rows: the unit of work of a product with K, each entry evaluated once and used twice.

    out_I += K[I, J] V_J,    out_J += K[I, J]^T V_I        for every pair I >= J

A super-block holds thousands of rows, so that a pair is a tenth of a second of work; inside, a pair is walked over in
blocks of 3,072 to 6,144 rows that nobody ever stores. The partition and the order of the walk depend on the problem
alone, not on who computes it, and so does every sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, ParameterError
from dkrr.kernels import RBF, Chi2, Constant, Kernel, Laplacian, Matern, Product, Sum
from dkrr.linalg.products import block_strips, kernel_product
from dkrr.linalg.repairs import check_finite
from dkrr.tiles import MAX_TILE_SIZE, TileGrid, TileMatrix
from dkrr.tiles.blas import buffer

__all__ = ["Entries", "KernelEntries", "Pair", "StoredEntries", "entry_nanoseconds", "is_nonnegative", "super_blocks"]

# Compiled products take blocks of 1,024 columns and more; even cuts of at most 6,144 rows leave no shorter rest. What a
# block costs besides its entries is a seventh of 2,500 x 2,500 of them in float32, a thirtieth of 6,144 x 6,144.
BLOCK_ROWS = 6144
STRIP_ROWS = 256
# Rows that a task holds of each side; more are read again for every such band of the other side.
BAND_BYTES = 16 << 20
# A pair takes at least the second; there are 36 pairs as soon as each takes the first. An even number of super-blocks
# divides evenly among two and more workers: diagonal pairs are half as long.
SHORT_PAIR_NANOSECONDS = 6e7
LONG_PAIR_NANOSECONDS = 1.5e8
MIN_SIDE, MAX_SIDE = 8, 64

FloatMatrix = NDArray[np.float64]
Precision = Literal["float64", "float32"]


class RowsReader(Protocol):
    """Rows of X as the kernel shall see them."""

    def read(self, start: int, stop: int) -> FloatMatrix: ...


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


def super_blocks(n: int, entry_ns: float, tile_size: int | None = None, num_blocks: int | None = None) -> TileGrid:
    """Partition of n rows into S super-blocks of equal size (the last one is smaller).

    Parameters
    ----------
    entry_ns
        From :func:`entry_nanoseconds`.
    tile_size
        Super-blocks are whole numbers of tiles of this edge.
    num_blocks
        S; None takes 2, 4, 6 or 8 while pairs last 15 ms and more, and up to 64 while they last 150 ms. Super-blocks
        have at most 16,384 rows whatever S is.

    Raises
    ------
    ParameterError
        ``num_blocks`` is less than 1.
    """
    if num_blocks is not None and num_blocks < 1:
        raise ParameterError(f"num_blocks = {num_blocks}", hint="give a positive integer, or None")
    short = n * math.sqrt(entry_ns / SHORT_PAIR_NANOSECONDS)
    few = min(MIN_SIDE, 2 * math.ceil(short / 2)) if short > 1 else 1
    many = min(MAX_SIDE, round(n * math.sqrt(entry_ns / LONG_PAIR_NANOSECONDS)))
    side = min(n, max(1, few, many, -(-n // MAX_TILE_SIZE)) if num_blocks is None else num_blocks)
    if tile_size is None:
        return TileGrid(n, min(-(-n // side), MAX_TILE_SIZE))
    num_tiles = -(-n // tile_size)
    return TileGrid(n, tile_size * max(1, min(-(-num_tiles // side), MAX_TILE_SIZE // tile_size)))


@dataclass(frozen=True)
class Pair:
    """The rows of K that a call is about, what they are multiplied with, and where the two results go.

    Parameters
    ----------
    rows, columns
        I and J; equal for a diagonal pair, which uses ``v_columns`` and ``out_rows`` only.
    v_rows, v_columns : (rows of I, c), (rows of J, c) float64, C-contiguous
    out_rows, out_columns : (rows of I, c), (rows of J, c) float64, C-contiguous
        Added to.
    precision
        Of the kernel's entries.
    absolute_last
        The last column is a product with |K|, entry by entry, instead of K.
    """

    rows: slice
    columns: slice
    v_rows: FloatMatrix
    v_columns: FloatMatrix
    out_rows: FloatMatrix
    out_columns: FloatMatrix
    precision: Precision = "float64"
    absolute_last: bool = False

    @property
    def is_diagonal(self) -> bool:
        return self.rows == self.columns


class Entries(Protocol):
    """Where the entries of K come from."""

    def multiply(self, pair: Pair) -> None:
        """Add both results of a pair."""
        ...

    def explain(self, pair: Pair) -> None:
        """Raise the error for a result that is not finite although V is."""
        ...


@dataclass(frozen=True)
class KernelEntries:
    """Entries evaluated on the spot from a kernel and its rows.

    Cost
    ----
    |I| |J| entries and 4 |I| |J| c flops. Memory: two bands of rows (16 MiB each, or 6,144 rows), and what
    :func:`~dkrr.linalg.products.kernel_product` needs for 6,144 x 6,144 entries.
    """

    kernel: Kernel
    rows: RowsReader
    num_features: int

    def multiply(self, pair: Pair) -> None:
        """Add both results of a pair."""
        a: Any
        band = BLOCK_ROWS * max(1, BAND_BYTES // (8 * self.num_features * BLOCK_ROWS))
        for a_span in _spans(pair.rows, band):
            a = self.rows.read(a_span.start, a_span.stop)
            for b_span in _spans(pair.columns, band):
                if pair.is_diagonal and b_span.start > a_span.start:
                    break
                b = a if b_span == a_span else self.rows.read(b_span.start, b_span.stop)
                for p in _spans(a_span, BLOCK_ROWS):
                    for q in _spans(b_span, BLOCK_ROWS):
                        if pair.is_diagonal and q.start > p.start:
                            break
                        self._block(pair, p, q, a[_within(p, a_span)], b[_within(q, b_span)])

    def _block(self, pair: Pair, p: slice, q: slice, a: FloatMatrix, b: FloatMatrix) -> None:
        rows, columns = _within(p, pair.rows), _within(q, pair.columns)
        v, out = pair.v_columns[columns], pair.out_rows[rows]
        if p == q:
            u = out_t = None
        elif pair.is_diagonal:
            u, out_t = pair.v_columns[rows], pair.out_rows[columns]
        else:
            u, out_t = pair.v_rows[rows], pair.out_columns[columns]
        try:
            if pair.absolute_last:
                for strip_rows, strip in block_strips(self.kernel, a, b, same=p == q):
                    _use_twice(strip, strip_rows, v, out, u, out_t)
            else:
                kernel_product(
                    self.kernel, a, b, v, out, u=u, out_t=out_t, same=p == q, precision=pair.precision
                )  # fmt: skip
        except DataError as exc:
            where = f"rows {p.start:,} to {p.stop:,} with rows {q.start:,} to {q.stop:,}"
            raise DataError(f"{where}: {exc.message}", hint=exc.hint, **exc.details) from exc

    def explain(self, pair: Pair) -> None:
        raise DataError(
            f"the product of rows {pair.rows.start:,} to {pair.rows.stop:,} with rows {pair.columns.start:,} to "
            f"{pair.columns.stop:,} is not finite, {self.kernel.describe()}",
            hint="scale the features",
        )


@dataclass(frozen=True)
class StoredEntries:
    """Entries read from tiles; super-blocks are whole numbers of tiles.

    Cost
    ----
    |I| |J| stored entries and 4 |I| |J| c flops; one tile is mapped at a time.
    """

    gram: TileMatrix

    def multiply(self, pair: Pair) -> None:
        """Add both results of a pair; a damaged or missing tile raises ``DamagedChunkError``."""
        for i, j in self._tiles(pair):
            p, q = self.gram.grid.span(i), self.gram.grid.span(j)
            rows, columns = _within(p, pair.rows), _within(q, pair.columns)
            v, out = pair.v_columns[columns], pair.out_rows[rows]
            u: FloatMatrix | None = None
            out_t: FloatMatrix | None = None
            if i != j:
                u = pair.v_columns[rows] if pair.is_diagonal else pair.v_rows[rows]
                out_t = pair.out_rows[columns] if pair.is_diagonal else pair.out_columns[columns]
            tile = self.gram.read(i, j)
            for start in range(0, len(tile), STRIP_ROWS):
                part = slice(start, min(start + STRIP_ROWS, len(tile)))
                if pair.absolute_last:
                    strip: Any = buffer("strip", tile[part].shape, np.float64)
                    strip[...] = tile[part]
                    _use_twice(strip, part, v, out, u, out_t)
                else:
                    _use(tile[part], part, v, out, u, out_t)
            del tile

    def _tiles(self, pair: Pair) -> Iterator[tuple[int, int]]:
        b = self.gram.grid.tile_size
        for i in range(pair.rows.start // b, -(-pair.rows.stop // b)):
            for j in range(pair.columns.start // b, -(-pair.columns.stop // b)):
                if j <= i:
                    yield i, j

    def explain(self, pair: Pair) -> None:
        check_finite(self.gram, self._tiles(pair))
        raise DataError(
            f"the product of rows {pair.rows.start:,} to {pair.rows.stop:,} with rows {pair.columns.start:,} to "
            f"{pair.columns.stop:,} of {self.gram.location} is not finite",
            hint="scale the matrix, or the targets",
        )


def _use(
    strip: Any, rows: slice, v: FloatMatrix, out: FloatMatrix, u: FloatMatrix | None, out_t: FloatMatrix | None
) -> None:
    out[rows] += strip @ v
    if u is not None and out_t is not None:
        out_t += strip.T @ u[rows]


def _use_twice(
    strip: Any, rows: slice, v: FloatMatrix, out: FloatMatrix, u: FloatMatrix | None, out_t: FloatMatrix | None
) -> None:
    """All columns but the last with the strip, the last one with |strip|; the strip is overwritten."""
    for columns in (slice(None, -1), slice(-1, None)):
        part, part_t = (None if array is None else array[:, columns] for array in (u, out_t))
        _use(strip, rows, v[:, columns], out[:, columns], part, part_t)
        np.abs(strip, out=strip)


def _spans(rows: slice, most: int) -> Iterator[slice]:
    """Parts of nearly equal length, at most ``most``."""
    count = rows.stop - rows.start
    parts = -(-count // most)
    for part in range(parts):
        yield slice(rows.start + count * part // parts, rows.start + count * (part + 1) // parts)


def _within(rows: slice, whole: slice) -> slice:
    return slice(rows.start - whole.start, rows.stop - whole.start)
