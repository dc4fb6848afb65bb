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

Manifest: SHA-256 of every key of a saved group, so that a missing, extra or changed key is found at load.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dkrr.errors import StoreError
from dkrr.store.files import (
    NO_LINKS,
    is_url,
    json_bytes,
    key_size,
    list_keys,
    local_root,
    name_of,
    parent_of,
    parse_address,
    parse_json,
    read_json,
    read_key,
    sync_path,
    write_file,
    write_json,
)
from dkrr.store.interruption import check_fence
from dkrr.store.objects import delete_objects, put_if, read_object

__all__ = [
    "MANIFEST",
    "Versioned",
    "check_conditions",
    "check_manifest",
    "content_digest",
    "create_bytes",
    "create_json",
    "discard_json",
    "manifest_digest",
    "read_versioned",
    "refuse_links",
    "swap_json",
    "write_manifest",
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

    ``durable`` as in :func:`dkrr.store.files.write_key`.

    Raises
    ------
    StoreError
        The store cannot be written, or does not honour conditions.
    """
    data = json_bytes(value)
    if is_url(location):
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


MANIFEST = "manifest.json"


def _keys(store: Any) -> list[str]:
    refuse_links(store)
    return list_keys(store)


def refuse_links(store: Any) -> None:
    """Refuse a local group with a symbolic link inside, before anything in it is read.

    Raises
    ------
    StoreError
        Names the link.
    """
    root = local_root(store)
    for folder, folders, names in os.walk(root) if root is not None else ():
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                raise StoreError(f"{path} is a symbolic link", hint="copy what it points to; links are not followed")


def _key_digest(store: Any, key: str) -> str:
    sha = hashlib.sha256()
    for part in _parts(store, key):
        sha.update(part)
    return sha.hexdigest()


def _parts(store: Any, key: str) -> Iterator[bytes]:
    root = local_root(store)
    if root is None:
        yield read_key(store, key) or b""
        return
    with open(root / key, "rb") as file:
        while part := file.read(2**20):
            yield part


def content_digest(location: str) -> str | None:
    """SHA-256 of a file or object, or of all that is in a folder; None where nothing is, and of a link what it says."""
    if not is_url(location) and os.path.islink(location):
        return f"a link to {os.readlink(location)}"
    if keys := _keys(location):
        digests = {key: _key_digest(location, key) for key in keys}
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    if not is_url(location) and os.path.isdir(location):
        return "an empty folder"
    folder, name = parent_of(location), name_of(location)
    return None if key_size(folder, name) is None else _key_digest(folder, name)


def write_manifest(store: Any) -> None:
    """Write the manifest; the last key of a saved group."""
    write_json(store, MANIFEST, {key: _key_digest(store, key) for key in _keys(store) if key != MANIFEST})


def manifest_digest(store: Any) -> str:
    """SHA-256 of the manifest, and so of everything in the group.

    Raises
    ------
    StoreError
        There is no manifest.
    """
    manifest = read_json(store, MANIFEST)
    if not isinstance(manifest, dict):
        raise StoreError(f"{store} has no {MANIFEST}", hint="it was not written completely; save it again")
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def check_manifest(store: Any) -> None:
    """Compare every key with the manifest.

    Raises
    ------
    StoreError
        Names the first key that is missing, extra or different, with what was expected and found.
    """
    manifest = read_json(store, MANIFEST)
    if not isinstance(manifest, dict):
        raise StoreError(f"{store} has no {MANIFEST}", hint="it was not written completely; save it again")
    keys = {key for key in _keys(store) if key != MANIFEST}
    for key in sorted(manifest.keys() - keys):
        raise StoreError(f"{key} of {store} is missing", hint="restore it, or fit again", key=key)
    for key in sorted(keys - manifest.keys()):
        raise StoreError(f"{key} of {store} is not in its manifest", hint="remove it, or save the model again", key=key)
    for key, expected in manifest.items():
        found = _key_digest(store, key)
        if found != expected:
            raise StoreError(
                f"{key} of {store} is damaged (SHA-256 {found[:12]}, {expected[:12]} expected)",
                hint="restore it, or fit again",
                key=key,
            )
