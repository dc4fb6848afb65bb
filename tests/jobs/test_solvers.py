"""Jobs with each solver: from a file to a model, its record, and what a later attempt of the run goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dkrr import load_model
from dkrr.errors import ConvergenceError, InterruptedRunError, JobFileError
from dkrr.jobs.inspection import describe, verify
from dkrr.jobs.plan import plan
from dkrr.jobs.run import fit_job
from tests.jobs.helpers import Make, job_maker
from tests.reference import dense_krr


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    document: dict[str, Any] = {
        "data": {"path": "generate:friedman?n=600&d=5&seed=0", "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 0.1},
        "solver": {"tile_size": 128},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a")},
    }
    return job_maker(document, tmp_path)


def exact(model: Any, alpha: float = 0.1) -> np.ndarray:
    """Coefficients of the dense reference on the rows of a model."""
    x = model.x_fit.read(0, model.num_rows)
    from dkrr.dataset.sources import open_table

    table = open_table("generate:friedman?n=600&d=5&seed=0")
    y = np.concatenate([block for block, _ in table.blocks(list(table.target))])
    return dense_krr(model.kernel(x, x), (y - y.mean(0)) / y.std(0), alpha)


@pytest.mark.parametrize(
    ("solver", "recorded"),
    [
        ({"name": "auto"}, ("cholesky", "float64")),
        ({"name": "cholesky", "precision": "mixed"}, ("cholesky", "mixed")),
        ({"name": "cg"}, ("cg", "float64")),
        ({"name": "cg", "precision": "mixed", "rank": 60}, ("cg", "mixed")),
        ({"name": "cg", "preconditioner": "none"}, ("cg", "float64")),
        ({"name": "cg", "gram": "stored", "rank": 40}, ("cg", "float64")),
    ],
    ids=str,
)
def test_exact_solvers_agree(solver: dict[str, Any], recorded: tuple[str, str], make: Make, tmp_path: Path) -> None:
    phases: set[str] = set()
    summary = fit_job(make(solver=solver), progress=lambda phase, *_: phases.add(phase))
    model = load_model(tmp_path / "runs/a/model.zarr")
    np.testing.assert_allclose(model.dual_coef.read(0, 600), exact(model), rtol=2e-6, atol=1e-7)
    assert (model.solution.solver, model.solution.precision) == recorded == (summary.solver, summary.precision)
    assert max(summary.relative_residual) <= 1e-8
    assert summary.converged
    assert model.provenance["solver"] == recorded[0]
    if recorded[0] == "cg":
        assert summary.num_iterations > 1
        assert model.provenance["tol"] == 1e-8
        assert any(phase.startswith("cg") for phase in phases)
    assert model.provenance.get("rank", 0) == solver.get("rank", model.provenance.get("rank", 0))
    result = json.loads((tmp_path / "runs/a/result.json").read_text())
    assert result["estimated_seconds"]["total"] > 0
    assert set(result["estimated_seconds"]) - {"total", "start", "write"} <= set(result["plan"]["estimated_seconds"])
    # each phase that took time has its estimate beside it
    assert set(result["seconds"]) - {"prepare", "total", "apply", "gram"} <= set(result["estimated_seconds"])
    facts = describe(str(tmp_path / "runs/a/model.zarr")).facts
    assert facts["solver"] == f"{recorded[0]}, {recorded[1]}"
    assert not verify(str(tmp_path / "runs/a"))
    summary.table()


def test_nystrom_says_what_it_is(make: Make, tmp_path: Path) -> None:
    job = make(solver={"name": "nystrom", "num_centers": 80}, evaluate={"fraction": 0.2, "metric": "r2"})
    planned = plan(job)
    assert "approximation" in str(planned)
    summary = fit_job(job)
    model = load_model(tmp_path / "runs/a/model.zarr")
    assert (model.num_rows, model.solution.solver) == (80, "nystrom")
    assert model.provenance["is_approximation"]
    assert model.provenance["num_centers"] == 80
    assert "approximation" in describe(str(tmp_path / "runs/a/model.zarr")).facts["note"]
    assert summary.score is not None
    assert summary.score.value("r2") > 0.8
    assert not list((tmp_path / "runs/store").glob("solves/*.zarr"))
    summary.table()


def test_an_answer_that_did_not_converge_is_refused_or_named(make: Make, tmp_path: Path) -> None:
    solver = {"name": "cg", "preconditioner": "none", "max_iter": 3}
    with pytest.raises(ConvergenceError):
        fit_job(make(solver=solver))
    assert not (tmp_path / "runs/a/model.zarr").exists()
    summary = fit_job(make(solver=solver | {"allow_unconverged": True}, output={"directory": str(tmp_path / "runs/b")}))
    assert not summary.converged
    facts = describe(str(tmp_path / "runs/b/model.zarr")).facts
    assert "NOT CONVERGED" in facts["solver"]
    assert facts["allow unconverged"] is True
    summary.table()


def test_a_later_attempt_goes_by_the_first_plan(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make(solver={"name": "cg"})

    def interrupt(phase: str, *_: Any) -> None:
        if phase.startswith("cg"):
            raise InterruptedRunError("interrupted")

    with pytest.raises(InterruptedRunError):
        fit_job(job, progress=interrupt)
    first = json.loads((tmp_path / "runs/a/plan.json").read_text())
    monkeypatch.setattr("dkrr.fit.choices.choose_rank", lambda *arguments, **options: 7)
    monkeypatch.setattr("dkrr.jobs.plan.measure_machine", None)  # nothing is measured again
    summary = fit_job(job)
    assert summary.plan.rank == first["rank"] != 7
    assert summary.plan.estimated_seconds == first["estimated_seconds"]
    assert load_model(tmp_path / "runs/a/model.zarr").provenance["rank"] == first["rank"]


def test_nystrom_of_a_matrix_is_refused_with_its_line(make: Make, tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="precomputed"):
        make(model={"kernel": "precomputed", "gamma": None}, solver={"name": "nystrom"})


def test_candidates_of_a_larger_plan(make: Make, tmp_path: Path) -> None:
    job = make(data={"path": "generate:friedman?n=11000&d=5&seed=0"}, solver={"tile_size": "auto"})
    planned = plan(job)
    assert {(item["solver"], item["precision"]) for item in planned.candidates} == {
        ("cholesky", "float64"),
        ("cholesky", "mixed"),
        ("cg", "float64"),
        ("cg", "mixed"),
    }
    text = str(planned)
    assert "candidates" in text
    for word in ("a worker", "on disk", "iterations", planned.reasons["solver"][:7]):
        assert word in text
    json.dumps(planned.to_dict())
