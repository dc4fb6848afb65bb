"""Versions of a model: each is written once, appears whole, and is never changed.

    versions/0007-3fa9c1d25b0e/    model.zarr, version.json

The name is a number, counted up, and the beginning of a key that says what the version was made from; publishing
again what has this key finds the version that is there. A number belongs to the model whose ``numbers/0007.json`` was
created first, so that of two publishers each has its own. In a folder a version appears by one rename. Objects cannot
be renamed: ``version.json`` comes last, is created under a condition, and without it there is no version.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkrr.errors import StoreError
from dkrr.jobs.documents import plain
from dkrr.jobs.runs.directory import utc_now
from dkrr.store.documents import MANIFEST, check_manifest, create_json, manifest_digest, refuse_links
from dkrr.store.failpoints import failpoint
from dkrr.store.files import (
    children,
    is_url,
    join,
    list_keys,
    local_root,
    read_json,
    read_key,
    remove_array,
    sync_folder,
    sync_path,
    write_json,
    write_key,
)
from dkrr.store.interruption import check_fence

__all__ = ["VERSIONS", "Version", "check_version", "list_versions", "open_version", "publish_version", "remove_version"]

VERSIONS, NUMBERS = "versions", "numbers"
RECORD = "version.json"
FORMAT, FORMAT_VERSION = "dkrr-model-version", 1
_ID = re.compile(r"(\d{4,})-([0-9a-f]{12})")


@dataclass(frozen=True, kw_only=True)
class Version:
    """One version of a model.

    Parameters
    ----------
    id
        Its name, for example ``0007-3fa9c1d25b0e``.
    number
        The number that the id begins with.
    key
        Hash of what it was made from.
    location
        Path or address of its folder.
    model_digest
        Digest of the model's manifest, and so of every byte of it.
    created_at
        UTC, ISO 8601.
    num_rows
        Training rows.
    facts
        What else was said about it when it was published: scores, batches, the report of the gate.
    """

    id: str
    number: int
    key: str
    location: str
    model_digest: str
    created_at: str
    num_rows: int
    facts: dict[str, Any]

    @property
    def model_path(self) -> str:
        """Path or address of the model."""
        return join(self.location, "model.zarr")

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "id": self.id,
            "number": self.number,
            "key": self.key,
            "model_digest": self.model_digest,
            "created_at": self.created_at,
            "num_rows": self.num_rows,
            "facts": self.facts,
        }


def open_version(folder: str, name: str) -> Version | None:
    """The version of this id; None when it is not there, or not complete."""
    location = join(folder, VERSIONS, name)
    document = read_json(location, RECORD) if _ID.fullmatch(name) else None
    if document is None:
        return None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f"{join(location, RECORD)} was not written by dkrr", hint="check the path of the registry")
    if document.get("format_version") != FORMAT_VERSION:
        raise StoreError(f"{location} is of a newer format", hint="install a newer dkrr")
    try:
        return Version(
            id=name,
            number=int(document["number"]),
            key=str(document["key"]),
            location=location,
            model_digest=str(document["model_digest"]),
            created_at=str(document["created_at"]),
            num_rows=int(document["num_rows"]),
            facts=dict(document["facts"]),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise StoreError(f"{join(location, RECORD)} is unreadable ({exc!r})", hint="restore it") from exc


def list_versions(folder: str) -> list[Version]:
    """The versions of the model in ``folder`` that are complete, oldest first."""
    found = (open_version(folder, name) for name in children(join(folder, VERSIONS)))
    return sorted(
        (version for version in found if version is not None), key=lambda version: (version.number, version.id)
    )


def publish_version(folder: str, model_path: str, *, key: str, facts: dict[str, Any], num_rows: int) -> Version:
    """Copy a saved model into a new version, unless there is one with this key already.

    Raises
    ------
    StoreError
        The model is not whole, or what is there under this key is another model.
    """
    refuse_links(model_path)
    check_manifest(model_path)
    digest = manifest_digest(model_path)
    existing = list_versions(folder)
    for version in existing:
        if version.key == key:
            return version
    number = _take_number(folder, 1 + max((version.number for version in existing), default=0), key, digest)
    name = f"{number:04d}-{key[:12]}"
    version = Version(
        id=name,
        number=number,
        key=key,
        location=join(folder, VERSIONS, name),
        model_digest=digest,
        created_at=utc_now(),
        num_rows=num_rows,
        facts=plain(facts),
    )
    failpoint("registry.version.before_write")
    if is_url(folder):
        _publish_objects(version, model_path)
    else:
        _publish_folder(version, model_path)
    failpoint("registry.version.after_write")
    found = open_version(folder, name)
    if found is None:
        raise StoreError(f"{version.location} was removed while it was published", hint="start again")
    return found


def _take_number(folder: str, number: int, key: str, digest: str) -> int:
    """The first number from ``number`` on that no other model has, and that no other will have."""
    claim = {"key": key, "model_digest": digest}  # the same bytes may be published twice: nothing is overwritten
    while create_json(folder, f"{NUMBERS}/{number:04d}.json", claim, durable=True) is None:
        if read_json(folder, f"{NUMBERS}/{number:04d}.json") == claim:
            break
        number += 1
    return number


def _publish_folder(version: Version, model_path: str) -> None:
    target = Path(version.location)
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    try:
        _copy(model_path, str(partial / "model.zarr"))
        write_json(str(partial), RECORD, version.to_dict())
        sync_folder(partial)
        failpoint("registry.version.before_pointer")
        check_fence()
        try:
            os.rename(partial, target)  # never onto a folder that holds something
        except OSError:
            if not (target / RECORD).exists():
                raise
        for folder in target.parents[:3]:  # versions, the model's folder and the registry may be new
            sync_path(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish_objects(version: Version, model_path: str) -> None:
    _copy(model_path, version.model_path)
    failpoint("registry.version.before_pointer")
    # a version of this name that is there already has the same key, and so the same model
    create_json(version.location, RECORD, version.to_dict() | {"token": uuid.uuid4().hex})


def _copy(source: str, target: str) -> None:
    """Every key of a saved model, its manifest last."""
    for key in sorted(list_keys(source), key=lambda key: (key == MANIFEST, key)):
        data = read_key(source, key)
        if data is None:
            raise StoreError(f"{key} of {source} is gone", hint="it was replaced during the copy; start again")
        write_key(target, key, data)
        failpoint("registry.version.mid_copy")


def check_version(version: Version) -> None:
    """Read the whole model of a version and compare it with what was published.

    Raises
    ------
    StoreError
        A key is missing, extra or changed.
    """
    check_manifest(version.model_path)
    found = manifest_digest(version.model_path)
    if found != version.model_digest:
        raise StoreError(
            f"{version.model_path} is another model than was published ({found[:12]}, {version.model_digest[:12]} "
            "expected)",
            hint="restore it; versions are never changed",
        )


def remove_version(location: str) -> None:
    """Delete a version, its record first, so that a deletion which is interrupted leaves none."""
    root = local_root(location)
    if root is not None:
        with contextlib.suppress(FileNotFoundError):
            (root / RECORD).unlink()
    remove_array(location)
