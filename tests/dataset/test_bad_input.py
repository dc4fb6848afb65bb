"""Bad input: a typed error that names what, where and what to do, and nothing left behind."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest

from dkrr.dataset import ingest, open_dataset
from dkrr.errors import DataError, DkrrError, ParameterError, StoreError, StoreMismatchError

X = np.arange(30.0).reshape(10, 3)
Y = np.arange(10.0)


def bad(values: np.ndarray, *places: tuple[Any, Any, float]) -> np.ndarray:
    values = values.copy()
    for i, j, value in places:
        values[i, j] = value
    return values


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": [1.0, 2.0], **columns})


def written(folder: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    raw = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith("gz") and isinstance(content, str) else raw)
    return folder / name


def changed(folder: Path, change: Callable[[Path], Any]) -> Any:
    """Open a data set in which something was changed."""
    ingest(X, folder / "a.zarr", y=Y)
    change(folder / "a.zarr")
    return open_dataset(folder / "a.zarr")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


BAD_ARRAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nan": (bad(X, (7, 1, np.nan)), {"y": Y}, r"1 value that is NaN or infinity; the first is nan at row 7, column 1"),
    "infinities": (
        bad(X, (9, 2, np.inf), (4, 2, -np.inf), (4, 0, np.nan)),
        {"y": Y},
        r"3 values .* the first is nan at row 4, column 0 \('x0'\)",
    ),
    "nan in y": (X, {"y": bad(Y[:, None], (3, 0, np.nan))}, r"nan at row 3, column 3 \('y'\)"),
    "masked": (np.ma.masked_equal(X, 5.0), {"y": Y}, "nan at row 1, column 2"),
    "None": (bad(X.astype(object), (2, 2, None)), {"y": Y}, "nan at row 2, column 2"),
    "long double too large": (X.astype(np.longdouble) * np.longdouble("1e400"), {}, "inf at row 0, column 1"),
    "text": (X.astype(str), {}, "dtype <U"),
    "bytes": (X.astype("S5"), {}, r"dtype \|S5"),
    "datetimes": (X.astype("datetime64[s]"), {}, r"dtype datetime64\[s\]"),
    "durations": (X.astype("timedelta64[s]"), {}, r"dtype timedelta64\[s\]"),
    "complex": (X.astype(complex), {}, "dtype complex128"),
    "text in objects": (bad(X.astype(object), (2, 1, "7")), {}, "dtype object with str '7' at row 2, column 1"),
    "complex in objects": (bad(X.astype(object), (0, 1, 1j)), {}, "dtype object with complex '1j'"),
    "huge integer": (bad(X.astype(object), (0, 1, 10**400)), {}, "inf at row 0, column 1"),
    "records": (np.zeros(4, dtype=[("a", float)]).reshape(2, 2), {}, "dtype "),
    "no rows": (np.empty((0, 3)), {}, r"no rows, shape \(0, 3\)"),
    "no columns": (np.empty((3, 0)), {}, r"no columns, shape \(3, 0\)"),
    "1-D X": (Y, {}, r"1-D, shape \(10,\).*reshape\(-1, 1\)"),
    "0-D X": (np.array(3.0), {}, "0-D"),
    "3-D X": (X.reshape(10, 3, 1), {}, "3-D"),
    "3-D y": (X, {"y": Y.reshape(10, 1, 1)}, r"y is 3-D, shape \(10, 1, 1\)"),
    "short y": (X, {"y": Y[:9]}, "X has 10 rows and y has 9"),
    "short weights": (X, {"y": Y, "sample_weight": Y[:9]}, "X has 10 rows and sample_weight has 9"),
    "two weights": (X, {"y": Y, "sample_weight": X[:, :2]}, "sample_weight has 2 columns"),
    "negative weight": (X, {"y": Y, "sample_weight": Y - 0.5}, r"weight -0.5 at row 0"),
    "nan weight": (X, {"sample_weight": np.where(Y == 6, np.nan, Y)}, r"weight nan at row 6"),
    "infinite weight": (X, {"sample_weight": np.where(Y == 6, np.inf, Y)}, r"weight inf at row 6"),
    "zero weights": (X, {"sample_weight": Y * 0}, "all weights of X are zero"),
    "dask unknown": (da.from_array(X, chunks=4)[da.from_array(Y) > 3], {}, "unknown chunk sizes.*compute_chunk_sizes"),
    "dask nan": (da.from_array(bad(X, (7, 1, np.nan)), chunks=4), {}, "nan at row 7, column 1"),
    "dask text": (da.from_array(X.astype(str), chunks=4), {}, "dtype <U"),
    "frame text": (frame(b=["u", "v"]), {}, "column 'b' of X has dtype"),
    "frame object": (frame(b=np.array([1, "v"], dtype=object)), {}, "Could not convert 'v' with type str.*column b"),
    "frame dates": (frame(b=pd.to_datetime(["2020-01-01", "2021-01-01"])), {}, "column 'b' of X has dtype timestamp"),
    "frame category": (frame(b=pd.Categorical([1, 2])), {}, "column 'b' of X has dtype dictionary"),
    "frame missing": (frame(b=pd.array([1, None], dtype="Int64")), {}, r"nan at row 1, column 1 \('b'\)"),
    "class missing": (frame(k=["u", None]), {"target": "k", "one_hot": True}, "row 1 of X has no class|row 1 of X, "),
    "too many classes": (np.arange(4000.0).reshape(2000, 2), {"target": 0, "one_hot": True}, "over 1,000 different"),
    "no features": (frame(), {"target": "a"}, "no feature columns left"),
}

BAD_TEXT: dict[str, tuple[str, dict[str, Any], str]] = {
    "ragged": ("1,2,3\n4,5,6\n7,8\n", {}, "line 3, column 2: the line has 2 columns; 3 expected as in line 1"),
    "ragged longer": ("1,2,3\n\n4,5,6,7\n", {}, "line 3, column 3: the line has 4 columns"),
    "header not declared": ("a,b\n1,2\n", {"header": False}, r"line 1, column 0 \('x0'\): 'a'.*use header=True"),
    "text": ("a,b\n1,2\n3,four\n", {}, r"line 3, column 1 \('b'\): 'four' is not a number"),
    "text after blank lines": ("a,b\n\n1,2\n\n\n3,four\n", {}, r"line 6, column 1 \('b'\)"),
    "underscore": ("1,2\n1_0,2\n", {}, "line 2, column 0"),
    "empty": ("", {}, "empty"),
    "blank": ("\n\n", {}, "empty"),
    "only a header": ("a,b\n", {}, "a header and no rows"),
    "only a declared header": ("1,2\n", {"header": True}, "a header and no rows"),
    "wrong delimiter": ("1;2;3\n4;5;6\n", {}, r"line 2, column 0: '4;5;6'.*use delimiter=';'"),
    "wrong delimiter with header": ("a;b\n4;5\n", {"target": "b"}, r"line 2, column 0: '4;5'.*use delimiter=';'"),
    "mixed delimiters": (
        "1,2;3\n4,5;6\n",
        {"features": [0, 1]},
        r"line 1, column 1 .*'2;3' .*separated by a semicolon",
    ),
    "tabs": ("1\t2\n4\t5\n", {}, r"separated by a tab"),
    "missing": ("a,b\n1,2\n\n3,\n5,6\n7,NA\n", {}, r"2 values .* nan at row 1, column 1 \('b'\), line 4"),
    "infinity": ("1,2\n3,inf\n", {}, "inf at row 1, column 1 .*, line 2"),
    "overflow": ("1,2\n3,1e999\n", {}, "inf at row 1, column 1"),
    "same name twice": ("a,a\n1,2\n", {}, "line 1, column 1: the name 'a' occurs 2 times"),
    "negative weight": ("x,w\n1,2\n\n3,-1\n", {"weight": "w"}, "weight -1.0 at row 1 .*line 4"),
    "class missing": ("x,k\n1,u\n3,\n", {"target": "k", "one_hot": True}, "row 1 of .*line 3, has no class"),
    "not utf-8": ("1,2\n\udcff3,4\n", {}, "line 2, column 0"),
    "text in target": ("x,k\n1,u\n3,v\n", {"target": "k"}, r"line 2, column 1 \('k'\): 'u' is not a number"),
}

COLUMNS: list[tuple[dict[str, Any], str]] = [
    ({"target": "pirce"}, "'pirce' is not a column .*did you mean 'price'"),
    ({"target": "zzz"}, "area, rooms, price"),
    ({"target": 3}, "columns 0 to 2"),
    ({"target": -4}, "columns 0 to 2"),
    ({"target": []}, "empty list"),
    ({"target": 1.5}, "neither a name nor a number"),
    ({"target": True}, "neither a name nor a number"),
    ({"weight": "prise"}, "weight 'prise'.*did you mean 'price'"),
    ({"features": ["aera"]}, "features 'aera'.*did you mean 'area'"),
    ({"features": "area"}, "a list of names"),
    ({"target": "price", "features": ["area", -1]}, "'price' is used 2 times"),
    ({"target": "price", "weight": -1}, "'price' is used 2 times"),
    ({"target": [0, 1], "one_hot": True}, "one_hot with 2 target columns"),
    ({"one_hot": True}, "one_hot with 0 target columns"),
    ({"rows_per_chunk": 0}, "at least 1"),
]

CHANGES: list[tuple[Any, str]] = [
    (lambda p: (p / "zarr.json").unlink(), "not a data set"),
    (lambda p: (p / "zarr.json").write_text("{"), "not valid JSON"),
    (lambda p: edit(p / "zarr.json", '"format_version": 1', '"format_version": 2'), "format version 2; 1 expected"),
    (lambda p: edit(p / "zarr.json", '"complete": true', '"complete": false'), "unfinished"),
    (lambda p: edit(p / "zarr.json", '"num_rows": 10', '"num_rows": 11'), "10 rows; 11 expected"),
    (lambda p: edit(p / "zarr.json", '"generations"', '"generation"'), "unreadable metadata"),
    (lambda p: edit(p / "zarr.json", '"x2"', '"x2", "x3"'), "3 columns and 4 names"),
    (lambda p: edit(p / "X/zarr.json", '"float64"', '"object"'), "data type 'object'"),
    (lambda p: edit(p / "X/zarr.json", '"crc32c"', '"pickle"'), "codecs"),
    (lambda p: edit(p / "X/zarr.json", '"zarr_format": 3', '"zarr_format": 2'), "not a Zarr format 3 array"),
    (lambda p: shutil.rmtree(p / "y"), "no zarr.json"),
    (lambda p: ((p / "y").rename(p / "z"), (p / "y").symlink_to("z")), "symbolic link"),
]

THREE = "1,2\n3,4\n5,6\n"
PACKED = gzip.compress(b"1,2\n" * 100_000)
OTHERS: dict[str, tuple[Any, dict[str, Any], type[DkrrError], str]] = {
    "half a gzip": (lambda p: written(p, PACKED[: len(PACKED) // 2], "s.csv.gz"), {}, DataError, "cannot be read"),
    "no gzip": (lambda p: written(p, b"1,2\n", "s.csv.gz"), {}, DataError, r"s\.csv\.gz cannot be read"),
    "y too short": (
        lambda p: written(p, "1,2\n3,4\n5,6\n"),
        {"y": Y[:2]},
        DataError,
        r"rows\.csv has 3 rows and y has 2",
    ),
    "y too long": (
        lambda p: written(p, "1,2\n3,4\n5,6\n"),
        {"y": Y[:4]},
        DataError,
        r"rows\.csv has 3 rows and y has 4",
    ),
    "two targets": (X, {"y": Y, "target": 0}, ParameterError, "targets of its own"),
    "own targets": ("sklearn:iris", {"y": np.zeros(150)}, ParameterError, "brings its own targets"),
    "no file": (
        lambda p: written(p, "1,2\n", "train.csv").with_name("trian.csv"),
        {},
        StoreError,
        r"trian\.csv does not exist .*did you mean 'train\.csv'",
    ),
    "no folder": (lambda p: p / "no/train.csv", {}, StoreError, "nor does the folder"),
    "no parent": (X, {"dest": "no/out.zarr"}, StoreError, r"no is not a folder"),
}
MADE_UP = {
    "sklearn:digit": "did you mean 'digits'",
    "generate:fridman?n=5": "did you mean 'friedman'",
    "generate:friedman?rows=5": "'rows' is unknown",
    "generate:friedman?n=ten": "an integer of at least 1 expected",
    "generate:friedman?n=0": "at least 1 expected",
    "generate:friedman?n=9&d=4": "at least 5 expected",
    "generate:normal?noise=nan": "a number of at least 0 expected",
}
FRAME = pd.DataFrame(X, columns=["area", "rooms", "price"])
CASES: dict[str, tuple[Any, dict[str, Any], type[DkrrError], str]] = {
    **{name: (source, options, DataError, text) for name, (source, options, text) in BAD_ARRAYS.items()},
    **{
        f"{name}{suffix}": (lambda p, t=text, s=suffix: written(p, t, f"rows{s}"), options, DataError, message)
        for name, (text, options, message) in BAD_TEXT.items()
        for suffix in (".csv", ".csv.gz")
    },
    **{str(options): (FRAME, options, ParameterError, text) for options, text in COLUMNS},
    **{
        f"data set {number}": (lambda p, c=change: changed(p, c), {}, StoreError, message)
        for number, (change, message) in enumerate(CHANGES)
    },
    **{source: (source, {}, ParameterError, message) for source, message in MADE_UP.items()},
    **OTHERS,
}


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, tmp_path: Path) -> None:
    source, options, error, message = CASES[case]
    options = {"dest": "out.zarr"} | options
    with pytest.raises(error, match=message) as caught:
        ingest(source(tmp_path) if callable(source) else source, tmp_path / options.pop("dest"), **options)
    assert caught.value.hint
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name or "partial" in path.name]


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StoreError, match="no permission to use there"):
        ingest(X, tmp_path / "out.zarr")


def test_existing_data_set(tmp_path: Path) -> None:
    first = ingest(X, tmp_path / "a.zarr", y=Y)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert ingest(X.tolist(), tmp_path / "a.zarr", y=Y).digest == first.digest
    others: list[tuple[Any, Any, str]] = [
        (X + 1, Y, "X: other values"),
        (X[:9], Y[:9], "rows: 10 there, 9 wanted"),
        (X, Y + 1, "y: other values"),
        (pd.DataFrame(X, columns=list("abc")), Y, r"feature_names: \('x0'"),
        (X, None, "target_names"),
    ]
    for x, y, message in others:
        with pytest.raises(StoreMismatchError, match=message):
            ingest(x, tmp_path / "a.zarr", y=y)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
