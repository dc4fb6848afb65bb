"""The diagonal of the inverse from probes, and leave-one-out with standard errors, against the dense inverse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import ParameterError
from dkrr.linalg.cg import column_solves
from dkrr.linalg.cg.column_solves import Column, ColumnSolves
from dkrr.linalg.cg.solver import CGSolver, PreparedCG
from dkrr.linalg.inference.leave_one_out import LeaveOneOut, loo_from_diagonal
from dkrr.linalg.inference.probes import rademacher, unbiased_powers
from dkrr.linalg.inference.stochastic_diagonal import (
    StochasticDiagonal,
    probe_columns,
    right_hand_side,
    stochastic_from_columns,
    stochastic_inverse_diagonal,
)
from dkrr.linalg.inference.stochastic_loo import stochastic_leave_one_out
from dkrr.linalg.settings import IterativeSettings
from dkrr.linalg.workspace import Workspace
from tests.faults import DAMAGES, chunk_files, failing_at
from tests.linalg.helpers import dense, operator, rows

N = 300
DRAWS = 20


def prepared(folder: Path, system: Any, preconditioner: str = "rpcholesky", rank: Any = 40) -> PreparedCG:
    settings = IterativeSettings(tol=1e-10, preconditioner=preconditioner, rank=rank)  # type: ignore[arg-type]
    workspace = Workspace(store=str(folder / "store"), executor=InProcessExecutor(), blas="test")
    return CGSolver(settings=settings).prepare(system, workspace)


def exact(dataset: Any, system: Any, alpha: float, *, intercept: bool) -> tuple[Any, ...]:
    """y, u, D, v (or None) and s from the dense matrix."""
    a = dense(system.with_alpha(alpha), dataset)
    y = dataset.y.read(0, N)
    root = np.ones(N) if dataset.weight is None else np.sqrt(dataset.weight.read(0, N)[:, 0])
    inverse = np.linalg.inv(a)
    u, v, diagonal = inverse @ (root[:, None] * y), inverse @ root, inverse.diagonal().copy()
    if intercept:
        u = u - np.outer(v, (root @ u) / (root @ v))
        diagonal -= v**2 / (root @ v)
    return y, u, diagonal, v, root


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_signs_depend_on_seed_probe_and_row_alone() -> None:
    signs = rademacher(1000, 3, 7)
    assert set(signs.tolist()) == {-1.0, 1.0}
    np.testing.assert_array_equal(rademacher(130, 3, 7), signs[:130])
    assert abs(signs.mean()) < 0.1
    for other in (rademacher(1000, 4, 7), rademacher(1000, 3, 8)):
        assert abs(other @ signs) < 130


def test_unbiased_powers_have_the_mean_that_they_promise() -> None:
    noise = np.random.default_rng(0).standard_normal(400_000)
    for tau in (0.02, 0.1, 0.25):
        powers = unbiased_powers(2.0 * (1 + tau * noise), np.full(noise.shape, 2.0 * tau))
        for k, value in enumerate((1 / 2, 1 / 4, 2 / 8)):
            spread = powers[k].std() / np.sqrt(len(noise))
            assert abs(powers[k].mean() - value) < 5 * spread + 1e-12
    at_zero = unbiased_powers(np.array([2.0]), np.zeros(1))
    np.testing.assert_allclose(np.ravel(at_zero), [0.5, 0.25, 0.25])


def test_closed_forms_and_series_of_unbiased_powers_meet() -> None:
    value = np.ones(2)
    error = np.sqrt(3e-3) * np.array([1 - 1e-9, 1 + 1e-9])
    for power in unbiased_powers(value, error):
        assert power[0] == pytest.approx(power[1], rel=1e-6)


@pytest.mark.parametrize("rank", [1, 40])
@pytest.mark.parametrize("alpha", [1e-16, 1e-3, 1.0])
def test_diagonal_of_the_preconditioner(tmp_path: Path, rank: int, alpha: float) -> None:
    system = operator(rows(tmp_path, N))
    low_rank: Any = prepared(tmp_path, system, rank=rank).preconditioner
    f = np.vstack([low_rank.rows(c) for c in range(low_rank.grid.num_tiles)])
    expected = np.linalg.inv(f @ f.T + low_rank.shift(alpha) * np.eye(N)).diagonal()
    found = low_rank.inverse_diagonal(alpha)
    if alpha > 1e-10:
        np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert (found >= 1 / (low_rank.shift(alpha) + np.square(f).sum(axis=1)) * (1 - 1e-12)).all()


def test_damage_of_the_preconditioner_is_repaired(tmp_path: Path) -> None:
    system = operator(rows(tmp_path, N))
    low_rank: Any = prepared(tmp_path, system).preconditioner
    expected = low_rank.inverse_diagonal(0.1)
    low_rank._held.clear()
    damaged = [path for path in chunk_files(tmp_path / "store") if "panel-" in str(path)]
    DAMAGES["flipped"](damaged[0])
    np.testing.assert_array_equal(low_rank.inverse_diagonal(0.1), expected)


# --- the estimate -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "intercept"), [(False, False), (True, True)])
@pytest.mark.parametrize(("preconditioner", "rank"), [("none", "auto"), ("rpcholesky", 40), ("nystrom", 40)])
def test_the_estimate_is_within_its_standard_errors(
    tmp_path: Path, preconditioner: str, rank: Any, weights: bool, intercept: bool
) -> None:
    dataset = rows(tmp_path, N, weights=weights)
    system = operator(dataset)
    _, _, diagonal, v, root = exact(dataset, system, 0.1, intercept=intercept)
    found = stochastic_inverse_diagonal(
        prepared(tmp_path, system, preconditioner, rank), tmp_path / "columns", 0.1, with_ones=intercept
    )
    off = np.abs(found.inverse_diagonal - diagonal)
    assert np.mean(off <= 4 * found.standard_error + 1e-9) >= 0.98
    assert np.mean(found.standard_error / diagonal) < (0.15 if preconditioner == "none" else 0.12)
    seen = root > 0
    assert abs(found.trace - diagonal[seen].sum()) < 4 * found.trace_se
    assert found.trace_se < 0.02 * found.trace
    assert (found.inverse_diagonal >= found.lower).all()
    assert (found.lower <= diagonal * (1 + 1e-12)).all()
    if intercept:
        assert found.ones is not None
        np.testing.assert_allclose(found.ones, v, rtol=1e-4, atol=1e-5)
    else:
        assert found.ones is None


def test_the_preconditioner_takes_noise_away(tmp_path: Path) -> None:
    dataset = rows(tmp_path, N)
    system = operator(dataset)
    errors = [
        stochastic_inverse_diagonal(prepared(tmp_path, system, *kind), tmp_path / "columns", 1.0).standard_error.mean()
        for kind in (("none", "auto"), ("rpcholesky", 30), ("rpcholesky", 100))
    ]
    assert errors[2] < 0.3 * errors[1]
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_a_matrix_of_the_preconditioners_rank_is_exact(tmp_path: Path, weights: bool, intercept: bool) -> None:
    dataset = rows(tmp_path, N, weights=weights)
    system = operator(dataset, kernel="linear")
    _, _, diagonal, _, root = exact(dataset, system, 0.5, intercept=intercept)
    found = stochastic_inverse_diagonal(
        prepared(tmp_path, system, rank=8), tmp_path / "columns", 0.5, with_ones=intercept
    )
    np.testing.assert_allclose(found.inverse_diagonal, diagonal, rtol=1e-5)
    assert found.trace == pytest.approx(diagonal[root > 0].sum(), rel=1e-5)
    assert found.num_projected == 0


def test_estimates_outside_their_bounds_are_moved_and_counted(tmp_path: Path) -> None:
    dataset = rows(tmp_path, N)
    system = operator(dataset, gamma=5.0)  # rows alone: D = 1 / A_ii nearly, a bound
    found = stochastic_inverse_diagonal(
        prepared(tmp_path, system, "none", "auto"), tmp_path / "columns", 1e-2, num_probes=4
    )
    assert found.num_projected > 10
    assert (found.inverse_diagonal >= 1 / 1.01 - 1e-12).all()
    assert (found.inverse_diagonal <= 100).all()
    assert np.sum(np.abs(found.unbounded - found.inverse_diagonal) > 1e-4) <= found.num_projected
    assert (found.standard_error > 0).all()


@pytest.mark.parametrize(("kernel", "alpha"), [("rbf", 0.01), ("laplacian", 1e-9)])
def test_the_error_that_an_iteration_leaves_is_known(tmp_path: Path, kernel: str, alpha: float) -> None:
    kind = ("rpcholesky", 40) if kernel == "rbf" else ("none", "auto")
    ready = prepared(tmp_path, operator(rows(tmp_path, N), kernel=kernel), *kind)
    fine, coarse = (
        stochastic_inverse_diagonal(ready, tmp_path / "columns", alpha, num_probes=8, tol=tol) for tol in (1e-8, 1e-3)
    )
    off = np.abs(fine.unbounded - coarse.unbounded)
    assert np.mean(off <= 3 * coarse.solver_error) > 0.97
    assert (coarse.solver_error < 0.02 / alpha).all()
    assert (coarse.solver_error <= coarse.standard_error).all()
    assert np.median(fine.solver_error) < 1e-4 * np.median(fine.standard_error)


def test_tile_size_and_blocks_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = rows(tmp_path, N)
    found = []
    for tile_size, most in ((64, 64), (300, 7)):
        monkeypatch.setattr(column_solves, "MAX_COLUMNS", most)
        system = operator(dataset, tile_size)
        own = tmp_path / f"{tile_size}"
        found.append(stochastic_inverse_diagonal(prepared(own, system), own / "columns", 0.1, num_probes=20))
    np.testing.assert_allclose(found[0].unbounded, found[1].unbounded, rtol=1e-4)
    np.testing.assert_allclose(found[0].standard_error, found[1].standard_error, rtol=1e-2)


def test_too_few_probes(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="num_probes is 3; a whole number of at least 4 expected"):
        probe_columns(0.1, 3, with_ones=False)


# --- leave-one-out ----------------------------------------------------------------------------------------------------


def estimates(
    dataset: Any, ready: PreparedCG, folder: Path, alphas: list[float], seed: int, *, intercept: bool = False
) -> tuple[LeaveOneOut, LeaveOneOut, list[StochasticDiagonal]]:
    """Stochastic and exact leave-one-out from the same solution; target k has alphas[k]."""
    y = dataset.y.read(0, N)[:, : len(alphas)]
    u, diagonal = np.empty(y.shape), np.empty(y.shape)
    for k, alpha in enumerate(alphas):
        _, solved, diagonal[:, k], _, root = exact(dataset, ready.operator, alpha, intercept=intercept)
        u[:, k] = solved[:, k]
    found = [
        stochastic_inverse_diagonal(ready, folder, alpha, seed=seed, with_ones=intercept)
        for alpha in dict.fromkeys(alphas)
    ]
    shared: dict[str, Any] = {"y": y, "u": u, "alpha": np.array(alphas), "root": root}
    loo = stochastic_leave_one_out(diagonals=found, **shared)
    return loo, loo_from_diagonal(inverse_diagonal=diagonal, **shared), found


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_leave_one_out(tmp_path: Path, weights: bool, intercept: bool) -> None:
    dataset = rows(tmp_path, N, weights=weights)
    ready = prepared(tmp_path, operator(dataset))
    loo, truth, _ = estimates(dataset, ready, tmp_path / "columns", [0.1, 1.0, 0.1], 0, intercept=intercept)
    assert loo.method == "stochastic"
    assert loo.standard_error is not None
    assert loo.mean_squared_error_se is not None
    seen = np.ones(N, bool) if not weights else np.arange(N) % 7 > 0
    assert np.mean((np.abs(loo.residuals - truth.residuals) <= 4 * loo.standard_error + 1e-9)[seen]) >= 0.98
    assert (np.abs(loo.mean_squared_error - truth.mean_squared_error) <= 3 * loo.mean_squared_error_se).all()
    assert (loo.mean_squared_error_se < 0.05 * loo.mean_squared_error).all()
    np.testing.assert_allclose(loo.gcv, truth.gcv, rtol=0.05)
    np.testing.assert_allclose(loo.degrees_of_freedom, truth.degrees_of_freedom, rtol=0.1)
    assert loo.inverse_diagonal.shape == (N, 2)
    assert loo.summary()["method"] == "stochastic"
    if weights:
        assert np.isnan(loo.residuals[~seen]).all()
        assert not loo.standard_error[~seen].any()


def test_twenty_draws(tmp_path: Path) -> None:
    """The small sibling of the measure: 3 standard errors hold, are not wide, and rows keep to theirs."""
    dataset = rows(tmp_path, N, t=1)
    ready = prepared(tmp_path, operator(dataset), rank=30)
    draws = [[Column(0.1, "probe", 32 * k + q) for q in range(32)] for k in range(DRAWS)]
    every = [column for draw in draws for column in draw]
    solves = ColumnSolves(ready, tmp_path / "columns", every, lambda c: right_hand_side(c, N, 0, None), tol=1e-6)
    y, u, diagonal, _, _ = exact(dataset, ready.operator, 0.1, intercept=False)
    truth = loo_from_diagonal(y=y, u=u, inverse_diagonal=diagonal[:, None], alpha=0.1)
    held, spread, in_rows = 0, [], []
    for draw in draws:
        found = stochastic_from_columns(solves, draw, seed=0)
        loo = stochastic_leave_one_out(y=y, u=u, diagonals=[found], alpha=np.array([0.1]))
        assert loo.mean_squared_error_se is not None
        assert loo.standard_error is not None
        off = np.abs(loo.mean_squared_error - truth.mean_squared_error)
        held += bool(off <= 3 * loo.mean_squared_error_se)
        spread.append(float((loo.mean_squared_error_se / truth.mean_squared_error)[0]))
        in_rows.append(np.mean(np.abs(loo.residuals - truth.residuals) <= 4 * loo.standard_error + 1e-9))
    print(f"{held} of {DRAWS}, standard error {np.mean(spread):.2%} of the mean squared error, {np.mean(in_rows):.2%}")
    assert held >= 0.95 * DRAWS
    assert max(spread) < 0.06
    assert np.mean(in_rows) >= 0.99
    # eight probes at a time: four times the noise, whose square would make every estimate too large
    small, plain = np.empty(4 * DRAWS), np.empty(4 * DRAWS)
    for k in range(4 * DRAWS):
        found = stochastic_from_columns(solves, every[8 * k : 8 * k + 8], seed=0)
        loo = stochastic_leave_one_out(y=y, u=u, diagonals=[found], alpha=np.array([0.1]))
        small[k], plain[k] = loo.mean_squared_error[0], np.square(loo.residuals).mean()
    spread_of_mean = small.std() / np.sqrt(len(small))
    assert abs(small.mean() - truth.mean_squared_error[0]) < 4 * spread_of_mean
    assert plain.mean() - truth.mean_squared_error[0] > 4 * spread_of_mean, "the mean square of the residuals is biased"


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_an_interrupted_estimate_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = operator(rows(tmp_path, N))
    monkeypatch.setattr(column_solves, "MAX_COLUMNS", 8)
    whole = stochastic_inverse_diagonal(prepared(tmp_path, system), tmp_path / "whole", 0.1, num_probes=24)
    with failing_at("columns.block.before_mark:@2:enospc"), pytest.raises(OSError, match="space"):
        stochastic_inverse_diagonal(prepared(tmp_path, system), tmp_path / "columns", 0.1, num_probes=24)
    done = list((tmp_path / "columns").glob("*/done.json"))
    assert len(done) == 1
    solved, solve = [], PreparedCG.solve

    def counted(self: PreparedCG, *arguments: Any, **keywords: Any) -> Any:
        solved.append(1)
        return solve(self, *arguments, **keywords)

    monkeypatch.setattr(PreparedCG, "solve", counted)
    again = stochastic_inverse_diagonal(prepared(tmp_path, system), tmp_path / "columns", 0.1, num_probes=24)
    assert len(solved) == 2
    np.testing.assert_array_equal(again.unbounded, whole.unbounded)
    assert not list((tmp_path / "columns").glob("*/state")), "checkpoints of blocks that are done"
    stochastic_inverse_diagonal(prepared(tmp_path, system), tmp_path / "columns", 0.1, num_probes=24)
    assert len(solved) == 2, "nothing is solved twice"
    stochastic_inverse_diagonal(prepared(tmp_path, system), tmp_path / "columns", 0.1, num_probes=24, seed=1)
    assert len(solved) == 5, "other probes"


def test_a_damaged_block_is_solved_again(tmp_path: Path) -> None:
    system = operator(rows(tmp_path, N))
    ready, columns = prepared(tmp_path, system), probe_columns(0.1, 8, with_ones=True)
    solves = ColumnSolves(ready, tmp_path / "columns", columns, lambda c: right_hand_side(c, N, 0, None), tol=1e-6)
    solves.run()
    before = stochastic_from_columns(solves, columns, seed=0)
    DAMAGES["flipped"](next(path for path in chunk_files(tmp_path / "columns") if "/u/" in str(path)))
    after = stochastic_from_columns(solves, columns, seed=0)
    np.testing.assert_array_equal(after.unbounded, before.unbounded)
    assert before.num_iterations == after.num_iterations > 0
    solves.remove()
    assert not (tmp_path / "columns").exists()


def test_columns_of_several_alphas_in_several_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_solves, "MAX_COLUMNS", 4)
    dataset = rows(tmp_path, N)
    system = operator(dataset)
    columns = [Column(alpha, "probe", q) for alpha in (0.1, 1.0, 10.0) for q in range(3)]
    solves = ColumnSolves(
        prepared(tmp_path, system), tmp_path / "columns", columns, lambda c: right_hand_side(c, N, 0, None)
    )
    wanted = [columns[8], columns[0], columns[4], columns[3]]
    found = solves.take(wanted)
    for k, column in enumerate(wanted):
        a = dense(system.with_alpha(column.alpha), dataset)
        np.testing.assert_allclose(a @ found[:, k], rademacher(N, column.index, 0), atol=1e-8)
    assert (solves.relative_residual(wanted) <= 1e-10).all()


def test_mixed_precision(tmp_path: Path) -> None:
    dataset = rows(tmp_path, N)
    ready = prepared(tmp_path, operator(dataset))
    mixed = replace(ready, solver=replace(ready.solver, precision="mixed"))
    both = [stochastic_inverse_diagonal(kind, tmp_path / "columns", 0.1, num_probes=8) for kind in (ready, mixed)]
    np.testing.assert_allclose(both[0].unbounded, both[1].unbounded, rtol=1e-3, atol=1e-4)
