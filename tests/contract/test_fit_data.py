"""``dkrr fit DATA --target y``: the job file that ``dkrr init`` would write is written, named, and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.contract.helpers import run


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A CSV file in a folder below the present one."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "measured" / "solubility.csv"
    path.parent.mkdir()
    rows = np.random.default_rng(0).random((120, 3))
    np.savetxt(path, rows, delimiter=",", header="a,b,y", comments="")
    return path


def test_a_fit_of_data_writes_the_job_of_init_and_runs_it(source: Path, tmp_path: Path) -> None:
    wanted = run("init", "measured/solubility.csv", "--target", "a").stdout
    result = run("fit", "measured/solubility.csv", "--target", "a")
    assert "wrote solubility.toml" in result.stderr
    assert (tmp_path / "solubility.toml").read_text() == wanted
    assert (tmp_path / "runs" / "solubility" / "model.zarr").is_dir()
    assert (tmp_path / "runs" / "solubility" / "job.toml").read_text() == wanted
    assert run("list").stdout.split() == ["solubility", "finished"]


class _Planned:
    def facts(self) -> list[tuple[str, str]]:
        return [("solver", "a plan")]

    def to_dict(self) -> dict[str, object]:
        return {}

    def check(self) -> None:
        pass


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Jobs that were planned, in place of plans."""
    from dkrr.jobs.spec import JobSpec

    jobs: list[object] = []

    def plan(job: JobSpec) -> _Planned:
        jobs.append(job)
        return _Planned()

    monkeypatch.setattr("dkrr.jobs.plan.plan", plan)
    return jobs


def test_an_identical_job_file_is_used_and_another_one_is_never_replaced(
    source: Path, tmp_path: Path, planned: list[object]
) -> None:
    run("plan", source, "--target", "y")
    job = tmp_path / "solubility.toml"
    before = job.read_text()
    again = run("plan", source, "--target", "y")
    assert "wrote" not in again.stderr
    assert "solubility.toml is there already" in again.stderr
    run(
        "plan",
        source,
        "--target",
        "a",
        exits=2,
        said=("solubility.toml exists and is another job", "`dkrr plan solubility.toml`"),
    )
    assert job.read_text() == before
    assert len(planned) == 2


def test_what_is_data_and_what_is_a_job_is_not_guessed(source: Path, tmp_path: Path, planned: list[object]) -> None:
    run("fit", source, exits=2, said=("is data and names no target", "--target"))
    assert not (tmp_path / "solubility.toml").exists()
    (tmp_path / "job.toml").write_text('[data]\npath = "measured/solubility.csv"\n')
    run("fit", "job.toml", "--target", "y", exits=2, said="--target is for data")
    run("fit", "job.toml", "--decimal", ",", exits=2, said="--decimal is for data")
    run("fit", source, "--target", "z", exits=2, said="has no column 'z'")
    run("fit", "nowhere.csv", "--target", "y", exits=4)
    # data that says itself what its target is needs no option
    run("plan", "generate:friedman?n=80&d=5&seed=0")
    assert (tmp_path / "friedman.toml").exists()
