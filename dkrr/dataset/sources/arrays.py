"""NumPy arrays, memory maps and dask arrays."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.sources.table import Block, MatrixTable, Table, check_shape, take_columns, with_mask
from dkrr.errors import DataError

__all__ = ["ArrayTable", "DaskTable", "as_array"]


def as_array(values: Any, label: str) -> NDArray[Any]:
    """A list or anything with ``__array__`` as an array.

    Raises
    ------
    DataError
        Sparse, ragged, or not an array at all.
    """
    values = with_mask(values)
    if isinstance(values, np.ndarray):
        return values if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    if type(values).__module__.partition(".")[0] == "scipy" and hasattr(values, "toarray"):
        raise DataError(f"{label} is sparse ({type(values).__name__}); dense rows expected", hint="pass .toarray()")
    if not isinstance(values, list | tuple) and not hasattr(values, "__array__"):
        raise DataError(
            f"{label} is of type {type(values).__name__}; a path, NumPy, pandas, dask or Zarr array expected",
            hint="convert it with numpy.asarray",
        )
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as exc:
        raise DataError(f"{label} is not a rectangular array ({exc})", hint="give every row the same length") from exc


class ArrayTable(MatrixTable):
    """An array in memory, or a memory map whose pages are dropped as soon as they are copied."""

    def __init__(
        self,
        array: NDArray[Any],
        label: str,
        *,
        prefix: str = "x",
        allow_1d: bool = False,
        step: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(label, array.shape, prefix=prefix, allow_1d=allow_1d, step=step, names=names)
        self._array = array
        self._map = _shared_map(array)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self._array[start:stop]

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        for values, labels in super().blocks(columns, label_column):
            if self._map is None:
                yield values, labels
                continue
            copied = values.copy()
            del values
            self._map.madvise(mmap.MADV_DONTNEED)
            yield copied, labels


def _shared_map(array: Any) -> mmap.mmap | None:
    """The memory map under an array, unless pages dropped from it would be lost (mode "c" keeps changes there)."""
    mode = None
    while array is not None:
        if isinstance(array, np.memmap):
            mode = array.mode
        if isinstance(array, mmap.mmap):
            return array if mode in ("r", "r+", "w+") and hasattr(mmap, "MADV_DONTNEED") else None
        array = getattr(array, "base", None)
    return None


class DaskTable(Table):
    """A dask array, computed one row block after the other; ``names`` of a frame that it was made of."""

    def __init__(
        self,
        array: Any,
        label: str,
        *,
        prefix: str = "x",
        allow_1d: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        if any(math.isnan(length) for length in array.shape):
            raise DataError(
                f"{label} is a dask array with unknown chunk sizes, shape {array.shape}; known sizes expected",
                hint="call compute_chunk_sizes() on it first",
            )
        num_rows, width = check_shape(array.shape, label, allow_1d=allow_1d)
        self.is_1d = array.ndim == 1
        generic = [prefix] if allow_1d and width == 1 else [f"{prefix}{j}" for j in range(width)]
        super().__init__(label, generic if names is None else names, num_rows, is_named=names is not None)
        self._array = array

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        row = 0
        for i in range(self._array.numblocks[0]):
            raw = as_array(self._array.blocks[i].compute(), self.label)
            yield take_columns(raw, columns, label_column, self.label, row)
            row += len(raw)
