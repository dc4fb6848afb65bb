"""The estimator with each solver: the same answer, what is recorded, warm starts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from dkrr import KernelRidge
from dkrr.errors import ConvergenceError, ParameterError
from tests.reference import dense_krr

RNG = np.random.default_rng(5)
X = RNG.standard_normal((400, 4))
Y = np.stack([np.sin(X[:, 0]) + X[:, 1] * X[:, 2], X[:, 3] ** 2], axis=1) + 0.05 * RNG.standard_normal((400, 2))
RBF: dict[str, Any] = {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1}


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr("dkrr.engine.cluster.start_local", refuse)


@pytest.mark.parametrize(
    "options",
    [
        {"solver": "cg"},
        {"solver": "cg", "precision": "mixed"},
        {"solver": "cg", "solver_params": {"preconditioner": "none"}},
        {"solver": "cg", "solver_params": {"preconditioner": "nystrom", "rank": 50, "seed": 3}},
        {"solver": "cholesky", "precision": "mixed"},
        {"precision": "mixed", "tile_size": 90},
    ],
    ids=str,
)
@pytest.mark.parametrize("weighted", [False, True])
def test_few_rows_run_the_solver_that_was_asked_for_here(
    options: dict[str, Any], weighted: bool, no_cluster: None
) -> None:
    weight = RNG.uniform(0.5, 2, len(X)) if weighted else None
    est = KernelRidge(**RBF, **options).fit(X, Y, sample_weight=weight)
    assert est.solution_.solver == options.get("solver", "cholesky")
    assert est.solution_.precision == options.get("precision", "float64")
    assert est.n_iter_ == est.solution_.num_iterations >= 1
    assert max(est.solution_.relative_residual) <= 1e-8
    matrix = dkrr.make_kernel("rbf", gamma=0.2)(X, X)
    np.testing.assert_allclose(est.dual_coef_, dense_krr(matrix, Y, 0.1, weight), rtol=1e-5, atol=1e-7)


def test_tol_and_max_iter_are_kept_to(no_cluster: None) -> None:
    loose = KernelRidge(**RBF, solver="cg", tol=1e-2, solver_params={"preconditioner": "none"}).fit(X, Y)
    tight = KernelRidge(**RBF, solver="cg", tol=1e-10, solver_params={"preconditioner": "none"}).fit(X, Y)
    assert 1e-10 < max(loose.solution_.relative_residual) <= 1e-2
    assert max(tight.solution_.relative_residual) <= 1e-10
    assert loose.n_iter_ < tight.n_iter_
    est = KernelRidge(**RBF, solver="cg", max_iter=2, solver_params={"preconditioner": "none"})
    with pytest.raises(ConvergenceError):
        est.fit(X, Y)
    est.set_params(solver_params={"preconditioner": "none", "allow_unconverged": True}).fit(X, Y)
    assert not est.solution_.converged
    assert "NOT CONVERGED" in est.solution_.message


def test_warm_start_goes_on_from_the_last_coefficients(no_cluster: None) -> None:
    plain = {"preconditioner": "none"}
    cold = KernelRidge(**RBF, solver="cg", solver_params=plain, warm_start=True).fit(X, Y)
    first = cold.n_iter_
    again = cold.fit(X, Y)
    assert again.solution_.num_iterations == 0
    # appended rows: the coefficients of the first ones are where it begins
    short = KernelRidge(**RBF, solver="cg", solver_params=plain, warm_start=True).fit(X[:380], Y[:380])
    assert short.fit(X, Y).n_iter_ < first
    np.testing.assert_allclose(short.dual_coef_, cold.dual_coef_, rtol=1e-4, atol=1e-6)
    # fewer rows, or other targets: nothing to begin with
    assert short.fit(X[:300], Y[:300]).dual_coef_.shape == (300, 2)
    assert short.fit(X[:300], Y[:300, 0]).dual_coef_.shape == (300,)


def test_nystrom_regression(tmp_path: Path, no_cluster: None) -> None:
    est = KernelRidge(**RBF, solver="nystrom", solver_params={"num_centers": 60}).fit(X, Y)
    assert (est.X_fit_.shape, est.dual_coef_.shape) == ((60, 4), (60, 2))
    assert "approximation" in est.solution_.message
    matrix = dkrr.make_kernel("rbf", gamma=0.2)(est.X_fit_, est.X_fit_)
    cross = dkrr.make_kernel("rbf", gamma=0.2)(X, est.X_fit_)
    expected = np.linalg.lstsq(cross.T @ cross + 0.1 * matrix, cross.T @ Y, rcond=None)[0]
    np.testing.assert_allclose(est.predict(X), cross @ expected, rtol=1e-3, atol=1e-4)
    est.save(tmp_path / "m.zarr")
    assert dkrr.load_model(tmp_path / "m.zarr").provenance["is_approximation"]


def test_a_precomputed_matrix_with_iterations(no_cluster: None) -> None:
    matrix = dkrr.make_kernel("rbf", gamma=0.2)(X, X)
    expected = dense_krr(matrix, Y, 0.1)
    for options in ({"solver": "cg"}, {"precision": "mixed"}):
        est = KernelRidge(alpha=0.1, kernel="precomputed", **options).fit(matrix, Y)
        np.testing.assert_allclose(est.dual_coef_, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ParameterError, match="precomputed matrix"):
        KernelRidge(kernel="precomputed", solver="nystrom").fit(matrix, Y)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "cg", "precision": "float32"}, "precision 'mixed'"),
        ({"solver_params": {"rank": 10}}, "rank is for solver 'cg'"),
        ({"solver": "cg", "solver_params": {"num_centers": 10}}, "num_centers is for solver 'nystrom'"),
        ({"solver_params": {"ranks": 10}}, "solver_params has 'ranks'; known: preconditioner, rank"),
        ({"solver_params": {"tol": 1e-3}}, "tol and max_iter are parameters of the estimator itself"),
        ({"solver_params": [1]}, "a dict expected"),
        ({"solver": "cg", "solver_params": {"rank": 0}}, "whole number above 0"),
        ({"solver": "cg", "solver_params": {"seed": -1}}, "at least 0"),
        ({"solver": "cg", "solver_params": {"allow_unconverged": 1}}, "True or False"),
        ({"tol": 0.0}, "tol = 0.0"),
        ({"max_iter": 0}, "max_iter = 0"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        KernelRidge(**RBF, **options).fit(X, Y)
