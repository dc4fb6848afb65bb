"""Places where things are kept: local folders, URLs and Zarr stores, with one set of verbs for all three.

A store is given as a path, a URL such as ``s3://bucket/key``, or a Zarr store object. Writes are atomic everywhere: a
reader sees the old value, the new one, or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkrr.errors import StoreError
from dkrr.failpoints import failpoint
from dkrr.fence import check_fence

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = [
    "get_key",
    "is_url",
    "list_keys",
    "local_root",
    "place",
    "read_json",
    "remove_array",
    "set_key",
    "sync_folder",
    "write_file",
    "write_json",
    "zarr_store",
]


def is_url(location: Any) -> bool:
    """Whether ``location`` is an address such as ``s3://bucket/key`` and not a path."""
    return isinstance(location, str) and "://" in location


def local_root(store: Any) -> Path | None:
    """The folder behind a store given as a path or a plain ``LocalStore``; None for any other store."""
    if isinstance(store, str | os.PathLike) and not is_url(store):
        return Path(store)
    # zarr costs 0.3 s to import and workers on local paths never need it, hence no isinstance here
    if type(store).__name__ == "LocalStore" and type(store).__module__.startswith("zarr."):
        return Path(store.root)
    return None


def place(root: Any, *names: str) -> str:
    """The path or URL of something below a store root; local parent folders are made.

    Raises
    ------
    StoreError
        ``root`` is a store object, or a folder cannot be made.
    """
    if is_url(root):
        return "/".join([str(root).rstrip("/"), *names])
    if not isinstance(root, str | os.PathLike):
        raise StoreError(f"a store root is a path or a URL, {type(root).__name__} given")
    path = Path(root).joinpath(*names)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"{path.parent} cannot be made ({exc.strerror})", hint="choose another store") from exc
    return str(path)


def zarr_store(location: Any) -> Store:
    """The Zarr store for a path, a URL or a store object."""
    from zarr.abc.store import Store
    from zarr.storage import LocalStore

    if isinstance(location, Store):
        return location
    if not is_url(location):
        return LocalStore(str(location))
    try:
        from obstore.store import from_url
        from zarr.storage import ObjectStore
    except ImportError as exc:
        raise StoreError(
            f"{location} is an object store", hint="install dkrr[object-store] to read and write it"
        ) from exc
    return ObjectStore(from_url(location))


def get_key(store: Store, key: str) -> bytes | None:
    """The bytes behind a key, None when it does not exist."""
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    buffer = sync(store.get(key, default_buffer_prototype()))
    return None if buffer is None else buffer.to_bytes()


def list_keys(store: Store) -> list[str]:
    """All keys of a store, sorted."""
    from zarr.core.sync import sync

    async def collect() -> list[str]:
        return [key async for key in store.list()]

    return sorted(sync(collect()))


def set_key(store: Store, key: str, value: bytes) -> None:
    """Write the bytes behind a key."""
    check_fence()
    from zarr.core.buffer import default_buffer_prototype
    from zarr.core.sync import sync

    sync(store.set(key, default_buffer_prototype().buffer.from_bytes(value)))


def write_file(path: Path, *parts: Any) -> None:
    """Write ``parts`` to ``path`` atomically: a reader sees the old file, the new file or none."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[file.write(view) :]
        failpoint("chunk.mid_write")
        check_fence()
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def sync_folder(folder: Path) -> None:
    """fsync every file and folder below ``folder``, so that what was finished survives a power failure."""
    for parent, _, names in os.walk(folder):
        for name in [*names, "."]:
            fd = os.open(os.path.join(parent, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def remove_array(location: Any) -> None:
    """Remove an array or group with everything in it."""
    check_fence()
    root = local_root(location)
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)
        return
    from zarr.core.sync import sync

    sync(zarr_store(location).delete_dir(""))


def write_json(location: Any, key: str, value: Any) -> None:
    """Write a JSON document atomically below ``location`` (path, URL or store)."""
    data = json.dumps(value, indent=1, sort_keys=True).encode()
    root = local_root(location)
    if root is None:
        set_key(zarr_store(location), key, data)
        return
    path = root / key
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)


def read_json(location: Any, key: str) -> Any | None:
    """Read a JSON document; None when it does not exist."""
    root = local_root(location)
    if root is None:
        data = get_key(zarr_store(location), key)
    else:
        try:
            data = (root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            data = None
    if data is None:
        return None
    try:
        return json.loads(data)
    except ValueError as exc:
        raise StoreError(f"{key} of {location} is not valid JSON ({exc})", hint="restore or remove it") from exc
