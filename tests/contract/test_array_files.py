"""Files of arrays: what stands in them is read whole, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

import dkrr
from dkrr.errors import DataError


def test_an_array_of_a_group_that_has_no_meaning_is_not_left_out(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "g.zarr", mode="w")
    group["X"], group["y"] = np.ones((3, 2)), np.ones(3)
    assert dkrr.ingest(tmp_path / "g.zarr", tmp_path / "one.zarr").num_targets == 1
    group["weights"] = np.ones(3)  # weight is meant
    with pytest.raises(DataError, match="holds X, weights, y; X, and optionally y and weight, expected"):
        dkrr.ingest(tmp_path / "g.zarr", tmp_path / "two.zarr")


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_second_array_behind_the_first_is_not_left_out(order: str, tmp_path: Path) -> None:
    rows = np.array(np.arange(12.0).reshape(4, 3), order=order)  # type: ignore[call-overload]
    path = tmp_path / "rows.npy"
    with path.open("wb") as file:
        np.save(file, rows)
    assert np.array_equal(dkrr.ingest(path, tmp_path / "one.zarr").read(0, 4), rows)
    with path.open("ab") as file:
        np.save(file, rows)
    with pytest.raises(DataError, match=r"rows\.npy has 448 bytes; 224 expected: .*more is behind its first"):
        dkrr.ingest(path, tmp_path / "two.zarr")
    assert not (tmp_path / "two.zarr").exists()
