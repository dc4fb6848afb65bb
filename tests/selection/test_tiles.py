"""KernelRidgeCV through tiles: the same choice as in memory, and no more on the disk than it needs."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr.selection.cv
from dkrr import KernelRidge, KernelRidgeCV, ingest
from dkrr.errors import ParameterError
from dkrr.fit.choices import Candidate, Problem
from dkrr.fit.rates import Machine
from dkrr.selection.cv import PathFit
from dkrr.selection.path import Scoring

RNG = np.random.default_rng(8)
N = 150
X = RNG.standard_normal((N, 4))
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], axis=1) + np.array([0.05, 1.0]) * RNG.standard_normal((N, 2)) + 1.0
Z = RNG.standard_normal((11, 4))
WEIGHT = RNG.uniform(0.1, 2.0, N)
WEIGHT[::10] = 0.0
ALPHAS = [1.0, 0.01, 30.0, 0.1]
KERNEL: dict[str, Any] = {"kernel": "rbf", "gamma": 0.2}


def both(y: np.ndarray, weight: Any, store: Path, **parameters: Any) -> tuple[KernelRidgeCV, KernelRidgeCV]:
    """The same in memory and through tiles."""
    memory = KernelRidgeCV(ALPHAS, **KERNEL, store_cv_results=True, **parameters).fit(X, y, sample_weight=weight)
    tiles = KernelRidgeCV(
        ALPHAS, **KERNEL, store_cv_results=True, tile_size=64, store=store, solver="cholesky", **parameters
    ).fit(X, y, sample_weight=weight)
    return memory, tiles


@pytest.mark.parametrize(
    ("weight", "fit_intercept", "per_target"),
    [(None, False, False), (WEIGHT, True, True)],
    ids=["plain", "weighted-intercept-per_target"],
)
def test_tiles_choose_what_memory_chooses(tmp_path: Path, weight: Any, fit_intercept: bool, per_target: bool) -> None:
    memory, tiles = both(Y, weight, tmp_path, fit_intercept=fit_intercept, alpha_per_target=per_target)
    np.testing.assert_array_equal(tiles.alpha_, memory.alpha_)
    np.testing.assert_allclose(tiles.scores_, memory.scores_, rtol=1e-8)
    np.testing.assert_allclose(tiles.best_score_, memory.best_score_, rtol=1e-8)
    np.testing.assert_allclose(tiles.cv_results_, memory.cv_results_, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(tiles.predict(Z), memory.predict(Z), rtol=1e-7, atol=1e-9)
    assert tiles.solution_.solver == "cholesky"
    factors = [path for path in tmp_path.glob("factors/*.zarr") if path.is_dir()]
    assert len(factors) == (len(set(tiles.alpha_)) if per_target else 1)
    if per_target:
        assert len(factors) == 2, "the targets want different alphas"


def test_scoring_and_a_single_target(tmp_path: Path) -> None:
    memory, tiles = both(Y[:, 0], WEIGHT, tmp_path, scoring="neg_mean_absolute_error")
    assert tiles.alpha_ == memory.alpha_
    np.testing.assert_allclose(tiles.scores_, memory.scores_, rtol=1e-8)
    assert tiles.cv_results_.shape == (N, len(ALPHAS))
    np.testing.assert_allclose(tiles.cv_results_, memory.cv_results_, rtol=1e-6, atol=1e-9)


def test_a_factor_that_was_there_stays(tmp_path: Path) -> None:
    KernelRidge(30.0, **KERNEL, tile_size=64, store=tmp_path).fit(X, Y)
    before = set(tmp_path.glob("factors/*.zarr"))
    fitted = KernelRidgeCV(ALPHAS, **KERNEL, tile_size=64, store=tmp_path).fit(X, Y)
    assert fitted.alpha_ != 30.0
    assert before <= set(tmp_path.glob("factors/*.zarr"))


def test_a_precomputed_matrix_and_a_data_set(tmp_path: Path) -> None:
    memory = KernelRidgeCV(ALPHAS, **KERNEL).fit(X, Y)
    K = np.exp(-0.2 * ((X[:, None] - X[None]) ** 2).sum(axis=2))
    given = KernelRidgeCV(ALPHAS, kernel="precomputed", tile_size=64).fit(K, Y)
    np.testing.assert_allclose(given.scores_, memory.scores_, rtol=1e-8)
    dataset = ingest(X, tmp_path / "data.zarr", y=Y)
    stored = KernelRidgeCV(ALPHAS, **KERNEL, tile_size=64).fit(dataset)
    np.testing.assert_allclose(stored.scores_, memory.scores_, rtol=1e-8)
    np.testing.assert_allclose(stored.predict(Z), memory.predict(Z), rtol=1e-7)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"cv": 3, "tile_size": 64}, "no formula for folds"),
        ({"solver": "nystrom"}, "nystrom"),
        ({"solver": "cg"}, "cholesky"),
    ],
)
def test_what_tiles_cannot_do_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        KernelRidgeCV(ALPHAS, **KERNEL, **parameters).fit(X, Y)


# --- what it costs -------------------------------------------------------------------------------------------------


def path_fit(per_target: bool = False) -> PathFit:
    from dkrr.fit.choices import SolverChoice
    from dkrr.kernels import make_kernel

    return PathFit(
        kernel=make_kernel("rbf"),
        alpha=0.01,
        choice=SolverChoice(),
        tile_size=None,
        max_in_process_rows=6000,
        grid=tuple(ALPHAS),
        scoring=Scoring(per_target=per_target),
        stored=None,
        take=lambda chosen: None,
    )


def test_a_candidate_pays_for_its_diagonals(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {item.name: 1.0 for item in fields(Machine)} | {"threads": 2, "gemm_float64": 1e11, "gemm_float32": 2e11}
    machine = Machine(**rates)  # type: ignore[arg-type]
    monkeypatch.setattr(PathFit, "_machine", lambda *args: machine)
    monkeypatch.setattr(dkrr.selection.cv, "factorise_seconds", lambda *args: 7.0)
    problem = Problem(num_rows=20_000, num_features=5, num_targets=3, kernel=None, alpha=(1.0,))
    item = Candidate(
        solver="cholesky", precision="float64", gram="stored", tile_size=2048,
        seconds={"factorise": 28.0}, disk_bytes={"factor": 400, "gram": 50},
    )  # fmt: skip
    executor: Any = None
    found = path_fit()._with_diagonals(item, problem, executor, "store")
    assert found.total_seconds == 28.0 + 4 * 7.0
    assert found.disk_bytes == {"factor": 200, "gram": 50}  # the best so far and the next one
    assert path_fit(per_target=True)._with_diagonals(item, problem, executor, "store").disk_bytes["factor"] == 400
    iterations = replace(item, solver="cg")
    assert path_fit()._with_diagonals(iterations, problem, executor, "store") is iterations


# --- in feature space ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["linear", "poly"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "stored"])
@pytest.mark.parametrize("scoring", [None, "neg_mean_absolute_error"])
def test_primal_chooses_what_the_dual_chooses(tmp_path: Path, kernel: str, in_memory: bool, scoring: Any) -> None:
    shared: dict[str, Any] = {"kernel": kernel, "degree": 2, "fit_intercept": True, "scoring": scoring}
    dual = KernelRidgeCV(ALPHAS, **shared, alpha_per_target=True).fit(X, Y, sample_weight=WEIGHT)
    primal = KernelRidgeCV(
        ALPHAS, **shared, alpha_per_target=True, solver="primal", store=None if in_memory else tmp_path
    ).fit(X, Y, sample_weight=WEIGHT)
    assert primal.solution_.solver == "primal"
    np.testing.assert_array_equal(primal.alpha_, dual.alpha_)
    np.testing.assert_allclose(primal.scores_, dual.scores_, rtol=1e-8)
    np.testing.assert_allclose(primal.predict(Z), dual.predict(Z), rtol=1e-7, atol=1e-9)


def test_primal_keeps_results_and_refuses_folds() -> None:
    dual = KernelRidgeCV(ALPHAS, store_cv_results=True).fit(X, Y[:, 0])
    primal = KernelRidgeCV(ALPHAS, store_cv_results=True, solver="primal").fit(X, Y[:, 0])
    np.testing.assert_allclose(primal.cv_results_, dual.cv_results_, rtol=1e-7)
    with pytest.raises(ParameterError, match="cv with solver 'primal'"):
        KernelRidgeCV(ALPHAS, cv=3, solver="primal").fit(X, Y)
