"""KernelRidgeCV: kernel ridge regression that chooses its alpha by held-out error.

A grid of alphas through tiles, for rows beyond an eigendecomposition in memory.

    cholesky    one stored Gram matrix; for each alpha a factor, the solution, the exact diagonal of the inverse
    primal      two passes over the rows for all alphas: :mod:`dkrr.linalg.primal.solver`

Factors of alphas that are not the best of any target are removed as soon as that is known, so that at most t + 1 lie on
the disk at once; those that were in the store before, or that another fit has used meanwhile, stay there. The smallest
alpha comes first: where it is too small for a factor, that is known before the others are paid for.

Cost
----
cholesky: 2/3 n^3 flops an alpha and n^2 / 2 numbers more on disk than one fit.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.engine.cluster import find_client
from dkrr.engine.machine import cpu_count, free_memory_bytes
from dkrr.errors import ParameterError
from dkrr.fit.choices import Candidate, FitSettings, Problem, SolverChoice, may_be_primal
from dkrr.fit.inputs import free_bytes
from dkrr.fit.plan import Decision
from dkrr.fit.prices import DISK_RESERVE_BYTES, factorise_seconds
from dkrr.fit.rates import Machine
from dkrr.kernels import Kernel
from dkrr.linalg.factor.dense import DenseFit
from dkrr.linalg.inference.eigen import eigen_bytes
from dkrr.linalg.primal.solver import array_source, stored_source
from dkrr.linalg.workspace import Workspace
from dkrr.models.estimator import KernelRidge, keeps_its_fit
from dkrr.models.leave_one_out import leave_one_out_rows
from dkrr.models.model import Model
from dkrr.models.tiled import TiledFit
from dkrr.models.validation import check_alpha, check_flag
from dkrr.selection.path import AlphaPath, Chosen, Scoring, choose, make_folds, primal_search
from dkrr.tiles import TileMatrix

__all__ = ["KernelRidgeCV", "PathFit"]

logger = logging.getLogger("dkrr.selection")
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PathFit(TiledFit):
    """A fit through tiles whose alpha is the one of a grid with the best leave-one-out score.

    Parameters
    ----------
    grid
        All alphas; ``alpha`` is the smallest of them, by which solvers are priced.
    scoring, stored
        See :meth:`dkrr.selection.path.AlphaPath.search`.
    take
        Called with what was chosen.
    """

    grid: tuple[float, ...]
    scoring: Scoring
    stored: Literal["errors", "predictions"] | None
    take: Callable[[Chosen], None]

    def __post_init__(self) -> None:
        if self.choice.solver in ("cg", "nystrom"):
            raise ParameterError(
                f"solver {self.choice.solver!r} with a grid of alphas, of which it has no leave-one-out errors",
                hint="give 'auto', 'cholesky' or 'primal', or a KernelRidge each",
            )

    def _decide(self, problem: Problem, dataset: Dataset, workspace: Workspace) -> Decision:
        """The cheaper of a factor and its inverse's diagonal for each alpha, and of two passes in feature space."""
        if problem.kernel is None:
            return super()._decide(problem, dataset, workspace)
        k, t = len(self.grid), problem.num_targets
        whole = replace(problem, alpha=tuple(np.repeat(self.grid, t)), num_targets=k * t)
        choice = replace(self.choice, precision=self._precision)
        if choice.solver == "auto" and not may_be_primal(whole, choice):
            choice = replace(choice, solver="cholesky")
        decision = super(PathFit, replace(self, choice=choice))._decide(whole, dataset, workspace)
        machine = cache(lambda: self._machine(problem, workspace.executor, workspace.store))
        free = free_bytes(workspace.store)
        usable = [self._with_diagonals(item, problem, machine, free) for item in decision.candidates]
        usable = [item for item in usable if item.solver != "cg"]
        feasible = sorted(
            [item for item in usable if not item.infeasible] or usable, key=lambda item: item.total_seconds
        )
        for item in feasible:
            logger.info("%d alphas by %s: %.0f s", k, item.name, item.total_seconds)
        reasons = {"solver": f"the cheapest for {k} alphas"}
        return replace(
            decision,
            problem=problem,
            choice=self.choice,
            chosen=feasible[0],
            candidates=tuple(usable),
            reasons=reasons,
        )

    @property
    def _precision(self) -> Literal["float32", "float64"]:
        """Leave-one-out errors are those of a float64 factor, unless a float32 answer is asked for."""
        return "float32" if self.choice.precision == "float32" else "float64"

    def _with_diagonals(
        self, item: Candidate, problem: Problem, machine: Callable[[], Machine], free: int | None
    ) -> Candidate:
        """A candidate with what the diagonals of the inverses cost, and the factors that lie on the disk at once."""
        if item.solver != "cholesky":
            return item
        k = len(self.grid)
        held = min(k, problem.num_targets + 1 if self.scoring.per_target else 2)
        disk = item.disk_bytes | {"factor": item.disk_bytes.get("factor", 0) // k * held}
        fits = free is not None and sum(disk.values()) + DISK_RESERVE_BYTES <= free
        if item.infeasible.startswith("writes ") and fits:
            item = replace(item, infeasible="")  # all factors together would not fit
        if not item.seconds:
            return replace(item, disk_bytes=disk)
        one = factorise_seconds(machine(), problem.num_rows, item.tile_size, item.precision, "stored")
        return replace(item, disk_bytes=disk, seconds=item.seconds | {"leave-one-out": k * one})

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
        """The model of the best alpha, from a factor of each or from two passes."""
        assert dataset.y is not None  # noqa: S101  (narrows the type)
        n, t, k = dataset.num_rows, dataset.num_targets, len(self.grid)
        y, weight = dataset.y.read(0, n), None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
        scoring = replace(self.scoring, per_target=self.scoring.per_target and t > 1, is_1d=t == 1)
        if solver == "primal":
            with stored_source(dataset, settings.kernel, workspace, fit_intercept=settings.fit_intercept) as source:
                grid, bordered = np.array(self.grid), settings.fit_intercept
                chosen = primal_search(source, y, grid, scoring, fit_intercept=bordered, stored=self.stored)
            self.take(chosen)
            settings = replace(settings, alpha=self._chosen_alphas(chosen))
            return super()._model(dataset, settings, workspace, solver=solver)
        settings = replace(settings, gram="stored", precision=self._precision)

        def fit(alphas: tuple[float, ...]) -> Model:
            own, one = replace(workspace, phases={}, reused={}), replace(settings, alpha=alphas)
            return super(PathFit, self)._model(dataset, one, own, given=given, source_digest=source_digest)

        scores = np.full((t, k) if scoring.per_target else (k,), -np.inf)
        values = None if self.stored is None else np.empty((n, t, k))
        kept = dict[int, Model]()
        for number in np.argsort(self.grid, kind="stable").tolist():
            alpha = (self.grid[number],)
            model, one = fit(alpha), replace(settings, alpha=alpha)
            loo = leave_one_out_rows(dataset, one, workspace, model, given=given, source_digest=source_digest)
            scores[..., number], kept_values = scoring.of_left_out(loo, y, weight, self.stored)
            logger.info("alpha %.3g: score %s", *alpha, scores[..., number])
            if values is not None:
                values[:, :, number] = kept_values
            kept[number] = model
            for other in set(kept) - set(np.ravel(np.argmax(scores, axis=-1)).tolist()):
                for location in kept.pop(other).provenance.get("factors", []):
                    if workspace.discard(location):
                        logger.info("removed %s: its alpha is not the best", location)
        chosen = choose(scores, t, values)
        self.take(chosen)
        return next(iter(kept.values())) if len(kept) == 1 else fit(self._chosen_alphas(chosen))

    def _chosen_alphas(self, chosen: Chosen) -> tuple[float, ...]:
        """One alpha, or one for each target."""
        numbers = chosen.index[:1] if chosen.scores.ndim == 1 else chosen.index
        return tuple(self.grid[number] for number in numbers)


MAX_EIGEN_ROWS = 12_000

MEMORY_SHARE = 0.8

# An eigendecomposition takes as long as the factors and inverse diagonals of about so many alphas on one core: 8.2 to
# 9.8 measured at n = 3,000, side by side; half of its flops are products of a matrix and a vector.
ALPHAS_A_CORE = 8


class KernelRidgeCV(KernelRidge):
    """Kernel ridge regression with the alpha of the smallest leave-one-out error, or of the best score over folds.

    Parameters
    ----------
    alphas : array of (k,), default (0.1, 1.0, 10.0)
        The grid, each at least 0.
    kernel, gamma, degree, coef0, kernel_params, fit_intercept
        As in :class:`dkrr.KernelRidge`.
    scoring : str or callable, optional
        A scorer of scikit-learn. None means the negative mean squared error, -mean(w_i e_i^2), of leave-one-out, and
        R^2 over folds, as in RidgeCV.
    cv : optional
        None is leave-one-out, exactly. Else a number of folds, a splitter of scikit-learn, an iterable of (train, test)
        row numbers, or an array of n labels: the rows of one label are one fold. Rows are not shuffled.
    alpha_per_target : bool, default False
        An alpha for each target.
    store_cv_results : bool, default False
        Keep ``cv_results_``.
    solver, precision, tile_size, store, tol, max_iter, solver_params
        As in :class:`dkrr.KernelRidge`. Up to 6,000 rows are fitted in memory, and up to 12,000 where folds or many
        alphas make it pay, unless ``tile_size`` or ``store`` ask for tiles: one eigendecomposition serves all folds
        and alphas; for leave-one-out with at most 8 alphas a factor for each takes less time. Through tiles "cholesky"
        makes a factor for each alpha from one stored Gram matrix, "primal" takes two passes, and "auto" what costs
        less; "cg" and "nystrom" have no leave-one-out error for a grid. Folds are for rows in memory.

    Attributes
    ----------
    alpha_ : float or (t,)
        The first of the grid with the best score, as in scikit-learn; `dkrr tune` takes a larger one where that is as
        good (:mod:`dkrr.selection.choice`).
    best_score_ : float or (t,)
    scores_ : (k,) or (t, k)
        Of every alpha of the grid.
    cv_results_ : (n, k) or (n, t, k)
        Held-out squared errors times the weight without ``scoring``, else held-out predictions; NaN for rows that no
        fold holds out.
    dual_coef_, intercept_, X_fit_, n_features_in_, solution_
        Of the fit of all rows with ``alpha_``.

    Notes
    -----
    Cost in memory: one eigendecomposition of the Gram matrix (9 n^3 flops at most, 24 n^2 bytes); then every alpha
    costs 2 n^2 (t + 1) flops for leave-one-out, and n f^2 for every fold of f rows.

    References
    ----------
    Rifkin and Lippert, Notes on regularized least squares, MIT-CSAIL-TR-2007-025, 2007.
    """

    def __init__(
        self,
        alphas: Any = (0.1, 1.0, 10.0),
        *,
        kernel: Any = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: dict[str, Any] | None = None,
        fit_intercept: bool = False,
        scoring: Any = None,
        cv: Any = None,
        alpha_per_target: bool = False,
        store_cv_results: bool = False,
        solver: str = "auto",
        precision: str = "auto",
        tile_size: Any = "auto",
        store: Any = None,
        tol: float = 1e-8,
        max_iter: int | None = None,
        solver_params: dict[str, Any] | None = None,
    ) -> None:
        self.alphas = alphas
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.fit_intercept = fit_intercept
        self.scoring = scoring
        self.cv = cv
        self.alpha_per_target = alpha_per_target
        self.store_cv_results = store_cv_results
        self.solver = solver
        self.precision = precision
        self.tile_size = tile_size
        self.store = store
        self.tol = tol
        self.max_iter = max_iter
        self.solver_params = solver_params

    # what a KernelRidge has as parameters, and its methods read
    warm_start = False

    @property
    def alpha(self) -> Any:
        """The chosen ridge, one or one per target; before there is one the first of the grid."""
        return self.__dict__.get("alpha_", np.ravel(np.asarray(self.alphas))[0])

    @keeps_its_fit
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelRidgeCV:
        """Choose alpha and fit; see :meth:`dkrr.KernelRidge.fit`.

        Parameters
        ----------
        sample_weight : (n,), optional
            At least 0. Fits, leave-one-out errors and the scores of folds are weighted with them.

        Raises
        ------
        NotPositiveDefiniteError
            K + alpha I is not positive definite for an alpha of the grid.
        """
        check_alpha(self.alphas)
        for name in ("alpha_per_target", "store_cv_results"):
            check_flag(name, getattr(self, name))
        for name in ("alpha_", "best_score_", "scores_", "cv_results_"):
            self.__dict__.pop(name, None)
        super().fit(X, y, sample_weight)
        if self.store_cv_results and self._model.y_is_1d:
            self.cv_results_: Any = self.cv_results_[:, 0]
        return self

    @property
    def _grid(self) -> Floats:
        return np.asarray(check_alpha(self.alphas))

    def _is_for_memory(self, num_rows: int) -> bool:
        """Few rows; folds, which tiles have no formula for; and so many alphas that their factors would cost more."""
        if super()._is_for_memory(num_rows):
            return True
        if self.solver != "auto" or num_rows > MAX_EIGEN_ROWS or find_client() is not None:
            return False
        pays = self.cv is not None or len(self._grid) > ALPHAS_A_CORE * cpu_count()
        return pays and eigen_bytes(num_rows) <= MEMORY_SHARE * free_memory_bytes()

    def _is_for_features(self, kernel: Kernel, choice: SolverChoice, X: Any, y: Any) -> bool:
        if self.cv is None:
            return super()._is_for_features(kernel, choice, X, y)
        if choice.solver == "primal":
            raise ParameterError("cv with solver 'primal'", hint="leave cv out: leave-one-out is exact; or the solver")
        return False

    def _fit_primal(self, fit: TiledFit, X: Any, y: Any, weight: Any) -> KernelRidge:
        targets = y.reshape(len(y), -1)
        source = array_source(X, targets, fit.kernel.resolve(X.shape[1]), weight)
        scoring, bordered = self._scoring(targets.shape[1]), fit.fit_intercept
        self._take(primal_search(source, targets, self._grid, scoring, fit_intercept=bordered, stored=self._stored))
        return super()._fit_primal(fit, X, y, weight)

    def _fit_tiled(self, fit: TiledFit, X: Any, y: Any, weight: Any) -> KernelRidge:
        if self.cv is not None:
            raise ParameterError(
                "cv through tiles, which have no formula for folds",
                hint=f"leave cv out: leave-one-out is exact; or give at most {MAX_EIGEN_ROWS:,} rows in memory, and no "
                "tile_size, store or solver",
            )
        path = PathFit(
            **(vars(fit) | {"alpha": float(self._grid.min()), "maker": uuid.uuid4().hex}),
            grid=tuple(self._grid.tolist()),
            scoring=Scoring(scorer=self.scoring, per_target=bool(self.alpha_per_target)),
            stored=self._stored,
            take=self._take,
        )
        return super()._fit_tiled(path, X, y, weight)

    @property
    def _stored(self) -> Literal["errors", "predictions"] | None:
        """What ``cv_results_`` holds."""
        if not self.store_cv_results:
            return None
        return "errors" if self.scoring is None else "predictions"

    def _solve_in_memory(
        self, kernel: Kernel | None, X: Any, center: Any, y: Floats, weight: Any, precision: str
    ) -> DenseFit:
        if precision != "float64":
            raise ParameterError(
                f"precision {precision!r} with an eigendecomposition", hint='it is made in float64; leave it "auto"'
            )
        started = time.perf_counter()
        folds = None if self.cv is None else make_folds(self.cv, X, y[:, 0] if y.shape[1] == 1 else y)
        x = X if center is None else X - center
        is_eigen = folds is not None or len(self._grid) > ALPHAS_A_CORE
        path = AlphaPath(
            kernel=kernel, x=x, y=y, weight=weight, fit_intercept=bool(self.fit_intercept), folds=folds,
            method="eigen" if is_eigen else "cholesky",
        )  # fmt: skip
        self._take(path.search(self._grid, self._scoring(y.shape[1]), store=self._stored))
        return path.fit(np.broadcast_to(check_alpha(self.alpha_), y.shape[1:]), started)

    def _scoring(self, num_targets: int) -> Scoring:
        scorer = self.scoring
        if scorer is None and self.cv is not None:
            scorer = "r2"
        return Scoring(
            scorer=scorer, per_target=bool(self.alpha_per_target) and num_targets > 1, is_1d=num_targets == 1
        )

    def _take(self, chosen: Chosen) -> None:
        """The attributes of a choice."""
        alphas = self._grid[chosen.index]
        is_one = chosen.scores.ndim == 1
        self.alpha_ = float(alphas[0]) if is_one else alphas
        self.best_score_, self.scores_ = chosen.best, chosen.scores
        logger.info("alpha %s of %d: score %s", self.alpha_, len(self._grid), self.best_score_)
        if chosen.values is not None:
            self.cv_results_ = chosen.values
