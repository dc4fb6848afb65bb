"""Auto against every fixed choice on a grid of problems, and its estimates beside what happened.

Every run is a fit of a job on a store of its own, workers started for it. What is compared is the time of the whole
fit; an estimate is compared with what comes after the plan, for that is what it is of. A choice that does not fit, or
does not converge in as many iterations as it is allowed, is not a choice.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from dkrr.dataset import ingest
from dkrr.errors import ClusterError, ConvergenceError, NumericalError, PlanRefusedError
from dkrr.jobs import toml
from dkrr.jobs.run import FitSummary, fit_job
from dkrr.jobs.spec import JobSpec
from tests.benchmarks.processes import run_sampled
from tests.measure.figures import Judge, scaled
from tests.measure.test_tune import rows_of

pytestmark = [pytest.mark.measure, pytest.mark.timeout(3600)]

MAX_TIME_RATIO = 1.5
MAX_ESTIMATE_RATIO = 1.5
MIN_GOOD_ESTIMATES = 10
MAX_ITER = 300

FIXED: dict[str, dict[str, Any]] = {
    "cholesky": {"name": "cholesky", "precision": "float64"},
    "mixed": {"name": "cholesky", "precision": "mixed", "max_iter": MAX_ITER},
    "cg": {"name": "cg", "precision": "float64", "max_iter": MAX_ITER},
    "cg mixed": {"name": "cg", "precision": "mixed", "max_iter": MAX_ITER},
}


@dataclass(frozen=True)
class Problem:
    """One cell of the grid; ``memory`` is the limit of each of two workers."""

    n: int
    d: int
    t: int
    kernel: str
    alpha: float | list[float]
    memory: str = "2GiB"

    @property
    def name(self) -> str:
        alpha = f"{len(self.alpha)} of them" if isinstance(self.alpha, list) else f"{self.alpha:g}"
        return f"{self.n:,} x {self.d}, t {self.t}, {self.kernel}, alpha {alpha}, {self.memory}"

    @property
    def model(self) -> dict[str, Any]:
        """The kernel's table: widths at which rows are neither all alike nor all strangers."""
        parameters: dict[str, Any] = {
            "rbf": {"gamma": 0.5 / self.d},
            "laplacian": {"gamma": 0.5 / self.d},
            "matern": {"kernel_params": {"nu": 1.5, "length_scale": float(self.d) ** 0.5}},
            "poly": {"gamma": 1.0 / self.d, "degree": 2, "coef0": 1.0},
        }[self.kernel]
        return {"kernel": self.kernel, "alpha": self.alpha, **parameters}


GRID = [
    Problem(3_000, 10, 1, "rbf", 0.1),
    Problem(6_000, 20, 5, "matern", 1e-2, "512MiB"),
    Problem(10_000, 5, 1, "rbf", 1.0, "1GiB"),
    Problem(10_000, 50, 50, "rbf", 0.1),
    Problem(12_000, 10, 1, "matern", 1e-4),
    Problem(12_000, 20, 1, "laplacian", 1.0, "1GiB"),
    Problem(12_000, 10, 5, "rbf", [0.01, 0.1, 1.0, 5.0, 10.0]),
    Problem(15_000, 30, 10, "poly", 10.0),
    Problem(16_000, 10, 1, "rbf", 10.0, "512MiB"),
    Problem(16_000, 10, 50, "matern", 1e-2),
    Problem(20_000, 10, 1, "rbf", 1e-3),
    Problem(20_000, 5, 2, "matern", 1.0, "1GiB"),
]


def rows(problem: Problem, folder: Path) -> Path:
    """Standard normal features, and targets that are smooth functions of some of them with noise."""
    n = scaled(problem.n)
    rng = np.random.default_rng(problem.n + problem.d)
    x = rng.standard_normal((n, problem.d))
    directions = rng.standard_normal((problem.d, problem.t)) / problem.d**0.5
    y = np.sin(2 * x @ directions) + 0.3 * x[:, [0]] * x[:, [1]] + 0.2 * rng.standard_normal((n, problem.t))
    path = folder / "rows.zarr"
    ingest(x, path, y=(y - y.mean(0)) / y.std(0))
    return path


def run(problem: Problem, data: Path, folder: Path, solver: dict[str, Any]) -> FitSummary | str:
    """A fit that leaves nothing behind; a word for one that could not be done."""
    document = {
        "data": {"path": str(data)},
        "model": problem.model,
        "solver": solver,
        "cluster": {"workers": 2, "memory_limit": problem.memory},
        "output": {"directory": str(folder / "run"), "store": str(folder / "store"), "keep": "model"},
    }
    try:
        return fit_job(JobSpec.from_dict(document))
    except PlanRefusedError:
        return "refused"
    except ConvergenceError:
        return "not converged"
    except (NumericalError, ClusterError) as exc:
        return type(exc).__name__
    finally:
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.rmtree(folder / "store", ignore_errors=True)


def expected(summary: FitSummary) -> float:
    """The middle of the estimate's two ends."""
    high = summary.plan.total_seconds
    return float((high * (summary.plan.seconds_low or high)) ** 0.5)


def test_measure_auto(judge: Judge, folder: Path) -> None:
    table = Table(title="auto against fixed choices: seconds of the whole fit")
    for column in ("problem", "auto", "chose", "after plan", "expected", "iterations", *FIXED, "ratio"):
        table.add_column(column)
    ratios, estimates = [], []
    for number, problem in enumerate(GRID):
        place = folder / str(number)
        place.mkdir()
        data = rows(problem, place)
        found = {name: run(problem, data, place, solver) for name, solver in FIXED.items()}
        auto = run(problem, data, place, {"max_iter": MAX_ITER})
        assert isinstance(auto, FitSummary), f"{problem.name}: {auto}"
        seconds = {name: one.seconds["total"] for name, one in found.items() if isinstance(one, FitSummary)}
        best = min([*seconds.values(), auto.seconds["total"]])
        after = auto.seconds["total"] - auto.seconds["prepare"]
        ratios.append(auto.seconds["total"] / best)
        estimates.append(max(after / expected(auto), expected(auto) / after))
        plan = auto.plan
        guess = "" if plan.iterations is None else f"{plan.iterations.low:.0f}-{plan.iterations.high:.0f}"
        table.add_row(
            problem.name,
            f"{auto.seconds['total']:.1f}",
            f"{plan.solver} {plan.precision}" + (f" {plan.rank}" if plan.solver == "cg" else ""),
            f"{after:.1f}",
            f"{expected(auto):.1f}",
            f"{auto.num_iterations} ({guess})" if guess else "",
            *(f"{seconds[name]:.1f}" if name in seconds else str(found[name]) for name in FIXED),
            f"{ratios[-1]:.2f}",
        )
        print(problem.name, plan.reasons, {name: round(value, 2) for name, value in auto.seconds.items()},
              {name: round(value, 2) for name, value in auto.estimated_seconds.items()}, flush=True)  # fmt: skip
        shutil.rmtree(place)
    Console(width=220).print(table)
    good = sum(ratio <= MAX_ESTIMATE_RATIO for ratio in estimates)
    judge(
        "auto: estimate",
        f"within a factor of {MAX_ESTIMATE_RATIO} on {good} of {len(GRID)}; worst {max(estimates):.2f}",
        f"at least {MIN_GOOD_ESTIMATES}",
        good >= MIN_GOOD_ESTIMATES,
        at_full_size=True,
    )
    judge(
        "auto: time",
        f"at most {max(ratios):.2f} of the best fixed choice on {len(GRID)} problems",
        f"at most {MAX_TIME_RATIO}",
        max(ratios) <= MAX_TIME_RATIO,
        at_full_size=True,
    )


# 25 fits of real rows with nothing set: four sets, two kernels, three length scales, and the ridges in turn
SETS, KERNELS = ("pol", "elevators", "bike", "protein"), ("matern", "rbf")
LENGTHS, RIDGES = (0.5, 5.0, 80.0), (1e-6, 1e-3, 1.0)
REAL = [("protein", "matern", 80.0, 1e-5)] + [
    (name, kernel, length, RIDGES[(i + j + k) % 3])
    for i, name in enumerate(SETS)
    for j, kernel in enumerate(KERNELS)
    for k, length in enumerate(LENGTHS)
]
NUM_COMPARED = 10
MAX_MEMORY_RATIO = 1.2
MIN_GOOD_TIMES = 20


def real_job(case: tuple[str, str, float, float], place: Path, data_folder: Path, solver: dict[str, Any]) -> Path:
    """A job file that sets nothing but the model."""
    name, kernel, length, alpha = case
    widths = {"gamma": 0.5 / length**2} if kernel == "rbf" else {"kernel_params": {"nu": 1.5, "length_scale": length}}
    document = rows_of(name, data_folder) | {
        "model": {"kernel": kernel, "alpha": alpha, **widths},
        "solver": solver,
        "output": {"directory": str(place / "run"), "store": str(place / "store"), "keep": "model"},
    }
    path = place / "job.toml"
    path.write_text(toml.dumps(document))
    return path


def real_fit(
    case: tuple[str, str, float, float], place: Path, data_folder: Path, solver: dict[str, Any], timeout: float = 3600.0
) -> Any:
    """result.json of a fit by a process of its own, whose memory is its own; a word where there is none in time."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    job = real_job(case, place, data_folder, solver)
    try:
        done = run_sampled([sys.executable, "-m", "dkrr.cli", "fit", str(job)], folder=place, timeout=timeout)
    except TimeoutError as exc:
        return str(exc)
    else:
        found = place / "run" / "result.json"
        return json.loads(found.read_text()) if done.status == "ok" and found.exists() else done.status
    finally:
        shutil.rmtree(place)


@pytest.mark.timeout(7200)
def test_measure_auto_on_real_rows(judge: Judge, folder: Path, data_folder: Path) -> None:
    compared = set(np.random.default_rng(16).choice(len(REAL), NUM_COMPARED, replace=False).tolist())
    columns = ("case", "way", "iterations", "seconds", "worker MiB", "client MiB", "residual", "backward", "best fixed")
    table, times, memory, ratios, errors = Table(*columns), [], [], [], []
    for number, case in enumerate(REAL):
        found = real_fit(case, folder / str(number), data_folder, {})
        print(case, found if isinstance(found, str) else found["message"], flush=True)
        if isinstance(found, str):
            errors.append(case)
            continue
        plan = found["plan"]
        high = sum(plan["estimated_seconds"].values())
        foreseen = (high * (plan["seconds_low"] or high)) ** 0.5
        total = found["seconds"]["total"]
        taken = total - found["seconds"]["prepare"]
        times.append(max(taken / foreseen, foreseen / taken))
        peak = max(found["peak_rss_bytes"].values(), default=0)
        memory.append(max(peak / plan["task_bytes"], found["client_peak_rss_bytes"] / plan["client_bytes"]))
        good = (
            max(found["relative_residual"]) <= 1e-8 or "limit of float64" in found["message"] or not plan["iterations"]
        )
        if not good:
            errors.append(case)
        best = ""
        if number in compared:
            others = {
                name: one["seconds"]["total"]
                for name, solver in FIXED.items()
                # one that takes longer than auto did is not the fastest, and is ended then
                if isinstance(one := real_fit(case, folder / str(number), data_folder, solver, total), dict)
            }
            fastest = min(others, key=lambda name: others[name], default="auto")
            ratios.append(total / min(total, others.get(fastest, total)))
            best = f"{fastest} {others.get(fastest, total):.0f} s, {ratios[-1]:.2f}"
        range_ = "" if plan["iterations"] is None else "-".join(f"{count:.0f}" for count in plan["iterations"].values())
        ways = [item["way"] for item in found["given_up"]] + [
            f"{found['solver']} {found['precision']} {plan['rank'] or ''}"
        ]
        table.add_row(
            " ".join(map(str, case)),
            " > ".join(ways),
            f"{range_}: {found['num_iterations']}",
            f"{plan['seconds_low']:.0f}-{high:.0f}: {taken:.0f}",
            f"{plan['task_bytes'] >> 20}: {peak >> 20}",
            f"{plan['client_bytes'] >> 20}: {found['client_peak_rss_bytes'] >> 20}",
            f"{max(found['relative_residual']):.1e}",
            f"{max(found['backward_error']):.1e}",
            best,
        )
        Console(width=200).print(table)
    good_times = sum(ratio <= MAX_ESTIMATE_RATIO for ratio in times)
    judge("real rows: answers", f"{len(REAL) - len(errors)} of {len(REAL)}; without: {errors}", "all", not errors)
    judge(
        "real rows: seconds",
        f"within a factor of {MAX_ESTIMATE_RATIO} on {good_times} of {len(REAL)}; worst {max(times):.2f}",
        f"at least {MIN_GOOD_TIMES}",
        good_times >= MIN_GOOD_TIMES,
        at_full_size=True,
    )
    judge(
        "real rows: memory",
        f"at most {max(memory):.2f} of what was announced",
        f"at most {MAX_MEMORY_RATIO}",
        max(memory) <= MAX_MEMORY_RATIO,
        at_full_size=True,
    )
    judge(
        "real rows: auto",
        f"at most {max(ratios, default=1.0):.2f} of the best fixed way on {len(ratios)}",
        f"at most {MAX_TIME_RATIO}",
        max(ratios, default=1.0) <= MAX_TIME_RATIO,
        at_full_size=True,
    )
