"""The rows of a pass in feature space: strips of X, Y and weights, from memory or from a data set on disk.

On disk a chunk of X is mapped, its checksum compared, and used where it lies. That a chunk is intact does not say that
it is in its place, so the first whole digest block of each chunk is compared with the digests of the data set where
that is asked for: a chunk is what a store can lose, mix up or bring back, and one block of it says which one it is.
That costs SHA-256 of 1,024 rows a chunk, an eighth of all rows at 50 features.

Cost: X, Y and weights are read once; memory for one chunk of X and what of Y and the weights belongs to it.

What a regression in feature space needs of the rows, one strip after the other.

    sums        G = F^T W F,  F^T W [Y, 1],  [Y, 1]^T W [Y, 1]
    residual    F^T W R,  1^T W R,  R^2 weighted,     R = Y - b - F c
    hat         R, and q_i = sum_j (F_i B)_j^2 e_j for matrices B and weights e: leverages, up to a constant
    path        squares of leave-one-out residuals, summed over the rows for each of many alphas

F (n, D) is never in memory as a whole. Features and targets are taken minus a *shift*, fixed before the pass, so that
large means do not swallow what differs from row to row. Sums are of monomials: their scale comes in afterwards.

Each is a :class:`~dkrr.linalg.passes.Pass`: rows in memory are one range, those of a data set up to 64 of whole
chunks, which depend on n, d and D alone. Where D is large G is cut into tiles, one task for a tile of a range. The sums
are kept until the fit is over under a name made of what decides them, so that a fit that was interrupted goes on.

Cost
----
sums: n D^2 flops, one reading of the rows for each D^2 / 2 of 2,048^2 / 2 entries; residual: 4 n D t flops; hat and
path: 2 n D^2. Memory of a task: :func:`task_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, lcm
from typing import Any, NamedTuple

import numpy as np

from dkrr.dataset import Dataset
from dkrr.dataset.dataset import Part
from dkrr.dataset.rows import DIGEST_ROWS, block_digest, decode_floats, prefix_digest
from dkrr.errors import DamagedChunkError, DataError
from dkrr.kernels.features import FeatureMap
from dkrr.linalg.blocks import FloatMatrix, FloatVector
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.inference.leave_one_out import MIN_SHARE
from dkrr.linalg.operators import Rows
from dkrr.linalg.passes import Operands, Pass, RowRanges
from dkrr.linalg.workspace import Workspace
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import buffer, gemm_nt, gemm_tn, syrk, syrk_tn

# what of Y and the weights is read at once
TARGET_BYTES = 64 << 20


class Strip(NamedTuple):
    """A few rows: the number of the first, X (q, d) read-only, Y (q, t), weights (q,) or None."""

    start: int
    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows in memory: x (n, d), y (n, t), weight (n,) or None."""

    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """n and t."""
        return self.y.shape[0], self.y.shape[1]

    @property
    def multiple(self) -> int:
        """Rows that are gone through together: all of them."""
        return len(self.x)

    def weights(self) -> FloatVector | None:
        """All weights (n,)."""
        return self.weight

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector]:
        """Unweighted means of X, their standard deviations, and means of Y."""
        return self.x.mean(axis=0), self.x.std(axis=0), self.y.mean(axis=0)

    def sample(self, num_rows: int) -> list[Strip]:
        """Strips from everywhere, for a guess of the means; all rows here."""
        return list(self.between(0, len(self.x), -(-len(self.x) // 4)))

    def between(self, start: int, stop: int, num_rows: int, *, placed: bool = False) -> Iterator[Strip]:
        """Strips of at most ``num_rows`` rows that cover rows ``start`` to ``stop`` in order.

        ``placed`` has every chunk looked at, whether it is in its place.
        """
        for first in range(start, stop, num_rows):
            rows = slice(first, min(first + num_rows, stop))
            x = np.ascontiguousarray(self.x[rows], dtype=np.float64)
            yield Strip(first, x, self.y[rows], None if self.weight is None else self.weight[rows])

    def not_finite(self, features: FeatureMap, start: int, stop: int) -> DataError:
        """The error for sums over rows ``start`` to ``stop`` that are not finite."""
        return features.overflow(self.x[start:stop])


@dataclass(frozen=True)
class DatasetRows:
    """The same for the rows of a data set."""

    rows: Rows

    @property
    def shape(self) -> tuple[int, int]:
        dataset = self.rows.open()
        return dataset.num_rows, dataset.num_targets

    @property
    def multiple(self) -> int:
        """Whole chunks of X, and of Y and the weights too unless those would be many."""
        dataset = self.rows.open()
        together = lcm(*(array.rows_per_chunk for array in dataset.parts().values()), DIGEST_ROWS)
        width = 8 * (dataset.num_targets + 1)
        return together if together * width <= TARGET_BYTES else lcm(dataset.X.rows_per_chunk, DIGEST_ROWS)

    def weights(self) -> FloatVector | None:
        weight = self.rows.open().weight
        return None if weight is None else weight.read(0, weight.num_rows)[:, 0]

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector]:
        dataset = self.rows.open()
        # a data set gives a constant column the deviation 1, for those who divide by it
        return dataset.x_mean, decode_floats(dataset.records["X"]["std"]), dataset.y_mean

    def sample(self, num_rows: int) -> list[Strip]:
        """The first strip of each of four chunks."""
        x = self.rows.open().X
        numbers = sorted({x.num_chunks * k // 4 for k in range(4)})
        return [next(self.between(*x.span(number), num_rows)) for number in numbers]

    def between(self, start: int, stop: int, num_rows: int, *, placed: bool = False) -> Iterator[Strip]:
        dataset, step = self.rows.open(), self.multiple
        for first in range(start - start % step, stop, step):
            yield from _strips(dataset, max(first, start), min(first + step, stop), num_rows, placed)

    def not_finite(self, features: FeatureMap, start: int, stop: int) -> DataError:
        """Looks for a row that was never written first: of mapped chunks nobody else does.

        Raises
        ------
        DamagedChunkError
            There is one.
        """
        x = self.rows.open().X
        for first in range(start, stop, x.rows_per_chunk):
            x.read(first, min(first + x.rows_per_chunk, stop))
        return DataError(
            f"the sums over rows {start:,} to {stop - 1:,} are not finite ({features.kernel.describe()})",
            hint="scale the features and the targets",
        )


def _strips(dataset: Dataset, start: int, stop: int, num_rows: int, placed: bool) -> Iterator[Strip]:
    """Strips of rows whose targets and weights are read at once."""
    read: dict[Any, Any] = {name: array.read(start, stop) for name, array in dataset.parts().items() if name != "X"}
    array, size = dataset.X, dataset.X.rows_per_chunk
    for part in read if placed else ():
        _check_places(dataset, part, start, read[part])
    for first in range(start, stop, DIGEST_ROWS) if placed and size % DIGEST_ROWS else ():
        _check_places(dataset, "X", first, array.read(first, min(first + DIGEST_ROWS, stop)))
    for first in range(start - start % size, stop, size):
        chunk: Any = array.array.read((first // size, 0))
        begin, end = max(first, start), min(first + size, stop)
        if placed and size % DIGEST_ROWS == 0:
            _check_places(dataset, "X", begin, chunk[begin - first : end - first])
        for row in range(begin, end, num_rows):
            last = min(row + num_rows, end)
            weight = read["weight"][row - start : last - start, 0] if "weight" in read else None
            yield Strip(row, chunk[row - first : last - first], read["y"][row - start : last - start], weight)
        del chunk  # unmapped before the next one is mapped


def _check_places(dataset: Dataset, part: Part, start: int, rows: FloatMatrix) -> None:
    """Compare rows from ``start`` on, where a digest block begins, with the digests that prove each chunk's place.

    One digest block of each chunk; all of them where a block is longer than a chunk; and the rows left over at the end
    of the array where their chunk has no whole block.
    """
    array, record = dataset.parts()[part], dataset.records[part]
    stop, blocks = start + len(rows), record["block_digests"]
    whole = array.num_rows - array.num_rows % DIGEST_ROWS
    step = array.rows_per_chunk if array.rows_per_chunk % DIGEST_ROWS == 0 else DIGEST_ROWS
    for chunk in range(start - start % step, stop, step):
        first = max(chunk, start)
        last = first + DIGEST_ROWS
        if last <= min(stop, whole):
            number = first // DIGEST_ROWS
            good = number < len(blocks) and block_digest(rows[first - start : last - start]) == blocks[number]
        elif stop == array.num_rows:
            first, last = whole, stop
            good = prefix_digest(blocks, rows[whole - start :]) == record["digest"]
        else:
            continue
        if not good:
            index, reason = (first // array.rows_per_chunk, 0), f"rows {first} to {last - 1} are others"
            raise DamagedChunkError(
                f"chunk {index} of {array.array.location} is damaged ({reason})",
                hint="restore it, or ingest the source again",
                path=array.array.location,
                index=index,
                reason=reason,
            )


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
    return RowRanges(n, min(n, -int(-rows // multiple) * multiple))


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


def sums_length(edge: int, num_targets: int) -> int:
    """Numbers of what :func:`sums_of` takes apart."""
    return edge * (edge + num_targets + 1) + 2 * num_targets + 2


def sums_of(vector: FloatVector, edge: int, num_targets: int) -> tuple[FloatMatrix, FloatMatrix, FloatVector]:
    """Views of one tile of G with what belongs to it, all in one vector.

    tile (e, e) | F^T W [Y, 1] of the panel, transposed (t + 1, e) | diagonal of Y^T W Y, Y^T W 1, 1^T W 1, rows used
    """
    square, cross = edge * edge, edge * (edge + num_targets + 1)
    return vector[:square].reshape(edge, edge), vector[square:cross].reshape(num_targets + 1, edge), vector[cross:]


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


@dataclass(frozen=True, eq=False)
class _Algebra:
    """What the tasks of a pass compute, each of a range of rows, or of one of ``num_tiles`` tiles of G over a range."""

    features: FeatureMap
    rows: MemoryRows | DatasetRows
    ranges: RowRanges
    num_tiles: int = 1
    constant: float = 0.0

    def not_finite(self, number: int) -> DataError:
        """The error for part ``number``."""
        return self.rows.not_finite(self.features, *self.ranges.span(number // self.num_tiles))

    def strips(self, i: int, *, used: bool = True, placed: bool = False) -> Iterator[Strip]:
        """The strips of range i; ``used`` leaves out rows of weight zero, whose features may be anything."""
        for strip in self.rows.between(*self.ranges.span(i), strip_rows(self.features), placed=placed):
            start, x, y, weight = strip
            if not used or weight is None or weight.all():
                yield strip
            elif weight.any():
                kept = weight > 0
                yield Strip(start, np.ascontiguousarray(x[kept]), y[kept], weight[kept])

    def affine(self, operands: Operands) -> Affine:
        """Coefficients and shifts."""
        return Affine.unpack(
            np.array(operands["coefficients"].read()[0]), self.features.num_features, self.rows.shape[1]
        )

    def sums(self, operands: Operands, number: int, out: FloatVector) -> None:
        """Tile (p, q) of a range, and where p = q what belongs to the panel, see :func:`sums_of`."""
        affine, grid, t = self.affine(operands), panels(self.features.num_features), self.rows.shape[1]
        i, tile = divmod(number, self.num_tiles)
        p, q = _tile(tile)
        square, cross, ends = sums_of(out, grid.tile_size, t)
        part = square[: grid.rows(p), : grid.rows(q)]
        # one of the tasks of a range looks whether its chunks are in their places
        for _, x, y, weight in self.strips(i, placed=tile == 0):
            root = None if weight is None else np.sqrt(weight)
            z, by_feature = _design(self.features, x, affine.shift, root)
            a, b = (z[grid.span(k)] if by_feature else z[:, grid.span(k)] for k in (p, q))
            if p != q:
                (gemm_nt if by_feature else gemm_tn)(part, a, b)
                continue
            (syrk if by_feature else syrk_tn)(part, a)
            targets = np.ones((len(x), t + 1))
            np.subtract(y, affine.y_shift, out=targets[:, :-1])
            if root is not None:
                targets *= root[:, None]
            cross[:, : grid.rows(p)] -= targets.T @ (a.T if by_feature else a)
            last = targets[:, t]
            ends[:t] -= np.einsum("ij,ij->j", targets[:, :t], targets[:, :t])
            ends[t : 2 * t] -= last @ targets[:, :t]
            ends[2 * t :] -= np.array([last @ last, len(x)])
        np.negative(out, out=out)

    def residual(self, operands: Operands, i: int, out: FloatVector) -> None:
        """F^T W R (D, t), 1^T W R (t) and sum_i w_i R_i^2 (t)."""
        affine = self.affine(operands)
        d, t = affine.coef.shape
        for _, x, y, weight in self.strips(i):
            z, residual = self._residual(x, y, affine)
            weighted = residual if weight is None else weight[:, None] * residual
            out[: d * t].reshape(d, t)[...] += z.T @ weighted
            out[d * t : (d + 1) * t] += weighted.sum(axis=0)
            out[(d + 1) * t :] += np.einsum("ij,ij->j", residual, weighted)

    def hat(self, operands: Operands, i: int, out: FloatMatrix) -> None:
        """R (q, t), then q_i (q, k); rows of weight zero have residuals too, and q_i without weight."""
        affine, weights = self.affine(operands), np.array(operands["weights"].read())
        first, t = self.ranges.span(i)[0], affine.coef.shape[1]
        for start, x, y, _ in self.strips(i, used=False):
            rows = slice(start - first, start - first + len(x))
            z, out[rows, :t] = self._residual(x, y, affine)
            out[rows, t:] = _quadratic(z, operands, weights)

    def path(self, operands: Operands, i: int, out: FloatVector) -> None:
        """sum_i w_i (R_i / (1 - h_i))^2 for each alpha and target, h_i = w_i (q_i + constant), and the largest h_i.

        The columns of the coefficients are all targets of the first alpha, then of the second. Last in the vector
        stands the largest h_i of each alpha.
        """
        affine, weights = self.affine(operands), np.array(operands["weights"].read())
        columns, k = affine.coef.shape[1], weights.shape[1]
        for _, x, y, weight in self.strips(i):
            z, residual = self._residual(x, y, affine)
            scale: Any = 1.0 if weight is None else weight[:, None]
            leverage = scale * (_quadratic(z, operands, weights) + self.constant)
            # below MIN_SHARE 1 - h_i is rounding; whoever asked sees the largest h_i
            residual /= np.repeat(np.maximum(1 - leverage, MIN_SHARE), columns // k, axis=1)
            out[:columns] += (scale * np.square(residual)).sum(axis=0)
            np.maximum(out[columns:], leverage.max(axis=0), out=out[columns:])

    def _residual(self, x: FloatMatrix, y: FloatMatrix, affine: Affine) -> tuple[FloatMatrix, FloatMatrix]:
        """F (q, D) in whatever order of memory, and Y - b - F c (q, c); several alphas take the targets in turn."""
        matrix, by_feature = _design(self.features, x, affine.shift, None)
        z = matrix.T if by_feature else matrix
        residual = y - affine.y_shift
        if affine.coef.shape[1] > y.shape[1]:
            residual = np.tile(residual, affine.coef.shape[1] // y.shape[1])
        residual -= affine.intercept
        residual -= z @ affine.coef
        return z, residual


def _quadratic(z: FloatMatrix, operands: Operands, weights: FloatMatrix) -> FloatMatrix:
    """sum_j (z_i B)_j^2 e_jk for each row i and each column k of e (D, k); B comes in panels of columns."""
    total, p, start = np.zeros((len(z), weights.shape[1])), 0, 0
    while start < len(weights):
        basis = operands["basis"].read(p)[:, : len(weights) - start]
        p, stop = p + 1, start + basis.shape[1]
        total += np.square(z @ basis) @ weights[start:stop]
        start = stop
    return total


@dataclass(frozen=True, eq=False)
class FeatureRows:
    """n rows that a regression in feature space is fitted to, and the passes over them.

    Parameters
    ----------
    features
        F.
    rows
        In memory, or of a data set.
    workspace, scratch
        Who runs the tasks, and the location of what travels, which the caller removes; None for this process.
    """

    features: FeatureMap
    rows: MemoryRows | DatasetRows
    workspace: Workspace | None = None
    scratch: str = ""

    def sums(self, affine: Affine, add: Callable[[int, int, FloatVector], None]) -> None:
        """Call ``add(p, q, vector of sums_of)``, for p >= q, several times for each."""
        grid = panels(self.features.num_features)
        length = sums_length(grid.tile_size, self.rows.shape[1])
        folder = "" if self.workspace is None else f"sums-{key_of({'shift': affine.pack().tobytes().hex()})[:12]}"
        parts = self._pass("sums", affine, (length,), 2.0 * grid.tile_size**2, folder=folder, num_tiles=grid.num_lower)
        parts.consume(lambda number, part: add(*_tile(number % grid.num_lower), part))

    def residual(self, affine: Affine) -> FloatVector:
        """F^T W R (D, t), 1^T W R (t) and sum_i w_i R_i^2 (t) in one vector."""
        d, t = affine.coef.shape
        return self._pass("residual", affine, ((d + 2) * t,), 4.0 * d * t).sum()  # type: ignore[no-any-return]

    def hat(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix) -> FloatMatrix:
        """R and q_i of every row (n, t + k)."""
        columns, size = affine.coef.shape[1] + weights.shape[1], self.ranges.size
        parts = self._pass("hat", affine, (size, columns), 2.0 * len(basis) ** 2, basis, weights)
        if self.workspace is None:  # one range: no second array
            found: list[FloatMatrix] = []
            parts.consume(lambda _, part: found.append(part))
            return found[0]
        out = np.empty((self.ranges.n, columns))

        def add(i: int, part: FloatMatrix) -> None:
            out[i * size : (i + 1) * size] = part[: self.ranges.n - i * size]

        parts.consume(add)
        return out

    def path(
        self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix, constant: float
    ) -> tuple[FloatVector, FloatVector]:
        """Sums of squares of leave-one-out residuals, and the largest leverage of each alpha."""
        columns, k = affine.coef.shape[1], weights.shape[1]
        flops = 2.0 * len(basis) * (len(basis) + columns)
        squares, largest = np.zeros(columns), np.zeros(k)

        def add(_: int, part: FloatVector) -> None:
            np.add(squares, part[:columns], out=squares)
            np.maximum(largest, part[columns:], out=largest)

        self._pass("path", affine, (columns + k,), flops, basis, weights, constant=constant).consume(add)
        return squares, largest

    @cached_property
    def ranges(self) -> RowRanges:
        """The rows of each task."""
        return row_ranges(self.rows.shape[0], self.features, self.rows.multiple)

    def _pass(
        self,
        name: str,
        affine: Affine,
        shape: tuple[int, ...],
        row_flops: float,
        basis: FloatMatrix | None = None,
        weights: FloatMatrix | None = None,
        *,
        folder: str = "",
        **algebra: Any,
    ) -> Pass:
        """The pass of that name, whose parts have this shape."""
        task = _Algebra(self.features, self.rows, self.ranges, **algebra)
        operands = {"coefficients": [affine.pack()[None]]}
        if basis is not None and weights is not None:
            # columns that a task has in memory at once, in chunks of one width; all of them in this process
            grid = panels(len(basis))
            count = 1 if self.workspace is None else grid.num_tiles
            whole = np.pad(basis, ((0, 0), (0, -len(basis) % grid.tile_size))) if count > 1 else basis
            operands |= {"basis": np.split(whole, count, axis=1), "weights": [weights]}
        return Pass(
            name,
            getattr(task, name),
            task.not_finite,
            [row_flops * self.ranges.size] * (len(self.ranges) * task.num_tiles),
            shape,
            operands=operands,
            workspace=self.workspace,
            store=self.scratch,
            folder=folder,
            graph=f"primal {name}",
        )


def _tile(number: int) -> tuple[int, int]:
    """The tile (p, q), p >= q, of G with a number p (p + 1) / 2 + q."""
    p = (isqrt(8 * number + 1) - 1) // 2
    return p, number - p * (p + 1) // 2
