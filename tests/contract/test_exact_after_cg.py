"""After conjugate gradients leave-one-out is exact, and so are intervals: a factor is made for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import dkrr
from dkrr.cli import main

N = 90


def fitted(seed: int, decades: float, alpha: float = 0.1, **options: object) -> tuple[dkrr.KernelRidge, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((N, 3))
    y = np.sin(X[:, 0]) + 0.3 * rng.standard_normal(N)
    weight = 10 ** rng.uniform(-decades, decades, N) if decades else None
    est = dkrr.KernelRidge(alpha, kernel="rbf", gamma=0.3, solver="cg", **options)  # type: ignore[arg-type]
    return est.fit(X, y, sample_weight=weight), X


@pytest.mark.parametrize("decades", [0, 6])
def test_intervals_after_cg_are_those_of_exact_residuals(decades: float) -> None:
    est, X = fitted(0, decades)
    left_out = est.leave_one_out()
    whole = dkrr.KernelRidge(0.1, kernel="rbf", gamma=0.3)
    whole.fit(X, est._training.y, sample_weight=est._training.weight)
    np.testing.assert_allclose(left_out.residuals, whole.leave_one_out().residuals, rtol=1e-5, atol=1e-6)
    size = np.sort(np.abs(left_out.residuals[:, 0]))
    lower, upper = est.predict_interval(X, 0.8)
    assert (upper - lower) / 2 == pytest.approx(np.full(N, size[int(np.ceil((N + 1) * 0.8)) - 1]), rel=1e-6)


@pytest.mark.parametrize(("said", "code"), [('"exact"', 0), ('"stochastic"', 2), ('"yes"', 2)])
def test_the_words_of_earlier_jobs(said: str, code: int, tmp_path: Path) -> None:
    np.savetxt(tmp_path / "rows.csv", np.eye(9)[:, :3], delimiter=",", header="a,b,y", comments="")
    (tmp_path / "job.toml").write_text(
        f'[data]\npath = "rows.csv"\ntarget = "y"\n[evaluate]\nleave_one_out = {said}\n[model]\nkernel = "rbf"\n'
    )
    ran = CliRunner().invoke(main, ["plan", str(tmp_path / "job.toml")])
    assert ran.exit_code == code, ran.output
    if code:
        assert "[evaluate] leave_one_out" in ran.output


def test_a_job_with_intervals_takes_exact_residuals_after_cg(tmp_path: Path) -> None:
    est, X = fitted(0, 0)
    rng = np.random.default_rng(0)
    y = np.sin(rng.standard_normal((N, 3))[:, 0]) + 0.3 * rng.standard_normal(N)
    np.savetxt(
        tmp_path / "rows.csv", np.column_stack([X, y]), delimiter=",", header="a,b,c,y", comments="", fmt="%.17g"
    )
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "rows.csv"\ntarget = ["y"]\n[model]\nkernel = "rbf"\ngamma = 0.3\nalpha = 0.1\n'
        '[solver]\nname = "cg"\ntile_size = 64\n[evaluate]\nintervals = 0.8\n'
    )
    ran = CliRunner().invoke(main, ["fit", str(tmp_path / "job.toml")])
    assert ran.exit_code == 0, ran.output
    model = dkrr.load_model(next((tmp_path / "runs").rglob("model.zarr")))
    for found, expected in zip(model.predict_interval(X, 0.8), est.predict_interval(X, 0.8), strict=True):
        assert found[:, 0] == pytest.approx(expected, abs=1e-5)
