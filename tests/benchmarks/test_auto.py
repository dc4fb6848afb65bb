"""Auto against every fixed choice on a grid of problems, and its estimates beside what happened.

Every run is a fit of a job on a store of its own, workers started for it. What is compared is the time of the whole
fit; an estimate is compared with what comes after the plan, for that is what it is of. A choice that does not fit, or
does not converge in as many iterations as it is allowed, is not a choice.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr.dataset import ingest
from dkrr.jobs.run import FitSummary, fit_job
from dkrr.jobs.spec import JobSpec
from tests.benchmarks.harness import Judge, scaled, table_lines

pytestmark = [pytest.mark.measure, pytest.mark.timeout(7200)]

FIXED: dict[str, dict[str, Any]] = {
    "cholesky": {"name": "cholesky", "precision": "float64"},
    "mixed": {"name": "cholesky", "precision": "mixed"},
    "cg": {"name": "cg", "precision": "float64"},
    "cg mixed": {"name": "cg", "precision": "mixed"},
}
# rows, features, targets, kernel, alpha, and the memory of each of two workers
Problem = tuple[int, int, int, str, Any, str]
GRID: list[Problem] = [
    (3_000, 10, 1, "rbf", 0.1, "2GiB"),
    (6_000, 20, 5, "matern", 1e-2, "512MiB"),
    (10_000, 5, 1, "rbf", 1.0, "1GiB"),
    (10_000, 50, 50, "rbf", 0.1, "2GiB"),
    (12_000, 10, 1, "matern", 1e-4, "2GiB"),
    (12_000, 20, 1, "laplacian", 1.0, "1GiB"),
    (12_000, 10, 5, "rbf", [0.01, 0.1, 1.0, 5.0, 10.0], "2GiB"),
    (15_000, 30, 10, "poly", 10.0, "2GiB"),
    (16_000, 10, 1, "rbf", 10.0, "512MiB"),
    (16_000, 10, 50, "matern", 1e-2, "2GiB"),
    (20_000, 10, 1, "rbf", 1e-3, "2GiB"),
    (20_000, 5, 2, "matern", 1.0, "1GiB"),
]


def write_rows(folder: Path, n: int, d: int, t: int) -> str:
    """Standard normal features, and targets that are smooth functions of some of them with noise."""
    rng = np.random.default_rng(n + d)
    x = rng.standard_normal((scaled(n), d))
    directions = rng.standard_normal((d, t)) / d**0.5
    y = np.sin(2 * x @ directions) + 0.3 * x[:, [0]] * x[:, [1]] + 0.2 * rng.standard_normal((len(x), t))
    return str(ingest(x, folder / "rows.zarr", y=(y - y.mean(0)) / y.std(0)).path)


def run(problem: Problem, data: str, folder: Path, solver: dict[str, Any]) -> FitSummary | str:
    """A fit that leaves nothing behind; a word for one that could not be done."""
    _, d, _, kernel, alpha, memory = problem
    widths: dict[str, dict[str, Any]] = {  # at which rows are neither all alike nor all strangers
        "rbf": {"gamma": 0.5 / d},
        "laplacian": {"gamma": 0.5 / d},
        "matern": {"kernel_params": {"nu": 1.5, "length_scale": float(d) ** 0.5}},
        "poly": {"gamma": 1.0 / d, "degree": 2, "coef0": 1.0},
    }
    document = {
        "data": {"path": data},
        "model": {"kernel": kernel, "alpha": alpha, **widths[kernel]},
        "solver": {"max_iter": 300} | solver,
        "cluster": {"workers": 2, "memory_limit": memory},
        "output": {"directory": str(folder / "run"), "store": str(folder / "store"), "keep": "model"},
    }
    try:
        return fit_job(JobSpec.from_dict(document))
    except dkrr.DkrrError as exc:
        return type(exc).__name__
    finally:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.rmtree(folder / "store", ignore_errors=True)


def test_measure_auto(judge: Judge, folder: Path) -> None:
    lines, ratios, estimates = [("problem", "auto", "chose", "after plan", "expected", *FIXED, "ratio")], [], []
    for problem in GRID:
        place = folder / str(len(lines))
        place.mkdir()
        data = write_rows(place, *problem[:3])
        found = {name: run(problem, data, place, solver) for name, solver in FIXED.items()}
        auto = run(problem, data, place, {})
        assert isinstance(auto, FitSummary), f"{problem}: {auto}"
        times = {name: one.seconds["total"] if isinstance(one, FitSummary) else np.inf for name, one in found.items()}
        total, plan = auto.seconds["total"], auto.plan
        after, high = total - auto.seconds["prepare"], plan.total_seconds
        expected = float((high * (plan.seconds_low or high)) ** 0.5)  # the middle of its two ends
        ratios.append(total / min(*times.values(), total))
        estimates.append(max(after / expected, expected / after))
        chose = f"{plan.solver} {plan.precision} {plan.rank or ''}"
        figures = [f"{value:.1f}" for value in (after, expected, *times.values())]
        lines.append((str(problem), f"{total:.1f}", chose, *figures, f"{ratios[-1]:.2f}"))
        print(*table_lines(lines), sep="\n", flush=True)
        shutil.rmtree(place)
    good = sum(ratio <= 1.5 for ratio in estimates)
    judge(
        "auto: time",
        f"at most {max(ratios):.2f} of the best fixed choice",
        "1.5",
        max(ratios) <= 1.5,
        at_full_size=True,
    )
    judge(
        "auto: estimate",
        f"within a factor of 1.5 on {good} of {len(GRID)}",
        "at least 10",
        good >= 10,
        at_full_size=True,
    )
