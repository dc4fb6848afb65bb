"""Leave-one-out and what rests on it: of which rows, of which coefficients, seen by whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import BaseCrossValidator

import dkrr
from dkrr.errors import DataError
from tests.contract.helpers import run
from tests.jobs.retrain.project import in_process

RNG = np.random.default_rng(3)
X = RNG.standard_normal((300, 4))
Y = np.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] + 0.3 * RNG.standard_normal(300)
KERNEL: dict[str, Any] = {"kernel": "rbf", "gamma": 0.5, "alpha": 1e-3, "solver": "cg"}


def unconverged(max_iter: int | None, tol: float) -> dkrr.KernelRidge:
    params = {"allow_unconverged": True, "preconditioner": "none"}
    return dkrr.KernelRidge(max_iter=max_iter, tol=tol, solver_params=params, **KERNEL).fit(X, Y)


@pytest.mark.parametrize(("max_iter", "tol"), [(3, 1e-8), (1, 1e-8), (None, 0.2)])
def test_rows_are_left_out_of_solutions_alone(max_iter: int | None, tol: float) -> None:
    est = unconverged(max_iter, tol)
    with pytest.raises(dkrr.ConvergenceError, match="relative residual of the fit"):
        est.leave_one_out()
    with pytest.raises(dkrr.ConvergenceError):
        est.predict_interval(X[:3])


def test_no_scale_is_known_without_a_solution() -> None:
    est = unconverged(3, 1e-8)
    with pytest.raises(dkrr.ParameterError, match="sigma2"):
        est.predict(X[:3], return_std=True)
    deviations = est.predict(X[:3], return_std=True, sigma2=1.0)[1]
    whole = dkrr.KernelRidge(**KERNEL | {"solver": "cholesky"}).fit(X, Y)
    np.testing.assert_allclose(deviations, whole.predict(X[:3], return_std=True, sigma2=1.0)[1], rtol=1e-6)


def test_centres_that_did_not_converge_have_no_leave_one_out() -> None:
    params = {"allow_unconverged": True, "num_centers": 40}
    options = KERNEL | {"solver": "nystrom", "solver_params": params}
    assert dkrr.KernelRidge(tol=1e-6, **options).fit(X, Y).leave_one_out().residuals.shape == (300, 1)
    with pytest.raises(dkrr.ConvergenceError, match="relative residual of the fit"):
        dkrr.KernelRidge(max_iter=1, **options).fit(X, Y).leave_one_out()


def test_a_splitter_sees_the_rows_as_they_were_given() -> None:
    class ByThreshold(BaseCrossValidator):  # type: ignore[misc]
        def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
            return 2

        def _iter_test_masks(self, X: Any = None, y: Any = None, groups: Any = None) -> Any:
            assert y.shape == (300,)
            yield X[:, 0] > 7.5
            yield X[:, 0] <= 7.5

    far = X + 7
    late = far[:, 0] > 7.5
    pairs = [(np.flatnonzero(~late), np.flatnonzero(late)), (np.flatnonzero(late), np.flatnonzero(~late))]
    scores = [
        dkrr.KernelRidgeCV(alphas=[0.1, 1.0], kernel="rbf", gamma=0.5, cv=cv).fit(far, Y).scores_
        for cv in (ByThreshold(), pairs)
    ]
    np.testing.assert_allclose(*scores, rtol=1e-12)


@pytest.mark.parametrize("alpha", [1.0, 49.0])  # 49 (1 / 49) is not 1
def test_intervals_count_rows_by_their_weight_and_not_by_their_leverage(alpha: float) -> None:
    features, y, weight = X.copy(), X[:, 0] + 0.1 * Y, np.ones(300)
    features[:100], y[:100] = 0.0, 5 * Y[:100]  # no leverage, and seen all the same
    weight[100:150], y[100:150] = 0.0, 100.0
    ends = [
        dkrr.KernelRidge(alpha=alpha, solver=solver).fit(features, y, weight).predict_interval(X[:5])
        for solver in ("primal", "cholesky")
    ]
    np.testing.assert_allclose(*ends, rtol=1e-9)


@pytest.mark.parametrize(
    ("coverage", "said"),
    [
        (0.9995, "less than or equal to 0.999"),
        (0.999, ["intervals = 0.999 of 300 training rows", "at most 0.996 for so few rows"]),
    ],
)
def test_intervals_that_the_rows_do_not_allow_are_refused_before_the_fit(
    coverage: float, said: str | list[str], tmp_path: Path
) -> None:
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, Y]), delimiter=",", header="a,b,c,d,y", comments="")
    job = tmp_path / "job.toml"
    job.write_text(
        f'[data]\npath = "rows.csv"\ntarget = "y"\n[evaluate]\nintervals = {coverage}\n[model]\nkernel = "rbf"\n'
    )
    for command in ("plan", "fit"):
        run(command, job, exits=2, said=said)


@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_nothing_is_known_without_the_only_row(precision: str) -> None:
    """A fit with an intercept; in single precision its share is rounding, and not 0."""
    weight = np.where(np.arange(len(X)) == 3, 1.0, 0.0)
    fitted = dkrr.KernelRidge(kernel="rbf", alpha=0.3, fit_intercept=True, solver="cholesky", precision=precision)
    for rows, given in ((slice(None), weight), (slice(3, 4), None)):
        with pytest.raises(DataError, match="decides its own prediction"):
            fitted.fit(X[rows], Y[rows], given).leave_one_out()


def test_a_search_without_a_score_is_an_error(tmp_path: Path) -> None:
    """Through features and the factor of their equations; row 7 alone has the last feature."""
    x = np.column_stack([X[:, :2], 1e3 * (np.arange(len(X)) == 7)])
    search = dkrr.KernelRidgeCV(alphas=[0.0], kernel="linear", solver="primal")
    with pytest.raises(DataError, match="row 7 decides its own prediction"):
        search.fit(x, Y)
    scores = [
        dkrr.KernelRidgeCV(alphas=[0.1, 10.0], kernel="linear", solver=solver).fit(1e3 * x, Y).scores_
        for solver in ("primal", "cholesky")
    ]
    np.testing.assert_allclose(*scores, rtol=1e-6)


@pytest.mark.parametrize("asked", ["leave_one_out = true", "intervals = 0.9\nfraction = 0.3"])
@pytest.mark.parametrize("solver", ["cg", "nystrom"])
def test_a_job_that_may_end_unconverged_ends_without_the_rows_left_out(
    solver: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_process(monkeypatch)
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, Y]), delimiter=",", header="a,b,c,d,y", comments="")
    job, folder = tmp_path / "job.toml", tmp_path / "runs/job"
    given = 'preconditioner = "none"' if solver == "cg" else "num_centers = 40"

    def fit(limits: str, exits: int = 0) -> None:
        job.write_text(
            f'[data]\npath = "rows.csv"\ntarget = "y"\n[evaluate]\n{asked}\n[model]\nkernel = "rbf"\nalpha = 0.1\n'
            f'[solver]\nname = "{solver}"\n{given}\n{limits}\n'
        )
        run("fit", job, exits=exits)

    # where it may not, nothing is written
    fit("max_iter = 2", exits=5)
    assert not (folder / "model.zarr").exists()

    fit("max_iter = 2\nallow_unconverged = true")
    facts = json.loads((folder / "result.json").read_text())
    assert not facts["converged"]
    assert facts["leave_one_out"] is None
    assert "no leave-one-out" in facts["message"]
    assert "leave-one-out" in caplog.text
    assert not (folder / "leave_one_out.zarr").exists()
    model = dkrr.load_model(folder / "model.zarr")
    assert (model.solution.converged, model.quantiles) == (False, None)
    assert (facts["score"] is None) == ("fraction" not in asked)

    # and goes on from there
    fit("allow_unconverged = true")
    assert json.loads((folder / "result.json").read_text())["leave_one_out"]["rmse"]


def test_a_job_that_converged_too_loosely_for_what_it_asks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    np.savetxt(tmp_path / "rows.csv", np.column_stack([X, Y]), delimiter=",", header="a,b,c,d,y", comments="")
    (tmp_path / "job.toml").write_text(
        '[data]\npath = "rows.csv"\ntarget = "y"\n[evaluate]\nleave_one_out = true\n[model]\nkernel = "rbf"\n'
        'alpha = 0.1\n[solver]\nname = "cg"\npreconditioner = "none"\ntol = 0.3\n'
    )
    run("fit", tmp_path / "job.toml", exits=5, said="leave-one-out of target 0: the relative residual of the fit")


UNITS: dict[str, dict[str, Any]] = {
    "memory": {},
    "tiles": {"tile_size": 64},
    "primal": {"solver": "primal"},
}


@pytest.mark.parametrize("unit", [1e85, 1e-70])
@pytest.mark.parametrize("way", UNITS)
def test_the_unit_of_the_features_does_not_matter(way: str, unit: float) -> None:
    def left_out(scale: float) -> Any:
        est = dkrr.KernelRidge(3.0 * scale**2, kernel="linear", fit_intercept=True, **UNITS[way])
        return est.fit(scale * X, Y).leave_one_out()

    wanted, found = left_out(1.0), left_out(unit)
    for name in ("residuals", "mean_squared_error", "degrees_of_freedom", "gcv"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("unit", [1e85, 1e-70])
@pytest.mark.parametrize("options", UNITS.values(), ids=UNITS)
def test_a_search_does_not_see_the_unit_of_the_features(options: dict[str, Any], unit: float) -> None:
    def scores(scale: float) -> Any:
        alphas = np.logspace(-1, 1, 8 if not options else 2) * scale**2
        return dkrr.KernelRidgeCV(alphas, kernel="linear", fit_intercept=True, **options).fit(scale * X, Y).scores_

    np.testing.assert_allclose(scores(unit), scores(1.0), rtol=1e-6)


@pytest.mark.parametrize("way", UNITS)
def test_the_unit_of_the_weights_does_not_matter(way: str) -> None:
    weight = np.random.default_rng(5).uniform(0.2, 2.0, len(X))

    def left_out(scale: float) -> Any:
        est = dkrr.KernelRidge(3.0 * scale, kernel="linear", fit_intercept=True, **UNITS[way])
        return est.fit(X, Y, sample_weight=weight * scale).leave_one_out()

    wanted, found = left_out(1.0), left_out(100.0)
    for name in ("residuals", "mean_squared_error", "degrees_of_freedom", "gcv"):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=1e-8, err_msg=name)


@pytest.mark.parametrize("options", [{}, {"tile_size": 64}])
def test_features_may_be_as_small_as_their_squares_are_numbers(options: dict[str, Any]) -> None:
    small, plain = (
        dkrr.KernelRidge(3.0 * scale**2, kernel="linear", fit_intercept=True, **options)
        .fit(scale * X, Y)
        .leave_one_out()
        for scale in (1e-150, 1.0)
    )
    np.testing.assert_allclose(small.residuals, plain.residuals, rtol=1e-6)
    np.testing.assert_allclose(small.gcv, plain.gcv, rtol=1e-6)
