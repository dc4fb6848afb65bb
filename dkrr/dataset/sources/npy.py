"""The .npy files that NumPy writes, read in row blocks and never mapped.

Mapped pages count as resident memory, so rows are read with ``readinto``: from C order in one piece a block, from
Fortran order in one piece a column. Pickled objects are refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.sources.table import MatrixTable, Unchanged
from dkrr.errors import DataError

__all__ = ["NpyTable"]


def _read_header(file: IO[bytes], label: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, and dtype; the file is left at its first value."""
    try:
        version = np.lib.format.read_magic(file)
        if version == (1, 0):
            header = np.lib.format.read_array_header_1_0(file)
        elif version == (2, 0):
            header = np.lib.format.read_array_header_2_0(file)
        else:
            raise ValueError(f"format version {version}")
    except (ValueError, EOFError) as exc:
        raise DataError(f"{label} is not a readable .npy file ({exc})", hint="write it again with numpy.save") from exc
    shape, is_fortran, dtype = header
    if dtype.hasobject:
        raise DataError(
            f"{label} has dtype {dtype}, stored as pickled objects; numbers expected", hint="save it as float64"
        )
    return shape, is_fortran, dtype


def _fill(file: Any, array: NDArray[Any], label: str) -> None:
    # uint8 in between: not every dtype (datetimes, float16 of other byte orders) has a buffer of its own
    octets: Any = array.reshape(-1).view(np.uint8)
    view = memoryview(octets)
    while len(view):
        count = file.readinto(view)
        if not count:
            raise DataError(f"{label} ends {len(view):,} bytes too early", hint="write it again")
        view = view[count:]


class NpyTable(MatrixTable):
    """A .npy file, C or Fortran order, any byte order."""

    def __init__(self, path: Path, label: str, *, prefix: str = "x", allow_1d: bool = False) -> None:
        self._unchanged = Unchanged([path])
        with open(path, "rb") as file:
            shape, self._is_fortran, self._dtype = _read_header(file, label)
            self._offset = file.tell()
            found = file.seek(0, 2)
        expected = self._offset + math.prod(shape) * self._dtype.itemsize
        if found != expected:
            what = "it is cut" if found < expected else "or save one array alone: more is behind its first"
            raise DataError(f"{label} has {found:,} bytes; {expected:,} expected", hint=f"copy it again, {what}")
        super().__init__(label, shape, prefix=prefix, allow_1d=allow_1d)
        self.path = path

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        try:
            return self._read(start, stop)
        finally:  # whatever is wrong with the bytes of a file that was replaced
            self._unchanged.check()

    def _read(self, start: int, stop: int) -> NDArray[Any]:
        width, size = len(self.names), self._dtype.itemsize
        with open(self.path, "rb", buffering=0) as file:
            if not self._is_fortran or width == 1:
                rows = np.empty((stop - start, width), dtype=self._dtype)
                file.seek(self._offset + start * width * size)
                _fill(file, rows, self.label)
                return rows
            columns = np.empty((width, stop - start), dtype=self._dtype)
            for j, column in enumerate(columns):
                file.seek(self._offset + (j * self.size + start) * size)
                _fill(file, column, self.label)
            return columns.T
