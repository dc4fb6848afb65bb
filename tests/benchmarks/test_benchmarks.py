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

from tests.benchmarks.__main__ import FACTORISATION
from tests.benchmarks.harness import (
    Comparison,
    Contender,
    Problem,
    Run,
    contenders,
    judge_answers,
    run_in_turns,
    run_once,
)
from tests.benchmarks.processes import clean_environment, run_sampled
from tests.benchmarks.tables import comparison_rows, comparison_table, factorisation_rows, factorisation_table

PROBLEM = Problem(n=600, tile_size=128)
DKRR, SKLEARN, DASK = "dkrr", "scikit-learn, one BLAS thread", "dask.array.linalg.solve"


def crash(**_: Any) -> dict[str, Any]:
    """A contender that ends as OpenBLAS does where its threads overrun a buffer."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    known = contenders()
    unequal = replace(known[SKLEARN], name="another alpha", overrides={"alpha": 2 * PROBLEM.alpha})
    broken = Contender(name="broken", function="tests.benchmarks.test_benchmarks:crash")
    turns = [known[DKRR], known[SKLEARN], broken, known[DASK], unequal, known[SKLEARN], broken]
    return run_in_turns(PROBLEM, turns, tmp_path_factory.mktemp("benchmark"))


def text(table: Any) -> str:
    console = Console(width=200, file=StringIO())
    console.print(table)
    return console.file.getvalue()


@pytest.mark.thorough
def test_every_contender_has_a_row(comparison: Comparison) -> None:
    rows = {row["contender"]: row for row in comparison_rows(comparison)}
    assert list(rows) == [DKRR, SKLEARN, "broken", DASK, "another alpha"]
    for name in (DKRR, SKLEARN, DASK):
        row = rows[name]
        assert row["status"] == "ok"
        assert row["difference"] < 1e-9
        assert row["seconds"] > 0
        assert row["time_ratio"] == pytest.approx(rows[DKRR]["seconds"] / row["seconds"])
        assert row["memory_ratio"] == pytest.approx(rows[DKRR]["peak_bytes"] / row["peak_bytes"])
    assert len(rows[SKLEARN]["all_seconds"]) == 2
    for name in (DKRR, DASK):
        assert 0 < rows[name]["start_seconds"] < rows[name]["seconds"]


@pytest.mark.thorough
def test_memory_is_that_of_the_whole_tree(comparison: Comparison) -> None:
    rows = {row["contender"]: row for row in comparison_rows(comparison)}
    kinds = rows[DKRR]["peak_bytes_by_kind"]
    assert {"command", "nanny", "worker"} <= set(kinds)
    # two workers and two nannies beside the command, each a Python with NumPy
    assert rows[DKRR]["peak_bytes"] > kinds["command"] + 2 * 30e6
    assert set(rows[SKLEARN]["peak_bytes_by_kind"]) == {"command"}


@pytest.mark.thorough
def test_unequal_work_is_rejected(comparison: Comparison) -> None:
    (run,) = comparison.rejected
    assert run.contender.name == "another alpha"
    assert run.difference is not None
    assert run.difference > 1e-6
    row = next(row for row in comparison_rows(comparison) if row["contender"] == "another alpha")
    assert row["seconds"] is None
    assert row["time_ratio"] is None
    assert "rejected: answers differ by" in text(comparison_table(comparison))


@pytest.mark.thorough
def test_a_crash_is_shown_and_the_fastest_that_ran_is_marked(comparison: Comparison) -> None:
    assert [run.status for run in comparison.runs if run.contender.name == "broken"] == ["crashed (SIGSEGV)"]
    shown = text(comparison_table(comparison))
    assert "crashed (SIGSEGV)" in shown
    best = comparison.fastest("sklearn")
    assert best is not None
    assert best.name == SKLEARN
    assert f"{SKLEARN} *" in shown


def answered(name: str, family: str, answer: Any) -> Run:
    return Run(Contender(name=name, function="", family=family), "ok", {"seconds": 1.0}, answer, 1, {})


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
    comparison = Comparison(PROBLEM, runs)
    assert comparison.fastest("dkrr") is None
    assert comparison.status(runs[1].contender) == "crashed (SIGSEGV)"


@pytest.mark.thorough
def test_factorisation_against_gemm(tmp_path: Path) -> None:
    PROBLEM.write(tmp_path)
    short = replace(FACTORISATION, overrides={"gemm_seconds": 0.1})
    run = run_once(short, PROBLEM, tmp_path)
    assert run.status == "ok"
    (row,) = factorisation_rows([run])
    assert row["flops_per_second"] == pytest.approx(PROBLEM.n**3 / 3 / row["seconds"])
    assert row["gemm_flops_per_second"] == pytest.approx((row["gemm_before"] + row["gemm_after"]) / 2)
    # 15 tiles of 128 rows cost more to schedule than to compute
    assert 0 < row["ratio"] < 1
    assert row["gemm_before"] > 1e9
    assert "on_the_fly" in text(factorisation_table(PROBLEM.n, [run]))


GRANDCHILD = """
import subprocess, sys, time
program = "import time; held = bytearray({size}); held[::4096] = b'x' * len(held[::4096]); time.sleep(0.6)"
subprocess.run([sys.executable, "-c", program], check=True)
"""


@pytest.mark.thorough
def test_the_sampler_sees_what_a_grandchild_holds(tmp_path: Path) -> None:
    def peak(size: int) -> int:
        command = [sys.executable, "-c", GRANDCHILD.replace("{size}", str(size))]
        done = run_sampled(command, folder=tmp_path, timeout=60)
        assert done.status == "ok"
        assert done.memory.peak_by_kind()["command"] < 40e6  # the parent holds nothing
        return done.memory.total_peak_bytes

    assert peak(200_000_000) - peak(0) == pytest.approx(200e6, abs=20e6)


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
