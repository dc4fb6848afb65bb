"""Documents that only one writer gets to write: created once, or swapped while nobody else has; and manifests.

    held = read_versioned(place, "driver.json")
    if held is None: version = create_json(place, "driver.json", {...})
    else:            version = swap_json(place, "driver.json", {...}, held.version)
    # None: somebody else was faster

Locks, leases, pointers and aliases are made of them. On a local file system creation is a hard link, which never
replaces, and a swap compares under a lock of the document (flock); where there are no hard links, a creation looks
under a lock of the folder. What cannot be locked is refused. On an object store both are conditional puts
(If-None-Match, If-Match); a store that takes a condition and ignores it would give a lock to everybody, so each is
tried out once, before the first use, and refused when it does not keep its word.

A document must hold something that no other writer writes (a token): where an answer was lost, it tells whose it is.

A manifest is the SHA-256 of every key of a saved group, so that a missing, extra or changed key is found at load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkrr.errors import DamagedChunkError, StoreError
from dkrr.store.files import (
    exclusive,
    is_url,
    join,
    json_bytes,
    key_size,
    list_keys,
    name_of,
    parent_of,
    parse_json,
    read_json,
    read_key,
    write_file,
    write_json,
)
from dkrr.store.interruption import check_fence
from dkrr.store.objects import delete_objects, parse_address, put_if, read_object

MANIFEST = "manifest.json"
# buckets that are known to keep their word, with the settings they were asked with
_HONOURED: set[Any] = set()


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
        return None if found is None else Versioned(parse_json(bytes(found[0]), location, key), found[1])
    data = read_key(location, key)
    return None if data is None else Versioned(parse_json(data, location, key), _digest(data))


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
        return _put_if(location, key, data, None)
    return _digest(data) if write_file(Path(location) / key, data, durable=durable, once=True) else None


def swap_json(location: Any, key: str, value: Any, version: str, *, durable: bool = False) -> str | None:
    """Replace a document that still has this version; its new version, None when it has another one or is gone.

    ``value`` None removes it, "" being its version then, from a local folder; object stores have no removal under a
    condition. ``durable`` as in :func:`dkrr.store.files.write_key`.

    Raises
    ------
    StoreError
        The store cannot be written, or does not honour conditions.
    """
    data = json_bytes(value)
    if is_url(location):
        return _put_if(location, key, data, version)
    with exclusive(Path(location) / key) as path:
        there = read_versioned(location, key)
        if there is None or there.version != version:
            return None
        if value is None:
            path.unlink()
            return ""
        write_file(path, data, durable=durable)
    return _digest(data)


def _put_if(location: str, key: str, data: bytes, version: str | None) -> str | None:
    check_conditions(location)
    check_fence()
    return put_if(location, key, data, version)


def check_conditions(location: str) -> None:
    """Try out whether documents can be swapped in a place.

    Of a local folder, which is made, whether it can be locked; of an object store, once per process and bucket, whether
    it honours conditions, with one object that is written and removed.

    Raises
    ------
    StoreError
        It does not, and nothing there could be locked; or it cannot be written.
    """
    name = f".dkrr-probe-{uuid.uuid4().hex}"
    if not is_url(location):
        probe = Path(location) / f"{name}.partial"
        probe.parent.mkdir(parents=True, exist_ok=True)
        try:
            probe.touch()
            with exclusive(probe):
                return
        finally:
            probe.unlink(missing_ok=True)
    address = parse_address(location)
    if (address.bucket, address.settings) in _HONOURED:
        return
    try:
        first = put_if(location, name, b"1", None)
        is_kept = {
            "If-None-Match refuses a new object": first is not None,
            "If-None-Match is ignored": put_if(location, name, b"2", None) is None,
            "If-Match is ignored": put_if(location, name, b"3", '"00000000000000000000000000000000"') is None,
            "If-Match refuses the right version": first is not None and put_if(location, name, b"4", first) is not None,
        }
    finally:
        with contextlib.suppress(StoreError):  # must not hide another
            delete_objects(location, "", [name])
    broken = [what for what, kept in is_kept.items() if not kept]
    if broken:
        raise StoreError(
            f"{parent_of(location)} does not honour conditional puts ({'; '.join(broken)})",
            hint="nothing can be locked there: use a store that does (Amazon S3, MinIO, R2, Ceph), or a local path",
        )
    _HONOURED.add((address.bucket, address.settings))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- manifests --------------------------------------------------------------------------------------------------------


def refuse_links(store: Any, *, is_deep: bool = True) -> None:
    """Refuse a local group with a symbolic link inside, or right below it, before anything in it is read.

    Raises
    ------
    StoreError
        Names the link.
    """
    for folder, folders, names in () if is_url(store) else os.walk(store):
        for name in [*folders, *names]:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                raise StoreError(f"{path} is a symbolic link", hint="copy what it points to; links are not followed")
        folders[:] = folders if is_deep else []


def _key_digests(store: Any) -> dict[str, str]:
    """SHA-256 of every key of a group but its manifest."""
    refuse_links(store)
    return {key: _key_digest(store, key) for key in list_keys(store) if key != MANIFEST}


def _key_digest(store: Any, key: str) -> str:
    if is_url(store):
        return _digest(read_key(store, key) or b"")
    with open(os.path.join(store, key), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_digest(location: str) -> str | None:
    """SHA-256 of a file or object, or of all that is in a folder; None where nothing is, and of a link what it says."""
    if not is_url(location) and os.path.islink(location):
        return f"a link to {os.readlink(location)}"
    if digests := _key_digests(location):
        return _digest(json.dumps(digests, sort_keys=True).encode())
    if not is_url(location) and os.path.isdir(location):
        return "an empty folder"
    folder, name = parent_of(location), name_of(location)
    return None if key_size(folder, name) is None else _key_digest(folder, name)


def write_manifest(store: Any) -> None:
    """Write the manifest; the last key of a saved group."""
    write_json(store, MANIFEST, _key_digests(store))


def _manifest(store: Any) -> dict[str, str]:
    manifest = read_json(store, MANIFEST)
    if not isinstance(manifest, dict):
        raise StoreError(f"{store} has no {MANIFEST}", hint="it was not written completely; save it again")
    return manifest


def manifest_digest(store: Any) -> str:
    """SHA-256 of the manifest, and so of everything in the group.

    Raises
    ------
    StoreError
        There is no manifest.
    """
    return _digest(json.dumps(_manifest(store), sort_keys=True).encode())


def check_manifest(store: Any) -> str:
    """Compare every key with the manifest; :func:`manifest_digest`.

    Raises
    ------
    StoreError
        Names the first key that is missing, extra or different, with what was expected and found.
    """
    expected, found = _manifest(store), _key_digests(store)
    for key in sorted(expected | found):
        if found.get(key) == expected.get(key):
            continue
        what = f"is damaged (SHA-256 {found.get(key, '')[:12]}, {expected.get(key, '')[:12]} expected)"
        if key not in found or key not in expected:
            what = "is not in its manifest" if key in found else "is missing"
        raise StoreError(f"{key} of {store} {what}", hint="restore it, fit again, or save it again", key=key)
    return _digest(json.dumps(expected, sort_keys=True).encode())


def file_states(store: Any) -> dict[str, Any]:
    """What tells that a key of a saved group in a folder was written since, of each, its manifest too."""
    return {} if is_url(store) else {key: _state(store, key) for key in (MANIFEST, *(read_json(store, MANIFEST) or {}))}


def _state(store: Any, key: str) -> Any:
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(os.path.join(store, key))
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
    return None


def check_unchanged(store: Any, digest: str, known: dict[str, Any]) -> None:
    """Refuse a group that is not the one that was opened; keys that were written since are compared with the manifest.

    Parameters
    ----------
    digest
        The :func:`manifest_digest` when it was opened.
    known
        The :func:`file_states` then; those of keys that are found to be the same are brought up to date. Of objects
        only the manifest is compared.

    Raises
    ------
    StoreError
        It was replaced or removed, or a part of it was.
    """
    changed = [key for key, state in known.items() if _state(store, key) != state]
    is_doubtful = is_url(store) or MANIFEST in changed
    if is_doubtful and (key_size(store, MANIFEST) is None or manifest_digest(store) != digest):
        raise StoreError(f"{store} was replaced by another model, or removed", hint="load it again")
    expected = _manifest(store) if changed else {}
    for key in changed:
        state = _state(store, key)
        if state is None or (key != MANIFEST and _key_digest(store, key) != expected[key]):
            raise _changed(store, key)
        known[key] = state


def _changed(store: Any, key: str) -> StoreError:
    """The error of a key that is another one than when its group was opened: of a chunk that of a damaged one."""
    array, _, index = key.partition("/c/")
    reason, hint = "changed since it was opened", "restore it, or load it again"
    if not index:
        return StoreError(f"{key} of {store} was {reason}", hint=hint)
    numbers, where = tuple(map(int, index.split("/"))), join(store, array)
    text = f"chunk ({', '.join(map(str, numbers))}) of {where} is damaged ({reason})"
    return DamagedChunkError(text, hint=hint, path=where, index=numbers, reason=reason)


def plain(value: Any) -> Any:
    """Nested values as JSON has them: NumPy numbers become Python's, what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
