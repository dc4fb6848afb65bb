"""Typed BLAS against NumPy on C-order, read-only and ragged operands; LAPACK's own bar for residuals."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dkrr.tiles.blas import (
    gemm_nt,
    gemm_tn,
    is_finite,
    potrf,
    syrk,
    syrk_tn,
    trsm_left,
    trsm_right,
)

DTYPES = ["float64", "float32"]
SHAPES = [(1, 1, 1), (33, 70, 12)]


def random(shape: tuple[int, int], dtype: str, seed: int = 0) -> np.ndarray:
    array = np.random.default_rng(seed).standard_normal(shape).astype(dtype)
    array.flags.writeable = False
    return array


def positive_definite(n: int, dtype: str) -> np.ndarray:
    a = random((n, n + 3), "float64")
    return np.ascontiguousarray((a @ a.T + np.eye(n)).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_gemm_and_syrk_update_in_place(m: int, n: int, k: int, dtype: str) -> None:
    a, b = random((m, k), dtype), random((n, k), dtype, 1)
    c = random((m, n), dtype, 2).copy()
    address, expected = c.ctypes.data, c - a.astype("float64") @ b.T
    gemm_nt(c, a, b)
    assert c.ctypes.data == address
    np.testing.assert_allclose(c, expected, atol=20 * k * np.finfo(dtype).eps)
    square = random((m, m), dtype, 3).copy()
    expected = square - a.astype("float64") @ a.T
    syrk(square, a)
    np.testing.assert_allclose(np.tril(square), np.tril(expected), atol=20 * k * np.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_of_rows_update_in_place(m: int, n: int, k: int, dtype: str) -> None:
    wide = random((k, m + n + 3), dtype)
    a, b = wide[:, 1 : m + 1], wide[:, m + 2 : m + n + 2]  # rows that are not next to one another
    c = random((m, n), dtype, 2).copy()
    expected = c - a.astype("float64").T @ b
    gemm_tn(c, a, b)
    np.testing.assert_allclose(c, expected, atol=20 * k * np.finfo(dtype).eps)
    square = random((m, m), dtype, 3).copy()
    expected = square - a.astype("float64").T @ a
    above = np.triu(square, 1)
    syrk_tn(square, a)
    np.testing.assert_allclose(np.tril(square), np.tril(expected), atol=20 * k * np.finfo(dtype).eps)
    np.testing.assert_array_equal(np.triu(square, 1), above)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 50, 300])
def test_factor_and_substitutions(n: int, dtype: str) -> None:
    a = positive_definite(n, dtype)
    eps = np.finfo(dtype).eps
    lower = a.copy()
    assert potrf(lower) == 0
    assert not np.triu(lower, 1).any()
    exact = lower.astype("float64")
    assert np.linalg.norm(a - exact @ exact.T, 1) / (n * np.linalg.norm(a, 1) * eps) < 30
    c = random((7, n), dtype).copy()
    before = c.astype("float64")
    trsm_right(c, lower)
    assert np.linalg.norm(c @ exact.T - before, 1) / (np.linalg.norm(c, 1) * np.linalg.norm(exact, 1) * eps) < 30 * n
    b = random((n, 3), dtype, 5)
    for transposed, few in itertools.product((False, True), repeat=2):
        matrix = exact.T if transposed else exact
        x = trsm_left(lower, b, transposed=transposed, few=few)
        residual = np.linalg.norm(matrix @ x - b, 1)
        assert residual / (np.linalg.norm(matrix, 1) * np.linalg.norm(x, 1) * eps) < 30 * n


def test_finite_is_about_entries_and_not_about_their_sum() -> None:
    big = np.full((4, 4), 1e308)
    assert is_finite(big)
    for bad in (np.nan, np.inf, -np.inf):
        array = np.zeros((4, 4))
        array[2, 1] = bad
        assert not is_finite(array)
