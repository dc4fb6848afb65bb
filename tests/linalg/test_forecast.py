"""How many iterations are left, by the residuals so far and by the plan."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.linalg.cg.solver import Forecast
from dkrr.linalg.solution import Foreseen


class Clock:
    """Two seconds an iteration."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 2.0
        return self.now


def forecast(residuals: list[float], foreseen: Foreseen | None = None, limit: int = 1000) -> Forecast:
    found = Forecast(1e-8, limit, foreseen, Clock())
    for number, value in enumerate(residuals, 1):
        found.add(number, value)
    return found


def falling(count: int, rate: float = 0.5) -> list[float]:
    return [rate**k for k in range(1, count + 1)]


@pytest.mark.parametrize("count", [5, 12, 20])
def test_a_steady_fall_tells_the_end(count: int) -> None:
    found = forecast(falling(count))
    assert found.total == pytest.approx(np.log(1e-8) / np.log(0.5), abs=1)
    assert found.seconds_left == pytest.approx(2.0 * (27 - count), abs=2)


def test_the_plan_speaks_before_the_residuals() -> None:
    plan = Foreseen(low=8, high=29)
    found = forecast([0.9, 0.8], plan)
    assert (found.phase, found.total) == ("cg, 8 to 29 foreseen", 29)
    assert forecast([0.9] * 6, plan).total == 29
    assert forecast(falling(6, 0.99), plan).total == 58  # not 1,800: it is early
    assert forecast(falling(6, 0.001), plan).total <= 8
    assert forecast(falling(40, 0.9), plan).total == pytest.approx(175, abs=2)
    assert forecast(falling(40, 0.9), plan, limit=100).total == 100


def test_an_iteration_is_slow_when_another_way_is_done_sooner() -> None:
    plan = Foreseen(low=2, high=8)
    slow = falling(17, 0.9)  # about 158 more, 316 s
    assert forecast(slow, plan).too_slow(17, lambda: 300.0)
    assert not forecast(slow, plan).too_slow(17, lambda: 330.0)
    assert not forecast(slow[:16], plan).too_slow(16, lambda: 0.1)  # not yet twice the upper end
    assert not forecast(slow, plan).too_slow(17, lambda: None)
    assert not forecast(slow, plan).too_slow(17, None)
    assert not forecast(slow).too_slow(17, lambda: 0.1)
    assert forecast([0.5] * 17, plan).too_slow(17, lambda: 1e6)
