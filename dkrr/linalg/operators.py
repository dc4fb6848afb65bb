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
from dkrr.dataset.dataset import before_appends
from dkrr.errors import DataError, StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import FloatMatrix
from dkrr.store.chunks import FloatArray
from dkrr.tiles import TileGrid, TileMatrix


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


@lru_cache(maxsize=8)
def open_rows(store: str, digest: str, version: int, facts: tuple[tuple[str, str, int], ...]) -> Dataset:
    """Open a data set and check that it is the one that was meant; kept open per process.

    Where rows have been appended since, or a new version has replaced it, it is the data set of before.

    Raises
    ------
    StoreError
        Its rows are others.
    """
    dataset = open_dataset(store)
    if dataset.digest == digest:
        return dataset
    before = dataset
    if version < dataset.version:
        with contextlib.suppress(StoreError):  # it is gone
            before = open_dataset(store, version=version)
    found = before_appends(before, {name: part for name, part, _ in facts} | {"X": digest})
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

    def known(self) -> tuple[Kernel, Rows]:
        """The kernel and the rows.

        Raises
        ------
        StoreError
            The matrix was given: there are none.
        """
        if self.kernel is None or self.rows is None:
            raise StoreError("a precomputed matrix has no kernel to evaluate", hint="give the matrix again")
        return self.kernel, self.rows

    def gram_tile(
        self, i: int, j: int, out: FloatArray | None = None, *, start: int = 0, stop: int | None = None
    ) -> FloatArray:
        """Tile (i, j) of K, i >= j, (rows of i, rows of j), evaluated from the kernel, in ``out`` if given.

        With ``start`` and ``stop`` it is those rows of the tile; of a diagonal tile their first ``stop`` columns.
        """
        kernel, rows = self.known()
        first, other = self.grid.span(i).start, self.grid.span(j)
        stop = self.grid.rows(i) if stop is None else stop
        block = np.empty((stop - start, stop if i == j else self.grid.rows(j))) if out is None else out
        a = rows.read(first + start, first + stop)
        try:
            if i != j:
                return kernel.block(a, rows.read(other.start, other.stop), block)
            if start:
                kernel.block(a, rows.read(first, first + start), block[:, :start])
            kernel.block(a, a, block[:, start:stop], same=True)
        except DataError as exc:
            raise DataError(f"tile ({i}, {j}): {exc.message}", hint=exc.hint, **exc.details) from exc
        return block

    def tile(self, i: int, j: int, out: FloatArray, *, start: int = 0, stop: int | None = None) -> FloatArray:
        """Tile (i, j) of A, i >= j, written to ``out`` (rows of i, rows of j); or some of its rows, as for K."""
        with np.errstate(over="ignore"):  # what float32 cannot hold is named before a tile is written
            if self.gram is None:
                self.gram_tile(i, j, out, start=start, stop=stop)
            else:
                out[...] = self.gram.read(i, j)[start:stop, : out.shape[1]]
            left, right = self.root_weights(i), self.root_weights(j)
            if left is not None and right is not None:
                out *= left[start : start + len(out), None]
                out *= right[None, : out.shape[1]]
            if i == j:
                places = np.arange(len(out))
                out[places, start + places] += self.alpha
        return out

    def diagonal(self, i: int) -> FloatArray:
        """Entries a_pp - alpha of row block i, the diagonal of S K S."""
        span, root = self.grid.span(i), self.root_weights(i)
        if self.kernel is None and self.gram is not None:
            values: FloatArray = np.diagonal(self.gram.read(i, i)).astype(np.float64)
        else:
            kernel, rows = self.known()
            values = kernel.diag(rows.read(span.start, span.stop))
        return values if root is None else root * root * values

    def diagonal_from(self, start: int) -> FloatArray:
        """The diagonal of S K S from row ``start`` on, (n - start,)."""
        first = start // self.grid.tile_size
        blocks = [self.diagonal(i) for i in range(first, self.grid.num_tiles)]
        return np.concatenate(blocks)[start - first * self.grid.tile_size :]

    def root_of(self, start: int, stop: int) -> FloatMatrix | None:
        """Square roots of the weights of rows ``start`` to ``stop``, None when the operator is not weighted."""
        return self.rows.root_weight(start, stop) if self.weighted and self.rows is not None else None

    def root_weights(self, i: int | None = None) -> FloatMatrix | None:
        """The diagonal of S (n,), or its entries of row block i; None when the operator is not weighted."""
        span = slice(0, self.grid.n) if i is None else self.grid.span(i)
        return self.root_of(span.start, span.stop)

    def normal(self) -> FloatMatrix:
        """s (n,), the diagonal of S; ones where the operator is not weighted."""
        root = self.root_weights()
        return np.ones(self.grid.n) if root is None else root

    @property
    def num_features(self) -> int:
        """d of the rows; 1 for a precomputed matrix."""
        return 1 if self.rows is None else self.rows.open().num_features


def rows_of(dataset: Dataset, kernel: Kernel | None, center: tuple[float, ...] | None = None) -> Rows:
    """Reference to the rows of a data set; a translation-invariant kernel is centred at its own point, unless told."""
    own = None if kernel is None else kernel.center(dataset.x_mean, dataset.x_std)
    if own is not None and center is None:
        center = tuple(own.tolist())
    return Rows.of(dataset, None if own is None else center)
