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
from dkrr.errors import ConvergenceError, DamagedChunkError, NotPositiveDefiniteError, StoreError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg import direct
from dkrr.linalg import factor_precondition as factors
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cg import Checkpoint, Identity, conjugate_gradients
from dkrr.linalg.cg_solver import CGSolver, PreparedCG
from dkrr.linalg.direct import CholeskySolver, factorise
from dkrr.linalg.factor_precondition import FactorPreconditioner, float32_factor
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid, TileMatrix
from tests.faults import DAMAGES, failing_at, lasts_from
from tests.linalg.given import store_given_matrix
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
    base = dense(system.with_alpha(0.0), dataset)
    for k, found in enumerate(u.whole().T):
        a = base + alpha[k] * np.eye(N)
        np.testing.assert_allclose(found, np.linalg.solve(a, values[:, k]), rtol=1e-6, atol=1e-7)
        residual = values[:, k] - a @ found
        assert np.linalg.norm(residual) <= 1.01e-10 * np.linalg.norm(values[:, k])
        bound = np.abs(a).sum(axis=1).max() * np.abs(found).max() + np.abs(values[:, k]).max()
        assert solution.backward_error[k] == pytest.approx(np.abs(residual).max() / bound, rel=0.1)
    assert (solution.solver, solution.precision, solution.converged) == ("cg", precision, True)
    assert 0 < solution.num_iterations < (500 if preconditioner == "none" else 200)
    assert f"{solution.num_iterations} iterations" in solution.message
    assert solution.message.count("rank") == (preconditioner != "none")
    assert Solution.from_dict(solution.to_dict()) == solution


WAYS: dict[str, dict[str, Any]] = {
    "rpcholesky": {"iterative": IterativeSettings(tol=1e-10, rank=30)},
    "stored": {"gram": "stored", "iterative": IterativeSettings(tol=1e-10, rank=30)},
    "float32 products": {"precision": "mixed"},
    "float32 factor": {"solver": "cholesky", "precision": "mixed"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("weights", "alpha"), [(False, (0.1,)), (True, (0.1, 3.0, 0.1))])
def test_every_way_agrees_with_the_direct_solver(
    tmp_path: Path, way: str, weights: bool, alpha: tuple[float, ...]
) -> None:
    dataset = rows(tmp_path, weights=weights)
    direct, _ = fit(dataset, tmp_path, alpha=alpha, solver="cholesky")
    found, solution = fit(dataset, tmp_path, alpha=alpha, **WAYS[way])
    close(found, direct)
    assert solution.converged
    assert max(solution.relative_residual) <= 1e-10
    assert len(solution.relative_residual) == 3
    assert not list((tmp_path / "store/solves").iterdir()), "right-hand sides, state, preconditioner, lock"
    if weights:
        assert not found[::7].any()
    assert way != "float32 factor" or 0 < solution.num_iterations < 20
    _, same = fit(dataset, tmp_path, start=direct, alpha=alpha, **WAYS[way])
    assert same.num_iterations <= 1


def test_a_model_that_did_not_converge_says_so(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    few = replace(TIGHT, max_iter=5)
    with pytest.raises(ConvergenceError, match="did not converge in 5 iterations"):
        fit(dataset, tmp_path, iterative=few)
    assert list((tmp_path / "store/solves").iterdir())  # more iterations go on from there
    _, solution = fit(dataset, tmp_path, iterative=replace(few, allow_unconverged=True))
    assert not solution.converged
    assert solution.num_iterations == 5
    assert "NOT CONVERGED to 1.0e-10 in 3 of 3 targets" in solution.message
    assert max(solution.relative_residual) > 1e-10
    assert not list((tmp_path / "store/solves").iterdir())


def test_an_indefinite_matrix_ends_the_fit_and_leaves_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((100, 100))
    work = workspace(tmp_path)
    holder, given, digest = store_given_matrix(matrix + matrix.T, rng.standard_normal(100), None, work.store, TILE)
    settings = FitSettings(kernel=None, alpha=(0.1,), tile_size=TILE, gram="stored", solver="cg", iterative=TIGHT)
    with (
        pytest.raises(NotPositiveDefiniteError, match=r"CG: p\^T A p = .* <= 0 at iteration"),
        fit_rows(holder, settings, work, given=given, source_digest=digest),
    ):
        pass
    assert not list((tmp_path / "store/solves").iterdir())


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


def checkpoint_of(path: Path) -> Checkpoint:
    return Checkpoint(str(path.parent), str(np.load(path)["fingerprint"]))


def state_file(folder: Path) -> Path:
    (found,) = (folder / "store/solves").glob("*.zarr/cg/state/state.npz")
    return found


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
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)
    with failing_at("write*/state.npz:1:eio") as points:
        lasts_from(points, 4, monkeypatch)
        with pytest.raises(StoreError, match="cannot use its storage"):
            solve(tmp_path)
    seen: list[int] = []
    found, _ = solve(tmp_path, seen=seen)
    assert seen[0] == 10
    assert np.array_equal(found, expected)


@pytest.mark.usefixtures("frequent")
@pytest.mark.parametrize("damage", [*DAMAGES, "another system"])
def test_a_state_that_is_damaged_or_of_another_system_is_not_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    with pytest.raises(Interrupted):
        solve(tmp_path, 14)
    path = state_file(tmp_path)
    if damage == "another system":
        state = checkpoint_of(path).load()
        assert state is not None
        Checkpoint(str(path.parent), "another").save(state)
    else:
        DAMAGES[damage](path)
    seen: list[int] = []
    with caplog.at_level(logging.WARNING, "dkrr.linalg.cg"):
        found, _ = solve(tmp_path, seen=seen)
    assert seen[0] == 1
    assert np.array_equal(found, expected)
    assert damage == "deleted" or "is removed" in caplog.text


@pytest.mark.usefixtures("frequent")
@pytest.mark.parametrize("name", ["x", "r", "converged"])
def test_a_forged_state_cannot_give_a_wrong_answer(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checksums and all: the true residual decides."""
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    with pytest.raises(Interrupted):
        solve(tmp_path, 14)
    checkpoint = checkpoint_of(state_file(tmp_path))
    state = checkpoint.load()
    assert state is not None
    if name == "converged":
        state.converged[:] = True
        state.live[:] = False
    else:
        getattr(state, name)[100:150] *= -1.0
    checkpoint.save(state)
    with caplog.at_level(logging.WARNING, "dkrr.linalg.cg"):
        found, solution = solve(tmp_path)
    assert "does not hold" in caplog.text
    assert max(solution.relative_residual) <= 1e-10
    close(found, expected)


# --- factors as preconditioners ---------------------------------------------------------------------------------------


def factor_of(system: RidgeOperator, folder: Path, dtype: str = "float32") -> TileMatrix:
    factor = TileMatrix.create(str(folder), system.grid, dtype=dtype)
    factorise(system, factor, InProcessExecutor())
    return factor


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_a_factor_is_the_inverse_to_its_precision(scale: float, tmp_path: Path) -> None:
    """Also for residuals that float32 cannot hold, and for one that is zero."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.5)
    r = np.random.default_rng(0).standard_normal((N, 3)) * np.array([1.0, scale, 0.0])
    before = r.copy()
    z = FactorPreconditioner(factor_of(system, tmp_path / "L"), workspace(tmp_path)).apply(r, np.full(3, 0.5))
    assert np.array_equal(r, before)
    assert not z[:, 2].any()
    expected = np.linalg.solve(dense(system, dataset), r)
    assert np.all(np.abs(z - expected).max(axis=0) <= 1e-4 * np.abs(expected).max(axis=0))
    assert not list((tmp_path / "store/scratch").glob("*"))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("rows_known", "alpha_known"), [(N, 1e-1), (240, 1e-2), (235, 5e-3)])
def test_an_old_factor_saves_iterations(rows_known: int, alpha_known: float, weights: bool, tmp_path: Path) -> None:
    """Of another alpha, and of the rows before others were appended, which are divided by their diagonal entry."""
    dataset = rows(tmp_path, weights=weights)
    system = operator(dataset, TILE, alpha=1e-2, gamma=0.25)
    old = replace(system, alpha=alpha_known, grid=TileGrid(rows_known, TILE))
    precondition = FactorPreconditioner(factor_of(old, tmp_path / "L", "float64"), workspace(tmp_path), system=system)
    a = dense(system.with_alpha(0.0), dataset)
    rhs, alpha = np.random.default_rng(0).standard_normal((N, 2)), np.array([1e-2, 1e-2])
    none, some = (
        conjugate_gradients(lambda v: a @ v, rhs, alpha, each, IterativeSettings(tol=1e-9))
        for each in (Identity(), precondition)
    )
    assert some.num_iterations < none.num_iterations / 2
    z = precondition.apply(rhs, alpha)[rows_known:]
    np.testing.assert_allclose(z, (rhs / (np.diag(a)[:, None] + alpha))[rows_known:], rtol=1e-12)


@pytest.mark.parametrize("damage", ["deleted", "flipped", "truncated"])
def test_a_damaged_tile_of_a_factor_is_computed_again(damage: str, tmp_path: Path) -> None:
    system = operator(rows(tmp_path), TILE, alpha=0.5)
    factor = factor_of(system, tmp_path / "L")
    r, alpha = np.random.default_rng(0).standard_normal((N, 1)), np.array([0.5])
    path = tmp_path / "L" / factor.array.chunk_key((2, 1))
    whole, expected = path.read_bytes(), FactorPreconditioner(factor, workspace(tmp_path)).apply(r, alpha)
    DAMAGES[damage](path)
    with pytest.raises(DamagedChunkError):
        FactorPreconditioner(factor, workspace(tmp_path)).apply(r, alpha)
    again = FactorPreconditioner(factor, workspace(tmp_path), operator=system)
    assert np.array_equal(again.apply(r, alpha), expected)
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


@pytest.mark.parametrize(("n", "weights"), [(1, False), (64, True), (250, True)])
def test_the_answer_in_mixed_precision_is_the_float64_answer(n: int, weights: bool, tmp_path: Path) -> None:
    """Ragged tiles, several targets of which one is zero, rows without weight."""
    dataset = rows(tmp_path, n=n, weights=weights)
    system = operator(dataset, TILE, alpha=0.1)
    values = np.random.default_rng(0).standard_normal((n, 4)) * np.array([1.0, 1e-30, 0.0, 1e30])
    if dataset.weight is not None:
        values *= np.sqrt(dataset.weight.read(0, n))
    u, solution = mixed(system, workspace(tmp_path), 1e-12).solve(right_hand_sides(tmp_path, system.grid, values))
    found, expected = u.whole(), np.linalg.solve(dense(system, dataset), values)
    assert np.all(np.abs(found - expected).max(axis=0) <= 1e-9 * np.abs(expected).max(axis=0))
    assert not found[:, 2].any()
    assert (solution.solver, solution.precision, solution.converged) == ("cholesky", "mixed", True)
    assert max(solution.relative_residual) <= 1e-12
    assert max(solution.backward_error) <= 30 * n * EPS
    assert 0 < solution.num_iterations <= 5
    assert "broke down" not in solution.message
    assert {"factorise", "precondition"} <= set(solution.seconds)


@pytest.mark.parametrize("n", [300, 700])
def test_a_breakdown_shifts_the_preconditioner_only(n: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = near_duplicates(tmp_path, n)
    system = operator(dataset, 128, alpha=1e-6, **MATERN)
    work = workspace(tmp_path)
    values = np.asarray(dataset.y.read(0, n))
    with caplog.at_level(logging.WARNING, "dkrr.linalg"):
        u, solution = mixed(system, work).solve(right_hand_sides(tmp_path, system.grid, values))
    assert "preconditioning with a factor of A +" in caplog.text
    assert "I because float32 broke down at row" in solution.message
    # the system is not shifted: its own residual says so, and the float64 factor's is no better than half
    residual = np.linalg.norm(values - dense(system, dataset) @ u.whole()) / np.linalg.norm(values)
    (folder := tmp_path / "direct").mkdir()
    _, reference, _ = CholeskySolver().prepare(system, work).solve(right_hand_sides(folder, system.grid, values))
    assert residual < max(1e-9, 2 * reference.relative_residual[0])
    assert solution.relative_residual[0] == pytest.approx(residual, rel=0.1)
    # what broke down is gone, and another fit does not try it again
    assert len(list((tmp_path / "store/factors").glob("*.zarr"))) == 2
    before = snapshot(tmp_path / "store/factors")
    caplog.clear()
    float32_factor(system, workspace(tmp_path), TIGHT)
    assert snapshot(tmp_path / "store/factors") == before
    assert not caplog.records


def test_shifts_grow_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[float] = []

    def broken(operator: Any, *arguments: Any, **options: Any) -> Any:
        tried.append(operator.alpha - 0.1)
        raise NotPositiveDefiniteError("broken", row=3, pivot=-1e-9, alpha=operator.alpha, suggested_alpha=1.0)

    monkeypatch.setattr(direct, "factorise", broken)
    with pytest.raises(NotPositiveDefiniteError, match="breaks down, too"):
        float32_factor(operator(rows(tmp_path), TILE, alpha=0.1), workspace(tmp_path), TIGHT)
    first = factors.FIRST_SHIFT * factors.EPS32 * N * 1.1
    assert tried == pytest.approx([0, first, 10 * first, 100 * first, 1000 * first], rel=1e-6)


def test_an_indefinite_kernel_is_not_shifted_away(tmp_path: Path) -> None:
    system = operator(rows(tmp_path), TILE, alpha=1e-3, kernel="sigmoid", gamma=2.0, coef0=-1.0)
    with pytest.raises(NotPositiveDefiniteError, match="not positive definite at row"):
        float32_factor(system, workspace(tmp_path), TIGHT)


def test_float64_s_own_limit_is_accepted_and_said(tmp_path: Path) -> None:
    dataset = near_duplicates(tmp_path, 300)
    system = operator(dataset, 128, alpha=1e-6, **MATERN)
    rhs = right_hand_sides(tmp_path, system.grid, np.asarray(dataset.y.read(0, 300)))
    _, solution = mixed(system, workspace(tmp_path), 1e-14).solve(rhs)
    assert solution.converged
    assert solution.relative_residual[0] > 1e-14
    assert solution.backward_error[0] <= 30 * 300 * EPS
    assert "above 1.0e-14 in 1 of 1 targets and the limit of float64" in solution.message


def test_a_wrong_factor_costs_iterations_and_not_the_answer(tmp_path: Path) -> None:
    """A tile with a good checksum that is not the right one; the direct solver would have to give up."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.1)
    prepared, values = mixed(system, workspace(tmp_path)), np.asarray(dataset.y.read(0, N))
    made = prepared.make()
    assert isinstance(made, FactorPreconditioner)
    made.factor.write(2, 1, 0.9 * made.factor.read(2, 1))
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values))
    assert solution.num_iterations > 5
    close(u.whole(), np.linalg.solve(dense(system, dataset), values))
