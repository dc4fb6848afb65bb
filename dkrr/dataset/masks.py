"""Which rows are held out: masks from files, and a hash that decides by row number."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.columns import resolve
from dkrr.dataset.destination import storage_errors
from dkrr.dataset.sources import open_table
from dkrr.dataset.sources.remote import local_copy
from dkrr.dataset.sources.text import CsvTable, Header, read_records
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.store.files import is_url

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
    """Read a mask of rows from .csv, .csv.gz, .npy, or a column of any other file that can be ingested.

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
    if is_url(source):
        with local_copy(str(source)) as found:
            if found is None:
                return _of_length(_from_table(str(source), 0 if column is None else column), source, num_rows)
            text = {"header": header, "delimiter": delimiter, "decimal": decimal}
            return read_mask(found, num_rows, column=column, **text)  # type: ignore[arg-type]
    path = Path(source)
    with storage_errors(path):
        if not path.exists():
            raise StoreError(f"mask {path} does not exist", hint="check the path")
        name = path.name.lower()
        if name.endswith(".npy"):
            mask = _from_npy(path, 0 if column is None else column)
        elif name.endswith((".csv", ".csv.gz")):
            table = CsvTable(path, str(path), header=False, delimiter=delimiter, decimal=decimal)
            values = list(_from_text(table, 0 if column is None else column, header))
            mask = np.array(values, dtype=bool)
        else:
            mask = _from_table(path, 0 if column is None else column)
    return _of_length(mask, path, num_rows)


def _of_length(mask: Mask, source: Any, num_rows: int) -> Mask:
    if len(mask) != num_rows:
        raise DataError(
            f"mask {source} has {len(mask)} rows; {num_rows} expected",
            hint="a mask needs one value for each row, those dropped for missing values included",
        )
    return mask


def _from_npy(path: Path, column: str | int) -> Mask:
    try:
        values = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as exc:
        raise DataError(f"mask {path} is not a readable .npy file ({exc})", hint="write it again") from exc
    if values.ndim == 2 and isinstance(column, int) and -values.shape[1] <= column < values.shape[1]:
        values = values[:, column]
    return _checked(values, path, column)


def _from_table(path: Path | str, column: str | int) -> Mask:
    table = open_table(path)
    layout = resolve(table, target=None, features=[column], weight=None)
    values = np.concatenate([block[:, 0] for block, _ in table.blocks(layout.features)])
    if table.dropped is None:
        return _checked(values, path, column)
    mask = np.zeros(len(table.dropped), dtype=bool)
    mask[~table.dropped] = _checked(values, path, column)
    return mask


def _checked(values: NDArray[Any], path: Path | str, column: str | int) -> Mask:
    if values.ndim != 1:
        raise DataError(f"mask {path} has shape {values.shape}, column {column!r} wanted", hint="save one column")
    if values.dtype.kind not in "biuf":
        raise DataError(f"mask {path} has dtype {values.dtype}; bool or 0 and 1 expected", hint="save it as bool")
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if wrong.size:
        row = int(wrong[0])
        raise DataError(f"mask {path} has {values[row]} at row {row}; 0 or 1 expected", hint="save it as bool", row=row)
    return np.asarray(values, dtype=bool)


def _from_text(table: CsvTable, column: str | int, header: Header) -> Iterator[bool]:
    path = table.path
    records = read_records(path, table.delimiter)
    line, first = next(records)
    width = len(table.names)
    j = column if isinstance(column, int) else None
    has_header = header
    if header == "auto":
        has_header = j is None or not -width <= j < width or first[j].strip().lower() not in _VALUES
    if j is None and re.fullmatch(r"-?\d+", str(column)) and str(column) not in (first if has_header else []):
        j = int(str(column))
    if j is None:
        names = [name.strip() for name in first] if has_header else []
        if column not in names:
            raise ParameterError(
                f"column {column!r} is not in mask {path} ({', '.join(names) or 'no header'})", hint="use its number"
            )
        j = names.index(str(column))
    if not -width <= j < width:
        raise ParameterError(f"column {j} of mask {path}; it has columns 0 to {width - 1}", hint="use column 0")
    if not has_header:
        yield _value(path, line, j, first, width)
    for line, record in records:
        yield _value(path, line, j, record, width)


def _value(path: Path, line: int, column: int, record: list[str], width: int) -> bool:
    text = record[column].strip().lower() if len(record) == width else ""
    if text not in _VALUES:
        found = repr(record[column]) if len(record) == width else f"{len(record)} columns instead of {width}"
        raise DataError(
            f"mask {path}, line {line}, column {column}: {found}; 0, 1, true or false expected",
            hint="correct the file, or choose another column",
            line=line,
            column=column,
        )
    return _VALUES[text]
