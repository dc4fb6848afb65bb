"""Object stores on a real server: keys, conditions, locks, failures that pass and failures that stay."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dkrr.errors import StoreError
from dkrr.store import documents, objects
from dkrr.store.chunks import ChunkArray
from dkrr.store.documents import create_json, swap_json
from dkrr.store.files import (
    children,
    key_size,
    read_key,
    write_key,
)
from dkrr.store.lease import hold_lock
from dkrr.store.objects import parse_address
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, S3Server, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few and quick repetitions, for tests of what happens when they end."""
    for name, value in (
        ("MAX_RETRIES", 2), ("RETRY_SECONDS", 20.0), ("REQUEST_SECONDS", 2.0), ("LONGEST_PAUSE_SECONDS", 0.2)
    ):  # fmt: skip
        monkeypatch.setattr(objects, name, value)
    objects._client.cache_clear()
    yield
    objects._client.cache_clear()


def test_large_objects_go_in_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 * 2**20)
    data = np.random.default_rng(0).bytes(12 * 2**20)
    write_key(bucket.url(), "large", data, b"tail")
    assert read_key(bucket.url(), "large") == data + b"tail"
    assert objects.read_range(bucket.url(), "large", len(data) - 2, 6) == data[-2:] + b"tail"
    assert objects.read_range(bucket.url(), "large", len(data) + 2, 6) is None
    assert objects.read_range(bucket.url(), "large", len(data) + 9, 6) is None


def test_markers_of_folders_are_no_objects(bucket: Bucket) -> None:
    """Of no bytes, under keys that end in a slash, as consoles and file systems over a store leave them."""
    for key in ("data/", "data/sub/", "data/sub/deep/"):
        bucket.server.ask("PUT", f"/{bucket.name}/{key}")
    write_key(bucket.url(), "data/empty", b"")
    write_key(bucket.url(), "data/sub/part", b"1")
    assert bucket.listing("data") == ["empty", "sub/part"]
    assert children(bucket.url("data")) == ["empty", "sub"]


# --- conditions -------------------------------------------------------------------------------------------------------


def test_an_answer_that_was_lost_is_no_refusal(bucket: Bucket) -> None:
    """The put is done, 500 is said, the repetition is refused because of the first one."""
    root = bucket.url("locks")
    documents.check_conditions(root)
    bucket.server.fail({"method": "PUT", "path": "lease", "lose_answer": True})
    first = create_json(root, "lease.json", {"token": "a"})
    assert first is not None
    bucket.server.fail({"method": "PUT", "path": "lease", "lose_answer": True})
    assert swap_json(root, "lease.json", {"token": "b"}, first) is not None
    puts = [item["status"] for item in bucket.server.log() if "lease" in item["path"] and item["method"] == "PUT"]
    assert puts.count(500) == 2
    assert puts.count(412) >= 2


def test_a_store_that_ignores_conditions_is_refused(s3_server: S3Server) -> None:
    documents._HONOURED.clear()
    bucket = s3_server.new_bucket()
    try:
        s3_server.fail({"method": "PUT", "times": 100, "ignore_conditions": True})
        with pytest.raises(StoreError, match="does not honour conditional puts") as caught, hold_lock(bucket.url("a")):
            pytest.fail("nothing is locked")
        assert "If-None-Match is ignored" in str(caught.value)
    finally:
        s3_server.fail()
    assert bucket.listing() == []
    with hold_lock(bucket.url("a")):
        pass
    documents._HONOURED.clear()


# --- failures --------------------------------------------------------------------------------------------------------


def test_failures_that_stay_end_in_a_typed_error(bucket: Bucket, impatient: None) -> None:
    bucket.server.fail({"path": "/x", "times": 1000, "status": 503})
    for access in (
        lambda: write_key(bucket.url(), "x", b"1"),
        lambda: read_key(bucket.url(), "x"),
        lambda: key_size(bucket.url(), "x"),
        lambda: create_json(bucket.url(), "x", {}),
    ):
        with pytest.raises(StoreError, match=r"/x\?.* cannot be (read|written) \(503 Service Unavailable"):
            access()


def test_a_body_that_ends_early(bucket: Bucket, impatient: None) -> None:
    array = ChunkArray.create(bucket.url("a.zarr"), "", shape=(64, 64), chunks=(64, 64))
    array.write((0, 0), np.ones((64, 64)))
    bucket.server.fail({"method": "GET", "path": "c/0/0", "times": 1000, "cut": True})
    with pytest.raises(StoreError):
        array.read((0, 0))
    bucket.server.fail()
    np.testing.assert_array_equal(array.read((0, 0)), np.ones((64, 64)))


def test_nobody_there_and_no_bucket(s3_server: S3Server, bucket: Bucket, impatient: None) -> None:
    port = s3_server.port
    nowhere = bucket.url("a").replace(f":{port}", ":9")
    with pytest.raises(StoreError, match="cannot be read"):
        read_key(nowhere, "x")
    other = bucket.url("a").replace(bucket.name, "no-such-bucket")
    assert read_key(other, "x") is None
    with pytest.raises(StoreError, match="no such bucket"):
        write_key(other, "x", b"")


def test_what_a_server_says_repeats_no_credential(bucket: Bucket, impatient: None) -> None:
    bucket.server.fail({"path": "/x", "times": 1000, "status": 403})
    with pytest.raises(StoreError, match="check the credentials") as caught:
        read_key(bucket.url(), "x")
    shown = [str(caught.value), repr(caught.value.__cause__), repr(objects.client_below(bucket.url()))]
    assert not any(secret in text for secret in (CANARY_KEY, CANARY_SECRET) for text in shown)


def test_settings_of_a_profile(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (
        ("SHARED_CREDENTIALS", "[lab]\naws_access_key_id = AKIALAB\naws_secret_access_key = s3cret\n"),
        ("CONFIG", "[profile lab]\nregion = eu-central-1\n[profile none]\nregion = eu-central-1\n"),
    ):
        (tmp_path / name).write_text(text)
        monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / name))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    address = parse_address(bucket.url("a"))
    asked = f"s3://{address.bucket}/a?profile=lab&endpoint_url={bucket.server.endpoint_url}&allow_http=true"
    write_key(asked, "x", b"1")
    assert read_key(bucket.url("a"), "x") == b"1"
    for name, message in (("nobody", "no profile 'nobody'"), ("none", "'none' gives no credentials")):
        with pytest.raises(StoreError, match=message):
            read_key(asked.replace("lab", name), "x")
    provide, region = objects.find_profile("lab")
    assert provide is not None
    assert (provide()["access_key_id"], region) == ("AKIALAB", "eu-central-1")
    monkeypatch.setitem(sys.modules, "boto3", None)
    objects._client.cache_clear()
    with pytest.raises(StoreError, match="'lab' needs boto3: install dkrr"):
        read_key(asked, "x")


def test_a_server_that_does_not_answer(bucket: Bucket, impatient: None) -> None:
    bucket.server.fail({"path": "/x", "times": 1, "sleep": 6})
    write_key(bucket.url(), "x", b"1")  # the second attempt
    bucket.server.fail({"path": "/x", "times": 1000, "sleep": 6})
    with pytest.raises(StoreError, match="cannot be read"):
        read_key(bucket.url(), "x")
