"""What a fit on tiles uses: rows on disk, room for its tiles, somebody to run its tasks; and what was fitted."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.address import join, parent_of
from dkrr.dataset import Dataset, ingest, lazy_rows, open_dataset
from dkrr.dataset.destination import FORMAT, check_space
from dkrr.dataset.ingest import fields_of
from dkrr.dataset.sources import Table, open_table
from dkrr.engine.cluster import executor_for, find_client
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import ClusterError, DataError
from dkrr.linalg.sizes import choose_tile_size, task_bytes
from dkrr.model import Model
from dkrr.stores import arrays_below, at_present, copy_tree, is_url, local_root, place, read_json, remove_array
from dkrr.tiles import TileGrid, TileMatrix

__all__ = [
    "Training",
    "changed",
    "check_disk",
    "check_unchanged",
    "existing_folder",
    "find_dataset",
    "find_executor",
    "free_bytes",
    "measured_place",
    "nothing_new",
    "resolve_tile_size",
    "rows_on_disk",
    "source_table",
]


@contextlib.contextmanager
def find_executor(num_rows: int, max_in_process_rows: int) -> Iterator[Executor]:
    """The caller's Dask client, else this process for few rows and a local cluster for many."""
    if num_rows <= max_in_process_rows and find_client() is None:
        yield InProcessExecutor()
        return
    with executor_for() as executor:
        yield executor


def resolve_tile_size(
    given: int | None, num_rows: int, num_features: int, precision: str, memory_limit: int | None
) -> int:
    """The tile edge that was asked for, or the chosen one; a task of it fits a worker.

    Raises
    ------
    ClusterError
        A worker's memory is too small for the tiles that were asked for.
    """
    itemsize = np.dtype(precision).itemsize
    if given is None:
        return choose_tile_size(num_rows, num_features, memory_limit, itemsize)
    needed = task_bytes(min(given, num_rows), num_features, itemsize)
    if memory_limit is not None and needed > memory_limit:
        raise ClusterError(
            f"a task with tiles of {given} needs {needed:,} bytes, a worker may use {memory_limit:,} a thread",
            hint="give a smaller tile_size, or workers with more memory",
        )
    return given


def existing_folder(root: Any) -> Path:
    """The folder of a store, or the nearest one above it that is there; the current one for an address."""
    path = Path.cwd() if is_url(str(root)) else Path(root).absolute()
    while not path.exists():
        path = path.parent
    return path


def measured_place(root: Any) -> Path | str:
    """Where the speed of a store is measured: the store, or the folder that it will be in."""
    return str(root) if is_url(root) else existing_folder(root)


def free_bytes(root: Any) -> int | None:
    """Bytes that are free where a store is; None for an address."""
    return None if is_url(str(root)) else shutil.disk_usage(existing_folder(root)).free


def check_disk(root: Any, needed_bytes: int, grid: TileGrid, fields: dict[str, list[Any]]) -> None:
    """Refuse a fit whose tiles do not fit on the disk of its store.

    Parameters
    ----------
    needed_bytes
        Of all its tiles.
    fields
        Attributes, with the values they may have, by which arrays of an earlier attempt are known; their tiles are not
        written again.

    Raises
    ------
    StorageFullError
        With the bytes needed and free.
    """
    check_space(root, max(0, needed_bytes - _present_bytes(root, grid, fields)))


def _present_bytes(root: Any, grid: TileGrid, fields: dict[str, list[Any]]) -> int:
    total = 0
    for location in arrays_below(root, "factors", "grams"):
        document = read_json(location, "zarr.json") or {}
        found = document.get("attributes", {})
        if found.get("tile_size") == grid.tile_size and all(found.get(key) in fields[key] for key in fields):
            matrix = TileMatrix.open(location)
            total += matrix.num_bytes - len(matrix.missing()) * (matrix.array.chunk_bytes + 4)
    return total


def find_dataset(X: Any) -> Any:
    """The data set at a path; anything else as it is."""
    if not isinstance(X, str | Path) or not (is_url(str(X)) or Path(X).is_dir()):
        return X
    document = read_json(str(X), "zarr.json")
    attributes = document.get("attributes") if isinstance(document, dict) else None
    is_ours = isinstance(attributes, dict) and attributes.get("dkrr_format") == FORMAT
    return open_dataset(at_present(X)) if is_ours else X


def source_table(X: Any, y: Any) -> Table:
    """The table behind rows that are not in memory; it has targets, or they are given.

    Raises
    ------
    DataError
        There are none.
    """
    table = open_table(X)
    if y is None and table.target is None:
        raise DataError(f"fit requires y to be passed, but the target y is None and {table.label} has none")
    return table


@contextlib.contextmanager
def rows_on_disk(X: Any, y: Any, sample_weight: Any, root: Any) -> Iterator[Dataset]:
    """The data set that is given, or one that is written below ``root``.

    Rows that the caller has in memory are removed at the end. Others stay, under the name of their digests, so that the
    same rows are there once, however many fits used them.

    Raises
    ------
    DataError
        At the path of a data set are other rows than when it was opened.
    """
    if isinstance(X, Dataset):
        X.check_still_there()
        if y is None and sample_weight is None:
            yield X
            return
        X, y, sample_weight = _parts(X, y, sample_weight)
    with nothing_new(root):
        dataset = ingest(X, place(root, "rows", uuid.uuid4().hex + ".zarr"), y=y, sample_weight=sample_weight)
    if not isinstance(X, np.ndarray) or isinstance(X, np.memmap):
        # the same rows may be there under other names
        yield replace(_named_by_content(dataset), **fields_of(dataset))
        return
    try:
        yield dataset
    finally:
        remove_array(dataset.path)


def _parts(dataset: Dataset, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """X, y and weights of a data set, lazily, with what is given instead."""
    if y is None and dataset.y is not None:
        y = lazy_rows(dataset.y)
        y = y[:, 0] if dataset.y_is_1d else y
    if sample_weight is None and dataset.weight is not None:
        sample_weight = lazy_rows(dataset.weight)[:, 0]
    return lazy_rows(dataset.X), y, sample_weight


def _named_by_content(dataset: Dataset) -> Dataset:
    """The same rows under a name made of their digests; objects are copied by their store, and the metadata last."""
    root = local_root(dataset.path)
    digests = [digest[:40] for digest in (dataset.digest, dataset.digest_y, dataset.digest_weight) if digest]
    name = "-".join(digests) + ("-1d" if dataset.y_is_1d else "") + ".zarr"
    if root is None:
        location = join(parent_of(dataset.path), name)
        if read_json(location, "zarr.json") is None:
            copy_tree(dataset.path, location)
        remove_array(dataset.path)
        return open_dataset(location)
    target = root.with_name(name)
    try:
        os.rename(root, target)
    except OSError:  # another fit of the same rows was first
        found = open_dataset(str(target))
        remove_array(dataset.path)
        return found
    return open_dataset(str(target))


@contextlib.contextmanager
def nothing_new(root: Any) -> Iterator[None]:
    """When the block fails, remove the folders below and at a local ``root`` that were made in it and are empty."""
    path = local_root(root)
    if path is None:
        yield
        return
    wanted = [path / "rows", path / "grams", path / "data", path, *path.parents]
    new = [folder for folder in wanted if not folder.exists()]
    try:
        yield
    except BaseException:
        for folder in new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


@dataclass(frozen=True, kw_only=True)
class Training:
    """What an estimator was fitted on: copies of arrays, and all else as it was given.

    Parameters
    ----------
    X, y, weight
        As ``fit`` took them; y and weight None where a data set has its own.
    checksum
        crc32c of an X that is the caller's, which may have changed since; None for a copy, and for what is on disk.
    tile_size
        As it was asked for; None for "auto".
    tiled
        Whether the fit went through tiles.
    max_in_process_rows
        Up to so many rows the tasks run in this process when there is no client.
    store
        Where the fit left its factors, whatever the current folder is by now; None for a temporary store.
    """

    X: Any
    y: Any
    weight: Any
    tiled: bool
    tile_size: int | None = None
    max_in_process_rows: int = 0
    checksum: int | None = None
    store: str | None = None


def check_unchanged(model: Model, dataset: Dataset, digest: str = "") -> None:
    """Compare rows that were read once more with those of the fit, as far as it has digests: one in memory has none.

    Parameters
    ----------
    digest
        Of a given matrix, which is no rows.

    Raises
    ------
    DataError
        X, y or weight has changed.
    """
    found = {"rows": digest or dataset.digest, "targets": dataset.digest_y, "weight": dataset.digest_weight}
    for part, (name, value) in zip(("X", "y", "weight"), found.items(), strict=True):
        if model.provenance.get(f"{name}_digest", value) != value:
            raise changed(part)


def changed(part: str) -> DataError:
    """The error of rows, targets or weights that are not those of the fit."""
    return DataError(f"{part} has changed since the fit", hint="fit again, or bring back what was there")
