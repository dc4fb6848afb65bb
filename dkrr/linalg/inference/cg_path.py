"""Many alphas by conjugate gradients, each with its leave-one-out error: no factor, and nothing as large as n^2.

    (S K S + alpha_k I) [u_k, v_k, x_k1 .. x_km] = [S Y, s, z_1 .. z_m],     k = 1 .. a

Targets, the vector s of an intercept and the probes of the diagonal of the inverse are columns side by side, so a pass
over the kernel serves up to 64 of them; one preconditioner serves all alphas. You need this to choose alpha where n is
too large for a factor per alpha, and without targets for the leave-one-out of a fit by conjugate gradients:
:func:`probe_diagonals`.

An interrupted path goes on with the block of columns it was in. What it kept is removed when it ends.

Cost
----
a (t + m + 1) columns of conjugate gradients to 1e-6, most iterations for the smallest alpha, and with weights of zero a
pass for each alpha; 8 n a (t + m + 1) bytes on disk. The calling process holds about 8 n 64 doubles for a
block and 3 n m for an estimate, whatever a is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, NumericalError
from dkrr.linalg.cg.column_solves import Column, ColumnSolves
from dkrr.linalg.cg.solver import CGSolver
from dkrr.linalg.inference.leave_one_out import LeaveOneOut
from dkrr.linalg.inference.stochastic_diagonal import (
    PROBE_TOL,
    StochasticDiagonal,
    probe_columns,
    right_hand_side,
    stochastic_from_columns,
)
from dkrr.linalg.inference.stochastic_loo import stochastic_leave_one_out
from dkrr.linalg.intercept import Centring, centre_targets, intercept_of
from dkrr.linalg.keys import gram_fields, key_of
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import Workspace
from dkrr.lock import hold_lock
from dkrr.stores import place, remove_array

__all__ = ["PathPoint", "cg_path", "probe_diagonals"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PathPoint:
    """One alpha of a path.

    Parameters
    ----------
    alpha
    u : (n, t)
        The solution; dual_coef = S u.
    intercept : (t,) or None
    leave_one_out
        With standard errors.
    relative_residual : (t,)
        Of the targets, true.
    """

    alpha: float
    u: FloatMatrix
    intercept: FloatVector | None
    leave_one_out: LeaveOneOut
    relative_residual: FloatVector


def cg_path(
    operator: RidgeOperator,
    workspace: Workspace,
    y: FloatMatrix,
    alphas: Sequence[float],
    solver: CGSolver,
    *,
    fit_intercept: bool = False,
    num_probes: int = 32,
    seed: int = 0,
    tol: float = PROBE_TOL,
    weight_digest: str | None = None,
    source_digest: str = "",
) -> Iterator[PathPoint]:
    """Solutions and leave-one-out errors for alphas, one after the other in the order given.

    Parameters
    ----------
    operator
        S K S; its alpha does not matter.
    y : (n, t)
        Targets, not scaled by weights.
    alphas
        Positive; a value that comes twice is solved once.
    solver
        Preconditioner, precision and limits of the iteration.
    num_probes, seed
        m; the same probes for every alpha, so that errors of neighbours are alike and their difference is sharper.
    tol
        Relative residual of all columns. A fit with the alpha that was chosen can start from ``u``.
    weight_digest, source_digest
        As in :func:`~dkrr.linalg.keys.factor_fields`.

    Raises
    ------
    ParameterError
        Fewer than four probes.
    NotPositiveDefiniteError, PreconditionerError, ConvergenceError
        See :func:`dkrr.linalg.cg.iteration.conjugate_gradients`.
    """
    root, n, t = operator.root_weights(), operator.grid.n, y.shape[1]
    weight = None if root is None else np.square(root)
    centring = centre_targets(lambda: [(y, weight)], t) if fit_intercept else None
    rhs = y if centring is None else centring.apply(y)
    rhs = rhs if root is None else root[:, None] * rhs
    distinct = list(dict.fromkeys(float(alpha) for alpha in alphas))
    columns = {
        alpha: probe_columns(alpha, num_probes, with_ones=fit_intercept)
        + [Column(alpha, "target", j) for j in range(t)]
        for alpha in distinct
    }

    def values(column: Column) -> FloatVector:
        return rhs[:, column.index] if column.kind == "target" else right_hand_side(column, n, seed, root)

    with _columns(
        operator, workspace, solver, columns, values, tol=tol, seed=seed, digests=(weight_digest, source_digest)
    ) as solves:
        for alpha in alphas:
            own = columns[float(alpha)]
            diagonal = stochastic_from_columns(solves, own, seed=seed)
            targets = own[-t:]
            u, intercept = solves.take(targets), None
            if centring is not None:
                u, intercept = _with_intercept(u, diagonal, centring, root)
            yield PathPoint(
                alpha=float(alpha),
                u=u,
                intercept=intercept,
                leave_one_out=stochastic_leave_one_out(
                    y=y,
                    u=u,
                    diagonals=[diagonal],
                    alpha=np.full(t, float(alpha)),
                    root=root,
                    predictions=_unseen(operator, workspace, u, root, intercept),
                ),
                relative_residual=solves.relative_residual(targets),
            )


def probe_diagonals(
    operator: RidgeOperator,
    workspace: Workspace,
    alphas: Sequence[float],
    solver: CGSolver,
    *,
    with_ones: bool = False,
    num_probes: int = 32,
    seed: int = 0,
    tol: float = PROBE_TOL,
    weight_digest: str | None = None,
    source_digest: str = "",
) -> list[StochasticDiagonal]:
    """The diagonal of the inverse for each distinct alpha; parameters as in :func:`cg_path`."""
    root, n = operator.root_weights(), operator.grid.n
    columns = {float(alpha): probe_columns(float(alpha), num_probes, with_ones=with_ones) for alpha in alphas}
    with _columns(
        operator,
        workspace,
        solver,
        columns,
        lambda column: right_hand_side(column, n, seed, root),
        tol=tol,
        seed=seed,
        digests=(weight_digest, source_digest),
    ) as solves:
        return [stochastic_from_columns(solves, own, seed=seed) for own in columns.values()]


@contextmanager
def _columns(
    operator: RidgeOperator,
    workspace: Workspace,
    solver: CGSolver,
    columns: dict[float, list[Column]],
    values: Any,
    *,
    tol: float,
    seed: int,
    digests: tuple[str | None, str],
) -> Iterator[ColumnSolves]:
    """Preconditioner and columns in a folder of their own; it stays for the next attempt after an interruption.

    Columns converge or are an error, whatever a fit allows: errors that are made of others would be wrong.
    """
    solver = replace(solver, settings=replace(solver.settings, allow_unconverged=False))
    every = [column for own in columns.values() for column in own]
    fields = gram_fields(operator, "float64", digests[1]) | {
        "columns": [[column.alpha, column.kind, column.index] for column in every],
        "seed": seed,
        "tol": tol,
        "weight_digest": digests[0] if operator.weighted else None,
        "solver": solver.settings.to_dict() | {"precision": solver.precision},
        "blas": workspace.blas,
    }
    location = place(workspace.store, "solves", key_of(fields) + ".zarr")
    with hold_lock(location):
        prepared = solver.prepare(
            operator.with_alpha(min(columns)),
            workspace,
            weight_digest=digests[0],
            source_digest=digests[1],
            store=location,
            num_columns=len(next(iter(columns.values()))),
        )
        solves = ColumnSolves(prepared, place(location, "columns"), every, values, tol=tol)
        try:
            solves.run()
            yield solves
        except (NumericalError, DataError, GeneratorExit):
            remove_array(location)  # hopeless, or nobody asks for more
            raise
        remove_array(location)


def _with_intercept(
    u: FloatMatrix, diagonal: StochasticDiagonal, centring: Centring, root: FloatVector | None
) -> tuple[FloatMatrix, FloatVector]:
    """u - b v and the intercepts of the targets that were given."""
    v = diagonal.ones
    assert v is not None  # noqa: S101  (narrows the type)
    normal = np.ones(len(v)) if root is None else root
    b = intercept_of(normal @ u, float(normal @ v))
    return u - v[:, None] * b, centring.offset + b


def _unseen(
    operator: RidgeOperator,
    workspace: Workspace,
    u: FloatMatrix,
    root: FloatVector | None,
    intercept: FloatVector | None,
) -> FloatMatrix | None:
    """f at the rows of weight zero (k, t), from one more pass over the kernel; None without such rows."""
    if root is None or root.all():
        return None
    with OperatorProduct(replace(operator, weighted=False), workspace, workspace.store, progress=None) as product:
        values = product(root[:, None] * u)[root == 0]
    return values if intercept is None else np.asarray(values + intercept)
