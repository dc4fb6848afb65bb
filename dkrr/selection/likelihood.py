"""How well a kernel, its widths and an alpha explain rows: the marginal likelihood with gradients, and leave-one-out.

With A = S K S + alpha I, S = diag(sqrt(w)), and a Gaussian process prior y ~ N(b, sigma^2 c^2 (K + alpha W^-1)) for
each of t targets of variance c^2, of which sigma^2 (one for all of them) and the intercepts b are given the values that
maximise it,

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
n^2 / 2 entries, n^3 flops for factor and inverse, 2 n^2 d for the gradient (n^2 d / 2 differences for the laplacian);
16 n^2 bytes and strips.

References
----------
Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 4.2.1, 5.1, 5.4.1 and 5.4.2.
Sundararajan and Keerthi (2001), Predictive approaches for choosing hyperparameters in Gaussian processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import get_lapack_funcs
from scipy.linalg.blas import dsymm

from dkrr.dataset import Floats
from dkrr.errors import NotPositiveDefiniteError
from dkrr.kernels import Kernel, make_kernel
from dkrr.linalg.dense import DenseFactor, EigenRidge, FactorRidge
from dkrr.selection.choice import NU, is_as_good, kernel_keys

# squared distances below this share of the rows' squared norms are rounding errors of the matrix product
ROUNDING = 1e-14

STRIP_ROWS = 128

ALPHA_BOUNDS = (1e-6, 1e3)


def family_kernel(family: str, widths: Floats) -> Kernel:
    """The kernel of a family with one width (1,), or one for each feature (d,)."""
    keys = kernel_keys(family, widths)
    return make_kernel(keys.pop("kernel"), **keys)


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """One kernel, width and alpha on n rows: -log p / (n t), its derivatives in the logarithms of the widths and of
    alpha (None where they were not asked for), and the leave-one-out error in units of the targets' standard deviations
    (root mean square over targets)."""

    loss: float
    gradient: Floats | None
    loo_rmse: float


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
    """

    x: Floats
    y: Floats
    weight: Floats | None = None
    intercept: bool = False
    root: Floats = field(init=False)
    deviation: Floats = field(init=False)

    def __post_init__(self) -> None:
        mean = np.average(self.y, axis=0, weights=self.weight)
        variance = np.atleast_1d(np.average((self.y - mean) ** 2, axis=0, weights=self.weight))
        found = {
            "root": np.ones(len(self.x)) if self.weight is None else np.sqrt(self.weight),
            "x": np.ascontiguousarray(self.x - self.x.mean(axis=0)),  # saves digits of distances
            "deviation": np.sqrt(np.where(variance > 1e-24 * (1.0 + mean**2), variance, 1.0)),
        }
        vars(self).update(found)

    def evaluate(self, family: str, widths: Floats, alpha: float, *, gradient: bool = False) -> Evaluation:
        """Likelihood and leave-one-out error of a kernel with widths (1,) or (d,) and an alpha.

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
        found = self._gradient(family, widths, alpha, inverse, trace, u, q) if gradient else None
        squares = self._squares((u / (self.root * diagonal)[:, None])[:, :, None])
        return Evaluation(loss=float(loss), gradient=found, loo_rmse=float(np.sqrt(squares.mean())))

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
            beside = [float(f"{value:.4g}") for value in np.clip(beside, *ALPHA_BOUNDS)]
            at = next((value for value in beside if not any(np.isclose(value, tried, rtol=0.02))), None)
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
        a: Floats = family_kernel(family, widths).block(self.x, self.x, same=True)
        if self.weight is not None:
            a *= self.root[:, None]
            a *= self.root[None, :]
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
