"""What every source of rows becomes: a table of columns that streams as blocks of float64; and which column is which.

A :class:`Table` knows its column names and, mostly, its number of rows, and hands out blocks of the columns one asks
for. What can be read anywhere is an :class:`ArrayTable`. Separate X, y and weights are one table too (:func:`joined`),
which knows which columns are targets and weights.

Features, targets and weights are told once (:func:`resolve`). Where a fit meets other rows and both sides have names,
names decide: the order does not matter, and what was not fitted is left aside. Where one side has none, columns are
told by their place, and as many as were fitted are expected.
"""

from __future__ import annotations

import contextlib
import decimal
import mmap
import numbers
import re
import reprlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.rows import Floats
from dkrr.errors import DataError, ParameterError, did_you_mean
from dkrr.store.files import file_state

if TYPE_CHECKING:
    from dkrr.dataset.dataset import Dataset

FRESH_SECONDS = 2.0  # longer than the steps of a file system's clock, and than one write
BLOCK_BYTES = 8 << 20  # of float64 a block, so that reading ahead of a 4 MiB chunk stays cheap in memory

Column = str | int
Block = tuple[Floats, list[Any] | None]  # (m, number of columns asked for), and the labels of one column


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
    is_1d
        Whether it is one column without a second axis.
    target, weight
        The columns that the source itself declares to be targets and weights.
    target_is_1d
        Whether those targets had one axis.
    classes
        Class labels of the targets where the source holds them one-hot.
    dropped
        Of the rows that the source itself was read from, which it left out for missing values.
    places
        Of a data set, see :class:`dkrr.Dataset`; () of other sources.
    """

    is_1d: bool = False
    target: tuple[int, ...] | None = None
    target_is_1d: bool = False
    weight: int | None = None
    classes: tuple[Any, ...] | None = None
    dropped: NDArray[np.bool_] | None = None
    places: tuple[tuple[int, ...], ...] = ()

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

    def is_text(self, column: int) -> bool:
        """Whether the values of this column are fields of a text file, in which marks stand for missing ones."""
        return False

    def label_type(self, column: int, *, as_text: bool = True) -> Any:
        """The Arrow type of a column as it stands, which need not hold numbers, for a copy beside predictions.

        ``as_text``: of a text file always text, and not numbers where all fields are.

        Raises
        ------
        DataError
            The source has no columns with names.
        """
        raise DataError(
            f"columns of {self.label} cannot be kept, it is neither .csv nor .parquet",
            hint="predict the file that it was made of",
        )

    def as_written(self, column: int, *, kind: Any = None) -> Iterator[Any]:
        """All values of a column as they stand, in order, as Arrow arrays of its :meth:`label_type`."""
        raise NotImplementedError

    def locate(self, row: int) -> str:
        """Where in the source global row ``row`` is, when there is a better word than its number."""
        return ""


class ArrayTable(Table):
    """A 2-D (or 1-D) array behind a function that reads its rows ``start`` to ``stop``.

    Parameters
    ----------
    names
        Of columns; None makes them up from ``prefix``.
    ends
        Where blocks end; None: blocks of 16 MiB, of whole chunks.
    chunk
        Rows that are read together at best.
    read_labels
        Of a column, for rows that have another type where all columns are read together.
    """

    def __init__(
        self,
        label: str,
        shape: Sequence[float],
        read: Callable[[int, int], Any],
        *,
        read_labels: Callable[[int, int, int], list[Any]] | None = None,
        prefix: str = "x",
        allow_1d: bool = False,
        names: Sequence[str] | None = None,
        ends: Sequence[int] | None = None,
        chunk: int = 256,
    ) -> None:
        num_rows, width = check_shape(shape, label, allow_1d=allow_1d)
        generic = [prefix] if allow_1d and width == 1 else [f"{prefix}{j}" for j in range(width)]
        super().__init__(label, generic if names is None else names, num_rows, is_named=names is not None)
        self.is_1d, self._read, self._read_labels = len(shape) == 1, read, read_labels
        step = chunk * max(1, BLOCK_BYTES // (8 * width * chunk))
        self._ends = [*range(step, num_rows, step), num_rows] if ends is None else ends

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        start, chosen = 0, list(columns)
        for stop in self._ends:
            raw = self._read(start, stop)
            raw = raw.reshape(len(raw), -1)
            labels = None if label_column is None else raw[:, label_column].tolist()
            if label_column is not None and self._read_labels is not None:
                labels = self._read_labels(start, stop, label_column)
            part = raw if chosen == list(range(raw.shape[1])) else raw[:, chosen]
            yield to_floats(part, self.label, start) if chosen else np.empty((len(raw), 0)), labels
            start = stop


def array_table(values: Any, label: str, **options: Any) -> Table:
    """A list, an array in memory, a memory map, or anything with ``__array__``.

    Raises
    ------
    DataError
        Sparse, ragged, or not an array at all.
    """
    array = as_array(values, label)
    mapped = _shared_map(array)

    def read(start: int, stop: int) -> NDArray[Any]:
        if mapped is None:
            return array[start:stop]
        # mapped pages count as resident memory
        copy = array[start:stop].copy()
        mapped.madvise(mmap.MADV_DONTNEED)
        return copy

    return ArrayTable(label, array.shape, read, **options)


def as_array(values: Any, label: str) -> NDArray[Any]:
    """A list, or anything with ``__array__``, as an array; see :func:`array_table`."""
    values = with_mask(values)
    if type(values).__module__.partition(".")[0] == "scipy" and hasattr(values, "toarray"):
        raise DataError(f"{label} is sparse ({type(values).__name__}); dense rows expected", hint="pass .toarray()")
    if not isinstance(values, list | tuple | np.ndarray) and not hasattr(values, "__array__"):
        raise DataError(
            f"{label} is of type {type(values).__name__}; a path, NumPy, pandas, dask or Zarr array expected",
            hint="convert it with numpy.asarray",
        )
    try:
        found = np.asanyarray(values)  # a variable of a file may have a mask, too
        return found if isinstance(found, np.ma.MaskedArray) else np.asarray(found)
    except (ValueError, TypeError) as exc:
        raise DataError(f"{label} is not a rectangular array ({exc})", hint="give every row the same length") from exc


def _shared_map(array: Any) -> mmap.mmap | None:
    """The memory map under an array, unless pages dropped from it would be lost (mode "c" keeps changes there)."""
    mode = None
    while array is not None and not isinstance(array, mmap.mmap):
        mode = getattr(array, "mode", mode)
        array = getattr(array, "base", None)
    return array if mode in ("r", "r+", "w+") and hasattr(mmap, "MADV_DONTNEED") else None


class Beside(Table):
    """A table with all columns of another one beside it, targets or weights, which are read whole: a fit holds them."""

    def __init__(self, table: Table, other: Table) -> None:
        self._table, self._other, self._width = table, other, len(table.names)
        self._check_rows(table.num_rows, other.num_rows)
        num_rows = other.num_rows if table.num_rows is None else table.num_rows
        super().__init__(table.label, [*table.names, *other.names], num_rows, is_named=table.is_named)
        self.target, self.target_is_1d = table.target, table.target_is_1d

    def _check_rows(self, here: int | None, there: int | None) -> None:
        if None not in (here, there) and here != there:
            raise DataError(
                f"{self._table.label} has {here} rows and {self._other.label} has {there}; equal numbers expected",
                hint="check how they were made",
            )

    def has_name(self, column: int) -> bool:
        is_here = column < self._width
        return self._table.has_name(column) if is_here else self._other.has_name(column - self._width)

    def is_text(self, column: int) -> bool:
        is_here = column < self._width
        return self._table.is_text(column) if is_here else self._other.is_text(column - self._width)

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        here = [k for k, column in enumerate(columns) if column < self._width]
        there = [k for k, column in enumerate(columns) if column >= self._width]
        has_labels = label_column is not None and label_column >= self._width
        label_there = label_column - self._width if label_column is not None and has_labels else None
        blocks = list(self._other.blocks([columns[k] - self._width for k in there], label_there))
        side = np.concatenate([values for values, _ in blocks])
        labels = [label for _, found in blocks for label in found or ()] if has_labels else None
        if not here and (has_labels or label_column is None):
            yield side, labels
            return
        start = 0
        for values, found in self._table.blocks([columns[k] for k in here], None if has_labels else label_column):
            stop = start + len(values)
            block = np.empty((len(values), len(columns)))
            block[:, here], beside = values, side[start:stop]
            block[: len(beside), there] = beside
            yield block[: len(beside)], labels[start:stop] if labels is not None else found and found[: len(beside)]
            start = stop
        self._check_rows(start, len(side))


def joined(x: Table, y: Table | None, weight: Table | None) -> Table:
    """X, y and weights, as far as there are any, as one table that knows which columns are which."""
    table = x
    if y is not None:
        table = Beside(x, y)
        table.target, table.target_is_1d = tuple(range(len(x.names), len(table.names))), y.is_1d
    if weight is not None:
        if len(weight.names) != 1:
            raise DataError(f"{weight.label} has {len(weight.names)} columns; one expected", hint="pass (rows,)")
        table = Beside(table, weight)
        table.weight = len(table.names) - 1
    return table


def was_changed(what: Any) -> DataError:
    """The error of a source that was not the same from the first look to the last."""
    return DataError(
        f"{what} was changed while it was read",
        hint="start again when it is complete; write files under another name and rename them",
    )


def unchanged(files: Iterable[Path]) -> Callable[[], None]:
    """A check, to be called when they were read, that files are as they are now.

    What was written a moment ago may be written once more, or on, without another time: then the bytes are compared.

    Raises
    ------
    DataError
        By the check: one was changed.
    """
    since = time.time() - FRESH_SECONDS
    states = {file: file_state(file, since) for file in files}

    def check() -> None:
        for file, state in states.items():
            if not file.exists() or file_state(file, since) != state:
                raise was_changed(file)

    return check


def is_visible(name: str) -> bool:
    """Whether a file counts, by its name or path inside a folder."""
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder and of its subfolders, in natural order (part.2 before part.10), without hidden ones.

    Raises
    ------
    DataError
        A subfolder is a link.
    """
    found = [path for path in folder.rglob("*") if is_visible(path.relative_to(folder).as_posix())]
    if linked := [path for path in found if path.is_symlink() and path.is_dir()]:
        raise DataError(f"{linked[0]} is a link to a folder", hint="move the folder there, or name it alone")
    return sorted((path for path in sorted(found) if not path.is_dir()), key=lambda path: _natural(str(path)))


def _natural(name: str) -> list[list[tuple[int, str]]]:
    parts = [re.split(r"(\d+)", part) for part in name.split("/")]
    return [[(int(text), "") if text.isdecimal() else (-1, text) for text in part if text] for part in parts]


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


def with_mask(values: Any) -> Any:
    """A list of masked arrays as one, other values as they are: asarray would uncover what is under the masks."""
    if isinstance(values, list | tuple) and any(isinstance(row, np.ma.MaskedArray) for row in values):
        with contextlib.suppress(ValueError):  # of several lengths, which the caller reports
            return np.ma.array([np.nan if row is np.ma.masked else row for row in values])
    return values


def to_floats(values: Any, label: str, first_row: int = 0) -> Floats:
    """``values`` as native float64.

    Raises
    ------
    DataError
        Anything but real numbers; the dtype is named, for objects also the row.
    """
    if labels := frame_labels(values):  # column by column: as a whole, dates beside floats would be numbers
        columns = [column for _, column in values.items()] if hasattr(values, "iloc") else values.columns
        columns = values.get_columns() if hasattr(values, "get_columns") else columns
        named = [(f"column {name!r} of {label}", np.asarray(item)) for name, item in zip(labels, columns, strict=True)]
        return np.column_stack([to_floats(item, name, first_row) for name, item in named])
    if isinstance(values, np.ma.MaskedArray):
        # a masked value is a missing one, whatever is under the mask
        hidden, there = np.ma.getmaskarray(values), np.asarray(values.data)
        if there.dtype.kind == "O":
            there = there.copy()
            there[hidden] = None
        return np.where(hidden, np.nan, to_floats(there, label, first_row))
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        with np.errstate(over="ignore"):  # a long double beyond float64 becomes inf, which the caller reports
            return array.astype(np.float64, copy=False)
    if array.dtype.kind != "O":
        raise no_numbers(label, array.dtype)
    out, width = np.empty(array.size), array.shape[1] if array.ndim == 2 else 1
    for i, value in enumerate(array.reshape(-1).tolist()):
        is_missing = value is None or type(value).__name__ == "NAType"
        if not is_missing and not isinstance(value, numbers.Real | decimal.Decimal | np.bool_):
            row, column = first_row + i // width, i % width
            found = f"object with {type(value).__name__} {str(value)[:40]!r} at row {row}, column {column}"
            raise no_numbers(label, found, row=row, column=column)
        try:
            out[i] = np.nan if is_missing else float(value)
        except OverflowError:  # of an integer
            out[i] = np.inf
    return out.reshape(array.shape)


def no_numbers(label: str, dtype: Any, **place: int) -> DataError:
    """The error of values that are no real numbers."""
    return DataError(
        f"{label} has dtype {dtype}; numbers expected",
        hint="convert it to numbers, or leave the column out with features=",
        dtype=str(dtype).partition(" with ")[0],
        **place,
    )


# --- fields of text ---------------------------------------------------------------------------------------------------

Header = bool | Literal["auto"]

# what pyarrow takes for a missing value, and marks that are as common
MISSING_MARKS = {"", "?", "-", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "1.#IND", "1.#QNAN"} | {
    *("-NaN", "-nan", "N/A", "NA", "NULL", "NaN", "n/a", "nan", "null")
}


def is_number(text: str, decimal: str = ".") -> bool:
    """Whether a field is a number, or says that it is none."""
    point = re.escape(decimal)
    pattern = rf"[+-]?(\d+{point}?\d*|{point}\d+)([eE][+-]?\d+)?|[+-]?(inf(inity)?|nan)"
    return re.fullmatch(pattern, text.strip(" \t"), re.IGNORECASE | re.ASCII) is not None


def is_missing(text: str) -> bool:
    """Whether a field is a mark of a missing value."""
    return text.strip(" \t") in MISSING_MARKS


# --- which column is which --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Column numbers of a table, resolved once.

    Parameters
    ----------
    features, targets
        In the order in which they are stored.
    weight
        None without weights.
    y_is_1d
        Whether the targets are one column without a second axis.
    """

    features: tuple[int, ...]
    targets: tuple[int, ...]
    weight: int | None
    y_is_1d: bool


class Fitted:
    """What is known of the columns of a fit: a model, or the data set it is made of.

    ``target_names`` are those of the targets, one by one; of classes ``label=class``. ``made_up`` says whether nobody
    gave the names of features, of targets.
    """

    feature_names: Sequence[str]
    target_names: Sequence[str]
    made_up: tuple[str, ...]
    classes: Sequence[Any] | None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the features, by which rows to predict, or the columns of k(Z, X), are matched; () for none."""
        return () if "feature_names" in self.made_up else tuple(self.feature_names)

    @property
    def named_targets(self) -> tuple[str, ...]:
        """Names of the columns that the targets were read from, as far as somebody gave them; () for none."""
        return () if "target_names" in self.made_up else target_columns(self.target_names, self.classes)

    @property
    def places(self) -> Sequence[Sequence[int]]:
        """Where features, targets and weights stood in the source; () where nobody knows."""
        raise NotImplementedError

    @property
    def num_features(self) -> int:
        """d."""
        raise NotImplementedError

    @property
    def num_targets(self) -> int:
        """t."""
        raise NotImplementedError


def resolve(
    table: Table,
    *,
    target: Column | Sequence[Column] | None,
    features: Sequence[Column] | None,
    weight: Column | None,
) -> Layout:
    """Turn names and numbers into a :class:`Layout`.

    ``target`` None means the table's own targets, if it has any. One name or number gives 1-D targets, a list 2-D ones.
    ``features`` None means all columns that are neither target nor weight.

    Raises
    ------
    ParameterError
        A column that does not exist (the nearest right name is offered), or one with two parts.
    DataError
        No features are left.
    """
    is_single = isinstance(target, str) or not isinstance(target, Sequence)
    wanted: Sequence[Any] = [target] if is_single else target  # type: ignore[assignment]
    targets, y_is_1d = table.target or (), table.target_is_1d
    if target is not None:
        targets = tuple(column_number(table, column, "target") for column in wanted)
        y_is_1d = table.target_is_1d if table.target is not None else is_single
        if not targets:
            raise ParameterError("target is an empty list", hint="leave it out if there is no target")
    if table.target not in (None, targets):
        names = ", ".join(table.names[j] for j in table.target or ())
        raise ParameterError(
            f"target {target!r} of {table.label}, which has targets of its own ({names})", hint="leave target out"
        )
    weights = [] if table.weight is None else [table.weight]
    if weight is not None:
        weights = [column_number(table, weight, "weight")]
        if table.weight not in (None, *weights):
            raise ParameterError(f"weight {weight!r} of {table.label}, which has weights of its own", hint="drop it")
    if isinstance(features, str) or not isinstance(features, Iterable | None):
        raise ParameterError(f"features is {features!r}; a list of names or numbers expected", hint="use a list")
    inputs = tuple(j for j in range(len(table.names)) if j not in (*targets, *weights))
    if features is not None:
        inputs = tuple(column_number(table, column, "features") for column in features)
    if not inputs:
        raise DataError(
            f"{table.label} has no feature columns left ({len(table.names)} in all)",
            hint="check target, weight, features and the delimiter",
        )
    for column, count in Counter([*inputs, *targets, *weights]).items():
        if count > 1:
            raise ParameterError(
                f"column {table.names[column]!r} is used {count} times among features, target and weight",
                hint="name every column once",
            )
    return Layout(features=inputs, targets=targets, weight=weights[0] if weights else None, y_is_1d=y_is_1d)


def column_number(table: Table, column: Any, role: str) -> int:
    """The number of a column that is named, or given by its number, as the ``role`` of the table.

    Raises
    ------
    ParameterError
        It does not exist, or may be either of two.
    """
    names, is_text = table.names, isinstance(column, str)
    if isinstance(column, bool) or not (is_text or isinstance(column, int | np.integer)):
        hint = "use a column name; arrays are given as y and sample_weight"
        raise ParameterError(f"{role} {reprlib.repr(column)} is neither a name nor a number", hint=hint)
    named = [j for j, name in enumerate(names) if name == str(column)]
    number = int(column) if is_place(column, names) else None
    placed = [j for j in range(len(names)) if number in (j, j - len(names))]
    if is_text and len(named) > 1:
        raise ParameterError(
            f"{role} {column!r}: {len(named)} columns of {table.label} have that name", hint="use column numbers"
        )
    found = [*dict.fromkeys(named + placed if len(named) == 1 else placed)]
    if len(found) > 1:
        raise ParameterError(
            f"{role} {number} may be column {placed[0]} of {table.label} ({names[placed[0]]!r}) or the one that is "
            f"called {str(number)!r}, column {named[0]}",
            hint=f"the text {str(number)!r} means the name; rename the columns to mean a number",
        )
    if not found and number is None:
        shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        raise ParameterError(
            f"{role} {column!r} is not a column of {table.label}, which has no column {column!r} among {shown}",
            hint=did_you_mean(column, names, "use one of its names, or a column number, and check the delimiter"),
        )
    if not found:
        raise ParameterError(
            f"{role} {number} is not a column of {table.label}; it has columns 0 to {len(names) - 1}",
            hint=f"columns count from 0 to {len(names) - 1}; -1 is the last",
        )
    return found[0]


def is_place(column: Any, names: Sequence[str]) -> bool:
    """Whether a column is given by its number, as such or as text that is no name."""
    return not isinstance(column, str) or (column not in names and re.fullmatch(r"-?\d+", column) is not None)


def target_columns(target_names: Sequence[str], classes: Sequence[Any] | None) -> tuple[str, ...]:
    """The columns of a table that targets are read from: of one-hot targets the one with the labels."""
    if classes is None or not target_names:
        return tuple(target_names)
    return (target_names[0].removesuffix(f"={classes[0]}"),)


def placed(places: Sequence[Sequence[int]], names: Sequence[str], num_roles: int) -> list[list[str]]:
    """The columns of a table that stand where those of another one stood; an empty list where there is no telling.

    Parameters
    ----------
    places
        Numbers of columns of the other table, see :class:`dkrr.Dataset`.
    names
        Of the columns of the table: as many as the other one had, or those of the roles alone, in the same order.
    num_roles
        2 for features and targets, 3 for weights, too.

    Raises
    ------
    DataError
        Only the columns of those roles are there, and they came in another order than in the other table.
    """
    places, whole = places[:num_roles], sorted(j for part in places for j in part)
    used = sorted(j for part in places for j in part)
    if len(names) == len(used):
        if used[-1:] != [len(used) - 1]:
            for part in places:
                check_in_order(part, f"a table of {len(names)} columns")
        return [[names[used.index(j)] for j in part] for part in places]
    # earlier releases did not record what was left aside: then there was nothing but in between
    is_known = whole == list(range(len(whole)))
    fits = len(names) == len(whole) if is_known else used and used[-1] < len(names)
    return [[names[j] for j in part] for part in places] if fits else []


def check_in_order(places: Sequence[int], label: str) -> None:
    """Refuse columns without names in common as they stand, where others were chosen in another order.

    Raises
    ------
    DataError
        The places are not in order.
    """
    if list(places) != sorted(places):
        raise DataError(
            f"{label} or the rows of the fit have no names of columns, and some were chosen in another order than they "
            "stood in",
            hint="give both names, or all columns of the file that was fitted, or choose all columns as in the fit",
        )


def check_places(fitted: Fitted, places: Sequence[Sequence[int]], label: Any, *, is_named: bool) -> None:
    """Refuse the columns of a data set, without names in common, that were chosen in another order than those of a fit.

    ``places`` says where those of the data set stood; () where nobody knows.

    Raises
    ------
    DataError
        Features or targets of one of the two are not in the order in which they stood, and the other's are not alike.
    """
    for here, there in zip(fitted.places[:2], places[:2], strict=False):
        if list(here) != list(there) and not (fitted.names and is_named):
            for part in (here, there):
                check_in_order(part, str(label))


def find_names(wanted: Sequence[str], names: Sequence[str], label: str, noun: str = "columns") -> tuple[int, ...]:
    """Where in ``names`` each of ``wanted`` is.

    Raises
    ------
    DataError
        Some are missing, or there twice.
    """
    places = {name: j for j, name in enumerate(names)}
    missing, known = [name for name in wanted if name not in places], set(wanted)
    if missing:
        others = [name for name in names if name not in known]
        near = did_you_mean(missing[0], others)
        raise DataError(
            f"{label} has no {noun} {_shown(missing)}, which the fit had; it has "
            + (f"{_shown(others)}, which the fit had not" if others else "no others"),
            hint=f"{near} Rename it" if near else "rename those that mean the same; their order is free",
        )
    unique_names([name for name in names if name in known], label, noun)
    return tuple(places[name] for name in wanted)


def frame_labels(values: Any) -> list[Any] | None:
    """What the columns of a frame of any library are called; None of what is no frame."""
    for attribute in ("column_names", "columns"):  # pyarrow's, everybody's
        if hasattr(type(values), attribute):
            return list(getattr(values, attribute))
    return None


def given_names(values: Any, label: str) -> list[str]:
    """What somebody called the columns of a frame or the values of a series, as text; [] of what has no names.

    The numbers 0, 1, ... that frames get by themselves are none.

    Raises
    ------
    DataError
        Some are the same.
    """
    if getattr(values, "ndim", 2) == 1 and hasattr(type(values), "to_frame"):
        labels = [] if values.name is None or not str(values.name) else [values.name]
    else:
        labels = frame_labels(values) or []
    names = unique_names(labels, label)
    return [] if _is_numbered(labels) else names


def matched_columns(frame: Any, names: Sequence[str], label: str, noun: str = "columns") -> Any:
    """The columns of a frame that are called ``names``, in that order; all where one side has no names.

    Raises
    ------
    DataError
        A name is missing; some are the same; or the columns of one side are numbered from 0, and those of the other
        have such numbers in another order: they may be names or places.
    """
    labels = frame_labels(frame)
    if labels is None:
        return frame
    found, is_numbered = unique_names(labels, label), _is_numbered(labels)
    if is_numbered or not names:
        refuse_shuffled_numbers(found, names, label, noun)
    if not names or (is_numbered and not set(found).issuperset(names)):
        return frame
    places = list(find_names(names, found, label, noun))
    return frame.iloc[:, places] if hasattr(type(frame), "iloc") else frame.select([labels[j] for j in places])


def refuse_shuffled_numbers(found: Sequence[str], fitted: Sequence[str], label: str, noun: str = "columns") -> None:
    """Refuse names that are the numbers from 0 where one side has no names, or such numbers by themselves.

    Raises
    ------
    DataError
        They come in another order than in the fit, and may be names or places.
    """
    numbers = [str(place) for place in range(len(found))]
    wanted = list(fitted) or numbers
    if set(found) == set(wanted) == set(numbers) and list(found) != wanted:
        raise DataError(
            f"{label} has {noun} {_shown(found)} and earlier rows had {_shown(wanted)}: names, or places?",
            hint="bring them into the order of the fit, with its labels, or give an array",
        )


def _is_numbered(labels: Sequence[Any]) -> bool:
    """Whether these are the numbers that a frame gets by itself."""
    return all(type(label).__name__.startswith("int") and label == place for place, label in enumerate(labels))


def unique_names(labels: Sequence[Any], label: str, noun: str = "columns") -> list[str]:
    """Labels of columns as names.

    Raises
    ------
    DataError
        Some are the same.
    """
    names = [str(name) for name in labels]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise DataError(f"{label} has {noun} of the same name: {_shown(repeated)}", hint="rename them")
    return names


def _shown(names: Sequence[Any]) -> str:
    return ", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _features(fitted: Fitted, names: Sequence[str], label: Any, *, is_named: bool) -> tuple[int, ...]:
    """Which of the columns ``names`` are the features of a fit: by name, or all where one side has no names."""
    if fitted.names and is_named:
        return find_names(fitted.names, names, str(label))
    if is_named:
        refuse_shuffled_numbers(names, (), str(label))
    if len(names) != fitted.num_features:
        raise DataError(
            f"{label} has {len(names)} features, the model was fitted with {fitted.num_features}",
            hint="give the same columns in the same order, or names on both sides",
        )
    return tuple(range(len(names)))


def feature_columns(fitted: Fitted, table: Table) -> list[int]:
    """The columns of a table that are the features of a fit.

    Raises
    ------
    DataError
        A name is missing; or, where one side has no names, another number of columns that are no targets or weights.
    """
    taken = {*(table.target or ()), table.weight}
    free = [column for column in range(len(table.names)) if column not in taken]
    check_places(fitted, table.places, table.label, is_named=table.is_named)
    found = _features(fitted, [table.names[j] for j in free], table.label, is_named=table.is_named)
    return [free[j] for j in found]


def ordered_like(fitted: Fitted, table: Table) -> dict[str, Any]:
    """Columns of a table with features and targets of a fit, by name, as ``ingest`` is told; {} where places decide.

    Raises
    ------
    DataError
        A name is missing, or the targets had none and other columns than they are left.
    """
    if not (fitted.names and table.is_named):
        return {}
    features = [table.names[j] for j in feature_columns(fitted, table)]
    if table.target is not None:
        return {"features": features, "target": None}
    if fitted.named_targets:
        find_names(fitted.named_targets, table.names, table.label)
        return {"features": features, "target": list(fitted.named_targets)}
    weight = None if table.weight is None else table.names[table.weight]
    return {"features": features, "target": left_over(fitted, table, [*features, weight])}


def left_over(fitted: Fitted, table: Table, others: Sequence[str | None]) -> list[str]:
    """The columns of a table besides ``others``, for the targets of a fit that had no names.

    Raises
    ------
    DataError
        They are not as many.
    """
    left = [name for name in table.names if name not in others]
    wanted = 1 if fitted.classes is not None else fitted.num_targets
    if len(left) != wanted:
        raise DataError(
            f"{table.label} has {len(left)} columns besides the features ({_shown(left)}); "
            f"{wanted} expected, for the targets of the fit have no names",
            hint="leave the others out of the file",
        )
    refuse_shuffled_numbers(left, (), table.label, "targets")
    return left


def match_features(fitted: Fitted, dataset: Dataset) -> tuple[int, ...] | None:
    """Columns of X that are the features of a fit, None where those are all in order.

    Raises
    ------
    DataError
        As for :func:`feature_columns`.
    """
    found = _features(fitted, dataset.feature_names, dataset.path, is_named=bool(dataset.names))
    return None if found == tuple(range(dataset.num_features)) else found


def match_targets(fitted: Fitted, dataset: Dataset) -> tuple[int, ...] | None:
    """Columns of y that are the targets of a fit, -1 for a class that no row has, None where those are all in order.

    Raises
    ------
    DataError
        A row has a class that the fit does not know, a name is missing, or there is another number of targets.
    """
    if fitted.classes is not None and dataset.classes is not None:
        known, there = list(fitted.classes), list(dataset.classes)
        unknown = [label for j, label in enumerate(there) if label not in known and dataset.y_mean[j] > 0]
        if unknown:
            raise DataError(
                f"{dataset.path} has rows of class {_shown(unknown)}; the model knows {_shown(known)}",
                hint="leave those rows out, or fit on rows of these classes, too",
            )
        found = tuple(there.index(label) if label in there else -1 for label in known)
    elif fitted.named_targets and dataset.named_targets:  # of classes on one side: their columns have names, too
        found = find_names(fitted.target_names, dataset.target_names, str(dataset.path), "targets")
    elif dataset.num_targets != fitted.num_targets:
        raise DataError(
            f"{dataset.path} has {dataset.num_targets} targets, the model {fitted.num_targets}",
            hint="name the columns that the model predicts as targets",
        )
    else:
        if dataset.named_targets:
            refuse_shuffled_numbers(dataset.target_names, (), str(dataset.path), "targets")
        return None
    return None if found == tuple(range(dataset.num_targets)) else found


def kept_columns(table: Table, names: Sequence[str]) -> tuple[int, ...]:
    """Columns of a table, names or numbers, that are to be copied beside predictions.

    Raises
    ------
    DataError
        There is no such column, or the table cannot hand out columns as they stand.
    """
    try:
        columns = tuple(dict.fromkeys(column_number(table, name, "keep") for name in names))
    except ParameterError as exc:
        raise DataError(exc.message, hint=exc.hint) from None
    for column in columns:
        table.label_type(column)
    return columns
