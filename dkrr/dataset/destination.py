"""Where a data set is written: what is there already, room for it, and leaving nothing behind.

A data set is complete when the attributes of its group say so; they are written last, in one atomic replacement. What
an interrupted run left is recognised by its unfinished attributes and may be overwritten; anything else is not ours
and is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from dkrr.errors import DkrrError, StorageFullError, StoreError
from dkrr.store.files import (
    children,
    delete_key,
    free_bytes,
    full_disk,
    is_url,
    join,
    list_entries,
    list_keys,
    local_root,
    parent_of,
    read_json,
    remove_array,
    write_json,
)
from dkrr.store.interruption import check_fence
from dkrr.store.lease import hold_lock

__all__ = [
    "FORMAT_VERSION",
    "State",
    "array_name",
    "check_outside",
    "check_space",
    "clear",
    "clear_versions",
    "earlier_versions",
    "inspect",
    "is_part",
    "mark_unfinished",
    "storage_errors",
    "write_attributes",
    "writing",
]

FORMAT = "dataset"
FORMAT_VERSION = 1
State = Literal["absent", "empty", "unfinished", "complete"]

# readers that have opened a data set go on with its rows for so long after a new version has replaced them
KEPT_SECONDS = 3600.0

_ARRAY = re.compile(r"(X|y|weight)(?:-([1-9]\d*))?")
_PARTIAL = re.compile(r"zarr\.json\.[0-9a-f]{32}\.partial")


def array_name(part: str, version: int) -> str:
    """What the array of a part is called in the group: ``X``, and ``X-2`` in version 2."""
    return part if version == 1 else f"{part}-{version}"


def is_part(name: str) -> bool:
    """Whether something in the folder of a data set has the name of its metadata or of an array."""
    return name == "zarr.json" or _ARRAY.fullmatch(name) is not None


def inspect(location: Any) -> State:
    """What is at ``location``.

    Raises
    ------
    StoreError
        Something that is not a data set of dkrr, a place inside of something of dkrr, a missing parent folder, or no
        permission.
    """
    state = _state(location)
    if state in ("absent", "empty"):
        check_outside(location)
    return state


def check_outside(location: Any) -> None:
    """Refuse to write inside a model, a version of one, a data set or an array of a store, which hold nothing else.

    Raises
    ------
    StoreError
        Names what ``location`` lies in.
    """
    for folder in _above(location):
        try:
            documents = [read_json(folder, name) for name in ("zarr.json", "version.json")]
        except (OSError, StoreError):  # of somebody else, or not ours to look at
            if is_url(folder):
                return
            continue
        group, version = (found if isinstance(found, dict) else {} for found in documents)
        attributes = group.get("attributes")
        attributes = attributes if isinstance(attributes, dict) else {}
        is_ours = bool({"dkrr_format", "rows_digest"} & attributes.keys()) or attributes.get("format") == "dkrr-model"
        if is_ours or version.get("format") == "dkrr-model-version":
            raise StoreError(
                f"{location} lies in {folder}, which dkrr wrote and which must hold nothing else",
                hint="choose a place outside of it",
            )


def _above(location: Any) -> Iterator[str]:
    """The folders that something lies in, the innermost first."""
    if is_url(location):
        while (folder := parent_of(location)) != location:
            yield folder
            location = folder
        return
    inner = Path(os.path.realpath(Path(location) / os.pardir))
    yield from map(str, (inner, *inner.parents))


def _state(location: Any) -> State:
    root = local_root(location)
    with storage_errors(location):
        if root is not None:
            if not root.parent.is_dir():
                raise StoreError(f"{root.parent} is not a folder, so {root} cannot be written", hint="create it first")
            if not os.path.lexists(root):
                return "absent"
            if not root.is_dir():
                raise StoreError(f"{root} exists and is not a folder", hint="choose another destination")
            names = os.listdir(root)
            if all(_PARTIAL.fullmatch(name) for name in names):  # killed before its first file was complete
                return "empty"
        document = read_json(location, "zarr.json")
        attributes = document.get("attributes", {}) if isinstance(document, dict) else {}
        if isinstance(attributes, dict) and attributes.get("dkrr_format") == FORMAT:
            return "complete" if attributes.get("complete") is True else "unfinished"
        if root is None and document is None and not list_keys(location):
            return "absent"
    raise StoreError(f"{location} exists and is not a data set of dkrr", hint="choose another destination")


@contextlib.contextmanager
def writing(location: Any, *, wait: bool = False) -> Iterator[None]:
    """Be the one who writes a data set while the block runs, see :func:`dkrr.store.lease.hold_lock`.

    Raises
    ------
    LockedError
        Another process writes there.
    StoreError
        No lock can be written beside it.
    """
    with contextlib.ExitStack() as stack:
        with storage_errors(location):
            stack.enter_context(hold_lock(location, wait=wait))
        yield


def mark_unfinished(location: Any, state: State) -> None:
    """Claim ``location``, where this state was found, for a data set that is being written.

    Raises
    ------
    StoreError
        What was absent is there now: somebody who holds no lock has made it.
    """
    root = local_root(location)
    try:
        if state == "absent" and root is not None:
            root.mkdir()
        elif state == "empty" and inspect(location) != "empty":
            raise FileExistsError
    except FileExistsError:
        raise StoreError(f"{location} was made by somebody else meanwhile", hint="look what is there") from None
    write_attributes(location, {"complete": False})


def write_attributes(location: Any, attributes: dict[str, Any]) -> None:
    """Replace the attributes of the group, atomically and durably."""
    document = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"dkrr_format": FORMAT, "format_version": FORMAT_VERSION, **attributes},
    }
    write_json(location, "zarr.json", document, durable=True)


def clear(location: Any, *, keep_folder: bool = False) -> None:
    """Remove the data set at ``location``, or only what is inside the folder; what is not of dkrr stays."""
    check_fence()
    root = local_root(location)
    # the marker goes last: an interrupted removal must still be recognised as ours
    if root is None:
        for name in children(location):
            if _ARRAY.fullmatch(name):
                remove_array(join(location, name))
        delete_key(location, "zarr.json")
        return
    ours = [path for path in root.iterdir() if is_part(path.name) or _PARTIAL.fullmatch(path.name)]
    for entry in sorted(ours, key=lambda path: path.name == "zarr.json"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    if not keep_folder and not os.listdir(root):
        root.rmdir()


def earlier_versions(location: Any, *, replaced: bool = False) -> list[dict[str, Any]]:
    """The versions before the present one that somebody may still read, the oldest first.

    Parameters
    ----------
    replaced
        Count the present one among them, replaced at this moment.

    Returns
    -------
    versions
        Plain JSON for the next attributes of the group: "version", "replaced_at" (seconds since 1970), and
        "attributes", what the group said of that version (None where an older dkrr replaced it).
    """
    attributes = dict((read_json(location, "zarr.json") or {}).get("attributes", {}))
    version = int(attributes.get("version", 1))
    found = list(attributes.pop("earlier", []))
    replaced_at = attributes.pop("replaced_at", None)
    if replaced_at is not None:  # as noted when only one of them was kept
        found.append({"version": version - 1, "replaced_at": replaced_at, "attributes": None})
    now = time.time()
    if replaced:
        found.append({"version": version, "replaced_at": now, "attributes": attributes})
    return [item for item in found if now - float(item["replaced_at"]) < KEPT_SECONDS]


def clear_versions(location: Any, version: int) -> None:
    """Remove arrays of a finished data set that nobody reads: of interrupted writes, and of versions long replaced.

    Parameters
    ----------
    version
        The one that counts. Each before it stays for an hour after it was replaced, for who has it open.
    """
    check_fence()
    kept = {version, *(int(item["version"]) for item in earlier_versions(location))}
    root = local_root(location)
    for name in children(location):
        found = _ARRAY.fullmatch(name)
        if found is not None and int(found[2] or 1) not in kept:
            remove_array(join(location, name))
        elif root is not None and (found is not None or _PARTIAL.fullmatch(name)):
            _remove_partials(root / name)


def _remove_partials(path: Path) -> None:
    """What writes that were killed left; nobody else writes there."""
    if path.is_file():
        path.unlink(missing_ok=True)
        return
    for entry in list_entries(path):
        if entry.key.endswith(".partial"):
            (path / entry.key).unlink(missing_ok=True)


def check_space(location: Any, num_bytes: int) -> None:
    """Refuse to start writing ``num_bytes`` where they do not fit.

    Raises
    ------
    StorageFullError
        With ``needed`` and ``free`` in bytes.
    """
    root = local_root(location)
    if root is None:
        return
    free = free_bytes(root)
    if num_bytes > free:
        raise StorageFullError(
            f"{root} needs {num_bytes:,} bytes and {free:,} are free",
            hint="free some space or choose another disk",
            needed=num_bytes,
            free=free,
            path=str(root),
        )


@contextlib.contextmanager
def storage_errors(location: Any, needed: int | None = None) -> Iterator[None]:
    """Turn what the operating system says about ``location`` into a typed error."""
    try:
        with full_disk(location, needed):
            yield
    except DkrrError:
        raise
    except OSError as exc:
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StoreError(
                f"no permission to use {exc.filename or location} ({exc.strerror})",
                hint="change its permissions or choose another place",
            ) from exc
        raise StoreError(f"{location} cannot be used ({exc})", hint="check the disk and start again") from exc
