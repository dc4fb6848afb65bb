"""The variance of a prediction, from a Cholesky factor and a forward substitution.

Kernel ridge regression is the mean of a Gaussian process: with f ~ N(0, sigma^2 k), noise of variance
sigma^2 alpha / w_i in target i, S = diag(sqrt(w)) and A = S K S + alpha I = L L^T,

    var f(z) = sigma^2 (k(z, z) - |L^-1 S k(X, z)|^2).

With an intercept b (a flat prior) the border s = S 1 adds what is not known of b,

    + sigma^2 (1 - s^T A^-1 S k(X, z))^2 / (s^T A^-1 s) = (1 - g^T V)^2 / |g|^2,    g = L^-1 s,  V = L^-1 S k(X, z):

g is one more column of the same substitution. A new observation at z of weight 1 has sigma^2 alpha on top. The
functions here leave out sigma^2; :func:`maximum_likelihood_scale` is its estimate.

Rows of Z are taken in blocks. A block keeps its V (w, n) in memory and reads every tile of the factor once, so that
w decides between memory and reading: :func:`block_rows`.

Cost
----
n kernel entries and n^2 flops a row of Z; 8 n w bytes.

References
----------
Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1 and section 2.7 (the flat prior of
explicit basis functions).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, NumericalError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import FloatVector
from dkrr.linalg.predict import CHECK_TOLERANCE, RowSource
from dkrr.linalg.products import kernel_product
from dkrr.linalg.triangular import LowerTiles, solve_rows
from dkrr.store.chunks import FloatArray

logger = logging.getLogger("dkrr.linalg")


MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 32, 1024
BLOCK_BYTES = 256 * 2**20
PASS_ROWS = 65_536
# how many units of n eps cond(L) k(z, z) rounding may be blamed for, as in LAPACK's tests
ROUNDING_FACTOR = 30.0
# of alpha: an error E of A changes no variance by more than |E| / alpha of k(z, z)
HARMLESS_ERROR = 1e-6


def block_rows(n: int, memory_bytes: int | None = None) -> int:
    """w, the rows of Z that are taken together: 32 to 1,024, as 8 n w bytes fit in 256 MiB or in ``memory_bytes``."""
    budget = BLOCK_BYTES if memory_bytes is None else min(BLOCK_BYTES, memory_bytes)
    return int(min(MAX_BLOCK_ROWS, max(MIN_BLOCK_ROWS, budget // (8 * n))))


@dataclass(frozen=True, kw_only=True)
class VarianceSystem:
    """Everything that the variance of f rests on, for one alpha.

    Parameters
    ----------
    factor
        L of A = S K S + alpha I, float64.
    kernel, x, center
        Resolved kernel, training rows (n, d), and what is subtracted from rows before the kernel sees them.
    alpha
    root : (n,), optional
        Square roots of the weights.
    intercept
        Whether f has an intercept.
    """

    factor: LowerTiles
    kernel: Kernel
    x: RowSource
    alpha: float
    center: FloatVector | None = None
    root: FloatVector | None = None
    intercept: bool = False

    def variance(self, z: NDArray[np.float64]) -> FloatVector:
        """var f(z) / sigma^2 (m,) for rows z (m, d) in memory, not centred.

        What rounding makes negative becomes 0; how many rows that are is logged.

        Raises
        ------
        NumericalError
            A variance is more negative than rounding explains.
        """
        m, step = len(z), block_rows(self.factor.grid.n)
        result = np.empty(m)
        for start in range(0, m, step):
            result[start : start + step] = self._block(np.ascontiguousarray(z[start : start + step]))
        return result

    def misfit(self) -> str:
        """Why the factor is not that of A, "" when it is: A v is compared with L (L^T v) for random signs v.

        A is evaluated from the kernel and the rows, so that it shows whatever became of a stored tile, and a kernel
        function that was another when the factor was made. The entries of A - L L^T are at most
        (100 n^1/2 eps + 1e-11) (A_pp A_qq)^1/2, see :mod:`dkrr.linalg.verify`; signs add up their squares.

        Cost
        ----
        n^2 / 2 kernel entries and 4 n^2 flops; every tile is read twice.
        """
        grid = self.factor.grid
        n, spans = grid.n, [grid.span(i) for i in range(grid.num_tiles)]
        v = np.random.default_rng(0).choice((-1.0, 1.0), size=(n, 1))
        root = np.ones((n, 1)) if self.root is None else self.root[:, None]
        found, product, diagonal, scaled = np.zeros((n, 1)), np.zeros((n, 1)), np.empty((n, 1)), root * v
        for j, columns in enumerate(spans):
            half = sum(self.factor.read(i, j).T @ v[spans[i]] for i in range(j, len(spans)))
            b = self._rows(columns)
            diagonal[columns] = np.abs(self.kernel.diag(b))[:, None]
            kernel_product(self.kernel, b, b, scaled[columns], product[columns], same=True)
            for i, rows in enumerate(spans[j:], j):
                found[rows] += self.factor.read(i, j) @ half
                if i > j:
                    halves = {"u": scaled[rows], "out_t": product[columns]}
                    kernel_product(self.kernel, self._rows(rows), b, scaled[columns], product[rows], **halves)
        error = np.abs(root * product + self.alpha * v - found)
        scale = np.sqrt(diagonal * root**2 + self.alpha)
        rounding = (100 * np.sqrt(n) * np.finfo(np.float64).eps + CHECK_TOLERANCE) * scale * np.linalg.norm(scale)
        allowed = rounding + HARMLESS_ERROR * self.alpha
        if (error <= allowed).all():
            return ""
        worst = int(np.argmax(np.where(error <= allowed, -1.0, error)))
        return (
            f"does not give back the matrix at row {worst:,} (off by {error[worst, 0]:.1e}, {allowed[worst, 0]:.1e} "
            "allowed): a tile is not its own, or the kernel function was another when it was made"
        )

    def _rows(self, span: slice) -> NDArray[np.float64]:
        """Training rows as the kernel sees them."""
        x = self.x.read(span.start, span.stop)
        return x if self.center is None else x - self.center

    def _block(self, z: NDArray[np.float64]) -> FloatVector:
        """Of rows that fit into memory together, from V^T = (L^-1 S [k(X, z), 1])^T (m or m + 1, n)."""
        z, grid = z if self.center is None else z - self.center, self.factor.grid
        half = np.empty((len(z) + self.intercept, grid.n))

        def fill(i: int, block: FloatArray) -> None:
            self.kernel.block(z, self._rows(grid.span(i)), block[: len(z)])
            if self.intercept:
                block[-1] = 1.0
            if self.root is not None:
                block *= self.root[grid.span(i)]

        solve_rows(self.factor, half, fill)
        own, rows, border = self.kernel.diag(z), half[: len(z)], half[-1]
        values: FloatVector = own - np.einsum("ij,ij->i", rows, rows)
        if self.intercept:
            values += np.square(1.0 - rows @ border) / (border @ border)
        return self._clipped(values, own)

    def _clipped(self, values: FloatVector, own: FloatVector) -> FloatVector:
        if not np.isfinite(values).all():
            raise DataError("a variance is not finite", hint="scale the features")
        negative = values < 0
        if not negative.any():
            return values
        # 30 n eps cond(L) k(z, z), cond(L) <= ((n k s^2 + alpha) / alpha)^1/2
        n, eps, largest = self.factor.grid.n, float(np.finfo(np.float64).eps), float(np.max(np.abs(own)))
        norm = n * largest * (1.0 if self.root is None else float(np.max(self.root)) ** 2)
        condition = np.sqrt((norm + self.alpha) / max(self.alpha, eps * norm))
        limit = float(ROUNDING_FACTOR * n * eps * condition * largest)
        worst = int(np.argmin(values))
        if values[worst] < -limit:
            raise NumericalError(
                f"the variance of a prediction is {values[worst]:.2g} (k(z, z) = {own[worst]:.3g}), which rounding "
                f"({limit:.1g}) does not explain",
                hint="an indefinite kernel has no variance; else check the store with `dkrr info --verify`",
            )
        logger.info("%d variances of at least %.1g set to 0 (rounding: %.1g)", negative.sum(), values[worst], limit)
        return np.maximum(values, 0.0)


def maximum_likelihood_scale(
    y: RowSource, dual_coef: RowSource, num_weighted: int, *, intercept: bool = False
) -> FloatVector:
    """sigma^2 (t,) = y^T S A^-1 S y / n: the maximum of the Gaussian process' likelihood, A given.

    y^T S A^-1 S y is y^T dual_coef, so no factor is needed. n counts the rows of positive weight; the others tell
    nothing. With an intercept, which is integrated out, it is y^T dual_coef / (n - 1) (restricted likelihood).

    Parameters
    ----------
    y, dual_coef : RowSource (n, t)
    num_weighted
        n.

    References
    ----------
    Rasmussen and Williams, 2006, section 5.4.1; Mardia and Marshall, Biometrika 71 (1984).
    """
    spans = [(start, min(start + PASS_ROWS, y.num_rows)) for start in range(0, y.num_rows, PASS_ROWS)]
    shift, total = np.zeros(y.num_columns), np.zeros(y.num_columns)
    if intercept:  # it makes dual_coef orthogonal to constants: a large mean would only be rounded
        shift = sum((y.read(*span).sum(axis=0) for span in spans), shift) / y.num_rows
    for span in spans:
        total += np.einsum("it,it->t", y.read(*span) - shift, dual_coef.read(*span))
    return np.maximum(total, 0.0) / max(1, num_weighted - intercept)
