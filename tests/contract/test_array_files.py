"""Files of arrays: what stands in them is read whole, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dkrr
from dkrr.errors import DataError


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
