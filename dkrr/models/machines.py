"""Losses other than the square with scikit-learn's faces: support vector machines, logistic, quantile and Huber.

    minimise over f in the space of k, and b      sum_i w_i loss(y_i, f(x_i) + b) + |f|^2 / (2 C)
                                                  f = sum_i dual_coef_i k(x_i, .)

C = 1 / (2 alpha); the constant b costs nothing. Which losses there are: :mod:`dkrr.linalg.loss`. What is
promised of every answer is a bound on how far its objective is from the least one, (P - D) / P <= tol, evaluated in
float64 from the kernel and the rows: :mod:`dkrr.linalg.loss_problem`.

Rows are in memory, and so are their answers; a fit runs in this process, with a thread for each processor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score, d2_pinball_score
from sklearn.utils.class_weight import compute_class_weight

from dkrr.dataset import Floats
from dkrr.engine.cluster import runs_in_process
from dkrr.engine.machine import cpu_count, single_blas_thread
from dkrr.errors import DataError, ParameterError
from dkrr.fit.inputs import check_given
from dkrr.kernels import Kernel
from dkrr.kernels.base import check_names
from dkrr.linalg.fit_losses import fit_losses, label_targets, loss_details, loss_parts
from dkrr.linalg.loss import Loss, log_probabilities, make_loss
from dkrr.linalg.solution import IterativeSettings
from dkrr.models.estimator import WithModel, WithTargets, keeps_its_fit
from dkrr.models.model import Model
from dkrr.models.validation import (
    check_flag,
    check_nonnegative,
    check_positive,
    check_weight,
    column_names,
    compared_targets,
    fit_arrays,
    is_dask_array,
    is_out_of_core,
    label_arrays,
    with_own_integers,
)

# rows (n, d), targets (n, t), weights (n,), the class (n,) by which support vectors are counted and sorted, and whether
# predictions have one axis
Training = tuple[Floats, Floats, Floats, NDArray[np.intp], bool]


class _KernelMachine(WithModel):
    """What the five estimators share: parameters of kernel and solver, the fit, and its attributes."""

    LOSSES: ClassVar[tuple[str, ...]]  # that it may have, its own by default

    def _losses(self) -> list[Loss]:
        """One loss for all targets, or one for each column that the only target becomes."""
        name = getattr(self, "loss", self.LOSSES[0])
        if not isinstance(name, str) or name not in self.LOSSES:
            raise ParameterError(f"loss is {name!r}; {' or '.join(map(repr, self.LOSSES))} expected")
        return [make_loss(name, **({"epsilon": self.epsilon} if hasattr(self, "epsilon") else {}))]

    @abstractmethod
    def _read(self, X: Any, y: Any, sample_weight: Any) -> Training:
        """What is given, validated."""

    @keeps_its_fit
    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit on rows X (n, d) and y (n,); regressors take (n, t) as well, a column for each target.

        Parameters
        ----------
        X
            NumPy array, memory map, pandas, scipy sparse (small n); the Gram matrix (n, n) for kernel="precomputed".
        y
            Labels of a classifier: numbers, text or booleans. Targets of a regressor.
        sample_weight : (n,), optional
            At least 0; a row of weight 0 gets the coefficient 0.

        After an error the estimator is what it was before: a fit that it had stays whole.

        Raises
        ------
        ParameterError, DataError
            A parameter, a row, a label or a weight cannot be used.
        ConvergenceError
            The gap did not reach ``tol``, and ``allow_unconverged`` is not set.

        Cost
        ----
        See :mod:`dkrr.linalg.decomposition` for hinge, epsilon_insensitive and pinball, and
        :mod:`dkrr.linalg.newton` for the others; each target is a problem of its own.
        """
        (C, alpha), losses, iteration = self._penalty(), self._losses(), self._iteration()
        check_flag("fit_intercept", self.fit_intercept)
        if is_out_of_core(X, 0, 0) and not isinstance(X, np.memmap):
            raise DataError(
                f"X is of type {type(X).__name__}; rows in memory expected", hint="give np.load(path), or X.compute()"
            )
        names = column_names(X, y)
        X, targets, weight, group, is_1d = self._read(X, y, sample_weight)
        kernel = self._resolved(X)
        with single_blas_thread():
            found = fit_losses(
                kernel,
                X,
                targets,
                losses,
                C,
                weight=weight,
                fit_intercept=bool(self.fit_intercept),
                tol=iteration.tol,
                max_iter=iteration.max_iter,
                allow_unconverged=iteration.allow_unconverged,
                num_threads=1 if runs_in_process() else cpu_count(),
            )
        support = np.flatnonzero(found.dual_coef.any(axis=1))
        support = support[np.argsort(group[support], kind="stable")]
        labels = self.classes_.tolist() if hasattr(self, "classes_") else []
        classes = [label if isinstance(label, str | int | float) else str(label) for label in labels]
        # a column for each class, as it is saved: another number of columns would be another rounding
        columns = found.mirrored() if len(classes) == 2 else found
        parts = loss_parts(columns, losses[0], kernel, X, fit_intercept=bool(self.fit_intercept), support=support)
        given = {name: getattr(self, name) for name in ("epsilon", "quantile") if hasattr(self, name)}
        if classes or found.dual_coef.shape[1] != targets.shape[1]:  # of columns that a target becomes
            names.pop("target_names", None)
        self._model = Model(
            **parts,
            **names,
            y_is_1d=is_1d and not classes,
            classes=classes or None,
            provenance={
                **loss_details(losses[0], C, alpha, **given),
                **({"classes": classes} if classes else {}),
                "num_training_rows": len(targets),
            },
        )
        self.support_ = support
        self.n_support_ = np.bincount(group[support], minlength=group.max() + 1)
        vectors = self.support_vectors_ = np.empty((0, 0)) if kernel is None else parts["x_fit"].array
        self.dual_coef_ = found.dual_coef[support].T
        self.intercept_ = found.intercept
        self.__dict__.pop("coef_", None)  # of an earlier fit
        if kernel is not None and kernel.name == "linear":
            self.coef_ = self.dual_coef_ @ vectors
        self.solution_ = replace(self._model.solution, certificates=found.certificates)
        self.n_iter_ = max(1, found.num_iterations)
        return self

    def _penalty(self) -> tuple[float, float]:
        """C and alpha = 1 / (2 C), of which an estimator has one."""
        if hasattr(self, "C"):
            return check_positive("C", self.C), 0.5 / self.C
        return 0.5 / check_positive("alpha", self.alpha), float(self.alpha)

    def _iteration(self) -> IterativeSettings:
        given = {} if self.solver_params is None else self.solver_params
        if not isinstance(given, Mapping):
            raise ParameterError(f"solver_params is {given!r}; a dict expected")
        check_names("solver_params", given, ("allow_unconverged",))
        allowed = check_flag("allow_unconverged", given.get("allow_unconverged", False))
        return IterativeSettings(tol=self.tol, max_iter=self.max_iter, allow_unconverged=allowed)

    def _resolved(self, X: Floats) -> Kernel | None:
        """The kernel for these rows; None for a matrix that is given."""
        gamma = self.gamma
        if isinstance(gamma, str) and gamma in ("scale", "auto"):
            with np.errstate(over="ignore"):
                variance = X.var() if gamma == "scale" else 1.0
            gamma = 1.0 / (X.shape[1] * variance) if variance > 0 else 1.0
        kernel = self._kernel(gamma)
        if self.__sklearn_tags__().input_tags.positive_only:
            check_nonnegative(X, kernel.name)
        if kernel.name == "precomputed":
            check_given(X)
            return None
        return kernel.resolve(X.shape[1])


class _KernelClassifier(ClassifierMixin, _KernelMachine):  # type: ignore[misc]
    """Two classes are one target, -1 and +1; of several each has one of its own, itself against all the others."""

    class_weight: Any

    def _read(self, X: Any, y: Any, sample_weight: Any) -> Training:
        X, self.classes_, codes = label_arrays(self, X, y)
        weight = check_weight(sample_weight, X)
        weight = np.ones(len(X)) if weight is None else weight
        self.class_weight_ = self._class_weights(codes, weight)
        weight = weight * self.class_weight_[codes]
        targets = label_targets(codes, weight, self.classes_.tolist())
        return X, targets, weight, codes, len(self.classes_) == 2

    def _class_weights(self, codes: NDArray[np.intp], weight: Floats) -> Floats:
        """The factor of the weights of each class (k,)."""
        given = self.class_weight
        if isinstance(given, str) and given == "balanced":
            total = np.bincount(codes, weights=weight)
            shared = weight.sum() / len(total)
            return np.array([shared / of_class if of_class else 0.0 for of_class in total])
        if not isinstance(given, Mapping | None):
            raise ParameterError(f"class_weight is {given!r}; 'balanced', a dict of class: weight, or None expected")
        try:
            factors: Floats = compute_class_weight(given, classes=self.classes_, y=self.classes_)
        except (ValueError, TypeError) as exc:
            raise ParameterError(f"class_weight is {given!r}: {exc}") from exc
        if not (np.isfinite(factors) & (factors >= 0)).all():
            raise ParameterError(f"class_weight is {given!r}; finite numbers of at least 0 expected")
        return factors

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of rows, or of their weight, whose class is right.

        Raises
        ------
        DataError
            A weight that is none, or that is masked.
        """
        predicted = np.asarray(self.predict(X))
        weight = check_weight(sample_weight, predicted)
        return float(accuracy_score(with_own_integers(y), predicted, sample_weight=weight))

    def decision_function(self, X: Any) -> Any:
        """f + b: (m,) for two classes, above 0 for the second one; else (m, k), a column for each class.

        Parameters
        ----------
        X
            Rows (m, d), k(Z, X) (m, n) for kernel="precomputed"; a dask array gives a lazy one, paths and data sets
            are read in blocks.

        Raises
        ------
        DataError
            Another number of features than in the fit, a name that is missing, or a value that is not a finite number.
        """
        values = self._predict(X)
        return values[:, 1] if len(self.classes_) == 2 else values

    def predict(self, X: Any) -> Any:
        """The class (m,) of each row: the sign of :meth:`decision_function`, or its largest column."""
        values = self.decision_function(X)
        if not is_dask_array(values):
            return _class_of(values, self.classes_)
        dropped = [1] if values.ndim == 2 else []
        return values.map_blocks(_class_of, classes=self.classes_, drop_axis=dropped, dtype=self.classes_.dtype)


def _class_of(values: Floats, classes: NDArray[Any]) -> NDArray[Any]:
    return np.take(classes, values > 0 if values.ndim == 1 else np.argmax(values, axis=1))


def _log_proba(values: Floats) -> Floats:
    return log_probabilities(np.stack((-values, values), axis=1) if values.ndim == 1 else values)


@dataclass(eq=False, repr=False)
class KernelSVC(_KernelClassifier):
    """Support vector machine with a kernel: sum_i C w_i max(0, 1 - y_i (f(x_i) + b)) + |f|^2 / 2.

    y_i = +1 for the second of two classes (in order), and -1 for the first. Several classes are fitted one against the
    rest, and the largest decision value wins; scikit-learn's SVC fits each pair of classes instead.

    Parameters
    ----------
    C : float, default 1.0
        Above 0; 1 / (2 alpha).
    kernel : str, callable or Kernel, default "rbf"
        As in :class:`dkrr.KernelRidge`. The certificate is a bound for positive semi-definite kernels, which "sigmoid"
        is not.
    gamma : float, "scale", "auto" or None
        None means 1 / d, as everywhere in dkrr; "scale" 1 / (d Var X), and "auto" 1 / d, as in scikit-learn.
    degree, coef0, kernel_params
        As in :class:`dkrr.KernelRidge`.
    fit_intercept : bool, default True
        Add the constant b.
    loss : {"hinge", "squared_hinge"}
        "squared_hinge": max(0, 1 - y_i (f(x_i) + b))^2.
    class_weight : dict, "balanced" or None
        Factors of the weights of the rows of each class; "balanced" gives all classes the same sum of weights.
    tol : float, default 1e-6
        The duality gap (P - D) / P to reach, of each target.
    max_iter : int, optional
        Most iterations; None: what no problem should need.
    solver_params : dict, optional
        ``allow_unconverged``: keep, and record, an answer whose gap is above ``tol``, instead of raising.

    Attributes
    ----------
    classes_ : (k,)
    class_weight_ : (k,)
    support_ : (n_SV,)
        Numbers of the rows with a coefficient other than 0 for any class, those of the first class first.
    n_support_ : (k,)
        How many of them are in each class.
    support_vectors_ : (n_SV, d)
        Empty for kernel="precomputed".
    dual_coef_ : (1, n_SV) or (k, n_SV)
        A row for each decision function: one for two classes, else one for each class.
    coef_ : (1, d) or (k, d)
        For the linear kernel.
    intercept_ : (1,) or (k,)
    n_features_in_ : int
    feature_names_in_ : (d,)
        Of rows that had names.
    n_iter_ : int
        Of the decision function that took most.
    solution_ : Solution
        With ``certificates``: objectives, gap and largest violation of the conditions of Karush, Kuhn and Tucker.

    References
    ----------
    Cortes and Vapnik, Support-vector networks, Machine Learning 20, 1995; Rifkin and Klautau, In defense of one-vs-all
    classification, JMLR 5, 2004.
    """

    C: float = 1.0
    loss: str = field(default="hinge", kw_only=True)
    class_weight: Any = field(default=None, kw_only=True)
    LOSSES = ("hinge", "squared_hinge")


@dataclass(eq=False, repr=False)
class KernelLogisticRegression(_KernelClassifier):
    """Logistic regression with a kernel: sum_i C w_i log(1 + exp(-y_i (f(x_i) + b))) + |f|^2 / 2.

    y_i = +1 for the second of two classes (in order), and -1 for the first. Several classes are fitted one against the
    rest, and their probabilities divided by their sum; scikit-learn's LogisticRegression fits one multinomial model.

    Parameters
    ----------
    C, kernel, gamma, degree, coef0, kernel_params, fit_intercept, class_weight, tol, max_iter, solver_params
        As in :class:`dkrr.KernelSVC`.

    Attributes
    ----------
    Those of :class:`dkrr.KernelSVC`; every row with a weight is a support vector.

    References
    ----------
    Zhu and Hastie, Kernel logistic regression and the import vector machine, JCGS 14, 2005.
    """

    C: float = 1.0
    class_weight: Any = field(default=None, kw_only=True)
    LOSSES = ("logistic",)

    def predict_log_proba(self, X: Any) -> Any:
        """Logarithms of :meth:`predict_proba`, which do not underflow."""
        values = self.decision_function(X)
        if not is_dask_array(values):
            return _log_proba(values)
        columns: dict[str, Any] = {"new_axis": [1]} if values.ndim == 1 else {}
        chunks = (values.chunks[0], (len(self.classes_),))
        return values.map_blocks(_log_proba, chunks=chunks, dtype=np.float64, meta=np.empty((0, 0)), **columns)

    def predict_proba(self, X: Any) -> Any:
        """Probabilities (m, k) of the classes: p(u) = 1 / (1 + exp(-u)) of the decision value u.

        1 - p and p for two classes; for several p_j / sum_j p_j.
        """
        return np.exp(self.predict_log_proba(X))


class _KernelRegressor(WithTargets, _KernelMachine):
    """Targets (n,) or (n, t), each fitted by itself."""

    def _read(self, X: Any, y: Any, sample_weight: Any) -> Training:
        X, y = fit_arrays(self, X, y)
        weight = check_weight(sample_weight, X)
        weight = np.ones(len(X)) if weight is None else weight
        return X, y.reshape(len(y), -1), weight, np.zeros(len(y), dtype=np.intp), y.ndim == 1

    def predict(self, X: Any) -> Any:
        """f + b: (m,), or (m, t) for several targets.

        Parameters
        ----------
        X
            Rows (m, d), k(Z, X) (m, n) for kernel="precomputed"; a dask array gives a lazy one, paths and data sets
            are read in blocks.

        Raises
        ------
        DataError
            Another number of features than in the fit, a name that is missing, or a value that is not a finite number.
        """
        return self._predict(X)


@dataclass(eq=False, repr=False)
class KernelSVR(_KernelRegressor):
    """Support vector regression with a kernel: sum_i C w_i max(0, |y_i - f(x_i) - b| - epsilon) + |f|^2 / 2.

    Parameters
    ----------
    C, kernel, gamma, degree, coef0, kernel_params, fit_intercept, tol, max_iter, solver_params
        As in :class:`dkrr.KernelSVC`.
    epsilon : float, default 0.1
        Half the width of the tube in which nothing is lost, at least 0, in units of y.
    loss : {"epsilon_insensitive", "squared_epsilon_insensitive"}
        The squared one: max(0, |y_i - f(x_i) - b| - epsilon)^2.

    Attributes
    ----------
    support_, n_support_, support_vectors_, dual_coef_, coef_, intercept_, n_iter_, solution_
        As of :class:`dkrr.KernelSVC`, with a row of ``dual_coef_`` for each target, and one number in ``n_support_``.

    References
    ----------
    Smola and Schoelkopf, A tutorial on support vector regression, Statistics and Computing 14, 2004.
    """

    C: float = 1.0
    epsilon: float = field(default=0.1, kw_only=True)
    loss: str = field(default="epsilon_insensitive", kw_only=True)
    LOSSES = ("epsilon_insensitive", "squared_epsilon_insensitive")


@dataclass(eq=False, repr=False)
class KernelHuberRegressor(_KernelRegressor):
    """Regression that outliers bend little: sum_i w_i h(y_i - f(x_i) - b) + alpha |f|^2.

    h(r) = r^2 for |r| <= epsilon, and 2 epsilon |r| - epsilon^2 beyond. epsilon is in units of y: scikit-learn's
    HuberRegressor multiplies it by a scale that it fits.

    Parameters
    ----------
    epsilon : float, default 1.35
        Above 0.
    alpha : float, default 1.0
        The ridge, above 0, never multiplied by n; as it grows together with epsilon, the answer becomes that of
        :class:`dkrr.KernelRidge`.
    kernel, gamma, degree, coef0, kernel_params, fit_intercept, tol, max_iter, solver_params
        As in :class:`dkrr.KernelSVC`.

    Attributes
    ----------
    Those of :class:`dkrr.KernelSVR`.

    References
    ----------
    Huber, Robust estimation of a location parameter, Annals of Mathematical Statistics 35, 1964.
    """

    epsilon: float = field(default=1.35, kw_only=True)
    alpha: float = field(default=1.0, kw_only=True)
    LOSSES = ("huber",)


@dataclass(eq=False, repr=False)
class KernelQuantileRegressor(_KernelRegressor):
    """Conditional quantiles with a kernel: sum_i w_i p(y_i - f(x_i) - b) + alpha |f|^2, p(r) = max(q r, (q - 1) r).

    Parameters
    ----------
    quantile : float or sequence of (q,), default 0.5
        Each between 0 and 1. A sequence gives a column for each in predictions, in its order, and takes y (n,) alone.
    alpha : float, default 1.0
        The ridge, above 0, never multiplied by n.
    kernel, gamma, degree, coef0, kernel_params, fit_intercept, tol, max_iter, solver_params
        As in :class:`dkrr.KernelSVC`.

    Attributes
    ----------
    Those of :class:`dkrr.KernelSVR`, with a row of ``dual_coef_`` for each quantile.

    Notes
    -----
    Quantiles are fitted one by one, so they may cross where there are few rows: see :meth:`num_crossing`.

    References
    ----------
    Koenker and Bassett, Regression quantiles, Econometrica 46, 1978; Takeuchi, Le, Sears and Smola, Nonparametric
    quantile estimation, JMLR 7, 2006.
    """

    quantile: Any = field(default=0.5, kw_only=True)
    alpha: float = field(default=1.0, kw_only=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = not self._is_sequence
        return tags

    @property
    def _is_sequence(self) -> bool:
        return isinstance(self.quantile, Iterable) and not isinstance(self.quantile, str)

    def _losses(self) -> list[Loss]:
        quantiles = list(self.quantile) if self._is_sequence else [self.quantile]
        if not quantiles:
            raise ParameterError(f"quantile = {self.quantile!r}; at least one number between 0 and 1 expected")
        return [make_loss("pinball", quantile=quantile) for quantile in quantiles]

    def _read(self, X: Any, y: Any, sample_weight: Any) -> Training:
        X, targets, weight, group, is_1d = super()._read(X, y, sample_weight)
        if self._is_sequence and targets.shape[1] > 1:
            raise DataError(
                f"y has shape {targets.shape} for a sequence of quantiles; (n,) expected",
                hint="fit an estimator for each target",
            )
        return X, targets, weight, group, is_1d and not self._is_sequence

    def num_crossing(self, X: Any) -> int:
        """How many rows X (m, d) have a prediction of one quantile below that of a smaller one; 0 for one quantile."""
        predicted = np.asarray(self.predict(X))
        if not isinstance(self._fitted, list):
            return 0
        order = np.argsort(self._fitted, kind="stable")
        steps = np.diff(predicted[:, order], axis=1)[:, np.diff(np.take(self._fitted, order)) > 0]
        return int(np.count_nonzero((steps < 0).any(axis=1)))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """D2: 1 - the pinball loss over that of the empirical quantile of y; the mean over quantiles and targets.

        Raises
        ------
        DataError
            y has another shape than the predictions of one quantile; a target or weight that is not a finite number.
        """
        predicted = np.asarray(self.predict(X))
        columns = list(predicted.T) if isinstance(self._fitted, list) else [predicted]
        truth, weight = compared_targets(y, columns[0].shape, self._model), check_weight(sample_weight, predicted)
        scores = [
            d2_pinball_score(truth, column, alpha=quantile, sample_weight=weight)
            for quantile, column in zip(np.ravel(self._fitted), columns, strict=True)
        ]
        return float(np.mean(scores))

    @property
    def _fitted(self) -> Any:
        """The quantile, or the list of them, that the model has."""
        return self._model.provenance["quantile"]
