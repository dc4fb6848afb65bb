"""The estimator's primal solver: attributes, what "auto" takes, saving, lazy predictions, leave-one-out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from sklearn.linear_model import Ridge

import dkrr
from dkrr.dataset import ingest
from dkrr.errors import ParameterError

N, D = 240, 5


def rows(n: int = N, t: int = 1) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, D)) + 1
    y = x @ rng.standard_normal((D, t)) + rng.standard_normal((n, t)) + 3
    return x, y[:, 0] if t == 1 else y, rng.uniform(0.2, 2, n) * (np.arange(n) % 7 > 0)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_coefficients_are_those_of_ridge(t: int, intercept: bool, stored: bool, tmp_path: Path) -> None:
    x, y, weight = rows(t=t)
    store = str(tmp_path / "store") if stored else None
    found = dkrr.KernelRidge(alpha=0.5, kernel="linear", solver="primal", fit_intercept=intercept, store=store)
    found.fit(x, y, sample_weight=weight)
    ridge = Ridge(alpha=0.5, fit_intercept=intercept, solver="cholesky").fit(x, y, sample_weight=weight)
    np.testing.assert_allclose(found.coef_, ridge.coef_, rtol=1e-10)
    np.testing.assert_allclose(found.intercept_, ridge.intercept_, rtol=1e-10)
    np.testing.assert_allclose(found.predict(x), ridge.predict(x), rtol=1e-10)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("degree", [2, 3])
def test_dual_and_primal_agree(degree: int, intercept: bool) -> None:
    x, y, weight = rows(t=2)
    dual, primal = (
        dkrr.KernelRidge([0.5, 2.0], kernel="poly", degree=degree, solver=solver, fit_intercept=intercept).fit(
            x, y, sample_weight=weight
        )
        for solver in ("cholesky", "primal")
    )
    np.testing.assert_allclose(primal.predict(x), dual.predict(x), rtol=1e-9)
    np.testing.assert_allclose(primal.dual_coef_, dual.dual_coef_, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(primal.X_fit_, x)
    assert not hasattr(primal, "coef_")
    np.testing.assert_allclose(primal.leave_one_out().residuals, dual.leave_one_out().residuals, rtol=0, atol=1e-9)


def test_rows_on_disk_are_not_needed_any_more(tmp_path: Path) -> None:
    x, y, weight = rows()
    dataset = ingest(x, tmp_path / "rows.zarr", y=y, sample_weight=weight)
    found = dkrr.KernelRidge(alpha=0.5, kernel="poly", degree=2, solver="primal", store=str(tmp_path / "store"))
    found.fit(dataset)
    memory = dkrr.KernelRidge(alpha=0.5, kernel="poly", degree=2, solver="primal").fit(x, y, sample_weight=weight)
    assert not hasattr(found, "dual_coef_")
    assert not hasattr(found, "X_fit_")
    left_out = found.leave_one_out().residuals
    np.testing.assert_allclose(left_out, memory.leave_one_out().residuals, rtol=1e-9)
    found.save(tmp_path / "model.zarr")
    assert sum(path.stat().st_size for path in (tmp_path / "model.zarr").rglob("c/*/*")) < 8 * 4100
    model = dkrr.load_model(tmp_path / "model.zarr")
    np.testing.assert_allclose(model.predict(x), memory.predict(x), rtol=1e-11)
    lazy = model.predict(da.from_array(x, chunks=(50, D)))
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), model.predict(x), rtol=1e-13)


def test_auto_takes_it_for_many_rows_of_few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, weight = rows(1500)
    plain = dkrr.KernelRidge(kernel="linear").fit(x, y, sample_weight=weight)
    monkeypatch.setattr("dkrr.models.estimator.MAX_IN_PROCESS_ROWS", 1000)
    auto = dkrr.KernelRidge(kernel="linear").fit(x, y, sample_weight=weight)
    assert (plain.solution_.solver, auto.solution_.solver) == ("cholesky", "primal")
    np.testing.assert_allclose(auto.dual_coef_, plain.dual_coef_, rtol=0, atol=1e-8 * np.abs(plain.dual_coef_).max())


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"kernel": "rbf"}, "no finite number"),
        ({"kernel": "poly", "degree": 2.5}, "whole degree"),
        ({"kernel": "poly", "coef0": -1}, "coef0"),
        ({"precision": "mixed"}, "all float64"),
        ({"solver_params": {"rank": 10}}, "rank is for solver 'cg'"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(parameters: dict[str, Any], words: str) -> None:
    x, y, _ = rows()
    with pytest.raises(ParameterError, match=words):
        dkrr.KernelRidge(solver="primal", **parameters).fit(x, y)
