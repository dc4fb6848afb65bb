"""Faults on purpose happen exactly when their rule says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dkrr.store.documents import create_json
from dkrr.store.files import read_key, write_key
from tests.faults import failing_at
from tests.hooks.failpoints import Failpoints


def visits_that_fail(specification: str, count: int, once: str | None = None) -> list[int]:
    points, failed = Failpoints(specification, once), []
    for visit in range(1, count + 1):
        try:
            points.hit("a.other")
            points.hit("a.x")
        except OSError:
            failed.append(visit)
    return failed


def test_when_a_rule_fires(tmp_path: Path) -> None:
    assert visits_that_fail("a.x:@3:eio", 10) == [3]
    assert visits_that_fail("b.*:1:eio;a.*:@4:eio", 10) == [2]
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, once=str(tmp_path / "once")) == [1]
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, once=str(tmp_path / "once")) == []


def test_arrays_are_spoilt() -> None:
    block = np.ones((5, 4))
    with failing_at("compute.s:1:nan"):
        sys.audit("dkrr.compute", "s", block)
    assert np.isnan(block).sum() == 1
    before = block.copy()
    Failpoints("s:1:bitflip").hit("s", block)
    assert np.unpackbits(np.bitwise_xor(block.view("u1"), before.view("u1"))).sum() == 1


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


def test_a_process_that_is_started_has_the_faults_of_its_environment(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'a')!r}, 'w')"
    environment = os.environ | {"DKRR_FAILPOINTS": "draft*/a:1:sigkill"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -9


@pytest.mark.parametrize("text", ["s:1", ":1:eio", "s:often:eio", "s:@0:eio", "s:1:explode", "s:1:eio;seed=3"])
def test_a_mistyped_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        Failpoints(text)
