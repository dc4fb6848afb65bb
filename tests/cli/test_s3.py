"""Commands take addresses wherever they take paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from dkrr.cli import main
from dkrr.store.files import write_key
from tests.s3 import CANARY_KEY, CANARY_SECRET, Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


def dkrr(*arguments: str) -> Any:
    result = CliRunner().invoke(main, [*arguments])
    assert CANARY_KEY not in result.output
    assert CANARY_SECRET not in result.output
    return result


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
