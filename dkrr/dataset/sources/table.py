"""What every source of rows becomes: a table of columns that streams as blocks of float64.

A :class:`Table` knows its column names and, mostly, its number of rows, and hands out blocks of the columns one asks
for. Separate X, y and weights are one table too (:class:`Join`), which knows which columns are targets and weights.
"""

from __future__ import annotations

import contextlib
import decimal
import numbers
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.rows import Floats
from dkrr.errors import DataError

__all__ = [
    "BLOCK_BYTES",
    "Block",
    "Join",
    "MatrixTable",
    "Table",
    "Unchanged",
    "check_shape",
    "take_columns",
    "to_floats",
    "with_mask",
]

BLOCK_BYTES = 16 << 20  # of float64 a block, so that reading ahead of a 4 MiB chunk stays cheap in memory

Block = tuple[Floats, list[Any] | None]  # (m, number of columns asked for), and the labels of one column


class Unchanged:
    """Files as they are now, to find out later whether all that was read of them was of one state."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._states = {file: self._state(file) for file in files}

    @staticmethod
    def _state(file: Path) -> tuple[int, int, int] | None:
        try:
            found = os.stat(file)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def check(self) -> None:
        """Compare the files with how they were.

        Raises
        ------
        DataError
            One was changed.
        """
        for file, state in self._states.items():
            if self._state(file) != state:
                raise DataError(
                    f"{file} was changed while it was read",
                    hint="start again when it is complete; write files under another name and rename them",
                )


class Table(ABC):
    """Columns of one source.

    Attributes
    ----------
    label
        What messages call it: a file, "X", a data set of scikit-learn.
    names
        One name a column.
    is_named
        Whether the source named its columns, so that an append may match them by name. Of a join, those of X: see
        :meth:`has_name`.
    num_rows
        None where only reading tells.
    target, weight
        The columns that the source itself declares to be targets and weights.
    target_is_1d
        Whether those targets had one axis.
    classes
        Class labels of the targets where the source holds them one-hot.
    dropped
        Of the rows that the source itself was read from, which it left out for missing values.
    """

    target: tuple[int, ...] | None = None
    target_is_1d: bool = False
    weight: int | None = None
    classes: tuple[Any, ...] | None = None
    dropped: NDArray[np.bool_] | None = None

    def __init__(self, label: str, names: Sequence[str], num_rows: int | None, *, is_named: bool) -> None:
        self.label = label
        self.names = tuple(names)
        self.num_rows = num_rows
        self.is_named = is_named

    @abstractmethod
    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        """All rows in order: the ``columns`` as float64, and the values of ``label_column`` as they are.

        Every call starts anew.

        Raises
        ------
        DataError
            A column does not hold numbers, or the source is damaged.
        """

    def has_name(self, column: int) -> bool:
        """Whether the source named this column."""
        return self.is_named

    def label_type(self, column: int) -> Any:
        """The Arrow type of a column as it stands, which need not hold numbers, for a copy beside predictions.

        Raises
        ------
        DataError
            The source has no columns with names.
        """
        raise DataError(
            f"columns of {self.label} cannot be kept, it is neither .csv nor .parquet",
            hint="predict the file that it was made of",
        )

    def as_written(self, column: int) -> Iterator[Any]:
        """All values of a column as they stand, as Arrow arrays of its :meth:`label_type`, in order."""
        self.label_type(column)
        return iter(())

    def locate(self, row: int) -> str:
        """Where in the source global row ``row`` is, when there is a better word than its number."""
        return ""


def check_shape(shape: Sequence[float], label: str, *, allow_1d: bool = False) -> tuple[int, int]:
    """Rows and columns of an array of ``shape``.

    Raises
    ------
    DataError
        Not two axes (or one, where that is allowed), no rows, or no columns.
    """
    text = "(" + ", ".join("unknown" if n != n else str(int(n)) for n in shape) + ("," if len(shape) == 1 else "") + ")"
    if len(shape) == 1 and not allow_1d:
        raise DataError(
            f"{label} is 1-D, shape {text}; (rows, features) expected",
            hint="Reshape your data with .reshape(-1, 1) if it is one feature, .reshape(1, -1) if it is one row",
        )
    if len(shape) not in (1, 2):
        wanted = "(rows,) or (rows, targets)" if allow_1d else "(rows, features)"
        raise DataError(f"{label} is {len(shape)}-D, shape {text}; {wanted} expected", hint="flatten the other axes")
    num_rows, num_columns = int(shape[0]), int(shape[1]) if len(shape) == 2 else 1
    if num_rows == 0 or num_columns == 0:
        what = "rows" if num_rows == 0 else "columns"
        raise DataError(f"{label} has no {what}, shape {text}; at least one expected", hint="check how it was made")
    return num_rows, num_columns


def to_floats(values: Any, label: str, first_row: int = 0) -> Floats:
    """``values`` as native float64.

    Raises
    ------
    DataError
        Anything but real numbers; the dtype is named, for objects also the row.
    """
    if isinstance(values, np.ma.MaskedArray):
        # a masked value is a missing one; asarray would uncover what is under the mask
        return np.ma.filled(values.astype(np.float64), np.nan)
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        with np.errstate(over="ignore"):  # a long double beyond float64 becomes inf, which the caller reports
            return array.astype(np.float64, copy=False)
    if array.dtype.kind == "O":
        return _objects_to_floats(array, label, first_row)
    raise DataError(
        f"{label} has dtype {array.dtype}; numbers expected",
        hint="convert it to numbers, or leave the column out with features=",
        dtype=str(array.dtype),
    )


def with_mask(values: Any) -> Any:
    """A list of masked arrays as one, other values as they are: asarray would uncover what is under the masks."""
    if isinstance(values, list | tuple) and any(isinstance(row, np.ma.MaskedArray) for row in values):
        with contextlib.suppress(ValueError):  # of several lengths, which the caller reports
            return np.ma.array([np.nan if row is np.ma.masked else row for row in values])
    return values


def _objects_to_floats(array: NDArray[Any], label: str, first_row: int) -> Floats:
    out = np.empty(array.shape)
    flat = out.reshape(-1)
    width = array.shape[1] if array.ndim == 2 else 1
    for i, value in enumerate(array.reshape(-1).tolist()):
        if value is None or type(value).__name__ == "NAType":
            flat[i] = np.nan
            continue
        try:
            if not isinstance(value, numbers.Real | decimal.Decimal | np.bool_):
                raise TypeError
            flat[i] = float(value)
        except (TypeError, OverflowError):
            raise DataError(
                f"{label} has dtype object with {type(value).__name__} {str(value)[:40]!r} at row "
                f"{first_row + i // width}, column {i % width}; numbers expected",
                hint="convert it to numbers, or leave the column out with features=",
                dtype="object",
                row=first_row + i // width,
                column=i % width,
            ) from None
    return out


def take_columns(raw: Any, columns: Sequence[int], label_column: int | None, label: str, first_row: int) -> Block:
    """The block of a (m, k) or (m,) array whose first row is global row ``first_row``."""
    raw = raw.reshape(len(raw), -1)
    labels = None if label_column is None else raw[:, label_column].tolist()
    chosen = list(columns)
    if not chosen:
        return np.empty((len(raw), 0)), labels
    is_whole = chosen == list(range(raw.shape[1]))
    return to_floats(raw if is_whole else raw[:, chosen], label, first_row), labels


class MatrixTable(Table):
    """A table over one 2-D (or 1-D) array whose rows can be read anywhere."""

    def __init__(
        self,
        label: str,
        shape: Sequence[float],
        *,
        prefix: str = "x",
        allow_1d: bool = False,
        step: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        num_rows, width = check_shape(shape, label, allow_1d=allow_1d)
        self.is_1d = len(shape) == 1
        generic = [prefix] if allow_1d and width == 1 else [f"{prefix}{j}" for j in range(width)]
        super().__init__(label, generic if names is None else names, num_rows, is_named=names is not None)
        self.size = num_rows
        self.step = step or max(256, BLOCK_BYTES // (8 * width))

    @abstractmethod
    def read_rows(self, start: int, stop: int) -> Any:
        """Rows ``start`` to ``stop`` in the dtype of the source."""

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        for start in range(0, self.size, self.step):
            raw = self.read_rows(start, min(start + self.step, self.size))
            yield take_columns(raw, columns, label_column, self.label, start)


class Join(Table):
    """X, y and weights side by side, cut to common blocks.

    Raises
    ------
    DataError
        They differ in their number of rows.
    """

    def __init__(self, x: Table, y: Table | None, weight: Table | None) -> None:
        self.tables = [table for table in (x, y, weight) if table is not None]
        known = [table for table in self.tables if table.num_rows is not None]
        for table in known[1:]:
            if table.num_rows != known[0].num_rows:
                raise _different_lengths(known[0], table, known[0].num_rows, table.num_rows)
        names = [name for table in self.tables for name in table.names]
        num_rows = known[0].num_rows if known else None
        super().__init__(x.label, names, num_rows, is_named=x.is_named)
        start = len(x.names)
        if y is not None:
            self.target = tuple(range(start, start + len(y.names)))
            self.target_is_1d = getattr(y, "is_1d", False)
            start += len(y.names)
        if weight is not None:
            if len(weight.names) != 1:
                raise DataError(f"{weight.label} has {len(weight.names)} columns; one expected", hint="pass (rows,)")
            self.weight = start

    def has_name(self, column: int) -> bool:
        for table in self.tables:
            if column < len(table.names):
                return table.has_name(column)
            column -= len(table.names)
        raise IndexError(f"column {column} beyond the last of {self.label}")

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        streams: list[Iterator[Block]] = []
        used: list[Table] = []
        positions: list[int] = []
        start = 0
        label_stream: int | None = None
        for table in self.tables:
            stop = start + len(table.names)
            mine = [(position, c - start) for position, c in enumerate(columns) if start <= c < stop]
            labelled = label_column is not None and start <= label_column < stop
            if mine or labelled:
                if labelled:
                    label_stream = len(streams)
                wanted = label_column - start if labelled and label_column is not None else None
                streams.append(table.blocks([column for _, column in mine], wanted))
                used.append(table)
                positions += [position for position, _ in mine]
            start = stop
        for parts in _in_step(streams, used):
            values = parts[0][0] if len(parts) == 1 else np.concatenate([part[0] for part in parts], axis=1)
            if positions != sorted(positions):
                values = values[:, np.argsort(positions)]
            yield values, parts[label_stream][1] if label_stream is not None else None


def _different_lengths(a: Table, b: Table, num_a: Any, num_b: Any) -> DataError:
    return DataError(
        f"{a.label} has {num_a} rows and {b.label} has {num_b}; equal numbers expected", hint="check how they were made"
    )


def _in_step(streams: list[Iterator[Block]], tables: list[Table]) -> Iterator[list[Block]]:
    """Blocks of equal length from streams that cut their rows differently."""
    waiting: list[Block | None] = [None] * len(streams)
    seen = [0] * len(streams)
    while True:
        for i, stream in enumerate(streams):
            while waiting[i] is None or len(waiting[i][0]) == 0:  # type: ignore[index]
                block = next(stream, None)
                if block is None:
                    waiting[i] = None
                    break
                waiting[i] = block
                seen[i] += len(block[0])
        ended = [i for i, block in enumerate(waiting) if block is None]
        if ended:
            if len(ended) < len(streams):
                other = next(i for i in range(len(streams)) if i not in ended)
                total = seen[other] + sum(len(values) for values, _ in streams[other])
                raise _different_lengths(tables[ended[0]], tables[other], seen[ended[0]], total)
            return
        blocks = [block for block in waiting if block is not None]
        length = min(len(values) for values, _ in blocks)
        yield [(values[:length], labels and labels[:length]) for values, labels in blocks]
        waiting = [(values[length:], labels and labels[length:]) for values, labels in blocks]
