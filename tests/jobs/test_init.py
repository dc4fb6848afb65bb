"""``dkrr init``: a job file that is valid, fits its data, and has a gamma that means something."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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
