"""Addresses of object stores, ``s3://bucket/key``, and the few words that say how a store is reached.

    s3://bucket/runs/demo?endpoint_url=https://minio.example:9000&region=eu-1

What stands behind the question mark belongs to the address: ``endpoint_url``, ``region``, ``profile``, ``allow_http``.
So whoever is handed an address can open it, on another machine and in a task too, and no process-wide setting has to be
there first. A job says the same once, in ``[storage]``. No credential belongs into either; every process finds its own
(environment, profile, role), and an address with one in it is refused.

The functions take local paths as well: callers need not know which of the two they have. Nothing is opened here.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from dkrr.errors import ParameterError

__all__ = [
    "Address",
    "StorageSettings",
    "is_below",
    "is_url",
    "join",
    "name_of",
    "parent_of",
    "parse_address",
    "relative_to",
    "sibling",
    "with_settings",
    "without_settings",
]


def is_url(location: Any) -> bool:
    """Whether ``location`` is an address such as ``s3://bucket/key`` and not a path."""
    return isinstance(location, str) and "://" in location


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
        if parts.username is not None or parts.password is not None:
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

    def query(self) -> str:
        """The part of an address behind the question mark; "" when there is nothing to say."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        return urlencode({name: "true" if value is True else value for name, value in given.items()}, safe=":/")


@dataclass(frozen=True)
class Address:
    """Bucket, key (without slashes at its ends, "" for the bucket itself) and settings of an address."""

    bucket: str
    key: str
    settings: StorageSettings

    def __str__(self) -> str:
        query = self.settings.query()
        return f"s3://{self.bucket}/{self.key}".rstrip("/") + (f"?{query}" if query else "")


_NAMES = tuple(field.name for field in fields(StorageSettings))
_NO_SECRETS = "addresses hold no credentials; use the environment, a profile or a role"


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
    for name in given:
        if name not in _NAMES:  # it may be a signature, or a name that someone gave a password
            raise ParameterError(
                f"an s3:// address with something else than {', '.join(_NAMES)} behind the question mark",
                hint=_NO_SECRETS,
            )
    if "allow_http" in given:
        if given["allow_http"] not in ("true", "false"):
            raise ParameterError("allow_http of an s3:// address is neither true nor false")
        given["allow_http"] = given["allow_http"] == "true"
    return Address(parts.netloc, parts.path.strip("/"), StorageSettings(**given))


def with_settings(url: str, settings: StorageSettings) -> str:
    """The address with settings, unless it brings its own; a path as it is."""
    if not is_url(url):
        return url
    address = parse_address(url)
    if address.settings != StorageSettings() or settings == StorageSettings():
        return url
    return str(Address(address.bucket, address.key, settings))


def without_settings(url: str, settings: StorageSettings) -> str:
    """The address without these settings; with others, and a path, as it is."""
    if not is_url(url) or settings == StorageSettings():
        return url
    address = parse_address(url)
    return str(Address(address.bucket, address.key, StorageSettings())) if address.settings == settings else url


def join(location: str | os.PathLike[str], *names: str) -> str:
    """The path or address of something below a folder or prefix."""
    if not is_url(location):
        return os.path.join(location, *names)
    base, mark, query = str(location).partition("?")
    return "/".join([base.rstrip("/"), *names]) + mark + query


def name_of(location: str | os.PathLike[str]) -> str:
    """The last part of a path or address."""
    return _base(location)[0].rpartition("/")[2]


def is_below(location: str, other: str) -> bool:
    """Whether a location is another one, or lies in it."""
    path, folder = _base(location)[0], _base(other)[0]
    return path == folder or path.startswith(f"{folder}/")


def relative_to(location: str, other: str) -> str:
    """What stands behind ``other`` in the location of something in it; "" where it does not lie in it."""
    path, folder = _base(location)[0], _base(other)[0]
    return path[len(folder) + 1 :] if path.startswith(f"{folder}/") else ""


def sibling(location: str | os.PathLike[str], ending: str) -> str:
    """The location with ``ending`` added to its name."""
    base, tail = _base(location)
    return base + ending + tail


def parent_of(location: str | os.PathLike[str]) -> str:
    """The folder or prefix that something lies in; that of a bucket is the bucket."""
    base, tail = _base(location)
    if is_url(location) and base.count("/") < 3:
        return base + tail
    parent = base.rpartition("/")[0]
    return (parent or ("/" if base.startswith("/") else ".")) + tail


def _base(location: str | os.PathLike[str]) -> tuple[str, str]:
    """Without slashes at the end, and what follows a question mark."""
    if not is_url(location):
        return os.fspath(location).rstrip("/"), ""
    base, mark, query = str(location).partition("?")
    return base.rstrip("/"), mark + query
