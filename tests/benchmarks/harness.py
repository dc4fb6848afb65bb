"""Run contenders side by side on one problem, and let only equal answers count.

Contenders take turns (A B C A B C), so that a machine that slows down slows all of them; a figure is the median of a
contender's turns. One that crashes is shown with its signal and not run again.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.engine.machine import CORETYPE, ONE_THREAD, worker_environment
from tests.benchmarks.processes import clean_environment, run_sampled

__all__ = ["ANSWER_RTOL", "Comparison", "Contender", "Problem", "Run", "contenders", "run_in_turns"]

ANSWER_RTOL = 1e-6
MODULE = "tests.benchmarks.contenders"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """X (n, d) standard normal, y = sin of a projection + noise; rbf kernel, one target.

    The Gram matrix has condition number of about 0.2 n / alpha, so answers in float64 agree to 1e-9 at full size.
    """

    n: int
    d: int = 10
    gamma: float = 0.1
    alpha: float = 1e-3
    seed: int = 0
    tile_size: int | str = "auto"
    memory_limit: str = "2GiB"

    def write(self, folder: Path) -> None:
        """Write X.npy and y.npy."""
        random = np.random.default_rng(self.seed)
        x = random.standard_normal((self.n, self.d))
        np.save(folder / "X.npy", x)
        np.save(folder / "y.npy", np.sin(x @ random.standard_normal(self.d)) + 0.1 * random.standard_normal(self.n))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A program: a function of :mod:`tests.benchmarks.contenders`, and the environment that it gets.

    ``overrides`` replace parameters of the problem, which makes a contender whose work is not equal.
    """

    name: str
    function: str
    family: str = "other"
    environment: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


def contenders() -> dict[str, Contender]:
    """All of them by name.

    Where dkrr's workers use the BLAS kernel as shipped, so does "as shipped", and there is no other variant of it.
    """
    if CORETYPE in os.environ:
        raise RuntimeError(f"{CORETYPE} is set to {os.environ[CORETYPE]}: unset it, contenders get their own values")
    coretype = worker_environment().get(CORETYPE)
    same = {} if coretype is None else {CORETYPE: coretype}
    found = [
        Contender(name="dkrr", family="dkrr", function=f"{MODULE}:dkrr_ridge"),
        # the same answer to a residual of 1e-9, by whatever solver the planner takes
        Contender(
            name="dkrr auto",
            family="dkrr auto",
            function=f"{MODULE}:dkrr_ridge",
            overrides={"solver": "auto", "precision": "auto"},
        ),
        _sklearn("scikit-learn as shipped", {}),
        _sklearn("scikit-learn, one BLAS thread", ONE_THREAD),
        _sklearn("scikit-learn, Haswell kernels", {CORETYPE: "Haswell"}),
        # the same BLAS kernel as dkrr's workers: what differs is the algorithm
        Contender(name="dask.array.linalg.solve", family="dask", function=f"{MODULE}:dask_solve", environment=same),
    ]
    if same:
        found.insert(2, _sklearn(f"scikit-learn, {coretype} kernels", same))
    return {contender.name: contender for contender in found}


def _sklearn(name: str, environment: dict[str, str]) -> Contender:
    return Contender(name=name, family="sklearn", function=f"{MODULE}:sklearn_ridge", environment=environment)


@dataclass
class Run:
    """One turn of one contender. Its time counts when ``status`` is "ok"."""

    contender: Contender
    status: str
    facts: dict[str, Any]
    answer: Any
    peak_bytes: int
    peak_by_kind: dict[str, int]
    difference: float | None = None

    @property
    def seconds(self) -> float:
        return float(self.facts["seconds"])


@dataclass
class Comparison:
    """All turns of all contenders on one problem."""

    problem: Problem
    runs: list[Run]

    @property
    def order(self) -> list[Contender]:
        """Contenders in the order of their first turn."""
        return list({run.contender.name: run.contender for run in self.runs}.values())

    def good(self, contender: Contender) -> list[Run]:
        """Turns that count: none as soon as one of them failed."""
        runs = [run for run in self.runs if run.contender == contender]
        return runs if all(run.status == "ok" for run in runs) else []

    def median_seconds(self, contender: Contender) -> float | None:
        runs = self.good(contender)
        return statistics.median(run.seconds for run in runs) if runs else None

    def median_peak_bytes(self, contender: Contender) -> float | None:
        runs = self.good(contender)
        return statistics.median(run.peak_bytes for run in runs) if runs else None

    def status(self, contender: Contender) -> str:
        """The worst status of its turns."""
        return next((run.status for run in self.runs if run.contender == contender and run.status != "ok"), "ok")

    def fastest(self, family: str) -> Contender | None:
        """The fastest member of a family whose time counts."""
        timed = {one.name: self.median_seconds(one) for one in self.order if one.family == family}
        name = min((name for name, time in timed.items() if time is not None), key=timed.__getitem__, default=None)
        return next((one for one in self.order if one.name == name), None)

    @property
    def rejected(self) -> list[Run]:
        """Turns with another answer than scikit-learn's."""
        return [run for run in self.runs if run.status.startswith("rejected")]


def judge_answers(runs: Sequence[Run]) -> None:
    """Reject every turn whose answer differs by more than 1e-6 from the reference, the first scikit-learn that ran.

    Without one the reference is the first turn that ran.
    """
    ran = [run for run in runs if run.status == "ok"]
    reference = next((run for run in ran if run.contender.family == "sklearn"), ran[0] if ran else None)
    for run in ran:
        assert reference is not None
        if run.answer is None or run.answer.shape != reference.answer.shape:
            shape = None if run.answer is None else run.answer.shape
            run.status = f"rejected: an answer of shape {shape}, {reference.answer.shape} expected"
            continue
        scale = float(np.max(np.abs(reference.answer)))
        run.difference = float(np.max(np.abs(run.answer - reference.answer))) / scale
        if not run.difference <= ANSWER_RTOL:  # NaN is rejected as well
            run.status = f"rejected: answers differ by {run.difference:.1e} from {reference.contender.name}"


def run_once(contender: Contender, problem: Problem, folder: Path, timeout: float = 3600.0) -> Run:
    """One turn in a fresh process, with its files removed afterwards."""
    scratch = folder / f"scratch-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    result = scratch / "result"
    specification = asdict(problem) | {"folder": str(folder), "scratch": str(scratch)} | contender.overrides
    (scratch / "problem.json").write_text(json.dumps(specification))
    command = [sys.executable, "-m", "tests.benchmarks.runner", contender.function]
    facts: dict[str, Any] = {}
    answer, peak, kinds = None, 0, {}
    try:
        done = run_sampled(
            [*command, str(scratch / "problem.json"), str(result)],
            folder=folder,
            environment=clean_environment(contender.environment),
            timeout=timeout,
        )
        status, peak, kinds = done.status, done.memory.total_peak_bytes, done.memory.peak_by_kind()
        if status == "ok":
            facts = json.loads(result.with_suffix(".json").read_text())
            if result.with_suffix(".npy").exists():
                answer = np.load(result.with_suffix(".npy"))
    except TimeoutError as exc:
        status = f"timed out: {exc}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Run(contender, status, facts, answer, peak, kinds)


def run_in_turns(
    problem: Problem,
    schedule: Iterable[Contender],
    folder: Path,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run a schedule of turns on one problem, then judge the answers."""
    problem.write(folder)
    runs: list[Run] = []
    lost: set[str] = set()
    for contender in schedule:
        if contender.name in lost:
            continue
        run = run_once(contender, problem, folder)
        runs.append(run)
        if run.status != "ok":
            lost.add(contender.name)
        shown = f"{run.seconds:.2f} s, {run.peak_bytes / 1e9:.2f} GB" if run.status == "ok" else run.status
        say(f"{contender.name}: {shown}")
    judge_answers(runs)
    return Comparison(problem, runs)
