"""What a search for hyperparameters is asked, what it answers, how one is chosen, and how well one explains rows.

Settings, candidates and the result are plain frozen data; the search itself is :mod:`dkrr.selection.tuning`.

Of candidates whose error is as good as the best, the one is chosen whose system of all rows is the best conditioned:
|K| / alpha decides how many iterations a fit takes, and whether float32 will do, while what it costs besides is nearly
the same for all kernels. As good is what lies within one standard error of the *difference* between the two errors, row
by row, or within 0.2 %. The standard error of the best error itself, as in Breiman et al. (1984, section 3.4.3), is
three to ten times as large, for the same rows are hard for both. Of a grid of alphas on 3,000 rows of pol, elevators,
protein and bike it let in ones whose error on the test rows was 3.1, 1.2, 0.4 and 0 % above that of the best; the
difference let in ones that were 0.05, 0, 0 and 0 % above it.

How well a kernel, its widths and an alpha explain rows is said by the marginal likelihood, with gradients, and by
leave-one-out (:class:`Explained`). With A = S K S + alpha I, S = diag(sqrt(w)), and a Gaussian process prior
y ~ N(b, sigma^2 c^2 (K + alpha W^-1)) for each of t targets of variance c^2, of which sigma^2 (one for all of them) and
the intercepts b are given the values that maximise it,

    u = A^-1 S (y - b) / c,    q = (S (y - b))^T u / c,    sigma^2 = sum(q) / (n t)
    -log p / (n t) = (log 2 pi + 1 + log sigma^2) / 2 + log det A / (2 n) - sum_i log s_i / n + mean(log c)

Its derivative in any parameter is

    sum_ij W_ij dA_ij / 2,    W = A^-1 / n - sum over targets of u u^T / sum(q).

With a sigma^2 for each target, one that has no noise would outweigh all others. Leave-one-out comes from the same
inverse: e_i = u_i / (s_i B_ii), B = A^-1, or A^-1 - v v^T / (s^T v) with v = A^-1 s for an intercept.

A kernel of a search is phi(r), r^2 = sum_j ((a_j - b_j) / l_j)^2. For rbf and matern the derivative in a logarithmic
width has one form for every feature,

    dk / d log l_j = G(r) ((a_j - b_j) / l_j)^2,    G(r) = -phi'(r) / r,

so that with M = S (W o G) S all d derivatives are sums of x_j^2 and of x_j (M x_j): one matrix product. The laplacian,
a function of the 1-norm, has dk / d log l_j = k |a_j - b_j| / l_j, for which there is no such product.

    family     phi                            G
    rbf        exp(-r^2 / 2)                  exp(-r^2 / 2)
    matern12   exp(-r)                        exp(-r) / r
    matern32   (1 + s) exp(-s), s = 3^.5 r    3 exp(-s)
    matern52   (1 + s + s^2 / 3) exp(-s),     5 / 3 (1 + s) exp(-s)
               s = 5^.5 r

You need it to choose hyperparameters on a subset of the rows; everything is float64.

Cost
----
Of an evaluation: n^2 / 2 entries, n^3 flops for factor and inverse, 2 n^2 d for the gradient (n^2 d / 2 differences for
the laplacian); 16 n^2 bytes and strips.

References
----------
Breiman, Friedman, Olshen and Stone, Classification and Regression Trees, 1984, section 3.4.3, for the rule.
Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 4.2.1, 5.1, 5.4.1 and 5.4.2.
Sundararajan and Keerthi (2001), Predictive approaches for choosing hyperparameters in Gaussian processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from scipy.linalg import get_lapack_funcs
from scipy.linalg.blas import dsymm

from dkrr.dataset import Floats
from dkrr.errors import NotPositiveDefiniteError, ParameterError
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.dense import DenseFactor, EigenRidge, FactorRidge
from dkrr.linalg.loss import Loss, make_loss
from dkrr.linalg.operators import weighted

WidthKind = Literal["shared", "per_feature"]

FAMILIES = ("rbf", "matern12", "matern32", "matern52", "laplacian")
NU = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}

# leave-one-out errors that differ by less are as good as the same
AS_GOOD = 1.002
LEAST_ROWS, MOST_ROWS = 20, 20_000


def kernel_keys(family: str, widths: Floats) -> dict[str, Any]:
    """The keys of ``[model]`` and arguments of :func:`~dkrr.kernels.make_kernel` for widths (1,) or (d,)."""
    values = [float(width) for width in widths]
    if family in NU:
        length_scale = values[0] if len(values) == 1 else values
        return {"kernel": "matern", "kernel_params": {"nu": NU[family], "length_scale": length_scale}}
    if len(values) == 1:
        gamma = 0.5 / values[0] ** 2 if family == "rbf" else 1.0 / values[0]
        return {"kernel": family, "gamma": gamma}
    gamma = 0.5 if family == "rbf" else 1.0
    return {"kernel": family, "gamma": gamma, "kernel_params": {"length_scale": values}}


def standard_error(values: Floats) -> float:
    """Of the mean of values (n,): their standard deviation over the square root of n."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class FoldLoss:
    """Another loss than the square: what is fitted to all folds but one, and what the rows of that one are judged by.

    Parameters
    ----------
    loss, epsilon, quantile
        A loss, with the parameter that it has; several quantiles of one target.
    metric
        Of each row, and of all their mean, so that less is better whatever it is: 1 where the class is wrong for
        "accuracy", and for "balanced_accuracy", where each class counts as much; -log of the probability of the true
        class for "log_loss"; the squared error for "rmse", of whose mean the root is taken; else the loss itself.
    C
        The values to choose from, ascending.
    num_folds
        At least 2.

    Raises
    ------
    ParameterError
        A value that is not allowed.
    """

    loss: str
    metric: str
    epsilon: float | None = None
    quantile: tuple[float, ...] | None = None
    C: tuple[float, ...] = tuple(float(f"{value:.3g}") for value in np.geomspace(0.01, 1000.0, 11))
    num_folds: int = 5

    def __post_init__(self) -> None:
        if not self.C or not all(low < high for low, high in zip((0.0, *self.C), self.C, strict=False)):
            raise ParameterError(f"C = {list(self.C)}", hint="numbers above 0 in increasing order are expected")
        if self.num_folds < 2:
            raise ParameterError(f"folds = {self.num_folds}", hint="at least 2 are expected")

    @property
    def losses(self) -> list[Loss]:
        """One, or one for each quantile."""
        if self.quantile is not None:
            return [make_loss(self.loss, quantile=quantile) for quantile in self.quantile]
        return [make_loss(self.loss, **({} if self.epsilon is None else {"epsilon": self.epsilon}))]

    @property
    def alphas(self) -> tuple[float, ...]:
        """1 / (2 C), ascending."""
        return tuple(0.5 / value for value in reversed(self.C))

    @property
    def words(self) -> str:
        """What the error is, of which less is better."""
        words = {"accuracy": "share of wrong classes", "balanced_accuracy": "mean share of wrong rows of a class"}
        own = self.metric.replace("_", " ") + (" loss" if self.metric == self.loss else "")
        return words.get(self.metric, own)

    def error(self, lost: Floats) -> Floats:
        """One number for each column (k,) of what the rows lose (n, k)."""
        means = lost.mean(axis=0)
        return np.asarray(np.sqrt(means) if self.metric == "rmse" else means)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What is searched, and how much.

    Parameters
    ----------
    kernels
        Families, of :data:`FAMILIES`.
    widths
        "shared": one width for all features; "per_feature": one for each; "both": whichever predicts better.
    search_rows
        Sizes of the subsets on which widths are searched, ascending.
    rows
        Most rows of the subset on which the finalists are compared.
    seed
        Of the subset.
    budget_seconds
        The time that the trials may take in all; what would take longer is left out, and noted.
    fold_loss
        Another loss than the square, which then has the last word on widths and alpha.

    Raises
    ------
    ParameterError
        A value that is not allowed.
    """

    kernels: tuple[str, ...] = FAMILIES
    widths: Literal["shared", "per_feature", "both"] = "both"
    search_rows: tuple[int, ...] = (1_000, 2_000)
    rows: int = 8_000
    seed: int = 0
    budget_seconds: float = 480.0
    fold_loss: FoldLoss | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.kernels if name not in FAMILIES]
        if unknown or not self.kernels or len(set(self.kernels)) < len(self.kernels):
            raise ParameterError(
                f"kernels = {list(self.kernels)}", hint=f"some of {', '.join(FAMILIES)} are expected, each once"
            )
        if self.widths not in ("shared", "per_feature", "both"):
            raise ParameterError(f"widths = {self.widths!r}", hint="'shared', 'per_feature' or 'both' is expected")
        sizes = [*self.search_rows, self.rows]
        if not self.search_rows or sizes[0] < LEAST_ROWS or sizes[-1] > MOST_ROWS or sizes != sorted(sizes):
            raise ParameterError(
                f"search_rows = {list(self.search_rows)}, rows = {self.rows}",
                hint=f"ascending numbers from {LEAST_ROWS} to {MOST_ROWS:,} are expected",
            )
        if not self.budget_seconds > 0:
            raise ParameterError(f"budget_seconds = {self.budget_seconds!r}", hint="a number above 0 is expected")


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """A kernel, its widths, an alpha, and how well they did on a number of rows.

    ``excess_error`` is the standard error of the difference between its error and the best one, None where the rows'
    errors are not known; ``condition`` that of K + alpha I of all rows, from the largest eigenvalue of K on these.
    ``metric`` is that of a :class:`FoldLoss` by which the error was found, "" of leave-one-out.
    """

    family: str
    widths: Floats
    alpha: float
    loo_rmse: float
    num_rows: int
    loss: float | None = None
    factor: float = 1.0
    origin: str = "likelihood"
    excess_error: float | None = None
    condition: float | None = None
    metric: str = ""

    @property
    def kind(self) -> WidthKind:
        """Whether there is one width for all features."""
        return "shared" if len(self.widths) == 1 else "per_feature"

    def keys(self) -> dict[str, Any]:
        """Kernel and alpha as ``[model]`` of a job, and :class:`~dkrr.KernelRidge`, take them."""
        return {**kernel_keys(self.family, self.widths), "alpha": self.alpha}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "kernel": self.family,
            "widths_kind": self.kind,
            "widths": self.widths.tolist(),
            "alpha": self.alpha,
            **({"metric": self.metric, "error": self.loo_rmse} if self.metric else {"loo_rmse": self.loo_rmse}),
            "loss": self.loss,
            "num_rows": self.num_rows,
            "factor": self.factor,
            "origin": self.origin,
            "excess_error": self.excess_error,
            "condition": self.condition,
        }


@dataclass(kw_only=True, eq=False)
class TuneResult:
    """The choice, and everything that led to it.

    ``best`` is what was chosen: of the ``candidates`` as good as the one of the smallest error, ``least_error``, the
    best conditioned. ``candidates`` are the finalists on the same ``num_rows`` rows, smallest error first; ``records``
    one dictionary a trial in order; ``slices`` the errors over (factor, alpha) that were computed; ``notes`` what the
    budget left out.
    ``seconds`` is the time of the trials, divided among the threads that ran them.
    """

    best: Candidate
    candidates: list[Candidate]
    records: list[dict[str, Any]]
    slices: list[dict[str, Any]]
    notes: list[str]
    seconds: float

    @property
    def least_error(self) -> Candidate:
        """The candidate of the smallest error."""
        return self.candidates[0]

    def mark(self, candidate: Candidate) -> str:
        """What a candidate is in a table."""
        names = {"smallest error": self.least_error, "chosen": self.best}
        return ", ".join(name for name, item in names.items() if item is candidate)

    def parameters(self) -> dict[str, Any]:
        """Arguments of :class:`~dkrr.KernelRidge`: kernel, its parameters and alpha."""
        return self.best.keys()

    def to_dict(self) -> dict[str, Any]:
        """Plain data: all that a picture or a report needs."""
        return {
            "best": self.best.to_dict(),
            "least_error": self.least_error.to_dict(),
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "slices": self.slices,
            "trials": self.records,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def is_as_good(squares: Floats, least: Floats) -> bool:
    """Whether errors are as good as the smallest ones, from the squared errors (n,) that both make in the same rows."""
    if squares.mean() <= AS_GOOD**2 * least.mean():
        return True
    difference = squares - least
    return bool(difference.mean() <= standard_error(difference))


def choose_candidates(points: list[Candidate], squares: list[Floats]) -> tuple[Candidate, list[Candidate]]:
    """What to fit, and what it was chosen from, smallest error first.

    Parameters
    ----------
    points
        Everything that was evaluated on the same rows: of those with the same widths, the one of the largest alpha that
        is as good as the best of them is a candidate, and the best of all is.
    squares
        Of each point, what its rows add to the squared error (n,).
    """
    order = sorted(range(len(points)), key=lambda k: (points[k].loo_rmse, -points[k].alpha))
    first = order[0]
    groups: dict[tuple[str, bytes], list[int]] = {}
    for k in order:
        groups.setdefault((points[k].family, points[k].widths.tobytes()), []).append(k)
    kept = {first}
    for group in groups.values():
        as_good = [[k for k in group if is_as_good(squares[k], squares[least])] for least in (group[0], first)]
        # the best of all may allow less than the best of these widths
        kept |= {max(good, key=lambda k: points[k].alpha) for good in as_good if good}
    # the derivative of the mean of what is compared in the error: of a root mean square twice that
    two = 2.0 * points[first].loo_rmse if points[first].metric in ("", "rmse") else 1.0
    shown = {
        k: replace(points[k], excess_error=standard_error(squares[k] - squares[first]) / two if two else 0.0)
        for k in order
        if k in kept
    }
    good = [k for k in shown if is_as_good(squares[k], squares[first])]
    chosen = min(good, key=lambda k: (points[k].condition or np.inf, points[k].loo_rmse))
    return shown[chosen], list(shown.values())


# --- how well a kernel explains rows ---------------------------------------------------------------------------------

# squared distances below this share of the rows' squared norms are rounding errors of the matrix product
ROUNDING = 1e-14

STRIP_ROWS = 128

# of targets of variance 1, and weights of mean 1
ALPHA_BOUNDS = (1e-6, 1e3)


def family_kernel(family: str, widths: Floats) -> Kernel:
    """The kernel of a family with one width (1,), or one for each feature (d,)."""
    keys = kernel_keys(family, widths)
    return make_kernel(keys.pop("kernel"), **keys)


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """Rows to be explained.

    Parameters
    ----------
    x : (n, d), y : (n, t)
    weight : (n,) or None
        Positive.
    intercept
        Whether a constant is fitted with the kernel.

    Attributes
    ----------
    root : (n,)
        s, the square roots of the weights.
    deviation : (t,)
        c, the standard deviations of the targets; 1 of one that is constant.
    spread : (d,)
        Standard deviations of the features; of one that is constant the root mean square of the others', and 1 where
        all are.
    mean_weight
        1 without weights. Weights times a number want alpha times that number.
    """

    x: Floats
    y: Floats
    weight: Floats | None = None
    intercept: bool = False
    root: Floats = field(init=False)
    deviation: Floats = field(init=False)
    spread: Floats = field(init=False)
    mean_weight: float = field(init=False)

    def __post_init__(self) -> None:
        mean = np.average(self.y, axis=0, weights=self.weight)
        variance = np.atleast_1d(np.average((self.y - mean) ** 2, axis=0, weights=self.weight))
        spread = self.x.std(axis=0)
        varying = spread > 1e-12 * np.abs(self.x).max(axis=0)
        found = {
            # the likelihood does not see what a constant explains, but the digits that it takes
            "y": self.y - mean if self.intercept else self.y,
            "root": np.ones(len(self.x)) if self.weight is None else np.sqrt(self.weight),
            "x": np.ascontiguousarray(self.x - self.x.mean(axis=0)),  # saves digits of distances
            "deviation": np.sqrt(np.where(variance > 1e-24 * mean**2, variance, 1.0)),
            "spread": np.where(varying, spread, np.sqrt(np.mean(spread[varying] ** 2)) if varying.any() else 1.0),
            "mean_weight": 1.0 if self.weight is None else float(self.weight.mean()),
        }
        vars(self).update(found)

    @property
    def alpha_bounds(self) -> tuple[float, float]:
        """The smallest and the largest alpha that is tried."""
        return ALPHA_BOUNDS[0] * self.mean_weight, ALPHA_BOUNDS[1] * self.mean_weight

    def evaluate(self, family: str, widths: Floats, alpha: float) -> tuple[float, Floats, float]:
        """How well a kernel with widths (1,) or (d,) and an alpha explains the rows.

        Returns
        -------
        -log p / (n t), its derivatives in the logarithms of the widths and of alpha, and the leave-one-out error in
        units of the targets' standard deviations (root mean square over targets).

        Raises
        ------
        NotPositiveDefiniteError
            alpha is too small for the rounding errors of the kernel matrix.
        """
        n = len(self.y)
        lower = DenseFactor.of(family_kernel(family, widths), self.x, self.root, alpha).lower
        half_log_det = float(np.log(np.diag(lower)).sum())
        (potri,) = get_lapack_funcs(("potri",), dtype=lower.dtype)
        # the C-order lower triangle is the Fortran-order upper one; what is above it is not the inverse
        inverse = potri(lower.T, lower=0, overwrite_c=1)[0].T
        diagonal = np.diag(inverse).copy()
        trace = float(diagonal.sum())
        rhs = self.root[:, None] * (self.y / self.deviation)
        u = _symmetric_product(inverse, rhs)
        if self.intercept:
            v = _symmetric_product(inverse, self.root[:, None])
            total = float(self.root @ v[:, 0])
            u -= v * ((self.root @ u) / total)
            diagonal -= v[:, 0] ** 2 / total
        q = float(np.vdot(rhs, u))
        loss = 0.5 * (np.log(2.0 * np.pi) + 1.0 + np.log(q / u.size)) + (half_log_det - np.log(self.root).sum()) / n
        loss += np.log(self.deviation).mean()
        gradient = self._gradient(family, widths, alpha, inverse, trace, u, q)
        squares = self._squares((u / (self.root * diagonal)[:, None])[:, :, None])
        return float(loss), gradient, float(np.sqrt(squares.mean()))

    def path(self, family: str, widths: Floats, alphas: Floats) -> Floats:
        """What each row adds to n times the squares of the leave-one-out errors of all alphas (n, k).

        Cost
        ----
        One eigendecomposition, about 9 n^3 flops and 24 n^2 bytes, then 2 n^2 (t + 1) for each alpha.
        """
        matrix, y = self.matrix(family, widths), self.y / self.deviation
        ridge = EigenRidge(matrix, y, self.root, fit_intercept=self.intercept, positive_semidefinite=True)
        return self._squares(ridge.leave_one_out(alphas))

    def refine(self, family: str, widths: Floats, alpha: float, num_evaluations: int) -> dict[float, Floats]:
        """The same (n,) for a few alphas, from a factor of each: three by factors of 4 towards the smallest error, then
        between the largest that is as good as the best and the next one, for its fit is the best conditioned.

        Alphas have four digits; those that are too small for rounding are left out.

        Raises
        ------
        NotPositiveDefiniteError
            All of them are.
        """
        kernel, y = family_kernel(family, widths), self.y / self.deviation
        ridge = FactorRidge(kernel, self.x, y, self.root, fit_intercept=self.intercept)
        found, tried = dict[float, Floats](), list[float]()
        for number in range(num_evaluations):
            beside = [alpha, 4 * alpha, alpha / 4]
            if number > 2 and found:
                good = max(value for value in found if is_as_good(found[value], found[alpha]))
                beside = [np.sqrt(good * min((value for value in found if value > good), default=16 * good))]
            beside = [float(f"{value:.4g}") for value in np.clip(beside, *self.alpha_bounds)]
            at = next((value for value in beside if not any(np.isclose(value, tried, rtol=0.02, atol=0.0))), None)
            if at is None:
                break
            tried.append(at)
            try:
                found[at] = self._squares(ridge.leave_one_out(np.array([at])))[:, 0]
                alpha = min(found, key=lambda value: float(found[value].mean()))
            except NotPositiveDefiniteError:
                alpha = alpha if found else 4 * at
                if not found and number == num_evaluations - 1:
                    raise
        return found

    def matrix(self, family: str, widths: Floats) -> Floats:
        """S K S (n, n)."""
        root = None if self.weight is None else self.root
        a: Floats = weighted(family_kernel(family, widths).block(self.x, self.x, same=True), root)
        return a

    def _squares(self, residuals: Floats) -> Floats:
        """What each row adds to n times the squared error (n, k), from residuals (n, t, k) of y / c."""
        share = np.square(self.root)
        return np.asarray((share / share.mean())[:, None] * np.square(residuals).mean(axis=1))

    def _gradient(
        self,
        family: str,
        widths: Floats,
        alpha: float,
        inverse: Floats,
        trace: float,
        u: Floats,
        q: float,
    ) -> Floats:
        """Derivatives of the loss in log widths (1 or d of them) and in log alpha."""
        n, shares = len(u), u / q
        z = self.x / widths
        by_width = np.zeros(z.shape[1])
        sums = _absolute_sums if family == "laplacian" else _squared_sums
        for start in range(0, n, STRIP_ROWS):
            stop = min(start + STRIP_ROWS, n)
            # rows of M below the diagonal; the diagonal has no differences, the other half is the same again
            strip = inverse[start:stop, :stop] / n
            strip -= u[start:stop] @ shares[:stop].T
            strip *= self.root[start:stop, None]
            strip *= self.root[None, :stop]
            strip[:, start:] = np.tril(strip[:, start:], -1)
            by_width += sums(family, strip, z[start:stop], z[:stop])
        total = by_width if len(widths) > 1 else np.array([by_width.sum()])
        return np.append(total, 0.5 * alpha * (trace / n - float(np.vdot(u, shares))))


def _symmetric_product(lower: Floats, right: Floats) -> Floats:
    """B R for the symmetric B of which the lower triangle of the C-order ``lower`` is given."""
    return np.ascontiguousarray(dsymm(1.0, lower.T, np.asfortranarray(right), lower=0))


def _squared_sums(family: str, strip: Floats, rows: Floats, columns: Floats) -> Floats:
    """sum_ij M_ij (z_i - z_j)^2 for each feature, over the rows of a strip; ``strip`` is W there."""
    norms = np.einsum("ij,ij->i", rows, rows)
    squared = rows @ columns.T
    squared *= -2.0
    squared += norms[:, None] + np.einsum("ij,ij->i", columns, columns)
    weighted = strip * _slope(family, np.maximum(squared, 0.0), norms)
    direct = weighted.sum(axis=1) @ rows**2 + weighted.sum(axis=0) @ columns**2
    return np.asarray(direct - 2.0 * np.einsum("ij,ij->j", rows, weighted @ columns))


def _slope(family: str, squared: Floats, norms: Floats) -> Floats:
    """G(r) from squared scaled distances (m, n) of a matrix product of rows with squared ``norms`` (m,)."""
    if family == "rbf":
        return np.exp(-0.5 * squared)
    if family == "matern12":
        # rows that coincide have no slope; G itself is infinite there
        r = np.sqrt(squared)
        return np.divide(np.exp(-r), r, out=np.zeros_like(r), where=squared > ROUNDING * (1.0 + norms[:, None]))
    s = np.sqrt(2.0 * NU[family] * squared)
    return np.asarray(np.exp(-s) * (3.0 if family == "matern32" else 5.0 / 3.0 * (s + 1.0)))


def _absolute_sums(family: str, strip: Floats, rows: Floats, columns: Floats) -> Floats:
    """sum_ij M_ij |z_i - z_j| for each feature, over the rows of a strip; ``strip`` is W there."""
    weighted = strip * family_kernel(family, np.ones(1)).block(rows, columns)
    pairs = zip(rows.T, columns.T, strict=True)
    return np.array([np.vdot(weighted, np.abs(mine[:, None] - theirs)) for mine, theirs in pairs])
