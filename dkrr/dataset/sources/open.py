"""Which kind of source is this? The one place that knows all of them."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dkrr.dataset.columns import frame_labels, unique_names
from dkrr.dataset.dataset import Dataset
from dkrr.dataset.destination import storage_errors
from dkrr.dataset.sources.table import Join, Table
from dkrr.dataset.sources.text import Header
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.store.files import is_url

__all__ = ["open_table"]

_SUFFIXES = (".csv", ".csv.gz", ".parquet", ".npy", ".zarr")


def open_table(
    source: Any,
    *,
    header: Header = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
    named: Iterable[Any] = (),
    y: Any = None,
    sample_weight: Any = None,
) -> Table:
    """The table behind any source, joined with targets and weights that are given apart.

    ``named`` has columns that are asked for, one by one or in lists, None among them: of a text file they tell names in
    its first line from values.

    Raises
    ------
    DataError, StoreError
        The source is missing, damaged, of the wrong shape or type, or of another length than ``y``.
    """
    columns = [name for item in named for name in (item if isinstance(item, list | tuple) else [item])]
    table = _open_one(source, "X", "x", header=header, delimiter=delimiter, decimal=decimal, named=columns)
    if y is None and sample_weight is None:
        return table
    given = [name for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None]
    if table.target is not None or table.weight is not None:
        raise ParameterError(f"{table.label} brings its own targets; {' and '.join(given)} given too", hint="drop them")
    targets = None if y is None else _open_one(y, "y", "y", allow_1d=True)
    weights = None if sample_weight is None else _open_one(sample_weight, "sample_weight", "weight", allow_1d=True)
    return Join(table, targets, weights)


def _open_one(
    source: Any,
    label: str,
    prefix: str,
    *,
    allow_1d: bool = False,
    **csv: Any,
) -> Table:
    options: dict[str, Any] = {"prefix": prefix, "allow_1d": allow_1d}
    if isinstance(source, str | os.PathLike):
        return _open_path(source, csv, **options)
    if isinstance(source, Table):
        return source
    if isinstance(source, Dataset):
        from dkrr.dataset.sources.zarrs import dataset_table

        return dataset_table(source)
    # a library whose object this is has been imported by whoever made it: nothing is imported to find out
    if _is_a(source, "pandas", "DataFrame", "Series"):
        from dkrr.dataset.sources.frames import FrameTable

        return FrameTable(source, label, **options)
    if _is_a(source, "dask.array", "Array"):
        from dkrr.dataset.sources.arrays import DaskTable

        return DaskTable(source, label, **options)
    if _is_a(source, "dask.dataframe", "DataFrame", "Series"):
        from dkrr.dataset.sources.arrays import DaskTable

        # one pass over the graph for the numbers of rows
        names = [source.name] if source.ndim == 1 else source.columns
        named = None if names[0] is None else unique_names(names, label)
        return DaskTable(source.to_dask_array(lengths=True), label, names=named, **options)
    if _is_a(source, "zarr", "Array", "Group"):
        from dkrr.dataset.sources.zarrs import open_zarr_object

        return open_zarr_object(source, label, **options)
    if type(source).__module__.startswith("dask."):
        raise DataError(
            f"{label} is of type {type(source).__name__}; a dask array expected",
            hint="pass its .to_dask_array(lengths=True)",
        )
    from dkrr.dataset.sources.arrays import ArrayTable, as_array

    labels = frame_labels(source)
    named = None if labels is None else unique_names(labels, label)
    return ArrayTable(as_array(source, label), label, names=named, **options)


def _is_a(source: Any, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    kinds = tuple(kind for kind in (getattr(loaded, name, None) for name in names) if isinstance(kind, type))
    return isinstance(source, kinds)


def _open_path(source: str | os.PathLike[str], csv: dict[str, Any], *, prefix: str, allow_1d: bool) -> Table:
    text = os.fspath(source)
    if text.startswith("sklearn:"):
        from dkrr.dataset.sources.generated import SklearnTable

        return SklearnTable(text)
    if text.startswith("generate:"):
        from dkrr.dataset.sources.generated import GeneratedTable

        return GeneratedTable(text)
    from dkrr.dataset.sources.zarrs import is_zarr, open_zarr

    if is_url(text):
        from dkrr.dataset.sources.remote import fetch_copy

        copy = fetch_copy(text)
        if copy is None:
            return open_zarr(text, text, prefix=prefix, allow_1d=allow_1d)
        table = _open_path(copy, csv, prefix=prefix, allow_1d=allow_1d)
        table.label = text
        weakref.finalize(table, shutil.rmtree, copy.parent, ignore_errors=True)
        return table
    path = Path(text)
    with storage_errors(text):
        if not _exists(path):
            _missing(path)
        name = path.name.lower()
        if path.is_dir():
            if is_zarr(path) or name.endswith(".zarr"):
                return open_zarr(text, text, prefix=prefix, allow_1d=allow_1d)
            from dkrr.dataset.sources.parquet import ParquetTable

            return ParquetTable(path, text)
        with open(path, "rb"):
            pass  # no permission is found here, with the system's own words
        if name.endswith((".csv", ".csv.gz")):
            from dkrr.dataset.sources.text import CsvTable

            return CsvTable(path, text, **csv)
        if name.endswith(".parquet"):
            from dkrr.dataset.sources.parquet import ParquetTable

            return ParquetTable(path, text)
        if name.endswith(".npy"):
            from dkrr.dataset.sources.npy import NpyTable

            return NpyTable(path, text, prefix=prefix, allow_1d=allow_1d)
    raise DataError(
        f"{text} has an unknown format; {', '.join(_SUFFIXES)}, sklearn:NAME or generate:NAME expected",
        hint="convert it to one of these",
    )


def _exists(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _missing(path: Path) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise StoreError(f"{path} does not exist, nor does the folder {folder}", hint="check the path")
    near = difflib.get_close_matches(path.name, os.listdir(folder), n=1)
    raise StoreError(f"{path} does not exist", hint=f"did you mean {folder / near[0]}?" if near else "check the path")
