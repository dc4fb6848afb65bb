"""RidgeOperator: A = S K S + alpha I on tiles, over a kernel and rows, a stored Gram matrix, or a given matrix.

The operator is a small description that travels with every task; each process opens the rows once. Kernel entries are
evaluated in float64 and cast. S = diag(sqrt(weights)) is applied on the fly, so a stored Gram matrix serves every
weighting and every alpha.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import FloatArray
from dkrr.dataset import Dataset, open_dataset
from dkrr.errors import DataError, StoreError
from dkrr.kernels import Kernel
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.blas import buffer

__all__ = ["RidgeOperator", "Rows", "open_rows"]

STRIP_ROWS = 256

FloatMatrix = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """A reference to the training rows: where the data set is, its digest, and the centre of its features.

    Parameters
    ----------
    store
        Location of the data set.
    digest
        Digest of its X; another digest found there is an error.
    center
        Subtracted from every row before the kernel sees it, or None.
    """

    store: Any
    digest: str
    center: tuple[float, ...] | None = None

    def read(self, start: int, stop: int) -> FloatMatrix:
        """Rows ``start:stop`` (stop - start, d), centred."""
        block = open_rows(self.store, self.digest).X.read(start, stop)
        if self.center is not None:
            block -= np.asarray(self.center)
        return block

    def root_weight(self, start: int, stop: int) -> FloatMatrix | None:
        """Square roots of the weights (stop - start,), None without weights."""
        weight = open_rows(self.store, self.digest).weight
        return None if weight is None else np.sqrt(weight.read(start, stop)[:, 0])


def open_rows(store: Any, digest: str) -> Dataset:
    """Open a data set and check that it is the one that was meant; kept open per process."""
    if isinstance(store, str):
        return _open_rows(store, digest)
    return _checked(open_dataset(store), digest)


@lru_cache(maxsize=8)
def _open_rows(store: str, digest: str) -> Dataset:
    return _checked(open_dataset(store), digest)


def _checked(dataset: Dataset, digest: str) -> Dataset:
    if dataset.digest != digest:
        raise StoreError(
            f"{dataset.path} holds other rows than this job was prepared with (digest {dataset.digest[:12]}, "
            f"{digest[:12]} expected)",
            hint="do not change a data set while a job uses it; start the job again",
        )
    return dataset


@dataclass(frozen=True, kw_only=True)
class RidgeOperator:
    """A = S K S + alpha I, symmetric positive definite for a positive semi-definite kernel and alpha > 0.

    Parameters
    ----------
    grid
        Partition of the n rows.
    alpha
        The ridge, raw.
    kernel
        The kernel; None when ``gram`` is a given (precomputed) matrix.
    rows
        The training rows (None only for a precomputed matrix without weights).
    weighted
        Whether the weights of the rows enter as S.
    gram
        A stored Gram matrix, read instead of evaluating the kernel.
    """

    grid: TileGrid
    alpha: float
    kernel: Kernel | None
    rows: Rows | None
    weighted: bool = False
    gram: TileMatrix | None = None

    def with_alpha(self, alpha: float) -> RidgeOperator:
        """The same matrix with another ridge."""
        return replace(self, alpha=alpha)

    def gram_tile(self, i: int, j: int, out: FloatArray | None = None) -> FloatArray:
        """Tile (i, j) of K, i >= j, (rows of i, rows of j), evaluated from the kernel, in ``out`` if given."""
        if self.kernel is None or self.rows is None:
            raise StoreError("a precomputed matrix has no kernel to evaluate", hint="give the matrix again")
        a_span, b_span = self.grid.span(i), self.grid.span(j)
        a = self.rows.read(a_span.start, a_span.stop)
        if out is None:
            out = np.empty(self.grid.shape(i, j))
        b = a if i == j else self.rows.read(b_span.start, b_span.stop)
        try:
            self.kernel.block(a, b, out, same=i == j)
        except DataError as exc:
            raise DataError(f"tile ({i}, {j}): {exc.message}", hint=exc.hint, **exc.details) from exc
        return out

    def tile(self, i: int, j: int, out: FloatArray) -> FloatArray:
        """Tile (i, j) of A, i >= j, written to ``out`` (rows of i, rows of j)."""
        if self.gram is None:
            self.gram_tile(i, j, out)
        else:
            out[...] = self.gram.read(i, j)
        if self.weighted:
            self._scale(i, j, out)
        if i == j:
            diagonal = np.arange(len(out))
            out[diagonal, diagonal] += self.alpha
        return out

    def _scale(self, i: int, j: int, out: FloatArray) -> None:
        left, right = self.root_weight(i), self.root_weight(j)
        if left is not None and right is not None:
            out *= left[:, None]
            out *= right[None, :]

    def root_weight(self, i: int) -> FloatMatrix | None:
        """Square roots of the weights of row block i, None when the operator is not weighted."""
        if not self.weighted or self.rows is None:
            return None
        span = self.grid.span(i)
        return self.rows.root_weight(span.start, span.stop)

    def matmul_rows(self, i: int, read: Callable[[int, int], FloatMatrix], num_columns: int) -> tuple[Any, Any]:
        """Row block i of A V, and the sums of |a_pq| over its rows; V (n, t) comes from ``read(start, stop)``.

        Matrix-free (or from the given matrix), in strips that stay in the cache; no stored Gram tile of a kernel is
        ever used, so that the product is independent of what the factorisation read.

        Cost
        ----
        n b kernel entries and 2 n b t flops; memory for one strip.
        """
        span = self.grid.span(i)
        product = np.zeros((self.grid.rows(i), num_columns))
        row_sums = np.zeros(self.grid.rows(i))
        left = self.root_weight(i)
        a = None if self.kernel is None or self.rows is None else self.rows.read(span.start, span.stop)
        for j in range(self.grid.num_tiles):
            columns = self.grid.span(j)
            v = read(columns.start, columns.stop)
            right = self.root_weight(j)
            b = None if a is None or self.rows is None else self.rows.read(columns.start, columns.stop)
            for start in range(0, len(product), STRIP_ROWS):
                rows = slice(start, min(start + STRIP_ROWS, len(product)))
                if a is not None and b is not None:
                    strip = self._strip(a, b, rows, i == j)
                else:
                    strip = self._given_strip(i, j, rows)
                if left is not None and right is not None:
                    strip *= left[rows, None]
                    strip *= right[None, :]
                if i == j:
                    index = np.arange(rows.start, rows.stop)
                    strip[index - rows.start, index] += self.alpha
                product[rows] += strip @ v
                row_sums[rows] += np.abs(strip, out=strip).sum(axis=1)
        return product, row_sums

    def _strip(self, a: FloatMatrix, b: FloatMatrix, rows: slice, diagonal: bool) -> FloatMatrix:
        assert self.kernel is not None  # noqa: S101  (narrows the type)
        strip: FloatMatrix = self.kernel.block(a[rows], b, buffer("strip", (rows.stop - rows.start, len(b)), float))
        if diagonal:
            index = np.arange(rows.start, rows.stop)
            strip[index - rows.start, index] = self.kernel.diag(a[rows])
        return strip

    def _given_strip(self, i: int, j: int, rows: slice) -> FloatMatrix:
        if self.gram is None:
            raise StoreError("the operator has neither a kernel nor a matrix")
        strip: FloatMatrix = buffer("strip", (rows.stop - rows.start, self.grid.rows(j)), np.float64)
        strip[...] = self.gram.read(i, j)[rows] if i >= j else self.gram.read(j, i)[:, rows].T
        return strip
