"""Rows of float64 on disk: an (n, k) array in chunks of whole rows.

X, y and weights of a data set, coefficients and right-hand sides are all :class:`RowArray`: one Zarr array of raw
checksummed chunks (``dkrr.store.chunks.ChunkArray``), cut between rows only. The last chunk is stored full size with
NaN in the rows that do not exist yet, so a row that was never written is seen when it is read and never counts as zero.

Cost: a read verifies and copies every chunk it touches, so read whole chunks (:meth:`RowArray.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DamagedChunkError, StoreError
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import read_json, write_json

__all__ = ["CheckedRows", "Floats", "RowArray", "default_rows_per_chunk", "lazy_rows"]

Floats = NDArray[np.float64]

CHUNK_BYTES = 4 << 20
MIN_ROWS, MAX_ROWS = 256, 65536


def default_rows_per_chunk(num_columns: int, num_rows: int | None = None) -> int:
    """Rows of a chunk: the power of two in [256, 65536] whose chunk is at most 4 MiB, no more than the rows need."""
    fitting = max(1, CHUNK_BYTES // (8 * max(1, num_columns)))
    rows = min(MAX_ROWS, max(MIN_ROWS, 1 << (fitting.bit_length() - 1)))
    if num_rows is not None:
        rows = min(rows, max(MIN_ROWS, 1 << (max(1, num_rows) - 1).bit_length()))
    return rows


@dataclass(frozen=True)
class RowArray:
    """An (n, k) float64 array on disk in chunks of rows.

    Parameters
    ----------
    array
        The Zarr array, chunks ``(rows_per_chunk, k)``.
    num_rows
        Rows in use. The array may be longer: an append that was interrupted leaves rows that nobody counts.
    """

    array: ChunkArray
    num_rows: int

    @classmethod
    def create(
        cls,
        store: Any,
        path: str,
        *,
        num_rows: int,
        num_columns: int,
        rows_per_chunk: int,
        attributes: dict[str, Any] | None = None,
    ) -> RowArray:
        """Create the array, or open the one that is there with the same parameters.

        Raises
        ------
        StoreMismatchError
            An array exists there and differs.
        """
        array = ChunkArray.create(
            store, path, shape=(num_rows, num_columns), chunks=(rows_per_chunk, num_columns), attributes=attributes
        )
        return cls(array, num_rows)

    @classmethod
    def open(cls, store: Any, path: str = "", num_rows: int | None = None) -> RowArray:
        """Open an existing array, or its first ``num_rows`` rows.

        Raises
        ------
        StoreError
            Nothing there, not an array of float64 rows, or fewer rows than ``num_rows``.
        """
        array = ChunkArray.open(store, path)
        if len(array.shape) != 2 or array.dtype != "float64" or array.chunks[1:] != array.shape[1:]:
            raise StoreError(
                f"{array.location} has shape {array.shape}, chunks {array.chunks}, {array.dtype}; "
                "rows of float64 in chunks of whole rows expected",
                hint="ingest it first",
            )
        if num_rows is not None and num_rows > array.shape[0]:
            raise StoreError(f"{array.location} has {array.shape[0]} rows; {num_rows} expected", hint="restore it")
        return cls(array, array.shape[0] if num_rows is None else num_rows)

    @classmethod
    def unsaved(cls, store: Any, path: str, *, num_rows: int, num_columns: int, rows_per_chunk: int) -> RowArray:
        """A handle for writing chunks of an array whose metadata is not on disk yet (see :meth:`save_shape`)."""
        shape, chunks = (num_rows, num_columns), (rows_per_chunk, num_columns)
        return cls(ChunkArray(store, path, shape, chunks, "float64"), num_rows)

    @property
    def num_columns(self) -> int:
        return self.array.shape[1]

    @property
    def rows_per_chunk(self) -> int:
        return self.array.chunks[0]

    @property
    def num_chunks(self) -> int:
        return -(-self.num_rows // self.rows_per_chunk)

    def with_rows(self, num_rows: int) -> RowArray:
        """The same array with another number of rows in use; nothing is read or written."""
        shape = (max(num_rows, self.array.shape[0]), self.num_columns)
        return RowArray(replace(self.array, shape=shape), num_rows)

    def save_shape(self) -> None:
        """Write the array's metadata with ``num_rows`` rows; one atomic replacement when it exists already."""
        key = f"{self.array.path}/zarr.json" if self.array.path else "zarr.json"
        document = read_json(self.array.store, key)
        if document is None:
            ChunkArray.create(
                self.array.store, self.array.path, shape=(self.num_rows, self.num_columns), chunks=self.array.chunks
            )
        elif document["shape"] != [self.num_rows, self.num_columns]:
            document["shape"] = [self.num_rows, self.num_columns]
            write_json(self.array.store, key, document)

    def span(self, i: int) -> tuple[int, int]:
        """First row of chunk ``i`` and one past its last."""
        if not 0 <= i < self.num_chunks:
            raise IndexError(f"chunk {i} of {self.array.location}; it has {self.num_chunks}")
        start = i * self.rows_per_chunk
        return start, min(start + self.rows_per_chunk, self.num_rows)

    def blocks(self, rows: int | None = None) -> Iterator[tuple[int, int]]:
        """Spans ``(start, stop)`` that cover all rows in order, each a whole number of chunks.

        Parameters
        ----------
        rows
            Wanted rows a span, rounded down to whole chunks but at least one; None means one chunk.
        """
        step = self.rows_per_chunk * max(1, (rows or 0) // self.rows_per_chunk)
        for start in range(0, self.num_rows, step):
            yield start, min(start + step, self.num_rows)

    def read(self, start: int, stop: int, out: Floats | None = None) -> Floats:
        """Copy rows ``start`` to ``stop`` out of verified chunks.

        Parameters
        ----------
        start, stop
            ``0 <= start <= stop <= num_rows``.
        out : (stop - start, k) float64, optional
            Where the rows go.

        Returns
        -------
        out : (stop - start, k) float64

        Raises
        ------
        DamagedChunkError
            A chunk is missing or damaged, or holds NaN where a row should be.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.array.location}; it has {self.num_rows}")
        shape = (stop - start, self.num_columns)
        if out is None:
            out = np.empty(shape)
        elif out.shape != shape or out.dtype != np.float64:
            raise ValueError(f"out is {out.shape} {out.dtype}; {shape} float64 expected")
        position = start
        while position < stop:
            i = position // self.rows_per_chunk
            first = i * self.rows_per_chunk
            end = min(stop, first + self.rows_per_chunk)
            part = out[position - start : end - start]
            # no name for the chunk: its pages are unmapped as soon as they are copied
            np.copyto(part, self.array.read((i, 0))[position - first : end - first])
            if np.isnan(part).any():
                row = position + int(np.flatnonzero(np.isnan(part).any(axis=1))[0])
                reason = f"row {row} was never written"
                raise DamagedChunkError(
                    f"chunk ({i}, 0) of {self.array.location} is damaged ({reason})",
                    hint="write it again, or restore it",
                    path=self.array.location,
                    index=(i, 0),
                    reason=reason,
                )
            position = end
        return out

    def write_chunk(self, i: int, block: Floats) -> None:
        """Write chunk ``i`` atomically; ``block`` holds its real rows, a ragged last chunk is padded with NaN."""
        start, stop = self.span(i)
        if block.shape != (stop - start, self.num_columns):
            raise ValueError(f"block {block.shape}; {(stop - start, self.num_columns)} expected for chunk {i}")
        if block.shape[0] < self.rows_per_chunk:
            padded = np.full(self.array.chunks, np.nan)
            padded[: block.shape[0]] = block
            block = padded
        self.array.write((i, 0), np.ascontiguousarray(block, dtype=self.array.numpy_dtype))


@dataclass(frozen=True)
class CheckedRows:
    """Rows on disk of which a check says that they are still those that were opened, and that they are still there.

    Parameters
    ----------
    rows
    check
        Raises where they are not; what it belongs to lasts as long as these rows.
    every_read
        Whether it is called after every read, or only after that of the last row, and of a chunk that is damaged:
        chunks of other rows may have another size.
    """

    rows: RowArray
    check: Callable[[], None]
    every_read: bool = False

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def num_columns(self) -> int:
        return self.rows.num_columns

    def read(self, start: int, stop: int, out: Floats | None = None) -> Floats:
        """Rows ``start`` to ``stop``; raises what :meth:`RowArray.read` and the check raise."""
        is_last = stop == self.num_rows
        try:
            return self.rows.read(start, stop, out)
        except DamagedChunkError:
            is_last = True
            raise
        finally:
            if self.every_read or is_last:
                self.check()


def lazy_rows(rows: RowArray | CheckedRows) -> Any:
    """The rows as a dask array (n, k) whose blocks are chunks on disk; nothing is read before it is computed."""
    import dask.array as da

    array = rows.rows if isinstance(rows, CheckedRows) else rows
    spans = list(array.blocks())
    return da.map_blocks(
        _read,
        dtype=np.float64,
        chunks=(tuple(stop - start for start, stop in spans), (array.num_columns,)),
        meta=np.empty((0, 0)),
        rows=rows,
        spans=spans,
    )


def _read(rows: RowArray | CheckedRows, spans: list[tuple[int, int]], block_id: tuple[int, int] = (0, 0)) -> Floats:
    return rows.read(*spans[block_id[0]])
