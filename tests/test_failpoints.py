"""Failpoints fire exactly when their rule says so, and cost nothing otherwise."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dkrr.store import failpoints
from dkrr.store.failpoints import Failpoints, failpoint


def visits_that_fail(points: Failpoints, site: str, count: int) -> list[int]:
    failed = []
    for visit in range(1, count + 1):
        try:
            points.hit(site)
        except OSError:
            failed.append(visit)
    return failed


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_unset_does_nothing() -> None:
    assert failpoints._active is None
    block = np.ones((3, 2))
    failpoint("chunk.before_write", block)
    assert (block == 1).all()


def test_exactly_the_third_visit_fails() -> None:
    assert visits_that_fail(Failpoints("chunk.after_read:@3:eio"), "chunk.after_read", 10) == [3]


def test_other_sites_do_not_count() -> None:
    points = Failpoints("a.x:@2:eio")
    points.hit("a.y")
    points.hit("a.x")
    with pytest.raises(OSError, match=r"a\.x"):
        points.hit("a.x")


def test_a_star_matches_sites_of_that_prefix() -> None:
    points = Failpoints("chunk.*:1:eio")
    points.hit("tile.before_read")
    with pytest.raises(OSError, match="before_read"):
        points.hit("chunk.before_read")


def test_probability_is_reproduced_by_the_seed() -> None:
    first = visits_that_fail(Failpoints("seed=7;s:0.2:eio"), "s", 500)
    again = visits_that_fail(Failpoints("seed=7;s:0.2:eio"), "s", 500)
    other = visits_that_fail(Failpoints("seed=8;s:0.2:eio"), "s", 500)
    assert first == again
    assert first != other
    assert 60 < len(first) < 140
    assert visits_that_fail(Failpoints("s:0:eio"), "s", 100) == []


@pytest.mark.parametrize(("action", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC), ("estale", errno.ESTALE)])
def test_os_errors_carry_their_number_and_the_seed(action: str, number: int) -> None:
    with pytest.raises(OSError, match="seed 5") as caught:
        Failpoints(f"seed=5;s:1:{action}").hit("s")
    assert caught.value.errno == number


def test_memory_error() -> None:
    with pytest.raises(MemoryError, match="failpoint s"):
        Failpoints("s:1:memoryerror").hit("s")


def test_sleep_takes_its_seconds() -> None:
    started = time.perf_counter()
    Failpoints("s:@1:sleep=0.05").hit("s")
    assert time.perf_counter() - started >= 0.05


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_nan_spoils_one_element(dtype: str) -> None:
    block = np.ones((5, 4), dtype)
    Failpoints("s:1:nan").hit("s", block)
    assert np.isnan(block).sum() == 1


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_bitflip_changes_one_bit(dtype: str) -> None:
    block = np.ones((5, 4), dtype)
    before = block.copy()
    Failpoints("s:1:bitflip").hit("s", block)
    changed = np.bitwise_xor(block.view("u1"), before.view("u1"))
    assert np.unpackbits(changed).sum() == 1


@pytest.mark.parametrize("action", ["nan", "bitflip"])
def test_array_actions_need_an_array(action: str) -> None:
    with pytest.raises(ValueError, match="hands over no array"):
        Failpoints(f"s:1:{action}").hit("s")


@pytest.mark.whole
@pytest.mark.parametrize(
    "text",
    [
        "s:1", ":1:eio", "s:1:eio:x", "s:often:eio", "s:1.5:eio", "s:-1:eio", "s:nan:eio", "s:@0:eio", "s:@x:eio",
        "s:1:explode", "s:1:sleep", "s:1:sleep=long", "s:1:sleep=-1", "s:1:eio=3", "seed=x;s:1:eio",
    ],
)  # fmt: skip
def test_a_mistyped_specification_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        Failpoints(text)


def test_once_fires_once_among_all_who_share_the_folder(tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    assert visits_that_fail(Failpoints("s:1:eio;t:1:eio", once), "s", 5) == [1]
    second_process = Failpoints("s:1:eio;t:1:eio", once)
    assert visits_that_fail(second_process, "s", 5) == []
    assert visits_that_fail(second_process, "t", 5) == [1]


def test_a_killed_process_does_not_die_again(tmp_path: Path) -> None:
    code = "from dkrr.store.failpoints import failpoint; failpoint('s'); print('alive')"
    environment = {"DKRR_FAILPOINTS": "s:1:sigkill", "DKRR_FAILPOINTS_ONCE": str(tmp_path / "once")}
    first = run_python(code, **environment)
    assert first.returncode == -signal.SIGKILL
    assert "alive" not in first.stdout
    second = run_python(code, **environment)
    assert second.returncode == 0
    assert "alive" in second.stdout


def test_a_stopped_process_goes_on_after_sigcont() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "from dkrr.store.failpoints import failpoint; failpoint('s')"],
        env={**os.environ, "DKRR_FAILPOINTS": "s:1:sigstop"},
        stderr=subprocess.DEVNULL,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()


def test_a_set_variable_is_announced_on_import() -> None:
    result = run_python("import dkrr.store.failpoints", DKRR_FAILPOINTS="seed=7;s:0.5:eio")
    assert result.returncode == 0
    assert "faults will happen on purpose" in result.stderr
    assert "seed=7;s:0.5:eio" in result.stderr


def test_only_the_standard_library_is_imported() -> None:
    code = "import sys, dkrr.store.failpoints; print(sorted({'numpy', 'zarr', 'dask', 'scipy'} & set(sys.modules)))"
    assert run_python(code).stdout.strip() == "[]"
