"""From rows or a given matrix to a model: what a solver or a loss gives a model, and the estimators' fit on tiles.

:func:`solve_rows` is the one fit that jobs, estimators and searches over alpha call; what a model remembers of its
solver and of its uncertainty is the same wherever it was fitted. :class:`TiledFit` asks the planner what "auto" means
for rows that an estimator was handed, refuses what does not fit a worker or the disk, and cleans up: what the caller
has in memory does not stay in a store that is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr import __version__
from dkrr.dataset import Dataset, RowArray
from dkrr.engine.cluster import blas_of, memory_limit_of
from dkrr.engine.machine import free_memory_bytes, single_blas_thread
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import DataError, ParameterError
from dkrr.fit.choices import FitSettings, Limits, Problem, SolverChoice, small_choice, ways_of
from dkrr.fit.fitting import FitResult, fit_rows
from dkrr.fit.inputs import (
    check_disk,
    find_executor,
    free_bytes,
    given_rows,
    given_tiles,
    nothing_new,
    resolve_tile_size,
    rows_on_disk,
    source_table,
)
from dkrr.fit.plan import Decision, decide, find_continued
from dkrr.fit.prices import priced_way
from dkrr.fit.rates import Machine, measure_machine
from dkrr.fit.schedule import nominal_machine
from dkrr.fit.trial import sample_trial
from dkrr.kernels import Kernel
from dkrr.linalg.fit_losses import LossFit
from dkrr.linalg.loss import Loss
from dkrr.linalg.nystrom import fit_nystrom
from dkrr.linalg.primal import PrimalResult, fit_primal
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.solution import NystromSettings, Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model
from dkrr.models.uncertainty import recorded_factors, target_scale
from dkrr.models.validation import check_alpha, check_target_sizes
from dkrr.store.files import full_disk, is_url
from dkrr.tiles import TileGrid, TileMatrix

__all__ = [
    "Solved",
    "TiledFit",
    "Training",
    "changed",
    "check_unchanged",
    "label_targets",
    "loss_details",
    "loss_parts",
    "loss_solver",
    "primal_details",
    "primal_parts",
    "solve_rows",
    "usable_rows",
]

logger = logging.getLogger("dkrr.tiled")

Floats = NDArray[np.float64]
# what of a candidate's disk is checked here: the rest is small
MATRICES = ("factor", "gram", "preconditioner", "centres", "sums", "strips")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What an estimator was fitted on: copies of arrays, and all else as it was given.

    Parameters
    ----------
    X, y, weight
        As ``fit`` took them; y and weight None where a data set has its own.
    checksum
        crc32c of an X that is the caller's, which may have changed since; None for a copy, and for what is on disk.
    tile_size
        As it was asked for; None for "auto".
    tiled
        Whether the fit went through tiles.
    max_in_process_rows
        Up to so many rows the tasks run in this process when there is no client.
    store
        Where the fit left its factors, whatever the current folder is by now; None for a temporary store.
    """

    X: Any
    y: Any
    weight: Any
    tiled: bool
    tile_size: int | None = None
    max_in_process_rows: int = 0
    checksum: int | None = None
    store: str | None = None


def check_unchanged(model: Model, dataset: Dataset, digest: str = "") -> None:
    """Compare rows that were read once more with those of the fit, as far as it has digests: one in memory has none.

    Parameters
    ----------
    digest
        Of a given matrix, which is no rows.

    Raises
    ------
    DataError
        X, y or weight has changed.
    """
    found = {"rows": digest or dataset.digest, "targets": dataset.digest_y, "weight": dataset.digest_weight}
    for part, (name, value) in zip(("X", "y", "weight"), found.items(), strict=True):
        if model.provenance.get(f"{name}_digest", value) != value:
            raise changed(part)


def changed(part: str) -> DataError:
    """The error of rows, targets or weights that are not those of the fit."""
    return DataError(f"{part} has changed since the fit", hint="fit again, or bring back what was there")


# --- what a model is made of ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Solved:
    """What a fit leaves to a model: its ``parts``, the solution among them, and ``details`` for its provenance.

    ``settings`` are those that led to it, of another way than was chosen where that was given up, and None of another
    loss than the square; ``tiles`` says what is in the store of a fit that had tiles. ``history`` has, of a loss,
    [iteration, gap, violation] of some iterations of each target.
    """

    parts: dict[str, Any]
    details: dict[str, Any]
    settings: FitSettings | None = None
    tiles: FitResult | None = None
    history: list[Any] = field(default_factory=list)

    def model(self, dataset: Dataset, **columns: Any) -> Model:
        """The model of the rows of a data set; ``columns`` are named otherwise than its own."""
        classes = None if dataset.classes is None else list(dataset.classes)
        named: dict[str, Any] = {"y_is_1d": dataset.y_is_1d, "made_up": dataset.made_up, "classes": classes}
        named |= {name: list(getattr(dataset, name)) for name in ("feature_names", "target_names")}
        digests = {"rows": dataset.digest, "targets": dataset.digest_y, "weight": dataset.digest_weight}
        provenance = {"dkrr": __version__, **{f"{name}_digest": digest for name, digest in digests.items()}}
        return Model(**(named | columns | self.parts), provenance=provenance | self.details)


@contextmanager
def solve_rows(
    dataset: Dataset,
    settings: FitSettings,
    workspace: Workspace,
    *,
    solver: str = "",
    nystrom: NystromSettings | None = None,
    given: TileMatrix | None = None,
    source_digest: str = "",
    start: Floats | None = None,
    ways: Decision | None = None,
) -> Iterator[Solved]:
    """The fit of the rows of a data set by the way that was chosen, whichever it is; a context manager.

    Coefficients of a fit that had tiles are in the store while the block runs, see :func:`dkrr.fit.fitting.fit_rows`.

    Parameters
    ----------
    solver
        "primal" and "nystrom" have no tiles; else ``settings`` say how it is solved.
    nystrom
        Centres, for "nystrom".
    """
    kernel, alpha, intercept = settings.kernel, settings.alpha, settings.fit_intercept
    details: dict[str, Any] = {name: getattr(settings, name) for name in ("tile_size", "precision", "gram")}
    details["alpha"] = list(alpha)
    if solver == "primal":
        primal = fit_primal(dataset, kernel, alpha, workspace, fit_intercept=intercept)
        parts = primal_parts(primal) | {"solution": primal.solution}
        yield Solved(parts=parts, details=details | primal_details(primal), settings=settings)
        return
    if solver == "nystrom":
        nystrom = nystrom or NystromSettings()
        iterative, precision = settings.iterative, settings.precision
        found = fit_nystrom(
            dataset, kernel, alpha, nystrom, iterative, workspace, precision=precision, fit_intercept=intercept
        )
        parts = {
            "kernel": kernel,
            "x_fit": ArrayRows(found.centres),
            "dual_coef": ArrayRows(found.dual_coef),
            "center": found.center,
            "intercept": found.intercept,
            "solution": found.solution,
        }
        details |= _solver_details(settings, nystrom.to_dict())
        yield Solved(parts=parts, details=details, settings=settings)
        return
    with fit_rows(
        dataset, settings, workspace, given=given, source_digest=source_digest, start=start, ways=ways
    ) as result:
        settings, rows, solution = result.settings, result.operator.rows, result.solution
        center = None if kernel is None or rows is None else rows.center
        assert dataset.y is not None  # noqa: S101  (narrows the type)
        weight = None if dataset.weight is None else ArrayRows(dataset.weight.read(0, dataset.num_rows))
        parts = {
            "kernel": kernel,
            "x_fit": None if kernel is None else dataset.X,
            "dual_coef": result.dual_coef,
            "center": None if center is None else np.asarray(center),
            "intercept": result.intercept,
            "solution": solution,
            "sample_weight": weight,
            # y^T dual_coef / n holds of a solution alone: a fit that did not converge has none
            "sigma2": target_scale(dataset.y, result.dual_coef, weight, intercept=intercept)
            if solution.converged
            else None,
        }
        details |= {name: getattr(settings, name) for name in ("tile_size", "precision", "gram")}
        details |= _solver_details(settings) | recorded_factors(workspace.store, result.factors)
        details |= {"rows_digest": source_digest} if source_digest else {}
        yield Solved(parts=parts, details=details, settings=settings, tiles=result)


def _solver_details(settings: FitSettings, nystrom: dict[str, Any] | None = None) -> dict[str, Any]:
    """Solver and its parameters, as far as they decide the answer, for ``Model.provenance``."""
    iterative = settings.iterative
    details: dict[str, Any] = {"solver": "nystrom" if nystrom is not None else settings.solver}
    if nystrom is not None:
        details |= {"is_approximation": True, **nystrom, "seed": iterative.seed}
    elif settings.solver == "cg":
        details |= {"preconditioner": iterative.preconditioner, "rank": iterative.rank, "seed": iterative.seed}
    if settings.fit_intercept:
        details["fit_intercept"] = True
    if nystrom is not None or settings.iterates:
        details["tol"] = iterative.tol
        if iterative.allow_unconverged:
            details["allow_unconverged"] = True
    return details


def usable_rows(dataset: Dataset) -> int:
    """Rows that may be centres: those whose weight is not zero."""
    n = dataset.num_rows
    return n if dataset.weight is None else int(np.count_nonzero(dataset.weight.read(0, n)))


def primal_parts(found: PrimalResult) -> dict[str, Any]:
    """Kernel, features, their coefficients and the intercept, for :class:`dkrr.models.model.Model`."""
    return {
        "kernel": found.features.kernel,
        "x_fit": None,
        "dual_coef": ArrayRows(found.coef),
        "features": found.features,
        "intercept": found.intercept,
    }


def primal_details(found: PrimalResult) -> dict[str, Any]:
    """The same for ``Model.provenance``."""
    details = {"solver": "primal", "num_explicit_features": found.features.num_features}
    return details if found.intercept is None else details | {"fit_intercept": True}


def label_targets(codes: NDArray[np.intp], weight: Floats, classes: Sequence[Any]) -> Floats:
    """Targets -1 and +1 of losses for labels: (n, 1), +1 for the second of two classes; (n, k), one against the rest.

    Parameters
    ----------
    codes : (n,)
        The place of the label of each row among the ``classes``.
    weight : (n,)

    Raises
    ------
    DataError
        A class has no row, or none with a weight above 0.
    """
    count = np.bincount(codes, minlength=len(classes))
    total = np.bincount(codes, weights=weight, minlength=len(classes))
    if not total.all():
        place = int(np.argmin(total))
        if not count[place]:
            raise DataError(f"class {classes[place]!r} has no training row", hint="leave out the rows that have it")
        raise DataError(
            f"the weights of class {classes[place]!r} are all zero",
            hint="give at least one of its rows a positive weight",
        )
    of_class = np.arange(len(classes)) if len(classes) > 2 else np.array([1])
    return np.where(codes[:, None] == of_class, 1.0, -1.0)


def loss_solver(loss: Loss) -> str:
    """Which solver a loss has: "newton" where it is smooth, "decomposition" where it has corners."""
    return "newton" if loss.is_smooth else "decomposition"


def loss_parts(
    found: LossFit,
    loss: Loss,
    kernel: Kernel | None,
    X: Floats,
    *,
    fit_intercept: bool,
    support: NDArray[np.intp] | None = None,
) -> dict[str, Any]:
    """Kernel, support vectors, their coefficients and the solution, for :class:`dkrr.models.model.Model`.

    Parameters
    ----------
    loss
        Of the first column; all have the same one but for its parameter.
    X : (n, d)
        Rows as they were given, not centred; not used without a kernel, where all coefficients are kept.
    support
        Rows with a coefficient other than 0, in the order in which the model shall have them; as in ``X`` by default.
    """
    coefficients = found.dual_coef
    support = np.flatnonzero(coefficients.any(axis=1)) if support is None else support
    solution = Solution(
        solver=loss_solver(loss),
        precision="float64",
        converged=found.converged,
        num_iterations=found.num_iterations,
        relative_residual=[],
        backward_error=[],
        certificates=found.certificates,
        seconds={"solve": found.seconds},
        message=f"{loss.name} loss: {len(support):,} of {len(coefficients):,} rows are support vectors",
    )
    return {
        "kernel": kernel,
        "x_fit": None if kernel is None else ArrayRows(X[support]),
        "dual_coef": ArrayRows(coefficients if kernel is None else coefficients[support]),
        "center": found.center,
        "intercept": found.intercept if fit_intercept else None,
        "solution": solution,
    }


def loss_details(loss: Loss, C: float, alpha: float, **parameters: Any) -> dict[str, Any]:
    """Loss, its ``parameters`` (epsilon, quantile), C = 1 / (2 alpha) and alpha, for ``Model.provenance``."""
    given = {name: np.asarray(value, dtype=np.float64).tolist() for name, value in parameters.items()}
    return {"alpha": [alpha], "C": C, "loss": loss.name, "solver": loss_solver(loss), **given}


# --- the fit of an estimator ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TiledFit:
    """A fit whose rows, tiles and coefficients are on disk.

    Parameters
    ----------
    kernel
        As given; resolved for the rows.
    alpha
        One ridge, or one per target.
    choice
        The solver as it was asked for.
    tile_size
        None means "auto".
    max_in_process_rows
        Up to so many rows the tasks run in this process when there is no client.
    feature_names
        Names of the columns of rows in memory.
    start
        Coefficients (m, t) of an earlier fit of the first m rows, for iterations.
    fit_intercept
        Whether f has a constant that is not penalised.
    maker
        See :class:`~dkrr.linalg.workspace.Workspace`.
    """

    kernel: Kernel
    alpha: Any
    choice: SolverChoice
    tile_size: int | None
    max_in_process_rows: int
    feature_names: Sequence[str] | None = None
    start: Any = None
    fit_intercept: bool = False
    maker: str = ""

    @property
    def is_given(self) -> bool:
        """Whether X is the Gram matrix itself."""
        return self.kernel.name == "precomputed"

    def _problem(self, n: int, d: int, t: int) -> Problem:
        return Problem(
            num_rows=n,
            num_features=1 if self.is_given else d,
            num_targets=t,
            kernel=None if self.is_given else self.kernel.resolve(d),
            alpha=tuple(check_alpha(self.alpha, t).tolist()),
            fit_intercept=self.fit_intercept,
            primal=self.tile_size is None,
        )

    def store_bytes(self, X: Any, y: Any) -> int:
        """What a temporary store will hold at most; 0 where only reading tells the number of rows."""
        if self.is_given:
            n, d = given_rows(X), 1
        else:
            table = source_table(X, y)
            n, d = table.num_rows or 0, len(table.names)
        if not n:
            return 0
        problem = self._problem(n, d, len(check_alpha(self.alpha)))
        limits = Limits(threads=1, memory_bytes=None)
        ways = [
            priced_way(problem, way, self.choice, limits, self.tile_size, None, None)
            for way in ways_of(problem, self.choice)
        ]
        return max(sum(way.disk_bytes.values()) for way in ways)

    def solve(self, X: Any, y: Any, weight: Any, root: Any) -> tuple[Model, RowArray | None]:
        """The model, with coefficients in memory, and its rows on disk (None for a given matrix).

        Parameters
        ----------
        X, y, weight
            What an estimator's ``fit`` takes.
        root
            The store.
        """
        self.kernel.to_dict()  # arrays are keyed by the kernel, so a function without a name is refused now
        if not self.is_given:
            source_table(X, y)
        elif self.choice.solver in ("nystrom", "primal"):
            what = "centres are chosen rows" if self.choice.solver == "nystrom" else "features are made of rows"
            raise ParameterError(
                f"solver {self.choice.solver!r} with a precomputed matrix", hint=f"give the rows and a kernel; {what}"
            )
        elif y is None:
            raise DataError("fit requires y to be passed, but the target y is None")
        rows = np.arange(given_rows(X), dtype=np.float64)[:, None] if self.is_given else X
        with full_disk(root), nothing_new(root), rows_on_disk(rows, y, weight, root) as dataset:
            check_target_sizes(dataset)
            n, problem = dataset.num_rows, self._problem(dataset.num_rows, dataset.num_features, dataset.num_targets)
            with find_executor(n, self.max_in_process_rows) as executor:
                workspace = Workspace(store=root, executor=executor, blas=blas_of(executor), maker=self.maker)
                decision = self._decide(problem, dataset, workspace)
                chosen, kernel = decision.chosen, None if problem.kernel is None else problem.kernel.to_dict()
                logger.info("%s (%s)", chosen.name, decision.reasons["solver"])
                known: dict[str, list[Any]] = {
                    "rows_digest": [dataset.digest],
                    "kernel": [kernel],
                    "alpha": [*problem.alpha, None],
                }
                needed = sum(chosen.disk_bytes.get(name, 0) for name in MATRICES)
                check_disk(root, needed, TileGrid(n, chosen.tile_size), known)
                if not self.is_given:
                    settings = decision.settings()
                    return self._model(dataset, settings, workspace, solver=chosen.solver, ways=decision), dataset.X
                # the caller has the matrix: a store that is kept needs no copy of it
                with given_tiles(X, root, chosen.tile_size) as (given, digest):
                    settings = replace(decision.settings(), gram="stored")
                    return self._model(dataset, settings, workspace, given=given, source_digest=digest), None

    def _decide(self, problem: Problem, dataset: Dataset, workspace: Workspace) -> Decision:
        """What "auto" becomes."""
        executor, kernel, root, choice = workspace.executor, problem.kernel, workspace.store, self.choice
        memory, tile_size = memory_limit_of(executor), self.tile_size
        if tile_size is not None or kernel is None:  # refused if no worker holds it
            precision = "float32" if choice.precision in ("float32", "mixed") else "float64"
            n, d = problem.num_rows, problem.num_features
            tile_size = resolve_tile_size(tile_size, n, d, precision, memory)
        if kernel is None:
            # what costs most, the matrix, is there already: nothing is measured
            choice = small_choice(problem, choice if choice.solver != "auto" else replace(choice, solver="cholesky"))
            limits = Limits(threads=executor.num_threads, memory_bytes=memory)
            return decide(problem, choice, limits, tile_size=tile_size, machine=lambda: nominal_machine(limits.threads))
        limits = Limits(
            threads=executor.num_threads,
            memory_bytes=memory,
            driver_bytes=free_memory_bytes(),
            disk_bytes=free_bytes(root),
            fetches=is_url(str(root)),
        )
        continued = find_continued(
            root, dataset, kernel, problem.alpha, choice, tile_size=tile_size, memory_bytes=memory
        )
        if continued is not None:
            logger.info("%s", continued.sentence(None))
        return decide(
            problem,
            choice,
            limits,
            tile_size=tile_size,
            machine=lambda: self._machine(problem, executor, root),
            trial=lambda seconds: sample_trial(dataset, kernel, seconds, seed=choice.seed),
            continued=continued,
        )

    def _machine(self, problem: Problem, executor: Executor, root: Any) -> Machine:
        """Rates of the workers."""
        where: Literal["client", "in process"] = "in process" if isinstance(executor, InProcessExecutor) else "client"
        threads = executor.num_threads
        return measure_machine(problem.kernel, problem.num_features, root, threads=threads, where=where)

    def _model(
        self,
        dataset: Dataset,
        settings: FitSettings,
        workspace: Workspace,
        *,
        solver: str = "",
        given: TileMatrix | None = None,
        source_digest: str = "",
        ways: Decision | None = None,
    ) -> Model:
        """The model of a fit with nothing left to choose."""
        nystrom = self.choice.nystrom(usable_rows(dataset)) if solver == "nystrom" else None
        start = None if self.start is None else np.asarray(self.start, dtype=np.float64).reshape(len(self.start), -1)
        # not of other targets, nor of more rows than there are now
        if start is not None and (len(start) > dataset.num_rows or start.shape[1] != dataset.num_targets):
            start = None
        fit = solve_rows(
            dataset,
            settings,
            workspace,
            solver=solver,
            nystrom=nystrom,
            given=given,
            source_digest=source_digest,
            start=start,
            ways=ways,
        )
        with single_blas_thread(), fit as solved:
            solved.parts["dual_coef"] = ArrayRows(solved.parts["dual_coef"].read(0, solved.parts["dual_coef"].num_rows))
        if self.feature_names is None:
            return solved.model(dataset, **({"feature_names": []} if self.is_given else {}))
        made_up = tuple(kind for kind in dataset.made_up if kind != "feature_names")
        return solved.model(dataset, feature_names=list(self.feature_names), made_up=made_up)
