"""Fit out of core: from training rows on disk to dual coefficients on disk.

    gram (optional)  ->  factorise  ->  solve  ->  residual            once per distinct alpha

Everything "auto" is resolved before, by :mod:`dkrr.fit.plan`. The phases are resumable: run the same fit on the same
store again and only what is not valid is computed. Conjugate gradients take all targets and alphas at once; a factor is
made for each distinct alpha.

A way that "auto" chose is replaced when it breaks down, comes to a standstill, or converges so much more slowly than
was foreseen that another one is done sooner. What failed decides what may follow:

    float32           products, or a factor, in float32 break down, or get no further: no other way with them
    preconditioner    none of the same rank
    iteration         conjugate gradients cannot reach the residual in float64, either: only a factor
    slow              only a preconditioner of larger rank, or a factor

An error that says that A itself is not positive definite ends the fit: no way would solve it. What was given up is
recorded in the store before the next way begins, with the iterate that it starts from, so that a fit that is killed
goes on with the next way.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray, write_rows
from dkrr.errors import (
    ConvergenceError,
    DamagedChunkError,
    DataError,
    DkrrError,
    LockedError,
    NotPositiveDefiniteError,
    NumericalError,
    PreconditionerError,
    StoreError,
)
from dkrr.fit.choices import FitSettings
from dkrr.fit.plan import Decision
from dkrr.linalg.catalogue import FrozenCenter, ancestors, choose_center, continue_lineage, gram_fields, key_of
from dkrr.linalg.cg_solver import CGSolver, float32_location
from dkrr.linalg.direct import CholeskyFactor
from dkrr.linalg.gram import build_gram
from dkrr.linalg.matmul import residual_norms
from dkrr.linalg.operators import (
    BlockColumns,
    FloatMatrix,
    RidgeOperator,
    centre_dataset,
    right_hand_sides,
    rows_of,
    target_alphas,
)
from dkrr.linalg.products import ArrayRows, check_training_rows
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import name_of, place, read_json, remove_array, storage_errors, write_json
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix

logger = logging.getLogger("dkrr.fitting")

Blame = Literal["float32", "preconditioner", "iteration", "slow", ""]
Failed = tuple[dict[str, Any], Blame]  # FitSettings.way
RECORD, START = "given_up.json", "start"
# phases whose time grows with the iterations
PER_ITERATION = ("multiply", "apply", "residual")


@contextmanager
def fit_rows(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    *,
    given: TileMatrix | None = None,
    source_digest: str = "",
    start: FloatMatrix | None = None,
    ways: Decision | None = None,
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
        What may be done where the way of ``settings`` leads to no answer.

    Raises
    ------
    NotPositiveDefiniteError, ResidualError
        See :class:`dkrr.linalg.direct.CholeskyFactor`.
    NotPositiveDefiniteError, PreconditionerError, ConvergenceError
        See :func:`dkrr.linalg.cg.conjugate_gradients`.
    LockedError
        Another process does the same fit on the same store.
    """
    alphas = tuple(target_alphas(settings.alpha, dataset.num_targets).tolist())
    attempts = _Attempts(dataset, settings, alphas, ways, source_digest, workspace)
    with ExitStack() as locks:
        locks.enter_context(hold_lock(attempts.location))
        locks.enter_context(storage_errors(workspace.store))
        way: FitSettings | None = attempts.begin()
        while way is not None:
            taken = with_lineage(way, dataset, workspace.store, workspace.reused)
            solve = FitResult(dataset, taken, alphas, given, source_digest, workspace)
            locks.enter_context(hold_lock(solve.store))
            # two chunks of rows that changed places pass their checksums, and every residual after that
            dataset.check_still_there()
            guess = attempts.start(way)
            if guess is None and start is not None and way.iterates:
                guess = _scaled_start(dataset, start)
            try:
                solve.run(guess, attempts.location)
                break
            except (NumericalError, DamagedChunkError, DataError) as exc:
                way = attempts.after(way, exc, solve)
                if way is None:
                    attempts.clear(solve.store, exc)
                    raise
        # there is an answer: what iterates from now on is something else
        workspace.foreseen = workspace.other_seconds = None
        try:
            solve.solution = attempts.told(solve.solution)
            yield solve
        except (NumericalError, DamagedChunkError, DataError) as exc:
            attempts.clear(solve.store, exc)
            raise
        remove_array(solve.store)
        remove_array(attempts.location)


def _scaled_start(dataset: Dataset, dual_coef: FloatMatrix) -> FloatMatrix:
    """u = S^-1 dual_coef (n, t), zero for new rows and for rows without weight."""
    start, m = np.zeros((dataset.num_rows, dataset.num_targets)), len(dual_coef)
    start[:m] = dual_coef
    if dataset.weight is not None:
        root = np.sqrt(dataset.weight.read(0, m))
        start[:m] = np.divide(dual_coef, root, out=np.zeros_like(start[:m]), where=root > 0)
    return start


# --- one way --------------------------------------------------------------------------------------------------------


class FitResult:
    """The system of a fit by one way: (S K S + alpha_k I) u_k = S y_k for all targets, and their intercepts.

    ``store`` is named by what decides the answer: right-hand sides, solutions and the state of an iteration are there.
    ``settings`` are those of this way, which may be another one than was asked first. Once it was solved there are
    ``dual_coef``, ``solution``, ``intercept`` (t,), None where none was asked for, and ``gram``, where a Gram matrix is
    that was made, or None.
    """

    def __init__(
        self,
        dataset: Dataset,
        settings: FitSettings,
        alphas: tuple[float, ...],
        given: TileMatrix | None,
        source_digest: str,
        workspace: Workspace,
    ) -> None:
        self.dataset, self.settings, self.alphas, self.workspace = dataset, settings, alphas, workspace
        self.operator = ridge_operator(dataset, settings, alphas[0], given)
        self.digests: dict[str, Any] = {"weight_digest": dataset.digest_weight, "source_digest": source_digest}
        self.solved: list[tuple[list[int], BlockColumns, Solution]] = []
        self.located: list[Callable[[], str | None]] = []
        iterative, is_cg = settings.iterative, settings.solver == "cg"
        # what decides the answer; what an iteration has besides is left out for a direct solve, and of an iteration the
        # BLAS kernel, for it goes on from any iterate
        fields = {
            "gram": gram_fields(self.operator, settings.precision, source_digest),
            "alpha": list(alphas),
            "y": dataset.digest_y,
            "weight": dataset.digest_weight,
            "tile_size": settings.tile_size,
            "blas": None if settings.iterates else workspace.blas,
            "fit_intercept": settings.fit_intercept,
            "iteration": [settings.solver, iterative.tol] if settings.iterates else None,
            "cg": [iterative.preconditioner, iterative.rank, iterative.seed, settings.gram] if is_cg else None,
        }
        self.store = place(workspace.store, "solves", key_of(fields) + ".zarr")

    def run(self, start: FloatMatrix | None, shared: str) -> None:
        """Solve for all targets.

        Parameters
        ----------
        start : (n, t), optional
            A guess of u, for iterations. Where it is good already, nothing is built.
        shared
            Where a preconditioner is kept that another way may use as well.
        """
        dataset, settings, operator, workspace = self.dataset, self.settings, self.operator, self.workspace
        self.centring = centre_dataset(dataset) if settings.fit_intercept else None
        self.right_hand_sides = partial(right_hand_sides, dataset, operator, centring=self.centring)
        self.intercept = None if self.centring is None else self.centring.offset
        source, gram = operator, None
        if settings.gram == "stored" and operator.gram is None:
            gram, _ = _gram_matrix(operator, workspace)
            source = replace(operator, gram=gram)

        @cache
        def ready() -> None:
            if gram is not None:
                stored_gram(operator, workspace)

        if start is None or not settings.iterates:
            ready()
        if settings.solver == "cg":
            self._iterate(source, start, shared, ready)
        else:
            for number, alpha in enumerate(dict.fromkeys(self.alphas)):
                self._factorise(number, source.with_alpha(alpha), start, ready)
        # no Gram matrix is made for a start that is good already
        has_gram = gram is not None and read_json(gram.location, "zarr.json") is not None
        self.gram = gram.location if gram is not None and has_gram else None
        self.dual_coef, self.solution = self._coefficients(), self._combined()
        if operator.kernel is not None and operator.rows is not None:
            center = operator.rows.center
            check_training_rows(
                operator.kernel,
                dataset.X,
                self.dual_coef,
                None if center is None else np.asarray(center),
                y=dataset.targets,
                weight=dataset.weight,
                alpha=np.asarray(self.alphas),
                intercept=self.intercept,
                residual_norm=residual_norm(dataset, self.solution, self.intercept),
            )

    def _iterate(
        self, source: RidgeOperator, start: FloatMatrix | None, shared: str, ready: Callable[[], object]
    ) -> None:
        settings, own, targets = self.settings, place(self.store, "cg"), list(range(len(self.alphas)))
        prepared = CGSolver(
            source.with_alpha(min(self.alphas)),
            self.workspace,
            settings.iterative,
            precision="mixed" if settings.precision == "mixed" else "float64",
            accept_limit=settings.accept_limit,
            store=shared,
            num_columns=len(targets),
            ready=ready,
            **self.digests,
        )
        rhs = self.right_hand_sides(targets, own)
        solved = prepared.solve(rhs, np.array(self.alphas), start, in_plane=settings.fit_intercept)
        self._settle(targets, rhs, *solved)

    def _factorise(
        self, number: int, source: RidgeOperator, start: FloatMatrix | None, ready: Callable[[], object]
    ) -> None:
        """Factor and answers of the targets that have one alpha."""
        settings, workspace = self.settings, self.workspace
        targets, own = [k for k, alpha in enumerate(self.alphas) if alpha == source.alpha], f"alpha-{number}"
        if settings.precision != "mixed":
            factor = CholeskyFactor.prepare(source, workspace, precision=settings.precision, **self.digests)
            self.located.append(lambda: factor.factor.location)
            rhs = self.right_hand_sides(targets, place(self.store, own))
            u, solution, intercept = factor.solve(rhs, bordered=settings.fit_intercept)
            self.solved.append((targets, u, solution))
            if self.intercept is not None:
                self.intercept[targets] += intercept
            return
        mixed = CGSolver(source, workspace, settings.iterative, float32_factor=True, **self.digests, ready=ready)
        self.located.append(partial(float32_location, source, workspace, **self.digests))
        if start is None:  # also where no target needs it: a matrix that has none is refused
            mixed.make()
        rhs = self.right_hand_sides(targets, place(self.store, own))
        begin = None if start is None else start[:, targets]
        self._settle(targets, rhs, *mixed.solve(rhs, None, begin, in_plane=settings.fit_intercept, targets=targets))

    @cached_property
    def factors(self) -> list[str]:
        """Where the factors are that were made, those of a solver that failed among them; asked once that has ended.

        A given matrix is gone after the fit, and with it what a float32 factor is named by.
        """
        return [location for find in self.located if (location := find()) is not None]

    def _settle(self, targets: list[int], rhs: BlockColumns, u: BlockColumns, solution: Solution) -> None:
        """Keep the answer of an iteration; with an intercept, find that and the residual of the whole system."""
        if self.intercept is not None:  # that of centred targets is known
            operator, alpha = self.operator, np.array([self.alphas[k] for k in targets])
            norms = residual_norms(
                operator, rhs, u, self.workspace, rhs.array.store, alpha=alpha, normal=operator.normal()
            )
            self.intercept[targets] += norms.intercept
            solution = replace(solution, relative_residual=norms.relative_residual, backward_error=norms.backward_error)
        self.solved.append((targets, u, solution))

    def _coefficients(self) -> RowArray:
        """dual_coef = S u (n, t)."""
        grid, t = self.operator.grid, self.dataset.num_targets
        found = RowArray.create(
            self.store, "dual_coef", num_rows=grid.n, num_columns=t, rows_per_chunk=self.settings.tile_size
        )
        for i in range(grid.num_tiles):
            block, root = np.empty((grid.rows(i), t)), self.operator.root_weights(i)
            for targets, u, _ in self.solved:
                block[:, targets] = u.read_rows(i)
            found.write_chunk(i, block if root is None else root[:, None] * block)
        return found

    def _combined(self) -> Solution:
        """What all answers have in common; the least exact of them speaks for all."""
        solutions = [solution for _, _, solution in self.solved]
        errors = np.zeros((2, self.dataset.num_targets))
        for targets, _, solution in self.solved:
            errors[:, targets] = solution.relative_residual, solution.backward_error
        least = max(solutions, key=lambda solution: max(solution.relative_residual))
        rest = f" (the least exact of {len(solutions)} values of alpha)" if len(solutions) > 1 else ""
        return replace(
            least,
            message=least.message + rest,
            converged=all(solution.converged for solution in solutions),
            num_iterations=max(solution.num_iterations for solution in solutions),
            relative_residual=errors[0].tolist(),
            backward_error=errors[1].tolist(),
            seconds={phase: summary.seconds for phase, summary in self.workspace.phases.items()},
            reused=dict(self.workspace.reused),
        )


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
        :meth:`dkrr.linalg.catalogue.FrozenCenter.to_dict`.

    Cost
    ----
    See :mod:`dkrr.linalg.catalogue`.
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


def residual_norm(dataset: Dataset, solution: Solution, intercept: NDArray[np.float64] | None) -> NDArray[np.float64]:
    """The 2-norm (t,) of R = S Y - S b - A u, which is the relative residual times |S (Y - b)|."""
    squares = np.zeros(dataset.num_targets)
    with np.errstate(over="ignore"):  # so large a norm allows anything
        for start, stop in dataset.targets.blocks():
            y = dataset.targets.read(start, stop) - (0.0 if intercept is None else intercept)
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
    # two fits may compute its tiles at once, which are the same
    with hold_lock(wanted.location, wait=True):
        gram = workspace.matrix(wanted.location, operator.grid, "float64", fields)
    taken = continue_lineage(operator, gram, "grams", fields, workspace.store)
    taken.record(workspace, "gram", operator.grid.n, build_gram(operator, gram, workspace, taken), power=2)
    return gram


# --- one way after the other ----------------------------------------------------------------------------------------


class _Attempts:
    """The way that is taken, those that may follow when it breaks down, and those that were given up.

    ``location`` is named by what decides the answer, whatever way leads to it: there are the record of what was given
    up, its iterate, and preconditioners, which all ways share.
    """

    def __init__(
        self,
        dataset: Dataset,
        first: FitSettings,
        alphas: tuple[float, ...],
        ways: Decision | None,
        source_digest: str,
        workspace: Workspace,
    ) -> None:
        self.first, self.ways, self.workspace = first, ways, workspace
        fields = {
            "kernel": None if first.kernel is None else first.kernel.to_dict(),
            "rows_digest": source_digest or dataset.digest,
            "alpha": list(alphas),
            "y": dataset.digest_y,
            "weight": dataset.digest_weight,
            "blas": workspace.blas,
            "tol": first.iterative.tol,
            "fit_intercept": first.fit_intercept,
            "ways": None if ways is None else ways.asked,
        }
        self.location = place(workspace.store, "solves", key_of(fields) + ".zarr")
        self._others = cache(lambda: () if ways is None else ways.others())

    def begin(self) -> FitSettings:
        """The way to take now: the first, or the one that an earlier attempt went on with."""
        found = None if self.ways is None else read_json(self.location, RECORD)
        if found is None:
            return self._taken(self.first)
        ways = {key_of(way.way): way for way in (*self._others(), self.first)}
        with contextlib.suppress(LockedError), hold_lock(place(self.workspace.store, "solves", found["useless"])):
            pass  # the lock of a process that was killed
        following = ways.get(key_of(found["next"]))
        if following is not None:
            self.workspace.given_up[:] = found["given_up"]
            logger.info("going on with %s: %s", following.name, self._sentences())
        return self._taken(following or self.first)

    def after(self, way: FitSettings, error: DkrrError, solve: FitResult) -> FitSettings | None:
        """The way that follows one that ended in an error; None when there is none, and the error stays.

        What was kept of it, and its factors, are removed. Where none follows, the hint of the error
        names what would work and was excluded by name.
        """
        because = _blame(way, error)
        if not because:
            return None
        failed = way.way, because
        # a limit that was asked for is one for all ways
        limited = because == "slow" and way.iterative.max_iter is not None and not error.details.get("slow")
        following = None if limited else self._next(self._others(), failed)
        if following is None:
            self._advise(error, failed)
            return None
        self._record(way, because, error, following, solve)
        return self._taken(following)

    def start(self, way: FitSettings) -> FloatMatrix | None:
        """The iterate u of a way that was given up, for an iteration that follows it; None where there is none."""
        given_up = self.workspace.given_up
        if not given_up or not way.iterates:
            return None
        found = None
        with contextlib.suppress(StoreError):  # nothing had iterated, or it is damaged: the next way begins at zero
            rows = RowArray.open(self.location, START)
            found = rows.read(0, rows.num_rows)
            source = f"the iterate of {given_up[-1]['way']}"
            self.workspace.reused["start"] = {"rows": rows.num_rows, "of_rows": rows.num_rows, "source": source}
        return found

    def told(self, solution: Solution) -> Solution:
        """The solution with what was given up before it."""
        message = ": ".join(filter(None, (self._sentences(), solution.message)))
        return replace(solution, message=message, given_up=list(self.workspace.given_up))

    def clear(self, solve_store: str, error: DkrrError) -> None:
        """A rerun must not find the blocks of a wrong or damaged answer valid, nor the state of a hopeless iteration.

        One that only came to its limit goes on from there when it is given more.
        """
        if not isinstance(error, ConvergenceError) or error.stagnated:
            remove_array(solve_store)
            remove_array(self.location)

    def _sentences(self) -> str:
        return "; ".join(str(item["sentence"]) for item in self.workspace.given_up)

    def _failed(self, *also: Failed) -> list[Failed]:
        """What was given up and why; ``also``: as if those were, too."""
        return [*((item["settings"], item["because"]) for item in self.workspace.given_up), *also]

    def _next(self, ways: Sequence[FitSettings], *also: Failed) -> FitSettings | None:
        """The cheapest that does not share the defect of one that was given up."""
        failed = self._failed(*also)
        usable = [way for way in ways if not any(_shares(because, other, way) for other, because in failed)]
        return min(usable, key=lambda way: self._seconds(way, *also), default=None)

    def _seconds(self, way: FitSettings, *also: Failed) -> float:
        """What a way costs now: what is there costs nothing, and iterations are as many times more as they were."""
        seconds = {} if way.foreseen is None else dict(way.foreseen.seconds)
        for failed, because in self._failed(*also):
            if way.solver == failed["solver"] == "cg" and way.rank == failed["rank"]:
                seconds.pop("precondition", None)
            if way.gram == failed["gram"] == "stored" and way.tile_size == failed["tile_size"]:
                seconds.pop("gram", None)
            if because == "slow" and way.solver == "cg":
                seconds |= {name: 2 * seconds[name] for name in PER_ITERATION if name in seconds}
        return sum(seconds.values())

    def _taken(self, way: FitSettings) -> FitSettings:
        """Say what is foreseen of a way; what a factor may answer, the iterations that stand for it may."""
        self.workspace.foreseen, self.workspace.other_seconds = way.foreseen, None
        if self.ways is None:
            return way

        def other_seconds() -> float | None:
            """Of the way that would follow a slow one; None where there is none, or nothing was measured."""
            following = self._next(self._others(), (way.way, "slow"))
            return None if following is None else self._seconds(following, (way.way, "slow")) or None

        if self.ways.priced:
            self.workspace.other_seconds = other_seconds
        return replace(way, accept_limit=self.ways.choice.solver == "auto")

    def _advise(self, error: DkrrError, failed: Failed) -> None:
        """Have the hint of an error name a way that would work."""
        with contextlib.suppress(DkrrError, OSError):
            way = None if self.ways is None else self._next(self.ways.beyond(), failed)
            if way is not None:
                price = self._seconds(way, failed)
                would = f"{way.name} would take {f'about {price:,.0f} s' if price >= 1 else 'less than 1 s'}"
                error.hint = f"{error.hint}; {would}" if error.hint else would

    def _record(
        self, way: FitSettings, because: Blame, error: DkrrError, following: FitSettings, solve: FitResult
    ) -> None:
        """Say it in the log, and in the store, where the next attempt finds it."""
        workspace, details = self.workspace, error.details
        sentence = f"{way.name} {_what_happened(error)} ({error.message}); went on with {following.name}"
        workspace.given_up.append(
            {
                "way": way.name,
                "next": following.name,
                "sentence": sentence,
                "because": because,
                "iterations": int(details.get("num_iterations", details.get("iteration", 0)) or 0),
                "settings": way.way,
            }
        )
        for trace in workspace.traces:
            trace.is_over = True
        for name in ("factor", "center", *(() if following.iterates else ("start",))):  # of the way that was given up
            workspace.reused.pop(name, None)
        iterate = getattr(error, "iterate", None)
        if iterate is not None:
            write_rows(self.location, START, ArrayRows(iterate))
        remove_array(solve.store)
        for location in solve.factors:
            workspace.discard(location)
        # last: a fit that is killed before tries the same way again
        record = {"given_up": workspace.given_up, "next": following.way, "useless": name_of(solve.store)}
        write_json(self.location, RECORD, record)
        logger.warning("%s", sentence)


def _blame(way: FitSettings, error: DkrrError) -> Blame:
    """What of a way failed; "" for what every way would meet, and for what is no failure of the numerics."""
    if isinstance(error, PreconditionerError):
        return "preconditioner"
    if isinstance(error, NotPositiveDefiniteError):
        return "float32" if "float32" in (way.precision, error.details.get("precision")) else ""
    if not isinstance(error, ConvergenceError):
        return ""
    if way.precision == "mixed" and not error.details.get("falls", not error.stagnated):
        return "float32"
    return "iteration" if error.stagnated else "slow"


def _shares(because: Blame, failed: dict[str, Any], other: FitSettings) -> bool:
    """Whether another way has the defect of one that failed."""
    is_same, is_cg, rank = other.solver == failed["solver"], other.solver == "cg", failed["rank"]
    shared = {
        "float32": is_same and other.precision in ("mixed", "float32"),
        "preconditioner": is_same
        and other.rank == failed["rank"]
        and (is_cg or other.precision == failed["precision"]),
        "iteration": is_cg,
        "slow": is_same and is_cg and other.rank <= rank,
    }
    return other.way == failed or shared[because]


def _what_happened(error: DkrrError) -> str:
    number = error.details.get("iteration")
    if isinstance(error, ConvergenceError):
        return f"{'came to a standstill' if error.stagnated else 'is slow'} after {error.num_iterations:,} iterations"
    return "broke down" if number is None else f"broke down at iteration {number:,}"
