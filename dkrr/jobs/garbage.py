"""What a store holds that no run and no model refers to.

A Gram matrix, a factor or a copy of rows is needed when a JSON document of a run or a model names its key, or when a
run that has a plan and no result may go on writing it; so are preconditioners and the state of an iteration ("solves").
While a run is being planned, all of it is: nobody knows yet what the run will find.
Runs and models are looked for in the folder that holds the store and below it, and wherever the store was told of some
(:func:`~dkrr.store.files.note_user`: each run, saved model and registry that uses a store elsewhere does so), or
remembers a model of.
You need this when a store has grown: factors are kept so that a fit can be extended, and nothing else removes them.
Scratch, that of a factor too unless such a run may go on with it, and what interrupted writes left are garbage. What
changed lately is left alone: it may belong to a fit that is running.

A store may be a folder with other things in it, and so may the one that holds it. Only names that dkrr gives are looked
at: in the store those made of keys, elsewhere those of drafts (``NAME.<32 hexadecimal digits>.partial``) of a run, a
model or a data set, or in one.

Of the versions of a registered model only those count that an alias names, that lost their alias within the last day,
or that are as young; a version that is kept for other reasons predicts without a factor.

What is deleted is locked and looked at once more before: between a list and a person's answer a fit may have begun.

Cost: one walk over the folders, or one listing; documents are read, chunks are not. Again for each 64 deletions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dkrr.errors import LockedError, StoreError
from dkrr.jobs.inspection import kind_of
from dkrr.jobs.registry import ALIASES, GRACE_SECONDS, VERSIONS, NamedModel
from dkrr.linalg.catalogue import recorded_models
from dkrr.linalg.direct import factor_of_scratch
from dkrr.store.files import (
    USERS,
    children,
    delete_key,
    is_below,
    is_url,
    join,
    list_entries,
    name_of,
    parent_of,
    read_key,
    relative_to,
    remove_array,
    sibling,
    users_of,
)
from dkrr.store.lease import hold_lock
from dkrr.store.objects import Entry

KEPT_SECONDS = 3600.0
# A driver says every few seconds that it is there; state and phase until it has a plan.
SILENT_SECONDS = 120.0
PLANNING = (("starting", ""), ("running", ""), ("running", "prepare"), ("running", "plan"))
_KEY = re.compile(rb"[0-9a-f]{32,64}")
_HASH, _DRAWN = "[0-9a-f]{40}", "[0-9a-f]{32}"
# what a store holds, by folder: besides arrays, vectors of a pass that was killed, notes about float32 factors that
# broke down, records of the rows that arrays were made of, and the subsets and trials of searches
_NAMES = {
    "grams": rf"(?:{_HASH}|given-{_DRAWN})\.zarr",
    "factors": rf"{_HASH}(?:-sums|-strips)?\.zarr",
    "rows": rf"(?:{_DRAWN}|{_HASH}-(?:train|test)|{_HASH}(?:-{_HASH}){{0,2}}(?:-1d)?)\.zarr",
    "data": rf"{_HASH}\.zarr",
    "preconditioners": rf"{_HASH}\.zarr",
    "solves": rf"{_HASH}\.zarr",
    "scratch": rf"{_DRAWN}\.zarr",
    "lineage": rf"[0-9a-f]{{16}}-(?:{_HASH}|[0-9a-f]{{64}})\.json",
    "tune": rf"{_HASH}\.zarr",
}
_ITEM = re.compile("|".join(f"{kind}/{name}" for kind, name in _NAMES.items()))
_IN_ITEM = re.compile(rf"(?:{_ITEM.pattern}|{USERS}/[0-9a-f]{{16}}\.json)(?:\.lock)?(?:/.*)?")
_LEFT = re.compile(rf"(?:\.dkrr-probe-|(?P<whole>.+)\.){_DRAWN}\.(?P<what>partial|replaced)")
_TOGETHER = 64


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted: an array or a file at a path or address, its size, and why nobody needs it."""

    location: str
    num_bytes: int
    reason: str


def find_garbage(
    store: str | os.PathLike[str], runs: Iterable[str | os.PathLike[str]] = (), kept_seconds: float = KEPT_SECONDS
) -> list[Garbage]:
    """List what nothing refers to.

    Parameters
    ----------
    store
        Folder or address with ``grams``, ``factors`` and prepared ``rows``.
    runs
        Folders or addresses below which runs and models are looked for, besides the one that holds the store and those
        that the store was told of.
    kept_seconds
        What changed within this time is not listed.

    Raises
    ------
    StoreError
        ``store`` is not a store, or somebody that it was told of cannot be looked at.
    """
    root = _absolute(store)
    there = {
        kind: [name for name in children(join(root, kind)) if re.fullmatch(ours, name)] for kind, ours in _NAMES.items()
    }
    if not any(there.values()) and not {"grams", "factors"} & set(children(root)):
        raise StoreError(f"{root} is not a store (no folder grams or factors)", hint="name the folder of the store")
    users = {note: _present(note, places) for note, places in users_of(root).items()}
    given = os.fspath(store) if is_url(root) else os.path.abspath(store)  # a link has runs beside it, too
    folders = (
        parent_of(root),
        _absolute(parent_of(given)),
        *map(_absolute, runs),
        *(place for places in users.values() for place in places),
        # of a store that was moved away from its runs
        *(parent_of(model) for model in recorded_models(root) if not is_url(model) and os.path.isdir(model)),
    )
    trees = [_Tree.of(folder) for folder in dict.fromkeys(folders)]
    for tree in trees:  # which grow: a run may lie behind a link, on another disk
        for link in _links(tree.location):
            behind = _present(link, [os.path.realpath(link)])
            trees += [
                _Tree.of(place) for place in behind if not any(is_below(place, other.location) for other in trees)
            ]
    named = set().union(*(tree.named_keys(root) for tree in trees))
    unfinished = [plan for tree in trees for plan in tree.unfinished_plans()]
    newest = time.time() - kept_seconds
    is_planning = any(tree.is_planning(min(newest, time.time() - SILENT_SECONDS)) for tree in trees)
    found = []
    for kind, names in there.items():
        for name in names:
            location = join(root, kind, name)
            keys = {key.decode() for key in _KEY.findall(name.encode())}
            factor = factor_of_scratch(name) if kind == "factors" else None
            if factor is not None:  # who names the factor has no use for its scratch, only who goes on with it
                keys, reason = set(), "scratch of a factor that no run goes on with"
            else:
                factor, reason = name, "no run or model refers to it"
            may_find = is_planning and kind != "scratch"
            if keys & named or may_find or _may_resume(join(root, kind, factor), kind, unfinished):
                continue
            size, changed = _facts(location)
            if changed < newest:
                found.append(Garbage(location, size, reason))
        if is_url(root):
            found.extend(_released_locks(root, kind, newest))
    for note in (note for note, places in users.items() if not places):
        size, changed = _facts(note)
        if changed < newest:
            found.append(Garbage(note, size, "a note of a run or model that was removed"))
    whole = {item.location for item in found}
    is_ours = functools.cache(_is_ours)
    for tree in trees:
        for location, size, changed in tree.partials(root, is_ours):
            if changed < newest and not any(is_below(location, other) for other in whole):
                found.append(Garbage(location, size, "left by an interrupted write"))
                whole.add(location)
    return found


def delete_garbage(items: Sequence[Garbage], look: Callable[[], list[Garbage]]) -> tuple[int, list[Garbage]]:
    """Delete items that are still garbage; each is locked first, and then looked at again.

    Parameters
    ----------
    look
        Lists the garbage that there is now: the same :func:`find_garbage` that listed the items.

    Returns
    -------
    num_bytes : int
        That became free.
    kept : list of Garbage
        What somebody holds or needs by now, or has changed, and why.
    """
    num_bytes, kept = 0, []
    for start in range(0, len(items), _TOGETHER):
        with contextlib.ExitStack() as locks:
            ours, held = [], set()
            for item in items[start : start + _TOGETHER]:
                name = name_of(item.location)
                array = join(parent_of(item.location), factor_of_scratch(name) or name)
                try:
                    if name.endswith(".zarr") and array not in held:
                        locks.enter_context(hold_lock(array))
                        held.add(array)
                    ours.append(item)
                except LockedError as exc:
                    kept.append(replace(item, reason=exc.message))
            now = set(look())
            for item in ours:
                if item in now:
                    remove_array(item.location)
                    delete_key(parent_of(item.location), name_of(item.location))  # of a file or an object
                    num_bytes += item.num_bytes
                elif item.location not in {sibling(array, ".lock") for array in held}:  # which we hold ourselves
                    kept.append(replace(item, reason="it has changed since it was listed, or is needed by now"))
    return num_bytes, kept


def _present(note: str, places: Sequence[str]) -> list[str]:
    """Where a user of a store is; nowhere, when it was removed.

    Raises
    ------
    StoreError
        A folder that it may have been in is not there either: on a disk that is not mounted, or moved.
    """
    found = [place for place in places if is_url(place) or os.path.isdir(place)]
    if found or all(os.path.isdir(parent_of(place)) for place in places):
        return found
    raise StoreError(
        f"{places[0]}, which uses the store, cannot be looked at: the folder it was in is not there",
        hint=f"mount its disk; if it was moved, name its folder with --runs and remove {note}; if it is gone for good, "
        "remove that file",
    )


def _absolute(location: str | os.PathLike[str]) -> str:
    text = os.fspath(location)
    return text if is_url(text) else os.path.realpath(text)


@dataclass(frozen=True)
class _Tree:
    """Everything below a folder or address that holds runs and models."""

    location: str
    entries: list[Entry]

    @classmethod
    def of(cls, location: str) -> _Tree:
        if not is_url(location) and not os.path.isdir(location):
            raise StoreError(f"{location} is not a folder", hint="check the path of the runs")
        return cls(location, _entries(location))

    def named_keys(self, store: str) -> set[str]:
        """Every key that a document names; the store's own documents do not count."""
        named: set[str] = set()
        retired = tuple(self._retired_versions())
        for entry in self.entries:
            is_document = entry.key.endswith((".json", ".toml"))
            if (
                is_document
                and not entry.key.startswith(retired)
                and not _IN_ITEM.fullmatch(relative_to(join(self.location, entry.key), store))
            ):
                data = read_key(self.location, entry.key)
                named.update(key.decode() for key in _KEY.findall(data or b""))
        return named

    def _retired_versions(self) -> Iterable[str]:
        """Where the versions of registered models are that no alias and no reader needs."""
        for entry in self.entries:
            folder, _, name = entry.key.rpartition("/")
            if name != ALIASES:
                continue
            location = join(self.location, folder) if folder else self.location
            start = f"{folder}/{VERSIONS}" if folder else VERSIONS
            unneeded = NamedModel(location).unneeded(grace_seconds=GRACE_SECONDS)
            yield from (f"{start}/{version.id}/" for version in unneeded)

    def is_planning(self, since: float) -> bool:
        """Whether a run that said since then that it is there has not come to its plan: it may find anything."""
        for entry in self.entries:
            if entry.key.rpartition("/")[2] == "status.json" and entry.modified >= since:
                with contextlib.suppress(ValueError):  # what others call so
                    status = json.loads(read_key(self.location, entry.key) or b"{}")
                    if isinstance(status, dict) and (status.get("state"), status.get("phase")) in PLANNING:
                        return True
        return False

    def unfinished_plans(self) -> Iterable[dict[str, Any]]:
        """Plans of runs that were started and have no result yet, or were started again since, with other rows."""
        changed = {entry.key: entry.modified for entry in self.entries}
        for key in sorted(changed):
            folder = key.removesuffix("plan.json")
            if key.rpartition("/")[2] != "plan.json":
                continue
            # every attempt writes job.json at its begin, and result.json at its end
            begun = max(changed[key], changed.get(f"{folder}job.json", 0.0))
            if begun > changed.get(f"{folder}result.json", 0.0):
                data = read_key(self.location, key)
                if data is not None:
                    yield json.loads(data)

    def partials(self, store: str, is_ours: Callable[[str], bool]) -> Iterable[tuple[str, int, float]]:
        """What interrupted writes left, files and folders: location, bytes, last change."""
        found: dict[str, list[Entry]] = {}
        keys = {entry.key.rstrip("/") for entry in self.entries}
        for entry in self.entries:
            parts = entry.key.rstrip("/").split("/")
            for depth, part in enumerate(parts, start=1):
                left = _LEFT.fullmatch(part)
                if left is None:
                    continue
                key, whole = "/".join(parts[:depth]), "/".join([*parts[: depth - 1], left["whole"] or part])
                # what was replaced is all that there is, until the other one is in its place
                if (left["what"] == "partial" or whole in keys) and (
                    left["whole"] is None
                    or _IN_ITEM.fullmatch(relative_to(join(self.location, whole), store))
                    or any(
                        is_ours(join(self.location, *name))
                        for name in ([key], [whole.removesuffix(".lock")], *_above(parts[:depth]))
                    )
                ):
                    found.setdefault(key, []).append(entry)
                break
        for key, entries in sorted(found.items()):
            yield join(self.location, key), sum(e.num_bytes for e in entries), max(e.modified for e in entries)


def _above(parts: list[str]) -> Iterable[list[str]]:
    """Every folder that something lies in, from the tree on."""
    return (parts[:depth] for depth in range(len(parts)))


def _is_ours(location: str) -> bool:
    """Whether a folder is a run, a registered model, or an array or a group of dkrr."""
    try:
        return bool(kind_of(location))
    except StoreError:
        return False


def _entries(location: str) -> list[Entry]:
    """Files or objects below a location; of a file system also the folders, whose keys end in a slash."""
    if is_url(location):
        return list_entries(location)
    folders = []
    for parent, names, _ in os.walk(location, onerror=_refuse):
        for name in names:
            path = os.path.join(parent, name)
            with contextlib.suppress(FileNotFoundError):
                folders.append(Entry(f"{os.path.relpath(path, location)}/", 0, os.lstat(path).st_mtime))
    return [*list_entries(location), *folders]


def _refuse(error: OSError) -> None:
    """A run may lie in a folder that cannot be read; not in one that is gone, or is the file system's own.

    Raises
    ------
    StoreError
        It may.
    """
    folder = str(error.filename)
    if not isinstance(error, FileNotFoundError) and name_of(folder) != "lost+found":
        raise StoreError(
            f"{folder} cannot be looked at ({error.strerror}), and a run in it may use the store",
            hint="start it as somebody who can read that folder, or move that elsewhere",
        )


def _links(location: str) -> Iterable[str]:
    """Symbolic links below a folder; there are none in arrays."""
    for parent, folders, names in os.walk(location) if not is_url(location) else ():
        if "zarr.json" in names:
            folders.clear()
        else:
            yield from (path for name in [*folders, *names] if os.path.islink(path := os.path.join(parent, name)))


def _facts(location: str) -> tuple[int, float]:
    """Bytes and last change: a chunk that is replaced changes the time of its folder."""
    if not is_url(location) and not os.path.isdir(location):
        facts = os.stat(location)
        return facts.st_size, facts.st_mtime
    # of an object there is nothing below
    found = _entries(location) or [e for e in list_entries(parent_of(location)) if e.key == name_of(location)]
    own = 0.0 if is_url(location) else os.stat(location).st_mtime
    return sum(entry.num_bytes for entry in found), max([own, *(entry.modified for entry in found)])


def _released_locks(root: str, kind: str, newest: float) -> Iterable[Garbage]:
    """Locks that nobody holds: an object cannot be removed under a condition, so their holders leave them."""
    folder = join(root, kind)
    for entry in list_entries(folder):
        of = entry.key.removesuffix(".lock")
        if of != entry.key and _ITEM.fullmatch(f"{kind}/{of}") and entry.modified < newest:
            data = read_key(folder, entry.key)
            if data is not None and b'"released": true' in data:
                yield Garbage(join(folder, entry.key), entry.num_bytes, "a lock that was released")


def _may_resume(array: str, kind: str, unfinished: list[dict[str, Any]]) -> bool:
    """Whether one of the unfinished runs would find the array when it is started again."""
    if kind == "scratch":
        return False  # its name is drawn anew by every attempt
    if kind not in ("grams", "factors"):
        return bool(unfinished)
    try:
        document = json.loads(read_key(array, "zarr.json") or b"")
        n, tile_size = document["shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # nothing can be resumed from an array without metadata
    return any((plan.get("num_rows"), plan.get("tile_size")) == (n, tile_size) for plan in unfinished)
