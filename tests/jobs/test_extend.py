"""Jobs whose data has grown: what is frozen, what is continued, what is said, and when all is fitted anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr.dataset import Dataset, append, open_dataset, row_hash_fraction
from dkrr.engine.tasks import InProcessExecutor
from dkrr.fit.rates import Machine
from dkrr.jobs import run as job_run
from dkrr.jobs.prepare import changed_since
from dkrr.jobs.run import fit_job
from dkrr.linalg.operators import open_rows
from dkrr.models.model import load_model
from tests.fit.test_planner import MACHINE
from tests.jobs.helpers import Make, job_maker

RNG = np.random.default_rng(5)
X = RNG.standard_normal((900, 4)) * [1, 10, 0.1, 3] + [0, 50, 0, -7]
Y = np.sin(X[:, 0]) + X[:, 1] / 20 + 0.1 * RNG.standard_normal(len(X))


DOCUMENT: dict[str, Any] = {
    "data": {"path": "data.zarr", "standardize": True},
    "evaluate": {"fraction": 0.2},
    "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 0.1},
    "solver": {"name": "cholesky", "tile_size": 64, "precision": "float64"},
    "cluster": {"workers": 1},
    "output": {"directory": "run", "store": "store"},
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Jobs whose tasks run in this process, planned for a machine that is not measured."""

    def executor(*arguments: Any, **options: Any) -> Any:
        from contextlib import nullcontext

        return nullcontext(InProcessExecutor())

    def machine(*arguments: Any, **options: Any) -> Machine:
        return MACHINE

    monkeypatch.setattr(job_run, "job_executor", executor)
    monkeypatch.setattr("dkrr.jobs.plan.measure_machine", machine)
    return job_maker(DOCUMENT, tmp_path)


@pytest.fixture
def plain(make: Make, tmp_path: Path) -> Make:
    """The same without whitening and held-out rows, and of fewer tiles."""
    document = {name: keys for name, keys in DOCUMENT.items() if name != "evaluate"}
    solver = DOCUMENT["solver"] | {"tile_size": 200}
    return job_maker(document | {"data": {"path": "data.zarr"}, "solver": solver}, tmp_path)


def grow(folder: Path, start: int, stop: int, shift: float = 0.0) -> Dataset:
    return append(X[start:stop] + shift, folder / "data.zarr", y=Y[start:stop])


def refitted(make: Make, folder: Path, scaling: Any) -> np.ndarray:
    """Predictions of a fit of the same rows in a fresh store, whitened with a given scaling."""
    from dkrr.dataset import prepare_rows

    dataset = open_dataset(folder / "data.zarr")
    mask = held_out(dataset)
    train, _ = prepare_rows(dataset, folder / "refit.zarr", test_mask=mask, scaling=scaling)
    import dkrr

    x, y = train.X.read(0, train.num_rows), train.y.read(0, train.num_rows)[:, 0]  # type: ignore[union-attr]
    model = dkrr.KernelRidge(alpha=0.1, kernel="rbf", gamma=0.1).fit(x, y)
    return scaling.invert_y(model.predict(scaling.apply_x(X[:200].copy())))


def held_out(dataset: Dataset) -> np.ndarray:
    parts = dataset.generations
    return np.concatenate([row_hash_fraction(p.first_row, p.first_row + len(p.kept), 0.2)[p.kept] for p in parts])


def test_a_job_on_grown_data_continues(make: Make, tmp_path: Path) -> None:
    grow(tmp_path, 0, 600)
    first = fit_job(make())
    scaling = load_model(first.model_path).scaling
    grow(tmp_path, 600, 640)
    again = fit_job(make())
    model = load_model(again.model_path)
    # the scaling is that of the first fit, and so are tiles and centre
    assert model.scaling == scaling
    rows = int((~held_out(open_dataset(tmp_path / "data.zarr"))[:600]).sum())
    factor = again.reused["factor"]
    assert (factor["rows"], factor["of_rows"]) == (rows, model.num_rows)
    assert factor["share"] == pytest.approx((rows / model.num_rows) ** 3)
    assert again.tiles_computed < first.tiles_computed
    assert again.reused["scaling"]["scaling"] == "frozen"
    assert again.reused["scaling"]["rows"] == 600
    np.testing.assert_allclose(model.predict(X[:200].copy()), refitted(make, tmp_path, scaling), rtol=1e-9, atol=1e-9)
    # what is said is the same everywhere
    result = json.loads((tmp_path / "run/result.json").read_text())
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert result["reused"]["factor"]["rows"] == status["reused"]["factor"]["rows"] == rows
    assert model.solution.reused["factor"]["rows"] == rows
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    assert (plan["num_rows"], plan["reused"]["factor"]["rows"]) == (model.num_rows, rows)
    assert any("continues a factor of the first" in note for note in plan["notes"])
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(width=200, file=text).print(again.table())
    assert f"{rows:,} of {model.num_rows:,} rows of the factor" in text.getvalue()
    # nothing new: nothing is computed
    third = fit_job(make())
    assert third.tiles_computed == 0
    assert third.reused["factor"]["share"] == 1.0


@pytest.mark.parametrize("when", ["before its workers open them", "in its midst"])
def test_a_fit_stays_on_the_rows_that_it_began_with(
    plain: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    grow(tmp_path, 0, 300)
    made: list[Dataset] = []

    def append_once(*_: Any) -> None:
        if not made:
            made.append(grow(tmp_path, 300, 340))
            open_rows.cache_clear()  # as in a worker that was started later

    open_rows.cache_clear()
    with monkeypatch.context() as patch:
        if when != "in its midst":
            execute = job_run.job_executor
            patch.setattr(job_run, "job_executor", lambda *given: (append_once(), execute(*given))[1])
        first = fit_job(plain(), progress=append_once)
    assert made[0].num_rows == 340
    model = load_model(first.model_path)
    assert model.num_rows == json.loads((tmp_path / "run/result.json").read_text())["data"]["rows"] == 300
    import dkrr

    alone = dkrr.KernelRidge(alpha=0.1, kernel="rbf", gamma=0.1).fit(X[:300], Y[:300])
    np.testing.assert_allclose(model.predict(X[:50].copy()), alone.predict(X[:50]), rtol=1e-8, atol=1e-8)
    # the next fit goes on with it
    assert changed_since(plain(), json.loads((tmp_path / "run/result.json").read_text()))
    again = fit_job(plain())
    assert (again.reused["factor"]["rows"], again.reused["factor"]["of_rows"]) == (300, 340)
