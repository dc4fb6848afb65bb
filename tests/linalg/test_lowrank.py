"""Low-rank preconditioners: the factor, its application, what it saves, and what it survives."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import ingest
from dkrr.engine.tasks import InProcessExecutor
from dkrr.kernels import make_kernel
from dkrr.linalg import preconditioner as lowrank
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.cg import Preconditioner, conjugate_gradients
from dkrr.linalg.gram import build_gram
from dkrr.linalg.preconditioner import LowRank, low_rank_fields
from dkrr.linalg.rpcholesky import accept, draw_weighted, pivot_rows
from dkrr.linalg.solution import IterativeSettings
from dkrr.linalg.workspace import Workspace
from dkrr.store.files import place
from dkrr.tiles import TileMatrix
from tests.faults import failing_at, flip
from tests.linalg.helpers import Apart, dense, operator, rows, snapshot

MATERN: dict[str, Any] = {"kernel": "matern", "kernel_params": {"nu": 1.5, "length_scale": 1.0}}


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
    system = operator(dataset, **MATERN)
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
    system, alpha = operator(rows(tmp_path, n=300, weights=True), **MATERN), np.array(alphas)
    low = build(tmp_path, system, 70)
    f, r = whole(low), np.random.default_rng(0).standard_normal((300, len(alpha)))
    before, held = r.copy(), low.apply(r, alpha)
    for k, value in enumerate(alphas):
        expected = np.linalg.solve(f @ f.T + value * np.eye(300), r[:, k])
        assert np.abs(held[:, k] - expected).max() < 1e-10 * np.abs(expected).max()
    monkeypatch.setattr(lowrank, "HELD_BYTES", 0)
    ways = [build(tmp_path, system, 70), build(tmp_path, system, 70, Apart())]
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
@pytest.mark.parametrize(
    "fault", ["compute.precondition.panel:@1", "compute.precondition.panel:@4", "written*/panel-*/c/*:@4"]
)
def test_an_interrupted_build_goes_on(tmp_path: Path, fault: str) -> None:
    dataset = rows(tmp_path, n=500, weights=True)
    system = operator(dataset, **MATERN)
    build(tmp_path / "whole", system, 150)
    undisturbed = {name: data for name, (data, _) in snapshot(tmp_path / "whole").items()}
    with failing_at(f"{fault}:memoryerror"), pytest.raises(MemoryError):
        build(tmp_path / "broken", system, 150)
    made = snapshot(tmp_path / "broken")
    build(tmp_path / "broken", system, 150)
    after = snapshot(tmp_path / "broken")
    assert {name: data for name, (data, _) in after.items()} == undisturbed
    rewritten = [name for name, value in made.items() if after[name] != value]
    assert all("pivots" in name for name in rewritten), "a valid chunk was written again"


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("damage", [Path.unlink, flip])
@pytest.mark.parametrize("executor", [InProcessExecutor(), Apart()], ids=["here", "apart"])
def test_damage_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, executor: Any) -> None:
    """Between applications, and when it is opened again."""
    monkeypatch.setattr(lowrank, "HELD_BYTES", 0)
    system, r = operator(rows(tmp_path, n=400), **MATERN), np.ones((400, 1))
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
    system = operator(dataset, tile_size=100, **MATERN)
    tiles = TileMatrix.create(tmp_path / "K.zarr", system.grid, dtype="float64")
    build_gram(system, tiles, InProcessExecutor())
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


def test_rejection_gives_the_distribution_of_one_at_a_time() -> None:
    # three rows, two of them nearly equal: after one of these, the other is drawn with the residual's probability
    k = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])
    generator, second = np.random.default_rng(0), np.zeros(3)
    rounds = 1500
    for _ in range(rounds):
        proposals = draw_weighted(np.diag(k), 40, generator)
        h = k[np.ix_(proposals, proposals)]
        taken, lower = accept(h, proposals, np.full(40, 1e-14), generator.random(40), 2)
        chosen = proposals[taken]
        np.testing.assert_allclose(lower @ lower.T, k[np.ix_(chosen, chosen)], atol=1e-14)
        if chosen[0] == 0:
            second[chosen[1]] += 1
    expected = 0.19 / 1.19
    count = second.sum()
    assert second[0] == 0
    assert abs(second[1] / count - expected) < 4 * np.sqrt(expected * (1 - expected) / count)


def test_pivots_in_memory() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 3))
    x[250:] = x[:250]
    kernel = make_kernel("rbf", gamma=0.5).resolve(3)
    pivots = pivot_rows(kernel, x, 60, 1)
    assert len(set(pivots.tolist())) == 60
    assert np.array_equal(pivots, pivot_rows(kernel, x, 60, 1))
    assert not np.array_equal(pivots, pivot_rows(kernel, x, 60, 2))
    k = kernel(x, x)

    def left(index: np.ndarray) -> float:
        return float(np.trace(k - k[:, index] @ np.linalg.lstsq(k[np.ix_(index, index)], k[index], rcond=1e-12)[0]))

    assert left(pivots) < 0.7 * left(rng.permutation(500)[:60])
    assert len(pivot_rows(kernel, x, 500, 1)) <= 250, "a row that was there before has nothing left"
    few = pivot_rows(kernel, x, 60, 1, max_bytes=8 * 100 * 60)
    assert len(set(few.tolist())) == 60
