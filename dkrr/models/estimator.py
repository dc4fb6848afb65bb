"""KernelRidge: the scikit-learn face.

Small problems are solved in this process in milliseconds. Larger ones, and any with an explicit ``tile_size`` or
``store``, take the tiled path: rows are written to a store, and tasks run on the Dask client that is found, on a local
cluster that is started for the fit and closed after it, or, for few rows, in this process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Self, TypeVar, cast

import numpy as np
from crc32c import crc32c
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from dkrr.dataset import Dataset, Floats, RowArray, frame_labels, given_names, lazy_rows
from dkrr.engine.machine import single_blas_thread
from dkrr.errors import ConvergenceError, ParameterError, StoreError
from dkrr.fit.choices import Problem, SolverChoice, is_plainly_primal
from dkrr.fit.inputs import TemporaryStore, check_given, find_dataset
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.dense import DenseFit, fit_dense
from dkrr.linalg.leave_one_out import IntervalMethod, LeaveOneOut, check_coverage, check_method, target_scale
from dkrr.linalg.leave_one_out import coverage as share_inside
from dkrr.linalg.primal import fit_primal_arrays, primal_features
from dkrr.linalg.products import ArrayRows
from dkrr.models.model import Model
from dkrr.models.prediction import values_of
from dkrr.models.tiled import Training, ensure_factor, leave_one_out, primal_parts
from dkrr.models.validation import (
    check_alpha,
    check_flag,
    check_nonnegative,
    check_tile_size,
    check_weight,
    column_names,
    compared_targets,
    fit_arrays,
    is_dask_array,
    is_dask_frame,
    is_out_of_core,
    owned,
    rows_to_predict,
)
from dkrr.store.files import at_present, check_place

# Starting a cluster takes about two seconds, as long as one core needs for a factor of this many rows.
MAX_IN_PROCESS_ROWS = 6_000

# A memory map of few rows is read at once up to this size, and a copy of the estimator takes its rows along up to it.
IN_MEMORY_BYTES = 256 * 2**20

# One core forms the sums of a primal fit of rows in memory in about the time that their way to workers takes.
MAX_PRIMAL_FLOPS = 2e11


Fit = TypeVar("Fit", bound=Callable[..., Any])


def keeps_its_fit(fit: Fit) -> Fit:
    """``fit``, after a failure of which an estimator is as it was: the fit that it had before, whole, or none."""

    @wraps(fit)
    def guarded(self: Any, *args: Any, **options: Any) -> Any:
        before = dict(vars(self))
        try:
            return fit(self, *args, **options)
        except BaseException:
            unfinished = vars(self).get("_unfinished")  # belongs to the fit that failed
            before.pop("_unfinished", None)
            vars(self).clear()
            vars(self).update(before if unfinished is None else before | {"_unfinished": unfinished})
            raise

    return cast(Fit, guarded)


@dataclass(kw_only=True, eq=False, repr=False)
class WithModel(BaseEstimator):  # type: ignore[misc]
    """An estimator with a kernel whose fit is a :class:`dkrr.Model`: its tags, predictions, and where it is kept.

    Parameters are the fields of a dataclass: one that several estimators have is declared once.
    """

    kernel: Any = "rbf"
    gamma: Any = None
    degree: float = 3
    coef0: float = 1
    kernel_params: dict[str, Any] | None = None
    fit_intercept: bool = True
    tol: float = 1e-6
    max_iter: int | None = None
    solver_params: dict[str, Any] | None = None
    _model: Model = field(init=False)  # no parameter

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.pairwise = isinstance(self.kernel, str) and self.kernel == "precomputed"
        tags.input_tags.positive_only = isinstance(self.kernel, str) and self.kernel == "chi2"
        return tags

    def _kernel(self, gamma: Any) -> Kernel:
        return make_kernel(
            self.kernel, gamma=gamma, degree=self.degree, coef0=self.coef0, kernel_params=self.kernel_params
        )

    def _predict(self, X: Any) -> Any:
        check_is_fitted(self)
        model = self._model
        if is_dask_array(X) or is_dask_frame(X):
            return model.predict(X)
        values = values_of(model, self._rows(X))
        return values[:, 0] if model.y_is_1d else values

    def _rows(self, X: Any) -> Any:
        """Rows in memory as they are checked; others, which are read in blocks, as they are."""
        return X if is_out_of_core(X, 0, 0) and not isinstance(X, np.memmap) else rows_to_predict(self, X, self._model)

    def save(self, path: Any, *, overwrite: bool = False) -> None:
        """Write the fitted model to ``path``; :func:`dkrr.load_model` reads it."""
        check_is_fitted(self)
        self._model.save(path, overwrite=overwrite)


class WithTargets(MultiOutputMixin, RegressorMixin, WithModel):  # type: ignore[misc]
    """A regressor, whose targets are compared with its predictions."""

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R2 of the predictions for rows X (m, d) and targets y (m,) or (m, t), the mean over the targets.

        The columns of a frame y are those that are called like the targets of the fit, where that had names.

        Raises
        ------
        DataError
            y has another shape than the predictions, or lacks a name; a target or weight that is not a finite number.
        """
        from sklearn.metrics import r2_score

        predicted = np.asarray(self.predict(X))
        truth, weight = compared_targets(y, predicted.shape, self._model), check_weight(sample_weight, predicted)
        return float(r2_score(truth, predicted, sample_weight=weight))


@dataclass(kw_only=True, eq=False, repr=False)
class WithRidge(WithTargets):
    """What the estimators of the square loss share: where a fit runs, its attributes, and all that is asked of it."""

    kernel: Any = "linear"
    fit_intercept: bool = False
    solver: str = "auto"
    precision: str = "auto"
    tile_size: Any = "auto"
    store: Any = None
    tol: float = 1e-8

    # no parameters: the ridge, or one per target, and what a fit leaves
    alpha: Any = field(init=False)
    _training: Training = field(init=False)

    @keeps_its_fit
    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit on rows X (n, d) and targets y (n,) or (n, t).

        Parameters
        ----------
        X
            NumPy array, memory map, pandas, scipy sparse (small n), dask array or frame, Zarr array, path to .npy or a
            data set, or :class:`dkrr.Dataset`; the Gram matrix (n, n) for kernel="precomputed".
        y
            Targets; None takes those of a data set.
        sample_weight : (n,), optional
            At least 0.

        After an error the estimator is what it was before: a fit that it had stays whole.

        Raises
        ------
        ParameterError, DataError
            A parameter or a row cannot be used.
        NotPositiveDefiniteError
            K + alpha I is not positive definite; names the row and a suggested alpha.
        ConvergenceError
            An iterative solver did not reach ``tol``, and ``allow_unconverged`` is not set.
        StorageFullError, ClusterError
            The disk is too small for the factor; workers cannot be used, or have too little memory for the tiles.
        """
        choice = SolverChoice.from_estimator(
            self.solver_params, solver=self.solver, precision=self.precision, tol=self.tol, max_iter=self.max_iter
        )
        tile_size = check_tile_size(self.tile_size)
        check_alpha(self.alpha)
        check_flag("fit_intercept", self.fit_intercept)
        if self.store is not None:
            check_place("store", self.store)
        kernel, warm = self._kernel(self.gamma), check_flag("warm_start", getattr(self, "warm_start", False))
        iterates = choice.solver in ("cg", "nystrom") or choice.precision == "mixed"
        is_tiled = self.store is not None or tile_size is not None or iterates
        # a small memory map is read at once, unless the tiled path was asked for
        in_memory = not is_out_of_core(X, 0 if is_tiled else MAX_IN_PROCESS_ROWS, IN_MEMORY_BYTES)
        weight, checksum, fit = sample_weight, None, self._fit_tiled
        columns: dict[str, Any] = {}
        if in_memory:
            given, columns = X, column_names(X, y)
            X, y = fit_arrays(self, np.array(X) if isinstance(X, np.memmap) else X, y)
            weight = check_weight(sample_weight, X)
            check_alpha(self.alpha, 1 if y.ndim == 1 else y.shape[1])
            if self.__sklearn_tags__().input_tags.positive_only:
                check_nonnegative(X, kernel.name)
            if not is_tiled and self._is_for_features(kernel, choice, X, y):
                fit = self._fit_primal
            elif not is_tiled and self._is_for_memory(len(X)):
                fit = self._fit_dense
            # what the fit says later rests on these rows, unless it is primal
            if fit == self._fit_primal and X.nbytes > IN_MEMORY_BYTES:
                checksum = crc32c(X)
            else:
                X = owned(X, given)
        else:
            self.__dict__.pop("feature_names_in_", None)  # of an earlier fit on named columns
            X, y, weight = (np.array(part) if type(part) is np.ndarray else part for part in (X, y, weight))
            X = find_dataset(X)
            for name, part, label in (("feature_names", X, "X"), ("target_names", y, "y")):
                if is_dask_frame(part):
                    columns[name] = given_names(part, label)
            columns = {name: names for name, names in columns.items() if names}
            if "feature_names" in columns and all(isinstance(label, str) for label in frame_labels(X) or ()):
                self.feature_names_in_ = np.array(columns["feature_names"], dtype=object)
            X, y = (part.to_dask_array(lengths=True) if is_dask_frame(part) else part for part in (X, y))
        training = Training(
            X=X,
            y=y,
            weight=weight,
            kernel=kernel,
            alpha=self.alpha,
            choice=choice,
            tile_size=tile_size,
            max_in_process_rows=MAX_IN_PROCESS_ROWS,
            columns=columns,
            start=getattr(self, "dual_coef_", None) if warm else None,
            fit_intercept=bool(self.fit_intercept),
            tiled=fit == self._fit_tiled,
            checksum=checksum,
            store=None if self.store is None else at_present(self.store),
        )
        self._training = replace(training, start=None)
        return fit(training)

    def _is_for_memory(self, num_rows: int) -> bool:
        """Whether rows in memory are solved in this process when nothing asks for tiles."""
        return num_rows <= MAX_IN_PROCESS_ROWS

    def _is_for_features(self, kernel: Kernel, choice: SolverChoice, X: Any, y: Any) -> bool:
        """Whether rows in memory are solved in this process by their explicit features."""
        (n, d), t = X.shape, 1 if y.ndim == 1 else y.shape[1]
        is_primal = choice.solver == "primal"
        if choice.solver == "auto" and not self._is_for_memory(n) and kernel.name != "precomputed":
            alpha = tuple(check_alpha(self.alpha, t).tolist())
            kernel = kernel.resolve(d)
            problem = Problem(num_rows=n, num_features=d, num_targets=t, kernel=kernel, alpha=alpha, primal=True)
            is_primal = is_plainly_primal(problem, choice)
        return is_primal and bool(n * primal_features(kernel, d, n).num_features ** 2 <= MAX_PRIMAL_FLOPS)

    def _fit_primal(self, fit: Training) -> Self:
        X, y, weight = fit.X, fit.y, fit.weight
        alpha = check_alpha(self.alpha, y[0].size)
        found = fit_primal_arrays(
            X, y.reshape(len(y), -1), fit.kernel, alpha, weight=weight, fit_intercept=fit.fit_intercept
        )
        model = Model(
            **primal_parts(found),
            y_is_1d=y.ndim == 1,
            **fit.columns,
            provenance={
                "alpha": alpha.tolist(),
                "solver": "primal",
                "num_explicit_features": found.features.num_features,
                "num_training_rows": len(X),
                **({"fit_intercept": True} if fit.fit_intercept else {}),
            },
        )
        self._finish(model, X)
        self.X_fit_ = X
        if (alpha > 0).all():
            with single_blas_thread():
                residuals = y - model.predict(X)
            scale = 1.0 if weight is None else weight if y.ndim == 1 else weight[:, None]
            self.dual_coef_ = scale * residuals / (alpha if y.ndim > 1 else alpha[0])
        return self

    def _solve_in_memory(
        self, kernel: Kernel | None, X: Any, center: Any, y: Floats, weight: Any, precision: str
    ) -> DenseFit:
        alpha, rows = check_alpha(self.alpha, y.shape[1]), X if center is None else X - center
        return fit_dense(kernel, rows, y, alpha, weight, precision, fit_intercept=bool(self.fit_intercept))

    def _fit_dense(self, fit: Training) -> Self:
        X, y, weight, targets, precision = fit.X, fit.y, fit.weight, fit.y.reshape(len(fit.y), -1), fit.choice.precision
        kernel = None if fit.is_given else fit.kernel.resolve(X.shape[1])
        if kernel is None:
            check_given(X)
        with np.errstate(over="ignore", invalid="ignore"):  # the kernel names what it is too large for
            center = None if kernel is None else kernel.center(X.mean(axis=0), X.std(axis=0))
        with single_blas_thread():
            found = self._solve_in_memory(
                kernel, X, center, targets, weight, "float64" if precision == "auto" else precision
            )
        weights, coefficients = None if weight is None else ArrayRows(weight[:, None]), ArrayRows(found.dual_coef)
        model = Model(
            kernel=kernel,
            x_fit=None if kernel is None else ArrayRows(X),
            dual_coef=coefficients,
            solution=found.solution,
            center=center,
            intercept=found.intercept,
            y_is_1d=y.ndim == 1,
            **fit.columns,
            provenance={"alpha": check_alpha(self.alpha, targets.shape[1]).tolist(), "num_training_rows": len(X)},
            sample_weight=weights,
            sigma2=target_scale(ArrayRows(targets), coefficients, weights, intercept=fit.fit_intercept),
        )
        return self._finish(model, X)

    def _fit_tiled(self, fit: Training) -> Self:
        X, holder, store = fit.X, None, fit.store
        if store is None:
            holder = self.__dict__.pop("_unfinished", None) or TemporaryStore(fit.store_bytes())
            store = holder.path
        try:
            model, on_disk = fit.solve(store)
        except BaseException as exc:
            if holder is not None and isinstance(exc, ConvergenceError) and not exc.stagnated:
                self._unfinished = holder  # a fit with a larger max_iter goes on from here
            elif holder is not None:
                holder.close()
            raise
        rows, is_theirs = X, isinstance(X, Dataset) and on_disk is not None and on_disk.X == X.X
        # predictions of features need no rows, those of centres these alone; else rows are kept that the caller has not
        if model.features is not None:
            on_disk = rows = None
        elif model.provenance["solver"] == "nystrom" and model.x_fit is not None:
            on_disk, rows = None, model.x_fit.read(0, model.num_rows)
        elif isinstance(X, np.ndarray) and not isinstance(X, np.memmap):
            on_disk = None
            model = model if fit.is_given else replace(model, x_fit=ArrayRows(X))
        if holder is not None:
            for name in ("store", "factors"):  # both end here
                model.provenance.pop(name, None)
            holder.keep("rows")
            if on_disk is None or is_theirs:
                holder.close()
                holder = None
        if on_disk is not None:
            check = on_disk.check_still_there if holder is None else holder.check
            kept = RowArray(on_disk.X.array, on_disk.num_rows, check)
            model, rows = replace(model, x_fit=kept), lazy_rows(kept)
        self.n_features_in_ = model.num_features
        return self._finish(model, rows, holder)

    def _finish(self, model: Model, rows: Any, holder: TemporaryStore | None = None) -> Self:
        if model.names and "feature_names" not in self._training.columns:  # else it has them
            self.feature_names_in_ = np.array(model.names, dtype=object)
        coefficients = model.dual_coef.read(0, model.num_rows)
        self._model, self._holder = model, holder
        for name in ("X_fit_", "dual_coef_", "coef_", "_unfinished"):
            self.__dict__.pop(name, None)  # of an earlier fit
        self.solution_ = model.solution
        self.n_iter_ = max(1, model.solution.num_iterations)
        primal = coefficients if model.features is not None and model.features.is_linear else None
        if model.features is None:
            self.X_fit_ = rows
            self.dual_coef_ = coefficients[:, 0] if model.y_is_1d else coefficients
            if model.kernel is not None and model.kernel.name == "linear" and isinstance(rows, np.ndarray):
                primal = rows.T @ coefficients
        if primal is not None:
            self.coef_ = primal[:, 0] if model.y_is_1d else primal.T
        intercept: Any = 0.0 if model.intercept is None else model.intercept
        self.intercept_ = float(intercept[0]) if model.intercept is not None and model.y_is_1d else intercept
        return self

    def predict(self, X: Any, return_std: bool = False, *, noise: bool = False, sigma2: Any = None) -> Any:
        """Predictions (m,) or (m, t) for rows X (m, d); lazy for a dask array.

        Parameters
        ----------
        X
            What :meth:`fit` takes; k(Z, X_fit_) (m, n) for kernel="precomputed". Where fit and X both have names, names
            decide: in a pandas frame they must be the same in the same order, as everywhere in scikit-learn, where all
            are text; in others, files, data sets and dask frames the order does not matter, and other columns are left
            aside. The numbers 0, 1, ... that frames get by themselves are no names.
        return_std
            Return (predictions, standard deviations), those of the Gaussian process f ~ N(0, sigma2 k) with noise
            sigma2 alpha / w_i: see :mod:`dkrr.linalg.leave_one_out`.
        noise
            Standard deviations of new observations of weight 1, sigma2 alpha included, and not of f.
        sigma2
            None: y^T dual_coef / n per target, which maximises the likelihood (n - 1 with an intercept). A number fixes
            it; 1.0 gives what scikit-learn's ``GaussianProcessRegressor(optimizer=None)`` gives.

        Raises
        ------
        DataError
            Another number of features than in the fit, a name that is missing, or a value that is not a finite number.
        ParameterError, StoreError
            Standard deviations need a float64 Cholesky factor. Up to 6,000 rows one is made in memory when it is first
            asked for, and kept; more need a fit by cholesky in float64 with ``store=``, which is kept.

        Cost
        ----
        m n kernel entries and 2 m n t flops. Memory for the predictions, one block of 4,096 rows, and one strip; from
        4e9 entries on the blocks are predicted by the workers of the client that is found or of a local cluster.
        Standard deviations: n^2 m flops more for each distinct alpha, on workers from 4e11 flops on.
        """
        check_flag("noise", noise)
        if not check_flag("return_std", return_std):
            return self._predict(X)
        check_is_fitted(self)
        deviations = self._model.deviations(self._variance(X), noise=noise, sigma2=sigma2)
        return self._predict(X), deviations

    def predict_interval(self, X: Any, coverage: float = 0.9, method: IntervalMethod = "jackknife") -> tuple[Any, Any]:
        """Ends (lower, upper), each (m,) or (m, t), of intervals that shall hold a new y with probability ``coverage``.

        Parameters
        ----------
        X
            As for :meth:`predict`, no dask array unless ``method`` is "jackknife".
        method
            "jackknife": f(z) -+ the ceil((n + 1) coverage)-th smallest absolute leave-one-out residual, the coverage
            rounded up to 0.001. "normalised": the same of residuals over their standard deviations, times that of the
            new observation: wider where there are few rows. "gaussian": the quantile of the Gaussian process, which no
            residual has been compared with.
            What each may promise: :mod:`dkrr.linalg.leave_one_out`.

        Raises
        ------
        ParameterError
            Too few rows for this coverage; what :meth:`leave_one_out` and :meth:`predict` raise.

        Cost
        ----
        :meth:`leave_one_out` once, whose quantiles stay with the estimator and are saved with it; then that of
        :meth:`predict`, with standard deviations unless ``method`` is "jackknife".
        """
        check_is_fitted(self)
        check_method(method)
        check_coverage(coverage)
        if method != "gaussian" and self._model.quantiles is None:
            self._model = self._model.with_quantiles(self.leave_one_out())
        variance = None if method == "jackknife" else self._variance(X)
        return self._model.interval(self._predict(X), coverage, method, variance)

    def interval_coverage(
        self, X: Any, y: Any, coverage: float = 0.9, method: IntervalMethod = "jackknife"
    ) -> float | Any:
        """The share of rows (X, y) whose y is in its interval: a number, or (t,) for several targets.

        Raises
        ------
        DataError
            y is not finite, or has another shape than the predictions of X.
        """
        lower, upper = (np.asarray(ends) for ends in self.predict_interval(X, coverage, method))
        return share_inside(lower, upper, compared_targets(y, lower.shape, self._model))

    def _variance(self, X: Any) -> Any:
        if is_dask_array(X):
            raise ParameterError(
                "standard deviations of a dask array", hint="give a path or a data set, which is read in blocks"
            )
        ensure_factor(self._model, self._training)
        return values_of(self._model, self._rows(X), "variance")

    def leave_one_out(self) -> LeaveOneOut:
        """What the fit would have said of each training row, had it not seen that row; nothing is fitted n times.

        Residuals (n, t), their weighted mean square, degrees of freedom and generalised cross validation per target:
        see :class:`dkrr.linalg.leave_one_out.LeaveOneOut`. With weights, with an intercept, for every solver;
        the centres of "nystrom" stay centres.

        Raises
        ------
        DataError
            A row decides its own prediction, so that nothing can be said of a fit without it.
        ConvergenceError
            The fit's own residual is not small beside those of the rows that are left out.
        ClusterError, StorageFullError
            A float64 factor, which is needed after cg, fits no worker, or not the disk.

        Cost
        ----
        n^3 / 3 flops for each distinct alpha, as much as the factor, and that again where the fit left no float64
        factor: in memory, after cg or "mixed" (unless ``precision`` is "float32", whose factor will do), or without
        ``store=``. For nystrom 4 n m^2 flops. The result of a stored factor is stored beside it.
        """
        check_is_fitted(self)
        return leave_one_out(self._model, self._training)

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes along the rows that are in a temporary store, for the store ends with this estimator."""
        state: dict[str, Any] = dict(super().__getstate__())
        state.pop("_unfinished", None)
        if state.get("_holder") is None:
            return state
        model: Model = state["_model"]
        num_bytes = 8 * model.num_rows * model.num_features
        if num_bytes > IN_MEMORY_BYTES:
            raise StoreError(
                f"this estimator's {num_bytes:,} bytes of training rows are in a temporary store and cannot be copied",
                hint="write it with save(path), or fit with store=",
            )
        rows = model.x_fit.read(0, model.num_rows) if model.x_fit is not None else None
        state["X_fit_"] = rows
        state["_model"] = replace(model, x_fit=None if rows is None else ArrayRows(rows))
        state["_holder"] = None
        return state


@dataclass(eq=False, repr=False)
class KernelRidge(WithRidge):
    """Exact kernel ridge regression, out of core: (K + alpha I) dual_coef = y.

    Minimises sum_i w_i (y_i - f(x_i))^2 + alpha |f|^2 over the reproducing kernel Hilbert space of the kernel;
    f(z) = sum_i dual_coef_i k(x_i, z).

    Parameters
    ----------
    alpha : float or array of (t,), default 1.0
        The ridge, at least 0, never multiplied by n; one per target costs one factor per distinct value.
    kernel : str, callable or Kernel, default "linear"
        linear, poly, rbf, laplacian (L1), matern, cosine, sigmoid, chi2, precomputed; a scikit-learn
        Gaussian-process kernel; a function of two blocks of rows or of two rows; sums and products of kernels.
    gamma, degree, coef0
        As in scikit-learn; gamma=None means 1 / d.
    kernel_params : dict, optional
        Further parameters, e.g. ``{"nu": 1.5, "length_scale": 0.75}`` for matern.
    fit_intercept : bool, default False
        Add a constant b to f that alpha does not shrink: sum_i w_i (y_i - f(x_i) - b)^2 + alpha |f|^2 is minimised.
    solver : {"auto", "cholesky", "cg", "nystrom", "primal"}
        "auto" takes the fastest exact way that fits, and the Cholesky factor in memory for few rows. "primal" solves
        for coefficients of explicit features: kernel "linear", or "poly" of whole degree with coef0 >= 0, at most
        10,000 features; "auto" becomes it for few features, where there are more than 6,000 rows, or a ``store`` or
        ``tile_size`` is given. "nystrom" is an approximation with ``num_centers`` rows as centres; it is never what
        "auto" becomes.
    precision : {"auto", "float64", "mixed", "float32"}
        "auto" and "mixed" (float32 inside) give the float64 answer.
    tile_size : int or "auto"
        Edge b of a tile; given, it selects the tiled path at any n.
    store : path or URL, optional
        Root of Gram matrices and factors, shared by fits, kept. None: a temporary folder below Dask's
        ``temporary-directory``, removed with the estimator.
    tol, max_iter
        For iterative solvers: the relative residual to reach, and the most iterations (None: 1,000).
    solver_params : dict, optional
        ``preconditioner`` ("rpcholesky", "nystrom", "factor", "none"), ``rank``, ``seed`` and ``allow_unconverged`` for
        cg; ``num_centers``, ``centers`` ("uniform", "rpcholesky") for nystrom.
    warm_start : bool, default False
        Let cg begin from the ``dual_coef_`` of the last fit, also when rows were appended since.

    Attributes
    ----------
    dual_coef_ : (n,) or (n, t)
        After a primal fit w_i (y_i - f(x_i)) / alpha, for rows in memory and alpha > 0.
    coef_ : (d,) or (t, d)
        f(z) = z.coef_ + intercept_; for the linear kernel, rows in memory or a primal fit.
    intercept_ : float or (t,)
        0.0 without ``fit_intercept``.
    X_fit_ : (n, d)
        The training rows; for rows that were read from disk a lazy dask array. The matrix for kernel="precomputed", the
        centres for nystrom, whose ``dual_coef_`` has a row for each of them. None that a primal fit read from disk.
    n_features_in_ : int
    feature_names_in_ : (d,)
        Names of the columns, of rows that had names: a frame, a data set, a file with a header.
    solution_ : Solution
        Relative residual and backward error per target, seconds per phase.
    n_iter_ : int
        Iterations of the solver; a direct solve counts as one.

    Notes
    -----
    Cost: n^2 / 2 kernel entries, n^3 / 3 flops, and on the tiled path n^2 / 2 elements on disk.

    References
    ----------
    Saunders, Gammerman and Vovk, Ridge regression learning algorithm in dual variables, ICML 1998.
    """

    alpha: Any = 1.0
    warm_start: bool = field(default=False, kw_only=True)
