"""Types of single values in a job file: each knows what it accepts and says so in one sentence.

You need them only in :mod:`dkrr.jobs.spec`. pydantic's own unions would report one mistake once for each branch; a
value with more than one form is therefore checked by one function here, whose docstring `dkrr help` prints.
"""

from __future__ import annotations

import os
from ipaddress import ip_address
from itertools import pairwise
from typing import Annotated, Any
from urllib.parse import urlsplit

from dask.utils import parse_bytes
from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from dkrr.store.files import is_url
from dkrr.store.objects import parse_address

__all__ = [
    "Alpha",
    "ByteSize",
    "Column",
    "Columns",
    "Header",
    "Location",
    "NumCenters",
    "Penalties",
    "Positive",
    "Quantile",
    "Rank",
    "TileSize",
    "is_data_file",
    "is_loopback",
    "locate",
]

MAX_TILE_SIZE = 16_384  # LAPACK calls with 32-bit indices overflow at 46,340 rows; a 16,384 tile is 2 GiB already
FILE_SUFFIXES = (".csv", ".csv.gz", ".npy", ".parquet", ".zarr")


def locate(value: str, info: ValidationInfo) -> str:
    """An absolute path for a relative one; addresses and built-in sources stay as they are."""
    if not value:
        raise ValueError("a path is expected")
    if value.startswith(("sklearn:", "generate:", "tcp://", "tls://")):
        return value
    if is_url(value):
        return str(parse_address(value))
    base = (info.context or {}).get("base")
    expanded = os.path.expanduser(value)
    return os.path.normpath(os.path.join(base, expanded) if base is not None else expanded)


def _columns(value: Any) -> Any:
    """a name or a number of a column, or a list"""
    columns = value if isinstance(value, list) else [value]
    if not columns or any(isinstance(item, bool) or not isinstance(item, str | int) for item in columns):
        raise ValueError("column names or numbers expected")
    return columns


def _column(value: Any) -> Any:
    """a name or a number of a column"""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ValueError("a column name or number expected")
    return value


def _bytes(value: Any) -> Any:
    """a size such as "2GiB", a number of bytes, or "auto\""""
    if value == "auto":
        return value
    try:
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError
        number = int(parse_bytes(value))
    except ValueError:
        raise ValueError('a size such as "2GiB", a number of bytes or "auto" expected') from None
    if number <= 0:
        raise ValueError("a size above 0 expected")
    return number


def _alpha(value: Any) -> Any:
    """number >= 0, or a list"""
    values = value if isinstance(value, list) else [value]
    good = [
        isinstance(item, int | float) and not isinstance(item, bool) and 0 <= item < float("inf") for item in values
    ]
    if not values or not all(good):
        raise ValueError("a finite number >= 0, or a list with one for each target, expected")
    return [float(item) for item in values] if isinstance(value, list) else float(value)


def _increasing(value: Any, end: float, expected: str) -> Any:
    """Numbers between 0 and ``end``, one or a list of some in increasing order."""
    values = value if isinstance(value, list) else [value]
    good = [isinstance(item, int | float) and not isinstance(item, bool) and 0 < item < end for item in values]
    if not values or not all(good) or any(low >= high for low, high in pairwise(values)):
        raise ValueError(f"a number {expected}, or a list of some in increasing order, expected")
    return [float(item) for item in values] if isinstance(value, list) else float(value)


def _quantile(value: Any) -> Any:
    """number > 0 and < 1, or a list in increasing order"""
    return _increasing(value, 1.0, "between 0 and 1")


def _penalties(value: Any) -> Any:
    """number > 0, or a list in increasing order"""
    return _increasing(value, float("inf"), "above 0")


def _tile_size(value: Any) -> Any:
    """a whole number >= 1, or "auto\""""
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TILE_SIZE:
        raise ValueError(f'"auto" or a whole number from 1 to {MAX_TILE_SIZE:,} expected')
    return value


def _header(value: Any) -> Any:
    """true, false, or "auto\""""
    if value is not True and value is not False and value != "auto":
        raise ValueError('true, false or "auto" expected')
    return value


def _count(value: Any) -> Any:
    """a whole number >= 1, or "auto\""""
    if value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError('"auto" or a whole number above 0 expected')
    return value


def is_data_file(mask: Any) -> bool:
    """Whether a mask names a file; a column of the data otherwise."""
    return isinstance(mask, str) and ("/" in mask or mask.lower().endswith(FILE_SUFFIXES))


def is_loopback(address: str) -> bool:
    """Whether ``tcp://host:port`` is on this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


Location = Annotated[str, AfterValidator(locate)]
Column = Annotated[Any, BeforeValidator(_column)]
Columns = Annotated[Any, BeforeValidator(_columns)]
ByteSize = Annotated[Any, BeforeValidator(_bytes)]
Alpha = Annotated[Any, BeforeValidator(_alpha)]
TileSize = Annotated[Any, BeforeValidator(_tile_size)]
Rank = Annotated[Any, BeforeValidator(_count)]
NumCenters = Annotated[Any, BeforeValidator(_count)]
Header = Annotated[Any, BeforeValidator(_header)]
Penalties = Annotated[Any, BeforeValidator(_penalties)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Quantile = Annotated[Any, BeforeValidator(_quantile)]
