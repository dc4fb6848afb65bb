"""Leave-one-out of a fit, whatever solved it: finds the factor in the store, or makes it.

    cholesky    D from the tile factor; a finished factor in the store is used as it is
    mixed, cg   D from a float64 factor, which is made: n^3 / 3 flops more
    nystrom     leverages by two passes over the rows, the centres fixed

Jobs and searches over alpha have rows in a data set (:func:`leave_one_out_rows`). An estimator reads the rows that it
was fitted on once more (:func:`leave_one_out`): a fit in memory, n <= 6,000, is factorised again; one through tiles
finds its factor in its store, or makes one for the time being where it has no store of its own.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Floats
from dkrr.engine.cluster import blas_of, memory_limit_of
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import ConvergenceError, ResidualError, StoreError
from dkrr.fit.choices import FitSettings
from dkrr.fit.fitting import residual_norm, ridge_operator, stored_gram
from dkrr.fit.inputs import (
    TemporaryStore,
    check_disk,
    find_executor,
    given_rows,
    given_tiles,
    nothing_new,
    resolve_tile_size,
    rows_on_disk,
)
from dkrr.fit.prices import tiles_bytes
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.dense import dense_diagonals
from dkrr.linalg.direct import CholeskyFactor, CholeskySolver
from dkrr.linalg.leave_one_out import LeaveOneOut, loo_from_diagonal, unscaled
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.nystrom import nystrom_leave_one_out, read_rows
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.primal import array_source, primal_leave_one_out, stored_source
from dkrr.linalg.triangular import forget_inverse_diagonal, inverse_diagonal, inverse_room
from dkrr.linalg.workspace import Workspace, choose_gram
from dkrr.models.model import Model
from dkrr.models.tiled import Training, changed, check_unchanged
from dkrr.models.uncertainty import OTHER_SOLVERS
from dkrr.store.files import full_disk, place, remove_array
from dkrr.tiles import TileGrid, TileMatrix

logger = logging.getLogger("dkrr.leave_one_out")


# Entries of an inverse diagonal that are compared with a solve, and how far they may be off: sums that belong to
# another factor are off by whole digits, rounding only where alpha is lost beside the kernel.
NUM_CHECKED = 3
CHECK_BAR = {"float64": 1e-3, "float32": 3e-2}
# |R| of a fit, as a share of its leave-one-out residuals
MAX_RESIDUAL_SHARE = 0.01


def _solver_of(model: Model) -> str:
    """Which solver a model came from."""
    return str(model.provenance.get("solver", "cholesky"))


# --- an estimator's fit, once more ----------------------------------------------------------------------------------


def leave_one_out(model: Model, training: Training, store: Any) -> LeaveOneOut:
    """Leave-one-out of an estimator's model, in the units of y.

    Parameters
    ----------
    model, training
        Of the fit.
    store
        Where the fit left its factors; None for a temporary store.

    Raises
    ------
    DataError
        The rows, targets or weights are not those of the fit any more.
    """
    if training.checksum is not None and crc32c(training.X) != training.checksum:
        raise changed("X")
    if not training.tiled:
        return _in_memory(model, training)
    n, d = model.num_rows, model.num_features
    tiles = 0 if _solver_of(model) in OTHER_SOLVERS else 4 * n * n * len(set(model.provenance["alpha"]))
    needed = tiles + 8 * n * (n // 2 if model.kernel is None else d)
    with (
        nullcontext() if store is not None else closing(TemporaryStore(needed)) as holder,
        _fitted_rows(model, training, store if holder is None else holder.path) as (dataset, given, digest, work, own),
    ):
        settings = factor_settings(own, dataset, work, model, training.tile_size)
        return leave_one_out_rows(dataset, settings, work, model, given=given, source_digest=digest)


def ensure_factor(model: Model, training: Training, store: Any) -> None:
    """Make the float64 factor of a fit that left a float32 one, in the store that it left it in; logged.

    Only after precision="mixed": that fit has paid for a factor, though for one of half the digits. Nothing is done
    for few rows, whose factor is made in memory, or where there is one.

    Cost
    ----
    n^3 / 3 flops for each distinct alpha, n^2 / 2 numbers in the store, which stay.
    """
    is_mixed = model.provenance.get("solver") == "cholesky" and model.provenance.get("precision") == "mixed"
    if not is_mixed or model.kernel is None or store is None:
        return
    with suppress(StoreError):
        _ = model.variance_systems
        return  # there is one
    with _fitted_rows(model, training, store) as (dataset, given, _, work, own):
        settings = factor_settings(own, dataset, work, model, training.tile_size, what="a standard deviation")
        operator = _operator(dataset, settings, work, given, model)
        for alpha in dict.fromkeys(settings.alpha):
            CholeskySolver().prepare(operator.with_alpha(alpha), work, weight_digest=dataset.digest_weight)


def _in_memory(model: Model, training: Training) -> LeaveOneOut:
    """From a factor that is made again in this process; of a primal fit from one pass more over the rows."""
    x = np.asarray(training.X, dtype=np.float64)
    y = np.asarray(training.y, dtype=np.float64).reshape(len(x), -1)
    fit_intercept = model.intercept is not None
    if _solver_of(model) == "primal":
        source = array_source(x, y, model.kernel, training.weight)
        return primal_leave_one_out(source, model.provenance["alpha"], fit_intercept=fit_intercept)
    n, t = y.shape
    alphas = np.broadcast_to(np.asarray(model.provenance["alpha"], dtype=np.float64), (t,))
    root = None if training.weight is None else np.sqrt(np.asarray(training.weight, dtype=np.float64))
    rows, precision = x if model.center is None else x - model.center, model.solution.precision
    with single_blas_thread():
        diagonal, ones = dense_diagonals(model.kernel, rows, alphas, root, precision, fit_intercept=fit_intercept)
        unseen = np.zeros(n, np.bool_) if root is None else root == 0
        return loo_from_diagonal(
            y=y,
            u=unscaled(model.dual_coef.read(0, n), root),
            inverse_diagonal=diagonal,
            alpha=alphas,
            root=root,
            ones=ones,
            predictions=model.predict_rows(x[unseen]) if unseen.any() else None,
        )


@contextmanager
def _fitted_rows(
    model: Model, training: Training, root: Any
) -> Iterator[tuple[Dataset, TileMatrix | None, str, Workspace, FitSettings]]:
    """The rows on disk as the fit had them, a given matrix in tiles, somebody to run tasks, and the fit's settings."""
    facts = model.provenance
    settings = FitSettings(
        kernel=model.kernel,
        alpha=tuple(facts["alpha"]),
        **{name: facts[name] for name in ("tile_size", "precision", "gram")},
        solver="cg" if _solver_of(model) == "cg" else "cholesky",
        fit_intercept=model.intercept is not None,
    )
    X, is_given, tile_size = training.X, model.kernel is None, model.provenance.get("tile_size", "auto")
    rows = np.arange(given_rows(X), dtype=np.float64)[:, None] if is_given else X
    with (
        full_disk(root),
        single_blas_thread(),
        nothing_new(root),
        rows_on_disk(rows, training.y, training.weight, root) as dataset,
        find_executor(dataset.num_rows, training.max_in_process_rows) as executor,
        given_tiles(X, root, tile_size) if is_given else nullcontext((None, "")) as (given, digest),
    ):
        check_unchanged(model, dataset, digest)
        yield dataset, given, digest, Workspace(store=root, executor=executor, blas=blas_of(executor)), settings


# --- rows of a data set ---------------------------------------------------------------------------------------------


def factor_settings(
    settings: FitSettings,
    dataset: Dataset,
    workspace: Workspace,
    model: Model,
    tile_size: int | None,
    *,
    what: str = "leave-one-out",
) -> FitSettings:
    """Settings of a fit by the factor that leave-one-out rests on: its own, or those of a float64 factor.

    Parameters
    ----------
    settings
        Of the fit.
    tile_size
        As it was asked for; None for "auto".
    what
        Needs the factor.

    Raises
    ------
    ClusterError, StorageFullError
        A float64 factor fits no worker, or not the disk.
    """
    if _solver_of(model) in OTHER_SOLVERS or not settings.iterates:
        return settings
    n, d, num_alphas = dataset.num_rows, dataset.num_features, len(set(settings.alpha))
    tile_size = settings.tile_size if model.kernel is None else tile_size  # a given matrix is in such tiles
    b = resolve_tile_size(tile_size, n, d, "float64", memory_limit_of(workspace.executor))
    gram = choose_gram(model.kernel, num_alphas)
    logger.info("%s needs a float64 factor of %s rows, which this fit has not", what, f"{n:,}")
    known: dict[str, list[Any]] = {"rows_digest": [dataset.digest], "alpha": [*settings.alpha, None]}
    needed = tiles_bytes(n, b, "float64") * (num_alphas + (gram == "stored"))
    check_disk(workspace.store, needed, TileGrid(n, b), known)
    return replace(settings, tile_size=b, gram=gram, solver="cholesky", precision="float64")


def leave_one_out_rows(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    model: Model,
    *,
    given: TileMatrix | None = None,
    source_digest: str = "",
) -> LeaveOneOut:
    """Leave-one-out of a model of the rows of a data set, in the units of the targets there.

    Parameters
    ----------
    dataset, workspace, given, source_digest
        As :func:`dkrr.fit.fitting.fit_rows` had them.
    settings
        Of :func:`factor_settings`.
    model
        Its coefficients and intercept, with centres and alpha for a Nystrom regression.

    Raises
    ------
    ConvergenceError
        The fit's own residual is not small beside those of the rows that are left out.

    Cost
    ----
    From tile factors, one for each distinct alpha, n^3 / 3 flops and one solve to check them; as many flops again where
    there is no factor of the right precision yet: a float64 fit has one, "mixed" and cg do not. In this process 8 n
    numbers a target.
    """
    if _solver_of(model) == "nystrom" and model.kernel is not None and model.x_fit is not None:
        relative = np.asarray(model.solution.relative_residual)
        if relative.max() > MAX_RESIDUAL_SHARE:  # leverages are those of a solution
            what = f": the relative residual of the fit, {relative.max():.2g}, exceeds {MAX_RESIDUAL_SHARE}"
            raise _not_solved(what, "", relative)
        return nystrom_leave_one_out(
            dataset,
            model.kernel,
            model.x_fit.read(0, model.num_rows),
            model.dual_coef.read(0, model.num_rows),
            settings.alpha,
            workspace,
            center=model.center,
            intercept=model.intercept,
        )
    fit_intercept = model.intercept is not None
    if _solver_of(model) == "primal":
        with stored_source(dataset, model.kernel, workspace, fit_intercept=fit_intercept) as rows:
            return primal_leave_one_out(rows, model.provenance["alpha"], fit_intercept=fit_intercept)
    n, t = dataset.num_rows, dataset.num_targets
    alphas = np.broadcast_to(np.asarray(settings.alpha, dtype=np.float64), (t,))
    operator = _operator(dataset, settings, workspace, given, model)
    solver = CholeskySolver(precision="float32" if settings.precision == "float32" else "float64")
    room = inverse_room(memory_limit_of(workspace.executor))
    diagonal, ones = np.empty((n, t)), np.empty((n, t)) if fit_intercept else None
    for alpha in dict.fromkeys(alphas.tolist()):
        factor = solver.prepare(
            operator.with_alpha(alpha), workspace, weight_digest=dataset.digest_weight, source_digest=source_digest
        )
        factor.make_durable()  # before as much work again
        own = inverse_diagonal(factor, memory_bytes=room)
        found = _checked_ones(factor, own)
        diagonal[:, alphas == alpha] = own[:, None]
        if ones is not None:
            ones[:, alphas == alpha] = found[:, None]
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    root = operator.root_weights()
    unseen = np.empty(0, np.int64) if root is None else np.flatnonzero(root == 0)
    loo = loo_from_diagonal(
        y=dataset.y.read(0, n),
        u=unscaled(model.dual_coef.read(0, n), root),
        inverse_diagonal=diagonal,
        alpha=alphas,
        root=root,
        ones=ones,
        predictions=_predictions(dataset, operator, model, unseen) if len(unseen) else None,
    )
    _check_solved(loo, dataset, model)
    return loo


def _check_solved(found: LeaveOneOut, dataset: Dataset, model: Model) -> None:
    """u_i / (A^-1)_ii is a row's residual without it only where A u = S y: |R| may be 1 % of them, in the 2-norm."""
    weight = 1.0 if dataset.weight is None else dataset.weight.read(0, dataset.num_rows)
    relative = np.asarray(model.solution.relative_residual)
    left_out = np.sqrt((weight * found.residuals**2).sum(axis=0))
    excess = residual_norm(dataset, model.solution, model.intercept) - MAX_RESIDUAL_SHARE * left_out
    if (excess > 0).any():
        target = int(np.argmax(excess))
        raise _not_solved(
            f" of target {target}: the relative residual of the fit, {relative[target]:.2g}, is not small beside the "
            f"residuals of rows that are left out, {left_out[target]:.2g} in the 2-norm",
            ", or by cholesky",
            relative,
        )


def _not_solved(what: str, other: str, relative: Floats) -> ConvergenceError:
    return ConvergenceError(
        f"leave-one-out{what}",
        hint=f"fit again with a smaller tol, without allow_unconverged{other}",
        relative_residual=relative,
        stagnated=False,
    )


def _operator(
    dataset: Dataset, settings: FitSettings, workspace: Workspace, given: TileMatrix | None, model: Model
) -> RidgeOperator:
    """That of the first alpha, over a stored Gram matrix where there is one."""
    if model.center is not None:  # it may be that of an earlier fit, whose tiles were continued
        settings = replace(settings, center=tuple(model.center.tolist()))
    operator = ridge_operator(dataset, settings, settings.alpha[0], given)
    if settings.gram == "stored" and given is None:
        operator = replace(operator, gram=stored_gram(operator, workspace))
    return operator


def _checked_ones(factor: CholeskyFactor, diagonal: Floats) -> Floats:
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
        rhs.fill(np.hstack([operator.normal()[:, None], np.arange(grid.n)[:, None] == rows]))
        u = factor.solve(rhs)[0]
        solved = u.whole()
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


def _predictions(dataset: Dataset, operator: RidgeOperator, model: Model, rows: NDArray[np.int64]) -> Floats:
    """f at some training rows (k, t), in the scale of the targets that were fitted."""
    if operator.kernel is not None:
        own = replace(model, scaling=None, x_fit=dataset.X)
        return np.asarray(own.compute(read_rows(dataset.X, rows), Model.predict_rows))
    here = Workspace(store="", executor=InProcessExecutor())
    product = OperatorProduct(replace(operator, weighted=False), here, "")
    values = product(model.dual_coef.read(0, dataset.num_rows))[rows]
    return values if model.intercept is None else values + model.intercept
