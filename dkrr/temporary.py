"""A store that lives as long as the object that needs it: where there is room for it, and that it goes away again.

Tiles on a memory file system are memory that no plan counts, so a tmpfs is used only for what is small beside the free
memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import psutil

from dkrr.engine.machine import free_memory_bytes
from dkrr.errors import StorageFullError, StoreError

__all__ = ["TemporaryStore", "temporary_folder"]

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
# the workers need the other half
SHARE_OF_FREE_MEMORY = 0.5


class TemporaryStore:
    """A folder below Dask's temporary directory, removed when this object is, or at the end of the process.

    Parameters
    ----------
    needed_bytes
        How much will be written, as far as it is known.

    Raises
    ------
    StorageFullError
        No place has that much room.
    """

    def __init__(self, needed_bytes: int = 0) -> None:
        self.path: str = temporary_folder(needed_bytes)
        self._finalizer: Any = weakref.finalize(self, _remove, self.path, os.getpid())

    def check(self) -> None:
        """Refuse to go on without the folder.

        Raises
        ------
        StoreError
            It was removed.
        """
        if not os.path.isdir(self.path):
            raise StoreError(f"the temporary store {self.path} is gone", hint="fit again, or with store=")

    def close(self) -> None:
        """Remove the folder now."""
        if self._finalizer is not None:
            self._finalizer()

    def keep(self, name: str) -> None:
        """Remove everything but the entry ``name``."""
        for entry in Path(self.path).iterdir():
            if entry.name != name:
                shutil.rmtree(entry, ignore_errors=True)

    def __dask_tokenize__(self) -> str:
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy that travelled does not own the folder
        self.path, self._finalizer = state["path"], None


def _remove(path: str, pid: int) -> None:
    # a forked child inherits the finalizer, and must not remove what its parent uses
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


def temporary_folder(needed_bytes: int = 0) -> str:
    """A new folder with room for ``needed_bytes``: below Dask's ``temporary-directory``, which alone counts when it is
    set, else below the system's, /var/tmp, or the current folder.

    Raises
    ------
    StorageFullError
        None of them has room; each is named with its free bytes.
    """
    import dask

    configured = dask.config.get("temporary-directory", None)
    candidates = [configured] if configured else [tempfile.gettempdir(), "/var/tmp", os.getcwd()]  # noqa: S108  (a check)
    reasons = []
    for base in dict.fromkeys(map(str, candidates)):
        reason = _reason_against(Path(base), needed_bytes, make=configured is not None)
        if not reason:
            return tempfile.mkdtemp(prefix="dkrr-", dir=base)
        reasons.append(f"{base} {reason}")
    raise StorageFullError(
        f"a temporary store needs {needed_bytes:,} bytes: {'; '.join(reasons)}",
        hint="set Dask's temporary-directory to a disk with room, or give store=",
        needed=needed_bytes,
    )


def _reason_against(base: Path, needed_bytes: int, *, make: bool) -> str:
    """Why a store of that size cannot be in ``base``; "" when it can."""
    try:
        if make:
            base.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(base).free
    except OSError as exc:
        return f"cannot be used ({exc.strerror})"
    if not os.access(base, os.W_OK | os.X_OK):
        return "cannot be written"
    kind = file_system(base)
    if kind in MEMORY_FILE_SYSTEMS:
        free = min(free, int(SHARE_OF_FREE_MEMORY * free_memory_bytes()))
        return "" if needed_bytes <= free else f"is in memory ({kind}) and may take {free:,} bytes"
    return "" if needed_bytes <= free else f"has {free:,} bytes free"


def file_system(path: Path) -> str:
    """Name of the file system that a folder is on, "" when the system does not tell."""
    wanted = path.resolve()
    depth, kind = -1, ""
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        # of two mounts on one point the later one is seen
        if (point == wanted or point in wanted.parents) and len(point.parts) >= depth:
            depth, kind = len(point.parts), mount.fstype
    return kind
