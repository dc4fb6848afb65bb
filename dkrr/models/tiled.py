"""From rows or a given matrix to a model: what a solver or a loss gives a model, and the estimators' fit on tiles.

:func:`solve_rows` is the one fit that jobs, estimators and searches over alpha call; what a model remembers of its
solver and of its uncertainty is the same wherever it was fitted. :class:`Training` asks the planner what "auto" means
for rows that an estimator was handed, refuses what does not fit a worker or the disk, and cleans up: what the caller
has in memory does not stay in a store that is kept.

Leave-one-out of a fit, whatever solved it: finds the factor in the store, or makes it.

    cholesky    D from the tile factor; a finished factor in the store is used as it is
    mixed, cg   D from a float64 factor, which is made: n^3 / 3 flops more
    nystrom     leverages by two passes over the rows, the centres fixed

Jobs and searches over alpha have rows in a data set (:func:`leave_one_out_rows`). An estimator reads the rows that it
was fitted on once more (:func:`leave_one_out`): a fit in memory, n <= 6,000, is factorised again; one through tiles
finds its factor in its store, or makes one for the time being where it has no store of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dkrr import __version__
from dkrr.dataset import Dataset, Floats
from dkrr.engine.cluster import blas_of, memory_limit_of
from dkrr.engine.machine import free_memory_bytes, single_blas_thread
from dkrr.engine.tasks import InProcessExecutor
from dkrr.errors import ConvergenceError, DataError, ParameterError, ResidualError, StoreError
from dkrr.fit.choices import FitSettings, Limits, Problem, SolverChoice, small_choice, ways_of
from dkrr.fit.fitting import FitResult, fit_rows, residual_norm, ridge_operator, stored_gram
from dkrr.fit.inputs import (
    TemporaryStore,
    find_executor,
    free_bytes,
    given_rows,
    given_tiles,
    nothing_new,
    present_bytes,
    resolve_tile_size,
    rows_on_disk,
    source_table,
)
from dkrr.fit.plan import Decision, decide
from dkrr.fit.prices import priced_way, tiles_bytes
from dkrr.fit.rates import measure_machine
from dkrr.fit.trial import sample_trial
from dkrr.kernels import Kernel
from dkrr.linalg.dense import dense_leave_one_out
from dkrr.linalg.direct import CholeskyFactor
from dkrr.linalg.leave_one_out import LeaveOneOut, loo_from_diagonal, target_scale, unscaled
from dkrr.linalg.matmul import OperatorProduct
from dkrr.linalg.nystrom import fit_nystrom, nystrom_leave_one_out
from dkrr.linalg.operators import BlockColumns, RidgeOperator
from dkrr.linalg.primal import PrimalResult, array_source, fit_primal, primal_leave_one_out, stored_source
from dkrr.linalg.products import ArrayRows
from dkrr.linalg.triangular import forget_inverse_diagonal, inverse_diagonal, inverse_room
from dkrr.linalg.workspace import Workspace, choose_gram
from dkrr.models.model import OTHER_SOLVERS, Model
from dkrr.models.validation import check_alpha, check_target_sizes
from dkrr.store.files import at_present, check_space, storage_errors
from dkrr.tiles import TileMatrix

logger = logging.getLogger("dkrr.tiled")

# what of a candidate's disk is checked here: the rest is small
MATRICES = ("factor", "gram", "preconditioner", "centres", "sums")


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


@dataclass(frozen=True)
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
        provenance: dict[str, Any] = {"dkrr": __version__, "places": [list(part) for part in dataset.places]}
        provenance |= {f"{name}_digest": digest for name, digest in digests.items()}
        provenance["num_training_rows"] = dataset.num_rows  # a model keeps fewer, or features
        return Model(**(named | columns | self.parts), provenance=provenance | self.details)


@contextmanager
def solve_rows(
    dataset: Dataset,
    decision: Decision,
    workspace: Workspace,
    *,
    settings: FitSettings | None = None,
    given: TileMatrix | None = None,
    source_digest: str = "",
    start: Floats | None = None,
) -> Iterator[Solved]:
    """The fit of the rows of a data set by the way that was chosen, whichever it is; a context manager.

    Coefficients of a fit that had tiles are in the store while the block runs, see :func:`dkrr.fit.fitting.fit_rows`.

    Parameters
    ----------
    decision
        The way that was chosen, and what may follow where it leads to no answer.
    settings
        Others than those of the decision, which nothing may follow.
    """
    solver, ways = decision.chosen.solver, decision if given is None and settings is None else None
    settings = settings or decision.settings()
    kernel, alpha, intercept = settings.kernel, settings.alpha, settings.fit_intercept
    if solver == "primal":
        dataset.check_still_there()
        primal = fit_primal(dataset, kernel, alpha, workspace, fit_intercept=intercept)
        yield Solved(
            primal_parts(primal),
            _details(settings, solver) | {"num_explicit_features": primal.features.num_features},
            settings,
        )
        return
    if solver == "nystrom":
        nystrom = decision.choice.nystrom(usable_rows(dataset))
        iterative, precision = settings.iterative, settings.precision
        found = fit_nystrom(
            dataset, kernel, alpha, nystrom, iterative, workspace, precision=precision, fit_intercept=intercept
        )
        parts: dict[str, Any] = {
            "kernel": kernel,
            "x_fit": ArrayRows(found.centres),
            "dual_coef": ArrayRows(found.dual_coef),
            "center": found.center,
            "intercept": found.intercept,
            "solution": found.solution,
        }
        yield Solved(parts, _details(settings, solver) | {"is_approximation": True, **nystrom.to_dict()}, settings)
        return
    with fit_rows(
        dataset, settings, workspace, given=given, source_digest=source_digest, start=start, ways=ways
    ) as result:
        settings, rows, solution = result.settings, result.operator.rows, result.solution
        center = None if kernel is None or rows is None else rows.center
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
            "sigma2": target_scale(dataset.targets, result.dual_coef, weight, intercept=intercept)
            if solution.converged
            else None,
        }
        # wherever the model will be opened
        details = {"store": at_present(workspace.store), "factors": [at_present(item) for item in result.factors]}
        details |= _details(settings, settings.solver)
        yield Solved(parts, details | ({"rows_digest": source_digest} if source_digest else {}), settings, result)


def _details(settings: FitSettings, solver: str) -> dict[str, Any]:
    """Solver and its parameters, as far as they decide the answer, for ``Model.provenance``."""
    iterative = settings.iterative
    found = {name: getattr(settings, name) for name in ("tile_size", "precision", "gram")}
    found |= {"alpha": list(settings.alpha), "solver": solver}
    found |= {"fit_intercept": True} if settings.fit_intercept else {}
    names = {"cg": ["preconditioner", "rank", "seed"], "nystrom": ["seed"]}.get(solver, [])
    if solver == "nystrom" or (solver != "primal" and settings.iterates):
        names += ["tol", *(["allow_unconverged"] if iterative.allow_unconverged else [])]
    return found | {name: getattr(iterative, name) for name in names}


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
        "solution": found.solution,
    }


# --- the fit of an estimator ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """What an estimator is fitted on, arrays copied and all else as it was given, and what was asked for.

    Parameters
    ----------
    X, y, weight
        As ``fit`` took them; y and weight None where a data set has its own.
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
    columns
        What the columns are called otherwise than in the data set that is made of them, as parts of a model.
    start
        Coefficients (m, t) of an earlier fit of the first m rows, for iterations.
    fit_intercept
        Whether f has a constant that is not penalised.
    tiled
        Whether the fit goes through tiles.
    checksum
        crc32c of an X that is the caller's, which may have changed since; None for a copy, and for what is on disk.
    store
        Where the fit leaves its factors, whatever the current folder is by then; None for a temporary store.
    maker
        See :class:`~dkrr.linalg.workspace.Workspace`.
    """

    X: Any
    y: Any
    weight: Any
    kernel: Kernel
    alpha: Any
    choice: SolverChoice
    tile_size: int | None
    max_in_process_rows: int
    columns: dict[str, Any] = field(default_factory=dict)
    start: Any = None
    fit_intercept: bool = False
    tiled: bool = False
    checksum: int | None = None
    store: str | None = None
    maker: str = ""

    @property
    def is_given(self) -> bool:
        """Whether X is the Gram matrix itself."""
        return self.kernel.name == "precomputed"

    def problem(self, n: int, d: int, t: int) -> Problem:
        """What is to be solved for n rows of d features and t targets."""
        return Problem(
            num_rows=n,
            num_features=1 if self.is_given else d,
            num_targets=t,
            kernel=None if self.is_given else self.kernel.resolve(d),
            alpha=tuple(check_alpha(self.alpha, t).tolist()),
            fit_intercept=self.fit_intercept,
            primal=self.tile_size is None,
        )

    def store_bytes(self) -> int:
        """What a temporary store will hold at most; 0 where only reading tells the number of rows."""
        table = None if self.is_given else source_table(self.X, self.y)
        n, d = (given_rows(self.X), 1) if table is None else (table.num_rows or 0, len(table.names))
        if not n:
            return 0
        problem, limits = self.problem(n, d, len(check_alpha(self.alpha))), Limits(threads=1, memory_bytes=None)
        ways = [
            priced_way(problem, way, self.choice, limits, self.tile_size, None, None)
            for way in ways_of(problem, self.choice)
        ]
        return max(sum(way.disk_bytes.values()) for way in ways)

    @contextmanager
    def laid_out(self, root: Any) -> Iterator[tuple[Dataset, Workspace]]:
        """The rows on disk below ``root``, those of a given matrix being their numbers, and who runs tasks on them."""
        rows = np.arange(given_rows(self.X), dtype=np.float64)[:, None] if self.is_given else self.X
        with (
            storage_errors(root, only_full=True),
            nothing_new(root),
            rows_on_disk(rows, self.y, self.weight, root) as dataset,
            find_executor(dataset.num_rows, self.max_in_process_rows) as executor,
        ):
            yield dataset, Workspace(store=root, executor=executor, blas=blas_of(executor), maker=self.maker)

    def matrix(self, root: Any, tile_size: Any) -> AbstractContextManager[tuple[TileMatrix | None, str]]:
        """A given matrix in tiles and its digest; the caller has it, so that a store that is kept needs no copy."""
        return given_tiles(self.X, root, tile_size) if self.is_given else nullcontext((None, ""))

    def solve(self, root: Any) -> tuple[Model, Dataset | None]:
        """The model, with coefficients in memory, and its rows on disk (None for a given matrix), below a store."""
        self.kernel.to_dict()  # arrays are keyed by the kernel, so a function without a name is refused now
        if not self.is_given:
            source_table(self.X, self.y)
        elif self.choice.solver in ("nystrom", "primal"):
            what = "centres are chosen rows" if self.choice.solver == "nystrom" else "features are made of rows"
            raise ParameterError(
                f"solver {self.choice.solver!r} with a precomputed matrix", hint=f"give the rows and a kernel; {what}"
            )
        elif self.y is None:
            raise DataError("fit requires y to be passed, but the target y is None")
        with self.laid_out(root) as (dataset, workspace):
            check_target_sizes(dataset)
            problem = self.problem(dataset.num_rows, dataset.num_features, dataset.num_targets)
            decision = self._decide(problem, dataset, workspace)
            chosen, kernel = decision.chosen, None if problem.kernel is None else problem.kernel.to_dict()
            logger.info("%s (%s)", chosen.name, decision.reasons["solver"])
            known: dict[str, list[Any]] = {
                "rows_digest": [dataset.digest],
                "kernel": [kernel],
                "alpha": [*problem.alpha, None],
            }
            needed = sum(chosen.disk_bytes.get(name, 0) for name in MATRICES)
            check_space(root, max(0, needed - present_bytes(root, known | {"tile_size": [chosen.tile_size]})))
            with self.matrix(root, chosen.tile_size) as (given, digest):
                model = self._model(dataset, decision, workspace, given=given, source_digest=digest)
                return model, None if self.is_given else dataset

    def _decide(self, problem: Problem, dataset: Dataset, workspace: Workspace) -> Decision:
        """What "auto" becomes."""
        executor, kernel, choice, tile_size = workspace.executor, problem.kernel, self.choice, self.tile_size
        limits = Limits(
            threads=executor.num_threads,
            memory_bytes=memory_limit_of(executor),
            driver_bytes=free_memory_bytes(),
            disk_bytes=free_bytes(workspace.store),
        )
        if kernel is None:  # what costs most, the matrix, is there already: nothing is measured
            choice = small_choice(problem, choice if choice.solver != "auto" else replace(choice, solver="cholesky"))
        if tile_size is not None or kernel is None:  # refused if no worker holds it
            precision = "float32" if choice.precision in ("float32", "mixed") else "float64"
            n, d = problem.num_rows, problem.num_features
            tile_size = resolve_tile_size(tile_size, n, d, precision, limits.memory_bytes)
        return decide(
            problem,
            choice,
            limits,
            tile_size=tile_size,
            machine=lambda: measure_machine(
                kernel,
                problem.num_features,
                workspace.store,
                threads=limits.threads,
                where="in process" if isinstance(executor, InProcessExecutor) else "client",
            ),
            trial=lambda seconds: None if kernel is None else sample_trial(dataset, kernel, seconds, seed=choice.seed),
            rows=(workspace.store, dataset),
        )

    def _model(
        self,
        dataset: Dataset,
        decision: Decision,
        workspace: Workspace,
        *,
        given: TileMatrix | None = None,
        source_digest: str = "",
        settings: FitSettings | None = None,
    ) -> Model:
        """The model of the way that was chosen; by ``settings``, which nothing may follow, where they are given."""
        start = self.start
        if start is not None:
            start = np.asarray(start, dtype=np.float64).reshape(len(start), -1)
            # not of other targets, nor of more rows than there are now
            start = start if len(start) <= dataset.num_rows and start.shape[1] == dataset.num_targets else None
        fit = solve_rows(
            dataset, decision, workspace, settings=settings, given=given, source_digest=source_digest, start=start
        )
        with single_blas_thread(), fit as solved:
            solved.parts["dual_coef"] = ArrayRows(solved.parts["dual_coef"].read(0, solved.parts["dual_coef"].num_rows))
        columns: dict[str, Any] = ({"feature_names": []} if self.is_given else {}) | self.columns
        return solved.model(dataset, **columns, made_up=tuple(kind for kind in dataset.made_up if kind not in columns))


# --- leave-one-out ---------------------------------------------------------------------------------------------------

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


def leave_one_out(model: Model, training: Training) -> LeaveOneOut:
    """Leave-one-out of an estimator's model, in the units of y.

    Parameters
    ----------
    model, training
        Of the fit.

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
    with ExitStack() as stack:
        store = training.store or stack.enter_context(closing(TemporaryStore(needed))).path
        dataset, given, digest, work, own = stack.enter_context(_fitted_rows(model, training, store))
        settings = factor_settings(own, dataset, work, model, training.tile_size)
        return leave_one_out_rows(dataset, settings, work, model, given=given, source_digest=digest)


def ensure_factor(model: Model, training: Training) -> None:
    """Make the float64 factor of a fit that left a float32 one, in the store that it left it in; logged.

    Only after precision="mixed": that fit has paid for a factor, though for one of half the digits. Nothing is done
    for few rows, whose factor is made in memory, or where there is one.

    Cost
    ----
    n^3 / 3 flops for each distinct alpha, n^2 / 2 numbers in the store, which stay.
    """
    is_mixed = model.provenance.get("solver") == "cholesky" and model.provenance.get("precision") == "mixed"
    if not is_mixed or model.kernel is None or training.store is None:
        return
    with suppress(StoreError):
        _ = model.variance_systems
        return  # there is one
    with _fitted_rows(model, training, training.store) as (dataset, given, _, work, own):
        settings = factor_settings(own, dataset, work, model, training.tile_size, what="a standard deviation")
        operator = _operator(dataset, settings, work, given, model)
        for alpha in dict.fromkeys(settings.alpha):
            CholeskyFactor.prepare(operator.with_alpha(alpha), work, weight_digest=dataset.digest_weight)


def _in_memory(model: Model, training: Training) -> LeaveOneOut:
    """From a factor that is made again in this process; of a primal fit from one pass more over the rows."""
    x = np.asarray(training.X, dtype=np.float64)
    y = np.asarray(training.y, dtype=np.float64).reshape(len(x), -1)
    fit_intercept = model.intercept is not None
    if _solver_of(model) == "primal":
        source = array_source(x, y, model.kernel, training.weight)
        return primal_leave_one_out(source, model.provenance["alpha"], fit_intercept=fit_intercept)
    alphas = np.broadcast_to(np.asarray(model.provenance["alpha"], dtype=np.float64), (y.shape[1],))
    weight = None if training.weight is None else np.asarray(training.weight, dtype=np.float64)
    rows, dual_coef = x if model.center is None else x - model.center, model.dual_coef.read(0, len(x))
    with single_blas_thread():
        return dense_leave_one_out(
            model.kernel, rows, y, alphas, weight, dual_coef, lambda unseen: model.predict_rows(x[unseen]),
            precision=model.solution.precision, fit_intercept=fit_intercept,
        )  # fmt: skip


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
    with (
        single_blas_thread(),
        training.laid_out(root) as (dataset, workspace),
        training.matrix(root, settings.tile_size) as (given, digest),
    ):
        check_unchanged(model, dataset, digest)
        yield dataset, given, digest, replace(workspace, maker=""), settings


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
    known: dict[str, list[Any]] = {"rows_digest": [dataset.digest], "alpha": [*settings.alpha, None], "tile_size": [b]}
    needed = tiles_bytes(n, b, "float64") * (num_alphas + (gram == "stored"))
    check_space(workspace.store, max(0, needed - present_bytes(workspace.store, known)))
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
    dataset.check_still_there()
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
    chosen: Any = {
        "precision": "float32" if settings.precision == "float32" else "float64",
        "weight_digest": dataset.digest_weight,
        "source_digest": source_digest,
    }
    room = inverse_room(memory_limit_of(workspace.executor))
    diagonal, ones = np.empty((n, t)), np.empty((n, t)) if fit_intercept else None
    for alpha in dict.fromkeys(alphas.tolist()):
        factor = CholeskyFactor.prepare(operator.with_alpha(alpha), workspace, **chosen)
        factor.make_durable()  # before as much work again
        own = inverse_diagonal(factor, memory_bytes=room)
        found = _checked_ones(factor, own)
        diagonal[:, alphas == alpha] = own[:, None]
        if ones is not None:
            ones[:, alphas == alpha] = found[:, None]
    root = operator.root_weights()
    unseen = np.empty(0, np.int64) if root is None else np.flatnonzero(root == 0)
    loo = loo_from_diagonal(
        y=dataset.targets.read(0, n),
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
    with work.scratch() as scratch:
        rhs = BlockColumns.create(scratch, "rhs", grid, 1 + len(rows), "float64")
        rhs.fill(np.hstack([operator.normal()[:, None], np.arange(grid.n)[:, None] == rows]))
        u = factor.solve(rhs)[0]
        solved = u.whole()
    error = np.abs(solved[rows, 1 + np.arange(len(rows))] / diagonal[rows] - 1)
    if not error.max() <= CHECK_BAR[factor.factor.array.dtype]:
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
    here = Workspace(store="", executor=InProcessExecutor())
    values = OperatorProduct(replace(operator, weighted=False), here, "")(model.dual_coef.read(0, dataset.num_rows))
    return values[rows] if model.intercept is None else values[rows] + model.intercept
