"""Rows: what is written comes back, whatever the chunks; digests and moments depend on nothing else than the values."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dkrr.dataset.rows import Moments, RowArray, RowSummary
from dkrr.errors import DamagedChunkError, StoreError
from dkrr.store.chunks import ChunkArray

FINITE = st.floats(allow_nan=False, allow_infinity=False)


def write(store: object, values: np.ndarray, rows_per_chunk: int, path: str = "X") -> RowArray:
    n, k = values.shape
    rows = RowArray.create(store, path, num_rows=n, num_columns=k, rows_per_chunk=rows_per_chunk)
    for i in range(rows.num_chunks):
        start, stop = rows.span(i)
        rows.write_chunk(i, values[start:stop])
    return rows


@settings(max_examples=40, deadline=None)
@given(
    values=hnp.arrays(np.float64, st.tuples(st.integers(1, 40), st.integers(1, 4)), elements=FINITE),
    rows_per_chunk=st.integers(1, 50),
    data=st.data(),
)
def test_round_trip(values: np.ndarray, rows_per_chunk: int, data: st.DataObject, tmp_path_factory) -> None:
    store = tmp_path_factory.mktemp("rows")
    write(store, values, rows_per_chunk)
    rows = RowArray.open(store, "X")
    assert (rows.num_rows, rows.num_columns, rows.rows_per_chunk) == (*values.shape, rows_per_chunk)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    out = np.empty((stop - start, values.shape[1]))
    assert rows.read(start, stop, out) is out
    assert out.tobytes() == values[start:stop].tobytes()  # bytes: -0.0 and subnormals too
    spans = list(rows.blocks())
    assert [spans[0][0], spans[-1][1]] == [0, len(values)]
    assert all(a[1] == b[0] and a[1] % rows_per_chunk == 0 for a, b in itertools.pairwise(spans))
    # any other reader sees the same rows
    assert np.array_equal(zarr.open_array(store / "X", mode="r")[:], values)


# --- digests and moments ----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300, 5e-324])
def test_scales_that_overflow_or_vanish_when_squared(scale: float) -> None:
    values = np.array([[0.0], [1.0], [2.0], [3.0]]) * scale
    std = Moments.of(values).std[0]
    assert std > 0
    if scale > 1e-320:  # among subnormal numbers there are few digits to compare
        assert std == pytest.approx(np.sqrt(1.25) * scale, rel=1e-14)


def test_an_unwritten_row_and_what_is_no_rows_are_found(tmp_path: Path) -> None:
    write(tmp_path, np.ones((3, 2)), 4)
    with pytest.raises(DamagedChunkError, match="row 3 was never written"):
        RowArray.unsaved(tmp_path, "X", num_rows=4, num_columns=2, rows_per_chunk=4).read(0, 4)
    with pytest.raises(StoreError, match="3 rows; 6 expected"):
        RowArray.open(tmp_path, "X", num_rows=6)
    ChunkArray.create(tmp_path, "tiles", shape=(4, 4), chunks=(2, 2))
    with pytest.raises(StoreError, match="chunks of whole rows"):
        RowArray.open(tmp_path, "tiles")
