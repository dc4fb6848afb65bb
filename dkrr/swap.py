"""Compare and swap on small JSON documents: what locks, leases, pointers and aliases are made of.

    held = read_versioned(place, "driver.json")
    if held is None: version = create_json(place, "driver.json", {...})
    else:            version = swap_json(place, "driver.json", {...}, held.version)
    # None: somebody else was faster

On a local file system creation is a hard link, which never replaces, and a swap compares under a lock of the document
(flock); where there are no hard links, a creation looks under a lock of the folder. What cannot be locked is refused.
On an object store both are conditional puts (If-None-Match, If-Match); a store that takes a condition and ignores it
would give a lock to everybody, so each is tried out once, before the first use, and refused when it does not keep its
word.

A document must hold something that no other writer writes (a token): where an answer was lost, it tells whose it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dkrr.address import is_url, parent_of, parse_address
from dkrr.errors import StoreError
from dkrr.interruption import check_fence
from dkrr.stores import NO_LINKS, json_bytes, parse_json, sync_path, write_file

__all__ = [
    "Versioned",
    "check_conditions",
    "create_bytes",
    "create_json",
    "discard_json",
    "read_versioned",
    "swap_json",
]


@dataclass(frozen=True)
class Versioned:
    """A document and the version under which it can be replaced."""

    value: Any
    version: str


def read_versioned(location: Any, key: str) -> Versioned | None:
    """Read a document below a path or address, None when it does not exist.

    Raises
    ------
    StoreError
        It is not JSON, or cannot be read.
    """
    if is_url(location):
        from dkrr.objects import read_object

        found = read_object(location, key)
        return None if found is None else Versioned(parse_json(found[0], location, key), found[1])
    try:
        data = (Path(location) / key).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Versioned(parse_json(data, location, key), _digest(data))


def create_json(location: Any, key: str, value: Any, *, durable: bool = False) -> str | None:
    """Create a document whole; its version, None when one is there already. ``durable`` as in a key.

    Raises
    ------
    StoreError
        The store cannot be written, or does not honour conditions.
    """
    return create_bytes(location, key, json_bytes(value), durable=durable)


def create_bytes(location: Any, key: str, data: bytes, *, durable: bool = False) -> str | None:
    """Create anything whole, see :func:`create_json`; ``data`` must be what no other writer writes, or writes too."""
    if is_url(location):
        from dkrr.objects import put_if

        check_conditions(location)
        check_fence()
        return put_if(location, key, data, None)
    path = Path(location) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        draft.write_bytes(data)
        if durable:
            sync_path(draft)
        check_fence()
        if not _name_once(draft, path):
            return None
        if durable:
            sync_path(path.parent)
    finally:
        draft.unlink(missing_ok=True)
    return _digest(data)


def _name_once(draft: Path, path: Path) -> bool:
    """Give a whole file the name that no other file has; False when one has it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return draft.stat().st_nlink > 1  # a network file system may repeat a request that was done
    except OSError as exc:
        if exc.errno not in NO_LINKS:
            raise
        with _exclusive(path.parent):  # whoever creates here finds no hard links either
            if os.path.lexists(path):
                return False
            os.replace(draft, path)
    return True


def swap_json(location: Any, key: str, value: Any, version: str, *, durable: bool = False) -> str | None:
    """Replace a document that still has this version; its new version, None when it has another one or is gone.

    ``durable`` as in :func:`dkrr.stores.write_key`.

    Raises
    ------
    StoreError
        The store cannot be written, or does not honour conditions.
    """
    data = json_bytes(value)
    if is_url(location):
        from dkrr.objects import put_if

        check_conditions(location)
        check_fence()
        return put_if(location, key, data, version)
    path = Path(location) / key
    with _exclusive(path):
        if _version_of(path) != version:
            return None
        write_file(path, data, durable=durable)
    return _digest(data)


def discard_json(location: Any, key: str, version: str) -> bool:
    """Remove a document of a local folder that still has this version; whether it did.

    Object stores have no removal under a condition: swap in a document that says so instead.
    """
    path = Path(location) / key
    with _exclusive(path):
        if _version_of(path) != version:
            return False
        path.unlink()
    return True


def check_conditions(location: str) -> None:
    """Try out whether documents can be swapped in a place.

    Of a local folder, which is made, whether it can be locked; of an object store, once per process and bucket, whether
    it honours conditions, with one object that is written and removed.

    Raises
    ------
    StoreError
        It does not, and nothing there could be locked; or it cannot be written.
    """
    if not is_url(location):
        folder = Path(location)
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".dkrr-probe-{uuid.uuid4().hex}.partial"
        try:
            probe.touch()
            with _exclusive(probe):
                return
        finally:
            probe.unlink(missing_ok=True)
    address = parse_address(location)
    _probe(address.bucket, address.settings, location)


@lru_cache(maxsize=32)
def _honoured(bucket: str, settings: Any) -> list[bool]:
    return []


def _probe(bucket: str, settings: Any, location: str) -> None:
    known = _honoured(bucket, settings)
    if known:
        return
    from dkrr.objects import delete_objects, put_if

    key = f".dkrr-probe-{uuid.uuid4().hex}"
    try:
        first = put_if(location, key, b"1", None)
        again = put_if(location, key, b"2", None)
        stale = put_if(location, key, b"3", '"00000000000000000000000000000000"')
        fresh = None if first is None else put_if(location, key, b"4", first)
    finally:
        with contextlib.suppress(StoreError):  # must not hide another
            delete_objects(location, [key])
    broken = [
        what
        for what, wrong in (
            ("If-None-Match refuses a new object", first is None),
            ("If-None-Match is ignored", again is not None),
            ("If-Match is ignored", stale is not None),
            ("If-Match refuses the right version", fresh is None),
        )
        if wrong
    ]
    if broken:
        raise StoreError(
            f"{parent_of(location)} does not honour conditional puts ({'; '.join(broken)})",
            hint="nothing can be locked there: use a store that does (Amazon S3, MinIO, R2, Ceph), or a local path",
        )
    known.append(True)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version_of(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One process at a time replaces what is at ``path``, which itself is locked, so that no file is left behind.

    Whoever waited may have locked what was replaced meanwhile, and looks again. Where nothing is, nothing is locked.

    Raises
    ------
    StoreError
        The file system has no locks: of two processes that compare and then replace both could be the first.
    """
    while (descriptor := _open(path)) is not None:
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as exc:
                raise StoreError(
                    f"{path.parent} cannot be locked ({exc.strerror}), so two processes could write there at once",
                    hint="mount it with locks (NFS: lockd on both sides, no option nolock), or choose a folder on "
                    "another disk or an s3:// address",
                ) from exc
            if not _is_at(descriptor, path):
                continue
            yield
            return
        finally:
            os.close(descriptor)
    yield


def _open(path: Path) -> int | None:
    """A descriptor that can be locked: NFS wants one that can be written; None where nothing is."""
    try:
        try:
            return os.open(path, os.O_RDWR)
        except (IsADirectoryError, PermissionError):
            return os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name; it is opened, for a look at the name alone may be an old answer."""
    there = _open(path)
    if there is None:
        return False
    try:
        return os.path.sameopenfile(descriptor, there)
    finally:
        os.close(there)
