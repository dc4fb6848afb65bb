"""Places where things are kept: local folders and addresses, with one set of verbs for both.

A store is given as a path or an address such as ``s3://bucket/key`` (:mod:`dkrr.store.files`). Writes are atomic
everywhere: a reader sees the old value, the new one, or none. An object store is asked for exact keys; only what counts
and cleans up lists (:func:`list_entries`, :func:`children`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dkrr.errors import DkrrError, ParameterError, StorageFullError, StoreError
from dkrr.store.address import (
    Address,
    StorageSettings,
    is_below,
    is_url,
    join,
    name_of,
    parent_of,
    parse_address,
    relative_to,
    sibling,
    with_settings,
    without_settings,
)
from dkrr.store.failpoints import failpoint
from dkrr.store.interruption import check_fence
from dkrr.store.objects import (
    client_of,
    copy_object,
    delete_objects,
    find_object,
    list_names,
    list_objects,
    put_object,
    read_object,
)

if TYPE_CHECKING:
    from zarr.abc.store import Store

__all__ = [
    "NO_LINKS",
    "Address",
    "Entry",
    "StorageSettings",
    "arrays_below",
    "at_present",
    "check_place",
    "children",
    "copy_tree",
    "delete_key",
    "file_state",
    "free_bytes",
    "full_disk",
    "is_below",
    "is_url",
    "join",
    "json_bytes",
    "key_size",
    "link_key",
    "list_entries",
    "list_keys",
    "local_root",
    "name_of",
    "note_user",
    "overlaps",
    "parent_of",
    "parse_address",
    "parse_json",
    "place",
    "put_back",
    "put_in_place",
    "read_json",
    "read_key",
    "relative_to",
    "remove_array",
    "sibling",
    "sync_folder",
    "sync_path",
    "users_of",
    "with_settings",
    "without_settings",
    "write_file",
    "write_json",
    "write_key",
    "zarr_store",
]

# what a file system says that has no hard links, or no more of them, or none from there to here
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True)
class Entry:
    """A key below a location, its bytes, and when it was last written (seconds since 1970)."""

    key: str
    num_bytes: int
    modified: float


def local_root(store: Any) -> Path | None:
    """A path as one; None for an address."""
    return None if is_url(store) else Path(store)


def at_present(path: Any) -> str:
    """A path or URL as it is from every folder: workers need not have the current one, which may change, too."""
    root = local_root(path)
    return str(path) if root is None else str(root.absolute())


def check_place(name: str, value: Any) -> None:
    """Refuse what is no place at all.

    Raises
    ------
    ParameterError
        ``value`` is neither a path nor an address.
    """
    if not isinstance(value, str | os.PathLike) or os.fspath(value) in ("", b""):
        raise ParameterError(f"{name} is {value!r}; a path or an address expected")


def place(root: Any, *names: str) -> str:
    """The path or address of something below a store root; local parent folders are made.

    Raises
    ------
    StoreError
        A folder cannot be made.
    """
    if is_url(root):
        return join(root, *names)
    path = Path(root).joinpath(*names)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StoreError(f"{path.parent} cannot be made ({exc.strerror})", hint="choose another store") from exc
    return str(path)


def zarr_store(location: Any) -> Store:
    """The Zarr store for a path or an address: for what Zarr itself shall read."""
    from zarr.storage import LocalStore, ObjectStore

    if not is_url(location):
        return LocalStore(str(location))
    store, _ = client_of(location, below=True)
    return ObjectStore(store)


def read_key(location: Any, key: str) -> bytes | None:
    """The bytes behind a key, None when it does not exist."""
    root = local_root(location)
    if root is not None:
        try:
            return (root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = read_object(location, key)
    return None if found is None else found[0]


def write_key(location: Any, key: str, *parts: Any, durable: bool = False) -> None:
    """Write what is given in one or more buffers behind a key, atomically; local folders are made.

    With ``durable`` it survives a power failure when this returns, as what an object store has taken always does.
    """
    root = local_root(location)
    if root is not None:
        path = root / key
        try:
            write_file(path, *parts, durable=durable)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, *parts, durable=durable)
        return
    failpoint("chunk.mid_write")
    check_fence()
    put_object(location, key, *parts)


def key_size(location: Any, key: str) -> int | None:
    """Bytes behind a key, None when it does not exist; reads nothing."""
    root = local_root(location)
    if root is not None:
        try:
            return os.stat(root / key).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
    found = find_object(location, key)
    return None if found is None else found.num_bytes


def delete_key(location: Any, key: str) -> None:
    """Remove a key; one that does not exist is no error."""
    check_fence()
    root = local_root(location)
    if root is not None:
        with contextlib.suppress(FileNotFoundError):
            (root / key).unlink()
        return
    delete_objects(location, [key])


def list_entries(location: Any) -> list[Entry]:
    """Every file or object below a path or address, by key; a folder that does not exist has none."""
    root = local_root(location)
    if root is None:
        return [Entry(item.key, item.num_bytes, item.modified) for item in list_objects(location)]
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(path)
                found.append(Entry(os.path.relpath(path, root), facts.st_size, facts.st_mtime))
    return sorted(found, key=lambda entry: entry.key)


def list_keys(location: Any) -> list[str]:
    """Every key below a path or an address, sorted."""
    return [entry.key for entry in list_entries(location)]


def children(location: Any) -> list[str]:
    """Names right below a path or address, sorted; none where nothing is."""
    root = local_root(location)
    if root is not None:
        return sorted(os.listdir(root)) if root.is_dir() else []
    return list_names(location)


def write_file(path: Path, *parts: Any, durable: bool = False) -> None:
    """Write ``parts`` to ``path`` atomically: a reader sees the old file, the new file or none.

    With ``durable`` the file is on the disk before it has its name, and its name when this returns (fsync of both).
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[file.write(view) :]
            if durable:
                os.fsync(file.fileno())
        failpoint("chunk.mid_write")
        check_fence()
        os.replace(partial, path)
        if durable:
            sync_path(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def file_state(path: str | os.PathLike[str]) -> list[int]:
    """Size, time of last write and time of last change of a file: what tells a changed one without reading it.

    The second of the times cannot be set, as programs that write in place or copy set the first one. It is also another
    one where the bytes are the same, after a copy or a change of permissions: then only reading tells.
    """
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that are free where a path is, or will be."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def full_disk(location: Any, needed: int | None = None) -> Iterator[None]:
    """Say of a disk that is full how much was needed there, and how much is free; other errors are not looked at.

    Raises
    ------
    StorageFullError
        With ``needed``, ``free`` (None at an address) and ``path``.
    """
    try:
        yield
    except DkrrError:
        raise
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        root = local_root(location)
        free = None if root is None else free_bytes(root)
        room = f"{needed:,} bytes needed, " if needed else ""
        room += "" if free is None else f"{free:,} bytes free"
        raise StorageFullError(
            f"the disk of {exc.filename or location} is full ({room or exc.strerror})",
            hint="free some space or choose another disk, and start again: what is finished is kept",
            needed=needed,
            free=free,
            path=str(location),
        ) from exc


def sync_folder(folder: Path) -> None:
    """fsync a file, or every file and folder below a folder, so that what was finished survives a power failure."""
    if not folder.is_dir():
        sync_path(folder)
    for parent, _, names in os.walk(folder):
        for name in [*names, "."]:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile, to be computed again
                sync_path(os.path.join(parent, name))


def sync_path(path: str | os.PathLike[str]) -> None:
    """fsync one file or folder."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def put_in_place(new: Path, path: Path) -> None:
    """Rename a finished file or folder to ``path``, durably; what was there is removed after that.

    Two folders change places in one step, so a crash leaves the one or the other at ``path``. Where the file system has
    no such step, a crash between two renames leaves what was there under a name that :func:`put_back` knows.
    """
    sync_folder(new)
    failpoint("output.before_rename")
    check_fence()
    if not os.path.lexists(path) or not (path.is_dir() or new.is_dir()):
        os.replace(new, path)
    else:
        earlier = new
        if not _exchange(new, path):
            earlier = path.with_name(f"{path.name}.{uuid.uuid4().hex}.replaced")
            os.replace(path, earlier)
            try:
                os.replace(new, path)
            except BaseException:
                put_back(path)
                raise
        if earlier.is_dir() and not earlier.is_symlink():
            shutil.rmtree(earlier)
        else:
            earlier.unlink()
    sync_path(path.parent)


def put_back(path: Path) -> None:
    """Where a crash has left nothing at ``path``, what was there before; see :func:`put_in_place`."""
    if not os.path.lexists(path):
        for name in children(path.parent):
            if name.startswith(path.name) and re.fullmatch(r"\.[0-9a-f]{32}\.replaced", name[len(path.name) :]):
                os.replace(path.parent / name, path)
                return


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    at_current_folder, exchange = -100, 2
    if rename(at_current_folder, os.fsencode(one), at_current_folder, os.fsencode(other), exchange) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def overlaps(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths or addresses are the same place, by whatever names, or one lies in the other."""
    if is_url(one) or is_url(other):
        return is_below(str(one), str(other)) or is_below(str(other), str(one))
    a, b = os.path.realpath(one), os.path.realpath(other)
    if is_below(a, b) or is_below(b, a):
        return True
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


def remove_array(location: Any) -> None:
    """Remove an array or group with everything in it.

    Raises
    ------
    StoreError
        The address is a whole bucket.
    """
    check_fence()
    root = local_root(location)
    if root is not None:
        if not root.is_symlink():  # metadata first, so that a removal that is interrupted leaves no array with holes
            with contextlib.suppress(OSError):
                (root / "zarr.json").unlink()
        shutil.rmtree(root, ignore_errors=True)
        return
    if not parse_address(location).key:
        raise StoreError(f"{location} is a whole bucket, which is never emptied", hint="give a key below it")
    keys = sorted(list_keys(location), key=lambda key: (not key.endswith(".json"), key))
    delete_objects(location, [key for key in keys if key.endswith(".json")])
    delete_objects(location, [key for key in keys if not key.endswith(".json")])


def copy_tree(source: str, target: str, *, is_last: Callable[[str], bool] = lambda key: key == "zarr.json") -> None:
    """Copy all objects below an address to another one in the same store; those that ``is_last`` names come last."""
    for key in sorted(list_keys(source), key=lambda key: (is_last(key), key)):
        copy_object(source, key, join(target, key))


def link_key(source: str, key: str, target: str) -> bool | None:
    """Give the bytes of a key a second place, below another folder or address of the same store, without moving them.

    A file gets a second name (a hard link); where the file system has none, it is copied, and so is an object, by its
    store. What is there already is left as it is.

    Returns
    -------
    is_linked : bool or None
        Whether no bytes were written; None when there is no such key.
    """
    folder, destination = local_root(source), local_root(target)
    if folder is None or destination is None:
        if key_size(source, key) is None:
            return None
        copy_object(source, key, join(target, key))
        return False
    path = destination / key
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(folder / key, path)
    except FileExistsError:
        return True
    except FileNotFoundError:
        return None
    except OSError as exc:
        if exc.errno not in NO_LINKS:
            raise
        data = read_key(source, key)  # it may be gone by now
        if data is not None:
            write_file(path, data)
        return None if data is None else False
    return True


def arrays_below(root: Any, *kinds: str) -> Iterable[str]:
    """Locations of the arrays in the folders ``kinds`` (such as "factors") of a store."""
    for kind in kinds if isinstance(root, str | os.PathLike) else ():
        folder = join(root, kind)
        yield from (join(folder, name) for name in children(folder) if name.endswith(".zarr"))


def json_bytes(value: Any) -> bytes:
    """A JSON document as it is written."""
    return json.dumps(value, indent=1, sort_keys=True).encode()


def parse_json(data: bytes, location: Any, key: str) -> Any:
    """A JSON document as it is read; :class:`StoreError` when it is none."""
    try:
        return json.loads(data)
    except ValueError as exc:
        raise StoreError(f"{key} of {location} is not valid JSON ({exc})", hint="restore or remove it") from exc


def write_json(location: Any, key: str, value: Any, *, durable: bool = False) -> None:
    """Write a JSON document atomically below ``location`` (path or address); ``durable`` as in a key."""
    write_key(location, key, json_bytes(value), durable=durable)


def read_json(location: Any, key: str) -> Any | None:
    """Read a JSON document; None when it does not exist."""
    data = read_key(location, key)
    return None if data is None else parse_json(data, location, key)


# the second folder: notes of registries, as they were before every user had one
USERS, _REGISTRIES = "users", "registries"


def note_user(store: Any, location: Any) -> None:
    """Let a store know a run, a model or a registry elsewhere that needs what is in it, so that nobody removes that.

    What lies in the folder beside the store, or below that, not behind a link, is found without; a store that is not
    there is not made.
    """
    if store is None:
        return
    root, user = (str(item) if is_url(item) else os.path.realpath(item) for item in (store, location))
    if is_below(user, parent_of(root)) or not (is_url(root) or os.path.isdir(root)):
        return
    document = {"location": user}
    if not is_url(root) and not is_url(user):
        document["relative"] = os.path.relpath(user, root)
    folder, name = join(root, USERS), f"{hashlib.sha256(user.encode()).hexdigest()[:16]}.json"
    if read_json(folder, name) != document:
        write_json(folder, name, document)


def users_of(store: str) -> dict[str, list[str]]:
    """Where each user is that a store was told of, by the location of the note.

    Two places where the store and its user may have been moved together: where it was, and where it is seen from here.
    """
    found = {}
    for folder in (join(store, USERS), join(store, _REGISTRIES)):
        for name in children(folder):
            # a store may be a folder with other things in it
            document = read_json(folder, name) if re.fullmatch(r"[0-9a-f]{16}\.json", name) else None
            if document is not None:
                places = [document.get("location") or document["registry"]]
                if "relative" in document:
                    places.append(os.path.normpath(join(store, document["relative"])))
                found[join(folder, name)] = list(dict.fromkeys(map(str, places)))
    return found
