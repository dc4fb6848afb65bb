"""How many iterations a solver will need: the solver itself, on two samples of the rows.

A sample of s of n rows is solved with the same alpha and a preconditioner of rank r s / n, which leaves as much to
explain for each row as rank r does in n rows. Two sizes, s / 2 and s, show how the number of iterations k changes with
the number of rows (:mod:`dkrr.planning.iterations`). The factor of mixed precision is tried in the same way, in
float32.

You need it before anything is known of a matrix but its rows. It is an estimate, given as a range: from what the larger
sample took to what the two say together, and a tenth to either side.

Cost: s^2 / 2 entries, and for each iteration 2 s^2 flops a rank and target: about a second for s = 2,000.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, log
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, cholesky, solve_triangular

from dkrr.dataset import Dataset
from dkrr.kernels import Kernel
from dkrr.linalg.gram import rows_of
from dkrr.planning.iterations import LARGEST_POWER, PLAIN_POWER, Count, Iterations, extrapolate

__all__ = ["Trial", "sample_trial"]

FloatArray = NDArray[np.float64]

SAMPLE_ROWS = 2000
NUM_TARGETS = 2
PANEL = 64
MOST_ITERATIONS = 300
# what float32 sums add to the diagonal of a sample before it is given up
MOST_SHIFTS = 12
# a sample is read from at most so many pieces of the data
NUM_PIECES = 64


@dataclass
class Trial:
    """A sample of the rows of a problem, on which solvers are tried.

    Parameters
    ----------
    kernel
        Resolved.
    rows : (s, d), targets : (s, t)
        A random sample in random order, as the kernel sees it, and its targets times the roots of the weights.
    num_rows
        n.
    root_weight : (s,) or None
        Of the sampled rows.
    seconds
        About what one question may take; iterations that are not done by then are counted at the rate so far.
    """

    kernel: Kernel
    rows: FloatArray
    targets: FloatArray
    num_rows: int
    root_weight: FloatArray | None = None
    seed: int = 0
    seconds: float = 1.5
    _matrix: FloatArray | None = field(default=None, repr=False)
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def cg(self, alpha: Sequence[float], ranks: Sequence[int], tol: float) -> dict[int, Iterations]:
        """Iterations of the slowest target for each rank (0: no preconditioner), for the smallest alpha."""
        key = ("cg", min(alpha), tuple(ranks), tol)
        sizes = len(self.rows), self.num_rows
        if key not in self._known:
            small, large = (self._conjugate_gradients(size, min(alpha), ranks, tol) for size in self._sizes())
            self._known[key] = {
                rank: extrapolate(small[rank], large[rank], *sizes, LARGEST_POWER if rank else PLAIN_POWER)
                for rank in ranks
            }
        found: dict[int, Iterations] = self._known[key]
        return found

    def mixed(self, alpha: Sequence[float], tol: float) -> Iterations:
        """Iterations around a float32 factor, for the smallest alpha."""
        key = ("mixed", min(alpha), tol)
        sizes = len(self.rows), self.num_rows
        if key not in self._known:
            small, large = (self._mixed(size, min(alpha), tol) for size in self._sizes())
            self._known[key] = extrapolate(small, large, *sizes, LARGEST_POWER)
        found: Iterations = self._known[key]
        return found

    def _sizes(self) -> tuple[int, int]:
        s = len(self.rows)
        return max(1, s // 2), s

    def _system(self, size: int) -> FloatArray:
        """S K S of the first rows."""
        if self._matrix is None:
            matrix = self.kernel.block(self.rows, self.rows, same=True)
            if self.root_weight is not None:
                matrix *= self.root_weight[:, None]
                matrix *= self.root_weight[None, :]
            self._matrix = matrix
        return np.ascontiguousarray(self._matrix[:size, :size])

    def _right_hand_sides(self, size: int) -> FloatArray:
        return np.ascontiguousarray(self.targets[:size, :NUM_TARGETS])

    def _conjugate_gradients(self, size: int, alpha: float, ranks: Sequence[int], tol: float) -> dict[int, Count]:
        """Iterations for each rank, all of them in one block."""
        matrix, rhs = self._system(size), self._right_hand_sides(size)
        scaled = [round(rank * size / self.num_rows) for rank in ranks]
        factor = pivoted_columns(matrix, max(scaled), np.random.default_rng(self.seed))
        inner = [
            cho_factor(factor[:r] @ factor[:r].T + max(alpha, 1e-12) * np.eye(len(factor[:r])), check_finite=False)
            if r
            else None
            for r in scaled
        ]
        t = rhs.shape[1]

        def apply(r: FloatArray) -> FloatArray:
            z = r.copy()
            for k, (rank, cho) in enumerate(zip(scaled, inner, strict=True)):
                if cho is not None:
                    part, columns = factor[:rank], slice(k * t, (k + 1) * t)
                    z[:, columns] -= part.T @ cho_solve(cho, part @ r[:, columns], check_finite=False)
            return z

        counts, ended = _iterate(matrix, alpha, np.tile(rhs, len(ranks)), apply, tol, self.seconds / 3)
        return {
            rank: Count.of(counts[k * t : (k + 1) * t], ended[k * t : (k + 1) * t], size)
            for k, rank in enumerate(ranks)
        }

    def _mixed(self, size: int, alpha: float, tol: float) -> Count:
        """Iterations around the float32 factor, of a shifted matrix where it breaks down."""
        matrix = self._system(size)
        single = matrix.astype(np.float32)
        # rounding grows like the root of the number of rows, while alpha stays
        effective = alpha * (size / self.num_rows) ** 0.5
        diagonal = np.arange(size)
        shift = 0.0
        for attempt in range(MOST_SHIFTS):
            shifted = single.copy()
            shifted[diagonal, diagonal] += np.float32(effective + shift)
            try:
                lower = cholesky(shifted, lower=True, overwrite_a=True, check_finite=False)
                break
            except np.linalg.LinAlgError:
                size_of_one = float(np.abs(matrix[diagonal, diagonal]).mean())
                shift = float(np.finfo(np.float32).eps) * size_of_one * 4.0**attempt
        else:
            return Count(MOST_ITERATIONS, tells_growth=False)

        def apply(r: FloatArray) -> FloatArray:
            scale = np.abs(r).max(axis=0)
            scale[scale == 0] = 1.0
            z = cho_solve((lower, True), (r / scale).astype(np.float32), check_finite=False)
            return np.asarray(z.astype(np.float64) * scale)

        counts, ended = _iterate(matrix, effective, self._right_hand_sides(size), apply, tol, self.seconds / 3)
        return Count.of(counts, ended, size)


def pivoted_columns(matrix: FloatArray, rank: int, rng: Any) -> FloatArray:
    """Rows of F^T (r, s), F F^T close to the matrix: randomly pivoted Cholesky in panels; fewer where nothing is left.

    A panel keeps the pivots that block rejection accepts (arXiv 2410.03969).
    """
    s = len(matrix)
    factor = np.zeros((rank, s))
    residual = np.maximum(np.diag(matrix).copy(), 0.0)
    first, done = float(residual.sum()), 0
    while done < rank and residual.sum() > 1e-12 * first:
        drawn = np.unique(rng.choice(s, size=PANEL, p=residual / residual.sum()))
        columns = matrix[drawn] - factor[:done, drawn].T @ factor[:done]
        block = columns[:, drawn].copy()
        bar = rng.random(len(drawn)) * np.diag(block)
        kept: list[int] = []
        for j in range(len(drawn)):
            if block[j, j] > max(bar[j], 1e-13 * first / s):
                column = block[:, j] / np.sqrt(block[j, j])
                block -= np.outer(column, column)
                kept.append(j)
        kept = kept[: rank - done]
        square = columns[kept][:, drawn[kept]]
        square[np.diag_indices_from(square)] *= 1 + 1e-12
        try:
            new = solve_triangular(cholesky(square, lower=True, check_finite=False), columns[kept], lower=True)
        except np.linalg.LinAlgError:
            break
        factor[done : done + len(kept)] = new
        done += len(kept)
        residual = np.maximum(residual - np.square(new).sum(axis=0), 0.0)
        residual[drawn[kept]] = 0.0
    return factor[:done]


def _iterate(
    matrix: FloatArray, alpha: float, rhs: FloatArray, apply: Any, tol: float, seconds: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Iterations of each column, and whether they ended; where they are too many or take too long, from the rate."""
    started = time.perf_counter()
    norms = np.sqrt(np.square(rhs).sum(axis=0))
    counts = np.zeros(rhs.shape[1])
    r = rhs.copy()
    z = apply(r)
    p = z.copy()
    rz = (r * z).sum(axis=0)
    for iteration in range(1, MOST_ITERATIONS + 1):
        q = matrix @ p + alpha * p
        curvature = (p * q).sum(axis=0)
        r -= np.divide(rz, curvature, out=np.zeros_like(rz), where=curvature > 0) * q
        relative = np.sqrt(np.square(r).sum(axis=0)) / np.where(norms > 0, norms, 1.0)
        counts[(counts == 0) & (relative <= tol)] = iteration
        late = iteration >= 4 and time.perf_counter() - started > seconds
        if counts.all() or late or iteration == MOST_ITERATIONS:
            break
        z = apply(r)
        new = (r * z).sum(axis=0)
        p *= np.divide(new, rz, out=np.zeros_like(rz), where=rz > 0)
        p += z
        rz = new
    ended = counts > 0
    for column in np.flatnonzero(~ended):
        rate = log(min(float(relative[column]), 0.9)) / iteration
        counts[column] = ceil(log(tol) / rate)
    return counts, ended


def sample_trial(dataset: Dataset, kernel: Kernel, seconds: float, *, seed: int = 0) -> Trial:
    """A trial on rows of a data set, from pieces spread evenly over it: as many as can be tried in the time.

    Cost: reads at most 64 chunks.
    """
    num_rows = SAMPLE_ROWS if seconds > 0.8 else SAMPLE_ROWS // 2 if seconds > 0.2 else SAMPLE_ROWS // 4
    n = dataset.num_rows
    rng = np.random.default_rng(seed)
    rows, y = rows_of(dataset, kernel), dataset.y
    assert y is not None  # noqa: S101  (narrows the type)
    step = dataset.X.rows_per_chunk
    starts = list(range(0, n, step))
    if len(starts) > NUM_PIECES:
        starts = [starts[round(k)] for k in np.linspace(0, len(starts) - 1, NUM_PIECES)]
    sizes = [min(step, n - start) for start in starts]
    share = min(1.0, num_rows / sum(sizes))
    parts: list[tuple[FloatArray, FloatArray, FloatArray | None]] = []
    for start, size in zip(starts, sizes, strict=True):
        taken = np.sort(rng.choice(size, size=min(size, ceil(share * size)), replace=False))
        root = rows.root_weight(start, start + size)
        parts.append(
            (
                rows.read(start, start + size)[taken],
                y.read(start, start + size)[taken],
                None if root is None else root[taken],
            )
        )
    order = rng.permutation(sum(len(part[0]) for part in parts))[:num_rows]
    x = np.concatenate([part[0] for part in parts])[order]
    targets = np.concatenate([part[1] for part in parts])[order]
    weights = [part[2] for part in parts if part[2] is not None]
    root_weight = np.concatenate(weights)[order] if weights else None
    if root_weight is not None:
        targets = targets * root_weight[:, None]
    return Trial(kernel, np.ascontiguousarray(x), targets, n, root_weight, seed, seconds)
