"""Tables of a TOML file that a person writes: their keys in words, and the types of single values.

You need it to describe such a file, see :mod:`dkrr.jobs.spec`. A type with more than one form is made by
:func:`one_of`, whose words are both the help and the error; pydantic's own unions would report one mistake once for
each form.
"""

from __future__ import annotations

import json
import os
import re
from inspect import cleandoc
from ipaddress import ip_address
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from dask.utils import parse_bytes
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)

from dkrr.store.files import is_url, parse_address

__all__ = [
    "Alpha",
    "ByteSize",
    "Column",
    "Columns",
    "Count",
    "Header",
    "Location",
    "Penalties",
    "Positive",
    "Quantile",
    "Table",
    "TileSize",
    "Whole",
    "is_data_file",
    "is_loopback",
    "locate",
]

MAX_TILE_SIZE = 16_384  # LAPACK calls with 32-bit indices overflow at 46,340 rows; a 16,384 tile is 2 GiB already
FILE_SUFFIXES = (".csv", ".csv.gz", ".npy", ".parquet", ".zarr")
_WORDS = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "value"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Key(NamedTuple):
    """A key of a table in words, for help: the values it takes, its default ("" where there is none), what it means."""

    name: str
    values: str
    default: str
    help: str


class Table(BaseModel):
    """A table of the file: every key is known, every value has its type, nothing changes afterwards.

    The section Parameters of a subclass's docstring says what each key means: that is what `dkrr help` prints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def described_keys(cls) -> list[Key]:
        """All keys in words, from the types, the defaults and the docstrings of the classes."""
        docs = "\n".join(cleandoc(kind.__doc__ or "") for kind in cls.__mro__ if issubclass(kind, Table))
        helps = dict(re.findall(r"^(\w+)\n((?:    .*(?:\n|\Z))+)", docs, re.MULTILINE))
        kinds = get_type_hints(cls, include_extras=True)
        found = []
        for name, field in cls.model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            shown = "required" if field.is_required() else "" if default is None else json.dumps(default)
            found.append(Key(name, _in_words(kinds[name]), shown, " ".join(helps.get(name, "").split())))
        return found

    @classmethod
    def tables(cls) -> dict[str, type[Table]]:
        """The tables in this one by their keys, none for a table without any."""
        parts = {name: _tables_in(field.annotation) for name, field in cls.model_fields.items()}
        return {name: found[0] for name, found in parts.items() if found}


def _tables_in(kind: Any) -> list[type[Table]]:
    if isinstance(kind, type) and issubclass(kind, Table):
        return [kind]
    return [table for part in get_args(kind) for table in _tables_in(part)]


def _in_words(kind: Any) -> str:
    """The values that an annotation allows."""
    parts, origin = [part for part in get_args(kind) if part is not NoneType], get_origin(kind)
    if origin is Literal:
        return " | ".join(json.dumps(part) for part in parts)
    if origin in (Union, UnionType, list):
        return ("list of " if origin is list else "") + " or ".join(map(_in_words, parts))
    if origin is not Annotated:
        return _WORDS.get(kind, "table")
    if isinstance(parts[-1], str):  # of one_of
        return parts[-1]
    rules = [rule for part in parts[1:] for rule in getattr(part, "metadata", ())]
    ends = [f"{sign} {getattr(rule, name)}" for rule in rules for name, sign in _SIGNS.items() if hasattr(rule, name)]
    return " ".join([_in_words(parts[0]), *([" and ".join(ends)] if ends else [])])


def one_of(kind: Any, words: str) -> Any:
    """The type ``kind``, of several forms, of which ``words`` says in a help and in an error what they are."""

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"{words} expected") from None

    return Annotated[kind, WrapValidator(check), words]


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


def _increasing(values: Any) -> Any:
    if isinstance(values, list) and any(low >= high for low, high in pairwise(values)):
        raise ValueError
    return values


def _some(kind: Any) -> Any:
    """One, or a list of at least one."""
    return kind | Annotated[list[kind], Field(min_length=1)]


Whole = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(gt=0, lt=1)]
_Ridge = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Edge = Annotated[int, Field(ge=1, le=MAX_TILE_SIZE)]
_Name = Annotated[str, Field(min_length=1)]

Location = Annotated[str, AfterValidator(locate)]
Column = one_of(_Name | int, "a column name or number")
Columns = one_of(
    Annotated[
        Annotated[list[str | int], Field(min_length=1)],
        BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    ],
    "column names or numbers",
)
ByteSize = one_of(
    Literal["auto"]
    | Annotated[
        Annotated[int, Field(gt=0)],
        BeforeValidator(lambda value: value if isinstance(value, bool) else int(parse_bytes(value))),
    ],
    'a size such as "2GiB", a number of bytes above 0, or "auto"',
)
Alpha = one_of(_some(_Ridge), "a finite number >= 0, or a list with one for each target,")
TileSize = one_of(Literal["auto"] | _Edge, f'"auto" or a whole number from 1 to {MAX_TILE_SIZE:,}')
Count = one_of(Literal["auto"] | Whole, '"auto" or a whole number above 0')
Header = one_of(Literal["auto"] | bool, 'true, false or "auto"')
Penalties = one_of(
    Annotated[_some(Positive), AfterValidator(_increasing)],
    "a number above 0, or a list of some in increasing order,",
)
Quantile = one_of(
    Annotated[_some(_Share), AfterValidator(_increasing)],
    "a number between 0 and 1, or a list of some in increasing order,",
)
