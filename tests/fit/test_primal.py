"""When "auto" becomes primal, and what it is told to cost."""

from __future__ import annotations

from typing import Any

import pytest

from dkrr.fit.choices import Limits, Problem, SolverChoice, is_plainly_primal
from dkrr.fit.plan import decide
from dkrr.fit.prices import primal_seconds
from dkrr.fit.rates import Machine
from dkrr.kernels import make_kernel

LIMITS = Limits(threads=2, memory_bytes=2**30)
MACHINE = Machine(
    threads=2, gemm_float64=1e11, gemm_float32=2e11, block_entry=1e-9, product_float64=5e-10, product_float32=4e-10,
    column_float64=1e-10, column_float32=1e-10, exact_factor=1.2, disk_write=5e8, disk_read=5e8, mapped_read=5e9,
    task_seconds=1e-3, round_seconds=0.02, start_seconds=2.0, first_product_seconds=0.5, end_seconds=1.5,
    cache_bytes=1e10,
)  # fmt: skip


def problem(n: int, d: int, kernel: str = "linear", primal: bool = True, **parameters: Any) -> Problem:
    resolved = make_kernel(kernel, **parameters).resolve(d)
    return Problem(num_rows=n, num_features=d, num_targets=1, kernel=resolved, alpha=(1.0,), primal=primal)


def chosen(asked: Problem, choice: SolverChoice | None = None) -> str:
    return decide(asked, choice or SolverChoice(), LIMITS, machine=lambda: MACHINE).chosen.solver


def test_few_features_need_no_measurement() -> None:
    def refuse() -> Machine:
        raise AssertionError

    found = decide(problem(5_000_000, 50), SolverChoice(), LIMITS, machine=refuse)
    assert found.chosen.solver == "primal"
    assert "less arithmetic" in found.reasons["solver"]
    assert found.settings(problem(5_000_000, 50), SolverChoice()).alpha == (1.0,)


@pytest.mark.parametrize(
    ("asked", "choice"),
    [
        (problem(3000, 4000), SolverChoice()),
        (problem(100_000, 10, "rbf"), SolverChoice(solver="cg", preconditioner="none")),
        (problem(8000, 5, primal=False), SolverChoice()),
        (problem(8000, 5), SolverChoice(precision="mixed")),
        (problem(8000, 5), SolverChoice(gram="stored")),
        (problem(8000, 200, "poly", degree=3), SolverChoice()),
        (problem(8000, 5, "poly", degree=2.5), SolverChoice()),
    ],
    ids=str,
)
def test_auto_stays_with_the_matrix(asked: Problem, choice: SolverChoice) -> None:
    assert not is_plainly_primal(asked, choice)
    assert chosen(asked, choice) != "primal"


def test_in_between_the_price_decides() -> None:
    many = problem(100_000, 20, "poly", degree=3)  # 1,771 features
    assert not is_plainly_primal(many, SolverChoice())
    decision = decide(many, SolverChoice(), LIMITS, machine=lambda: MACHINE)
    assert decision.chosen.solver == "primal"
    assert {item.solver for item in decision.candidates} == {"primal", "cholesky", "cg"}
    assert decision.chosen.name == "primal float64"


def test_seconds_grow_with_rows_and_with_the_square_of_the_features() -> None:
    base = primal_seconds(MACHINE, 100_000, 1000, 1000, 1)["primal"]
    assert 1.8 < primal_seconds(MACHINE, 200_000, 1000, 1000, 1)["primal"] / base < 2.1
    assert 2.5 < primal_seconds(MACHINE, 100_000, 2000, 2000, 1)["primal"] / base < 4.1


def test_a_task_that_fits_no_worker_is_no_candidate() -> None:
    small = Limits(threads=2, memory_bytes=100 << 20)
    asked = SolverChoice(solver="primal")
    found = decide(problem(100_000, 50), asked, small, machine=lambda: MACHINE)
    assert "a worker has 100" in found.chosen.infeasible
