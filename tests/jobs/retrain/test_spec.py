"""RETRAIN.toml: what is taken, what is refused, and where the mistake stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from dkrr.errors import JobFileError
from dkrr.jobs.retrain.spec import RetrainSpec

GOOD = """[retrain]
name = "demo"
data = "rows.zarr"
incoming = "incoming/*.csv"

[holdout]
fraction = 0.1

[model]
kernel = "rbf"
gamma = 0.5
"""


def load(folder: Path, text: str) -> RetrainSpec:
    path = folder / "RETRAIN.toml"
    path.write_text(text)
    return RetrainSpec.load(path)


def test_a_job_file_and_its_held_out_rows(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "first.csv"\ntarget = "y"\n[evaluate]\nfraction = 0.25\n[output]\nstore = "s"\n'
    )
    text = '[retrain]\nname = "demo"\ndata = "rows.zarr"\nincoming = "in"\njob = "job.toml"\n'
    spec = load(tmp_path, text)
    assert spec.holdout.fraction == 0.25
    assert spec.initial == str(tmp_path / "first.csv")
    assert spec.store == str(tmp_path / "s")
    with pytest.raises(JobFileError, match=r"job = .* and \[model\] in the same file"):
        load(tmp_path, text + "[model]\ngamma = 1.0\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name = ", "nmae = "), r"RETRAIN.toml:2: unknown key 'nmae' in \[retrain\]; nearest right name: 'name'"),
        (("[holdout]", "[holdut]"), r"unknown table \[holdut\]; nearest right name: 'holdout'"),
        (("fraction = 0.1", "fraction = 2.0"), r"RETRAIN.toml:7: \[holdout\] fraction = 2.0"),
        (("fraction = 0.1", 'fraction = 0.1\npath = "a.csv"'), "one of path, mask and fraction expected"),
        (("[holdout]\nfraction = 0.1", ""), r"has no \[holdout\]"),
        (("[holdout]\nfraction = 0.1", '[holdout]\nmask = "m"'), r"\[data\] features is missing"),
        (('"rows.zarr"', '"rows.csv"'), r"a data set \(.zarr\) expected"),
        (('"demo"', '"De mo"'), "'De mo' is not the name of a model"),
        (("gamma = 0.5", "gamma = -1.0"), r"\[model\] gamma = -1.0"),
        (("gamma = 0.5", "gamma = 0.5\n[gate]\ntolerence = 0.1"), "nearest right name: 'tolerance'"),
        (("gamma = 0.5", "gamma = 0.5\n[gate]\nmin_rows = 0"), r"\[gate\] min_rows = 0"),
        (("gamma = 0.5", "gamma = 0.5\n[window]\nrows = 5\ngenerations = 2"), "one of rows and generations"),
        (("gamma = 0.5", 'gamma = 0.5\n[mlflow]\ntracking_uri = "http://a:b@host"'), "an address with a password"),
        (("[retrain]", "[retrain"), "is not valid TOML"),
    ],
)
def test_mistakes_and_their_place(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=message) as caught:
        load(tmp_path, GOOD.replace(*change))
    assert caught.value.exit_code == 2
