"""The harness on small problems: its tables, and that unequal work, crashes and hidden memory do not pass."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.benchmarks.__main__ import fit_table
from tests.benchmarks.contenders import contenders
from tests.benchmarks.harness import Contender, Problem, Run, fastest, figures, judge_answers, run_in_turns
from tests.benchmarks.processes import clean_environment, run_sampled

PROBLEM = Problem(n=600, tile_size=128)
DKRR, SKLEARN, DASK = "dkrr", "scikit-learn, one BLAS thread", "dask.array.linalg.solve"


def crash(**_: Any) -> dict[str, Any]:
    """A contender that ends as OpenBLAS does where its threads overrun a buffer."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def text(table: Any) -> str:
    console = Console(width=200, file=StringIO())
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.thorough
def test_fits_side_by_side(tmp_path: Path) -> None:
    known = contenders()
    unequal = replace(known[SKLEARN], name="another alpha", overrides={"alpha": 2 * PROBLEM.alpha})
    broken = Contender(name="broken", function="tests.benchmarks.test_benchmarks:crash")
    turns = [known[DKRR], known[SKLEARN], broken, known[DASK], unequal, known[SKLEARN], broken]
    rows = figures(run_in_turns(PROBLEM, turns, tmp_path))
    assert list(rows) == [DKRR, SKLEARN, "broken", DASK, "another alpha"]
    for name in (DKRR, SKLEARN, DASK):
        assert rows[name]["status"] == "ok"
        assert rows[name]["difference"] < 1e-9
    assert len(rows[SKLEARN]["all_seconds"]) == 2
    for name in (DKRR, DASK):
        assert 0 < rows[name]["start_seconds"] < rows[name]["seconds"]
    # memory is that of the whole tree: two workers and two nannies beside the command, each a Python with NumPy
    kinds = rows[DKRR]["peak_by_kind"]
    assert {"command", "nanny", "worker"} <= set(kinds)
    assert rows[DKRR]["peak_bytes"] > kinds["command"] + 2 * 30e6
    assert set(rows[SKLEARN]["peak_by_kind"]) == {"command"}
    assert rows["another alpha"]["status"].startswith("rejected: answers differ by")
    assert rows["another alpha"]["seconds"] is None
    assert rows["broken"]["status"] == "crashed (SIGSEGV)"
    assert fastest(rows, "sklearn") == SKLEARN
    shown = text(fit_table(PROBLEM, rows))
    assert all(part in shown for part in (*rows, "rejected: answers differ by", "crashed (SIGSEGV)"))


def answered(name: str, family: str, answer: Any) -> Run:
    return Run(Contender(name=name, function="", family=family), "ok", {"seconds": 1.0}, answer)


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (np.array([1.0, 2.0 + 1e-6]), "ok"),
        (np.array([1.0, 2.0 + 4e-6]), "rejected: answers differ by 2.0e-06"),
        (np.array([1.0, np.nan]), "rejected: answers differ by nan"),
        (np.array([1.0]), "rejected: an answer of shape (1,)"),
        (None, "rejected: an answer of shape None"),
    ],
)
def test_answers_must_agree_to_one_part_in_a_million(answer: Any, status: str) -> None:
    runs = [answered("a", "dkrr", answer), answered("b", "sklearn", np.array([1.0, 2.0]))]
    judge_answers(runs)
    assert runs[0].status.startswith(status)
    assert runs[1].status == "ok"


def test_a_time_counts_only_when_every_turn_was_good() -> None:
    runs = [answered("a", "sklearn", np.ones(2)), answered("b", "dkrr", np.ones(2)), answered("b", "dkrr", np.ones(2))]
    runs[2].status = "crashed (SIGSEGV)"
    judge_answers(runs)
    rows = figures(runs)
    assert (rows["b"]["status"], rows["b"]["seconds"]) == ("crashed (SIGSEGV)", None)
    assert fastest(rows, "dkrr") is None


def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(TimeoutError, match="did not end within 1 s"):
        run_sampled([sys.executable, "-c", program], folder=tmp_path, timeout=1)
    assert not list(tmp_path.iterdir())


def test_contenders_run_with_a_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # what the test session sets for itself
    environment = clean_environment({"OPENBLAS_CORETYPE": "Haswell"})
    assert "OPENBLAS_NUM_THREADS" not in environment
    assert environment["OPENBLAS_CORETYPE"] == "Haswell"
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    with pytest.raises(RuntimeError, match="unset it"):
        contenders()
