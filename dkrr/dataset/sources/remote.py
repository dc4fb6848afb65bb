"""Files at an s3:// address: fetched whole into a temporary folder, then read like any other file.

CSV, Parquet and NumPy files are read from their beginning to their end, some of them twice, so a copy that lives as
long as its table is simpler than a file that is read over the network, and no slower. Zarr arrays and data sets are
read in place. Cost: the bytes of the source, in Dask's temporary directory or the system's.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dkrr.dataset.sources.parquet import check_names, is_visible
from dkrr.errors import StorageFullError, StoreError
from dkrr.store.files import children, join, key_size, list_entries, name_of, parent_of
from dkrr.store.objects import get_file

__all__ = ["fetch_copy", "local_copy"]

_FILES = (".csv", ".csv.gz", ".npy", ".parquet")


def fetch_copy(url: str) -> Path | None:
    """A copy of a file, or of all Parquet files below an address, in a new folder that the caller removes.

    None for what is read in place.

    Raises
    ------
    StoreError
        There is no such file.
    DataError
        There are Parquet files and others.
    StorageFullError
        The temporary directory is too small.
    """
    name, parent = name_of(url), parent_of(url)
    if name.endswith(".zarr"):
        return None
    size = key_size(parent, name) if name.endswith(_FILES) else None
    sizes = {} if size is None else {name: size}
    if size is None:
        is_zarr = "zarr.json" in children(url)  # whose chunks need not be listed
        found = [] if is_zarr else [item for item in list_entries(url) if is_visible(item.key)]
        if any(item.key.endswith(".parquet") for item in found):
            check_names([item.key for item in found], url)
            sizes = {f"{name}/{item.key}": item.num_bytes for item in found}
    if not sizes:
        if name.endswith(_FILES):
            raise StoreError(f"{url} does not exist", hint="check the address")
        return None
    folder = Path(_temporary_folder())
    try:
        _check_room(folder, sum(sizes.values()), url)
        for key in sizes:
            _copy(parent, key, folder / key)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / name


@contextlib.contextmanager
def local_copy(url: str) -> Iterator[Path | None]:
    """The copy of :func:`fetch_copy` while the block runs."""
    copy = fetch_copy(url)
    try:
        yield copy
    finally:
        if copy is not None:
            shutil.rmtree(copy.parent, ignore_errors=True)


def _copy(location: str, key: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if get_file(location, key, path) is None:
        raise StoreError(f"{join(location, key)} was removed while it was read", hint="start again")


def _temporary_folder() -> str:
    import dask

    return tempfile.mkdtemp(prefix="dkrr-", dir=dask.config.get("temporary-directory", None))


def _check_room(folder: Path, num_bytes: int, url: str) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StorageFullError(
            f"{url} has {num_bytes:,} bytes, {free:,} are free in {folder.parent}",
            hint="set Dask's temporary-directory to a disk with room, or ingest it elsewhere",
            needed=num_bytes,
            free=free,
        )
