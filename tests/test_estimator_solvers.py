"""The estimator with each solver: the same answer, what is recorded, warm starts, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dkrr import KernelRidge
from dkrr.errors import ConvergenceError, ParameterError

RNG = np.random.default_rng(5)
X = RNG.standard_normal((400, 4))
Y = np.stack([np.sin(X[:, 0]) + X[:, 1] * X[:, 2], X[:, 3] ** 2], axis=1) + 0.05 * RNG.standard_normal((400, 2))
RBF: dict[str, Any] = {"kernel": "rbf", "gamma": 0.2, "alpha": 0.1}


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a cluster was started")

    monkeypatch.setattr("dkrr.engine.cluster.start_local", refuse)


def test_tol_and_max_iter_are_kept_to(no_cluster: None) -> None:
    loose = KernelRidge(**RBF, solver="cg", tol=1e-2, solver_params={"preconditioner": "none"}).fit(X, Y)
    assert 1e-10 < max(loose.solution_.relative_residual) <= 1e-2
    est = KernelRidge(**RBF, solver="cg", max_iter=2, solver_params={"preconditioner": "none"})
    with pytest.raises(ConvergenceError):
        est.fit(X, Y)
    est.set_params(solver_params={"preconditioner": "none", "allow_unconverged": True}).fit(X, Y)
    assert not est.solution_.converged
    assert "NOT CONVERGED" in est.solution_.message


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
