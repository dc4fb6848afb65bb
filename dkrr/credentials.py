"""Credentials from the files that Amazon's tools keep, for the profile that is asked for.

The library that talks to the store finds credentials in the environment and through roles by itself; profiles are read
here. Keys that stand in the files are taken as they are. A profile that has to ask somebody (single sign-on, a role to
assume, a program) is left to boto3, where that is installed. Nothing is kept longer than five minutes, logged, or sent
anywhere but to the store.
"""

from __future__ import annotations

import os
from configparser import ConfigParser
from configparser import Error as ConfigError
from datetime import UTC, datetime, timedelta
from typing import Any

from dkrr.errors import StoreError

__all__ = ["Profile", "find_profile"]

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
