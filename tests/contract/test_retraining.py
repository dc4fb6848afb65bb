"""Retraining left alone overnight: nothing delivered is lost, nothing harmless refused, nothing changed unseen."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result

import dkrr
from dkrr.cli import main
from dkrr.dataset.dataset import unpack
from dkrr.errors import DataError, InterruptedRunError, RefusedError, StoreError
from dkrr.jobs import toml
from dkrr.jobs.gate import judge
from dkrr.jobs.history import History
from dkrr.jobs.retrain import RetrainSummary
from dkrr.jobs.retrain_spec import GateSpec, deliveries
from dkrr.store.files import children
from dkrr.store.objects import put_file
from tests.contract.helpers import killed_while_removing
from tests.contract.helpers import run as cli
from tests.faults import contents, failing_at
from tests.jobs.retrain.project import COLUMNS, Project, in_process, rows_of
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


# --- addresses --------------------------------------------------------------------------------------------------------


def test_the_run_of_the_last_fit_stays_at_an_address_with_settings(bucket: Bucket, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"registry": bucket.url("models")})
    run = project.nights(1).fit["run"]
    assert children(bucket.url("models/demo/retrain/runs")) == [run.partition("?")[0].rpartition("/")[2]]
    later = project.nights(2).fit["run"]
    assert later != run
    assert children(bucket.url("models/demo/retrain/runs")) == [later.partition("?")[0].rpartition("/")[2]]


@pytest.mark.parametrize("place", ["folder", "address"])
def test_held_out_rows_that_were_exchanged_judge_again(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    project = Project(folder)
    held_out = project.aside("held-out", seed=7)
    project.deliver("n1", seed=1)
    path = str(held_out)
    if place == "address":
        there: Bucket = request.getfixturevalue("bucket")
        path = there.url("held-out.csv")
        put_file(there.url(""), "held-out.csv", held_out)
    project.document["holdout"] = {"path": path}
    first = project.run()
    assert project.is_done()

    project.deliver("other", seed=8).rename(held_out)
    if place == "address":
        put_file(there.url(""), "held-out.csv", held_out)
    again = project.run()
    assert (again.outcome, again.num_rows) == ("promoted", first.num_rows)
    assert again.fit["score"]["rmse"] != first.fit["score"]["rmse"]
    assert project.is_done()


@pytest.mark.parametrize("place", ["folder", "address"])
@pytest.mark.parametrize("kind", ["data set", "Parquet files in a folder"])
def test_held_out_rows_in_a_folder_count_with_all_that_is_in_it(
    kind: str, place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1)
    path = str(project.folder / "test") if place == "folder" else request.getfixturevalue("bucket").url("test")

    def put(seed: int) -> None:
        frame = pd.DataFrame(rows_of(seed, 60), columns=list(COLUMNS))
        if kind == "data set":
            dkrr.ingest(frame, path, target="y", append=True)
        elif place == "folder":
            (project.folder / "test/site=1").mkdir(parents=True, exist_ok=True)
            frame.to_parquet(project.folder / "test/site=1/part.parquet")
        else:
            frame.to_parquet(there := tmp_path / "part.parquet")
            put_file(path, "site=1/part.parquet", there)

    put(7)
    project.document["holdout"] = {"path": path}
    project.run()
    assert project.is_done()
    put(8)
    assert project.run().outcome != "nothing new"


def test_held_out_rows_that_are_gone_are_missed(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    held_out = project.aside("held-out", seed=7)
    project.document["holdout"] = {"path": str(held_out)}
    project.nights(1)
    held_out.unlink()
    with pytest.raises(StoreError, match=r"nothing is at .*held-out\.csv"):
        project.run()


def test_a_batch_that_is_exchanged_at_an_address_before_it_is_read_waits(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": bucket.url("incoming")})
    first, second = (project.deliver(f"n{seed}", seed=seed) for seed in (1, 2))
    put_file(bucket.url("incoming"), "n.csv", first)

    def late(self: History, *arguments: Any) -> Any:
        put_file(bucket.url("incoming"), "n.csv", second)
        return validate(self, *arguments)

    validate = History.validate
    with monkeypatch.context() as patch:
        patch.setattr(History, "validate", late)
        with pytest.raises(InterruptedRunError, match="was changed while it was read"):
            project.run()
    assert project.run().outcome == "promoted"
    assert np.array_equal(project.dataset.X.read(0, 1), rows_of(2, 1)[:, :3])


def test_what_is_named_after_an_address_has_its_last_part(bucket: Bucket, tmp_path: Path) -> None:
    put_file(bucket.url("data"), "wine.csv", Project(tmp_path / "p").deliver("wine", seed=1))
    result = CliRunner().invoke(main, ["init", bucket.url("data/wine.csv"), "--target", "y"])
    assert 'directory = "runs/wine' in result.stdout, result.output


# --- drift ------------------------------------------------------------------------------------------------------------


def with_flag(share: float, value: float = 1.0, otherwise: float = 0.0) -> Callable[[Any], Any]:
    """The rows with a feature c that has ``value`` in a share of them and is constant otherwise."""

    def change(rows: Any) -> Any:
        rows[:, 2] = otherwise
        rows[: round(share * len(rows)), 2] = value
        return rows

    return change


@pytest.mark.parametrize(
    ("first", "second", "is_drift"),
    [
        (with_flag(0.0), with_flag(0.025), False),
        (with_flag(0.0), with_flag(0.025, -1000.0), False),
        (with_flag(0.025), with_flag(0.0), False),
        (with_flag(1 / 120, 1000.0), with_flag(0.1, 1000.0), False),
        (with_flag(0.0), with_flag(0.8), True),
        (with_flag(0.0), with_flag(0.8, -1.0), True),
        (with_flag(0.025), with_flag(0.025, 1e6), True),  # an entry that was never so large
        (lambda rows: rows, with_flag(0.0, otherwise=-1.0), True),  # a sensor that stands still at its mean
    ],
)
def test_a_rare_flag_is_no_drift_and_a_column_that_was_constant_and_is_not_any_more_is(
    first: Callable[[Any], Any], second: Callable[[Any], Any], is_drift: bool, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    for name, change in (("n1", first), ("n2", second)):
        project.deliver(name, seed=int(name[1]), change=change)
        if is_drift and name == "n2":
            project.is_refused(r"n2.csv: feature c: ")
        else:  # neither the batch nor the data set that has grown by it
            assert project.run().outcome == "promoted"


# --- a data set that was lost -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, Path]:
    """A data set made of a first file, two nights, and a model in production; and a copy of it all."""
    folder = tmp_path_factory.mktemp("nights")
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_process(monkeypatch)
        project = Project(folder / "p", gate={"tolerance": 9.0}, data={"path": "first.csv"})
        project.aside("first", seed=1)
        assert project.nights(2, 3).outcome == "promoted"
    return project, Path(shutil.copytree(project.folder, folder / "copy"))


@pytest.fixture
def project(made: tuple[Project, Path]) -> Project:
    """The same, as it was in the beginning."""
    found, saved = copy.copy(made[0]), made[1]
    found.document = copy.deepcopy(found.document)
    shutil.rmtree(found.folder)
    shutil.copytree(saved, found.folder)
    return found


def dropped(project: Project, number: int) -> None:
    """Somebody takes a generation out."""
    result = CliRunner().invoke(main, ["ingest", "--drop-generation", str(number), str(project.rows)])
    assert result.exit_code == 0, result.output


def lost(project: Project, *what: str) -> None:
    """The data set, or the ledger of the batches, is gone."""
    if "rows" in what:
        shutil.rmtree(project.rows)
    if "ledger" in what:
        (project.folder / "models/demo/retrain/batches.json").unlink()


def same_rows(before: dkrr.Dataset, after: dkrr.Dataset) -> bool:
    return (after.digest, after.digest_y, after.generations) == (before.digest, before.digest_y, before.generations)


@pytest.mark.parametrize("case", ["rows", "rows, ledger", "rows, ledger, a file was renamed"])
def test_what_a_lost_data_set_held_is_appended_again(
    case: str, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    production, before = project.production, project.dataset
    lost(project, *case.split(", "))
    if "renamed" in case:
        (project.folder / "incoming/n2.csv").rename(project.folder / "incoming/other.csv")
    first = str(project.folder / "first.csv")
    assert would(project) == {name: ("appended", "") for name in (first, "n2.csv", "n3.csv")}
    summary = project.run()
    assert [(batch["name"], batch["outcome"]) for batch in summary.batches] == [
        ("n2.csv", "appended"), ("n3.csv", "appended")
    ]  # fmt: skip
    assert ("which generations had been dropped" in caplog.text) == ("ledger" in case)
    assert same_rows(before, project.dataset)
    assert (summary.outcome, project.production) == ("kept", production)
    assert project.is_done()


def test_a_data_set_that_was_set_back_gets_what_it_lacks(project: Project, tmp_path: Path) -> None:
    shutil.copytree(project.rows, tmp_path / "backup")
    project.nights(4)
    digest = project.dataset.digest
    lost(project, "rows")
    shutil.copytree(tmp_path / "backup", project.rows)
    assert [batch["name"] for batch in project.run().batches] == ["n4.csv"]
    assert project.dataset.digest == digest


@pytest.mark.parametrize("window", [{}, {"window": {"rows": 200}}])
def test_without_a_first_file_the_batches_alone_make_it_again(window: dict[str, Any], tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0}, **window)
    project.nights(1, 2)
    before = project.dataset
    lost(project, "rows")
    for interruption in ("write*/batches.json:@1:eio",) * 2:
        with failing_at(interruption), pytest.raises(OSError, match="failpoint"):
            project.run()
    project.run()
    assert project.is_done()
    assert same_rows(before, project.dataset)


@pytest.mark.parametrize("loss", ["gone", "changed", "first file changed", "targets of the first file changed"])
def test_what_cannot_be_appended_again_is_named(loss: str, project: Project) -> None:
    production = project.production
    lost(project, "rows")
    file = project.folder / ("first.csv" if "first file" in loss else "incoming/n2.csv")
    kept = file.read_bytes()
    file.unlink()
    if "targets" in loss:
        frame = pd.read_csv(io.BytesIO(kept))
        frame.assign(y=frame["y"] + 1000).to_csv(file, index=False)
    elif loss != "gone":
        project.deliver("n9", seed=9).rename(file)
    assert [name for name, found in would(project).items() if found[0] == "missing" and file.name in name]
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"lacks rows that were in it: generation \d.*{file.name}"):
            project.run()
        assert not project.rows.exists()
        assert project.production == production
    file.write_bytes(kept)
    assert (project.run().outcome, project.production) == ("kept", production)


def test_a_data_set_that_somebody_made_anew_is_refused(project: Project) -> None:
    lost(project, "rows")
    production = project.production
    for name in ("first.csv", "incoming/n3.csv", "incoming/n2.csv"):  # as many rows, in another order
        dkrr.ingest(project.folder / name, project.rows, target="y", append=True, label=name)
    with pytest.raises(StoreError, match="made anew"):
        project.run()
    assert project.production == production


def test_a_data_set_that_was_set_back_and_got_other_rows_is_refused(project: Project, tmp_path: Path) -> None:
    shutil.copytree(project.rows, tmp_path / "backup")
    for name, seed in (("x", 8), ("z", 9)):
        dkrr.ingest(project.aside(name, seed=seed), project.rows, target="y", append=True)
        if name == "x":
            project.run()
            production = project.production
            lost(project, "rows")
            shutil.copytree(tmp_path / "backup", project.rows)
    with pytest.raises(StoreError, match=r"generation 4 .*, others.*"):
        project.run()
    assert project.production == production


@pytest.mark.parametrize(("what", "is_dropped"), [("ledger", False), ("ledger", True), ("rows", True)])
def test_what_was_lost_is_made_again_of_what_was_decided(what: str, is_dropped: bool, project: Project) -> None:
    if is_dropped:
        dropped(project, 2)
        project.run()
    before, production = project.dataset, project.production
    lost(project, what)
    summary = project.run()
    assert (summary.batches == [], project.production) == (what == "ledger", production)
    assert same_rows(before, project.dataset)  # nothing twice, and nothing that was dropped
    assert project.is_done()
    project.deliver("n3", seed=9)
    project.is_refused(r"n3\.csv is in the data set with other bytes")


# --- files of a retrain job that lie where batches are delivered ------------------------------------------------------


def test_held_out_rows_and_first_rows_are_no_batches(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": "*.csv"}, gate={"tolerance": 9.0})
    for name, seed in (("first", 1), ("test", 7), ("monday", 2)):
        project.deliver(name, seed).rename(project.folder / f"{name}.csv")
    project.document["holdout"] = {"path": "test.csv"}
    project.document["data"] |= {"path": "first.csv"}
    assert [name for name, found in would(project).items() if found[0] == "appended"] == [
        str(project.folder / "first.csv"), "monday.csv"
    ]  # fmt: skip
    labels = ["initial", "monday.csv"]

    def generations() -> list[str]:
        found = project.dataset.generations
        return [str(item.label).partition(" ")[0] for item in found]

    assert project.run().num_rows == 240
    assert generations() == labels
    assert project.is_done()
    # by their bytes, too
    shutil.copy(project.folder / "first.csv", project.folder / "again.csv")
    shutil.copy(project.folder / "test.csv", project.folder / "copy.csv")
    project.is_refused(r"copy\.csv: .*held-out rows")
    assert generations() == labels
    assert project.is_done()
    project.aside("first", seed=9)
    project.is_refused(r"first\.csv is in the data set with other bytes")


def test_one_file_that_is_written_anew_each_night_begins_with_the_first_rows(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": "night.csv"}, gate={"tolerance": 9.0})
    project.document["data"] |= {"path": "night.csv"}
    for night in (1, 2, 3):
        project.deliver("night", seed=night).rename(project.folder / "night.csv")
        faults = failing_at("write*/batches.json:1:eio") if night == 1 else contextlib.nullcontext()
        with faults, contextlib.suppress(OSError):
            project.run()
        assert project.run().outcome in ("promoted", "kept", "nothing new")
        assert project.dataset.num_rows == 120 * night


def test_a_mask_and_the_data_set_are_no_batches(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"data": "incoming/rows.zarr"}, holdout={"mask": "incoming/mask.csv"})
    del project.document["holdout"]["fraction"]
    project.deliver("n1", seed=1)
    (project.folder / "incoming/mask.csv").write_text("\n".join(str(int(i % 5 == 0)) for i in range(120)))
    assert project.run().outcome == "promoted"
    assert project.is_done()


# --- a RETRAIN.toml that was changed ----------------------------------------------------------------------------------


def command(project: Project, *options: str, code: int = 0) -> Result:
    """``dkrr retrain`` of the document as it is now."""
    path = project.folder / "RETRAIN.toml"
    path.write_text(toml.dumps(project.document))
    result = CliRunner().invoke(main, ["retrain", str(path), *options])
    assert result.exit_code == code, result.output
    return result


def test_other_columns_than_those_of_the_data_set_are_refused(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    dkrr.ingest(project.aside("first", seed=1), project.rows, target="y")
    production, before, target = project.production, project.dataset.digest, project.document["data"]
    for night, (said, data) in enumerate(
        {
            "target: c given": {"target": "c"},
            "features: a, b given": {"features": ["a", "b"]},
            "weight: c given": {"weight": "c"},
            "one_hot is true": {"one_hot": True},
        }.items()
    ):
        project.document["data"] = target | data
        for options in ((), ("--dry-run",)):
            result = command(project, *options, code=2)
            assert f"[data] {said}" in " ".join(result.output.split())
            assert "rows.zarr" in result.output
        project.deliver(f"n{night + 2}", seed=night + 2)
    assert (project.production, project.dataset.digest) == (production, before)
    project.document["data"] = {"target": "y", "features": ["a", "b", "c"]}
    command(project)


def test_numbers_of_columns_are_those_of_the_files(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0}, data={"target": 3})
    for night in (1, 2):
        batch = project.deliver(f"n{night}", seed=night)
        batch.write_text(batch.read_text().partition("\n")[2])  # without names
        command(project)
    command(project)
    assert project.dataset.num_rows == 240


@pytest.mark.parametrize("first", [{"fraction": 0.2}, {"mask": "mask.npy"}])
def test_held_out_rows_stay_held_out_when_others_judge(first: dict[str, Any], tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    np.save(project.folder / "mask.npy", np.arange(120) % 5 == 0)
    project.aside("test", seed=7, num_rows=60)
    project.document["holdout"] = first
    project.deliver("n1", seed=1)

    def judged() -> tuple[int, int]:
        """Rows that were trained on, and rows that judged."""
        found = project.run()
        return int(found.num_rows or 0), int(found.fit["score"]["num_rows"])

    trained, judging = judged()
    assert trained + judging == 120
    project.document["holdout"] = {"path": "test.csv"}
    assert judged() == (trained, 60)
    project.deliver("n2", seed=2)  # nothing of it is held out
    assert judged() == (trained + 120, 60)
    project.document["holdout"] = first
    assert judged() == (trained + 120, judging)


def marked(rows: Any) -> Any:
    """The rows with a column c that marks every fourth."""
    rows[:, 2] = np.arange(len(rows)) % 4 == 0
    return rows


@pytest.mark.parametrize(("data", "rows_kept"), [({"path": "first.csv"}, None), ({}, 250)])
def test_a_column_marks_the_rows_of_a_data_set_that_another_job_made(
    data: dict[str, Any], rows_kept: int | None, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", data={"features": ["a", "b"], **data}, gate={"tolerance": 9.0, "min_r2": -9.0})
    project.document["holdout"] = {"mask": "c"}
    if data:
        project.aside("first", seed=4, change=marked)
    for seed in (1, 2, 3):
        project.deliver(f"n{seed}", seed=seed, change=marked)
    if rows_kept is not None:
        project.document["window"] = {"rows": rows_kept}
    first = project.run()
    project.document["retrain"]["name"] = "another"
    again = project.run()
    assert (again.num_rows, again.fit["score"]) == (first.num_rows, first.fit["score"])
    assert rows_kept is not None or again.num_rows == 360


def test_rows_that_are_made_anew_under_other_names_are_fitted_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_r2": -9.0})
    for names in (["a", "b", "c", "y"], ["b", "a", "c", "y"]):  # exchanged
        shutil.rmtree(project.rows, ignore_errors=True)
        dkrr.ingest(pd.DataFrame(rows_of(1, 120), columns=names), project.rows, target="y")
        assert project.run().outcome == "promoted"
        assert dkrr.load_model(project.model.resolve().model_path).feature_names == names[:3]


def test_rows_that_are_made_anew_with_other_labels_are_not_passed_over(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    rows = rows_of(1, 120)
    rows[:, 3] = rows[:, 0] > 0
    frame = pd.DataFrame(rows, columns=["a", "b", "c", "y"])
    dkrr.ingest(frame, project.rows, target="y", one_hot=True)
    project.run()
    shutil.rmtree(project.rows)
    dkrr.ingest(frame.assign(y=2 * frame["y"]), project.rows, target="y", one_hot=True)
    with pytest.raises(dkrr.DataError, match="rows of class 2; the model knows 0, 1"):
        project.run()


@pytest.mark.parametrize(("mask", "said"), [(2, "this one 'c'"), ("2", "this one 'c'"), ("x2", "is a name")])
def test_a_mask_is_a_name_where_there_are_names_and_else_a_number(mask: int | str, said: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", data={"features": [0, 1], "target": 3})
    project.document["holdout"] = {"mask": mask}
    file = project.deliver("n1", seed=1, change=marked)
    if mask == "x2":
        np.save(file.with_suffix(".npy"), np.loadtxt(file, delimiter=",", skiprows=1))
        file.unlink()
    assert f"[holdout] mask = {mask!r} is a" in (error := command(project, code=7).stderr)
    assert said in error


def test_a_column_marks_rows_that_were_appended_by_hand(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", data={"features": ["a", "b"]}, gate={"tolerance": 9.0, "min_r2": -9.0})
    project.document["holdout"] = {"mask": "c"}
    project.deliver("n1", seed=1, change=marked)
    assert project.run().num_rows == 90
    by_hand = project.aside("n2", seed=2, change=marked)
    dkrr.ingest(by_hand, project.rows, append=True, target="y", features=["a", "b"])
    result = command(project, code=4)
    assert "generation 2" in result.stderr
    assert "column 'c'" in result.stderr
    dkrr.dataset.drop_generations(project.rows, [2])
    by_hand.rename(project.folder / "incoming/n2.csv")
    assert project.run().num_rows == 180


def test_rows_that_were_added_are_not_held_out_by_their_file(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0}, data={"path": "first.csv"})
    project.aside("first", seed=4)
    for night in (1, 2):
        project.deliver(f"n{night}", seed=night)
    production = project.run().production
    for name in ("incoming/n2.csv", "first.csv"):
        project.document["holdout"] = {"path": name}
        for _ in range(2):
            result = command(project, code=2)
            assert name in result.output
            assert "were added to" in " ".join(result.output.split())
    assert project.production == production
    project.aside("other", seed=9)
    project.document["holdout"] = {"path": "other.csv"}
    command(project)


def test_a_pruned_version_is_fitted_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    versions = [project.nights(1).version]
    for _ in range(2):
        project.document["model"]["alpha"] *= 2
        versions.append(project.run().version)
    project.model.prune(keep=0, grace_seconds=0)
    assert [version.id for version in project.model.versions()] == versions[1:]
    project.document["model"]["alpha"] /= 4
    again = project.run().version
    assert again == project.production
    assert again not in versions
    assert len(project.predict(rows_of(9, 5)[:, :3])) == 5
    assert project.is_done()
    project.document["model"]["alpha"] *= 4  # a version that is there is found, and not fitted again
    assert project.run().version == versions[2]


# --- what would happen ------------------------------------------------------------------------------------------------


def would(project: Project) -> dict[str, tuple[str, str]]:
    """Outcome and first reason of each batch, by ``dkrr retrain --dry-run``, which must change nothing."""
    assert "dry run" in command(project, "--dry-run").stdout
    before = contents(project.folder)
    found = json.loads(command(project, "--dry-run", "--json").stdout)["batches"]
    assert contents(project.folder) == before
    return {batch["name"]: (batch["outcome"], " ".join(batch["reasons"])) for batch in found}


def test_a_dry_run_says_what_would_become_of_each_batch(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    assert would(project) == {}
    project.deliver("n1", seed=1)
    project.deliver("n2", seed=2, change=lambda rows: rows * 100)
    found = would(project)
    assert found["n1.csv"] == ("appended", "")
    assert found["n2.csv"][0] == "refused"
    assert "feature a: its standard deviation" in found["n2.csv"][1]
    with pytest.raises(RefusedError):
        project.run()
    project.deliver("n1", seed=3)
    found = would(project)
    assert found.keys() == {"n1.csv", "n2.csv"}
    assert "in the data set with other bytes" in found["n1.csv"][1]


@pytest.mark.parametrize("with_rows", [False, True])
def test_a_dry_run_sees_that_batches_of_one_night_share_rows(tmp_path: Path, with_rows: bool) -> None:
    project = Project(tmp_path / "p")
    if with_rows:
        project.deliver("n0", seed=1)
        project.run()
    first = project.deliver("n1", seed=2)
    header, *lines = first.read_text().splitlines()
    first.with_name("n2.csv").write_text("\n".join([header, *reversed(lines), ""]))
    project.deliver("n3", seed=3)
    expected = would(project)
    with pytest.raises(RefusedError):
        project.run()
    report = json.loads(next(project.folder.rglob("report.json")).read_text())
    assert {batch["name"]: (batch["outcome"], " ".join(batch["reasons"])) for batch in report["batches"]} == expected
    assert {name: outcome for name, (outcome, _) in expected.items()} == {
        "n1.csv": "appended",
        "n2.csv": "refused",
        "n3.csv": "appended",
    }


# --- rows that are there already --------------------------------------------------------------------------------------


def test_rows_that_the_data_set_was_made_of_by_hand_are_not_appended_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    first, second = project.deliver("monday", seed=1), project.deliver("tuesday", seed=2)
    data = project.rows
    dkrr.ingest(str(first), str(data), target="y")
    dkrr.ingest(str(second), str(data), target="y", append=True, label="tuesday")
    with pytest.raises(RefusedError, match="are those of generation 2 \\(tuesday\\)") as caught:
        project.run()
    assert "are those of generation 1, " in caught.value.message
    assert dkrr.open_dataset(str(data)).num_rows == 240
    project.deliver("wednesday", seed=3)
    assert project.run().outcome == "promoted"
    assert dkrr.open_dataset(str(data)).num_rows == 360


def appends_rows(project: Project) -> None:
    """Somebody appends rows by hand."""
    dkrr.ingest(project.aside("hand", seed=40, num_rows=40), project.rows, append=True, label="hand", target="y")


def changes_rows(project: Project) -> None:
    """As many rows as are appended leave on the other side."""
    appends_rows(project)
    dkrr.dataset.keep_last(project.rows, rows=240)


def scores_of(summary: RetrainSummary) -> list[str]:
    """What the gate said about the scores."""
    return [check["sentence"] for check in summary.checks if check["name"] == "score"]


@contextlib.contextmanager
def around_fits(before: Callable[[], Any] = str, after: Callable[[], Any] = str) -> Iterator[None]:
    """What somebody does before and after every fit of the block."""
    real = dkrr.jobs.gate.drive_job

    def disturbed(*args: Any, **options: Any) -> Any:
        before()
        summary = real(*args, **options)
        after()
        return summary

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("dkrr.jobs.gate.drive_job", disturbed)
        yield


def test_rows_that_change_while_a_fit_runs_are_not_those_that_models_are_compared_on(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    project.nights(1)
    project.deliver("n2", seed=2)
    alone = project.copied(tmp_path / "alone").run()

    with around_fits(after=lambda: changes_rows(project)):
        found = project.run()
    assert scores_of(found) == scores_of(alone) != []
    assert found.outcome == "promoted"
    assert project.run().outcome == "promoted"  # of what is there now


@pytest.mark.parametrize("change", [changes_rows, appends_rows])
def test_rows_that_change_before_a_fit_opens_them_are_fitted_by_the_next(
    change: Callable[[Project], None], tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    for night in (1, 2):
        project.deliver(f"n{night}", seed=night)
    with (
        around_fits(before=lambda: change(project)),
        pytest.raises(InterruptedRunError, match="was changed"),
    ):
        project.run()
    assert project.run().outcome == "promoted"


def test_held_out_rows_that_are_replaced_while_a_fit_runs_judge_both_models_or_none(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    del project.document["holdout"]["fraction"]
    project.document["holdout"]["path"] = "test.csv"
    project.aside("test", seed=7, num_rows=60)
    project.nights(1)
    project.deliver("n2", seed=2)
    other = project.aside("other", seed=8, num_rows=50)
    expected = project.copied(tmp_path / "alone")
    shutil.copy(other, expected.folder / "test.csv")
    with around_fits(after=lambda: shutil.copy(other, project.folder / "test.csv")):
        found = project.run()
    assert scores_of(found) == scores_of(expected.run()) != []


@pytest.mark.parametrize(
    ("doubled", "again", "match"),
    [
        (0, lambda lines, more: lines, "its 120 rows are those of generation 1"),
        (0, lambda lines, more: lines + more, "120 of its 160 rows are in .* already"),
        (0, lambda lines, more: lines[::-1], "120 of its 120 rows are in .* already"),
        # a logger that repeats lines does not hide that a batch comes again
        (3, lambda lines, more: [*lines[:119], *lines[:3]], "122 of its 122 rows are in .* already"),
    ],
    ids=["other line ends", "with new ones", "in another order", "some doubled"],
)
def test_rows_that_come_again_are_told(
    doubled: int, again: Callable[[list[str], list[str]], list[str]], match: str, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    more = project.aside("more", seed=2, num_rows=40).read_text().splitlines()[1:]
    path = project.deliver("n1", seed=1)
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines, *lines[:doubled], ""]))
    project.run()
    path.unlink()
    path.with_name("again.csv").write_bytes("\r\n".join([header, *again(lines, more), ""]).encode())
    project.is_refused(match)
    assert project.dataset.num_rows == 120 + doubled


def test_rows_of_few_values_may_come_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_r2": -9.0})
    for night in (1, 2):
        project.deliver(f"n{night}", seed=night, change=np.round)
        assert project.run().outcome == "promoted"


def test_held_out_rows_among_others_are_not_trained_on(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_rows": 20}, data={"path": "first.csv"})
    test = project.aside("test", seed=7, num_rows=40)
    project.aside("first", seed=1)
    project.document["holdout"] = {"path": "test.csv"}
    _, *lines = test.read_text().splitlines()
    assert project.run().outcome == "promoted"
    batch = project.deliver("monday", seed=2)
    batch.write_text(batch.read_text() + "\n".join([*lines, ""]))
    project.is_refused("it has 40 of the 40 held-out rows")
    assert project.dataset.num_rows == 120
    project.deliver("tuesday", seed=3)
    batch.unlink()
    assert project.run().outcome == "promoted"


@pytest.mark.parametrize("count", [8, 16, 18, 19])
def test_a_night_that_is_killed_while_it_clears_its_drafts_does_not_stop_the_next_one(
    count: int, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_rows": 20}, holdout={"path": "test.csv"})
    del project.document["holdout"]["fraction"]
    project.aside("test", seed=7, num_rows=40)
    project.deliver("monday", seed=1)
    with killed_while_removing(project.folder / "models/demo/retrain/staged", count), pytest.raises(KeyboardInterrupt):
        project.run()
    project.deliver("tuesday", seed=2)
    assert project.run().outcome == "promoted"
    assert project.dataset.num_rows == 240


@pytest.mark.parametrize("name", ["000001.json", "000001.npy"])
def test_a_bit_that_flips_in_what_says_who_is_held_out_is_found(name: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_rows": 10})
    project.deliver("n1", seed=1)
    assert project.run().outcome == "promoted"
    path = next((tmp_path / "p").glob(f"models/*/retrain/holdout/{name}"))
    octets = bytearray(path.read_bytes())
    at = octets.find(b'"held_out": "') + 20 if name.endswith("json") else len(octets) - 1
    octets[at] ^= 1
    path.write_bytes(octets)
    project.deliver("n2", seed=2)
    with pytest.raises(StoreError, match="is damaged"):
        project.run()


def test_a_bit_that_flips_in_any_document_is_found_or_changes_nothing(project: Project, tmp_path: Path) -> None:
    """A digit or a letter becomes another one, and the document stays valid JSON."""
    saved = Path(shutil.copytree(project.folder, tmp_path / "saved"))
    project.deliver("n4", seed=4)
    path = project.folder / "incoming/n4.csv"
    batch = path.read_bytes()

    def night() -> tuple[str, list[float]]:
        shutil.rmtree(project.folder)
        shutil.copytree(saved, project.folder)
        path.write_bytes(batch)
        if name:
            (project.folder / name).write_bytes(octets)
        found = project.run()
        return found.outcome, project.predict(rows_of(9, 20)[:, :3]).tolist()

    name, octets = "", bytearray()
    right, refused = night(), 0
    draw = np.random.default_rng(0)
    names = sorted(str(path.relative_to(saved)) for path in saved.rglob("*.json") if path.name != "zarr.json")
    documents = {re.sub("[0-9a-f]{6,}|[0-9]", "", name): name for name in names}  # the last one of each kind
    for name in documents.values():
        octets = bytearray((saved / name).read_bytes())
        places = [found.start(1) for found in re.finditer(rb"(?<=[:\[ ,])\"?[0-9a-z.-]*([0-9a-f])", octets)]
        octets[draw.choice(places)] ^= 1
        with contextlib.suppress(StoreError):
            refused += 1
            outcome, predictions = night()
            refused -= 1
            assert outcome == right[0], name
            assert np.allclose(predictions, right[1], rtol=1e-9), name
    assert 5 < refused < len(documents)


def test_rows_of_a_batch_that_are_alike_are_held_out_together(tmp_path: Path) -> None:
    """Noise that is there twice is not learnt by heart from one half and judged by the other."""
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_rows": 20})
    project.document["model"] |= {"gamma": 30.0, "alpha": 1e-6}
    path = project.deliver(
        "n1", seed=1, num_rows=300, change=lambda rows: np.random.default_rng(0).normal(size=rows.shape)
    )
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines, *lines, ""]))
    with pytest.raises(RefusedError):
        project.run()
    found = json.loads(next((tmp_path / "p").glob("models/*/retrain/holdout/000001.json")).read_text())
    held_out = unpack(found["held_out"], 600)
    assert 20 < np.count_nonzero(held_out) < 300
    assert np.array_equal(held_out[:300], held_out[300:])


def written_again(path: Path, name: str) -> Path:
    """The same rows in other bytes."""
    again = path.with_name(f"{name}.csv")
    again.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    return again


@pytest.mark.parametrize(
    ("which", "then"),
    [("all", "drift edited"), ("some and new ones", "ledger lost"), ("some and new ones", "delivered late")],
)
def test_rows_that_a_window_left_behind_do_not_come_in_again(which: str, then: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", window={"generations": 1}, gate={"tolerance": 9.0})

    def deliver_again() -> None:
        again = written_again(project.folder / "incoming/n1.csv", "again")
        if which != "all":
            more = project.deliver("more", seed=30, num_rows=40)
            again.write_bytes(again.read_bytes() + more.read_bytes().partition(b"\n")[2])
            more.unlink()

    for night in (1, 2, 3):
        project.deliver(f"n{night}", seed=night)
        if night == 2 and then != "delivered late":
            deliver_again()
        with contextlib.suppress(RefusedError):
            project.run()
    if then == "drift edited":
        project.document["drift"] = {"shift": 1.1}
    elif then == "ledger lost":
        lost(project, "ledger")
    else:
        deliver_again()
    assert would(project)["again.csv"][0] == "refused"
    project.is_refused(r"again\.csv: .*(are those of generation 1 \(n1|120 of its 160 rows)")
    assert [item.number for item in project.dataset.generations] == [3]
    assert project.is_done()


def test_rows_of_a_dropped_generation_that_come_again_stay_held_out_or_trained_on(project: Project) -> None:
    incoming = project.folder / "incoming"
    held_out = project.model.resolve().facts["held_out"]
    dkrr.dataset.drop_generations(project.rows, [2])
    written_again(incoming / "n2.csv", "corrected")
    summary = project.run()
    assert [batch["outcome"] for batch in summary.batches] == ["appended"]
    assert project.model.resolve(str(summary.version)).facts["held_out"] == held_out
    assert fitted_rows(project, str(summary.version)) == fitted_rows(project, project.model.versions()[1].id)


def fitted_rows(project: Project, version: str) -> Counter[tuple[float, ...]]:
    """The features that a version was fitted on, and how often each."""
    model = dkrr.load_model(project.model.resolve(version).model_path)
    assert model.x_fit is not None
    assert model.scaling is not None
    rows = model.x_fit.read(0, model.num_rows) * model.scaling.x_std + model.scaling.x_mean
    return Counter(tuple(row) for row in np.round(rows, 6))


def drifted(rows: Any) -> Any:
    return rows + 50


def of_noise(rows: Any) -> Any:
    rows[:, 3] = 5 * np.random.default_rng(0).standard_normal(len(rows))
    return rows


WIDE = {"correlation": 2.0, "shift": 10.0, "scale": 100.0, "distance": 1.0}


@pytest.mark.parametrize(
    ("change", "drift", "reason"),
    [(drifted, {}, "n2.csv: feature a"), (of_noise, WIDE, "rmse")],
    ids=["a batch", "the model"],
)
def test_a_refusal_whose_report_was_not_written_is_told_by_the_next_run(
    change: Callable[[Any], Any], drift: dict[str, float], reason: str, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", drift=drift)
    project.nights(1)
    project.deliver("n2", seed=2, change=change)
    report = project.folder / "models/demo/retrain/report.txt"
    report.unlink()
    report.mkdir()
    with pytest.raises(IsADirectoryError):
        project.run()
    report.rmdir()
    project.is_refused(reason)
    assert reason in report.read_text()
    assert project.is_done()


@pytest.mark.parametrize("another_was_dropped", [False, True])
def test_a_few_rows_that_come_again_stay_held_out_or_trained_on(another_was_dropped: bool, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0}, holdout={"fraction": 0.5})
    first = project.deliver("n1", seed=1, num_rows=200)
    project.run()
    trained = fitted_rows(project, project.model.resolve().id)
    if another_was_dropped:
        second = project.deliver("n2", seed=2, num_rows=200)
        project.run()
        dkrr.dataset.drop_generations(project.rows, [2])
        written_again(second, "n3")
        project.run()
    lines = first.read_text().splitlines()[1:]
    more = project.deliver("more", seed=3, num_rows=190)
    more.write_text("\n".join([*more.read_text().splitlines(), *lines[:15]]) + "\n")
    with contextlib.suppress(RefusedError):
        project.run()
    again = fitted_rows(project, project.model.resolve().id)
    kept = {tuple(np.round([float(value) for value in line.split(",")], 6)[:3]) for line in lines[:15]}
    assert len(kept & trained.keys()) not in (0, 15)  # some of the rows were held out
    assert {row: again[row] for row in kept} == {row: 2 * trained[row] for row in kept}


def test_a_file_that_was_refused_for_its_name_comes_in_under_another_one(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    project.nights(1)
    again = project.deliver("n1", seed=2)
    project.is_refused("under another name")
    again.rename(again.with_name("n1-corrected.csv"))
    assert [(batch["name"], batch["outcome"]) for batch in project.run().batches] == [("n1-corrected.csv", "appended")]
    assert project.is_done()


def test_a_run_that_fits_nothing_is_no_fit_of_search_every(tmp_path: Path) -> None:
    tune = {"kernels": ["rbf"], "widths": "shared", "search_rows": [60], "rows": 120}
    project = Project(tmp_path / "p", retrain={"search_every": 2}, gate={"min_rows": 1000}, tune=tune)
    with pytest.raises(RefusedError, match="held-out rows, at least 1,000 needed to judge; nothing was fitted"):
        project.nights(1)
    project.document["gate"]["min_rows"] = 10
    again = project.nights(2)
    assert (again.outcome, again.searched) == ("promoted", False)
    project.document["gate"]["tolerance"] = 0.5  # judged again, and not fitted
    again = project.run()
    assert (again.version, again.searched, len(project.model.versions())) == (project.production, False, 1)
    assert project.nights(3).searched


def test_a_fit_by_another_solver_is_a_fit_of_search_every(tmp_path: Path) -> None:
    tune = {"kernels": ["rbf"], "widths": "shared", "search_rows": [60], "rows": 120}
    project = Project(tmp_path / "p", retrain={"search_every": 2}, gate={"tolerance": 9.0}, tune=tune)
    assert not project.nights(1).searched
    project.document["solver"]["tile_size"] = 64
    assert project.run().searched


def test_what_a_fit_shall_keep_may_change_while_it_is_interrupted_and_after_it(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    project.deliver("n1", seed=1)
    with failing_at("write*/model.zarr/*:@1:eio"), pytest.raises(OSError, match="failpoint"):
        project.run()
    project.document["gate"]["metric"] = "r2"
    project.document["evaluate"] = {"leave_one_out": True}
    assert project.run().outcome == "promoted"
    project.document["evaluate"]["intervals"] = 0.9
    first, again = project.production, project.run()
    assert (again.outcome, again.version != first) == ("promoted", True)
    dkrr.load_model(project.model.resolve().model_path).predict_interval(rows_of(9, 5)[:, :3], coverage=0.9)
    assert project.is_done()


def test_a_project_that_is_moved_is_the_same(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.document["holdout"] = {"path": "test.csv"}
    project.aside("test", seed=7, num_rows=60)
    project.nights(1)
    project.folder = project.folder.rename(tmp_path / "q")
    assert project.is_done()


def test_an_object_under_another_key_is_the_same_batch(bucket: Bucket, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": bucket.url("in")}, storage=bucket.storage())
    file = project.deliver("n1", seed=1)
    for name in ("n1.csv", "renamed.csv"):
        put_file(bucket.url("in", name), "", file)
    first, second = deliveries(project.spec.retrain.incoming)
    assert first.content_hash() == second.content_hash()


def test_a_batch_is_known_whatever_its_name_is(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.deliver("two\nlines", seed=1)
    assert project.run().outcome == "promoted"
    assert project.is_done()


def test_the_records_of_retraining_are_whole_or_what_is_damaged_is_named(project: Project) -> None:
    folder = Path(project.spec.directory)
    cli("info", folder, "--verify")
    (folder / "holdout/000002.npy").write_bytes(b"damaged")
    output = cli("info", folder, "--verify", exits=4, said="restore it").output
    assert f"holdout/000002.npy of {folder} is damaged" in output
    assert "delete" not in output


@pytest.mark.parametrize("hidden", ["_SUCCESS", ".DS_Store", "_temporary/0/part"])
def test_hidden_files_are_no_part_of_a_folder_that_is_delivered(hidden: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    folder = project.folder / "incoming/n1.parquet"
    folder.mkdir()
    pd.DataFrame(rows_of(1, 120), columns=list("abcy")).to_parquet(folder / "part-0.parquet")
    assert project.run().outcome == "promoted"
    (folder / hidden).parent.mkdir(parents=True, exist_ok=True)
    (folder / hidden).write_bytes(b"")
    assert project.is_done()


@pytest.mark.parametrize("incoming", ["in [1]", "in [1]/n1.csv", "in [1]/n1 [2].csv", "in [1]/n?.csv"])
def test_a_name_with_the_marks_of_a_pattern_that_is_there_is_no_pattern(incoming: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": incoming})
    (tmp_path / "p/in [1]").mkdir()
    name = Path(incoming).name if incoming.endswith("[2].csv") else "n1.csv"
    project.deliver("n1", seed=1).rename(tmp_path / "p/in [1]" / name)
    assert (project.run().outcome, project.dataset.num_rows) == ("promoted", 120)


# --- records that are gone --------------------------------------------------------------------------------------------


def test_retraining_whose_records_were_removed_goes_on_at_once(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.nights(1, 2, 3)
    shutil.rmtree(project.spec.directory)
    shutil.rmtree(project.rows)
    again = project.run()  # to the version that is in production
    assert (again.outcome, again.version) == ("kept", project.production)
    assert project.nights(4).outcome == "promoted"


@pytest.mark.parametrize("lost", ["holdout/000001.json", "holdout/000001.npy"])
def test_a_decision_that_is_gone_is_missed(lost: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.nights(1, 2)
    (Path(project.spec.directory) / lost).unlink()
    assert lost in cli("info", project.spec.directory, "--verify", "--json", exits=4).output
    project.deliver("n3", seed=3)
    with pytest.raises(StoreError, match=f"{lost} of .* is gone"):
        project.run()


def test_pinball_losses_of_other_quantiles_are_not_compared(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"max_residual": 1e-3})
    project.document["model"] = {"kernel": "rbf", "gamma": 0.2, "loss": "pinball", "quantile": 0.9}
    del project.document["solver"]
    project.nights(1)
    project.document["model"]["quantile"] = 0.5
    found = project.run()
    assert found.outcome == "promoted"
    assert "quantiles [0.5] are others than [0.9] of 0001" in str(found)


def test_a_mask_file_marks_batches_that_come_together(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", holdout={"mask": "mask.npy"})
    del project.document["holdout"]["fraction"]
    mask = project.folder / "mask.npy"
    for name in ("n1", "n2"):
        project.deliver(name, seed=int(name[1]))
    for wrong in (250, 250, 120):
        np.save(mask, np.arange(wrong) % 3 == 0)
        with pytest.raises(DataError, match=f"{wrong} rows; 240 expected"):
            project.run()
    np.save(mask, marked := np.arange(240) % 5 == 0)  # nothing was decided by the wrong ones
    assert project.run().num_rows == 192
    assert np.array_equal(History(project.spec).held_out(project.dataset), marked)
    assert project.is_done()
    np.save(mask, np.arange(360) % 5 == 0)  # before its rows are there
    project.document["model"]["alpha"] = 0.1
    with contextlib.suppress(RefusedError):
        project.run()
    assert project.nights(3).num_rows == 288


def test_a_mask_that_was_damaged_since_is_written_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    rows = project.nights(1).num_rows
    (mask,) = Path(project.spec.directory, "masks").glob("*.npy")
    whole = mask.read_bytes()
    mask.write_bytes(whole[:-120] + bytes(119) + b"\1")
    project.document["model"]["alpha"] = 0.1
    assert project.run().num_rows == rows
    assert mask.read_bytes() == whole


def test_a_search_that_was_asked_otherwise_since_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune = {"kernels": ["rbf"], "search_rows": [40], "rows": 60}
    project = Project(tmp_path / "p", retrain={"search_every": 1}, gate={"tolerance": 9.0}, tune=tune)
    project.nights(1)
    project.deliver("n2", seed=2)
    with monkeypatch.context() as patch:
        patch.setattr("dkrr.jobs.gate._fit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            project.run()
    project.document["tune"]["kernels"] = ["laplacian"]
    found = project.run()
    assert dkrr.load_model(project.model.resolve(found.version or "").model_path).kernel.name == "laplacian"  # type: ignore[union-attr]


def test_a_loss_with_probabilities_is_compared_with_one_without_by_accuracy(tmp_path: Path) -> None:
    def labels(rows: Any) -> Any:
        rows[:, 3] = rows[:, 3] > np.median(rows[:, 3])
        return rows

    project = Project(tmp_path / "p", gate={"max_residual": 1e-3}, data={"one_hot": True})
    project.document["model"] = {"kernel": "rbf", "gamma": 0.2, "loss": "hinge"}
    del project.document["solver"]
    project.deliver("n1", seed=1, change=labels)
    project.run()
    project.document["model"]["loss"] = "logistic"
    with contextlib.suppress(RefusedError):
        project.run()
    (check,) = [
        check
        for check in json.loads(Path(project.spec.directory, "report.json").read_text())["checks"]
        if check["name"] == "score"
    ]
    assert check["sentence"].startswith("accuracy 0.")


def test_every_class_that_held_out_rows_have_must_be_learnt() -> None:
    score = {"num_rows": 90, "rmse": [0.1] * 3, "r2": [0.9, 0.9, -0.5], "accuracy": 0.9, "balanced_accuracy": 0.9}
    fit = {"relative_residual": [0.0], "converged": True}

    def passed(r2: list[float | None]) -> bool:
        scores = {"num_rows": 90, "candidate": score | {"r2": r2}, "production": None}
        checks = {check.name: check.passed for check in judge(GateSpec(), fit, scores, None, [])}
        return checks["better than the mean"]

    assert not passed([0.9, 0.9, -0.5])
    assert passed([0.9, 0.9, None])
    assert not passed([None, None, None])


# --- what others put there --------------------------------------------------------------------------------------------


def test_a_copy_of_a_decision_is_nobodys(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.nights(1)
    folder = tmp_path / "p/models/demo/retrain"
    for name in ("000001 (conflicted copy).json", "._000001.json"):
        shutil.copy(folder / "holdout/000001.json", folder / "holdout" / name)
    project.nights(2)
    assert project.dataset.num_rows == 240
    cli("info", folder, "--verify")


def test_a_delivery_of_a_form_that_is_not_read_is_refused_and_the_others_come_in(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.nights(1)
    old = tmp_path / "p/incoming/n0.zarr"
    old.mkdir()
    (old / ".zarray").write_text('{"zarr_format": 2, "shape": [300, 4], "chunks": [300, 4], "dtype": "<f8"}')
    project.deliver("n2", seed=2)
    project.is_refused("n0.zarr.* is Zarr format 2")
    assert project.dataset.num_rows == 240
    assert project.is_done()
    shutil.rmtree(old)
    dkrr.ingest(project.aside("n0", seed=5), old, target="y")
    damaged = old / "X/c/0/0"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    project.deliver("n3", seed=3)
    project.is_refused("n0.zarr.* is damaged")
    assert project.dataset.num_rows == 360


@pytest.mark.parametrize("pattern", ["", "/*.csv"])
def test_hidden_objects_are_no_deliveries(pattern: str, bucket: Bucket, tmp_path: Path) -> None:
    for name in ("n1.csv", ".n2.csv", "._n1.csv"):
        put_file(bucket.url("incoming"), name, Project(tmp_path / name).deliver("n1", seed=1))
    assert [item.name for item in deliveries(bucket.url("incoming").replace("incoming", f"incoming{pattern}"))] == [
        "n1.csv"
    ]


def test_what_a_search_found_is_not_gone_on_with_when_the_gate_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {"kernel": "rbf", "gamma": 1e4, "alpha": 1e3}
    monkeypatch.setattr("dkrr.jobs.gate._search", lambda *_: {"model": bad})
    project = Project(tmp_path / "p", retrain={"search_every": 2}, gate={"tolerance": 0.5})
    project.nights(1)
    project.deliver("n2", seed=2)
    project.is_refused("score|rmse")
    later = project.nights(3)
    assert (later.outcome, later.searched) == ("promoted", False)


def test_a_version_that_a_person_promoted_was_not_promoted_by_the_job(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 0.0})
    project.nights(1)
    project.deliver(
        "n2", seed=2, change=lambda rows: rows + [0, 0, 0, 1] * np.random.default_rng(0).normal(0, 2, (120, 1))
    )
    project.is_refused("rmse")
    candidate = project.model.aliases().targets["candidate"]
    project.model.promote(candidate)
    project.document["gate"] = {"min_rows": 11, "tolerance": 0.0}
    again = project.run()
    assert (again.outcome, again.checks, again.production) == ("kept", [], candidate)


def test_rows_that_were_dropped_as_wrong_are_compared_with_no_more(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    project.deliver("n1", seed=1, change=lambda rows: rows * [1, 1000, 1, 1])
    assert project.run().outcome == "promoted"
    project.deliver("n2", seed=2)
    project.is_refused("mean")
    project.document["drift"] = {"shift": 1e9, "scale": 1e9, "distance": 1.0}
    assert project.run().num_rows
    cli("ingest", project.rows, "--drop-generation", 1)
    del project.document["drift"]
    assert project.run().outcome == "promoted"
    assert project.nights(3).outcome == "promoted"
    project.deliver("n4", seed=4, change=lambda rows: rows * [1, 1000, 1, 1])
    project.is_refused("mean")
