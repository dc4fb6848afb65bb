"""Factors as preconditioners: of the same matrix, of another alpha, of fewer rows, damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dkrr.engine.cluster import start_local
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import DamagedChunkError
from dkrr.linalg.cg.factor_precondition import FactorPreconditioner
from dkrr.linalg.cg.iteration import conjugate_gradients
from dkrr.linalg.cg.precondition import Identity
from dkrr.linalg.factor.cholesky import factorise
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid, TileMatrix
from tests.linalg.helpers import dense, operator, rows

N, TILE = 250, 64


def factor_of(system: RidgeOperator, folder: Path, dtype: str = "float32") -> TileMatrix:
    factor = TileMatrix.create(str(folder), system.grid, dtype=dtype)
    factorise(system, factor, InProcessExecutor())
    return factor


def leading(system: RidgeOperator, m: int) -> RidgeOperator:
    """The first m rows as a system of their own."""
    return replace(system, grid=TileGrid(m, system.grid.tile_size))


def workspace(folder: Path, executor: Executor | None = None) -> Workspace:
    return Workspace(store=str(folder), executor=executor or InProcessExecutor(), blas="test")


def iterations(a: np.ndarray, precondition: object, alpha: float, rhs: np.ndarray) -> int:
    result = conjugate_gradients(
        lambda v: a @ v,
        rhs,
        np.full(rhs.shape[1], alpha),
        precondition,  # type: ignore[arg-type]
        IterativeSettings(tol=1e-9),
    )
    assert result.converged.all()
    np.testing.assert_allclose(a @ result.x + alpha * result.x, rhs, atol=1e-8 * np.linalg.norm(rhs))
    return result.num_iterations


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_it_is_the_inverse_to_the_factor_s_precision(scale: float, tmp_path: Path) -> None:
    """Also for residuals that float32 cannot hold, and for one that is zero."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.5)
    factor = factor_of(system, tmp_path / "L")
    r = np.random.default_rng(0).standard_normal((N, 3)) * np.array([1.0, scale, 0.0])
    before = r.copy()
    precondition = FactorPreconditioner(factor, workspace(tmp_path), str(tmp_path / "scratch"))
    z = precondition.apply(r, np.full(3, 0.5))
    assert np.array_equal(r, before)
    assert z.dtype == np.float64
    assert not z[:, 2].any()
    expected = np.linalg.solve(dense(system, dataset), r[:, :2])
    for k in range(2):
        assert np.abs(z[:, k] - expected[:, k]).max() < 1e-4 * np.abs(expected[:, k]).max()
    assert not list((tmp_path / "scratch").glob("precondition-*"))
    assert "float32 Cholesky factor of 250 rows" in precondition.description


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(("rows_known", "alpha_known"), [(N, 1e-2), (N, 1e-1), (240, 1e-2), (235, 5e-3)])
def test_an_old_factor_saves_iterations(rows_known: int, alpha_known: float, weights: bool, tmp_path: Path) -> None:
    """Of another alpha, and of the rows before others were appended, in whole tiles and not."""
    dataset = rows(tmp_path, weights=weights)
    system = operator(dataset, TILE, alpha=1e-2, gamma=0.25)
    old = leading(system.with_alpha(alpha_known), rows_known)
    factor = factor_of(old, tmp_path / "L", "float64")
    a = dense(system.with_alpha(0.0), dataset)
    rhs = np.random.default_rng(0).standard_normal((N, 2))
    none = iterations(a, Identity(), 1e-2, rhs)
    precondition = FactorPreconditioner(factor, workspace(tmp_path), str(tmp_path / "s"), system=system)
    some = iterations(a, precondition, 1e-2, rhs)
    assert some < (4 if (rows_known, alpha_known) == (N, 1e-2) else none / 2)


def test_rows_beyond_the_factor_are_divided_by_their_diagonal(tmp_path: Path) -> None:
    dataset = rows(tmp_path, weights=True)
    system = operator(dataset, TILE, alpha=0.3, kernel="linear")
    m = 150
    factor = factor_of(leading(system, m), tmp_path / "L")
    np.testing.assert_allclose(system.diagonal_from(m), np.diag(dense(system.with_alpha(0.0), dataset))[m:], rtol=1e-12)
    r = np.random.default_rng(0).standard_normal((N, 2))
    alpha = np.array([0.3, 2.0])
    precondition = FactorPreconditioner(factor, workspace(tmp_path), str(tmp_path / "s"), system=system)
    z = precondition.apply(r, alpha)
    np.testing.assert_allclose(z[m:], r[m:] / (system.diagonal_from(m)[:, None] + alpha), rtol=1e-12)
    with pytest.raises(ValueError, match="250 rows, 150 expected"):
        FactorPreconditioner(factor, workspace(tmp_path), str(tmp_path / "s")).apply(r, alpha)


@pytest.mark.parametrize("damage", ["deleted", "flipped", "not finite"])
@pytest.mark.parametrize("application", [1, 2])
def test_a_damaged_tile_is_computed_again(damage: str, application: int, tmp_path: Path) -> None:
    """Checksums are compared in the first application; what makes later ones fail is found in any."""
    dataset = rows(tmp_path)
    system = operator(dataset, TILE, alpha=0.5)
    factor = factor_of(system, tmp_path / "L")
    r, alpha = np.random.default_rng(0).standard_normal((N, 1)), np.array([0.5])
    path = tmp_path / "L" / factor.array.chunk_key((2, 1))
    whole = path.read_bytes()
    repairing = FactorPreconditioner(factor, workspace(tmp_path), str(tmp_path / "s"), operator=system)
    helpless = FactorPreconditioner(factor, workspace(tmp_path), str(tmp_path / "s"))
    expected = repairing.apply(r, alpha)
    if application == 1:
        repairing.num_applications = 0
    else:
        helpless.apply(r, alpha)
    if damage == "deleted":
        path.unlink()
    else:
        content = bytearray(whole)
        content[4 * 70 : 4 * 70 + 4] = np.float32(np.nan if damage == "not finite" else 3.0).tobytes()
        path.write_bytes(content)
    seen = damage != "flipped" or application == 1
    if seen:
        with pytest.raises(DamagedChunkError):
            helpless.apply(r, alpha)
    found = repairing.apply(r, alpha)
    assert np.array_equal(found, expected) == seen
    assert (path.read_bytes() == whole) == seen


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    with start_local(workers=2) as executor:
        yield executor


def test_workers_give_the_same_bits(workers: Executor, tmp_path: Path) -> None:
    system = operator(rows(tmp_path), TILE, alpha=0.5)
    factor = factor_of(system, tmp_path / "L")
    r, alpha = np.random.default_rng(0).standard_normal((N, 2)), np.full(2, 0.5)
    found = []
    for executor in (InProcessExecutor(), workers):
        precondition = FactorPreconditioner(factor, workspace(tmp_path, executor), str(tmp_path / "s"))
        found += [precondition.apply(r, alpha), precondition.apply(r[:, ::-1], alpha)[:, ::-1]]
    for z in found[1:]:
        assert np.array_equal(z, found[0])
