"""How many iterations are left, by the residuals so far and by the plan."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import numpy as np
import pytest

from dkrr.errors import ConvergenceError
from dkrr.linalg.cg_solver import Forecast
from dkrr.linalg.solution import Foreseen


def forecast(residuals: list[float], foreseen: Foreseen | None = None, limit: int = 1000) -> Forecast:
    found = Forecast(1e-8, limit, foreseen, count(0, 2).__next__)  # two seconds an iteration
    for number, value in enumerate(residuals, 1):
        found.add(number, value)
    return found


PLAN = Foreseen(low=2, high=8)


def falling(number: int, rate: float = 0.5) -> list[float]:
    return [rate**k for k in range(1, number + 1)]


@pytest.mark.parametrize("number", [5, 12, 20])
def test_a_steady_fall_tells_the_end(number: int) -> None:
    assert forecast(falling(number)).total == pytest.approx(np.log(1e-8) / np.log(0.5), abs=1)


def test_the_plan_speaks_before_the_residuals() -> None:
    plan = Foreseen(low=8, high=29)
    found = forecast([0.9, 0.8], plan)
    assert (found.phase, found.total) == ("cg, 8 to 29 foreseen", 29)
    assert forecast([0.9] * 6, plan).total == 29
    assert forecast(falling(6, 0.99), plan).total == 58  # not 1,800: it is early
    assert forecast(falling(6, 0.001), plan).total <= 8
    assert forecast(falling(40, 0.9), plan).total == pytest.approx(175, abs=2)
    assert forecast(falling(40, 0.9), plan, limit=100).total == 100


@pytest.mark.parametrize(
    ("residuals", "plan", "price", "slow"),
    [
        (falling(17, 0.9), PLAN, 300.0, True),  # about 158 more, 316 s
        (falling(17, 0.9), PLAN, 330.0, False),
        (falling(16, 0.9), PLAN, 0.1, False),  # not yet twice the upper end
        (falling(17, 0.9), PLAN, None, False),
        (falling(17, 0.9), None, 0.1, False),
        ([0.5] * 17, PLAN, 1e6, True),
    ],
)
def test_an_iteration_is_slow_when_another_way_is_done_sooner(
    residuals: list[float], plan: Foreseen | None, price: float | None, slow: bool
) -> None:
    with pytest.raises(ConvergenceError, match="at most 8 were foreseen") if slow else nullcontext():
        forecast(residuals, plan).check(len(residuals), np.array(residuals[-1:]), lambda: price)
