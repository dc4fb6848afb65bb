"""Checksummed chunks of Zarr arrays, read and written one whole chunk at a time.

Everything dkrr keeps on disk is a Zarr format 3 array of little-endian floats whose chunks are the raw C-order values
followed by four bytes of crc32c. Zarr's own reader returns the fill value for a chunk that is missing; here a missing,
short or damaged chunk raises :class:`~dkrr.errors.DamagedChunkError`. On a local file system a chunk is memory-mapped
(no copy) and verified; elsewhere it is fetched by its key. Any Zarr reader can open the same arrays.

What a process keeps between tasks, here and elsewhere, it gives back when it is told to (:func:`release`): workers that
others run are told at the end of a fit.

Cost: a read is one pass of crc32c over the chunk (about 25 GB/s); a write is one crc32c pass, one temporary file and
one rename.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dkrr.errors import DamagedChunkError, StoreError, StoreMismatchError
from dkrr.store.documents import create_json
from dkrr.store.files import (
    delete_key,
    is_url,
    join,
    key_size,
    list_entries,
    read_json,
    sync_folder,
    write_key,
)
from dkrr.store.interruption import check_cancelled
from dkrr.store.objects import read_object

FloatArray = NDArray[np.floating[Any]]

CRC_BYTES = 4
_FOREIGN = "only arrays written by dkrr are read; ingest others first"
_DTYPES: dict[str, np.dtype[Any]] = {"float64": np.dtype("<f8"), "float32": np.dtype("<f4")}


def check_same(
    location: str,
    there: dict[str, Any],
    wanted: dict[str, Any],
    what: str = "exists with other parameters",
    hint: str = "choose another store or remove it",
) -> None:
    """Refuse something that exists with other parameters than are wanted.

    Raises
    ------
    StoreMismatchError
        Lists the differing fields.
    """
    differing = [
        f"{name}: {there.get(name)!r} there, {wanted.get(name)!r} wanted"
        for name in sorted(there.keys() | wanted.keys())
        if there.get(name) != wanted.get(name)
    ]
    if differing:
        raise StoreMismatchError(
            f"{location} {what} ({'; '.join(differing)})",
            hint=hint,
            fields=differing,
        )


@dataclass(frozen=True)
class ChunkArray:
    """One Zarr array of raw, checksummed float chunks.

    Parameters
    ----------
    store
        Folder or URL; everything a task needs to find the array again.
    path
        Path of the array inside the store, "" for the root.
    shape, chunks
        Shape of the array and of one chunk; the last chunk of an axis is stored full size, NaN beyond the array.
    dtype
        "float64" or "float32".
    flat
        All chunks are in one folder, which takes less time than a folder for each row: only without metadata.
    """

    store: str
    path: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: str
    flat: bool = False

    @classmethod
    def create(
        cls,
        store: Any,
        path: str,
        *,
        shape: Sequence[int],
        chunks: Sequence[int],
        dtype: str = "float64",
        attributes: dict[str, Any] | None = None,
    ) -> ChunkArray:
        """Create the array, or open it when it exists with the same shape, chunks, dtype and attributes.

        Raises
        ------
        StoreMismatchError
            An array exists there and differs; the message lists the differing fields.
        """
        array = cls(str(store), path, tuple(map(int, shape)), tuple(map(int, chunks)), dtype)
        wanted = json.loads(json.dumps(attributes or {}))
        key = array._key("zarr.json")
        is_new = read_json(array.store, key) is None
        if not is_new or create_json(array.store, key, array._document(wanted)) is None:  # another process was first
            there = cls.open(store, path)
            check_same(array.location, there._facts(there.attributes), array._facts(wanted))
        return array

    @classmethod
    def open(cls, store: Any, path: str = "") -> ChunkArray:
        """Open an existing array; its metadata is checked as plain JSON before anything else is read.

        Raises
        ------
        StoreError
            Nothing there, another Zarr format, or a data type or codec that dkrr does not write.
        """
        array = cls(str(store), path, (), (), "float64")
        document, where = read_json(array.store, array._key("zarr.json")), array.location
        if document is None:
            raise StoreError(f"{where} does not hold a Zarr format 3 array (no zarr.json)", hint="check the path")
        if not isinstance(document, dict) or document.get("zarr_format") != 3 or document.get("node_type") != "array":
            raise StoreError(f"{where} is not a Zarr format 3 array", hint=_FOREIGN)
        dtype = document.get("data_type")
        if dtype not in _DTYPES:
            raise StoreError(f"{where} has data type {dtype!r}; float64 or float32 expected", hint="ingest it first")
        try:
            shape = tuple(int(n) for n in document["shape"])
            chunks = tuple(int(n) for n in document["chunk_grid"]["configuration"]["chunk_shape"])
        except (KeyError, TypeError, ValueError) as exc:
            raise StoreError(f"{where} has unreadable metadata ({exc!r})", hint="restore or remove it") from exc
        opened = cls(array.store, path, shape, chunks, dtype)
        wanted = {**opened._document(document.get("attributes", {})), "storage_transformers": []}
        for name, expected in wanted.items():
            if document.get(name, [] if name == "storage_transformers" else {}) != expected:
                raise StoreError(f"{where} has {name} {document.get(name)!r}; {expected!r} expected", hint=_FOREIGN)
        return opened

    @property
    def location(self) -> str:
        """Where the array is, for messages."""
        return join(self.store, self.path) if self.path else self.store

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes stored with the array (read anew each time)."""
        document = read_json(self.store, self._key("zarr.json"))
        return dict(document.get("attributes", {})) if document else {}

    @property
    def num_chunks(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunks, strict=True))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the values of one chunk; a chunk on disk has four more."""
        return math.prod(self.chunks) * self.numpy_dtype.itemsize

    def chunk_key(self, index: Sequence[int]) -> str:
        """Key of a chunk, computed from integers only."""
        return self._key("c/" + ("." if self.flat else "/").join(str(int(i)) for i in index))

    def is_valid(self, index: Sequence[int]) -> bool:
        """Whether the chunk exists with the right size. Reads nothing; the checksum is verified on read."""
        return key_size(self.store, self.chunk_key(index)) == self.chunk_bytes + CRC_BYTES

    def valid_keys(self) -> set[str]:
        """Keys of the chunks that are there with the right size, for counting many: one listing, no look at each.

        A listing may lag behind; whether a chunk has to be computed is decided by :meth:`is_valid`.
        """
        wanted = self.chunk_bytes + CRC_BYTES
        return {self._key(entry.key) for entry in list_entries(self.location) if entry.num_bytes == wanted}

    def read(self, index: Sequence[int], *, verify: bool = True) -> FloatArray:
        """Read one whole chunk, read-only: mapped on a local file system, fetched by key elsewhere.

        The mapping lives as long as the returned array; drop it soon, mapped pages count as resident memory.
        Without ``verify`` the checksum is not compared: for what has been verified lately and is read again and again.

        Raises
        ------
        DamagedChunkError
            The chunk is missing, has a wrong size, or its crc32c does not match.
        """
        ((_, block),) = self.read_strips(index, max(1, self.chunks[0]), verify=verify)
        return block

    def read_strips(
        self, index: Sequence[int], num_rows: int, *, verify: bool = True
    ) -> Iterator[tuple[int, FloatArray]]:
        """Read one chunk in strips of ``num_rows`` rows, read-only: (first row, strip), top to bottom.

        Each strip is added to the checksum right before it is handed out, so that it is fetched from memory once for
        both. The sum is compared behind the last strip: whatever was made of the strips is void when this raises.

        Raises
        ------
        DamagedChunkError
            The chunk is missing or has a wrong size, at once; its crc32c does not match, at the end.
        """
        data, block = self._fetch(index)
        row_bytes, found = self.chunk_bytes // self.chunks[0], 0
        for start in range(0, self.chunks[0], num_rows):
            strip = block[start : start + num_rows]
            if verify:
                found = crc32c(data[start * row_bytes : (start + len(strip)) * row_bytes], found)
            yield start, strip
        stored = int.from_bytes(data[self.chunk_bytes :], "little")
        if verify and found != stored:
            raise self._damaged(index, f"crc32c {found:08x}, {stored:08x} stored")

    def _fetch(self, index: Sequence[int]) -> tuple[memoryview, FloatArray]:
        """The bytes of a chunk with its checksum, which has not been compared, and its values."""
        check_cancelled()
        key, data = self.chunk_key(index), None
        if is_url(self.store):
            found = read_object(self.store, key)
            data = None if found is None else found[0]
        else:
            path, nothing = os.path.join(self.store, key), (FileNotFoundError, NotADirectoryError)
            with contextlib.suppress(*nothing), open(path, "rb", buffering=0) as file:
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                is_empty = os.fstat(file.fileno()).st_size == 0  # which cannot be mapped
                data = b"" if is_empty else mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        octets = memoryview(data or b"").cast("B")
        if len(octets) != self.chunk_bytes + CRC_BYTES:
            found_bytes = f"{len(octets)} bytes, {self.chunk_bytes + CRC_BYTES} expected"
            raise self._damaged(index, "missing" if data is None else found_bytes)
        block = np.frombuffer(octets, dtype=self.numpy_dtype, count=math.prod(self.chunks)).reshape(self.chunks)
        block.flags.writeable = False
        return octets, block

    def write(self, index: Sequence[int], block: FloatArray) -> None:
        """Write one whole chunk atomically. ``block`` has the chunk's shape and dtype and is C-contiguous."""
        if block.shape != self.chunks or block.dtype != self.numpy_dtype or not block.flags.c_contiguous:
            raise ValueError(f"block {block.shape} {block.dtype}, chunk {self.chunks} {self.dtype} in C order expected")
        view = block.data.cast("B")
        tail = crc32c(view).to_bytes(CRC_BYTES, "little")
        write_key(self.store, self.chunk_key(index), view, tail)

    def delete(self, index: Sequence[int]) -> None:
        """Remove one chunk; a missing one is no error."""
        delete_key(self.store, self.chunk_key(index))

    def digest(self) -> str:
        """SHA-256 of all chunks in their order: it tells that two were exchanged, each of which is whole.

        Raises
        ------
        DamagedChunkError
            One is missing or damaged.
        """
        found = hashlib.sha256()
        for index in np.ndindex(*self.num_chunks):
            found.update(self.read(index).tobytes())
        return found.hexdigest()

    def sync(self) -> None:
        """Make all chunks durable on a local file system; nothing elsewhere."""
        if not is_url(self.store):
            sync_folder(Path(self.location))

    def _key(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def _damaged(self, index: Sequence[int], reason: str) -> DamagedChunkError:
        chunk = ", ".join(str(int(i)) for i in index)
        what, hint = "is damaged", f"restore it, or make {self.store} anew from what it was made of"
        with contextlib.suppress(StoreError, OSError):
            there = ChunkArray.open(self.store, self.path)
            if (there.chunks, there.dtype) != (self.chunks, self.dtype):  # an array of other chunks, which are whole
                what, hint = "is not one of the array that was opened", "the array was made anew: open it again"
        return DamagedChunkError(
            f"chunk ({chunk}) of {self.location} {what} ({reason})",
            hint=hint,
            path=self.location,
            index=tuple(int(i) for i in index),
            reason=reason,
        )

    def _facts(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {**attributes, "shape": self.shape, "chunks": self.chunks, "dtype": self.dtype}

    def _document(self, attributes: dict[str, Any]) -> dict[str, Any]:
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunks)}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": "NaN",
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "attributes": attributes,
        }


class _Arrays(dict[tuple[str, str], Any]):
    """The buffers of one thread by name and dtype; the thread that ends takes them with it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class _Held(threading.local):
    def __init__(self) -> None:
        self.arrays = _Arrays()
        _of_all_threads.add(self.arrays)


_of_all_threads: weakref.WeakSet[_Arrays] = weakref.WeakSet()
_held = _Held()


def buffer(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """An uninitialised C-order array that this thread reuses for every request under ``name``.

    A fresh 32 MiB allocation costs more in page faults than the product that fills it, so tiles are accumulated in
    memory that stays mapped. The previous content of the same name is overwritten.
    """
    count = math.prod(shape)
    key, held = (name, np.dtype(dtype).str), _held.arrays
    flat = held.get(key)
    if flat is None or flat.size < count:
        held.pop(key, None)
        flat = held[key] = np.empty(count, dtype)
    return flat[:count].reshape(shape)


def release() -> None:
    """Give back all memory that this process keeps for tasks to come; a task that uses some goes on with it."""
    for arrays in list(_of_all_threads):
        arrays.clear()
