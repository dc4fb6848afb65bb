"""Prediction in blocks: the dense answer, and the same bits however the rows are cut."""

from __future__ import annotations

import numpy as np
import pytest

from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.products import ArrayRows, predict_block
from tests.reference import reference_kernel

RNG = np.random.default_rng(0)


def predicted(kernel: Kernel, z: np.ndarray, x: np.ndarray, dual_coef: np.ndarray) -> np.ndarray:
    center = x.mean(axis=0) if kernel.stationary else None
    return predict_block(kernel, z, ArrayRows(x), ArrayRows(dual_coef), center)


@pytest.mark.parametrize("n", [1, 100, 1023, 1024, 2048, 2049, 5000])
@pytest.mark.parametrize("name", ["rbf", "laplacian", "matern", "poly"])
def test_the_dense_answer(name: str, n: int) -> None:
    x, z, dual_coef = RNG.standard_normal((n, 4)), RNG.standard_normal((33, 4)), RNG.standard_normal((n, 2))
    kernel = make_kernel(name).resolve(4)
    dense = reference_kernel(kernel.to_dict(), z, x)
    error = np.abs(predicted(kernel, z, x, dual_coef) - dense @ dual_coef)
    assert (error <= 1e-13 * (np.abs(dense) @ np.abs(dual_coef))).all()


@pytest.mark.parametrize("n", [1024, 2047, 2049, 4100])
@pytest.mark.parametrize("name", ["rbf", "laplacian", "matern"])
def test_bits_do_not_depend_on_how_rows_are_cut(name: str, n: int) -> None:
    x, z, dual_coef = RNG.standard_normal((n, 5)), RNG.standard_normal((100, 5)), RNG.standard_normal((n, 2))
    kernel = make_kernel(name).resolve(5)
    whole = predicted(kernel, z, x, dual_coef)
    for cuts in ([1, 2, 3], [50], [7, 64, 65], [33, 99]):
        parts = [predicted(kernel, part, x, dual_coef) for part in np.split(z, cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)
