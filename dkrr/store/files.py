"""Files and objects by key: local folders and addresses, with one set of verbs for both.

A store is given as a path or an address such as ``s3://bucket/key`` (:mod:`dkrr.store.objects`). Writes are atomic
everywhere: a reader sees the old value, the new one, or none. An object store is asked for exact keys; only what counts
and cleans up lists (:func:`list_entries`, :func:`children`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from dkrr.errors import DkrrError, ParameterError, StorageFullError, StoreError
from dkrr.store.interruption import check_fence
from dkrr.store.objects import (
    Address,
    Entry,
    StorageSettings,
    client_below,
    copy_object,
    delete_objects,
    find_object,
    list_names,
    list_objects,
    parse_address,
    put_object,
    read_object,
)

if TYPE_CHECKING:
    from zarr.abc.store import Store

NO_REPLACE, EXCHANGE = 1, 2  # of renameat2
# what a file system says that has no hard links, or no more of them, or none from there to here
NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
# what it says that may only be read
READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
# the folder of a store with one note for each user elsewhere
USERS = "users"
# file systems without a disk
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
STRIP = 1 << 20
# the entry of a document with the checksum of its others
CRC = "crc32c"
logger = logging.getLogger("dkrr.store")


# --- locations: paths or addresses ------------------------------------------------------------------------------------


def is_url(location: Any) -> bool:
    """Whether ``location`` is an address such as ``s3://bucket/key`` and not a path."""
    return isinstance(location, str) and "://" in location


def local_root(location: Any) -> Path | None:
    """A path as one; None for an address."""
    return None if is_url(location) else Path(location)


def at_present(path: Any) -> str:
    """A path or URL as it is from every folder: workers need not have the current one, which may change, too."""
    return str(path) if is_url(path) else str(Path(path).absolute())


def check_place(name: str, value: Any) -> None:
    """Refuse what is no place at all.

    Raises
    ------
    ParameterError
        ``value`` is neither a path nor an address.
    """
    if not isinstance(value, str | os.PathLike) or os.fspath(value) in ("", b""):
        raise ParameterError(f"{name} is {value!r}; a path or an address expected")


def change_settings(url: str, before: StorageSettings, after: StorageSettings) -> str:
    """The address with other settings where its own are those of before; any other address, and a path, as it is."""
    if not is_url(url) or before == after:
        return url
    address = parse_address(url)
    return str(Address(address.bucket, address.key, after)) if address.settings == before else url


def join(location: str | os.PathLike[str], *names: str) -> str:
    """The path or address of something below a folder or prefix."""
    if not is_url(location):
        return os.path.join(location, *names)
    base, mark, query = str(location).partition("?")
    return "/".join([base.rstrip("/"), *names]) + mark + query


def _base(location: str | os.PathLike[str]) -> tuple[str, str]:
    """Without slashes at the end, and what follows a question mark."""
    if not is_url(location):
        return os.fspath(location).rstrip("/"), ""
    base, mark, query = str(location).partition("?")
    return base.rstrip("/"), mark + query


def name_of(location: str | os.PathLike[str]) -> str:
    """The last part of a path or address."""
    return _base(location)[0].rpartition("/")[2]


def parent_of(location: str | os.PathLike[str]) -> str:
    """The folder or prefix that something lies in; that of a bucket is the bucket."""
    base, tail = _base(location)
    if is_url(location) and base.count("/") < 3:
        return base + tail
    parent = base.rpartition("/")[0]
    return (parent or ("/" if base[:1] in "/" else ".")) + tail


def sibling(location: str | os.PathLike[str], ending: str) -> str:
    """The location with ``ending`` added to its name."""
    base, tail = _base(location)
    return base + ending + tail


def relative_to(location: str, other: str) -> str:
    """What stands behind ``other`` in the location of something in it; "" where it does not lie in it."""
    path, folder = _base(location)[0], _base(other)[0]
    return path[len(folder) + 1 :] if path.startswith(f"{folder}/") else ""


def is_below(location: str, other: str) -> bool:
    """Whether a location is another one, or lies in it."""
    return _base(location)[0] == _base(other)[0] or bool(relative_to(location, other))


def overlaps(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether two paths or addresses are the same place, by whatever names, or one lies in the other."""
    if is_url(one) or is_url(other):
        return is_below(str(one), str(other)) or is_below(str(other), str(one))
    a, b = os.path.realpath(one), os.path.realpath(other)
    if is_below(a, b) or is_below(b, a):
        return True
    return os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)


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


# --- bytes by key -----------------------------------------------------------------------------------------------------


def zarr_store(location: Any) -> Store:
    """The Zarr store for a path or an address: for what Zarr itself shall read."""
    from zarr.storage import LocalStore, ObjectStore

    return ObjectStore(client_below(location)) if is_url(location) else LocalStore(str(location))


def read_key(location: Any, key: str) -> bytes | None:
    """The bytes behind a key, None when it does not exist."""
    if is_url(location):
        found = read_object(location, key)
        return None if found is None else bytes(found[0])
    try:
        return (Path(location) / key).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def key_size(location: Any, key: str) -> int | None:
    """Bytes behind a key, None when it does not exist; reads nothing."""
    if is_url(location):
        found = find_object(location, key)
        return None if found is None else found.num_bytes
    try:
        return os.stat(Path(location) / key).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def write_key(location: Any, key: str, *parts: Any, durable: bool = False) -> None:
    """Write what is given in one or more buffers behind a key, atomically; local folders are made.

    With ``durable`` it survives a power failure when this returns, as what an object store has taken always does.
    """
    if not is_url(location):
        write_file(Path(location) / key, *parts, durable=durable)
        return
    check_fence()
    put_object(location, key, *parts)


def write_file(path: Path, *parts: Any, durable: bool = False, once: bool = False) -> bool:
    """Write ``parts`` to ``path`` atomically: a reader sees the old file, the new file or none. Its folder is made.

    With ``durable`` the file is on the disk before it has its name, and its name when this returns (fsync of both).
    With ``once`` nothing is replaced.

    Returns
    -------
    is_written : bool
        False where there is something already, with ``once``.
    """
    if not path.parent.is_dir():
        check_fence()  # or a folder that was moved away would be made again
        path.parent.mkdir(parents=True, exist_ok=True)
    draft, is_written = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial"), True
    try:
        with open(draft, "wb", buffering=0) as file:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[file.write(view) :]
            if durable:
                os.fsync(file.fileno())
        check_fence()
        if once:
            is_written = _name_once(draft, path)
        else:
            os.replace(draft, path)
        if durable:
            sync_path(path.parent)
    finally:
        draft.unlink(missing_ok=True)
    return is_written


def remove_drafts(location: Any, pattern: str = "**/*") -> None:
    """Remove what writes that were killed have left below a folder, of the files that match ``pattern``.

    For the holder of the lock of all that: the draft of a write that goes on is removed as well. Objects have none.
    """
    root = local_root(location)
    for path in root.glob(f"{pattern}.{'[0-9a-f]' * 32}.partial") if root is not None else ():
        path.unlink(missing_ok=True)


def _name_once(draft: Path, path: Path) -> bool:
    """Give a whole file the name that no other file has; False when one has it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return draft.stat().st_nlink > 1  # a network file system may repeat a request that was done
    except OSError as exc:
        if exc.errno not in NO_LINKS:
            raise
        with exclusive(path.parent):  # whoever creates here finds no hard links either
            if os.path.lexists(path):
                return False
            os.replace(draft, path)
    return True


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[Path]:
    """One process at a time replaces what is at ``path``, which itself is locked, so that no file is left behind.

    Whoever waited may have locked what was replaced meanwhile, and looks again. Where nothing is, nothing is locked.

    Raises
    ------
    StoreError
        The file system has no locks: of two processes that compare and then replace both could be the first.
    """
    while True:
        with _opened(path) as descriptor:
            if descriptor is None:
                yield path
                return
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as exc:
                raise StoreError(
                    f"{path.parent} cannot be locked ({exc.strerror}), so two processes could write there at once",
                    hint="mount it with locks (NFS: lockd on both sides, no option nolock), or choose a folder on "
                    "another disk or an s3:// address",
                ) from exc
            # it is opened again, for a look at the name alone may be an old answer
            with _opened(path) as there:
                is_same = there is not None and os.path.sameopenfile(descriptor, there)
            if is_same:
                yield path
                return


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A descriptor that can be locked: NFS wants one that can be written; None where nothing is."""
    try:
        is_written = os.access(path, os.W_OK) and not path.is_dir()
        descriptor = os.open(path, os.O_RDWR if is_written else os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def delete_key(location: Any, key: str) -> None:
    """Remove a key; one that does not exist is no error."""
    check_fence()
    if is_url(location):
        delete_objects(location, "", [key])
    else:
        (Path(location) / key).unlink(missing_ok=True)


def list_entries(location: Any) -> list[Entry]:
    """Every file or object below a path or address, by key; a folder that does not exist has none."""
    if is_url(location):
        return list_objects(location, "") or []
    found = []
    for folder, _, names in os.walk(location):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                facts = os.lstat(path)
                found.append(Entry(os.path.relpath(path, location), facts.st_size, facts.st_mtime))
    return sorted(found, key=lambda entry: entry.key)


def list_keys(location: Any) -> list[str]:
    """Every key below a path or an address, sorted."""
    return [entry.key for entry in list_entries(location)]


def children(location: Any) -> list[str]:
    """Names right below a path or address, sorted; none where nothing is."""
    if is_url(location):
        return list_names(location, "") or []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # not where nobody may look
        return sorted(os.listdir(location))
    return []


def link_key(source: str, key: str, target: str) -> bool | None:
    """Give the bytes of a key a second place, below another folder or address of the same store, without moving them.

    A file gets a second name (a hard link); where the file system has none, it is copied, and so is an object, by its
    store. A file that is there already is left as it is, an object is replaced.

    Returns
    -------
    is_linked : bool or None
        Whether no bytes were written; None when there is no such key.
    """
    if is_url(source) or is_url(target):
        return None if copy_object(source, key, join(target, key)) is None else False
    path = Path(target) / key
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(Path(source) / key, path)
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


def copy_tree(source: str, target: str) -> None:
    """Copy all objects below an address to another one in the same store, the metadata last."""
    for key in sorted(list_keys(source), key=lambda key: (key == "zarr.json", key)):
        copy_object(source, key, join(target, key))


def remove_array(location: Any) -> None:
    """Remove an array or group with everything in it; metadata first, so that none with holes is ever left.

    Raises
    ------
    StoreError
        The address is a whole bucket.
    """
    check_fence()
    if not is_url(location):
        if not os.path.islink(location):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(location, "zarr.json"))
        shutil.rmtree(location, ignore_errors=True)
        return
    if not parse_address(location).key:
        raise StoreError(f"{location} is a whole bucket, which is never emptied", hint="give a key below it")
    keys = list_keys(location)
    delete_objects(location, "", [key for key in keys if key.endswith(".json")])
    delete_objects(location, "", [key for key in keys if not key.endswith(".json")])


def remove_parts(location: Any, documents: Iterable[str], arrays: Iterable[str]) -> None:
    """Remove a group by the names of what is in it, its metadata first; what somebody else put there stays."""
    for name in ("zarr.json", *documents):
        delete_key(location, name)
    for name in arrays:
        remove_array(join(location, name))
    if not is_url(location):
        with contextlib.suppress(OSError):
            os.rmdir(location)


def json_bytes(value: Any, *, indent: int | None = 1) -> bytes:
    """A JSON document as it is written: with the crc32c of its other entries as one more, "crc32c".

    A flipped bit mostly leaves valid JSON, which would say another number of rows or another version. Documents of
    Zarr, whose entries its specification names, and what is no object go without.
    """
    if isinstance(value, dict) and "zarr_format" not in value:
        value = {**value, CRC: document_crc(json.loads(json.dumps(value)))}
    return json.dumps(value, indent=indent, sort_keys=True).encode()


def parse_json(data: bytes, location: Any, key: str) -> Any:
    """A JSON document as it is read; :class:`StoreError` when it is none, or not the one that was written."""
    try:
        value = json.loads(data)
    except ValueError as exc:
        raise StoreError(f"{key} of {location} is not valid JSON ({exc})", hint="restore or remove it") from exc
    # what others and earlier releases wrote has none
    stored = value.pop(CRC, None) if isinstance(value, dict) else None
    if stored is not None and stored != (found := document_crc(value)):
        raise StoreError(
            f"{key} of {location} is damaged or was edited ({CRC} {found}, {stored} stored)",
            hint=f"restore it; where the change is meant, remove its entry {CRC}",
        )
    return value


def document_crc(value: Any) -> str:
    """crc32c of the canonical JSON, eight hexadecimal digits."""
    return f"{crc32c(json.dumps(value, sort_keys=True).encode()):08x}"


def write_json(location: Any, key: str, value: Any, *, durable: bool = False) -> None:
    """Write a JSON document atomically below ``location`` (path or address); ``durable`` as in a key."""
    write_key(location, key, json_bytes(value), durable=durable)


def read_json(location: Any, key: str) -> Any | None:
    """Read a JSON document; None when it does not exist."""
    data = read_key(location, key)
    return None if data is None else parse_json(data, location, key)


# --- what only a local file system has --------------------------------------------------------------------------------


def file_state(path: str | os.PathLike[str], since: float = math.inf) -> list[int | str]:
    """Size, time of last write and time of last change of a file: what tells a changed one without reading it.

    Behind a link also where it is, as seen from there: another file may have been written at the same time.

    The second of the times cannot be set, as programs that write in place or copy set the first one. It is also another
    one where the bytes are the same, after a copy or a change of permissions: then only reading tells.

    Through a memory map only the first write to a page sets them, until the page is on disk: so the file is synced, and
    what is written from here on sets them again. A file system in memory has no disk; there the crc32c of the bytes is
    added (16 GB/s), and so it is of a file that was changed after ``since``, in seconds since the epoch: the times have
    the steps of a clock, and that of a write is when it began.
    """
    is_readable = os.path.isfile(path) and os.access(path, os.R_OK)  # else it is refused by whoever reads it
    if is_readable:
        with contextlib.suppress(OSError):  # some file systems over a network have no fsync
            sync_path(path)
    found = os.stat(path)
    state: list[int | str] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    if os.path.realpath(path) != (named := os.path.abspath(path)):
        state.append(os.path.relpath(os.path.realpath(path), os.path.dirname(named)))
    if is_readable and (found.st_ctime > since or file_system(path) in MEMORY_FILE_SYSTEMS):
        state.append(_checksum(path))
    return state


def _checksum(path: str | os.PathLike[str]) -> int:
    """The crc32c of the bytes of a file, when a write that has begun is over."""
    with open(path, "rb") as file:
        with contextlib.suppress(OSError):  # an empty file has no hole
            # in most file systems this waits for the lock of a write, for which a read does not
            os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        file.seek(0)
        return functools.reduce(lambda crc, strip: crc32c(strip, crc), iter(lambda: file.read(STRIP), b""), 0)


def file_system(path: str | os.PathLike[str]) -> str:
    """Name of the file system that a path is on, "" when the system does not tell."""
    device = os.stat(path).st_dev
    name, mounts = f"{os.major(device)}:{os.minor(device)}", Path("/proc/self/mountinfo")
    lines = [line.split() for line in mounts.read_text().splitlines()] if mounts.exists() else []
    return next((line[line.index("-") + 1] for line in lines if line[2] == name), "")


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that are free where a path is, or will be."""
    folder = Path(path).absolute()
    return shutil.disk_usage(next(known for known in (folder, *folder.parents) if known.exists())).free


@contextlib.contextmanager
def storage_errors(location: Any, needed: int | None = None, *, only_full: bool = False) -> Iterator[None]:
    """Turn what the operating system says about ``location`` into a typed error.

    Raises
    ------
    StorageFullError
        The disk is full; with ``needed``, ``free`` (None at an address) and ``path``.
    StoreError
        No permission, or a device that cannot be used.
    """
    try:
        yield
    except DkrrError:
        raise
    except OSError as exc:
        where, what = exc.filename or location, f"{location} cannot be used ({exc})"
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            free = None if is_url(location) else free_bytes(location)
            room = f"{needed:,} bytes needed, " if needed else ""
            room += "" if free is None else f"{free:,} bytes free"
            raise StorageFullError(
                f"the disk of {where} is full ({room or exc.strerror})",
                hint="free some space or choose another disk, and start again: what is finished is kept",
                needed=needed,
                free=free,
                path=str(location),
            ) from exc
        if only_full:
            raise
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            what = f"no permission to use {where} ({exc.strerror})"
        raise StoreError(what, hint="check the disk and its permissions, or choose another place") from exc


def check_space(location: Any, num_bytes: int) -> None:
    """Refuse to start writing ``num_bytes`` where they do not fit.

    Raises
    ------
    StorageFullError
        With ``needed`` and ``free`` in bytes.
    """
    free = None if is_url(location) else free_bytes(location)
    if free is not None and num_bytes > free:
        raise StorageFullError(
            f"{location} needs {num_bytes:,} bytes and {free:,} are free",
            hint="free some space or choose another disk",
            needed=num_bytes,
            free=free,
            path=str(location),
        )


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


def put_in_place(new: Path, path: Path, check: Callable[[Path], None]) -> None:
    """Rename a finished file or folder to ``path``, durably; what was there is removed after that.

    The two change places in one step, so a crash leaves the one or the other at ``path``. Where the file system has
    no such step, a crash between two renames of a folder leaves what was there under a name :func:`put_back` knows.

    Parameters
    ----------
    check
        Raises where what was there may not be removed: it may have come a moment ago, and is put back. It is told where
        that is by then.
    """
    sync_folder(new)
    check_fence()
    try:
        if not _rename(new, path, NO_REPLACE):
            if os.path.lexists(path):
                raise FileExistsError
            os.replace(new, path)
    except FileExistsError:
        _replace(new, path, check)
    sync_path(path.parent)


def _replace(new: Path, path: Path, check: Callable[[Path], None]) -> None:
    earlier = new
    if not _rename(new, path, EXCHANGE):
        if not (path.is_dir() or new.is_dir()):
            check(path)
            os.replace(new, path)
            return
        earlier = path.with_name(f"{path.name}.{uuid.uuid4().hex}.replaced")
        os.replace(path, earlier)
    try:
        check_fence()  # of a process that stood still since it was asked last, the lock may be another's
        check(earlier)
        if earlier is not new:
            os.replace(new, path)
    except BaseException:
        if earlier is new:
            _rename(new, path, EXCHANGE)
        else:
            put_back(path)
        raise
    if earlier.is_dir() and not earlier.is_symlink():
        shutil.rmtree(earlier)
    else:
        earlier.unlink()


def put_back(path: Path) -> None:
    """Where a crash has left nothing at ``path``, what was there before; see :func:`put_in_place`."""
    if not os.path.lexists(path):
        for name in children(path.parent):
            if name.startswith(path.name) and re.fullmatch(r"\.[0-9a-f]{32}\.replaced", name[len(path.name) :]):
                os.replace(path.parent / name, path)
                return


def _rename(one: Path, other: Path, how: int) -> bool:
    """Rename where nothing is, or let two names change places, in one step; False where the file system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux
        return False
    sys.audit("os.rename", one, other, -1, -1)  # as the renames of os do
    at_current_folder = -100
    if rename(at_current_folder, os.fsencode(one), at_current_folder, os.fsencode(other), how) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


# --- who needs a store ------------------------------------------------------------------------------------------------


def note_user(store: Any, location: Any) -> None:
    """Let a store know a run, a model or a registry elsewhere that needs what is in it, so that nobody removes that.

    What lies in the folder beside the store, or below that, not behind a link, is found without; a store that is not
    there is not made. One that may only be read is another person's: it is told nothing, and a warning says so.
    """
    if store is None:
        return
    root, user = (str(item) if is_url(item) else os.path.realpath(item) for item in (store, location))
    is_found = is_below(user, parent_of(root)) and _base(user)[1] == _base(root)[1]  # at the same endpoint
    if is_found or not (is_url(root) or os.path.isdir(root)):
        return
    document = {"location": user}
    if is_url(root) and not is_url(user):
        document["host"] = socket.gethostname()
    if not is_url(root) and not is_url(user):
        document["relative"] = os.path.relpath(user, root)
    folder, name = join(root, USERS), f"{hashlib.sha256(user.encode()).hexdigest()[:16]}.json"
    if read_json(folder, name) == document:
        return
    try:
        write_json(folder, name, document)
    except (OSError, StoreError) as exc:
        if getattr(exc, "errno", None) not in READ_ONLY and getattr(exc, "reason", None) != "PermissionDeniedError":
            raise
        logger.warning("%s cannot be told of %s (%s): `dkrr gc` there may remove its factor", root, user, exc)


def users_of(store: str) -> dict[str, list[str]]:
    """Where each user is that a store was told of, by the location of the note.

    Two places where the store and its user may have been moved together: where it was, and where it is seen from here.
    What was noted on another machine may be another folder here: that is at ``//HOST`` and its path, too.
    """
    found, folder, here = {}, join(store, USERS), socket.gethostname()
    for name in children(folder):
        # a store may be a folder with other things in it
        document = read_json(folder, name) if re.fullmatch(r"[0-9a-f]{16}\.json", name) else None
        if document is not None:
            seen = os.path.normpath(join(store, document["relative"])) if "relative" in document else None
            location, host = str(document["location"]), document.get("host", here)
            elsewhere = None if host == here else f"//{host}{location}"
            found[join(folder, name)] = list(dict.fromkeys(filter(None, (location, seen, elsewhere))))
    return found
