"""RowArray: what is written comes back, whatever the chunks, and what is missing or damaged is seen."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dkrr.dataset import RowArray, default_rows_per_chunk
from dkrr.errors import DamagedChunkError, StoreError, StoreMismatchError

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
    spans = list(rows.blocks(data.draw(st.none() | st.integers(1, 60))))
    assert [spans[0][0], spans[-1][1]] == [0, len(values)]
    assert all(a[1] == b[0] and a[1] % rows_per_chunk == 0 for a, b in itertools.pairwise(spans))
    # any other reader sees the same rows
    assert np.array_equal(zarr.open_array(store / "X", mode="r")[:], values)


def test_ragged_chunk_is_stored_full_size_with_nan(tmp_path: Path) -> None:
    rows = write(tmp_path, np.arange(10.0).reshape(5, 2), 4)
    raw = np.frombuffer((tmp_path / "X/c/1/0").read_bytes()[:-4], dtype="<f8").reshape(4, 2)
    assert np.array_equal(raw[0], [8.0, 9.0])
    assert np.isnan(raw[1:]).all()
    assert rows.read(4, 5).tolist() == [[8.0, 9.0]]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "bytes"),
        (lambda path: path.write_bytes(b"\x01" + path.read_bytes()[1:]), "crc32c"),
        (lambda path: path.write_bytes(bytes(path.stat().st_size)), "crc32c"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage, reason: str) -> None:
    rows = write(tmp_path, np.ones((10, 3)), 4)
    damage(tmp_path / "X/c/1/0")
    assert rows.read(0, 4).sum() == 12
    with pytest.raises(DamagedChunkError, match=reason) as caught:
        rows.read(0, 10)
    assert caught.value.index == (1, 0)


def test_unwritten_row_is_found(tmp_path: Path) -> None:
    rows = write(tmp_path, np.ones((3, 2)), 4)
    with pytest.raises(DamagedChunkError, match="row 3 was never written"):
        rows.with_rows(4).read(0, 4)


def test_wrong_blocks_and_ranges_are_refused(tmp_path: Path) -> None:
    rows = write(tmp_path, np.ones((5, 2)), 4)
    with pytest.raises(ValueError, match=r"\(1, 2\) expected for chunk 1"):
        rows.write_chunk(1, np.ones((4, 2)))
    with pytest.raises(IndexError, match="chunk 2"):
        rows.write_chunk(2, np.ones((1, 2)))
    with pytest.raises(IndexError, match="rows 2 to 6"):
        rows.read(2, 6)
    with pytest.raises(ValueError, match="float64 expected"):
        rows.read(0, 5, np.empty((5, 2), dtype=np.float32))


def test_open_refuses_what_is_not_rows(tmp_path: Path) -> None:
    write(tmp_path, np.ones((5, 2)), 4)
    with pytest.raises(StoreError, match="5 rows; 6 expected"):
        RowArray.open(tmp_path, "X", num_rows=6)
    with pytest.raises(StoreMismatchError, match="chunks"):
        RowArray.create(tmp_path, "X", num_rows=5, num_columns=2, rows_per_chunk=3)
    from dkrr.store.chunks import ChunkArray

    ChunkArray.create(tmp_path, "tiles", shape=(4, 4), chunks=(2, 2))
    with pytest.raises(StoreError, match="chunks of whole rows"):
        RowArray.open(tmp_path, "tiles")


def test_default_chunk_is_four_mebibytes_and_no_more_than_needed() -> None:
    assert default_rows_per_chunk(8) == 65536
    assert default_rows_per_chunk(10) == 32768
    assert default_rows_per_chunk(100_000) == 256
    assert default_rows_per_chunk(10, 1025) == 2048
    assert default_rows_per_chunk(10, 1) == 256
