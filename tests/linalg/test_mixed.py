"""Mixed precision: the float64 answer from a float32 factor, breakdowns, interruptions, damage."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import ConvergenceError, NotPositiveDefiniteError
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cg import mixed
from dkrr.linalg.cg.mixed import MixedSolver
from dkrr.linalg.factor import direct
from dkrr.linalg.factor.direct import CholeskySolver
from dkrr.linalg.solution import IterativeSettings, Solution
from dkrr.linalg.workspace import Workspace
from tests.linalg.helpers import dense, operator, rows, snapshot

N, TILE = 250, 64
EPS = np.finfo(np.float64).eps


def workspace(folder: Path, executor: Any = None) -> Workspace:
    return Workspace(store=str(folder / "store"), executor=executor or InProcessExecutor(), blas="test")


def solver(tol: float = 1e-10, **parameters: Any) -> MixedSolver:
    return MixedSolver(settings=IterativeSettings(tol=tol, **parameters))


def right_hand_sides(folder: Path, grid: Any, values: np.ndarray) -> BlockColumns:
    rhs = BlockColumns.create(str(folder / "rhs.zarr"), "rhs", grid, values.shape[1], "float64")
    for i, panel in rhs.blocks():
        rhs.write(i, panel, values[grid.span(i), rhs.columns(panel)])
    return rhs


def values_of(u: BlockColumns) -> np.ndarray:
    return np.vstack([u.read_rows(i) for i in range(u.grid.num_tiles)])


def near_duplicates(folder: Path, n: int) -> Dataset:
    """Rows in pairs that differ in the sixth digit."""
    rng = np.random.default_rng(3)
    x = np.repeat(rng.standard_normal((n // 2, 5)), 2, axis=0)
    x += 1e-6 * rng.standard_normal(x.shape)
    y = np.sin(x[:, 0]) + x[:, 1] + 0.1 * rng.standard_normal(len(x))
    return ingest(x, folder / "rows.zarr", y=y[:, None])


MATERN: dict[str, Any] = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 20.0}}


@pytest.mark.parametrize("n", [1, 64, 250])
@pytest.mark.parametrize("weights", [False, True])
def test_the_answer_is_the_float64_answer(n: int, weights: bool, tmp_path: Path) -> None:
    """Ragged tiles, several targets of which one is zero, rows without weight."""
    dataset = rows(tmp_path, n=n, weights=weights and n > 1)
    system = operator(dataset, TILE, alpha=0.1)
    values = np.random.default_rng(0).standard_normal((n, 4)) * np.array([1.0, 1e-30, 0.0, 1e30])
    if dataset.weight is not None:
        values *= np.sqrt(dataset.weight.read(0, n))
    prepared = solver(1e-12).prepare(system, workspace(tmp_path))
    assert prepared.factor.array.dtype == "float32"
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values))
    found, expected = values_of(u), np.linalg.solve(dense(system, dataset), values)
    assert np.all(np.abs(found - expected).max(axis=0) <= 1e-9 * np.abs(expected).max(axis=0))
    assert not found[:, 2].any()
    if dataset.weight is not None:
        assert not found[::7].any()
    assert (solution.solver, solution.precision, solution.converged) == ("cholesky", "mixed", True)
    assert max(solution.relative_residual) <= 1e-12
    assert solution.relative_residual[2] == 0
    assert max(solution.backward_error) <= 30 * n * EPS
    assert 0 < solution.num_iterations <= 5
    assert f"{solution.num_iterations} iterations" in solution.message
    assert "broke down" not in solution.message
    assert {"factorise", "precondition"} <= set(solution.seconds)
    assert Solution.from_dict(solution.to_dict()) == solution


@pytest.mark.parametrize("n", [300, 700])
def test_a_breakdown_shifts_the_preconditioner_only(n: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = near_duplicates(tmp_path, n)
    system = operator(dataset, 128, alpha=1e-6, **MATERN)
    work = workspace(tmp_path)
    with pytest.raises(NotPositiveDefiniteError):
        CholeskySolver(precision="float32").prepare(system, Workspace(str(tmp_path / "other"), InProcessExecutor()))
    values = np.asarray(dataset.y.read(0, n))
    with caplog.at_level(logging.WARNING, "dkrr.linalg"):
        prepared = solver().prepare(system, work)
    assert prepared.breakdown is not None
    shift = prepared.breakdown["shift"]
    assert f"A + {shift:.2g} I" in caplog.text
    assert prepared.factored.operator.alpha == pytest.approx(1e-6 + shift)
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values))
    assert f"of A + {shift:.2g} I because float32 broke down at row" in solution.message
    # the system is not shifted: its own residual says so, and the float64 factor's is no better than half
    residual = np.linalg.norm(values - dense(system, dataset) @ values_of(u)) / np.linalg.norm(values)
    (folder := tmp_path / "direct").mkdir()
    _, reference, _ = CholeskySolver().prepare(system, work).solve(right_hand_sides(folder, system.grid, values))
    assert residual < max(1e-9, 2 * reference.relative_residual[0])
    assert solution.relative_residual[0] == pytest.approx(residual, rel=0.1)
    # what broke down is gone, and another fit does not try it again
    assert len(list((tmp_path / "store/factors").glob("*.zarr"))) == 2
    before = snapshot(tmp_path / "store/factors")
    caplog.clear()
    again = solver().prepare(system, workspace(tmp_path))
    assert again.breakdown == prepared.breakdown
    assert snapshot(tmp_path / "store/factors") == before
    assert not caplog.records


def test_shifts_grow_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = operator(rows(tmp_path), TILE, alpha=0.1)
    tried: list[float] = []
    factorise = direct.factorise

    def broken(operator: Any, *arguments: Any, **options: Any) -> Any:
        tried.append(operator.alpha - 0.1)
        if len(tried) <= breaks:
            raise NotPositiveDefiniteError("broken", row=3, pivot=-1e-9, alpha=operator.alpha, suggested_alpha=1.0)
        return factorise(operator, *arguments, **options)

    monkeypatch.setattr(direct, "factorise", broken)
    breaks = 3
    prepared = solver().prepare(system, workspace(tmp_path))
    first = mixed.FIRST_SHIFT * mixed.EPS32 * N * 1.1
    assert tried == pytest.approx([0, first, 10 * first, 100 * first], rel=1e-6)
    assert prepared.breakdown is not None
    assert prepared.breakdown["row"] == 3
    tried.clear()
    breaks = 100
    with pytest.raises(NotPositiveDefiniteError, match="breaks down, too"):
        solver().prepare(system, workspace(tmp_path / "other"))
    assert len(tried) == mixed.MAX_SHIFTS + 1


def test_an_indefinite_kernel_is_not_shifted_away(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=1e-3, kernel="sigmoid", gamma=2.0, coef0=-1.0)
    with pytest.raises(NotPositiveDefiniteError, match="not positive definite at row"):
        solver().prepare(system, workspace(tmp_path))
    assert not (tmp_path / "store/breakdowns").exists()


def test_float64_s_own_limit_is_accepted_and_said(tmp_path: Path) -> None:
    dataset = near_duplicates(tmp_path, 300)
    system = operator(dataset, 128, alpha=1e-6, **MATERN)
    values = np.asarray(dataset.y.read(0, 300))
    _, solution = (
        solver(1e-14).prepare(system, workspace(tmp_path)).solve(right_hand_sides(tmp_path, system.grid, values))
    )
    assert solution.converged
    assert solution.relative_residual[0] > 1e-14
    assert solution.backward_error[0] <= 30 * 300 * EPS
    assert "above 1.0e-14 in 1 of 1 targets and the limit of float64" in solution.message


@pytest.mark.parametrize("allow", [False, True])
def test_too_few_iterations_are_an_error_unless_allowed(allow: bool, tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.1)
    prepared = solver(1e-13, max_iter=1, allow_unconverged=allow).prepare(system, workspace(tmp_path))
    rhs = right_hand_sides(tmp_path, system.grid, np.asarray(dataset.y.read(0, N)))
    if not allow:
        with pytest.raises(ConvergenceError, match=r"did not converge in 1 iterations.*3 of 3 targets") as caught:
            prepared.solve(rhs)
        assert not caught.value.converged.any()
        assert "max_iter" in caught.value.hint
        return
    _, solution = prepared.solve(rhs)
    assert not solution.converged
    assert "which was allowed" in solution.message


def test_a_wrong_factor_costs_iterations_and_not_the_answer(tmp_path: Path) -> None:
    """A tile with a good checksum that is not the right one; the direct solver would have to give up."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.1)
    prepared = solver().prepare(system, workspace(tmp_path))
    prepared.factor.write(2, 1, 0.9 * prepared.factor.read(2, 1))
    values = np.asarray(dataset.y.read(0, N))
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values))
    assert solution.num_iterations > 5
    np.testing.assert_allclose(values_of(u), np.linalg.solve(dense(system, dataset), values), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("damage", ["deleted", "flipped", "short"])
def test_a_damaged_tile_is_computed_again_during_the_solve(damage: str, tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.1)
    prepared = solver().prepare(system, workspace(tmp_path))
    path = Path(prepared.factor.location) / prepared.factor.array.chunk_key((2, 1))
    whole = path.read_bytes()
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(whole[:-9] if damage == "short" else whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    values = np.asarray(dataset.y.read(0, N))
    u, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values))
    assert path.read_bytes() == whole
    assert solution.num_iterations <= 5
    np.testing.assert_allclose(values_of(u), np.linalg.solve(dense(system, dataset), values), rtol=1e-8, atol=1e-9)


class Stopping(InProcessExecutor):
    """Raises before task ``number`` of a phase."""

    def __init__(self, phase: str, number: int) -> None:
        self.phase, self.number = phase, number

    def run(self, phase: str, function: Any, payload: Any, nodes: Any, progress: Any = None) -> Any:
        if phase == self.phase:
            super().run(phase, function, payload, nodes[: self.number], progress)
            raise KeyboardInterrupt
        return super().run(phase, function, payload, nodes, progress)


@pytest.mark.parametrize("phase", ["factorise", "precondition"])
def test_an_interrupted_fit_recomputes_no_tile(phase: str, tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    settings = FitSettings(
        kernel=operator(dataset).kernel,
        alpha=(0.1,),
        tile_size=TILE,
        precision="mixed",
        iterative=IterativeSettings(tol=1e-10),
    )
    with fit_rows(dataset, settings, workspace(tmp_path / "whole")) as result:
        expected = result.dual_coef.read(0, N)
    with (
        pytest.raises(KeyboardInterrupt),
        fit_rows(dataset, settings, workspace(tmp_path, Stopping(phase, 5))) as result,
    ):
        pass
    done = snapshot(tmp_path / "store/factors")
    assert len(done) >= 5
    work = workspace(tmp_path)
    with fit_rows(dataset, settings, work) as result:
        found = result.dual_coef.read(0, N)
        assert result.solution.precision == "mixed"
        assert result.factors == [str(next((tmp_path / "store/factors").glob("*.zarr")))]
    assert work.phases["factorise"].num_computed == 10 - len(done)
    after = snapshot(tmp_path / "store/factors")
    assert {name: after[name] for name in done} == done
    assert np.array_equal(found, expected)
    assert not list((tmp_path / "store/solves").iterdir())


def test_one_alpha_per_target_with_weights(tmp_path: Path) -> None:
    dataset = rows(tmp_path, weights=True)
    settings = {"kernel": operator(dataset).kernel, "alpha": (0.1, 3.0, 0.1), "tile_size": TILE}
    found = {}
    for precision in ("float64", "mixed"):
        chosen = FitSettings(**settings, precision=precision, iterative=IterativeSettings(tol=1e-12))  # type: ignore[arg-type]
        with fit_rows(dataset, chosen, workspace(tmp_path / precision)) as result:
            found[precision] = result.dual_coef.read(0, N)
            assert len(result.factors) == 2
    largest = np.abs(found["float64"]).max(axis=0)
    assert np.all(np.abs(found["mixed"] - found["float64"]).max(axis=0) <= 1e-9 * largest)
    assert not found["mixed"][::7].any()


def test_a_start_is_used(tmp_path: Path) -> None:
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.1)
    values = np.asarray(dataset.y.read(0, N))
    prepared = solver(1e-9).prepare(system, workspace(tmp_path))
    answer = np.linalg.solve(dense(system, dataset), values)
    _, solution = prepared.solve(right_hand_sides(tmp_path, system.grid, values), answer)
    assert solution.num_iterations == 0
