"""What a store holds that no run and no model refers to.

A Gram matrix, a factor or a copy of rows is needed when a JSON document of a run or a model names its key, or when a
run that has a plan and no result may go on writing it; so are preconditioners and the state of an iteration ("solves").
You need this when a store has grown: factors are kept so that a fit can be extended, and nothing else removes them.
Scratch, and files of interrupted writes (``*.partial``), are garbage too. What changed lately is left alone: it may
belong to a fit that is running.

Cost: one walk over the folders; documents are read, chunks are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dkrr.errors import StoreError

__all__ = ["Garbage", "delete_garbage", "find_garbage"]

KEPT_SECONDS = 3600.0
_KEY = re.compile(rb"[0-9a-f]{32,64}")
_ARRAYS = ("grams", "factors", "rows", "data", "preconditioners", "solves")
# what is there besides: vectors of a pass that was killed, notes about float32 factors that broke down, and the
# subsets and trials of searches
_OTHERS = ("scratch", "breakdowns", "tune")


@dataclass(frozen=True)
class Garbage:
    """Something that can be deleted: a folder or a file, its size, and why nobody needs it."""

    path: Path
    num_bytes: int
    reason: str


def find_garbage(
    store: str | os.PathLike[str], runs: Iterable[str | os.PathLike[str]] = (), kept_seconds: float = KEPT_SECONDS
) -> list[Garbage]:
    """List what nothing refers to.

    Parameters
    ----------
    store
        Folder with ``grams``, ``factors`` and prepared ``rows``.
    runs
        Folders below which runs and models are looked for, besides the folder that holds the store.
    kept_seconds
        What changed within this time is not listed.

    Raises
    ------
    StoreError
        ``store`` is not a store on a local file system.
    """
    root = Path(store).absolute()
    if not any((root / name).is_dir() for name in _ARRAYS):
        raise StoreError(f"{root} is not a store (no folder grams or factors)", hint="name the folder of the store")
    folders = [root.parent, *(Path(folder).absolute() for folder in runs)]
    for folder in folders:
        if not folder.is_dir():
            raise StoreError(f"{folder} is not a folder", hint="check the path of the runs")
    named = set().union(*(_named_keys(folder, root) for folder in folders))
    unfinished = [plan for folder in folders for plan in _unfinished_plans(folder)]
    newest = time.time() - kept_seconds
    found = []
    for kind in (*_ARRAYS, *_OTHERS):
        for array in sorted((root / kind).glob("*.json" if kind == "breakdowns" else "*.zarr")):
            keys = {key.decode() for key in _KEY.findall(array.name.encode())}
            if not keys & named and _last_change(array) < newest and not _may_resume(array, kind, unfinished):
                found.append(Garbage(array, _size(array), "no run or model refers to it"))
    whole = {item.path for item in found}
    for folder in folders:
        for path in _partials(folder):
            if not whole & set(path.parents) and _last_change(path) < newest:
                found.append(Garbage(path, _size(path), "left by an interrupted write"))
                whole.add(path)
    return found


def delete_garbage(items: Iterable[Garbage]) -> int:
    """Delete the items and return the bytes that became free."""
    num_bytes = 0
    for item in items:
        if item.path.is_dir():
            # unreadable at once, so that a deletion that is interrupted leaves no array with holes
            (item.path / "zarr.json").unlink(missing_ok=True)
            shutil.rmtree(item.path)
        else:
            item.path.unlink(missing_ok=True)
        num_bytes += item.num_bytes
    return num_bytes


def _named_keys(folder: Path, store: Path) -> set[str]:
    """Every key that a document below ``folder`` names; the store's own documents do not count."""
    named: set[str] = set()
    for parent, folders, names in os.walk(folder):
        if Path(parent) == store:
            folders[:] = []
            continue
        folders[:] = [name for name in folders if name != "c"]  # the chunks of an array
        for name in names:
            if name.endswith((".json", ".toml")):
                named.update(key.decode() for key in _KEY.findall((Path(parent) / name).read_bytes()))
    return named


def _unfinished_plans(folder: Path) -> Iterator[dict[str, Any]]:
    """Plans of runs that were started and have no result yet."""
    for path in folder.rglob("plan.json"):
        if not (path.parent / "result.json").exists():
            yield json.loads(path.read_bytes())


def _may_resume(array: Path, kind: str, unfinished: list[dict[str, Any]]) -> bool:
    """Whether one of the unfinished runs would find the array when it is started again."""
    if kind == "scratch":
        return False  # its name is drawn anew by every attempt
    if kind not in ("grams", "factors"):
        return bool(unfinished)
    try:
        document = json.loads((array / "zarr.json").read_bytes())
        n, tile_size = document["shape"][0], document["chunk_grid"]["configuration"]["chunk_shape"][0]
    except (OSError, ValueError, LookupError, TypeError):
        return False  # nothing can be resumed from an array without metadata
    return any((plan.get("num_rows"), plan.get("tile_size")) == (n, tile_size) for plan in unfinished)


def _partials(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        yield from (Path(parent) / name for name in sorted([*folders, *names]) if name.endswith(".partial"))
        folders[:] = [name for name in folders if not name.endswith(".partial")]


def _last_change(path: Path) -> float:
    """Time of the last change below ``path``: a chunk that is replaced changes the time of its folder."""
    folders = [parent for parent, _, _ in os.walk(path)] or [str(path)]
    return max(os.stat(folder).st_mtime for folder in folders)


def _size(path: Path) -> int:
    if not path.is_dir():
        return path.stat().st_size
    return sum((Path(parent) / name).stat().st_size for parent, _, names in os.walk(path) for name in names)
