"""Compare and swap on small JSON documents: what locks, leases, pointers and aliases are made of.

    held = read_versioned(place, "driver.json")
    if held is None: version = create_json(place, "driver.json", {...})
    else:            version = swap_json(place, "driver.json", {...}, held.version)
    # None: somebody else was faster

On a local file system creation is a hard link, which never replaces, and a swap compares under a lock of the folder. On
an object store both are conditional puts (If-None-Match, If-Match); a store that takes a condition and ignores it would
give a lock to everybody, so each is tried out once, before the first use, and refused when it does not keep its word.

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
from dkrr.fence import check_fence
from dkrr.stores import json_bytes, local_root, parse_json, write_file

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
        data = (_folder(location) / key).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Versioned(parse_json(data, location, key), _digest(data))


def create_json(location: Any, key: str, value: Any) -> str | None:
    """Create a document whole; its version, None when one is there already.

    Raises
    ------
    StoreError
        The store cannot be written, or does not honour conditions.
    """
    return create_bytes(location, key, json_bytes(value))


def create_bytes(location: Any, key: str, data: bytes) -> str | None:
    """Create anything whole, see :func:`create_json`; ``data`` must be what no other writer writes."""
    if is_url(location):
        from dkrr.objects import put_if

        check_conditions(location)
        check_fence()
        return put_if(location, key, data, None)
    path = _folder(location) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        draft.write_bytes(data)
        check_fence()
        os.link(draft, path)
    except FileExistsError:
        return None
    finally:
        draft.unlink(missing_ok=True)
    return _digest(data)


def swap_json(location: Any, key: str, value: Any, version: str) -> str | None:
    """Replace a document that still has this version; its new version, None when it has another one or is gone.

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
    path = _folder(location) / key
    with _exclusive(path.parent):
        if _version_of(path) != version:
            return None
        write_file(path, data)
    return _digest(data)


def discard_json(location: Any, key: str, version: str) -> bool:
    """Remove a document of a local folder that still has this version; whether it did.

    Object stores have no removal under a condition: swap in a document that says so instead.
    """
    path = _folder(location) / key
    with _exclusive(path.parent):
        if _version_of(path) != version:
            return False
        path.unlink()
    return True


def check_conditions(location: str) -> None:
    """Try out, once per process and bucket, whether an object store honours conditions; writes and removes one object.

    Raises
    ------
    StoreError
        It does not, and nothing there could be locked; or it cannot be written.
    """
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


def _folder(location: Any) -> Path:
    root = local_root(location)
    if root is None:
        raise StoreError(f"{type(location).__name__} has no compare and swap", hint="give a path or an s3:// address")
    return root


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _version_of(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """One process at a time; the folder is what is locked, so that no file is left behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system that cannot; the comparison alone has to do
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
