"""Retraining left alone overnight: nothing delivered is lost, nothing harmless refused, nothing changed unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dkrr.cli import main
from dkrr.errors import RefusedError
from dkrr.objects import put_file
from dkrr.stores import children
from tests.jobs.retrain.project import Project, in_process
from tests.s3 import Bucket, bucket, s3_server

__all__ = ["bucket", "s3_server"]


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    in_process(monkeypatch)


# --- addresses --------------------------------------------------------------------------------------------------------


def test_the_run_of_the_last_fit_stays_at_an_address_with_settings(bucket: Bucket, tmp_path: Path) -> None:
    project = Project(tmp_path / "p", retrain={"registry": bucket.url("models")})
    project.deliver("n1", seed=1)
    run = project.run().fit["run"]
    assert children(bucket.url("models/demo/retrain/runs")) == [run.partition("?")[0].rpartition("/")[2]]
    project.deliver("n2", seed=2)
    later = project.run().fit["run"]
    assert later != run
    assert children(bucket.url("models/demo/retrain/runs")) == [later.partition("?")[0].rpartition("/")[2]]


@pytest.mark.parametrize("place", ["folder", "address"])
def test_held_out_rows_that_were_exchanged_judge_again(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = tmp_path / "p"
    project = Project(folder)
    held_out = project.deliver("held-out", seed=7).rename(folder / "held-out.csv")
    project.deliver("n1", seed=1)
    path = str(held_out)
    if place == "address":
        there: Bucket = request.getfixturevalue("bucket")
        path = there.url("held-out.csv")
        put_file(there.url(""), "held-out.csv", held_out)
    project.document["holdout"] = {"path": path}
    first = project.run()
    assert project.run().outcome == "nothing new"

    project.deliver("other", seed=8).rename(held_out)
    if place == "address":
        put_file(there.url(""), "held-out.csv", held_out)
    again = project.run()
    assert (again.outcome, again.num_rows) == ("promoted", first.num_rows)
    assert again.fit["score"]["rmse"] != first.fit["score"]["rmse"]
    assert project.run().outcome == "nothing new"


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


@pytest.mark.whole
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


@pytest.mark.whole
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
    with pytest.raises(RefusedError, match=r"n2.csv: feature c: "):
        project.run()
