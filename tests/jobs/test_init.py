"""``dkrr init``: a job file that is valid, fits its data, and has a gamma that means something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.jobs.init import init_job, median_gamma
from dkrr.jobs.spec import JobSpec


def load(folder: Path, text: str) -> JobSpec:
    path = folder / "job.toml"
    path.write_text(text)
    return JobSpec.load(path)


def csv(folder: Path, header: str = "a,b,y", rows: int = 50, target: str = "") -> Path:
    random = np.random.default_rng(0)
    lines = [header] if header else []
    for i in range(rows):
        a, b, y = random.standard_normal(3)
        lines.append(f"{a},{100 * b},{target.format(i % 2) or y}")
    path = folder / "train.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_gamma_is_one_over_the_median_squared_distance() -> None:
    rows = np.array([[0.0, 5.0], [1.0, 5.0], [3.0, 5.0]])  # the constant column adds nothing
    scale = np.var([0.0, 1.0, 3.0])
    assert median_gamma(rows) == pytest.approx(1 / (4 / scale), rel=1e-14)  # distances 1, 4, 9


def test_the_last_column_is_the_target_unless_one_is_named(tmp_path: Path) -> None:
    path = csv(tmp_path)
    assert load(tmp_path, init_job(path)).data.target == ["y"]
    assert load(tmp_path, init_job(path, "a")).data.target == ["a"]
    assert load(tmp_path, init_job(path, [0, "b"])).data.target == [0, "b"]
    assert load(tmp_path, init_job(csv(tmp_path, header=""))).data.target == [-1]


def test_the_file_whitens_and_holds_rows_out(tmp_path: Path) -> None:
    spec = load(tmp_path, init_job(csv(tmp_path)))
    assert (spec.data.standardize, spec.model.kernel) == (True, "rbf")
    assert spec.evaluate is not None
    assert (spec.evaluate.fraction, spec.evaluate.metric) == (0.1, "rmse")
    assert spec.directory == str(tmp_path / "runs" / "train")


def test_words_as_target_are_classes(tmp_path: Path) -> None:
    spec = load(tmp_path, init_job(csv(tmp_path, target="class{}")))
    assert spec.data.one_hot
    assert spec.evaluate is not None
    assert spec.evaluate.metric == "accuracy"


def test_the_path_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    path = csv(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert load(tmp_path, init_job("train.csv")).data.path == str(path)
    assert load(tmp_path / "jobs", init_job("train.csv", base=tmp_path / "jobs")).data.path == str(path)
    assert load(tmp_path / "jobs", init_job(path)).data.path == str(path)


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    path = csv(tmp_path)
    with pytest.raises(ParameterError, match="'yy' is not a column of"):
        init_job(path, "yy")
    with pytest.raises(ParameterError, match=r"target 3 is not a column of .*; it has columns 0 to 2"):
        init_job(path, 3)
    with pytest.raises(DataError, match="no column besides its targets"):
        init_job(path, ["a", "b", "y"])
    with pytest.raises(StoreError, match="does not exist"):
        init_job(tmp_path / "none.csv")
    np.save(tmp_path / "x.npy", np.full((4, 2), np.nan))
    with pytest.raises(DataError, match="no row without missing values"):
        init_job(tmp_path / "x.npy")
