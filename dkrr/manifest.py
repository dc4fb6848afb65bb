"""Manifest: SHA-256 of every key of a saved group, so that a missing, extra or changed key is found at load."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from dkrr.address import is_url, name_of, parent_of
from dkrr.errors import StoreError
from dkrr.stores import key_size, list_keys, local_root, read_json, read_key, write_json

__all__ = ["MANIFEST", "check_manifest", "content_digest", "manifest_digest", "refuse_links", "write_manifest"]

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


def _digest(store: Any, key: str) -> str:
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
        digests = {key: _digest(location, key) for key in keys}
        return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()
    if not is_url(location) and os.path.isdir(location):
        return "an empty folder"
    folder, name = parent_of(location), name_of(location)
    return None if key_size(folder, name) is None else _digest(folder, name)


def write_manifest(store: Any) -> None:
    """Write the manifest; the last key of a saved group."""
    write_json(store, MANIFEST, {key: _digest(store, key) for key in _keys(store) if key != MANIFEST})


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
        found = _digest(store, key)
        if found != expected:
            raise StoreError(
                f"{key} of {store} is damaged (SHA-256 {found[:12]}, {expected[:12]} expected)",
                hint="restore it, or fit again",
                key=key,
            )
