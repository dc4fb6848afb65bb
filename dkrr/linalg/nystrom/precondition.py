"""The preconditioner of Nystrom regression: Falkon's two triangles, the second one from more rows than the centres.

    H = B^T S^2 B + alpha K                     B = k(X, Z) (n, m),  K = k(Z, Z) (m, m)
    K + j I = L L^T
    G = L^-1 (B^T S^2 B) L^-T + alpha I         estimated from a sample of the rows,  G = R R^T
    R^-1 L^-1 H L^-T R^-T beta = R^-1 L^-1 B^T S^2 Y,   c = L^-T R^-T beta

Falkon takes the centres themselves as the sample, which gives (n / m) L^T D L + alpha I with the weights D of the
centres; that is good when alpha is large. Here the centres enter with factor one, and q m other rows, drawn uniformly,
with factor (n - m) / (q m). The eigenvalues of the preconditioned matrix are then within about (1 +- q^-1/2)^2 for any
alpha and any choice of centres.
On 41,157 rows of a regression set with 800 centres and alpha 0.1 the sample of the centres took 80 iterations to
1e-7, q = 8 took 29 and q = 16 took 19; on 100,000 generated rows with 500 centres 43 became 18 and 13.

Centres in the span of the others (duplicated rows, a kernel of small rank) add nothing to f, and are left out: those
that a Cholesky factorisation with complete pivoting puts last, with pivots of rounding size, 10 eps times the trace.

The jitter j is in the preconditioner only, the system stays what it is. It is 0 for products in float64. With float32
entries of B it is so large that their rounding E, amplified by L^-1 and R^-1, stays small even where K has no weight:

    |R^-1 L^-1 E^T| ~ u n^1/2 k / (j (alpha + (n / m) j))^1/2 = 1 / 10      u = 2^-22,  k = mean of k(z, z)

Cost
----
m^2 entries and m^3 / 3 flops for L and each R, in the driver; (q + 1) m rows times 2 m^2 flops for G, on the workers.
The driver holds 3 m^2 numbers. A task holds 2 m^2 and a few blocks of 512 rows: :func:`preconditioner_bytes`.

References
----------
Rudi, Carratino and Rosasco, FALKON: an optimal large scale kernel method, 2017, arXiv 1705.10958. Avron, Clarkson and
Woodruff, Faster kernel ridge regression using sketching and preconditioning, 2017, arXiv 1611.03220.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas, lapack

from dkrr.errors import DataError, NotPositiveDefiniteError
from dkrr.kernels import Kernel
from dkrr.linalg.blocks import FloatMatrix, FloatVector
from dkrr.linalg.passes import Operands, Pass
from dkrr.linalg.workspace import Workspace
from dkrr.tiles.blas import buffer, potrf, syrk, trsm_right

logger = logging.getLogger("dkrr.linalg.nystrom.solver")


BLOCK_ROWS = 512
EPS = float(np.finfo(np.float64).eps)
# of an entry that comes from rounded rows
FLOAT32_ROUNDING = 2.0**-22
MAX_NOISE = 0.1
MIN_OVERSAMPLING, MAX_OVERSAMPLING = 4, 16
MAX_PARTS, MIN_PART_ROWS = 8, 2048


def sample_size(n: int, m: int) -> int:
    """Rows of the sample besides the centres, q m of the n - m others: q = n / (25 m), but from 4 to 16.

    A sampled row costs 2 m^2 flops once, a row of a pass m kernel entries an iteration, so more passes ask for a better
    preconditioner.
    """
    q = min(max(n / (25 * m), MIN_OVERSAMPLING), MAX_OVERSAMPLING)
    return int(min(n - m, np.ceil(q * m)))


def preconditioner_bytes(m: int) -> int:
    """Memory of a task besides the baseline, in bytes: 16 m^2 for L and its part of G, and four blocks of 512 rows."""
    return 16 * m * m + 32 * BLOCK_ROWS * m


def jitter_for(diagonal: FloatVector, n: int, alpha: float, precision: Literal["float64", "float32"]) -> float:
    """j: 0 for products in float64, what keeps the rounding of float32 entries small otherwise (see above)."""
    if precision == "float64":
        return 0.0
    noise = n * (FLOAT32_ROUNDING * float(diagonal.mean()) / MAX_NOISE) ** 2
    slope = n / len(diagonal)
    # the positive root of slope j^2 + alpha j = noise, without cancellation
    return float(2.0 * noise / (alpha + np.sqrt(alpha * alpha + 4.0 * slope * noise))) if noise else 0.0


def independent_centers(kernel: Kernel, centers: FloatMatrix) -> NDArray[np.int64]:
    """Numbers (r,) of centres that span all of them to rounding, in the order of the pivots.

    Raises
    ------
    NotPositiveDefiniteError
        K is indefinite by more than rounding.
    DataError
        The kernel is zero on all centres.

    Cost
    ----
    m^3 / 3 flops, 8 m^2 bytes.
    """
    m = len(centers)
    square: Any = kernel.block(centers, centers, same=True)
    diagonal = square.diagonal().copy()
    trace = float(np.abs(diagonal).sum())
    if not trace:
        raise DataError(f"{kernel.describe()} is zero on all {m:,} centres", hint="use another kernel")
    tolerance = 10.0 * EPS * trace
    # in columns a C-order square is its transpose: its lower triangle is the upper one there
    _, order, rank, info = lapack.dpstrf(square.T, lower=0, tol=tolerance, overwrite_a=1)
    pivots: NDArray[np.int64] = order.astype(np.int64) - 1
    if info:
        left = diagonal[pivots[rank:]] - np.square(square[rank:, :rank]).sum(axis=1)
        if left.min() < -100.0 * tolerance:
            raise NotPositiveDefiniteError(
                f"the kernel matrix of the {m:,} centres is not positive semi-definite (pivot {left.min():.2g})",
                hint="use a positive semi-definite kernel",
                pivot=float(left.min()),
            )
    return pivots[:rank]


class CenterFactor:
    """L of K + j I = L L^T with K = k(Z, Z), in one square; its upper triangle holds nothing that is read.

    Parameters
    ----------
    kernel
        Resolved.
    centers : (m, d)
        Centred as the rows are, independent, in the order of the pivots.
    n, alpha, precision
        What :func:`jitter_for` depends on.

    Raises
    ------
    NotPositiveDefiniteError
        K + j I is not.
    """

    def __init__(
        self,
        kernel: Kernel,
        centers: FloatMatrix,
        n: int,
        alpha: float,
        precision: Literal["float64", "float32"],
    ) -> None:
        m = len(centers)
        self.square: Any = kernel.block(centers, centers, same=True)
        self.row_sums: FloatVector = np.zeros(m)
        for start in range(0, m, BLOCK_ROWS):
            self.row_sums[start : start + BLOCK_ROWS] = np.abs(self.square[start : start + BLOCK_ROWS]).sum(axis=1)
        self.jitter = jitter_for(self.square.diagonal(), n, alpha, precision)
        self.square[np.diag_indices(m)] += self.jitter
        info = potrf(self.square)
        if info:
            raise NotPositiveDefiniteError(
                f"the kernel matrix of {m:,} centres is not positive definite at row {info - 1:,}",
                hint="use a positive semi-definite kernel",
                row=info - 1,
            )

    def __len__(self) -> int:
        return len(self.square)

    def solve(self, b: FloatMatrix, *, transposed: bool) -> FloatMatrix:
        """L^-1 B, or L^-T B, (m, t)."""
        return solve_lower(self.square, b, transposed=transposed)

    def reduced(self, c: FloatMatrix) -> FloatMatrix:
        """L^-1 K C = L^T C - j L^-1 C (m, t): no rounding of K C that L^-1 would amplify."""
        product = np.ascontiguousarray(blas.dtrmm(1.0, self.square.T, c, lower=0, trans_a=0))
        return product - self.jitter * self.solve(c, transposed=False) if self.jitter else product

    def multiply(self, c: FloatMatrix) -> FloatMatrix:
        """K C (m, t)."""
        product = blas.dtrmm(1.0, self.square.T, c, lower=0, trans_a=0)
        return np.ascontiguousarray(blas.dtrmm(1.0, self.square.T, product, lower=0, trans_a=1)) - self.jitter * c


def solve_lower(square: FloatMatrix, b: FloatMatrix, *, transposed: bool) -> FloatMatrix:
    """L^-1 B or L^-T B with L below and on the diagonal of a C-order square; m^2 t flops."""
    return np.ascontiguousarray(blas.dtrsm(1.0, square.T, b, lower=0, trans_a=int(not transposed)))


class SampleGram:
    """The estimate of L^-1 B^T S^2 B L^-T from a sample of the rows: a pass over them whose parts stay in the store.

    Parameters
    ----------
    kernel
        Resolved.
    triangle
        L.
    centers : (m, d), sample : (s, d), root : (s,)
        Centred rows; roots of the sample's weights times factors.
    workspace, scratch
        Who runs the tasks; location of what travels, which the caller removes.
    centred
        With an intercept: B less its weighted mean over the sample, G - g g^T / W with g = C^T S_f 1 and W the sum of
        the weights.
    """

    def __init__(
        self,
        kernel: Kernel,
        triangle: CenterFactor,
        centers: FloatMatrix,
        sample: FloatMatrix,
        root: FloatVector,
        workspace: Workspace,
        scratch: Any,
        *,
        centred: bool = False,
    ) -> None:
        m, count = len(centers), min(MAX_PARTS, -(-len(sample) // MIN_PART_ROWS))
        rows = np.zeros((-(-len(sample) // count) * count, centers.shape[1] + 1))  # a row whose root is 0 is none
        rows[: len(sample), :-1], rows[: len(sample), -1] = sample, root
        self.weight = float(root @ root)
        self.shape = (m + centred, m)
        self.parts = Pass(
            "precondition",
            partial(_sample_gram, kernel),
            _not_finite,
            [2.0 * m * m * len(rows) / count] * count,
            self.shape,
            operands={"centers": [centers], "factor": [triangle.square], "sample": np.split(rows, count)},
            workspace=workspace,
            store=scratch,
            folder="sample",
            parts="grams",
        )

    def factor(self, alpha: float, whole: FloatMatrix) -> FloatMatrix:
        """R (m, m) lower with R R^T = G + alpha I, in the first rows of ``whole``, an array as large as a part.

        G is positive semi-definite but for rounding, which a very small alpha may not exceed; alpha then grows in
        the preconditioner, with a line in the log.
        """
        shift, m = alpha, whole.shape[1]
        out, sums = whole[:m], whole[m:]
        while True:
            whole[...] = 0.0
            self.parts.consume(lambda _, part: np.subtract(whole, part, out=whole))
            for start in range(0, m if len(sums) and self.weight else 0, BLOCK_ROWS):
                rows = slice(start, start + BLOCK_ROWS)
                out[rows] -= sums[0, rows, None] * (sums[0] / self.weight)
            scale = float(out.diagonal().max())
            out[np.diag_indices(m)] += shift
            info = potrf(out)
            if not info:
                return out
            larger = max(10.0 * shift, EPS * scale * np.sqrt(m))
            logger.info("G + %.1e I has no Cholesky factor (row %d): %.1e instead", shift, info - 1, larger)
            if not 0 < larger <= scale:
                raise NotPositiveDefiniteError(
                    f"the preconditioner of the centres is not positive definite at row {info - 1:,}",
                    hint="use a positive semi-definite kernel, or raise alpha",
                    row=info - 1,
                )
            shift = larger


def _sample_gram(kernel: Kernel, operands: Operands, i: int, whole: FloatMatrix) -> None:
    """-C^T C of part i of the sample, C = S_f B L^-T, its lower triangle; -C^T S_f 1 below it for an intercept."""
    rows, centers = np.array(operands["sample"].read(i)), np.array(operands["centers"].read())
    factor, m = operands["factor"].read(), len(centers)
    rows = rows[rows[:, -1] > 0]
    gram, sums = whole[:m], whole[m:]
    for start in range(0, len(rows), BLOCK_ROWS):
        part = rows[start : start + BLOCK_ROWS]
        block: Any = buffer("sample", (len(part), m), np.float64)
        kernel.block(np.ascontiguousarray(part[:, :-1]), centers, block)
        block *= part[:, -1:]
        trsm_right(block, factor)
        columns: Any = buffer("sample transposed", (m, len(part)), np.float64)
        columns[...] = block.T
        syrk(gram, columns)
        if len(sums):
            sums -= part[:, -1] @ block


def _not_finite(_: int) -> DataError:
    return DataError("the preconditioner of the centres is not finite", hint="scale the features")
