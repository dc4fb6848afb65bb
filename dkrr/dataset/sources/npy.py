"""The files that NumPy writes, .npy and .npz, read in row blocks and never mapped.

Mapped pages count as resident memory, so rows are read with ``readinto``: from C order in one piece a block, from
Fortran order in one piece a column. Members of an .npz are streams without a way back; a Fortran-order one is unpacked
to a temporary file first. Pickled objects are refused.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.sources.table import Block, Join, MatrixTable, Table, Unchanged, take_columns
from dkrr.errors import DataError

__all__ = ["NpyTable", "open_npz"]


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
        try:
            count = file.readinto(view)
        except (zipfile.BadZipFile, zlib.error, EOFError) as exc:
            raise DataError(f"{label} is damaged ({exc})", hint="write it again") from exc
        if not count:
            raise DataError(f"{label} ends {len(view):,} bytes too early", hint="write it again")
        view = view[count:]


class NpyTable(MatrixTable):
    """A .npy file, C or Fortran order, any byte order; ``unchanged`` is of the files that it must be read of."""

    def __init__(
        self, path: Path, label: str, *, prefix: str = "x", allow_1d: bool = False, unchanged: Unchanged | None = None
    ) -> None:
        self._unchanged = unchanged or Unchanged([path])
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


class _MemberTable(MatrixTable):
    """A C-order array inside an .npz, read from front to back."""

    def __init__(
        self, path: Path, member: str, label: str, *, prefix: str, allow_1d: bool, unchanged: Unchanged
    ) -> None:
        self._path, self._member, self._unchanged = path, member, unchanged
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            shape, _, self._dtype = _read_header(file, label)
        super().__init__(label, shape, prefix=prefix, allow_1d=allow_1d)

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        raise NotImplementedError("a member of an .npz is read from its beginning only")

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        with zipfile.ZipFile(self._path) as archive, archive.open(self._member) as file:
            _read_header(file, self.label)
            for start in range(0, self.size, self.step):
                rows = np.empty((min(self.step, self.size - start), len(self.names)), dtype=self._dtype)
                _fill(file, rows, self.label)
                yield take_columns(rows, columns, label_column, self.label, start)
        self._unchanged.check()


class _UnpackedTable(NpyTable):
    """A Fortran-order array of an .npz, unpacked for as long as the table lives."""

    def __init__(
        self, path: Path, member: str, label: str, *, prefix: str, allow_1d: bool, unchanged: Unchanged
    ) -> None:
        folder = tempfile.mkdtemp(prefix="dkrr-npz-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        unpacked = Path(folder) / "member.npy"
        with zipfile.ZipFile(path) as archive, archive.open(member) as file, open(unpacked, "wb") as copy:
            shutil.copyfileobj(file, copy, 1 << 20)
        super().__init__(unpacked, label, prefix=prefix, allow_1d=allow_1d, unchanged=unchanged)


def open_npz(path: Path, label: str) -> Table:
    """An .npz with X and, if there, y and weight; or with one array under any name.

    Raises
    ------
    DataError
        Other members, or a damaged file.
    """
    unchanged = Unchanged([path])  # of all members
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        if "X" not in members and len(members) == 1:
            (name,) = members
            return _open_member(path, members[name], f"{name} of {label}", "x", unchanged=unchanged)
        unknown = sorted(set(members) - {"X", "y", "weight"})
        if "X" not in members or unknown:
            raise DataError(
                f"{label} holds {', '.join(sorted(members)) or 'no arrays'}; X, and optionally y and weight, expected",
                hint="save it with numpy.savez(path, X=X, y=y)",
            )
        x = _open_member(path, members["X"], f"X of {label}", "x", unchanged=unchanged)
        y, weight = (
            _open_member(path, members[name], f"{name} of {label}", name, allow_1d=True, unchanged=unchanged)
            if name in members
            else None
            for name in ("y", "weight")
        )
    except zipfile.BadZipFile as exc:
        raise DataError(f"{label} is not a readable .npz file ({exc})", hint="write it again with numpy.savez") from exc
    return x if y is None and weight is None else Join(x, y, weight)


def _open_member(
    path: Path, member: str, label: str, prefix: str, *, allow_1d: bool = False, unchanged: Unchanged
) -> Table:
    with zipfile.ZipFile(path) as archive, archive.open(member) as file:
        shape, is_fortran, _ = _read_header(file, label)
    kind = _UnpackedTable if is_fortran and len(shape) > 1 else _MemberTable
    return kind(path, member, label, prefix=prefix, allow_1d=allow_1d, unchanged=unchanged)
