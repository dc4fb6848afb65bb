"""One set of verbs for folders and addresses: what is written is read, one of many writers wins, a fence holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.errors import LockedError, ParameterError, StoreError
from dkrr.store.chunks import ChunkArray
from dkrr.store.documents import Versioned, check_manifest, create_json, read_versioned, swap_json, write_manifest
from dkrr.store.files import (
    change_settings,
    children,
    copy_tree,
    delete_key,
    is_below,
    join,
    key_size,
    link_key,
    list_entries,
    list_keys,
    name_of,
    parent_of,
    read_json,
    read_key,
    relative_to,
    remove_array,
    write_file,
    write_json,
    write_key,
)
from dkrr.store.interruption import check_fence, fenced
from dkrr.store.objects import Address, StorageSettings, parse_address
from tests.s3 import bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture(params=["path", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An empty place."""
    return str(tmp_path / "at") if request.param == "path" else request.getfixturevalue("bucket").url("at")


def test_keys(root: str) -> None:
    assert read_key(root, "x/1") is read_json(root, "x.json") is key_size(root, "x/1") is None
    assert (children(root), list_keys(root)) == ([], [])
    write_key(root, "x/1", b"one", memoryview(b" two"), durable=True)
    write_json(root, "x.json", {"n": 1})
    write_key(join(parent_of(root), "at-other"), "y", b"")
    assert (read_key(root, "x/1"), key_size(root, "x/1"), read_json(root, "x.json")) == (b"one two", 7, {"n": 1})
    assert (list_keys(root), children(root)) == (["x.json", "x/1"], ["x", "x.json"])
    assert [entry.num_bytes for entry in list_entries(root)] == [len(read_key(root, "x.json") or b""), 7]
    assert abs(list_entries(root)[0].modified - time.time()) < 60
    assert link_key(root, "x/1", join(root, "linked")) is ("://" not in root)
    assert link_key(root, "none", join(root, "linked")) is None
    assert read_key(join(root, "linked"), "x/1") == b"one two"
    write_key(root, "x.json", b"{")
    with pytest.raises(StoreError, match=r"x\.json of .* is not valid JSON"):
        read_json(root, "x.json")
    delete_key(root, "x/1")
    delete_key(root, "x/1")
    assert list_keys(root) == ["linked/x/1", "x.json"]
    remove_array(root)
    assert list_keys(root) == []
    assert children(parent_of(root)) == ["at-other"]


def test_what_only_an_object_store_does(bucket: Any) -> None:
    with pytest.raises(StoreError, match="whole bucket"):
        remove_array(bucket.url())
    write_key(bucket.url("a"), "zarr.json", b"{}")
    write_key(bucket.url("a"), "c/0", b"1")
    copy_tree(bucket.url("a"), bucket.url("b"))
    assert bucket.listing("b") == ["c/0", "zarr.json"]
    assert bucket.puts()[-1] == "b/zarr.json"


def test_a_manifest_finds_every_change(root: str) -> None:
    for key in ("a", "b/c"):
        write_key(root, key, key.encode())
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        check_manifest(root)
    write_manifest(root)
    check_manifest(root)
    for change, expected in (
        (lambda: write_key(root, "a", b"other"), "a of .* is damaged"),
        (lambda: delete_key(root, "a"), "a of .* is missing"),
        (lambda: (write_key(root, "a", b"a"), write_key(root, "d", b"")), "d of .* is not in its manifest"),
    ):
        change()
        with pytest.raises(StoreError, match=expected):
            check_manifest(root)


# --- a fence ----------------------------------------------------------------------------------------------------------


def refuse() -> None:
    raise LockedError("taken over")


WRITES: dict[str, Callable[[Path], Any]] = {
    "a document": lambda folder: write_json(str(folder), "a.json", {}),
    "a new document": lambda folder: create_json(str(folder), "b.json", {}),
    "a file": lambda folder: write_file(folder / "a", b"1"),
    "a removal": lambda folder: remove_array(folder / "kept"),
    "a document less": lambda folder: delete_key(folder / "kept", "zarr.json"),
    "rows": lambda folder: ChunkArray.open(str(folder / "kept")).write((0, 0), np.ones((2, 2))),
}


# --- locations --------------------------------------------------------------------------------------------------------

MINIO = StorageSettings(endpoint_url="http://127.0.0.1:9000", region="eu-1", allow_http=True)
FULL = "s3://bucket/runs/demo?endpoint_url=http://127.0.0.1:9000&region=eu-1&allow_http=true"


def test_an_address_round_trips() -> None:
    assert parse_address(FULL) == Address("bucket", "runs/demo", MINIO)
    assert str(parse_address(FULL)) == FULL
    assert str(parse_address("s3://bucket/")) == "s3://bucket"
    assert change_settings("s3://bucket/runs/demo", StorageSettings(), MINIO) == FULL
    assert change_settings(FULL, StorageSettings(), StorageSettings(region="other")) == FULL
    assert change_settings("/a/path", StorageSettings(), MINIO) == "/a/path"
    assert change_settings(FULL, MINIO, StorageSettings()) == "s3://bucket/runs/demo"
    assert change_settings(FULL, StorageSettings(region="other"), StorageSettings()) == FULL


@pytest.mark.parametrize("base", ["s3://bucket/a/", "/x/a/"])
def test_parts_of_a_location(base: str) -> None:
    query = "?region=eu-1" if base.startswith("s3") else ""
    below, short = join(base + query, "b", "c.zarr"), base.rstrip("/") + query
    assert below == base + "b/c.zarr" + query
    assert (name_of(below), parent_of(parent_of(below)), relative_to(below, short)) == ("c.zarr", short, "b/c.zarr")
    assert is_below(below, short)
    assert is_below(short, base + query)
    assert not is_below(base.rstrip("/") + "b" + query, short)
    assert parent_of("s3://bucket?region=x") == parent_of("s3://bucket/a?region=x") == "s3://bucket?region=x"
    assert (parent_of("/a"), parent_of("a"), name_of("a")) == ("/", ".", "a")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://user:hunter2@bucket/a", "user or a password"),
        ("s3://AKIAhunter2@bucket/a", "user or a password"),
        ("s3://bucket/a?X-Amz-Signature=hunter2", "something else than endpoint_url, region"),
        ("s3://bucket/a?hunter2", "something else than"),
        ("s3://bucket/a?endpoint_url=https://user:hunter2@host", "user or a password"),
        ("s3://bucket/a?endpoint_url=https://hunter2@host", "user or a password"),
        ("gs://user:hunter2@bucket/a", "user or a password"),
        ("gs://bucket/a", "gs:// is not supported"),
        ("s3:///a", "names no bucket"),
        ("s3://bucket/a#b", "a #"),
        ("s3://bucket/a?allow_http=yes", "neither true nor false"),
        ("s3://bucket/a?endpoint_url=http://host", "without encryption"),
        ("s3://bucket/a?endpoint_url=host", "an address such as"),
        ("s3://[/a", "not a valid address"),
    ],
)
def test_what_is_no_address_is_refused_and_no_credential_repeated(url: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
        parse_address(url)
    assert "hunter2" not in str(caught.value)


def test_one_creates_and_one_swaps(root: str) -> None:
    first = create_json(root, "lease.json", {"token": "a"})
    assert first is not None
    assert create_json(root, "lease.json", {"token": "b"}) is None
    assert read_versioned(root, "lease.json") == Versioned({"token": "a"}, first)
    assert swap_json(root, "none.json", {"token": "d"}, first) is None
    with ThreadPoolExecutor(8) as pool:
        versions = list(pool.map(lambda name: swap_json(root, "lease.json", {"token": name}, first), range(8)))
    ((winner, version),) = [(name, version) for name, version in enumerate(versions) if version is not None]
    assert read_json(root, "lease.json") == {"token": winner}
    if "://" not in root:
        assert swap_json(root, "lease.json", None, first) is None
        assert swap_json(root, "lease.json", None, version) is not None
        assert children(root) == []


@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_behind_a_closed_fence(write: str, tmp_path: Path) -> None:
    ChunkArray.create(str(tmp_path / "kept"), "", shape=(2, 2), chunks=(2, 2))
    before = list_keys(tmp_path)
    # the one around it is asked too
    with fenced(refuse), fenced(lambda: None), pytest.raises(LockedError, match="taken over"):
        WRITES[write](tmp_path)
    assert list_keys(tmp_path) == before
    check_fence()
