"""RidgeOperator: A = S K S + alpha I on tiles, over a kernel and rows, a stored Gram matrix, or a given matrix.

The operator is a small description that travels with every task; each process opens the rows once. Kernel entries are
evaluated in float64 and cast. S = diag(sqrt(weights)) is applied on the fly, so a stored Gram matrix serves every
weighting and every alpha.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, open_dataset
from dkrr.dataset.prefix import before_appends
from dkrr.errors import DataError, StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.pairs import Entries, KernelEntries, Pair, StoredEntries, entry_nanoseconds, super_blocks
from dkrr.store.chunks import FloatArray
from dkrr.tiles import TileGrid, TileMatrix

__all__ = ["RidgeOperator", "Rows", "open_rows"]

FloatMatrix = NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """A reference to the training rows: where the data set is, its digest, and the centre of its features.

    Parameters
    ----------
    store
        Location of the data set.
    digest
        Digest of its X; another digest found there is an error, unless rows were appended since.
    center
        Subtracted from every row before the kernel sees it, or None.
    version
        Of the data set; what a process knows of an older one with the same rows is not believed.
    facts
        What else a data set with the same X may differ in, see :meth:`of`.
    """

    store: Any
    digest: str
    center: tuple[float, ...] | None = None
    version: int = 1
    facts: tuple[tuple[str, str, int], ...] = ()

    @classmethod
    def of(cls, dataset: Dataset, center: tuple[float, ...] | None = None) -> Rows:
        """The rows of a data set: digest and rows per chunk of every part are part of the reference.

        The same X may be there again with other weights, in other chunks.
        """
        parts = dataset.parts().items()
        facts = tuple((name, str(dataset.records[name]["digest"]), array.rows_per_chunk) for name, array in parts)
        return cls(dataset.path, dataset.digest, center, dataset.version, facts)

    def open(self) -> Dataset:
        """The data set; kept open per process."""
        return open_rows(self.store, self.digest, self.version, self.facts)

    def read(self, start: int, stop: int) -> FloatMatrix:
        """Rows ``start:stop`` (stop - start, d), centred."""
        block = self.open().X.read(start, stop)
        if self.center is not None:
            block -= np.asarray(self.center)
        return block

    def take(self, index: NDArray[np.int64], n: int) -> FloatMatrix:
        """Rows by number (k, d), centred, of the first n; every chunk of X that is met is read once."""
        dataset = self.open()
        step = dataset.X.rows_per_chunk
        result = np.empty((len(index), dataset.num_features))
        for number in np.unique(index // step):
            start = int(number) * step
            inside = index // step == number
            result[inside] = self.read(start, min(start + step, n))[index[inside] - start]
        return result

    def root_weight(self, start: int, stop: int) -> FloatMatrix | None:
        """Square roots of the weights (stop - start,), None without weights."""
        weight = self.open().weight
        return None if weight is None else np.sqrt(weight.read(start, stop)[:, 0])


def open_rows(store: Any, digest: str, version: int = 1, facts: tuple[tuple[str, str, int], ...] = ()) -> Dataset:
    """Open a data set and check that it is the one that was meant; kept open per process.

    Where rows have been appended since, or a new version has replaced it, it is the data set of before.

    Raises
    ------
    StoreError
        Its rows are others.
    """
    if isinstance(store, str):
        return _open_rows(store, digest, version, facts)
    return _open_checked(store, digest, version, facts)


@lru_cache(maxsize=8)
def _open_rows(store: str, digest: str, version: int, facts: tuple[tuple[str, str, int], ...]) -> Dataset:
    return _open_checked(store, digest, version, facts)


def _open_checked(store: Any, digest: str, version: int, facts: tuple[tuple[str, str, int], ...]) -> Dataset:
    dataset = open_dataset(store)
    if dataset.digest == digest:
        return dataset
    before = dataset
    if version < dataset.version:
        with contextlib.suppress(StoreError):  # it is gone
            before = open_dataset(store, version=version)
    wanted = {name: part for name, part, _ in facts} | {"X": digest}
    found = before_appends(before, wanted)
    if found is None:
        raise StoreError(
            f"{dataset.path} holds other rows than this job was prepared with (digest {dataset.digest[:12]}, "
            f"{digest[:12]} expected)",
            hint="do not change a data set while a job uses it, other than by appending; start the job again",
        )
    return found


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
        with np.errstate(over="ignore"):  # what float32 cannot hold is named before a tile is written
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

    def gram_rows(self, i: int, j: int, start: int, stop: int, out: FloatArray) -> FloatArray:
        """Rows ``start`` to ``stop`` of tile (i, j) of K, in ``out``; of a diagonal tile its first ``stop`` columns."""
        if self.kernel is None or self.rows is None:
            raise StoreError("a precomputed matrix has no kernel to evaluate", hint="give the matrix again")
        first, other = self.grid.span(i).start, self.grid.span(j)
        a = self.rows.read(first + start, first + stop)
        try:
            if i != j:
                self.kernel.block(a, self.rows.read(other.start, other.stop), out)
            else:
                if start:
                    self.kernel.block(a, self.rows.read(first, first + start), out[:, :start])
                self.kernel.block(a, a, out[:, start:stop], same=True)
        except DataError as exc:
            raise DataError(f"tile ({i}, {j}): {exc.message}", hint=exc.hint, **exc.details) from exc
        return out

    def tile_rows(self, i: int, j: int, start: int, stop: int, out: FloatArray) -> FloatArray:
        """Rows ``start`` to ``stop`` of tile (i, j) of A, in ``out``; of a diagonal tile its first ``stop`` columns."""
        if self.gram is None:
            self.gram_rows(i, j, start, stop, out)
        else:
            out[...] = self.gram.read(i, j)[start:stop, : out.shape[1]]
        if self.weighted:
            self._scale(i, j, out, start)
        if i == j:
            places = np.arange(stop - start)
            out[places, start + places] += self.alpha
        return out

    def _scale(self, i: int, j: int, out: FloatArray, start: int = 0) -> None:
        left, right = self.root_weight(i), self.root_weight(j)
        if left is not None and right is not None:
            out *= left[start : start + len(out), None]
            out *= right[None, : out.shape[1]]

    def diagonal(self, i: int) -> FloatArray:
        """Entries a_pp - alpha of row block i, the diagonal of S K S."""
        span = self.grid.span(i)
        if self.kernel is not None and self.rows is not None:
            values = self.kernel.diag(self.rows.read(span.start, span.stop))
        elif self.gram is not None:
            values = np.diagonal(self.gram.read(i, i)).astype(np.float64)
        else:
            raise StoreError("a precomputed matrix has no kernel to evaluate", hint="give the matrix again")
        root = self.root_weight(i)
        return values if root is None else root * root * values

    def root_weight(self, i: int) -> FloatMatrix | None:
        """Square roots of the weights of row block i, None when the operator is not weighted."""
        if not self.weighted or self.rows is None:
            return None
        span = self.grid.span(i)
        return self.rows.root_weight(span.start, span.stop)

    @property
    def num_features(self) -> int:
        """d of the rows; 1 for a precomputed matrix."""
        return 1 if self.rows is None else self.rows.open().num_features

    def root_weights(self) -> FloatMatrix | None:
        """The diagonal of S (n,), None when the operator is not weighted."""
        return self.rows.root_weight(0, self.grid.n) if self.weighted and self.rows is not None else None

    def entries(self, *, use_gram: bool = False) -> Entries:
        """Where a product takes the entries of K from: the kernel and the rows, or the matrix that was given.

        Parameters
        ----------
        use_gram
            Take stored tiles of a kernel where there are some. They may hold anything that passes a checksum, so the
            residual does without.
        """
        if self.gram is not None and (use_gram or self.kernel is None):
            return StoredEntries(self.gram)
        if self.kernel is None or self.rows is None:
            raise StoreError("the operator has neither a kernel nor a matrix", hint="give the matrix again")
        return KernelEntries(self.kernel, self.rows, self.num_features)

    def super_blocks(self, *, use_gram: bool = False, num_blocks: int | None = None) -> TileGrid:
        """The partition of the rows for products; see :func:`~dkrr.linalg.pairs.super_blocks`."""
        stored = self.gram is not None and (use_gram or self.kernel is None)
        kernel, tile_size = (None, self.grid.tile_size) if stored else (self.kernel, None)
        return super_blocks(self.grid.n, entry_nanoseconds(kernel, self.num_features), tile_size, num_blocks)

    def matmul(self, v: FloatMatrix) -> FloatMatrix:
        """A V (n, t) in this process, matrix-free (or from the given matrix), each entry evaluated once.

        Cost
        ----
        n^2 / 2 kernel entries and 2 n^2 t flops; memory for two blocks of rows and one strip, and 3 n t numbers.
        """
        root, entries, blocks = self.root_weights(), self.entries(), self.super_blocks()
        scaled = np.ascontiguousarray(v if root is None else root[:, None] * v, dtype=np.float64)
        result = np.zeros(scaled.shape)
        for i, j in blocks.lower():
            rows, columns = blocks.span(i), blocks.span(j)
            entries.multiply(Pair(rows, columns, scaled[rows], scaled[columns], result[rows], result[columns]))
        if root is not None:
            result *= root[:, None]
        return result + self.alpha * v
