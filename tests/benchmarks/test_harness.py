"""The harness on small problems: that unequal work, crashes and hidden memory do not pass, nor a bar that fails."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import harness
from tests.benchmarks.harness import Contender, Judge, Problem, run_in_turns
from tests.benchmarks.processes import clean_environment, run_sampled


def crash(*_: Any) -> None:
    """A contender that ends as OpenBLAS does where its threads overrun a buffer."""
    os.kill(os.getpid(), signal.SIGSEGV)


def answered(*_: Any, answer: Any) -> dict[str, Any]:
    """A contender that knows the answer."""
    return {"answer": answer, "seconds": 1.0}


def test_answers_must_agree_and_a_time_counts_only_when_every_turn_was_good(tmp_path: Path) -> None:
    right = Contender(name="right", function=answered, options={"answer": [1.0, 2.0]})
    near, far = (replace(right, name=f"{x}", options={"answer": [1.0, 2.0 + x]}) for x in (1e-6, 4e-6))
    other, none = (replace(right, name=f"{x}", options={"answer": x}) for x in ([1.0], [1.0, np.nan]))
    schedule = [right, near, far, other, none, Contender(name="broken", function=crash)]
    rows = run_in_turns(Problem(n=2), [*schedule, replace(near, options=far.options), *schedule], tmp_path)
    said = [row.status.partition(":")[0] for row in rows.values()]
    assert said == ["ok", *["rejected"] * 4, "crashed (SIGSEGV)"]
    assert [len(row.turns) for row in rows.values()] == [2, 2, 1, 1, 1, 0]
    assert rows["right"].seconds == 1.0
    assert rows["1e-06"].seconds == np.inf


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        run_sampled([sys.executable, "-c", program], folder=tmp_path, timeout=1)
    assert not list(tmp_path.iterdir())


def test_memory_of_children_counts(tmp_path: Path) -> None:
    child = "x = bytearray(2 * 10**8); import time; time.sleep(1)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_sampled([sys.executable, "-c", program], folder=tmp_path).total_peak_bytes > 2e8


def test_contenders_run_with_a_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # what the test session sets for itself
    environment = clean_environment({"OPENBLAS_CORETYPE": "Haswell"})
    assert "OPENBLAS_NUM_THREADS" not in environment
    assert environment["OPENBLAS_CORETYPE"] == "Haswell"


@pytest.mark.parametrize(("scale", "verdict"), [(1.0, "FAIL"), (0.1, "not judged at scale 0.1")])
def test_a_bar_that_does_not_hold_fails_and_is_recorded(
    monkeypatch: pytest.MonkeyPatch, scale: float, verdict: str
) -> None:
    monkeypatch.setattr(harness, "SCALE", scale)
    judge = Judge()
    with pytest.raises(AssertionError, match=r"memory: 2 GiB; bar: 1 GiB"):
        judge("memory", "2 GiB", "1 GiB", False)
    try:
        judge("speed", "0.60", "at most 0.45", False, at_full_size=True)
    except AssertionError:
        assert scale == 1
    assert [figure[0] for figure in judge.figures] == ["FAIL", verdict]
    assert harness.table_lines(judge.figures)[0] == f"{'FAIL'.ljust(len(verdict))}  memory  2 GiB  1 GiB"
