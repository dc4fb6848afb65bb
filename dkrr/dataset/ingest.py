"""From any source of rows to a data set on disk, in one streamed pass.

Every value is looked at before it is stored, memory stays bounded by a few blocks of 16 MiB, and what fails leaves
nothing behind. Cost: one read of the source (two of the target column for ``one_hot``) and one write; SHA-256 and
column statistics are gathered on the way, at about the rate of a disk.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.dataset import Dataset, fields_of, open_dataset
from dkrr.dataset.rows import Floats
from dkrr.dataset.sources import open_table
from dkrr.dataset.table import (
    MISSING_MARKS,
    Column,
    Header,
    Layout,
    Table,
    check_in_order,
    check_places,
    is_place,
    left_over,
    placed,
    refuse_shuffled_numbers,
    resolve,
    target_columns,
)
from dkrr.dataset.writer import claimed, is_finished, writing
from dkrr.errors import DataError, ParameterError, StoreError, StoreMismatchError, check_whole, did_you_mean
from dkrr.store.files import check_place, overlaps

Missing = Literal["error", "drop"]

MAX_CLASSES = 1000

logger = logging.getLogger("dkrr.dataset")


def ingest(
    source: Any,
    dest: Any,
    *,
    target: Column | Sequence[Column] | None = None,
    features: Sequence[Column] | None = None,
    weight: Column | None = None,
    header: Header = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
    missing: Missing = "error",
    one_hot: bool = False,
    classes: Sequence[Any] | None = None,
    append: bool = False,
    label: str | None = None,
    like: Dataset | None = None,
    y: Any = None,
    sample_weight: Any = None,
    rows_per_chunk: int | None = None,
    wait: bool = False,
) -> Dataset:
    """Write rows from any source into a data set.

    Parameters
    ----------
    source
        A path or s3:// address (.csv, .csv.gz, .parquet file or folder, .npy, Zarr format 3), ``sklearn:NAME``,
        ``generate:NAME?n=...``, a NumPy array or memory map, a pandas, dask or Zarr object, or a :class:`Dataset`. Of a
        folder of Parquet all files count, also those of subfolders, but none whose name begins
        with a dot or an underscore; a subfolder ``year=2019`` makes a column ``year``. Numbers become float64, so
        integers beyond 2^53 are rounded.
    dest
        Folder or URL of the data set.
    target
        Name or number of the target column, or a list of them; negative numbers count from the end. One column given
        without a list makes 1-D targets. None: the targets that the source itself has, if any.
    features
        Names or numbers; None means all columns that are neither target nor weight.
    weight
        Name or number of the column of sample weights.
    header
        Whether a CSV file begins with names; "auto" looks, and asks where the first line may be names or values.
    delimiter
        Of a CSV file; None means a comma, or a semicolon where ``decimal`` is a comma.
    decimal
        What stands before the fraction of a number in a CSV file, "." or ",".
    missing
        What to do with a row that lacks a value (NaN, null, or an empty field, NA, ?, -, nan or null in a text file) in
        one of the columns used: "error", or "drop" to leave it out. How many were dropped is logged, and which they
        were is kept in the generation: row numbers, and so masks and what is held out, count them.
    one_hot
        The target holds classes, numbers or text; it becomes one column of 0 and 1 a class.
    classes
        With ``one_hot``: the classes in their order, those of a fit; another label is an error. None: what occurs. In
        a text file "-" is a class among others that are text; NA, nan and null are classes only where they are given
        here. White space around such a label counts only where a class here has it.
    append
        Add the rows to the data set at ``dest`` as a generation of their own, all or none; they must match it. Without
        ``target``, ``features`` and ``weight`` its own column names are looked up in the source.
    label
        What the generation is called. An append is done once under a label: the same rows again change nothing, while
        the generation is there.
    like
        Write what an append to this data set would add to one of its own, to look at it first; ``like`` is not changed.
    y : (n,) or (n, t), optional
        Targets given apart from the source.
    sample_weight : (n,), optional
        Weights given apart from the source.
    rows_per_chunk
        None chooses chunks of at most 4 MiB.
    wait
        Wait until another process that writes to ``dest`` has ended, instead of an error.

    Returns
    -------
    dataset
        A finished data set that is at ``dest`` already is returned when it holds the same rows.

    Raises
    ------
    DataError
        Values that are not finite numbers, with file, line, row and column; or shapes that do not fit.
    ParameterError
        Columns that do not exist.
    StoreError, StoreMismatchError
        ``source`` cannot be read, or ``dest`` holds something else.
    StorageFullError
        The disk is too small.
    LockedError
        Another process writes to ``dest``.
    """
    check_place("dest", dest)
    if rows_per_chunk is not None:
        check_whole("rows_per_chunk", rows_per_chunk, hint="leave it out")
    if label is not None and not (isinstance(label, str) and label):
        raise ParameterError(f"label is {label!r}; a text expected", hint="leave it out, or name the append")
    if append and like is not None:
        raise ParameterError(
            "append and like are given, which is an append to one of them", hint="leave one of them out"
        )
    if missing not in ("error", "drop"):
        raise ParameterError(f"missing is {missing!r}; 'error' or 'drop' expected", hint="leave it out for an error")
    place = source.path if isinstance(source, Dataset) else source
    if all(isinstance(item, str | os.PathLike) for item in (place, dest)) and overlaps(place, dest):
        raise StoreError(f"{dest} and {place} are, or hold, the same files", hint="choose another destination")
    like = open_dataset(dest) if append and is_finished(dest) else like
    named = [target, features, weight, None if like is None else like.names]
    text: dict[str, Any] = {"header": header, "delimiter": delimiter, "decimal": decimal, "named": named}
    table = open_table(source, **text, y=y, sample_weight=sample_weight)
    with claimed(dest, wait=wait, to_change=append) as existing:
        base = existing if append else None
        like = base or like
        columns: dict[str, Any] = {"target": target, "features": features, "weight": weight}
        if like is not None:
            columns = _as_before(like, table, **columns)
            one_hot, classes = one_hot or (like.classes is not None and table.classes is None), like.classes
        layout = resolve(table, **columns)
        labels = _Labels(table, layout, classes, drop=missing == "drop") if one_hot else None
        fields = _fields(table, layout, labels)
        if like is not None:
            _check_same_columns(like, table, layout, fields)
            fields = fields_of(like)
        rows = _Rows(table, layout, labels, drop=missing == "drop")
        if existing is not None and base is None:
            there = fields_of(existing)
            differing = [
                f"{name}: {there[name]!r} there, {value!r} wanted"
                for name, value in fields.items()
                if name not in ("made_up", "places") and there[name] != value
            ]
            if differing := differing or _differing(existing, 0, existing.num_rows, existing.kept, rows):
                raise StoreMismatchError(
                    f"{existing.path} exists with other rows ({'; '.join(differing)})",
                    hint="add to it with append=True, remove it, or choose another destination",
                    fields=differing,
                )
            return existing
        for found in base.generations if base is not None and label is not None else ():
            if base is not None and found.label == label:
                if _differing(base, found.start, found.n, found.kept, rows):
                    raise StoreMismatchError(
                        f"generation {found.number} of {base.path} is called {label!r} and holds {found.num_rows:,} "
                        f"other rows than {table.label}",
                        hint="give the append another label, or drop that generation first",
                        fields=["label"],
                    )
                return base
        options: dict[str, Any] = {"rows_per_chunk": rows_per_chunk, "num_rows": table.num_rows, "before": base}
        with writing(dest, **options, origin=base and base.origin, **fields) as writer:
            for block in rows:
                writer.add(**block)
            return writer.commit(label, rows.dropped)


def append(source: Any, dest: Any, **options: Any) -> Dataset:
    """``ingest(source, dest, append=True)``: add rows to a data set as one generation, all or none."""
    return ingest(source, dest, append=True, **options)


class _Rows:
    """The rows of a table as blocks of X, y and weights, every value looked at; memory for one block.

    With ``drop`` rows with missing values are left out; ``dropped`` then says, of all rows that the source was read
    from, which are not there.

    Raises
    ------
    DataError
        At the end, with ``row``, ``column`` and ``count``: features or targets that are NaN or infinity. At once, with
        ``row``: a weight that is none, or a label that is no class. No rows, or none that is kept or has a weight.
    """

    def __init__(self, table: Table, layout: Layout, labels: _Labels | None, *, drop: bool) -> None:
        self.table, self.layout, self.labels, self.drop = table, layout, labels, drop
        self.dropped: NDArray[np.bool_] | None = None

    def __iter__(self) -> Iterator[dict[str, Floats]]:
        table, layout, labels = self.table, self.layout, self.labels
        targets, label_column = (layout.targets, None) if labels is None else ((), layout.targets[0])
        columns = [*layout.features, *targets, *(() if layout.weight is None else (layout.weight,))]
        d, end = len(layout.features), len(layout.features) + len(targets)
        row, count, is_weighed, first_bad = 0, 0, layout.weight is None, (0, 0, 0.0)
        dropped: list[NDArray[np.bool_]] = []
        for values, found in table.blocks(columns, label_column):
            numbers = np.arange(row, row + len(values))
            row += len(values)
            gone: NDArray[np.bool_] = np.zeros(len(values), dtype=bool)
            if self.drop:
                gone |= np.isnan(values).any(axis=1)
                gone |= np.array([labels.is_missing(label) for label in found or ()], dtype=bool) if labels else False
            dropped.append(gone)
            if gone.any():
                values, numbers, found = values[~gone], numbers[~gone], list(itertools.compress(found or (), ~gone))
            finite = np.isfinite(values[:, :end])
            bad: Any = () if finite.all() else np.argwhere(~finite)
            if len(bad) and not count:
                i, k = bad[0].tolist()
                first_bad = int(numbers[i]), columns[k], float(values[i, k])
            count += len(bad)
            if count:
                continue  # the rest is only counted
            block = {"X": values[:, :d]}
            if layout.targets:
                block["y"] = values[:, d:end] if labels is None else labels.encode(found or (), numbers)
            if layout.weight is not None:
                block["weight"] = values[:, end:]
                self._check_weights(block["weight"], numbers)
                is_weighed = is_weighed or bool(block["weight"].any())
            yield block
        if count:
            number, column, value = first_bad
            noun = "1 value that is" if count == 1 else f"{count:,} values that are"
            drop = (
                " (--missing drop or missing='drop' leaves them out when they are ingested)" if np.isnan(value) else ""
            )
            raise DataError(
                f"{table.label} has {noun} NaN or infinity; the first is {value} at row {number}, "
                f"column {column} ({table.names[column]!r}){_place(table, number)}",
                hint=f"remove these rows{drop}, or fill the values in; rows and columns count from 0",
                row=number,
                column=column,
                count=count,
            )
        if row == 0:
            raise DataError(f"{table.label} has no rows", hint="check how it was made")
        self._finish(np.concatenate(dropped))
        if not is_weighed:
            raise DataError(
                f"all weights of {table.label} are zero (column {table.names[layout.weight or 0]!r})",
                hint="give some row a weight",
            )

    def _check_weights(self, weights: Floats, numbers: NDArray[np.intp]) -> None:
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            number, name = int(numbers[bad[0]]), self.table.names[self.layout.weight or 0]
            raise DataError(
                f"weight {float(weights[bad[0], 0])} at row {number} of {self.table.label} (column {name!r})"
                f"{_place(self.table, number)}; finite numbers >= 0 expected",
                hint="a weight of 0 leaves a row out",
                row=number,
            )

    def _finish(self, gone: NDArray[np.bool_]) -> None:
        table = self.table
        if gone.all():
            raise _nothing_left(table, len(gone), "leave the column out with features=, or check the delimiter")
        if gone.any():
            first = int(np.argmax(gone))
            where = f"{table.label} have missing values and are left out, the first in "
            where += table.locate(first) or f"row {first}"
            logger.warning("%s of %s rows of %s", f"{np.count_nonzero(gone):,}", f"{len(gone):,}", where)
        self.dropped = gone if table.dropped is None else table.dropped.copy()
        if table.dropped is not None:
            self.dropped[~table.dropped] = gone


def _place(table: Table, row: int) -> str:
    """What follows the number of a row, where there is a better word for it."""
    where = table.locate(row)
    return f", {where}" if where else ""


def _nothing_left(table: Table, num_rows: int, hint: str) -> DataError:
    """The error of rows that all have missing values."""
    where = table.locate(0) or "row 0"
    return DataError(f"all {num_rows:,} rows of {table.label} have missing values, the first in {where}", hint=hint)


class _Labels:
    """Classes and their one-hot columns: column j of a row is 1 where its label is ``classes[j]``, else 0.

    Labels that are text are integers where all of them read as integers, numbers where all read as numbers, else text;
    those with leading zeros are codes, and text. A whole float is an integer. True of a Parquet file is the class that
    a text file writes ``true``, ``True`` or ``TRUE``. Without ``classes`` they are those that occur, sorted, which
    reads the column once. White space around a field of a text file belongs to its label only where a class has it.

    Raises
    ------
    DataError
        A label is missing, text and numbers are mixed, two labels differ by white space alone, there are more than
        1,000 classes, or none.
    """

    def __init__(self, table: Table, layout: Layout, classes: Sequence[Any] | None, *, drop: bool) -> None:
        if len(layout.targets) != 1:
            raise ParameterError(
                f"one_hot with {len(layout.targets)} target columns; one column of classes expected", hint="set target"
            )
        self._table, self._column = table, layout.targets[0]
        self._what = f"column {table.names[self._column]!r} of {table.label}"
        self._is_text = table.is_text(self._column)
        if classes is None:
            used = [*layout.features, *(() if layout.weight is None else (layout.weight,))]
            classes = self._sorted(self._occurring(used if drop else None))
        self.classes = tuple(classes)
        self._index = {label: j for j, label in enumerate(self.classes)}
        for forms in _BOOLEANS:
            same = [j for j, label in enumerate(self.classes) if isinstance(label, bool | str) and label in forms]
            if len(same) == 1:
                self._index = dict.fromkeys(forms, same[0]) | self._index
        self._has_numbers = not any(isinstance(label, str) for label in self.classes)

    def is_missing(self, label: Any) -> bool:
        """Whether a label says that there is none."""
        is_mark = self._has_numbers and isinstance(label, str) and self._field(label) in MISSING_MARKS
        return (is_mark or self._lacks(label)) and self._class_of(label) is None

    def _field(self, label: Any) -> Any:
        """A label without the white space around it, where that may be none of its own."""
        return label.strip() if self._is_text and isinstance(label, str) else label

    def _lacks(self, label: Any) -> bool:
        """Whether a label is missing, unless a class is called so: NA may be Namibia, and - is a class among others."""
        field = self._field(label)
        return _is_missing(field) or (self._is_text and field != "-" and field in MISSING_MARKS)

    def _class_of(self, label: Any) -> int | None:
        """The number of the class with this label."""
        names = (label, self._field(label))
        found = (self._index.get(_as_number(name) if self._has_numbers else name) for name in names)
        return next((j for j in found if j is not None), None)

    def encode(self, labels: Sequence[Any], numbers: NDArray[np.intp]) -> Floats:
        """(m, number of classes) float64 for the labels of rows ``numbers``.

        Raises
        ------
        DataError
            A label that is missing or none of the classes, with its row.
        """
        out = np.zeros((len(labels), len(self.classes)))
        for i, label in enumerate(labels):
            j = self._class_of(label)
            if j is None:
                row, table = int(numbers[i]), self._table
                if self._lacks(label):
                    raise self._no_class(row)
                shown = ", ".join(map(repr, self.classes[:10])) + (", ..." if len(self.classes) > 10 else "")
                raise DataError(
                    f"row {row} of {table.label} has class {label!r}; the data set has {shown}",
                    hint=did_you_mean(str(label), map(str, self.classes), "ingest all rows anew to add a class"),
                    row=row,
                )
            out[i, j] = 1.0
        return out

    def _occurring(self, used: Sequence[int] | None) -> set[Any]:
        """The labels, of rows where the columns ``used`` have values, if any are given: others may lack a label."""
        found: dict[Any, int] = {}  # with the row where a label is first
        written: dict[Any, set[Any]] = {}
        row = 0
        for values, labels in self._table.blocks(used or [], self._column):
            is_whole: NDArray[np.bool_] = np.asarray(~np.isnan(values).any(axis=1))
            for number, label in enumerate(labels or (), row):
                is_there, field = not self._lacks(label), self._field(label)
                if is_whole[number - row] and (is_there or used is None):
                    found.setdefault(field if is_there else None, number)
                    written.setdefault(field, {label}).add(label)
            row += len(values)
            if len(found) > MAX_CLASSES:
                raise DataError(
                    f"{self._what} has over {MAX_CLASSES:,} different values; classes expected",
                    hint="leave one_hot out if the target is a quantity",
                )
        # "-" may be a class among text, "NA" of a table other than text, and no class among numbers
        rest = set(found) - {None, *MISSING_MARKS}
        if any(isinstance(_as_number(label), str) for label in rest):
            rest = set(found) - {None}
            if same := [sorted(written[label]) for label in rest if len(written[label]) > 1]:
                raise DataError(
                    f"{self._what} has {' and '.join(map(repr, same[0][:2]))}, which differ by white space alone",
                    hint="write the class in one way",
                )
        if used is None and len(rest) < len(found):
            raise self._no_class(min(found[label] for label in set(found) - rest))
        if row and not rest:
            hint = f"{self._what} has no class where all features are; check the delimiter"
            raise _nothing_left(self._table, row, hint)
        return rest

    def _sorted(self, found: set[Any]) -> list[Any]:
        kinds = {
            "text" if isinstance(label, str) else "numbers" if isinstance(label, _NUMBERS) else type(label).__name__
            for label in found
        }
        if len(kinds) > 1 or not kinds <= {"text", "numbers"}:
            kind = " and ".join(sorted(kinds))
            raise DataError(f"{self._what} holds {kind}; text or numbers expected", hint="convert it to one of them")
        numbers = {label: _as_number(label) for label in sorted(found)}
        if any(isinstance(number, str) for number in numbers.values()):
            return list(numbers)
        counts = Counter(numbers.values())
        if same := [label for label, number in numbers.items() if counts[number] > 1]:
            raise DataError(
                f"{self._what} has {' and '.join(map(repr, same[:2]))}, which are one number",
                hint="write it in one way, or codes with a letter",
            )
        return sorted(numbers.values())

    def _no_class(self, row: int) -> DataError:
        table, column = self._table, self._column
        return DataError(
            f"row {row} of {table.label}{_place(table, row)}, has no class in column {table.names[column]!r}",
            hint="remove the row (--missing drop or missing='drop'), or name its class",
            row=row,
            column=column,
        )


_BOOLEANS = ((False, "False", "false", "FALSE"), (True, "True", "true", "TRUE"))
_NUMBERS = bool | int | float | np.integer | np.floating | np.bool_


def _is_missing(label: Any) -> bool:
    is_nan = isinstance(label, float) and math.isnan(label)
    return label is None or is_nan or type(label).__name__ in ("NAType", "NaTType") or label in ("", "?")


def _as_number(label: Any) -> Any:
    """A number as Python has it, an integer where it is whole; text without leading zeros that is one, too."""
    if isinstance(label, str) and re.fullmatch(r"[+-]?(0|[1-9]\d*)", label):
        return int(label)  # above 2^53 two integers may be one float
    if isinstance(label, str) and re.fullmatch(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?", label):
        label = float(label)
    label = label.item() if isinstance(label, np.generic) else label
    return int(label) if isinstance(label, float) and label.is_integer() else label


def _fields(table: Table, layout: Layout, labels: _Labels | None) -> dict[str, Any]:
    """What a data set keeps besides its rows."""
    names = tuple(table.names[j] for j in layout.targets)
    made_up = [] if table.is_named else ["feature_names"]
    if not all(table.has_name(j) for j in layout.targets):
        made_up.append("target_names")
    return {
        "made_up": tuple(made_up),
        "places": _places(table, layout),
        "feature_names": tuple(table.names[j] for j in layout.features),
        "target_names": names if labels is None else tuple(f"{names[0]}={label}" for label in labels.classes),
        "weight_name": None if layout.weight is None else table.names[layout.weight],
        "classes": table.classes if labels is None else labels.classes,
        "y_is_1d": layout.y_is_1d and labels is None,
    }


def _places(table: Table, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Where the columns of each role, and of none, stood in the first source: of a data set where that one's stood."""
    parts = (layout.features, layout.targets, () if layout.weight is None else (layout.weight,))
    features, targets, weights, *rest = table.places or ((), (), ())
    first = [*features, *(targets * len(table.target or ()) if table.classes else targets), *weights]
    if len(first) != len(table.names):
        first, rest = [*range(len(table.names))], [()]
    found = tuple(tuple(dict.fromkeys(first[j] for j in part)) for part in parts)
    left = {*first, *(j for part in rest for j in part)}.difference(*found)
    return (*found, tuple(sorted(left))) if rest else found


def _as_before(base: Dataset, table: Table, **given: Any) -> dict[str, Any]:
    """Columns of an append that are not given by name: those of the data set, found by name.

    Where one side has none, a name that was made up for it says no more than a place. Then columns stand where they
    stood, unless some are given.
    """
    targets: Any = list(target_columns(base.target_names, base.classes))
    features, weight, by_place = list(base.feature_names), base.weight_name, not (base.names and table.is_named)
    if by_place:
        is_asked = table.target is None and all(columns is None for columns in given.values())
        check_places(base, table.places, table.label, is_named=table.is_named)
        if table.is_named and not base.names:
            refuse_shuffled_numbers(table.names, (), table.label)
        if given["features"] is None and not (is_asked or table.places) and base.places:
            check_in_order(base.places[0], table.label)
        features, targets, weights = (placed(base.places, table.names, 3) if is_asked else None) or ([], [], [])
        weight = weights[0] if weights else None
    elif not base.named_targets and base.y is not None and table.target is None and given["target"] is None:
        targets = left_over(base, table, [*features, weight])
    own = {
        "target": (targets[0] if base.y_is_1d and targets else targets, table.target),
        "features": (features, None),
        "weight": (weight, table.weight),
    }
    for role, (wanted, declared) in own.items():
        columns = given[role] if isinstance(given[role], list | tuple) else [given[role]]
        for column in columns if base.names and not table.is_named else ():
            is_there = column in table.names and table.has_name(table.names.index(column))
            if column is not None and not (is_place(column, base.names) or is_there):
                raise ParameterError(
                    f"{role} {column!r} is a name, and {table.label} has none", hint="give numbers of columns, or names"
                )
        # numbers are those of another file, whose columns may stand elsewhere
        are_numbers = all(is_place(column, table.names) for column in columns)
        is_free = given[role] is None or (are_numbers and not by_place)
        names = wanted if isinstance(wanted, list) else [wanted]
        if is_free and declared is None and wanted and set(table.names).issuperset(names):
            given[role] = wanted
    return given


def _check_same_columns(base: Dataset, table: Table, layout: Layout, fields: dict[str, Any]) -> None:
    weights = () if layout.weight is None else (layout.weight,)
    differing = []
    for name, numbers, is_named in (
        ("feature_names", layout.features, bool(base.names)),
        ("target_names", layout.targets, bool(base.named_targets)),
        ("weight_name", weights, bool(base.names)),
    ):
        both = (getattr(base, name), fields[name])
        old, new = ((value,) if isinstance(value, str) else value or () for value in both)
        if not is_named and all(table.has_name(j) for j in numbers):
            refuse_shuffled_numbers(new, (), table.label, name.replace("_names", "s"))
        # where one side has no names of its own, only the number of columns can be compared
        if len(old) != len(new) or (old != new and is_named and all(table.has_name(j) for j in numbers)):
            old_text, new_text = (f"{len(names)} ({', '.join(names[:8])})" for names in (old, new))
            differing.append(f"{name.partition('_')[0]}s: {old_text} there, {new_text} given")
    old_classes, new_classes = (list(classes or ()) for classes in (base.classes, fields["classes"]))
    if old_classes != new_classes:
        differing.append(f"classes: {old_classes or 'none'} there, {new_classes or 'none'} given")
    if differing:
        raise DataError(
            f"{table.label} does not fit {base.path} ({'; '.join(differing)})",
            hint="append the same columns, chosen by target, features and weight; rename those that mean the same",
        )


def _differing(dataset: Dataset, start: int, stop: int, kept: NDArray[np.bool_], rows: _Rows) -> list[str]:
    """In what a source differs from rows ``start`` to ``stop`` of a data set; reads both, writes nothing.

    ``kept`` says which of all rows these are: a mask counts those that were left out, too.
    """
    position, differing = start, list[str]()
    for block in rows:
        end = position + len(block["X"])
        if end <= stop and not differing:
            there = dataset.read_parts(position, end)
            differing = [f"{name}: other values" for name in there if not np.array_equal(there[name], block[name])]
        position = end
    if position != stop:
        return [f"rows: {stop - start} there, {position - start} wanted"]
    is_same = np.all(kept) if rows.dropped is None else np.array_equal(rows.dropped, ~kept)
    return differing or ([] if is_same else ["missing values: in other rows"])
