"""The ways of one fit: the one that is taken, those that may follow when it breaks down, and those that were given up.

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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import RowArray
from dkrr.dataset.drift import DRIFT_LIMIT
from dkrr.dataset.rows import default_rows_per_chunk
from dkrr.errors import (
    ConvergenceError,
    DkrrError,
    LockedError,
    NotPositiveDefiniteError,
    ParameterError,
    PreconditionerError,
    StoreError,
)
from dkrr.kernels import Kernel
from dkrr.linalg.settings import Foreseen, IterativeSettings, way_name
from dkrr.linalg.workspace import Workspace
from dkrr.store.failpoints import failpoint
from dkrr.store.files import read_json, remove_array, write_json
from dkrr.store.lease import hold_lock

__all__ = ["Attempts", "FitSettings", "OtherWays"]

logger = logging.getLogger("dkrr.fitting")

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
