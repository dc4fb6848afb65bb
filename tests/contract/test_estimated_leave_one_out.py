"""Leave-one-out by probes after cg: its standard error covers, whatever the weights; intervals do not rest on it."""

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


@pytest.mark.whole
@pytest.mark.parametrize("decades", [0, 1, 6])
def test_the_standard_error_covers(decades: float) -> None:
    for seed in range(3):
        est, _ = fitted(seed, decades, alpha=[1.0, 0.1, 0.01][seed % 3], fit_intercept=seed == 2)
        exact, found = est.leave_one_out("exact"), est.leave_one_out("stochastic", num_probes=24, seed=seed)
        off = abs(found.mean_squared_error - exact.mean_squared_error)
        assert (off <= 3 * found.mean_squared_error_se).all(), seed
        assert np.mean(abs(found.residuals - exact.residuals) <= 3 * found.standard_error + 1e-9) >= 0.93, seed


def test_the_standard_error_is_small_where_little_is_unknown() -> None:
    est, _ = fitted(0, 0, alpha=1.0)
    found = est.leave_one_out("stochastic")
    assert found.mean_squared_error_se[0] < 0.05 * found.mean_squared_error[0]


@pytest.mark.parametrize("decades", [0, 6])
def test_intervals_after_cg_are_those_of_exact_residuals(decades: float) -> None:
    est, X = fitted(0, decades)
    size = np.sort(np.abs(est.leave_one_out("exact").residuals[:, 0]))
    lower, upper = est.predict_interval(X, 0.8)
    assert (upper - lower) / 2 == pytest.approx(np.full(N, size[int(np.ceil((N + 1) * 0.8)) - 1]), rel=1e-6)


def test_estimates_that_are_not_known_well_enough_make_no_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for more rows than a factor is made of in passing."""
    exactly = dkrr.KernelRidge.leave_one_out
    monkeypatch.setattr(dkrr.KernelRidge, "leave_one_out", lambda self, method: exactly(self, "stochastic"))
    est, X = fitted(0, 6)
    with pytest.raises(dkrr.ParameterError, match=r"are estimates.*solver='cholesky'"):
        est.predict_interval(X, 0.8)
    known, X = fitted(0, 0, alpha=30.0)
    lower, upper = known.predict_interval(X, 0.8)
    size = np.sort(np.abs(exactly(known, "exact").residuals[:, 0]))
    assert (upper - lower) / 2 == pytest.approx(np.full(N, size[int(np.ceil((N + 1) * 0.8)) - 1]), rel=0.1)


def test_no_alpha_is_chosen_by_errors_that_nobody_knows() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((N, 3))
    search = dkrr.KernelRidgeCV([1e-2, 1.0], kernel="rbf", gamma=0.3, solver="cg")
    with pytest.raises(dkrr.DataError, match=r"is estimated as .* \+- .*solver='cholesky'"):
        search.fit(X, np.sin(X[:, 0]), sample_weight=10 ** rng.uniform(-6, 6, N))
    assert search.set_params(alphas=[1.0, 10.0]).fit(X, np.sin(X[:, 0])).alpha_ in (1.0, 10.0)


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


@pytest.mark.parametrize(("rows", "targets"), [(1e50, 1e-60), (1e-70, 1.0), (1.0, 1e-140)])
def test_an_estimate_does_not_depend_on_units(rows: float, targets: float) -> None:
    rng = np.random.default_rng(2)
    X = rng.random((N, 3))
    y = np.sin(4 * X[:, 0]) + X[:, 1]
    usual, other = (
        dkrr.KernelRidge(3 * a**2, kernel="linear", solver="cg", tile_size=32).fit(a * X, b * y)
        for a, b in ((1.0, 1.0), (rows, targets))
    )
    wanted, found = usual.leave_one_out("stochastic"), other.leave_one_out("stochastic")
    for name, power in (("mean_squared_error", 2), ("gcv", 2), ("degrees_of_freedom", 0), ("residuals", 1)):
        for _ in range(power):
            object.__setattr__(found, name, getattr(found, name) / targets)
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-3, err_msg=name)
