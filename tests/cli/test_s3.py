"""Commands take addresses wherever they take paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.store.files import delete_key, write_key
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


def dkrr(*arguments: str) -> Any:
    result = CliRunner().invoke(main, [*arguments])
    assert CANARY_KEY not in result.output
    assert CANARY_SECRET not in result.output
    return result


def test_ingest_and_info(bucket: Bucket) -> None:
    data = bucket.url("data/d.zarr")
    done = dkrr("ingest", "generate:friedman?n=300&d=5&seed=0", data)
    assert (done.exit_code, "300" in done.stdout) == (0, True), done.output
    assert dkrr("info", data, "--verify").exit_code == 0
    delete_key(data, "X/c/0/0")
    found = dkrr("info", data, "--verify")
    assert (found.exit_code, "missing" in found.stdout) == (4, True), found.output
    assert "is not a data set" in dkrr("info", bucket.url("none")).stderr


def test_gc(bucket: Bucket, tmp_path: Path) -> None:
    key = "a" * 40
    write_key(bucket.url("runs/store/factors", f"{key}.zarr"), "c/0/0", bytes(2048))
    job = tmp_path / "job.toml"
    storage = "".join(
        f"{name} = {str(value).lower() if value is True else repr(value)}\n" for name, value in bucket.storage().items()
    )
    job.write_text(f'[data]\npath = "x.npy"\n[output]\ndirectory = "{bucket.plain("runs/a")}"\n[storage]\n{storage}')
    for place in (bucket.url("runs"), bucket.url("runs/store"), str(job)):
        listed = dkrr("gc", place, "--older-than", "-60")
        assert (listed.exit_code, "2 KiB can be deleted" in listed.stdout) == (0, True), listed.output
    assert dkrr("gc", bucket.url("runs")).stdout == "nothing to delete\n"
    assert "deleted 2 KiB" in dkrr("gc", bucket.url("runs"), "--older-than", "-60", "--yes").stdout
    # the released lock of what was removed goes with the next collection: an object has no conditional removal
    assert [name for name in bucket.listing() if not name.endswith(f"{key}.zarr.lock")] == []
    assert dkrr("gc", bucket.url("runs"), "--older-than", "-60", "--yes").exit_code == 0
    assert bucket.listing() == []


@pytest.mark.parametrize("command", [["info"], ["gc"], ["status"], ["list"]])
def test_a_credential_on_the_command_line_is_not_repeated(command: list[str]) -> None:
    result = dkrr(*command, "s3://user:hunter2@bucket/runs/a")
    assert result.exit_code == 2, result.output
    assert "hunter2" not in result.output


def test_nobody_there(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    from dkrr.store import objects

    monkeypatch.setattr(objects, "MAX_RETRIES", 1)
    objects._client.cache_clear()
    result = dkrr("info", bucket.url("a").replace(f":{bucket.server.port}", ":9"))
    objects._client.cache_clear()
    assert result.exit_code == 4
    assert "check endpoint, region and network" in result.stderr
