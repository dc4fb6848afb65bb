"""Parquet, one file or a folder of them.

What a folder holds is as in pyarrow.dataset and pandas: the files of all its subfolders, but for names that begin with
a dot or an underscore; and a subfolder ``year=2019`` gives its rows a column ``year``, behind those of the files. Files
are read in natural order (part.2 before part.10).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from dkrr.dataset.columns import unique_names
from dkrr.dataset.sources.table import BLOCK_BYTES, Block, Table, Unchanged
from dkrr.dataset.sources.text import is_number
from dkrr.errors import DataError

__all__ = ["ParquetTable", "check_names", "is_visible", "visible_files"]

_NULL = "__HIVE_DEFAULT_PARTITION__"


def is_visible(name: str) -> bool:
    """Whether a file counts, by its name or path inside a folder."""
    return not any(part.startswith((".", "_")) for part in name.split("/"))


def visible_files(folder: Path) -> list[Path]:
    """The files of a folder and of its subfolders, in natural order, without hidden ones.

    Raises
    ------
    DataError
        A subfolder is a link.
    """
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = filter(is_visible, folders)
        for name in folders:
            if os.path.islink(os.path.join(place, name)):
                raise DataError(
                    f"{os.path.join(place, name)} is a link to a folder", hint="move the folder there, or name it alone"
                )
        found += [Path(place, name) for name in names if is_visible(name)]
    return sorted(found, key=lambda path: _natural(path.relative_to(folder)))


def check_names(names: Sequence[str], label: str) -> None:
    """Refuse a folder without files of this kind, or with files of another, whose rows would be left out.

    Raises
    ------
    DataError
        None of the names, or not all of them, end in .parquet.
    """
    others = [name for name in names if not name.lower().endswith(".parquet")]
    if len(others) == len(names):
        raise DataError(f"{label} is a folder without .parquet files", hint="give the folder that holds the files")
    if others:
        raise DataError(
            f"{label} is a folder that holds {others[0]}, which is no .parquet file",
            hint="move it elsewhere, or give it a name that begins with an underscore",
        )


def _natural(path: Path) -> list[list[tuple[int, str]]]:
    return [
        [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", part) if text]
        for part in path.parts
    ]


class ParquetTable(Table):
    """Columns of numbers in Parquet files of the same columns; a stored pandas index is left out."""

    def __init__(self, path: Path, label: str) -> None:
        import pyarrow.parquet as pq

        self._files = [path]
        if path.is_dir():
            self._files = visible_files(path)
            check_names([str(file.relative_to(path)) for file in self._files], label)
        self._unchanged = Unchanged(self._files)
        num_rows = 0
        self._types: dict[str, Any] = {}
        for number, file in enumerate(self._files):
            with _damage(file):
                schema, metadata = pq.read_schema(file), pq.read_metadata(file)
            unique_names(schema.names, str(file))
            index = [name for name in (schema.pandas_metadata or {}).get("index_columns", []) if isinstance(name, str)]
            types = {name: schema.field(name).type for name in schema.names if name not in index}
            if number and set(types) != set(self._types):
                raise DataError(
                    f"{file} has columns {', '.join(types)}; {', '.join(self._types)} expected as in {self._files[0]}",
                    hint="ingest files of the same columns",
                )
            for name, kind in types.items():
                if not number:
                    self._types[name] = kind
                elif kind != self._types[name]:
                    self._types[name] = _wider(file, name, kind, self._types[name])
            num_rows += metadata.num_rows
        if num_rows == 0 or not self._types:
            raise DataError(f"{label} has no {'rows' if self._types else 'columns'}", hint="check how it was made")
        self._folders = _folder_columns(self._files, path, self._types)
        super().__init__(label, [*self._types, *self._folders], num_rows, is_named=True)

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        names = [self.names[j] for j in columns]
        for name in names:
            kind = self._types[name] if name in self._types else type(self._folders[name][0]).__name__
            if kind != "float" and (kind == "str" or not _is_number(kind)):
                raise DataError(
                    f"column {name!r} of {self.label} has dtype {kind}; numbers expected",
                    hint="convert it to numbers, or leave the column out with features=",
                    dtype=str(kind),
                )
        label = None if label_column is None else self.names[label_column]
        for number, batch in self._batches([*names, *([label] if label else [])]):
            values = np.empty((batch.num_rows, len(names)))
            for k, name in enumerate(names):
                if name in self._types:
                    values[:, k] = _to_floats(batch.column(name))
                else:
                    values[:, k] = self._folders[name][number]
            labels = None
            if label in self._types:
                labels = batch.column(label).to_pylist()
            elif label is not None:
                labels = [self._folders[label][number]] * batch.num_rows
            yield values, labels

    def as_written(self, column: int) -> Iterator[Any]:
        import pyarrow as pa

        name, kind = self.names[column], self.label_type(column)
        for number, batch in self._batches([name]):
            if name in self._folders:
                yield pa.array([self._folders[name][number]] * batch.num_rows, kind)
                continue
            try:
                yield batch.column(name).cast(kind)
            except pa.ArrowInvalid as exc:
                raise DataError(
                    f"column {name!r} of {self._files[number]} has values that are no {kind}, as in {self._files[0]} "
                    f"({exc})",
                    hint="write files of one schema",
                ) from exc

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """Numbers of files and batches of rows with the columns that files have of these; one of them at least."""
        import pyarrow.parquet as pq

        wanted = [name for name in dict.fromkeys(names) if name in self._types]
        wanted = wanted or list(self._types)[:1]  # which tells the number of rows
        step = max(256, BLOCK_BYTES // (8 * max(1, len(wanted))))
        for number, file in enumerate(self._files):
            # a buffer makes the reader stream the column chunks of a row group and not load them whole
            with _damage(file), pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as reader:
                for batch in reader.iter_batches(batch_size=step, columns=wanted, use_threads=False):
                    yield number, batch
        self._unchanged.check()

    def label_type(self, column: int) -> Any:
        import pyarrow as pa

        name = self.names[column]
        if name in self._folders:
            return pa.string() if isinstance(self._folders[name][0], str) else pa.float64()
        kind = self._types[name]
        return kind.value_type if pa.types.is_dictionary(kind) else kind


def _folder_columns(files: Sequence[Path], root: Path, types: dict[str, Any]) -> dict[str, list[Any]]:
    """Columns that folders called ``name=value`` give, with a value for each file.

    They are numbers where all values are, NaN where there is none, else text.
    """
    found = [
        dict(part.split("=", 1) for part in file.relative_to(root).parts[:-1] if "=" in part) if file != root else {}
        for file in files
    ]
    for file, values in zip(files, found, strict=True):
        if list(values) != list(found[0]):
            raise DataError(
                f"{file} is in folders that name {', '.join(values) or 'no columns'}; {', '.join(found[0]) or 'none'} "
                f"expected as for {files[0]}",
                hint="put all files into folders NAME=VALUE of the same names",
            )
    columns: dict[str, list[Any]] = {}
    for name in found[0]:
        if name in types:
            raise DataError(
                f"column {name!r} is in {files[0]} and in the name of its folder", hint="rename one of the two"
            )
        texts = [unquote(values[name]).replace(_NULL, "nan") for values in found]
        columns[unquote(name)] = [float(text) for text in texts] if all(map(is_number, texts)) else texts
    return columns


@contextlib.contextmanager
def _damage(file: Path) -> Iterator[None]:
    """Turn what pyarrow says about a file that it cannot read into a typed error."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as exc:
        raise DataError(f"{file} is not a readable Parquet file ({exc})", hint="write it again") from exc
    except OSError as exc:
        if exc.errno is not None:
            raise
        raise DataError(f"{file} is not a readable Parquet file ({exc})", hint="write it again") from exc


def _is_number(kind: Any) -> bool:
    import pyarrow.types as t

    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind))


def _wider(file: Path, name: str, kind: Any, first: Any) -> Any:
    if _is_number(kind) and _is_number(first):
        return first
    raise DataError(f"column {name!r} of {file} has dtype {kind}; {first} expected", hint="ingest files of one schema")


def _to_floats(column: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    # 64-bit integers beyond 2^53 are rounded, as NumPy does
    floats = column.cast(pa.float64(), safe=False)
    if floats.null_count:
        floats = pc.fill_null(floats, float("nan"))
    return floats.to_numpy(zero_copy_only=False)
