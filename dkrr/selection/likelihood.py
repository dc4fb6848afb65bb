"""How well a kernel, its widths and an alpha explain rows: the marginal likelihood, with gradients, and leave-one-out.

With A = S K S + alpha I, S = diag(sqrt(w)), and a Gaussian process prior y ~ N(b, sigma^2 c^2 (K + alpha W^-1)) for
each of t targets of variance c^2, of which sigma^2 (one for all of them) and the intercepts b are given the values that
maximise it,

    u = A^-1 S (y - b) / c,    q = (S (y - b))^T u / c,    sigma^2 = sum(q) / (n t)
    -log p / (n t) = (log 2 pi + 1 + log sigma^2) / 2 + log det A / (2 n) - sum_i log s_i / n + mean(log c)

Its derivative in any parameter is

    sum_ij W_ij dA_ij / 2,    W = A^-1 / n - sum over targets of u u^T / sum(q).

With a sigma^2 for each target, one that has no noise would outweigh all others.

For the logarithms of the widths dA_ij is a slope times a squared difference of one feature (see
:mod:`dkrr.selection.likelihood`), so that with M = S (W o G) S all d derivatives are sums of x_j^2 and of x_j (M x_j).
Leave-one-out comes from the same inverse: e_i = u_i / (s_i B_ii), B = A^-1, or A^-1 - v v^T / (s^T v) with v = A^-1 s
for an intercept; and its derivative in alpha too, du = -B u, dB_ii = -(B B)_ii.

You need it to choose hyperparameters on a subset of the rows; everything is float64.

Cost
----
n^2 / 2 entries, n^3 flops for factor and inverse, 2 n^2 d for the gradient (n^2 d / 2 differences for the laplacian);
8 n^2 bytes and strips.

References
----------
Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 5.4.1 and 5.4.2. Sundararajan and
Keerthi (2001), Predictive approaches for choosing hyperparameters in Gaussian processes.

The kernels that a search may choose: k(a, b) = phi(r), r^2 = sum_j ((a_j - b_j) / l_j)^2, and their slopes.

For rbf and matern the derivative in a logarithmic width has one form for every feature,

    dk / d log l_j = G(r) ((a_j - b_j) / l_j)^2,    G(r) = -phi'(r) / r,

so that the derivatives for all features come from one matrix product. The laplacian, a function of the 1-norm, has
dk / d log l_j = k |a_j - b_j| / l_j, for which there is no such product.

    family     phi                            G
    rbf        exp(-r^2 / 2)                  exp(-r^2 / 2)
    matern12   exp(-r)                        exp(-r) / r
    matern32   (1 + s) exp(-s), s = 3^.5 r    3 exp(-s)
    matern52   (1 + s + s^2 / 3) exp(-s),     5 / 3 (1 + s) exp(-s)
               s = 5^.5 r

You need it to turn widths into a kernel, and into the keys of a job file that build it.

References
----------
Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, sections 4.2.1 and 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import get_lapack_funcs
from scipy.linalg.blas import dsymm

from dkrr.errors import NotPositiveDefiniteError, ParameterError
from dkrr.kernels import Kernel, make_kernel
from dkrr.tiles.blas import gemm_nt, leading_minor_pivot, potrf

__all__ = [
    "FAMILIES",
    "Evaluation",
    "Explained",
    "family_kernel",
    "kernel_keys",
    "scaled_slope",
    "standard_error",
    "weighted_variance",
]

FloatArray = NDArray[np.float64]

FAMILIES = ("rbf", "matern12", "matern32", "matern52", "laplacian")

_NU = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}

# squared distances below this share of the rows' squared norms are rounding errors of the matrix product
_ROUNDING = 1e-14


def kernel_keys(family: str, widths: FloatArray) -> dict[str, Any]:
    """The keys of ``[model]`` and arguments of :func:`~dkrr.kernels.make_kernel` for widths (1,) or (d,).

    Raises
    ------
    ParameterError
        An unknown family.
    """
    if family not in FAMILIES:
        raise ParameterError(f"kernel family {family!r}", hint=f"one of {', '.join(FAMILIES)} is expected")
    values = [float(width) for width in widths]
    if family in _NU:
        length_scale = values[0] if len(values) == 1 else values
        return {"kernel": "matern", "kernel_params": {"nu": _NU[family], "length_scale": length_scale}}
    if len(values) == 1:
        gamma = 0.5 / values[0] ** 2 if family == "rbf" else 1.0 / values[0]
        return {"kernel": family, "gamma": gamma}
    gamma = 0.5 if family == "rbf" else 1.0
    return {"kernel": family, "gamma": gamma, "kernel_params": {"length_scale": values}}


def family_kernel(family: str, widths: FloatArray) -> Kernel:
    """The kernel of a family with one width (1,), or one for each feature (d,)."""
    keys = kernel_keys(family, widths)
    return make_kernel(keys.pop("kernel"), **keys)


def scaled_slope(family: str, squared: FloatArray, norms: FloatArray) -> None:
    """Replace squared scaled distances r^2 of a block by the slopes G(r), in place.

    Parameters
    ----------
    squared : (m, n)
        From a matrix product, so that what should be 0 may be anything up to the rounding of ``norms``.
    norms : (m,)
        Squared norms of the rows of the block.
    """
    np.maximum(squared, 0.0, out=squared)
    if family == "rbf":
        np.multiply(squared, -0.5, out=squared)
        np.exp(squared, out=squared)
        return
    if family == "matern12":
        # rows that coincide have no slope; G itself is infinite there
        apart = squared > _ROUNDING * (1.0 + norms[:, None])
        r = np.sqrt(squared, out=squared)
        scratch = np.exp(-r)
        np.divide(scratch, r, out=squared, where=apart)
        squared[~apart] = 0.0
        return
    s = np.sqrt(2.0 * _NU[family] * squared)
    np.negative(s, out=squared)
    np.exp(squared, out=squared)
    if family == "matern32":
        squared *= 3.0
    else:
        s += 1.0
        s *= 5.0 / 3.0
        squared *= s


STRIP_ROWS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """One kernel, width and alpha on n rows.

    ``loss`` is -log p / (n t), ``gradient`` its derivatives in the logarithms of the widths and of alpha (None when it
    was not asked for). ``loo_rmse`` is the leave-one-out error in units of the targets' standard deviations (root mean
    square over targets), ``loo_squares`` (n,) what each row adds to n times its square, ``loo_slope`` its derivative in
    log alpha and ``loo_slope_error`` the standard error of that.
    """

    loss: float
    gradient: FloatArray | None
    loo_rmse: float
    loo_squares: FloatArray
    loo_slope: float | None
    loo_slope_error: float | None
    degrees_of_freedom: float


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
        c, the standard deviations of the targets.
    share : (n, t)
        What the square of a residual / c counts for: w_i / (t sum(w)).
    """

    x: FloatArray
    y: FloatArray
    weight: FloatArray | None = None
    intercept: bool = False
    root: FloatArray = field(init=False)
    deviation: FloatArray = field(init=False)
    share: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        root = np.ones(len(self.x)) if self.weight is None else np.sqrt(self.weight)
        object.__setattr__(self, "root", root)
        object.__setattr__(self, "x", np.ascontiguousarray(self.x - self.x.mean(axis=0)))  # saves digits of distances
        share = np.square(root) / np.square(root).sum()
        object.__setattr__(self, "deviation", np.sqrt(weighted_variance(self.y, self.weight)))
        object.__setattr__(self, "share", np.repeat(share[:, None] / self.y.shape[1], self.y.shape[1], axis=1))

    def evaluate(
        self, family: str, widths: FloatArray, alpha: float, *, gradient: bool = False, slope: bool = False
    ) -> Evaluation:
        """Likelihood and leave-one-out error of a kernel with widths (1,) or (d,) and an alpha.

        Parameters
        ----------
        gradient, slope
            Whether the gradient of the loss, and the slope of the leave-one-out error, are wanted.

        Raises
        ------
        NotPositiveDefiniteError
            alpha is too small for the rounding errors of the kernel matrix.
        """
        n = len(self.y)
        inverse, half_log_det = self._inverse(family, widths, alpha)
        v = _symmetric_product(inverse, self.root[:, None]) if self.intercept else None
        rhs = self.root[:, None] * (self.y / self.deviation)
        u = _symmetric_product(inverse, rhs)
        total = 1.0
        if v is not None:
            total = float(self.root @ v[:, 0])
            u -= v * ((self.root @ u) / total)
        q = float(np.einsum("it,it->", rhs, u))
        log_root = float(np.log(self.root).sum())
        loss = 0.5 * (np.log(2.0 * np.pi) + 1.0 + np.log(q / u.size)) + (half_log_det - log_root) / n
        loss += float(np.log(self.deviation).mean())
        trace = float(np.trace(inverse))
        found = self._gradient(family, widths, alpha, inverse, trace, u, q) if gradient else None
        diagonal = np.diag(inverse).copy()
        if v is not None:
            diagonal -= v[:, 0] ** 2 / total
        squares, changes = self._leave_one_out(alpha, inverse, v, total, u, diagonal, slope)
        rmse = float(np.sqrt(squares.mean()))
        slopes = None if changes is None else changes / (2.0 * rmse) if rmse > 0 else np.zeros(n)
        return Evaluation(
            loss=float(loss),
            gradient=found,
            loo_rmse=rmse,
            loo_squares=squares,
            loo_slope=None if slopes is None else float(slopes.mean()),
            loo_slope_error=None if slopes is None else standard_error(slopes),
            degrees_of_freedom=float(n - alpha * diagonal.sum()),
        )

    def _inverse(self, family: str, widths: FloatArray, alpha: float) -> tuple[FloatArray, float]:
        """Lower triangle of A^-1 (what is above it is not the inverse), and half the logarithm of det A."""
        a = self.matrix(family, widths)
        a[np.diag_indices_from(a)] += alpha
        info = potrf(a)
        if info:
            again = self.matrix(family, widths)
            again[np.diag_indices_from(again)] += alpha
            order, pivot = leading_minor_pivot(again, info)
            raise NotPositiveDefiniteError(
                f"the matrix of {len(a):,} rows is not positive definite at row {order - 1:,} "
                f"(pivot {pivot:.2g}, alpha {alpha:.3g})",
                hint="remove duplicated rows, or search among larger alphas",
                row=order - 1,
                alpha=alpha,
            )
        half_log_det = float(np.log(np.diag(a)).sum())
        (potri,) = get_lapack_funcs(("potri",), dtype=a.dtype)
        # the C-order lower triangle is the Fortran-order upper one
        inverse, failed = potri(a.T, lower=0, overwrite_c=1)
        if failed:
            raise AssertionError(f"potri failed with {failed} after potrf succeeded")
        return inverse.T, half_log_det

    def matrix(self, family: str, widths: FloatArray) -> FloatArray:
        """S K S (n, n)."""
        a: FloatArray = family_kernel(family, widths).block(self.x, self.x, same=True)
        if self.weight is not None:
            a *= self.root[:, None]
            a *= self.root[None, :]
        return a

    def _gradient(
        self,
        family: str,
        widths: FloatArray,
        alpha: float,
        inverse: FloatArray,
        trace: float,
        u: FloatArray,
        q: float,
    ) -> FloatArray:
        """Derivatives of the loss in log widths (1 or d of them) and in log alpha."""
        n = len(u)
        shares = u / q
        by_alpha = 0.5 * alpha * (trace / n - float(np.einsum("it,it->", u, shares)))
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
            by_width += sums(family, strip, z, start, stop)
        total = by_width if len(widths) > 1 else np.array([by_width.sum()])
        return np.append(total, by_alpha)

    def _leave_one_out(
        self,
        alpha: float,
        inverse: FloatArray,
        v: FloatArray | None,
        total: float,
        u: FloatArray,
        diagonal: FloatArray,
        slope: bool,
    ) -> tuple[FloatArray, FloatArray | None]:
        """What each row adds to the squared leave-one-out error (n,), times n, and the derivatives of that in log alpha
        if they are wanted; turns ``inverse`` into B."""
        residual = u / (self.root * diagonal)[:, None]
        share = len(u) * self.share
        squares = np.einsum("it,it->i", share, residual**2)
        if not slope:
            return squares, None
        if v is not None:
            gemm_nt(inverse, v, v / total)
        change_u = -_symmetric_product(inverse, u)
        change_diagonal = -_row_norms(inverse)
        change = change_u / (self.root * diagonal)[:, None] - residual * (change_diagonal / diagonal)[:, None]
        return squares, 2.0 * alpha * np.einsum("it,it->i", share, residual * change)


def standard_error(values: FloatArray) -> float:
    """Of the mean of values (n,): their standard deviation over the square root of n."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def weighted_variance(y: FloatArray, weight: FloatArray | None) -> FloatArray:
    """Weighted variance of each target (t,); 1 for one that is constant."""
    mean = np.average(y, axis=0, weights=weight)
    variance = np.atleast_1d(np.average((y - mean) ** 2, axis=0, weights=weight))
    variance[~(variance > 1e-24 * (1.0 + mean**2))] = 1.0
    return variance


def _symmetric_product(lower: FloatArray, right: FloatArray) -> FloatArray:
    """B R for the symmetric B of which the lower triangle of the C-order ``lower`` is given."""
    product: FloatArray = dsymm(1.0, lower.T, np.asfortranarray(right), lower=0)
    return np.ascontiguousarray(product)


def _row_norms(lower: FloatArray) -> FloatArray:
    """(B B)_ii for the symmetric B of which the lower triangle is given."""
    n = len(lower)
    norms = np.zeros(n)
    for start in range(0, n, STRIP_ROWS):
        stop = min(start + STRIP_ROWS, n)
        strip = np.tril(lower[start:stop, :stop], start) ** 2
        norms[start:stop] += strip.sum(axis=1)
        strip[np.arange(stop - start), np.arange(start, stop)] = 0.0  # the diagonal counts once
        norms[:stop] += strip.sum(axis=0)
    return norms


def _squared_sums(family: str, strip: FloatArray, z: FloatArray, start: int, stop: int) -> FloatArray:
    """sum_ij M_ij (z_i - z_j)^2 for each feature, over the rows of a strip; ``strip`` is W there and becomes M."""
    rows, columns = z[start:stop], z[:stop]
    row_norms, column_norms = np.einsum("ij,ij->i", rows, rows), np.einsum("ij,ij->i", columns, columns)
    squared = rows @ columns.T
    squared *= -2.0
    squared += row_norms[:, None]
    squared += column_norms
    scaled_slope(family, squared, row_norms)
    strip *= squared
    direct = strip.sum(axis=1) @ rows**2 + strip.sum(axis=0) @ columns**2
    total: FloatArray = direct - 2.0 * np.einsum("ij,ij->j", rows, strip @ columns)
    return total


def _absolute_sums(family: str, strip: FloatArray, z: FloatArray, start: int, stop: int) -> FloatArray:
    """sum_ij M_ij |z_i - z_j| for each feature, over the rows of a strip; ``strip`` is W there and becomes M."""
    rows, columns = np.ascontiguousarray(z[start:stop].T), np.ascontiguousarray(z[:stop].T)
    strip *= family_kernel(family, np.ones(1)).block(z[start:stop], z[:stop])
    sums = np.empty(len(rows))
    difference = np.empty_like(strip)
    for j, (of_rows, of_columns) in enumerate(zip(rows, columns, strict=True)):
        np.subtract(of_rows[:, None], of_columns, out=difference)
        np.abs(difference, out=difference)
        sums[j] = np.vdot(strip, difference)
    return sums
