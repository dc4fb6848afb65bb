"""Objects behind s3:// addresses: whole reads and writes by key, listings, and puts under a condition.

Every request goes to an exact key; only what counts and cleans up lists. Requests that fail for reasons of the network
or of the server (time-outs, 429, 5xx) are repeated with growing pauses; what fails for good is a
:class:`~dkrr.errors.StoreError` whose message names the address and what the server said, and no credential.

The connection pool belongs to the process and to the settings of the address. Costs one round trip a call; needs
``dkrr[s3]`` (obstore), which is imported when the first address is opened.

Credentials from the files that Amazon's tools keep, for the profile that is asked for.

The library that talks to the store finds credentials in the environment and through roles by itself; profiles are read
here. Keys that stand in the files are taken as they are. A profile that has to ask somebody (single sign-on, a role to
assume, a program) is left to boto3, where that is installed. Nothing is kept longer than five minutes, logged, or sent
anywhere but to the store.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigError
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from dkrr.errors import StoreError
from dkrr.store.address import StorageSettings, join, parse_address

__all__ = [
    "Profile",
    "StoredObject",
    "client_of",
    "copy_object",
    "delete_objects",
    "fetch",
    "find_object",
    "find_profile",
    "list_names",
    "list_objects",
    "parts_of",
    "put_file",
    "put_if",
    "put_object",
    "read_object",
    "read_range",
]

# A request is repeated so often, and no repetition begins after so many seconds: below the watchdog's patience.
MAX_RETRIES = 8
RETRY_SECONDS = 120.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 15.0
CONNECT_SECONDS, REQUEST_SECONDS = 3.0, 120.0
# One put up to here; larger objects go in parts, each of which is repeated by itself. They appear whole all the same.
PART_BYTES = 64 * 2**20
# A body is copied into place in pieces of this size, which is all that a read needs besides its buffer.
STREAM_BYTES = 2**20

_STATUS = re.compile(r"non-2xx status code: (\d{3}[\w ]*)")
_TAGS = re.compile(r"<(Code|Message)>([^<]{1,200})</")


@dataclass(frozen=True)
class StoredObject:
    """One object: its key below the listed prefix, bytes, seconds since 1970 when it was written, and its ETag."""

    key: str
    num_bytes: int
    modified: float
    version: str


def client_of(url: str, *, below: bool = False) -> tuple[Any, str]:
    """The connection pool for an address, kept for the life of the process, and the key of the address.

    With ``below`` the keys of the client begin there, for libraries that know no address.

    Raises
    ------
    ParameterError
        See :func:`~dkrr.store.files.parse_address`.
    StoreError
        obstore is not installed, or there is no such profile.
    """
    address = parse_address(url)
    return _client(address.bucket, address.settings, address.key if below else ""), address.key


@lru_cache(maxsize=32)
def _client(bucket: str, settings: StorageSettings, prefix: str) -> Any:
    profile = find_profile(settings.profile)
    options: dict[str, Any] = {
        "endpoint": settings.endpoint_url,
        "region": settings.region or (profile.region if profile is not None else None),
        "credential_provider": profile,
        "prefix": prefix or None,
    }
    http: Any = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
    }
    if settings.allow_http:
        http["allow_http"] = True
    pauses = {"init_backoff": FIRST_PAUSE_SECONDS, "max_backoff": LONGEST_PAUSE_SECONDS}
    retries: Any = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "backoff": {name: timedelta(seconds=value) for name, value in pauses.items()} | {"base": 2},
    }
    given = {name: value for name, value in options.items() if value is not None}
    with _errors(f"s3://{bucket}", "opened"):
        return _library().store.S3Store(
            bucket, client_options=http, retry_config=retries, conditional_put="etag", **given
        )


def _library() -> Any:
    try:
        import obstore
        import obstore.store
    except ImportError as exc:
        raise StoreError("s3:// addresses need obstore, which is not installed", hint="install dkrr[s3]") from exc
    return obstore


@contextmanager
def _errors(url: str, verb: str) -> Iterator[None]:
    """Turn what the library raises into a typed error. A missing key is the caller's business."""
    try:
        yield
    except (FileNotFoundError, StoreError):
        raise
    except Exception as exc:
        from obstore.exceptions import BaseError

        if not isinstance(exc, BaseError | OSError):
            raise
        _fail(url, verb, exc)


def _fail(url: str, verb: str, exc: BaseException) -> NoReturn:
    kind, said = type(exc).__name__, _said(exc)
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        hint = "check the credentials of this process; to see that a key does not exist takes s3:ListBucket"
    elif "169.254." in str(exc) or "credential" in str(exc).lower():  # the library asks the machine when all else fails
        hint = "no credentials were found: set AWS_ACCESS_KEY_ID and its secret, a profile, or a role"
    else:
        hint = "check endpoint, region and network, then start again; everything finished so far is kept"
    # "from None": the library's own text may repeat signatures and key ids
    raise StoreError(f"{url} cannot be {verb} ({said})", hint=hint, reason=kind) from None


def _said(exc: BaseException) -> str:
    """The status and the server's sentence, or the first line of the library's, without what is signed."""
    text = str(exc)
    status, tags = _STATUS.search(text), dict(_TAGS.findall(text))
    if status is not None:
        parts = [status[1].strip(), tags.get("Code", ""), tags.get("Message", "")]
        return ", ".join(part for part in parts if part)
    first = text.partition("\n")[0].strip()
    return first[:300] or type(exc).__name__


def _missing_bucket(url: str) -> NoReturn:
    raise StoreError(f"{url} cannot be written: there is no such bucket", hint="create it, or check the address")


def fetch(location: str, key: str, num_bytes: int, lend: Callable[[int], Any]) -> tuple[int, Any] | None:
    """An object in a buffer that ``lend`` gives, with its size; None when there is none.

    When it has another size than ``num_bytes`` it is not read, and None stands in place of the buffer.
    """
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    try:
        with _errors(url, "read"):
            found = obstore.get(store, path)
            size = int(found.meta["size"])
            if size != num_bytes:
                return size, None
            lent = lend(num_bytes)
            view, position = memoryview(lent).cast("B"), 0
            for part in found.stream(min_chunk_size=STREAM_BYTES):
                if position + len(part) > num_bytes:
                    raise StoreError(f"{url} grew while it was read", hint="start again")
                view[position : position + len(part)] = part
                position += len(part)
            if position != num_bytes:
                raise StoreError(f"{url} ended after {position:,} of {num_bytes:,} bytes", hint="start again")
            return size, lent
    except FileNotFoundError:
        return None


def read_object(location: str, key: str) -> tuple[bytes, str] | None:
    """The bytes of an object and its ETag, None when there is none."""
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    try:
        with _errors(url, "read"):
            found = obstore.get(store, path)
            return bytes(found.bytes()), str(found.meta["e_tag"])
    except FileNotFoundError:
        return None


def parts_of(location: str, key: str) -> Iterator[bytes]:
    """The bytes of an object of any size, a few MiB at a time.

    Raises
    ------
    FileNotFoundError
        There is none.
    """
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    with _errors(url, "read"):
        yield from obstore.get(store, path).stream(min_chunk_size=STREAM_BYTES)


def put_file(location: str, key: str, path: Path) -> None:
    """Upload a file of any size; the object appears whole or not at all."""
    obstore = _library()
    url = join(location, key)
    store, name = client_of(url)
    try:
        with _errors(url, "written"):
            obstore.put(store, name, path, chunk_size=PART_BYTES, max_concurrency=2)
    except FileNotFoundError:
        _missing_bucket(url)


def read_range(location: str, key: str, start: int, length: int) -> bytes | None:
    """``length`` bytes from ``start``; None when there is no such object, or it is shorter."""
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    try:
        with _errors(url, "read"):
            part = bytes(obstore.get_range(store, path, start=start, length=length))
    except FileNotFoundError:
        return None
    except StoreError as exc:
        if "416" in exc.message:
            return None
        raise
    return part if len(part) == length else None


def find_object(location: str, key: str) -> StoredObject | None:
    """What is known about an object without reading it, None when there is none."""
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    try:
        with _errors(url, "read"):
            return _stored(key, obstore.head(store, path))
    except FileNotFoundError:
        return None


def _stored(key: str, facts: Any) -> StoredObject:
    return StoredObject(key, int(facts["size"]), facts["last_modified"].timestamp(), str(facts["e_tag"]))


def put_object(location: str, key: str, *parts: Any) -> None:
    """Write an object, given in buffers one after the other; it appears whole or not at all."""
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    views = [memoryview(part).cast("B") for part in parts]
    large = sum(len(view) for view in views) > PART_BYTES
    try:
        with _errors(url, "written"):
            obstore.put(store, path, iter(views), use_multipart=large, chunk_size=PART_BYTES, max_concurrency=2)
    except FileNotFoundError:
        _missing_bucket(url)


def put_if(location: str, key: str, data: bytes, version: str | None) -> str | None:
    """Write a small object if it does not exist (``version`` None) or still has this ETag; its new ETag, else None.

    An answer may be lost after the store has done what it was asked: then the repetition is refused, because of what
    this very call has written. So a refusal counts only when the store holds something else: ``data`` must not be equal
    to what any other writer writes (a token in it sees to that).
    """
    obstore = _library()
    url = join(location, key)
    store, path = client_of(url)
    mode: Any = "create" if version is None else {"e_tag": version}
    try:
        with _errors(url, "written"):
            try:
                return str(obstore.put(store, path, data, mode=mode, use_multipart=False)["e_tag"])
            except Exception as exc:
                # 409: two puts at once, of which the store takes one
                conflict = type(exc).__name__ in ("AlreadyExistsError", "PreconditionError")
                if not conflict and "409 Conflict" not in str(exc):
                    raise
    except FileNotFoundError:
        if version is None:
            _missing_bucket(url)
        return None
    found = read_object(location, key)
    return found[1] if found is not None and found[0] == data else None


def list_objects(location: str) -> list[StoredObject]:
    """Every object below a prefix, by key; keys are relative to it."""
    obstore = _library()
    store, prefix = client_of(location)
    start = len(prefix) + 1 if prefix else 0
    found = []
    with _errors(location, "listed"):
        for page in obstore.list(store, prefix or None):
            for item in page:
                key = str(item["path"])[start:]
                if key:
                    found.append(_stored(key, item))
    return sorted(found, key=lambda item: item.key)


def list_names(location: str) -> list[str]:
    """Names right below a prefix: of objects, and of what holds further ones."""
    obstore = _library()
    store, prefix = client_of(location)
    with _errors(location, "listed"):
        found = obstore.list_with_delimiter(store, prefix or None)
    paths = [*found["common_prefixes"], *(str(item["path"]) for item in found["objects"])]
    return sorted({str(path).rstrip("/").rpartition("/")[2] for path in paths})


def delete_objects(location: str, keys: Sequence[str]) -> None:
    """Delete objects; those that do not exist are no error."""
    obstore = _library()
    store, prefix = client_of(location)
    paths = [f"{prefix}/{key}" if prefix else key for key in keys]
    try:
        with _errors(location, "deleted from"):
            if len(paths) == 1:
                obstore.delete(store, paths[0])
            elif paths:
                obstore.delete(store, paths)
    except FileNotFoundError:
        return


def copy_object(location: str, key: str, target: str) -> None:
    """Copy an object of ``location`` to the address ``target`` in the same store; the store itself does it."""
    obstore = _library()
    url = join(location, key)
    source, destination = parse_address(url), parse_address(target)
    if (source.bucket, source.settings) != (destination.bucket, destination.settings):
        raise StoreError(f"{url} and {target} are in different stores", hint="read one and write the other")
    store, path = client_of(url)
    with _errors(url, "copied"):
        obstore.copy(store, path, destination.key)


KEPT = timedelta(minutes=5)
_NOT_STATIC = ("sso_session", "sso_start_url", "role_arn", "credential_process")


class Profile:
    """The credentials of one profile, read again when they are five minutes old: keys are replaced while jobs run.

    Calling it returns what ``obstore`` expects of a credential provider.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Profile({self.name!r})"

    @property
    def region(self) -> str | None:
        """The region that the profile names."""
        return self._fields().get("region")

    @property
    def has_keys(self) -> bool:
        """Whether keys stand in the files."""
        return bool(self._fields().get("aws_access_key_id"))

    def __call__(self) -> dict[str, Any]:
        found = self._fields()
        key, secret = found.get("aws_access_key_id"), found.get("aws_secret_access_key")
        if not key or not secret:
            return self._ask()
        return {
            "access_key_id": key,
            "secret_access_key": secret,
            "token": found.get("aws_session_token"),
            "expires_at": datetime.now(UTC) + KEPT,
        }

    def check(self) -> None:
        """Raise :class:`StoreError` when there is no such profile, or none that can be used."""
        found = self._fields()
        if not found:
            raise StoreError(
                f"there is no profile {self.name!r} in {' and '.join(_files())}",
                hint="correct [storage] profile, or unset AWS_PROFILE",
            )
        if not found.get("aws_access_key_id"):
            self._session()

    def _ask(self) -> dict[str, Any]:
        credentials = self._session().get_credentials()
        if credentials is None:
            raise StoreError(f"the profile {self.name!r} gives no credentials", hint="log in again (aws sso login)")
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + KEPT,
        }

    def _session(self) -> Any:
        try:
            import boto3
        except ImportError:
            needs = next((name for name in _NOT_STATIC if name in self._fields()), "no keys")
            raise StoreError(
                f"the profile {self.name!r} needs boto3 ({needs})",
                hint="install boto3, or give keys in the environment",
            ) from None
        return boto3.Session(profile_name=self.name)

    def _fields(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for path, section in zip(_files(), (f"profile {self.name}", self.name), strict=True):
            parser = ConfigParser(interpolation=None)
            try:
                parser.read(path, encoding="utf-8")
            except (ConfigError, OSError, UnicodeDecodeError):
                # the parser's own message would repeat the line, which may be a key
                raise StoreError(f"{path} cannot be read", hint="correct the file") from None
            for name in {section, self.name}:
                if parser.has_section(name):
                    found |= dict(parser.items(name))
        return found


def _files() -> tuple[str, str]:
    """Configuration first: what both files say, credentials decide."""
    home = os.path.expanduser("~/.aws")
    return (
        os.environ.get("AWS_CONFIG_FILE", f"{home}/config"),
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", f"{home}/credentials"),
    )


def find_profile(asked: str | None) -> Profile | None:
    """The profile to use: the one asked for, else as Amazon's tools decide; None leaves it to environment and role.

    Raises
    ------
    StoreError
        There is no profile of that name, or it needs boto3, which is not installed.
    """
    if asked is None and os.environ.get("AWS_ACCESS_KEY_ID"):
        return None
    name = asked or os.environ.get("AWS_PROFILE")
    if name:
        profile = Profile(name)
        profile.check()
        return profile
    if os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return None
    default = Profile("default")
    return default if default.has_keys else None
