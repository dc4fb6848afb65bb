"""Passes over the rows of a ridge regression in explicit features: sums, residuals and leverages, strip by strip.

    sums        F^T W [F, Y, 1],  the diagonal of [Y, 1]^T W [Y, 1]
    residual    F^T W R,  1^T W R                       R = Y - b - F c
    hat         R, and q_i = sum_j (F_i B)_j^2 e_j for matrices B and weights e: leverages, up to a constant
    path        squares of leave-one-out residuals, summed over the rows for each of many alphas

You need it for every regression whose unknowns are D coefficients of features and not n of rows: monomials
(:class:`~dkrr.kernels.features.FeatureMap`) or kernels at centres (:class:`CentreFeatures`). Features have a
method ``design(x, operands)`` that gives F of a few rows. F (n, D) is never in memory as a whole. Features and targets
are taken minus a *shift* and means, fixed before the pass, so that large means do not swallow what differs from row to
row.

Each is a :class:`~dkrr.linalg.workspace.Pass`: rows in memory of this process are one range, others up to 64 of whole
chunks, which depend on n, d and D alone. Where D is large G is cut into tiles, one task for a tile of a range. The sums
are kept until the fit is over under a name made of what decides them, so that a fit that was interrupted goes on.

On disk a chunk of X is mapped, its checksum compared, and used where it lies. That a chunk is intact does not say that
it is in its place, so the first whole digest block of each chunk is compared with the digests of the data set in the
sums: a chunk is what a store can lose, mix up or bring back, and one block of it says which one it is. That costs
SHA-256 of 1,024 rows a chunk, an eighth of all rows at 50 features.

Cost
----
sums: n D^2 flops, one reading of the rows for each tile of G; residual: 4 n D t flops; hat and path: 2 n D^2. Memory of
a task: :func:`task_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from dkrr.dataset import Dataset
from dkrr.dataset.dataset import Part
from dkrr.dataset.rows import DIGEST_ROWS, block_digest, decode_floats, prefix_digest
from dkrr.errors import DamagedChunkError, DataError
from dkrr.kernels import Kernel
from dkrr.kernels.base import mirror
from dkrr.kernels.features import FeatureMap, not_finite
from dkrr.linalg.catalogue import key_of
from dkrr.linalg.leave_one_out import MIN_SHARE
from dkrr.linalg.operators import Centring, FloatMatrix, FloatVector, Rows, centre_dataset, centre_targets
from dkrr.linalg.workspace import ROW_MULTIPLE, Operands, Pass, RowRanges, Workspace
from dkrr.store.chunks import buffer
from dkrr.tiles import TileGrid
from dkrr.tiles.blas import gemm_nt, gemm_tn, syrk, syrk_tn, trsm_right

# features of a strip: many enough rows for a product with a tile, else what stays in a cache
STRIP_BYTES, CACHED_BYTES = 16 << 20, 2 << 20

MIN_STRIP_ROWS, GOOD_STRIP_ROWS, MAX_STRIP_ROWS = 128, 1024, 4096

# a task takes at least this long, at rates that one core reaches
TASK_SECONDS, FLOP_SECONDS, BYTE_SECONDS = 0.1, 3e-11, 3e-10

MAX_RANGES = 64

# what all tiles of all ranges together may take on disk, unless a few ranges already take more
SUMS_BYTES, FEWEST_RANGES = 4 << 30, 4

# of a range with a whole G of its own, which is written, read and added in 5 % of the time then
WHOLE_ROWS = 10_000

CHUNK_BYTES = 4 << 20

PANEL = 2048


@dataclass(frozen=True, eq=False)
class CentreFeatures:
    """phi(x) = L^-1 k(Z, x), for centres (m, d), centred as the rows are, and L (m, m)."""

    kernel: Kernel
    centers: FloatMatrix
    factor: FloatMatrix

    # a row takes m^2 flops: all of G is summed by one task of a range
    has_panels = False

    def __getstate__(self) -> dict[str, Any]:
        """Without what goes through the store."""
        return {"kernel": self.kernel, "num_features": self.num_features}

    @cached_property
    def num_features(self) -> int:
        """m."""
        return len(self.centers)

    # numbers that are made on the way to the features of a row
    num_monomials = property(lambda self: self.num_features)

    def operands(self) -> dict[str, Sequence[FloatMatrix]]:
        """What :meth:`design` reads."""
        return {"centers": [self.centers], "factor": [self.factor]}

    def design(self, x: FloatMatrix, operands: Operands, room: FloatMatrix) -> FloatMatrix:
        """The features of rows (q, d), row by row in ``room``, which holds q m numbers."""
        block = room.reshape(len(x), self.num_features)
        self.kernel.block(x, np.array(operands["centers"].read()), block)
        trsm_right(block, operands["factor"].read())
        return block

    def typical(self, mean: FloatVector, std: FloatVector) -> None:
        """Their means are not known before they are summed."""


Features = FeatureMap | CentreFeatures


class Strip(NamedTuple):
    """A few rows: the number of the first, X (q, d) read-only, Y (q, t), weights (q,) or None."""

    start: int
    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None

    def used(self) -> Strip | None:
        """Without rows of weight zero, whose features may be anything; None if that is all of them."""
        if self.weight is None or self.weight.all():
            return self
        kept = self.weight > 0
        return Strip(self.start, self.x[kept], self.y[kept], self.weight[kept]) if kept.any() else None


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """Rows in memory: x (n, d), y (n, t), weight (n,) or None. To workers they travel as operands."""

    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None = None
    hidden: tuple[int, ...] = ()

    multiple = 1

    def __getstate__(self) -> dict[str, Any]:
        """Without the rows."""
        return {"shape": self.shape}

    @cached_property
    def shape(self) -> tuple[int, int]:
        """n and t."""
        return self.y.shape[0], self.y.shape[1]

    def weights(self) -> FloatVector | None:
        """All weights (n,)."""
        return self.weight

    def without(self, rows: Sequence[int]) -> MemoryRows:
        """The same with the weight 0 for these rows."""
        weight = np.ones(len(self.y)) if self.weight is None else self.weight.copy()
        weight[list(rows)] = 0.0
        return MemoryRows(self.x, self.y, weight, tuple(rows))

    def whole(self) -> MemoryRows:
        """All rows in memory."""
        return self

    def moments(self) -> tuple[FloatVector, FloatVector]:
        """Unweighted means of X and their standard deviations."""
        return self.x.mean(axis=0), self.x.std(axis=0)

    def centring(self) -> Centring:
        """Weighted means of Y."""
        return centre_targets(lambda: [(self.y, self.weight)], self.y.shape[1])

    def operands(self, ranges: RowRanges) -> dict[str, Sequence[FloatMatrix]]:
        """X, Y and the weights, one matrix a range."""
        parts = {"x": self.x, "y": self.y, "weight": None if self.weight is None else self.weight[:, None]}
        spans = [slice(*ranges.span(i)) for i in range(len(ranges))]
        return {name: [part[span] for span in spans] for name, part in parts.items() if part is not None and part.size}

    def strips(
        self, operands: Operands, ranges: RowRanges, i: int, num_rows: int, *, placed: bool = False
    ) -> Iterator[Strip]:
        """Strips of at most ``num_rows`` rows that cover range i in order.

        ``placed`` has every chunk looked at, whether it is in its place.
        """
        part = {name: operands[name].read(i) for name in ("x", "y", "weight") if name in operands}
        start, stop = ranges.span(i)
        for first in range(0, stop - start, num_rows):
            rows = slice(first, min(first + num_rows, stop - start))
            x = np.ascontiguousarray(part["x"][rows], dtype=np.float64)
            y = part["y"][rows] if "y" in part else np.empty((len(x), 0))
            yield Strip(start + first, x, y, part["weight"][rows, 0] if "weight" in part else None)

    def not_finite(self, kernel: Kernel, start: int, stop: int) -> DataError:
        """The error for sums over rows ``start`` to ``stop`` that are not finite."""
        return not_finite(kernel, self.x[start:stop])


@dataclass(frozen=True)
class DatasetRows:
    """The same for the rows of a data set.

    With ``in_place`` chunks of X are mapped and used where they lie, in strips that end where chunks do. Without, rows
    are copied, and centred as the kernel wants them, in strips whose place does not depend on chunks. Rows that are
    ``hidden`` have the weight 0.
    """

    rows: Rows
    in_place: bool = True
    hidden: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        dataset = self.rows.open()
        return dataset.num_rows, dataset.num_targets

    @property
    def multiple(self) -> int:
        """Rows that are read together: those of a chunk, all parts have the same, or whole digest blocks."""
        size = self.rows.open().X.rows_per_chunk
        return (size if size % DIGEST_ROWS == 0 else DIGEST_ROWS) if self.in_place else ROW_MULTIPLE

    def weights(self) -> FloatVector | None:
        weight = self.rows.open().weight
        return self._weights(0, self.shape[0], None if weight is None else weight.read(0, weight.num_rows)[:, 0])

    def _weights(self, start: int, stop: int, weight: FloatVector | None) -> FloatVector | None:
        """Those of rows ``start`` to ``stop``, given their weights in the data set."""
        hidden = [row - start for row in self.hidden if start <= row < stop]
        if hidden:
            weight = np.ones(stop - start) if weight is None else weight.copy()
            weight[hidden] = 0.0
        return weight

    def without(self, rows: Sequence[int]) -> DatasetRows:
        return replace(self, hidden=tuple(rows))

    def whole(self) -> MemoryRows:
        dataset, (n, _) = self.rows.open(), self.shape
        return MemoryRows(dataset.X.read(0, n), dataset.targets.read(0, n), self.weights())

    def moments(self) -> tuple[FloatVector, FloatVector]:
        dataset = self.rows.open()
        # a data set gives a constant column the deviation 1, for those who divide by it
        return dataset.x_mean, decode_floats(dataset.records["X"]["std"])

    def centring(self) -> Centring:
        return centre_dataset(self.rows.open(), self._weights)

    def operands(self, ranges: RowRanges) -> dict[str, Sequence[FloatMatrix]]:
        return {}

    def strips(
        self, operands: Operands, ranges: RowRanges, i: int, num_rows: int, *, placed: bool = False
    ) -> Iterator[Strip]:
        dataset, (start, stop) = self.rows.open(), ranges.span(i)
        size = self.multiple if self.in_place else num_rows
        is_mapped = self.in_place and size == dataset.X.rows_per_chunk
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            parts: dict[Any, Any] = {k: part.read(begin, end) for k, part in dataset.parts().items() if k != "X"}
            mapped = dataset.X.array.read((begin // size, 0))[: end - begin] if is_mapped else None
            x: Any = self.rows.read(begin, end) if mapped is None else mapped
            for part in (*parts, "X") if placed and self.in_place else ():
                check_place(dataset, part, begin, x if part == "X" else parts[part])
            y = parts.get("y", np.empty((end - begin, 0)))
            weight = self._weights(begin, end, parts["weight"][:, 0] if "weight" in parts else None)
            for first in range(0, end - begin, num_rows):
                rows = slice(first, first + num_rows)
                yield Strip(begin + first, x[rows], y[rows], None if weight is None else weight[rows])
            del x, mapped  # unmapped before the next one is mapped

    def not_finite(self, kernel: Kernel, start: int, stop: int) -> DataError:
        """Looks for a row that was never written first: of mapped chunks nobody else does.

        Raises
        ------
        DamagedChunkError
            There is one.
        """
        x = self.rows.open().X
        for first, last in x.blocks(first=start, end=stop):
            x.read(first, last)
        return DataError(
            f"the sums over rows {start:,} to {stop - 1:,} are not finite ({kernel.describe()})",
            hint="scale the features and the targets",
        )


def check_place(dataset: Dataset, part: Part, start: int, rows: FloatMatrix) -> None:
    """Compare the first digest block of rows from ``start`` on, where one begins: its digest proves their place.

    The rows left over at the end of the array are compared where there is no whole block.

    Raises
    ------
    DamagedChunkError
        The rows are others.
    """
    array, record, block = dataset.parts()[part], dataset.records[part], rows[:DIGEST_ROWS]
    blocks = record["block_digests"]
    if len(block) == DIGEST_ROWS:
        good = block_digest(block) in blocks[start // DIGEST_ROWS :][:1]
    else:
        good = prefix_digest(blocks, block) == record["digest"]
    if not good:
        index, reason = (start // array.rows_per_chunk, 0), f"rows {start} to {start + len(block) - 1} are others"
        raise DamagedChunkError(
            f"chunk {index} of {array.array.location} is damaged ({reason})",
            hint="restore it, or ingest the source again",
            path=array.array.location,
            index=index,
            reason=reason,
        )


def panels(features: Features) -> TileGrid:
    """The features in panels, of at most 2,048 where they may be made again: G consists of a tile for each pair."""
    count = features.num_features
    return TileGrid(count, min(PANEL, count) if features.has_panels else count)


def strip_rows(features: Features) -> int:
    """Rows whose features are in memory at once: 1,024 if these take 16 MiB at most, 4,096 in 2 MiB, 128 at least."""
    row_bytes = 8 * features.num_monomials
    rows = max(min(STRIP_BYTES // row_bytes, GOOD_STRIP_ROWS), CACHED_BYTES // row_bytes)
    return int(min(MAX_STRIP_ROWS, max(MIN_STRIP_ROWS, rows // 16 * 16)))


def row_ranges(n: int, features: Features, multiple: int) -> RowRanges:
    """At most 64 ranges of whole chunks, of 0.1 s each at least; fewer where the tiles of all would fill a disk."""
    grid = panels(features)
    edge = grid.tile_size
    row_seconds = 2 * edge**2 * FLOP_SECONDS + 8 * features.num_monomials * BYTE_SECONDS
    most = max(FEWEST_RANGES, min(MAX_RANGES, SUMS_BYTES // (8 * edge * edge * grid.num_lower)))
    rows = max(n / most, TASK_SECONDS / row_seconds)
    if not features.has_panels:
        count = max(1, int(n / max(rows, WHOLE_ROWS)))
        rows = n / (count if count < 4 else count - count % 4)  # each of a few workers gets as many
    return RowRanges(n, min(n, -int(-rows // multiple) * multiple))


def task_memory(features: Features, num_inputs: int, num_targets: int, num_columns: int = 0) -> int:
    """Bytes of a task besides the interpreter's.

    A tile and its copy on the way to disk, a strip of monomials and its copy, a chunk of X and its rows of Y,
    coefficients of ``num_columns`` columns.
    """
    edge = panels(features).tile_size
    strip = 16 * strip_rows(features) * (features.num_monomials + num_inputs + 2 * num_targets)
    coefficients = 24 * features.num_features * (num_columns + num_targets)
    return 16 * edge * (edge + num_targets) + strip + 4 * CHUNK_BYTES + coefficients


def _subtract_product(c: FloatMatrix, a: FloatMatrix, b: FloatMatrix | None) -> None:
    """C -= A^T B, or the lower triangle of C -= A^T A; A and B in either order of memory."""
    by_row = a.strides[1] == a.itemsize
    if b is None:
        syrk_tn(c, a) if by_row else syrk(c, a.T)
    else:
        gemm_tn(c, a, b) if by_row else gemm_nt(c, a.T, b.T)


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
    phase
        Name of the passes, if they are not those of the primal solver.
    shift : (D,), optional
        Subtracted from F.
    centring
        Subtracted from Y.
    """

    features: Features
    rows: MemoryRows | DatasetRows
    workspace: Workspace | None = None
    scratch: str = ""
    phase: str = ""
    shift: FloatVector | None = None
    centring: Centring | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs."""
        return self.__dict__ | {"workspace": None, "shift": None, "centring": None}

    def about(self, shift: FloatVector | None, centring: Centring | None) -> FeatureRows:
        """The same rows, their features and targets less these."""
        return replace(self, shift=shift, centring=centring)

    def without(self, rows: Sequence[int]) -> FeatureRows:
        """The same with the weight 0 for these rows, about nothing."""
        return replace(self, rows=self.rows.without(rows), shift=None, centring=None)

    @cached_property
    def ranges(self) -> RowRanges:
        """The rows of each task."""
        n = self.rows.shape[0]
        return row_ranges(n, self.features, n if self.workspace is None else self.rows.multiple)

    # --- what is asked for --------------------------------------------------------------------------------------------

    def sums(self) -> tuple[FloatMatrix, FloatMatrix, FloatVector]:
        """F^T W F (D, D), F^T W [Y, 1] (D, t + 1), and the diagonal of [Y, 1]^T W [Y, 1] (t + 1)."""
        size, t, grid = self.features.num_features, self.rows.shape[1], panels(self.features)
        edge, tiles = grid.tile_size, list(grid.lower())
        gram, cross, squares = np.zeros((size, size)), np.zeros((size, t + 1)), np.zeros(t + 1)

        def add(number: int, part: FloatMatrix) -> None:
            p, q = tiles[number % len(tiles)]
            gram[grid.span(p), grid.span(q)] += part[: grid.rows(p), : grid.rows(q)]
            if p == q:
                cross[grid.span(p)] += part[edge:, : grid.rows(p)].T
                squares[:] += part[edge:, edge] if p == 0 else 0.0

        about: dict[str, Any] = {name: matrices[0].tobytes().hex() for name, matrices in self._about().items()}
        about["rows"] = self.ranges.size
        if self.rows.hidden:
            about["hidden"] = self.rows.hidden
        folder = "" if self.workspace is None else f"sums-{key_of(about)[:12]}"
        shape = (edge + t + 1, edge + 1)
        self._pass("sums", shape, 2.0 * edge**2, {}, folder=folder, num_tiles=len(tiles)).consume(add)
        mirror(gram)
        return gram, cross, squares

    def residual(self, coef: FloatMatrix, intercept: FloatVector) -> FloatMatrix:
        """F^T W R and below it 1^T W R (D + 1, t)."""
        size, t = coef.shape
        found = self._pass("residual", (size + 1, t), 4.0 * size * t, {"coef": [coef], "intercept": [intercept[None]]})
        return found.sum()  # type: ignore[no-any-return]

    def hat(self, coef: FloatMatrix, intercept: FloatVector, basis: FloatMatrix, weights: FloatMatrix) -> FloatMatrix:
        """R and q_i of every row (n, t + k); rows of weight zero have residuals too, and q_i without weight."""
        columns, (n, size) = coef.shape[1] + weights.shape[1], (self.ranges.n, self.ranges.size)
        found = np.empty((n, columns))

        def add(i: int, part: FloatMatrix) -> None:
            found[i * size : (i + 1) * size] = part[: n - i * size]

        operands = self._leverage_operands(coef, intercept, basis, weights)
        self._pass("hat", (size, columns), 2.0 * len(basis) ** 2, operands).consume(add)
        return found

    def picked(self, rows: Sequence[int], coef: FloatMatrix, intercept: FloatVector) -> FloatMatrix:
        """F and R (k, D + t) of k rows in any order."""
        shape, operands = (len(rows), sum(coef.shape)), {"coef": [coef], "intercept": [intercept[None]]}
        picks = {"picked": [np.array([rows], dtype=np.float64)]}
        return self._pass("picked", shape, 0.0, operands | picks).sum()  # type: ignore[no-any-return]

    def path(
        self,
        coef: FloatMatrix,
        intercept: FloatVector,
        basis: FloatMatrix,
        weights: FloatMatrix,
        constant: float,
    ) -> tuple[FloatVector, FloatVector]:
        """sum_i w_i (R_i / (1 - h_i))^2, h_i = w_i (q_i + constant), and the largest h_i of each alpha.

        The columns of the coefficients are all targets of the first alpha, then of the second.
        """
        columns = coef.shape[1]
        squares, largest = np.zeros(columns), np.zeros(weights.shape[1])

        def add(_: int, part: FloatVector) -> None:
            np.add(squares, part[:columns], out=squares)
            np.maximum(largest, part[columns:], out=largest)

        operands = self._leverage_operands(coef, intercept, basis, weights) | {"constant": [np.array([[constant]])]}
        flops = 2.0 * len(basis) * (len(basis) + columns)
        self._pass("path", (columns + len(largest),), flops, operands).consume(add)
        return squares, largest

    # --- what tasks compute -------------------------------------------------------------------------------------------

    def _compute_sums(self, operands: Operands, number: int, out: FloatMatrix) -> None:
        """Tile (p, q) of G over a range (e, e); where p = q also F^T W [Y, 1] of the panel, and the diagonal.

        tile                   -
        [Y, 1]^T W F (t + 1)   diagonal of [Y, 1]^T W [Y, 1]
        """
        grid, t = panels(self.features), self.rows.shape[1]
        i, tile = divmod(number, grid.num_lower)
        p, q = list(grid.lower())[tile]
        part, below = out[: grid.rows(p), : grid.rows(q)], out[grid.tile_size :]
        # one of the tasks of a range looks whether its chunks are in their places
        for _, x, y, weight in self._used(operands, i, placed=tile == 0):
            root = None if weight is None else np.sqrt(weight)
            z = self._design(operands, x, root)
            a = z[:, grid.span(p)]
            _subtract_product(part, a, None if p == q else z[:, grid.span(q)])
            if p == q:
                targets = np.ones((len(x), t + 1))
                targets[:, :t] = self._targets(operands, y)
                if root is not None:
                    targets *= root[:, None]
                below[:, : grid.rows(p)] -= targets.T @ a
                below[:, -1] -= np.einsum("ij,ij->j", targets, targets)
        np.negative(out, out=out)

    def _compute_residual(self, operands: Operands, i: int, out: FloatMatrix) -> None:
        for _, x, y, weight in self._used(operands, i):
            z, residual = self._residual(operands, x, y)
            weighted = residual if weight is None else weight[:, None] * residual
            out[:-1] += z.T @ weighted
            out[-1] += weighted.sum(axis=0)

    def _compute_hat(self, operands: Operands, i: int, out: FloatMatrix) -> None:
        first, weights = self.ranges.span(i)[0], np.array(operands["weights"].read())
        for start, x, y, _ in self.rows.strips(operands, self.ranges, i, strip_rows(self.features)):
            rows = slice(start - first, start - first + len(x))
            z, residual = self._residual(operands, x, y)
            out[rows] = np.hstack([residual, _quadratic(z, operands, weights)])

    def _compute_picked(self, operands: Operands, i: int, out: FloatMatrix) -> None:
        picked = operands["picked"].read()[0].astype(np.int64)
        for start, x, y, _ in self.rows.strips(operands, self.ranges, i, strip_rows(self.features)):
            inside = np.flatnonzero((picked >= start) & (picked < start + len(x)))
            if len(inside):
                rows = picked[inside] - start
                out[inside] = np.hstack(self._residual(operands, x[rows], y[rows]))

    def _compute_path(self, operands: Operands, i: int, out: FloatVector) -> None:
        weights, constant = np.array(operands["weights"].read()), float(operands["constant"].read()[0, 0])
        for _, x, y, weight in self._used(operands, i):
            z, residual = self._residual(operands, x, y)
            columns = residual.shape[1]
            scale: Any = 1.0 if weight is None else weight[:, None]
            leverage = scale * (_quadratic(z, operands, weights) + constant)
            # below MIN_SHARE 1 - h_i is rounding; whoever asked sees the largest h_i
            residual /= np.repeat(np.maximum(1 - leverage, MIN_SHARE), columns // weights.shape[1], axis=1)
            out[:columns] += (scale * np.square(residual)).sum(axis=0)
            np.maximum(out[columns:], leverage.max(axis=0), out=out[columns:])

    def _used(self, operands: Operands, i: int, *, placed: bool = False) -> Iterator[Strip]:
        strips = self.rows.strips(operands, self.ranges, i, strip_rows(self.features), placed=placed)
        return (used for used in map(Strip.used, strips) if used is not None)

    def _design(self, operands: Operands, x: FloatMatrix, root: FloatVector | None = None) -> FloatMatrix:
        """F - shift, each row times its ``root``."""
        room: FloatMatrix = buffer("primal", (self.features.num_monomials, len(x)), np.float64)
        z = self.features.design(x, operands, room)
        shift = operands["shift"].read()[0] if "shift" in operands else 0.0
        if z is x and (root is not None or "shift" in operands):
            z = np.subtract(x, shift, out=room.reshape(x.shape))
        elif "shift" in operands:
            z -= shift
        if root is not None:
            z *= root[:, None]
        return z

    def _targets(self, operands: Operands, y: FloatMatrix) -> FloatMatrix:
        if "targets" not in operands:
            return y
        mean, rest = operands["targets"].read()
        return np.asarray((y - mean) - rest)

    def _residual(self, operands: Operands, x: FloatMatrix, y: FloatMatrix) -> tuple[FloatMatrix, FloatMatrix]:
        """F (q, D), and Y - b - F c (q, c); several alphas take the targets in turn."""
        z, coef = self._design(operands, x), operands["coef"].read()
        residual = np.tile(self._targets(operands, y), coef.shape[1] // y.shape[1])
        residual -= operands["intercept"].read()[0]
        residual -= z @ coef
        return z, residual

    # --- how ----------------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Sequence[FloatMatrix]]:
        shift, centring = self.shift, self.centring
        found: dict[str, Sequence[FloatMatrix]] = {} if shift is None else {"shift": [shift[None]]}
        return found | ({} if centring is None else {"targets": [np.stack([centring.mean, centring.rest])]})

    def _leverage_operands(
        self, coef: FloatMatrix, intercept: FloatVector, basis: FloatMatrix, weights: FloatMatrix
    ) -> dict[str, Sequence[FloatMatrix]]:
        # columns that a task has in memory at once, in chunks of one width; all of them in this process
        edge = len(basis) if self.workspace is None else min(PANEL, len(basis))
        whole = np.pad(basis, ((0, 0), (0, -len(basis) % edge)))
        parts = np.split(whole, whole.shape[1] // edge, axis=1)
        return {"coef": [coef], "intercept": [intercept[None]], "basis": parts, "weights": [weights]}

    def _not_finite(self, num_tiles: int, number: int) -> DataError:
        return self.rows.not_finite(self.features.kernel, *self.ranges.span(number // num_tiles))

    def _pass(
        self,
        name: str,
        shape: tuple[int, ...],
        row_flops: float,
        operands: Mapping[str, Sequence[FloatMatrix]],
        *,
        folder: str = "",
        num_tiles: int = 1,
    ) -> Pass:
        """The pass of that name, whose parts have this shape."""
        return Pass(
            self.phase or name,
            getattr(self, f"_compute_{name}"),
            partial(self._not_finite, num_tiles),
            [row_flops * self.ranges.size] * (len(self.ranges) * num_tiles),
            shape,
            operands=self.features.operands() | self.rows.operands(self.ranges) | self._about() | dict(operands),
            workspace=self.workspace,
            store=self.scratch,
            folder=folder,
            graph=self.phase or f"primal {name}",
        )


def _quadratic(z: FloatMatrix, operands: Operands, weights: FloatMatrix) -> FloatMatrix:
    """sum_j (z_i B)_j^2 e_jk for each row i and each column k of e (D, k); B comes in panels of columns."""
    total, p, start = np.zeros((len(z), weights.shape[1])), 0, 0
    while start < len(weights):
        basis = operands["basis"].read(p)[:, : len(weights) - start]
        p, stop = p + 1, start + basis.shape[1]
        total += np.square(z @ basis) @ weights[start:stop]
        start = stop
    return total
