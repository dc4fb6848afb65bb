"""What a regression in feature space needs of the rows, one strip after the other.

    sums        G = F^T W F,  F^T W [Y, 1],  [Y, 1]^T W [Y, 1]
    residual    F^T W R,  1^T W R,  R^2 weighted,     R = Y - b - F c
    hat         R, and q_i = sum_j (F_i B)_j^2 e_j for matrices B and weights e: leverages, up to a constant
    path        the same, summed over the rows for each of many alphas

F (n, D) is never in memory as a whole. Features and targets are taken minus a *shift*, fixed before the pass, so that
large means do not swallow what differs from row to row. Sums are of monomials: their scale comes in afterwards.

Everything here acts on rows in memory or on disk alike. On disk a task takes a fixed range of whole chunks and writes
its sums as one chunk, which the driver adds up in the order of the ranges: the sums are the same bits on any number of
workers. Where D is large G is cut into tiles, one task for a tile of a range. The ranges depend on n, d and D alone.

Cost
----
sums: n D^2 flops, one reading of the rows for each D^2 / 2 of 2,048^2 / 2 entries; residual: 4 n D t flops; hat and
path: 2 n D^2. Memory of a task: :func:`task_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dkrr.kernels.features import FeatureMap
from dkrr.linalg.primal.rows import Strip
from dkrr.linalg.row_ranges import RowRanges
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import buffer, gemm_nt, gemm_tn, syrk, syrk_tn

__all__ = [
    "Affine",
    "SumLayout",
    "add_hat",
    "add_path",
    "add_residual",
    "add_sums",
    "panels",
    "row_ranges",
    "strip_rows",
    "sums_bytes",
    "task_memory",
]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

PANEL = 2048
# features of a strip: many enough rows for a product with a tile, else what stays in a cache
STRIP_BYTES, CACHED_BYTES = 16 << 20, 2 << 20
MIN_STRIP_ROWS, GOOD_STRIP_ROWS, MAX_STRIP_ROWS = 128, 1024, 4096
# a task takes at least this long, at rates that one core reaches
TASK_SECONDS, FLOP_SECONDS, BYTE_SECONDS = 0.1, 3e-11, 3e-10
MAX_RANGES = 64
# what all tiles of all ranges together may take on disk, unless a few ranges already take more
SUMS_BYTES, FEWEST_RANGES = 4 << 30, 4
CHUNK_BYTES = 4 << 20
# below this 1 - h_i is rounding; whoever asked sees the largest h_i
MIN_SHARE = 1e-14


def panels(num_features: int) -> TileGrid:
    """The features in panels of at most 2,048: G consists of a tile for each pair."""
    return TileGrid(num_features, min(PANEL, num_features))


def strip_rows(features: FeatureMap) -> int:
    """Rows whose features are in memory at once: 1,024 if these take 16 MiB at most, 4,096 in 2 MiB, 128 at least."""
    row_bytes = 8 * features.num_monomials
    rows = max(min(STRIP_BYTES // row_bytes, GOOD_STRIP_ROWS), CACHED_BYTES // row_bytes)
    return int(min(MAX_STRIP_ROWS, max(MIN_STRIP_ROWS, rows // 16 * 16)))


def row_ranges(n: int, features: FeatureMap, multiple: int) -> RowRanges:
    """At most 64 ranges of whole chunks, of 0.1 s each at least; fewer where the tiles of all would fill a disk."""
    edge, grid = panels(features.num_features).tile_size, panels(features.num_features)
    row_seconds = 2 * edge**2 * FLOP_SECONDS + 8 * (features.num_inputs + features.num_monomials) * BYTE_SECONDS
    most = max(FEWEST_RANGES, min(MAX_RANGES, SUMS_BYTES // (8 * edge * edge * grid.num_lower)))
    rows = max(n / most, TASK_SECONDS / row_seconds)
    return RowRanges(n, -int(-rows // multiple) * multiple)


def sums_bytes(n: int, features: FeatureMap, num_targets: int) -> int:
    """What the sums of all ranges take on disk, about: ranges are of whole chunks, which are not known here."""
    grid = panels(features.num_features)
    count = len(row_ranges(n, features, MAX_STRIP_ROWS)) * grid.num_lower
    return 8 * count * SumLayout(grid.tile_size, num_targets).length


def task_memory(features: FeatureMap, num_targets: int, num_columns: int = 0) -> int:
    """Bytes of a task besides the interpreter's.

    A tile and its copy on the way to disk, a strip of monomials and its copy, a chunk of X, 64 MiB of targets at most,
    coefficients of ``num_columns`` columns.
    """
    edge = panels(features.num_features).tile_size
    strip = 16 * strip_rows(features) * (features.num_monomials + features.num_inputs + 2 * num_targets)
    targets = min(64 << 20, 8 * 65_536 * (num_targets + 1))
    coefficients = 24 * features.num_features * (num_columns + num_targets)
    return 16 * edge * (edge + num_targets) + strip + 2 * CHUNK_BYTES + targets + coefficients


@dataclass(frozen=True, eq=False)
class Affine:
    """f(x) = b + (M(x) - shift) c for columns of coefficients, and the shift of the targets.

    Parameters
    ----------
    shift : (D,), optional
        Of the monomials M; None means zero, and no arithmetic.
    y_shift : (t,)
    coef : (D, c)
    intercept : (c,)
    """

    shift: FloatVector | None
    y_shift: FloatVector
    coef: FloatMatrix
    intercept: FloatVector

    def pack(self) -> FloatVector:
        """Everything in one vector, NaN where there is no shift."""
        shift = np.full(len(self.coef), np.nan) if self.shift is None else self.shift
        return np.concatenate([shift, self.y_shift, self.intercept, self.coef.ravel()])

    @classmethod
    def unpack(cls, values: FloatVector, num_features: int, num_targets: int) -> Affine:
        """Inverse of :meth:`pack`."""
        d, t = num_features, num_targets
        c = (len(values) - d - t) // (d + 1)
        shift = values[:d]
        return cls(
            None if np.isnan(shift).any() else shift,
            values[d : d + t],
            values[d + t + c :].reshape(d, c),
            values[d + t : d + t + c],
        )


@dataclass(frozen=True)
class SumLayout:
    """One tile of G with what belongs to it, as one vector.

    tile (e, e) | F^T W [Y, 1] of the panel, transposed (t + 1, e) | diagonal of Y^T W Y, Y^T W 1, 1^T W 1, rows used
    """

    edge: int
    num_targets: int

    @property
    def length(self) -> int:
        """Numbers of a vector."""
        return self.edge * (self.edge + self.num_targets + 1) + 2 * self.num_targets + 2

    def parts(self, vector: FloatVector) -> tuple[FloatMatrix, FloatMatrix, FloatVector]:
        """Views of the three parts."""
        e, t = self.edge, self.num_targets
        cross = e * e + e * (t + 1)
        return vector[: e * e].reshape(e, e), vector[e * e : cross].reshape(t + 1, e), vector[cross:]


def _design(
    features: FeatureMap, x: FloatMatrix, shift: FloatVector | None, root: FloatVector | None
) -> tuple[FloatMatrix, bool]:
    """Monomials of a strip minus the shift, each row times its ``root``; whether they lie feature by feature."""
    if features.is_linear:
        if shift is None and root is None:
            return x, False
        rows: FloatMatrix = buffer("primal", x.shape, np.float64)
        np.subtract(x, 0.0 if shift is None else shift, out=rows)
        if root is not None:
            rows *= root[:, None]
        return rows, False
    room = buffer("primal", (features.num_monomials, len(x)), np.float64)
    columns = features.monomials(x, room)
    if shift is not None:
        columns -= shift[:, None]
    if root is not None:
        columns *= root
    return columns, True


def _rows(features: FeatureMap, x: FloatMatrix, shift: FloatVector | None) -> FloatMatrix:
    """Monomials of a strip minus the shift as a matrix (q, D), in whatever order of memory."""
    matrix, by_feature = _design(features, x, shift, None)
    return matrix.T if by_feature else matrix


def _used(strip: Strip) -> Strip:
    """Without the rows of weight zero, whose features may be anything."""
    if strip.weight is None or strip.weight.all():
        return strip
    used = strip.weight > 0
    return Strip(strip.start, np.ascontiguousarray(strip.x[used]), strip.y[used], strip.weight[used])


def add_sums(
    features: FeatureMap, affine: Affine, strip: Strip, layout: SumLayout, p: int, q: int, vector: FloatVector
) -> None:
    """Subtract the sums over a strip from a vector: tile (p, q), and where p = q what belongs to the panel."""
    _, x, y, weight = _used(strip)
    if not len(x):
        return
    grid = panels(features.num_features)
    root = None if weight is None else np.sqrt(weight)
    with np.errstate(over="ignore", invalid="ignore"):
        z, by_feature = _design(features, x, affine.shift, root)
        tile, cross, ends = layout.parts(vector)
        a, b = (z[grid.span(k)] if by_feature else z[:, grid.span(k)] for k in (p, q))
        part = tile[: grid.rows(p), : grid.rows(q)]
        if p != q:
            (gemm_nt if by_feature else gemm_tn)(part, a, b)
            return
        (syrk if by_feature else syrk_tn)(part, a)
        targets = np.ones((len(x), y.shape[1] + 1))
        np.subtract(y, affine.y_shift, out=targets[:, :-1])
        if root is not None:
            targets *= root[:, None]
        cross[:, : grid.rows(p)] -= targets.T @ (a.T if by_feature else a)
        t = y.shape[1]
        last = targets[:, t]
        ends[:t] -= np.einsum("ij,ij->j", targets[:, :t], targets[:, :t])
        ends[t : 2 * t] -= last @ targets[:, :t]
        ends[2 * t] -= last @ last
        ends[2 * t + 1] -= len(x)


def add_residual(features: FeatureMap, affine: Affine, strip: Strip, vector: FloatVector) -> None:
    """Add F^T W R (D, t), 1^T W R (t) and sum_i w_i R_i^2 (t) of a strip to a vector."""
    _, x, y, weight = _used(strip)
    if not len(x):
        return
    d, t = affine.coef.shape
    with np.errstate(over="ignore", invalid="ignore"):
        z = _rows(features, x, affine.shift)
        residual = _residual(z, y, affine)
        weighted = residual if weight is None else weight[:, None] * residual
        vector[: d * t].reshape(d, t)[...] += z.T @ weighted
        vector[d * t : (d + 1) * t] += weighted.sum(axis=0)
        vector[(d + 1) * t :] += np.einsum("ij,ij->j", residual, weighted)


def _residual(z: FloatMatrix, y: FloatMatrix, affine: Affine) -> FloatMatrix:
    """Y - b - F c for each column of c; columns of several alphas take the targets in turn."""
    shifted = y - affine.y_shift
    repeats = affine.coef.shape[1] // max(1, y.shape[1])
    if repeats > 1:
        shifted = np.tile(shifted, repeats)
    shifted -= affine.intercept
    shifted -= z @ affine.coef
    return shifted


def _quadratic(z: FloatMatrix, bases: Iterator[tuple[slice, FloatMatrix]], weights: FloatMatrix) -> FloatMatrix:
    """sum_j (z_i B)_j^2 e_jk for each row i and each column k of e (D, k); B comes in panels of columns."""
    total = np.zeros((len(z), weights.shape[1]))
    for span, basis in bases:
        total += np.square(z @ basis) @ weights[span]
    return total


def add_hat(
    features: FeatureMap,
    affine: Affine,
    strip: Strip,
    bases: Iterator[tuple[slice, FloatMatrix]],
    weights: FloatMatrix,
    out: FloatMatrix,
) -> None:
    """Write R (q, t), then q_i (q, k), of a strip; rows of weight zero have residuals too, and q_i without weight."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = _rows(features, strip.x, affine.shift)
        t = affine.coef.shape[1]
        out[:, :t] = _residual(z, strip.y, affine)
        out[:, t:] = _quadratic(z, bases, weights)


def add_path(
    features: FeatureMap,
    affine: Affine,
    strip: Strip,
    bases: Iterator[tuple[slice, FloatMatrix]],
    weights: FloatMatrix,
    constant: float,
    vector: FloatVector,
) -> None:
    """Add sum_i w_i R_i^2 and sum_i w_i (R_i / (1 - h_i))^2 for each alpha and target, h_i = w_i (q_i + constant).

    The columns of the coefficients are all targets of the first alpha, then of the second. Last in the vector stands
    the largest h_i of each alpha.
    """
    _, x, y, weight = _used(strip)
    if not len(x):
        return
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        z = _rows(features, x, affine.shift)
        residual = _residual(z, y, affine)
        leverage = _quadratic(z, bases, weights) + constant
        if weight is not None:
            leverage *= weight[:, None]
        columns, k = residual.shape[1], leverage.shape[1]
        scale = 1.0 if weight is None else weight[:, None]
        vector[:columns] += (scale * np.square(residual)).sum(axis=0)
        residual /= np.repeat(np.maximum(1 - leverage, MIN_SHARE), columns // k, axis=1)
        vector[columns : 2 * columns] += (scale * np.square(residual)).sum(axis=0)
        np.maximum(vector[2 * columns :], leverage.max(axis=0), out=vector[2 * columns :])
