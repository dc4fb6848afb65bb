"""KernelRidgeCV: kernel ridge regression that chooses its alpha by held-out error, of a grid of alphas.

    gram  ->  eigendecomposition  ->  for every alpha: predictions of held-out rows  ->  scores  ->  alpha

Rows in memory are held out one by one or by folds (:class:`AlphaPath`); in feature space two passes over the rows serve
all alphas (:func:`primal_search`). A fold whose training rows are all the others is answered from the fit of all rows;
any other split (time-ordered ones train on the past alone) needs a fit of its own. Beyond an eigendecomposition in
memory there are tiles (:class:`PathFit`):

    cholesky    one stored Gram matrix; for each alpha a factor, the solution, the exact diagonal of the inverse
    primal      two passes over the rows for all alphas: :mod:`dkrr.linalg.primal`

Factors of alphas that are not the best of any target are removed as soon as that is known, so that at most t + 1 lie on
the disk at once; those that were in the store before, or that another fit has used meanwhile, stay there. The smallest
alpha comes first: where it is too small for a factor, that is known before the others are paid for.

Scores are those of scikit-learn's RidgeCV. Leave-one-out predictions are scored all together: without ``scoring`` by
-mean(w_i e_i^2) over all rows, else by the scorer. Folds are scored one by one, by R^2 unless told otherwise, and their
scores averaged, as GridSearchCV does. A scorer that takes sample weights is given them.

Cost
----
One eigendecomposition (9 n^3 flops at most), then 2 n^2 (t + 1) flops an alpha for leave-one-out, n f^2 for every alpha
and fold of f rows, and an eigendecomposition more for each split whose training rows are not all the others, or that
holds out rows of weight 0; 24 n^2 bytes. For leave-one-out with few alphas 2/3 n^3 flops an alpha and 16 n^2 bytes.
Through tiles 2/3 n^3 flops an alpha and n^2 / 2 numbers more on disk than one fit.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from inspect import signature
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.metrics import check_scoring
from sklearn.model_selection import LeaveOneGroupOut, check_cv

from dkrr.dataset import Dataset, Floats
from dkrr.engine.cluster import find_client
from dkrr.engine.machine import cpu_count, free_memory_bytes
from dkrr.errors import DataError, ParameterError
from dkrr.fit.choices import FitSettings, Problem, SolverChoice, may_be_primal
from dkrr.fit.plan import Decision
from dkrr.kernels import Kernel
from dkrr.linalg.dense import DenseFit, EigenRidge, FactorRidge, eigen_bytes, judge_dense
from dkrr.linalg.operators import weighted
from dkrr.linalg.primal import array_source, leave_one_out_errors, primal_leave_one_out, stored_source
from dkrr.linalg.primal_passes import FeatureRows
from dkrr.linalg.workspace import Workspace
from dkrr.models.estimator import WithRidge, keeps_its_fit
from dkrr.models.model import Model
from dkrr.models.tiled import Training, leave_one_out_rows
from dkrr.models.validation import TARGET_SIZES, check_alpha, check_flag, with_own_integers
from dkrr.tiles import TileMatrix

Rows = NDArray[np.intp]
logger = logging.getLogger("dkrr.selection")

# numbers of one batch of alphas: predictions of all rows and targets
BATCH_NUMBERS = 4_000_000


# rows (f,) that are predicted by a fit of others; None means all the others
Fold = tuple[Rows, Rows | None]


def make_folds(cv: Any, X: Any, y: Any) -> list[Fold]:
    """The folds that ``cv`` means for n rows.

    Parameters
    ----------
    cv
        A number of folds of consecutive rows; a scikit-learn splitter; an iterable of (train, test) row numbers; or an
        array (n,) of labels: the rows of one label are one fold.

    Raises
    ------
    ParameterError
        It is none of these.
    DataError
        A fold is empty, or names rows that do not exist; a label is missing.
    """
    cv = with_own_integers(cv)
    how = "give a number of folds, a splitter, (train, test) pairs, or a label for each row"
    has_labels = hasattr(cv, "shape") and hasattr(cv, "dtype") and np.ndim(cv) == 1
    try:
        if has_labels and np.ma.is_masked(cv):
            raise ValueError("some are masked")
        splits = list(LeaveOneGroupOut().split(X, y, cv) if has_labels else check_cv(cv).split(X, y))
    except (ValueError, TypeError) as error:
        said = str(error).partition("\n")[0]
        if has_labels:
            hint = "give the fold of every row, and two folds at least"
            raise DataError(f"cv has labels that cannot be used: {said}", hint=hint) from error
        raise ParameterError(
            f"cv is {cv!r}: {said}", hint=f"{how}; a splitter by groups is given as list(splitter.split(X, y, groups))"
        ) from error
    if not splits:
        raise DataError("cv has no folds", hint="give at least one pair (train, test)")
    folds = []
    for number, split in enumerate(splits):
        if any(np.ma.is_masked(rows) for rows in split):
            raise DataError(f"fold {number} of cv has masked values", hint="give row numbers alone")
        try:
            train, test = (np.arange(len(X))[np.asarray(rows) if len(rows) else []] for rows in split)
        except IndexError as error:
            hint = f"give row numbers from 0 to {len(X) - 1:,}"
            raise DataError(f"fold {number} of cv is none: {error}", hint=hint) from error
        if not (train.size and test.size):
            raise DataError(
                f"fold {number} has no training or no test rows", hint="every fold needs rows on both sides"
            )
        is_whole = (np.bincount(np.concatenate((train, test)), minlength=len(X)) == 1).all()
        folds.append((test, None if is_whole else train))
    return folds


class _Given(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """A regressor whose rows are their own predictions: what a scorer is called with."""

    def fit(self, X: Any, y: Any = None) -> _Given:
        return self

    def predict(self, X: Any) -> Any:
        return X

    def __sklearn_is_fitted__(self) -> bool:
        return True


def checked_scorer(scoring: Any) -> Any:
    """The scorer of scikit-learn that ``scoring``, a name or a function (estimator, X, y), means; None for None.

    Raises
    ------
    ParameterError
        It is none of these.
    """
    try:
        return None if scoring is None else check_scoring(_Given(), scoring=scoring)
    except (ValueError, TypeError) as exc:
        raise ParameterError(
            f"scoring is {scoring!r}; the name of a scorer, a function (estimator, X, y) or None expected",
            hint="sklearn.metrics.get_scorer_names() lists the names",
        ) from exc


@dataclass(kw_only=True, eq=False)
class AlphaSearch:
    """Scores of a grid of alphas, as held-out predictions come, and the best alpha of each target.

    Parameters
    ----------
    y : (n, t), weight : (n,) or None
    num_alphas
        k.
    scoring
        See :func:`checked_scorer`; None means the negative mean squared error.
    per_target
        A score, and an alpha, for each target.
    stored
        What :attr:`values` keeps.

    Attributes
    ----------
    scores : (k,) or (t, k)
        Of every alpha; -inf of one that nothing was added for.
    values : (n, t, k) or None
        Held-out squared errors times the weight, or predictions; NaN for a row that no fold holds out.
    """

    y: Floats
    weight: Floats | None
    num_alphas: int
    scoring: Any = None
    per_target: bool = False
    stored: Literal["errors", "predictions"] | None = None
    scores: Floats = field(init=False)
    values: Floats | None = field(init=False)

    def __post_init__(self) -> None:
        (n, t), k = self.y.shape, self.num_alphas
        self.per_target, self.scoring = self.per_target and t > 1, checked_scorer(self.scoring)
        self.scores = np.full((t, k) if self.per_target else (k,), -np.inf)
        self.values = None if self.stored is None else np.full((n, t, k), np.nan)

    @property
    def index(self) -> Rows:
        """The first alpha whose score is the largest, for each target (t,)."""
        return np.broadcast_to(np.argmax(self.scores, axis=-1), self.y.shape[1:])

    def add(
        self, batch: slice, predictions: Floats, rows: Any = slice(None), where: str = "", share: float = 1
    ) -> None:
        """Count predictions (f, t, b) of the held-out ``rows`` for a batch of alphas as a ``share`` of their scores.

        Raises
        ------
        DataError
            A score is not a finite number.
        """
        y, weight = self.y[rows], None if self.weight is None else self.weight[rows]
        errors = np.square(y[:, :, None] - predictions)
        errors = errors if weight is None else errors * weight[:, None, None]
        if self.scoring is None:
            scores = -errors.mean(axis=0 if self.per_target else (0, 1))
        elif self.per_target:
            scores = np.stack(
                [self._called(*pair, weight) for pair in zip(y.T, predictions.swapaxes(0, 1), strict=True)]
            )
        else:
            one = 0 if y.shape[1] == 1 else slice(None)
            scores = self._called(y[:, one], predictions[:, one], weight)
        if not np.isfinite(scores).all():
            raise DataError(
                f"the score of {where or 'the leave-one-out predictions'} is {scores[~np.isfinite(scores)].ravel()[0]}",
                hint="R^2 needs at least two rows in a fold; another scoring, or larger folds, may do",
            )
        before = self.scores[..., batch]
        self.scores[..., batch] = np.where(np.isneginf(before), 0.0, before) + scores * share
        if self.values is not None:
            self.values[rows, :, batch] = predictions if self.stored == "predictions" else errors

    def _called(self, y: Floats, predictions: Floats, weight: Floats | None) -> Floats:
        """The scorer for predictions (m, k) or (m, t, k)."""
        parameters = signature(getattr(self.scoring, "_score_func", self.scoring)).parameters.values()
        takes_weights = any(item.name == "sample_weight" or item.kind is item.VAR_KEYWORD for item in parameters)
        options = {"sample_weight": weight} if weight is not None and takes_weights else {}
        columns = np.moveaxis(predictions, -1, 0)
        return np.array([float(self.scoring(_Given(), column, y, **options)) for column in columns])


@dataclass(frozen=True, kw_only=True, eq=False)
class AlphaPath:
    """Rows in memory, their kernel, and what is held out.

    Parameters
    ----------
    kernel
        Resolved; None when ``x`` (n, n) is the Gram matrix.
    x : (n, d)
        As the kernel shall see them (centred for a stationary one).
    y : (n, t), weight : (n,) or None
    fit_intercept
        Whether f has an unpenalised constant.
    folds
        None means every row by itself.
    method
        "eigen", or "cholesky" for a factor an alpha, which takes less time for few of them and has no folds.
    """

    kernel: Kernel | None
    x: Any
    y: Floats
    weight: Floats | None = None
    fit_intercept: bool = False
    folds: list[Fold] | None = None
    method: Literal["eigen", "cholesky"] = "eigen"

    @cached_property
    def system(self) -> EigenRidge | FactorRidge:
        """Of all rows of positive weight."""
        system = self._ridge(self.inside, self.method)
        system.numbers = self.inside
        return system

    @cached_property
    def inside(self) -> Rows:
        """Rows of positive weight; the others are predicted and are never fitted."""
        return np.arange(len(self.y)) if self.weight is None else np.flatnonzero(self.weight > 0)

    def _gram(self, rows: Rows, columns: Rows | None = None) -> Floats:
        """k(x[rows], x[columns]), a new array; symmetric, of the same rows, without ``columns``."""
        other = rows if columns is None else columns
        if self.kernel is None:
            return np.array(self.x[np.ix_(rows, other)], dtype=np.float64, order="C")
        block: Floats = self.kernel.block(
            np.ascontiguousarray(self.x[rows]), np.ascontiguousarray(self.x[other]), same=columns is None
        )
        return block

    def _ridge(self, rows: Rows, method: str = "eigen") -> EigenRidge | FactorRidge:
        """Every alpha of some rows of positive weight."""
        gram, y, root = self._gram(rows), self.y[rows], None if self.weight is None else np.sqrt(self.weight[rows])
        if method == "cholesky":
            return FactorRidge(None, gram, y, root, fit_intercept=self.fit_intercept)
        is_psd = self.kernel is not None and self.kernel.positive_semidefinite
        matrix = weighted(gram, root)
        return EigenRidge(matrix, y, root, fit_intercept=self.fit_intercept, positive_semidefinite=is_psd)

    def search(self, alphas: Floats, search: AlphaSearch) -> None:
        """Add the held-out predictions of every alpha.

        Raises
        ------
        NotPositiveDefiniteError
            For an alpha, K + alpha I is not positive definite.
        DataError
            Nothing is left to train on, or a score is not a finite number.
        """
        if len(self.inside) < 2:
            raise DataError(
                f"n_samples={len(self.inside)} rows of positive weight; at least 2 expected",
                hint="a row is held out, and others must be left to train on",
            )
        folds = self.folds or [(np.arange(len(self.y)), None)]
        size = max(1, BATCH_NUMBERS // self.y.size)
        for number, (test, train) in enumerate(folds):
            where = f"fold {number}" if self.folds else ""
            predict = self._held_out(test, train, where)
            for start in range(0, len(alphas), size):
                batch = slice(start, start + size)
                search.add(batch, predict(alphas[batch]), test, where, 1 / len(folds))

    def _held_out(self, test: Rows, train: Rows | None, where: str) -> Callable[[Floats], Floats]:
        """A function of alphas (k,): predictions (f, t, k) of the rows of a fold by a fit without them; of all rows one
        by one without a fold. Rows of weight 0 have no formula: those of a fold are predicted by a fit of their own."""
        is_inside = np.isin(test, self.inside)
        if self.folds:
            seen = np.setdiff1d(self.inside, test) if train is None else train[np.isin(train, self.inside)]
            if not is_inside.any():
                raise DataError(f"{where} holds out no row of positive weight", hint="change the folds")
            if not len(seen):
                raise DataError(f"{where} leaves no training row of positive weight", hint="change the folds")
            if train is not None or not is_inside.all():
                return partial(self._ridge(seen).predict, self._gram(test, seen))
        outside = None if is_inside.all() else self._gram(test[~is_inside], self.inside)

        def predict(alphas: Floats) -> Floats:
            if isinstance(self.system, EigenRidge) and self.folds:
                residuals = self.system.leave_fold_out(np.searchsorted(self.inside, test), alphas)
            else:
                residuals = self.system.leave_one_out(alphas)
            predictions = np.empty((len(test), self.y.shape[1], len(alphas)))
            predictions[is_inside] = self.y[test[is_inside]][:, :, None] - residuals
            if outside is not None:
                predictions[~is_inside] = self.system.predict(outside, alphas)
            return predictions

        return predict

    def fit(self, alphas: Floats, started: float) -> DenseFit:
        """The fit of all rows with one alpha for each target, with its true residual.

        Raises
        ------
        ResidualError
            See :func:`dkrr.linalg.dense.judge_dense`.
        """
        what = "Eigendecomposition" if self.method == "eigen" else "Cholesky factors"
        u, rhs = np.zeros((2, *self.y.shape))
        u[self.inside], rhs[self.inside] = self.system.solve_each(alphas), self.system.rhs
        root = None if self.weight is None else np.sqrt(self.weight)
        offset = self.system.offset if self.fit_intercept else None
        return judge_dense(
            self.kernel, self.x, root, alphas, rhs, u, offset, solver=self.method, precision="float64", started=started,
            message=f"{what} of {len(self.inside):,} rows in memory",
        )  # fmt: skip


def primal_search(source: FeatureRows, grid: Floats, search: AlphaSearch, *, fit_intercept: bool) -> None:
    """Add the leave-one-out errors of a grid of alphas (k,) in feature space.

    Parameters
    ----------
    source
        Rows, targets and weights as a primal fit reads them.

    Raises
    ------
    DataError
        A row decides its own prediction at every alpha.

    Cost
    ----
    Two passes for mean squared errors; a scorer, or what is stored, needs every residual: three passes for each alpha.
    """
    if search.scoring is None and search.stored is None:
        errors = leave_one_out_errors(source, grid.tolist(), fit_intercept=fit_intercept).T  # (t, k), weighted means
        if np.isinf(errors).all(axis=1).any():
            primal_leave_one_out(source, float(grid.max()), fit_intercept=fit_intercept)  # names the row
        scores = -errors * (1.0 if search.weight is None else float(search.weight.mean()))
        search.scores[...] = scores if search.per_target else scores.mean(axis=0)
        return
    for number, alpha in enumerate(grid.tolist()):
        found = primal_leave_one_out(source, alpha, fit_intercept=fit_intercept)
        search.add(slice(number, number + 1), (search.y - found.residuals)[:, :, None])


# --- the estimator ----------------------------------------------------------------------------------------------------

MAX_EIGEN_ROWS = 12_000

MEMORY_SHARE = 0.8

# An eigendecomposition takes as long as the factors and inverse diagonals of about so many alphas on one core: 8.2 to
# 9.8 measured at n = 3,000, side by side; half of its flops are products of a matrix and a vector.
ALPHAS_A_CORE = 8


@dataclass(frozen=True, kw_only=True)
class PathFit(Training):
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
        decision: Decision,
        workspace: Workspace,
        *,
        given: TileMatrix | None = None,
        source_digest: str = "",
        settings: FitSettings | None = None,
    ) -> Model:
        """The model of the best alpha, from a factor of each or from two passes."""
        n, grid, settings = dataset.num_rows, self.estimator.grid, decision.settings()
        weight = None if dataset.weight is None else dataset.weight.read(0, n)[:, 0]
        search = self.estimator.start_search(dataset.targets.read(0, n), weight)

        def fit(alphas: Any) -> tuple[Model, FitSettings]:
            own, work = replace(settings, alpha=tuple(np.ravel(alphas))), replace(workspace, phases={}, reused={})
            solve = super(PathFit, self)._model
            return solve(dataset, decision, work, given=given, source_digest=source_digest, settings=own), own

        if decision.chosen.solver == "primal":
            with stored_source(dataset, settings.kernel, workspace, fit_intercept=settings.fit_intercept) as source:
                primal_search(source, grid, search, fit_intercept=settings.fit_intercept)
            return fit(self.estimator.take(search))[0]
        kept = dict[int, Model]()
        for number in np.argsort(grid, kind="stable").tolist():
            model, own = fit(grid[number])
            loo = leave_one_out_rows(dataset, own, workspace, model, given=given, source_digest=source_digest)
            search.add(slice(number, number + 1), (search.y - loo.residuals)[:, :, None])
            logger.info("alpha %.3g: score %s", grid[number], search.scores[..., number])
            kept[number] = model
            others = [kept.pop(other) for other in set(kept) - set(search.index.tolist())]
            # two numbers of the grid may be one alpha, which has one factor
            needed = {location for each in kept.values() for location in each.provenance.get("factors", [])}
            for other in others:
                for location in set(other.provenance.get("factors", [])) - needed:
                    if workspace.discard(location):
                        logger.info("removed %s: its alpha is not the best", location)
        chosen = self.estimator.take(search)
        return next(iter(kept.values())) if len(kept) == 1 else fit(chosen)[0]


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

    def _fit_primal(self, fit: Training) -> Self:
        targets = fit.y.reshape(len(fit.y), -1)
        source = array_source(fit.X, targets, fit.kernel.resolve(fit.X.shape[1]), fit.weight)
        search = self.start_search(targets, fit.weight)
        primal_search(source, self.grid, search, fit_intercept=fit.fit_intercept)
        self.take(search)
        return super()._fit_primal(fit)

    def _fit_tiled(self, fit: Training) -> Self:
        if self.cv is not None:
            raise ParameterError(
                "cv through tiles, which have no formula for folds",
                hint=f"leave cv out: leave-one-out is exact; or give at most {MAX_EIGEN_ROWS:,} rows in memory, and no "
                "tile_size, store or solver",
            )
        own = vars(fit) | {"alpha": float(self.grid.min()), "maker": uuid.uuid4().hex, "estimator": self}
        return super()._fit_tiled(PathFit(**own))

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
        """Of this grid, for targets (n, t).

        Raises
        ------
        DataError
            Weights times squared targets, which scores are made of, are too small for float64.
        """
        sizes = np.abs(y).max(axis=0, initial=0.0) * np.sqrt(1.0 if weight is None else weight.max(initial=0.0))
        if ((sizes > 0) & (sizes < TARGET_SIZES[0])).any():
            raise DataError(
                f"the largest target, times the square root of its weight, is at most {sizes.max():.2g}: its square is "
                "too small for float64",
                hint="multiply the weights, and alpha, by one number",
            )
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
