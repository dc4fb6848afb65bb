"""Bad input, one row of the table after the other: the type of the error, what it names, and nothing left behind.

Every case works on a folder of inputs, which it may fill as it likes, and a folder of outputs (stores, runs, temporary
files), which must be afterwards what it was before.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import zarr
from click.testing import CliRunner, Result
from scipy import sparse

import dkrr.engine.cluster
from dkrr import KernelRidge, ingest, open_dataset
from dkrr.cli import main
from dkrr.errors import (
    DataError,
    DkrrError,
    JobFileError,
    NotPositiveDefiniteError,
    ParameterError,
    StorageFullError,
    StoreError,
    StoreMismatchError,
)
from dkrr.jobs.spec import JobSpec

RNG = np.random.default_rng(9)
X = RNG.standard_normal((200, 4))
Y = RNG.standard_normal((200, 2))
TILES = {"kernel": "rbf", "tile_size": 64}


@dataclass(frozen=True)
class Place:
    """Where a case reads and writes."""

    inputs: Path
    outputs: Path
    patch: pytest.MonkeyPatch

    @property
    def store(self) -> Path:
        return self.outputs / "store"


@dataclass(frozen=True)
class Case:
    """One row: what is done, and the error (its type, or the exit code of a command) with what it says."""

    name: str
    act: Callable[[Place], Any]
    error: type[DkrrError] | int
    message: str
    prepare: Callable[[Place], Any] | None = None
    leaves: tuple[str, ...] = ()
    """What may stay below the outputs: good rows, which the next attempt finds, and the claim of a run that began."""


DATA = ("store/data",)
RUN = ("store/data", "run")


def bad(values: np.ndarray, *places: tuple[Any, ...]) -> np.ndarray:
    values = values.copy()
    for *index, value in places:
        values[tuple(index)] = value
    return values


def fit(rows: Any = X, y: Any = Y, weight: Any = None, /, **parameters: Any) -> Callable[[Place], Any]:
    """Fit an estimator; callables among the inputs are called with the place."""

    def act(place: Place) -> Any:
        given = [value(place) if callable(value) else value for value in (rows, y, weight)]
        return KernelRidge(**{"kernel": "rbf"} | parameters).fit(*given)

    return act


def predict(rows: Any, **parameters: Any) -> Callable[[Place], Any]:
    """Predict with a good estimator."""

    def act(place: Place) -> Any:
        fitted = KernelRidge(**{"kernel": "rbf"} | parameters).fit(X, Y)
        return np.asarray(fitted.predict(rows(place) if callable(rows) else rows))

    return act


def lazy(values: Any) -> Any:
    return da.from_array(values, chunks=30)


def npy(values: np.ndarray) -> Callable[[Place], Any]:
    def write(place: Place) -> Path:
        np.save(place.inputs / "rows.npy", values)
        return place.inputs / "rows.npy"

    return write


def mapped(values: np.ndarray) -> Callable[[Place], Any]:
    return lambda place: np.load(npy(values)(place), mmap_mode="r")


def stored(values: np.ndarray, **options: Any) -> Callable[[Place], Any]:
    return lambda place: zarr.create_array(str(place.inputs / "rows.zarr"), data=values, chunks=(30, 2), **options)


def run(*arguments: Any) -> Callable[[Place], Result]:
    """A command; {in} and {out} are the folders."""

    def act(place: Place) -> Result:
        texts = [str(argument).format(**{"in": place.inputs, "out": place.outputs}) for argument in arguments]
        return CliRunner().invoke(main, texts)

    return act


def csv(text: str, *options: str, name: str = "rows.csv") -> Callable[[Place], Result]:
    """Ingest a CSV file with this text."""

    def act(place: Place) -> Result:
        opener: Any = gzip.open if name.endswith(".gz") else open
        with opener(place.inputs / name, "wt") as file:
            file.write(text)
        return run("ingest", f"{{in}}/{name}", "{out}/rows.zarr", *options)(place)

    return act


JOB = {
    "data": {"path": "generate:friedman?n=200&d=5&seed=0"},
    "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 0.1},
    "solver": {"tile_size": 64},
    "cluster": {"workers": 1, "memory_limit": "1GiB"},
}


def job(command: str = "fit", /, **tables: Any) -> Callable[[Place], Result]:
    """Run a job file made of ``JOB`` with other keys."""

    def act(place: Place) -> Result:
        document = {name: dict(table) for name, table in JOB.items()}
        document["output"] = {"directory": str(place.outputs / "run"), "store": str(place.store)}
        for name, table in tables.items():
            changed = document.setdefault(name, {})
            for key, value in table.items():
                text = isinstance(value, str)
                changed[key] = value.replace("{in}", str(place.inputs)) if text else value
        lines = []
        for name, table in document.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
        path = place.inputs / "job.toml"
        path.write_text("\n".join(lines) + "\n")
        return run(command, path)(place)

    return act


def full_disk(free: int) -> Callable[[Place], None]:
    usage = namedtuple("usage", "total used free")
    return lambda place: place.patch.setattr("shutil.disk_usage", lambda path: usage(0, 0, free))


def write_csv(text: str) -> Callable[[Place], None]:
    return lambda place: (place.inputs / "rows.csv").write_text(text)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    document.pop("crc32c", None)
    path.write_text(json.dumps(document))


def saved_model(place: Place) -> Path:
    KernelRidge(kernel="rbf").fit(X, Y[:, 0]).save(place.inputs / "model.zarr")
    return place.inputs / "model.zarr"


GOOD_CSV = "a,b,y\n" + "".join(f"{i},{i * i % 7},{i % 3}\n" for i in range(40))
NAN = "1 value that is NaN or infinity; the first is nan at row 170, column 2"

NOT_FINITE = [
    Case("NaN in X", fit(bad(X, (170, 2, np.nan))), DataError, NAN),
    Case("NaN in X, tiles", fit(bad(X, (170, 2, np.nan)), tile_size=64), DataError, NAN),
    Case("NaN in a list", fit(bad(X, (170, 2, np.nan)).tolist()), DataError, NAN),
    Case("NaN in pandas", fit(pd.DataFrame(bad(X, (170, 2, np.nan)))), DataError, NAN),
    Case("NaN in sparse", fit(sparse.csr_array(bad(X, (170, 2, np.nan)))), DataError, NAN),
    Case("NaN in float32", fit(bad(X, (170, 2, np.nan)).astype("f4")), DataError, NAN),
    Case("NaN in a later chunk", fit(lazy(bad(X, (170, 2, np.nan))), tile_size=64), DataError, NAN),
    Case(
        "NaN in a later chunk, kept store",
        lambda p: fit(lazy(bad(X, (170, 2, np.nan))), store=p.store)(p),
        DataError,
        NAN,
    ),
    Case("NaN in .npy", fit(npy(bad(X, (170, 2, np.nan)))), DataError, NAN),
    Case("NaN in a map", fit(mapped(bad(X, (170, 2, np.nan)))), DataError, NAN),
    Case("NaN in a map, tiles", fit(mapped(bad(X, (170, 2, np.nan))), **TILES), DataError, NAN),
    Case("NaN in zarr", fit(stored(bad(X, (170, 2, np.nan)))), DataError, NAN),
    Case("masked", fit(np.ma.masked_greater(X, 2.5)), DataError, "NaN or infinity"),
    Case(
        "three of them",
        fit(bad(X, (9, 3, np.inf), (8, 1, -np.inf), (150, 0, np.nan))),
        DataError,
        "3 values that are NaN or infinity; the first is -inf at row 8, column 1",
    ),
    Case(
        "three of them, dask",
        fit(lazy(bad(X, (9, 3, np.inf), (8, 1, -np.inf), (150, 0, np.nan)))),
        DataError,
        "3 values that are NaN or infinity; the first is -inf at row 8, column 1",
    ),
    Case("infinity in y", fit(X, bad(Y, (33, 1, np.inf))), DataError, "input y .* inf at row 33, column 1"),
    Case("NaN in y, tiles", fit(X, bad(Y, (33, 1, np.nan)), **TILES), DataError, "nan at row 33, column 1"),
    Case("NaN in lazy y", fit(lazy(X), lazy(bad(Y, (33, 1, np.nan)))), DataError, r"nan at row 33, column 5 \('y1'\)"),
    Case(
        "too large for float64",
        fit(np.full((3, 2), 10**400, dtype=object), np.ones(3)),
        DataError,
        "at row 0, column 0",
    ),
    Case("NaN in predict", predict(bad(X, (170, 2, np.nan))), DataError, "nan in row 170, column 2"),
    Case("NaN in predict, dask", predict(lazy(bad(X, (170, 2, np.nan)))), DataError, "nan in row 170, column 2"),
    Case("NaN in predict, file", predict(npy(bad(X, (170, 2, np.nan)))), DataError, "nan in row 170, column 2"),
    Case("NaN in ingest", csv(GOOD_CSV.replace("30,", "nan,")), 4, "nan at row 30, column 0 ('a'), line 32"),
    Case(
        "NaN in a job",
        job(data={"path": "{in}/rows.csv", "target": [-1]}),
        4,
        "nan at row 30, column 0 ('a')",
        write_csv(GOOD_CSV.replace("30,", ",")),
    ),
]

DATES = pa.table({"a": X[:, 0], "when": pd.date_range("2000", periods=200), "c": X[:, 2], "d": X[:, 3]})


class LikePolars:
    """A frame that as a whole makes numbers of dates."""

    columns, shape = DATES.column_names, DATES.shape

    def get_columns(self) -> list[Any]:
        return list(DATES.columns)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.column_stack([X[:, 0], np.arange(200.0), X[:, 2:4]])

    def __len__(self) -> int:
        return 200

    def __getitem__(self, rows: slice) -> LikePolars:
        return self


WRONG_TYPES = [
    Case("text", fit(X.astype(str)), DataError, "X has dtype <U32; numbers expected"),
    Case("text, tiles", fit(X.astype(str), **TILES), DataError, "X has dtype <U32; numbers expected"),
    Case("text, dask", fit(lazy(X.astype(str))), DataError, "X has dtype <U32; numbers expected"),
    Case("bytes in y", fit(X, Y.astype("S8")), DataError, r"y has dtype \|S8; numbers expected"),
    Case("dates", fit(X.astype("M8[s]")), DataError, r"X has dtype datetime64\[s\]"),
    Case("durations", fit(X.astype("m8[s]")), DataError, r"X has dtype timedelta64\[s\]"),
    Case(
        "dates in pandas",
        fit(pd.DataFrame({"a": X[:, 0], "when": pd.date_range("2000", periods=200)})),
        DataError,
        r"column 'when' of X has dtype datetime64",
    ),
    Case("dates in pyarrow", fit(DATES), DataError, r"column 'when' of X has dtype datetime64"),
    Case("dates in polars", fit(LikePolars()), DataError, r"column 'when' of X has dtype datetime64"),
    Case("dates in polars, predict", predict(LikePolars()), DataError, r"column 'when' of X has dtype datetime64"),
    Case(
        "text in pandas", fit(pd.DataFrame({"a": X[:, 0], "b": "x"})), DataError, "column 'b' of X has dtype (str|obj)"
    ),
    Case("complex", fit(X.astype(complex)), DataError, "Complex data not supported: X has dtype complex128"),
    Case("complex y, dask", fit(lazy(X), Y.astype(complex)), DataError, "y has dtype complex128; numbers expected"),
    Case(
        "objects",
        fit(bad(X.astype(object), (12, 3, "seven"))),
        DataError,
        "X has dtype object with str 'seven' at row 12, column 3; numbers expected",
    ),
    Case(
        "objects, dask",
        fit(lazy(bad(X.astype(object), (112, 3, "seven")))),
        DataError,
        "X has dtype object with str 'seven' at row 112, column 3; numbers expected",
    ),
    Case("records", fit(np.zeros(4, dtype=[("a", float)])), DataError, "X has dtype"),
    Case(
        "many sparse entries",
        fit(sparse.csr_array((50_000, 5_000)), np.ones(50_000)),
        DataError,
        r"\(50000, 5000\) would be dense with 250,000,000 entries; at most 20,000,000",
    ),
    Case("sparse y", fit(X, sparse.csr_array(Y)), DataError, "y is sparse"),
    Case("a string that is no path", fit("no/such/file.npy"), StoreError, "no/such/file.npy does not exist"),
    Case("a dictionary", fit({"a": 1}), DataError, "dict"),
    Case("text in predict", predict(X.astype(str)), DataError, "X has dtype <U32"),
    Case("dates in predict", predict(X.astype("M8[s]")), DataError, "X has dtype datetime64"),
    Case("complex in predict, dask", predict(lazy(X.astype(complex))), DataError, "X has dtype complex128"),
]


WRONG_SHAPES = [
    Case("no rows", fit(X[:0], Y[:0]), DataError, r"\(0, 4\)"),
    Case("no rows, dask", fit(lazy(X)[:0], Y[:0]), DataError, r"no rows, shape \(0, 4\)"),
    Case("no features", fit(X[:, :0]), DataError, r"\(200, 0\)"),
    Case("no features, dask", fit(lazy(X)[:, :0]), DataError, r"no columns, shape \(200, 0\)"),
    Case("no targets", fit(X, Y[:, :0]), DataError, r"y has no columns, shape \(200, 0\)"),
    Case("1-D X", fit(X[:, 0]), DataError, r"X is 1-D, shape \(200,\).*reshape\(-1, 1\)"),
    Case("1-D X, dask", fit(lazy(X)[:, 0]), DataError, r"X is 1-D, shape \(200,\).*reshape\(-1, 1\)"),
    Case("3-D X", fit(X[None]), DataError, r"X is 3-D, shape \(1, 200, 4\)"),
    Case("3-D y", fit(X, Y[:, :, None]), DataError, r"y is 3-D, shape \(200, 2, 1\)"),
    Case("3-D y, dask", fit(lazy(X), lazy(Y[:, :, None])), DataError, r"y is 3-D, shape \(200, 2, 1\)"),
    Case("lengths", fit(X, Y[:199]), DataError, r"\[200, 199\]"),
    Case("lengths, dask", fit(lazy(X), lazy(Y[:199])), DataError, "X has 200 rows and y has 199"),
    Case("no y", fit(X, None), DataError, "requires y to be passed, but the target y is None"),
    Case("no y, dask", fit(lazy(X), None), DataError, "requires y to be passed, but the target y is None"),
    Case("no y in a file", fit(npy(X), None), DataError, "requires y to be passed, but the target y is None"),
    Case("no y in a data set", fit(lambda p: ingest(X, p.inputs / "d.zarr"), None), DataError, "y is None"),
    Case("ragged lists", fit([[1.0, 2.0], [3.0]], [1, 2]), DataError, "inhomogeneous"),
    Case("wrong d in predict", predict(X[:, :3]), DataError, "X has 3 features, but KernelRidge is expecting 4"),
    Case("wrong d in predict, dask", predict(lazy(X)[:, :3]), DataError, r"shape \(200, 3\); \(m, 4\) expected"),
    Case("wrong d in predict, file", predict(npy(X[:, :3])), DataError, "has 3 features, the model was fitted with 4"),
    Case("1-D in predict", predict(X[0]), DataError, r"X is 1-D, shape \(4,\).*Reshape your data"),
    Case("no rows in predict", predict(X[:0].tolist()), DataError, "Expected 2D array"),
]

OVERFLOW = [
    Case("poly", fit(X * 1e120, kernel="poly"), DataError, r"Polynomial\(.*degree=3.*not finite.*scale the features"),
    Case(
        "poly, tiles",
        fit(X * 1e120, kernel="poly", tile_size=64),
        DataError,
        r"tile \(0, 0\).*Polynomial\(.*degree=3.*scale the features",
    ),
    Case("linear, tiles", fit(X * 1e200, kernel="linear", tile_size=64), DataError, r"tile .*scale the features"),
    Case("rbf", fit(X * 1e200), DataError, "scale the features"),
    Case("predict", predict(X * 1e120, kernel="poly"), DataError, r"Polynomial\(.*scale the features"),
]

PARAMETERS = [
    *(
        Case(f"alpha {value}", fit(alpha=value), ParameterError, rf"alpha is .*{text}")
        for value, text in (
            (-1, "-1"),
            (np.nan, "nan"),
            (np.inf, "inf"),
            ("high", "'high'"),
            (None, "None"),
            (True, "True"),
            ([1, -2], r"\[1, -2\]"),
            ("1.0", "'1.0'"),
            ([], r"\[\]"),
            ([[1.0]], r"\[\[1.0\]\]"),
        )
    ),
    Case("alphas", fit(alpha=[1, 2, 3]), ParameterError, "3 values for 2 targets"),
    Case("alphas, dask", fit(lazy(X), alpha=[1, 2, 3]), ParameterError, "3 values for 2 targets"),
    *(
        Case(f"gamma {value}", fit(gamma=value), ParameterError, "gamma = .* for kernel 'rbf': a finite number")
        for value in (0, -0.5, np.nan, "auto")
    ),
    Case("kernel", fit(kernel="rfb"), ParameterError, "kernel = 'rfb': did you mean 'rbf'"),
    Case("kernel object", fit(kernel=7), ParameterError, "kernel = 7"),
    Case(
        "kernel parameter", fit(kernel="matern", kernel_params={"mu": 1.5}), ParameterError, "'mu': did you mean 'nu'"
    ),
    Case("nu", fit(kernel="matern", kernel_params={"nu": 7}), ParameterError, "nu = 7"),
    Case("length scales", fit(kernel="matern", kernel_params={"length_scale": [1.0, 2.0]}), ParameterError, "2"),
    Case("solver", fit(solver="svd"), ParameterError, "solver is 'svd'; one of 'auto', 'cholesky', 'cg', 'nystrom'"),
    Case("float32 answers of cg", fit(solver="cg", precision="float32"), ParameterError, "precision 'mixed'"),
    Case("centres of cg", fit(solver="cg", solver_params={"num_centers": 5}), ParameterError, "solver 'nystrom'"),
    Case("parameter of no solver", fit(solver_params={"rnk": 5}), ParameterError, "known: preconditioner, rank"),
    Case("precision", fit(precision="float16"), ParameterError, "'auto', 'float64', 'float32', 'mixed' expected"),
    *(
        Case(f"tile size {value}", fit(tile_size=value), ParameterError, "tile_size is .* from 1 to 16,384 expected")
        for value in (0, -1, 2.5, "big", True, 16_385)
    ),
    Case("job alpha", job(model={"alpha": -1}), 2, "[model] alpha = -1: a finite number >= 0"),
    Case("job gamma", job(model={"gamma": 0}), 2, "gamma"),
    Case("job kernel", job(model={"kernel": "rfb"}), 2, "did you mean 'rbf'"),
    Case("job solver", job(solver={"name": "cholesk"}), 2, "did you mean 'cholesky'"),
    Case(
        "job key",
        job(solver={"tilesize": 64}),
        2,
        "unknown key 'tilesize' in [solver]; did you mean 'tile_size'",
    ),
    Case("job table", job(solvr={"name": "auto"}), 2, "unknown table [solvr]; did you mean 'solver'"),
    Case(
        "job in Python",
        lambda p: JobSpec.from_dict({"data": {"path": "x.csv"}, "modell": {}}),
        JobFileError,
        r"unknown table \[modell\]; did you mean 'model'",
    ),
    Case("job that is no TOML", lambda p: JobSpec.load(Path(__file__)), JobFileError, "is not valid TOML"),
    Case("no job", run("fit", "{in}/none.toml"), 2, "none.toml cannot be read"),
    Case("job alphas", job(model={"alpha": [1.0, 2.0]}), 2, "2 values for 1 target;", leaves=DATA),
]

SINGULAR = np.repeat(X[:100], 2, axis=0)
NUMERICAL = [
    Case(
        "alpha 0",
        fit(X, kernel="linear", alpha=0),
        NotPositiveDefiniteError,
        r"not positive definite at row 4 \(pivot .*, alpha 0, float64\): raise alpha to at least",
    ),
    Case(
        "alpha 0, tiles",
        fit(X, kernel="linear", alpha=0, tile_size=64),
        NotPositiveDefiniteError,
        r"tile \(0, 0\) of .* at row 4 \(pivot .*, alpha 0",
    ),
    Case(
        "duplicated rows", fit(SINGULAR, alpha=0, gamma=3.0, tile_size=50), NotPositiveDefiniteError, "duplicated rows"
    ),
    Case("sigmoid", fit(kernel="sigmoid", alpha=1e-3, coef0=-1.0), NotPositiveDefiniteError, "indefinite kernel"),
    Case(
        "precomputed", fit(-np.eye(200), kernel="precomputed", alpha=0.5), NotPositiveDefiniteError, r"at row 0 .*-0\.5"
    ),
    Case("float32", fit(alpha=1e-9, gamma=1e-4, precision="float32"), NotPositiveDefiniteError, "float32"),
]

WEIGHTS = [
    Case("negative", fit(X, Y, bad(np.ones(200), (7, -0.25))), DataError, r"sample_weight is -0\.25 in row 7"),
    Case("NaN", fit(X, Y, bad(np.ones(200), (7, np.nan))), DataError, "sample_weight is nan in row 7"),
    Case("negative, tiles", fit(X, Y, bad(np.ones(200), (7, -1)), **TILES), DataError, "-1.0 in row 7"),
    Case("negative, dask", fit(lazy(X), Y, bad(np.ones(200), (107, -1))), DataError, r"weight -1\.0 at row 107"),
    Case("all zero", fit(X, Y, np.zeros(200)), DataError, "all sample weights are zero"),
    Case("all zero, dask", fit(lazy(X), Y, np.zeros(200)), DataError, "all weights of .* are zero"),
    Case("length", fit(X, Y, np.ones(199)), DataError, r"\(199,\).*\(200,\)"),
    Case("length, dask", fit(lazy(X), Y, np.ones(199)), DataError, "200 rows and sample_weight has 199"),
    Case("two columns", fit(X, Y, np.ones((200, 2))), DataError, "1D"),
    Case("in a file", csv("a,w,y\n1,1,2\n2,-3,4\n", "--target", "y", "--weight", "w"), 4, "weight -3.0 at row 1"),
]


def finished_job(place: Place) -> None:
    result = job()(place)
    assert result.exit_code == 0, result.stderr


def foreign_folder(place: Place) -> None:
    (place.outputs / "run").mkdir()
    (place.outputs / "run" / "thesis.txt").write_text("years of work")


def tampered_factor(place: Place) -> None:
    fit(store=place.store, tile_size=64)(place)
    (document,) = place.store.glob("factors/*/zarr.json")
    edit(document, lambda d: d["attributes"].update(alpha=2.0))


def finished_rows(place: Place) -> None:
    ingest(X, place.outputs / "rows.zarr")


STORES = [
    Case(
        "run of another job",
        job(model={"alpha": 5.0}),
        4,
        "holds another job ([model] alpha: 0.1 there, 5.0 wanted)",
        finished_job,
    ),
    Case("directory that is no run", job(), 4, "run exists and is not a run of dkrr", foreign_folder),
    Case(
        "store that is a file",
        lambda p: fit(store=p.store, tile_size=64)(p),
        StoreError,
        "store",
        lambda p: p.store.write_text("x"),
    ),
    Case(
        "factor with other parameters",
        lambda p: fit(store=p.store, tile_size=64)(p),
        StoreMismatchError,
        r"alpha: 2\.0 there, 1\.0 wanted",
        tampered_factor,
    ),
    Case("data set with other rows", csv(GOOD_CSV), 4, "rows.zarr exists with other rows", finished_rows),
    Case(
        "destination that is not ours",
        csv(GOOD_CSV),
        4,
        "rows.zarr exists and is not a data set of dkrr",
        lambda p: (p.outputs / "rows.zarr").mkdir() or (p.outputs / "rows.zarr/a").write_text("x"),
    ),
    Case(
        "model over something else",
        lambda p: KernelRidge().fit(X, Y).save(p.outputs, overwrite=True),
        StoreError,
        "is not a model",
    ),
]


def newer_data(place: Place) -> Path:
    ingest(X, place.inputs / "newer.zarr", y=Y)
    edit(place.inputs / "newer.zarr/zarr.json", lambda d: d["attributes"].update(format_version=2))
    return place.inputs / "newer.zarr"


def spoiled_model(change: Callable[[Path], Any]) -> Callable[[Place], Result]:
    def act(place: Place) -> Result:
        change(saved_model(place))
        np.save(place.inputs / "rows.npy", X)
        return run("predict", "{in}/model.zarr", "{in}/rows.npy", "-o", "{out}/p.npy")(place)

    return act


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def replace_by_link(path: Path) -> None:
    shutil.move(path, path.parent.parent / "moved")
    path.symlink_to(path.parent.parent / "moved")


def format_2(place: Place) -> Path:
    zarr.create_array(str(place.inputs / "two.zarr"), data=X, zarr_format=2)
    return place.inputs / "two.zarr"


def changed_array(**fields: Any) -> Callable[[Place], Path]:
    def write(place: Place) -> Path:
        stored(X)(place)
        edit(place.inputs / "rows.zarr/zarr.json", lambda d: d.update(fields))
        return place.inputs / "rows.zarr"

    return write


def linked_array(place: Place) -> Path:
    stored(X)(place)
    replace_by_link(place.inputs / "rows.zarr/zarr.json")
    return place.inputs / "rows.zarr"


FILES = [
    Case("newer data set", fit(newer_data, None), StoreError, "data set format version 2; 1 expected"),
    Case("newer data set, command", lambda p: newer_data(p) and run("info", "{in}/newer.zarr")(p), 4, "version 2"),
    Case(
        "newer model",
        spoiled_model(lambda m: edit(m / "zarr.json", lambda d: d["attributes"].update(format_version=9))),
        4,
        "model format version 9; this dkrr reads version 1",
    ),
    Case("truncated chunk", spoiled_model(lambda m: shorten(m / "X_fit/c/0/0")), 4, "X_fit/c/0/0 of"),
    Case("missing chunk", spoiled_model(lambda m: (m / "dual_coef/c/0/0").unlink()), 4, "dual_coef/c/0/0 of"),
    Case("extra file", spoiled_model(lambda m: (m / "evil.py").write_text("")), 4, "evil.py of"),
    Case("link in a model", spoiled_model(lambda m: replace_by_link(m / "X_fit")), 4, "X_fit is a symbolic link"),
    Case(
        "path in a manifest",
        spoiled_model(lambda m: edit(m / "manifest.json", lambda d: d.update({"../../x": ""}))),
        4,
        "../../x of",
    ),
    Case("no model", spoiled_model(shutil.rmtree), 4, "model.zarr does not exist"),
    Case("format 2", fit(format_2), StoreError, "two.zarr is Zarr format 2; format 3 expected"),
    Case(
        "format 2, command", lambda p: format_2(p) and run("ingest", "{in}/two.zarr", "{out}/a.zarr")(p), 4, "format 2"
    ),
    Case("object dtype", fit(changed_array(data_type="object")), DataError, "dtype object; numbers expected"),
    Case(
        "unknown codec",
        fit(changed_array(codecs=[{"name": "numcodecs.pickle"}])),
        StoreError,
        "uses the codec 'numcodecs.pickle'",
    ),
    Case("link", fit(linked_array), StoreError, "zarr.json is a symbolic link"),
    Case("pickled objects", fit(npy(np.array([[{}]]))), DataError, "Python objects in dtype"),
    Case("ragged", csv("1,2,3\n4,5\n6,7,8\n"), 4, "rows.csv, line 2, column 2: the line has 2 columns; 3 expected"),
    Case("header", csv("a,b,y\n1,2,3\n", "--no-header"), 4, "rows.csv, line 1, column 0 ('x0'): 'a' is not a number"),
    Case("text", csv(GOOD_CSV.replace("17,", "abc,")), 4, "rows.csv, line 19, column 0 ('a'): 'abc' is not a number"),
    Case(
        "text in .csv.gz", csv(GOOD_CSV.replace("17,", "abc,"), name="rows.csv.gz"), 4, "rows.csv.gz, line 19, column 0"
    ),
    Case("empty file", csv(""), 4, "rows.csv is empty"),
    Case("delimiter", csv("1;2\n3;4\n"), 4, "use delimiter=';'"),
    Case("unknown column", csv(GOOD_CSV, "--target", "z"), 2, "target 'z' is not a column of"),
    Case("unknown format", run("ingest", __file__, "{out}/rows.zarr"), 4, "has an unknown format"),
    Case(
        "output of another kind",
        lambda p: saved_model(p) and run("predict", "{in}/model.zarr", "x", "-o", "{out}/p.xls")(p),
        2,
        "ends in '.xls'",
    ),
    Case(
        "other features",
        lambda p: (
            saved_model(p)
            and npy(X[:, :2])(p)
            and run("predict", "{in}/model.zarr", "{in}/rows.npy", "-o", "{out}/p.npy")(p)
        ),
        4,
        "2 features, the model was fitted with 4",
    ),
]


def quick(place: Place) -> None:
    """Two seconds instead of thirty."""
    place.patch.setattr(dkrr.engine.cluster, "CONNECT_SECONDS", 2.0)
    place.patch.setitem(dkrr.engine.cluster.connect.__kwdefaults__, "timeout", 2.0)


WORKERS = [
    Case(
        "nobody answers",
        job(cluster={"scheduler": "tcp://127.0.0.1:9"}),
        6,
        "no connection to the scheduler at tcp://127.0.0.1:9 within 2 s",
        quick,
        RUN,
    ),
    Case(
        "no scheduler file",
        job(cluster={"scheduler": "{in}/scheduler.json"}),
        6,
        "scheduler.json does not exist",
        leaves=RUN,
    ),
    Case(
        "no TLS files",
        job(cluster={"scheduler": "tls://127.0.0.1:9"}),
        6,
        "needs TLS files: ca-file not set",
        leaves=RUN,
    ),
    Case(
        "wrong TLS file",
        job(cluster={"scheduler": "tls://127.0.0.1:9"}),
        6,
        "/none.pem",
        lambda p: dask.config.set({"distributed.comm.tls.ca-file": "/none.pem"}),
        RUN,
    ),
    Case("another machine", job(cluster={"scheduler": "tcp://10.0.0.1:8786"}), 2, "insecure = true"),
    Case(
        "a worker's memory",
        job(solver={"tile_size": 6000, "precision": "float64"}),
        3,
        "a task with tiles of 6000 needs",
        leaves=DATA,
    ),
    Case(
        "a worker's memory, auto",
        job(solver={"tile_size": "auto"}, cluster={"memory_limit": "64MiB"}),
        3,
        "cannot hold a task",
        leaves=DATA,
    ),
]

DISKS = [
    Case("job", job(), 3, "100 MiB are free", full_disk(100 << 20), DATA),
    Case(
        "ingest",
        run("ingest", "generate:friedman?n=20&d=5", "{out}/rows.zarr"),
        3,
        "bytes and 10 are free",
        full_disk(10),
    ),
    Case(
        "store",
        lambda p: fit(store=p.store, tile_size=64)(p),
        StorageFullError,
        "needs [0-9,]+ bytes and 10 are free",
        full_disk(10),
    ),
    Case(
        "temporary",
        fit(lazy(X)),
        StorageFullError,
        "temporary store needs [0-9,]+ bytes: .* has 10 bytes free",
        full_disk(10),
    ),
    Case("no permission", fit(store="/proc/store", tile_size=64), StoreError, "/proc/store(/rows)? cannot be made"),
    Case(
        "parent that is a file",
        run("ingest", "generate:friedman?n=20&d=5", f"{__file__}/rows.zarr"),
        4,
        "test_bad_input.py is not a folder",
    ),
    Case(
        "missing parent",
        run("ingest", "generate:friedman?n=20&d=5", "{out}/no/parent/rows.zarr"),
        4,
        "no/parent is not a folder",
    ),
    Case("missing data", job(data={"path": "{in}/none.csv"}), 4, "none.csv cannot be read (No such file or directory)"),
]

# --- ingest: sources of every kind ------------------------------------------------------------------------------------

TEN = np.arange(30.0).reshape(10, 3)
COUNTED = np.arange(10.0)


def frame(**columns: Any) -> pd.DataFrame:
    return pd.DataFrame({"a": [1.0, 2.0], **columns})


def written(folder: Path, content: str | bytes, name: str = "rows.csv") -> Path:
    raw = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    (folder / name).write_bytes(gzip.compress(raw) if name.endswith("gz") and isinstance(content, str) else raw)
    return folder / name


def changed_set(folder: Path, change: Callable[[Path], Any]) -> Any:
    """Open a data set in which something was changed."""
    ingest(TEN, folder / "a.zarr", y=COUNTED)
    change(folder / "a.zarr")
    return open_dataset(folder / "a.zarr")


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def earlier(path: Path, old: str, new: str) -> None:
    """As an earlier release left it, without a checksum."""
    edit(path, lambda document: document["attributes"].pop("checksum"))
    rewrite(path, old, new)


BAD_ARRAYS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "nan": (
        bad(TEN, (7, 1, np.nan)),
        {"y": COUNTED},
        r"1 value that is NaN or infinity; the first is nan at row 7, column 1",
    ),
    "infinities": (
        bad(TEN, (9, 2, np.inf), (4, 2, -np.inf), (4, 0, np.nan)),
        {"y": COUNTED},
        r"3 values .* the first is nan at row 4, column 0 \('x0'\)",
    ),
    "nan in y": (TEN, {"y": bad(COUNTED[:, None], (3, 0, np.nan))}, r"nan at row 3, column 3 \('y'\)"),
    "masked": (np.ma.masked_equal(TEN, 5.0), {"y": COUNTED}, "nan at row 1, column 2"),
    "None": (bad(TEN.astype(object), (2, 2, None)), {"y": COUNTED}, "nan at row 2, column 2"),
    "long double too large": (TEN.astype(np.longdouble) * np.longdouble("1e400"), {}, "inf at row 0, column 1"),
    "text": (TEN.astype(str), {}, "dtype <U"),
    "bytes": (TEN.astype("S5"), {}, r"dtype \|S5"),
    "datetimes": (TEN.astype("datetime64[s]"), {}, r"dtype datetime64\[s\]"),
    "durations": (TEN.astype("timedelta64[s]"), {}, r"dtype timedelta64\[s\]"),
    "complex": (TEN.astype(complex), {}, "dtype complex128"),
    "text in objects": (bad(TEN.astype(object), (2, 1, "7")), {}, "dtype object with str '7' at row 2, column 1"),
    "complex in objects": (bad(TEN.astype(object), (0, 1, 1j)), {}, "dtype object with complex '1j'"),
    "huge integer": (bad(TEN.astype(object), (0, 1, 10**400)), {}, "inf at row 0, column 1"),
    "records": (np.zeros(4, dtype=[("a", float)]).reshape(2, 2), {}, "dtype "),
    "no rows": (np.empty((0, 3)), {}, r"no rows, shape \(0, 3\)"),
    "no columns": (np.empty((3, 0)), {}, r"no columns, shape \(3, 0\)"),
    "1-D X": (COUNTED, {}, r"1-D, shape \(10,\).*reshape\(-1, 1\)"),
    "0-D X": (np.array(3.0), {}, "0-D"),
    "3-D X": (TEN.reshape(10, 3, 1), {}, "3-D"),
    "3-D y": (TEN, {"y": COUNTED.reshape(10, 1, 1)}, r"y is 3-D, shape \(10, 1, 1\)"),
    "short y": (TEN, {"y": COUNTED[:9]}, "X has 10 rows and y has 9"),
    "short weights": (TEN, {"y": COUNTED, "sample_weight": COUNTED[:9]}, "X has 10 rows and sample_weight has 9"),
    "two weights": (TEN, {"y": COUNTED, "sample_weight": TEN[:, :2]}, "sample_weight has 2 columns"),
    "negative weight": (TEN, {"y": COUNTED, "sample_weight": COUNTED - 0.5}, r"weight -0.5 at row 0"),
    "nan weight": (TEN, {"sample_weight": np.where(COUNTED == 6, np.nan, COUNTED)}, r"weight nan at row 6"),
    "infinite weight": (TEN, {"sample_weight": np.where(COUNTED == 6, np.inf, COUNTED)}, r"weight inf at row 6"),
    "zero weights": (TEN, {"sample_weight": COUNTED * 0}, "all weights of X are zero"),
    "dask unknown": (
        da.from_array(TEN, chunks=4)[da.from_array(COUNTED) > 3],
        {},
        "unknown chunk sizes.*compute_chunk_sizes",
    ),
    "dask nan": (da.from_array(bad(TEN, (7, 1, np.nan)), chunks=4), {}, "nan at row 7, column 1"),
    "dask text": (da.from_array(TEN.astype(str), chunks=4), {}, "dtype <U"),
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
    ({"weight": np.ones(3)}, r"weight array\(.*neither a name nor a number"),
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
    (lambda p: rewrite(p / "zarr.json", '"format_version": 1', '"format_version": 2'), "format version 2; 1 expected"),
    (lambda p: rewrite(p / "zarr.json", '"complete": true', '"complete": false'), "unfinished"),
    (lambda p: rewrite(p / "zarr.json", '"num_rows": 10', '"num_rows": 11'), "zarr.json of .* is damaged"),
    (lambda p: earlier(p / "zarr.json", '"num_rows": 10', '"num_rows": 11'), "10 rows; 11 expected"),
    (lambda p: earlier(p / "zarr.json", '"generations"', '"generation"'), "unreadable metadata"),
    (lambda p: earlier(p / "zarr.json", '"x2"', '"x2", "x3"'), "3 columns and 4 names"),
    (lambda p: rewrite(p / "X/zarr.json", '"float64"', '"object"'), "data type 'object'"),
    (lambda p: rewrite(p / "X/zarr.json", '"crc32c"', '"pickle"'), "codecs"),
    (lambda p: rewrite(p / "X/zarr.json", '"zarr_format": 3', '"zarr_format": 2'), "not a Zarr format 3 array"),
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
        {"y": COUNTED[:2]},
        DataError,
        r"rows\.csv has 3 rows and y has 2",
    ),
    "y too long": (
        lambda p: written(p, "1,2\n3,4\n5,6\n"),
        {"y": COUNTED[:4]},
        DataError,
        r"rows\.csv has 3 rows and y has 4",
    ),
    "two targets": (TEN, {"y": COUNTED, "target": 0}, ParameterError, "targets of its own"),
    "own targets": ("sklearn:iris", {"y": np.zeros(150)}, ParameterError, "brings its own targets"),
    "no file": (
        lambda p: written(p, "1,2\n", "train.csv").with_name("trian.csv"),
        {},
        StoreError,
        r"trian\.csv does not exist .*did you mean 'train\.csv'",
    ),
    "no folder": (lambda p: p / "no/train.csv", {}, StoreError, "nor does the folder"),
    "no parent": (TEN, {"dest": "no/out.zarr"}, StoreError, r"no is not a folder"),
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
FRAME = pd.DataFrame(TEN, columns=["area", "rooms", "price"])


def ingested(source: Any, options: dict[str, Any]) -> Callable[[Place], Any]:
    """Ingest a source, or what is made of the folder of inputs."""

    def act(place: Place) -> Any:
        given, dest = dict(options), place.outputs / options.get("dest", "out.zarr")
        given.pop("dest", None)
        return ingest(source(place.inputs) if callable(source) else source, dest, **given)

    return act


INGESTED = [
    *(Case(f"ingest {name}", ingested(*row[:2]), DataError, row[2]) for name, row in BAD_ARRAYS.items()),
    *(
        Case(
            f"ingest {name}{end}",
            ingested(lambda p, t=text, e=end: written(p, t, f"rows{e}"), options),
            DataError,
            said,
        )
        for name, (text, options, said) in BAD_TEXT.items()
        for end in (".csv", ".csv.gz")
    ),
    *(Case(f"ingest {options}", ingested(FRAME, options), ParameterError, said) for options, said in COLUMNS),
    *(
        Case(f"data set {number}", ingested(lambda p, c=change: changed_set(p, c), {}), StoreError, said)
        for number, (change, said) in enumerate(CHANGES)
    ),
    *(Case(source, ingested(source, {}), ParameterError, said) for source, said in MADE_UP.items()),
    *(Case(f"ingest {name}", ingested(*row[:2]), row[2], row[3]) for name, row in OTHERS.items()),
]


TABLE = {
    "not finite": NOT_FINITE,
    "types": WRONG_TYPES,
    "shapes": WRONG_SHAPES,
    "overflow": OVERFLOW,
    "parameters": PARAMETERS,
    "numerical": NUMERICAL,
    "weights": WEIGHTS,
    "stores": STORES,
    "files": FILES,
    "workers": WORKERS,
    "disks": DISKS,
    "ingested": INGESTED,
}
NAMED = {f"{group}-{case.name}": case for group, cases in TABLE.items() for case in cases}
assert len(NAMED) == sum(map(len, TABLE.values())), "two rows have one name"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in ("inputs", "outputs", "outputs/temporary"):
        (tmp_path / name).mkdir()
    with dask.config.set({"temporary-directory": str(tmp_path / "outputs/temporary")}):
        yield Place(tmp_path / "inputs", tmp_path / "outputs", monkeypatch)


def contents(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_bad_input(case: Case, place: Place) -> None:
    manager = case.prepare(place) if case.prepare is not None else None
    before = contents(place.outputs)
    if isinstance(case.error, int):
        with manager if isinstance(manager, dask.config.set) else dask.config.set({}):
            result = case.act(place)
        phases = re.compile(r"(prepare|plan|start|ingest): (< )?[0-9.]+ (s|ms)$")  # a line for each phase that is over
        lines = [line for line in result.stderr.splitlines() if not phases.match(line)]
        assert result.exit_code == case.error, result.output
        assert case.message in result.stderr
        assert lines[0].startswith("error: ")
        assert "Traceback" not in result.output
        assert result.stdout == ""
    else:
        with pytest.raises(case.error, match=case.message) as caught:
            case.act(place)
        assert type(caught.value).__module__.startswith("dkrr.")
        if issubclass(case.error, DataError | ParameterError | NotPositiveDefiniteError):
            assert isinstance(caught.value, ValueError)
        assert "\n" not in str(caught.value)
        del caught
    place.patch.undo()
    if contents(place.outputs) != before:  # what goes with an estimator in a circle of references
        gc.collect()
    after = {
        name: content
        for name, content in contents(place.outputs).items()
        if name in before or not any(name.startswith(start) or start.startswith(f"{name}/") for start in case.leaves)
    }
    assert after == before, sorted(after.keys() ^ before.keys()) or "contents differ"


def test_verbose_shows_the_traceback(place: Place) -> None:
    result = CliRunner().invoke(main, ["fit", str(place.inputs / "none.toml"), "--verbose"])
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
