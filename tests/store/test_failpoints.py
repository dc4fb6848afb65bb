"""Failpoints fire exactly when their rule says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr.store.failpoints import Failpoints


def visits_that_fail(specification: str, count: int, site: str = "a.x", once: str | None = None) -> list[int]:
    points, failed = Failpoints(specification, once), []
    for visit in range(1, count + 1):
        try:
            points.hit("a.other")
            points.hit(site)
        except OSError:
            failed.append(visit)
    return failed


def test_when_a_rule_fires(tmp_path: Path) -> None:
    assert visits_that_fail("a.x:@3:eio", 10) == [3]
    assert visits_that_fail("b.*:1:eio;a.*:@4:eio", 10, site="a.z") == [2]
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, once=str(tmp_path / "once")) == [1]
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, once=str(tmp_path / "once")) == []


def test_arrays_are_spoilt() -> None:
    block = np.ones((5, 4))
    Failpoints("s:1:nan").hit("s", block)
    assert np.isnan(block).sum() == 1
    before = block.copy()
    Failpoints("s:1:bitflip").hit("s", block)
    assert np.unpackbits(np.bitwise_xor(block.view("u1"), before.view("u1"))).sum() == 1


@pytest.mark.parametrize("text", ["s:1", ":1:eio", "s:often:eio", "s:@0:eio", "s:1:explode", "s:1:eio;seed=3"])
def test_a_mistyped_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        Failpoints(text)
