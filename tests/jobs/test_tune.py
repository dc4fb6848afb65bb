"""A job in, a job with kernel, widths and alpha out: what is written, what it says, and that it can be planned."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import JobFileError, StoreError
from dkrr.jobs import tune as tune_module
from dkrr.jobs.garbage import find_garbage
from dkrr.jobs.plan import plan
from dkrr.jobs.run import fit_job
from dkrr.jobs.spec import JobSpec
from dkrr.jobs.tune import TuneSummary, draw_search, tune_job

N = 300
TUNE = {"kernels": ["rbf"], "search_rows": [60, 120], "rows": 200}
Make = Callable[..., JobSpec]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(4)
    x = rng.uniform(-2, 2, (N, 3)) * [1, 10, 0.1] + [0, 5, 0]
    y = 50 + 7 * np.sin(2 * x[:, 0]) + 0.2 * x[:, 1] + 0.5 * rng.standard_normal(N)
    root = tmp_path_factory.mktemp("job")
    mask = (np.arange(N) % 5 == 0).astype(float)
    table = np.column_stack([x, mask, y])
    np.savetxt(root / "rows.csv", table, delimiter=",", fmt="%.17g", header="a,b,c,held,y", comments="")
    return root


def document(folder: Path, address: str, **tables: Any) -> dict[str, Any]:
    job: dict[str, Any] = {
        "data": {"path": str(folder / "rows.csv"), "target": ["y"], "features": ["a", "b", "c"], "standardize": True},
        "evaluate": {"mask": "held", "metric": "rmse"},
        "solver": {"tile_size": 64},
        "cluster": {"scheduler": address},
        "output": {"directory": str(folder / "runs/first")},
        "tune": TUNE,
    }
    for name, changed in tables.items():
        job[name] = job.get(name, {}) | changed
    return job


@pytest.fixture(scope="module")
def job(folder: Path, cluster_client: Any) -> JobSpec:
    return JobSpec.from_dict(document(folder, cluster_client.scheduler.address), base=folder)


@pytest.fixture(scope="module")
def summary(job: JobSpec, folder: Path) -> TuneSummary:
    return tune_job(job, folder / "best.toml", picture=True)


def test_the_job_that_is_written(summary: TuneSummary, folder: Path, job: JobSpec) -> None:
    best = JobSpec.load(folder / "best.toml")
    chosen = summary.result.best
    assert best.data == job.data
    assert best.evaluate == job.evaluate
    assert best.solver == job.solver
    assert best.tune is None
    assert best.model.alpha == chosen.alpha
    assert best.model.kernel == "rbf"
    assert best.output.directory == str(folder / "runs/best")
    assert best.output.store == job.store
    document = tomllib.loads((folder / "best.toml").read_text())
    assert document["data"]["path"] == "rows.csv"  # seen from its folder
    if chosen.kind == "per_feature":
        assert document["model"]["kernel_params"]["length_scale"] == chosen.widths.tolist()
    text = (folder / "best.toml").read_text()
    assert "# Chosen by dkrr tune (seed 0) for 240 training rows" in text
    lines = [line for line in text.splitlines() if line.endswith("chosen")]
    assert len(lines) == 1
    assert f"{chosen.loo_rmse:.4f}" in lines[0]


def test_the_job_can_be_planned_and_fitted(summary: TuneSummary, folder: Path) -> None:
    planned = plan(folder / "best.toml")
    planned.check()
    assert planned.num_rows == 240
    fitted = fit_job(folder / "best.toml")
    assert fitted.score is not None
    assert fitted.score.value("rmse") < 0.8  # the noise is 0.5, the deviation of the target about 5
    assert fitted.score.rmse_whitened is not None
    assert abs(fitted.score.rmse_whitened[0] - summary.result.best.loo_rmse) < 0.06


def test_what_else_is_written(summary: TuneSummary, folder: Path) -> None:
    lines = (folder / "best.trials.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == summary.result.records
    search = json.loads((folder / "best.search.json").read_text())
    assert search["num_rows"] == 240
    assert search["feature_names"] == ["a", "b", "c"]
    assert search["best"] == summary.result.best.to_dict()
    assert search["slices"] == summary.result.slices
    picture = folder / "best.search.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    before = picture.read_bytes()
    draw_search(search, str(picture))
    assert picture.read_bytes() == before
    assert json.dumps(summary.to_dict())


def test_the_picture_shows_what_was_computed(summary: TuneSummary, folder: Path, monkeypatch: Any) -> None:
    from matplotlib.axes import Axes

    shown: list[np.ndarray] = []
    drawn = Axes.imshow

    def imshow(self: Any, data: Any, *arguments: Any, **options: Any) -> Any:
        shown.append(np.array(data))
        assert options["interpolation"] == "none"
        return drawn(self, data, *arguments, **options)

    monkeypatch.setattr(Axes, "imshow", imshow)
    search = json.loads((folder / "best.search.json").read_text())
    draw_search(search, str(folder / "again.svg"))
    assert len(shown) == len(search["slices"]) == 2
    slices = [record for record in search["trials"] if record["kind"] == "slice"]
    np.testing.assert_array_equal(np.vstack(shown), [record["errors"] for record in slices])


def test_the_table_shows_both_kinds_of_widths(summary: TuneSummary) -> None:
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=120).print(summary.table())
    shown = text.getvalue()
    assert "per feature" in shown
    assert shown.count("chosen") == 1
    for candidate in summary.result.candidates:
        assert f"{candidate.loo_rmse:.4f}" in shown
    assert "best.trials.jsonl" in shown


def test_the_same_again(summary: TuneSummary, job: JobSpec, folder: Path) -> None:
    again = tune_job(job, folder / "again.toml", picture=False)
    assert again.picture_path is None
    # read back, every time included
    assert (folder / "again.trials.jsonl").read_bytes() == (folder / "best.trials.jsonl").read_bytes()
    changed = (folder / "again.toml").read_text().replace("runs/again", "runs/best")
    assert changed == (folder / "best.toml").read_text()


def test_options_instead_of_the_table(job: JobSpec, folder: Path) -> None:
    found = tune_job(job, folder / "few.toml", rows=50, seed=9, budget_seconds=100.0, picture=False)
    assert found.settings.search_rows == (50,)
    assert found.settings.seed == 9
    assert found.result.best.num_rows == 50
    assert "seed 9" in (folder / "few.toml").read_text()


def test_an_intercept_stays(folder: Path, cluster_client: Any) -> None:
    tables = {"model": {"fit_intercept": True}, "tune": {**TUNE, "rows": 60, "search_rows": [60]}}
    job = JobSpec.from_dict(document(folder, cluster_client.scheduler.address, **tables), base=folder)
    tune_job(job, folder / "with.toml", picture=False)
    assert JobSpec.load(folder / "with.toml").model.fit_intercept


def test_the_run_of_the_job_itself_stays(job: JobSpec, folder: Path) -> None:
    written = tune_module._document(job, folder / "first.toml", {"kernel": "rbf", "gamma": 1.0, "alpha": 1.0})
    assert written["output"]["directory"] == "runs/first-tuned"
    assert written["output"]["store"] == "runs/store"


def test_a_fit_does_not_mind_the_table(folder: Path, cluster_client: Any) -> None:
    tables: dict[str, Any] = {"output": {"directory": str(folder / "runs/plain")}}
    with_table = document(folder, cluster_client.scheduler.address, **tables)
    fit_job(JobSpec.from_dict(with_table, base=folder))
    del with_table["tune"]
    fit_job(JobSpec.from_dict(with_table, base=folder))


def test_what_is_refused_before_the_search(job: JobSpec, folder: Path) -> None:
    (folder / "there.toml").touch()
    with pytest.raises(JobFileError, match=r"there.toml exists"):
        tune_job(job, folder / "there.toml")
    given = job.model_dump(exclude_unset=True) | {"model": {"kernel": "precomputed"}}
    with pytest.raises(JobFileError, match="precomputed"):
        tune_job(JobSpec.from_dict(given, base=folder), folder / "matrix.toml")


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"kernel": ["rbf"]}, r"unknown key 'kernel' in \[tune\]; nearest right name: 'kernels'"),
        ({"kernels": ["rbf", "cosine"]}, r"\[tune\].*'cosine'"),
        ({"widths": "each"}, r"\[tune\] widths = 'each' is not allowed"),
        ({"rows": 10**6}, r"\[tune\].*rows = 1000000"),
        ({"budget_seconds": 0}, r"\[tune\] budget_seconds = 0"),
    ],
)
def test_mistakes_in_the_table(folder: Path, table: dict[str, Any], expected: str) -> None:
    with pytest.raises(JobFileError, match=expected):
        JobSpec.from_dict({"data": {"path": "x.csv"}, "tune": table}, base=folder)


def test_an_empty_table_is_the_default() -> None:
    job = JobSpec.from_dict({"data": {"path": "x.csv"}, "tune": {}})
    assert job.tune is not None
    assert job.tune.settings().search_rows == (1_000, 2_000)
    assert JobSpec.from_dict(job.to_dict()) == job


def test_what_a_search_left_in_the_store_can_be_deleted(summary: TuneSummary, job: JobSpec) -> None:
    store = Path(job.store)
    found = [item.path for item in find_garbage(store, kept_seconds=-1.0)]
    searches = sorted((store / "tune").iterdir())
    assert searches
    assert set(searches) <= set(found)


def test_data_that_cannot_be_read(folder: Path, job: JobSpec) -> None:
    given = job.model_dump(exclude_unset=True)
    given["data"] = {**given["data"], "path": str(folder / "missing.csv")}
    with pytest.raises((StoreError, Exception), match=r"missing\.csv"):
        tune_job(JobSpec.from_dict(given, base=folder), folder / "none.toml")
    assert not (folder / "none.toml").exists()
