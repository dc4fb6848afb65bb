"""What workers must have in their environment, and that a core type is recommended only after it was proved right."""

from __future__ import annotations

import platform
import shlex
import subprocess
from typing import Any

import pytest

from dkrr.engine import machine as environment

AVX512 = frozenset({"fpu", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def library(architecture: str | None, internal_api: str = "openblas") -> dict[str, Any]:
    return {"user_api": "blas", "internal_api": internal_api, "architecture": architecture, "num_threads": 1}


HASWELL, ZEN, SKYLAKEX, MKL = library("Haswell"), library("Zen"), library("SkylakeX"), library(None, "mkl")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    environment._coretype_here.cache_clear()
    yield
    environment._coretype_here.cache_clear()


def machine(
    monkeypatch: pytest.MonkeyPatch, flags: frozenset[str], libraries: list[dict[str, Any]], problem: str
) -> None:
    monkeypatch.setattr(environment, "cpu_flags", lambda: flags)
    monkeypatch.setattr(environment, "blas_libraries", lambda: libraries)
    monkeypatch.setattr(environment, "_problem_with", lambda coretype: problem)


@pytest.mark.parametrize(
    ("flags", "libraries", "problem", "expected"),
    [
        (AVX512, [HASWELL, HASWELL], "", "SkylakeX"),
        (AVX512, [ZEN, ZEN], "", "SkylakeX"),
        (AVX512, [SKYLAKEX, HASWELL], "", "SkylakeX"),  # NumPy's OpenBLAS is newer than SciPy's
        (AVX512, [SKYLAKEX, SKYLAKEX], "", None),
        (AVX512, [library("Cooperlake")], "", None),
        (AVX512, [MKL], "", None),
        (AVX512, [library("haswell", "blis")], "", None),
        (AVX512, [], "", None),
        (AVX512 - {"avx512vl"}, [HASWELL], "", None),
        (frozenset(), [HASWELL], "", None),
        (AVX512, [HASWELL], "wrong numbers", None),
    ],
)
def test_recommended_coretype(
    monkeypatch: pytest.MonkeyPatch,
    flags: frozenset[str],
    libraries: list[dict[str, Any]],
    problem: str,
    expected: str | None,
) -> None:
    machine(monkeypatch, flags, libraries, problem)
    assert environment.recommended_coretype(flags, libraries) == expected
    variables = dict(ONE_THREAD) if expected is None else {**ONE_THREAD, "OPENBLAS_CORETYPE": expected}
    assert environment.worker_environment() == variables


def test_lines_are_what_a_shell_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, AVX512, [ZEN], "")
    lines = environment.environment_lines()
    assert [shlex.split(line)[0] for line in lines] == ["export"] * 4
    script = "\n".join([*lines, "env"])
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    exported = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert {**ONE_THREAD, "OPENBLAS_CORETYPE": "SkylakeX"}.items() <= exported.items()


# --- the test in a process of its own ---------------------------------------------------------------------------------

x86 = pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="needs an x86-64 CPU")


@x86
def test_a_core_type_that_openblas_does_not_take_is_named() -> None:
    assert "instead" in environment._problem_with("Pentium9")


# --- known answers ----------------------------------------------------------------------------------------------------


def test_blas_here_is_right() -> None:
    assert environment.self_test() == []
    assert {item["user_api"] for item in environment.blas_libraries()} == {"blas"}
