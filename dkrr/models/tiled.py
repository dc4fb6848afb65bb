"""The estimator's fit on tiles: rows or a given matrix in, a model out.

It asks the planner what "auto" means for rows that an estimator was handed, refuses what does not fit a worker or the
disk, and cleans up: what the caller has in memory does not stay in a store that is kept.

What a model remembers of its solver and of its uncertainty, and the parts that a solver or a loss gives it.

Shared by jobs and the estimators, so that a model says the same wherever it was fitted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray
from dkrr.engine.cluster import blas_of, memory_limit_of
from dkrr.engine.machine import free_memory_bytes
from dkrr.engine.tasks import Executor, InProcessExecutor
from dkrr.errors import DataError, ParameterError
from dkrr.fit.choices import Limits, Problem, SolverChoice, small_choice
from dkrr.fit.fitting import FitSettings, fit_rows
from dkrr.fit.inputs import (
    check_disk,
    find_executor,
    free_bytes,
    given_rows,
    measured_place,
    nothing_new,
    resolve_tile_size,
    rows_on_disk,
    source_table,
    store_given_matrix,
)
from dkrr.fit.plan import Decision, Ways, decide, find_continued
from dkrr.fit.prices import cholesky_disk
from dkrr.fit.rates import Machine, measure_machine
from dkrr.fit.trial import sample_trial
from dkrr.kernels import Kernel
from dkrr.linalg.losses.fit import LossFit
from dkrr.linalg.losses.loss import Loss
from dkrr.linalg.nystrom.solver import NystromResult, fit_nystrom
from dkrr.linalg.predict import ArrayRows, RowSource
from dkrr.linalg.primal.solver import PrimalResult, fit_primal
from dkrr.linalg.sizes import choose_gram, choose_tile_size
from dkrr.linalg.solution import Solution
from dkrr.linalg.workspace import Workspace
from dkrr.models.model import Model
from dkrr.models.uncertainty import recorded_factors, target_scale
from dkrr.models.validation import check_alpha, check_target_sizes
from dkrr.store.files import (
    full_disk,
    is_url,
    remove_array,
)
from dkrr.threads import single_blas_thread
from dkrr.tiles import TileGrid, TileMatrix

__all__ = [
    "TiledFit",
    "Training",
    "changed",
    "check_unchanged",
    "label_targets",
    "loss_details",
    "loss_parts",
    "loss_solver",
    "nystrom_parts",
    "primal_details",
    "primal_parts",
    "solver_details",
    "uncertainty_parts",
    "usable_rows",
]

Floats = NDArray[np.float64]
logger = logging.getLogger("dkrr.models.tiled")


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


def solver_details(settings: FitSettings, nystrom: dict[str, Any] | None = None) -> dict[str, Any]:
    """Solver and its parameters, as far as they decide the answer, for ``Model.provenance``."""
    iterative = settings.iterative
    details: dict[str, Any] = {"solver": "nystrom" if nystrom is not None else settings.solver}
    if nystrom is not None:
        details |= {"is_approximation": True, **nystrom, "seed": iterative.seed}
    elif settings.solver == "cg":
        details |= {"preconditioner": iterative.preconditioner, "rank": iterative.rank, "seed": iterative.seed}
    if settings.fit_intercept:
        details["fit_intercept"] = True
    if nystrom is not None or settings.solver == "cg" or settings.precision == "mixed":
        details["tol"] = iterative.tol
        if iterative.allow_unconverged:
            details["allow_unconverged"] = True
    return details


def usable_rows(dataset: Dataset) -> int:
    """Rows that may be centres: those whose weight is not zero."""
    n = dataset.num_rows
    return n if dataset.weight is None else int(np.count_nonzero(dataset.weight.read(0, n)))


def uncertainty_parts(
    dataset: Dataset, dual_coef: RowSource, *, intercept: bool, converged: bool = True
) -> dict[str, Any]:
    """Weights and sigma^2 of an exact fit, for :class:`dkrr.models.model.Model`: what standard deviations need.

    sigma^2 = y^T dual_coef / n holds of a solution alone: a fit that did not converge has none.
    """
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    weight = None if dataset.weight is None else ArrayRows(dataset.weight.read(0, dataset.num_rows))
    sigma2 = target_scale(dataset.y, dual_coef, weight, intercept=intercept) if converged else None
    return {"sample_weight": weight, "sigma2": sigma2}


def nystrom_parts(found: NystromResult, kernel: Kernel | None) -> dict[str, Any]:
    """Kernel, centres, coefficients and the centre of the features, for :class:`dkrr.models.model.Model`."""
    return {
        "kernel": kernel,
        "x_fit": ArrayRows(found.centres),
        "dual_coef": ArrayRows(found.dual_coef),
        "center": found.center,
        "intercept": found.intercept,
    }


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


# what of a candidate's disk is checked here: the rest is small
MATRICES = ("factor", "gram", "preconditioner", "centres", "sums", "strips")


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

    def __post_init__(self) -> None:
        self.kernel.to_dict()  # arrays are keyed by the kernel, so a function without a name is refused now

    @property
    def is_given(self) -> bool:
        """Whether X is the Gram matrix itself."""
        return self.kernel.name == "precomputed"

    def store_bytes(self, X: Any, y: Any) -> int:
        """What a temporary store will hold; 0 where only reading tells the number of rows."""
        alpha = check_alpha(self.alpha).tolist()
        if self.is_given:
            n, d = given_rows(X), 1
        else:
            table = source_table(X, y)
            n, d = table.num_rows or 0, len(table.names)
        if not n:
            return 0
        if self.choice.solver == "primal":
            return 8 * n * d
        if self.choice.solver == "nystrom":
            return 16 * self.choice.nystrom(n).num_centers ** 2 + 8 * n * d
        if self.choice.solver == "cg" and self.choice.gram != "stored":
            return 8 * n * (d + (2000 if self.choice.rank == "auto" else self.choice.rank))
        precision = "float64" if self.choice.precision == "auto" else self.choice.precision
        b = self.tile_size or choose_tile_size(n, d, None)
        return sum(
            cholesky_disk(n, b, d, 1, precision=precision, gram=self._gram(alpha), num_alphas=len(set(alpha))).values()
        )

    def solve(self, X: Any, y: Any, weight: Any, root: Any) -> tuple[Model, RowArray | None]:
        """The model, with coefficients in memory, and its rows on disk (None for a given matrix).

        Parameters
        ----------
        X, y, weight
            What an estimator's ``fit`` takes.
        root
            The store.
        """
        with full_disk(root):
            return self._solve_given(X, y, weight, root) if self.is_given else self._solve_rows(X, y, weight, root)

    def _gram(self, alpha: list[float]) -> Literal["stored", "on_the_fly"]:
        return choose_gram(None if self.is_given else self.kernel, len(set(alpha)))

    def _solve_rows(self, X: Any, y: Any, weight: Any, root: Any) -> tuple[Model, RowArray]:
        source_table(X, y)
        with rows_on_disk(X, y, weight, root) as dataset:
            check_target_sizes(dataset)
            n, d = dataset.num_rows, dataset.num_features
            alpha = check_alpha(self.alpha, dataset.num_targets).tolist()
            kernel = self.kernel.resolve(d)
            problem = Problem(
                num_rows=n,
                num_features=d,
                num_targets=dataset.num_targets,
                kernel=kernel,
                alpha=tuple(alpha),
                fit_intercept=self.fit_intercept,
                primal=self._takes_primal,
            )
            with find_executor(n, self.max_in_process_rows) as executor:
                memory = memory_limit_of(executor)
                if self.tile_size is not None:
                    resolve_tile_size(self.tile_size, n, d, self._precision, memory)  # refused if no worker holds it
                decision = self._decide(problem, dataset, executor, root)
                chosen = decision.chosen
                logger.info("%s (%s)", chosen.name, decision.reasons["solver"])
                known: dict[str, list[Any]] = {
                    "rows_digest": [dataset.digest],
                    "kernel": [kernel.to_dict()],
                    "alpha": [*alpha, None],
                }
                needed = sum(chosen.disk_bytes.get(name, 0) for name in MATRICES)
                check_disk(root, needed, TileGrid(n, chosen.tile_size), known)
                settings = decision.settings(problem, self.choice)
                if chosen.solver == "primal":
                    return self._primal(dataset, settings, root, executor), dataset.X
                if self.choice.solver == "nystrom":
                    return self._nystrom(dataset, settings, root, executor), dataset.X
                ways = Ways(
                    problem=problem,
                    choice=self.choice,
                    limits=self._limits(executor, root),
                    tile_size=self.tile_size,
                    machine=lambda: self._machine(problem, executor, root),
                    candidates=decision.candidates,
                )
                return self._model(dataset, settings, root, executor, ways=ways), dataset.X

    @property
    def _takes_primal(self) -> bool:
        """Whether "auto" may become primal."""
        return self.tile_size is None

    def _decide(self, problem: Problem, dataset: Dataset, executor: Executor, root: Any) -> Decision:
        """What "auto" becomes."""
        kernel = problem.kernel
        assert kernel is not None  # noqa: S101  (narrows the type)
        limits = self._limits(executor, root)
        choice, tile_size = self.choice, self.tile_size
        continued = find_continued(
            root, dataset, kernel, problem.alpha, choice, tile_size=tile_size, memory_bytes=limits.memory_bytes
        )
        if continued is not None:
            choice, tile_size = continued.resolve(choice, tile_size)
            logger.info("%s", continued.sentence(None))
        decision = decide(
            problem,
            choice,
            limits,
            tile_size=tile_size,
            machine=lambda: self._machine(problem, executor, root),
            trial=lambda seconds: sample_trial(dataset, kernel, seconds, seed=self.choice.seed),
        )
        if continued is None or not continued.is_for(decision.chosen):
            return decision
        return replace(decision, chosen=continued.saved(decision.chosen, executor.num_threads))

    def _limits(self, executor: Executor, root: Any) -> Limits:
        """What there is."""
        return Limits(
            threads=executor.num_threads,
            memory_bytes=memory_limit_of(executor),
            driver_bytes=free_memory_bytes(),
            disk_bytes=free_bytes(root),
            fetches=is_url(str(root)),
        )

    def _machine(self, problem: Problem, executor: Executor, root: Any) -> Machine:
        """Rates of the workers."""
        where = _where(executor)
        place, threads = measured_place(root), executor.num_threads
        return measure_machine(problem.kernel, problem.num_features, place, threads=threads, where=where)

    @property
    def _precision(self) -> str:
        """Of the tiles that a worker must hold at least."""
        return "float32" if self.choice.precision in ("float32", "mixed") else "float64"

    def _nystrom(self, dataset: Dataset, settings: FitSettings, root: Any, executor: Executor) -> Model:
        nystrom = self.choice.nystrom(usable_rows(dataset))
        workspace = Workspace(store=root, executor=executor, blas=blas_of(executor))
        found = fit_nystrom(
            dataset,
            settings.kernel,
            settings.alpha,
            nystrom,
            settings.iterative,
            workspace,
            precision=settings.precision,
            fit_intercept=settings.fit_intercept,
        )
        return Model(
            **nystrom_parts(found, settings.kernel),
            solution=found.solution,
            **self._names(dataset),
            provenance=_provenance(dataset, settings, nystrom.to_dict()),
        )

    def _primal(self, dataset: Dataset, settings: FitSettings, root: Any, executor: Executor) -> Model:
        workspace = Workspace(store=root, executor=executor, blas=blas_of(executor))
        found = fit_primal(dataset, settings.kernel, settings.alpha, workspace, fit_intercept=settings.fit_intercept)
        return Model(
            **primal_parts(found),
            solution=found.solution,
            **self._names(dataset),
            provenance=_provenance(dataset, settings, None) | primal_details(found),
        )

    def _start(self, dataset: Dataset) -> Any:
        """The earlier coefficients, unless they are of other targets or of more rows than there are now."""
        if self.start is None:
            return None
        start = np.asarray(self.start, dtype=np.float64)
        start = start[:, None] if start.ndim == 1 else start
        fits = len(start) <= dataset.num_rows and start.shape[1] == dataset.num_targets
        return start if fits else None

    def _names(self, dataset: Dataset) -> dict[str, Any]:
        names, made_up = self.feature_names, dataset.made_up
        if names is None:
            names = () if self.is_given else dataset.feature_names
        else:
            made_up = tuple(kind for kind in made_up if kind != "feature_names")
        return {
            "y_is_1d": dataset.y_is_1d,
            "feature_names": list(names),
            "target_names": list(dataset.target_names),
            "made_up": made_up,
            "classes": None if dataset.classes is None else list(dataset.classes),
        }

    def _solve_given(self, K: Any, y: Any, weight: Any, root: Any) -> tuple[Model, None]:
        n = given_rows(K)
        if y is None:
            raise DataError("fit requires y to be passed, but the target y is None")
        if self.choice.solver in ("nystrom", "primal"):
            what = "centres are chosen rows" if self.choice.solver == "nystrom" else "features are made of rows"
            raise ParameterError(
                f"solver {self.choice.solver!r} with a precomputed matrix", hint=f"give the rows and a kernel; {what}"
            )
        alpha = check_alpha(self.alpha).tolist()
        with find_executor(n, self.max_in_process_rows) as executor:
            memory = memory_limit_of(executor)
            b = resolve_tile_size(self.tile_size, n, 1, self._precision, memory)
            num_targets = 1 if np.ndim(y) < 2 else int(np.shape(y)[1])
            problem = Problem(
                num_rows=n,
                num_features=1,
                num_targets=num_targets,
                kernel=None,
                alpha=tuple(alpha),
                fit_intercept=self.fit_intercept,
            )
            # what costs most, the matrix, is there already: nothing is measured
            choice = self.choice if self.choice.solver != "auto" else replace(self.choice, solver="cholesky")
            choice = replace(choice, **small_choice(problem, choice))
            limits = Limits(threads=executor.num_threads, memory_bytes=memory)
            decision = decide(problem, choice, limits, tile_size=b, machine=_unmeasured)
            grid = TileGrid(n, b)
            needed = sum(decision.chosen.disk_bytes.get(name, 0) for name in MATRICES)
            check_disk(root, needed, grid, {"rows_digest": []})
            with nothing_new(root):
                dataset, given, digest = store_given_matrix(K, y, weight, root, b)
            try:
                check_target_sizes(dataset)
                alpha = check_alpha(self.alpha, dataset.num_targets).tolist()
                problem = replace(problem, alpha=tuple(alpha))
                settings = replace(decision.settings(problem, choice), gram="stored")
                return self._model(dataset, settings, root, executor, given, digest), None
            finally:
                # the caller has the matrix: a store that is kept needs no copy of it
                remove_array(dataset.path)
                remove_array(given.location)

    def _model(
        self,
        dataset: Dataset,
        settings: FitSettings,
        root: Any,
        executor: Executor,
        given: TileMatrix | None = None,
        digest: str = "",
        ways: Ways | None = None,
    ) -> Model:
        workspace = Workspace(store=root, executor=executor, blas=blas_of(executor), maker=self.maker)
        fit = fit_rows(
            dataset,
            settings,
            workspace,
            given=given,
            source_digest=digest,
            start=self._start(dataset),
            ways=ways,
        )
        with single_blas_thread(), fit as result:
            coefficients = result.dual_coef.read(0, dataset.num_rows)
        settings = result.settings
        rows = result.operator.rows
        center = None if given is not None or rows is None else rows.center
        return Model(
            kernel=settings.kernel,
            x_fit=None if given is not None else dataset.X,
            dual_coef=ArrayRows(coefficients),
            solution=result.solution,
            center=None if center is None else np.asarray(center),
            intercept=result.intercept,
            **self._names(dataset),
            **uncertainty_parts(
                dataset,
                ArrayRows(coefficients),
                intercept=settings.fit_intercept,
                converged=result.solution.converged,
            ),
            provenance=_provenance(dataset, settings, None, digest) | recorded_factors(root, result.factors),
        )


def _provenance(
    dataset: Dataset, settings: FitSettings, nystrom: dict[str, Any] | None, digest: str = ""
) -> dict[str, Any]:
    return {
        "alpha": list(settings.alpha),
        "tile_size": settings.tile_size,
        "precision": settings.precision,
        "gram": settings.gram,
        "rows_digest": digest or dataset.digest,
        "targets_digest": dataset.digest_y,
        "weight_digest": dataset.digest_weight,
        **solver_details(settings, nystrom),
    }


def _where(executor: Executor) -> Literal["client", "in process"]:
    return "in process" if isinstance(executor, InProcessExecutor) else "client"


def _unmeasured() -> Machine:
    raise AssertionError("one way to solve needs no rates")
