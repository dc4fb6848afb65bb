"""Digests and moments: what must not matter does not, what must be exact is."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.dataset.digests import prefix_digest
from dkrr.dataset.moments import Moments
from dkrr.dataset.summary import RowSummary


def summary_of(values: np.ndarray, cuts: list[int]) -> RowSummary:
    summary = RowSummary(values.shape[1])
    for part in np.split(values, sorted(cuts)):
        summary.add(part)
    return summary


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 5000), k=st.integers(1, 3), cuts=st.lists(st.integers(0, 5000), max_size=8), seed=st.integers(0, 9)
)
def test_neither_cuts_nor_resuming_matter(n: int, k: int, cuts: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((n, k))
    whole = summary_of(values, [])
    pieces = summary_of(values, [min(c, n) for c in cuts])
    assert pieces.to_dict() == whole.to_dict()
    first = min([*cuts, n])
    if 0 < first < n:
        part = summary_of(values[:first], [])
        resumed = RowSummary.resume(part.to_dict(), values[first // 1024 * 1024 : first])
        resumed.add(values[first:])
        assert resumed.to_dict() == whole.to_dict()


def test_digest_is_what_the_formula_says() -> None:
    values = np.arange(2 * 1500.0).reshape(1500, 2)
    first, rest = (hashlib.sha256(part.tobytes()).digest() for part in (values[:1024], values[1024:]))
    wanted = hashlib.sha256(b"dkrr rows 1500 x 2\n" + first + rest).hexdigest()
    assert summary_of(values, []).digest() == wanted


def test_digest_sees_values_order_and_shape() -> None:
    values = np.arange(24.0).reshape(12, 2)
    others = [values[::-1], values + 0.0 * values + np.eye(12, 2) * 1e-15, values.reshape(8, 3), values[:11], -values]
    digests = {summary_of(v, []).digest() for v in [values, *others]}
    assert len(digests) == 6
    with pytest.raises(ValueError, match="fewer than 1024"):
        prefix_digest([], np.zeros((1024, 1)))


def test_moments_equal_numpy_in_extended_precision() -> None:
    random = np.random.default_rng(1)
    values = random.standard_normal((5000, 4)) * [1, 1e-3, 1e6, 5] + [0, 1e3, -1e9, 0]
    moments = summary_of(values, [7, 999, 4000]).moments()
    exact = values.astype(np.longdouble)
    np.testing.assert_allclose(moments.mean, exact.mean(axis=0).astype(float), rtol=1e-14, atol=1e-16)
    np.testing.assert_allclose(moments.std, exact.std(axis=0).astype(float), rtol=1e-11)


@pytest.mark.parametrize("k", [2, 40])  # narrow and wide blocks take different paths through memory
def test_constant_columns_have_std_exactly_zero(k: int) -> None:
    values = np.tile([0.1, 1.7e308, *[1 / 3] * (k - 2)], (3001, 1))  # the second overflows when summed
    moments = summary_of(values, [10, 1700]).moments()
    assert moments.std.tolist() == [0.0] * k
    assert moments.mean.tolist() == values[0].tolist()


def test_constant_blocks_of_different_value_are_not_constant() -> None:
    values = np.repeat([[1.0], [2.0]], 1024, axis=0)
    assert summary_of(values, []).moments().std == pytest.approx([0.5], rel=1e-15)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300, 5e-324])
def test_scales_that_overflow_or_vanish_when_squared(scale: float) -> None:
    values = np.array([[0.0], [1.0], [2.0], [3.0]]) * scale
    std = Moments.of(values).std[0]
    assert std > 0
    if scale > 1e-320:  # among subnormal numbers there are few digits to compare
        assert std == pytest.approx(np.sqrt(1.25) * scale, rel=1e-14)


def test_sum_that_overflows_is_stored_as_null() -> None:
    summary = RowSummary(2)
    summary.add(np.array([[1.7e308, 1.0], [1.7e308, 2.0], [1.6e308, 2.0]]))
    assert summary.to_dict()["mean"][0] is None
    assert summary.to_dict()["mean"][1] == pytest.approx(5 / 3)
