"""Training rows, scaling and masks."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dkrr.dataset import Scaling, ingest, open_dataset, prepare_rows, read_mask, row_hash_fraction
from dkrr.errors import DataError, ParameterError, StoreError, StoreMismatchError

RANDOM = np.random.default_rng(2)
N = 2600
X = np.column_stack([RANDOM.standard_normal((N, 3)) * [1, 1e-4, 1e5] + [0, 3, 1e6], np.full(N, 0.1)])
Y = RANDOM.standard_normal((N, 2)) * 3 + 100
W = RANDOM.random(N)
MASK = RANDOM.random(N) < 0.3


def whiten(values: np.ndarray) -> np.ndarray:
    std = values.std(axis=0)
    std[np.ptp(values, axis=0) == 0] = 1
    return (values - values.mean(axis=0)) / std


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("standardize", [False, True])
def test_prepared_rows(mask: np.ndarray | None, standardize: bool, tmp_path: Path) -> None:
    dataset = ingest(X, tmp_path / "a.zarr", y=Y, sample_weight=W, rows_per_chunk=500)
    train, scaling = prepare_rows(dataset, tmp_path / "b.zarr", test_mask=mask, standardize=standardize)
    keep = np.ones(N, dtype=bool) if mask is None else ~mask
    m = int(keep.sum())
    assert (train.num_rows, train.feature_names, train.target_names) == (m, dataset.feature_names, dataset.target_names)
    assert train.y is not None
    assert train.weight is not None
    assert np.array_equal(train.weight.read(0, m)[:, 0], W[keep])
    if not standardize:
        assert scaling is None
        assert np.array_equal(train.read(0, m), X[keep])
        assert np.array_equal(train.y.read(0, m), Y[keep])
    else:
        assert scaling is not None
        np.testing.assert_allclose(train.read(0, m), whiten(X[keep]), rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(train.y.read(0, m), whiten(Y[keep]), rtol=1e-11, atol=1e-11)
        assert scaling.x_std[3] == 1.0
        assert not train.read(0, m)[:, 3].any()  # a constant column is exactly zero
        assert np.array_equal(scaling.apply_x(X[keep]), train.read(0, m))
        np.testing.assert_allclose(scaling.invert_y(train.y.read(0, m)), Y[keep], rtol=1e-13)
    train.verify()
    again, scaling_again = prepare_rows(dataset, tmp_path / "b.zarr", test_mask=mask, standardize=standardize)
    assert again.digest == train.digest
    assert scaling_again == scaling


def test_appended_rows_continue_the_prepared_ones(tmp_path: Path) -> None:
    first = ingest(X[:1500], tmp_path / "a.zarr", y=Y[:1500], rows_per_chunk=400)
    train, scaling = prepare_rows(first, tmp_path / "t1.zarr", test_mask=MASK[:1500], standardize=True)
    longer = ingest(X[1500:], tmp_path / "a.zarr", y=Y[1500:], append=True)
    longer_train, same = prepare_rows(longer, tmp_path / "t2.zarr", test_mask=MASK, scaling=scaling)
    assert same == scaling
    found = [(generation.n, generation.digest) for generation in longer_train.generations]
    assert found == [(train.num_rows, train.digest), (int((~MASK).sum()), longer_train.digest)]


def test_prepare_refuses(tmp_path: Path) -> None:
    dataset = ingest(X, tmp_path / "a.zarr", y=Y)
    for mask, message in (
        (MASK[:-1], r"shape \(2599,\)"),
        (MASK.astype(int), "int64 of shape"),
        (np.ones(N, dtype=bool), "none of 2600 rows"),
    ):
        with pytest.raises(DataError, match=message):
            prepare_rows(dataset, tmp_path / "b.zarr", test_mask=mask)
    prepare_rows(dataset, tmp_path / "b.zarr", test_mask=MASK)
    with pytest.raises(StoreMismatchError, match="differing: rows"):
        prepare_rows(dataset, tmp_path / "b.zarr", test_mask=~MASK)
    with pytest.raises(StoreMismatchError, match="differing: scaling"):
        prepare_rows(dataset, tmp_path / "b.zarr", test_mask=MASK, standardize=True)
    with pytest.raises(StoreMismatchError, match="differing"):
        prepare_rows(dataset, tmp_path / "a.zarr")
    huge = ingest(np.full((3, 1), 1.7e308) * [[1], [0.9], [1]], tmp_path / "huge.zarr")
    with pytest.raises(DataError, match="x_mean has an unusable value at column 0"):
        prepare_rows(huge, tmp_path / "c.zarr", standardize=True)
    assert not (tmp_path / "c.zarr").exists()


def test_scaling_round_trip_and_shapes(tmp_path: Path) -> None:
    import json

    scaling = Scaling.from_dataset(ingest(X, tmp_path / "a.zarr", y=Y[:, 0]))
    assert Scaling.from_dict(json.loads(json.dumps(scaling.to_dict()))) == scaling
    one = scaling.apply_y(Y[:, 0])
    assert one.shape == (N,)
    np.testing.assert_allclose(scaling.invert_y(one), Y[:, 0], rtol=1e-14)
    values = X.copy()
    assert scaling.apply_x(values, out=values) is values
    for call in (lambda: scaling.apply_x(X[:, :1]), lambda: scaling.apply_y(Y), lambda: scaling.invert_y(Y)):
        with pytest.raises(DataError, match="expected"):
            call()
    two = Scaling.from_dataset(ingest(X, tmp_path / "b.zarr", y=Y))
    with pytest.raises(DataError, match="1-D targets, 2 columns expected"):
        two.apply_y(Y[:, 0])
    with pytest.raises(DataError, match="x_std"):
        Scaling(x_mean=np.zeros(2), x_std=np.array([1.0, 0.0]), y_mean=np.zeros(0), y_std=np.zeros(0))
    assert Scaling.from_dataset(ingest(X, tmp_path / "c.zarr")).y_mean.shape == (0,)
    with pytest.raises(ValueError, match="read-only"):
        open_dataset(tmp_path / "c.zarr").x_mean[0] = 3


@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 10**12), length=st.integers(0, 200), cut=st.integers(0, 200), seed=st.integers(-5, 2**70))
def test_hash_depends_on_the_row_number_only(start: int, length: int, cut: int, seed: int) -> None:
    middle = start + min(cut, length)
    whole = row_hash_fraction(start, start + length, 0.4, seed)
    parts = [row_hash_fraction(start, middle, 0.4, seed), row_hash_fraction(middle, start + length, 0.4, seed)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not (row_hash_fraction(start, start + length, 0.2, seed) & ~whole).any()


def test_hash_is_splitmix64_and_uniform() -> None:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    assert mix(gamma) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 from state 0
    seeded = mix(gamma)
    wanted = [mix((seeded + (i + 1) * gamma) % 2**64) / 2**64 < 0.3 for i in range(500)]
    assert row_hash_fraction(0, 500, 0.3).tolist() == wanted
    assert abs(row_hash_fraction(0, 100_000, 0.1).mean() - 0.1) < 0.005
    assert not row_hash_fraction(0, 1000, 0.0).any()
    assert row_hash_fraction(0, 1000, 1.0).all()
    assert (row_hash_fraction(0, 1000, 0.5, 1) != row_hash_fraction(0, 1000, 0.5, 2)).any()
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ParameterError, match="0 to 1"):
            row_hash_fraction(0, 5, bad)


def masks(folder: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    values = [True, False, False, True]
    other = np.array([[v, not v] for v in values])
    (folder / "a.csv").write_text("1,0\n0,1\n0,1\n1,0\n")
    (folder / "b.csv").write_text("test,train\nTrue,False\nfalse,TRUE\n\nFalse,true\ntrue,0\n")
    (folder / "c.csv.gz").write_bytes(gzip.compress(b"0;1\n1;0\n1;0\n0;1\n"))
    np.save(folder / "d.npy", np.array(values))
    np.save(folder / "e.npy", other.astype(float))
    import pandas as pd

    pd.DataFrame({"x": [0.5] * 4, "held": values}).to_parquet(folder / "f.parquet")
    (folder / "g.csv").write_text("x,held\n0.5,1\n0.5,0\n0.5,0\n0.5,1\n")
    return {
        "csv": (folder / "a.csv", {}),
        "csv header": (folder / "b.csv", {}),
        "csv name": (folder / "b.csv", {"column": "test"}),
        "csv.gz column": (folder / "c.csv.gz", {"column": -1, "delimiter": ";"}),
        "npy": (folder / "d.npy", {}),
        "npy 2-D": (folder / "e.npy", {"column": 0}),
        "parquet": (folder / "f.parquet", {"column": "held"}),
        "data file": (folder / "g.csv", {"column": "held"}),
        "number as text": (folder / "g.csv", {"column": "1"}),
    }


KINDS = ["csv", "csv header", "csv name", "csv.gz column", "npy", "npy 2-D", "parquet", "data file", "number as text"]


@pytest.mark.parametrize("kind", KINDS)
def test_masks(kind: str, tmp_path: Path) -> None:
    path, options = masks(tmp_path)[kind]
    mask = read_mask(path, 4, **options)
    assert mask.dtype == bool
    assert mask.tolist() == [True, False, False, True]


def test_bad_masks(tmp_path: Path) -> None:
    masks(tmp_path)
    (tmp_path / "h.csv").write_text("1\n0\n2\n")
    (tmp_path / "i.csv").write_text("1,0\n0\n")
    np.save(tmp_path / "j.npy", np.array([0, 3]))
    np.save(tmp_path / "k.npy", np.zeros((2, 2, 2)))
    cases: list[tuple[str, dict[str, Any], type[Exception], str]] = [
        ("a.csv", {"num_rows": 5}, DataError, "4 rows; 5 expected"),
        ("h.csv", {}, DataError, r"h\.csv, line 3, column 0: '2'"),
        ("i.csv", {}, DataError, "line 2, column 1: the line has 1 columns; 2 expected"),
        ("a.csv", {"column": 2}, ParameterError, "columns 0 to 1"),
        ("b.csv", {"column": "tests"}, ParameterError, "test, train"),
        ("j.npy", {}, DataError, "row 1, column 0: '3'"),
        ("k.npy", {}, DataError, r"shape \(2, 2, 2\)"),
        ("no.csv", {}, StoreError, "does not exist"),
        ("g.csv", {"column": 0, "header": True}, DataError, "line 2, column 0: '0.5'"),
    ]
    for name, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            read_mask(tmp_path / name, **{"num_rows": 4, **options})
