"""A fit that stopped short of its tolerance goes on from where it stopped, when it is given more iterations."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import dkrr
from dkrr.cli import main
from dkrr.engine.tasks import InProcessExecutor

X = np.random.default_rng(1).uniform(size=(300, 4))
Y = np.sin(6 * X[:, 0]) + X[:, 1]
FEW = 100


def estimator(**parameters: Any) -> dkrr.KernelRidge:
    given: dict[str, Any] = {"kernel": "rbf", "gamma": 2.0, "alpha": 1e-3, "solver": "cg", "tile_size": 100}
    return dkrr.KernelRidge(**given | parameters)


def chunks(store: Path) -> dict[str, int]:
    """When each chunk of a preconditioner or a factor was written."""
    return {
        str(path.relative_to(store)): path.stat().st_mtime_ns
        for path in store.rglob("c/*/*")
        if path.is_file() and ("preconditioner" in str(path) or "factors" in str(path))
    }


def begun_at(caplog: pytest.LogCaptureFixture) -> list[int]:
    """At which iterations fits went on."""
    said = [message for message in caplog.messages if message.startswith("going on from the checkpoint")]
    return [int(message.rpartition(" ")[2]) for message in said]


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dkrr")


@pytest.mark.parametrize(
    "parameters",
    [{}, {"precision": "mixed", "solver": "cholesky", "alpha": 1e-9}],
    ids=["cg", "mixed"],
)
def test_a_fit_in_the_same_store_goes_on(
    parameters: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    few, store = 1 if parameters else FEW, tmp_path / "store"
    whole = estimator(**parameters, store=str(tmp_path / "other")).fit(X, Y)
    assert whole.n_iter_ > few
    caplog.clear()
    with pytest.raises(dkrr.ConvergenceError) as caught:
        estimator(**parameters, store=str(store), max_iter=few).fit(X, Y)
    assert caught.value.num_iterations == few
    assert "max_iter" in caught.value.hint
    before = chunks(store)
    assert before
    with pytest.raises(dkrr.ConvergenceError):
        estimator(**parameters, store=str(store), max_iter=few).fit(X, Y)
    assert chunks(store) == before  # the preconditioner, or the factor it is, was found
    assert begun_at(caplog) == [few]
    caplog.clear()
    found = estimator(**parameters, store=str(store), max_iter=1000).fit(X, Y)
    assert begun_at(caplog) == [few]
    assert few < found.n_iter_ <= 1.1 * whole.n_iter_  # the true residual at the limit takes the place of another
    np.testing.assert_allclose(found.predict(X), whole.predict(X), rtol=0, atol=1e-7)
    assert not list((store / "solves").iterdir())


def test_the_same_estimator_goes_on_without_a_store(caplog: pytest.LogCaptureFixture) -> None:
    whole = estimator().fit(X, Y)
    found = estimator(max_iter=FEW)
    with pytest.raises(dkrr.ConvergenceError):
        found.fit(X, Y)
    with pytest.raises(dkrr.ConvergenceError):
        found.fit(X, Y)  # at once: the limit was reached before
    found.set_params(max_iter=1000).fit(X, Y)
    assert begun_at(caplog) == [FEW, FEW]
    np.testing.assert_allclose(found.predict(X), whole.predict(X), rtol=0, atol=1e-7)
    caplog.clear()
    found.set_params(max_iter=FEW)
    with pytest.raises(dkrr.ConvergenceError):
        found.fit(X, Y)
    found.set_params(max_iter=1000).fit(X[:200], Y[:200])  # other rows begin anew
    assert begun_at(caplog) == []
    whole = estimator().fit(X[:200], Y[:200])
    np.testing.assert_array_equal(found.dual_coef_, whole.dual_coef_)


def test_a_tolerance_out_of_reach_leaves_no_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(dkrr.ConvergenceError) as caught:
        estimator(store=str(tmp_path), tol=1e-17, max_iter=2000).fit(X, Y)
    assert caught.value.stagnated
    assert not list((tmp_path / "solves").iterdir())


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_job_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dkrr.jobs.run.job_executor", lambda *_: contextlib.nullcontext(InProcessExecutor()))
    np.savez("data.npz", X=X, y=Y)
    text = (
        '[data]\npath = "data.npz"\n[model]\nkernel = "rbf"\ngamma = 2.0\nalpha = 1e-3\n'
        '[solver]\nname = "cg"\ntile_size = 100\nmax_iter = {}\n[output]\ndirectory = "runs/a"\n'
    )
    Path("job.toml").write_text(text.format(FEW))
    result = run("fit", "job.toml")
    assert result.exit_code == 5, result.output
    assert "raise max_iter" in result.output
    before = chunks(tmp_path / "runs" / "store")
    Path("job.toml").write_text(text.format(1000))
    result = run("fit", "job.toml")
    assert result.exit_code == 0, result.output
    assert begun_at(caplog) == [FEW]
    assert before
    assert dkrr.load_model("runs/a/model.zarr").solution.num_iterations > FEW
