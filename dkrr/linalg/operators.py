"""RidgeOperator: A = S K S + alpha I on tiles, over a kernel and rows, a stored Gram matrix, or a given matrix.

The operator is a small description that travels with every task; each process opens the rows once. Kernel entries are
evaluated in float64 and cast. S = diag(sqrt(weights)) is applied on the fly, so a stored Gram matrix serves every
weighting and every alpha.

Right-hand sides: vectors in blocks of rows, their arithmetic, an alpha for each target, and an intercept.

No temporary array of the arithmetic is as long as the columns, and every sum has one order.

The intercept b is the constant in f(z) + b that the ridge does not shrink:

    minimise  sum_i w_i (y_i - f(x_i) - b)^2 + alpha |f|^2

    | A    s | | u |   | S Y |        A = S K S + alpha I,  s = sqrt(w),  S = diag(s),  dual_coef = S u
    | s^T  0 | | b | = |  0  |

    v = A^-1 s,    b = s^T A^-1 S Y / s^T v,    u = A^-1 S Y - b v,    s^T u = 0

Adding a number to a target adds it to b and changes nothing else. So every solver is given targets whose weighted mean
is zero: what it computes does not lose digits to a large mean, and its relative residual |R| / |S (Y - mean)|,
R = S Y - A u - b s, says the same for y and for y + 1e6. A constant target leaves nothing to solve: u = 0.

Where u is much smaller than b v, because f + b fits closely and f alone could not, digits are lost in the difference.
Iterative refinement brings them back: the residuals of both equations on the right, the same factor, and u is corrected
until what is subtracted is not larger than u.

Systems in memory are solved by :func:`solve_bordered`; conjugate gradients iterate in the plane s^T u = 0
(:mod:`dkrr.linalg.cg_solver`).

Cost
----
Three passes over y, and O(n t) flops.

References
----------
Saunders, Gammerman and Vovk (1998) have no intercept; for this system see Suykens and Vandewalle, Least squares support
vector machine classifiers, Neural Processing Letters 9 (1999).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray, open_dataset
from dkrr.dataset.dataset import before_appends
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.kernels import Kernel
from dkrr.store.chunks import ChunkArray, FloatArray
from dkrr.tiles import TileGrid, TileMatrix

BLOCK_ROWS = 4096

FloatMatrix = NDArray[np.float64]

FloatVector = NDArray[np.float64]

Indices = NDArray[np.int64]
Floats = FloatMatrix


def row_blocks(n: int, most: int = BLOCK_ROWS) -> Iterator[slice]:
    """0 .. n in slices of at most so many."""
    for start in range(0, n, most):
        yield slice(start, min(start + most, n))


def weighted(block: FloatArray, left: FloatVector | None, right: FloatVector | None = None) -> Any:
    """S K T in place for a block K, the diagonal ``left`` of S (rows) and ``right`` of T (columns; else that of S).

    K itself where nothing is weighted.
    """
    if left is not None:
        block *= left[:, None]
        block *= left if right is None else right
    return block


def dots(a: FloatMatrix, b: FloatMatrix) -> FloatVector:
    """a_k^T b_k for every column k, (t,)."""
    total = np.zeros(a.shape[1])
    for rows in row_blocks(len(a)):
        total += np.einsum("ij,ij->j", a[rows], b[rows])
    return total


def norms(a: FloatMatrix) -> FloatVector:
    """|a_k| for every column k, (t,)."""
    return np.sqrt(dots(a, a))


def largest(a: FloatMatrix) -> FloatVector:
    """max |a_ik| for every column k, (t,)."""
    return np.asarray(np.maximum(a.max(axis=0), -a.min(axis=0)))


def ratio(a: FloatVector, b: FloatVector) -> FloatVector:
    """a / b, 0 where b is 0; no number where it is none."""
    return np.divide(a, b, out=np.zeros_like(a), where=~(b <= 0))


def add_scaled(y: FloatMatrix, c: FloatVector, x: FloatMatrix, columns: Indices | None = None) -> None:
    """y_k += c_k x_k in place, for all columns of y or those that are named."""
    for rows in row_blocks(len(y)):
        if columns is None or len(columns) == y.shape[1]:
            y[rows] += c * x[rows]
        else:
            y[rows, columns] += c * x[rows]


def take(a: FloatMatrix, columns: Indices) -> FloatMatrix:
    """The named columns in C order; ``a`` itself when those are all."""
    return a if len(columns) == a.shape[1] else np.take(a, columns, axis=1)


MAX_BLOCK_COLUMNS = 256


@dataclass(frozen=True)
class BlockColumns:
    """An (n, t) matrix in blocks of b rows (those of a :class:`TileGrid`) and at most 256 columns."""

    array: ChunkArray
    grid: TileGrid

    @classmethod
    def create(cls, store: Any, path: str, grid: TileGrid, num_columns: int, dtype: str) -> BlockColumns:
        """Create the matrix, or open it when it exists with the same parameters."""
        chunks = (grid.tile_size, min(num_columns, MAX_BLOCK_COLUMNS))
        return cls(ChunkArray.create(store, path, shape=(grid.n, num_columns), chunks=chunks, dtype=dtype), grid)

    @property
    def num_columns(self) -> int:
        """t."""
        return self.array.shape[1]

    @property
    def num_panels(self) -> int:
        """Number of column blocks."""
        return self.array.num_chunks[1]

    def columns(self, panel: int) -> slice:
        """Columns of a column block."""
        width = self.array.chunks[1]
        return slice(panel * width, min((panel + 1) * width, self.num_columns))

    def is_valid(self, i: int, panel: int) -> bool:
        return self.array.is_valid((i, panel))

    def read(self, i: int, panel: int) -> FloatArray:
        """Block (i, panel), a copy without padding."""
        columns = self.columns(panel)
        block = self.array.read((i, panel))[: self.grid.rows(i), : columns.stop - columns.start]
        return np.array(block, order="C")

    def write(self, i: int, panel: int, block: FloatArray) -> None:
        padded = np.full(self.array.chunks, np.nan, self.array.numpy_dtype)
        padded[: block.shape[0], : block.shape[1]] = block
        self.array.write((i, panel), padded)

    def fill(self, values: FloatArray) -> BlockColumns:
        """Write all blocks from a matrix (n, t) in memory; the matrix of blocks itself."""
        for i in range(self.grid.num_tiles):
            self.write_rows(i, values[self.grid.span(i)])
        return self

    def whole(self, panel: int | None = None) -> FloatMatrix:
        """All rows of one column block, or of all of them, in float64."""
        columns = slice(0, self.num_columns) if panel is None else self.columns(panel)
        found = np.empty((self.grid.n, columns.stop - columns.start))
        for i in range(self.grid.num_tiles):
            found[self.grid.span(i)] = self.read_rows(i) if panel is None else self.read(i, panel)
        return found

    def read_rows(self, i: int) -> FloatArray:
        """All columns of row block i (rows, t)."""
        return np.hstack([self.read(i, panel) for panel in range(self.num_panels)])

    def write_rows(self, i: int, rows: FloatArray) -> None:
        """All columns of row block i."""
        for panel in range(self.num_panels):
            self.write(i, panel, rows[:, self.columns(panel)])


Blocks = Callable[[], Iterable[tuple[FloatMatrix, FloatVector | None]]]

MAX_REFINEMENTS = 3
# b v may be so many times as large as u before the rounding of their difference counts
MAX_GROWTH = 10.0
# half a unit in the last place: a target that varies at all varies by more
CONSTANT = 2.0**-54


@dataclass(frozen=True)
class Centring:
    """What is subtracted from targets before they are solved for.

    Parameters
    ----------
    mean : (t,)
        The weighted mean, as rounding leaves it.
    rest : (t,)
        The weighted mean of y - mean.
    constant : (t,) bool
        Targets that are the same number in every row of positive weight.
    """

    mean: FloatVector
    rest: FloatVector
    constant: NDArray[np.bool_]

    @property
    def offset(self) -> FloatVector:
        """mean + rest (t,)."""
        return self.mean + self.rest

    def take(self, targets: list[int]) -> Centring:
        """The same for some of the targets."""
        return Centring(self.mean[targets], self.rest[targets], self.constant[targets])

    def apply(self, y: FloatMatrix) -> FloatMatrix:
        """Y - mean - rest (rows, t), a new array; zero for a constant target."""
        centred: FloatMatrix = (y - self.mean) - self.rest
        centred[:, self.constant] = 0.0
        return centred


def centre_targets(blocks: Blocks, num_targets: int) -> Centring:
    """Weighted means of targets that are read a block at a time.

    Parameters
    ----------
    blocks
        Gives Y (rows, t) and weights (rows,) or None, block after block, each time it is called.

    Raises
    ------
    DataError
        A mean is not finite: the targets or the weights are too large.
    """
    mean, rest = np.zeros(num_targets), np.zeros(num_targets)
    for part in (mean, rest):
        total, whole = np.zeros(num_targets), 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            for y, weight in blocks():
                centred = (y - mean) - rest
                total += centred.sum(axis=0) if weight is None else weight @ centred
                whole += float(len(y) if weight is None else weight.sum())
            part += total / whole if whole > 0 else 0.0
    if not (np.isfinite(mean).all() and np.isfinite(rest).all()):
        target = int(np.argmin(np.isfinite(mean) & np.isfinite(rest)))
        raise DataError(
            f"the weighted mean of target {target} is {mean[target]:.3g}, which cannot be computed with",
            hint="scale the targets or the weights",
        )
    varies, largest = np.zeros(num_targets), np.zeros(num_targets)
    for y, weight in blocks():
        used = y if weight is None else y[weight > 0]
        varies = np.maximum(varies, np.abs((used - mean) - rest).max(axis=0, initial=0.0))
        largest = np.maximum(largest, np.abs(used).max(axis=0, initial=0.0))
    return Centring(mean, rest, varies <= CONSTANT * largest)


def without_means(
    y: FloatMatrix, weight: FloatVector | None, fit_intercept: bool
) -> tuple[FloatMatrix, Centring | None]:
    """Targets in memory less their weighted means, and what was subtracted: nothing without an intercept."""
    centring = centre_targets(lambda: [(y, weight)], y.shape[1]) if fit_intercept else None
    return y if centring is None else centring.apply(y), centring


def offset_of(centring: Centring | None) -> FloatVector | float:
    """What was subtracted from targets (t,), 0 without an intercept."""
    return 0.0 if centring is None else centring.offset


def centre_dataset(dataset: Dataset, weights: Callable[..., FloatVector | None] | None = None) -> Centring:
    """Weighted means of the targets of a data set, in three passes over them.

    ``weights`` gives those of rows first to last in place of the data set, given its own.
    """
    y, weight, t = dataset.y, dataset.weight, dataset.num_targets
    assert y is not None  # noqa: S101  (narrows the type)

    def blocks() -> Iterator[tuple[FloatMatrix, FloatVector | None]]:
        for span in y.blocks():
            found = None if weight is None else weight.read(*span)[:, 0]
            yield y.read(*span), found if weights is None else weights(*span, found)

    return centre_targets(blocks, t)


def target_alphas(alpha: Any, num_targets: int) -> NDArray[np.float64]:
    """An alpha for each target (t,), of one or of as many.

    Raises
    ------
    ParameterError
        No target; another number of alphas, or a negative one.
    """
    values = np.asarray(alpha, dtype=np.float64).ravel()
    if not num_targets:
        raise ParameterError("the rows have no target", hint="name one with target=")
    if len(values) not in (1, num_targets):
        raise ParameterError(f"{len(values)} values of alpha for {num_targets} targets; 1 or {num_targets} expected")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ParameterError(f"alpha = {values.min()}", hint="give a number that is at least 0")
    return np.broadcast_to(values, (num_targets,)).copy()


def right_hand_sides(
    dataset: Dataset,
    operator: RidgeOperator,
    targets: list[int],
    store: Any,
    *,
    centring: Centring | None = None,
) -> BlockColumns:
    """S Y in blocks, written anew whatever an earlier attempt left: the residual rests on them.

    Parameters
    ----------
    centring
        Of all targets of the data set, to be subtracted from Y.
    """
    rhs = BlockColumns.create(store, "rhs", operator.grid, len(targets), "float64")
    for i in range(operator.grid.num_tiles):
        span = operator.grid.span(i)
        block = dataset.targets.read(span.start, span.stop)[:, targets]
        if centring is not None:
            block = centring.take(targets).apply(block)
        root = operator.root_weights(i)
        if root is not None:
            block = root[:, None] * block
        rhs.write_rows(i, block)
    return rhs


def total_weight(dataset: Dataset) -> float:
    """s^T s: the sum of the weights of a data set, n without weights."""
    weight = dataset.weight
    return float(dataset.num_rows if weight is None else sum(weight.read(*span).sum() for span in weight.blocks()))


def best_intercept(residual: FloatMatrix, normal: FloatVector) -> FloatVector:
    """b = s^T R_0 / s^T s (t,), for which R_0 - b s is shortest; R_0 = S Y - A u."""
    total, square = np.asarray(normal @ residual), float(normal @ normal)
    return total / square if square > 0 else np.zeros_like(total)  # no row has a weight


def solve_bordered(
    solve: Callable[[FloatMatrix], FloatMatrix],
    multiply: Callable[[FloatMatrix], FloatMatrix],
    rhs: FloatMatrix,
    normal: FloatVector,
    *,
    begun: tuple[FloatMatrix, FloatMatrix] | None = None,
) -> FloatMatrix:
    """u (n, c) of A u + b s = S Y, s^T u = 0 in memory; refined where b v was much larger.

    Parameters
    ----------
    solve, multiply
        R (n, c) -> A^-1 R and U (n, c) -> A U; each column may have an A of its own, and a single column goes to all.
    rhs : (n, c)
        S Y of centred targets.
    normal : (n,)
        s.
    begun : (n, c), (n, 1 or c), optional
        A^-1 S Y and v = A^-1 s, where they are known.
    """
    solved, v = (None, solve(normal[:, None])) if begun is None else begun
    largest_v, sum_v = np.abs(v).max(axis=0), normal @ v
    u, residual = np.zeros(rhs.shape), rhs
    for number in range(MAX_REFINEMENTS + 1):
        solved = solve(residual) if number or solved is None else solved
        total = normal @ solved + normal @ u
        b = np.divide(total, sum_v, out=np.zeros_like(total), where=sum_v != 0)
        u += solved - v * b
        lost = np.abs(b) * largest_v > MAX_GROWTH * np.abs(u).max(axis=0)
        if number == MAX_REFINEMENTS or not lost.any():
            break
        left = rhs - multiply(u)
        residual = left - normal[:, None] * best_intercept(left, normal)
    return u


@dataclass(frozen=True)
class Rows:
    """A reference to the training rows: where the data set is, its digest, and the centre of its features.

    Parameters
    ----------
    store
        Location of the data set.
    digest
        Digest of its X; another digest found there is an error, unless rows were appended since.
    center
        Subtracted from every row before the kernel sees it, or None.
    version
        Of the data set; what a process knows of an older one with the same rows is not believed.
    facts
        What else a data set with the same X may differ in, see :meth:`of`.
    """

    store: Any
    digest: str
    center: tuple[float, ...] | None = None
    version: int = 1
    facts: tuple[tuple[str, str, int], ...] = ()

    @classmethod
    def of(cls, dataset: Dataset, center: tuple[float, ...] | None = None) -> Rows:
        """The rows of a data set: digest and rows per chunk of every part are part of the reference.

        The same X may be there again with other weights, in other chunks.
        """
        parts = dataset.parts().items()
        facts = tuple((name, str(dataset.records[name]["digest"]), array.rows_per_chunk) for name, array in parts)
        return cls(dataset.path, dataset.digest, center, dataset.version, facts)

    def open(self) -> Dataset:
        """The data set; kept open per process."""
        return open_rows(self.store, self.digest, self.version, self.facts)

    def read(self, start: int, stop: int) -> FloatMatrix:
        """Rows ``start:stop`` (stop - start, d), centred."""
        block = self.open().X.read(start, stop)
        if self.center is not None:
            block -= np.asarray(self.center)
        return block

    def take(self, index: NDArray[np.int64]) -> FloatMatrix:
        """Rows by number (k, d), centred; every chunk of X that is met is read once."""
        return read_rows(self.open().X, index, self.center)

    def root_weight(self, start: int, stop: int) -> FloatMatrix | None:
        """Square roots of the weights (stop - start,), None without weights."""
        weight = self.open().weight
        return None if weight is None else np.sqrt(weight.read(start, stop)[:, 0])


def read_rows(array: RowArray, numbers: NDArray[np.int64], center: tuple[float, ...] | None = None) -> FloatMatrix:
    """The rows (s, k) with these numbers, centred if asked; every chunk that holds one is read once."""
    result, step = np.empty((len(numbers), array.num_columns)), array.rows_per_chunk
    for chunk in np.unique(numbers // step):
        inside = numbers // step == chunk
        start, stop = array.span(int(chunk))
        result[inside] = array.read(start, stop)[numbers[inside] - start]
    return result if center is None else result - np.asarray(center)


@lru_cache(maxsize=8)
def open_rows(store: str, digest: str, version: int, facts: tuple[tuple[str, str, int], ...]) -> Dataset:
    """Open a data set and check that it is the one that was meant; kept open per process.

    Where rows have been appended since, or a new version has replaced it, it is the data set of before.

    Raises
    ------
    StoreError
        Its rows are others.
    """
    dataset = open_dataset(store)
    if dataset.digest == digest:
        return dataset
    before = dataset
    if version < dataset.version:
        with contextlib.suppress(StoreError):  # it is gone
            before = open_dataset(store, version=version)
    found = before_appends(before, {name: part for name, part, _ in facts} | {"X": digest})
    if found is None:
        raise StoreError(
            f"{dataset.path} holds other rows than this job was prepared with (digest {dataset.digest[:12]}, "
            f"{digest[:12]} expected)",
            hint="do not change a data set while a job uses it, other than by appending; start the job again",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class RidgeOperator:
    """A = S K S + alpha I, symmetric positive definite for a positive semi-definite kernel and alpha > 0.

    Parameters
    ----------
    grid
        Partition of the n rows.
    alpha
        The ridge, raw.
    kernel
        The kernel; None when ``gram`` is a given (precomputed) matrix.
    rows
        The training rows (None only for a precomputed matrix without weights).
    weighted
        Whether the weights of the rows enter as S.
    gram
        A stored Gram matrix, read instead of evaluating the kernel.
    """

    grid: TileGrid
    alpha: float
    kernel: Kernel | None
    rows: Rows | None
    weighted: bool = False
    gram: TileMatrix | None = None

    def with_alpha(self, alpha: float) -> RidgeOperator:
        """The same matrix with another ridge."""
        return replace(self, alpha=alpha)

    def known(self) -> tuple[Kernel, Rows]:
        """The kernel and the rows.

        Raises
        ------
        StoreError
            The matrix was given: there are none.
        """
        if self.kernel is None or self.rows is None:
            raise StoreError("a precomputed matrix has no kernel to evaluate", hint="give the matrix again")
        return self.kernel, self.rows

    def gram_tile(
        self, i: int, j: int, out: FloatArray | None = None, *, start: int = 0, stop: int | None = None
    ) -> FloatArray:
        """Tile (i, j) of K, i >= j, (rows of i, rows of j), evaluated from the kernel, in ``out`` if given.

        With ``start`` and ``stop`` it is those rows of the tile; of a diagonal tile their first ``stop`` columns.
        """
        kernel, rows = self.known()
        first, other = self.grid.span(i).start, self.grid.span(j)
        stop = self.grid.rows(i) if stop is None else stop
        block = np.empty((stop - start, stop if i == j else self.grid.rows(j))) if out is None else out
        a = rows.read(first + start, first + stop)
        try:
            if i != j:
                return kernel.block(a, rows.read(other.start, other.stop), block)
            if start:
                kernel.block(a, rows.read(first, first + start), block[:, :start])
            kernel.block(a, a, block[:, start:stop], same=True)
        except DataError as exc:
            raise DataError(f"tile ({i}, {j}): {exc.message}", hint=exc.hint, **exc.details) from exc
        return block

    def tile(self, i: int, j: int, out: FloatArray, *, start: int = 0, stop: int | None = None) -> FloatArray:
        """Tile (i, j) of A, i >= j, written to ``out`` (rows of i, rows of j); or some of its rows, as for K."""
        # what float32 cannot hold is named before a tile is written, also where a weight of zero makes NaN of it
        with np.errstate(over="ignore", invalid="ignore"):
            if self.gram is None:
                self.gram_tile(i, j, out, start=start, stop=stop)
            else:
                out[...] = self.gram.read(i, j)[start:stop, : out.shape[1]]
            left = self.root_weights(i)
            weighted(out, None if left is None else left[start : start + len(out)], self.root_weights(j))
            if i == j:
                places = np.arange(len(out))
                out[places, start + places] += self.alpha
        return out

    def diagonal(self, i: int) -> FloatArray:
        """Entries a_pp - alpha of row block i, the diagonal of S K S."""
        span, root = self.grid.span(i), self.root_weights(i)
        if self.kernel is None and self.gram is not None:
            values: FloatArray = np.diagonal(self.gram.read(i, i)).astype(np.float64)
        else:
            kernel, rows = self.known()
            values = kernel.diag(rows.read(span.start, span.stop))
        return values if root is None else root * root * values

    def diagonal_from(self, start: int) -> FloatArray:
        """The diagonal of S K S from row ``start`` on, (n - start,)."""
        first = start // self.grid.tile_size
        blocks = [self.diagonal(i) for i in range(first, self.grid.num_tiles)]
        return np.concatenate(blocks)[start - first * self.grid.tile_size :]

    def root_of(self, start: int, stop: int) -> FloatMatrix | None:
        """Square roots of the weights of rows ``start`` to ``stop``, None when the operator is not weighted."""
        return self.rows.root_weight(start, stop) if self.weighted and self.rows is not None else None

    def root_weights(self, i: int | None = None) -> FloatMatrix | None:
        """The diagonal of S (n,), or its entries of row block i; None when the operator is not weighted."""
        span = slice(0, self.grid.n) if i is None else self.grid.span(i)
        return self.root_of(span.start, span.stop)

    def normal(self) -> FloatMatrix:
        """s (n,), the diagonal of S; ones where the operator is not weighted."""
        root = self.root_weights()
        return np.ones(self.grid.n) if root is None else root

    @property
    def num_features(self) -> int:
        """d of the rows; 1 for a precomputed matrix."""
        return 1 if self.rows is None else self.rows.open().num_features


def rows_of(dataset: Dataset, kernel: Kernel | None, center: tuple[float, ...] | None = None) -> Rows:
    """Reference to the rows of a data set; a translation-invariant kernel is centred at its own point, unless told."""
    own = None if kernel is None else kernel.center(dataset.x_mean, dataset.x_std)
    if own is not None and center is None:
        center = tuple(own.tolist())
    return Rows.of(dataset, None if own is None else center)
