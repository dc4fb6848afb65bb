"""A store that lives as long as the object that needs it: where there is room for it, and that it goes away again.

Tiles on a memory file system are memory that no plan counts, so a tmpfs is used only for what is small beside the free
memory.

What a fit on tiles uses: rows on disk, room for its tiles, somebody to run its tasks; and what was fitted.

A precomputed Gram matrix: checked and copied into lower tiles, so that it is factored like any other.

The training rows of such a fit are the row numbers; predictions take k(Z, X) directly.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.dataset import (
    Dataset,
    Floats,
    RowArray,
    Table,
    attributes_of,
    check_shape,
    fields_of,
    ingest,
    lazy_rows,
    open_dataset,
    open_table,
    to_floats,
)
from dkrr.dataset.writer import remove_dataset
from dkrr.engine.cluster import executor_for, find_client
from dkrr.engine.machine import free_memory_bytes
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import ClusterError, DataError, StorageFullError, StoreError
from dkrr.linalg.workspace import choose_tile_size, task_bytes
from dkrr.store import files
from dkrr.store.documents import plain
from dkrr.store.files import (
    MEMORY_FILE_SYSTEMS,
    arrays_below,
    at_present,
    copy_tree,
    file_system,
    is_url,
    join,
    local_root,
    parent_of,
    place,
    read_json,
    remove_array,
    zarr_store,
)
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix


def find_executor(num_rows: int, max_in_process_rows: int) -> contextlib.AbstractContextManager[Executor]:
    """The caller's Dask client, else this process for few rows and a local cluster for many."""
    is_here = num_rows <= max_in_process_rows and find_client() is None
    return contextlib.nullcontext(InProcessExecutor()) if is_here else executor_for()


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


def free_bytes(root: Any) -> int | None:
    """Bytes that are free where a store is; None for an address."""
    return None if is_url(str(root)) else files.free_bytes(root)


def present_bytes(root: Any, fields: dict[str, list[Any]]) -> int:
    """Bytes of valid tiles of the factors and Gram matrices whose attributes have some of the values in ``fields``.

    A Gram matrix has no alpha, so that None is one of its values. The BLAS kernel is not compared: which one the
    workers have is known only when they run.
    """
    total, wanted = 0, plain(fields)
    for location in arrays_below(root, "factors", "grams"):
        found = (read_json(location, "zarr.json") or {}).get("attributes", {})
        if all(found.get(name) in values for name, values in wanted.items()):
            tiles = TileMatrix.open(location)
            total += (tiles.grid.num_lower - len(tiles.missing())) * (tiles.array.chunk_bytes + 4)
    return total


def find_dataset(X: Any) -> Any:
    """The data set at a path; anything else as it is."""
    if not isinstance(X, str | Path) or not (is_url(str(X)) or Path(X).is_dir()):
        return X
    return X if attributes_of(str(X)) is None else open_dataset(at_present(X))


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
    same rows are there once, however many fits used them. While they are used a lock of its own name, ``fit-*.lock``,
    says that somebody is at work in the store: `dkrr gc` leaves what is in it.

    Raises
    ------
    DataError
        At the path of a data set are other rows than when it was opened.
    """
    source = of_targets = None
    with nothing_new(root), hold_lock(place(root, f"fit-{uuid.uuid4().hex}")):
        if isinstance(X, Dataset):
            X.check_still_there()
            if y is None and sample_weight is None:
                yield X
                return
            source, of_targets = X, y is None
            X, y, sample_weight = _parts(X, y, sample_weight)
        dataset = ingest(X, place(root, "rows", uuid.uuid4().hex + ".zarr"), y=y, sample_weight=sample_weight)
        if isinstance(X, np.ndarray) and not isinstance(X, np.memmap):
            try:
                yield dataset
            finally:
                remove_array(dataset.path)
            return
        # the same rows may be there under other names
        fields = fields_of(dataset)
        if source is not None:
            kinds = ("feature_names", "target_names") if of_targets else ("feature_names",)
            others = [kind for kind in dataset.made_up if kind not in kinds]
            fields["made_up"] = (*others, *(kind for kind in source.made_up if kind in kinds))
            fields |= {name: getattr(source, name) for name in (*kinds, *(("classes", "places") if of_targets else ()))}
        yield replace(_named_by_content(dataset), **fields)


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
    digests = [digest[:40] for digest in (dataset.digest, dataset.digest_y, dataset.digest_weight) if digest]
    location = join(parent_of(dataset.path), "-".join(digests) + ("-1d" if dataset.y_is_1d else "") + ".zarr")
    if not _is_whole(location):
        with hold_lock(location, wait=True):
            if _is_whole(location):  # another fit of the same rows was first
                pass
            elif is_url(location):
                copy_tree(dataset.path, location)
            else:
                remove_dataset(location)  # damaged, or what a removal that was killed left of it
                os.rename(dataset.path, location)
    remove_array(dataset.path)
    return open_dataset(location)


def _is_whole(location: str) -> bool:
    try:
        open_dataset(location).verify()
    except StoreError:
        return False
    return True


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


SYMMETRY_RTOL = 1e-8

CHECK_ROWS = 1024


@contextlib.contextmanager
def given_tiles(K: Any, root: Any, tile_size: Any = "auto") -> Iterator[tuple[TileMatrix, str]]:
    """K (n, n) in tiles below ``root``, and their digest; removed at the end.

    Parameters
    ----------
    K
        NumPy array, dask array, Zarr array or its path, path to .npy, or rows on disk; read a tile at a time.

    Raises
    ------
    DataError
        Not square, not finite, or not symmetric to 1e-8 of its largest entry; names the entry. Nothing is left.
    """
    n, matrix, digest = given_rows(K), _opened(K), hashlib.sha256()
    grid = TileGrid(n, choose_tile_size(n, 1, None) if tile_size == "auto" else int(tile_size))
    location = place(root, "grams", f"given-{uuid.uuid4().hex}.zarr")
    try:
        tiles = TileMatrix.create(location, grid, dtype="float64")
        for i, j, tile in _checked_tiles(matrix, grid):
            tiles.write(i, j, tile)
            digest.update(tile.data)
        yield tiles, digest.hexdigest()
    finally:
        remove_array(location)


def check_given(K: Floats) -> None:
    """Refuse a matrix in memory that is not square, not finite or not symmetric.

    Raises
    ------
    DataError
        Names the first such entry.
    """
    for _ in _checked_tiles(K, TileGrid(given_rows(K), CHECK_ROWS)):
        pass


def given_rows(K: Any) -> int:
    """n of a matrix (n, n) in any form; reads no entries.

    Raises
    ------
    DataError
        It is not square, or not a matrix of numbers.
    """
    if isinstance(K, str | Path) or type(K).__module__.startswith(("dask.", "zarr.")):
        table = open_table(K)
        shape: tuple[Any, ...] = (table.num_rows, len(table.names))
    elif isinstance(K, RowArray):
        shape = (K.num_rows, K.num_columns)
    else:
        shape = check_shape(np.shape(K), "the precomputed matrix")
    if shape[0] != shape[1]:
        raise DataError(f"the precomputed matrix has shape {shape}; a square one expected", hint="give k(X, X)")
    return int(shape[0])


def _opened(K: Any) -> Any:
    """Something that slices like an array."""
    if isinstance(K, str | Path):
        if str(K).endswith(".npy"):
            return np.load(K, mmap_mode="r", allow_pickle=False)
        import zarr

        return zarr.open_array(zarr_store(str(K)), mode="r", zarr_format=3)
    return K if hasattr(K, "shape") or isinstance(K, RowArray) else np.asarray(K)


def _checked_tiles(matrix: Any, grid: TileGrid) -> Iterator[tuple[int, int, Floats]]:
    """(i, j, tile) of the lower triangle, each compared with its mirror image."""
    # the largest entry of a positive semi-definite matrix is on its diagonal
    scale = max(float(np.abs(np.diag(_block(matrix, grid, i, i))).max()) for i in range(grid.num_tiles))
    for i, j in grid.lower():
        tile = _block(matrix, grid, i, j)
        mirror = tile.T if i == j else _block(matrix, grid, j, i).T
        difference = np.abs(tile - mirror)
        if i == j:
            difference = np.tril(difference)  # of the two entries the lower one is named
        p, q = np.unravel_index(int(np.argmax(difference)), difference.shape)
        if difference[p, q] > SYMMETRY_RTOL * max(scale, float(np.abs(tile).max())):
            row, column = grid.span(i).start + p, grid.span(j).start + q
            raise DataError(
                f"the precomputed matrix is not symmetric: entry ({row:,}, {column:,}) is {tile[p, q]:.6g}, its "
                f"mirror image {mirror[p, q]:.6g}",
                hint="symmetrise it: K = (K + K.T) / 2",
                row=int(row),
                column=int(column),
            )
        yield i, j, np.ascontiguousarray(tile)


def _block(matrix: Any, grid: TileGrid, i: int, j: int) -> Floats:
    rows, columns = grid.span(i), grid.span(j)
    part = matrix.read(rows.start, rows.stop)[:, columns] if isinstance(matrix, RowArray) else matrix[rows, columns]
    if hasattr(part, "compute"):
        part = part.compute()
    block = to_floats(np.asarray(part), "the precomputed matrix", rows.start)
    if not np.isfinite(block).all():
        p, q = np.argwhere(~np.isfinite(block))[0]
        row, column = int(rows.start + p), int(columns.start + q)
        raise DataError(
            f"the precomputed matrix has {block[p, q]} at row {row:,}, column {column:,}",
            hint="all entries are needed",
            row=row,
            column=column,
        )
    return block


# the workers need the other half
SHARE_OF_FREE_MEMORY = 0.5


class TemporaryStore:
    """A folder below Dask's temporary directory, removed when this object is, or at the end of the process.

    Parameters
    ----------
    needed_bytes
        How much will be written, as far as it is known.

    Raises
    ------
    StorageFullError
        No place has that much room.
    """

    def __init__(self, needed_bytes: int = 0) -> None:
        self.path: str = temporary_folder(needed_bytes)
        self._finalizer: Any = weakref.finalize(self, _remove, self.path, os.getpid())

    def check(self) -> None:
        """Refuse to go on without the folder.

        Raises
        ------
        StoreError
            It was removed.
        """
        if not os.path.isdir(self.path):
            raise StoreError(f"the temporary store {self.path} is gone", hint="fit again, or with store=")

    def close(self) -> None:
        """Remove the folder now."""
        if self._finalizer is not None:
            self._finalizer()

    def keep(self, name: str) -> None:
        """Remove everything but the entry ``name``."""
        for entry in Path(self.path).iterdir():
            if entry.name != name:
                shutil.rmtree(entry, ignore_errors=True)

    def __dask_tokenize__(self) -> str:
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy that travelled does not own the folder
        self.path, self._finalizer = state["path"], None


def _remove(path: str, pid: int) -> None:
    # a forked child inherits the finalizer, and must not remove what its parent uses
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


def temporary_folder(needed_bytes: int = 0) -> str:
    """A new folder with room for ``needed_bytes``: below Dask's ``temporary-directory``, which alone counts when it is
    set, else below the system's, /var/tmp, or the current folder.

    Raises
    ------
    StorageFullError
        None of them has room; each is named with its free bytes.
    """
    import dask

    configured = dask.config.get("temporary-directory", None)
    candidates = [configured] if configured else [tempfile.gettempdir(), "/var/tmp", os.getcwd()]  # noqa: S108  (a check)
    reasons = []
    for base in dict.fromkeys(map(str, candidates)):
        try:
            Path(base).mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(base).free if os.access(base, os.W_OK | os.X_OK) else -1
        except OSError:
            free = -1
        said = "cannot be written" if free < 0 else f"has {free:,} bytes free"
        if (kind := file_system(base)) in MEMORY_FILE_SYSTEMS:
            free = min(free, int(SHARE_OF_FREE_MEMORY * free_memory_bytes()))
            said = f"is in memory ({kind}) and may take {free:,} bytes"
        if needed_bytes <= free:
            return tempfile.mkdtemp(prefix="dkrr-", dir=base)
        reasons.append(f"{base} {said}")
    raise StorageFullError(
        f"a temporary store needs {needed_bytes:,} bytes: {'; '.join(reasons)}",
        hint="set Dask's temporary-directory to a disk with room, or give store=",
        needed=needed_bytes,
    )
