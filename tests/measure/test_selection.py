"""A grid of alphas: its time beside one eigendecomposition."""

from __future__ import annotations

import time

import numpy as np
import pytest
from scipy.linalg import eigh
from threadpoolctl import threadpool_limits

from dkrr.kernels import make_kernel
from dkrr.selection.path import AlphaPath, AlphaSearch
from tests.measure.figures import Judge, scaled

pytestmark = [pytest.mark.measure, pytest.mark.timeout(7200)]

MAX_RATIO = 1.5


def friedman(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(n, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, y + rng.standard_normal(n)


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
