"""The environment that worker processes need before NumPy loads: one BLAS thread, and the fastest BLAS kernel.

OpenBLAS reads its variables once, when it is loaded, so they must be set before the process starts. The wheels of NumPy
and SciPy fall back to AVX2 kernels on CPUs that are newer than their OpenBLAS, at about half the speed of the AVX-512
kernels; ``OPENBLAS_CORETYPE=SkylakeX`` is recommended there, after a process that uses it has passed the self-test.

Cost: nothing where OpenBLAS already uses an AVX-512 kernel; otherwise one Python process, 0.3 s, once per process.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from dkrr.engine.selftest import blas_libraries

__all__ = [
    "cpu_count",
    "cpu_flags",
    "environment_lines",
    "recommended_coretype",
    "subprocess_environment",
    "worker_environment",
]

logger = logging.getLogger("dkrr.engine.environment")

CORETYPE = "OPENBLAS_CORETYPE"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})  # what SkylakeX kernels use
_AVX2_KERNELS = frozenset({"haswell", "zen"})
_AVX512_KERNEL = "SkylakeX"
_CPUINFO = Path("/proc/cpuinfo")
_TEST_SECONDS = 30.0


def cpu_count() -> int:
    """CPUs that this process may use, as Dask counts them: affinity and control group quota respected."""
    from dask.system import CPU_COUNT

    return int(CPU_COUNT)


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the CPU, as Linux names them; empty on other systems and other processors."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())


def recommended_coretype(flags: Collection[str], libraries: Collection[Mapping[str, Any]]) -> str | None:
    """The OpenBLAS core type that is worth setting on this CPU.

    Parameters
    ----------
    flags
        Instruction sets of the CPU, from :func:`cpu_flags`.
    libraries
        The BLAS libraries in use without the variable, from :func:`dkrr.engine.selftest.blas_libraries`.

    Returns
    -------
    coretype : str or None
        "SkylakeX" where the CPU has AVX-512, an AVX2 kernel is in use, and a process with the variable set uses the
        kernel and computes right numbers; None otherwise.
    """
    slow = [
        library
        for library in libraries
        if library["internal_api"] == "openblas" and str(library.get("architecture")).lower() in _AVX2_KERNELS
    ]
    if not slow or not set(flags) >= _AVX512:
        return None
    problem = _problem_with(_AVX512_KERNEL)
    if problem:
        logger.warning(
            "the CPU has AVX-512 but OpenBLAS uses %s kernels, and %s=%s is not usable: %s",
            slow[0]["architecture"],
            CORETYPE,
            _AVX512_KERNEL,
            problem,
        )
        return None
    return _AVX512_KERNEL


def _problem_with(coretype: str) -> str:
    """Run the self-test in a process that uses ``coretype``; "" when it is in use and right."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "dkrr.engine.selftest"],
            env={**subprocess_environment(), **ONE_THREAD, CORETYPE: coretype},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TEST_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the self-test did not end within {_TEST_SECONDS:.0f} s"
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [""]
        return f"the self-test ended with status {done.returncode} {reason[0]}".rstrip()
    outcome = json.loads(done.stdout)
    if outcome["failures"]:
        return "; ".join(outcome["failures"])
    used = {str(item["architecture"]) for item in outcome["libraries"] if item["internal_api"] == "openblas"}
    return "" if used == {coretype} else f"OpenBLAS used {', '.join(sorted(used))} instead"


@lru_cache(maxsize=1)
def _coretype_here() -> str | None:
    flags = cpu_flags()
    # SciPy is loaded for the look at its BLAS only where the answer can matter
    return recommended_coretype(flags, blas_libraries()) if flags >= _AVX512 else None


def worker_environment() -> dict[str, str]:
    """Variables to set before a worker process starts.

    One BLAS thread a process, whatever the caller's own setting: threaded OpenBLAS is slower per core on tiles and has
    returned wrong numbers. ``OPENBLAS_CORETYPE`` where :func:`recommended_coretype` says so; a value that the user set
    is left alone.
    """
    variables = dict(ONE_THREAD)
    if CORETYPE not in os.environ:
        coretype = _coretype_here()
        if coretype is not None:
            variables[CORETYPE] = coretype
    return variables


def subprocess_environment() -> dict[str, str]:
    """The environment of this process, with its import path: a child imports what this process can import."""
    path = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)  # "" is the current folder
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def environment_lines() -> list[str]:
    """``worker_environment()`` as shell lines ``export NAME=value``, for workers that others start."""
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(worker_environment().items())]
