"""The iterative solver from rows on disk to coefficients on disk: dense comparisons, checkpoints, and what is kept."""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import open_dataset
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import ConvergenceError, NotPositiveDefiniteError, ParameterError, StoreError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cg import solver as iterative
from dkrr.linalg.cg.checkpoint import StoredCheckpoint
from dkrr.linalg.cg.solver import CGSolver
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from tests.faults import DAMAGES, chunk_files, failing_at
from tests.linalg.given import store_given_matrix
from tests.linalg.helpers import dense, operator, rows

TIGHT = IterativeSettings(tol=1e-10, preconditioner="none")


def workspace(folder: Path) -> Workspace:
    return Workspace(store=str(folder / "store"), executor=InProcessExecutor(), blas="test")


def right_hand_sides(folder: Path, grid: Any, values: np.ndarray) -> BlockColumns:
    rhs = BlockColumns.create(str(folder / "solve.zarr"), "rhs", grid, values.shape[1], "float64")
    for i, panel in rhs.blocks():
        rhs.write(i, panel, values[grid.span(i), rhs.columns(panel)])
    return rhs


def settings_for(dataset: Any, **parameters: Any) -> FitSettings:
    values: dict[str, Any] = {"alpha": (0.1,), "tile_size": 64, "solver": "cg", "iterative": TIGHT} | parameters
    return FitSettings(kernel=operator(dataset).kernel, **values)


def fit(dataset: Any, folder: Path, start: Any = None, **parameters: Any) -> tuple[np.ndarray, Solution]:
    with fit_rows(dataset, settings_for(dataset, **parameters), workspace(folder), start=start) as result:
        return result.dual_coef.read(0, dataset.num_rows), result.solution


# --- the answer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float64", "mixed"])
@pytest.mark.parametrize(("preconditioner", "rank"), [("none", "auto"), ("rpcholesky", 40), ("nystrom", "auto")])
def test_solution_matches_a_dense_solve(tmp_path: Path, precision: Any, preconditioner: Any, rank: Any) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset)
    values = np.random.default_rng(0).standard_normal((250, 5))
    alpha = np.array([0.01, 1.0, 0.1, 10.0, 0.1])
    settings = IterativeSettings(tol=1e-10, preconditioner=preconditioner, rank=rank)
    prepared = CGSolver(settings=settings, precision=precision).prepare(system, workspace(tmp_path))
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values), alpha)
    found = np.vstack([u.read_rows(i) for i in range(system.grid.num_tiles)])
    base = dense(system.with_alpha(0.0), dataset)
    for k in range(5):
        a = base + alpha[k] * np.eye(250)
        np.testing.assert_allclose(found[:, k], np.linalg.solve(a, values[:, k]), rtol=1e-6, atol=1e-7)
        residual = values[:, k] - a @ found[:, k]
        assert np.linalg.norm(residual) <= 1.01e-10 * np.linalg.norm(values[:, k])
        bound = np.abs(a).sum(axis=1).max() * np.abs(found[:, k]).max() + np.abs(values[:, k]).max()
        assert solution.backward_error[k] == pytest.approx(np.abs(residual).max() / bound, rel=0.1)
    assert solution.solver == "cg"
    assert solution.precision == precision
    assert solution.converged
    assert 0 < solution.num_iterations < (500 if preconditioner == "none" else 200)
    assert f"{solution.num_iterations} iterations" in solution.message
    assert solution.message.count("rank") == (preconditioner != "none")
    assert Solution.from_dict(solution.to_dict()) == solution


@pytest.mark.parametrize("alpha", [(0.1,), (0.1, 3.0, 0.1)])
@pytest.mark.parametrize("gram", ["stored", "on_the_fly"])
@pytest.mark.parametrize("weights", [False, True])
def test_fit_rows_agrees_with_the_direct_solver(
    tmp_path: Path, alpha: tuple[float, ...], gram: str, weights: bool
) -> None:
    dataset = rows(tmp_path, weights=weights)
    direct, _ = fit(dataset, tmp_path, alpha=alpha, solver="cholesky")
    settings = IterativeSettings(tol=1e-10, rank=30)
    found, solution = fit(dataset, tmp_path, alpha=alpha, gram=gram, iterative=settings)
    np.testing.assert_allclose(found, direct, rtol=0, atol=1e-7 * np.abs(direct).max())
    assert max(solution.relative_residual) <= 1e-10
    assert len(solution.relative_residual) == 3
    assert not list((tmp_path / "store/solves").iterdir()), "right-hand sides, state, preconditioner, lock"
    if weights:
        assert not found[::7].any()


def test_mixed_precision_gives_the_same_answer(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    direct, _ = fit(dataset, tmp_path, solver="cholesky")
    found, solution = fit(dataset, tmp_path, precision="mixed")
    np.testing.assert_allclose(found, direct, rtol=0, atol=1e-7 * np.abs(direct).max())
    assert solution.precision == "mixed"
    assert max(solution.relative_residual) <= 1e-10
    with pytest.raises(ParameterError, match="float32 with solver cg"):
        fit(dataset, tmp_path, precision="float32")


@pytest.mark.parametrize("alpha", [(0.1,), (0.1, 3.0, 0.1)])
@pytest.mark.parametrize("weights", [False, True])
def test_iterations_around_a_float32_factor(tmp_path: Path, alpha: tuple[float, ...], weights: bool) -> None:
    dataset = rows(tmp_path, weights=weights)
    direct, _ = fit(dataset, tmp_path, alpha=alpha, solver="cholesky")
    found, solution = fit(dataset, tmp_path, alpha=alpha, solver="cholesky", precision="mixed")
    np.testing.assert_allclose(found, direct, rtol=0, atol=1e-7 * np.abs(direct).max())
    assert 0 < solution.num_iterations < 20
    assert solution.converged
    assert max(solution.relative_residual) <= 1e-10
    _, warm = fit(dataset, tmp_path, alpha=alpha, solver="cholesky", precision="mixed", start=direct)
    assert warm.num_iterations == 0


@pytest.mark.parametrize("weights", [False, True])
def test_a_given_matrix(tmp_path: Path, weights: bool) -> None:
    dataset = rows(tmp_path, weights=weights)
    system = operator(dataset)
    x = dataset.X.read(0, 250)
    weight = None if dataset.weight is None else dataset.weight.read(0, 250)[:, 0]
    y = dataset.y.read(0, 250)
    expected, _ = fit(dataset, tmp_path, solver="cholesky")
    work = workspace(tmp_path / "given")
    holder, given, digest = store_given_matrix(system.kernel(x, x), y, weight, work.store, 64)
    settings = replace(settings_for(dataset), kernel=None, gram="stored")
    with fit_rows(holder, settings, work, given=given, source_digest=digest) as result:
        found = result.dual_coef.read(0, 250)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 * np.abs(expected).max())


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
    matrix = matrix + matrix.T
    work = workspace(tmp_path)
    holder, given, digest = store_given_matrix(matrix, rng.standard_normal(100), None, work.store, 64)
    settings = FitSettings(kernel=None, alpha=(0.1,), tile_size=64, gram="stored", solver="cg", iterative=TIGHT)
    with (
        pytest.raises(NotPositiveDefiniteError, match=r"CG: p\^T A p = .* <= 0 at iteration"),
        fit_rows(holder, settings, work, given=given, source_digest=digest),
    ):
        pass
    assert not list((tmp_path / "store/solves").iterdir())


def test_an_earlier_answer_is_a_start(tmp_path: Path) -> None:
    dataset = rows(tmp_path, weights=True)
    cold, solution = fit(dataset, tmp_path)
    _, warm = fit(dataset, tmp_path, start=cold * (1 + 1e-6))
    assert warm.num_iterations < solution.num_iterations / 1.5
    _, same = fit(dataset, tmp_path, start=cold)
    assert same.num_iterations <= 1
    shorter, _ = fit(dataset, tmp_path, start=cold[:200])
    np.testing.assert_allclose(shorter, cold, rtol=0, atol=1e-7 * np.abs(cold).max())


def test_what_decides_the_answer_decides_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = rows(tmp_path)
    keys: list[str] = []
    monkeypatch.setattr("dkrr.fit.fitting.hold_lock", lambda place: keys.append(str(place)) or nullcontext())
    variants: list[dict[str, Any]] = [
        {},
        {"iterative": replace(TIGHT, tol=1e-9)},
        {"precision": "mixed"},
        {"solver": "cholesky"},
        {"alpha": (0.2,)},
    ]
    for parameters in variants:
        fit(dataset, tmp_path, **parameters)
    assert len(set(keys[1::2])) == len(variants)  # before each is that of the fit by whatever way
    # a limit on iterations decides whether there is an answer, not which
    fit(dataset, tmp_path, iterative=replace(TIGHT, max_iter=900))
    assert keys[-1] == keys[1]
    # the tolerance means nothing to a direct solve
    fit(dataset, tmp_path, solver="cholesky", iterative=replace(TIGHT, tol=1e-9))
    assert keys[-1] == keys[7]


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
        return result.dual_coef.read(0, 250), result.solution


class Frequent(StoredCheckpoint):
    """A checkpoint every three iterations."""

    def __init__(self, *arguments: Any, **parameters: Any) -> None:
        super().__init__(*arguments, **parameters | {"every_iterations": 3})


@pytest.fixture
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterative, "StoredCheckpoint", Frequent)


def state_folder(folder: Path) -> Path:
    (found,) = (folder / "store/solves").glob("*.zarr/cg/state")
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
@pytest.mark.parametrize("site", ["cg.checkpoint.before_state", "cg.checkpoint.after_state", "chunk.mid_write"])
def test_a_checkpoint_that_is_interrupted_leaves_the_one_before(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every place of the fourth checkpoint; EIO three times, so that trying again is of no use."""
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    with failing_at(f"{site}:1:eio") as points:
        rule = points.rules[0]
        inside = [0]
        save = StoredCheckpoint.save

        def counted(self: StoredCheckpoint, state: Any) -> None:
            inside[0] = state.iteration
            save(self, state)
            inside[0] = 0

        monkeypatch.setattr(StoredCheckpoint, "save", counted)
        monkeypatch.setattr("dkrr.engine.tasks.time.sleep", lambda seconds: None)
        monkeypatch.setattr(rule, "is_due", lambda: inside[0] == 12)
        with pytest.raises(StoreError, match="cannot use its storage"):
            solve(tmp_path)
    seen: list[int] = []
    found, _ = solve(tmp_path, seen=seen)
    assert seen[0] == (13 if site.endswith("after_state") else 10)
    assert np.array_equal(found, expected)


@pytest.mark.usefixtures("frequent")
@pytest.mark.parametrize("damage", [*DAMAGES, "state", "both"])
def test_a_damaged_checkpoint_is_answered_by_the_other_generation(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    with pytest.raises(Interrupted):
        solve(tmp_path, 14)
    folder = state_folder(tmp_path)
    named = max("01", key=lambda number: json.loads((folder / number / "state.json").read_text())["iteration"])
    files = chunk_files(folder / str(named))
    if damage == "state":
        (folder / f"{named}/state.json").write_text('{"fingerprint": 3}')
    elif damage == "both":
        for path in chunk_files(folder):
            path.unlink()
    else:
        for number, path in enumerate(files):
            if number % 2:
                DAMAGES[damage](path)
    seen: list[int] = []
    with caplog.at_level(logging.WARNING, "dkrr.linalg.cg.checkpoint"):
        found, _ = solve(tmp_path, seen=seen)
    assert seen[0] == {"both": 1}.get(damage, 10)
    assert np.array_equal(found, expected)
    assert caplog.records, "it is said"


@pytest.mark.usefixtures("frequent")
def test_the_state_of_another_system_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows(tmp_path)
    with pytest.raises(Interrupted):
        solve(tmp_path, 14)
    folder = state_folder(tmp_path)
    for generation in "01":
        document = json.loads((folder / generation / "state.json").read_text())
        (folder / generation / "state.json").write_text(json.dumps(document | {"fingerprint": "0" * 40}))
    seen: list[int] = []
    with caplog.at_level(logging.WARNING, "dkrr.linalg.cg.checkpoint"):
        solve(tmp_path, seen=seen)
    assert seen[0] == 1
    assert "belongs to another system and is removed" in caplog.text


@pytest.mark.usefixtures("frequent")
@pytest.mark.parametrize("name", ["x", "r", "converged"])
def test_a_forged_state_cannot_give_a_wrong_answer(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checksums and all: the true residual decides."""
    rows(tmp_path)
    expected, _ = solve(tmp_path)
    with pytest.raises(Interrupted):
        solve(tmp_path, 14)
    folder = state_folder(tmp_path)
    checkpoint = StoredCheckpoint(str(folder), json.loads((folder / "0/state.json").read_text())["fingerprint"])
    state = checkpoint.load()
    assert state is not None
    if name == "converged":
        state.converged[:] = True
        state.keep(np.zeros(len(state.live), np.bool_))
    else:
        getattr(state, name)[100:150] *= -1.0
    checkpoint.save(state)
    with caplog.at_level(logging.WARNING, "dkrr.linalg.cg.iteration"):
        found, solution = solve(tmp_path)
    assert "does not hold" in caplog.text
    assert max(solution.relative_residual) <= 1e-10
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 * np.abs(expected).max())
