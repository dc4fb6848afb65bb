"""Compiled code: its exponential, when it is loaded, and what happens where it cannot be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dkrr.kernels import Laplacian
from dkrr.kernels.pairwise import Pairwise, pack
from dkrr.linalg.products import kernel_product


def laplacian(x: np.ndarray, dtype: type, c: float = 1.0) -> np.ndarray:
    """exp(-c x) for x (n,), through the smallest kernel there is."""
    from dkrr.kernels.compiled import fill_function

    # the second side, which decides whether differences are weighted, is at the origin
    packed = pack(Laplacian(gamma=c), x[:, None], np.zeros((1, 1)), dtype)
    assert packed is not None
    out = np.full((len(x), 1), np.nan, dtype)
    fill_function(packed.kind, packed.width)(*packed.sides, out, packed.factor, 0, 0)
    return out[:, 0]


@pytest.mark.parametrize(("dtype", "cutoff"), [(np.float64, 1000 * np.log(2)), (np.float32, 100 * np.log(2))])
def test_the_exponential_of_large_arguments(dtype: type, cutoff: float) -> None:
    x = np.linspace(1.0, cutoff - 0.01, 10001).astype(dtype)
    exact = np.exp(-x.astype(np.longdouble))
    error = np.abs(laplacian(x.astype(float), dtype) - exact) / exact
    # half a unit in the last place of x log2(e), twice
    assert (error < np.finfo(dtype).eps * (2 + x)).all()
    beyond = laplacian(np.array([cutoff + 0.01, 750.0, 1e4, 1e17]), dtype)
    assert (beyond == 0.0).all()
    assert not np.signbit(beyond).any()


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numba_is_loaded_by_the_first_large_block_only() -> None:
    code = """
import sys, numpy as np
import dkrr
from dkrr.linalg.products import kernel_product
from dkrr.kernels import make_kernel
small, large = np.ones((1000, 2)), np.ones((1024, 2))
kernel = make_kernel("rbf", gamma=1.0)
kernel_product(kernel, large, small, small, np.zeros((1024, 2)))
kernel_product(make_kernel("cosine"), large, large, large, np.zeros((1024, 2)))
print("numba" in sys.modules)
kernel_product(kernel, small, large, large, np.zeros((1000, 2)))
print("numba" in sys.modules)
"""
    assert run(code).split() == ["False", "True"]


def test_it_works_where_compiled_code_cannot_be_kept() -> None:
    # what Numba raises when neither the package's folder nor the user's cache folder can be written
    code = """
import numba.core.caching as caching
class Nowhere:
    @classmethod
    def from_function(cls, *_):
        return None
for implementation in (caching.CompileResultCacheImpl,):
    implementation._locator_classes = [Nowhere]
import numpy as np
from dkrr.linalg.products import kernel_product
from dkrr.kernels import make_kernel
rows, out = np.ones((1024, 2)), np.zeros((1024, 1))
kernel_product(make_kernel("rbf", gamma=1.0), rows, rows, np.ones((1024, 1)), out)
print((out == 1024).all())
"""
    assert run(code).split() == ["True"]


@dataclass(frozen=True, kw_only=True)
class Stretched(Pairwise):
    """exp(-beta r): what a formula reads from around it decides the code as well."""

    name, distance = "stretched", "squared"
    positive_semidefinite = True
    beta: float = 1.0

    @property
    def formula(self) -> Any:  # type: ignore[override]
        beta = self.beta

        def formula(v: Any, x: Any) -> Any:
            return v.exp(-v.sqrt(x) * beta)

        return formula


@pytest.mark.parametrize("beta", [1.0, 8.0])
def test_a_formula_that_reads_another_number_is_compiled_anew(beta: float) -> None:
    x, v = np.random.default_rng(0).random((1100, 4)), np.ones((1100, 1))
    kernel, found = Stretched(beta=beta).resolve(4), np.zeros_like(v)
    kernel_product(kernel, x, x, v, found, same=True)
    np.testing.assert_allclose(found, kernel.block(x, x, same=True) @ v, rtol=1e-10)
