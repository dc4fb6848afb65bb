"""CSV text, plain or gzipped, parsed by pyarrow as it streams.

pyarrow is fast and says little about where a file is wrong. So when it fails, or a value turns out missing, the file
is read once more, slowly, with Python's csv module, to name line and column.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from dkrr.dataset.sources.table import Block, Table
from dkrr.errors import DataError, ParameterError

__all__ = ["CsvTable", "Header", "read_records"]

Header = bool | Literal["auto"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(inf(inity)?|nan)", re.IGNORECASE)
# what pyarrow takes for a missing value, and this module therefore too
_MISSING = {"", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA"} | {
    "NULL",
    "NaN",
    "n/a",
    "nan",
    "null",
}
_DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a bar", " ": "a space"}
BLOCK_BYTES = 4 << 20


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.strip(" \t")) is not None


def _is_missing(text: str) -> bool:
    return text.strip(" \t") in _MISSING


@contextlib.contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
        yield file


def read_records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Line number (from 1) and fields of every record that is not empty.

    Raises
    ------
    DataError
        The file is no readable gzip file.
    """
    csv.field_size_limit(1 << 30)
    try:
        with _open(path) as file:
            reader = csv.reader(file, delimiter=delimiter)
            line = 1
            for record in reader:
                if record:
                    yield line, record
                line = reader.line_num + 1
    except (gzip.BadGzipFile, EOFError, zlib.error, csv.Error) as exc:
        raise DataError(f"{path} cannot be read ({exc})", hint="copy it again, or write it again") from exc


class CsvTable(Table):
    """A .csv or .csv.gz file.

    Parameters
    ----------
    header
        "auto" takes the first line for names if it has text where the second line has a number, or nothing but text.
    delimiter
        One character; None means a comma.

    Raises
    ------
    DataError
        An empty file.
    """

    def __init__(self, path: Path, label: str, *, header: Header = "auto", delimiter: str | None = None) -> None:
        if header not in (True, False, "auto"):
            raise ParameterError(f"header is {header!r}", hint="use True, False or 'auto'")
        if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n'):
            raise ParameterError(f"delimiter is {delimiter!r}; one character expected", hint="use ',' ';' '|' or a tab")
        self.path, self.delimiter = path, delimiter or ","
        records = read_records(path, self.delimiter)
        try:
            first = next(records, None)
            second = next(records, None)
        finally:
            records.close()  # type: ignore[attr-defined]
        if first is None:
            raise DataError(f"{path} is empty", hint="check how it was written")
        self._first_line, record = first
        self._has_header = _looks_like_header(record, second[1] if second else None) if header == "auto" else header
        line, example = second or first
        if len(example) == 1 and (hint := self._other_delimiter(example)):
            # here and not when it is parsed: the one column may be taken for the target
            raise DataError(f"{path}, line {line}, column 0: {example[0][:40]!r} is not a number", hint=hint)
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
        self._line_bytes = max(sum(map(len, r)) + len(r) for r in (record, second[1] if second else record))
        # the second record starts on the line after the header, which may itself span several
        self._skip = (second[0] - 1 if second else 0) if self._has_header else self._first_line - 1
        super().__init__(label, names, None, is_named=bool(self._has_header))

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        import pyarrow as pa
        import pyarrow.csv as pc

        wanted = sorted({*columns, *([label_column] if label_column is not None else [])})
        # a name may be anything and occur twice, a number does not
        types = {str(j): pa.string() if j == label_column else pa.float64() for j in wanted}
        try:
            with pa.input_stream(str(self.path), compression="gzip" if self._is_gzip else None) as stream:
                reader = pc.open_csv(
                    stream,
                    read_options=pc.ReadOptions(
                        column_names=[str(j) for j in range(len(self.names))],
                        skip_rows=self._skip,
                        block_size=max(BLOCK_BYTES, 16 * self._line_bytes),
                    ),
                    parse_options=pc.ParseOptions(delimiter=self.delimiter),
                    convert_options=pc.ConvertOptions(
                        column_types=types,
                        include_columns=list(types),
                        null_values=sorted(_MISSING),
                        strings_can_be_null=False,
                    ),
                )
                with reader:
                    for batch in reader:
                        if batch.num_rows:
                            yield _to_block(batch, columns, label_column)
        except (pa.ArrowInvalid, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno is not None:
                raise
            raise self._diagnose(columns, label_column, exc) from exc

    def locate(self, row: int) -> str:
        for number, (line, _) in enumerate(self._records()):
            if number == row:
                return f"line {line}"
        return ""

    @property
    def _is_gzip(self) -> bool:
        return self.path.suffix.lower() == ".gz"

    def _records(self) -> Iterator[tuple[int, list[str]]]:
        records = read_records(self.path, self.delimiter)
        if self._has_header:
            next(records, None)
        return records

    def _diagnose(self, columns: Sequence[int], label_column: int | None, error: Exception) -> DataError:
        """The first thing that is wrong with the file, by line and column."""
        width = len(self.names)
        numeric = sorted({j for j in columns if j != label_column})
        for line, record in self._records():
            if len(record) != width:
                column = min(len(record), width)
                return DataError(
                    f"{self.path}, line {line}, column {column}: the line has {len(record)} columns; {width} expected "
                    f"as in line {self._first_line}",
                    hint=self._other_delimiter(record) or "every line needs the same number of columns",
                    line=line,
                    column=column,
                )
            for j in numeric:
                if not _is_number(record[j]) and not _is_missing(record[j]):
                    return DataError(
                        f"{self.path}, line {line}, column {j} ({self.names[j]!r}): {record[j][:40]!r} is not a number",
                        hint=self._text_hint(line, record, j),
                        line=line,
                        column=j,
                    )
        return DataError(f"{self.path} cannot be parsed ({error})", hint="check quotes, delimiter and encoding")

    def _text_hint(self, line: int, record: list[str], column: int) -> str:
        if hint := self._other_delimiter(record) or self._other_delimiter([record[column]]):
            return hint
        if line == self._first_line and not self._has_header:
            return "the first line looks like a header, use header=True"
        return "correct it, or leave the column out with features="

    def _other_delimiter(self, record: list[str]) -> str:
        text = self.delimiter.join(record)
        for delimiter, name in _DELIMITERS.items():
            parts = text.split(delimiter)
            if delimiter != self.delimiter and len(parts) > 1 and all(map(_is_number, parts)):
                return f"the fields are separated by {name}, use delimiter={delimiter!r}"
        return ""


def _looks_like_header(first: list[str], second: list[str] | None) -> bool:
    text = [not _is_number(field) and not _is_missing(field) for field in first]
    if not any(text):
        return False
    if second is None or len(second) != len(first) or all(text):
        return all(text)
    return any(is_text and _is_number(field) for is_text, field in zip(text, second, strict=True))


def _to_block(batch: Any, columns: Sequence[int], label_column: int | None) -> Block:
    values = np.empty((batch.num_rows, len(columns)))
    for k, j in enumerate(columns):
        column = batch.column(str(j))
        values[:, k] = (column.fill_null(float("nan")) if column.null_count else column).to_numpy()
    return values, None if label_column is None else batch.column(str(label_column)).to_pylist()
