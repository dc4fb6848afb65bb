"""The iterative solver from rows on disk to coefficients on disk: around low-rank and Cholesky factors, interrupted,
damaged, and in mixed precision."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import StoreError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.kernels import make_kernel
from dkrr.linalg import preconditioner as lowrank
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.cg import Checkpoint, Preconditioner, conjugate_gradients
from dkrr.linalg.cg_solver import CGSolver, FactorPreconditioner, earlier_factor, make_float32_factor
from dkrr.linalg.direct import CholeskyFactor
from dkrr.linalg.gram import build_gram
from dkrr.linalg.operators import BlockColumns, RidgeOperator
from dkrr.linalg.preconditioner import LowRank, low_rank_fields, pivot_rows
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place
from dkrr.tiles import TileMatrix
from tests.faults import DAMAGES, flip
from tests.linalg.helpers import Apart, dense, operator, rows, snapshot

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
    prepared = CGSolver(system, workspace(tmp_path), settings, precision=precision)
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


@pytest.mark.parametrize(("known", "precision"), [(N, "float32"), (240, "float64")])
@pytest.mark.parametrize("weights", [False, True])
def test_an_old_factor_saves_iterations(weights: bool, known: int, precision: Any, tmp_path: Path) -> None:
    """Of another alpha, and of the rows before others were appended, which are divided by their diagonal entry."""
    rng = np.random.default_rng(0)
    x, y, weight = rng.standard_normal((N, 4)), rng.standard_normal((N, 2)), rng.uniform(0.2, 2.0, N)
    for part in (slice(0, known), slice(known, N))[: 1 + (known < N)]:
        given = {"y": y[part], "sample_weight": weight[part] if weights else None}
        dataset = ingest(x[part], tmp_path / "rows.zarr", append=part.start > 0, **given)
        for alpha in () if part.start else (3.0, 0.05):
            fit(dataset, tmp_path, solver="cholesky", alpha=(alpha,), precision=precision)
    plain, none = fit(dataset, tmp_path)
    found, some = fit(dataset, tmp_path, iterative=replace(TIGHT, preconditioner="factor"))
    close(found, plain)
    assert some.num_iterations < none.num_iterations / 2
    assert f"{precision} Cholesky factor of {known} rows and alpha 0.05 of an earlier fit" in some.message
    assert some.reused["preconditioner"]["rows"] == known
    system, r = operator(dataset, TILE, alpha=0.1), rng.standard_normal((N, 2))
    made = earlier_factor(system, workspace(tmp_path))
    z = made.apply(r, np.full(2, 0.1))
    diagonal = np.diag(dense(system, dataset))[known:, None]
    np.testing.assert_allclose(z[known:], r[known:] / diagonal, rtol=1e-12)
    DAMAGES["flipped"](Path(made.factored.factor.location) / "c/2/1")  # what it is made of is known
    assert np.array_equal(earlier_factor(system, workspace(tmp_path)).apply(r, np.full(2, 0.1)), z)


def test_without_an_old_factor_there_is_no_preconditioner_of_one(tmp_path: Path) -> None:
    """Also where one is of too few rows."""
    fit(rows(tmp_path, 230), tmp_path, solver="cholesky")
    dataset = ingest(np.ones((20, 4)), tmp_path / "rows.zarr", y=np.ones((20, 3)), append=True)
    with pytest.raises(StoreError, match="no whole factor of at least the first 240 of 250 rows"):
        fit(dataset, tmp_path, iterative=replace(TIGHT, preconditioner="factor"))


# --- mixed precision --------------------------------------------------------------------------------------------------


def mixed(system: RidgeOperator, work: Workspace, tol: float = 1e-10) -> CGSolver:
    return CGSolver(system, work, IterativeSettings(tol=tol), float32_factor=True)


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
    make_float32_factor(system, workspace(tmp_path), TIGHT)
    assert snapshot(tmp_path / "store/factors") == before
    assert not caplog.records


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


NARROW: dict[str, Any] = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 1.0}}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 128 rows, so that a few hundred rows make several, the last one ragged."""
    monkeypatch.setattr(lowrank, "MIN_CHUNK_ROWS", 128)
    monkeypatch.setattr(lowrank, "MAX_CHUNK_ROWS", 128)


def build(folder: Path, system: Any, rank: int, executor: Any = None, **settings: Any) -> LowRank:
    chosen = IterativeSettings(**settings)
    location = place(folder, "preconditioners", key_of(low_rank_fields(system, chosen, rank, "")) + ".zarr")
    return LowRank(system, Workspace(str(folder), executor or InProcessExecutor()), location, chosen, rank)


def whole(factor: LowRank) -> np.ndarray:
    panels = factor.panels
    return np.vstack(
        [np.hstack([panels.read(p, c) for p in range(len(panels.arrays))]) for c in range(panels.grid.num_tiles)]
    )


def matrix(system: Any, dataset: Any) -> np.ndarray:
    return dense(replace(system, alpha=0.0), dataset)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("method", ["rpcholesky", "nystrom"])
@pytest.mark.parametrize("weights", [False, True])
def test_the_factor(tmp_path: Path, method: Any, weights: bool) -> None:
    dataset = rows(tmp_path, n=700, weights=weights)
    system = operator(dataset, **NARROW)
    k, low = matrix(system, dataset), build(tmp_path, system, 200, preconditioner=method)
    f, pivots = whole(low), low.index
    left, scale = k - f @ f.T, np.abs(k).max()
    assert len(set(pivots.tolist())) == low.panels.rank == 200
    assert np.abs(left[:, pivots]).max() < 1e-13 * scale, "the columns of the pivots are exact"
    assert np.linalg.eigvalsh(left)[0] > -1e-12 * scale, "the residual is positive semi-definite"
    assert all(after < before for before, after in pairwise(low.trace))
    assert low.trace[-1] == pytest.approx(left.trace() / k.trace(), rel=1e-10)
    if weights:
        zero = dataset.weight.read(0, 700)[:, 0] == 0
        assert not zero[pivots].any(), "a row of weight zero was drawn"
        assert not f[zero].any()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("alphas", [(0.1, 1e-3, 0.1), (1.0, 0.1, 1e-2, 1e-3, 1e-4)])
def test_the_inverse_wherever_it_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alphas: Any) -> None:
    system, alpha = operator(rows(tmp_path, n=300, weights=True), **NARROW), np.array(alphas)
    low = build(tmp_path, system, 70)
    f, r = whole(low), np.random.default_rng(0).standard_normal((300, len(alpha)))
    before, held = r.copy(), low.apply(r, alpha)
    for k, value in enumerate(alphas):
        expected = np.linalg.solve(f @ f.T + value * np.eye(300), r[:, k])
        assert np.abs(held[:, k] - expected).max() < 1e-10 * np.abs(expected).max()
    monkeypatch.setattr(lowrank, "HELD_BYTES", 0)
    ways = [build(tmp_path, system, 70)]
    for cores in (2, 1):  # as many as there are workers, which do it where they are more
        monkeypatch.setattr(lowrank, "cpu_count", lambda cores=cores: cores)
        ways.append(build(tmp_path, system, 70, Apart()))
    assert [way._applies is None for way in ways] == [True, True, False]
    for way in (*ways, *ways):
        assert np.array_equal(way.apply(r, alpha), held)
    assert np.array_equal(r, before)
    assert not list((tmp_path / "scratch").glob("*")), "vectors of an application were left behind"


def test_it_saves_iterations(tmp_path: Path) -> None:
    dataset = rows(tmp_path, n=600, t=2)
    system = operator(dataset, kernel="matern", kernel_params={"nu": 1.5, "length_scale": 3.0})
    k, y, counts = matrix(system, dataset), dataset.y.read(0, 600), []
    for method in ("rpcholesky", "nystrom", None):
        each = build(tmp_path, system, 150, preconditioner=method) if method else Preconditioner()
        result = conjugate_gradients(lambda v: k @ v, y, np.full(2, 1e-3), each, IterativeSettings(tol=1e-8))
        counts.append(result.num_iterations)
    assert counts[0] < counts[2] / 4
    assert counts[0] <= counts[1] < counts[2]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("damage", [Path.unlink, flip])
@pytest.mark.parametrize("executor", [InProcessExecutor(), Apart()], ids=["here", "apart"])
def test_damage_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, executor: Any) -> None:
    """Between applications, and when it is opened again."""
    monkeypatch.setattr(lowrank, "HELD_BYTES", 0)
    monkeypatch.setattr(lowrank, "cpu_count", lambda: 1)
    system, r = operator(rows(tmp_path, n=400), **NARROW), np.ones((400, 1))
    low = build(tmp_path / "s", system, 150, executor)
    undisturbed = {name: data for name, (data, _) in snapshot(tmp_path / "s").items()}
    expected = low.apply(r, np.array([0.1]))
    for names in (["panel-0000-*/f/c/0/0", "panel-0001-*/f/c/2/0"], ["panel-0001-*/f/c/0/0", "gram/c/0/0"]):
        for name in names:
            damage(next((tmp_path / "s").rglob(name)))
        if "gram/c/0/0" in names:
            low = build(tmp_path / "s", system, 150, executor)
        assert np.array_equal(low.apply(r, np.array([0.1])), expected)
        assert {name: data for name, (data, _) in snapshot(tmp_path / "s").items()} == undisturbed


@pytest.mark.usefixtures("small_chunks")
def test_a_given_matrix(tmp_path: Path) -> None:
    dataset = rows(tmp_path, n=333, weights=True)
    system = operator(dataset, tile_size=100, **NARROW)
    tiles = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
    build_gram(system, tiles, Workspace("", InProcessExecutor()))
    from_kernel = build(tmp_path, system, 90)
    from_tiles = build(tmp_path, replace(system, gram=tiles, kernel=None), 90)
    np.testing.assert_allclose(whole(from_tiles), whole(from_kernel), atol=1e-12)


@pytest.mark.parametrize("method", ["rpcholesky", "nystrom"])
def test_duplicated_rows_and_one_feature(tmp_path: Path, method: Any) -> None:
    x = np.repeat(np.linspace(-1, 1, 9), 30)[:, None]
    dataset = ingest(x, tmp_path / "rows.zarr", y=x)
    system = operator(dataset, kernel="matern", kernel_params={"nu": 1.5, "length_scale": 0.5})
    low = build(tmp_path, system, 100, preconditioner=method)
    assert low.panels.rank == 9, "nine different rows have a Gram matrix of rank nine"
    assert low.trace[-1] < 1e-13
    r = np.random.default_rng(0).standard_normal((270, 1))
    expected = np.linalg.solve(matrix(system, dataset) + 0.1 * np.eye(270), r)
    np.testing.assert_allclose(low.apply(r, np.array([0.1])), expected, atol=1e-10)


def test_alpha_below_rounding_shifts_the_preconditioner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = rows(tmp_path, n=300)
    low = build(tmp_path, operator(dataset, gamma=0.01), 100)
    r = np.random.default_rng(0).standard_normal((300, 2))
    with caplog.at_level("INFO", logger="dkrr.linalg"):
        z = low.apply(r, np.array([0.0, 1e-3]))
    assert "the preconditioner (and only it) has" in caplog.text
    assert np.isfinite(z).all()
    assert (np.einsum("ij,ij->j", r, z) > 0).all()


def test_pivots_in_memory() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3))
    x[250:] = x[:250]
    kernel = make_kernel("rbf", gamma=0.5).resolve(3)
    pivots, k = pivot_rows(kernel, x, 60, 1), kernel(x, x)

    def left(index: np.ndarray) -> float:
        return float(np.trace(k - k[:, index] @ np.linalg.lstsq(k[np.ix_(index, index)], k[index], rcond=1e-12)[0]))

    assert left(pivots) < 0.7 * left(rng.permutation(500)[:60])
    assert len(pivot_rows(kernel, x, 500, 1)) <= 250, "a row that was there before has nothing left"
    assert len(set(pivot_rows(kernel, x, 60, 1, max_bytes=8 * 100 * 60).tolist())) == 60
