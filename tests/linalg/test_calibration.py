"""Quantiles of leave-one-out residuals: ranks, coverage, and what a model keeps of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dkrr.errors import ParameterError
from dkrr.linalg.leave_one_out import Quantiles, conformal_rank, coverage


def quantiles(n: int, t: int = 1) -> Quantiles:
    """Of the residuals 1 .. n in some order, times (-1, 2, ...) per target; deviations 1 / 2."""
    order = np.random.default_rng(0).permutation(n) + 1.0
    residuals = order[:, None] * np.resize([-1.0, 2.0, 3.0], t)
    return Quantiles.of(residuals, np.full((n, t), 4.0))


@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (250, 0.5), (5000, 0.901)])
def test_half_widths_are_the_ranked_residuals(n: int, level: float) -> None:
    found = quantiles(n, 3)
    rank = conformal_rank(n, level)
    np.testing.assert_array_equal(found.half_width(level, "jackknife"), [rank, 2 * rank, 3 * rank])
    np.testing.assert_array_equal(found.half_width(level, "normalised"), [2 * rank, 4 * rank, 6 * rank])


def test_too_few_rows_for_a_coverage() -> None:
    assert quantiles(9).half_width(0.9, "jackknife") == 9
    with pytest.raises(ParameterError, match=r"0\.95 from 9 leave-one-out residuals: at most 0\.9 "):
        quantiles(9).half_width(0.95, "jackknife")


def test_quantiles_survive_json() -> None:
    found = quantiles(300, 2)
    again = Quantiles.from_dict(json.loads(json.dumps(found.to_dict())))
    for kind in ("jackknife", "normalised"):
        np.testing.assert_array_equal(again.half_width(0.9, kind), found.half_width(0.9, kind))
    bare = Quantiles.from_dict(json.loads(json.dumps(Quantiles.of(np.ones((20, 1)), None).to_dict())))
    with pytest.raises(ParameterError, match="no normalised residuals"):
        bare.half_width(0.9, "normalised")
    with pytest.raises(ValueError, match="quantiles of shape"):
        Quantiles.from_dict(found.to_dict() | {"normalised": [1.0]})


def test_coverage_counts_both_ends() -> None:
    y = np.array([0.0, 1.0, 2.0, 3.0])
    assert coverage(np.ones(4), np.full(4, 2.0), y) == 0.5
    both = coverage(np.zeros((4, 2)), np.ones((4, 2)), np.stack([y, y * 0], axis=1))
    np.testing.assert_array_equal(both, [0.5, 1.0])
