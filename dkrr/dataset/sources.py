"""Which kind of source is this? The one place that knows all of them, and fetches those at an address.

CSV, Parquet and NumPy files at an s3:// address are read from their beginning to their end, some of them twice, so a
copy that lives as long as its table is simpler than a file that is read over the network, and no slower. Zarr arrays
and data sets are read in place. Cost: the bytes of the source, in Dask's temporary directory or the system's.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dkrr.dataset import arrays
from dkrr.dataset.columns import did_you_mean, frame_labels, unique_names
from dkrr.dataset.dataset import Dataset
from dkrr.dataset.destination import check_space, storage_errors
from dkrr.dataset.table import Join, Table, is_visible
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.store.files import children, is_url, join, key_size, list_entries, name_of, parent_of
from dkrr.store.objects import get_file

__all__ = ["Table", "open_table"]

_TEXT, _FILES = (".csv", ".csv.gz"), (".csv", ".csv.gz", ".parquet", ".npy")


def open_table(
    source: Any,
    *,
    header: Any = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
    named: Iterable[Any] = (),
    y: Any = None,
    sample_weight: Any = None,
    allow_1d: bool = False,
) -> Table:
    """The table behind any source, joined with targets and weights that are given apart.

    ``header``, ``delimiter`` and ``decimal`` are those of a text file, see :class:`~dkrr.dataset.arrow.CsvTable`.
    ``named`` has columns that are asked for, one by one or in lists, None among them: of a text file they tell names in
    its first line from values. With ``allow_1d`` an array of one axis is one column.

    Raises
    ------
    DataError, StoreError
        The source is missing, damaged, of the wrong shape or type, or of another length than ``y``.
    """
    columns = [name for item in named for name in (item if isinstance(item, list | tuple) else [item])]
    text = {"header": header, "delimiter": delimiter, "decimal": decimal, "named": columns}
    table = _open_any(source, "X", text, allow_1d=allow_1d)
    if y is None and sample_weight is None:
        return table
    if table.target is not None or table.weight is not None:
        given = [name for name, value in (("y", y), ("sample_weight", sample_weight)) if value is not None]
        raise ParameterError(f"{table.label} brings its own targets; {' and '.join(given)} given too", hint="drop them")
    targets = None if y is None else _open_any(y, "y", {}, prefix="y", allow_1d=True)
    weights = None
    if sample_weight is not None:
        weights = _open_any(sample_weight, "sample_weight", {}, prefix="weight", allow_1d=True)
    return Join(table, targets, weights)


def _open_any(source: Any, label: str, text: dict[str, Any], **options: Any) -> Table:
    if isinstance(source, Table):
        return source
    if isinstance(source, str | os.PathLike):
        return _open_path(os.fspath(source), os.fspath(source), text, **options)
    if isinstance(source, Dataset):
        return arrays.dataset_table(source)
    libraries = {kind.__module__.partition(".")[0] for kind in type(source).__mro__}
    if "zarr" in libraries:
        return arrays.zarr_table(source, label, **options)
    if "dask" in libraries and hasattr(type(source), "to_dask_array"):
        labels = [source.name] if source.ndim == 1 else source.columns
        names = None if labels[0] is None else unique_names(labels, label)
        # one pass over the graph for the numbers of rows
        return arrays.dask_table(source.to_dask_array(lengths=True), label, names=names, **options)
    if "dask" in libraries and hasattr(type(source), "chunks"):
        return arrays.dask_table(source, label, **options)
    if "dask" in libraries:
        raise DataError(
            f"{label} is of type {type(source).__name__}; a dask array expected",
            hint="pass its .to_dask_array(lengths=True)",
        )
    labels = frame_labels(source)
    if "pandas" in libraries or (labels is not None and hasattr(source, "__arrow_c_stream__")):
        from dkrr.dataset.arrow import FrameTable  # loads pyarrow

        return FrameTable(source, label, **options)
    named = None if labels is None else unique_names(labels, label)
    return arrays.array_table(source, label, names=named, **options)


def _open_path(place: str, label: str, text: dict[str, Any], **options: Any) -> Table:
    if place.startswith("sklearn:"):
        return arrays.sklearn_table(place)
    if place.startswith("generate:"):
        return arrays.generated_table(place)
    if is_url(place):
        copy = _fetch(place)
        if copy is None:
            return arrays.open_zarr(place, label, **options)
        table = _open_path(str(copy), label, text, **options)
        weakref.finalize(table, shutil.rmtree, copy.parent, ignore_errors=True)
        return table
    path, is_file = Path(place), os.path.isfile(place)
    name = path.name.lower() if is_file else ""
    with storage_errors(place):
        try:
            os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise _missing(path) from None
        if is_file:
            path.open("rb").close()  # no permission is found here, with the system's own words
        elif place.endswith(".zarr") or any((path / key).exists() for key in ("zarr.json", ".zarray", ".zgroup")):
            return arrays.open_zarr(place, label, **options)
        if name.endswith(".npy"):
            return arrays.npy_table(path, label, **options)
        if not is_file or name.endswith((*_TEXT, ".parquet")):
            from dkrr.dataset import arrow  # loads pyarrow

            return arrow.CsvTable(path, label, **text) if name.endswith(_TEXT) else arrow.ParquetTable(path, label)
    raise DataError(
        f"{label} has an unknown format; {', '.join(_FILES)}, .zarr, sklearn:NAME or generate:NAME expected",
        hint="convert it to one of these",
    )


def _missing(path: Path) -> StoreError:
    if not path.parent.is_dir():
        return StoreError(f"{path} does not exist, nor does the folder {path.parent}", hint="check the path")
    near = did_you_mean(path.name, os.listdir(path.parent), "check the path")
    return StoreError(f"{path} does not exist in {path.parent}", hint=near)


def _fetch(url: str) -> Path | None:
    """A copy of a file, or of all Parquet files below an address, in a new folder that the caller removes.

    None for what is read in place.
    """
    name, parent = name_of(url), parent_of(url)
    if name.endswith(".zarr"):
        return None
    size = key_size(parent, name) if name.endswith(_FILES) else None
    sizes = {name: size or 0}
    if size is None and "zarr.json" in children(url):  # whose chunks need not be listed
        return None
    if size is None:
        found = [item for item in list_entries(url) if is_visible(item.key)]
        sizes = {f"{name}/{item.key}": item.num_bytes for item in found}
        if not any(key.endswith(".parquet") for key in sizes):
            if name.endswith(_FILES):
                raise StoreError(f"{url} does not exist", hint="check the address")
            return None
    import dask

    folder = Path(tempfile.mkdtemp(prefix="dkrr-", dir=dask.config.get("temporary-directory", None)))
    try:
        check_space(folder, sum(sizes.values()))
        for key in sizes:
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            if get_file(parent, key, folder / key) is None:
                raise StoreError(f"{join(parent, key)} was removed while it was read", hint="start again")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / name
