"""KernelRidge: the scikit-learn face.

Small problems are solved in this process in milliseconds. Larger ones, and any with an explicit ``tile_size`` or
``store``, take the tiled path: rows are written to a store, and tasks run on the Dask client that is found, on a local
cluster that is started for the fit and closed after it, or, for few rows, in this process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

from dkrr.bulk import is_worth_a_cluster, predict_on_workers, predict_table
from dkrr.dataset import Dataset
from dkrr.errors import StoreError
from dkrr.given import check_given
from dkrr.kernels import Kernel, make_kernel
from dkrr.lazy import HeldRows, lazy_rows
from dkrr.linalg.dense import solve_dense
from dkrr.linalg.predict import ArrayRows
from dkrr.model import Model
from dkrr.planning.choices import SolverChoice
from dkrr.resources import find_dataset
from dkrr.temporary import TemporaryStore
from dkrr.threads import single_blas_thread
from dkrr.tiled import TiledFit
from dkrr.validation import (
    check_alpha,
    check_nonnegative,
    check_tile_size,
    check_weight,
    fit_arrays,
    is_dask_array,
    is_out_of_core,
    rows_to_predict,
)

__all__ = ["KernelRidge"]

# Starting a cluster takes about two seconds, as long as one core needs for a factor of this many rows.
MAX_IN_PROCESS_ROWS = 6_000
# A memory map of few rows is read at once up to this size, and a copy of the estimator takes its rows along up to it.
IN_MEMORY_BYTES = 256 * 2**20


class KernelRidge(MultiOutputMixin, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Exact kernel ridge regression, out of core: (K + alpha I) dual_coef = y.

    Minimises sum_i w_i (y_i - f(x_i))^2 + alpha |f|^2 over the reproducing kernel Hilbert space of the kernel;
    f(z) = sum_i dual_coef_i k(x_i, z).

    Parameters
    ----------
    alpha : float or array of (t,), default 1.0
        The ridge, at least 0, never multiplied by n; one per target costs one factor per distinct value.
    kernel : str, callable or Kernel, default "linear"
        linear, poly, rbf, laplacian (L1), matern, cosine, sigmoid, chi2, additive_chi2, precomputed; a scikit-learn
        Gaussian-process kernel; a function of two blocks of rows or of two rows; sums and products of kernels.
    gamma, degree, coef0
        As in scikit-learn; gamma=None means 1 / d.
    kernel_params : dict, optional
        Further parameters, e.g. ``{"nu": 1.5, "length_scale": 0.75}`` for matern.
    solver : {"auto", "cholesky", "cg", "nystrom"}
        "auto" takes the fastest exact way that fits, and the Cholesky factor in memory for few rows. "nystrom" is an
        approximation with ``num_centers`` rows as centres; it is never what "auto" becomes.
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
        ``preconditioner`` ("rpcholesky", "nystrom", "none"), ``rank``, ``seed``, ``allow_unconverged`` for cg;
        ``num_centers``, ``centers`` ("uniform", "rpcholesky") for nystrom.
    warm_start : bool, default False
        Let cg begin from the ``dual_coef_`` of the last fit, also when rows were appended since.

    Attributes
    ----------
    dual_coef_ : (n,) or (n, t)
    X_fit_ : (n, d)
        The training rows; for rows that were read from disk a lazy dask array. The matrix for kernel="precomputed", the
        centres for nystrom, whose ``dual_coef_`` has a row for each of them.
    n_features_in_ : int
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

    def __init__(
        self,
        alpha: Any = 1.0,
        *,
        kernel: Any = "linear",
        gamma: float | None = None,
        degree: float = 3,
        coef0: float = 1,
        kernel_params: dict[str, Any] | None = None,
        solver: str = "auto",
        precision: str = "auto",
        tile_size: Any = "auto",
        store: Any = None,
        tol: float = 1e-8,
        max_iter: int | None = None,
        solver_params: dict[str, Any] | None = None,
        warm_start: bool = False,
    ) -> None:
        self.alpha = alpha
        self.kernel = kernel
        self.gamma = gamma
        self.degree = degree
        self.coef0 = coef0
        self.kernel_params = kernel_params
        self.solver = solver
        self.precision = precision
        self.tile_size = tile_size
        self.store = store
        self.tol = tol
        self.max_iter = max_iter
        self.solver_params = solver_params
        self.warm_start = warm_start

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.pairwise = isinstance(self.kernel, str) and self.kernel == "precomputed"
        tags.input_tags.positive_only = isinstance(self.kernel, str) and self.kernel in ("chi2", "additive_chi2")
        return tags

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> KernelRidge:
        """Fit on rows X (n, d) and targets y (n,) or (n, t).

        Parameters
        ----------
        X
            NumPy array, memory map, pandas, scipy sparse (small n), dask array, Zarr array, path to .npy or a data
            set, or :class:`dkrr.Dataset`; the Gram matrix (n, n) for kernel="precomputed".
        y
            Targets; None takes those of a data set.
        sample_weight : (n,), optional
            At least 0.

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
        kernel = make_kernel(
            self.kernel,
            gamma=self.gamma,
            degree=self.degree,
            coef0=self.coef0,
            kernel_params=self.kernel_params,
        )
        start = getattr(self, "dual_coef_", None) if self.warm_start else None
        is_tiled = self.store is not None or tile_size is not None or choice.is_iterative
        # a small memory map is read at once, unless the tiled path was asked for
        in_memory = not is_out_of_core(X, 0 if is_tiled else MAX_IN_PROCESS_ROWS, IN_MEMORY_BYTES)
        weight, names = sample_weight, None
        if in_memory:
            X, y = fit_arrays(self, np.array(X) if isinstance(X, np.memmap) else X, y)
            weight = check_weight(sample_weight, X)
            check_alpha(self.alpha, 1 if y.ndim == 1 else y.shape[1])
            if self.__sklearn_tags__().input_tags.positive_only:
                check_nonnegative(X, kernel.name)
            names = list(getattr(self, "feature_names_in_", []))
            if not is_tiled and len(X) <= MAX_IN_PROCESS_ROWS:
                precision = "float64" if choice.precision == "auto" else choice.precision
                return self._fit_dense(X, y, weight, kernel, precision, names)
        else:
            self.__dict__.pop("feature_names_in_", None)  # of an earlier fit on named columns
        tiled = TiledFit(
            kernel=kernel,
            alpha=self.alpha,
            choice=choice,
            tile_size=tile_size,
            max_in_process_rows=MAX_IN_PROCESS_ROWS,
            feature_names=names,
            start=start,
        )
        return self._fit_tiled(tiled, find_dataset(X), y, weight, in_memory)

    def _fit_dense(self, X: Any, y: Any, weight: Any, kernel: Kernel, precision: str, names: list[str]) -> KernelRidge:
        targets = y.reshape(len(y), -1)
        alpha = check_alpha(self.alpha, targets.shape[1])
        resolved = None if kernel.name == "precomputed" else kernel.resolve(X.shape[1])
        if resolved is None:
            check_given(X)
        center = X.mean(axis=0) if resolved is not None and resolved.stationary else None
        rows = X if center is None else X - center
        with single_blas_thread():
            coefficients, solution = solve_dense(resolved, rows, targets, alpha, weight, precision)
        model = Model(
            kernel=resolved,
            x_fit=None if resolved is None else ArrayRows(X),
            dual_coef=ArrayRows(coefficients),
            solution=solution,
            center=center,
            y_is_1d=y.ndim == 1,
            feature_names=names,
            provenance={"alpha": alpha.tolist()},
        )
        return self._finish(model, X)

    def _fit_tiled(self, tiled: TiledFit, X: Any, y: Any, weight: Any, in_memory: bool) -> KernelRidge:
        holder = TemporaryStore(tiled.store_bytes(X, y)) if self.store is None else None
        try:
            model, on_disk = tiled.solve(X, y, weight, str(self.store) if holder is None else holder.path)
        except BaseException:
            if holder is not None:
                holder.close()
            raise
        rows = X
        if tiled.choice.solver == "nystrom":  # all that predictions need is in memory
            if holder is not None:
                holder.close()
            self.n_features_in_ = model.num_features
            assert model.x_fit is not None  # noqa: S101  (narrows the type)
            return self._finish(model, model.x_fit.read(0, model.num_rows))
        if holder is not None:
            # predictions need the rows and no tiles, and these rows only where the caller does not have them
            holder.keep("rows")
            if in_memory or on_disk is None or (isinstance(X, Dataset) and on_disk == X.X):
                holder.close()
                holder = None
        if in_memory and not tiled.is_given:
            model = replace(model, x_fit=ArrayRows(X))
        elif on_disk is not None:
            kept = on_disk if holder is None else HeldRows(on_disk, holder)
            model, rows = replace(model, x_fit=kept), lazy_rows(kept)
        self.n_features_in_ = model.num_features
        return self._finish(model, rows, holder)

    def _finish(self, model: Model, rows: Any, holder: TemporaryStore | None = None) -> KernelRidge:
        coefficients = model.dual_coef.read(0, model.num_rows)
        self._model, self._holder = model, holder
        self.X_fit_ = rows
        self.solution_ = model.solution
        self.n_iter_ = max(1, model.solution.num_iterations)
        self.dual_coef_ = coefficients[:, 0] if model.y_is_1d else coefficients
        return self

    def predict(self, X: Any) -> Any:
        """Predictions (m,) or (m, t) for rows X (m, d); lazy for a dask array.

        Parameters
        ----------
        X
            What :meth:`fit` takes; k(Z, X_fit_) (m, n) for kernel="precomputed".

        Raises
        ------
        DataError
            Another number of features than in the fit, or a value that is not a finite number.

        Cost
        ----
        m n kernel entries and 2 m n t flops. Memory for the predictions, one block of 4,096 rows, and one strip; from
        4e9 entries on the blocks are predicted by the workers of the client that is found or of a local cluster.
        """
        check_is_fitted(self)
        if is_dask_array(X):
            return self._model.predict(X)
        if is_out_of_core(X, 0, 0) and not isinstance(X, np.memmap):
            return predict_table(self._model, find_dataset(X))
        X = rows_to_predict(self, X)
        if is_worth_a_cluster(self._model, len(X)):
            return predict_on_workers(self._model, X, len(X))
        with single_blas_thread():
            return self._model.predict(X)

    def save(self, path: Any, *, overwrite: bool = False) -> None:
        """Write the fitted model to ``path``; :func:`dkrr.load_model` reads it."""
        check_is_fitted(self)
        self._model.save(path, overwrite=overwrite)

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes along the rows that are in a temporary store, for the store ends with this estimator."""
        state: dict[str, Any] = dict(super().__getstate__())
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
