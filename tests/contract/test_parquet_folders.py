"""A folder of Parquet holds what pyarrow.dataset and pandas say that it holds: no row more, no row less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

import dkrr
from dkrr.errors import DataError
from tests.contract.helpers import run


def write(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)
    return path


def rows(dataset: dkrr.Dataset) -> list[list[float]]:
    found: list[list[float]] = dataset.read(0, dataset.num_rows).tolist()
    return found


def test_hidden_files_do_not_count_and_subfolders_do(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    for number, name in enumerate(["part.2.parquet", "part.10.parquet", "more/a.parquet", "more/deep/b.PARQUET"]):
        write(folder / name, x=[float(number)])
    for name in ["_metadata", ".part.1.parquet.crc", "_SUCCESS"]:
        (folder / name).write_bytes(b"")
    for name in [".x.parquet", "_y.parquet", "_old/z.parquet", ".tmp/z.parquet"]:
        write(folder / name, x=[99.0])
    found = rows(dkrr.ingest(folder, tmp_path / "d.zarr"))
    assert sorted(found) == [[0], [1], [2], [3]]
    assert found.index([0]) < found.index([1])
    assert sorted(found) == [[x] for x in sorted(pyarrow.dataset.dataset(folder).to_table()["x"].to_pylist())]


def test_folders_with_values_in_their_names_are_columns(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(6.0), "year": [2019, 2020] * 3, "land": ["a b", "c", "c"] * 2})
    frame.to_parquet(tmp_path / "p", partition_cols=["year", "land"])
    dataset = dkrr.ingest(tmp_path / "p", tmp_path / "d.zarr", features=["x", "year"], target="land", one_hot=True)
    assert dataset.y is not None
    assert dataset.classes == ("a b", "c")
    found = [
        (x, year, dataset.classes[int(np.argmax(y))])
        for (x, year), y in zip(rows(dataset), dataset.y.read(0, 6), strict=True)
    ]
    assert sorted(found) == sorted(frame.itertuples(index=False, name=None))
    only = dkrr.ingest(tmp_path / "p", tmp_path / "only.zarr", features=["year"])
    assert sorted(rows(only)) == [[2019]] * 3 + [[2020]] * 3
    with pytest.raises(DataError, match=r"column 'land' of .* has dtype str"):
        dkrr.ingest(tmp_path / "p", tmp_path / "e.zarr")
    missing = pd.DataFrame({"x": [1.0, 2.0], "k": [7.0, None]})
    missing.to_parquet(tmp_path / "m", partition_cols=["k"])
    with pytest.raises(DataError, match=r"1 value that is NaN .* column 1 \('k'\)"):
        dkrr.ingest(tmp_path / "m", tmp_path / "e.zarr")
    assert rows(dkrr.ingest(tmp_path / "m", tmp_path / "e.zarr", missing="drop")) == [[1, 7]]


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    write(tmp_path / "p/1.parquet", a=[1.0], b=[2.0])
    write(tmp_path / "p/2.parquet", b=[4], a=[3])
    write(tmp_path / "p/3.parquet", a=pa.array([], pa.float64()), b=pa.array([], pa.float64()))
    dataset = dkrr.ingest(tmp_path / "p", tmp_path / "d.zarr")
    assert (dataset.feature_names, rows(dataset)) == (("a", "b"), [[1, 2], [3, 4]])


REFUSED: dict[str, tuple[list[str], str]] = {
    "another kind": (["1.parquet", "notes/README.md"], r"holds notes/README\.md, which is no \.parquet file"),
    "another name of a folder": (["y=1/1.parquet", "z=1/2.parquet"], "folders that name z; y expected"),
    "only some in such folders": (["y=1/1.parquet", "2.parquet"], "expected as for"),
    "a column twice": (["x=1/1.parquet"], "column 'x' is in .* and in the name of its folder"),
    "nothing but hidden files": (["_1.parquet", ".2.parquet"], r"a folder without \.parquet files"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_left_out_is_named(case: str, tmp_path: Path) -> None:
    names, message = REFUSED[case]
    for name in names:
        write(tmp_path / "p" / name, x=[1.0])
    with pytest.raises(DataError, match=message):
        dkrr.ingest(tmp_path / "p", tmp_path / "d.zarr")
    assert not (tmp_path / "d.zarr").exists()


def test_a_linked_folder_and_an_empty_file_are_named(tmp_path: Path) -> None:
    write(tmp_path / "p/1.parquet", x=[1.0])
    write(tmp_path / "q/2.parquet", x=[2.0])
    (tmp_path / "p/more").symlink_to(tmp_path / "q")
    with pytest.raises(DataError, match="more is a link to a folder"):
        dkrr.ingest(tmp_path / "p", tmp_path / "d.zarr")
    (tmp_path / "q/3.parquet").touch()
    with pytest.raises(DataError, match=r"3\.parquet is not a readable Parquet file"):
        dkrr.ingest(tmp_path / "q", tmp_path / "d.zarr")


def test_a_job_sees_what_changes_in_a_subfolder(tmp_path: Path) -> None:
    from dkrr.jobs.prepare import open_data
    from dkrr.jobs.spec import DataSpec

    file = write(tmp_path / "p/year=2019/1.parquet", x=[1.0, 2.0])
    data = DataSpec(path=str(tmp_path / "p"), target=["x"])
    before = open_data(data, tmp_path / "store")
    write(file, x=[3.0, 4.0, 5.0])
    after = open_data(data, tmp_path / "store")
    assert (before.num_rows, after.num_rows) == (2, 3)


LOSSY: dict[str, tuple[pa.Array, pa.Array]] = {
    "booleans, then codes": (pa.array([True, False]), pa.array([1, 2])),
    "days, then hours": (pa.array([0, 1], pa.date32()), pa.array([0, 3_600_000], pa.timestamp("ms"))),
    "cents, then fractions": (pa.array(["1.10", "2.20"]).cast(pa.decimal128(10, 2)), pa.array([1.25, 0.004])),
    "float32, then float64": (pa.array([1, 2], pa.float32()), pa.array([1.0, 123456789.0])),
    "numbers, then text": (pa.array([1, 2]), pa.array(["1", "007"])),
}


@pytest.mark.parametrize("name", LOSSY)
def test_values_of_a_later_file_that_its_first_cannot_hold_are_no_other_values(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for number, kept in enumerate(LOSSY[name]):
        pq.write_table(pa.table({"x": [0.0, number], "kept": kept}), tmp_path / f"rows/{number}.parquet")
    dkrr.KernelRidge().fit(pd.DataFrame({"x": np.arange(5.0)}), np.arange(5.0)).save(tmp_path / "model.zarr")
    given = ["predict", tmp_path / "model.zarr", tmp_path / "rows", "-o", tmp_path / "out.csv", "--keep", "kept"]
    run(*given, exits=4, said=("column 'kept'", "1.parquet", "one schema"))
    run("ingest", tmp_path / "rows", tmp_path / "d.zarr", "--target", "kept", "--one-hot", exits=4, said="one schema")
