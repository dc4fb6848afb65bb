"""Arrays and frames: what stands in them is read whole and as it is meant, or refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import zarr

import dkrr
from dkrr.errors import DataError, ParameterError
from dkrr.jobs.prepare import prepare
from dkrr.jobs.spec import JobSpec


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


def test_a_number_that_is_the_name_of_another_column_is_asked_about(tmp_path: Path) -> None:
    frame = pd.DataFrame(np.arange(12.0).reshape(3, 4))
    assert dkrr.ingest(frame, tmp_path / "a.zarr", target=3).target_names == ("3",)
    rest = frame.drop(columns=0)
    with pytest.raises(
        ParameterError, match=r"target 2 may be column 2 of X \('3'\) or the one that is called '2', column 1"
    ):
        dkrr.ingest(rest, tmp_path / "b.zarr", target=2)
    assert dkrr.ingest(rest, tmp_path / "b.zarr", target="2").target_names == ("2",)
    years = frame.set_axis([2019, 2020, 2021, 2022], axis=1)
    assert dkrr.ingest(years, tmp_path / "c.zarr", target=2021).target_names == ("2021",)


@pytest.mark.parametrize(("name", "options"), [("group.zarr", {}), ("array.zarr", {"target": -1})])
def test_a_job_takes_zarr_arrays_that_are_no_data_set(name: str, options: dict[str, int], tmp_path: Path) -> None:
    rows = np.random.default_rng(0).random((40, 4))
    group = zarr.open_group(tmp_path / "group.zarr", mode="w", zarr_format=3)
    group["X"], group["y"] = rows[:, :3], rows[:, 3]
    zarr.save_array(tmp_path / "array.zarr", rows, zarr_format=3)
    job = JobSpec.from_dict({"data": {"path": name, **options}}, base=tmp_path)
    train = prepare(job, str(tmp_path / "store")).train
    np.testing.assert_array_equal(train.read(0, 40), rows[:, :3])
    np.testing.assert_array_equal(train.targets.read(0, 40)[:, 0], rows[:, 3])
