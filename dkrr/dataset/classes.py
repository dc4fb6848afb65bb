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
from dkrr.errors import DataError

__all__ = ["OneHot"]

MAX_CLASSES = 1000


class OneHot:
    """Encodes labels: column j of a row is 1 where the label is ``classes[j]``, else 0.

    Labels from text files are integers where all of them read as integers, numbers where all read as numbers, else
    text. A whole float is an integer.
    """

    def __init__(self, classes: Sequence[Any]) -> None:
        self.classes = tuple(classes)
        self._index = {label: j for j, label in enumerate(self.classes)}
        self._has_numbers = not any(isinstance(label, str) for label in self.classes)

    @classmethod
    def of(cls, table: Table, column: int) -> OneHot:
        """The classes that occur in a column, sorted; reads that column once.

        Raises
        ------
        DataError
            A label is missing, text and numbers are mixed, or there are more than 1,000 classes.
        """
        found: set[Any] = set()
        row = 0
        for _, labels in table.blocks([], column):
            if labels is None:
                raise ValueError("the table gave no labels")
            for offset, label in enumerate(labels):
                if label not in found:
                    _check_label(table, column, row + offset, label)
                    found.add(label)
            row += len(labels)
            if len(found) > MAX_CLASSES:
                raise DataError(
                    f"column {table.names[column]!r} of {table.label} has over {MAX_CLASSES:,} different values; "
                    "classes expected",
                    hint="leave one_hot out if the target is a quantity",
                )
        return cls(_sorted_classes(found, f"column {table.names[column]!r} of {table.label}"))

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
            try:
                return float(label)
            except ValueError:
                return None
        return label


def _check_label(table: Table, column: int, row: int, label: Any) -> None:
    is_nan = isinstance(label, float) and math.isnan(label)
    if label is None or is_nan or type(label).__name__ in ("NAType", "NaTType") or label == "":
        where = f", {place}" if (place := table.locate(row)) else ""
        raise DataError(
            f"row {row} of {table.label}{where}, has no class in column {table.names[column]!r}",
            hint="remove the row, or name its class",
            row=row,
            column=column,
        )
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
    for read, pattern in ((int, r"[+-]?\d+"), (float, r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")):
        if all(re.fullmatch(pattern, text) for text in texts):
            return sorted({read(text) for text in texts})
    return sorted(texts)
