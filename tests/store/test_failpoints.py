"""Failpoints fire exactly when their rule says so, and cost nothing otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.store import failpoints
from dkrr.store.failpoints import Failpoints, failpoint


def visits_that_fail(specification: str, count: int, site: str = "a.x", once: str | None = None) -> list[int]:
    points, failed = Failpoints(specification, once), []
    for visit in range(1, count + 1):
        try:
            points.hit("a.other")
            points.hit(site)
        except OSError:
            failed.append(visit)
    return failed


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_when_a_rule_fires(tmp_path: Path) -> None:
    assert failpoints._active is None
    failpoint("chunk.before_write", np.ones((3, 2)))
    assert visits_that_fail("a.x:@3:eio", 10) == [3]
    assert visits_that_fail("a.x:0:eio", 10) == []
    assert visits_that_fail("b.*:1:eio;a.*:@4:eio", 10, site="a.z") == [2]
    first = visits_that_fail("seed=7;a.x:0.2:eio", 500)
    assert first == visits_that_fail("seed=7;a.x:0.2:eio", 500)
    assert first != visits_that_fail("seed=8;a.x:0.2:eio", 500)
    assert 60 < len(first) < 140
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, once=str(tmp_path / "once")) == [1]
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, once=str(tmp_path / "once")) == []
    assert visits_that_fail("a.x:1:eio;t:1:eio", 5, site="t", once=str(tmp_path / "once")) == [1]


@pytest.mark.parametrize(
    ("action", "error", "number"),
    [
        ("eio", OSError, errno.EIO),
        ("enospc", OSError, errno.ENOSPC),
        ("estale", OSError, errno.ESTALE),
        ("memoryerror", MemoryError, None),
        ("nan", ValueError, None),
        ("bitflip", ValueError, None),
    ],
)
def test_errors(action: str, error: Any, number: int | None) -> None:
    with pytest.raises(error, match="failpoint s") as caught:
        Failpoints(f"seed=5;s:1:{action}").hit("s")
    assert getattr(caught.value, "errno", None) == number


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_arrays_are_spoilt(dtype: str) -> None:
    block = np.ones((5, 4), dtype)
    Failpoints("s:1:nan").hit("s", block)
    assert np.isnan(block).sum() == 1
    before = block.copy()
    Failpoints("s:1:bitflip").hit("s", block)
    assert np.unpackbits(np.bitwise_xor(block.view("u1"), before.view("u1"))).sum() == 1
    started = time.perf_counter()
    Failpoints("s:@1:sleep=0.05").hit("s")
    assert time.perf_counter() - started >= 0.05


@pytest.mark.parametrize(
    "text",
    [
        "s:1", ":1:eio", "s:1:eio:x", "s:often:eio", "s:1.5:eio", "s:-1:eio", "s:nan:eio", "s:@0:eio", "s:@x:eio",
        "s:1:explode", "s:1:sleep", "s:1:sleep=long", "s:1:sleep=-1", "s:1:eio=3", "seed=x;s:1:eio", "s:1:eio;seed=3",
    ],
)  # fmt: skip
def test_a_mistyped_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        Failpoints(text)


def test_processes_that_are_killed_and_stopped(tmp_path: Path) -> None:
    code = "from dkrr.store.failpoints import failpoint; failpoint('s'); print('alive')"
    environment = {"DKRR_FAILPOINTS": "s:1:sigkill", "DKRR_FAILPOINTS_ONCE": str(tmp_path / "once")}
    first = run_python(code, **environment)
    assert (first.returncode, first.stdout) == (-signal.SIGKILL, "")
    assert "faults will happen on purpose: s:1:sigkill" in first.stderr
    second = run_python(code, **environment)
    assert (second.returncode, second.stdout) == (0, "alive\n")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "DKRR_FAILPOINTS": "s:1:sigstop"},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
