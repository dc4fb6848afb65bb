"""New rows as files that somebody delivers: which there are, and whether they have been seen.

A batch is a file (or a folder of Parquet, or a Zarr array) and is known by its bytes, not by its name: the same bytes
under another name are the same batch, and a corrected file under the old name is a new one. The size and times of
a file, or the ETag of an object, tell one that is unchanged without reading it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkrr.errors import InterruptedRunError, StoreError
from dkrr.jobs.fields import FILE_SUFFIXES
from dkrr.store.files import file_state, is_url, join, list_entries, name_of, overlaps, parent_of

__all__ = ["Delivery", "content_hash", "deliveries"]

_PATTERN = "*?["
_BLOCK = 2**20


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
    found = _objects(incoming) if is_url(incoming) else _local(incoming)
    return [delivery for delivery in found if not any(overlaps(delivery.location, own) for own in without)]


def _local(incoming: str) -> list[Delivery]:
    if any(mark in os.path.basename(incoming) for mark in _PATTERN):
        folder, pattern = os.path.split(incoming)
        paths = [path for path in _files(folder) if fnmatch.fnmatchcase(path.name, pattern)]
    elif os.path.isdir(incoming) and not _is_data(os.path.basename(incoming)):
        paths = [path for path in _files(incoming) if _is_data(path.name)]
    else:
        paths = [Path(incoming)] if os.path.exists(incoming) else _not_yet(incoming)
    return [Delivery(path.name, str(path), _state(path)) for path in paths]


def _not_yet(incoming: str) -> list[Path]:
    """A file may be delivered later, into a folder that is there; anything else that is missing is a mistake."""
    folder, name = os.path.split(incoming)
    if not _is_data(name) or not os.path.isdir(folder):
        raise StoreError(f"{incoming} does not exist", hint="[retrain] incoming names it; make the folder")
    return []


def _is_data(name: str) -> bool:
    return name.lower().endswith(FILE_SUFFIXES) and not name.startswith(".")


def _files(folder: str) -> list[Path]:
    try:
        return sorted(path for path in Path(folder).iterdir() if not path.name.startswith("."))
    except OSError as exc:
        raise StoreError(
            f"{folder} cannot be listed ({exc.strerror})", hint="[retrain] incoming names it; make the folder"
        ) from None


def _state(path: Path) -> Any:
    """Size and times of last change, of every file in a folder."""
    return [[str(file.relative_to(path)) if file != path else "", *file_state(file)] for file in _walk(path)]


def _walk(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names))


def _objects(incoming: str) -> list[Delivery]:
    """The same below an address: objects right there, and prefixes with the ending of a data file."""
    name = name_of(incoming)
    is_pattern = any(mark in name for mark in _PATTERN)
    folder = parent_of(incoming) if is_pattern or _is_data(name) else incoming
    found: dict[str, list[Any]] = {}
    for item in list_entries(folder):
        first = item.key.partition("/")[0]
        is_meant = fnmatch.fnmatchcase(first, name) if is_pattern else folder == incoming or first == name
        if is_meant and (is_pattern or _is_data(first)):
            found.setdefault(first, []).append([item.key, item.num_bytes, item.version])
    return [Delivery(first, join(folder, first), state) for first, state in sorted(found.items())]


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
    path = Path(delivery.location)
    try:
        for file in _walk(path):
            digest.update(str(file.relative_to(path) if file != path else "").encode())
            with open(file, "rb") as stream:
                while block := stream.read(_BLOCK):
                    digest.update(block)
        unchanged = _state(path) == delivery.state
    except FileNotFoundError:
        unchanged = False
    if not unchanged:
        raise InterruptedRunError(
            f"{delivery.location} was changed while it was read",
            hint="start again when it is complete; write files under another name and rename them",
        )
    return digest.hexdigest()
