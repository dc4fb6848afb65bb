"""The planner: what "auto" becomes on made-up machines, and that nothing which was excluded is ever chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dkrr import KernelRidge
from dkrr.fit.choices import Iterations, Limits, Problem, SolverChoice
from dkrr.fit.plan import Decision, decide
from dkrr.fit.rates import Machine, TileSeconds, simulate
from dkrr.fit.trial import Trial
from dkrr.kernels import make_kernel
from dkrr.linalg.direct import Split
from dkrr.tiles import TileGrid

MACHINE = Machine(
    threads=2,
    gemm_float64=2e11,
    gemm_float32=4.5e11,
    block_entry=1e-9,
    product_float64=9e-10,
    product_float32=6e-10,
    column_float64=3e-11,
    column_float32=2e-11,
    exact_factor=1.2,
    disk_write=1e9,
    disk_read=1e9,
    mapped_read=1e10,
    task_seconds=2e-3,
    round_seconds=0.02,
    start_seconds=2.0,
    first_product_seconds=0.5,
    end_seconds=1.0,
    cache_bytes=1.6e10,
)
LIMITS = Limits(threads=2, memory_bytes=2 * 2**30, disk_bytes=10**12)
RBF = make_kernel("rbf", gamma=0.1).resolve(10)


class FakeTrial(Trial):
    """Iterations that follow 30 sqrt(n / (r alpha)) / 100, and 5 around a float32 factor (300 at a tiny alpha)."""

    def __init__(self, n: int) -> None:
        super().__init__(RBF, np.zeros((1, 10)), np.zeros((1, 1)), n)

    def cg(self, alpha: Any, ranks: Any, tol: float, precision: Any = "float64") -> dict[int, Iterations]:
        each = {rank: 2 + 0.3 * (self.num_rows / (max(rank, 1) * min(alpha))) ** 0.5 for rank in ranks}
        return {rank: Iterations(count / 1.2, count * 1.2) for rank, count in each.items()}

    def mixed(self, alpha: Any, tol: float) -> Iterations:
        count = 5 if min(alpha) > 1e-6 else 300
        return Iterations(count, count)

    def rounding(self) -> float:
        return 1e-10 * self.num_rows


def problem(n: int = 40_000, t: int = 1, alpha: float | tuple[float, ...] = 0.1) -> Problem:
    ridges = alpha if isinstance(alpha, tuple) else (alpha,)
    return Problem(num_rows=n, num_features=10, num_targets=t, kernel=RBF, alpha=ridges)


def decided(what: Problem, choice: SolverChoice | None = None, limits: Limits = LIMITS, **options: Any) -> Decision:
    machine = options.pop("machine", MACHINE)
    return decide(
        what,
        choice or SolverChoice(),
        limits,
        machine=lambda: machine,
        trial=lambda seconds: FakeTrial(what.num_rows),
        **options,
    )


def unwanted(*_: Any) -> Any:
    raise AssertionError("measured")


def test_small_problems_measure_nothing() -> None:
    decision = decide(problem(n=4000), SolverChoice(), LIMITS, machine=unwanted, trial=unwanted)
    assert (decision.chosen.solver, decision.chosen.precision) == ("cholesky", "float64")
    assert "the rows are few" in decision.reasons["solver"]
    # many ridges make a small problem large
    ridges = tuple(float(k) for k in range(1, 41))
    with pytest.raises(AssertionError, match="measured"):
        decide(problem(n=4000, t=40, alpha=ridges), SolverChoice(), LIMITS, machine=unwanted, trial=unwanted)


def test_the_choice_is_the_fastest_that_fits() -> None:
    decision = decided(problem())
    feasible = [item for item in decision.candidates if not item.infeasible]
    assert decision.chosen.total_seconds == min(item.total_seconds for item in feasible)
    kinds = {(item.solver, item.precision) for item in decision.candidates}
    assert kinds == {("cholesky", "float64"), ("cholesky", "mixed"), ("cg", "float64"), ("cg", "mixed")}


@pytest.mark.parametrize(
    ("what", "limits", "solver"),
    [
        ({"n": 200_000, "alpha": 1.0}, {}, "cg"),
        ({"alpha": 1.0}, {}, "cg"),
        ({"alpha": 1.0, "t": 3000}, {}, "cholesky"),
        ({"alpha": 1e-9}, {}, "cholesky"),
        ({"n": 30_000, "t": 10, "alpha": tuple(np.logspace(-1, 1, 10).tolist())}, {}, "cg"),
        ({"n": 60_000, "alpha": 1e-3}, {"disk_bytes": 3 * 10**9}, "cg"),
        ({}, {"disk_bytes": 10**6}, "cholesky"),
    ],
    ids=str,
)
def test_what_wins(what: dict[str, Any], limits: dict[str, Any], solver: str) -> None:
    decision = decided(problem(**what), limits=replace(LIMITS, **limits))
    assert decision.chosen.solver == solver
    assert bool(decision.chosen.infeasible) == (limits == {"disk_bytes": 10**6})
    if limits:
        assert "are free" in decision.candidates[0].infeasible


@pytest.mark.parametrize(
    "asked",
    [
        {"solver": "cholesky"},
        {"solver": "cg", "rank": 123},
        {"solver": "cg", "preconditioner": "none"},
        {"solver": "cg", "preconditioner": "factor"},
        {"solver": "nystrom", "num_centers": 500},
        {"precision": "mixed"},
        {"precision": "float32"},
        {"gram": "stored"},
    ],
    ids=str,
)
def test_what_was_asked_for_is_done(asked: dict[str, Any]) -> None:
    decision = decided(problem(), SolverChoice(**asked))
    for item in decision.candidates:
        assert asked.get("solver", item.solver) == item.solver
        assert asked.get("precision", item.precision) == item.precision
        assert asked.get("gram", item.gram) == item.gram
        assert asked.get("rank", item.rank) == item.rank
    settings = decision.settings()
    if "preconditioner" in asked:
        assert (settings.iterative.preconditioner, decision.chosen.rank) == (asked["preconditioner"], 0)
    elif asked.get("solver") == "cg":
        assert settings.iterative.rank == decision.chosen.rank > 0


# --- iterations from a sample ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["rbf", "matern"])
def test_a_third_of_the_rows_gives_the_right_size(kernel: str) -> None:
    rng, resolved = np.random.default_rng(0), make_kernel(kernel, **({} if kernel == "matern" else {"gamma": 0.2}))
    x = rng.standard_normal((1800, 5))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(1800)
    options: dict[str, Any] = {"solver": "cg", "tol": 1e-6, "solver_params": {"preconditioner": "none"}}
    true = KernelRidge(0.1, kernel=resolved, precision="float64", **options).fit(x, y).n_iter_
    trial = Trial(resolved.resolve(5), x, y[:600, None], 1800, seconds=20.0)
    found = trial.cg([0.1], (0, 100, 400), 1e-6)
    assert found[0].low / 1.6 <= true <= 1.6 * found[0].high
    assert found[0].high > found[100].high > found[400].high >= 1


def test_a_larger_preconditioner_is_never_expected_to_need_more_iterations() -> None:
    rng, ranks = np.random.default_rng(0), (0, 100, 200, 400)
    x = rng.standard_normal((1000, 5))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(1000)
    # of 400 rows, which say next to nothing of how the iterations of rank 400 grow
    found = Trial(make_kernel("matern").resolve(5), x, y[:400, None], 20_000, seconds=20.0).cg([1e-3], ranks, 1e-6)
    assert sorted((found[rank].high for rank in ranks), reverse=True) == [found[rank].high for rank in ranks]


def test_ranks_that_are_tried_together_are_those_that_are_tried_alone() -> None:
    """Of one preconditioner, whose first columns are those of smaller ranks."""
    random = np.random.default_rng(0)
    x = random.standard_normal((900, 3))
    trial = Trial(make_kernel("matern").resolve(3), x, random.standard_normal((300, 2)), 3000, seconds=60.0)
    columns, part, ranks = trial._columns(80), slice(0, 300), (0, 20, 80)
    together = trial._counts(part, 0.1, 0.01, ranks, columns, 1e-8)
    assert 300 > together[0][1] > together[20][1] > together[80][1]
    for rank in ranks:
        assert trial._counts(part, 0.1, 0.01, (rank,), columns[:rank], 1e-8)[rank] == pytest.approx(
            together[rank], rel=0.05
        )


@pytest.mark.parametrize("rank", [50, 100])
def test_iterations_that_were_not_done_are_foreseen(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1200, 8))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(1200)
    kernel = make_kernel("matern", kernel_params={"nu": 2.5, "length_scale": 2.0}).resolve(8)
    found = []
    for most in (44, 300):
        monkeypatch.setattr("dkrr.fit.trial.MOST_ITERATIONS", most)
        found.append(Trial(kernel, x, y[:600, None], 1200, seconds=1e9).cg([1e-2], (rank,), 1e-8)[rank].high)
    few, all_of_them = found
    assert all_of_them > 150
    assert few == pytest.approx(all_of_them, rel=0.1)


# --- the simulated schedule ------------------------------------------------------------------------------------------

# tiles for which only arithmetic counts, a product taking a second
FLOPS = TileSeconds(gemm=1.0, syrk=0.5, trsm=0.5, potrf=1 / 6, make=0.0, read=0.0, write=0.0, task=0.0)


@pytest.mark.parametrize(
    ("side", "workers", "num_last", "without", "with_it"),
    [(10, 2, 1, 0.92, 0.98), (20, 32, 2, 0.15, 0.52), (122, 100, 4, 0.27, 0.92)],
)
def test_figures_of_the_design(side: int, workers: int, num_last: int, without: float, with_it: float) -> None:
    grid, split = TileGrid(side * 2048, 2048), Split(num_columns=side, num_last=num_last)
    assert simulate(grid, Split(), workers, FLOPS).efficiency == pytest.approx(without, abs=0.02)
    assert simulate(grid, split, workers, FLOPS).efficiency == pytest.approx(with_it, abs=0.02)


def test_the_table_of_the_readme_has_a_row_for_each_number_of_workers() -> None:
    from tests.benchmarks.schedule import table

    lines = table((20_000,), (8, 16))
    assert len(lines) == 4
    assert lines[2].startswith("| 20,000 | 8 |")
    assert {line.count("|") for line in lines} == {9}
