"""Values, names and defaults of scikit-learn, to 1e-13."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.gaussian_process import kernels as gp
from sklearn.metrics.pairwise import pairwise_kernels

from dkrr.kernels import make_kernel

RNG = np.random.default_rng(3)
A, B = RNG.random((300, 6)), RNG.random((70, 6))
NORMAL_A, NORMAL_B = RNG.standard_normal((300, 6)), RNG.standard_normal((70, 6))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("linear", {}),
        ("poly", {}),
        ("polynomial", {"gamma": 0.3, "degree": 4, "coef0": 2.0}),
        ("rbf", {}),
        ("rbf", {"gamma": 2.0}),
        ("laplacian", {}),
        ("laplacian", {"gamma": 0.2}),
        ("cosine", {}),
        ("sigmoid", {}),
        ("sigmoid", {"gamma": 0.05, "coef0": -1}),
    ],
)
def test_named_kernels(name: str, parameters: dict[str, Any]) -> None:
    kernel = make_kernel(name, **parameters)
    expected = pairwise_kernels(NORMAL_A, NORMAL_B, metric=name, filter_params=True, **parameters)
    np.testing.assert_allclose(kernel(NORMAL_A, NORMAL_B), expected, rtol=1e-13, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize(
    "foreign",
    [
        gp.Matern(0.75, nu=0.5),
        gp.Matern([0.5, 1.0, 2.0, 3.0, 4.0, 0.7], nu=2.5),
        gp.ConstantKernel(2.0) * gp.Matern([1.0, 2.0, 3.0, 0.5, 0.6, 0.7], nu=2.5) + gp.DotProduct(0.3),
        gp.ExpSineSquared(1.2, 3.0),
        gp.RationalQuadratic(0.8, 0.4) ** 2,
        gp.PairwiseKernel(gamma=0.2, metric="laplacian"),
    ],
    ids=lambda kernel: type(kernel).__name__,
)
def test_gaussian_process_kernels(foreign: Any) -> None:
    kernel = make_kernel(foreign)
    np.testing.assert_allclose(kernel.block(A, A, same=True), foreign(A), rtol=1e-13, atol=1e-13)
    if isinstance(foreign, gp.Matern):
        kernel = make_kernel("matern", kernel_params={"nu": foreign.nu, "length_scale": foreign.length_scale})
    np.testing.assert_allclose(kernel(A, B), foreign(A, B), rtol=1e-13, atol=1e-13)


def test_parameters_of_other_kernels_are_ignored() -> None:
    for name in ("linear", "cosine", "matern", "precomputed"):
        assert make_kernel(name, gamma=0.3, degree=7, coef0=9) == make_kernel(name)
