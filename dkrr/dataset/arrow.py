"""Sources that Arrow reads: CSV text, Parquet files and folders, and data frames of any library.

pyarrow is fast and says little about where a text file is wrong. So when it fails, the file is read once more, slowly,
with Python's csv module, to name line and column.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import re
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pyarrow.types as t

from dkrr.dataset.rows import Floats
from dkrr.dataset.table import (
    BLOCK_BYTES,
    MISSING_MARKS,
    Block,
    Header,
    Table,
    check_shape,
    frame_labels,
    is_missing,
    is_number,
    no_numbers,
    unchanged,
    unique_names,
    visible_files,
)
from dkrr.errors import DataError, ParameterError


class ArrowTable(Table):
    """Columns that come as Arrow arrays."""

    @abstractmethod
    def arrays(self, columns: Sequence[int], written: int | None = None) -> Iterator[list[Any]]:
        """All rows in order: arrays of the ``columns``, which may be numbers by now, and of one as it stands."""

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        for arrays in self.arrays(columns, label_column):
            values = np.empty((len(arrays[0]), len(columns)))
            for k, j in enumerate(columns):
                values[:, k] = _floats(arrays[k], f"column {self.names[j]!r} of {self.label}")
            yield values, None if label_column is None else arrays[-1].to_pylist()

    def as_written(self, column: int, *, kind: Any = None) -> Iterator[Any]:
        return (arrays[-1] for arrays in self.arrays([], column))


def _floats(array: Any, label: str) -> Floats:
    kind = array.type
    if not any(is_kind(kind) for is_kind in (t.is_integer, t.is_floating, t.is_boolean, t.is_decimal)):
        raise no_numbers(label, kind)
    # 64-bit integers beyond 2^53 are rounded, as NumPy does
    floats = array.cast(pa.float64(), safe=False)
    if floats.null_count:
        floats = pc.fill_null(floats, float("nan"))
    found: Floats = floats.to_numpy(zero_copy_only=False)
    return found


class FrameTable(ArrowTable):
    """A data frame of pandas, Arrow or any library that hands out Arrow streams; of pandas also a series."""

    def __init__(self, frame: Any, label: str, *, prefix: str = "x", allow_1d: bool = False) -> None:
        self._is_pandas = hasattr(frame, "iloc")
        if not self._is_pandas:
            frame = pa.table(frame)
        num_rows, width = check_shape(frame.shape, label, allow_1d=allow_1d)
        self.is_1d, is_named = len(frame.shape) == 1, True
        if self.is_1d:
            is_named = frame.name is not None
            frame = frame.to_frame() if is_named else frame.to_frame(prefix)
        super().__init__(label, unique_names(frame_labels(frame) or [], label), num_rows, is_named=is_named)
        self._frame, self._step = frame, max(256, BLOCK_BYTES // (8 * width))

    def arrays(self, columns: Sequence[int], written: int | None = None) -> Iterator[list[Any]]:
        chosen = [*columns, *([] if written is None else [written])]
        for start in range(0, self.num_rows or 0, self._step):
            stop = start + self._step
            if not self._is_pandas:
                yield [self._frame.column(j)[start:stop] for j in chosen]
                continue
            part = self._frame.iloc[start:stop, chosen]
            sparse = {name: kind.subtype for name, kind in part.dtypes.items() if hasattr(kind, "fill_value")}
            try:
                yield pa.Table.from_pandas(part.astype(sparse) if sparse else part, preserve_index=False).columns
            except (pa.ArrowException, TypeError) as exc:
                raise DataError(
                    f"{self.label} cannot be read ({'; '.join(map(str, exc.args))}); numbers expected",
                    hint="convert that column to numbers, or leave it out with features=",
                ) from exc


# --- Parquet ----------------------------------------------------------------------------------------------------------

_NULL = "__HIVE_DEFAULT_PARTITION__"


class ParquetTable(ArrowTable):
    """Parquet, one file or a folder of files with the same columns; a stored pandas index is left out.

    What a folder holds is as in pyarrow.dataset and pandas: the files of all its subfolders, but for names that begin
    with a dot or an underscore; and a subfolder ``year=2019`` gives its rows a column ``year``, behind those of the
    files: numbers where all values are, null where there is none, else text. As labels they are text.
    """

    def __init__(self, path: Path, label: str) -> None:
        self._files = visible_files(path) if path.is_dir() else [path]
        others = [str(file.relative_to(path)) for file in self._files if file.suffix.lower() != ".parquet"]
        if len(others) == len(self._files):
            raise DataError(f"{label} is a folder without .parquet files", hint="give the folder that holds the files")
        if others:
            raise DataError(
                f"{label} is a folder that holds {others[0]}, which is no .parquet file",
                hint="move it elsewhere, or give it a name that begins with an underscore",
            )
        self._check = unchanged(self._files)
        schemas = []
        num_rows = 0
        for file in self._files:
            with _reading(file), pq.ParquetFile(file) as reader:
                schema, num_rows = reader.schema_arrow, num_rows + reader.metadata.num_rows
            unique_names(schema.names, str(file))
            index = (schema.pandas_metadata or {}).get("index_columns", [])
            schemas.append({name: schema.field(name).type for name in schema.names if name not in index})
        self._types = schemas[0]
        if num_rows == 0 or not self._types:
            raise DataError(f"{label} has no {'rows' if self._types else 'columns'}", hint="check how it was made")
        folders = [
            dict(part.split("=", 1) for part in file.relative_to(path).parts[:-1] if "=" in part)
            for file in self._files
        ]
        for what, found in (("has columns", schemas), ("is in folders that name", folders)):
            for file, names in zip(self._files, found, strict=True):
                if set(names) != set(found[0]):
                    raise DataError(
                        f"{file} {what} {', '.join(names) or 'nothing'}; {', '.join(found[0]) or 'nothing'} expected "
                        f"as for {self._files[0]}",
                        hint="ingest files of the same columns, in folders NAME=VALUE of the same names",
                    )
        if twice := set(folders[0]) & set(self._types):
            raise DataError(
                f"column {min(twice)!r} is in {self._files[0]} and in the name of its folder",
                hint="rename one of the two",
            )
        self._folders = {
            unquote(name): pa.array(
                [None if values[name] == _NULL else unquote(values[name]) for values in folders], pa.string()
            )
            for name in folders[0]
        }
        self._parsed = {name: _parsed(texts) for name, texts in self._folders.items()}
        super().__init__(label, [*self._types, *self._folders], num_rows, is_named=True)

    def arrays(self, columns: Sequence[int], written: int | None = None) -> Iterator[list[Any]]:
        names = [self.names[j] for j in [*columns, *([] if written is None else [written])]]
        wanted = [name for name in dict.fromkeys(names) if name in self._types]
        wanted = wanted or list(self._types)[:1]  # which tells the number of rows
        step = max(256, BLOCK_BYTES // (8 * len(wanted)))
        for number, file in enumerate(self._files):
            # a buffer makes the reader stream the column chunks of a row group and not load them whole
            with _reading(file), pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as reader:
                for batch in reader.iter_batches(batch_size=step, columns=wanted, use_threads=False):
                    arrays = [
                        pa.repeat((self._parsed if k < len(columns) else self._folders)[name][number], len(batch))
                        if name in self._folders
                        else batch.column(name)
                        for k, name in enumerate(names)
                    ]
                    if written is not None:
                        arrays[-1] = self._as_in_first(arrays[-1], written, file)
                    yield arrays
        self._check()

    def _as_in_first(self, array: Any, column: int, file: Path) -> Any:
        kind = self.label_type(column)
        array = array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
        if array.type == kind:
            return array
        try:
            found = array.cast(kind)
            # a cast that loses nothing leads back: Arrow itself lets true be 2, and days be hours
            same = pc.or_kleene(pc.is_null(array, nan_is_null=True), pc.equal(found.cast(array.type), array))
            if len(array) > array.null_count and not pc.all(same).as_py():
                first = array.filter(pc.invert(same))[0]
                raise pa.ArrowInvalid(f"{first} would be {found.filter(pc.invert(same))[0]}")
        except (ValueError, NotImplementedError) as exc:
            raise DataError(
                f"column {self.names[column]!r} of {file} has values that are no {kind}, as in {self._files[0]}; {exc}",
                hint="write files of one schema",
            ) from exc
        return found

    def label_type(self, column: int, *, as_text: bool = True) -> Any:
        name = self.names[column]
        if name in self._folders:
            return pa.string() if as_text else _type_of([self._folders[name]])
        kind = self._types[name]
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    def as_written(self, column: int, *, kind: Any = None) -> Iterator[Any]:
        for array in super().as_written(column):
            yield array if kind is None else array.cast(kind)


def _parsed(array: Any) -> Any:
    """Values of folders: numbers where all are, null where there is none, else text."""
    texts = array.to_pylist()
    if all(text is None or is_number(text) for text in texts):
        return pa.array([None if text is None else float(text) for text in texts], pa.float64())
    return array


def _type_of(arrays: Iterable[Any], decimal: str = ".") -> Any:
    """The type that gives all texts back: whole numbers of 64 bits, floats that are written in one way, else text.

    As numbers "01" and "1" would be one, and so would "1.1" and "1.10", and whole numbers of twenty digits.
    """
    ways: list[tuple[Any, Callable[[str], str]]] = []
    for array in arrays:
        for text in filter(None, pc.unique(array).to_pylist()):
            if decimal != "." and "." in text:
                return pa.string()
            number = text.replace(decimal, ".")
            ways = ways or [
                (pa.int64(), lambda text: str(np.int64(int(text)))),
                (pa.float64(), lambda text: repr(float(text))),
                (pa.float64(), lambda text: repr(float(text)).removesuffix(".0")),
                (pa.float64(), partial(_with_decimals, len(number.partition(".")[2]))),
            ]
            ways = [(kind, way) for kind, way in ways if _gives_back(way, number)]
            if not ways:
                return pa.string()
    return ways[0][0] if ways else pa.string()


def _with_decimals(count: int, text: str) -> str:
    return f"{float(text):.{count}f}"


def _gives_back(way: Callable[[str], str], text: str) -> bool:
    try:
        return text[-1].isdigit() and way(text) == text  # inf and nan are no numbers here
    except (ValueError, OverflowError):
        return False


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn what pyarrow says about a file that it cannot read into a typed error."""
    try:
        yield
    except (pa.ArrowException, OSError) as exc:
        if isinstance(exc, OSError) and exc.errno is not None:
            raise
        raise DataError(f"{file} is not a readable Parquet file ({exc})", hint="write it again") from exc


# --- text -------------------------------------------------------------------------------------------------------------

_BLANKS = ["\t", *(" " * count for count in range(9))]  # that may stand around a mark
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar", " ": "a space"}
_HEADER_HINT = "say header=True (--header) if these are names, header=False (--no-header) if they are values"
_HEAD_RECORDS = 100  # looked at to find out whether the line above them has names
TEXT_BYTES = 4 << 20


class _Counted(io.RawIOBase):
    """A stream of bytes for Arrow to read; counts quotes and lines."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.quotes, self._ends, self._last, self._is_old = stream, 0, 0, b"", False

    def read(self, size: int = -1) -> bytes:
        data: bytes = self.stream.read(size)
        self.quotes += data.count(b'"')
        self._ends += data.count(b"\n")
        self._is_old |= data.count(b"\r") != data.count(b"\r\n")  # also where two reads part the two
        self._last = data[-1:] or self._last
        return data

    @property
    def lines(self) -> int:
        """-1 where the last one has no end, or one ends with a carriage return alone."""
        return -1 if self._is_old or self._last != b"\n" else self._ends


class CsvTable(ArrowTable):
    """A .csv or .csv.gz file in UTF-8.

    Parameters
    ----------
    header
        "auto" takes the first line for names where all its fields are text and numbers stand below, and for values
        where it has numbers, or marks of missing values, and other fields that fit the columns below them. A line that
        may be either is an error, unless columns that are asked for by name stand in it.
    named
        Columns that somebody asks for, of which the names count; a text that may be a number of a column is none.
    delimiter
        One character; None means a comma, or a semicolon where ``decimal`` is a comma.
    decimal
        "." or ",".

    Raises
    ------
    DataError
        An empty file, or a first line that may be names or values.
    """

    def __init__(
        self,
        path: Path,
        label: str,
        *,
        header: Header = "auto",
        delimiter: str | None = None,
        decimal: str = ".",
        named: Sequence[str | int] = (),
    ) -> None:
        if header not in (True, False, "auto"):
            raise ParameterError(f"header is {header!r}", hint="use True, False or 'auto'")
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise ParameterError(f"delimiter is {delimiter!r}; one character expected", hint="use ',' ';' '|' or a tab")
        if decimal not in (".", ","):
            raise ParameterError(f"decimal is {decimal!r}; '.' or ',' expected", hint="leave it out for 1.5")
        self.path, self.label, self.decimal = path, label, decimal
        self.delimiter = delimiter or (";" if decimal == "," else ",")
        self._compression = "gzip" if path.suffix.lower() == ".gz" else None
        self._check = unchanged([path])
        with contextlib.closing(self._records()) as records:
            head = list(itertools.islice(records, 1 + _HEAD_RECORDS))
        if not head:
            raise DataError(f"{label} is empty", hint="check how it was written")
        self._first_line, first = head[0]
        if header is not False:
            self._check_utf8(self._first_line, list(enumerate(first)))
        line, example = head[1] if len(head) > 1 else head[0]
        if len(example) == 1 and (hint := self._other_delimiter(example)):
            # here and not when it is parsed: the one column may be taken for the target
            raise self._error(line, 0, f"{example[0][:40]!r} is not a number", hint)
        self._has_header = self._looks_like_header(head, named) if header == "auto" else header
        names = [name.strip() for name in first] if self._has_header else [f"x{j}" for j in range(len(first))]
        if self._has_header and len(head) == 1:
            raise DataError(f"{label} has a header and no rows", hint="check how it was written")
        for name, count in Counter(names).items():
            if count > 1:
                raise self._error(
                    self._first_line,
                    names.index(name, names.index(name) + 1),
                    f"the name {name!r} occurs {count} times",
                    "rename the columns, or use header=False if these are values",
                )
        self._line_bytes = max(sum(map(len, fields)) + len(fields) for _, fields in head)
        # the second record starts on the line after the header, which may itself span several
        self._skip = line - 1 if self._has_header else self._first_line - 1
        super().__init__(label, names, None, is_named=bool(self._has_header))

    def is_text(self, column: int) -> bool:
        return True

    def label_type(self, column: int, *, as_text: bool = True) -> Any:
        """Text as it stands; without ``as_text`` numbers where these give all fields back."""
        return pa.string() if as_text else _type_of(self.as_written(column), self.decimal)

    def as_written(self, column: int, *, kind: Any = None) -> Iterator[Any]:
        for array in super().as_written(column):
            if kind not in (None, pa.string()):
                empty = pc.if_else(pc.equal(array, ""), None, array)
                array = pc.replace_substring(empty, self.decimal, ".").cast(kind)
            yield array

    def locate(self, row: int) -> str:
        return next((f"line {line}" for line, _ in itertools.islice(self._rows(), row, None)), "")

    def arrays(self, columns: Sequence[int], written: int | None = None) -> Iterator[list[Any]]:
        # a name may be anything, a number is told from it
        types = {str(j): pa.float64() for j in columns} | ({} if written is None else {str(written): pa.string()})
        read = pa.csv.ReadOptions(
            column_names=[str(j) for j in range(len(self.names))],
            skip_rows=self._skip,
            block_size=max(TEXT_BYTES, 16 * self._line_bytes),
        )
        parse = pa.csv.ParseOptions(
            delimiter=self.delimiter,
            newlines_in_values=True,
            ignore_empty_lines=len(self.names) > 1,  # of one column they are values that are missing
        )
        convert = pa.csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[a + mark + b for mark in MISSING_MARKS for a, b in itertools.product(_BLANKS, repeat=2)],
            strings_can_be_null=False,
            decimal_point=self.decimal,
        )
        records = 0
        try:
            with (
                pa.input_stream(str(self.path), compression=self._compression) as stream,
                _Counted(stream) as counted,
                pa.csv.open_csv(pa.PythonFile(counted), read, parse, convert) as reader,
            ):
                for batch in reader:
                    records += len(batch)
                    yield [batch.column(name) for name in types]
        except (pa.ArrowInvalid, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise
            self._check()
            self._diagnose(columns, written)
            hint = "check quotes, delimiter and encoding"
            raise DataError(f"{self.label} cannot be parsed ({exc})", hint=hint) from exc
        self._check()
        # some records may have several lines, or the last one no end
        if counted.quotes and (counted.quotes % 2 or counted.lines != self._skip + records):
            self._check_quotes()

    def _check_quotes(self) -> None:
        """Look for a quote that is not closed where its field ends: the field would have the rows below it in it."""
        plain = rf"[^{re.escape(self.delimiter)}\r\n]*"
        field, lines = re.compile(rf'"(?P<body>[^"]*(?:""[^"]*)*)(?P<quote>"?)(?P<rest>{plain})|{plain}'), list[str]()

        def passed(file: Iterable[str]) -> Iterator[str]:
            for text in file:
                lines.append(text)
                yield text

        def check(text: str, line: int) -> None:
            """The fields of a record, which begins on a line."""
            start = 0
            while start <= len(text) and (found := field.match(text, start)):
                start, body = found.end() + 1, found["body"]
                if body is not None and (
                    not found["quote"] or (re.search("[\r\n]", body) and found["rest"].strip(" \t"))
                ):
                    shown = f"{self.label}, line {line}: a quote is not closed where its field ends"
                    hint = "close the quote, or remove it where it is part of the text"
                    raise DataError(shown, hint=hint, line=line)

        with self._open() as file:
            reader, line, text = csv.reader(passed(file), delimiter=self.delimiter), 1, ""
            for _ in reader:
                start, text = line, "".join(lines)
                if len(lines) > 1:
                    check(text, start)
                line = reader.line_num + 1
                lines.clear()
            check(text, start)  # the last one may have no end

    def _open(self) -> Any:
        opened: Any = gzip.open if self._compression else open
        return opened(self.path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="")

    def _records(self) -> Generator[tuple[int, list[str]]]:
        """Line number (from 1) and fields of every record.

        Empty lines are passed over, but below a first record of one field they are values that are missing. A byte that
        is not UTF-8 is a lone surrogate in its field.
        """
        csv.field_size_limit(1 << 30)
        try:
            with self._open() as file:
                reader = csv.reader(file, delimiter=self.delimiter)
                line, width = 1, 0
                for record in reader:
                    width = width or len(record)
                    if record or width == 1:
                        yield line, record or [""]
                    line = reader.line_num + 1
        except (gzip.BadGzipFile, EOFError, zlib.error, csv.Error) as exc:
            raise DataError(f"{self.label} cannot be read ({exc})", hint="copy it again, or write it again") from exc

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        return itertools.islice(self._records(), int(self._has_header), None)

    def _error(self, line: int, column: int, text: str, hint: str, name: str = "") -> DataError:
        place = f"{self.label}, line {line}, column {column}{name}"
        return DataError(f"{place}: {text}", hint=hint, line=line, column=column)

    def _check_utf8(self, line: int, fields: Sequence[tuple[int, str]]) -> None:
        for column, field in fields:
            octets = [ord(c) - 0xDC00 for c in field if "\udc80" <= c <= "\udcff"]
            if octets:
                shown = field[:40].encode("utf-8", "surrogateescape").decode("latin-1")
                text = f"byte 0x{octets[0]:02X} in {shown!r} is not UTF-8"
                raise self._error(line, column, text, "save the file as UTF-8, e.g. iconv -f LATIN1 -t UTF-8")

    def _diagnose(self, columns: Sequence[int], written: int | None) -> None:
        """Raise the first thing that is wrong with the file, by line and column."""
        width, used = len(self.names), sorted({*columns, *([] if written is None else [written])})
        for line, record in self._rows():
            if len(record) != width:
                raise self._error(
                    line,
                    min(len(record), width),
                    f"the line has {len(record)} columns; {width} expected as in line {self._first_line}",
                    self._other_delimiter(record) or "every line needs the same number of columns",
                )
            self._check_utf8(line, [(j, record[j]) for j in used])
            for j in sorted(columns):
                if not (is_missing(record[j]) or is_number(record[j], self.decimal)):
                    text, name = f"{record[j][:40]!r} is not a number", f" ({self.names[j]!r})"
                    raise self._error(line, j, text, self._text_hint(line, record, j), name)

    def _text_hint(self, line: int, record: list[str], column: int) -> str:
        other, word = (",", "comma") if self.decimal == "." else (".", "point")
        if is_number(record[column], other):
            return (
                f"use --decimal {other} (decimal={other!r}) where a {word} stands before the fraction, "
                "remove it where it groups thousands"
            )
        if hint := self._other_delimiter(record) or self._other_delimiter([record[column]]):
            return hint
        if line == self._first_line and not self._has_header:
            return "the first line looks like a header, use header=True"
        return "correct it, or leave the column out with features="

    def _other_delimiter(self, record: list[str]) -> str:
        text = self.delimiter.join(record).strip(" ")
        for decimal, (delimiter, name) in itertools.product((self.decimal, ","), _DELIMITERS.items()):
            parts = text.split(delimiter)
            if delimiter in (self.delimiter, decimal) or len(parts) < 2 or all(map(is_missing, parts)):
                continue
            if all(is_number(part, decimal) or is_missing(part) for part in parts):
                if decimal == self.decimal:
                    return f"the fields are separated by {name}, use delimiter={delimiter!r}"
                return (
                    f"the fields are separated by {name} and have decimal commas, "
                    f"use --delimiter '{delimiter}' --decimal {decimal}"
                )
        return ""

    def _looks_like_header(self, head: list[tuple[int, list[str]]], named: Sequence[str | int]) -> bool:
        """Whether the first record of ``head`` holds names.

        Raises
        ------
        DataError
            It may hold names or values; taking one for the other would lose a row, or make one of names.
        """
        (line, first), below = head[0], [fields for _, fields in head[1:] if len(fields) == len(head[0][1])]
        width, places = len(first), range(len(first))

        def reads(field: str) -> bool:
            return is_number(field, self.decimal)

        def shown(columns: Sequence[int]) -> str:
            return repr(first[columns[0]][:40]) if columns else ""

        columns = [[fields[j] for fields in below if not is_missing(fields[j])] for j in places]
        has_numbers = [any(map(reads, column)) for column in columns]
        text = [j for j in places if not reads(first[j]) and not is_missing(first[j])]
        numbers = [j for j in places if reads(first[j]) and not is_missing(first[j])]
        above_numbers = [j for j in text if has_numbers[j]]
        above_words = [
            j for j in numbers if columns[j] and not has_numbers[j] and not re.search(r"\d", "".join(columns[j]))
        ]
        recurring = [j for j in text if not has_numbers[j] and first[j] in columns[j]]
        wanted = {x for x in named if isinstance(x, str) and not (x.lstrip("-").isdigit() and -width <= int(x) < width)}
        if wanted and wanted <= {field.strip() for j, field in enumerate(first) if j not in recurring}:
            return True
        fractions = [j for j in numbers if columns[j] and all(reads(x) and self.decimal in x for x in columns[j])]
        whole = [int(first[j]) for j in numbers if re.fullmatch(r"[ \t]*\d+[ \t]*", first[j], re.ASCII)]
        are_years = len(whole) == width > 1 and whole == list(range(whole[0], whole[0] + len(whole)))
        are_odd = len(fractions) == len(numbers) and bool(text or len(below) > 1)
        is_whole = bool(whole) and len(whole) == len(numbers) == width - len(text) and not recurring
        # wavelengths, years, times: evenly spaced as no row below is, and with no value near those below
        spaced = [len(fields) > 2 and self._are_spaced(fields) for fields in (first, *below)]
        is_scale = spaced[0] and bool(below) and not any(spaced[1:])
        for j in places if is_scale else ():
            found = [self._number(field) for field in columns[j]]
            is_scale = is_scale and bool(found) and not min(found) <= self._number(first[j]) <= max(found)
        all_text = len(text) == width
        other = next((j for j in places if j not in text), 0)
        beside = "a number" if other in numbers else "empty" if not first[other].strip() else "a missing value"
        with_digits = all(re.match(r"\W*\d", first[j]) for j in above_numbers)
        is_quoted = numbers and below and self._quotes_numbers(line) and not self._quotes_numbers(head[1][0])
        doubts: list[tuple[Any, str]] = [
            (is_quoted, "its numbers are quoted, those below are not"),
            (all_text and above_numbers and recurring, f"{shown(recurring)} is a value further down"),
            (all_text and above_numbers and with_digits, f"{shown(above_numbers)} looks like a number"),
            (
                not all_text and above_numbers,
                f"{shown(above_numbers)} stands above numbers, and column {other} is {beside}",
            ),
            (above_words, f"{shown(above_words)} stands above text"),
            (
                is_whole and (are_odd or (are_years and fractions)),
                f"{' and '.join(map(str, whole[:2]))} stand above fractions",
            ),
            (is_scale, f"{' and '.join(first[:2])} are evenly spaced, and no value below is near them"),
            # what pandas writes where columns have no names
            (width > 1 and whole == list(places), "0 and 1 are the numbers of its columns"),
        ]
        if doubt := next((said for is_doubtful, said in doubts if is_doubtful), ""):
            raise DataError(f"{self.label}, line {line}: {doubt}; it may hold names or values", hint=_HEADER_HINT)
        return all_text

    def _number(self, field: str) -> float:
        return float(field.replace(self.decimal, ".")) if is_number(field, self.decimal) else np.nan

    def _are_spaced(self, fields: list[str]) -> bool:
        steps = np.diff([self._number(field) for field in fields])
        return bool(steps[0]) and np.allclose(steps, steps[0], rtol=1e-6, atol=0.0)

    def _quotes_numbers(self, line: int) -> bool:
        with self._open() as file:
            text = next(itertools.islice(file, line - 1, None), "")
        return re.search(r'"[ \t]*[+-]?[\d.,]+([eE][+-]?\d+)?[ \t]*"', text) is not None
