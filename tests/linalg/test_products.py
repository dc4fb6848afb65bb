"""Fused products where rounding matters; that they are products with the block is a law of every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dkrr.errors import DataError
from dkrr.kernels import Kernel, make_kernel, pairwise
from dkrr.linalg.products import kernel_product
from tests.laws import check_products
from tests.reference import reference_kernel


def matern(nu: float, length_scale: Any = 1.0) -> Kernel:
    return make_kernel("matern", kernel_params={"nu": nu, "length_scale": length_scale})


@pytest.fixture
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairwise, "MIN_COLUMNS", 1)


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("name", ["rbf", "laplacian", "linear"])
@pytest.mark.parametrize("d", [1, 2, 63, 64, 65, 200])
def test_any_number_of_features(name: str, d: int) -> None:
    rng = np.random.default_rng(0)
    check_products(make_kernel(name), rng.standard_normal((30, d)), rng.standard_normal((80, d)), 1, 1, rng)


@pytest.mark.parametrize("shift", [0.0, 100.0])
@pytest.mark.parametrize(("precision", "bar"), [("float64", 1e-13), ("float32", 1e-6)])
@pytest.mark.parametrize("t", [1, 3])
def test_error_of_the_norm_also_far_from_the_origin(shift: float, precision: Any, bar: float, t: int) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((3000, 10))
    v = rng.standard_normal((3000, t))
    for kernel in (make_kernel("rbf", gamma=0.05), matern(0.5), matern(1.5), matern(2.5), make_kernel("laplacian")):
        kernel = kernel.resolve(10)
        moved = rows + shift
        exact = reference_kernel(kernel.to_dict(), moved[:500], moved) @ v
        centred = moved - moved.mean(axis=0)
        out = np.zeros((500, t))
        kernel_product(kernel, centred[:500], centred, v, out, precision=precision)
        assert relative(out, exact) < bar, kernel
        out = np.zeros((3000, t))
        kernel_product(kernel, centred, centred, v, out, same=True, precision=precision)
        assert relative(out[:500], exact) < bar, kernel


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("name", ["rbf", "matern", "poly", "laplacian"])
def test_a_row_has_the_same_bits_whatever_its_neighbours(name: str) -> None:
    rng = np.random.default_rng(4)
    a, b, v = rng.standard_normal((301, 6)), rng.standard_normal((700, 6)), rng.standard_normal((700, 3))
    kernel = make_kernel(name).resolve(6)
    whole = np.zeros((301, 3))
    kernel_product(kernel, a, b, v, whole)
    for cuts in ([1, 2, 5, 130], [64, 131], [299]):
        for part, expected in zip(np.split(a, cuts), np.split(whole, cuts), strict=True):
            out = np.zeros((len(part), 3))
            kernel_product(kernel, part, b, v, out)
            np.testing.assert_array_equal(out, expected)


@pytest.mark.usefixtures("always_compiled")
@pytest.mark.parametrize("precision", ["float64", "float32"])
@pytest.mark.parametrize("name", ["rbf", "laplacian", "matern", "poly", "linear"])
def test_what_is_not_finite_is_named(name: str, precision: Any) -> None:
    good, bad = np.ones((20, 3)), np.ones((20, 3))
    bad[4, 1] = np.nan
    kernel, v = make_kernel(name).resolve(3), np.ones((20, 1))
    with pytest.raises(DataError, match=r"B\[4, 1\] = nan"):
        kernel_product(kernel, good, bad, v, np.zeros((20, 1)), precision=precision)
    bad[4, 1] = np.inf
    with pytest.raises(DataError, match=r"A\[4, 1\] = inf"):
        kernel_product(kernel, bad, good, v, np.zeros((20, 1)), precision=precision)
    huge = np.full((20, 3), 1e160)
    with pytest.raises(DataError, match="scale the features"):
        kernel_product(kernel, huge, huge, v, np.zeros((20, 1)), precision=precision)
