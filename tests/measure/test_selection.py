"""A grid of alphas: equal to RidgeCV of scikit-learn and to refitting, and its time beside one eigendecomposition."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from scipy.linalg import eigh
from sklearn.linear_model import RidgeCV
from threadpoolctl import threadpool_limits

from dkrr import KernelRidge, KernelRidgeCV
from dkrr.kernels import make_kernel
from dkrr.selection.cv import AlphaPath, AlphaSearch
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(7200)]

TOL = 1e-8
MAX_RATIO = 1.5


def friedman(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(n, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + rng.standard_normal(n)


def relative(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


def test_measure_equals_ridge_cv(judge: Judge) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((600, 20))
    y = x @ rng.standard_normal((20, 3)) + np.array([0.5, 4.0, 30.0]) * rng.standard_normal((600, 3)) + 3.0
    weight, z, alphas = rng.uniform(0.1, 2.0, 600), rng.standard_normal((50, 20)), np.logspace(-3, 4, 15)
    worst, cases = 0.0, 0
    for fit_intercept in (False, True):
        for sample_weight in (None, weight):
            for per_target in (False, True):
                shared = {"alphas": alphas, "fit_intercept": fit_intercept, "alpha_per_target": per_target}
                ours = KernelRidgeCV(**shared).fit(x, y, sample_weight=sample_weight)
                theirs = RidgeCV(**shared).fit(x, y, sample_weight=sample_weight)
                assert np.array_equal(ours.alpha_, theirs.alpha_)
                worst = max(worst, relative(ours.predict(z), theirs.predict(z)))
                worst = max(worst, relative(ours.best_score_, theirs.best_score_))
                cases += 1
    judge(
        "KernelRidgeCV and RidgeCV",
        f"the same alphas in {cases} cases, predictions and scores differ by {worst:.1e}",
        f"linear kernel, 600 x 20, 3 targets: the same alpha, {TOL:g}",
        worst <= TOL,
    )


def test_measure_leave_one_out_is_refitting(judge: Judge) -> None:
    x, y = friedman(300)
    targets = np.column_stack([y, np.cos(x[:, 5]) + y])
    rng = np.random.default_rng(2)
    worst = 0.0
    for fit_intercept in (False, True):
        for weight in (np.ones(300), np.where(rng.uniform(size=300) < 0.1, 0.0, rng.uniform(0.1, 2, 300))):
            shared = {"kernel": "rbf", "gamma": 0.5, "fit_intercept": fit_intercept}
            ours = KernelRidgeCV([0.1], **shared, scoring="r2", store_cv_results=True)
            predicted = ours.fit(x, targets, sample_weight=weight).cv_results_[:, :, 0]
            for i in range(300):
                rest = np.arange(300) != i
                one = KernelRidge(0.1, **shared).fit(x[rest], targets[rest], sample_weight=weight[rest])
                worst = max(worst, relative(predicted[i], one.predict(x[i : i + 1])[0]))
    judge(
        "leave-one-out from an eigendecomposition",
        f"differs from refitting 300 times by {worst:.1e}",
        f"n = 300, weights, intercept, both: {TOL:g}",
        worst <= TOL,
    )


def test_measure_twenty_alphas(judge: Judge) -> None:
    n = scaled(8_000)
    x, y = friedman(n)
    kernel, alphas = make_kernel("rbf", gamma=0.5), np.logspace(-4, 3, 20)
    with threadpool_limits(1, user_api="blas"):
        matrix = kernel(x, x)
        began = time.perf_counter()
        eigh(matrix)
        one = time.perf_counter() - began
        del matrix
        began = time.perf_counter()
        path = AlphaPath(kernel=kernel, x=x - x.mean(axis=0), y=y[:, None])
        search = AlphaSearch(y=y[:, None], weight=None, num_alphas=len(alphas))
        path.search(alphas, search)
        fit = path.fit(alphas[search.index], began)
        seconds = time.perf_counter() - began
    judge(
        "20 alphas",
        f"{seconds / one:.2f} x one eigendecomposition ({seconds:.1f} s, {one:.1f} s), residual "
        f"{max(fit.solution.relative_residual):.1e}",
        f"n = {n:,}, Gram matrix, leave-one-out, fit and residual: at most {MAX_RATIO}",
        seconds <= MAX_RATIO * one,
        at_full_size=True,
    )
