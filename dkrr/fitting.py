"""Fit out of core: from training rows on disk to dual coefficients on disk.

    gram (optional)  ->  factorise  ->  solve  ->  residual            once per distinct alpha

Everything "auto" is resolved before, once, by :mod:`dkrr.linalg.sizes` and the callers. The phases are resumable: run
the same fit on the same store again and only what is not valid is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.attempts import Attempts, FitSettings, OtherWays
from dkrr.chunks import ChunkArray
from dkrr.dataset import Dataset, RowArray
from dkrr.dataset.destination import storage_errors
from dkrr.errors import ConvergenceError, DamagedChunkError, DataError, DkrrError, NumericalError, ParameterError
from dkrr.linalg.frozen_center import FrozenCenter, choose_center
from dkrr.linalg.gram import build_gram, rows_of
from dkrr.linalg.keys import gram_fields, key_of
from dkrr.linalg.lineage import ancestors
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.predict import check_training_rows
from dkrr.linalg.solution import Solution
from dkrr.linalg.solving import Solved, dual_coef_block, solve_targets, start_from
from dkrr.linalg.takeover import continue_lineage
from dkrr.linalg.workspace import Workspace
from dkrr.lock import hold_lock
from dkrr.stores import place, read_json, remove_array
from dkrr.tiles import TileGrid, TileMatrix

__all__ = [
    "FitSettings",
    "center_of_lineage",
    "fit_rows",
    "residual_norm",
    "ridge_operator",
    "stored_gram",
    "with_lineage",
]

logger = logging.getLogger("dkrr.fitting")

FloatMatrix = NDArray[np.float64]


@dataclass
class FitResult:
    """Where the answer is and how good it is; ``intercept`` (t,), None where none was asked for.

    ``settings`` are those that led to it: of another way than was asked first where that was given up.
    """

    dual_coef: RowArray
    solution: Solution
    operator: RidgeOperator
    factors: list[str]
    gram: str | None
    settings: FitSettings
    intercept: NDArray[np.float64] | None = None


@contextmanager
def fit_rows(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    *,
    given: TileMatrix | None = None,
    source_digest: str = "",
    start: FloatMatrix | None = None,
    ways: OtherWays | None = None,
) -> Iterator[FitResult]:
    """Solve (K + alpha I) dual_coef = Y for the rows of a data set; a context manager.

    The coefficients live in the store while the block runs; right-hand sides and solutions are removed at its end
    (and kept for the next attempt when the fit is interrupted, or came to the limit of its iterations).

    Parameters
    ----------
    dataset
        Training rows X, targets y, optional weights, as the kernel shall see them.
    settings, workspace
        What to compute, and where.
    given
        A precomputed matrix in tiles, instead of a kernel.
    source_digest
        Digest of ``given``.
    start : (m, t), optional
        Coefficients of an earlier fit of the first m <= n rows, from which an iteration begins; rows beyond them begin
        at zero. A direct solve has no use for it.
    ways
        What may be done where the way of ``settings`` leads to no answer, see :mod:`dkrr.attempts`.

    Raises
    ------
    NotPositiveDefiniteError, ResidualError
        See :class:`dkrr.linalg.factor.direct.CholeskySolver`.
    NotPositiveDefiniteError, PreconditionerError, ConvergenceError
        See :func:`dkrr.linalg.cg.iteration.conjugate_gradients`.
    LockedError
        Another process does the same fit on the same store.
    """
    if dataset.y is None:
        raise ParameterError(f"{dataset.path} has no target", hint="name one with target=")
    num_targets = dataset.num_targets
    if len(settings.alpha) not in (1, num_targets):
        raise ParameterError(
            f"{len(settings.alpha)} values of alpha for {num_targets} targets; 1 or {num_targets} expected"
        )
    alphas = settings.alpha * (num_targets if len(settings.alpha) == 1 else 1)
    fields = _answer_fields(dataset, settings, workspace, alphas, source_digest)
    common = place(workspace.store, "solves", key_of(fields | {"ways": None if ways is None else ways.asked}) + ".zarr")
    attempts = Attempts(settings, ways, common, workspace)
    with ExitStack() as locks:
        if ways is not None:
            locks.enter_context(hold_lock(common))
        locks.enter_context(storage_errors(workspace.store))
        way = attempts.begin()
        while True:
            taken = with_lineage(way, dataset, workspace.store, workspace.reused)
            operator = ridge_operator(dataset, taken, alphas[0], given)
            guess = attempts.start(way, dataset.num_rows, num_targets)
            if guess is None and start is not None:
                guess = start_from(dataset, start)
            solve_key = key_of(_solve_fields(dataset, taken, operator, workspace, alphas, source_digest))
            solve_store = place(workspace.store, "solves", solve_key + ".zarr")
            locks.enter_context(hold_lock(solve_store))
            # two chunks of rows that changed places pass their checksums, and every residual after that
            dataset.verify()
            try:
                result = _solve_all(
                    dataset,
                    taken,
                    operator,
                    workspace,
                    solve_store,
                    alphas,
                    source_digest,
                    guess,
                    None if ways is None else common,
                )
                break
            except (NumericalError, DamagedChunkError, DataError) as exc:
                error: DkrrError = exc
            following = attempts.after(way, error, solve_store)
            if following is None:
                _clear(attempts, solve_store, error)
                raise error
            way = following
            del error  # with all that its traceback holds
        attempts.settle()
        try:
            yield replace(result, solution=_told(result.solution, workspace))
        except (NumericalError, DamagedChunkError, DataError) as exc:
            _clear(attempts, solve_store, exc)
            raise
        remove_array(solve_store)
        attempts.end()


def _clear(attempts: Attempts, solve_store: str, error: DkrrError) -> None:
    """A rerun must not find the blocks of a wrong or damaged answer valid, nor the state of a hopeless iteration.

    One that only came to its limit goes on from there when it is given more.
    """
    if not isinstance(error, ConvergenceError) or error.stagnated:
        remove_array(solve_store)
        attempts.end()


def _told(solution: Solution, workspace: Workspace) -> Solution:
    """The solution with what was given up before it."""
    if not workspace.given_up:
        return solution
    sentences = "; ".join(str(item["sentence"]) for item in workspace.given_up)
    return replace(solution, message=f"{sentences}: {solution.message}", given_up=list(workspace.given_up))


def with_lineage(
    settings: FitSettings, dataset: Dataset, store: Any, reused: dict[str, Any] | None = None
) -> FitSettings:
    """The settings with the centre of the earlier fit that shares the most rows, so that its tiles can be continued.

    Nothing changes where no tiles are kept, or there is none. Rows that have drifted too far from it get a centre of
    their own, and a warning says so.

    Parameters
    ----------
    reused
        Where "center" is noted when there are newer rows: what became of it, see
        :meth:`dkrr.linalg.frozen_center.FrozenCenter.to_dict`.

    Cost
    ----
    See :mod:`dkrr.linalg.lineage` and :mod:`dkrr.linalg.frozen_center`.
    """
    found = center_of_lineage(settings, dataset, store)
    if found is None:
        return settings
    if found.sentence() and reused is not None:
        reused["center"] = found.to_dict()
    if found.center is None:
        logger.warning("%s", found.sentence())
    return replace(settings, center=found.center)


def center_of_lineage(settings: FitSettings, dataset: Dataset, store: Any) -> FrozenCenter | None:
    """The centre that a fit would go on with; None where there is nothing to go on with, or no need of a centre."""
    kernel = settings.kernel
    has_tiles = settings.solver == "cholesky" or settings.gram == "stored"
    if settings.center is not None or kernel is None or not kernel.stationary or not has_tiles:
        return None
    return choose_center(
        ancestors(store, dataset, kernel.to_dict(), kinds=("factors", "grams")),
        dataset,
        kernel,
        tile_size=settings.tile_size,
        dtype="float64" if settings.precision == "float64" else "float32",
        gram=settings.gram,
        alphas=settings.alpha,
        limit=settings.drift_limit,
    )


def ridge_operator(
    dataset: Dataset, settings: FitSettings, alpha: float, given: TileMatrix | None = None
) -> RidgeOperator:
    """A = S K S + alpha I of a data set, over its kernel or over a given matrix."""
    return RidgeOperator(
        grid=TileGrid(dataset.num_rows, settings.tile_size),
        alpha=alpha,
        kernel=settings.kernel,
        rows=rows_of(dataset, settings.kernel, settings.center),
        weighted=dataset.weight is not None,
        gram=given,
    )


def _answer_fields(
    dataset: Dataset, settings: FitSettings, workspace: Workspace, alphas: tuple[float, ...], source_digest: str
) -> dict[str, Any]:
    """What decides the answer, whatever way leads to it."""
    return {
        "kernel": None if settings.kernel is None else settings.kernel.to_dict(),
        "rows_digest": source_digest or dataset.digest,
        "alpha": list(alphas),
        "y": dataset.digest_y,
        "weight": dataset.digest_weight,
        "blas": workspace.blas,
        "tol": settings.iterative.tol,
        "fit_intercept": settings.fit_intercept,
    }


def _solve_fields(
    dataset: Dataset,
    settings: FitSettings,
    operator: RidgeOperator,
    workspace: Workspace,
    alphas: tuple[float, ...],
    source_digest: str,
) -> dict[str, Any]:
    """What decides the answer. What an iteration has besides is left out for a direct solve."""
    fields: dict[str, Any] = {
        "gram": gram_fields(operator, settings.precision, source_digest),
        "alpha": list(alphas),
        "y": dataset.digest_y,
        "weight": dataset.digest_weight,
        "tile_size": settings.tile_size,
        "blas": workspace.blas,
    }
    if settings.solver == "cg" or settings.precision == "mixed":
        fields["solver"], fields["tol"] = settings.solver, settings.iterative.tol
    if settings.solver == "cg":
        iterative = settings.iterative
        fields["preconditioner"] = [iterative.preconditioner, iterative.rank, iterative.seed]
        fields["source"] = settings.gram
    if settings.fit_intercept:  # absent without one: what was solved before there were intercepts keeps its key
        fields["fit_intercept"] = True
    return fields


def _solve_all(
    dataset: Dataset,
    settings: FitSettings,
    operator: RidgeOperator,
    workspace: Workspace,
    solve_store: Any,
    alphas: tuple[float, ...],
    source_digest: str,
    start: FloatMatrix | None,
    shared: str | None,
) -> FitResult:
    source, gram_location = operator, None
    if settings.gram == "stored" and operator.gram is None:
        gram, _ = _gram_matrix(operator, workspace)
        gram_location, source = gram.location, replace(operator, gram=gram)

    @cache
    def ready() -> None:
        if gram_location is not None:
            stored_gram(operator, workspace)

    digests = {"weight_digest": dataset.digest_weight, "source_digest": source_digest}
    solved = solve_targets(
        dataset, settings, operator, source, workspace, solve_store, alphas, digests, start, ready, shared
    )
    # no Gram matrix is made for a start that is good already
    has_gram = gram_location is not None and read_json(gram_location, "zarr.json") is not None
    coefficients = RowArray.create(
        solve_store,
        "dual_coef",
        num_rows=dataset.num_rows,
        num_columns=dataset.num_targets,
        rows_per_chunk=settings.tile_size,
    )
    for i in range(operator.grid.num_tiles):
        coefficients.write_chunk(i, dual_coef_block(operator, solved.solutions, i, dataset.num_targets))
    solution = _combined(solved.solutions, dataset.num_targets, workspace)
    if operator.kernel is not None and operator.rows is not None:
        _check_predictions(dataset, operator, coefficients, solution, alphas, solved.intercept)
    return FitResult(
        dual_coef=coefficients,
        solution=solution,
        operator=operator,
        factors=solved.factors,
        gram=gram_location if has_gram else None,
        settings=settings,
        intercept=solved.intercept,
    )


def _check_predictions(
    dataset: Dataset,
    operator: RidgeOperator,
    coefficients: RowArray,
    solution: Solution,
    alphas: tuple[float, ...],
    intercept: NDArray[np.float64] | None,
) -> None:
    """:func:`~dkrr.linalg.predict.check_training_rows` for a data set."""
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    assert operator.kernel is not None  # noqa: S101  (narrows the type)
    assert operator.rows is not None  # noqa: S101  (narrows the type)
    center = operator.rows.center
    check_training_rows(
        operator.kernel,
        dataset.X,
        coefficients,
        None if center is None else np.asarray(center),
        y=dataset.y,
        weight=dataset.weight,
        alpha=np.asarray(alphas),
        intercept=intercept,
        residual_norm=residual_norm(dataset, solution, intercept),
    )


def residual_norm(dataset: Dataset, solution: Solution, intercept: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """The 2-norm (t,) of R = S Y - S b - A u, which is the relative residual times |S (Y - b)|."""
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    squares = np.zeros(dataset.num_targets)
    with np.errstate(over="ignore"):  # so large a norm allows anything
        for start, stop in dataset.y.blocks():
            y = dataset.y.read(start, stop) - (0.0 if intercept is None else intercept)
            root = 1.0 if dataset.weight is None else np.sqrt(dataset.weight.read(start, stop))
            squares += np.square(root * y).sum(axis=0)
    relative, norm = np.asarray(solution.relative_residual), np.sqrt(squares)
    return np.asarray(np.multiply(relative, norm, out=np.zeros_like(norm), where=relative > 0))


def _gram_matrix(operator: RidgeOperator, workspace: Workspace) -> tuple[TileMatrix, dict[str, Any]]:
    """The Gram matrix of a kernel in the store, whether or not it is there, and what decides its bytes."""
    fields, grid = gram_fields(operator, "float64"), operator.grid
    location = place(workspace.store, "grams", key_of(fields) + ".zarr")
    return TileMatrix(ChunkArray(location, "", (grid.n,) * 2, (grid.tile_size,) * 2, "float64"), grid), fields


def stored_gram(operator: RidgeOperator, workspace: Workspace) -> TileMatrix:
    """The Gram matrix of a kernel in the store; only tiles that are not there are computed."""
    wanted, fields = _gram_matrix(operator, workspace)
    location = wanted.location
    # two fits may compute its tiles at once, which are the same
    with hold_lock(location, wait=True):
        gram = workspace.matrix(location, operator.grid, "float64", fields)
    taken = continue_lineage(operator, gram, "grams", fields, workspace.store)
    summary = build_gram(operator, gram, workspace.executor, workspace.progress, taken=taken)
    workspace.record("gram", summary)
    workspace.record_reuse("gram", operator.grid.n, taken.to_dict(), summary, power=2)
    return gram


def _combined(solutions: list[Solved], num_targets: int, workspace: Workspace) -> Solution:
    relative, backward = [0.0] * num_targets, [0.0] * num_targets
    for targets, solution, _ in solutions:
        for position, target in enumerate(targets):
            relative[target] = solution.relative_residual[position]
            backward[target] = solution.backward_error[position]
    seconds = {phase: summary.seconds for phase, summary in workspace.phases.items()}
    # the least exact of them speaks for all
    worst = max((solution for _, solution, _ in solutions), key=lambda solution: max(solution.relative_residual))
    return replace(
        worst,
        converged=all(solution.converged for _, solution, _ in solutions),
        num_iterations=max(solution.num_iterations for _, solution, _ in solutions),
        relative_residual=relative,
        backward_error=backward,
        seconds=seconds,
        reused=dict(workspace.reused),
    )
