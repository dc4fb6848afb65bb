"""Fit out of core: from training rows on disk to dual coefficients on disk.

    gram (optional)  ->  factorise  ->  solve  ->  residual            once per distinct alpha

Everything "auto" is resolved before, once, by :mod:`dkrr.linalg.sizes` and the callers. The phases are resumable: run
the same fit on the same store again and only what is not valid is computed.

The ways of one fit: the one that is taken, those that may follow when it breaks down, and those that were given up.

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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray
from dkrr.dataset.destination import storage_errors
from dkrr.dataset.drift import DRIFT_LIMIT
from dkrr.dataset.rows import default_rows_per_chunk
from dkrr.errors import (
    ConvergenceError,
    DamagedChunkError,
    DataError,
    DkrrError,
    LockedError,
    NotPositiveDefiniteError,
    NumericalError,
    ParameterError,
    PreconditionerError,
    StoreError,
)
from dkrr.kernels import Kernel
from dkrr.linalg.catalogue import FrozenCenter, ancestors, choose_center, continue_lineage, gram_fields, key_of
from dkrr.linalg.gram import build_gram, rows_of
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.predict import check_training_rows
from dkrr.linalg.settings import Foreseen, IterativeSettings, way_name
from dkrr.linalg.solution import Solution
from dkrr.linalg.solving import Solved, dual_coef_block, solve_targets, start_from
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, read_json, remove_array, write_json
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix

__all__ = [
    "Attempts",
    "FitSettings",
    "OtherWays",
    "center_of_lineage",
    "fit_rows",
    "residual_norm",
    "ridge_operator",
    "stored_gram",
    "with_lineage",
]

logger = logging.getLogger("dkrr.fit.fitting")
FloatMatrix = NDArray[np.float64]

Blame = Literal["float32", "preconditioner", "iteration", "slow", ""]

RECORD, START = "given_up.json", "start"

# phases whose time grows with the iterations
PER_ITERATION = ("multiply", "apply", "residual")


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """A fit with nothing left to choose.

    Parameters
    ----------
    kernel
        Resolved kernel; None with a given matrix.
    alpha
        One ridge, or one per target.
    tile_size, precision, gram, solver
        As resolved. "mixed": float32 inside, the float64 answer.
    iterative
        Of cg, and of the refinement of a mixed factor.
    fit_intercept
        Whether f has an unpenalised constant, see :mod:`dkrr.linalg.intercept`.
    center
        Where a translation-invariant kernel is centred; None means anew, see :meth:`dkrr.kernels.Kernel.center`.
    drift_limit
        How far newer rows may lie from the centre of an earlier fit for it to be kept, see
        :mod:`dkrr.linalg.catalogue`. None keeps any: of whitened rows the drift was judged before.
    foreseen
        What a plan foresees of it; None where there was none.
    accept_limit
        Whether conjugate gradients may end at the limit of float64 above ``tol``, as the answer of a factor does; where
        they were named that is an error.

    Raises
    ------
    ParameterError
        A float32 answer of conjugate gradients: their answers are float64.
    """

    kernel: Kernel | None
    alpha: tuple[float, ...]
    tile_size: int
    precision: Literal["float64", "float32", "mixed"] = "float64"
    gram: Literal["stored", "on_the_fly"] = "on_the_fly"
    solver: Literal["cholesky", "cg"] = "cholesky"
    iterative: IterativeSettings = field(default_factory=IterativeSettings)
    fit_intercept: bool = False
    center: tuple[float, ...] | None = None
    drift_limit: float | None = DRIFT_LIMIT
    foreseen: Foreseen | None = None
    accept_limit: bool = False

    def __post_init__(self) -> None:
        if self.solver == "cg" and self.precision == "float32":
            raise ParameterError(
                "precision float32 with solver cg, whose answers are float64",
                hint='"mixed" evaluates the kernel in float32 and gives a float64 answer',
            )

    @property
    def rank(self) -> int:
        """Of the preconditioner of cg; 0 for none, or where it is chosen later."""
        iterative = self.iterative
        is_low_rank = self.solver == "cg" and iterative.preconditioner not in ("none", "factor")
        return int(iterative.rank) if is_low_rank and iterative.rank != "auto" else 0

    def to_fit(self, other: FitSettings) -> FitSettings:
        """This way to what ``other`` fits."""
        return replace(
            self,
            kernel=other.kernel,
            alpha=other.alpha,
            fit_intercept=other.fit_intercept,
            drift_limit=other.drift_limit,
        )

    @property
    def name(self) -> str:
        """``cg mixed, rank 500``."""
        return way_name(self.solver, self.precision, self.gram, self.rank)

    @property
    def way(self) -> dict[str, Any]:
        """What differs between the ways to one answer."""
        return {
            "solver": self.solver,
            "precision": self.precision,
            "gram": self.gram,
            "tile_size": self.tile_size,
            "preconditioner": self.iterative.preconditioner if self.solver == "cg" else "none",
            "rank": self.rank,
        }


class OtherWays(Protocol):
    """What else may be done; priced when it is asked for.

    ``asked`` are the words of the choice, as far as they decide which ways there are; ``priced`` says that the choice
    compared prices. Where it did not, the rows are few, and only a way that fails is replaced.
    """

    @property
    def asked(self) -> dict[str, Any]: ...
    @property
    def priced(self) -> bool: ...

    def others(self) -> Sequence[FitSettings]:
        """The ways that the words allow."""
        ...

    def beyond(self) -> Sequence[FitSettings]:
        """The ways that the words exclude: the hint of an error names the cheapest that would work."""
        ...


class Attempts:
    """What a fit tries, one way after the other.

    Parameters
    ----------
    first
        The way that was chosen.
    ways
        What else may be done; None where there is nothing else.
    location
        Folder in the store for the record, the iterate and preconditioners, which all ways share.
    workspace
        Takes what is foreseen of the current way, and what was given up.
    """

    def __init__(self, first: FitSettings, ways: OtherWays | None, location: str, workspace: Workspace) -> None:
        self.first, self.location, self.workspace = first, location, workspace
        self.ways = ways
        self._known: list[FitSettings] | None = None
        self._given_up: list[tuple[FitSettings, Blame]] = []

    def begin(self) -> FitSettings:
        """The way to take now: the first, or the one that an earlier attempt went on with."""
        found = None if self.ways is None else read_json(self.location, RECORD)
        way = self.first
        if found is not None:
            ways = [self.first, *self._ways()]
            named = {str(sorted(item.way.items())): item for item in ways}
            next_way = named.get(str(sorted(found["next"].items())))
            for item in found["given_up"]:
                failed = named.get(str(sorted(item["settings"].items())))
                if failed is not None:
                    self._given_up.append((failed, item["because"]))
            for location in found["useless"]["solves"]:  # the process that gave it up may have been killed right then
                with contextlib.suppress(LockedError), hold_lock(location):
                    remove_array(location)
            for location in found["useless"]["factors"]:
                self.workspace.discard(location)
            if next_way is not None:
                way = next_way
                self.workspace.given_up[:] = found["given_up"]
                logger.info("going on with %s: %s", way.name, "; ".join(self.sentences()))
        self._foresee(way)
        return self._judged_as_asked(way)

    def after(self, way: FitSettings, error: DkrrError, solve_store: str) -> FitSettings | None:
        """The way that follows one that ended in an error; None when there is none, and the error stays.

        What was kept of it in ``solve_store``, and its factors, are removed. Where none follows, the hint of the error
        names what would work and was excluded by name.
        """
        because = _blame(way, error)
        if not because:
            return None
        self._given_up.append((way, because))
        # a limit that was asked for is one for all ways
        limited = because == "slow" and way.iterative.max_iter is not None and not error.details.get("slow")
        following = None if limited else self._next(self._ways())
        if following is None:
            self._advise(error)
            return None
        self._record(way, because, error, following, solve_store)
        self._foresee(following)
        return self._judged_as_asked(following)

    def start(self, way: FitSettings, num_rows: int, num_targets: int) -> FloatMatrix | None:
        """The iterate u of a way that was given up, for an iteration that follows it; None where there is none."""
        if not self.workspace.given_up or (way.solver == "cholesky" and way.precision != "mixed"):
            return None
        try:
            rows = RowArray.open(self.location, START)
            found = rows.read(0, rows.num_rows)
        except StoreError:  # nothing had iterated, or it is damaged: the next way begins at zero
            return None
        if found.shape != (num_rows, num_targets):
            return None
        source = f"the iterate of {self.workspace.given_up[-1]['way']}"
        self.workspace.reused["start"] = {"rows": num_rows, "of_rows": num_rows, "source": source}
        return found

    def sentences(self) -> list[str]:
        """A sentence for each way that was given up."""
        return [str(item["sentence"]) for item in self.workspace.given_up]

    def settle(self) -> None:
        """There is an answer: what iterates from now on is something else."""
        self.workspace.foreseen = self.workspace.other_seconds = None

    def end(self) -> None:
        """Remove what the ways shared."""
        if self.ways is not None:
            remove_array(self.location)

    # --- which way ------------------------------------------------------------------------------------------------

    def _judged_as_asked(self, way: FitSettings) -> FitSettings:
        """What a factor may answer, the iterations that stand for it may."""
        return replace(way, accept_limit=self.ways is not None and self.ways.asked.get("solver") == "auto")

    def _ways(self) -> list[FitSettings]:
        """The others, with all that does not differ between ways as the first has it."""
        if self._known is None:
            self._known = [] if self.ways is None else self._of_this_fit(self.ways.others())
        return self._known

    def _of_this_fit(self, ways: Sequence[FitSettings]) -> list[FitSettings]:
        return [way.to_fit(self.first) for way in ways]

    def _next(self, ways: Sequence[FitSettings]) -> FitSettings | None:
        """The cheapest that does not share the defect of one that was given up."""
        usable = [way for way in ways if not any(_shares(because, failed, way) for failed, because in self._given_up)]
        return min(usable, key=self._seconds, default=None)

    def _seconds(self, way: FitSettings) -> float:
        """What a way costs now: what is there costs nothing, and iterations are as many times more as they were."""
        seconds = {} if way.foreseen is None else dict(way.foreseen.seconds)
        for failed, because in self._given_up:
            if way.solver == failed.solver == "cg" and way.rank == failed.rank:
                seconds.pop("precondition", None)
            if way.gram == failed.gram == "stored" and way.tile_size == failed.tile_size:
                seconds.pop("gram", None)
            if because == "slow" and way.solver == "cg":
                seconds |= {name: 2 * seconds[name] for name in PER_ITERATION if name in seconds}
        return sum(seconds.values())

    def _foresee(self, way: FitSettings) -> None:
        self.workspace.foreseen = way.foreseen
        compared = self.ways is not None and self.ways.priced
        self.workspace.other_seconds = (lambda: self._price_without(way)) if compared else None

    def _price_without(self, way: FitSettings) -> float | None:
        """Seconds of the way that would follow a slow one; None where there is none, or nothing was measured."""
        self._given_up.append((way, "slow"))
        following = self._next(self._ways())
        price = None if following is None else self._seconds(following)
        self._given_up.pop()
        return price or None

    def _advise(self, error: DkrrError) -> None:
        """Have the hint of an error name a way that would work."""
        with contextlib.suppress(DkrrError, OSError):
            way = None if self.ways is None else self._next(self._of_this_fit(self.ways.beyond()))
            if way is not None:
                price = self._seconds(way)
                seconds = f"about {price:,.0f} s" if price >= 1 else "less than 1 s"
                would = f"{way.name} would take {seconds}"
                error.hint = f"{error.hint}; {would}" if error.hint else would

    # --- what is kept -----------------------------------------------------------------------------------------------

    def _record(
        self, way: FitSettings, because: Blame, error: DkrrError, following: FitSettings, solve_store: str
    ) -> None:
        """Say it in the log, and in the store, where the next attempt finds it."""
        sentence = f"{way.name} {_what_happened(because, error)} ({error.message}); went on with {following.name}"
        workspace = self.workspace
        workspace.given_up.append(
            {
                "way": way.name,
                "next": following.name,
                "sentence": sentence,
                "because": because,
                "iterations": int(error.details.get("num_iterations", error.details.get("iteration", 0)) or 0),
                "settings": way.way,
            }
        )
        for trace in workspace.traces:
            trace.is_over = True
        for name in ("factor", "center"):  # of the way that was given up
            workspace.reused.pop(name, None)
        self._store_start(error)
        useless = {"solves": [solve_store], "factors": list(getattr(error, "factors", ()))}
        record = {"given_up": workspace.given_up, "next": following.way, "useless": useless}
        write_json(self.location, RECORD, record)
        failpoint("fit.given_up.after_record")
        logger.warning("%s", sentence)
        remove_array(solve_store)
        for location in useless["factors"]:
            workspace.discard(location)

    def _store_start(self, error: DkrrError) -> None:
        iterate = getattr(error, "iterate", None)
        if iterate is None:
            return
        n, t = iterate.shape
        rows = RowArray.create(
            self.location, START, num_rows=n, num_columns=t, rows_per_chunk=min(n, default_rows_per_chunk(t))
        )
        for number, (start, stop) in enumerate(rows.blocks()):
            rows.write_chunk(number, np.ascontiguousarray(iterate[start:stop]))


def _blame(way: FitSettings, error: DkrrError) -> Blame:
    """What of a way failed; "" for what every way would meet, and for what is no failure of the numerics."""
    if isinstance(error, PreconditionerError):
        return "preconditioner"
    if isinstance(error, NotPositiveDefiniteError):
        return "float32" if "float32" in (way.precision, error.details.get("precision")) else ""
    if not isinstance(error, ConvergenceError):
        return ""
    falls = bool(error.details.get("falls", not error.stagnated))
    if way.precision == "mixed" and not falls:
        return "float32"
    return "iteration" if error.stagnated else "slow"


def _shares(because: Blame, failed: FitSettings, other: FitSettings) -> bool:
    """Whether another way has the defect of one that failed."""
    if other.way == failed.way:
        return True
    if because == "float32":
        return other.solver == failed.solver and other.precision in ("mixed", "float32")
    if because == "preconditioner":
        same = other.solver == failed.solver and other.rank == failed.rank
        return same and (other.solver == "cg" or other.precision == failed.precision)
    if because == "iteration":
        return other.solver == "cg"
    return other.solver == failed.solver == "cg" and other.rank <= failed.rank


def _what_happened(because: Blame, error: DkrrError) -> str:
    number = error.details.get("iteration")
    if isinstance(error, ConvergenceError):
        return f"{'came to a standstill' if error.stagnated else 'is slow'} after {error.num_iterations:,} iterations"
    return "broke down" if number is None else f"broke down at iteration {number:,}"


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
        What may be done where the way of ``settings`` leads to no answer, see :mod:`dkrr.fit.fitting`.

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
        :meth:`dkrr.linalg.catalogue.FrozenCenter.to_dict`.

    Cost
    ----
    See :mod:`dkrr.linalg.catalogue` and :mod:`dkrr.linalg.catalogue`.
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
