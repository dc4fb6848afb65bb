"""W += B^T S^2 (Y - B P) for rows in memory, each entry of B evaluated once, in compiled code.

V = Y - B P needs whole rows of B before B^T can be applied, so the entries of ROWS rows go to a buffer (128 KiB for
8,000 centres in float32) that stays in the cache, and both sums run over it. Entries are float32 or float64; P, Y, W
and every sum are float64: the rounding of P would be amplified by the size of B, that of the entries is not.

Cost
----
One evaluation of the kernel and, for each target, four more vector instructions a vector of entries in float64, six in
float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from dkrr.kernels.compiled import PANEL_VECTORS, ROWS, STORE, Vectors, _compile, _step
from dkrr.kernels.pairwise import Packed, pack_rows, pack_sums
from dkrr.linalg.blocks import FloatMatrix


def _integer(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


class _Buffer:
    """Instructions on the entries of one block of rows (panels, ROWS, panel), beside arrays (panels, t, panel)."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self.b = builder
        width = signature.args[0].literal_value
        self.narrow = Vectors(builder, signature.args[1].dtype.bitwidth, width)
        self.wide = Vectors(builder, 64, width)
        arrays = [
            context.make_array(kind)(context, builder, value)
            for kind, value in zip(signature.args[1:4], values[1:4], strict=True)
        ]
        self.data = [array.data for array in arrays]
        shapes = [cgutils.unpack_tuple(builder, array.shape) for array in arrays]
        self.panels, self.count = shapes[0][0], shapes[1][1]
        self.target = values[4]

    def entry(self, panel: Any, row: int, vector: int) -> Any:
        """A vector of entries, in float64."""
        offset = self.b.mul(panel, _integer(ROWS * PANEL_VECTORS * self.wide.width))
        place = _integer((row * PANEL_VECTORS + vector) * self.wide.width)
        value = self.narrow.load(self.b.gep(self.data[0], [self.b.add(offset, place)]))
        return value if self.narrow.bits == 64 else self.b.fpext(value, self.wide.type)

    def place(self, panel: Any, vector: int) -> Any:
        """Pointer to a vector of the second array, for the target."""
        b = self.b
        row = b.add(b.mul(panel, self.count), self.target)
        offset = b.mul(row, _integer(PANEL_VECTORS * self.wide.width))
        return b.gep(self.data[1], [b.add(offset, _integer(vector * self.wide.width))])

    def row_sums(self) -> None:
        """Third array (ROWS,) = sums over the columns of entries times the second array."""
        b, v = self.b, self.wide
        sums = [[cgutils.alloca_once_value(b, v.constant(0.0)) for _ in range(PANEL_VECTORS)] for _ in range(ROWS)]
        # set here and not where they are made, at the entry of the function: there are many blocks
        for pointers in sums:
            for pointer in pointers:
                b.store(v.constant(0.0), pointer)
        with cgutils.for_range(b, self.panels) as loop:
            right = [v.load(self.place(loop.index, q)) for q in range(PANEL_VECTORS)]
            for r in range(ROWS):
                for q in range(PANEL_VECTORS):
                    total = v.multiply_add(self.entry(loop.index, r, q), right[q], b.load(sums[r][q]))
                    b.store(total, sums[r][q])
        for r in range(ROWS):
            total = b.load(sums[r][0])
            for pointer in sums[r][1:]:
                total = b.fadd(total, b.load(pointer))
            b.store(v.sum(total), b.gep(self.data[2], [_integer(r)]))

    def column_sums(self) -> None:
        """Second array += entries times the third array (ROWS,), summed over the rows."""
        b, v = self.b, self.wide
        left = [v.broadcast(b.gep(self.data[2], [_integer(r)])) for r in range(ROWS)]
        with cgutils.for_range(b, self.panels) as loop:
            for q in range(PANEL_VECTORS):
                pointer = self.place(loop.index, q)
                total = v.load(pointer)
                for r in range(ROWS):
                    total = v.multiply_add(self.entry(loop.index, r, q), left[r], total)
                v.store(total, pointer)


def _instructions(method: Any) -> Any:
    """A function of (width, entries, matrix (panels, t, panel), sums (ROWS,), target) for compiled code."""

    def typed(typing_context: Any, width: Any, entries: Any, matrix: Any, sums: Any, target: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            method(_Buffer(context, builder, signature, values))
            return context.get_dummy_value()

        return types.void(width, entries, matrix, sums, target), code

    return intrinsic(prefer_literal=True)(typed)


# sums[r] = sum over all columns of entries[:, r, :] p[:, target, :]
# w[:, target, :] += sum over r of entries[:, r, :] v[r]
_row_sums, _column_sums = _instructions(_Buffer.row_sums), _instructions(_Buffer.column_sums)


@cache
def two_sided_function(kind: str, width: int) -> Any:
    """The function for one kind of kernel.

    ``two_sided(a, offset_a, b, offset_b, p, y, weight, w, factor, sign)`` with P and W (panels, t, panel),
    Y (rows, t): adds B^T diag(weight) (Y + sign B P) to W.
    """
    kind, rows, panel = f"{kind} {STORE}", ROWS, PANEL_VECTORS * width

    def two_sided(a, offset_a, b, offset_b, p, y, weight, w, factor, sign):  # type: ignore[no-untyped-def]
        panels, t = b.shape[0], w.shape[1]
        entries = np.empty((panels, rows, panel), a.dtype)
        v = np.zeros(rows)
        for i in range(a.shape[0]):
            for j in range(panels):
                # the last two: where the first entry goes, and how far apart rows are
                _step(kind, a, offset_a, b, offset_b, a, a, a, entries, factor, i, j, j * rows * panel, panel)
            for c in range(t):
                v[:] = 0.0
                if sign != 0.0:
                    _row_sums(width, entries, p, v, c)
                for r in range(rows):
                    v[r] = weight[i * rows + r] * (y[i * rows + r, c] + sign * v[r])
                _column_sums(width, entries, w, v, c)

    return _compile(two_sided)


def add_compiled(
    packed: Packed,
    p: FloatMatrix | None,
    y: FloatMatrix,
    weight: NDArray[np.float64],
    total: FloatMatrix,
) -> None:
    """Add B^T S^2 V to W (m, t) for packed rows and centres; V = Y or Y - B P. ``weight`` has one entry a row."""
    blocks, _, rows = packed.rows.shape
    panels, _, panel = packed.columns.shape
    n, t = blocks * rows, total.shape[1]
    # rows that only fill up the last block have weight 0
    targets, factors = np.zeros((n, t)), np.zeros(n)
    factors[: len(weight)] = weight
    targets[: len(y)] = y
    sums = np.zeros((panels, t, panel))
    two_sided_function(packed.kind, packed.width)(
        *packed.sides,
        sums[:0] if p is None else pack_rows(p, panel, np.float64),
        targets,
        factors,
        sums,
        packed.factor,
        0.0 if p is None else -1.0,
    )
    total += pack_sums(sums, len(total))
