"""Leave-one-out of the rows of a data set, whatever solved them: finds the factor in the store, or makes it.

    cholesky    D from the tile factor; a finished factor in the store is used as it is
    mixed, cg   D from a float64 factor, which is made: n^3 / 3 flops more; or, for cg, a stochastic estimate
    nystrom     leverages by two passes over the rows, the centres fixed

Jobs, searches over alpha and the estimator come here.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.session import memory_limit_of
from dkrr.errors import ConvergenceError, ParameterError, ResidualError
from dkrr.fitting import FitSettings, residual_norm, ridge_operator, stored_gram
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.cg.solver import CGSolver
from dkrr.linalg.factor.direct import CholeskyFactor, CholeskySolver
from dkrr.linalg.inference.cg_path import probe_diagonals
from dkrr.linalg.inference.inverse_diagonal import forget_inverse_diagonal, inverse_diagonal, inverse_room
from dkrr.linalg.inference.leave_one_out import LeaveOneOut, loo_from_diagonal, unscaled
from dkrr.linalg.inference.stochastic_loo import stochastic_leave_one_out
from dkrr.linalg.nystrom.centers import read_rows
from dkrr.linalg.nystrom.leverage import Centres, nystrom_leave_one_out
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.predict import ArrayRows, predict_block
from dkrr.linalg.primal.choose import primal_leave_one_out, stored_source
from dkrr.linalg.sizes import choose_gram
from dkrr.linalg.workspace import Workspace
from dkrr.model import Model
from dkrr.planning.costs import cholesky_disk
from dkrr.resources import check_disk, resolve_tile_size
from dkrr.stores import place, remove_array
from dkrr.tiles import TileGrid, TileMatrix

__all__ = ["exact_leave_one_out", "factor_settings", "leave_one_out_rows", "resolve_method", "solver_of"]

logger = logging.getLogger("dkrr.diagnose")

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

METHODS = ("auto", "exact", "stochastic")
PREDICT_ROWS = 4096
# Entries of an inverse diagonal that are compared with a solve, and how far they may be off: sums that belong to
# another factor are off by whole digits, rounding only where alpha is lost beside the kernel.
NUM_CHECKED = 3
# |R| of a fit, as a share of its leave-one-out residuals
MAX_RESIDUAL_SHARE = 0.01
CHECK_BAR = {"float64": 1e-3, "float32": 3e-2}


def solver_of(model: Model) -> str:
    """Which solver a model came from."""
    return str(model.provenance.get("solver", "cholesky"))


def resolve_method(method: str, solver: str) -> str:
    """What "auto" means after a solver: "stochastic" for cg, "exact" otherwise."""
    if method not in METHODS:
        raise ParameterError(f"method is {method!r}; one of {', '.join(METHODS)} expected")
    if method == "auto":
        return "stochastic" if solver == "cg" else "exact"
    return method


def factor_settings(
    settings: FitSettings, dataset: Dataset, workspace: Workspace, model: Model, tile_size: int | None
) -> FitSettings:
    """Settings of a fit by the factor that exact leave-one-out rests on: its own, or those of a float64 factor.

    Parameters
    ----------
    settings
        Of the fit.
    tile_size
        As it was asked for; None for "auto".

    Raises
    ------
    ClusterError, StorageFullError
        A float64 factor fits no worker, or not the disk.
    """
    if solver_of(model) in ("nystrom", "primal") or (settings.solver == "cholesky" and settings.precision != "mixed"):
        return settings
    n, d, num_alphas = dataset.num_rows, dataset.num_features, len(set(settings.alpha))
    if model.kernel is None:
        tile_size = settings.tile_size  # the matrix is in such tiles
    b = resolve_tile_size(tile_size, n, d, "float64", memory_limit_of(workspace.executor))
    gram = choose_gram(model.kernel, num_alphas)
    logger.info("exact leave-one-out needs a float64 factor of %s rows, which this fit has not", f"{n:,}")
    needed = cholesky_disk(n, b, d, 1, precision="float64", gram=gram, num_alphas=num_alphas)
    known: dict[str, list[Any]] = {"rows_digest": [dataset.digest], "alpha": [*settings.alpha, None]}
    check_disk(workspace.store, needed["factor"] + needed["gram"], TileGrid(n, b), known)
    return replace(settings, tile_size=b, gram=gram, solver="cholesky", precision="float64")


def leave_one_out_rows(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    model: Model,
    *,
    method: str = "exact",
    num_probes: int = 32,
    seed: int = 0,
    given: TileMatrix | None = None,
    source_digest: str = "",
) -> LeaveOneOut:
    """Leave-one-out of a model of the rows of a data set, in the units of the targets there.

    Parameters
    ----------
    dataset, settings, workspace, given, source_digest
        As :func:`dkrr.fitting.fit_rows` had them.
    model
        Its coefficients and intercept, with centres and alpha for a Nystrom regression.
    method, num_probes, seed
        "exact" or "stochastic".

    Raises
    ------
    ParameterError
        A Nystrom regression, or a primal fit, has no stochastic estimate.
    ConvergenceError
        The fit's own residual is not small beside those of the rows that are left out.
    """
    if solver_of(model) == "nystrom":
        if method != "exact":
            raise ParameterError(f"method {method!r} of a Nystrom regression", hint='take "exact", two passes')
        relative = max(model.solution.relative_residual)
        if relative > MAX_RESIDUAL_SHARE:  # leverages are those of a solution
            raise ConvergenceError(
                f"leave-one-out: the relative residual of the fit, {relative:.2g}, exceeds {MAX_RESIDUAL_SHARE}",
                hint="fit again with a smaller tol, without allow_unconverged",
                relative_residual=np.asarray(model.solution.relative_residual),
                stagnated=False,
            )
        return nystrom_leave_one_out(dataset, _centres(model), settings.alpha, workspace)
    if solver_of(model) == "primal":
        if method != "exact":
            raise ParameterError(f"method {method!r} of a primal fit", hint='take "exact", one pass')
        fit_intercept = model.intercept is not None
        with stored_source(dataset, model.kernel, workspace, fit_intercept=fit_intercept) as rows:
            return primal_leave_one_out(rows, model.provenance["alpha"], fit_intercept=fit_intercept)
    if method == "stochastic":
        found = _stochastic(dataset, settings, workspace, model, num_probes, seed, given, source_digest)
    else:
        found = exact_leave_one_out(dataset, settings, workspace, model, given=given, source_digest=source_digest)
    _check_solved(found, dataset, model)
    return found


def _check_solved(found: LeaveOneOut, dataset: Dataset, model: Model) -> None:
    """u_i / (A^-1)_ii is a row's residual without it only where A u = S y: |R| may be 1 % of them, in the 2-norm."""
    weight = 1.0 if dataset.weight is None else dataset.weight.read(0, dataset.num_rows)
    relative = np.asarray(model.solution.relative_residual)
    residual = residual_norm(dataset, model.solution, model.intercept)
    left_out = np.sqrt((weight * found.residuals**2).sum(axis=0))
    if (residual > MAX_RESIDUAL_SHARE * left_out).any():
        target = int(np.argmax(residual - MAX_RESIDUAL_SHARE * left_out))
        raise ConvergenceError(
            f"leave-one-out of target {target}: the relative residual of the fit, {relative[target]:.2g}, is not small "
            f"beside the residuals of rows that are left out, {left_out[target]:.2g} in the 2-norm",
            hint="fit again with a smaller tol, without allow_unconverged, or by cholesky",
            relative_residual=relative,
            stagnated=False,
        )


def exact_leave_one_out(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    model: Model,
    *,
    given: TileMatrix | None = None,
    source_digest: str = "",
) -> LeaveOneOut:
    """The same from the tile factors, one for each distinct alpha, with settings of :func:`factor_settings`.

    Cost
    ----
    n^3 / 3 flops for each distinct alpha and one solve to check them; as many flops again where there is no factor of
    the right precision yet: a float64 fit has one, "mixed" and cg do not. In this process 8 n numbers a target.
    """
    n, t = dataset.num_rows, dataset.num_targets
    alphas, operator = _system(dataset, settings, workspace, given, model)
    solver = CholeskySolver(precision="float32" if settings.precision == "float32" else "float64")
    limit = memory_limit_of(workspace.executor)
    room = inverse_room(limit)
    diagonal, ones = np.empty((n, t)), np.empty((n, t)) if model.intercept is not None else None
    for alpha in dict.fromkeys(alphas.tolist()):
        targets = alphas == alpha
        factor = solver.prepare(
            operator.with_alpha(alpha), workspace, weight_digest=dataset.digest_weight, source_digest=source_digest
        )
        factor.make_durable()  # before as much work again
        own = inverse_diagonal(factor, memory_bytes=room)
        found = _checked_ones(factor, own)
        diagonal[:, targets] = own[:, None]
        if ones is not None:
            ones[:, targets] = found[:, None]
    return loo_from_diagonal(inverse_diagonal=diagonal, alpha=alphas, ones=ones, **_answer(dataset, operator, model))


def _stochastic(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    model: Model,
    num_probes: int,
    seed: int,
    given: TileMatrix | None,
    source_digest: str,
) -> LeaveOneOut:
    """The same from probes, without a factor: see :mod:`dkrr.linalg.inference.stochastic_diagonal`."""
    alphas, operator = _system(dataset, settings, workspace, given, model)
    diagonals = probe_diagonals(
        operator,
        workspace,
        alphas.tolist(),
        CGSolver(settings=settings.iterative, precision="mixed" if settings.precision == "mixed" else "float64"),
        with_ones=model.intercept is not None,
        num_probes=num_probes,
        seed=seed,
        weight_digest=dataset.digest_weight,
        source_digest=source_digest,
    )
    return stochastic_leave_one_out(diagonals=diagonals, alpha=alphas, **_answer(dataset, operator, model))


def _system(
    dataset: Dataset, settings: FitSettings, workspace: Workspace, given: TileMatrix | None, model: Model
) -> tuple[FloatVector, RidgeOperator]:
    """An alpha for each target, and the operator of the first of them, over a stored Gram matrix where there is one."""
    alphas = np.broadcast_to(np.asarray(settings.alpha, dtype=np.float64), (dataset.num_targets,))
    if model.center is not None:  # it may be that of an earlier fit, whose tiles were continued
        settings = replace(settings, center=tuple(model.center.tolist()))
    operator = ridge_operator(dataset, settings, float(alphas[0]), given)
    if settings.gram == "stored" and given is None:
        operator = replace(operator, gram=stored_gram(operator, workspace))
    return alphas, operator


def _answer(dataset: Dataset, operator: RidgeOperator, model: Model) -> dict[str, Any]:
    """Targets, the solution u, s, and predictions of rows that were not seen."""
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    n, root = dataset.num_rows, operator.root_weights()
    coefficients = model.dual_coef.read(0, n)
    seen = np.ones(n, np.bool_) if root is None else root > 0
    return {
        "y": dataset.y.read(0, n),
        "u": unscaled(coefficients, root),
        "root": root,
        "predictions": None if seen.all() else _predictions(dataset, operator, model, np.flatnonzero(~seen)),
    }


def _centres(model: Model) -> Centres:
    assert model.kernel is not None  # noqa: S101  (narrows the type)
    assert model.x_fit is not None  # noqa: S101  (narrows the type)
    m = model.num_rows
    return Centres(
        kernel=model.kernel,
        points=model.x_fit.read(0, m),
        coefficients=model.dual_coef.read(0, m),
        center=model.center,
        intercept=model.intercept,
    )


def _checked_ones(factor: CholeskyFactor, diagonal: FloatVector) -> FloatVector:
    """v = A^-1 s (n,), by a solve that also gives some columns of A^-1: their residuals are true, the diagonal theirs.

    Raises
    ------
    ResidualError
        The factor is not that of A, or the diagonal not that of A^-1. The latter is forgotten.
    """
    operator, work = factor.operator, factor.workspace
    grid = operator.grid
    rows = np.unique(np.linspace(0, grid.n - 1, NUM_CHECKED).astype(np.int64))
    scratch = place(work.store, "scratch", uuid.uuid4().hex + ".zarr")
    try:
        rhs = BlockColumns.create(scratch, "rhs", grid, 1 + len(rows), "float64")
        for i in range(grid.num_tiles):
            span, root = grid.span(i), operator.root_weight(i)
            block = np.zeros((span.stop - span.start, 1 + len(rows)))
            block[:, 0] = 1.0 if root is None else root
            block[:, 1:] = np.arange(span.start, span.stop)[:, None] == rows
            rhs.write(i, 0, block)
        u, _ = factor.solve(rhs)
        solved = np.concatenate([u.read(i, 0) for i in range(grid.num_tiles)]).astype(np.float64)
    finally:
        remove_array(scratch)
    error = np.abs(solved[rows, 1 + np.arange(len(rows))] / diagonal[rows] - 1)
    if not error.max() <= CHECK_BAR[factor.solver.precision]:
        forget_inverse_diagonal(factor)
        worst = int(np.argmax(error))
        raise ResidualError(
            f"entry {rows[worst]:,} of the diagonal of the inverse is {diagonal[rows[worst]]:.6g}, a solve gives "
            f"{solved[rows[worst], 1 + worst]:.6g}",
            hint="start again: it is computed anew; if that does not help, raise alpha",
        )
    return solved[:, 0]


def _predictions(dataset: Dataset, operator: RidgeOperator, model: Model, rows: NDArray[np.int64]) -> FloatMatrix:
    """f at some training rows (k, t), in the scale of the targets that were fitted."""
    coefficients = model.dual_coef.read(0, dataset.num_rows)
    if operator.kernel is None:
        values = replace(operator, alpha=0.0, weighted=False).matmul(coefficients)[rows]
    else:
        values = np.empty((len(rows), dataset.num_targets))
        for start in range(0, len(rows), PREDICT_ROWS):
            part = slice(start, start + PREDICT_ROWS)
            block = read_rows(dataset.X, rows[part])
            values[part] = predict_block(operator.kernel, block, dataset.X, ArrayRows(coefficients), model.center)
    return values if model.intercept is None else values + model.intercept
