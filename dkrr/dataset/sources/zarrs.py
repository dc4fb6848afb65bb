"""Zarr format 3 arrays and groups, and data sets of dkrr.

What the metadata says is checked as plain JSON before anything is opened: format 2, types that are not numbers and
unknown codecs are refused, because a filter that is looked up by name may run code.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.destination import FORMAT
from dkrr.dataset.rows import RowArray
from dkrr.dataset.sources.table import BLOCK_BYTES, Join, MatrixTable, Table
from dkrr.errors import DataError, StoreError
from dkrr.store.files import is_url, local_root, read_json, zarr_store

__all__ = ["dataset_table", "open_zarr", "open_zarr_object"]

_CODECS = {"blosc", "bytes", "crc32c", "gzip", "sharding_indexed", "transpose", "zstd"}
_TYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"} | {
    "float16",
    "float32",
    "float64",
}


class _ZarrTable(MatrixTable):
    """A Zarr array, read in whole row chunks."""

    def __init__(self, array: Any, label: str, *, prefix: str = "x", allow_1d: bool = False) -> None:
        if array.metadata.zarr_format != 3:
            raise StoreError(f"{label} is a Zarr array of format 2; format 3 expected", hint="convert it to format 3")
        _check_array(array.metadata.to_dict(), label)
        width = array.shape[1] if len(array.shape) > 1 else 1
        rows = (getattr(array, "shards", None) or array.chunks or (1,))[0]
        step = rows * max(1, BLOCK_BYTES // (8 * max(1, width) * rows))
        super().__init__(label, array.shape, prefix=prefix, allow_1d=allow_1d, step=step)
        self._array = array

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return np.asarray(self._array[start:stop])


class _RowTable(MatrixTable):
    """Rows of a data set of dkrr: every chunk is verified."""

    def __init__(self, rows: RowArray, label: str, names: Iterable[str], is_named: bool = True) -> None:
        step = rows.rows_per_chunk * max(1, BLOCK_BYTES // (8 * rows.num_columns * rows.rows_per_chunk))
        super().__init__(label, (rows.num_rows, rows.num_columns), step=step, names=list(names))
        self.is_named = is_named
        self._rows = rows

    def read_rows(self, start: int, stop: int) -> NDArray[Any]:
        return self._rows.read(start, stop)


def dataset_table(dataset: Dataset) -> Table:
    """A data set as a source, with its own names, targets and weights."""
    label = str(dataset.path)
    x = _RowTable(dataset.X, label, dataset.feature_names, bool(dataset.names))
    y = None if dataset.y is None else _RowTable(dataset.y, f"y of {label}", dataset.target_names)
    weight = None
    if dataset.weight is not None:
        weight = _RowTable(dataset.weight, f"weight of {label}", [dataset.weight_name or "weight"])
    table: Table = x
    if y is not None or weight is not None:
        table = Join(x, y, weight)
        table.target_is_1d, table.classes = dataset.y_is_1d, dataset.classes
    table.dropped = ~dataset.kept if dataset.num_dropped else None
    return table


def open_zarr(location: Any, label: str, *, prefix: str = "x", allow_1d: bool = False) -> Table:
    """The array or group at a path or a URL.

    Raises
    ------
    StoreError
        Format 2, a symbolic link, an unknown codec, or not what was expected.
    DataError
        Values that are not numbers.
    """
    root = local_root(location)
    if root is not None:
        _check_links(root, label)
    document = read_json(location, "zarr.json")
    if not isinstance(document, dict) or document.get("zarr_format") != 3:
        for old in (".zarray", ".zgroup"):
            if read_json(location, old) is not None:
                raise StoreError(f"{label} is Zarr format 2; format 3 expected", hint="convert it to format 3")
        raise StoreError(f"{label} is not a Zarr format 3 array or group (no zarr.json)", hint="check the path")
    attributes = document.get("attributes")
    if isinstance(attributes, dict) and attributes.get("dkrr_format") == FORMAT:
        return dataset_table(open_dataset(location))
    if document.get("node_type") == "group":
        for name in ("X", "y", "weight"):
            member = read_json(location, f"{name}/zarr.json")
            if member is not None:
                _check_array(member, f"{name} of {label}")
    else:
        _check_array(document, label)

    import zarr

    opened = zarr.open(zarr_store(location), mode="r", zarr_format=3)
    return open_zarr_object(opened, label, prefix=prefix, allow_1d=allow_1d)


def open_zarr_object(node: Any, label: str, *, prefix: str = "x", allow_1d: bool = False) -> Table:
    """An opened Zarr array, or a group with X and, if there, y and weight."""
    import zarr

    if isinstance(node, zarr.Array):
        return _ZarrTable(node, label, prefix=prefix, allow_1d=allow_1d)
    members = {name: node.get(name) for name in ("X", "y", "weight")}
    if not isinstance(members["X"], zarr.Array) or set(node.array_keys()) - set(members):
        raise DataError(
            f"{label} is a group that holds {', '.join(sorted(node)) or 'nothing'}; X, and optionally y and weight, "
            "expected",
            hint="name the array inside the group, or rename it",
        )
    x = _ZarrTable(members["X"], f"X of {label}")
    y, weight = (
        None if members[name] is None else _ZarrTable(members[name], f"{name} of {label}", prefix=name, allow_1d=True)
        for name in ("y", "weight")
    )
    return x if y is None and weight is None else Join(x, y, weight)


def is_zarr(location: Any) -> bool:
    """Whether there is something of Zarr at a path or URL."""
    if is_url(location):
        return True
    return any((Path(location) / name).exists() for name in ("zarr.json", ".zarray", ".zgroup"))


def _check_links(root: Path, label: str) -> None:
    for name in ("zarr.json", "X", "y", "weight"):
        if (root / name).is_symlink():
            raise StoreError(f"{name} of {label} is a symbolic link", hint="only plain files and folders are read")


def _check_array(document: dict[str, Any], label: str) -> None:
    if document.get("zarr_format") != 3 or document.get("node_type") != "array":
        raise StoreError(f"{label} is not a Zarr format 3 array", hint="convert it to format 3")
    dtype = document.get("data_type")
    name = dtype.get("name") if isinstance(dtype, dict) else dtype
    if name not in _TYPES:
        raise DataError(f"{label} has dtype {name}; numbers expected", hint="convert it to float64", dtype=str(name))
    pending = list(document.get("codecs", []))
    while pending:
        codec = pending.pop()
        codec_name = codec.get("name") if isinstance(codec, dict) else codec
        if codec_name not in _CODECS:
            raise StoreError(
                f"{label} uses the codec {codec_name!r}; one of {', '.join(sorted(_CODECS))} expected",
                hint="write it again without that codec",
            )
        configuration = codec.get("configuration", {}) if isinstance(codec, dict) else {}
        pending += list(configuration.get("codecs", [])) + list(configuration.get("index_codecs", []))
