"""An S3 server on the loopback interface for tests that import ``s3_server`` and ``bucket`` as fixtures."""

from __future__ import annotations

import http.client
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dkrr.store.files import list_entries
from dkrr.store.objects import Address, StorageSettings

__all__ = ["CANARY_KEY", "CANARY_SECRET", "Bucket", "S3Server", "bucket", "s3_server"]

# whatever these end up in, a test finds them there
CANARY_KEY, CANARY_SECRET = "AKIACANARYCANARYCANA", "canary-secret-that-must-never-travel"

_numbers = itertools.count()


@dataclass(frozen=True)
class S3Server:
    """A server of this machine, and what it was asked."""

    port: int

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def settings(self) -> StorageSettings:
        return StorageSettings(endpoint_url=self.endpoint_url, region="us-east-1", allow_http=True)

    def fail(self, *faults: dict[str, Any]) -> None:
        """Fail requests as the faults say (see tests/s3_server.py); none ends it."""
        self.ask("POST", "/-/faults", json.dumps(faults).encode())

    def log(self) -> list[dict[str, Any]]:
        """Every request so far: method, path, status, bytes."""
        found: list[dict[str, Any]] = json.loads(self.ask("GET", "/-/log"))
        return found

    def new_bucket(self) -> Bucket:
        name = f"bucket-{next(_numbers)}"
        self.ask("PUT", f"/{name}", b"")
        return Bucket(self, name)

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body=body, headers={"Content-Length": str(len(body))})
        response = connection.getresponse()
        data = response.read()
        connection.close()
        assert response.status == 200, data
        return data


@dataclass(frozen=True)
class Bucket:
    """An empty bucket of the server."""

    server: S3Server
    name: str

    def url(self, *names: str) -> str:
        """The address of something in it, settings included."""
        return str(Address(self.name, "/".join(names), self.server.settings))

    def plain(self, *names: str) -> str:
        """The same without settings, for jobs that have them in [storage]."""
        return str(Address(self.name, "/".join(names), StorageSettings()))

    def storage(self) -> dict[str, Any]:
        """The [storage] table of a job."""
        return {"endpoint_url": self.server.endpoint_url, "region": "us-east-1", "allow_http": True}

    def listing(self, *prefix: str) -> list[str]:
        """Keys below a prefix."""
        return [item.key for item in list_entries(self.url(*prefix))]

    def puts(self) -> list[str]:
        """Keys that were written, in order, as often as they were."""
        start = f"/{self.name}/"
        return [
            item["path"].removeprefix(start)
            for item in self.server.log()
            if item["method"] == "PUT" and item["status"] == 200 and item["path"].startswith(start)
        ]


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A server for the tests of a module; this process and those it starts have credentials in their environment."""
    script = Path(__file__).with_name("s3_server.py")
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=script.parent
    )
    patch = pytest.MonkeyPatch()
    try:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ACCESS_KEY_ID", CANARY_KEY)
        patch.setenv("AWS_SECRET_ACCESS_KEY", CANARY_SECRET)
        patch.setenv("NO_PROXY", "127.0.0.1,localhost")
        assert process.stdout is not None
        yield S3Server(int(process.stdout.readline()))
    finally:
        patch.undo()
        process.kill()
        process.communicate()


@pytest.fixture
def bucket(s3_server: S3Server) -> Iterator[Bucket]:
    """An empty bucket; faults end with the test."""
    yield s3_server.new_bucket()
    s3_server.fail()
