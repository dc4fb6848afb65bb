"""V -> S K S V on the workers, for V (n, t) in the driver's memory; and the true residual R = S Y - A u.

The n rows are cut into S super-blocks; one task a pair (I, J), I >= J, evaluates the entries of K[I, J] once and uses
them for the rows of I and for those of J: a :class:`~dkrr.linalg.workspace.Pass` for each panel of at most 256 columns.
The partition depends on n, d and the kernel, not on the workers, so the sums are the same bits on any number of them.

A residual is evaluated in float64 from the kernel and the rows, never from stored tiles. (Only for a precomputed
matrix, which has no kernel, the given matrix is read.) It is independent of everything the solver stored, so a wrong
tile that passed its checksum shows here. The factor (direct.py) and a fit with an intercept (dkrr.fit.fitting) take
theirs here, conjugate gradients by the same product in cg.py, systems in memory in dense.py; primal.py and nystrom.py
have those of their own equations. The sums of |A| over its rows are one more column of the same product.

Cost
----
n^2 / 2 kernel entries and 2 n^2 t flops. S (S + 1) / 2 tasks a panel of columns. Through the store: n t numbers one way
and S n t the other, of which few are there at once. The driver holds V, S V when weighted, and the result, for a
residual three (n, 256) arrays. Memory of a task: :func:`product_task_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from dkrr.engine.machine import single_blas_thread
from dkrr.errors import DataError, DkrrError, NumericalError
from dkrr.linalg.gram import gram_owner
from dkrr.linalg.operators import (
    BlockColumns,
    FloatMatrix,
    FloatVector,
    RidgeOperator,
    add_scaled,
    best_intercept,
    largest,
    norms,
    ratio,
    row_blocks,
)
from dkrr.linalg.products import (
    BLOCK_ROWS,
    STRIP_ROWS,
    add_strips,
    block_strips,
    entry_nanoseconds,
    is_nonnegative,
    kernel_product,
    spans,
    super_blocks,
)
from dkrr.linalg.workspace import Operands, Pass, Workspace
from dkrr.store.chunks import FloatArray
from dkrr.tiles.blas import is_finite

# A panel of columns: a block of V in it, and each half of a partial result, takes at most this.
PANEL_BYTES = 16 << 20
MAX_PANEL_COLUMNS = 256
SAMPLED_ROWS = 256
SAMPLED_COLUMNS = 4096


def panel_width(block_rows: int, num_columns: int) -> int:
    """Columns of a panel: at most 256 and 16 MiB a super-block, all panels of about the same width."""
    most = max(1, min(MAX_PANEL_COLUMNS, PANEL_BYTES // (8 * block_rows)))
    return -(-num_columns // -(-num_columns // most))


def product_task_bytes(block_rows: int, num_columns: int, num_features: int, *, compiled: bool = False) -> int:
    """Memory of a task besides the baseline: 4 B w 8 + 4 (256 + d) 6,144 8 + 2 d 6,144 8 bytes, and the rows of J.

    V_I, V_J and both results with w columns of a panel and B rows; a strip, the rows and the operands of a block of
    6,144 x 6,144 entries, the latter in two copies. Compiled code has no strip; it packs the columns, of V too. The
    rows of J are held, 8 B d bytes, where these are at most 16 MiB.
    """
    width = panel_width(block_rows, num_columns)
    rows = min(block_rows, BLOCK_ROWS)
    beside = width if compiled else STRIP_ROWS
    held = block_rows * num_features if _are_held(block_rows, num_features) else 0
    return 8 * (4 * block_rows * width + 4 * rows * (beside + num_features) + 2 * rows * num_features + held)


def _are_held(num_rows: int, num_features: int) -> bool:
    """Whether a task reads the rows of J once, not once for each block of the rows of I."""
    return 8 * num_rows * num_features <= PANEL_BYTES


class OperatorProduct:
    """The product with S K S (without alpha), its own task: the pairs of super-blocks, each of them a part of the sum.

    Parameters
    ----------
    operator, workspace
        The matrix, and who runs the tasks.
    scratch
        Folder, URL or store below which vectors and partial sums pass, in a folder of each product's own. Not touched
        when tasks run in this process.
    precision
        Of the kernel entries; sums are float64.
    use_gram
        Read stored Gram tiles of a kernel where the operator has them, instead of evaluating it.
    phase
        Name under which progress and figures are reported.
    quiet
        No progress is reported.

    Notes
    -----
    A block of V or a partial result that is damaged in the scratch is written or computed again, a Gram tile of a
    kernel as well; a damaged tile of a given matrix raises ``DamagedChunkError``.
    """

    def __init__(
        self,
        operator: RidgeOperator,
        workspace: Workspace,
        scratch: Any,
        *,
        precision: Literal["float64", "float32"] = "float64",
        use_gram: bool = False,
        phase: str = "multiply",
        quiet: bool = False,
    ) -> None:
        self.operator, self.workspace, self.scratch, self.precision = operator, workspace, scratch, precision
        self.phase, self.quiet = phase, quiet
        # tiles of a kernel may hold anything that passes a checksum, so the residual does without
        self.stored = operator.gram is not None and (use_gram or operator.kernel is None)
        kernel, tile_size = (None, operator.grid.tile_size) if self.stored else (operator.known()[0], None)
        entry = entry_nanoseconds(kernel, operator.num_features)
        self.blocks = super_blocks(operator.grid.n, entry, tile_size)
        self.root = operator.root_weights()
        self.num_products = 0
        self.row_sums: FloatMatrix | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs: nothing that is n long."""
        return self.__dict__ | {"workspace": None, "root": None, "row_sums": None}

    def __call__(self, v: FloatMatrix) -> FloatMatrix:
        """S K S V (n, t) float64; the order of every sum depends on n and the settings only.

        Raises
        ------
        NumericalError
            V is not finite.
        DataError
            The kernel is not finite.
        """
        return self._multiply(v, absolute_last=False)

    def exact(self, v: FloatMatrix, *, always: bool = False) -> FloatMatrix:
        """S K S V (n, t); the first pass also gives ``row_sums``, sum_q |(S K S)_pq| (n,), for the norm of the matrix.

        ``always``: every pass does, for a product that is not the one of the iterations, whose bits must not depend on
        whether a process was killed in between.
        """
        if self.row_sums is not None and not always:
            return self(v)
        absolute = self.stored or not is_nonnegative(self.operator.kernel)
        product = self._multiply(np.hstack([v, np.ones((len(v), 1))]), absolute_last=absolute)
        self.row_sums = product[:, -1].copy()
        return np.ascontiguousarray(product[:, :-1])

    def norm(self) -> float:
        """|S K S|, the largest sum of a row, where a caller has kept ``row_sums``; 0 before."""
        return 0.0 if self.row_sums is None else float(self.row_sums.max())

    def _multiply(self, v: FloatMatrix, *, absolute_last: bool) -> FloatMatrix:
        """S K S V; of the last column the product with |S K S|, entry by entry, where asked for."""
        n, blocks = self.operator.grid.n, self.blocks
        if v.ndim != 2 or len(v) != n:
            raise ValueError(f"V has shape {v.shape}, ({n}, t) expected")
        if not is_finite(v):
            column = int(np.flatnonzero(~np.isfinite(v).all(axis=0))[0])
            raise NumericalError(f"column {column} of a vector to multiply with is not finite", hint="raise alpha")
        result = np.zeros(v.shape)
        if not v.shape[1]:
            return result
        scaled = np.asarray(v if self.root is None else self.root[:, None] * v, dtype=np.float64)
        self.num_products += 1
        for columns in row_blocks(v.shape[1], panel_width(blocks.tile_size, v.shape[1])):
            panel, target = scaled[:, columns], result[:, columns]
            cost = 2.0 * self.operator.num_features + 4.0 * panel.shape[1]

            def add(number: int, part: FloatMatrix, target: FloatMatrix = target) -> None:
                i, j = self.pair(number)
                of_rows, of_columns = self.halves(number, part)
                target[blocks.span(i)] += of_rows
                if i != j:
                    target[blocks.span(j)] += of_columns

            Pass(
                self.phase,
                partial(self.multiply_pair, absolute_last and columns.stop == v.shape[1]),
                self.explain,
                [blocks.rows(i) * blocks.rows(j) * cost / (1 + (i == j)) for i, j in blocks.lower()],
                (2 * blocks.tile_size, panel.shape[1]),
                operands={"v": [np.ascontiguousarray(panel[blocks.span(i)]) for i in range(blocks.num_tiles)]},
                workspace=self.workspace,
                store=self.scratch,
                site="multiply.pair",
                owners=gram_owner(self.operator, self.workspace),
                quiet=self.quiet,
            ).consume(add)
        if self.root is not None:
            result *= self.root[:, None]
        return result

    # --- a task: K[I, J] V_J, and below it, from row B on, K[I, J]^T V_I ---

    def pair(self, number: int) -> tuple[int, int]:
        """I and J of the lower pair of super-blocks with a number."""
        return next(islice(self.blocks.lower(), number, None))

    def halves(self, number: int, part: FloatMatrix) -> tuple[FloatMatrix, FloatMatrix]:
        """The rows of I and the rows of J; the same ones when I = J."""
        (i, j), b = self.pair(number), self.blocks.tile_size
        start = (i != j) * b
        return part[: self.blocks.rows(i)], part[start : start + self.blocks.rows(j)]

    def multiply_pair(self, absolute_last: bool, operands: Operands, number: int, out: FloatMatrix) -> None:
        """Add both results, block by block; a damaged or missing tile raises ``DamagedChunkError``."""
        (i, j), blocks = self.pair(number), self.blocks
        rows, columns = blocks.span(i), blocks.span(j)
        # copies: nothing stays mapped, and compiled kernels meet writable arrays only
        v_rows, v_columns = (np.array(operands["v"].read(k)[: blocks.rows(k)]) for k in (i, j))
        out_rows, out_columns = self.halves(number, out)
        for p, q, add in (self._stored if self.stored else self._evaluated)(rows, columns, absolute_last):
            left = slice(p.start - rows.start, p.stop - rows.start)
            right = slice(q.start - columns.start, q.stop - columns.start)
            other = {} if p == q else {"u": v_rows[left], "out_t": out_columns[right]}
            try:
                add(v_columns[right], out_rows[left], **other)
            except DataError as exc:
                where = f"rows {p.start:,} to {p.stop:,} with rows {q.start:,} to {q.stop:,}"
                raise DataError(f"{where}: {exc.message}", hint=exc.hint, **exc.details) from exc

    def _evaluated(self, rows: slice, columns: slice, absolute_last: bool) -> Iterator[tuple[slice, slice, Any]]:
        """Blocks of 6,144 x 6,144 entries, and how each is multiplied with."""
        kernel, source = self.operator.known()
        held = None
        if rows != columns and _are_held(self.blocks.tile_size, self.operator.num_features):
            held = source.read(columns.start, columns.stop)
        for p in spans(rows, BLOCK_ROWS):
            a = source.read(p.start, p.stop)
            for q in spans(columns, BLOCK_ROWS):
                if q.start > p.start:
                    break
                if p == q:
                    b = a
                elif held is None:
                    b = source.read(q.start, q.stop)
                else:
                    b = held[q.start - columns.start : q.stop - columns.start]
                sides, same = (a, b), p == q
                if absolute_last:
                    yield p, q, partial(add_strips, block_strips(kernel, *sides, same=same), absolute_last=True)
                else:
                    yield p, q, partial(kernel_product, kernel, *sides, same=same, precision=self.precision)

    def _stored(self, rows: slice, columns: slice, absolute_last: bool) -> Iterator[tuple[slice, slice, Any]]:
        """Tiles, of which one is mapped at a time."""
        gram = self.operator.gram
        assert gram is not None  # noqa: S101  (narrows the type)
        for i, j in self._tiles(rows, columns):
            tile = gram.read(i, j)
            strips = ((part, slice(None), tile[part]) for part in row_blocks(len(tile), STRIP_ROWS))
            yield gram.grid.span(i), gram.grid.span(j), partial(add_strips, strips, absolute_last=absolute_last)
            del tile, strips

    def _tiles(self, rows: slice, columns: slice) -> Iterator[tuple[int, int]]:
        b = self.operator.grid.tile_size
        for i in range(rows.start // b, -(-rows.stop // b)):
            for j in range(columns.start // b, min(i + 1, -(-columns.stop // b))):
                yield i, j

    def explain(self, number: int) -> DkrrError:
        """The error for results that are not finite although V is."""
        rows, columns = map(self.blocks.span, self.pair(number))
        where = f"the product of rows {rows.start:,} to {rows.stop:,} with rows {columns.start:,} to {columns.stop:,}"
        if self.stored and self.operator.gram is not None:
            self.operator.gram.check_finite(self._tiles(rows, columns))
            of, hint = f" of {self.operator.gram.location}", "scale the matrix, or the targets"
            return DataError(f"{where}{of} is not finite", hint=hint)
        return DataError(f"{where} is not finite, {self.operator.known()[0].describe()}", hint="scale the features")


@dataclass(frozen=True)
class ResidualNorms:
    """The two numbers of a :class:`~dkrr.linalg.solution.Solution`, per target; intercepts of centred targets."""

    relative_residual: list[float]
    backward_error: list[float]
    intercept: FloatVector


def system_norms(
    product: FloatMatrix,
    size: FloatVector,
    rhs: FloatMatrix,
    u: FloatMatrix,
    normal: FloatVector | None = None,
) -> ResidualNorms:
    """The norms of R = S Y - A u, or with an intercept of R = S Y - A u - b s and of s^T u = 0.

    b = s^T (S Y - A u) / s^T s is the one for which R is smallest; where u solves the system it is the intercept.

    Parameters
    ----------
    product : (n, t)
        A u; R takes its place.
    size : (t,)
        |A| in the infinity norm, of each target's own A.
    rhs, u : (n, t)
        S Y (of centred targets, with an intercept), and u.
    normal : (n,), optional
        s, for an intercept.

    Returns
    -------
    ResidualNorms
        |R| / |S Y| in the 2-norm, and |R| / (|A| |u| + |S Y - b s|) in the infinity norm; with an intercept at least
        |s^T u| / (|s|_1 |u|_inf), the backward error of the last row.
    """
    residual, intercept, right = product, np.zeros(rhs.shape[1]), largest(rhs)
    np.subtract(rhs, product, out=residual)
    if normal is not None:
        intercept = best_intercept(residual, normal)
        right = np.zeros_like(right)
        for rows in row_blocks(len(rhs)):
            shift = normal[rows, None] * intercept
            residual[rows] -= shift
            right = np.maximum(right, largest(rhs[rows] - shift))
    left, whole, most = norms(residual), norms(rhs), largest(u)
    relative = np.where((whole == 0) & (left > 0), np.inf, ratio(left, whole))
    backward = ratio(largest(residual), size * most + right)
    if normal is not None:
        backward = np.maximum(backward, ratio(np.abs(normal @ u), float(normal.sum()) * most))
    return ResidualNorms(relative.tolist(), backward.tolist(), intercept)


def residual_norms(
    operator: RidgeOperator,
    rhs: BlockColumns,
    solution: BlockColumns,
    workspace: Workspace,
    scratch: Any,
    *,
    alpha: FloatVector | None = None,
    normal: FloatVector | None = None,
) -> ResidualNorms:
    """:func:`system_norms` of an answer on disk; phase "residual" of the workspace.

    Parameters
    ----------
    rhs, solution : BlockColumns (n, t)
        S Y (of centred targets, with an intercept) and u, in any precision.
    scratch
        See :class:`OperatorProduct`.
    alpha : (t,), optional
        The ridge of each column, if not that of the operator.
    normal : (n,), optional
        s, for an intercept.
    """
    alphas = np.full(rhs.num_columns, operator.alpha) if alpha is None else alpha
    product = OperatorProduct(operator, workspace, scratch, phase="residual")
    diagonal: FloatArray = np.zeros(operator.grid.n)
    if operator.kernel is None or not operator.kernel.positive_semidefinite:  # an entry of it may be negative
        diagonal = operator.diagonal_from(0)
    found = []
    for panel in range(rhs.num_panels):
        columns, u = alphas[rhs.columns(panel)], solution.whole(panel)
        multiplied = product.exact(u)
        add_scaled(multiplied, columns, u)
        # |a_pp| = |k_pp + alpha|, which is |k_pp| + alpha unless k_pp is negative
        size = [float((product.row_sums + np.abs(diagonal + value) - np.abs(diagonal)).max()) for value in columns]
        found.append(system_norms(multiplied, np.array(size), rhs.whole(panel), u, normal))
    return ResidualNorms(
        [value for part in found for value in part.relative_residual],
        [value for part in found for value in part.backward_error],
        np.concatenate([part.intercept for part in found]),
    )


def sampled_row_sums(operator: RidgeOperator) -> FloatMatrix:
    """sum_q |(S K S)_pq| of at most 256 rows p: half of them evenly spread, half those with the largest diagonal.

    Their maximum is a lower bound of |S K S|, so that a backward error from it is never too small. On whitened rows of
    five data sets (8,000 rows, six kernels) it was at most 1.6 times too large for kernels that are bounded.

    Cost: 256 n kernel entries, in this process.
    """
    (kernel, rows), n = operator.known(), operator.grid.n
    diagonal = operator.diagonal_from(0)
    spread = np.linspace(0, n - 1, SAMPLED_ROWS // 2).astype(np.int64)
    largest = np.argsort(-np.abs(diagonal), kind="stable")[: SAMPLED_ROWS // 2]
    index = np.unique(np.concatenate([spread, largest]))
    root = operator.root_weights()
    chosen, sums = rows.take(index), np.zeros(len(index))
    with single_blas_thread():
        for start in range(0, n, SAMPLED_COLUMNS):
            span = slice(start, min(start + SAMPLED_COLUMNS, n))
            entries = np.abs(kernel.block(chosen, rows.read(span.start, span.stop)))
            sums += entries.sum(axis=1) if root is None else entries @ root[span]
    return sums if root is None else root[index] * sums
