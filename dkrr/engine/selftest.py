"""Known answers for the BLAS and LAPACK routines that tiles are made of, in both precisions.

A wrong kernel (a core type that does not suit the CPU, a broken build, threads that overwrite each other's buffers)
gives wrong numbers without an error. Every worker runs this test when it is first used, and a core type is recommended
only after a process that uses it has passed. ``python -m dkrr.engine.selftest`` prints the outcome as JSON.

Cost: about 30 million multiplications by plain loops, 20 to 30 ms.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["blas_libraries", "self_test"]

# neither is a multiple of a register block, so that the edges of the kernels are used as well
_ORDER, _DEPTH = 203, 67
_BAR = 30.0


def blas_libraries() -> list[dict[str, Any]]:
    """The BLAS libraries that NumPy and SciPy loaded, as ``threadpoolctl.threadpool_info`` describes them."""
    import scipy.linalg  # noqa: F401  (loads SciPy's own BLAS)
    from threadpoolctl import threadpool_info

    return [dict(library) for library in threadpool_info() if library["user_api"] == "blas"]


def self_test() -> list[str]:
    """Check gemm, syrk, potrf and trsm in float64 and float32 against sums that use no BLAS.

    Returns
    -------
    failures : list of str
        One sentence for each routine whose residual is above 30 in units of n |A| |B| eps; empty when all is well.
    """
    from scipy.linalg import blas, lapack

    failures: list[str] = []
    for letter, dtype in (("d", np.float64), ("s", np.float32)):
        gemm, syrk, trsm = (getattr(blas, letter + name) for name in ("gemm", "syrk", "trsm"))
        failures += _test(dtype, gemm, syrk, trsm, getattr(lapack, letter + "potrf"))
    return failures


def _test(
    dtype: type[np.floating[Any]],
    gemm: Callable[..., Any],
    syrk: Callable[..., Any],
    trsm: Callable[..., Any],
    potrf: Callable[..., Any],
) -> list[str]:
    name = np.dtype(dtype).name
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((_ORDER, _DEPTH)).astype(dtype)
    right = generator.standard_normal((_ORDER, _DEPTH)).astype(dtype)
    failures: list[str] = []

    def compare(routine: str, found: NDArray[Any], expected: NDArray[Any], scale: float) -> None:
        residual = float(np.max(np.abs(found - expected))) / (scale * float(np.finfo(dtype).eps))
        if not residual < _BAR:  # NaN fails as well
            failures.append(f"{name} {routine}: residual {residual:.1e} eps, at most {_BAR:.0f} expected")

    gram = _product(rows, rows)
    size = float(np.max(gram))
    compare("gemm", gemm(1.0, rows, rows, trans_b=1), gram, size)
    compare("matmul", np.matmul(rows, right.T), _product(rows, right), size)
    compare("syrk", np.tril(syrk(1.0, rows, lower=1)), np.tril(gram), size)

    matrix = gram / dtype(_DEPTH) + np.eye(_ORDER, dtype=dtype)
    size = float(np.max(matrix)) * _ORDER
    factor, info = potrf(matrix, lower=1, clean=1)
    if info:
        return [*failures, f"{name} potrf: stopped at row {info} of a positive definite matrix"]
    compare("potrf", _product(factor, factor), matrix, size)
    # L from a matrix that is known, so that trsm is judged apart from potrf
    lower = np.tril(matrix)
    solution = trsm(1.0, lower, right, lower=1)
    compare("trsm", _product(lower, np.ascontiguousarray(solution.T)), right, size * float(np.max(np.abs(solution))))
    return failures


def _product(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """A B^T summed in float64 by einsum's own loops."""
    wide: NDArray[Any] = np.einsum("ik,jk->ij", a.astype(np.float64), b.astype(np.float64), optimize=False)
    product: NDArray[Any] = wide.astype(a.dtype)
    return product


if __name__ == "__main__":
    libraries = [{key: library.get(key) for key in ("internal_api", "architecture")} for library in blas_libraries()]
    json.dump({"failures": self_test(), "libraries": libraries}, sys.stdout)
