"""Retraining left alone overnight: nothing delivered is lost, nothing harmless refused, nothing changed unseen."""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import dkrr
from dkrr.cli import main
from dkrr.dataset.dataset import unpack
from dkrr.errors import InterruptedRunError, JobFileError, RefusedError, StoreError
from dkrr.jobs import toml
from dkrr.store.files import children
from dkrr.store.objects import put_file
from tests.faults import contents, failing_at
from tests.jobs.retrain.project import Project, in_process, rows_of
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
    ("first", "second", "value"), [(0.0, 0.025, 1.0), (0.0, 0.025, -1000.0), (0.025, 0.0, 1.0), (1 / 120, 0.1, 1000.0)]
)
def test_a_rare_flag_is_no_drift(first: float, second: float, value: float, tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1, change=with_flag(first, value))
    assert project.run().outcome == "promoted"
    project.deliver("n2", seed=2, change=with_flag(second, value))
    summary = project.run()  # neither the batch nor the data set that has grown by it
    assert [batch["outcome"] for batch in summary.batches] == ["appended"], summary.reasons
    assert next(check["passed"] for check in summary.checks if check["name"] == "drift")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (with_flag(0.0), with_flag(0.8)),
        (with_flag(0.0), with_flag(0.8, -1.0)),
        (with_flag(0.025), with_flag(0.025, 1e6)),  # an entry that was never so large
        (lambda rows: rows, with_flag(0.0, otherwise=-1.0)),  # a sensor that stands still at its mean
    ],
)
def test_what_was_constant_or_rare_and_is_not_any_more_is_drift(
    first: Callable[[Any], Any], second: Callable[[Any], Any], tmp_path: Path
) -> None:
    project = Project(tmp_path / "p")
    project.deliver("n1", seed=1, change=first)
    project.run()
    project.deliver("n2", seed=2, change=second)
    project.is_refused(r"n2.csv: feature c: ")


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


def test_what_a_lost_data_set_held_is_appended_again(project: Project) -> None:
    production, before = project.production, project.dataset
    lost(project, "rows")
    summary = project.run()
    assert [(batch["name"], batch["outcome"]) for batch in summary.batches] == [
        ("n2.csv", "appended"), ("n3.csv", "appended")
    ]  # fmt: skip
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


def test_without_a_first_file_the_batches_alone_make_it_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    project.nights(1, 2)
    digest = project.dataset.digest
    lost(project, "rows")
    for interruption in ("write*/batches.json:@1:eio",) * 2:
        with failing_at(interruption), pytest.raises(OSError, match="failpoint"):
            project.run()
    project.run()
    assert project.is_done()
    assert project.dataset.digest == digest


@pytest.mark.parametrize("loss", ["gone", "changed", "first file changed"])
def test_what_cannot_be_appended_again_is_named(loss: str, project: Project) -> None:
    production = project.production
    lost(project, "rows")
    file = project.folder / ("first.csv" if loss == "first file changed" else "incoming/n2.csv")
    kept = file.read_bytes()
    file.unlink()
    if loss != "gone":
        project.deliver("n9", seed=9).rename(file)
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


def test_a_generation_that_was_dropped_stays_dropped(project: Project) -> None:
    dropped(project, 2)
    project.run()
    before = project.dataset
    assert [found.number for found in before.generations] == [1, 3]
    lost(project, "rows")
    project.run()
    assert same_rows(before, project.dataset)


def test_a_window_is_made_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", window={"rows": 200}, gate={"tolerance": 9.0})
    project.nights(1, 2, 3)
    before = project.dataset
    lost(project, "rows")
    project.run()
    assert same_rows(before, project.dataset)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_lost_ledger_is_made_again_of_what_was_decided(is_dropped: bool, project: Project) -> None:
    if is_dropped:
        dropped(project, 2)
        project.run()
    before, production = project.dataset, project.production
    lost(project, "ledger")
    summary = project.run()
    assert (summary.batches, project.production) == ([], production)
    assert project.dataset.generations == before.generations  # nothing twice, and nothing that was dropped
    assert project.is_done()
    project.deliver("n3", seed=9)
    project.is_refused(r"n3\.csv is in the data set with other bytes")


@pytest.mark.parametrize("renamed", [False, True])
def test_a_lost_data_set_and_a_lost_ledger_are_made_again(
    renamed: bool, project: Project, caplog: pytest.LogCaptureFixture
) -> None:
    before, production = project.dataset, project.production
    lost(project, "rows", "ledger")
    if renamed:
        (project.folder / "incoming/n2.csv").rename(project.folder / "incoming/other.csv")
    first = str(project.folder / "first.csv")
    assert would(project) == {name: ("appended", "") for name in (first, "n2.csv", "n3.csv")}
    assert project.run().outcome == "kept"
    assert "which generations had been dropped" in caplog.text
    assert same_rows(before, project.dataset)
    assert project.production == production
    assert project.is_done()


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


@pytest.mark.parametrize("made_by", ["ingest", pytest.param("retrain", marks=pytest.mark.thorough)])
def test_other_columns_than_those_of_the_data_set_are_refused(made_by: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    if made_by == "ingest":
        dkrr.ingest(project.aside("first", seed=1), project.rows, target="y")
    else:
        project.nights(1)
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


@pytest.mark.parametrize("target", [3, *(pytest.param(name, marks=pytest.mark.thorough) for name in ("3", "-1"))])
def test_numbers_of_columns_are_those_of_the_files(target: int | str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0}, data={"target": target})
    for night in (1, 2):
        batch = project.deliver(f"n{night}", seed=night)
        batch.write_text(batch.read_text().partition("\n")[2])  # without names
        command(project)
    command(project)
    assert project.dataset.num_rows == 240


@pytest.mark.parametrize("first", [pytest.param({"fraction": 0.2}, marks=pytest.mark.thorough), {"mask": "mask.npy"}])
def test_held_out_rows_stay_held_out_when_others_judge(first: dict[str, Any], tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    np.save(project.folder / "mask.npy", np.arange(120) % 5 == 0)
    project.aside("test", seed=7, num_rows=60)
    project.document["holdout"] = first
    project.deliver("n1", seed=1)

    def tick() -> dict[str, Any]:
        result = command(project, "--json")
        return dict(json.loads(result.stdout))

    def judges(found: dict[str, Any]) -> int:
        return int(found["fit"]["score"]["num_rows"])

    before = tick()
    assert before["num_rows"] + judges(before) == 120
    project.document["holdout"] = {"path": "test.csv"}
    after = tick()
    assert (after["num_rows"], judges(after)) == (before["num_rows"], 60)
    project.deliver("n2", seed=2)  # nothing of it is held out
    assert tick()["num_rows"] == before["num_rows"] + 120
    project.document["holdout"] = first
    again = tick()
    assert (again["num_rows"], judges(again)) == (before["num_rows"] + 120, judges(before))


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


@pytest.mark.parametrize("going_back", ["parameters", "rows"])
def test_a_pruned_version_is_fitted_again(going_back: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    first = project.nights(1)
    versions = [first.version]
    for step in (1, 2):
        if going_back == "rows":
            project.deliver(f"more{step}", seed=1 + step)
        else:
            project.document["model"]["alpha"] *= 2
        versions.append(project.run().version)
    prune = ["models", "prune", "demo", "--keep", "0", "--grace", "0", "--registry", str(project.folder / "models")]
    assert CliRunner().invoke(main, prune).exit_code == 0
    assert [version.id for version in project.model.versions()] == versions[1:]

    if going_back == "rows":
        for number in (3, 2):
            dropped(project, number)
    else:
        project.document["model"]["alpha"] /= 4
    result = command(project, "--json")
    again = project.model.resolve().id
    assert again not in versions
    assert json.loads(result.stdout)["version"] == again
    rows = rows_of(9, 5)[:, :3]
    assert len(project.predict(rows)) == 5
    assert json.loads(command(project, "--json").stdout)["outcome"] == "nothing new"
    # the versions that are there are found, and not fitted again
    if going_back == "parameters":
        project.document["model"]["alpha"] *= 4
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


def test_a_dry_run_says_what_a_lost_data_set_would_get_again(project: Project) -> None:
    assert would(project) == {}
    lost(project, "rows")
    first = str(project.folder / "first.csv")
    assert would(project) == {name: ("appended", "") for name in (first, "n2.csv", "n3.csv")}
    (project.folder / "incoming/n2.csv").unlink()
    ((name, found),) = would(project).items()
    assert found[0] == "missing"
    assert "n2.csv" in name
    assert "no file" in found[1]


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


def test_rows_that_were_written_again_are_not_appended_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p")
    path = project.deliver("monday", seed=1)
    project.run()
    again = path.with_name("again.csv")
    again.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    path.unlink()
    project.is_refused("are those of generation 1")
    assert project.dataset.num_rows == 120


def changes_rows(project: Project, keep_rows: int | None) -> None:
    """Somebody appends as many rows as leave on the other side, or just appends."""
    path = project.folder / "hand.csv"
    project.deliver("hand", seed=40, num_rows=40).rename(path)
    dkrr.ingest(path, project.rows, append=True, label="hand", target="y")
    if keep_rows is not None:
        dkrr.dataset.keep_last(project.rows, rows=keep_rows)


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


@pytest.mark.parametrize("keep_rows", [pytest.param(None, marks=pytest.mark.thorough), 240])
def test_rows_that_change_while_a_fit_runs_are_not_those_that_models_are_compared_on(
    keep_rows: int | None, tmp_path: Path
) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    project.nights(1)
    project.deliver("n2", seed=2)
    alone = project.copied(tmp_path / "alone").run()

    with around_fits(after=lambda: changes_rows(project, keep_rows)):
        found = project.run()
    sentences = [
        check["sentence"].replace(str(found.version), "") for check in found.checks if check["name"] == "score"
    ]
    said = [check["sentence"] for check in alone.checks if check["name"] == "score"]
    assert sentences == said
    assert found.outcome == "promoted"
    assert project.run().outcome == "promoted"  # of what is there now


def test_rows_that_change_before_a_fit_opens_them_are_fitted_by_the_next(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    for night in (1, 2):
        project.deliver(f"n{night}", seed=night)
    with (
        around_fits(before=lambda: changes_rows(project, 240)),
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
    scores = [[check for check in one.checks if check["name"] == "score"] for one in (found, expected.run())]
    assert scores[0] == scores[1] != []


@pytest.mark.parametrize("how", ["with new ones", "in another order"])
def test_rows_that_come_again_are_told(how: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": "night.csv"}, gate={"tolerance": 9.0})
    path = project.aside("night", seed=1)
    project.run()
    header, *lines = path.read_text().splitlines()
    if how == "with new ones":
        other = project.deliver("other", seed=2, num_rows=40)
        lines += other.read_text().splitlines()[1:]
        other.unlink()
    else:
        np.random.default_rng(0).shuffle(lines)
    path.write_text("\n".join([header, *lines, ""]))
    project.is_refused(f"120 of its {len(lines)} rows are in .* already")
    assert project.dataset.num_rows == 120


def test_rows_of_few_values_may_come_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0, "min_r2": -9.0})
    for night in (1, 2):
        project.deliver(f"n{night}", seed=night, change=np.round)
        assert project.run().outcome == "promoted"


@pytest.mark.parametrize("where", ["in a batch", "in the first rows"])
def test_held_out_rows_among_others_are_not_trained_on(where: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"incoming": "incoming/*.csv"}, gate={"tolerance": 9.0, "min_rows": 20})
    test = project.aside("test", seed=7, num_rows=40)
    first = project.aside("first", seed=1)
    project.document["holdout"] = {"path": "test.csv"}
    project.document["data"] |= {"path": "first.csv"}
    _, *lines = test.read_text().splitlines()
    if where == "in the first rows":
        first.write_text(first.read_text() + "\n".join([*lines, ""]))
        with pytest.raises(JobFileError, match=r"40 of the 40 held-out rows of .*test.csv are in .*rows.zarr"):
            project.run()
        return
    assert project.run().outcome == "promoted"
    batch = project.deliver("monday", seed=2)
    batch.write_text(batch.read_text() + "\n".join([*lines, ""]))
    project.is_refused("it has 40 of the 40 held-out rows")
    assert project.dataset.num_rows == 120
    project.deliver("tuesday", seed=3)
    batch.unlink()
    assert project.run().outcome == "promoted"


def test_a_few_doubled_rows_do_not_hide_that_a_batch_comes_again(tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0})
    path = project.deliver("n1", seed=1)
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *lines, *lines[:3], ""]))  # a logger that repeats lines
    project.run()
    (path.parent / "n2.csv").write_text("\n".join([header, *lines[:-1], *lines[:3], ""]))
    project.is_refused(r"122 of its 122 rows are in .* already")


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


@pytest.mark.parametrize(
    "dropped", ["", pytest.param("the first", marks=pytest.mark.thorough), "another, which came again"]
)
def test_a_few_rows_that_come_again_stay_held_out_or_trained_on(dropped: str, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", gate={"tolerance": 9.0}, holdout={"fraction": 0.5})
    first = project.deliver("n1", seed=1, num_rows=200)
    project.run()
    trained = fitted_rows(project, project.model.resolve().id)
    if dropped:
        project.deliver("n2", seed=2, num_rows=200)
        project.run()
        dkrr.dataset.drop_generations(project.rows, [1 if dropped == "the first" else 2])
    if dropped[:7] == "another":
        written_again(project.folder / "incoming/n2.csv", "n3")
        project.run()
    lines = first.read_text().splitlines()[1:]
    more = project.deliver("more", seed=3, num_rows=190)
    more.write_text("\n".join([*more.read_text().splitlines(), *lines[:15]]) + "\n")
    if dropped == "the first":
        first.unlink()
    with contextlib.suppress(RefusedError):
        project.run()
    model = project.model.resolve()
    again = fitted_rows(project, model.id)
    kept = {tuple(np.round([float(value) for value in line.split(",")], 6)[:3]) for line in lines[:15]}
    assert len(kept & trained.keys()) not in (0, 15)  # some of the rows were held out
    copies = 1 if dropped == "the first" else 2
    assert {row: again[row] for row in kept} == {row: copies * trained[row] for row in kept}


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
    with pytest.raises(RefusedError, match="nothing was fitted"):
        project.nights(1)
    project.document["gate"]["min_rows"] = 10
    assert not project.nights(2).searched
