"""What an intercept costs, in the planner's books."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dkrr.fit.choices import SolverChoice
from dkrr.fit.prices import pass_seconds
from tests.fit.test_planner import MACHINE, decided, problem


def test_after_an_iteration_it_takes_one_more_product() -> None:
    usual = problem(alpha=(0.1, 0.2), t=2)
    prices = [
        {item.name: item.total_seconds for item in decided(replace(usual, fit_intercept=asked)).candidates}
        for asked in (False, True)
    ]
    product = MACHINE.exact_factor * pass_seconds(MACHINE, usual.num_rows, 2, "float64")
    for name, seconds in prices[0].items():
        more = {"cg": 1, "cholesky mixed": 2}.get("cg" if name.startswith("cg") else name.split(",")[0], 0)
        assert prices[1][name] == pytest.approx(seconds + more * product, rel=1e-12), name


@pytest.mark.parametrize("asked", [False, True])
def test_it_is_handed_on(asked: bool) -> None:
    what = replace(problem(), fit_intercept=asked)
    assert decided(what).settings(what, SolverChoice()).fit_intercept is asked
