"""Histories of residuals: whole while they are short, thinner when they are long, and the last point always there."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.linalg.workspace import MOST_POINTS, ResidualTrace


@pytest.mark.parametrize("count", [1, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_a_long_history_is_thinned(count: int) -> None:
    trace = ResidualTrace("cg", 1e-8, [0.1])
    trace.add(7, np.array([0.5]))  # resumed: the first six were in another process
    trace.replace([np.array([1.0 / (k + 1)]) for k in range(count)])
    found = trace.to_dict()
    assert count > MOST_POINTS or found["iterations"] == list(range(count))
    assert len(found["iterations"]) <= MOST_POINTS
    assert (found["iterations"][0], found["iterations"][-1]) == (0, count - 1)
    assert found["relative_residual"] == [[1.0 / (k + 1)] for k in found["iterations"]]
    assert len(set(np.diff(found["iterations"][:-1]).tolist())) <= 1  # evenly spaced but for the last one
