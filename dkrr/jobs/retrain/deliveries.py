"""New rows as files that somebody delivers: which there are, and whether they have been seen.

A batch is a file (or a folder of Parquet, or a Zarr array) and is known by its bytes, not by its name: the same bytes
under another name are the same batch, and a corrected file under the old name is a new one. The size and times of
a file, or the ETag of an object, tell one that is unchanged without reading it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dkrr.errors import InterruptedRunError, StoreError
from dkrr.jobs.toml import FILE_SUFFIXES
from dkrr.store.files import file_state, is_url, join, list_entries, name_of, overlaps, parent_of


@dataclass(frozen=True)
class Delivery:
    """A file that was found: its name, where it is, and what tells it from a changed one without reading it."""

    name: str
    location: str
    state: Any


def deliveries(incoming: str, without: Sequence[str] = ()) -> list[Delivery]:
    """What a file, a folder or a pattern means now, by name; a folder or pattern may mean nothing.

    Files of the job itself that lie there (``without``) are no deliveries.

    In a folder only files of known formats count, and none whose name begins with a dot: whoever writes a file there
    slowly gives it another ending first.

    Raises
    ------
    StoreError
        The folder does not exist, where a mistyped name would mean "nothing new" for ever.
    """
    name = name_of(incoming)
    is_pattern = any(mark in name for mark in "*?[")
    is_file = not is_pattern and (_is_data(name) or os.path.isfile(incoming))
    folder = parent_of(incoming) if is_pattern or is_file else incoming
    found = []
    for other, state in (_objects(folder) if is_url(folder) else dict.fromkeys(_names(folder))).items():
        location = join(folder, other)
        is_meant = fnmatch.fnmatchcase(other, name) if is_pattern else other == name if is_file else _is_data(other)
        if is_meant and not any(overlaps(location, own) for own in without):
            found.append(Delivery(other, location, _state(location) if state is None else state))
    return found


def _is_data(name: str) -> bool:
    return name.lower().endswith(FILE_SUFFIXES) and not name.startswith(".")


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as exc:
        raise StoreError(
            f"{folder} cannot be listed ({exc.strerror})", hint="[retrain] incoming names it; make the folder"
        ) from None


def _state(location: str) -> Any:
    """Name, size and times of last change of a file, or of every file in a folder."""
    if not os.path.isdir(location):
        return [["", *file_state(location)]]
    paths = sorted(os.path.join(folder, name) for folder, _, names in os.walk(location) for name in names)
    return [[os.path.relpath(path, location), *file_state(path)] for path in paths]


def _objects(folder: str) -> dict[str, list[Any]]:
    """The same below an address: objects right there, and everything below a prefix."""
    found: dict[str, list[Any]] = {}
    for item in list_entries(folder):
        found.setdefault(item.key.partition("/")[0], []).append([item.key, item.num_bytes, item.version])
    return found


def content_hash(delivery: Delivery) -> str:
    """SHA-256 of the bytes of a batch; of an object store the ETags stand for them.

    Raises
    ------
    InterruptedRunError
        The file changed while it was read.
    """
    digest = hashlib.sha256()
    if is_url(delivery.location):
        digest.update(repr(delivery.state).encode())
        return digest.hexdigest()
    try:
        for name, *_ in delivery.state:
            with open(os.path.join(delivery.location, name).rstrip("/"), "rb") as stream:
                digest.update(name.encode() + hashlib.file_digest(stream, "sha256").digest())
        if _state(delivery.location) == delivery.state:
            return digest.hexdigest()
    except FileNotFoundError:
        pass
    raise InterruptedRunError(
        f"{delivery.location} was changed while it was read",
        hint="start again when it is complete; write files under another name and rename them",
    )
