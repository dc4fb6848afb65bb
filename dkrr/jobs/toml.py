"""Files in TOML: their tables and types of values, reading one that a person wrote, saying in one line what is wrong
with it, writing plain ones.

You need it for job files, those that a program made included; the standard library reads TOML and does not write it.
The types of a table are both its help and its errors. One with more than one form is made by :func:`one_of`, whose
words are; pydantic's own unions would report one mistake once for each form.
An error names the place, what stands there and what belongs there. Secrets are refused: a job file is copied into
runs, plans and reports, and no value that looks like a credential may travel with it, nor be repeated in an error.
Costs nothing.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator
from inspect import cleandoc
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import unquote, urlsplit

from dask.utils import parse_bytes
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)

from dkrr.errors import DkrrError, JobFileError, did_you_mean
from dkrr.store.files import change_settings, is_url
from dkrr.store.objects import StorageSettings, parse_address

MAX_TILE_SIZE = 16_384  # LAPACK calls with 32-bit indices overflow at 46,340 rows; a 16,384 tile is 2 GiB already
BUILT_IN = ("sklearn:", "generate:")
FILE_SUFFIXES = (".csv", ".csv.gz", ".npy", ".parquet", ".zarr")
_WORDS = {str: "text", bool: "true or false", int: "whole number", float: "number", Any: "value"}
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


class Table(BaseModel):
    """A table of the file: every key is known, every value has its type, nothing changes afterwards.

    The section Parameters of a subclass's docstring says what each key means: that is what `dkrr help` prints.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def settings(self) -> Any:
        """The same for whoever uses it, which refuses combinations without a meaning; None where there is no such."""
        return None

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        self.settings()
        return self

    @classmethod
    def described_keys(cls) -> list[tuple[str, str, str, str]]:
        """All keys in words: name, values, default ("" where there is none), and what the docstrings say of it."""
        docs = "\n".join(cleandoc(kind.__doc__ or "") for kind in cls.__mro__ if issubclass(kind, Table))
        helps = dict(re.findall(r"^(\w+)\n((?:    .*(?:\n|\Z))+)", docs, re.MULTILINE))
        kinds = get_type_hints(cls, include_extras=True)
        found = []
        for name, field in cls.model_fields.items():
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            shown = "required" if field.is_required() else "" if default is None else json.dumps(default)
            found.append((name, _in_words(kinds[name]), shown, " ".join(helps.get(name, "").split())))
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


def one_of(kind: Any, words: str, *more: Any) -> Any:
    """The type ``kind``, of several forms, of which ``words`` says in a help and in an error what they are.

    ``more`` are metadata for pydantic.
    """

    def check(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"{words} expected") from None

    return Annotated[kind, WrapValidator(check), *more, words]


def locate(value: str, info: ValidationInfo) -> str:
    """An absolute path for a relative one; addresses and built-in sources stay as they are."""
    if not value:
        raise ValueError("a path is expected")
    if value.startswith((*BUILT_IN, "tcp://", "tls://")):
        return value
    known = info.context or {}
    if is_url(value):
        return change_settings(str(parse_address(value)), StorageSettings(), known.get("storage", StorageSettings()))
    path = os.path.join(known.get("base", ""), os.path.expanduser(value))
    plain = os.path.normpath(path)
    # ".." behind a link to a folder is the folder that has what the link names
    return plain if os.path.realpath(plain) == os.path.realpath(path) else os.path.realpath(path)


def _written(value: Any, info: SerializationInfo) -> Any:
    """A location as whoever writes the table down wants it: ``context`` has a function ``location``."""
    return value if info.context is None or not isinstance(value, str) else info.context["location"](value)


def is_data_file(mask: Any) -> bool:
    """Whether a mask names a file; a column of the data otherwise."""
    return isinstance(mask, str) and ("/" in mask or mask.lower().endswith(FILE_SUFFIXES))


def is_loopback(address: str) -> bool:
    """Whether ``tcp://host:port`` is on this machine."""
    return re.fullmatch(r"localhost|::1|127(\.\d+){3}", urlsplit(address).hostname or "") is not None


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

Location = Annotated[str, AfterValidator(locate), PlainSerializer(_written)]
Column = one_of(_Name | int, "a column name or number")
Mask = one_of(
    _Name | int,
    "a column name or number",
    AfterValidator(lambda value, info: locate(value, info) if is_data_file(value) else value),
    PlainSerializer(lambda value, info: _written(value, info) if is_data_file(value) else value),
)
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


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SECRET = re.compile(
    r"secret|passw|passphrase|token|credential|access_?key|private_?key|api_?key|authori[sz]ation|sign"
)
_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_ASSIGNMENT = re.compile(r"\s*([A-Za-z0-9_.\"'-]+)\s*=")

Keys = tuple[Any, ...]
Checked = TypeVar("Checked", bound=Table)


def misplaced(path: Keys, message: str, hint: str = "") -> JobFileError:
    """The error of a validator about one key among several, ``("model", "alpha")`` say: [model] alpha ``message``."""
    return JobFileError(f"{_where(path)} {message}", hint=hint, key=list(path))


def _where(path: Keys) -> str:
    """``("model", "kernel", "sum", 0, "gamma")`` as people read it: ``[model.kernel.sum] gamma``."""
    names = [str(part) for part in path if not isinstance(part, int)]
    if len(names) < 2:
        return f"[{names[0]}]" if names else "the job file"
    return f"[{'.'.join(names[:-1])}] {names[-1]}"


class Source:
    """Where a document comes from: its errors name file and line.

    Parameters
    ----------
    name
        Of the file, "" where there is none.
    text
        What it holds.
    """

    def __init__(self, name: str = "", text: str = "") -> None:
        self.name, self.text = name, text

    @classmethod
    def read(cls, path: Path, *, not_text: str, unreadable: str) -> tuple[Source, dict[str, Any]]:
        """A file and what it holds; ``not_text`` and ``unreadable`` are the hints of two of the errors.

        Raises
        ------
        JobFileError
            The file cannot be read, is not UTF-8, or is not TOML.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls(str(path), text), tomllib.loads(text)
        except UnicodeDecodeError as exc:
            raise JobFileError(f"{path} is not UTF-8 text (byte {exc.start})", hint=not_text) from None
        except OSError as exc:
            raise JobFileError(f"{path} cannot be read ({exc.strerror})", hint=unreadable) from None
        except tomllib.TOMLDecodeError as exc:
            hint = "strings stand in quotes" if path.suffix == ".toml" else not_text
            raise JobFileError(f"{path} is not valid TOML: {exc}", hint=hint) from None

    def error(self, message: str, path: Keys, hint: str = "") -> JobFileError:
        """The error for a mistake at ``path``."""
        line = self.line_of(path)
        place = f"{self.name}:{line}: " if line else f"{self.name}: " if self.name else ""
        return JobFileError(place + message, hint=hint, line=line, key=[str(part) for part in path])

    def line_of(self, path: Keys) -> int | None:
        """Number of the line on which the key ``path`` stands; that of its table when the key has no line."""
        wanted = [str(part) for part in path if not isinstance(part, int)]
        header, lines = list[str](), dict[tuple[str, ...], int | None]({(): None})
        for number, line in enumerate(self.text.splitlines(), start=1):
            if match := _HEADER.fullmatch(line) or _ASSIGNMENT.match(line):
                found = [part.strip().strip("\"'") for part in match[1].split(".")]
                header = found if match.re is _HEADER else header
                found = found if match.re is _HEADER else [*header, *found]
                if found == wanted[: len(found)]:
                    lines.setdefault(tuple(found), number)
        return lines[max(lines, key=len)]

    def check(
        self, table: type[Checked], document: Any, base: Path, path: Keys = (), storage: StorageSettings | None = None
    ) -> Checked:
        """A document, or the table of it at ``path``, as a ``table``; relative paths mean the folder ``base``.

        Addresses that do not say how they are reached are reached as ``storage`` says.

        Raises
        ------
        JobFileError
            Something is unknown or not allowed, or looks like a secret.
        """
        self._refuse_secrets(document)
        try:
            return table.model_validate(document, context={"base": base, "storage": storage or StorageSettings()})
        except ValidationError as exc:
            errors = exc.errors(include_url=False)
        for error in errors:  # of a misspelt key another one may be missing
            if error["type"] == "extra_forbidden":
                raise self.unknown_key((*path, *_keys(error)), _known(table, _keys(error)))
        first = errors[0]
        raise self._described(first, (*path, *_keys(first)), f" (and {len(errors) - 1} more)" * (len(errors) > 1))

    def unknown_key(self, path: Keys, choices: Iterable[str]) -> JobFileError:
        """The error for a key, or a table, that does not exist."""
        known = sorted(choices)
        *parents, key = [part for part in path if not isinstance(part, int)]
        what = f"unknown key {key!r} in [{'.'.join(map(str, parents))}]" if parents else f"unknown table [{key}]"
        return self.error(f"{what}; {did_you_mean(str(key), known, 'known: ' + ', '.join(known))}", path)

    def _described(self, error: Any, path: Keys, more: str) -> JobFileError:
        """A mistake that pydantic found, in our words."""
        value, cause = error.get("input"), error.get("ctx", {}).get("error")
        is_table = isinstance(value, dict) or len(path) < 2
        place = _where(path) if is_table else f"{_where(path)} = {value!r}"
        hint = cause.hint if isinstance(cause, DkrrError) else ""
        said = cause.message if isinstance(cause, DkrrError) else cause
        if isinstance(cause, JobFileError):
            return self.error(cause.message, tuple(cause.key), hint)
        if error["type"] == "missing":
            message = f"{_where(path)} is missing"
        elif error["type"] == "literal_error":
            expected = error["ctx"]["expected"]
            message = f"{place} is not allowed; {expected} expected"
            hint = did_you_mean(str(value), re.findall(r"'([^']+)'", expected))
        elif error["type"] == "union_tag_invalid":
            message = f"{place}: the name of a kernel, or a table with kernel, sum or product, expected"
        else:
            message = f"{place}: {said or error['msg'][:1].lower() + error['msg'][1:]}"
        return self.error(message + more, path, hint)

    def _refuse_secrets(self, document: Any) -> None:
        """Raise when a key or a value looks like a credential; the value is not repeated."""
        for path, value in _leaves(document, ()):
            if any(_looks_secret(part) for part in path if isinstance(part, str)):
                what = "looks like a secret"
            elif isinstance(value, str) and (kind := _url_secret(value)):
                what = f"is an address with a {kind} in it"
            else:
                continue
            hint = "job files hold no credentials; use the environment, a profile or a role"
            raise self.error(f"{_where(path)} {what}", path, hint)


def _keys(error: Any) -> Keys:
    """Where a mistake is, without the tags of unions, which are no keys of the file."""
    return tuple(part for part in error["loc"] if not str(part).startswith("kernel "))


def _known(table: type[Table], path: Keys) -> Iterable[str]:
    for name in path[:-1]:
        table = table.tables().get(name, table)
    return table.model_fields


def _looks_secret(name: str) -> bool:
    return bool(_SECRET.search(name.lower().replace("-", "_")))


def _url_secret(value: str) -> str:
    """What kind of secret the address holds, or one inside of it, "" when none (or when it is no address)."""
    text = unquote(value)
    if re.search(r"://[^/?#@:]*:[^/?#@]*@", text):
        return "password"
    names = re.findall(r"[?&]([^=&#]*)=", text) if "://" in text else []
    return "credential" if re.search(r"s3://[^/]*@", text) or any(map(_looks_secret, names)) else ""


def _leaves(value: Any, path: Keys) -> Iterator[tuple[Keys, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield path, value
        return
    for key, item in items:
        yield from _leaves(item, (*path, key))


def dumps(document: dict[str, dict[str, Any]]) -> str:
    """The TOML text of ``{"table": {"key": value}}``; None values are left out, nested tables are written inline."""
    lines = []
    for table, values in document.items():
        lines.append(f"[{_key(table)}]")
        lines.extend(f"{_key(name)} = {inline(value)}" for name, value in values.items() if value is not None)
        lines.append("")
    return "\n".join(lines)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else inline(name)


def inline(value: Any) -> str:
    """One value as it stands behind the equals sign."""
    if isinstance(value, dict):
        pairs = (f"{_key(name)} = {inline(item)}" for name, item in value.items() if item is not None)
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(inline(item) for item in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON's are TOML's, except that TOML wants DEL escaped as well
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
