"""What must hold for every implementation of an abstraction, checked against a dense reference.

A new implementation's test is three lines: build it, call its check, and nothing else.
"""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import numpy as np

from dkrr.kernels import FunctionKernel, Kernel, SklearnKernel, base, kernel_from_dict, pairwise
from dkrr.linalg.products import kernel_product
from tests.reference import reference_kernel

# Shapes (m, n) of blocks: single rows and columns, ragged strips, more columns than one strip holds.
BLOCKS = ((1, 1), (1, 70), (300, 1), (7, 7), (300, 70), (40, 2100))
# Rows m and n, and columns t and s of V and U, of products: one row, ragged panels, more columns than are fused.
PRODUCTS = ((1, 1, 1, 1), (7, 255, 3, 1), (257, 7, 1, 3), (255, 257, 17, 2), (70, 300, 1, 17), (90, 270, 40, 40))
PRODUCT_ERROR = {"float64": 1e-13, "float32": 1e-6}


def assert_close(actual: np.ndarray, expected: np.ndarray, message: str) -> None:
    """Agreement to 1e-13 of the largest value: rounding of the operands, nothing else."""
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(actual / scale, expected / scale, rtol=0, atol=1e-13, err_msg=message)


def _pairwise(kernel: Kernel, A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """The kernel from its formula, or for foreign ones from the foreign object, pair by pair."""
    if isinstance(kernel, SklearnKernel):
        return np.array([[kernel.kernel(a[None], b[None])[0, 0] for b in B] for a in A])
    if isinstance(kernel, FunctionKernel):
        kind, call = kernel.resolve(A.shape[1]).kind, kernel.function
        rows = [(a[None], b[None]) if kind == "block" else (a, b) for a in A for b in B]
        return np.array([np.asarray(call(a, b, **kernel.kernel_params)).item() for a, b in rows]).reshape(len(A), -1)
    return reference_kernel(kernel.to_dict(), A, B)


def check_kernel(kernel: Kernel, rng: np.random.Generator, *, num_features: int = 5, storable: bool = True) -> None:
    """Every law of a kernel, on non-negative rows so that all kernels take them.

    Parameters
    ----------
    storable
        Whether the kernel has a dictionary; lambdas have none.
    """
    d = num_features
    kernel = kernel.resolve(d)
    assert kernel.resolve(d) == kernel, "a resolved kernel resolves to itself"
    for m, n in BLOCKS:
        A, B = rng.random((m, d)), rng.random((n, d))
        if m > 1 and n > 1:
            B[0] = A[1]  # one row twice
            A[0] = 0.0  # zero histograms and zero vectors are rows, too
            B[1] = 0.0
        _check_block(kernel, A, B)
    square = rng.random((150, d))
    square[3] = square[90]
    _check_same(kernel, square)
    _check_strips(kernel, square)
    _check_stationary(kernel, square)
    if storable:
        check_round_trip(kernel, square)
    for least in {pairwise.MIN_COLUMNS, 1 if pairwise.compiled_form(kernel) else pairwise.MIN_COLUMNS}:
        with mock.patch.object(pairwise, "MIN_COLUMNS", least):
            for m, n, t, s in PRODUCTS:
                check_products(kernel, rng.random((m, d)), rng.random((n, d)), t, s, rng)


def check_products(kernel: Kernel, a: np.ndarray, b: np.ndarray, t: int, s: int, rng: np.random.Generator) -> None:
    """Fused products are those with the block, in both precisions and directions, added to what is there."""
    (m, n), kernel = (len(a), len(b)), kernel.resolve(a.shape[1])
    b[0] = a[0]
    v, u, start, start_t = (rng.standard_normal(shape) for shape in ((n, t), (m, s), (m, t), (n, s)))
    dense = _pairwise(kernel, a, b) if isinstance(kernel, pairwise.Pairwise) else kernel.block(a, b)
    square = kernel.block(b, b, same=True)
    # of the magnitudes that are added up: with one row or column a sum may cancel by itself
    scale, scale_t = np.abs(dense) @ np.abs(v) + np.abs(start), np.abs(dense).T @ np.abs(u) + np.abs(start_t)
    for precision, bar in PRODUCT_ERROR.items():
        out, alone, out_t, symmetric = start.copy(), start.copy(), start_t.copy(), np.zeros((n, t))
        kernel_product(kernel, a, b, v, out, u=u, out_t=out_t, precision=precision)  # type: ignore[arg-type]
        kernel_product(kernel, a, b, v, alone, precision=precision)  # type: ignore[arg-type]
        kernel_product(kernel, b, b, v, symmetric, same=True, precision=precision)  # type: ignore[arg-type]
        for what, found, expected, size in (
            ("K V", out, start + dense @ v, scale),
            ("K^T U", out_t, start_t + dense.T @ u, scale_t),
            ("K V alone", alone, start + dense @ v, scale),
            ("K V of the same rows", symmetric, square @ v, np.abs(square) @ np.abs(v)),
        ):
            error = float(np.linalg.norm(found - expected))
            assert error <= bar * np.linalg.norm(size), f"{kernel}: {what} in {precision}, {m} x {n}: {error:.1e}"


def _check_block(kernel: Kernel, A: np.ndarray, B: np.ndarray) -> None:
    m, n = len(A), len(B)
    out = np.full((m, n), np.nan)
    assert kernel.block(A, B, out) is out, "block returns out"
    some = slice(None, None, max(1, m // 8)), slice(None, None, max(1, n // 40))
    assert_close(
        out[some], _pairwise(kernel, A[some[0]], B[some[1]]), f"{kernel}: block against its formula, {m} x {n}"
    )
    assert_close(kernel(A, B), out, f"{kernel}: call against block")
    assert_close(kernel.block(B, A).T, out, f"{kernel}: k(a, b) = k(b, a)")

    frame = np.full((m, n + 9), -7.5)
    kernel.block(A, B, frame[:, 4 : n + 4])
    assert_close(frame[:, 4 : n + 4], out, f"{kernel}: into a view whose row stride exceeds n")
    assert (np.delete(frame, np.s_[4 : n + 4], axis=1) == -7.5).all(), f"{kernel}: wrote outside of out"

    single = np.full((m, n), np.nan, dtype=np.float32)
    kernel.block(A, B, single)
    np.testing.assert_allclose(single, out, rtol=1e-6, atol=1e-7 * np.abs(out).max(), err_msg=f"{kernel}: float32 out")


def _check_same(kernel: Kernel, A: np.ndarray) -> None:
    n = len(A)
    general = kernel.block(A, A)
    diagonal = kernel.diag(A)
    assert diagonal.shape == (n,)
    assert diagonal.dtype == np.float64
    assert_close(diagonal, general.diagonal(), f"{kernel}: diag against block")
    frame = np.full((n, n + 3), np.nan)
    single = np.full((n, n), np.nan, dtype=np.float32)
    for out in (np.full((n, n), np.nan), frame[:, :n], single):
        kernel.block(A, A, out, same=True)
        assert np.array_equal(out, out.T), f"{kernel}: same=True is not exactly symmetric"
        assert np.array_equal(out.diagonal(), diagonal.astype(out.dtype)), f"{kernel}: same=True diagonal is not exact"
        if out.dtype == np.float64:
            assert_close(out, general, f"{kernel}: same=True against the general block")
            if kernel.positive_semidefinite:
                eigenvalues = np.linalg.eigvalsh(out)
                bar = 30 * n * np.finfo(float).eps * eigenvalues[-1]
                assert eigenvalues[0] >= -bar, f"{kernel}: eigenvalue {eigenvalues[0]}, claimed positive semi-definite"


def _check_strips(kernel: Kernel, A: np.ndarray) -> None:
    """Neither the size of the strips nor the cut into blocks matters beyond rounding."""
    whole = kernel.block(A, A, same=True)
    n = len(A)
    pieces = np.empty((n, n))
    for i in range(0, n, 64):
        for j in range(0, n, 47):
            kernel.block(A[i : i + 64], A[j : j + 47], pieces[i : i + 64, j : j + 47])
    assert_close(pieces, whole, f"{kernel}: cut into blocks")
    general, small = np.full((n, n), np.nan), np.full((n, n), np.nan)
    with mock.patch.multiple(base, STRIP_ENTRIES=7 * 32, STRIP_COLUMNS=32, MIRROR_EDGE=16):
        assert_close(kernel.block(A, A, general), whole, f"{kernel}: small strips")
        kernel.block(A, A, small, same=True)
    assert_close(small, whole, f"{kernel}: small strips, same=True")
    assert np.array_equal(small, small.T), f"{kernel}: small strips, same=True is not exactly symmetric"


def _check_stationary(kernel: Kernel, A: np.ndarray) -> None:
    shift = np.linspace(1.0, 2.0, A.shape[1])
    moved = np.abs(kernel.block(A + shift, A[:20] + shift) - kernel.block(A, A[:20])).max()
    # what a function does with its rows is not known, so a stationary one may go unclaimed
    if kernel.stationary or not isinstance(kernel, FunctionKernel):
        assert (moved < 1e-12) == kernel.stationary, f"{kernel}: stationary {kernel.stationary}, shift makes {moved}"
    if kernel.stationary:
        far = 2.0**20  # exact in the sums, so that only the distance from the origin changes
        grid = np.round(A * 256) / 256
        assert_close(
            kernel(grid + far, grid[:20] + far), kernel(grid, grid[:20]), f"{kernel}: call far from the origin"
        )


def check_round_trip(kernel: Kernel, A: np.ndarray) -> None:
    """to_dict is plain JSON, from_dict its exact inverse, and the values are the same bits."""
    values = kernel.to_dict()
    restored: Any = json.loads(json.dumps(values, allow_nan=False))
    assert restored == values, f"{kernel}: to_dict is not plain JSON"
    again = kernel_from_dict(restored)
    assert type(again) is type(kernel)
    assert again.to_dict() == values, f"{kernel}: round trip through a dictionary"
    assert np.array_equal(again.block(A, A[:30]), kernel.block(A, A[:30])), f"{kernel}: values after a round trip"
