"""Looking at every value before it is stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dkrr.dataset.rows import Floats
from dkrr.dataset.sources.table import Table
from dkrr.errors import DataError

__all__ = ["FiniteCheck", "WeightCheck"]


class FiniteCheck:
    """Counts NaN and infinity in the features and targets of a table, and keeps where the first one is."""

    def __init__(self, table: Table, columns: Sequence[int]) -> None:
        self._table, self._columns = table, columns
        self.count = 0
        self._first: tuple[int, int, float] | None = None

    def look(self, values: Floats, first_row: int) -> bool:
        """Whether all of ``values`` (m, number of columns) and all before are finite."""
        finite = np.isfinite(values)
        if not finite.all():
            self.count += int(finite.size - np.count_nonzero(finite))
            if self._first is None:
                i, k = (int(v) for v in np.argwhere(~finite)[0])
                self._first = (first_row + i, self._columns[k], float(values[i, k]))
        return self.count == 0

    def finish(self) -> None:
        """Report after the last row.

        Raises
        ------
        DataError
            With ``row``, ``column`` and ``count``.
        """
        if self._first is None:
            return
        row, column, value = self._first
        where = self._table.locate(row)
        noun = "1 value that is" if self.count == 1 else f"{self.count:,} values that are"
        raise DataError(
            f"{self._table.label} has {noun} NaN or infinity; the first is {value} at row {row}, "
            f"column {column} ({self._table.names[column]!r})" + (f", {where}" if where else ""),
            hint="remove these rows (--missing drop or missing='drop' leaves them out when they are ingested), or fill "
            "the values in; rows and columns count from 0",
            row=row,
            column=column,
            count=self.count,
        )


class WeightCheck:
    """Weights are finite, not negative, and not all zero."""

    def __init__(self, table: Table, name: str) -> None:
        self._table, self._name = table, name
        self._any_positive = False

    def look(self, values: Floats, first_row: int) -> None:
        """Check weights (m, 1).

        Raises
        ------
        DataError
            With ``row``.
        """
        bad = ~(np.isfinite(values) & (values >= 0))
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            where = self._table.locate(first_row + i)
            raise DataError(
                f"weight {float(values[i, 0])} at row {first_row + i} of {self._table.label} (column {self._name!r})"
                + (f", {where}" if where else "")
                + "; finite numbers >= 0 expected",
                hint="a weight of 0 leaves a row out",
                row=first_row + i,
            )
        self._any_positive = self._any_positive or bool((values > 0).any())

    def finish(self) -> None:
        """Report after the last row.

        Raises
        ------
        DataError
            All weights are zero.
        """
        if not self._any_positive:
            raise DataError(
                f"all weights of {self._table.label} are zero (column {self._name!r})", hint="give some row a weight"
            )
