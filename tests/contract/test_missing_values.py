"""``missing = "drop"``: rows without a value are left out, counted, and never shift what is said about the others."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dkrr
from dkrr.dataset import drop_generations, keep_last, row_hash_fraction
from dkrr.errors import DataError, ParameterError, RefusedError, StoreMismatchError
from tests.contract.helpers import run
from tests.faults import flip
from tests.jobs.retrain.project import Project, in_process, rows_of

ROWS = 60
GONE = [0, 7, 8, 31, 59]
KEPT = np.setdiff1d(np.arange(ROWS), GONE)


def values() -> np.ndarray:
    """Columns a, b, y and held, where a is the number of the row and held says whether it is held out."""
    a = np.arange(float(ROWS))
    return np.column_stack([a, np.sin(a), np.cos(a), a % 5 == 0])


def with_gaps() -> pd.DataFrame:
    frame = pd.DataFrame(values(), columns=["a", "b", "y", "held"])
    frame.loc[GONE[:3], "b"] = np.nan
    frame.loc[GONE[3:], "y"] = np.nan
    return frame


SOURCES: dict[str, Any] = {
    "csv": lambda p: (with_gaps().to_csv(p / "s.csv", index=False), p / "s.csv")[1],
    "parquet": lambda p: (with_gaps().to_parquet(p / "s.parquet"), p / "s.parquet")[1],
    "npy": lambda p: (np.save(p / "s.npy", with_gaps().to_numpy()), p / "s.npy")[1],
    "frame": lambda p: with_gaps(),
    "nullable frame": lambda p: with_gaps().convert_dtypes(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_rows_with_missing_values_are_left_out_and_counted(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = SOURCES[kind](tmp_path)
    with pytest.raises(DataError, match="5 values that are NaN"):
        dkrr.ingest(source, tmp_path / "d.zarr", target=2, features=[0, 1])
    with caplog.at_level(logging.WARNING, "dkrr"):
        dataset = dkrr.ingest(source, tmp_path / "d.zarr", target=2, features=[0, 1], missing="drop")
    assert np.array_equal(dataset.read(0, len(KEPT)), values()[KEPT, :2])
    where = "line 2" if kind == "csv" else "row 0"
    assert f"5 of 60 rows of {source if isinstance(source, Path) else 'X'} have missing values" in caplog.text
    assert f"the first in {where}" in caplog.text
    assert dataset.num_dropped == 5
    assert dkrr.open_dataset(tmp_path / "d.zarr").kept.tolist() == [i in KEPT for i in range(ROWS)]
    # a column that is not used may lack values
    assert dkrr.ingest(source, tmp_path / "a.zarr", features=[0, 3]).num_rows == ROWS


def test_the_command_says_how_many(tmp_path: Path) -> None:
    source = SOURCES["csv"](tmp_path)
    run("ingest", source, tmp_path / "d.zarr", "--target", "y", "--missing", "drop", said="5 rows with missing values")
    assert "5 dropped for missing values" in run("info", tmp_path / "d.zarr").stdout
    run("ingest", source, tmp_path / "e.zarr", "--target", "y", exits=4, said="--missing drop")


def test_what_is_no_missing_value_is_still_an_error(tmp_path: Path) -> None:
    frame = with_gaps()
    frame.loc[40, "a"] = np.inf
    with pytest.raises(DataError, match=r"1 value that is .* inf at row 40, column 0") as caught:
        dkrr.ingest(frame, tmp_path / "d.zarr", missing="drop")
    assert caught.value.row == 40
    with pytest.raises(DataError, match="all 60 rows of X have missing values"):
        dkrr.ingest(frame.assign(a=np.nan), tmp_path / "d.zarr", missing="drop")
    with pytest.raises(ParameterError, match="'error' or 'drop' expected"):
        dkrr.ingest(frame, tmp_path / "d.zarr", missing="fill")  # type: ignore[arg-type]
    assert not (tmp_path / "d.zarr").exists()


def test_classes_and_weights_of_rows_that_are_left_out_do_not_count(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {"x": [1.0, 2, np.nan, 4, 5], "k": ["u", None, "only here", "v", "u"], "w": [1.0, 2, 3, np.nan, 5]}
    )
    dataset = dkrr.ingest(frame, tmp_path / "d.zarr", target="k", weight="w", one_hot=True, missing="drop")
    assert dataset.classes == ("u",)
    assert dataset.read(0, 2)[:, 0].tolist() == [1, 5]
    assert dataset.weight is not None
    assert dataset.weight.read(0, 2)[:, 0].tolist() == [1, 5]


def held_out(folder: Path, data: Path, evaluate: dict[str, Any], **options: Any) -> list[float]:
    """Column a of the rows that a fit holds out."""
    from dkrr.jobs.prepare import prepare
    from dkrr.jobs.spec import JobSpec

    document = {"data": {"path": str(data), "target": "y", "features": ["a", "b"], **options}, "evaluate": evaluate}
    prepared = prepare(JobSpec.from_dict(document, base=folder), str(folder / "store"))
    assert prepared.test is not None
    found = prepared.test.read(0, prepared.test.num_rows)[:, 0].tolist()
    train = prepared.train.read(0, prepared.train.num_rows)[:, 0].tolist()
    assert sorted(found + train) == KEPT.tolist() or not options
    return found


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_is_held_out_is_told_by_the_rows_of_the_file(kind: str, tmp_path: Path) -> None:
    whole = pd.DataFrame(values(), columns=["a", "b", "y", "held"])
    whole.to_parquet(tmp_path / "whole.parquet")
    data = SOURCES[kind](tmp_path)
    np.save(tmp_path / "mask.npy", values()[:, 3] == 1)
    cases: list[dict[str, Any]] = [{"fraction": 0.3}, {"mask": "held"}, {"mask": "mask.npy"}]
    for evaluate in cases:
        expected = [row for row in held_out(tmp_path, tmp_path / "whole.parquet", evaluate) if row in KEPT]
        assert held_out(tmp_path, data, evaluate, missing="drop") == expected
    np.save(tmp_path / "short.npy", values()[KEPT, 3] == 1)
    with pytest.raises(DataError, match=r"55 rows; 60 expected.*dropped for missing values included"):
        held_out(tmp_path, data, {"mask": "short.npy"}, missing="drop")


def test_row_numbers_stay_when_rows_come_and_go(tmp_path: Path) -> None:
    frame, location = with_gaps(), tmp_path / "d.zarr"
    options: dict[str, Any] = {"target": "y", "features": ["a", "b"], "missing": "drop"}
    for start in (0, 20, 40):
        dkrr.ingest(frame[start : start + 20], location, append=True, **options)
    whole = dkrr.open_dataset(location)
    assert [generation.first_row for generation in whole.generations] == [0, 20, 40]
    assert np.array_equal(np.flatnonzero(whole.kept), KEPT)
    copy = dkrr.ingest(whole, tmp_path / "copy.zarr")
    assert np.array_equal(copy.kept, whole.kept)
    last = keep_last(location, rows=25)  # begins inside a generation, behind the rows 29 and 30 and before 31
    for generation in last.generations:
        numbers = generation.first_row + np.flatnonzero(generation.kept)
        assert last.read(generation.start, generation.n)[:, 0].tolist() == numbers.tolist()
    kept = drop_generations(location, [2])
    assert kept.read(0, kept.num_rows)[:, 0].tolist() == [i for i in KEPT if i >= 40]
    more = dkrr.ingest(frame[1:3], location, append=True, **options)
    assert more.generations[-1].first_row == 60


@pytest.mark.parametrize("holdout", ["fraction", "mask"])
def test_batches_lose_rows_and_held_out_rows_stay_the_same(
    holdout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p", data={"missing": "drop", "features": ["a", "b"]}, gate={"tolerance": 9.0})
    if holdout == "mask":
        project.document["holdout"] = {"mask": "c"}
    rows = np.concatenate([rows_of(night, 120) for night in (1, 2)])
    rows[:, 2] = np.arange(240) % 4 == 0
    chosen = row_hash_fraction(0, 240, 0.2) if holdout == "fraction" else rows[:, 2] == 1
    gone = np.zeros(240, dtype=bool)
    gone[[0, 5, 6, 130, 200, 239]] = True

    def change(batch: np.ndarray, night: int) -> np.ndarray:
        part = slice(120 * night - 120, 120 * night)
        batch[:, 2] = rows[part, 2]
        batch[gone[part], 1] = np.nan
        return batch

    def fitted() -> list[float]:
        model = dkrr.load_model(project.model.resolve().model_path)
        assert model.x_fit is not None
        assert model.scaling is not None
        x = model.x_fit.read(0, model.num_rows) * model.scaling.x_std + model.scaling.x_mean
        return sorted(x[:, 0])

    for night in (1, 2):
        project.deliver(f"n{night}", seed=night, change=partial(change, night=night))
        assert project.run().outcome == "promoted"
    assert np.allclose(fitted(), sorted(rows[~gone & ~chosen, 0]))
    project.document["window"] = {"rows": 150}  # begins in the middle of the first batch
    assert project.run().outcome == "promoted"
    first = np.flatnonzero(~gone)[-150]
    assert np.allclose(fitted(), sorted(rows[first:][~gone[first:] & ~chosen[first:], 0]))


def test_init_predict_and_evaluate(tmp_path: Path) -> None:
    data = SOURCES["csv"](tmp_path)
    job = tmp_path / "job.toml"
    run("init", data, "--target", "y", "--missing", "drop", "-o", job)
    assert 'missing = "drop"' in job.read_text()
    assert "# one_hot = true" in job.read_text()  # targets that are missing are no words
    dataset = dkrr.ingest(data, tmp_path / "d.zarr", target="y", features=["a", "b", "held"], missing="drop")
    model = tmp_path / "model.zarr"
    dkrr.KernelRidge(kernel="rbf").fit(dataset).save(model)
    data = tmp_path / "new.csv"
    with_gaps()[["a", "b", "held", "y"]].to_csv(data, index=False)
    # a prediction for every row, or none
    with_gaps()[["a", "b", "held"]].to_csv(tmp_path / "x.csv", index=False)
    run("predict", model, tmp_path / "x.csv", "-o", tmp_path / "p.csv", exits=4, said="3 values that are NaN")
    assert not (tmp_path / "p.csv").exists()
    run("evaluate", model, data, "--missing", "drop", "--json", said='"rows": 55')


def test_decimal_commas_from_init_to_predict(tmp_path: Path) -> None:
    from dkrr.jobs.prepare import open_data
    from dkrr.jobs.spec import JobSpec

    table = np.random.default_rng(0).standard_normal((60, 3))
    lines = "\n".join(";".join(map(str, row)) for row in table.tolist()).replace(".", ",")
    data, new, job = tmp_path / "t.csv", tmp_path / "new.csv", tmp_path / "job.toml"
    data.write_text("a;b;y\n" + lines)
    new.write_text("a;b\n" + "\n".join(line.rpartition(";")[0] for line in lines.split("\n")))
    run("init", data, "-o", job, exits=4)
    run("init", data, "--decimal", ",", "-o", job)
    dataset = open_data(JobSpec.load(job).data, tmp_path / "store")
    assert np.array_equal(dataset.read(0, 60), table[:, :2])
    model = dkrr.KernelRidge(kernel="rbf").fit(dataset)
    model.save(tmp_path / "model.zarr")
    run("predict", tmp_path / "model.zarr", new, "--decimal", ",", "-o", tmp_path / "p.npy")
    rows = pd.DataFrame(table[:, :2], columns=["a", "b"])
    assert np.allclose(np.load(tmp_path / "p.npy"), model.predict(rows), rtol=1e-12)


@pytest.mark.parametrize("label", ["NA", ""])
def test_rows_of_which_none_has_a_class(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)
    project = Project(tmp_path / "p", data={"target": "lab", "one_hot": True, "missing": "drop", "standardize": False})
    path = project.folder / "incoming/n1.csv"
    path.write_text(f"a,lab\n1.5,{label}\n2.5,{label}\n")
    run(
        "ingest",
        path,
        tmp_path / "d.zarr",
        "--target",
        "lab",
        "--one-hot",
        "--missing",
        "drop",
        exits=4,
        said="all 2 rows of",
    )
    with pytest.raises(RefusedError, match=r"n1.csv: all 2 rows of .* have missing values"):
        project.run()
    assert project.run().outcome == "nothing new"


@pytest.mark.parametrize("label", [None, "first"])
def test_the_same_rows_with_gaps_in_other_places_are_others(label: str | None, tmp_path: Path) -> None:
    """A mask counts the rows that were left out."""
    frame, options = with_gaps(), {"target": "y", "missing": "drop", "append": label is not None, "label": label}
    dkrr.ingest(frame, tmp_path / "d.zarr", **options)
    dkrr.ingest(frame, tmp_path / "d.zarr", **options)
    gaps_last = pd.concat([frame.drop(index=GONE), frame.loc[GONE]])
    with pytest.raises(StoreMismatchError):
        dkrr.ingest(gaps_last, tmp_path / "d.zarr", **options)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (("--drop-generation", "11"), 4),
        (("--drop-generation", "1", "--drop-generation", "2", "--keep-rows", "5"), 4),
        (("--keep-rows", "0"), 2),
        (("--keep-generations", "-1"), 2),
    ],
)
def test_a_command_that_takes_rows_out_wrongly_appends_none(wrong: tuple[str, ...], code: int, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", values())
    run("ingest", tmp_path / "rows.npy", tmp_path / "d.zarr")
    run("ingest", tmp_path / "rows.npy", tmp_path / "d.zarr", "--append", *wrong, exits=code)
    assert dkrr.open_dataset(tmp_path / "d.zarr").num_rows == ROWS


def test_after_an_interrupt_the_hint_does_not_append_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "rows.npy", values())
    run("ingest", tmp_path / "rows.npy", tmp_path / "d.zarr")
    window = "--keep-rows", 12

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(dkrr.dataset, "keep_last", interrupted)
        append = "ingest", tmp_path / "rows.npy", tmp_path / "d.zarr", "--append", *window
        said = run(*append, exits=75, said="has been appended: leave it out next time").stderr
        assert "the same command again" not in said
        said = run("ingest", tmp_path / "d.zarr", *window, exits=75).stderr
        assert "the same command again" in said
    run("ingest", tmp_path / "d.zarr", *window)
    assert dkrr.open_dataset(tmp_path / "d.zarr").num_rows == 12


def test_a_damaged_data_set_that_was_appended_to_says_so(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", values())
    run("ingest", tmp_path / "rows.npy", tmp_path / "d.zarr")
    flip(tmp_path / "d.zarr/X/c/0/0")
    command = ("ingest", tmp_path / "rows.npy", tmp_path / "d.zarr", "--append", "--drop-generation", "1")
    shown = run(*command, exits=None)
    assert ("has been appended" in shown.output) == (dkrr.open_dataset(tmp_path / "d.zarr").num_rows > ROWS)
