"""CSV text, plain or gzipped, parsed by pyarrow as it streams.

pyarrow is fast and says little about where a file is wrong. So when it fails, or a value turns out missing, the file
is read once more, slowly, with Python's csv module, to name line and column.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from dkrr.dataset.sources.table import Block, Table, Unchanged
from dkrr.errors import DataError, ParameterError

__all__ = ["MISSING_MARKS", "CsvTable", "Header", "is_missing", "is_number", "read_records"]

Header = bool | Literal["auto"]

# what pyarrow takes for a missing value, and marks that are as common
MISSING_MARKS = {
    "",
    "#N/A",
    "#N/A N/A",
    "#NA",
    "-1.#IND",
    "-1.#QNAN",
    "-NaN",
    "-nan",
    "1.#IND",
    "1.#QNAN",
    "N/A",
    "NA",
} | {
    "NULL",
    "NaN",
    "n/a",
    "nan",
    "null",
    "?",
    "-",
}
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar", " ": "a space"}
_HEADER_HINT = "say header=True (--header) if these are names, header=False (--no-header) if they are values"
_HEAD_RECORDS = 100  # looked at to find out whether the line above them has names
BLOCK_BYTES = 4 << 20


def _number_pattern(decimal: str) -> re.Pattern[str]:
    point = re.escape(decimal)
    return re.compile(
        rf"[+-]?(\d+{point}?\d*|{point}\d+)([eE][+-]?\d+)?|[+-]?(inf(inity)?|nan)", re.IGNORECASE | re.ASCII
    )


_NUMBERS = {decimal: _number_pattern(decimal) for decimal in ".,"}


def is_number(text: str, decimal: str = ".") -> bool:
    """Whether a field is a number, or says that it is none."""
    return _NUMBERS[decimal].fullmatch(text.strip(" \t")) is not None


def is_missing(text: str) -> bool:
    """Whether a field is a mark of a missing value."""
    return text.strip(" \t") in MISSING_MARKS


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        yield file


def read_records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Line number (from 1) and fields of every record.

    Empty lines are passed over, but below a first record of one field they are values that are missing. A byte that is
    not UTF-8 is a lone surrogate in its field.

    Raises
    ------
    DataError
        The file is no readable gzip file.
    """
    csv.field_size_limit(1 << 30)
    try:
        with _open(path) as file:
            reader = csv.reader(file, delimiter=delimiter)
            line, width = 1, 0
            for record in reader:
                width = width or len(record)
                if record or width == 1:
                    yield line, record or [""]
                line = reader.line_num + 1
    except (gzip.BadGzipFile, EOFError, zlib.error, csv.Error) as exc:
        raise DataError(f"{path} cannot be read ({exc})", hint="copy it again, or write it again") from exc


class CsvTable(Table):
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
        if decimal not in _NUMBERS:
            raise ParameterError(f"decimal is {decimal!r}; '.' or ',' expected", hint="leave it out for 1.5")
        self.path, self.decimal = path, decimal
        self.delimiter = delimiter or (";" if decimal == "," else ",")
        self._unchanged = Unchanged([path])
        self._marks = MISSING_MARKS | {f" {mark}" for mark in MISSING_MARKS}
        records = read_records(path, self.delimiter)
        try:
            head = list(itertools.islice(records, 1 + _HEAD_RECORDS))
        finally:
            records.close()  # type: ignore[attr-defined]
        if not head:
            raise DataError(f"{path} is empty", hint="check how it was written")
        self._first_line, record = head[0]
        if header is not False:
            for j, field in enumerate(record):
                self._check_utf8(self._first_line, j, field)
        second = head[1] if len(head) > 1 else None
        line, example = second or head[0]
        if len(example) == 1 and (hint := self._other_delimiter(example)):
            # here and not when it is parsed: the one column may be taken for the target
            raise DataError(f"{path}, line {line}, column 0: {example[0][:40]!r} is not a number", hint=hint)
        self._has_header = self._looks_like_header(head, named) if header == "auto" else header
        if self._has_header and second is None:
            raise DataError(f"{path} has a header and no rows", hint="check how it was written")
        if self._has_header:
            names, repeated = [name.strip() for name in record], Counter(name.strip() for name in record)
            for name, count in repeated.items():
                if count > 1:
                    column = names.index(name, names.index(name) + 1)
                    raise DataError(
                        f"{path}, line {self._first_line}, column {column}: the name {name!r} occurs {count} times",
                        hint="rename the columns, or use header=False if these are values",
                    )
        else:
            names = [f"x{j}" for j in range(len(record))]
        self._line_bytes = max(sum(map(len, fields)) + len(fields) for _, fields in head)
        # the second record starts on the line after the header, which may itself span several
        self._skip = (second[0] - 1 if second else 0) if self._has_header else self._first_line - 1
        super().__init__(label, names, None, is_named=bool(self._has_header))

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        import pyarrow.compute as pc

        for values, labels in self._read(columns, label_column):
            yield values, None if labels is None else pc.utf8_trim_whitespace(labels).to_pylist()

    def as_written(self, column: int) -> Iterator[Any]:
        return (labels for _, labels in self._read([], column))

    def _read(self, columns: Sequence[int], label_column: int | None) -> Iterator[tuple[Any, Any]]:
        """The blocks, with labels as they stand in an Arrow array."""
        import pyarrow as pa

        done = 0
        while True:
            skipped = 0
            try:
                for values, labels in self._parse(columns, label_column):
                    start = min(done - skipped, len(values))
                    skipped += start
                    done += len(values) - start
                    skipped += len(values) - start
                    if start < len(values):
                        yield values[start:], None if labels is None else labels[start:]
                break
            except (pa.ArrowInvalid, OSError) as exc:
                if isinstance(exc, OSError) and exc.errno is not None:
                    raise
                self._unchanged.check()
                padded = self._diagnose(columns, label_column, exc)
                if not padded - self._marks:
                    raise DataError(
                        f"{self.path} cannot be parsed ({exc})", hint="check quotes, delimiter and encoding"
                    ) from exc
                self._marks = self._marks | padded
        self._unchanged.check()

    def _parse(self, columns: Sequence[int], label_column: int | None) -> Iterator[tuple[Any, Any]]:
        import pyarrow as pa
        import pyarrow.csv as pc

        wanted = sorted({*columns, *([label_column] if label_column is not None else [])})
        # a name may be anything and occur twice, a number does not
        types = {str(j): pa.string() if j == label_column else pa.float64() for j in wanted}
        with pa.input_stream(str(self.path), compression="gzip" if self._is_gzip else None) as stream:
            reader = pc.open_csv(
                stream,
                read_options=pc.ReadOptions(
                    column_names=[str(j) for j in range(len(self.names))],
                    skip_rows=self._skip,
                    block_size=max(BLOCK_BYTES, 16 * self._line_bytes),
                ),
                parse_options=pc.ParseOptions(
                    delimiter=self.delimiter,
                    newlines_in_values=True,
                    ignore_empty_lines=len(self.names) > 1,  # of one column they are values that are missing
                ),
                convert_options=pc.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=sorted(self._marks),
                    strings_can_be_null=False,
                    decimal_point=self.decimal,
                ),
            )
            with reader:
                for batch in reader:
                    if batch.num_rows:
                        yield _to_block(batch, columns, label_column)

    def label_type(self, column: int) -> Any:
        import pyarrow as pa

        return pa.string()  # as it is written there: 007 stays 007

    def locate(self, row: int) -> str:
        for number, (line, _) in enumerate(self._records()):
            if number == row:
                return f"line {line}"
        return ""

    @property
    def _is_gzip(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    def _check_utf8(self, line: int, column: int, field: str) -> None:
        octets = [ord(c) - 0xDC00 for c in field if "\udc80" <= c <= "\udcff"]
        if octets:
            shown = field[:40].encode("utf-8", "surrogateescape").decode("latin-1")
            raise DataError(
                f"{self.path}, line {line}, column {column}: byte 0x{octets[0]:02X} in {shown!r} is not UTF-8",
                hint="save the file as UTF-8, e.g. iconv -f LATIN1 -t UTF-8",
                line=line,
                column=column,
            )

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        records = read_records(self.path, self.delimiter)
        if self._has_header:
            next(records, None)
        return records

    def _diagnose(self, columns: Sequence[int], label_column: int | None, error: Exception) -> set[str]:
        """Raise the first thing that is wrong with the file, by line and column; else marks among blanks, as found."""
        width, padded = len(self.names), set()
        numeric = sorted({j for j in columns if j != label_column})
        for line, record in self._records():
            if len(record) != width:
                column = min(len(record), width)
                raise DataError(
                    f"{self.path}, line {line}, column {column}: the line has {len(record)} columns; {width} expected "
                    f"as in line {self._first_line}",
                    hint=self._other_delimiter(record) or "every line needs the same number of columns",
                    line=line,
                    column=column,
                ) from error
            for j in sorted({*numeric, *([] if label_column is None else [label_column])}):
                self._check_utf8(line, j, record[j])
            for j in numeric:
                if is_missing(record[j]):
                    padded.add(record[j])
                elif not is_number(record[j], self.decimal):
                    raise DataError(
                        f"{self.path}, line {line}, column {j} ({self.names[j]!r}): {record[j][:40]!r} is not a number",
                        hint=self._text_hint(line, record, j),
                        line=line,
                        column=j,
                    ) from error
        return padded

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
        for decimal in (self.decimal, ","):
            for delimiter, name in _DELIMITERS.items():
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

        def reads(field: str) -> bool:
            return is_number(field, self.decimal)

        columns = [[fields[j] for fields in below if not is_missing(fields[j])] for j in range(len(first))]
        has_numbers = [any(map(reads, column)) for column in columns]
        text = [j for j, field in enumerate(first) if not reads(field) and not is_missing(field)]
        numbers = [j for j, field in enumerate(first) if reads(field) and not is_missing(field)]
        above_numbers = [j for j in text if has_numbers[j]]
        above_words = [
            j for j in numbers if columns[j] and not has_numbers[j] and not re.search(r"\d", "".join(columns[j]))
        ]
        recurring = [j for j in text if not has_numbers[j] and first[j] in columns[j]]
        width = len(first)
        wanted = {x for x in named if isinstance(x, str) and not (x.lstrip("-").isdigit() and -width <= int(x) < width)}
        if wanted and wanted <= {field.strip() for j, field in enumerate(first) if j not in recurring}:
            return True
        fractions = [j for j in numbers if columns[j] and all(reads(x) and self.decimal in x for x in columns[j])]
        whole = [int(first[j]) for j in numbers if re.fullmatch(r"[ \t]*\d+[ \t]*", first[j], re.ASCII)]
        are_years = len(whole) == len(first) > 1 and whole == list(range(whole[0], whole[0] + len(whole)))
        doubt = ""
        if len(text) == len(first):
            if above_numbers and recurring:
                doubt = f"{first[recurring[0]][:40]!r} is a value further down"
            elif above_numbers and all(re.match(r"\W*\d", first[j]) for j in above_numbers):
                doubt = f"{first[above_numbers[0]][:40]!r} looks like a number"
        elif above_numbers:
            j, other = above_numbers[0], next(j for j in range(len(first)) if j not in text)
            beside = "a number" if other in numbers else "empty" if not first[other].strip() else "a missing value"
            doubt = f"{first[j][:40]!r} stands above numbers, and column {other} is {beside}"
        elif above_words:
            doubt = f"{first[above_words[0]][:40]!r} stands above text"
        elif whole and len(whole) == len(numbers) == len(first) - len(text) and not recurring:
            is_odd = len(fractions) == len(numbers) and bool(text or len(below) > 1)
            if is_odd or (are_years and fractions):
                doubt = f"{' and '.join(map(str, whole[:2]))} stand above fractions"
        if numbers and below and _quotes_numbers(self.path, line) and not _quotes_numbers(self.path, head[1][0]):
            doubt = "its numbers are quoted, those below are not"
        if doubt:
            raise DataError(f"{self.path}, line {line}: {doubt}; it may hold names or values", hint=_HEADER_HINT)
        return len(text) == len(first)


def _quotes_numbers(path: Path, line: int) -> bool:
    with _open(path) as file:
        text = next(itertools.islice(file, line - 1, None), "")
    return re.search(r'"[ \t]*[+-]?[\d.,]+([eE][+-]?\d+)?[ \t]*"', text) is not None


def _to_block(batch: Any, columns: Sequence[int], label_column: int | None) -> tuple[Any, Any]:
    values = np.empty((batch.num_rows, len(columns)))
    for k, j in enumerate(columns):
        column = batch.column(str(j))
        values[:, k] = (column.fill_null(float("nan")) if column.null_count else column).to_numpy()
    return values, None if label_column is None else batch.column(str(label_column))
