"""Addresses: taken apart, put together, and never with a credential in them."""

from __future__ import annotations

import pytest

from dkrr.errors import ParameterError
from dkrr.store.files import Address, StorageSettings, join, name_of, parent_of, parse_address, with_settings

MINIO = StorageSettings(endpoint_url="http://127.0.0.1:9000", region="eu-1", allow_http=True)
FULL = "s3://bucket/runs/demo?endpoint_url=http://127.0.0.1:9000&region=eu-1&allow_http=true"


def test_an_address_round_trips() -> None:
    assert parse_address(FULL) == Address("bucket", "runs/demo", MINIO)
    assert str(parse_address(FULL)) == FULL
    assert str(parse_address("s3://bucket/")) == "s3://bucket"
    assert with_settings("s3://bucket/runs/demo", MINIO) == FULL
    assert with_settings(FULL, StorageSettings(region="other")) == FULL
    assert with_settings("/a/path", MINIO) == "/a/path"


@pytest.mark.parametrize("base", ["s3://bucket/a", "s3://bucket/a/", "/x/a", "/x/a/"])
def test_parts_of_a_location(base: str) -> None:
    query = "?region=eu-1" if base.startswith("s3") else ""
    below = join(base + query, "b", "c.zarr")
    assert below == base.rstrip("/") + "/b/c.zarr" + query
    assert name_of(below) == "c.zarr"
    assert parent_of(parent_of(below)) == base.rstrip("/") + query


def test_parents_at_the_ends() -> None:
    assert parent_of("s3://bucket?region=x") == "s3://bucket?region=x"
    assert parent_of("s3://bucket/a?region=x") == "s3://bucket?region=x"
    assert (parent_of("/a"), parent_of("a"), name_of("a")) == ("/", ".", "a")


SECRETS = [
    "s3://user:hunter2@bucket/a",
    "s3://AKIAhunter2@bucket/a",
    "s3://bucket/a?secret=hunter2",
    "s3://bucket/a?X-Amz-Signature=hunter2",
    "s3://bucket/a?hunter2",
    "s3://bucket/a?endpoint_url=https://user:hunter2@host",
    "s3://bucket/a?endpoint_url=https://hunter2@host",
    "gs://user:hunter2@bucket/a",
]


@pytest.mark.parametrize("url", SECRETS)
def test_a_credential_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_address(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://bucket/a", "gs:// is not supported"),
        ("s3:///a", "names no bucket"),
        ("s3://bucket/a#b", "a #"),
        ("s3://bucket/a?allow_http=yes", "neither true nor false"),
        ("s3://bucket/a?endpoint_url=http://host", "without encryption"),
        ("s3://bucket/a?endpoint_url=host", "an address such as"),
        ("s3://[/a", "not a valid address"),
    ],
)
def test_what_is_no_address(url: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        parse_address(url)
