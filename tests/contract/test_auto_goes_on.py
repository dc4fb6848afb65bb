"""A way that was chosen by "auto" is replaced when it breaks down; one that was named stays an error."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import dkrr
from dkrr.cli import main
from dkrr.engine.tasks import InProcessExecutor
from dkrr.fit import plan as planner
from dkrr.fit.choices import Iterations
from dkrr.jobs.inspection import verify
from dkrr.jobs.run import fit_job
from dkrr.linalg import cg_solver
from tests.faults import failing_at, flip
from tests.jobs.helpers import Make, job_maker

X = np.random.default_rng(1).uniform(size=(400, 4))
Y = np.sin(6 * X[:, 0]) + X[:, 1]
TOL = 1e-8


def estimator(**parameters: Any) -> dkrr.KernelRidge:
    given: dict[str, Any] = {"kernel": "rbf", "gamma": 2.0, "alpha": 1e-2, "tile_size": 128, "tol": TOL}
    return dkrr.KernelRidge(**given | parameters)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dkrr")


@pytest.fixture
def no_row_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways are priced, and those in float32 are the cheapest."""
    price_in_order(monkeypatch, "cg mixed", "cg float64", "cholesky float64", "cholesky mixed")


def price_in_order(monkeypatch: pytest.MonkeyPatch, *order: str) -> None:
    """All ways are priced, and these are the cheapest, in their order."""
    monkeypatch.setattr(planner, "SMALL_FLOPS", 0.0)
    priced_way = planner.priced_way

    def in_order(*arguments: Any) -> Any:
        found = priced_way(*arguments)
        rank = next(k for k, name in enumerate(order) if found.name.startswith(name))
        return replace(found, seconds=found.seconds | {"start": 10.0 ** (2 * rank)}, infeasible="")

    monkeypatch.setattr(planner, "priced_way", in_order)


def test_a_breakdown_in_float32_goes_on_in_float64(
    no_row_is_few: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with failing_at("compute.cg.float32.curvature:@4:nan"):
        found = estimator(store=str(tmp_path)).fit(X, Y)
    solution = found.solution_
    assert (solution.solver, solution.precision) == ("cg", "float64")
    assert "cg mixed" in solution.message
    assert "broke down at iteration 4" in solution.message
    assert "went on with cg float64" in solution.message
    assert [record.levelname for record in caplog.records if "went on with" in record.getMessage()] == ["WARNING"]
    (given_up,) = solution.given_up
    assert given_up["iterations"] == 4
    named = estimator(solver="cg", precision="float64", solver_params={"rank": 100}).fit(X, Y)
    np.testing.assert_allclose(found.predict(X), named.predict(X), rtol=0, atol=1e-6)
    assert max(solution.relative_residual) <= TOL
    assert not list((tmp_path / "solves").iterdir())


def test_what_was_named_stays_an_error_that_names_what_would_work(tmp_path: Path) -> None:
    with (
        failing_at("compute.cg.float32.curvature:@4:nan"),
        pytest.raises(dkrr.NotPositiveDefiniteError, match="at iteration 4") as caught,
    ):
        estimator(solver="cg", precision="mixed", solver_params={"rank": 50}, store=str(tmp_path)).fit(X, Y)
    assert re.search(r"; cholesky float64 would take less than 1 s$", caught.value.hint)
    assert not list((tmp_path / "solves").iterdir())


@pytest.mark.parametrize("named", ["solver", "precision", "both"])
def test_what_was_named_holds_in_every_way(named: str, no_row_is_few: None) -> None:
    words = {
        "solver": {"solver": "cg"},
        "precision": {"precision": "mixed"},
        "both": {"solver": "cg", "precision": "mixed"},
    }
    with failing_at("compute.cg.float32.curvature:@4:nan"):
        if named == "both":  # ranks are left, and share the defect
            with pytest.raises(dkrr.NotPositiveDefiniteError, match="not finite"):
                estimator(**words[named]).fit(X, Y)
            return
        found = estimator(**words[named]).fit(X, Y)
    solution = found.solution_
    assert (solution.solver, solution.precision) == {"solver": ("cg", "float64"), "precision": ("cholesky", "mixed")}[
        named
    ]
    assert len(solution.given_up) == 1


def test_a_float32_factor_that_no_shift_mends_says_nothing_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A polynomial of rank 15: alpha is far below the rounding of float32, and far above that of float64."""
    price_in_order(monkeypatch, "cholesky mixed", "cholesky float64", "cg mixed", "cg float64", "primal")
    monkeypatch.setattr(cg_solver, "MAX_SHIFTS", 0)  # how many it takes depends on the kernel of the BLAS
    rows = np.random.default_rng(1).random((300, 4)) * [1, 5, 0.2, 3]
    targets = np.sin(rows[:, 0])
    kernel = {"kernel": "poly", "gamma": 1.0, "degree": 2, "coef0": 1, "tile_size": 100}
    found = dkrr.KernelRidge(1e-4, **kernel).fit(rows, targets)
    assert (found.solution_.solver, found.solution_.precision) == ("cholesky", "float64")
    assert "a float32 factor of A" in found.solution_.message
    named = dkrr.KernelRidge(1e-4, solver="cholesky", precision="float64", **kernel).fit(rows, targets)
    np.testing.assert_array_equal(found.predict(rows), named.predict(rows))
    with pytest.raises(dkrr.NotPositiveDefiniteError, match="a float32 factor of A") as caught:
        dkrr.KernelRidge(1e-4, solver="cholesky", precision="mixed", **kernel).fit(rows, targets)
    assert "cholesky float64 would take" in caught.value.hint


def test_an_indefinite_matrix_ends_in_the_error_of_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    price_in_order(monkeypatch, "cholesky mixed", "cholesky float64", "cg mixed", "cg float64")
    with pytest.raises(dkrr.NotPositiveDefiniteError) as caught:
        dkrr.KernelRidge(1e-3, kernel="sigmoid", gamma=2.0, coef0=-1.0, tile_size=128).fit(X, Y)
    assert "float32" not in caught.value.message


def test_a_preconditioner_that_fails_takes_its_rank_with_it(no_row_is_few: None) -> None:
    rows = np.random.default_rng(2).uniform(size=(1000, 4))
    with failing_at("compute.cg.preconditioned:@3:nan"):
        found = estimator(solver="cg", precision="float64", tile_size=512).fit(rows, np.sin(6 * rows[:, 0]))
    (given_up,) = found.solution_.given_up
    assert given_up["because"] == "preconditioner"
    assert given_up["way"] != given_up["next"]


@pytest.fixture
def make(tmp_path: Path, cluster_client: Any) -> Make:
    document: dict[str, Any] = {
        "data": {"path": "generate:friedman?n=600&d=5&seed=0", "standardize": True},
        "model": {"kernel": "rbf", "gamma": 0.1, "alpha": 0.1},
        # a float32 factor, for the rows are few; conjugate gradients with float32 products are left
        "solver": {"tile_size": 128, "precision": "mixed"},
        "cluster": {"scheduler": cluster_client.scheduler.address},
        "output": {"directory": str(tmp_path / "runs/a")},
    }
    return job_maker(document, tmp_path)


def test_a_job_with_workers_goes_on_and_says_so(make: Make, tmp_path: Path) -> None:
    with failing_at("compute.cg.preconditioned:@2:nan"):
        summary = fit_job(make())
    assert (summary.solver, summary.precision) == ("cg", "mixed")
    sentence = summary.given_up[0]["sentence"]
    assert sentence.startswith("cholesky mixed broke down at iteration 1 (")
    run = tmp_path / "runs/a"
    result = json.loads((run / "result.json").read_text())
    assert result["given_up"][0]["sentence"] == sentence
    assert result["message"].startswith(sentence)
    assert json.loads((run / "status.json").read_text())["given_up"][0]["sentence"] == sentence
    assert sentence[:40] in (run / "report.html").read_text()
    events = "".join(path.read_text() for path in sorted((run / "events").iterdir()))
    assert events.count("went on with cg mixed") == 1
    shown = CliRunner().invoke(main, ["status", str(run)])
    assert "went on with cg mixed" in " ".join(shown.output.split())
    model = dkrr.load_model(run / "model.zarr")
    named = fit_job(make(solver={"name": "cg", "tile_size": 128}, output={"directory": str(tmp_path / "runs/b")}))
    there = dkrr.load_model(named.model_path).dual_coef.read(0, 600)
    np.testing.assert_allclose(model.dual_coef.read(0, 600), there, rtol=0, atol=1e-6 * np.abs(there).max())
    assert model.provenance["solver"] == "cg"
    # of the way that was given up nothing stays
    assert not list((tmp_path / "runs/store/solves").glob("*"))
    assert not list((tmp_path / "runs/store/factors").glob("*.zarr"))
    assert not verify(str(run))


IN_PROCESS = """
import contextlib, sys
import dkrr.jobs.run
from dkrr.engine.tasks import InProcessExecutor

dkrr.jobs.run.job_executor = lambda *_: contextlib.nullcontext(InProcessExecutor())
dkrr.jobs.run.fit_job(sys.argv[1])
"""


@pytest.mark.parametrize(
    "moment",
    ["written*/given_up.json:@1", "compute.cg.float32.curvature:@3"],
)
def test_a_job_that_was_killed_goes_on_with_the_next_way(
    moment: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dkrr.jobs.run.job_executor", lambda *_: contextlib.nullcontext(InProcessExecutor()))
    with failing_at("compute.cg.preconditioned:@2:nan"):
        whole = fit_job(make(output={"directory": str(tmp_path / "runs/b"), "store": str(tmp_path / "other")}))
    path = tmp_path / "job.toml"
    path.write_text(make().to_toml())
    environment = os.environ | {"DKRR_FAILPOINTS": f"compute.cg.preconditioned:@2:nan;{moment}:sigkill"}
    ended = subprocess.run([sys.executable, "-c", IN_PROCESS, str(path)], env=environment, capture_output=True)
    assert ended.returncode == -9, ended.stderr
    with failing_at("compute.cholesky.tile:1:eio"):  # no tile of a factor is computed again
        summary = fit_job(path)
    assert summary.given_up == whole.given_up
    first, second = (dkrr.load_model(found.model_path).dual_coef.read(0, 600) for found in (whole, summary))
    np.testing.assert_array_equal(first, second)
    for name in ("solves/*", "factors/*.zarr"):
        assert not list((tmp_path / "runs/store").glob(name))


def test_rounding_of_a_large_matrix_is_no_error(no_row_is_few: None) -> None:
    """|K| is about n, and n eps32 is far above alpha: what float32 products make of A is indefinite."""
    rows = np.random.default_rng(3).uniform(size=(1000, 1))
    y = np.sin(6 * rows[:, 0]) + 0.1 * np.random.default_rng(4).standard_normal(1000)
    given = {"gamma": 1.0, "alpha": 1e-5, "tile_size": 1024, "tol": 1e-6}
    found = estimator(**given, solver="cg", solver_params={"rank": 50}).fit(rows, y)
    (given_up,) = found.solution_.given_up
    assert given_up["because"] == "float32"
    assert found.solution_.precision == "float64"
    exact = estimator(**given, solver="cholesky", precision="float64").fit(rows, y)
    np.testing.assert_allclose(found.predict(rows), exact.predict(rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("parameters", [{}, {"fit_intercept": True}], ids=["", "intercept"])
def test_what_is_there_is_used(parameters: dict[str, Any], no_row_is_few: None) -> None:
    """The preconditioner of the same rank is not made again, and the iteration starts from where the other came."""
    rows = np.random.default_rng(2).uniform(size=(400, 4))
    y = np.column_stack([np.sin(6 * rows[:, 0]), rows[:, 1]])
    given = {"solver": "cg", "tile_size": 256, "solver_params": {"rank": 50}, **parameters}
    count = "written*/pivots/c/*:0:eio"
    with failing_at(count) as once:
        named = estimator(**given, precision="float64").fit(rows, y)
    with failing_at(f"{count};compute.cg.float32.curvature:@6:nan") as points:
        found = estimator(**given).fit(rows, y)
    assert found.solution_.given_up[0]["next"] == "cg float64, rank 50"
    assert points.rules[0].visits == once.rules[0].visits > 0
    start = found.solution_.reused["start"]
    assert start["source"] == "the iterate of cg mixed, rank 50"
    assert start["relative_residual"] < 0.9
    assert found.n_iter_ < named.n_iter_
    np.testing.assert_allclose(found.predict(rows), named.predict(rows), rtol=0, atol=1e-6)


def test_an_iteration_that_another_way_outruns_is_given_up(
    no_row_is_few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced_way = planner.priced_way

    def hopeful(*arguments: Any) -> Any:
        """Conjugate gradients in float32 are expected to need three iterations, all else takes next to no time."""
        found = priced_way(*arguments)
        seconds = {"start": 1e-9} if found.name.startswith("cg mixed") else {"start": 1e-6}
        return replace(found, iterations=Iterations(1, 3), seconds=seconds)

    monkeypatch.setattr(planner, "priced_way", hopeful)
    with failing_at("compute.multiply.pair:1:sleep=0.01"):
        found = estimator().fit(X, Y)
    (given_up,) = found.solution_.given_up
    assert given_up["because"] == "slow"
    assert given_up["way"].startswith("cg mixed")
    assert found.solution_.solver == "cholesky"
    assert re.search(r"is slow after \d iterations \(.*at most 3 were foreseen, about", found.solution_.message)


def test_an_iteration_of_auto_may_end_at_the_limit_of_float64_and_a_named_one_may_not(
    no_row_is_few: None, tmp_path: Path
) -> None:
    hard: dict[str, Any] = {"gamma": 1e-3, "alpha": 1e-6, "tol": 1e-13, "precision": "float64", "tile_size": 256}
    rows, targets = X[:200], Y[:200]
    model = estimator(store=tmp_path / "auto", solver="auto", **hard).fit(rows, targets)
    found = model.solution_
    assert found.solver == "cg"
    assert found.converged
    assert found.relative_residual[0] > 1e-13
    assert found.backward_error[0] < 1e-14
    assert "the limit of float64" in found.message
    exact = estimator(store=tmp_path / "factor", solver="cholesky", **hard).fit(rows, targets)
    np.testing.assert_allclose(model.predict(rows), exact.predict(rows), atol=1e-7)
    with pytest.raises(dkrr.ConvergenceError, match="out of reach"):
        estimator(store=tmp_path / "named", solver="cg", **hard).fit(rows, targets)


def test_iterations_on_a_given_matrix_choose_their_rank_without_measuring(no_row_is_few: None, tmp_path: Path) -> None:
    """As for more than 9,000 rows: nothing is measured for a matrix that is there."""
    rows = np.random.default_rng(5).uniform(size=(1100, 4))
    y = np.sin(6 * rows[:, 0])
    matrix = np.asarray(dkrr.gram_matrix(rows, kernel="rbf", gamma=2.0, store=tmp_path / "gram"))
    given: dict[str, Any] = {"kernel": "precomputed", "gamma": None, "tile_size": 512}
    found = estimator(**given, solver="cg", store=tmp_path / "cg").fit(matrix, y)
    assert "rank" in found.solution_.message
    exact = estimator(**given, solver="cholesky", store=tmp_path / "exact").fit(matrix, y)
    np.testing.assert_allclose(found.predict(matrix), exact.predict(matrix), rtol=0, atol=1e-6)


def test_a_plan_says_where_float32_products_cannot_lead_to_the_answer(tmp_path: Path) -> None:
    """|K| of 10,000 rows that are all alike is 10,000, and alpha is below what float32 leaves of it."""
    (tmp_path / "job.toml").write_text(
        "[data]\n"
        'path = "generate:friedman?n=10000&d=9&seed=0"\n'
        "standardize = true\n"
        "[model]\n"
        'kernel = "matern"\n'
        "kernel_params = { nu = 1.5, length_scale = 80.0 }\n"
        "alpha = 1e-5\n"
    )
    done = CliRunner().invoke(main, ["plan", str(tmp_path / "job.toml"), "--json"])
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    ways = [way for way in plan["candidates"] if way["solver"] == "cg"]
    assert {way["precision"] for way in ways} == {"float64", "mixed"}
    for way in ways:
        assert ("float32 products are off by up to" in way["infeasible"]) == (way["precision"] == "mixed")
    assert (plan["solver"], plan["precision"]) != ("cg", "mixed")


def test_tiles_that_are_computed_again_are_not_counted_as_found(make: Make) -> None:
    spec, flipped = make(solver={"name": "cholesky", "precision": "float64", "tile_size": 128}), list[Path]()

    def progress(phase: str, *_: Any) -> None:
        if phase.startswith("solve") and not flipped:
            flipped.extend(Path(spec.store).glob("factors/*.zarr/c/1/0"))
            flip(flipped[0])

    summary = fit_job(spec, progress=progress)
    assert ("tiles of the factor", "15, 15 computed, 0 found valid") in summary.facts()


@pytest.mark.parametrize("missing", [["4/4"], []])
def test_a_tile_that_turns_out_damaged_counts_as_computed(missing: list[str], make: Make) -> None:
    given = {"solver": {"name": "cholesky", "precision": "float64", "tile_size": 128}}
    earlier = make(output={"keep": "factor"}, **given)
    fit_job(earlier)
    (factor,) = Path(earlier.store).glob("factors/*.zarr")
    flip(factor / "c/3/2")
    for name in missing:
        (factor / "c" / name).unlink()
    facts = fit_job(make(output={"directory": "runs/b"}, **given)).facts()
    computed = 1 + len(missing)
    assert ("tiles of the factor", f"15, {computed} computed, {15 - computed} found valid") in facts


def test_what_a_way_that_was_given_up_began_with_is_no_reuse(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = {"output": {"directory": "runs/b"}, "model": {"alpha": 0.2}}
    fit_job(make(solver={"name": "cg", "rank": 100, "tile_size": 128}, **earlier))
    price_in_order(monkeypatch, "cg mixed", "cholesky float64", "cg float64", "cholesky mixed", "primal")
    with failing_at("compute.cg.float32.curvature:@2:nan"):
        summary = fit_job(make(solver={"precision": "auto"}))
    assert summary.given_up
    assert (summary.solver, summary.precision) == ("cholesky", "float64")
    assert "start" not in summary.reused
