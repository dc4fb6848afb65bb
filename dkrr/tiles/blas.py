"""Typed BLAS on C-order tiles and their sub-blocks, in place, without transposes or copies.

A C-order tile T is the Fortran-order tile T^T, so every routine is called on the transposes: C -= A B^T in rows is
C^T -= B A^T in columns, which is gemm with its first operand transposed; the lower triangle in C order is the upper one
in Fortran order.

The routines are SciPy's own BLAS and LAPACK, reached through the function pointers that ``scipy.linalg.cython_blas``
exports: they take a leading dimension (so a sub-block needs no copy, which the array wrappers would make) and run
without the interpreter lock (so that a worker answers its scheduler during a long product). Triangular solves and
factorisations are cut in halves whose coupling is a gemm. A solve ends at triangles of 64 columns, which are inverted:
trsm at that size runs at a fifth of the gemm rate. At tile edge 2,048 the whole solve then takes 0.86 of the time
(float32: 0.75), measured side by side; its residual |C - X L^T| was at most 2.3 times that of substitution for factors
of condition 4e6 (7 times with triangles of 256).

One BLAS thread a process is assumed (the engine sees to it).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

from dkrr.store.chunks import FloatArray, buffer

# below these widths a single call is as fast as its parts
BASE = 64
POTRF_BASE = 256


def _routine(module: Any, name: str) -> Any:
    """The C function behind a routine that a SciPy module exports to Cython."""
    capsule = module.__pyx_capi__[name]
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype, api.PyCapsule_GetName.argtypes = ctypes.c_char_p, [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address = api.PyCapsule_GetPointer(capsule, api.PyCapsule_GetName(capsule))
    # every argument of a Fortran routine is a pointer; calls through CFUNCTYPE release the interpreter lock
    num_arguments = {"gemm": 13, "syrk": 10, "trsm": 11, "potrf": 5, "trtri": 6}[name[1:]]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * num_arguments)(address)


_ROUTINES = {
    (kind, name): _routine(cython_lapack if name in ("potrf", "trtri") else cython_blas, letter + name)
    for kind, letter in (("float64", "d"), ("float32", "s"))
    for name in ("gemm", "syrk", "trsm", "potrf", "trtri")
}
_CTYPES: dict[str, Any] = {"float64": ctypes.c_double, "float32": ctypes.c_float}


def _call(name: str, dtype: np.dtype[Any], *arguments: Any) -> None:
    """Call a Fortran routine: characters as bytes, integers and scalars by reference, arrays by address."""
    boxes = {bytes: ctypes.c_char, float: _CTYPES[dtype.name], int: ctypes.c_int}
    kept = [boxes[type(argument)](argument) if type(argument) in boxes else argument for argument in arguments]
    _ROUTINES[dtype.name, name](
        *[each.ctypes.data if isinstance(each, np.ndarray) else ctypes.addressof(each) for each in kept]
    )


def _leading(array: FloatArray) -> int:
    """Leading dimension of a C-order block; raises when its rows are not contiguous."""
    itemsize = int(array.itemsize)
    if array.ndim != 2 or (array.shape[1] > 1 and array.strides[1] != itemsize) or array.strides[0] % itemsize:
        raise ValueError(f"block of shape {array.shape} and strides {array.strides} is not in C order")
    return max(int(array.strides[0]) // itemsize, int(array.shape[1]), 1)


def _same_type(*arrays: FloatArray) -> np.dtype[Any]:
    dtype = arrays[0].dtype
    if dtype.name not in _CTYPES or not dtype.isnative or any(array.dtype != dtype for array in arrays):
        raise ValueError(f"blocks of types {[str(array.dtype) for array in arrays]}; one native float type expected")
    return dtype


def gemm_nt(c: FloatArray, a: FloatArray, b: FloatArray) -> None:
    """C -= A B^T with C (m, n), A (m, k), B (n, k), all C-order blocks. 2 m n k flops."""
    _gemm(c, a, b, a.shape, b.shape, (b"T", b"N"))


def gemm_tn(c: FloatArray, a: FloatArray, b: FloatArray) -> None:
    """C -= A^T B with C (m, n), A (k, m), B (k, n), all C-order blocks. 2 m n k flops."""
    _gemm(c, a, b, a.shape[::-1], b.shape[::-1], (b"N", b"T"))


def _gemm(c: Any, a: Any, b: Any, left: tuple[int, ...], right: tuple[int, ...], flags: tuple[bytes, bytes]) -> None:
    """C -= op(A) op(B)^T, where op(A) and op(B) have the shapes ``left`` and ``right``."""
    (m, n), k = c.shape, left[1]
    if left != (m, k) or right != (n, k):
        raise ValueError(f"shapes {a.shape}, {b.shape} do not fit C of shape {c.shape}")
    dtype = _same_type(c, a, b)
    _call("gemm", dtype, *flags, n, m, k, -1.0, b, _leading(b), a, _leading(a), 1.0, c, _leading(c))


def syrk(c: FloatArray, a: FloatArray) -> None:
    """Lower triangle of C -= A A^T with C (m, m), A (m, k), both C-order blocks. m^2 k flops."""
    _syrk(c, a, a.shape, b"T")


def syrk_tn(c: FloatArray, a: FloatArray) -> None:
    """Lower triangle of C -= A^T A with C (m, m), A (k, m), both C-order blocks. m^2 k flops."""
    _syrk(c, a, a.shape[::-1], b"N")


def _syrk(c: FloatArray, a: FloatArray, shape: tuple[int, ...], flag: bytes) -> None:
    m, k = shape
    if c.shape != (m, m):
        raise ValueError(f"shape {a.shape} does not fit C of shape {c.shape}")
    _call("syrk", _same_type(c, a), b"U", flag, m, k, -1.0, a, _leading(a), 1.0, c, _leading(c))


def potrf(c: FloatArray) -> int:
    """Replace C (m, m) by L with C = L L^T (strict upper triangle 0), by recursive halving. m^3 / 3 flops.

    Returns 0, or k > 0 when the leading minor of order k is not positive definite (C is then destroyed).
    """
    _same_type(c)
    info = _potrf(c)
    if not info:
        for start in range(0, len(c), BASE):
            stop = min(start + BASE, len(c))
            c[start:stop, stop:] = 0
            c[start:stop, start:stop] = np.tril(c[start:stop, start:stop])
    return info


def _potrf(c: FloatArray) -> int:
    m = len(c)
    if m <= POTRF_BASE:
        info = ctypes.c_int(0)
        _call("potrf", c.dtype, b"U", m, c, _leading(c), info)
        if info.value < 0:
            raise AssertionError(f"potrf rejected argument {-info.value}")
        return info.value
    half = _half(m)
    info_first = _potrf(c[:half, :half])
    if info_first:
        return info_first
    trsm_right(c[half:, :half], c[:half, :half])
    syrk(c[half:, half:], c[half:, :half])
    info_second = _potrf(c[half:, half:])
    return half + info_second if info_second else 0


def _half(n: int) -> int:
    """Where n columns are cut: half of them, rounded up to whole base blocks."""
    return -(-n // (2 * BASE)) * BASE


def trsm_right(c: FloatArray, lower: FloatArray) -> None:
    """C <- C L^-T with C (m, n), L (n, n) lower triangular, both C-order blocks, by recursive halving. m n^2 flops.

    References
    ----------
    Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 14.2 (solving with inverted diagonal
    blocks).
    """
    n = lower.shape[0]
    if lower.shape != (n, n) or c.shape[1] != n:
        raise ValueError(f"shapes {c.shape}, {lower.shape} do not fit C <- C L^-T")
    _same_type(c, lower)
    if n <= BASE:
        if len(c) < 2 * BASE:  # an inverse costs as much as it saves
            _trsm(c, lower)
        else:
            _multiply_inverse(c, lower)
        return
    half = _half(n)
    trsm_right(c[:, :half], lower[:half, :half])
    gemm_nt(c[:, half:], c[:, :half], lower[half:, :half])
    trsm_right(c[:, half:], lower[half:, half:])


def _multiply_inverse(c: FloatArray, lower: FloatArray) -> None:
    """C <- C (L^-1)^T through the inverse of a small triangle."""
    (m, n), dtype = c.shape, c.dtype
    inverse = np.tril(lower)
    info = ctypes.c_int(0)
    _call("trtri", dtype, b"U", b"N", n, inverse, n, info)
    if info.value:  # a zero pivot: give what substitution gives, which is not finite and is found
        _trsm(c, lower)
        return
    copy = buffer("solve", (m, n), dtype)
    copy[...] = c
    _call("gemm", dtype, b"T", b"N", n, m, n, 1.0, inverse, n, copy, n, 0.0, c, _leading(c))


def _trsm(c: FloatArray, lower: FloatArray) -> None:
    """C <- C L^-T in one call: in columns, the solution of U^T X = C^T with U = L^T."""
    m, n = c.shape
    _call(
        "trsm", c.dtype, b"L", b"U", b"T", b"N", n, m, 1.0, lower, _leading(lower), c, _leading(c)
    )  # fmt: skip


def trsm_left(lower: FloatArray, b: FloatArray, *, transposed: bool, few: bool = False) -> Any:
    """L^-1 B, or L^-T B when ``transposed``; L (m, m) lower triangular, B (m, t). m^2 t flops.

    With ``few`` columns the result is in Fortran order, by the side of trsm that is several times as fast for them. Its
    rounding is another one: a float32 factor of condition 1e6 and more is the worse preconditioner for it.
    """
    m, t = b.shape
    if lower.shape != (m, m):
        raise ValueError(f"shapes {lower.shape}, {b.shape} do not fit L X = B")
    x = np.array(b, dtype=lower.dtype, order="F" if few else "C")
    dtype = _same_type(lower) if few else _same_type(x, lower)
    if few:
        flag = b"N" if transposed else b"T"  # L is the transpose of an upper triangle in columns
        _call("trsm", dtype, b"L", b"U", flag, b"N", m, t, 1.0, lower, _leading(lower), x, max(1, m))
    else:  # X^T in columns: X^T U = B^T for L X = B, and X^T U^T = B^T for L^T X = B
        flag = b"T" if transposed else b"N"
        _call("trsm", dtype, b"R", b"U", flag, b"N", t, m, 1.0, lower, _leading(lower), x, _leading(x))
    return x


def leading_minor_pivot(a: FloatArray, k: int) -> tuple[int, float]:
    """The order of a leading minor of A that fails, at most k, and its pivot a_kk - |l_k|^2 <= 0. k^3 / 3 flops.

    k is the order at which potrf of A stopped. The smaller matrix is rounded otherwise: where pivots are rounding alone
    it may stop earlier, which is the answer then, and a pivot that comes out positive is 0.
    """
    while k > 1:
        minor = np.array(a[: k - 1, : k - 1], order="C")
        earlier = potrf(minor)
        if not earlier:
            row = trsm_left(minor, np.ascontiguousarray(a[k - 1, : k - 1, None]), transposed=False)
            return k, min(0.0, float(a[k - 1, k - 1]) - float(np.sum(np.square(row))))
        k = earlier
    return 1, float(a[0, 0])


def lost_pivot(
    lower: FloatArray, info: int, diagonal: FloatArray, alpha: float, n: int, again: Callable[[], FloatArray]
) -> tuple[int, float] | None:
    """The order of a leading minor of A that is not positive definite, and its pivot; None where all pivots are good.

    Parameters
    ----------
    lower, info
        What potrf made of A, or of a diagonal tile, and its answer.
    diagonal, alpha, n
        See :func:`rounded_pivot`.
    again
        Gives the matrix once more, both triangles: potrf destroyed it.
    """
    if info:
        return leading_minor_pivot(again(), info)
    order = rounded_pivot(lower, diagonal, alpha, n)
    return (order, float(lower[order - 1, order - 1]) ** 2) if order else None


# in eps: more than squared distances from products have, for sums of some hundred terms
ENTRY_ROUNDING = 2 * 24**2


def rounded_pivot(lower: FloatArray, diagonal: FloatArray, alpha: float, n: int) -> int:
    """The order of the first pivot l_kk^2 of A that rounding alone may have made positive; 0 if there is none.

    Rounding moves a pivot by up to (n + m) eps a_kk, if entries of K are right to m eps. It is looked for where alpha
    is lost in the rounding of the diagonal: a larger one bounds all pivots of a positive semi-definite K from below.

    Parameters
    ----------
    lower, diagonal
        L (m, m) and a_kk (m,), of a diagonal tile or of all of A.
    n
        Rows of A.
    """
    eps = float(np.finfo(lower.dtype).eps)
    if not diagonal.size or alpha > eps * float(diagonal.max()):
        return 0
    lost = np.square(lower.diagonal().astype(np.float64)) <= (n + ENTRY_ROUNDING) * eps * diagonal
    return int(np.argmax(lost)) + 1 if lost.any() else 0


def is_finite(array: FloatArray) -> bool:
    """Whether every entry is finite; one pass without a temporary of the array's size."""
    # a sum is finite unless an entry is not, or the sum overflows; only then is every entry looked at
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.sum(array)
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())
