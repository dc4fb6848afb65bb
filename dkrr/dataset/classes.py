"""Class labels and their one-hot columns."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dkrr.dataset.rows import Floats
from dkrr.dataset.sources.table import Table
from dkrr.dataset.sources.text import MISSING_MARKS
from dkrr.errors import DataError

__all__ = ["OneHot"]

MAX_CLASSES = 1000


class OneHot:
    """Encodes labels: column j of a row is 1 where the label is ``classes[j]``, else 0.

    Labels that are text are integers where all of them read as integers, numbers where all read as numbers, else text;
    those with leading zeros are codes, and text. A whole float is an integer.
    """

    def __init__(self, classes: Sequence[Any]) -> None:
        self.classes = tuple(classes)
        self._index = {label: j for j, label in enumerate(self.classes)}
        self._has_numbers = not any(isinstance(label, str) for label in self.classes)

    @classmethod
    def of(cls, table: Table, column: int, present: Sequence[int] | None = None) -> OneHot:
        """The classes that occur in a column, sorted; reads that column once.

        Rows without a class are passed over where ``present`` is given, and those where one of its columns is NaN.

        Raises
        ------
        DataError
            A label is missing, text and numbers are mixed, there are more than 1,000 classes, or none.
        """
        found: dict[Any, int] = {}  # with the row where a label is first
        row = 0
        for values, labels in table.blocks(present or [], column):
            if labels is None:
                raise ValueError("the table gave no labels")
            is_whole = np.asarray(~np.isnan(values).any(axis=1))
            for offset, label in enumerate(labels):
                if is_whole[offset] and label not in found and not (present is not None and is_missing(label)):
                    _check_label(table, column, row + offset, label)
                    found[label] = row + offset
            row += len(labels)
            if len(found) > MAX_CLASSES:
                raise DataError(
                    f"column {table.names[column]!r} of {table.label} has over {MAX_CLASSES:,} different values; "
                    "classes expected",
                    hint="leave one_hot out if the target is a quantity",
                )
        rest = set(found) - MISSING_MARKS
        if len(rest) < len(found) and all(isinstance(label, str) and _reads_as(float, label) for label in rest):
            # "NA" is Namibia among countries, and no class among numbers
            for label in set(found) & MISSING_MARKS:
                if present is None:
                    raise _no_class(table, column, found[label])
                del found[label]
        if row and not found:
            raise DataError(
                f"all {row:,} rows of {table.label} have missing values, the first in {table.locate(0) or 'row 0'}",
                hint=f"column {table.names[column]!r} has no class where all features are; check the delimiter",
            )
        return cls(_sorted_classes(set(found), f"column {table.names[column]!r} of {table.label}"))

    def is_missing(self, label: Any) -> bool:
        """Whether a label says that there is none."""
        return is_missing(label) or (self._has_numbers and isinstance(label, str) and label in MISSING_MARKS)

    def encode(self, labels: Sequence[Any], table: Table, column: int, first_row: int) -> Floats:
        """(m, number of classes) float64 for ``labels`` from global row ``first_row`` on.

        Raises
        ------
        DataError
            A label that is missing or none of the classes, with its row.
        """
        out = np.zeros((len(labels), len(self.classes)))
        for i, label in enumerate(labels):
            j = self._index.get(label)
            if j is None:
                _check_label(table, column, first_row + i, label)
                j = self._index.get(self._read(label))
            if j is None:
                shown = ", ".join(map(repr, self.classes[:10])) + (", ..." if len(self.classes) > 10 else "")
                near = difflib.get_close_matches(str(label), list(map(str, self.classes)), n=1)
                raise DataError(
                    f"row {first_row + i} of {table.label} has class {label!r}; the data set has {shown}",
                    hint=f"did you mean {near[0]!r}?" if near else "ingest all rows anew to add a class",
                    row=first_row + i,
                )
            out[i, j] = 1.0
        return out

    def _read(self, label: Any) -> Any:
        if self._has_numbers and isinstance(label, str):
            # as an integer where it is one: above 2^53 two integers may be one float
            return next((read(label) for read in (int, float) if _reads_as(read, label)), None)
        return label


def is_missing(label: Any) -> bool:
    """Whether any class label of this kind says that there is none."""
    is_nan = isinstance(label, float) and math.isnan(label)
    return label is None or is_nan or type(label).__name__ in ("NAType", "NaTType") or label in ("", "?")


def _no_class(table: Table, column: int, row: int) -> DataError:
    where = f", {place}" if (place := table.locate(row)) else ""
    return DataError(
        f"row {row} of {table.label}{where}, has no class in column {table.names[column]!r}",
        hint="remove the row (--missing drop or missing='drop'), or name its class",
        row=row,
        column=column,
    )


def _check_label(table: Table, column: int, row: int, label: Any) -> None:
    if is_missing(label):
        raise _no_class(table, column, row)
    if not isinstance(label, str | bool | int | float | np.integer | np.floating | np.bool_):
        raise DataError(
            f"row {row} of {table.label} has a {type(label).__name__} for a class; text or a number expected",
            hint="convert the column",
        )


def _sorted_classes(found: set[Any], what: str) -> list[Any]:
    texts = [label for label in found if isinstance(label, str)]
    if texts and len(texts) < len(found):
        raise DataError(f"{what} mixes text ({texts[0]!r}) and numbers", hint="convert it to one of them")
    if not texts:
        plain = [label.item() if isinstance(label, np.generic) else label for label in found]
        return sorted({int(v) if isinstance(v, float) and v.is_integer() else v for v in plain})
    for read in (int, float):
        if all(_reads_as(read, text) for text in texts):
            numbers: dict[Any, str] = {}
            for text in sorted(texts):
                if numbers.setdefault(read(text), text) != text:
                    raise DataError(
                        f"{what} has {numbers[read(text)]!r} and {text!r}, which are one number",
                        hint="write it in one way, or codes with a letter",
                    )
            return sorted(numbers)
    return sorted(texts)


# a whole part without leading zeros
_PATTERNS = {int: r"[+-]?(0|[1-9]\d*)", float: r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?"}


def _reads_as(read: type[int | float], text: str) -> bool:
    return re.fullmatch(_PATTERNS[read], text) is not None
