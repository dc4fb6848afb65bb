"""Columns and classes are told by their names, wherever two sides have names."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from click.testing import Result

import dkrr
from dkrr.jobs.gate import judge
from dkrr.jobs.prepare import prepare
from dkrr.jobs.retrain_spec import GateSpec
from dkrr.jobs.spec import JobSpec
from tests.contract.helpers import run, unchanged
from tests.jobs.retrain.project import Project, in_process, rows_of

RNG = np.random.default_rng(3)
X = RNG.standard_normal((120, 3))
Y = X @ [1.0, -2.0, 5.0]
FRAME = pd.DataFrame(np.column_stack([X, Y]), columns=["a", "b", "c", "y"])
MIXED = FRAME.assign(id=[f"{k:03d}" for k in range(120)])[["y", "c", "id", "a", "b"]]  # others, in another order


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of a data set with named columns."""
    data = dkrr.ingest(FRAME, tmp_path / "train.zarr", target="y")
    dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(data).save(tmp_path / "model.zarr")
    return tmp_path / "model.zarr"


def csv(frame: pd.DataFrame, path: Path, **options: Any) -> Path:
    frame.to_csv(path, index=False, **options)
    return path


def folder_of_parquet(frame: pd.DataFrame, path: Path) -> Path:
    path.mkdir()
    for number in range(2):
        frame[60 * number : 60 * number + 60].to_parquet(path / f"part.{number}.parquet")
    return path


def data_set(frame: pd.DataFrame, path: Path) -> Path:
    dkrr.ingest(frame.drop(columns="id"), path, target="y")
    return path


SOURCES: dict[str, Callable[[pd.DataFrame, Path], Path]] = {
    "new.csv": csv,
    "new.csv.gz": csv,
    "new.parquet": lambda frame, path: frame.to_parquet(path) or path,
    "folder": folder_of_parquet,
    "new.zarr": data_set,
}


def assert_predicted(model: Path, data: Path, folder: Path) -> None:
    """The command predicts the targets of these rows with this model."""
    run("predict", model, data, "-o", folder / "out.npy")
    np.testing.assert_allclose(np.load(folder / "out.npy"), Y, atol=1e-6)


# --- predict and evaluate ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_the_order_of_columns_does_not_matter_and_others_are_left_aside(name: str, model: Path, tmp_path: Path) -> None:
    data = SOURCES[name](MIXED, tmp_path / name)
    assert_predicted(model, data, tmp_path)
    result = run("evaluate", model, data, "--metric", "r2", "--json")
    assert '"r2": 1.0' in result.stdout or '"r2": 0.9999' in result.stdout


@pytest.mark.parametrize("name", SOURCES)
def test_missing_columns_are_named(name: str, model: Path, tmp_path: Path) -> None:
    data = SOURCES[name](MIXED.rename(columns={"b": "bb"}), tmp_path / name)
    for command in (["predict", model, data, "-o", tmp_path / "out.npy"], ["evaluate", model, data]):
        run(*command, exits=4, said=("has no columns 'b'", "'bb'"))
    assert not (tmp_path / "out.npy").exists()


def test_a_missing_target_is_named(model: Path, tmp_path: Path) -> None:
    data = csv(FRAME.rename(columns={"y": "z"}), tmp_path / "new.csv")
    run("evaluate", model, data, exits=4, said="has no columns 'y'")


def test_what_has_no_names_is_told_by_its_place(model: Path, tmp_path: Path) -> None:
    data = csv(FRAME[["a", "b", "c"]], tmp_path / "new.csv", header=False)
    assert_predicted(model, data, tmp_path)
    data = csv(FRAME, tmp_path / "four.csv", header=False)
    run("predict", model, data, "-o", tmp_path / "out.npy", exits=4, said="has 4 features, the model was fitted with 3")
    assert run("evaluate", model, data, "--metric", "r2").stdout.split()[1] == "1"


def test_a_model_without_names_takes_columns_by_their_place(tmp_path: Path) -> None:
    train = csv(FRAME, tmp_path / "train.csv", header=False)
    dkrr.ingest(train, tmp_path / "train.zarr", target=-1)
    dkrr.KernelRidge(alpha=1e-8).fit(tmp_path / "train.zarr").save(tmp_path / "model.zarr")
    for columns in (["a", "b", "c"], ["p", "q", "r"]):
        data = tmp_path / "new.csv"
        FRAME[["a", "b", "c"]].to_csv(data, index=False, header=columns)
        assert_predicted(tmp_path / "model.zarr", data, tmp_path)
    run("predict", tmp_path / "model.zarr", csv(FRAME, data), "-o", tmp_path / "out.npy", exits=4)


@pytest.mark.parametrize("names", [("0", "1", "2"), ("x0", "x1", "x2")], ids=["numbers", "as made up"])
def test_names_may_be_numbers_or_as_made_up_ones(names: tuple[str, ...], tmp_path: Path) -> None:
    numbered = FRAME.set_axis([*names, "y"], axis=1)
    mixed = numbered[[names[2], "y", *names[:2]]]
    unnamed = FRAME[["a", "b", "c"]].set_axis([names[2], *names[:2]], axis=1)
    dkrr.KernelRidge(alpha=1e-8).fit(dkrr.ingest(numbered, tmp_path / "d.zarr", target="y")).save(tmp_path / "m.zarr")
    dkrr.KernelRidge(alpha=1e-8).fit(X, Y).save(tmp_path / "n.zarr")
    for name, frame in (("m.zarr", mixed), ("n.zarr", unnamed)):
        if name == "n.zarr" and names[0] == "0":  # may be names or places
            continue
        frame.to_parquet(tmp_path / "new.parquet")
        assert_predicted(tmp_path / name, tmp_path / "new.parquet", tmp_path)
    mixed.to_parquet(tmp_path / "new.parquet")
    run("evaluate", tmp_path / "m.zarr", tmp_path / "new.parquet")


def test_a_name_of_digits_is_no_place_because_it_was_typed(tmp_path: Path) -> None:
    columns = {"01": np.arange(30.0), "02": np.arange(30.0) ** 2, "03": np.arange(30.0) % 7, "y": np.arange(30.0) % 11}
    path = csv(pd.DataFrame(columns), tmp_path / "rows.csv")
    typed = ["--header", "--features", "01", "--features", "02", "--target", "03", "--weight", "y"]
    assert run("ingest", path, tmp_path / "data.zarr", *typed).exit_code == 0
    dataset = dkrr.open_dataset(tmp_path / "data.zarr")
    assert (dataset.feature_names, dataset.target_names, dataset.weight_name) == (("01", "02"), ("03",), "y")
    assert tomllib.loads(run("init", path, "--header", "--target", "02").stdout)["data"]["target"] in ("02", ["02"])


def test_targets_of_a_data_set_are_matched_by_name(tmp_path: Path) -> None:
    frame = FRAME.assign(z=-3 * FRAME["a"])
    train = dkrr.ingest(frame, tmp_path / "train.zarr", target=["y", "z"])
    dkrr.KernelRidge(alpha=1e-8).fit(train).save(tmp_path / "model.zarr")
    dkrr.ingest(frame, tmp_path / "test.zarr", target=["z", "y"])
    result = run("evaluate", tmp_path / "model.zarr", tmp_path / "test.zarr", "--metric", "rmse")
    assert float(result.stdout.split()[1]) < 1e-6
    dkrr.ingest(frame.rename(columns={"z": "w"}), tmp_path / "other.zarr", target=["w", "y"])
    run("evaluate", tmp_path / "model.zarr", tmp_path / "other.zarr", exits=4, said="has no targets 'z'")


@pytest.mark.parametrize("labels", [[0, 2], [1, 0], None], ids=str)
def test_a_data_set_of_other_classes_is_not_appended(labels: list[int] | None, tmp_path: Path) -> None:
    rows = np.column_stack([X, np.arange(120) % 2])
    data = dkrr.ingest(rows, tmp_path / "train.zarr", target=3, one_hot=True)
    if labels is None:
        data, other = dkrr.ingest(np.column_stack([X, Y, Y]), tmp_path / "other.zarr", target=[3, 4]), data
    else:
        rows[:, 3] = np.take(labels, np.arange(120) % 2)
        other = dkrr.ingest(rows, tmp_path / "other.zarr", target=3, one_hot=True, classes=labels)
    with pytest.raises(dkrr.DataError, match="classes: "):
        dkrr.ingest(other, data.path, append=True)


def test_columns_of_a_given_matrix_are_matched_by_name(tmp_path: Path) -> None:
    names = [f"mol{j}" for j in range(120)]
    matrix = pd.DataFrame(X @ X.T, columns=names)
    est = dkrr.KernelRidge(kernel="precomputed", alpha=1e-3).fit(matrix, Y)
    est.save(tmp_path / "model.zarr")
    mixed = matrix[[names[j] for j in RNG.permutation(120)]]
    np.testing.assert_allclose(dkrr.load_model(tmp_path / "model.zarr").predict(mixed), est.predict(matrix), rtol=1e-9)
    run("evaluate", tmp_path / "model.zarr", csv(mixed.assign(y=Y), tmp_path / "all.csv"), "--metric", "r2", said="r2")
    for data, code in ((mixed, 0), (matrix.to_numpy(), 0), (mixed.rename(columns={"mol3": "other"}), 4)):
        path = csv(pd.DataFrame(data), tmp_path / "K.csv", header=isinstance(data, pd.DataFrame))
        run("predict", tmp_path / "model.zarr", path, "-o", tmp_path / "out.npy", "--overwrite", exits=code)
        if code == 0:
            np.testing.assert_allclose(np.load(tmp_path / "out.npy"), est.predict(matrix), rtol=1e-6)


# --- Python --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pandas", "dask"])
def test_a_model_finds_the_columns_of_a_frame(kind: str, model: Path) -> None:
    loaded = dkrr.load_model(model)

    def rows(frame: pd.DataFrame) -> Any:
        return frame if kind == "pandas" else dd.from_pandas(frame, npartitions=3)

    found = loaded.predict(rows(MIXED))
    assert isinstance(found, da.Array) == (kind == "dask")
    np.testing.assert_allclose(np.asarray(found), Y, atol=1e-6)
    with pytest.raises(dkrr.DkrrError, match=r"X has no columns 'b', which the fit had; it has 'y', 'id', 'bb'"):
        loaded.predict(rows(MIXED.rename(columns={"b": "bb"})))
    numbered = pd.DataFrame(X)  # pandas' own numbers are no names
    np.testing.assert_allclose(np.asarray(loaded.predict(rows(numbered))), Y, atol=1e-6)
    with pytest.raises(dkrr.DkrrError, match="columns of the same name: 'a'"):
        loaded.predict(pd.DataFrame(np.column_stack([X, X[:, 0]]), columns=["a", "b", "c", "a"]))


def test_standard_deviations_of_a_frame(tmp_path: Path) -> None:
    est = dkrr.KernelRidge(kernel="rbf", alpha=0.1).fit(FRAME[["a", "b", "c"]], Y)
    expected = est.predict(FRAME[["a", "b", "c"]], return_std=True)[1]
    est.save(tmp_path / "model.zarr")
    np.testing.assert_allclose(dkrr.load_model(tmp_path / "model.zarr").predict_std(MIXED), expected, rtol=1e-9)


@pytest.mark.parametrize("tile_size", ["auto", 50])
def test_the_estimator_is_as_strict_with_frames_as_scikit_learn(tile_size: Any, tmp_path: Path) -> None:
    est = dkrr.KernelRidge(alpha=1e-8, tile_size=tile_size)
    sources: list[tuple[Any, Any]] = [
        (FRAME[["a", "b", "c"]], Y),
        (dkrr.ingest(FRAME, tmp_path / "d.zarr", target="y"), None),
        (tmp_path / "d.zarr", None),
        (dkrr.open_dataset(tmp_path / "d.zarr"), -Y),
        (dd.from_pandas(FRAME[["a", "b", "c"]], npartitions=2), dd.from_pandas(FRAME["y"], npartitions=2)),
    ]
    for rows, targets in sources:
        est.fit(rows, targets)
        assert est.feature_names_in_.tolist() == ["a", "b", "c"]
        expected = -Y if targets is not None and targets is sources[3][1] else Y
        np.testing.assert_allclose(est.predict(FRAME[["a", "b", "c"]]), expected, atol=1e-6)
        with pytest.raises(ValueError, match="same order"):
            est.predict(FRAME[["c", "b", "a"]])
        with pytest.raises(ValueError, match="same order"):
            est.score(FRAME[["c", "b", "a"]], Y)
        # what scikit-learn has no rule for
        np.testing.assert_allclose(est.predict(dd.from_pandas(MIXED, npartitions=2)).compute(), expected, atol=1e-6)
        path = csv(MIXED, tmp_path / "new.csv")
        np.testing.assert_allclose(est.predict(path), expected, atol=1e-6)
    est.fit(X, Y)
    assert not hasattr(est, "feature_names_in_")


@pytest.mark.parametrize("options", [{}, {"tile_size": 8}], ids=["memory", "tiles"])
def test_partitions_without_rows_are_no_rows(options: dict[str, Any], tmp_path: Path) -> None:
    """Every filter of a dask frame may leave some."""
    frame = dd.from_pandas(FRAME.reset_index(drop=True), npartitions=4)
    kept = frame.map_partitions(lambda part: part[part.index >= len(FRAME) // 2])
    rows = FRAME.iloc[len(FRAME) // 2 :]
    expected = dkrr.KernelRidge(**options).fit(rows[["a", "b"]], rows["y"]).predict(FRAME[["a", "b"]])
    found = dkrr.KernelRidge(**options).fit(kept[["a", "b"]], kept["y"]).predict(FRAME[["a", "b"]])
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert dkrr.ingest(kept, tmp_path / "rows.zarr", target="y").num_rows == len(rows)


def test_cross_validation_keeps_names(tmp_path: Path) -> None:
    est = dkrr.KernelRidgeCV(alphas=[1e-8, 1e-6]).fit(FRAME[["a", "b", "c"]], Y)
    est.save(tmp_path / "model.zarr")
    np.testing.assert_allclose(dkrr.load_model(tmp_path / "model.zarr").predict(MIXED), Y, atol=1e-4)
    with pytest.raises(ValueError, match="same order"):
        est.predict(FRAME[["c", "b", "a"]])


def test_the_same_rows_under_other_names_are_fitted_with_those(tmp_path: Path) -> None:
    est = dkrr.KernelRidge(alpha=1e-8, store=tmp_path / "store")
    for names in (["a", "b", "c"], ["c", "b", "a"]):
        path = csv(FRAME[["a", "b", "c"]].set_axis(names, axis=1), tmp_path / "X.csv")
        assert est.fit(path, Y).feature_names_in_.tolist() == names
        est.save(tmp_path / "model.zarr", overwrite=True)
        rows = FRAME[["a", "b", "c"]].set_axis(names, axis=1)[["b", "c", "a"]]
        np.testing.assert_allclose(dkrr.load_model(tmp_path / "model.zarr").predict(rows), Y, atol=1e-6)


# --- data sets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--target", "-1"], ["--target", "y", "--features", "a"]])
def test_an_append_finds_its_columns_by_name(options: list[str], tmp_path: Path) -> None:
    data = csv(FRAME, tmp_path / "train.csv")
    run("ingest", data, tmp_path / "d.zarr", "--target", "-1")
    before = dkrr.open_dataset(tmp_path / "d.zarr").num_rows
    others = "--features" in options  # are asked for, by name
    run(
        "ingest", csv(MIXED, tmp_path / "more.csv"), tmp_path / "d.zarr", "--append", *options, exits=4 if others else 0
    )
    found = dkrr.open_dataset(tmp_path / "d.zarr")
    if others:
        assert found.num_rows == before
        return
    np.testing.assert_array_equal(found.read(120, 240), X)
    assert found.y is not None
    np.testing.assert_array_equal(found.y.read(120, 240)[:, 0], Y)


# --- classes -------------------------------------------------------------------------------------------------------

CENTRES = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0]])
LABELS = np.repeat([0, 1, 2], 30)
POINTS = CENTRES[LABELS] + 0.3 * RNG.standard_normal((90, 2))
NAMES = np.array(["ash", "oak", "yew"])
TREES = pd.DataFrame(POINTS, columns=["a", "b"]).assign(kind=NAMES[LABELS])


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    train = dkrr.ingest(TREES, tmp_path / "trees.zarr", target="kind", one_hot=True)
    dkrr.KernelRidge(kernel="rbf", alpha=0.1).fit(train).save(tmp_path / "trees-model.zarr")
    return tmp_path / "trees-model.zarr"


def accuracy(result: Result) -> float:
    return float(result.stdout.split()[1])


@pytest.mark.parametrize("kind", ["csv", "zarr"])
def test_the_classes_of_the_model_decide(kind: str, classifier: Path, tmp_path: Path) -> None:
    def source(frame: pd.DataFrame) -> Path:
        path = csv(frame[["kind", "b", "a"]], tmp_path / f"{len(frame)}.csv")
        if kind == "csv":
            return path
        dkrr.ingest(path, tmp_path / f"{len(frame)}.zarr", target="kind", one_hot=True)
        return tmp_path / f"{len(frame)}.zarr"

    two = TREES[TREES["kind"] != "ash"]  # its first class is another one than the model's
    assert accuracy(run("evaluate", classifier, source(two), "--metric", "accuracy")) == 1.0
    scores = run("evaluate", classifier, source(two)).stdout
    assert "nan" not in scores
    more = pd.concat([TREES, pd.DataFrame({"kind": ["elm"], "a": [0.0], "b": [0.0]})])
    run("evaluate", classifier, source(more), exits=4, said=("'elm'", "'ash', 'oak', 'yew'"))


def test_classes_that_are_numbers(tmp_path: Path) -> None:
    frame = TREES.assign(kind=LABELS)
    dkrr.ingest(csv(frame, tmp_path / "t.csv"), tmp_path / "t.zarr", target="kind", one_hot=True)
    dkrr.KernelRidge(kernel="rbf", alpha=0.1).fit(tmp_path / "t.zarr").save(tmp_path / "m.zarr")
    last = csv(frame[frame["kind"] > 0][["kind", "a", "b"]], tmp_path / "u.csv")
    assert accuracy(run("evaluate", tmp_path / "m.zarr", last, "--metric", "accuracy")) == 1.0
    run("predict", tmp_path / "m.zarr", last, "-o", tmp_path / "out.parquet")
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert found["kind"].tolist() == frame["kind"][frame["kind"] > 0].tolist()


@pytest.mark.parametrize("fitted", ["classes", "columns"])
def test_columns_of_classes_are_found_by_name_where_one_side_has_labels(fitted: str, tmp_path: Path) -> None:
    labels = np.digitize(X[:, 0], [-0.5, 0.5])
    names = ["label=1", "label=10", "label=2"]
    frame = FRAME[["a", "b", "c"]].assign(label=np.array([1, 2, 10])[labels])
    columns = frame.drop(columns="label").assign(**dict(zip(names, np.eye(3)[:, [0, 2, 1]][labels].T, strict=True)))
    sets = {
        "classes": dkrr.ingest(frame, tmp_path / "classes.zarr", target="label", one_hot=True),
        "columns": dkrr.ingest(columns, tmp_path / "columns.zarr", target=names),
    }
    dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(sets.pop(fitted)).save(tmp_path / "m.zarr")
    same = run("evaluate", tmp_path / "m.zarr", tmp_path / f"{fitted}.zarr", "--metric", "r2", "--json")
    other = run("evaluate", tmp_path / "m.zarr", next(iter(sets.values())).path, "--metric", "r2", "--json")
    assert json.loads(other.stdout)["r2"] == pytest.approx(json.loads(same.stdout)["r2"], rel=1e-12)
    renamed = columns.rename(columns=dict(zip(names, ["is1", "is10", "is2"], strict=True)))
    dkrr.ingest(renamed, tmp_path / "renamed.zarr", target=["is1", "is10", "is2"])
    run("evaluate", tmp_path / "m.zarr", tmp_path / "renamed.zarr", exits=4, said="has no targets 'label=1'")


def test_the_label_stands_beside_the_scores(classifier: Path, tmp_path: Path) -> None:
    data = csv(TREES, tmp_path / "new.csv")
    scores = ["kind=ash", "kind=oak", "kind=yew"]
    for name, read in (("out.csv", pd.read_csv), ("out.parquet", pd.read_parquet)):
        run("predict", classifier, data, "-o", tmp_path / name)
        found = read(tmp_path / name)
        assert list(found.columns) == [*scores, "kind"]
        assert found["kind"].tolist() == TREES["kind"].tolist()
    run("predict", classifier, data, "-o", tmp_path / "out.zarr")
    array = zarr.open_array(tmp_path / "out.zarr", mode="r")
    stamp = json.loads((tmp_path / "out.zarr.json").read_text())
    assert stamp["classes"] == NAMES.tolist()
    assert np.array(stamp["classes"])[np.argmax(array[:], axis=1)].tolist() == TREES["kind"].tolist()
    assert "classes" not in array.attrs
    # the true label can be kept beside it
    run("predict", classifier, data, "-o", tmp_path / "both.csv", "--keep", "kind")
    found = pd.read_csv(tmp_path / "both.csv")
    assert list(found.columns) == ["kind", *scores, "kind_predicted"]
    assert found["kind"].tolist() == found["kind_predicted"].tolist()


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_no_column_of_predictions_is_written_over_another(name: str, tmp_path: Path) -> None:
    frame = FRAME.assign(y_std=-Y, y_predicted=2 * Y)
    dkrr.ingest(frame, tmp_path / "train.zarr", target=["y", "y_std", "y_predicted"])
    dkrr.KernelRidge(kernel="linear", alpha=1e-3, solver="cholesky").fit(tmp_path / "train.zarr").save(
        tmp_path / "m.zarr"
    )
    data = csv(frame, tmp_path / "new.csv")
    for options, column in ((["--std"], "y_std"), (["--keep", "y"], "y_predicted")):
        run(
            "predict",
            tmp_path / "m.zarr",
            data,
            "-o",
            tmp_path / name,
            *options,
            exits=4,
            said=f"two columns {column!r}",
        )
        assert not list(tmp_path.glob("out*"))
    run("predict", tmp_path / "m.zarr", data, "-o", tmp_path / name)


# --- jobs ----------------------------------------------------------------------------------------------------------


def job(folder: Path, train: Path, evaluate: str = "fraction = 0.2", data: str = "") -> Path:
    path = folder / "job.toml"
    path.write_text(
        f'[data]\npath = "{train}"\nheader = true\nstandardize = true\n{data}\n[evaluate]\n{evaluate}\n'
        '[model]\nkernel = "rbf"\ngamma = 0.3\nalpha = 1e-3\n[solver]\nname = "cholesky"\ntile_size = 64\n'
        '[cluster]\nworkers = 1\nmemory_limit = "1GiB"\n[output]\ndirectory = "runs/a"\n'
    )
    return path


@pytest.mark.parametrize("kind", ["csv", "zarr"])
def test_a_file_to_evaluate_is_matched_by_names_and_classes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the job, or of the data set as it was made."""
    in_process(monkeypatch)
    train, data = csv(TREES, tmp_path / "train.csv"), "target = [-1]\none_hot = true"
    if kind == "zarr":
        dkrr.ingest(train, tmp_path / "train.zarr", target="kind", one_hot=True)
        train, data = tmp_path / "train.zarr", ""
    test = csv(TREES[TREES["kind"] != "ash"].assign(id=7)[["kind", "id", "b", "a"]], tmp_path / "test.csv")
    run("fit", job(tmp_path, train, f'path = "{test}"', data), "--json", said='"accuracy": 1.0')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda frame: frame.rename(columns={"a": "p"}), "has no columns 'a'"),
        (lambda frame: frame.assign(kind="elm"), "'elm'"),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "zarr"])
def test_what_does_not_fit_is_said_before_anything_is_computed(
    change: Any, said: str, kind: str, tmp_path: Path
) -> None:
    train = csv(TREES, tmp_path / "train.csv")
    test = csv(change(TREES), tmp_path / "test.csv")
    if kind == "zarr":
        dkrr.ingest(test, tmp_path / "test.zarr", target="kind", one_hot=True)
        test = tmp_path / "test.zarr"
    for command in ("plan", "fit"):
        run(command, job(tmp_path, train, f'path = "{test}"', 'target = ["kind"]\none_hot = true'), exits=4, said=said)
    assert not (tmp_path / "runs/a/model.zarr").exists()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('features = ["a", "b"]', "features: a, b given"),
        ('target = "a"', "target: a given"),
        ("target = 0", "target: 0 given"),
        ('target = "nosuch"', "target: nosuch given"),
        ('weight = "b"', "weight: b given"),
        ("one_hot = true", "one_hot"),
        ('target = "y"', ""),
        ('target = [-1]\nfeatures = ["a", "b", "c"]', ""),
        ('features = [0, "b", 2]\nmissing = "drop"', ""),
    ],
)
def test_other_columns_than_a_data_set_has_are_refused(data: str, said: str, model: Path, tmp_path: Path) -> None:
    path = job(tmp_path, tmp_path / "train.zarr", data=data)
    for command in ("plan", "fit") if said else ("plan",):
        run(command, path, exits=2 if said else 0, said=said)
    assert not said or not list(tmp_path.glob("runs/**/*.zarr"))


@pytest.mark.parametrize(
    ("data", "is_taken"),
    [
        ("target = [-1]", True),
        ("target = -1\none_hot = true", True),
        ('target = "kind"\nfeatures = [0, 1]', True),
        ("target = 2", True),
        ("target = [2, 3, 4]", True),  # as they stand in the data set
        ("target = [1]", False),
        ("target = [-2]", False),
    ],
)
@pytest.mark.parametrize("weight", [None, "w"])
def test_numbers_of_columns_of_classes_are_those_of_the_labels(
    data: str, is_taken: bool, weight: str | None, tmp_path: Path
) -> None:
    frame = TREES[["a", "b", "kind"]].assign(w=2.0)
    names = ["a", "b", "kind", "w"] if weight else ["a", "b", "kind"]
    dkrr.ingest(frame[names], tmp_path / "train.zarr", target="kind", weight=weight, one_hot=True)
    path = job(tmp_path, tmp_path / "train.zarr", data=data)
    if weight:  # is the last column then
        is_taken = {"-1": False, "-2": True}.get(data.partition("= ")[2].partition("\n")[0].strip("[]"), is_taken)
    run("plan", path, exits=0 if is_taken else 2)


@pytest.mark.parametrize(
    "labels",
    [
        ("9007199254740993", "0.5", "9007199254740992"),
        ("18446744073709551615", "-1", "18446744073709551614"),
        ("9223372036854775808", "-1", "1"),
        ("12345678901234567890", "9223372036854775808", "1"),
        ("100000000000000000000", "99999999999999999999", "1"),
    ],
)
def test_predicted_labels_are_those_of_the_file(labels: tuple[str, ...], tmp_path: Path) -> None:
    frame = TREES[["a", "b"]].assign(kind=TREES["kind"].map(dict(zip(sorted(set(TREES["kind"])), labels, strict=True))))
    rows, model, found = csv(frame, tmp_path / "rows.csv"), tmp_path / "model.zarr", tmp_path / "found.csv"
    data = dkrr.ingest(rows, tmp_path / "rows.zarr", target="kind", one_hot=True)
    dkrr.KernelRidge(kernel="rbf", gamma=10.0, alpha=1e-6).fit(data).save(model)
    run("predict", model, rows, "-o", found, "--keep", "kind")
    table = pd.read_csv(found, dtype=str)
    assert (table["kind"] == table["kind_predicted"]).all()


@pytest.mark.parametrize(("fitted", "other"), [("parquet", "csv"), ("csv", "parquet"), ("lower.csv", "csv")])
def test_classes_that_are_true_and_false_are_the_same_in_every_format(fitted: str, other: str, tmp_path: Path) -> None:
    frame = TREES[["a", "b"]].assign(kind=TREES["kind"] == "oak")

    def rows(ending: str) -> Path:
        path = tmp_path / f"rows.{ending}"
        if ending == "parquet":
            frame.to_parquet(path)
            return path
        return csv(frame.assign(kind=frame["kind"].astype(str).str.lower()) if "lower" in ending else frame, path)

    data = dkrr.ingest(rows(fitted), tmp_path / "rows.zarr", target="kind", one_hot=True)
    dkrr.KernelRidge(kernel="rbf", gamma=10.0, alpha=1e-6).fit(data).save(tmp_path / "model.zarr")
    assert accuracy(run("evaluate", tmp_path / "model.zarr", rows(other), "--metric", "accuracy")) == 1.0


@pytest.mark.parametrize("mask", ["m", 0])
def test_the_column_of_a_mask_is_no_feature(mask: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    frame = FRAME.assign(m=[int(k % 4 == 0) for k in range(120)])[["m", "y", "a", "b", "c"]]
    path = job(tmp_path, csv(frame, tmp_path / "rows.csv"), f"mask = {mask!r}", 'target = "y"')
    run("fit", path, "--json")
    assert dkrr.load_model(tmp_path / "runs/a/model.zarr").feature_names == ["a", "b", "c"]
    without = csv(frame.drop(columns="m"), tmp_path / "without.csv")
    run("evaluate", tmp_path / "runs/a/model.zarr", without)

    # a data set has its features already
    dkrr.ingest(frame, tmp_path / "rows.zarr", target="y")
    path.write_text(path.read_text().replace("rows.csv", "rows.zarr").replace("runs/a", "runs/b"))
    run("fit", path, exits=2, said="[evaluate] mask")


def test_rows_that_were_prepared_under_other_names_are_named_anew(tmp_path: Path) -> None:
    train = tmp_path / "train.csv"
    for names in (["a", "b"], ["b", "a"]):
        csv(FRAME[["a", "b", "y"]].set_axis([*names, "y"], axis=1), train)
        spec = JobSpec.load(job(tmp_path, train, data="target = [-1]"))
        assert prepare(spec, str(tmp_path / "store")).train.names == tuple(names)


# --- columns that are kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["new.csv", "new.csv.gz", "new.parquet", "folder"])
@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_columns_are_kept_beside_predictions(source: str, output: str, model: Path, tmp_path: Path) -> None:
    frame = MIXED.assign(day=pd.date_range("2024-01-01", periods=120).strftime("%Y-%m-%d"))
    data = SOURCES[source](frame, tmp_path / source)
    run("predict", model, data, "-o", tmp_path / output, "--keep", "id", "--keep", "day")
    text = {"id": str, "day": str}
    found = pd.read_csv(tmp_path / output, dtype=text) if output == "out.csv" else pd.read_parquet(tmp_path / output)
    assert list(found.columns) == ["id", "day", "y"]
    assert found["id"].tolist() == frame["id"].tolist()
    assert found["day"].tolist() == frame["day"].tolist()
    np.testing.assert_allclose(found["y"], Y, atol=1e-6)


@pytest.mark.parametrize("source", ["new.csv", "new.csv.gz", "new.parquet"])
def test_text_is_kept_with_the_spaces_at_its_ends(source: str, model: Path, tmp_path: Path) -> None:
    names = ["  lead", "trail  ", "\u00a0nbsp", "\ttab", " ", "plain"] * 20
    data = SOURCES[source](FRAME.assign(id=names), tmp_path / source)
    for output in ("out.csv", "out.parquet"):
        run("predict", model, data, "-o", tmp_path / output, "--keep", "id")
        path = tmp_path / output
        found = pd.read_csv(path, dtype={"id": str}) if output == "out.csv" else pd.read_parquet(path)
        assert found["id"].tolist() == names


def test_numbers_of_a_text_file_are_kept_as_numbers_in_parquet_and_as_they_stand_in_text(
    model: Path, tmp_path: Path
) -> None:
    columns = {
        "whole": ["7", ""],
        "long": ["1790000000000000001", "-1790000000000000002"],
        "real": ["1.5", "-2000.0"],
        "fixed": ["1.50", "-2000.00"],
        "code": ["007", "8"],
        "word": ["1", "x"],
        "version": ["1.1", "1.10"],
        "longer": ["12345678901234567890", "12345678901234567891"],
        "digits": ["0.12345678901234567890", "1e400"],
    }
    data = csv(FRAME.assign(**{name: values * 60 for name, values in columns.items()}), tmp_path / "new.csv")
    for output in ("out.csv", "out.parquet"):
        kept = [option for name in columns for option in ("--keep", name)]
        run("predict", model, data, "-o", tmp_path / output, *kept)
    text = pd.read_csv(tmp_path / "out.csv", dtype=str, keep_default_na=False)
    assert {name: text[name][:2].tolist() for name in columns} == columns
    found = pq.read_table(tmp_path / "out.parquet").select(list(columns))
    assert [str(kind) for kind in found.schema.types] == ["int64"] * 2 + ["double"] * 2 + ["string"] * 5
    numbers = {"whole": None, "long": -1790000000000000002, "real": -2000.0, "fixed": -2000.0}
    assert found.to_pylist()[1] == numbers | {name: columns[name][1] for name in list(columns)[4:]}


KEPT_TYPES = {
    "time64[ns]": pa.array(np.arange(1, 121), pa.time64("ns")),
    "time64[us]": pa.array(np.arange(1, 121), pa.time64("us")),
    "timestamp[ns]": pa.array(np.arange(1, 121), pa.timestamp("ns", "UTC")),
    "duration[ns]": pa.array(np.arange(1, 121), pa.duration("ns")),
    "uint64": pa.array(np.arange(120, dtype=np.uint64) + np.uint64(2**64 - 121)),
    "float32": pa.array(np.linspace(0.1, 0.9, 120, dtype=np.float32)),
    "binary": pa.array([bytes([j]) for j in range(120)]),
    "list": pa.array([[j, None] for j in range(120)]),
    "dictionary": pa.array(["u", None] * 60).dictionary_encode(),
}


@pytest.mark.parametrize("rows_a_group", [120, 7])
def test_every_type_of_parquet_is_kept_to_the_last_digit(rows_a_group: int, model: Path, tmp_path: Path) -> None:
    table = pa.table({name: pa.array(FRAME[name]) for name in FRAME.columns} | KEPT_TYPES)
    pq.write_table(table, tmp_path / "new.parquet", row_group_size=rows_a_group)
    kept = [option for name in KEPT_TYPES for option in ("--keep", name)]
    run("predict", model, tmp_path / "new.parquet", "-o", tmp_path / "out.parquet", *kept)
    found = pq.read_table(tmp_path / "out.parquet")
    for name, expected in KEPT_TYPES.items():
        if name == "dictionary":
            expected = expected.dictionary_decode()
        assert found[name].combine_chunks().equals(expected), name


def test_files_of_other_types_than_the_first_are_kept_or_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    FRAME.assign(id=1).to_parquet(tmp_path / "new" / "1.parquet")
    command = ["predict", model, tmp_path / "new", "-o", tmp_path / "out.parquet", "--keep", "id"]
    FRAME.assign(id=2.0).to_parquet(tmp_path / "new" / "2.parquet")
    run(*command)
    assert pd.read_parquet(tmp_path / "out.parquet")["id"].tolist() == [1] * 120 + [2] * 120
    FRAME.assign(id=2.5).to_parquet(tmp_path / "new" / "2.parquet")
    run(*command, exits=4, said="2.parquet has values that are no int64")


def test_columns_in_the_names_of_folders_are_kept(model: Path, tmp_path: Path) -> None:
    for part, place in ((FRAME[:60], "Rome"), (FRAME[60:], "Oslo")):
        (tmp_path / f"new/place={place}/year={len(place)}").mkdir(parents=True)
        part.to_parquet(tmp_path / f"new/place={place}/year={len(place)}/part.parquet")
    run("predict", model, tmp_path / "new", "-o", tmp_path / "o.csv", "--keep", "place", "--keep", "year")
    found = pd.read_csv(tmp_path / "o.csv")
    expected = np.concatenate([Y[60:], Y[:60]])
    np.testing.assert_allclose(found["y"], expected, atol=1e-6)
    assert found["place"].tolist() == ["Oslo"] * 60 + ["Rome"] * 60
    assert set(found["year"]) == {4}


@pytest.mark.parametrize(
    ("values", "classes", "kind"),
    [
        (("01", "1", "2"), ("01", "1", "2"), "string"),
        (("1790000000000000001", "1790000000000000002", "5"), (5, 1790000000000000001, 1790000000000000002), "int64"),
        (("1", "2", "3"), (1, 2, 3), "int64"),
    ],
)
def test_values_in_the_names_of_folders_are_told_apart_as_in_a_text_file(
    values: tuple[str, ...], classes: tuple[Any, ...], kind: str, tmp_path: Path
) -> None:
    for number, value in enumerate(values):
        (tmp_path / f"rows/plant={value}").mkdir(parents=True)
        FRAME[40 * number : 40 * number + 40].to_parquet(tmp_path / f"rows/plant={value}/part.parquet")
    (tmp_path / "all").mkdir()
    labels = np.repeat(values, 40)
    text = csv(FRAME.assign(plant=labels), tmp_path / "all/rows.csv")
    for source in (tmp_path / "rows", text):
        data = dkrr.ingest(source, tmp_path / f"{source.name}.zarr", target="plant", one_hot=True)
        assert data.classes == classes
    dkrr.KernelRidge(alpha=0.1).fit(data).save(tmp_path / "classes.zarr")
    for name in ("out.csv", "out.parquet"):
        run("predict", tmp_path / "classes.zarr", tmp_path / "rows", "-o", tmp_path / name, "--keep", "plant")
    assert sorted(pd.read_csv(tmp_path / "out.csv", dtype=str)["plant"]) == sorted(labels)
    found = pq.read_table(tmp_path / "out.parquet")["plant"]
    assert (str(found.type), sorted(map(str, found.to_pylist()))) == (kind, sorted(labels))


def test_what_cannot_be_kept_is_said(model: Path, tmp_path: Path) -> None:
    data = csv(MIXED, tmp_path / "new.csv")
    run(
        "predict",
        model,
        data,
        "-o",
        tmp_path / "out.csv",
        "--keep",
        "idd",
        exits=4,
        said=("'idd' is not a column of", "did you mean 'id'?"),
    )
    np.save(tmp_path / "X.npy", X)
    for source in ("X.npy", "train.zarr"):
        run(
            "predict",
            model,
            tmp_path / source,
            "-o",
            tmp_path / "out.csv",
            "--keep",
            "0",
            exits=4,
            said="cannot be kept",
        )
    for output in ("out.npy", "out.zarr"):
        run("predict", model, data, "-o", tmp_path / output, "--keep", "id", exits=2, said="write .csv or .parquet")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"X.npy", "model.zarr", "new.csv", "train.zarr"}


# --- retraining ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["y", -1])
def test_a_batch_in_another_order_is_appended_by_name(
    target: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p", data={"target": [target]})
    project.deliver("night-1", seed=1)
    assert project.run().outcome == "promoted"
    frame = pd.DataFrame(rows_of(2, 120), columns=["a", "b", "c", "y"])
    csv(frame.assign(id=3)[["id", "y", "c", "a", "b"]], project.folder / "incoming/night-2.csv")
    assert project.run().batches[0]["outcome"] == "appended"
    found = dkrr.open_dataset(project.folder / "rows.zarr")
    np.testing.assert_array_equal(found.read(120, 240), frame[["a", "b", "c"]])


def test_a_class_that_no_held_out_row_has_does_not_fail_a_model() -> None:
    score = {"num_rows": 50, "rmse": [0.1] * 3, "r2": [0.9, 0.8, None], "accuracy": 1.0}
    fit = {"relative_residual": [1e-12], "converged": True}
    for r2, passed in (([0.9, 0.8, None], True), ([-0.9, 0.1, None], False), ([None, None, None], False)):
        scores = {"num_rows": 50, "candidate": {**score, "r2": r2}, "production": None}
        checks = {check.name: check for check in judge(GateSpec(), fit, scores, None, [])}
        assert checks["better than the mean"].passed == passed


# --- columns of one name ----------------------------------------------------------------------------------------------

TWICE = FRAME.set_axis(["a", "b", "a", "y"], axis=1)


def arrow(frame: pd.DataFrame) -> pa.Table:
    return pa.table([frame.iloc[:, j].to_numpy() for j in range(frame.shape[1])], names=list(frame.columns))


FRAMES: dict[str, Callable[[pd.DataFrame], Any]] = {
    "pandas": lambda frame: frame,
    "dask": lambda frame: dd.from_pandas(frame, npartitions=2),
    "arrow": arrow,
}
TAKING: dict[str, Callable[[Any, Path], Any]] = {
    "fit": lambda frame, _: dkrr.KernelRidge().fit(frame, Y),
    "fit in tiles": lambda frame, _: dkrr.KernelRidge(tile_size=50).fit(frame, Y),
    "fit of targets": lambda frame, _: dkrr.KernelRidge(tile_size=50).fit(X, frame),
    "cross-validation": lambda frame, _: dkrr.KernelRidgeCV().fit(frame, Y),
    "prediction": lambda frame, _: dkrr.KernelRidge().fit(np.column_stack([X, Y]), Y).predict(frame),
    "ingest": lambda frame, path: dkrr.ingest(frame, path / "data.zarr", y=Y),
    "ingest with a target": lambda frame, path: dkrr.ingest(frame, path / "data.zarr", target="y"),
    "ingest of targets": lambda frame, path: dkrr.ingest(X, path / "data.zarr", y=frame),
}


@pytest.mark.parametrize("kind", FRAMES)
@pytest.mark.parametrize("taking", TAKING)
def test_columns_of_one_name_are_refused(kind: str, taking: str, tmp_path: Path) -> None:
    frame = FRAMES[kind](TWICE)
    with pytest.raises(dkrr.DkrrError, match=r"(X|y) has columns of the same name: 'a'"):
        TAKING[taking](frame, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_columns_of_one_name_names_them(tmp_path: Path) -> None:
    pq.write_table(arrow(TWICE), tmp_path / "twice.parquet")
    with pytest.raises(dkrr.DkrrError, match=r"twice\.parquet has columns of the same name: 'a'"):
        dkrr.ingest(tmp_path / "twice.parquet", tmp_path / "data.zarr")


@pytest.mark.parametrize("kind", FRAMES)
def test_any_frame_brings_its_names_into_a_data_set(kind: str, tmp_path: Path) -> None:
    data = dkrr.ingest(FRAMES[kind](FRAME), tmp_path / "data.zarr", target="y")
    assert data.names == ("a", "b", "c")


@pytest.mark.parametrize("features", ["", "features = [0, 1, 2]\n"])
def test_widths_that_were_chosen_belong_to_names(
    features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.uniform(-1, 1, (400, 3)), columns=["a", "b", "c"])
    frame["y"] = np.sin(9 * frame["a"]) + 0.3 * frame["b"] + 0.01 * rng.standard_normal(400)
    csv(frame, tmp_path / "rows.csv")
    (tmp_path / "job.toml").write_text(
        f'[data]\npath = "rows.csv"\ntarget = "y"\n{features}standardize = true\n'
        '[tune]\nkernels = ["rbf"]\nrows = 400\nsearch_rows = [200, 400]\n'
    )
    run("tune", "job.toml", "-o", "best.toml", "--no-picture")
    best = tomllib.loads((tmp_path / "best.toml").read_text())
    assert len(best["model"]["kernel_params"]["length_scale"]) == 3, best["model"]
    assert best["data"]["features"] == ["a", "b", "c"]
    found = []
    for columns in (["a", "b", "c", "y"], ["y", "c", "b", "a"]):
        csv(frame[columns], tmp_path / "rows.csv")
        run("fit", "best.toml")
        model = dkrr.load_model(tmp_path / "runs/best/model.zarr")
        found.append(model.predict(frame[["a", "b", "c"]].to_numpy()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


# where targets are, without names in common: named or not on one side, first, last, or among other columns
PLACES: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "target first": (["y", "a", "b", "c"], 0, {}),
    "target last, no names in the fit": (["a", "b", "c", "y"], -1, {"header": False}),
    "features in an order of their own": (["a", "y", "b", "c"], 1, {"features": [3, 0, 2]}),
    "others beside": (["a", "id", "y", "b", "c"], 2, {"features": [0, 3, 4]}),
}


@pytest.mark.parametrize(
    ("fitted", "header"),
    [*((name, False) for name in PLACES), ("target last, no names in the fit", ["x1", "x2", "x3", "x0"])],
)
def test_without_names_in_common_columns_are_where_they_were_in_the_fit(
    fitted: str, header: list[str] | bool, tmp_path: Path
) -> None:
    columns, target, options = PLACES[fitted]
    frame = FRAME.assign(id=np.arange(120.0))[columns]
    rows = csv(frame, tmp_path / "rows.csv", header=options.get("header", True))
    data = dkrr.ingest(rows, tmp_path / "train.zarr", target=target, **options)
    dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(data).save(tmp_path / "model.zarr")
    new = csv(frame, tmp_path / "new.csv", header=header)
    said = run("evaluate", tmp_path / "model.zarr", new, "--json").stdout
    assert json.loads(said)["r2"] > 1 - 1e-12


@pytest.mark.parametrize("told", ["", "target = [{target}]"])
@pytest.mark.parametrize("fitted", PLACES)
def test_rows_without_names_are_appended_and_evaluated_where_they_stood(
    fitted: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    columns, target, options = PLACES[fitted]
    rows = FRAME.assign(id=np.arange(120.0))[columns].to_numpy()
    data = dkrr.ingest(rows, tmp_path / "train.zarr", target=target, features=options.get("features"))
    np.save(tmp_path / "new.npy", rows)
    file = job(tmp_path, Path(data.path), f'path = "{tmp_path}/new.npy"', told.format(target=target))
    file.write_text(file.read_text().replace('kernel = "rbf"\ngamma = 0.3\nalpha = 1e-3', 'kernel = "linear"'))
    assert json.loads(run("fit", file, "--json").stdout)["score"]["r2"][0] > 0.99
    run("ingest", tmp_path / "new.npy", data.path, "--append")
    both = dkrr.open_dataset(data.path)
    np.testing.assert_array_equal(both.read(120, 240), data.read(0, 120))
    np.testing.assert_array_equal(both.targets.read(120, 240), data.targets.read(0, 120))


@pytest.mark.parametrize("fitted", PLACES)
def test_rows_without_names_of_more_columns_are_not_taken_by_place(
    fitted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    columns, target, options = PLACES[fitted]
    rows = FRAME.assign(id=np.arange(120.0))[columns].to_numpy()
    data = dkrr.ingest(rows, tmp_path / "train.zarr", target=target, features=options.get("features"))
    np.savetxt(new := tmp_path / "new.csv", np.c_[np.ones(120), rows], delimiter=",")
    dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(data).save(tmp_path / "model.zarr")
    file = job(tmp_path, Path(data.path), f'path = "{new}"')
    file.write_text(file.read_text().replace("header = true", "header = false"))
    with unchanged(Path(data.path)):
        run("ingest", new, data.path, "--append", "--no-header", exits=None)
    run("evaluate", tmp_path / "model.zarr", new, "--no-header", exits=4)
    run("fit", file, exits=4)


def test_rows_that_say_nothing_of_the_order_of_columns_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features were chosen in another order: of a data set in order, of a target that is told, of targets apart."""
    in_process(monkeypatch)
    rows, said = FRAME.to_numpy(), "chosen in another order"
    data = dkrr.ingest(rows, tmp_path / "train.zarr", target=3, features=[2, 0, 1])
    est = dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(data)
    est.save(tmp_path / "model.zarr")
    other = dkrr.ingest(rows, tmp_path / "other.zarr", target=3)
    swapped = dkrr.ingest(np.c_[rows, Y], tmp_path / "swapped.zarr", target=[4, 3])
    for given in ({"source": other}, {"source": rows, "target": 3}, {"source": X, "y": Y}):
        with pytest.raises(dkrr.DataError, match=said):
            dkrr.ingest(**given, dest=data.path, append=True)
    with pytest.raises(dkrr.DataError, match=said):
        dkrr.ingest(dkrr.ingest(np.c_[rows, Y], tmp_path / "last.zarr", target=[3, 4]), swapped.path, append=True)
    with pytest.raises(dkrr.DataError, match=said):
        est.predict(other)
    for command in (["evaluate"], ["predict", "-o", tmp_path / "out.npy"]):
        run(command[0], tmp_path / "model.zarr", other.path, *command[1:], exits=4, said=said)
    run("fit", job(tmp_path, Path(data.path), f'path = "{other.path}"'), exits=4, said=said)
    dkrr.ingest(rows, data.path, target=3, features=[2, 0, 1], append=True)
    np.testing.assert_allclose(est.predict(dkrr.ingest(data, tmp_path / "copy.zarr"))[:120], Y, atol=1e-6)


def test_names_that_were_made_up_for_a_file_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit of columns x1, x2, x3, x4, and files whose columns are called x0, x1, x2, x3 for want of names."""
    in_process(monkeypatch)
    frame = pd.DataFrame(np.column_stack([Y, X]), columns=["x1", "x2", "x3", "x4"])
    data = dkrr.ingest(frame, tmp_path / "train.zarr", target="x1")
    dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(data).save(tmp_path / "model.zarr")
    np.save(tmp_path / "new.npy", frame.to_numpy())
    found = run("evaluate", tmp_path / "model.zarr", tmp_path / "new.npy", "--json")
    assert json.loads(found.stdout)["r2"] > 1 - 1e-12
    given = tmp_path / "new.npy", data.path, "--append"
    run("ingest", *given, "--target", "x1", exits=2, said="'x1' is a name")
    run("ingest", *given)
    np.testing.assert_array_equal(dkrr.open_dataset(data.path).targets.read(120, 240)[:, 0], Y)
    for told in ('target = "x1"', 'target = "x1"\nfeatures = ["x2", "x3", "x4"]'):
        file = job(tmp_path, csv(frame, tmp_path / "train.csv"), f'path = "{tmp_path}/new.npy"', told)
        file.write_text(file.read_text().replace("runs/a", f"runs/{len(told)}"))
        assert json.loads(run("fit", file, "--json").stdout)["score"]["r2"][0] > 0.99


def test_a_target_without_a_name_is_the_one_column_that_is_left(tmp_path: Path) -> None:
    data = dkrr.ingest(FRAME[["a", "b", "c"]], tmp_path / "train.zarr", y=Y)
    two = csv(FRAME.assign(z=FRAME["y"], y=-100.0), tmp_path / "two.csv")
    run("ingest", two, data.path, "--append", exits=4, said="2 columns besides the features ('y', 'z'); 1 expected")
    run("ingest", csv(FRAME.rename(columns={"y": "z"}), tmp_path / "one.csv"), data.path, "--append")
    np.testing.assert_array_equal(dkrr.open_dataset(data.path).targets.read(120, 240)[:, 0], Y)


def test_columns_that_may_have_been_chosen_in_either_order_are_refused(tmp_path: Path) -> None:
    data = dkrr.ingest(FRAME, tmp_path / "train.zarr", target="y", features=["c", "a"])
    dkrr.KernelRidge(kernel="linear", alpha=1e-8).fit(data).save(tmp_path / "model.zarr")
    chosen = csv(FRAME[["c", "a", "y"]], tmp_path / "chosen.csv", header=False)
    run("evaluate", tmp_path / "model.zarr", chosen, exits=4, said="chosen in another order")
    run("ingest", chosen, data.path, "--append", exits=4, said="chosen in another order")
    run("evaluate", tmp_path / "model.zarr", csv(FRAME, tmp_path / "all.csv", header=False))


@pytest.mark.parametrize("options", [{}, {"one_hot": True}], ids=["numbers", "classes"])
def test_a_copy_of_a_data_set_knows_its_columns_as_it_does(options: dict[str, Any], tmp_path: Path) -> None:
    rows = FRAME[["y", "a", "b", "c"]].assign(y=np.where(Y > 0, 1.0, 2.0) if options else Y, w=1.0)
    source = csv(rows, tmp_path / "rows.csv", header=False)
    first = dkrr.ingest(source, tmp_path / "first.zarr", target=0, weight=4, **options)
    for folder, given in (("copy", {}), ("chosen", {"features": [2, 0]})):
        copy = dkrr.ingest(first, tmp_path / f"{folder}.zarr", **given)
        assert (copy.made_up, copy.named_targets) == (first.made_up, ())
        assert copy.places == (((3, 1) if given else (1, 2, 3)), (0,), (4,), (2,) if given else ())
    dkrr.KernelRidge(alpha=1e-8).fit(tmp_path / "copy.zarr").save(tmp_path / "model.zarr")
    new = csv(rows.iloc[:, :4], tmp_path / "new.csv", header=["y", "x0", "x1", "x2"])
    said = json.loads(run("evaluate", tmp_path / "model.zarr", new, "--json").stdout)
    assert said["accuracy"] > 0.8 if options else said["r2"] > 0.999


@pytest.mark.parametrize("given", [["--target", "-1"], []], ids=["target", "nothing"])
@pytest.mark.parametrize("names", [(False, ["x3", "x0", "x1", "x2"]), (["x3", "x0", "x1", "x2"], False)])
def test_names_that_nobody_gave_match_none_of_a_batch(given: list[str], names: tuple[Any, Any], tmp_path: Path) -> None:
    first, batch = (csv(FRAME, tmp_path / f"{k}.csv", header=header) for k, header in enumerate(names))
    run("ingest", first, tmp_path / "rows.zarr", "--target", "-1")
    run("ingest", batch, tmp_path / "rows.zarr", "--append", *given)
    both = dkrr.open_dataset(tmp_path / "rows.zarr").read_parts(0, 240)
    np.testing.assert_array_equal(both["X"][120:], both["X"][:120])
    np.testing.assert_array_equal(both["y"][120:], both["y"][:120])


@pytest.mark.parametrize("name", ["rows.npy", "rows.csv"])
def test_a_batch_without_names_has_its_columns_where_the_first_rows_had_them(name: str, tmp_path: Path) -> None:
    data = dkrr.ingest(csv(FRAME, tmp_path / "first.csv"), tmp_path / "rows.zarr", target="b", features=["y", "a"])
    rows = FRAME.to_numpy()
    np.save(tmp_path / name, rows) if name.endswith("npy") else np.savetxt(tmp_path / name, rows, "%.17g", ",")
    both = dkrr.ingest(tmp_path / name, data.path, append=True).read_parts(0, 240)
    np.testing.assert_array_equal(both["X"][120:], rows[:, [3, 0]])
    np.testing.assert_array_equal(both["y"][120:, 0], rows[:, 1])


def test_an_array_of_a_data_set_that_has_other_rows_than_it_is_not_read_for_it(tmp_path: Path) -> None:
    data = dkrr.ingest(FRAME, tmp_path / "rows.zarr", target="y")
    assert dkrr.ingest(data.path + "/X", tmp_path / "same.zarr").num_rows == 120
    run("ingest", FRAME.to_csv(tmp_path / "b.csv", index=False) or tmp_path / "b.csv", data.path, "--append")
    run("ingest", data.path, "--keep-rows", 50)
    run("ingest", data.path + "/X", tmp_path / "old.zarr", exits=4, said="name the data set")
    assert not (tmp_path / "old.zarr").exists()
    group = zarr.open_group(data.path, mode="r")
    with pytest.raises(dkrr.DkrrError, match="name the data set"):
        dkrr.KernelRidge().fit(group["X"], Y)
    assert dkrr.ingest(group, tmp_path / "new.zarr").digest == dkrr.open_dataset(data.path).digest


# --- frames whose columns have names that are no text, and frames of targets ----------------------------------------

COLUMN_LABELS: dict[str, Any] = {
    "wavelengths": [1100.0, 1101.5, 1103.0],
    "years": [2001, 2002, 2003],
    "pairs": pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)]),
    "numbers": [2, 1, 0],
}
TARGETS = pd.DataFrame({"p": Y, "q": -3 * X[:, 0]})
REGRESSORS: dict[str, Callable[[], Any]] = {
    "memory": lambda: dkrr.KernelRidge(alpha=1e-8),
    "tiles": lambda: dkrr.KernelRidge(alpha=1e-8, tile_size=50),
    "primal": lambda: dkrr.KernelRidge(alpha=1e-8, solver="primal"),
    "grid": lambda: dkrr.KernelRidgeCV(alphas=[1e-8]),
    "svr": lambda: dkrr.KernelSVR(kernel="linear", C=1e5, epsilon=1e-5, tol=1e-4),
}


@pytest.mark.parametrize("labels", COLUMN_LABELS)
@pytest.mark.parametrize("name", REGRESSORS)
def test_names_of_columns_that_are_no_text_are_names(name: str, labels: str, tmp_path: Path) -> None:
    frame = pd.DataFrame(X, columns=COLUMN_LABELS[labels])
    mixed = frame[[frame.columns[j] for j in (2, 0, 1)]]
    est = REGRESSORS[name]().fit(frame, Y)
    est.save(tmp_path / "model.zarr")
    lazy = dd.from_pandas(mixed.set_axis(pd.Index(map(str, mixed.columns)), axis=1), npartitions=2)
    for found in (est.predict(mixed), dkrr.load_model(tmp_path / "model.zarr").predict(mixed), est.predict(lazy)):
        np.testing.assert_allclose(np.asarray(found), Y, atol=1e-3)
    data = csv(mixed.set_axis(pd.Index(map(str, mixed.columns)), axis=1), tmp_path / "new.csv")
    run("predict", tmp_path / "model.zarr", data, "--header", "-o", tmp_path / "out.npy")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), Y, atol=1e-3)
    with pytest.raises(dkrr.DkrrError, match="which the fit had"):
        est.predict(frame.rename(columns=lambda label: "other", level=0 if labels == "pairs" else None).iloc[:, :1])
    np.testing.assert_allclose(est.predict(X), Y, atol=1e-3)


def test_numbers_of_columns_in_another_order_may_be_names_or_places() -> None:
    plain, moved = pd.DataFrame(X), pd.DataFrame(X)[[2, 0, 1]]
    est = dkrr.KernelRidge(alpha=1e-8).fit(plain, TARGETS.set_axis([0, 1], axis=1))
    np.testing.assert_allclose(est.predict(plain)[:, 0], Y, atol=1e-6)
    with pytest.raises(
        dkrr.DkrrError, match=r"X has columns '2', '0', '1' and earlier rows had '0', '1', '2': names, or"
    ):
        est.predict(moved)
    with pytest.raises(dkrr.DkrrError, match=r"y has targets '1', '0' and earlier rows had '0', '1': names, or"):
        est.score(X, pd.DataFrame(TARGETS.to_numpy())[[1, 0]])
    est.fit(moved, Y)
    np.testing.assert_allclose(est.predict(moved), Y, atol=1e-6)
    np.testing.assert_allclose(est.predict(plain.assign(more=0.0)), Y, atol=1e-6)
    with pytest.raises(dkrr.DkrrError, match="names, or places"):
        est.predict(plain)


def test_such_numbers_in_files_and_data_sets_are_refused_as_in_frames(tmp_path: Path) -> None:
    moved, words = pd.DataFrame(X)[[2, 0, 1]].rename(columns=str), "names, or places"
    est = dkrr.KernelRidge(alpha=1e-8).fit(pd.DataFrame(X), TARGETS.to_numpy())
    est.save(tmp_path / "model.zarr")
    moved.to_parquet(tmp_path / "moved.parquet")
    for rows in (str(tmp_path / "moved.parquet"), dkrr.ingest(moved, tmp_path / "moved.zarr")):
        with pytest.raises(dkrr.DataError, match=words):
            est.predict(rows)
    given = tmp_path / "moved.parquet", "-o", tmp_path / "out.npy"
    run("predict", tmp_path / "model.zarr", *given, exits=4, said=words)
    moved[["0", "1", "2"]].to_parquet(tmp_path / "in_order.parquet")
    np.testing.assert_allclose(est.predict(str(tmp_path / "in_order.parquet"))[:, 0], Y, atol=1e-6)


def test_rows_with_such_numbers_are_not_appended_to_rows_without_names(tmp_path: Path) -> None:
    moved, plain = pd.DataFrame(X)[[2, 0, 1]].rename(columns=str), tmp_path / "plain.zarr"
    dkrr.ingest(X, plain, y=TARGETS.to_numpy())
    with pytest.raises(dkrr.DataError, match=r"features '2', '0', '1' .*names, or places"):
        dkrr.ingest(moved, plain, y=TARGETS.to_numpy(), append=True)
    with pytest.raises(dkrr.DataError, match=r"targets '1', '0' .*names, or places"):
        dkrr.ingest(X, plain, y=TARGETS.set_axis(["1", "0"], axis=1), append=True)


def test_such_numbers_of_targets_are_refused_where_a_file_is_evaluated(tmp_path: Path) -> None:
    model, data = tmp_path / "model.zarr", tmp_path / "data.parquet"
    rows, targets = pd.DataFrame(X, columns=["a", "b", "c"]), TARGETS.set_axis([0, 1], axis=1)
    dkrr.KernelRidge(alpha=1e-8).fit(rows, targets).save(model)
    both = pd.concat([rows, targets], axis=1).rename(columns=str)
    both.to_parquet(data)
    assert float(run("evaluate", model, data, "--metric", "rmse").stdout.split()[1]) < 1e-6
    both[["a", "b", "c", "1", "0"]].to_parquet(data)
    run("evaluate", model, data, exits=4, said="targets '1', '0'")
    dkrr.KernelRidge(alpha=1e-8).fit(pd.DataFrame(X), Y).save(tmp_path / "plain.zarr")
    pd.DataFrame(np.column_stack([Y, X]), columns=["3", "0", "1", "2"]).to_parquet(data)
    run("evaluate", tmp_path / "plain.zarr", data, exits=4, said="columns '3', '0', '1', '2'")


@pytest.mark.parametrize("labels", [[True, False, None], [pd.NA, 10, 11], [0, pd.NA, 2], [0.0, 1.0, 2.0]], ids=str)
def test_labels_of_any_kind_are_names(labels: list[Any]) -> None:
    frame = pd.DataFrame(X, columns=pd.Index(labels, dtype=object))
    est = dkrr.KernelRidge(alpha=1e-8).fit(frame, pd.Series(Y, name=labels[0]))
    np.testing.assert_allclose(est.predict(frame.iloc[:3, [2, 1, 0]]), Y[:3], atol=1e-6)


def test_the_columns_of_a_given_matrix_are_rows_in_any_order() -> None:
    matrix, order = pd.DataFrame(X @ X.T), RNG.permutation(120)
    est = dkrr.KernelRidge(kernel="precomputed", alpha=1e-8).fit(matrix.iloc[order, order], Y[order])
    np.testing.assert_allclose(est.predict(matrix.iloc[:, order]), Y, atol=1e-6)


@pytest.mark.parametrize("rows", ["frames", "data set", "weights", "dask"])
@pytest.mark.parametrize("name", REGRESSORS)
def test_targets_of_a_frame_are_compared_by_name(name: str, rows: str, tmp_path: Path) -> None:
    est, frame = REGRESSORS[name](), FRAME[["a", "b", "c"]]
    if rows == "frames" or name == "svr":
        est.fit(frame, TARGETS)
    elif rows == "dask":
        est.fit(dd.from_pandas(frame, npartitions=2), dd.from_pandas(TARGETS, npartitions=2))
    else:
        both = frame.assign(p=TARGETS["p"], q=TARGETS["q"])
        weight = np.ones(120) if rows == "weights" else None
        est.fit(dkrr.ingest(both, tmp_path / "rows.zarr", target=["p", "q"]), sample_weight=weight)
    other = TARGETS.assign(more=0.0)[["q", "more", "p"]]
    assert est.score(frame, other) > 0.999
    assert est.score(frame, other) == est.score(frame, TARGETS.to_numpy())
    if hasattr(est, "interval_coverage"):
        assert est.interval_coverage(frame, other).min() > 0.8
    with pytest.raises(dkrr.DkrrError, match=r"y has no targets 'p', which the fit had; it has 'r'"):
        est.score(frame, TARGETS.rename(columns={"p": "r"}))
    est.save(tmp_path / "model.zarr")
    file = csv(MIXED.assign(p=TARGETS["p"], q=TARGETS["q"]), tmp_path / "new.csv")
    assert json.loads(run("evaluate", tmp_path / "model.zarr", file, "--json").stdout)["r2"] > 0.999


def test_a_data_set_that_is_given_weights_keeps_what_its_columns_are(tmp_path: Path) -> None:
    first = FRAME[["y", "a", "b", "c"]]
    data = dkrr.ingest(csv(first, tmp_path / "rows.csv", header=False), tmp_path / "rows.zarr", target=0)
    dkrr.KernelRidge(alpha=1e-8).fit(data, sample_weight=np.ones(120)).save(tmp_path / "model.zarr")
    said = run("evaluate", tmp_path / "model.zarr", csv(first, tmp_path / "new.csv"), "--json").stdout
    assert json.loads(said)["r2"] > 0.999
    one_hot = dkrr.ingest(FRAME.assign(y=np.where(Y > 0, "up", "down")), tmp_path / "u.zarr", target="y", one_hot=True)
    est = dkrr.KernelRidge(alpha=1e-8).fit(one_hot, sample_weight=np.ones(120))
    est.save(tmp_path / "classes.zarr")
    loaded = dkrr.load_model(tmp_path / "classes.zarr")
    assert (loaded.classes, loaded.target_names) == (["down", "up"], ["y=down", "y=up"])
