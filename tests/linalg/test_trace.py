"""Histories of residuals: whole while they are short, thinner when they are long, and the last point always there."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.linalg.workspace import MOST_POINTS, ResidualTrace


@pytest.mark.parametrize("count", [MOST_POINTS, MOST_POINTS + 1, 3 * MOST_POINTS + 1, 12_345])
def test_a_long_history_is_thinned(count: int) -> None:
    trace = ResidualTrace("cg", 1e-8, [0.1])
    for k in range(count):
        trace.add(k, np.array([1.0 / (k + 1)]))
    assert len(trace.iterations) <= MOST_POINTS + 1
    assert trace.iterations[0] == 0
    assert trace.iterations[-1] == count - 1
    assert trace.iterations == sorted(set(trace.iterations))
    for iteration, (value,) in zip(trace.iterations, trace.relative, strict=True):
        assert value == pytest.approx(1.0 / (iteration + 1))
    steps = np.diff(trace.iterations[:-1])
    assert len(set(steps.tolist())) <= 1  # evenly spaced but for the last one


def test_the_whole_history_replaces_what_was_heard() -> None:
    trace = ResidualTrace("cg", 1e-8, [0.1])
    trace.add(7, np.array([0.5]))  # resumed: the first six were in another process
    trace.replace([np.array([1.0 / (k + 1)]) for k in range(9)])
    assert trace.iterations == list(range(9))
    assert trace.is_over
