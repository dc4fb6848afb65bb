"""The bordered system on blocks in the store: a factor's answer with an intercept, and the residual of any answer.

    R = S Y - A u - b s,    b = s^T (S Y - A u) / s^T s

b is the one for which R is smallest; where u solves the system it is the intercept. R is evaluated like every residual,
in float64 from the kernel and the rows (:mod:`dkrr.linalg.residual`), whatever computed u.

Cost
----
One product with S K S for the residual, whose driver holds six (n, 256) arrays; two passes over the blocks of u to
combine it. A refinement, where there is one, is two more sweeps and a product; the driver holds R (n, t).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.factor.direct import CholeskyFactor
from dkrr.linalg.intercept import (
    MAX_REFINEMENTS,
    best_intercept,
    bordered_norms,
    intercept_of,
    loses_digits,
    weighted_sums,
)
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.residual import ResidualNorms, exact_product, panel_rows, product_norms
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import FloatArray
from dkrr.store.files import place
from dkrr.tiles import TileGrid

__all__ = ["bordered_residual", "solve_bordered", "with_bordered_residual"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


def solve_bordered(factor: CholeskyFactor, rhs: BlockColumns) -> tuple[BlockColumns, Solution, FloatVector]:
    """Solve A u + b s = S Y, s^T u = 0 with a finished factor of A.

    Parameters
    ----------
    rhs : BlockColumns (n, t + 1)
        S Y of centred targets, and s in the last column.

    Returns
    -------
    u : BlockColumns (n, t)
        In float64, also from a float32 factor: v is subtracted in float64, so that s^T u = 0 holds to its rounding.
    solution : Solution
        Relative residual and backward error of the bordered system.
    intercept : (t,)
        Of the centred targets.

    Raises
    ------
    ResidualError
        See :meth:`dkrr.linalg.factor.direct.CholeskyFactor.solve`.
    """
    t, grid, operator, store = rhs.num_columns - 1, rhs.grid, factor.operator, place(rhs.array.store, "bordered")
    targets = _columns(store, "rhs", grid, t, lambda i: rhs.read_rows(i)[:, :t])
    u, right = _columns(store, "u", grid, t, lambda i: np.zeros((grid.rows(i), t))), rhs
    residual = np.empty((grid.n, t))
    for number in range(MAX_REFINEMENTS + 1):
        u, enough = _corrected(factor, u, factor.substitute(right, f"-{number}" if number else ""), f"u-{number}")
        norms, intercept = bordered_residual(
            operator, targets, u, np.full(t, operator.alpha), factor.workspace, keep=residual
        )
        if enough or number == MAX_REFINEMENTS:
            break
        normal = _normal(operator)[:, None]
        right = _columns(
            rhs.array.store,
            f"residual-{number}",
            grid,
            t + 1,
            lambda i: np.hstack([residual[grid.span(i)], normal[grid.span(i)]]),  # noqa: B023
        )
    return u, factor.judged(norms), intercept


def _columns(store: Any, name: str, grid: TileGrid, count: int, rows: Callable[[int], FloatArray]) -> BlockColumns:
    """A matrix of ``count`` columns in float64 whose row blocks are computed."""
    columns = BlockColumns.create(store, name, grid, count, "float64")
    for i in range(grid.num_tiles):
        block = rows(i)
        for panel in range(columns.num_panels):
            columns.write(i, panel, block[:, columns.columns(panel)])
    return columns


def _corrected(factor: CholeskyFactor, u: BlockColumns, solved: BlockColumns, name: str) -> tuple[BlockColumns, bool]:
    """u + A^-1 R - b v with s^T of it 0, for A^-1 R and v side by side; whether b v was small enough beside it."""
    grid, t = u.grid, u.num_columns
    sums, sum_v = np.zeros(t), 0.0
    for i in range(grid.num_tiles):
        root = factor.operator.root_weight(i)
        part = weighted_sums(solved.read_rows(i), root)
        sums, sum_v = sums + part[:t] + weighted_sums(u.read_rows(i), root), sum_v + float(part[t])
    b = intercept_of(sums, sum_v)
    largest_u, largest_v = np.zeros(t), 0.0

    def corrected(i: int) -> FloatArray:
        nonlocal largest_u, largest_v
        parts = solved.read_rows(i).astype(np.float64, copy=False)
        block = u.read_rows(i) + (parts[:, :t] - parts[:, t:] * b)
        largest_u = np.maximum(largest_u, np.abs(block).max(axis=0))
        largest_v = max(largest_v, float(np.abs(parts[:, t]).max()))
        return block

    result = _columns(u.array.store, name, grid, t, corrected)
    return result, not loses_digits(b, largest_v, largest_u)


def _normal(operator: RidgeOperator) -> FloatVector:
    """s (n,)."""
    root = operator.root_weights()
    return np.ones(operator.grid.n) if root is None else root


def with_bordered_residual(
    solution: Solution, operator: RidgeOperator, rhs: BlockColumns, u: BlockColumns, alpha: Any, workspace: Workspace
) -> tuple[Solution, FloatVector]:
    """The solution of conjugate gradients in the plane with the norms of the whole system, and the intercept (t,)."""
    norms, intercept = bordered_residual(operator, rhs, u, np.asarray(alpha, np.float64), workspace)
    norms_of = {"relative_residual": norms.relative_residual, "backward_error": norms.backward_error}
    return replace(solution, **norms_of), intercept  # type: ignore[arg-type]


def bordered_residual(
    operator: RidgeOperator,
    rhs: BlockColumns,
    u: BlockColumns,
    alpha: FloatVector,
    workspace: Workspace,
    *,
    keep: FloatMatrix | None = None,
) -> tuple[ResidualNorms, FloatVector]:
    """Norms of R, and b, for centred targets and solutions on disk; phase "residual" of the workspace.

    Parameters
    ----------
    rhs, u : BlockColumns (n, t)
        S Y and u.
    alpha : (t,)
    keep : (n, t), optional
        Takes R.

    Returns
    -------
    norms
        |R| / |S Y| in the 2-norm; the larger of |R| / (|A| |u| + |S Y - b s|) and |s^T u| / (|s|_1 |u|_inf), where
        |.| without a mark is the infinity norm.
    intercept : (t,)
    """
    relative: list[float] = []
    backward: list[float] = []
    intercept = np.zeros(rhs.num_columns)
    normal = _normal(operator)
    with OperatorProduct(operator, workspace, rhs.array.store, phase="residual") as product:
        for panel in range(rhs.num_panels):
            columns = rhs.columns(panel)
            norms, intercept[columns], residual = _panel_norms(
                product, alpha[columns], panel_rows(rhs, panel), panel_rows(u, panel), normal
            )
            if keep is not None:
                keep[:, columns] = residual
            relative += norms.relative_residual
            backward += norms.backward_error
    return ResidualNorms(relative, backward), intercept


def _panel_norms(
    product: OperatorProduct, alpha: FloatVector, rhs: FloatMatrix, u: FloatMatrix, normal: FloatVector
) -> tuple[ResidualNorms, FloatVector, FloatMatrix]:
    multiplied = exact_product(product, u)
    left = rhs - multiplied - alpha * u
    b = best_intercept(left, normal)
    shifted = rhs - normal[:, None] * b
    norms = product_norms(product, alpha, shifted, u, multiplied)
    relative, backward = bordered_norms(
        np.array(norms.relative_residual), np.array(norms.backward_error), rhs, shifted, u, normal
    )
    return ResidualNorms(relative.tolist(), backward.tolist()), b, left - normal[:, None] * b
