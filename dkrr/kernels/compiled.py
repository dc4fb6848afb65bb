"""Kernel blocks and products with them, compiled by Numba. Imported when a block is large enough to be worth it.

One block of ROWS rows meets one panel of two vectors of columns entirely in registers: distances or inner products over
the features, the kernel's profile, and at once the two sums that need the entries,

    out_i += sum_j k_ij v_j        out_t_j += sum_i k_ij u_i,

so that an entry is never stored. Rows are packed as (blocks, d, ROWS), columns as (panels, d, 2 width), zero where
there is none: no loop has a remainder, and what a row gets does not depend on its place or on its neighbours.

Cost
----
An entry of rbf with d = 10 takes 0.5 ns in float32 and 1.1 ns in float64 on one core with AVX-512 at 2.7 GHz, both sums
included: about d + 20 (d + 15) vector instructions for 8 (16) entries. Every further target costs two more.
Compiling takes a second or two for each pair of distance and profile, once: the result is kept by Numba beside this
file, or in the user's cache folder where that is not writable, or nowhere (then every process compiles).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dkrr.kernels.vectors import STAMP, Vectors

__all__ = ["PANEL_VECTORS", "ROWS", "fill_function", "product_function", "vector_width"]

ROWS = 4
PANEL_VECTORS = 2
# how a step ends: into the two sums, or into a buffer
SUMS, STORE = "sums", "store"
LOG2E = 1.4426950408889634


@cache
def _vector_bytes() -> int:
    """Bytes of a vector: 64 with AVX-512, else 32 (which narrower machines process in two halves)."""
    return 64 if llvm.get_host_cpu_features().get("avx512f") else 32


def vector_width(dtype: Any) -> int:
    """Numbers in a vector."""
    return int(_vector_bytes() // np.dtype(dtype).itemsize)


def _compile(function: Any) -> Any:
    """Compiled on the first call, kept between processes if there is a place for it."""
    try:
        return njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # Numba finds no folder that it may write to
        return njit(function, nogil=True, error_model="numpy")


def _integer(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


class _Step:
    """The instructions of one block of rows against one panel of columns."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        distance, self.profile, self.end, width, _ = signature.args[0].literal_value.split()
        # the weight of each feature follows the factor
        self.distance, self.weighted = distance.removeprefix("weighted_"), distance.startswith("weighted_")
        self.b = builder
        self.vectors = Vectors(builder, signature.args[1].dtype.bitwidth, int(width))
        self.panel = PANEL_VECTORS * self.vectors.width
        self.data, self.shape = [], []
        for kind, value in zip(signature.args[1:10], arguments[1:10], strict=True):
            array = context.make_array(kind)(context, builder, value)
            self.data.append(array.data)
            self.shape.append(cgutils.unpack_tuple(builder, array.shape))
        self.degree, self.row_block, self.column_panel, self.first_panel, self.triangle = arguments[10:15]
        self.places = [(r, q) for r in range(ROWS) for q in range(PANEL_VECTORS)]

    def at(self, array: int, *terms: Any) -> Any:
        """Pointer to the number at the sum of the terms, which are integers and products of them."""
        b, offset = self.b, _integer(0)
        for term in terms:
            product = _integer(1)
            for factor in term if isinstance(term, tuple) else (term,):
                product = b.mul(product, _integer(factor) if isinstance(factor, int) else factor)
            offset = b.add(offset, product)
        return b.gep(self.data[array], [offset])

    def emit(self) -> None:
        entries = self._profile(self._exponents())
        if self.end == STORE:
            for r, q in self.places:
                # the last two arguments are then the offset of the first entry and the distance between rows
                place = self.at(7, self.first_panel, (self.triangle, r), q * self.vectors.width)
                self.vectors.store(entries[r, q], place)
            return
        entries = self._below_diagonal(entries)
        self._sum_rows(entries)
        self._sum_columns(entries)

    def _exponents(self) -> dict[tuple[int, int], Any]:
        """Inner products with and without offsets, squared distances or 1-norms, one vector a place."""
        b, v = self.b, self.vectors
        rows, offsets_a, columns, offsets_b = range(4)
        d = self.shape[columns][1]
        sums = {place: cgutils.alloca_once(b, v.type) for place in self.places}
        for r, q in self.places:
            start = v.constant(0.0)
            if self.distance == "inner":
                left = v.broadcast(self.at(offsets_a, (self.row_block, ROWS), r))
                right = v.load(self.at(offsets_b, (self.column_panel, self.panel), q * v.width))
                start = b.fadd(left, right)
            b.store(start, sums[r, q])
        with cgutils.for_range(b, d) as loop:
            right = [
                v.load(self.at(columns, (self.column_panel, d, self.panel), (loop.index, self.panel), q * v.width))
                for q in range(PANEL_VECTORS)
            ]
            for r in range(ROWS):
                left = v.broadcast(self.at(rows, (self.row_block, d, ROWS), (loop.index, ROWS), r))
                weight = v.broadcast(self.at(8, 1, loop.index)) if self.weighted else None
                for q in range(PANEL_VECTORS):
                    total = b.load(sums[r, q])
                    if self.distance in ("inner", "product"):
                        total = v.multiply_add(left, right[q], total)
                    else:
                        difference = b.fsub(left, right[q])
                        if weight is not None:
                            difference = b.fmul(difference, weight)
                        if self.distance == "squared":
                            total = v.multiply_add(difference, difference, total)
                        else:
                            total = b.fadd(total, v.call("fabs", difference))
                    b.store(total, sums[r, q])
        return {place: b.load(pointer) for place, pointer in sums.items()}

    def _profile(self, sums: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
        b, v = self.b, self.vectors
        values = [sums[place] for place in self.places]
        if self.profile == "power":
            values = self._power(values)
        elif self.profile == "exp" and self.distance == "product":
            values = v.exp2(values, bounded=True)
        elif self.profile == "exp":
            if self.distance == "inner":
                values = [v.at_most_zero(x) for x in values]
            elif self.distance == "squared":
                values = [b.fneg(x) for x in values]
            else:
                factor = v.broadcast(self.at(8, 0))
                values = [b.fmul(x, factor) for x in values]
            values = v.exp2(values)
        else:
            if self.distance == "inner":
                values = [v.at_least_zero(x) for x in values]
            radii = [v.call("sqrt", x) for x in values]
            decays = v.exp2([b.fmul(r, v.constant(-LOG2E)) for r in radii])
            if self.profile == "matern32":
                decays = [v.multiply_add(r, e, e) for r, e in zip(radii, decays, strict=True)]
            elif self.profile == "matern52":
                third = v.constant(1.0 / 3.0)
                factors = [v.multiply_add(x, third, r) for x, r in zip(values, radii, strict=True)]
                decays = [v.multiply_add(f, e, e) for f, e in zip(factors, decays, strict=True)]
            values = decays
        return dict(zip(self.places, values, strict=True))

    def _power(self, bases: list[Any]) -> list[Any]:
        b = self.b
        powers = [cgutils.alloca_once_value(b, base) for base in bases]
        with cgutils.for_range(b, b.sub(self.degree, _integer(1))):
            for base, power in zip(bases, powers, strict=True):
                b.store(b.fmul(b.load(power), base), power)
        return [b.load(power) for power in powers]

    def _below_diagonal(self, entries: dict[tuple[int, int], Any]) -> dict[tuple[int, int], Any]:
        """Entries right of or on the diagonal become 0, if the panel meets it and a triangle is wanted."""
        b, v = self.b, self.vectors
        held = {place: cgutils.alloca_once_value(b, entry) for place, entry in entries.items()}
        right = b.mul(b.add(self.column_panel, _integer(1)), _integer(self.panel))
        top = b.mul(self.row_block, _integer(ROWS))
        meets = b.and_(b.icmp_signed("!=", self.triangle, _integer(0)), b.icmp_signed(">", right, top))
        with b.if_then(meets, likely=False):
            for r, q in self.places:
                first = b.add(b.sub(right, _integer(self.panel)), _integer(q * v.width))
                row = b.add(top, _integer(r))
                rows = v.spread(row if v.bits == 64 else b.trunc(row, v.integers.element), v.integers)
                below = b.icmp_signed("<", v.indices(first), rows)
                b.store(b.select(below, entries[r, q], v.constant(0.0)), held[r, q])
        return {place: b.load(pointer) for place, pointer in held.items()}

    def _sum_rows(self, entries: dict[tuple[int, int], Any]) -> None:
        b, v = self.b, self.vectors
        coefficients, sums = 4, 6
        t = self.shape[coefficients][1]
        with cgutils.for_range(b, t) as loop:
            right = [
                v.load(self.at(coefficients, (self.column_panel, t, self.panel), (loop.index, self.panel), q * v.width))
                for q in range(PANEL_VECTORS)
            ]
            for r in range(ROWS):
                pointer = self.at(sums, (loop.index, ROWS * v.width), r * v.width)
                total = v.load(pointer)
                for q in range(PANEL_VECTORS):
                    total = v.multiply_add(entries[r, q], right[q], total)
                v.store(total, pointer)

    def _sum_columns(self, entries: dict[tuple[int, int], Any]) -> None:
        b, v = self.b, self.vectors
        coefficients, sums = 5, 7
        t = self.shape[coefficients][1]
        panel = b.sub(self.column_panel, self.first_panel)
        with cgutils.for_range(b, t) as loop:
            pointers = [
                self.at(sums, (panel, t, self.panel), (loop.index, self.panel), q * v.width)
                for q in range(PANEL_VECTORS)
            ]
            totals = [v.load(pointer) for pointer in pointers]
            for r in range(ROWS):
                left = v.broadcast(self.at(coefficients, (self.row_block, t, ROWS), (loop.index, ROWS), r))
                totals = [v.multiply_add(entries[r, q], left, totals[q]) for q in range(PANEL_VECTORS)]
            for total, pointer in zip(totals, pointers, strict=True):
                v.store(total, pointer)


def _typed_step(
    typing_context: Any,
    kind: Any,
    a: Any,
    offset_a: Any,
    b: Any,
    offset_b: Any,
    v: Any,
    u: Any,
    row_sums: Any,
    column_sums: Any,
    factor: Any,
    degree: Any,
    row_block: Any,
    column_panel: Any,
    first_panel: Any,
    triangle: Any,
) -> Any:
    """One block of rows against one panel of columns; ``kind`` is a literal of distance, profile, end, width, stamp."""
    arrays = (a, offset_a, b, offset_b, v, u, row_sums, column_sums, factor)
    place = (degree, row_block, column_panel, first_panel, triangle)
    signature = types.void(kind, *arrays, *place)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _Step(context, builder, signature, values).emit()
        return context.get_dummy_value()

    return signature, code


def _typed_sum(typing_context: Any, width: Any, sums: Any, index: Any) -> Any:
    """The sum of vector ``index`` of an array of vectors."""
    signature = types.float64(width, sums, index)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectors = Vectors(builder, sums.dtype.bitwidth, width.literal_value)
        array = context.make_array(signature.args[1])(context, builder, values[1])
        offset = builder.mul(values[2], _integer(vectors.width))
        return vectors.sum(vectors.load(builder.gep(array.data, [offset])))

    return signature, code


_step: Any = intrinsic(prefer_literal=True)(_typed_step)
_sum: Any = intrinsic(prefer_literal=True)(_typed_sum)


@cache
def product_function(distance: str, profile: str, width: int) -> Any:
    """The function that adds both sums for one kind of kernel; :mod:`dkrr.kernels.pairwise` packs its arguments.

    ``product(a, offset_a, b, offset_b, v, u, out, out_t, factor, degree, triangle, strip, run)`` with out (m, t) and
    out_t (panels, s, panel) in float64. Columns are taken in strips of ``strip`` panels; after ``run`` blocks of rows
    the sums of a strip's columns are added to out_t. ``triangle`` leaves out entries on and right of the diagonal.
    """
    kind, rows, panel = f"{distance} {profile} {SUMS} {width} {STAMP}", ROWS, PANEL_VECTORS * width

    def product(a, offset_a, b, offset_b, v, u, out, out_t, factor, degree, triangle, strip, run):  # type: ignore[no-untyped-def]
        blocks, panels, t, s = a.shape[0], b.shape[0], v.shape[1], u.shape[1]
        row_sums = np.empty((t, rows, width), a.dtype)
        column_sums = np.empty((strip, s, panel), a.dtype)
        for first in range(0, panels, strip):
            last = min(first + strip, panels)
            # in a triangle, rows above the first column of a strip have nothing in it
            for block in range(first * panel // rows if triangle else 0, blocks, run):
                column_sums[:] = 0
                for i in range(block, min(block + run, blocks)):
                    row_sums[:] = 0
                    stop = min(last, (i * rows + rows - 1) // panel + 1) if triangle else last
                    for j in range(first, stop):
                        # fmt: off
                        _step(kind, a, offset_a, b, offset_b, v, u, row_sums, column_sums, factor,
                              degree, i, j, first, triangle)
                        # fmt: on
                    for c in range(t):
                        for r in range(rows):
                            out[i * rows + r, c] += _sum(width, row_sums, c * rows + r)
                if s > 0:
                    for j in range(first, last):
                        for c in range(s):
                            for k in range(panel):
                                out_t[j, c, k] += column_sums[j - first, c, k]

    return _compile(product)


@cache
def fill_function(distance: str, profile: str, width: int) -> Any:
    """The function that writes the entries of one kind of kernel into a C-order block.

    ``fill(a, offset_a, b, offset_b, out, factor, degree, start, first)`` with out (m, n) for m rows of A from ``start``
    and n rows of B from ``first``.
    """
    kind, rows, panel = f"{distance} {profile} {STORE} {width} {STAMP}", ROWS, PANEL_VECTORS * width

    def fill(a, offset_a, b, offset_b, out, factor, degree, start, first):  # type: ignore[no-untyped-def]
        m, n = out.shape
        buffer = np.empty((rows, panel), a.dtype)
        for i in range(start // rows, (start + m - 1) // rows + 1):
            top = i * rows - start
            for j in range(first // panel, (first + n - 1) // panel + 1):
                left = j * panel - first
                if top >= 0 and left >= 0 and top + rows <= m and left + panel <= n:
                    _step(kind, a, offset_a, b, offset_b, a, a, a, out, factor, degree, i, j, top * n + left, n)
                    continue
                _step(kind, a, offset_a, b, offset_b, a, a, a, buffer, factor, degree, i, j, 0, panel)
                for r in range(max(0, -top), min(rows, m - top)):
                    for k in range(max(0, -left), min(panel, n - left)):
                        out[top + r, left + k] = buffer[r, k]

    return _compile(fill)
