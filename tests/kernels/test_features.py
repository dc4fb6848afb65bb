"""Explicit features: their inner products are the kernel, term by term."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dkrr.errors import ParameterError
from dkrr.kernels import kernel_from_dict, make_kernel
from dkrr.kernels.features import count_features, feature_map


@pytest.mark.parametrize("d", [1, 2, 3, 7])
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize(("gamma", "coef0"), [(None, 1), (0.7, 2.5), (1.3, 0)])
def test_inner_products_are_the_kernel(d: int, degree: int, gamma: float | None, coef0: float) -> None:
    kernel = make_kernel("poly", degree=degree, gamma=gamma, coef0=coef0).resolve(d)
    rng = np.random.default_rng(d * 10 + degree)
    x, z = rng.standard_normal((40, d)), rng.standard_normal((30, d))
    features = feature_map(kernel, d)
    fx, fz = features.design(x), features.design(z)
    assert fx.shape == (40, features.num_features)
    scale = np.sqrt(np.outer(kernel.diag(x), kernel.diag(z)))
    assert np.max(np.abs(fx @ fz.T - kernel(x, z)) / scale) < 1e-14 * 5


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ({"kernel": "rbf", "gamma": 1.0}, "'rbf'.*linear.*poly"),
        ({"kernel": "poly", "degree": 2.5}, "degree = 2.5.*whole"),
        ({"kernel": "poly", "coef0": -1.0}, "coef0 = -1.0.*coef0 >= 0"),
        ({"kernel": "poly", "degree": 300}, "degree = 300.*at most 170"),
        ({"kernel": "sum", "terms": [{"kernel": "linear"}]}, "'sum'"),
        (None, "precomputed"),
    ],
)
def test_kernels_without_finite_features_are_refused(kernel: dict[str, Any] | None, message: str) -> None:
    found = None if kernel is None else kernel_from_dict(kernel)
    assert count_features(found, 3) is None
    with pytest.raises(ParameterError, match=message):
        feature_map(found, 3)
