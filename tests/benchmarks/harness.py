"""What all measures share: figures and their bars, job files run as a person runs them, and contenders side by side.

Contenders take turns (A B C A B C), so that a machine that slows down slows all of them; a figure is the median of a
contender's turns. One that crashes is shown with its signal and not run again; one whose answer is not that of the
first has no time.

DKRR_MEASURE_SCALE (1 unless set) multiplies the number of rows of every measure, to try the tests themselves. At
another scale than 1 a bar that is promised at full size is shown and not judged.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.jobs import toml
from tests.benchmarks.processes import Completed, clean_environment, run_sampled

SCALE = float(os.environ.get("DKRR_MEASURE_SCALE", "1"))


def scaled(n: int, least: int = 256) -> int:
    """A number of rows at this session's scale."""
    return n if SCALE == 1 else max(least, round(n * SCALE))


# --- figures ---------------------------------------------------------------------------------------------------------

# verdict, line, figure and bar
FIGURES: pytest.StashKey[list[tuple[str, str, str, str]]] = pytest.StashKey()


@dataclass
class Judge:
    """Records a figure, then asserts its bar."""

    figures: list[tuple[str, str, str, str]] = field(default_factory=list)

    def __call__(self, line: str, figure: str, bar: str, holds: bool, *, at_full_size: bool = False) -> None:
        """Record ``figure`` under ``line``; ``holds`` must be true.

        ``at_full_size``: the bar is a promise about the full size and is judged there only.
        """
        is_judged = SCALE == 1 or not at_full_size
        verdict = ("pass" if holds else "FAIL") if is_judged else f"not judged at scale {SCALE:g}"
        self.figures.append((verdict, line, figure, bar))
        print(f"{line}: {figure} (bar: {bar}): {verdict}")
        assert holds or not is_judged, f"{line}: {figure}; bar: {bar}"


def table_lines(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows of cells as lines, each column as wide as its widest cell."""
    found = list(rows)
    widths = [max(map(len, column)) for column in zip(*found, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in found]


# --- jobs ------------------------------------------------------------------------------------------------------------


def run_command(folder: Path, *arguments: str, prefix: tuple[str, ...] = (), timeout: float = 3600.0) -> Completed:
    """``dkrr ARGUMENTS`` to its end in a fresh process, sampled; it has to end well."""
    done = run_sampled([*prefix, sys.executable, "-m", "dkrr.cli", *arguments], folder=folder, timeout=timeout)
    print(done.stdout)
    assert done.status == "ok", done.stderr
    return done


def write_job(folder: Path, n: int, **tables: dict[str, Any]) -> Path:
    """``job.toml`` on ``n`` generated rows with two local workers; ``tables`` are merged into it."""
    document: dict[str, dict[str, Any]] = {
        "data": {"path": f"generate:friedman?n={n}&d=10&seed=0", "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 1e-3},
        "cluster": {"workers": 2, "memory_limit": "2GiB"},
        "output": {"directory": "run", "store": "store", "keep": "model"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    merged = {name: document.get(name, {}) | tables.get(name, {}) for name in (*document, *tables)}
    merged["model"] = tables.get("model", document["model"])  # another kernel has other keys
    (folder / "job.toml").write_text(toml.dumps(merged))
    return folder / "job.toml"


def run_job(job: Path, **options: Any) -> tuple[Completed, dict[str, Any]]:
    """``dkrr fit JOB``, and its ``result.json``."""
    done = run_command(job.parent, "fit", str(job), **options)
    result: dict[str, Any] = json.loads((job.parent / "run" / "result.json").read_text())
    print(result["message"], result["seconds"])
    return done, result


def real_rows(name: str, data_folder: Path) -> dict[str, dict[str, Any]]:
    """The tables of a job on a real set with its published split; generated rows at another scale: it has one size."""
    if SCALE != 1:
        return {"evaluate": {"fraction": 0.1, "metric": "rmse"}}
    data, mask = (str(data_folder / name / file) for file in ("data.csv.gz", "test_mask.csv.gz"))
    return {
        "data": {"path": data, "target": [-1], "header": False, "standardize": True},
        "evaluate": {"mask": mask, "mask_column": 0, "metric": "rmse"},
    }


# --- contenders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Problem:
    """X (n, d) standard normal, y = sin of a projection + noise; rbf kernel unless a contender has another.

    The Gram matrix has condition number of about 0.2 n / alpha, so answers in float64 agree to 1e-9 at full size.
    """

    n: int
    d: int = 10
    gamma: float = 0.1
    alpha: float = 1e-3

    def rows(self) -> tuple[Any, Any]:
        """X and y."""
        random = np.random.default_rng(0)
        x = random.standard_normal((self.n, self.d))
        return x, np.sin(x @ random.standard_normal(self.d)) + 0.1 * random.standard_normal(self.n)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A program: a function of a problem and ``options``, its environment, and how near its answer has to be.

    It returns the "answer", "seconds", and whatever else is to be told.
    """

    name: str
    function: Callable[..., dict[str, Any]]
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-6


@dataclass
class Row:
    """What the turns of a contender came to; there are ``seconds`` where ``status`` is "ok"."""

    status: str = "ok"
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of the turns; infinity where one of them failed."""
        return statistics.median(turn["seconds"] for turn in self.turns) if self.status == "ok" else np.inf

    def cells(self) -> tuple[str, ...]:
        """Time, peak memory of the whole tree, and by how much the answer differs from the first contender's."""
        if self.status != "ok":
            return self.status, "", ""
        peak, difference = (max(turn[name] for turn in self.turns) for name in ("peak_bytes", "difference"))
        return f"{self.seconds:.3g} s", f"{peak / 1e9:.2f} GB", f"{difference:.1e}"


def run_in_turns(problem: Problem, schedule: Iterable[Contender], folder: Path) -> dict[str, Row]:
    """Run a schedule of turns on one problem, each in a fresh process; prints a table."""
    rows, right = dict[str, Row](), None
    for contender in schedule:
        row = rows.setdefault(contender.name, Row())
        if row.status != "ok":
            continue
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            asked, told = Path(scratch) / "asked", Path(scratch) / "told"
            asked.write_bytes(pickle.dumps((contender.function, (problem, scratch), contender.options)))
            command = [sys.executable, "-m", "tests.benchmarks.harness", str(asked), str(told)]
            try:
                done = run_sampled(command, folder=folder, environment=clean_environment(contender.environment))
                row.status = done.status
            except TimeoutError as exc:
                row.status = f"timed out: {exc}"
            if row.status != "ok":
                continue
            turn = pickle.loads(told.read_bytes()) | {"peak_bytes": done.total_peak_bytes}
        answer = np.asarray(turn.pop("answer"))
        right = answer if right is None else right
        same = answer.shape == right.shape
        turn["difference"] = float(np.abs(answer - right).max() / np.abs(right).max()) if same else np.nan
        if not turn["difference"] <= contender.tolerance:  # NaN is rejected as well
            row.status = f"rejected: answers differ by {turn['difference']:.1e}"
        row.turns.append(turn)
    print(problem, *table_lines([(name, *row.cells()) for name, row in rows.items()]), sep="\n")
    return rows


def main(asked: str, told: str) -> None:
    """One turn; Dask's LocalCluster imports this module once more in every worker."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash at full size would write a core file of gigabytes
    function, arguments, options = pickle.loads(Path(asked).read_bytes())
    Path(told).write_bytes(pickle.dumps(function(*arguments, **options)))


if __name__ == "__main__":
    main(*sys.argv[1:])
