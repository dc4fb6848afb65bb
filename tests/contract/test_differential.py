"""Random fits against dense references in extended precision: a fixed hundred, and those that were wrong once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import dkrr
from tests.contract.differential import check, draw, failures

# near rows among far ones, centred or scaled; rows at 7 to 48 lengths; float32 that overflows; centres of an indefinite
# kernel that seem to be in the span of one; more features than rows;
# entries that float32 cannot hold, in rows of weight zero
ONCE_WRONG = (
    98, 494, 1241, 1716, 2085, 2118, 2328, 11166, 11174, 11828, 12390, 30826, 40193, 60136, 70117, 92724, 101143,
)  # fmt: skip


@pytest.mark.parametrize("seeds", [*(range(first, first + 10) for first in range(0, 100, 10)), ONCE_WRONG], ids=str)
def test_no_answer_is_wrong_without_an_error(seeds: Sequence[int]) -> None:
    outcomes = {seed: check(draw(seed)) for seed in seeds}
    wrong = {seed: failures(outcome) for seed, outcome in outcomes.items() if failures(outcome)}
    assert not wrong, [draw(seed) for seed in wrong]
    assert sum("refused" not in outcome for outcome in outcomes.values()) >= 5


def test_a_wrong_answer_is_seen() -> None:
    case = draw(10)
    assert not failures(check(case))
    case.alpha = np.multiply(case.alpha, 1 + 1e-6)
    assert "prediction" in failures(check(case, truth=draw(10)))


def test_counts_may_be_numpy_integers() -> None:
    X = np.random.default_rng(0).standard_normal((50, 3))
    est = dkrr.KernelRidge(kernel="rbf", solver="nystrom", solver_params={"num_centers": np.int64(20)})
    assert "20 of 50" in est.fit(X, X[:, 0]).solution_.message
