"""Which rows are held out: masks from files, and a hash that decides by row number."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.columns import column_number, is_number
from dkrr.dataset.sources import open_table
from dkrr.dataset.table import Header
from dkrr.errors import DataError, ParameterError

__all__ = ["read_mask", "row_hash_fraction"]

Mask = NDArray[np.bool_]

_VALUES = {"1": True, "true": True, "0": False, "false": False, "1.0": True, "0.0": False}


def row_hash_fraction(start: int, stop: int, fraction: float, seed: int = 0) -> Mask:
    """Rows of ``start`` to ``stop`` that belong to a random ``fraction``; a row's answer depends on its number only.

    Row i is chosen when h(i) / 2^64 < fraction, where h is the SplitMix64 output function at
    state ``seed' + (i + 1) * 0x9E3779B97F4A7C15`` and seed' that of ``seed``. Rows keep their answer when others are
    appended, and larger fractions contain smaller ones.

    Returns
    -------
    mask : (stop - start,) bool

    References
    ----------
    Steele, Lea, Flood (2014), "Fast splittable pseudorandom number generators", OOPSLA.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ParameterError(f"fraction is {fraction!r}; 0 to 1 expected", hint="use 0.1 for a tenth")
    if not 0 <= start <= stop:
        raise ParameterError(f"rows {start} to {stop}", hint="0 <= start <= stop")
    gamma = np.uint64(0x9E3779B97F4A7C15)
    seeded = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + gamma)
    hashed = _mix(seeded + np.arange(start + 1, stop + 1, dtype=np.uint64) * gamma)
    # the upper 53 bits are exact in a float64
    return np.asarray((hashed >> np.uint64(11)) * 2.0**-53 < fraction)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def read_mask(
    source: str | os.PathLike[str],
    num_rows: int,
    *,
    column: str | int | None = None,
    header: Header = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
) -> Mask:
    """Read a mask of rows from a column of any file that can be ingested.

    Parameters
    ----------
    source
        The file; values are 0, 1, true and false.
    num_rows
        Number of rows expected.
    column
        Name or number of the column; None means the first.
    header
        Of a text file; "auto" takes a first line whose value is no 0, 1, true or false for names.
    delimiter, decimal
        Of a text file, as in :func:`~dkrr.dataset.ingest`.

    Returns
    -------
    mask : (num_rows,) bool

    Raises
    ------
    DataError
        Another number of rows, or a value that is neither true nor false, with its line.
    StoreError
        The file cannot be read.
    """
    has_names = not is_number(0 if column is None else column, []) if header == "auto" else header
    text: dict[str, Any] = {"header": has_names, "delimiter": delimiter, "decimal": decimal}
    table = open_table(source, **text, allow_1d=True)
    j, row, parts = column_number(table, 0 if column is None else column, "column"), 0, list[Mask]()
    for _, labels in table.blocks([], j):
        texts = [str(label).lower() for label in labels or ()]
        if row == 0 and header == "auto" and table.num_rows is None and not has_names and texts[0] not in _VALUES:
            texts, row = texts[1:], 1  # a name
        for number, value in enumerate(texts, row):
            if value in _VALUES:
                continue
            where = table.locate(number) or f"row {number}"
            raise DataError(
                f"mask {source}, {where}, column {j}: {value!r}; 0, 1, true or false expected",
                hint="correct the file, or choose another column",
                row=number,
                column=j,
            )
        parts.append(np.array([_VALUES[text] for text in texts], dtype=bool))
        row += len(texts)
    mask = np.concatenate(parts)
    if table.dropped is not None:
        mask, kept = np.zeros(len(table.dropped), dtype=bool), mask
        mask[~table.dropped] = kept
    if len(mask) != num_rows:
        raise DataError(
            f"mask {source} has {len(mask)} rows; {num_rows} expected",
            hint="a mask needs one value for each row, those dropped for missing values included",
        )
    return mask
