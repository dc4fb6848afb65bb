"""Where a data set is written: what is there already, room for it, and leaving nothing behind.

A data set is complete when the attributes of its group say so; they are written last, in one atomic replacement. What
an interrupted run left is recognised by its unfinished attributes and may be overwritten; anything else is not ours
and is never touched.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any, Literal

from dkrr.errors import StoreError
from dkrr.store.files import (
    check_space,
    children,
    delete_key,
    is_url,
    join,
    local_root,
    parent_of,
    read_json,
    remove_array,
    storage_errors,
    write_json,
)

__all__ = ["check_space", "storage_errors"]

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


def inspect(location: Any) -> State:
    """What is at ``location``.

    Raises
    ------
    StoreError
        Something that is not a data set of dkrr, a place inside of something of dkrr, a missing parent folder, or no
        permission.
    """
    root = local_root(location)
    with storage_errors(location):
        if root is not None and not root.parent.is_dir():
            raise StoreError(f"{root.parent} is not a folder, so {root} cannot be written", hint="create it first")
        if root is not None and os.path.lexists(root) and not root.is_dir():
            raise StoreError(f"{root} exists and is not a folder", hint="choose another destination")
        names = children(location)
        document = read_json(location, "zarr.json") if "zarr.json" in names else None
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if isinstance(attributes, dict) and attributes.get("dkrr_format") == FORMAT:
        return "complete" if attributes.get("complete") is True else "unfinished"
    if not all(_PARTIAL.fullmatch(name) for name in names):  # of one killed before its first file was complete
        raise StoreError(f"{location} exists and is not a data set of dkrr", hint="choose another destination")
    check_outside(location)
    return "empty" if root is not None and root.is_dir() else "absent"


def check_outside(location: Any) -> None:
    """Refuse to write inside a model, a version of one, a data set or an array of a store, which hold nothing else.

    Raises
    ------
    StoreError
        Names what ``location`` lies in.
    """
    folder = str(location) if is_url(location) else os.path.realpath(location)
    while (above := parent_of(folder)) != folder:
        folder = above
        try:
            documents = [read_json(folder, name) or {} for name in ("zarr.json", "version.json")]
        except (OSError, StoreError):  # of somebody else, or not ours to look at
            if is_url(folder):
                return
            continue
        group, version = (found if isinstance(found, dict) else {} for found in documents)
        attributes = group.get("attributes") or {}
        is_ours = "dkrr_format" in attributes or "rows_digest" in attributes or attributes.get("format") == "dkrr-model"
        if is_ours or version.get("format") == "dkrr-model-version":
            raise StoreError(
                f"{location} lies in {folder}, which dkrr wrote and which must hold nothing else",
                hint="choose a place outside of it",
            )


def claim(location: Any, state: State) -> None:
    """Make ``location``, where this state was found, a data set that is being written, and has no rows yet.

    Raises
    ------
    StoreError
        What was absent is there now: somebody who holds no lock has made it.
    """
    if state == "unfinished":
        clear(location, keep_folder=True)
    if state != "unfinished" and inspect(location) != state:
        raise StoreError(f"{location} was made by somebody else meanwhile", hint="look what is there")
    if (root := local_root(location)) is not None:
        root.mkdir(exist_ok=state != "absent")
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
    for name in children(location):
        if _ARRAY.fullmatch(name):
            remove_array(join(location, name))
        elif _PARTIAL.fullmatch(name):
            delete_key(location, name)
    # the marker goes last: an interrupted removal must still be recognised as ours
    delete_key(location, "zarr.json")
    if (root := local_root(location)) is not None and not keep_folder and not os.listdir(root):
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
        "attributes", what the group said of that version.
    """
    attributes = dict((read_json(location, "zarr.json") or {}).get("attributes", {}))
    found, now = list(attributes.pop("earlier", [])), time.time()
    if replaced:
        found.append({"version": attributes["version"], "replaced_at": now, "attributes": attributes})
    return [item for item in found if now - float(item["replaced_at"]) < KEPT_SECONDS]


def clear_versions(location: Any, version: int) -> None:
    """Remove arrays of a finished data set that nobody reads: of interrupted writes, and of versions long replaced.

    Parameters
    ----------
    version
        The one that counts. Each before it stays for an hour after it was replaced, for who has it open.
    """
    kept = {version, *(int(item["version"]) for item in earlier_versions(location))}
    root = local_root(location)
    for name in filter(_ARRAY.fullmatch, children(location)):
        if int(name.partition("-")[2] or 1) not in kept:
            remove_array(join(location, name))
    # what writes that were killed left; nobody else writes there
    for path in root.rglob("*.partial") if root is not None else ():
        path.unlink(missing_ok=True)
