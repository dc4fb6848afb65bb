"""Parquet, one file or a folder of them in natural order (part.2 before part.10)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.dataset.sources.table import BLOCK_BYTES, Block, Table
from dkrr.errors import DataError

__all__ = ["ParquetTable"]


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(text), "") if text.isdigit() else (-1, text) for text in re.split(r"(\d+)", path.name) if text]


class ParquetTable(Table):
    """Columns of numbers in Parquet files of one schema; a stored pandas index is left out."""

    def __init__(self, path: Path, label: str) -> None:
        import pyarrow.parquet as pq

        self._files = sorted(path.glob("*.parquet"), key=_natural) if path.is_dir() else [path]
        if not self._files:
            raise DataError(f"{label} is a folder without .parquet files", hint="give the folder that holds the files")
        num_rows = 0
        self._types: dict[str, Any] = {}
        for number, file in enumerate(self._files):
            with _damage(file):
                schema, metadata = pq.read_schema(file), pq.read_metadata(file)
            if len(set(schema.names)) != len(schema.names):
                raise DataError(f"{file} has columns of the same name", hint="rename them")
            index = [name for name in (schema.pandas_metadata or {}).get("index_columns", []) if isinstance(name, str)]
            types = {name: schema.field(name).type for name in schema.names if name not in index}
            if number and list(types) != list(self._types):
                raise DataError(
                    f"{file} has columns {', '.join(types)}; {', '.join(self._types)} expected as in {self._files[0]}",
                    hint="ingest files of one schema",
                )
            for name, kind in types.items():
                if number and kind != self._types[name]:
                    types[name] = _wider(file, name, kind, self._types[name])
            self._types = types
            num_rows += metadata.num_rows
        if num_rows == 0 or not self._types:
            raise DataError(f"{label} has no {'rows' if self._types else 'columns'}", hint="check how it was made")
        super().__init__(label, list(self._types), num_rows, is_named=True)

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        import pyarrow.parquet as pq

        names = [self.names[j] for j in columns]
        for name in names:
            if not _is_number(self._types[name]):
                raise DataError(
                    f"column {name!r} of {self.label} has dtype {self._types[name]}; numbers expected",
                    hint="convert it to numbers, or leave the column out with features=",
                    dtype=str(self._types[name]),
                )
        label = None if label_column is None else self.names[label_column]
        wanted = list(dict.fromkeys([*names, *([label] if label else [])]))
        step = max(256, BLOCK_BYTES // (8 * max(1, len(wanted))))
        for file in self._files:
            # a buffer makes the reader stream the column chunks of a row group and not load them whole
            with _damage(file), pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False) as reader:
                for batch in reader.iter_batches(batch_size=step, columns=wanted, use_threads=False):
                    values = np.empty((batch.num_rows, len(names)))
                    for k, name in enumerate(names):
                        values[:, k] = _to_floats(batch.column(batch.schema.get_field_index(name)))
                    labels = None
                    if label is not None:
                        labels = batch.column(batch.schema.get_field_index(label)).to_pylist()
                    yield values, labels


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
