"""Conjugate gradients: iterations and times on the protein set, many alphas in one run, and n = 250,000."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dkrr
from dkrr.engine.cluster import local_cluster
from tests.measure.figures import Judge, scaled
from tests.measure.jobs import fit_command, read_result, run_fit, write_job

pytestmark = [pytest.mark.measure, pytest.mark.timeout(7200)]

KERNEL: dict[str, Any] = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 0.75}}
RANK = 2_000
TOL = 1e-6
MAX_ITERATIONS = 70
MAX_ALPHAS_RATIO = 3.0
MAX_LARGE_SECONDS = 1800.0


@pytest.fixture
def client() -> Iterator[Any]:
    """Two workers of 2 GiB."""
    with local_cluster(workers=2, memory_limit="2GiB") as cluster, Client(cluster) as found:
        yield found


def protein(data_folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Whitened training rows of split 0, a part of them at a smaller scale."""
    table = np.loadtxt(data_folder / "protein" / "data.csv.gz", delimiter=",")
    training = table[np.loadtxt(data_folder / "protein" / "test_mask.csv.gz", delimiter=",", usecols=0) == 0]
    whitened = (training - training.mean(axis=0)) / training.std(axis=0)
    whitened = whitened[: scaled(len(whitened))]
    return np.ascontiguousarray(whitened[:, :-1]), whitened[:, -1].copy()


def timed_fit(x: np.ndarray, y: np.ndarray, **parameters: Any) -> tuple[float, Any]:
    """Wall time of a fit on a running cluster of two workers, and its estimator."""
    estimator = dkrr.KernelRidge(**KERNEL, tol=TOL, **parameters)
    began = time.perf_counter()
    estimator.fit(x, y)
    seconds = time.perf_counter() - began
    print(f"{seconds:.1f} s: {estimator.solution_.message}; {estimator.solution_.seconds}")
    return seconds, estimator


def test_measure_cg_protein(judge: Judge, data_folder: Path, client: Any) -> None:
    x, y = protein(data_folder)
    cg, estimator = timed_fit(x, y, alpha=0.1, solver="cg", solver_params={"rank": min(RANK, len(x) // 10)})
    mixed, direct = timed_fit(x, y, alpha=0.1, solver="cholesky", precision="mixed")
    solution = estimator.solution_
    residual = max(solution.relative_residual)
    judge(
        "cg: protein",
        f"{solution.num_iterations} iterations to {residual:.1e}, {cg:.1f} s; mixed Cholesky {mixed:.1f} s "
        f"({max(direct.solution_.relative_residual):.1e})",
        f"n = {len(x):,}, rank {RANK:,}: at most {MAX_ITERATIONS} iterations to {TOL:g}, less time than mixed",
        solution.num_iterations <= MAX_ITERATIONS and residual <= TOL and cg < mixed,
        at_full_size=True,
    )


def test_measure_cg_alphas(judge: Judge, data_folder: Path, client: Any) -> None:
    x, y = protein(data_folder)
    params = {"rank": min(RANK, len(x) // 10)}
    alphas = np.logspace(-2, 1, 10)
    one, _ = timed_fit(x, y, alpha=float(alphas[0]), solver="cg", solver_params=params)
    ten, estimator = timed_fit(x, np.repeat(y[:, None], 10, axis=1), alpha=alphas, solver="cg", solver_params=params)
    residual = max(estimator.solution_.relative_residual)
    judge(
        "cg: 10 alphas",
        f"{ten / one:.2f} x the smallest alone ({ten:.1f} s, {one:.1f} s), largest residual {residual:.1e}",
        f"0.01 to 10 in one run: at most {MAX_ALPHAS_RATIO}",
        ten <= MAX_ALPHAS_RATIO * one and residual <= TOL,
        at_full_size=True,
    )


@pytest.mark.parametrize("alpha", [250.0, 1.0])
def test_measure_cg_large(judge: Judge, folder: Path, alpha: float) -> None:
    n = scaled(250_000)
    job = write_job(
        folder,
        {
            "data": {"path": f"generate:friedman?n={n}&d=10&seed=0", "standardize": True},
            "model": {"kernel": "rbf", "gamma": 0.05, "alpha": alpha},
            "solver": {"name": "cg", "tol": TOL},
            "cluster": {"workers": 2, "memory_limit": "2GiB"},
            "output": {"directory": "run", "store": "store", "keep": "model"},
        },
    )
    killed, saved = kill_while_it_iterates(job)
    done = run_fit(job, timeout=7000)
    assert done.status == "ok", done.stderr
    result = read_result(job)
    print(json.dumps({key: result[key] for key in ("seconds", "message")}, indent=1))
    residual = max(result["relative_residual"])
    peaks = done.memory.peak_by_kind()
    again = result["seconds"].get("precondition", 0.0)
    began = [int(number) for number in re.findall(r"cg: iteration (\d+)", done.stderr)]
    seconds = killed + done.seconds
    judge(
        f"cg: n = {n:,}, alpha {alpha:g}",
        f"{seconds:.0f} s ({killed:.0f} s before it was killed after iteration {saved or 1}, checkpoint of {saved}; "
        f"then {again:.1f} s for the preconditioner that was there), residual {residual:.1e}, "
        f"worker {peaks['worker'] / 2**20:.0f} MiB; {result['message']}",
        f"residual {TOL:g}, 2 GiB a worker, goes on" + (f", {MAX_LARGE_SECONDS:.0f} s" if alpha == 250.0 else ""),
        residual <= TOL
        and peaks["worker"] < 2 * 2**30
        and again < killed / 10
        and min(began, default=saved + 1) > saved
        and (alpha != 250.0 or seconds <= MAX_LARGE_SECONDS),
        at_full_size=True,
    )


def kill_while_it_iterates(job: Path) -> tuple[float, int]:
    """Kill the command with SIGKILL: seconds it ran, and the iteration of its checkpoint, 0 without one.

    It has finished an iteration; where there are enough of them, it has written a checkpoint.
    """
    began, output = time.perf_counter(), job.parent / "killed.txt"
    with output.open("w") as stderr, subprocess.Popen(fit_command(job), cwd=job.parent, stderr=stderr) as process:
        state: list[Path] = []
        while process.poll() is None and not state:
            time.sleep(0.2)
            state = list((job.parent / "store/solves").glob("**/state/pointer.json"))
            if "cg: iteration 1 of about 2" in output.read_text():
                break
        assert process.poll() is None, f"the fit ended before it was killed: {output.read_text()}"
        process.send_signal(signal.SIGKILL)
    seconds = time.perf_counter() - began
    if not state:
        return seconds, 0
    generation = json.loads(state[0].read_text())["generation"]
    return seconds, int(json.loads((state[0].parent / str(generation) / "state.json").read_text())["iteration"])
