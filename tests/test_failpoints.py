"""Faults on purpose happen exactly when their rule says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from dkrr.store.documents import create_json
from dkrr.store.files import read_key, write_key
from tests.faults import failing_at
from tests.hooks.failpoints import Failpoints


@pytest.mark.parametrize(
    ("verb", "is_there"), [("draft", False), ("write", False), ("written", True), ("link", False), ("read", True)]
)
def test_what_is_done_with_a_key(verb: str, is_there: bool, tmp_path: Path) -> None:
    def act() -> None:
        if verb == "link":
            create_json(tmp_path, "a/b", {})
        else:
            write_key(tmp_path, "a/b", b"1")
            read_key(tmp_path, "a/b")

    with failing_at(f"{verb}*/a/b:1:eio"), pytest.raises(OSError, match=f"failpoint {verb}"):
        act()
    assert (tmp_path / "a/b").exists() == is_there
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize(
    "text", ["*:1", ":1:eio", "cg.tile:1:eio", "*:often:eio", "*:@0:eio", "*:1:explode", "*:1:eio;seed=3"]
)
def test_a_mistyped_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        Failpoints(text)
