"""KernelRidgeCV: kernel ridge regression that chooses its alpha by held-out error.

A grid of alphas through tiles, for rows beyond an eigendecomposition in memory.

    cholesky    one stored Gram matrix; for each alpha a factor, the solution, the exact diagonal of the inverse
    primal      two passes over the rows for all alphas: :mod:`dkrr.linalg.primal`

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
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from dkrr.dataset import Dataset, Floats
from dkrr.engine.cluster import find_client
from dkrr.engine.machine import cpu_count, free_memory_bytes
from dkrr.errors import ParameterError
from dkrr.fit.choices import FitSettings, Problem, SolverChoice, may_be_primal
from dkrr.fit.plan import Decision
from dkrr.kernels import Kernel
from dkrr.linalg.dense import DenseFit, eigen_bytes
from dkrr.linalg.primal import array_source, stored_source
from dkrr.linalg.workspace import Workspace
from dkrr.models.estimator import WithRidge, keeps_its_fit
from dkrr.models.leave_one_out import leave_one_out_rows
from dkrr.models.model import Model
from dkrr.models.tiled import TiledFit
from dkrr.models.validation import check_alpha, check_flag
from dkrr.selection.path import AlphaPath, AlphaSearch, checked_scorer, make_folds, primal_search
from dkrr.tiles import TileMatrix

logger = logging.getLogger("dkrr.selection")

MAX_EIGEN_ROWS = 12_000

MEMORY_SHARE = 0.8

# An eigendecomposition takes as long as the factors and inverse diagonals of about so many alphas on one core: 8.2 to
# 9.8 measured at n = 3,000, side by side; half of its flops are products of a matrix and a vector.
ALPHAS_A_CORE = 8


@dataclass(frozen=True, kw_only=True)
class PathFit(TiledFit):
    """A fit through tiles whose alpha is the one of a grid with the best leave-one-out score.

    ``estimator`` has the grid, of which ``alpha`` is the smallest; it makes the search, and takes what was chosen.
    """

    estimator: KernelRidgeCV

    def _decide(self, problem: Problem, dataset: Dataset, workspace: Workspace) -> Decision:
        """Passes in feature space where there are fewer features than rows, else a factor for each alpha."""
        # leave-one-out errors are those of a float64 factor, unless a float32 answer is asked for
        precision = "float32" if self.choice.precision == "float32" else "float64"
        choice = replace(self.choice, precision=precision)
        if choice.solver != "primal" and not may_be_primal(problem, choice):
            choice = replace(choice, solver="cholesky", gram="stored")
        else:
            choice = replace(choice, solver="primal")
        # so many factors lie on the disk at once: that of the best alpha of each target, and the one that is made
        held = sorted(self.estimator.grid.tolist())[: problem.num_targets + 1 if self.estimator.alpha_per_target else 2]
        priced = replace(problem, alpha=tuple(held), num_targets=len(held))
        decision = super(PathFit, replace(self, choice=choice))._decide(priced, dataset, workspace)
        return replace(decision, problem=problem, choice=self.choice)

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
        n, grid = dataset.num_rows, self.estimator.grid
        weight = None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
        search = self.estimator.start_search(dataset.y.read(0, n), weight)

        def fit(alphas: Any) -> Model:
            own, one = (
                replace(workspace, phases={}, reused={}),
                replace(settings, alpha=tuple(np.ravel(alphas).tolist())),
            )
            return super(PathFit, self)._model(
                dataset, one, own, solver=solver, given=given, source_digest=source_digest
            )

        if solver == "primal":
            with stored_source(dataset, settings.kernel, workspace, fit_intercept=settings.fit_intercept) as source:
                primal_search(source, grid, search, fit_intercept=settings.fit_intercept)
            return fit(self.estimator.take(search))
        kept = dict[int, Model]()
        for number in np.argsort(grid, kind="stable").tolist():
            model, one = fit(grid[number]), replace(settings, alpha=(float(grid[number]),))
            loo = leave_one_out_rows(dataset, one, workspace, model, given=given, source_digest=source_digest)
            search.add(slice(number, number + 1), (search.y - loo.residuals)[:, :, None])
            logger.info("alpha %.3g: score %s", grid[number], search.scores[..., number])
            kept[number] = model
            for other in set(kept) - set(search.index.tolist()):
                for location in kept.pop(other).provenance.get("factors", []):
                    if workspace.discard(location):
                        logger.info("removed %s: its alpha is not the best", location)
        chosen = self.estimator.take(search)
        return next(iter(kept.values())) if len(kept) == 1 else fit(chosen)


@dataclass(eq=False, repr=False)
class KernelRidgeCV(WithRidge):
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
        makes a factor for each alpha from one stored Gram matrix, "primal" takes two passes, and "auto" is primal where
        there are fewer features than rows; "cg" and "nystrom" have no leave-one-out error for a grid. Folds are for
        rows in memory.

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

    alphas: Any = (0.1, 1.0, 10.0)
    scoring: Any = field(default=None, kw_only=True)
    cv: Any = field(default=None, kw_only=True)
    alpha_per_target: bool = field(default=False, kw_only=True)
    store_cv_results: bool = field(default=False, kw_only=True)

    @property  # type: ignore[misc]
    def alpha(self) -> Any:
        """The chosen ridge, one or one per target; before there is one the first of the grid."""
        return vars(self).get("alpha_", np.ravel(np.asarray(self.alphas))[0])

    @property
    def grid(self) -> Floats:
        """All alphas (k,)."""
        return check_alpha(self.alphas)

    @keeps_its_fit
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
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
        checked_scorer(self.scoring)
        if self.solver in ("cg", "nystrom"):
            raise ParameterError(
                f"solver {self.solver!r} with a grid of alphas, of which it has no leave-one-out errors",
                hint="give 'auto', 'cholesky' or 'primal', or a KernelRidge each",
            )
        if self.cv is not None and self.solver == "primal":
            raise ParameterError("cv with solver 'primal'", hint="leave cv out: leave-one-out is exact; or the solver")
        for name in ("alpha_per_target", "store_cv_results"):
            check_flag(name, getattr(self, name))
        for name in ("alpha_", "best_score_", "scores_", "cv_results_"):
            self.__dict__.pop(name, None)
        super().fit(X, y, sample_weight)
        if self.store_cv_results and self._model.y_is_1d:
            self.cv_results_: Any = self.cv_results_[:, 0]
        return self

    def _is_for_memory(self, num_rows: int) -> bool:
        """Few rows; folds, which tiles have no formula for; and so many alphas that their factors would cost more."""
        if super()._is_for_memory(num_rows):
            return True
        if self.solver != "auto" or num_rows > MAX_EIGEN_ROWS or find_client() is not None:
            return False
        pays = self.cv is not None or len(self.grid) > ALPHAS_A_CORE * cpu_count()
        return pays and eigen_bytes(num_rows) <= MEMORY_SHARE * free_memory_bytes()

    def _is_for_features(self, kernel: Kernel, choice: SolverChoice, X: Any, y: Any) -> bool:
        return self.cv is None and super()._is_for_features(kernel, choice, X, y)

    def _fit_primal(self, fit: TiledFit, X: Any, y: Any, weight: Any) -> Self:
        targets = y.reshape(len(y), -1)
        source, search = (
            array_source(X, targets, fit.kernel.resolve(X.shape[1]), weight),
            self.start_search(targets, weight),
        )
        primal_search(source, self.grid, search, fit_intercept=fit.fit_intercept)
        self.take(search)
        return super()._fit_primal(fit, X, y, weight)

    def _fit_tiled(self, fit: TiledFit, X: Any, y: Any, weight: Any) -> Self:
        if self.cv is not None:
            raise ParameterError(
                "cv through tiles, which have no formula for folds",
                hint=f"leave cv out: leave-one-out is exact; or give at most {MAX_EIGEN_ROWS:,} rows in memory, and no "
                "tile_size, store or solver",
            )
        own = vars(fit) | {"alpha": float(self.grid.min()), "maker": uuid.uuid4().hex, "estimator": self}
        return super()._fit_tiled(PathFit(**own), X, y, weight)

    def _solve_in_memory(
        self, kernel: Kernel | None, X: Any, center: Any, y: Floats, weight: Any, precision: str
    ) -> DenseFit:
        if precision != "float64":
            raise ParameterError(
                f"precision {precision!r} with an eigendecomposition", hint='it is made in float64; leave it "auto"'
            )
        started = time.perf_counter()
        folds = None if self.cv is None else make_folds(self.cv, X, y[:, 0] if y.shape[1] == 1 else y)
        x, search = X if center is None else X - center, self.start_search(y, weight)
        is_eigen = folds is not None or len(self.grid) > ALPHAS_A_CORE
        path = AlphaPath(
            kernel=kernel, x=x, y=y, weight=weight, fit_intercept=bool(self.fit_intercept), folds=folds,
            method="eigen" if is_eigen else "cholesky",
        )  # fmt: skip
        path.search(self.grid, search)
        return path.fit(np.broadcast_to(self.take(search), y.shape[1:]), started)

    def start_search(self, y: Floats, weight: Floats | None) -> AlphaSearch:
        """Of this grid, for targets (n, t)."""
        return AlphaSearch(
            y=y,
            weight=weight,
            num_alphas=len(self.grid),
            scoring="r2" if self.scoring is None and self.cv is not None else self.scoring,
            per_target=bool(self.alpha_per_target),
            stored=None if not self.store_cv_results else "errors" if self.scoring is None else "predictions",
        )

    def take(self, search: AlphaSearch) -> Any:
        """The attributes of a choice; returns the chosen alpha, or one for each target."""
        best = search.scores.max(axis=-1)
        self.alpha_: Any = self.grid[search.index] if best.ndim else float(self.grid[search.index[0]])
        self.best_score_: Any = best if best.ndim else float(best)
        self.scores_ = search.scores
        logger.info("alpha %s of %d: score %s", self.alpha_, len(self.grid), self.best_score_)
        if search.values is not None:
            self.cv_results_ = search.values
        return self.alpha_
