"""KernelRidge: the scikit-learn face.

Small problems are solved in this process in milliseconds. Larger ones, and any with an explicit ``tile_size`` or
``store``, take the tiled path: rows are written to a store, and tasks run on the Dask client that is found, or on a
local cluster that is started for the fit and closed after it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from dkrr.chunks import place
from dkrr.dataset import Dataset, ingest, open_dataset
from dkrr.engine.session import blas_of, executor_for, memory_limit_of
from dkrr.errors import DataError, ParameterError
from dkrr.fitting import FitSettings, choose_gram, choose_tile_size, fit_rows
from dkrr.given import store_given_matrix
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.dense import solve_dense
from dkrr.linalg.direct import Workspace
from dkrr.linalg.predict import ArrayRows
from dkrr.model import Model
from dkrr.threads import single_blas_thread

__all__ = ["KernelRidge"]

# Starting a cluster takes about two seconds, as long as one core needs for a factor of this many rows.
MAX_IN_PROCESS_ROWS = 6_000
MAX_SPARSE_ENTRIES = 20_000_000


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
    solver : {"auto", "cholesky"}
    precision : {"auto", "float64", "float32"}
        "auto" is float64.
    tile_size : int or "auto"
        Edge b of a tile; given, it selects the tiled path at any n.
    store : path or URL, optional
        Root of Gram matrices and factors, shared by fits, kept. None: a temporary folder below Dask's
        ``temporary-directory``, removed with the estimator.
    tol, max_iter
        For iterative solvers.

    Attributes
    ----------
    dual_coef_ : (n,) or (n, t)
    X_fit_ : (n, d)
        The training rows; for rows that were read from disk a lazy dask array.
    n_features_in_ : int
    solution_ : Solution
        Relative residual and backward error per target, seconds per phase.

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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.pairwise = self.kernel == "precomputed"
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
        """
        precision = self._precision()
        kernel = make_kernel(
            self.kernel,
            gamma=self.gamma,
            degree=self.degree,
            coef0=self.coef0,
            kernel_params=self.kernel_params,
        )
        if self._is_out_of_core(X):
            return self._fit_tiled(X, y, sample_weight, kernel, precision)
        X, y = validate_data(
            self, X, y, accept_sparse=("csr", "csc"), dtype=np.float64, order="C", multi_output=True, y_numeric=True
        )
        X = _dense(X)
        weight = self._weight(sample_weight, X)
        if self.tile_size != "auto" or self.store is not None or len(X) > MAX_IN_PROCESS_ROWS:
            return self._fit_tiled(X, y, weight, kernel, precision)
        y_is_1d = y.ndim == 1
        targets = np.ascontiguousarray(y.reshape(len(y), -1), dtype=np.float64)
        alpha = self._alphas(targets.shape[1])
        resolved = _resolved(kernel, X.shape[1])
        if resolved is None:
            _require_square(X.shape)
        center = X.mean(axis=0) if resolved is not None and resolved.stationary else None
        rows = X if center is None else X - center
        with single_blas_thread():
            coefficients, solution = solve_dense(resolved, rows, targets, alpha, weight, precision)
        self.X_fit_ = X
        self.solution_ = solution
        self.dual_coef_ = coefficients[:, 0] if y_is_1d else coefficients
        self._model = Model(
            kernel=resolved,
            x_fit=None if resolved is None else ArrayRows(X),
            dual_coef=ArrayRows(coefficients),
            solution=solution,
            center=center,
            y_is_1d=y_is_1d,
            feature_names=list(getattr(self, "feature_names_in_", [])),
            provenance={"alpha": alpha.tolist()},
        )
        return self

    def _fit_tiled(self, X: Any, y: Any, sample_weight: Any, kernel: Kernel, precision: str) -> KernelRidge:
        root, holder = self._root()
        if kernel.name == "precomputed":
            dataset, given, digest = store_given_matrix(X, y, sample_weight, root, self.tile_size)
        else:
            dataset, given, digest = self._dataset(X, y, sample_weight, root), None, ""
        if dataset.y is None:
            raise ParameterError("y is None and the data set has no target", hint="give y")
        resolved = _resolved(kernel, dataset.num_features)
        alpha = self._alphas(dataset.num_targets)
        with executor_for() as executor:
            tile_size = self._tile_size(dataset, precision, memory_limit_of(executor))
            if given is not None:
                tile_size = given.grid.tile_size
            settings = FitSettings(
                kernel=resolved,
                alpha=tuple(alpha.tolist()),
                tile_size=tile_size,
                precision=precision,  # type: ignore[arg-type]
                gram=choose_gram(resolved, len(set(alpha.tolist()))),
            )
            workspace = Workspace(store=root, executor=executor, blas=blas_of(executor))
            fit = fit_rows(dataset, settings, workspace, given=given, source_digest=digest)
            with single_blas_thread(), fit as result:
                coefficients = result.dual_coef.read(0, dataset.num_rows)
        y_is_1d = dataset.y_is_1d
        self.n_features_in_ = dataset.num_features if given is None else dataset.num_rows
        self.solution_ = result.solution
        self.dual_coef_ = coefficients[:, 0] if y_is_1d else coefficients
        center = result.operator.rows.center if result.operator.rows is not None else None
        self.X_fit_ = X if isinstance(X, np.ndarray) or given is not None else _lazy_rows(dataset)
        self._model = Model(
            kernel=resolved,
            x_fit=None if resolved is None else dataset.X,
            dual_coef=ArrayRows(coefficients),
            solution=result.solution,
            center=None if center is None or resolved is None else np.asarray(center),
            y_is_1d=y_is_1d,
            feature_names=list(dataset.feature_names or []),
            provenance={"alpha": alpha.tolist(), "tile_size": tile_size, "gram": settings.gram},
        )
        self._holder = holder
        return self

    def predict(self, X: Any) -> Any:
        """Predictions (m,) or (m, t) for rows X (m, d); lazy for a dask array.

        Cost
        ----
        m n kernel entries and 2 m n t flops.
        """
        check_is_fitted(self)
        if type(X).__module__.startswith("dask."):
            return self._model.predict(X)
        X = validate_data(self, X, accept_sparse=("csr", "csc"), dtype=np.float64, order="C", reset=False)
        with single_blas_thread():
            return self._model.predict(_dense(X))

    def save(self, path: Any, *, overwrite: bool = False) -> None:
        """Write the fitted model to ``path``; :func:`dkrr.load_model` reads it."""
        check_is_fitted(self)
        self._model.save(path, overwrite=overwrite)

    def _is_out_of_core(self, X: Any) -> bool:
        module = type(X).__module__
        return isinstance(X, str | Path | Dataset | np.memmap) or module.startswith(("dask.", "zarr."))

    def _precision(self) -> str:
        if self.solver not in ("auto", "cholesky"):
            later = " (cg comes with a later version)" if self.solver == "cg" else ""
            raise ParameterError(f"solver is {self.solver!r}; 'auto' or 'cholesky' expected{later}")
        if self.precision not in ("auto", "float64", "float32"):
            later = " (mixed comes with a later version)" if self.precision == "mixed" else ""
            raise ParameterError(f"precision is {self.precision!r}; 'auto', 'float64' or 'float32' expected{later}")
        if self.tile_size != "auto" and (not isinstance(self.tile_size, int | np.integer) or self.tile_size < 1):
            raise ParameterError(f"tile_size is {self.tile_size!r}; 'auto' or a positive integer expected")
        return "float64" if self.precision == "auto" else self.precision

    def _alphas(self, num_targets: int) -> NDArray[np.float64]:
        return check_alpha(self.alpha, num_targets)

    def _weight(self, sample_weight: Any, X: Any) -> NDArray[np.float64] | None:
        if sample_weight is None or isinstance(sample_weight, bool):
            return None
        return check_weight(_check_sample_weight(sample_weight, X, dtype=np.float64))

    def _tile_size(self, dataset: Dataset, precision: str, memory_limit: int | None) -> int:
        if self.tile_size != "auto":
            return int(self.tile_size)
        itemsize = np.dtype(precision).itemsize
        return choose_tile_size(dataset.num_rows, dataset.num_features, memory_limit, itemsize)

    def _root(self) -> tuple[Any, Any]:
        """The store root, and what keeps a temporary one alive."""
        if self.store is not None:
            return str(self.store), None
        holder = TemporaryStore()
        return holder.path, holder

    def _dataset(self, X: Any, y: Any, sample_weight: Any, root: Any) -> Dataset:
        if isinstance(X, Dataset) and y is None:
            dataset = X
        elif isinstance(X, str | Path) and y is None:
            dataset = open_dataset(X)
        else:
            import uuid

            location = place(root, "rows", uuid.uuid4().hex + ".zarr")
            source = X.X if isinstance(X, Dataset) else X
            return ingest(source, location, y=y, sample_weight=sample_weight)
        if sample_weight is not None:
            raise ParameterError("sample_weight is given beside a data set", hint="ingest the weights with weight=")
        return dataset


class TemporaryStore:
    """A store root below Dask's temporary directory that is removed when nobody holds it any more."""

    def __init__(self) -> None:
        self.path = temporary_folder()
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy that travelled does not own the folder
        self.path = state["path"]


def temporary_folder() -> str:
    """A new folder below Dask's ``temporary-directory``, or the system's."""
    import dask

    base = dask.config.get("temporary-directory", None)
    if base is not None:
        Path(base).mkdir(parents=True, exist_ok=True)
    return tempfile.mkdtemp(prefix="dkrr-", dir=base)


def check_alpha(alpha: Any, num_targets: int) -> NDArray[np.float64]:
    """alpha as an array of 1 or t values, each finite and at least 0."""
    try:
        values = np.atleast_1d(np.asarray(alpha, dtype=np.float64))
    except (TypeError, ValueError):
        raise ParameterError(f"alpha is {alpha!r}; a number or one per target expected") from None
    if values.ndim != 1 or len(values) not in (1, num_targets):
        raise ParameterError(f"alpha has shape {values.shape}; a number or {num_targets} (one per target) expected")
    if not np.all(np.isfinite(values)) or np.any(values < 0):
        raise ParameterError(f"alpha is {alpha!r}; finite values of at least 0 expected")
    return values


def check_weight(weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights, each at least 0, not all 0."""
    if np.any(weight < 0):
        row = int(np.argmax(weight < 0))
        raise DataError(f"sample_weight is {weight[row]:g} in row {row:,}; at least 0 expected")
    if not np.any(weight > 0):
        raise DataError("all sample weights are zero", hint="give at least one row a positive weight")
    return weight


def _resolved(kernel: Kernel, num_features: int) -> Kernel | None:
    return None if kernel.name == "precomputed" else kernel.resolve(num_features)


def _require_square(shape: tuple[int, ...]) -> None:
    if shape[0] != shape[1]:
        raise DataError(f"the precomputed matrix has shape {shape}; a square one expected")


def _dense(X: Any) -> Any:
    if not hasattr(X, "toarray"):
        return X
    if X.shape[0] * X.shape[1] > MAX_SPARSE_ENTRIES:
        raise DataError(
            f"sparse X of shape {X.shape} would be dense with {X.shape[0] * X.shape[1]:,} entries; at most "
            f"{MAX_SPARSE_ENTRIES:,} are converted",
            hint="reduce the features (TruncatedSVD, hashing) or ingest dense rows",
        )
    return np.ascontiguousarray(X.toarray(), dtype=np.float64)


def _lazy_rows(dataset: Dataset) -> Any:
    import dask.array as da

    chunks = tuple(stop - start for start, stop in dataset.X.blocks())
    return da.map_blocks(
        _read_rows,
        dataset.X,
        np.asarray([start for start, _ in dataset.X.blocks()]),
        dtype=np.float64,
        chunks=(chunks, (dataset.num_features,)),
        meta=np.empty((0, 0)),
    )


def _read_rows(rows: Any, starts: Any, block_id: tuple[int, int] | None = None) -> Any:
    number = (block_id or (0, 0))[0]
    start = int(starts[number])
    stop = int(starts[number + 1]) if number + 1 < len(starts) else rows.num_rows
    return rows.read(start, stop)
