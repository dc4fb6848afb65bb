"""Addresses of object stores, ``s3://bucket/key``, and the requests to what stands behind them.

    s3://bucket/runs/demo?endpoint_url=https://minio.example:9000&region=eu-1

What stands behind the question mark belongs to the address: ``endpoint_url``, ``region``, ``profile``, ``allow_http``.
So whoever is handed an address can open it, on another machine and in a task too, and no process-wide setting has to be
there first. A job says the same once, in ``[storage]``. No credential belongs into either; every process finds its own
(environment, profile, role), and an address with one in it is refused.

Every request goes to an exact key; only what counts and cleans up lists. Requests that fail for reasons of the network
or of the server (time-outs, 429, 5xx) are repeated with growing pauses; what fails for good is a
:class:`~dkrr.errors.StoreError` whose message names the address and what the server said, and no credential.

The connection pool belongs to the process and to the settings of the address. Costs one round trip a call; needs
``dkrr[s3]`` (obstore, and boto3 for profiles), which is imported when the first address is opened.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from dkrr.errors import DkrrError, ParameterError, StorageFullError, StoreError

# A request is repeated so often, and no repetition begins after so many seconds: below the watchdog's patience.
MAX_RETRIES = 8
RETRY_SECONDS = 120.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 15.0
CONNECT_SECONDS, REQUEST_SECONDS = 3.0, 120.0
# Keys of a profile are read again when they are so old: they are replaced while jobs run.
CREDENTIALS_KEPT = timedelta(minutes=5)
# One put up to here; larger objects go in parts, each of which is repeated by itself. They appear whole all the same.
PART_BYTES = 64 * 2**20
# A body is copied into place in pieces of this size, which is all that a read needs besides its buffer.
STREAM_BYTES = 2**20

_STATUS = re.compile(r"non-2xx status code: (\d{3}[\w ]*)")
_TAGS = re.compile(r"<(Code|Message)>([^<]{1,200})</")
_NO_SECRETS = "addresses hold no credentials; use the environment, a profile or a role"

P = ParamSpec("P")
T = TypeVar("T")


# --- addresses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StorageSettings:
    """How an object store is reached; plain words, no secret.

    Parameters
    ----------
    endpoint_url
        Of a store that is not Amazon's; None: ``AWS_ENDPOINT_URL``, then Amazon's.
    region
        None: ``AWS_REGION``, that of the profile, then us-east-1.
    profile
        Of ``~/.aws/credentials`` and ``~/.aws/config``; None: the environment decides.
    allow_http
        Whether the endpoint may be reached without encryption.

    Raises
    ------
    ParameterError
        The endpoint is no address, holds a user or a password, or is plain http without ``allow_http``.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    allow_http: bool = False

    def __post_init__(self) -> None:
        if self.endpoint_url is None:
            return
        parts = _split(self.endpoint_url, "endpoint_url")
        if "@" in parts.netloc:
            raise ParameterError("endpoint_url has a user or a password in it", hint=_NO_SECRETS)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ParameterError(
                f"endpoint_url is {self.endpoint_url!r}; an address such as https://host:9000 expected"
            )
        if parts.scheme == "http" and not self.allow_http:
            raise ParameterError(
                f"endpoint_url {self.endpoint_url} is reached without encryption",
                hint="use https://, or allow_http = true on a network you trust",
            )


@dataclass(frozen=True)
class Address:
    """Bucket, key (without slashes at its ends, "" for the bucket itself) and settings of an address."""

    bucket: str
    key: str
    settings: StorageSettings

    def __str__(self) -> str:
        given: Any = {name: value for name, value in asdict(self.settings).items() if value not in (None, False)}
        query = urlencode({name: "true" if value is True else value for name, value in given.items()}, safe=":/")
        return f"s3://{self.bucket}/{self.key}".rstrip("/") + (f"?{query}" if query else "")

    def below(self, key: str) -> Address:
        """The address of a key below this one; this one for ""."""
        return replace(self, key=f"{self.key}/{key}".strip("/"))


def _split(text: str, what: str) -> Any:
    try:
        return urlsplit(text)
    except ValueError:
        raise ParameterError(f"{what} is not a valid address") from None


def parse_address(url: str) -> Address:
    """Take an address apart.

    Raises
    ------
    ParameterError
        Another scheme than s3, no bucket, a credential in it, or an unknown setting. What may be secret is not
        repeated.
    """
    parts = _split(url, "the location")
    if "@" in parts.netloc:
        raise ParameterError(f"an {parts.scheme}:// address has a user or a password in it", hint=_NO_SECRETS)
    if parts.scheme != "s3":
        raise ParameterError(f"{parts.scheme}:// is not supported", hint="give s3://bucket/key, or a local path")
    if not parts.netloc:
        raise ParameterError(f"{url} names no bucket", hint="give s3://bucket/key")
    if parts.fragment:
        raise ParameterError("an s3:// address with a # in it", hint="use other names for keys")
    given: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = [field.name for field in fields(StorageSettings)]
    if not given.keys() <= set(known):  # it may be a signature, or a name that someone gave a password
        raise ParameterError(
            f"an s3:// address with something else than {', '.join(known)} behind the question mark", hint=_NO_SECRETS
        )
    if "allow_http" in given:
        if given["allow_http"] not in ("true", "false"):
            raise ParameterError("allow_http of an s3:// address is neither true nor false")
        given["allow_http"] = given["allow_http"] == "true"
    return Address(parts.netloc, parts.path.strip("/"), StorageSettings(**given))


# --- connections ------------------------------------------------------------------------------------------------------


def client_below(url: str) -> Any:
    """A connection pool whose keys begin at an address, kept for the life of the process: for libraries that know none.

    Raises
    ------
    ParameterError
        See :func:`parse_address`.
    StoreError
        obstore is not installed, or there is no such profile.
    """
    address = parse_address(url)
    return _client(address.bucket, address.settings, address.key)


@lru_cache(maxsize=32)
def _client(bucket: str, settings: StorageSettings, prefix: str) -> Any:
    try:
        from obstore.store import S3Store
    except ImportError as exc:
        raise StoreError("s3:// addresses need obstore, which is not installed", hint="install dkrr[s3]") from exc
    profile, region = find_profile(settings.profile)
    options: Any = {
        "endpoint": settings.endpoint_url,
        "region": settings.region or region,
        "credential_provider": profile,
        "prefix": prefix or None,
    }
    http: Any = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "timeout": timedelta(seconds=REQUEST_SECONDS),
        **({"allow_http": True} if settings.allow_http else {}),
    }
    retries: Any = {
        "max_retries": MAX_RETRIES,
        "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        "backoff": {
            "init_backoff": timedelta(seconds=FIRST_PAUSE_SECONDS),
            "max_backoff": timedelta(seconds=LONGEST_PAUSE_SECONDS),
            "base": 2,
        },
    }
    given: Any = {name: value for name, value in options.items() if value is not None}
    try:
        return S3Store(bucket, client_options=http, retry_config=retries, conditional_put="etag", **given)
    except Exception as exc:
        raise _typed_error(f"s3://{bucket}", "opened", exc) from None


def find_profile(asked: str | None) -> tuple[Callable[[], dict[str, Any]] | None, str | None]:
    """What gives the credentials of a profile, and its region: of the one asked for, else as Amazon's tools decide.

    Nothing where the environment or a role is to decide, which the library that talks to the store asks by itself.
    Nothing is kept longer than five minutes, logged, or sent anywhere but to the store.

    Raises
    ------
    StoreError
        There is no profile of that name, it gives no credentials, or boto3 is not installed.
    """
    if asked is None and (os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")):
        return None, None
    name = asked or os.environ.get("AWS_PROFILE")
    try:
        import boto3
        from botocore.exceptions import BotoCoreError, ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if name is None:
            return None, None
        raise StoreError(f"the profile {name!r} needs boto3", hint="install dkrr[s3]") from None

    def credentials() -> Any:
        try:
            return Boto3CredentialProvider(boto3.Session(profile_name=name), ttl=CREDENTIALS_KEPT)()
        except (AttributeError, ValueError, BotoCoreError) as exc:
            raise StoreError(
                f"the profile {name!r} gives no credentials ({type(exc).__name__})",
                hint="log in again (aws sso login), or give it keys",
            ) from None

    try:
        if name is None and "default" not in boto3.Session().available_profiles:
            return None, None
        region = boto3.Session(profile_name=name).region_name
    except ProfileNotFound:
        raise StoreError(
            f"there is no profile {name!r}", hint="correct [storage] profile, or unset AWS_PROFILE"
        ) from None
    except BotoCoreError as exc:
        raise StoreError(f"the profiles cannot be read ({type(exc).__name__})", hint="correct ~/.aws/config") from None
    credentials()
    return credentials, region


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A file or object: its key below what was listed, bytes, seconds since 1970 when it was written, and its ETag."""

    key: str
    num_bytes: int
    modified: float
    version: str = ""


def _typed_error(url: str, verb: str, exc: BaseException) -> StoreError:
    """The status and the server's sentence, or the first line of the library's, without what is signed."""
    kind, text = type(exc).__name__, str(exc)
    status, tags = _STATUS.search(text), dict(_TAGS.findall(text))
    said = text.partition("\n")[0].strip()[:300] or kind
    if status is not None:
        said = ", ".join(filter(None, (status[1].strip(), tags.get("Code"), tags.get("Message"))))
    hint = "check endpoint, region and network, then start again; everything finished so far is kept"
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        hint = "check the credentials of this process; to see that a key does not exist takes s3:ListBucket"
    elif "169.254." in text or "credential" in text.lower():  # the library asks the machine when all else fails
        hint = "no credentials were found: set AWS_ACCESS_KEY_ID and its secret, a profile, or a role"
    return StoreError(f"{url} cannot be {verb} ({said})", hint=hint, reason=kind)


def _request(
    verb: str,
) -> Callable[[Callable[Concatenate[Any, str, P], T]], Callable[Concatenate[str, str, P], T | None]]:
    """Give a function, instead of an address and a key below it, the client and the whole key.

    What the library raises becomes a typed error; None stands for what does not exist, where nothing is written.
    """

    def decorate(ask: Callable[Concatenate[Any, str, P], T]) -> Callable[Concatenate[str, str, P], T | None]:
        @wraps(ask)
        def asked(location: str, key: str, /, *args: P.args, **options: P.kwargs) -> T | None:
            address = parse_address(location).below(key)
            client = _client(address.bucket, address.settings, "")
            try:
                return ask(client, address.key, *args, **options)
            except FileNotFoundError:
                if verb != "written":
                    return None
                raise StoreError(
                    f"{address} cannot be written: there is no such bucket", hint="create it, or check the address"
                ) from None
            except Exception as exc:
                from obstore.exceptions import BaseError

                if isinstance(exc, DkrrError) or not isinstance(exc, BaseError | OSError):
                    raise
                # "from None": the library's text may repeat signatures and key ids
                raise _typed_error(str(address), verb, exc) from None

        return asked

    return decorate


@_request("read")
def read_object(client: Any, path: str) -> tuple[Any, str]:
    """The bytes of an object, as a buffer, and its ETag."""
    found = client.get(path)
    return found.bytes(), str(found.meta["e_tag"])


@_request("read")
def get_file(client: Any, path: str, target: Path) -> bool:
    """Download an object of any size, a few MiB at a time."""
    found = client.get(path)
    with open(target, "wb") as file:
        for part in found.stream(min_chunk_size=STREAM_BYTES):
            try:
                file.write(part)
            except OSError as exc:
                hint = "set Dask's temporary-directory to a disk with room"
                raise StorageFullError(f"{target} cannot be written ({exc.strerror})", hint=hint) from exc
    return True


@_request("read")
def read_range(client: Any, path: str, start: int, length: int) -> bytes | None:
    """``length`` bytes from ``start``; None when there is no such object, or it is shorter."""
    try:
        part = bytes(client.get_range(path, start=start, length=length))
    except Exception as exc:
        if "416" in str(exc):
            return None
        raise
    return part if len(part) == length else None


@_request("read")
def find_object(client: Any, path: str) -> Entry:
    """What is known about an object without reading it."""
    return _entry(path.rpartition("/")[2], client.head(path))


def _entry(key: str, facts: Any) -> Entry:
    return Entry(key, int(facts["size"]), facts["last_modified"].timestamp(), str(facts["e_tag"]))


@_request("written")
def put_object(client: Any, path: str, *parts: Any) -> None:
    """Write an object, given in buffers one after the other; it appears whole or not at all."""
    views = [memoryview(part).cast("B") for part in parts]
    large = sum(len(view) for view in views) > PART_BYTES
    client.put(path, iter(views), use_multipart=large, chunk_size=PART_BYTES, max_concurrency=2)


@_request("written")
def put_file(client: Any, path: str, source: Path) -> None:
    """Upload a file of any size; the object appears whole or not at all."""
    client.put(path, source, chunk_size=PART_BYTES, max_concurrency=2)


@_request("written")
def put_if(client: Any, path: str, data: bytes, version: str | None) -> str | None:
    """Write a small object if it does not exist (``version`` None) or still has this ETag; its new ETag, else None.

    An answer may be lost after the store has done what it was asked: then the repetition is refused, because of what
    this very call has written. So a refusal counts only when the store holds something else: ``data`` must not be equal
    to what any other writer writes (a token in it sees to that).
    """
    mode = "create" if version is None else {"e_tag": version}
    try:
        return str(client.put(path, data, mode=mode, use_multipart=False)["e_tag"])
    except FileNotFoundError:
        if version is None:
            raise
        return None
    except Exception as exc:
        # 409: two puts at once, of which the store takes one
        if type(exc).__name__ not in ("AlreadyExistsError", "PreconditionError") and "409 Conflict" not in str(exc):
            raise
    with contextlib.suppress(FileNotFoundError):  # removed by now
        found = client.get(path)
        if bytes(found.bytes()) == data:
            return str(found.meta["e_tag"])
    return None


@_request("listed")
def list_objects(client: Any, path: str) -> list[Entry]:
    """Every object below a prefix, by key; keys are relative to it."""
    start = len(path) + 1 if path else 0
    items = [item for page in client.list(path or None) for item in page if str(item["path"])[start:]]
    items = [item for item in items if item["size"] or _is_object(client, str(item["path"]))]
    return sorted((_entry(str(item["path"])[start:], item) for item in items), key=lambda item: item.key)


def _is_object(client: Any, path: str) -> bool:
    """Whether something of no bytes is an object, and not the marker "path/" that some programs leave of a folder."""
    try:
        client.head(path)
    except FileNotFoundError:
        return False
    return True


@_request("listed")
def list_names(client: Any, path: str) -> list[str]:
    """Names right below a prefix: of objects, and of what holds further ones."""
    found = client.list_with_delimiter(path or None)
    paths = [*found["common_prefixes"], *(str(item["path"]) for item in found["objects"] if item["path"] != path)]
    return sorted({str(item).rstrip("/").rpartition("/")[2] for item in paths})


@_request("deleted from")
def delete_objects(client: Any, path: str, keys: Sequence[str]) -> None:
    """Delete objects below a prefix; those that do not exist are no error."""
    paths = [f"{path}/{key}" if path else key for key in keys]
    if paths:
        client.delete(paths[0] if len(paths) == 1 else paths)


@_request("copied")
def copy_object(client: Any, path: str, target: str) -> bool:
    """Copy an object to an address in the same store; the store itself does it."""
    destination = parse_address(target)
    if client is not _client(destination.bucket, destination.settings, ""):
        raise StoreError(f"{path} and {target} are in different stores", hint="read one and write the other")
    client.copy(path, destination.key)
    return True
