"""Run contenders side by side on one problem, and let only equal answers count.

Contenders take turns (A B C A B C), so that a machine that slows down slows all of them; a figure is the median of a
contender's turns. One that crashes is shown with its signal and not run again.

``python -m tests.benchmarks.harness module:function SPEC.json RESULT`` is the fresh process of one turn: SPEC.json
holds the keyword arguments of the function; what it returns is written to RESULT.json, an array under "answer" to
RESULT.npy.
"""

from __future__ import annotations

import importlib
import json
import platform
import resource
import shutil
import statistics
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from dkrr.engine.machine import cpu_count
from tests.benchmarks.processes import clean_environment, run_sampled

__all__ = ["Contender", "Problem", "Run", "figures", "judge_answers", "machine", "run_in_turns", "run_once", "table"]


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
    """A program: a function ("module:name"), the environment that it gets, and how near its answer has to be.

    ``overrides`` replace parameters of the problem, which makes a contender whose work is not equal.
    """

    name: str
    function: str
    family: str = "other"
    environment: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6


@dataclass
class Run:
    """One turn of one contender. Its time counts when ``status`` is "ok"."""

    contender: Contender
    status: str
    facts: dict[str, Any]
    answer: Any = None
    peak_bytes: int = 0
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    difference: float | None = None


def run_once(contender: Contender, problem: Problem, folder: Path, timeout: float = 3600.0) -> Run:
    """One turn in a fresh process, with its files removed afterwards."""
    scratch = folder / f"scratch-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    result, run = scratch / "result", Run(contender, "ok", {})
    specification = asdict(problem) | {"folder": str(folder), "scratch": str(scratch)} | contender.overrides
    (scratch / "problem.json").write_text(json.dumps(specification))
    command = [sys.executable, "-m", "tests.benchmarks.harness", contender.function]
    environment = clean_environment(contender.environment)
    try:
        done = run_sampled(
            [*command, str(scratch / "problem.json"), str(result)],
            folder=folder,
            environment=environment,
            timeout=timeout,
        )
        run.status, run.peak_bytes, run.peak_by_kind = (
            done.status,
            done.memory.total_peak_bytes,
            done.memory.peak_by_kind(),
        )
        if run.status == "ok":
            run.facts = json.loads(result.with_suffix(".json").read_text())
            run.answer = np.load(result.with_suffix(".npy")) if result.with_suffix(".npy").exists() else None
    except TimeoutError as exc:
        run.status = f"timed out: {exc}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return run


def run_in_turns(
    problem: Problem,
    schedule: Iterable[Contender],
    folder: Path,
    *,
    reference: str = "sklearn",
    say: Callable[[str], None] = lambda line: None,
) -> list[Run]:
    """Run a schedule of turns on one problem, then judge the answers by the first one of the family ``reference``."""
    problem.write(folder)
    runs: list[Run] = []
    for contender in schedule:
        if any(run.contender.name == contender.name and run.status != "ok" for run in runs):
            continue
        run = run_once(contender, problem, folder)
        runs.append(run)
        shown = f"{run.facts['seconds']:.2f} s, {run.peak_bytes / 1e9:.2f} GB" if run.status == "ok" else run.status
        say(f"{contender.name}: {shown}")
    judge_answers(runs, reference)
    return runs


def judge_answers(runs: Sequence[Run], reference: str = "sklearn") -> None:
    """Reject every turn whose answer differs by more than its contender's tolerance from the reference.

    That is the first turn of the family ``reference`` that ran, or without one the first that ran.
    """
    ran = [run for run in runs if run.status == "ok"]
    for run in ran:
        right = next((one for one in ran if one.contender.family == reference), ran[0])
        if run.answer is None or run.answer.shape != right.answer.shape:
            shape = None if run.answer is None else run.answer.shape
            run.status = f"rejected: an answer of shape {shape}, {right.answer.shape} expected"
            continue
        run.difference = float(np.max(np.abs(run.answer - right.answer)) / np.max(np.abs(right.answer)))
        if not run.difference <= run.contender.tolerance:  # NaN is rejected as well
            run.status = f"rejected: answers differ by {run.difference:.1e} from {right.contender.name}"


def figures(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """Figures of each contender by name: medians of its turns, None as soon as one of them failed."""
    rows = {}
    for contender in {run.contender.name: run.contender for run in runs}.values():
        mine = [run for run in runs if run.contender == contender]
        failed = next((run.status for run in mine if run.status != "ok"), None)
        good = [] if failed else mine
        facts = [run.facts for run in good]
        rows[contender.name] = {
            "family": contender.family,
            "status": failed or "ok",
            "seconds": _median([one["seconds"] for one in facts]),
            "all_seconds": [one["seconds"] for one in facts],
            "start_seconds": _median([one["start_seconds"] for one in facts if "start_seconds" in one]),
            "peak_bytes": _median([run.peak_bytes for run in good]),
            "peak_by_kind": good[0].peak_by_kind if good else {},
            "difference": max((run.difference for run in good if run.difference is not None), default=None),
            "facts": facts,
        }
    return rows


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def fastest(rows: Mapping[str, Mapping[str, Any]], family: str) -> str | None:
    """The fastest member of a family whose time counts."""
    timed = {name: row["seconds"] for name, row in rows.items() if row["family"] == family and row["seconds"]}
    return min(timed, key=timed.__getitem__, default=None)


def table(title: str, caption: str, rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, Any]) -> Table:
    """One row a contender; ``columns`` are functions of a row by heading. Without a time it has its status alone."""
    shown = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for name in ("contender", *columns):
        shown.add_column(name, justify="left" if name == "contender" else "right")
    for name, row in rows.items():
        if row["status"] == "ok":
            shown.add_row(name, *(_text(column(row)) for column in columns.values()))
        else:
            shown.add_row(name, f"[bold]{row['status']}[/bold]", *["-"] * (len(columns) - 1))
    return shown


def _text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}"


def machine() -> str:
    """CPU, cores, versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    names = ("numpy", "scipy", "scikit-learn", "dask", "distributed", "zarr")
    return f"{cpu or platform.processor()}, {cpu_count()} CPUs; " + ", ".join(
        f"{name} {version(name)}" for name in names
    )


def main(target: str, specification: str, result: str) -> None:
    """One turn; Dask's LocalCluster imports this module once more in every worker."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash at full size would write a core file of gigabytes
    module, _, name = target.partition(":")
    facts = getattr(importlib.import_module(module), name)(**json.loads(Path(specification).read_text()))
    answer = facts.pop("answer", None)
    if answer is not None:
        np.save(f"{result}.npy", np.asarray(answer, dtype=np.float64))
    Path(f"{result}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
