"""The iterative solver from rows on disk to coefficients on disk: around low-rank and Cholesky factors, interrupted,
damaged, and in mixed precision."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import NotPositiveDefiniteError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg.cg import Checkpoint
from dkrr.linalg.cg_solver import CGSolver, FactorPreconditioner, PreparedCG, float32_factor
from dkrr.linalg.direct import CholeskyFactor
from dkrr.linalg.operators import BlockColumns, RidgeOperator
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from tests.faults import DAMAGES
from tests.linalg.helpers import dense, operator, rows, snapshot

N, TILE = 250, 64
EPS = np.finfo(np.float64).eps
TIGHT = IterativeSettings(tol=1e-10, preconditioner="none")
MATERN: dict[str, Any] = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 20.0}}


def workspace(folder: Path, executor: Any = None) -> Workspace:
    return Workspace(store=str(folder / "store"), executor=executor or InProcessExecutor(), blas="test")


def right_hand_sides(folder: Path, grid: Any, values: np.ndarray) -> BlockColumns:
    return BlockColumns.create(str(folder / "solve.zarr"), "rhs", grid, values.shape[1], "float64").fill(values)


def settings_for(dataset: Any, **parameters: Any) -> FitSettings:
    values: dict[str, Any] = {"alpha": (0.1,), "tile_size": TILE, "solver": "cg", "iterative": TIGHT} | parameters
    return FitSettings(kernel=operator(dataset).kernel, **values)


def fit(dataset: Any, folder: Path, start: Any = None, **parameters: Any) -> tuple[np.ndarray, Solution]:
    with fit_rows(dataset, settings_for(dataset, **parameters), workspace(folder), start=start) as result:
        return result.dual_coef.read(0, dataset.num_rows), result.solution


def close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-7) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize(("preconditioner", "rank"), [("none", "auto"), ("rpcholesky", 40), ("nystrom", "auto")])
def test_solution_matches_a_dense_solve(tmp_path: Path, precision: Any, preconditioner: Any, rank: Any) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset)
    values = np.random.default_rng(0).standard_normal((N, 5))
    alpha = np.array([0.01, 1.0, 0.1, 10.0, 0.1])
    settings = IterativeSettings(tol=1e-10, preconditioner=preconditioner, rank=rank)
    prepared = CGSolver(settings=settings, precision=precision).prepare(system, workspace(tmp_path))
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values), alpha)
    for k, found in enumerate(u.whole().T):
        a = dense(system.with_alpha(alpha[k]), dataset)
        np.testing.assert_allclose(found, np.linalg.solve(a, values[:, k]), rtol=1e-6, atol=1e-7)
        residual = values[:, k] - a @ found
        assert np.linalg.norm(residual) <= 1.01e-10 * np.linalg.norm(values[:, k])
        bound = np.abs(a).sum(axis=1).max() * np.abs(found).max() + np.abs(values[:, k]).max()
        assert solution.backward_error[k] == pytest.approx(np.abs(residual).max() / bound, rel=0.1)
    assert (solution.solver, solution.precision, solution.converged) == ("cg", precision, True)
    assert f"{solution.num_iterations} iterations" in solution.message
    assert solution.message.count("rank") == (preconditioner != "none")


# --- checkpoints ------------------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As a signal raises it."""


def solve(
    folder: Path, stop_at: int | None = None, seen: list[int] | None = None, **parameters: Any
) -> tuple[np.ndarray, Solution]:
    """A fit of 250 rows; interrupted after an iteration if asked. ``seen`` gets the numbers of its iterations."""
    dataset = open_dataset(str(folder / "rows.zarr"))
    work = workspace(folder)

    def progress(phase: str, done: int, *_: float) -> None:
        if phase == "cg":
            if seen is not None:
                seen.append(done)
            if done == stop_at:
                raise Interrupted

    work.progress = progress
    with fit_rows(dataset, settings_for(dataset, alpha=(1.0, 0.3, 5.0), **parameters), work) as result:
        return result.dual_coef.read(0, N), result.solution


@pytest.fixture
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint every three iterations."""
    monkeypatch.setattr(Checkpoint, "is_due", lambda self, iteration: iteration % 3 == 0)


@pytest.mark.usefixtures("frequent")
@pytest.mark.parametrize(
    ("preconditioner", "precision", "stops"),
    [("none", "float64", [2, 20, 52]), ("rpcholesky", "float64", [1, 7]), ("rpcholesky", "mixed", [4, 11])],
)
def test_an_interrupted_solve_goes_on_to_the_same_bits(
    tmp_path: Path, preconditioner: Any, precision: str, stops: list[int]
) -> None:
    rows(tmp_path)
    parameters = {"precision": precision, "iterative": replace(TIGHT, preconditioner=preconditioner, rank=40)}
    expected, undisturbed = solve(tmp_path, **parameters)
    assert undisturbed.num_iterations > stops[-1]
    for stop in stops:
        with pytest.raises(Interrupted):
            solve(tmp_path, stop, **parameters)
    seen: list[int] = []
    found, solution = solve(tmp_path, seen=seen, **parameters)
    assert seen[0] == (stops[-1] - 1) // 3 * 3 + 1, "from the last checkpoint"
    assert np.array_equal(found, expected)
    assert solution.num_iterations == undisturbed.num_iterations
    assert solution.relative_residual == undisturbed.relative_residual
    assert not list((tmp_path / "store/solves").iterdir())


@pytest.mark.usefixtures("frequent")
@pytest.mark.parametrize("damage", [*DAMAGES, "another system", "x", "r", "converged"])
def test_a_state_that_is_damaged_foreign_or_forged_cannot_give_a_wrong_answer(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is forged has its checksums and all: the true residual decides."""
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    with pytest.raises(Interrupted):
        solve(tmp_path, 14)
    (path,) = (tmp_path / "store/solves").glob("*.zarr/cg/state/state.npz")
    checkpoint = Checkpoint(str(path.parent), str(np.load(path)["fingerprint"]))
    state, is_forged = checkpoint.load(), damage in ("x", "r", "converged")
    assert state is not None
    if damage == "another system":
        Checkpoint(str(path.parent), "another").save(state)
    elif damage == "converged":
        state.converged[:], state.live[:] = True, False
    elif is_forged:
        getattr(state, damage)[100:150] *= -1.0
    else:
        DAMAGES[damage](path)
    if is_forged:
        checkpoint.save(state)
    with caplog.at_level(logging.WARNING, "dkrr.linalg.cg"):
        found, solution = solve(tmp_path)
    assert max(solution.relative_residual) <= 1e-10
    close(found, expected, 1e-7 if is_forged else 1e-15)
    assert damage == "deleted" or ("does not hold" if is_forged else "is removed") in caplog.text


# --- factors as preconditioners ---------------------------------------------------------------------------------------


def factored(system: RidgeOperator, folder: Path) -> CholeskyFactor:
    return CholeskyFactor.prepare(system, workspace(folder), precision="float32")


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_a_factor_is_the_inverse_to_its_precision(scale: float, tmp_path: Path) -> None:
    """Also for residuals that float32 cannot hold, and for one that is zero."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.5)
    r = np.random.default_rng(0).standard_normal((N, 3)) * np.array([1.0, scale, 0.0])
    before = r.copy()
    z = FactorPreconditioner(factored(system, tmp_path)).apply(r, np.full(3, 0.5))
    assert np.array_equal(r, before)
    assert not z[:, 2].any()
    expected = np.linalg.solve(dense(system, dataset), r)
    assert np.all(np.abs(z - expected).max(axis=0) <= 1e-4 * np.abs(expected).max(axis=0))
    assert not list((tmp_path / "store/scratch").glob("*"))


@pytest.mark.parametrize("damage", ["deleted", "flipped", "truncated"])
def test_a_damaged_tile_of_a_factor_is_computed_again(damage: str, tmp_path: Path) -> None:
    made = factored(operator(rows(tmp_path), TILE, alpha=0.5), tmp_path)
    r, path = np.random.default_rng(0).standard_normal((N, 1)), Path(made.factor.location) / "c/2/1"
    whole, expected = path.read_bytes(), FactorPreconditioner(made).apply(r, np.array([0.5]))
    DAMAGES[damage](path)
    assert np.array_equal(FactorPreconditioner(made).apply(r, np.array([0.5])), expected)
    assert path.read_bytes() == whole


# --- mixed precision --------------------------------------------------------------------------------------------------


def mixed(system: RidgeOperator, work: Workspace, tol: float = 1e-10, **settings: Any) -> PreparedCG:
    chosen = IterativeSettings(tol=tol, **settings)
    return CGSolver(settings=chosen, float32_factor=True, accept_limit=True).prepare(system, work)


def near_duplicates(folder: Path, n: int) -> Dataset:
    """Rows in pairs that differ in the sixth digit."""
    rng = np.random.default_rng(3)
    x = np.repeat(rng.standard_normal((n // 2, 5)), 2, axis=0)
    x += 1e-6 * rng.standard_normal(x.shape)
    y = np.sin(x[:, 0]) + x[:, 1] + 0.1 * rng.standard_normal(len(x))
    return ingest(x, folder / "rows.zarr", y=y[:, None])


@pytest.mark.parametrize(("n", "tol"), [(300, 1e-10), (700, 1e-10), (300, 1e-14)])
def test_a_breakdown_shifts_the_preconditioner_only(
    n: int, tol: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And float64's own limit is accepted, and said."""
    dataset = near_duplicates(tmp_path, n)
    system, work = operator(dataset, 128, alpha=1e-6, **MATERN), workspace(tmp_path)
    values = np.asarray(dataset.y.read(0, n))
    u, solution = mixed(system, work, tol).solve(right_hand_sides(tmp_path, system.grid, values))
    assert "preconditioning with a factor of A +" in caplog.text
    assert "I because float32 broke down at row" in solution.message
    assert solution.converged
    assert solution.backward_error[0] <= 30 * n * EPS
    assert ("above 1.0e-14 in 1 of 1 targets and the limit of float64" in solution.message) == (tol == 1e-14)
    # the system is not shifted: its own residual says so, and the float64 factor's is no better than half
    residual = np.linalg.norm(values - dense(system, dataset) @ u.whole()) / np.linalg.norm(values)
    (folder := tmp_path / "direct").mkdir()
    _, reference, _ = CholeskyFactor.prepare(system, work).solve(right_hand_sides(folder, system.grid, values))
    assert residual < max(1e-9, 2 * reference.relative_residual[0])
    # what broke down is gone, and another fit does not try it again
    before = snapshot(tmp_path / "store/factors")
    caplog.clear()
    float32_factor(system, workspace(tmp_path), TIGHT)
    assert snapshot(tmp_path / "store/factors") == before
    assert not caplog.records


def test_an_indefinite_kernel_is_not_shifted_away(tmp_path: Path) -> None:
    system = operator(rows(tmp_path), TILE, alpha=1e-3, kernel="sigmoid", gamma=2.0, coef0=-1.0)
    with pytest.raises(NotPositiveDefiniteError, match="not positive definite at row"):
        float32_factor(system, workspace(tmp_path), TIGHT)


def test_a_wrong_factor_costs_iterations_and_not_the_answer(tmp_path: Path) -> None:
    """A tile with a good checksum that is not the right one; the direct solver would have to give up."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.1)
    prepared, values = mixed(system, workspace(tmp_path)), np.asarray(dataset.y.read(0, N))
    made = prepared.make()
    assert isinstance(made, FactorPreconditioner)
    factor = made.factored.factor
    factor.write(2, 1, 0.9 * factor.read(2, 1))
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values))
    assert solution.num_iterations > 5
    close(u.whole(), np.linalg.solve(dense(system, dataset), values))
