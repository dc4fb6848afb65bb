"""Targets of (m,) and of (m, 1) are the same thing where predictions are compared with them; others are refused."""

from __future__ import annotations

from typing import Any

import dask.array as da
import numpy as np
import pandas as pd
import pytest

import dkrr

RNG = np.random.default_rng(0)
X = RNG.standard_normal((200, 3))
Y = X @ [1.0, -2.0, 0.5] + 0.1 * RNG.standard_normal(200)

FORMS: dict[str, Any] = {
    "1-D": lambda y: y,
    "a column": lambda y: y[:, None],
    "a frame": lambda y: pd.DataFrame({"y": y}),
    "a series": pd.Series,
    "a dask column": lambda y: da.from_array(y[:, None], chunks=64),
    "a list": lambda y: y.tolist(),
}


@pytest.fixture(scope="module", params=["1-D", "a column"])
def fitted(request: Any) -> dkrr.KernelRidge:
    return dkrr.KernelRidge(1e-2).fit(X[:100], FORMS[request.param](Y[:100]))


@pytest.mark.parametrize("form", FORMS)
def test_one_column_is_one_dimension(fitted: dkrr.KernelRidge, form: str) -> None:
    y = FORMS[form](Y[100:])
    inside = fitted.interval_coverage(X[100:], y, 0.9)
    lower, upper = fitted.predict_interval(X[100:], 0.9)
    assert inside == pytest.approx(np.mean((np.ravel(lower) <= Y[100:]) & (Y[100:] <= np.ravel(upper))))
    assert 0.8 < inside <= 1
    assert fitted.score(X[100:], y) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("shape", [(99,), (1,), (1, 1), (100, 2), (1, 100), (100, 1, 1), ()], ids=str)
def test_other_shapes_are_refused(fitted: dkrr.KernelRidge, shape: tuple[int, ...]) -> None:
    with pytest.raises(dkrr.DataError, match=r"y .*shape .* expected"):
        fitted.interval_coverage(X[100:], np.zeros(shape))
    with pytest.raises((ValueError, TypeError)):
        fitted.score(X[100:], np.zeros(shape))


def test_several_targets_are_compared_each_with_its_own() -> None:
    both = np.stack([Y, -Y], axis=1)
    est = dkrr.KernelRidge(1e-2).fit(X[:100], both[:100])
    assert (est.interval_coverage(X[100:], both[100:]) > 0.8).all()
    with pytest.raises(dkrr.DataError, match=r"y has shape \(100,\); \(100, 2\) expected"):
        est.interval_coverage(X[100:], Y[100:])


def test_a_target_that_is_no_number_is_named(fitted: dkrr.KernelRidge) -> None:
    y = Y[100:].copy()
    y[7] = np.nan
    with pytest.raises(dkrr.DataError, match="row 7"):
        fitted.interval_coverage(X[100:], y)
