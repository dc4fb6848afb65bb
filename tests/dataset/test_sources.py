"""Every kind of source gives the same data set."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zarr

from dkrr.dataset import ingest, open_dataset

N, D = 2500, 3
RANDOM = np.random.default_rng(5)
X = RANDOM.standard_normal((N, D))
Y = RANDOM.standard_normal(N)
W = RANDOM.random(N)
TABLE = np.column_stack([X, Y])
NAMES = ["a", "b", "c", "y"]


def save_text(path: Path, header: bool, delimiter: str = ",") -> Path:
    text = (delimiter.join(NAMES) + "\n") * header
    text += "\n".join(delimiter.join(map(repr, row)) for row in TABLE.tolist()) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def save_npy(path: Path, values: np.ndarray) -> Path:
    np.save(path, values)
    return path


def save_parquet(path: Path, cuts: list[int], **options: Any) -> Path:
    frames = [pd.DataFrame(part, columns=NAMES) for part in np.split(TABLE, cuts)]
    if not cuts:
        frames[0].to_parquet(path)
        return path
    path.mkdir()
    for i, frame in enumerate(frames):
        frame.to_parquet(path / f"part.{i}.parquet", **options)
    return path


def save_zarr(path: Path, **arrays: np.ndarray) -> Path:
    group = zarr.open_group(path, mode="w", zarr_format=3)
    for name, values in arrays.items():
        group.create_array(name, data=values, chunks=(700, *values.shape[1:]))
    return path


def memmap(path: Path, mode: Any, values: np.ndarray, order: str = "C") -> np.memmap:
    written = np.memmap(path, np.float64, "w+", shape=values.shape, order=order)  # type: ignore[call-overload]
    written[:] = values
    written.flush()
    return np.memmap(path, np.float64, mode, shape=values.shape, order=order)  # type: ignore[call-overload]


SOURCES: dict[str, Any] = {
    "csv": lambda p: (save_text(p / "s.csv", False), {"target": -1}),
    "csv header": lambda p: (save_text(p / "s.csv", True), {"target": "y"}),
    "csv.gz header": lambda p: (save_text(p / "s.csv.gz", True), {"target": "y", "header": True}),
    "csv semicolon": lambda p: (save_text(p / "s.csv", True, ";"), {"target": "y", "delimiter": ";"}),
    "parquet": lambda p: (save_parquet(p / "s.parquet", []), {"target": "y"}),
    "parquet folder": lambda p: (save_parquet(p / "s", list(range(200, 2500, 200))), {"target": 3}),
    "npy": lambda p: (save_npy(p / "s.npy", TABLE), {"target": -1}),
    "npy fortran": lambda p: (save_npy(p / "s.npy", np.asfortranarray(TABLE)), {"target": -1}),
    "npy big-endian": lambda p: (save_npy(p / "s.npy", TABLE.astype(">f8")), {"target": -1}),
    "npy and y": lambda p: (str(save_npy(p / "s.npy", X)), {"y": Y}),
    "npy and y.npy": lambda p: (save_npy(p / "s.npy", X), {"y": save_npy(p / "y.npy", Y)}),
    "zarr group": lambda p: (save_zarr(p / "s.zarr", X=X, y=Y), {}),
    "zarr group object": lambda p: (zarr.open_group(save_zarr(p / "s.zarr", X=X, y=Y), mode="r"), {}),
    "zarr array path": lambda p: (save_zarr(p / "s.zarr", T=TABLE) / "T", {"target": -1}),
    "zarr array": lambda p: (zarr.open_group(save_zarr(p / "s.zarr", T=TABLE))["T"], {"target": -1}),
    "numpy": lambda p: (X, {"y": Y}),
    "numpy table": lambda p: (TABLE, {"target": "-1"}),
    "numpy fortran": lambda p: (np.asfortranarray(X), {"y": Y[:, None]}),
    "numpy strided": lambda p: (np.repeat(X, 2, axis=0)[::2], {"y": np.repeat(Y, 3)[::3]}),
    "numpy big-endian": lambda p: (X.astype(">f8"), {"y": Y.astype(">f8")}),
    "numpy object": lambda p: (X.astype(object), {"y": Y.astype(object)}),
    "list": lambda p: (X.tolist(), {"y": Y.tolist()}),
    "memmap r": lambda p: (memmap(p / "m", "r", TABLE), {"target": -1}),
    "memmap c": lambda p: (memmap(p / "m", "c", TABLE), {"target": -1}),
    "memmap fortran": lambda p: (memmap(p / "m", "r+", TABLE, "F"), {"target": -1}),
    "memmap view": lambda p: (memmap(p / "m", "r", np.repeat(TABLE, 2, axis=0))[::2], {"target": -1}),
    "frame": lambda p: (pd.DataFrame(TABLE, columns=NAMES), {"target": "y"}),
    "frame nullable": lambda p: (pd.DataFrame(TABLE, columns=NAMES).astype("Float64"), {"target": "y"}),
    "frame sparse": lambda p: (pd.DataFrame(TABLE, columns=NAMES).astype(pd.SparseDtype(float)), {"target": "y"}),
    "arrow table": lambda p: (pa.table(dict(zip(NAMES, TABLE.T, strict=True))), {"target": "y"}),
    "frame and series": lambda p: (pd.DataFrame(X, columns=list("abc")), {"y": pd.Series(Y, index=range(N, 0, -1))}),
    "dask": lambda p: (da.from_array(X, chunks=(700, 2)), {"y": da.from_array(Y, chunks=999)}),
    "dask and numpy": lambda p: (da.from_array(X, chunks=(700, 3)), {"y": Y}),
    "dataset": lambda p: (ingest(X, p / "first.zarr", y=Y), {}),
    "dataset path": lambda p: (ingest(X, p / "first.zarr", y=Y, rows_per_chunk=77).path, {}),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    source, options = SOURCES[kind](tmp_path)
    dataset = ingest(source, tmp_path / "out.zarr", **options)
    assert (dataset.num_rows, dataset.num_features, dataset.num_targets) == (N, D, 1)
    assert dataset.X.read(0, N).tobytes() == X.tobytes()
    assert dataset.y.read(0, N).tobytes() == Y.tobytes()
    plain = ingest(X, tmp_path / "plain.zarr", y=Y)
    assert (dataset.digest, dataset.digest_y) == (plain.digest, plain.digest_y)
    assert dataset.x_std.tobytes() == plain.x_std.tobytes()
    dataset.verify()


def test_names_one_dimensional_targets_and_weights(tmp_path: Path) -> None:
    frame = pd.DataFrame(np.column_stack([TABLE, W]), columns=[*NAMES, "w"])
    dataset = ingest(frame, tmp_path / "a.zarr", target="y", weight="w")
    assert dataset.feature_names == ("a", "b", "c")
    assert (dataset.target_names, dataset.weight_name, dataset.y_is_1d) == (("y",), "w", True)
    assert np.array_equal(dataset.weight.read(0, N)[:, 0], W)
    dataset = ingest(frame, tmp_path / "b.zarr", target=["y", 0], features=["c", -4])
    assert (dataset.feature_names, dataset.target_names) == (("c", "b"), ("y", "a"))
    assert dataset.y_is_1d is False
    assert dataset.weight is None
    assert np.array_equal(dataset.y.read(0, N), TABLE[:, [3, 0]])
    assert np.array_equal(dataset.read(3, 9), TABLE[3:9, [2, 1]])
    assert ingest(frame[["y"]], tmp_path / "c.zarr").y is None
    assert ingest(X, tmp_path / "d.zarr", y=Y[:, None]).y_is_1d is False


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", ">i4", "longdouble"])
def test_numbers_of_any_type_are_converted(dtype: str, tmp_path: Path) -> None:
    values = (np.arange(30).reshape(10, 3) % 2).astype(dtype)
    assert np.array_equal(ingest(values, tmp_path / "a.zarr").read(0, 10), values.astype(float))
    np.save(tmp_path / "a.npy", values)
    assert np.array_equal(ingest(tmp_path / "a.npy", tmp_path / "b.zarr").read(0, 10), values.astype(float))


def test_memory_map_changes_in_memory_survive(tmp_path: Path) -> None:
    mapped = memmap(tmp_path / "m", "c", X)
    mapped[5] = 7.0  # copy on write: only in memory, so its pages must not be dropped
    assert np.array_equal(ingest(mapped, tmp_path / "a.zarr").read(5, 6), [[7.0] * 3])
    assert mapped[5].tolist() == [7.0] * 3


def test_parquet_types_index_and_folder_order(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"i": [1, 2, 3], "f": np.float32([0.5, 1.5, 2.5]), "b": [True, False, True]}, index=list("uvw")
    )
    frame.to_parquet(tmp_path / "s.parquet")
    dataset = ingest(tmp_path / "s.parquet", tmp_path / "a.zarr")
    assert dataset.feature_names == ("i", "f", "b")  # the stored index is no feature
    assert dataset.read(0, 3).tolist() == [[1, 0.5, 1], [2, 1.5, 0], [3, 2.5, 1]]


CLASSES: dict[str, tuple[Any, dict[str, Any], tuple[Any, ...]]] = {
    "text": ("x,k\n1,pear\n2,apple\n3,pear\n", {}, ("apple", "pear")),
    "Namibia": ("x,k\n1, NA\n2,DE\n", {"target": "k", "classes": ["DE", "NA"]}, ("DE", "NA")),
    "frame of Namibia": (pd.DataFrame({"x": [1.0, 2.0], "k": ["NA", "DE"]}), {}, ("DE", "NA")),
    "signs": ("x,k\n1,-\n2,+\n3, -\n".replace(", ", ","), {}, ("+", "-")),
    "padded": ("x,k\n1, pear\n2,apple \n3, pear\n", {}, ("apple", "pear")),
    "numbers": ("x,k\n1,10\n2,9\n3,10\n", {}, (9, 10)),
    "codes": ("x,k\n1,01\n2,1\n3,02\n", {}, ("01", "02", "1")),
    "category": (pd.DataFrame({"x": [1.0, 2.0], "k": pd.Categorical(["u", "v"])}), {}, ("u", "v")),
    "array": (X[:3], {"y": np.array(["u", "v", "u"])}, ("u", "v")),
    "fractions": (X[:3], {"y": [0.0, 2.0, 0.5]}, (0, 0.5, 2)),
    "digits": ("sklearn:digits", {"target": [-1]}, tuple(range(10))),
}


@pytest.mark.parametrize("case", CLASSES)
def test_classes(case: str, tmp_path: Path) -> None:
    source, options, classes = CLASSES[case]
    if isinstance(source, str) and "\n" in source:
        (tmp_path / "s.csv").write_text(source)
        source = tmp_path / "s.csv"
    options = options or {"target": "k"}
    dataset = ingest(source, tmp_path / "a.zarr", one_hot=True, **options)
    assert (dataset.classes, open_dataset(tmp_path / "a.zarr").classes) == (classes, classes)
    assert np.array_equal(dataset.y.read(0, dataset.num_rows).sum(axis=1), np.ones(dataset.num_rows))


def test_generated_rows_do_not_depend_on_how_they_are_read(tmp_path: Path) -> None:
    longer = ingest("generate:friedman?n=5000&d=7&seed=3&noise=0", tmp_path / "a.zarr")
    shorter = ingest("generate:friedman?n=3000&d=7&seed=3&noise=0", tmp_path / "b.zarr", rows_per_chunk=100)
    assert longer.prefix_digest(3000) == shorter.digest
    assert longer.prefix_digest(3000, "y") == shorter.digest_y
    x = shorter.read(0, 3000)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    np.testing.assert_allclose(shorter.y.read(0, 3000)[:, 0], y, rtol=1e-14)
    assert len(np.unique(x[:, 0])) == 3000  # blocks have random streams of their own
    several = ingest("generate:normal?n=2000&d=4&t=3&seed=1", tmp_path / "c.zarr")
    np.testing.assert_allclose(several.x_std, 1, atol=0.1)
