"""A way that was chosen by "auto" is replaced when it breaks down; one that was named stays an error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dkrr
from tests.faults import failing_at

X = np.random.default_rng(1).uniform(size=(400, 4))
Y = np.sin(6 * X[:, 0]) + X[:, 1]
TOL = 1e-8


def estimator(**parameters: Any) -> dkrr.KernelRidge:
    given: dict[str, Any] = {"kernel": "rbf", "gamma": 2.0, "alpha": 1e-2, "tile_size": 128, "tol": TOL}
    return dkrr.KernelRidge(**given | parameters)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dkrr")


@pytest.fixture
def no_row_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways are priced, and those in float32 are the cheapest."""
    monkeypatch.setattr("dkrr.planning.planner.SMALL_FLOPS", 0.0)
    from dkrr.planning import planner

    priced_way = planner.priced_way

    def cheap_in_float32(*arguments: Any) -> Any:
        from dataclasses import replace

        found = priced_way(*arguments)
        order = ("cg mixed", "cg float64", "cholesky float64", "cholesky mixed")
        rank = next(k for k, name in enumerate(order) if found.name.startswith(name))
        return replace(found, seconds=found.seconds | {"start": 10.0 ** (2 * rank)}, infeasible="")

    monkeypatch.setattr(planner, "priced_way", cheap_in_float32)


def test_a_breakdown_in_float32_goes_on_in_float64(
    no_row_is_few: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing_at("cg.float32.curvature:@4:nan"):
        found = estimator(store=str(tmp_path)).fit(X, Y)
    solution = found.solution_
    assert (solution.solver, solution.precision) == ("cg", "float64")
    assert "cg mixed" in solution.message
    assert "broke down at iteration 4" in solution.message
    assert "went on with cg float64" in solution.message
    assert [record.levelname for record in caplog.records if "went on with" in record.getMessage()] == ["WARNING"]
    (given_up,) = solution.given_up
    assert given_up["iterations"] == 4
    named = estimator(solver="cg", precision="float64", solver_params={"rank": 100}).fit(X, Y)
    np.testing.assert_allclose(found.predict(X), named.predict(X), rtol=0, atol=1e-6)
    assert max(solution.relative_residual) <= TOL
    assert not list((tmp_path / "solves").iterdir())
