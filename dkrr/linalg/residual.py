"""The true residual R = S Y - A u, evaluated in float64 from the kernel and the rows, never from stored tiles.

(Only for a precomputed matrix, which has no kernel, the given matrix is read.) It is independent of everything the
solver stored, so a wrong tile that passed its checksum shows here.

Cost
----
n^2 / 2 kernel entries and 2 n^2 t flops, in the pairs of :mod:`dkrr.linalg.matmul`; the sums of |A| over its rows are
one more column of the same product. The driver holds three (n, 256) arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ParameterError
from dkrr.linalg.factor.triangular import BlockColumns
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import FloatArray
from dkrr.threads import single_blas_thread

__all__ = [
    "ResidualNorms",
    "block_norms",
    "combine_norms",
    "exact_product",
    "panel_rows",
    "product_norms",
    "residual_norms",
    "sampled_row_sums",
    "true_residual",
]

FloatMatrix = NDArray[np.float64]

SAMPLED_ROWS = 256
SAMPLED_COLUMNS = 4096


@dataclass(frozen=True)
class ResidualNorms:
    """The two numbers of a :class:`~dkrr.linalg.solution.Solution`, per target."""

    relative_residual: list[float]
    backward_error: list[float]


def block_norms(residual: FloatArray, rhs: FloatArray, solution: FloatArray, row_sums: FloatArray) -> dict[str, Any]:
    """Sums and maxima per target over some rows; ``row_sums`` of |A| is (rows,), or (rows, t) for one A per target."""
    return {
        "residual_squares": np.square(residual).sum(axis=0),
        "rhs_squares": np.square(rhs).sum(axis=0),
        "residual_max": np.abs(residual).max(axis=0),
        "rhs_max": np.abs(rhs).max(axis=0),
        "solution_max": np.abs(solution).max(axis=0),
        "matrix_norm": np.max(row_sums, axis=0, keepdims=row_sums.ndim == 1),
    }


def combine_norms(parts: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Relative residual and backward error per target from the norms of all row blocks, in order."""

    def total(name: str) -> Any:
        return np.sum([part[name] for part in parts], axis=0)

    def largest(name: str) -> Any:
        return np.max([part[name] for part in parts], axis=0)

    rhs = np.sqrt(total("rhs_squares"))
    residual = np.sqrt(total("residual_squares"))
    bound = largest("matrix_norm") * largest("solution_max") + largest("rhs_max")
    error = largest("residual_max")
    relative = np.divide(residual, rhs, out=np.zeros_like(residual), where=rhs > 0)
    relative = np.where((rhs == 0) & (residual > 0), np.inf, relative)
    backward = np.divide(error, bound, out=np.zeros_like(error), where=bound > 0)
    return relative.tolist(), backward.tolist()


def true_residual(
    product: OperatorProduct, alpha: NDArray[np.float64], rhs: FloatMatrix, solution: FloatMatrix
) -> ResidualNorms:
    """The norms of R = S Y - (S K S + diag(alpha)) u, column by column.

    Parameters
    ----------
    product
        In float64 and from the kernel: ``OperatorProduct(operator, workspace, scratch)``.
    alpha : (t,)
        The ridge of each column.
    rhs, solution : (n, t)
        S Y and u.

    Raises
    ------
    ParameterError
        The product is in float32, or reads stored tiles of a kernel: its residual would prove nothing.
    """
    return product_norms(product, alpha, rhs, solution, exact_product(product, solution))


def exact_product(product: OperatorProduct, v: FloatMatrix) -> FloatMatrix:
    """S K S V (n, t), and the sums of |S K S| over its rows if the product has none yet.

    Raises
    ------
    ParameterError
        The product is in float32, or reads stored tiles of a kernel.
    """
    operator = product.operator
    if product.precision != "float64" or (product.reads_tiles and operator.kernel is not None):
        raise ParameterError(
            f"a residual from {product.precision} entries{' of stored tiles' if product.reads_tiles else ''}",
            hint="give a float64 product from the kernel",
        )
    if product.row_sums is not None:
        return product(v)
    multiplied, product.row_sums = product.with_row_sums(v)
    return multiplied


def product_norms(
    product: OperatorProduct,
    alpha: NDArray[np.float64],
    rhs: FloatMatrix,
    solution: FloatMatrix,
    multiplied: FloatMatrix,
) -> ResidualNorms:
    """What :func:`true_residual` returns, for a known S K S u from :func:`exact_product`."""
    alpha = np.broadcast_to(np.asarray(alpha, dtype=np.float64), solution.shape[1:])
    assert product.row_sums is not None  # noqa: S101  (narrows the type)
    diagonal = _diagonal(product.operator)
    parts = []
    for i in range(product.blocks.num_tiles):
        rows = product.blocks.span(i)
        shift = np.broadcast_to(alpha, (rows.stop - rows.start, len(alpha)))
        if diagonal is not None:  # |a_pp| = |k_pp + alpha|, which is |k_pp| + alpha unless k_pp is negative
            shift = np.abs(diagonal[rows, None] + shift) - np.abs(diagonal[rows, None])
        row_sums = product.row_sums[rows, None] + shift
        residual = rhs[rows] - (multiplied[rows] + alpha * solution[rows])
        parts.append(block_norms(residual, rhs[rows], solution[rows], row_sums))
    return ResidualNorms(*combine_norms(parts))


def sampled_row_sums(operator: RidgeOperator) -> FloatMatrix:
    """sum_q |(S K S)_pq| of at most 256 rows p: half of them evenly spread, half those with the largest diagonal.

    Their maximum is a lower bound of |S K S|, so that a backward error from it is never too small. On whitened rows of
    five data sets (8,000 rows, six kernels) it was at most 1.6 times too large for kernels that are bounded.

    Cost: 256 n kernel entries, in this process.
    """
    assert operator.kernel is not None  # noqa: S101  (narrows the type)
    assert operator.rows is not None  # noqa: S101
    kernel, rows, n = operator.kernel, operator.rows, operator.grid.n
    diagonal = np.concatenate([operator.diagonal(i) for i in range(operator.grid.num_tiles)])
    spread = np.linspace(0, n - 1, SAMPLED_ROWS // 2).astype(np.int64)
    largest = np.argsort(-np.abs(diagonal), kind="stable")[: SAMPLED_ROWS // 2]
    index = np.unique(np.concatenate([spread, largest]))
    root = operator.root_weights()
    chosen, sums = rows.take(index, n), np.zeros(len(index))
    with single_blas_thread():
        for start in range(0, n, SAMPLED_COLUMNS):
            span = slice(start, min(start + SAMPLED_COLUMNS, n))
            entries = np.abs(kernel.block(chosen, rows.read(span.start, span.stop)))
            sums += entries.sum(axis=1) if root is None else entries @ root[span]
    return sums if root is None else root[index] * sums


def _diagonal(operator: RidgeOperator) -> FloatMatrix | None:
    """The diagonal of S K S (n,); None when no entry of it is negative because K is positive semi-definite."""
    if operator.kernel is not None and operator.kernel.positive_semidefinite:
        return None
    return np.concatenate([operator.diagonal(i) for i in range(operator.grid.num_tiles)])


def residual_norms(
    operator: RidgeOperator, rhs: BlockColumns, solution: BlockColumns, workspace: Workspace, scratch: Any
) -> ResidualNorms:
    """The norms of R = S Y - A u for right-hand sides and solutions on disk; phase "residual" of the workspace.

    Parameters
    ----------
    rhs, solution : BlockColumns (n, t)
        S Y and u, in any precision.
    scratch
        See :class:`~dkrr.linalg.matmul.OperatorProduct`.
    """
    relative: list[float] = []
    backward: list[float] = []
    with OperatorProduct(operator, workspace, scratch, phase="residual") as product:
        for panel in range(rhs.num_panels):
            norms = true_residual(
                product, np.array([operator.alpha]), panel_rows(rhs, panel), panel_rows(solution, panel)
            )  # fmt: skip
            relative += norms.relative_residual
            backward += norms.backward_error
    return ResidualNorms(relative, backward)


def panel_rows(blocks: BlockColumns, panel: int) -> FloatMatrix:
    """All rows of one column block (n, <= 256) in float64."""
    columns = blocks.columns(panel)
    whole = np.empty((blocks.grid.n, columns.stop - columns.start))
    for i in range(blocks.grid.num_tiles):
        whole[blocks.grid.span(i)] = blocks.read(i, panel)
    return whole
