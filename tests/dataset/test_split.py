"""Training rows, scaling and masks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import ingest, prepare_rows, read_mask, row_hash_fraction
from dkrr.errors import DataError, ParameterError, StoreMismatchError

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


def test_prepare_refuses(tmp_path: Path) -> None:
    dataset = ingest(X, tmp_path / "a.zarr", y=Y)
    prepare_rows(dataset, tmp_path / "b.zarr", test_mask=MASK)
    cases: list[tuple[Any, bool, str]] = [
        (MASK[:-1], False, r"shape \(2599,\)"),
        (np.ones(N, dtype=bool), False, "none of 2600 rows"),
        (~MASK, False, "differing: rows"),
        (MASK, True, "differing: scaling"),
    ]
    for mask, standardize, message in cases:
        with pytest.raises((DataError, StoreMismatchError), match=message):
            prepare_rows(dataset, tmp_path / "b.zarr", test_mask=mask, standardize=standardize)
    huge = ingest(np.full((3, 1), 1.7e308) * [[1], [0.9], [1]], tmp_path / "huge.zarr")
    with pytest.raises(DataError, match="x_mean has an unusable value at column 0"):
        prepare_rows(huge, tmp_path / "c.zarr", standardize=True)
    assert not (tmp_path / "c.zarr").exists()


@pytest.mark.parametrize(("start", "seed"), [(0, 0), (10**12, -5), (7, 2**70 + 3)])
def test_hash_is_splitmix64_of_the_number_of_the_row(start: int, seed: int) -> None:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    hashed = [mix((mix((seed + gamma) % 2**64) + (start + i + 1) * gamma) % 2**64) / 2**64 for i in range(500)]
    assert row_hash_fraction(start, start + 500, 0.3, seed).tolist() == [value < 0.3 for value in hashed]
    with pytest.raises(ParameterError, match="0 to 1"):
        row_hash_fraction(0, 5, 1.1)


MASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "no header": ("1,0\n0,1\n0,1\n1,0\n", {}),
    "a header": ("test,train\nTrue,False\nfalse,TRUE\n\nFalse,true\ntrue,0\n", {}),
    "a name": ("x,held\n0.5,1\n0.5,0\n0.5,0\n0.5,1\n", {"column": "held"}),
    "a number": ("0;1\n1;0\n1;0\n0;1\n", {"column": -1, "delimiter": ";"}),
    "4 rows; 5 expected": ("1\n0\n0\n1\n", {"num_rows": 5}),
    r"\.csv, line 3, column 0: '2'": ("1\n0\n2\n", {}),
    "columns 0 to 1": ("1,0\n0,1\n", {"column": 2}),
    "line 2, column 0: '0.5'": ("x,held\n0.5,1\n", {"column": 0, "header": True}),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks(case: str, tmp_path: Path) -> None:
    text, options = MASKS[case]
    (tmp_path / "mask.csv").write_text(text)
    fails = pytest.raises((DataError, ParameterError), match=case) if " " in case and case[0] not in "an" else None
    with fails or contextlib.nullcontext():
        mask = read_mask(tmp_path / "mask.csv", **{"num_rows": 4, **options})
        assert mask.tolist() == [True, False, False, True]
