"""Rows of float64 on disk: an (n, k) array in chunks of whole rows, and its digests, means and deviations.

X, y and weights of a data set, coefficients and right-hand sides are all :class:`RowArray`: one Zarr array of raw
checksummed chunks (``dkrr.store.chunks.ChunkArray``), cut between rows only. The last chunk is stored full size with
NaN in the rows that do not exist yet, so a row that was never written is seen when it is read and never counts as zero.

Cost: a read verifies and copies every chunk it touches, so read whole chunks (:meth:`RowArray.blocks`).

Digest and moments of rows (:class:`RowSummary`) are gathered while they stream past, in fixed blocks of 1,024 rows. So
they depend on the rows alone, bit for bit: not on chunks, not on how a source was cut, not on how many appends it took.
"These rows are a prefix of those" is proved by SHA-256: with the block digest b = SHA-256(the block's little-endian
float64 values), the digest of the first n rows is ::

    SHA-256("dkrr rows <n> x <k>\\n", b_0, b_1, ..., b_{floor(n / 1024) - 1}, SHA-256(the n mod 1024 rows left over)).

With the block digests at hand, the digest of *any* prefix costs one block to read, and appending rows hashes only the
new ones. Cost: one pass of SHA-256, 1.4 GB/s on a core with SHA instructions, and about six passes over a block that is
in cache for the moments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DamagedChunkError, StoreError
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import read_json, write_json

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
    check
        Raises where these are not the rows that were opened, or are gone; what it belongs to lasts as long as they do.
    every_read
        Whether ``check`` is called after every read, or only after that of the last row, and of a chunk that is
        damaged: chunks of other rows may have another size.
    """

    array: ChunkArray
    num_rows: int
    check: Callable[[], None] | None = field(default=None, compare=False)
    every_read: bool = field(default=False, compare=False)

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
        shape, chunks = (num_rows, num_columns), (rows_per_chunk, num_columns)
        return cls(ChunkArray.create(store, path, shape=shape, chunks=chunks, attributes=attributes), num_rows)

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

    def save_shape(self) -> None:
        """Write the array's metadata with ``num_rows`` rows; one atomic replacement when it exists already."""
        shape = (self.num_rows, self.num_columns)
        document = read_json(self.array.location, "zarr.json")
        if document is None:
            ChunkArray.create(self.array.store, self.array.path, shape=shape, chunks=self.array.chunks)
        elif document["shape"] != list(shape):
            write_json(self.array.location, "zarr.json", {**document, "shape": shape})

    def span(self, i: int) -> tuple[int, int]:
        """First row of chunk ``i`` and one past its last."""
        if not 0 <= i < self.num_chunks:
            raise IndexError(f"chunk {i} of {self.array.location}; it has {self.num_chunks}")
        start = i * self.rows_per_chunk
        return start, min(start + self.rows_per_chunk, self.num_rows)

    def blocks(self, *, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Spans ``(start, stop)`` that cover rows ``first`` to ``end`` in order, cut where chunks end."""
        step, end = self.rows_per_chunk, self.num_rows if end is None else end
        for start in range(first // step * step, end, step):
            yield max(start, first), min(start + step, end)

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
            A chunk is missing or damaged, or holds NaN where a row should be; besides what ``check`` raises.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"rows {start} to {stop} of {self.array.location}; it has {self.num_rows}")
        is_due, out = True, np.empty((stop - start, self.num_columns)) if out is None else out
        try:
            for first, last in self.blocks(first=start, end=stop) if self.num_columns else ():
                # no name for the chunk: its pages are unmapped as soon as they are copied
                i, part = first // self.rows_per_chunk, out[first - start : last - start]
                offset = i * self.rows_per_chunk
                np.copyto(part, self.array.read((i, 0))[first - offset : last - offset])
                if np.isnan(part).any():
                    reason = f"row {first + int(np.argmax(np.isnan(part).any(axis=1)))} was never written"
                    raise damaged(self.array, i, reason, "write it again, or restore it")
            is_due = self.every_read or stop == self.num_rows
        finally:
            if self.check is not None and is_due:
                self.check()
        return out

    def write_chunk(self, i: int, block: Floats) -> None:
        """Write chunk ``i`` atomically; ``block`` holds its real rows, a ragged last chunk is padded with NaN."""
        if len(block) < self.rows_per_chunk:
            missing = np.full((self.rows_per_chunk - len(block), self.num_columns), np.nan)
            block = np.concatenate([block, missing])
        self.array.write((i, 0), np.ascontiguousarray(block, dtype=self.array.numpy_dtype))


def damaged(array: ChunkArray, i: int, reason: str, hint: str) -> DamagedChunkError:
    """The error of chunk ``i`` of rows, whose bytes are whole, and the rows are not."""
    text = f"chunk ({i}, 0) of {array.location} is damaged ({reason})"
    return DamagedChunkError(text, hint=hint, path=array.location, index=(i, 0), reason=reason)


def write_rows(location: Any, name: str, rows: Any, rows_per_chunk: int | None = None) -> None:
    """Write as an array at a location what has ``num_rows`` and ``num_columns``, and reads rows as a RowArray does."""
    n, k = rows.num_rows, rows.num_columns
    chunk = rows_per_chunk or min(n, default_rows_per_chunk(k))
    copy = RowArray.create(location, name, num_rows=n, num_columns=k, rows_per_chunk=chunk)
    for number, (start, stop) in enumerate(copy.blocks()):
        copy.write_chunk(number, np.ascontiguousarray(rows.read(start, stop)))


def lazy_rows(rows: RowArray) -> Any:
    """The rows as a dask array (n, k) whose blocks are chunks on disk; nothing is read before it is computed."""
    import dask.array as da

    spans = list(rows.blocks())
    chunks = (tuple(stop - start for start, stop in spans), (rows.num_columns,))
    return da.map_blocks(_read, dtype=np.float64, chunks=chunks, meta=np.empty((0, 0)), rows=rows, spans=spans)


def _read(rows: RowArray, spans: list[tuple[int, int]], block_id: tuple[int, int] = (0, 0)) -> Floats:
    return rows.read(*spans[block_id[0]])


# --- digests and moments ----------------------------------------------------------------------------------------------

DIGEST_ROWS = 1024


def block_digest(rows: Floats) -> str:
    """SHA-256 of the little-endian float64 values of ``rows`` in C order."""
    values: Any = np.ascontiguousarray(rows, dtype="<f8").reshape(-1)
    return hashlib.sha256(values).hexdigest()


def prefix_digest(block_digests: Sequence[str], tail: Floats) -> str:
    """The digest of the rows of all full blocks followed by ``tail``.

    Parameters
    ----------
    block_digests
        Digests of the full blocks, in order.
    tail : (m, k)
        The rows after the last full block, m < 1,024; may be empty.
    """
    num_rows = len(block_digests) * DIGEST_ROWS + len(tail)
    digest = hashlib.sha256(f"dkrr rows {num_rows} x {tail.shape[1]}\n".encode())
    for value in block_digests:
        digest.update(bytes.fromhex(value))
    if len(tail):
        digest.update(bytes.fromhex(block_digest(tail)))
    return digest.hexdigest()


NARROW = 32
SAFE = 1e-200, 1e200  # sums of squares that neither overflowed nor lost digits


@dataclass(frozen=True)
class Moments:
    """Count, mean and deviation norm M of the columns of some rows, merged by the pairwise update of Chan and others.

    For a block of m rows with mean b after n rows with mean a, and delta = b - a,

        mean = a + delta m / (n + m),        M = hypot(M, M_block, |delta| sqrt(n m / (n + m))),

    where M^2 is the sum of squared deviations. M itself is kept, not its square, so columns of any scale neither
    overflow nor vanish; a column is constant exactly when M is 0, which the rounding of a mean never disturbs.

    Parameters
    ----------
    count
        Number of rows.
    mean : (k,)
    norm : (k,)
        Square root of the sum of squared deviations from the mean.

    References
    ----------
    Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance", The American Statistician 37.
    """

    count: int
    mean: Floats
    norm: Floats

    @classmethod
    def of(cls, rows: Floats) -> Moments:
        """Moments of ``rows`` (m, k), m >= 1."""
        count = len(rows)
        # one column a row; a sum along short rows of memory costs several times one along long rows
        columns = np.ascontiguousarray(rows.T) if rows.shape[1] <= NARROW else rows.T
        constant = (columns == columns[:, :1]).all(axis=1)
        # columns beyond 1e150 may overflow here; what comes out is inf or NaN and refused by whoever scales with it
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            mean = columns.sum(axis=1) / count
            deviations = columns - mean[:, None]
            lost = deviations.sum(axis=1) / count  # by the first sum
            mean += lost
            squares = np.einsum("ji,ji->j", deviations, deviations) - count * lost * lost
            norm = np.sqrt(np.maximum(squares, 0.0))
            if (unsafe := ~constant & ~((squares > SAFE[0]) & (squares < SAFE[1]))).any():
                # deviations of any scale can be squared when they are divided by the largest
                deviations = columns[unsafe] - mean[unsafe, None]
                largest = np.abs(deviations).max(axis=1)
                deviations /= np.where(largest == 0, 1.0, largest)[:, None]
                norm[unsafe] = largest * np.sqrt(np.einsum("ji,ji->j", deviations, deviations))
        mean[constant] = rows[0, constant]
        norm[constant] = 0.0
        return cls(count, mean, norm)

    def merge(self, other: Moments) -> Moments:
        """Moments of both sets of rows together."""
        if self.count == 0 or other.count == 0:
            return other if self.count == 0 else self
        count = self.count + other.count
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            delta = other.mean - self.mean
            mean = self.mean + delta * (other.count / count)
            between = np.abs(delta) * np.sqrt(self.count * (other.count / count))
            norm = np.hypot(np.hypot(self.norm, other.norm), between)
        return Moments(count, mean, norm)

    @property
    def std(self) -> Floats:
        """Population standard deviation, (k,); exactly 0 for a constant column."""
        return np.asarray(self.norm / np.sqrt(max(1, self.count)), dtype=np.float64)


class RowSummary:
    """Running digest and moments of rows with ``num_columns`` columns."""

    def __init__(self, num_columns: int) -> None:
        self.block_digests: list[str] = []
        self._moments = Moments(0, np.zeros(num_columns), np.zeros(num_columns))
        self._tail = np.empty((0, num_columns))

    @classmethod
    def resume(cls, record: dict[str, Any], tail: Floats) -> RowSummary:
        """Go on after the rows of ``record`` (see :meth:`to_dict`); ``tail`` are those after its last full block."""
        summary = cls(tail.shape[1])
        summary.block_digests = list(record["block_digests"])
        mean, norm = decode_floats(record["block_mean"]), decode_floats(record["block_norm"])
        summary._moments = Moments(len(summary.block_digests) * DIGEST_ROWS, mean, norm)
        summary.add(tail)
        return summary

    @classmethod
    def of(
        cls,
        array: RowArray,
        start: int = 0,
        stop: int | None = None,
        *,
        without: NDArray[np.bool_] | None = None,
    ) -> RowSummary:
        """Of rows ``start`` to ``stop`` of an array, but for those that ``without`` (n,) leaves out.

        Cost: reads those rows once; memory for one chunk.
        """
        summary = cls(array.num_columns)
        for first, last in array.blocks(first=start, end=stop):
            rows = array.read(first, last)
            summary.add(rows if without is None else rows[~without[first:last]])
        return summary

    def add(self, rows: Floats) -> None:
        """Take the next ``rows`` (m, k)."""
        rows = np.concatenate([self._tail, rows]) if len(self._tail) else rows
        full = len(rows) // DIGEST_ROWS * DIGEST_ROWS
        for start in range(0, full, DIGEST_ROWS):
            block = rows[start : start + DIGEST_ROWS]
            self.block_digests.append(block_digest(block))
            self._moments = self._moments.merge(Moments.of(block))
        self._tail = rows[full:].copy()

    def digest(self) -> str:
        """Digest of all rows so far."""
        return prefix_digest(self.block_digests, self._tail)

    def moments(self) -> Moments:
        """Moments of all rows so far."""
        return self._moments.merge(Moments.of(self._tail)) if len(self._tail) else self._moments

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: what a data set stores of an array, and what :meth:`resume` needs."""
        total = self.moments()
        return {
            "digest": self.digest(),
            "block_digests": list(self.block_digests),
            "mean": _encode_floats(total.mean),
            "std": _encode_floats(total.std),
            "block_mean": _encode_floats(self._moments.mean),
            "block_norm": _encode_floats(self._moments.norm),
        }


def _encode_floats(values: Floats) -> list[float | None]:
    # JSON has no infinity: a moment that overflowed is null
    return [float(v) if np.isfinite(v) else None for v in values]


def decode_floats(values: list[float | None]) -> Floats:
    """Back from JSON; null is NaN."""
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)
