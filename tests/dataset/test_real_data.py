"""The real data sets give what NumPy reads from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr.dataset import ingest, prepare_rows, read_mask

SHAPES = {"pol": (15000, 26), "elevators": (16599, 18), "bike": (17379, 17), "protein": (45730, 9)}


@pytest.mark.parametrize("name", SHAPES)
def test_same_as_loadtxt(name: str, data_folder: Path, tmp_path: Path) -> None:
    source = data_folder / name / "data.csv.gz"
    dataset = ingest(source, tmp_path / "a.zarr", target=[-1])
    assert (dataset.num_rows, dataset.num_features) == SHAPES[name]
    head = np.loadtxt(source, delimiter=",", max_rows=500)
    assert np.array_equal(dataset.read(0, 500), head[:, :-1])
    assert dataset.y is not None
    assert np.array_equal(dataset.y.read(0, 500), head[:, -1:])


def test_split_of_pol(data_folder: Path, tmp_path: Path) -> None:
    dataset = ingest(data_folder / "pol/data.csv.gz", tmp_path / "a.zarr", target=-1)
    mask_file = data_folder / "pol/test_mask.csv.gz"
    mask = read_mask(mask_file, dataset.num_rows)
    assert np.array_equal(mask, np.loadtxt(mask_file, delimiter=",")[:, 0] == 1)
    train, scaling = prepare_rows(dataset, tmp_path / "b.zarr", test_mask=mask, standardize=True)
    assert scaling is not None
    assert train.num_rows == 15000 - mask.sum()
    raw = dataset.read(0, 15000)[~mask]
    constant = np.ptp(raw, axis=0) == 0
    assert np.array_equal(scaling.x_std == 1.0, constant)
    np.testing.assert_allclose(train.x_mean, 0, atol=1e-12)
    np.testing.assert_allclose(train.x_std, 1, rtol=1e-12)
    np.testing.assert_allclose(scaling.x_std[~constant], raw.std(axis=0)[~constant], rtol=1e-12)
