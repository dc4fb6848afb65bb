"""The planner: what "auto" becomes on made-up machines, and that nothing which was excluded is ever chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dkrr.fit.choices import Iterations, Limits, Problem, SolverChoice
from dkrr.fit.plan import Decision, decide
from dkrr.fit.prices import pass_seconds
from dkrr.fit.rates import Machine
from dkrr.fit.trial import Trial
from dkrr.kernels import make_kernel
from dkrr.linalg.direct import usual_split
from dkrr.linalg.products import kernel_product
from tests.reference import dense_krr

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
        assert "GB are free" in decision.candidates[0].infeasible


@pytest.mark.parametrize(
    "asked",
    [
        {"solver": "cholesky"},
        {"solver": "cg", "rank": 123},
        {"solver": "cg", "preconditioner": "none"},
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
    if asked.get("preconditioner") == "none":
        assert (settings.iterative.preconditioner, decision.chosen.rank) == ("none", 0)
    elif asked.get("solver") == "cg":
        assert settings.iterative.rank == decision.chosen.rank > 0


def test_an_intercept_takes_one_more_product_after_an_iteration() -> None:
    usual = problem(alpha=(0.1, 0.2), t=2)
    prices = [
        {item.name: item.total_seconds for item in decided(replace(usual, fit_intercept=asked)).candidates}
        for asked in (False, True)
    ]
    product = MACHINE.exact_factor * pass_seconds(MACHINE, usual.num_rows, 2, "float64")
    for name, seconds in prices[0].items():
        more = {"cg": 1, "cholesky mixed": 2}.get("cg" if name.startswith("cg") else name.split(",")[0], 0)
        assert prices[1][name] == pytest.approx(seconds + more * product, rel=1e-12), name


# --- primal ----------------------------------------------------------------------------------------------------------


def explicit(n: int, d: int, kernel: str = "linear", primal: bool = True, **parameters: Any) -> Problem:
    resolved = make_kernel(kernel, **parameters).resolve(d)
    return Problem(num_rows=n, num_features=d, num_targets=1, kernel=resolved, alpha=(1.0,), primal=primal)


@pytest.mark.parametrize(
    ("asked", "words", "solver"),
    [
        (explicit(5_000_000, 50), {}, "primal"),
        (explicit(3000, 4000), {}, "cholesky"),
        (explicit(8000, 5, primal=False), {}, "cholesky"),
        (explicit(8000, 5), {"precision": "mixed"}, "cholesky"),
        (explicit(8000, 5, "poly", degree=2.5), {}, "cholesky"),
    ],
    ids=str,
)
def test_few_features_need_no_measurement(asked: Problem, words: dict[str, Any], solver: str) -> None:
    found = decide(asked, SolverChoice(**words), LIMITS, machine=unwanted)
    assert found.chosen.solver == solver
    assert ("less arithmetic" in found.reasons["solver"]) == (solver == "primal")


# --- iterations from a sample ----------------------------------------------------------------------------------------


def plain_iterations(matrix: np.ndarray, alpha: float, y: np.ndarray, tol: float) -> int:
    """Textbook conjugate gradients."""
    x, r = np.zeros_like(y), y.copy()
    p, count = r.copy(), 0
    while np.linalg.norm(r) > tol * np.linalg.norm(y):
        q = matrix @ p + alpha * p
        step = r @ r / (p @ q)
        x, new = x + step * p, r - step * q
        p, r, count = new + (new @ new) / (r @ r) * p, new, count + 1
    np.testing.assert_allclose(x, dense_krr(matrix, y, alpha), rtol=1e-2, atol=1e-4)
    return count


def sampled(n: int, s: int, kernel: Any, weights: bool = False) -> tuple[Trial, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, 5))
    y = np.sin(x[:, 0]) + x[:, 1] * x[:, 2] + 0.1 * rng.standard_normal(n)
    root = np.sqrt(rng.uniform(0.5, 2, n)) if weights else None
    matrix = kernel(x, x) if root is None else root[:, None] * kernel(x, x) * root
    rhs = y if root is None else root * y
    pool = min(n, s + 1800)
    part = None if root is None else root[:pool]
    return Trial(kernel, x[:pool], rhs[:s, None], n, part, seconds=20.0), matrix, rhs


def test_a_whole_sample_gives_the_exact_number() -> None:
    trial, matrix, rhs = sampled(600, 600, make_kernel("rbf", gamma=0.2).resolve(5), weights=True)
    found = trial.cg([0.1], (0,), 1e-6)[0]
    assert found.low == found.high
    assert found.high == pytest.approx(plain_iterations(matrix, 0.1, rhs, 1e-6), rel=0.05)  # rounding decides the last


@pytest.mark.parametrize("kernel", ["rbf", "matern"])
def test_a_third_of_the_rows_gives_the_right_size(kernel: str) -> None:
    resolved = make_kernel(kernel, **({} if kernel == "matern" else {"gamma": 0.2})).resolve(5)
    trial, matrix, rhs = sampled(1800, 600, resolved)
    true = plain_iterations(matrix, 0.1, rhs, 1e-6)
    found = trial.cg([0.1], (0, 100, 400), 1e-6)
    assert found[0].low / 1.6 <= true <= 1.6 * found[0].high
    assert found[0].high > found[100].high > found[400].high >= 1


@pytest.mark.parametrize(("length", "alpha", "supported"), [(80.0, 1e-5, False), (80.0, 1e-1, True)])
def test_float32_products_are_supported_where_their_error_is_below_alpha(
    length: float, alpha: float, supported: bool
) -> None:
    """Measured on the sample, |E| is that of the products with all rows within a factor of four."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6000, 9))
    kernel = make_kernel("matern", kernel_params={"nu": 1.5, "length_scale": length}).resolve(9)
    trial = Trial(kernel, x[:2048], np.sin(x[:1000, :1]), 6000)
    assert trial.supports_single([alpha]) == supported
    v = rng.standard_normal((6000, 2))
    for _ in range(4):
        v /= np.linalg.norm(v, axis=0)
        single, double = np.zeros_like(v), np.zeros_like(v)
        kernel_product(kernel, x, x, v, single, same=True, precision="float32")
        kernel_product(kernel, x, x, v, double, same=True)
        v = single - double
    true = np.linalg.norm(v, axis=0).max()
    assert true / 4 <= trial.rounding() <= 4 * true


def test_auto_leaves_float32_products_out_where_they_cannot_lead_to_the_answer() -> None:
    class Coarse(FakeTrial):
        def rounding(self) -> float:
            return 2e-4

    def ways(choice: SolverChoice) -> list[Any]:
        found = decide(
            problem(n=41_000, alpha=1e-5), choice, LIMITS, machine=lambda: MACHINE, trial=lambda seconds: Coarse(41_000)
        )
        return [way for way in found.candidates if way.solver == "cg" and way.precision == "mixed"]

    left_out = ways(SolverChoice())
    assert left_out
    assert all("float32 products are off by up to 2.0e-04" in way.infeasible for way in left_out)
    assert not any(way.infeasible for way in ways(SolverChoice(solver="cg", precision="mixed"))), "named: never changed"


# --- split sums and the simulated schedule ---------------------------------------------------------------------------


def test_a_factor_comes_with_its_split_and_what_to_expect() -> None:
    chosen = decided(problem(), SolverChoice(solver="cholesky")).chosen
    assert chosen.split == usual_split(-(-40_000 // chosen.tile_size), 2)
    assert 0.9 < chosen.efficiency < 1
    assert decided(problem(), SolverChoice(solver="cg")).chosen.split is None
    assert chosen.to_dict()["split"] == {"num_columns": 3, "num_last": 1}


def test_the_other_ways_come_by_price_with_what_is_foreseen() -> None:
    decision = decided(problem(n=200_000, alpha=1.0))
    others = decision.others()
    assert others[0].name == decision.chosen.name
    prices = [sum(way.foreseen.seconds.values()) for way in others if way.foreseen is not None]
    assert prices == sorted(prices)
    assert len(prices) == len(others) == len([item for item in decision.candidates if not item.infeasible])
    first, iterations = others[0].foreseen, decision.chosen.iterations
    assert first is not None
    assert iterations is not None
    assert (first.low, first.high) == (iterations.low, iterations.high)


@pytest.mark.parametrize(
    "words",
    [{"solver": "cg"}, {"precision": "mixed"}, {"solver": "cg", "rank": 500}, {"gram": "on_the_fly", "tol": 1e-5}],
    ids=str,
)
def test_words_hold_in_every_other_way(words: dict[str, Any]) -> None:
    decision = decided(problem(n=200_000, alpha=1.0), SolverChoice(**words))
    assert len(decision.others()) > 1
    for way in decision.others():
        assert words.get("solver", way.solver) == way.solver
        assert words.get("precision", way.precision) == way.precision
        assert words.get("rank", way.rank) == way.rank
        assert way.iterative.tol == decision.choice.tol
    excluded = {way.name for way in decision.beyond()}
    assert not excluded & {way.name for way in decision.others()}
    assert ("cholesky float64" in excluded) == (words.keys() & {"solver", "precision"} != set())
