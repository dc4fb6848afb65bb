"""Kernel blocks and products with them, compiled by Numba. Imported when a block is large enough to be worth it.

One block of ROWS rows meets one panel of two vectors of columns entirely in registers: distances or inner products over
the features, the kernel's formula, and at once the two sums that need the entries,

    out_i += sum_j k_ij v_j        out_t_j += sum_i k_ij u_i,

so that an entry is never stored. Rows are packed as (blocks, d, ROWS), columns as (panels, d, 2 width), zero where
there is none: no loop has a remainder, and what a row gets does not depend on its place or on its neighbours.

B^T (Y - B P) needs whole rows of B before B^T can be applied: there a block of rows of entries goes to a buffer
(128 KiB for 8,000 columns in float32) that stays in the cache, and both sums run over it, in float64 for entries of
either precision.

A loop that is left to the compiler's vectoriser gets vectors of the width that the compiler thinks best (half of what
AVX-512 offers), or none at all if it cannot prove that two arrays are apart. Vectors written out are always vectors:
LLVM splits them where the machine has narrower ones. Multiplications are contracted with additions where the machine
can, nothing is reassociated: the order of every sum is the one that is written here.

Cost
----
An entry of rbf with d = 10 takes 0.5 ns in float32 and 1.1 ns in float64 on one core with AVX-512 at 2.7 GHz, both sums
included: about d + 20 (d + 15) vector instructions for 8 (16) entries. Every further target costs two more.
Compiling takes a second or two for each pair of distance and formula, once: the result is kept by Numba beside this
file, or in the user's cache folder where that is not writable, or nowhere (then every process compiles).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, partialmethod
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 4
PANEL_VECTORS = 2
# how a step ends: into the two sums, or into a buffer; and the step that begins with entries of such a buffer
SUMS, STORE = "sums", "store"
STORED = f"stored stored 0 {SUMS}"
LOG2E = 1.4426950408889634
# What is compiled into a step beside the file of the compiled function, which is all that Numba looks at.
_STAMP = zlib.crc32(Path(__file__).read_bytes())
_FORMULAS: dict[str, Callable[[Any, Any], Any]] = {}

# bits: (c_0, c_1 ... of 2^f = c_0 + c_1 f + ... on [-1/2, 1/2], magic number, bits of the significand).
# The coefficients are minimax in the relative error (Remez): 7e-18 in float64, 2.5e-9 in float32.
# "table": c_1, c_2 ... on [-1/32, 1/32], 7e-18.
_EXP2: dict[int | str, tuple[tuple[float, ...], float, int]] = {
    64: (
        (
            1.0,
            0.6931471805599453,
            0.24022650695910117,
            0.05550410866482133,
            0.009618129107599958,
            0.0013333558146493237,
            0.0001540353044990867,
            1.5252733747386008e-05,
            1.3215438802211746e-06,
            1.0178099728335211e-07,
            7.073189669295151e-09,
            4.448990763321361e-10,
        ),
        1.5 * 2.0**52,
        52,
    ),
    32: (
        (
            1.0,
            0.6931472067028326,
            0.24022650922288757,
            0.05550327226670302,
            0.009618056678524637,
            0.0013400428177615838,
            0.0001546144469856913,
        ),
        1.5 * 2.0**23,
        23,
    ),
    "table": (
        (
            0.6931471805599468,
            0.24022650695910167,
            0.055504108651954584,
            0.009618129102053624,
            0.0013333820232815162,
            0.00015404211699335225,
        ),
        1.5 * 2.0**48,
        48,
    ),
}
_CUTOFF = {64: -1000.0, 32: -100.0}
# the bits of 2^(j / 16), less those that j adds to the exponent
_TABLE = [int(np.float64(2.0 ** (j / 16)).view(np.int64)) - (j << 48) for j in range(16)]


# of a vector: 64 with AVX-512, else 32 (which narrower machines process in two halves)
VECTOR_BYTES = 64 if llvm.get_host_cpu_features().get("avx512f") else 32


def vector_width(dtype: Any) -> int:
    """Numbers in a vector."""
    return VECTOR_BYTES // int(np.dtype(dtype).itemsize)


def kind_of(distance: str, formula: Callable[[Any, Any], Any]) -> str:
    """The first argument of a step, without how it ends; under this name compiled code is kept."""
    name = f"{formula.__name__}-{zlib.crc32(repr(_decides(formula)).encode())}"
    _FORMULAS[name] = formula
    return f"{distance} {name} {_STAMP}"


def _decides(value: Any, known: tuple[Any, ...] = ()) -> Any:
    """What a formula computes, as far as can be seen: its code, and what it reads from around it."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if not isinstance(value, FunctionType) or value in known:
        return repr(value)
    code, cells = value.__code__, [cell.cell_contents for cell in value.__closure__ or ()]
    around = [value.__globals__[name] for name in code.co_names if name in value.__globals__]
    read = [_decides(item, (*known, value)) for item in (*around, *cells, value.__defaults__)]
    return code.co_code, code.co_consts, code.co_names, read


def _compile(function: Any) -> Any:
    """Compiled on the first call, kept between processes if there is a place for it."""
    try:
        return njit(function, cache=True, nogil=True, error_model="numpy")
    except RuntimeError:  # Numba finds no folder that it may write to
        return njit(function, nogil=True, error_model="numpy")


def _integer(value: int) -> Any:
    return ir.Constant(ir.IntType(64), value)


class _Lanes:
    """Several vectors that go through the same instructions, step by step, with the operators of numbers.

    A polynomial is one long chain, and the processor looks ahead over a few chains only if their instructions
    alternate.
    """

    def __init__(self, vectors: Vectors, values: list[Any]) -> None:
        self.vectors, self.values = vectors, values

    def _with(self, operation: str, other: Any) -> _Lanes:
        v = self.vectors
        others = other.values if isinstance(other, _Lanes) else [v.constant(other)] * len(self.values)
        emit = getattr(v.builder, operation)
        return _Lanes(v, [emit(x, y, flags=("contract",)) for x, y in zip(self.values, others, strict=True)])

    __add__, __mul__ = partialmethod(_with, "fadd"), partialmethod(_with, "fmul")

    def __neg__(self) -> Any:
        return self * -1.0


class Vectors:
    """Builds instructions on vectors of ``width`` numbers of ``bits`` bits; formulas use exp and sqrt."""

    def __init__(self, builder: Any, bits: int, width: int) -> None:
        self.builder, self.bits, self.width = builder, bits, width
        self.element = ir.DoubleType() if bits == 64 else ir.FloatType()
        self.type = ir.VectorType(self.element, width)
        self.integers = ir.VectorType(ir.IntType(bits), width)

    def constant(self, value: float) -> Any:
        return ir.Constant(self.type, [ir.Constant(self.element, value)] * self.width)

    def load(self, pointer: Any) -> Any:
        return self.builder.load(self.builder.bitcast(pointer, self.type.as_pointer()), align=self.bits // 8)

    def store(self, vector: Any, pointer: Any) -> None:
        self.builder.store(vector, self.builder.bitcast(pointer, self.type.as_pointer()), align=self.bits // 8)

    def spread(self, value: Any) -> Any:
        """A scalar in every place."""
        nothing = ir.Constant(ir.VectorType(value.type, self.width), ir.Undefined)
        first = self.builder.insert_element(nothing, value, ir.Constant(ir.IntType(32), 0))
        places = ir.Constant(ir.VectorType(ir.IntType(32), self.width), [0] * self.width)
        return self.builder.shuffle_vector(first, nothing, places)

    def broadcast(self, pointer: Any) -> Any:
        """The number at ``pointer`` in every place."""
        return self.spread(self.builder.load(pointer))

    def call(self, name: str, *operands: Any) -> Any:
        """An intrinsic of LLVM."""
        kind = ir.FunctionType(self.type, [self.type] * len(operands))
        function = cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.{name}.v{self.width}f{self.bits}")
        return self.builder.call(function, operands)

    def multiply_add(self, x: Any, y: Any, z: Any) -> Any:
        """x y + z, rounded once where the machine can."""
        return self.call("fmuladd", x, y, z)

    def exp(self, x: _Lanes, out: Any = None) -> _Lanes:
        return _Lanes(self, self.exp2((x * LOG2E).values))

    def sqrt(self, x: _Lanes, out: Any = None) -> _Lanes:
        return _Lanes(self, [self.call("sqrt", value) for value in x.values])

    def exp2(self, exponents: list[Any], *, bounded: bool = False) -> list[Any]:
        """2^s for s <= 0, within two units in the last place; exactly 1 for 0, 0 below 2^-1000 (2^-100 in float32).

        ``bounded``: |s| is known to be at most 1,000 (100), and s may be positive.

        s = k + f with an integer k and |f| <= 1/2, both exact: adding the magic number 1.5 2^52 leaves k in the low
        bits of the sum. 2^f is a polynomial, and k is added to its exponent. Where one instruction looks up 16 numbers
        in float64 (AVX-512 permutes two registers), k counts sixteenths, and 2^(k / 16) comes from a table: 7
        instructions of 12 are left of the polynomial. The cutoff keeps k in the range of exponents, and the products
        of tiny entries and tiny vectors away from denormal numbers, which take a hundred cycles each.
        """
        b, has_table = self.builder, self.bits == 64 and self.width == 8
        coefficients, magic, significand = _EXP2["table" if has_table else self.bits]
        shifted = [b.fadd(s, self.constant(magic)) for s in exponents]
        whole = [b.fsub(x, self.constant(magic)) for x in shifted]
        fraction = [b.fsub(s, k) for s, k in zip(exponents, whole, strict=True)]
        values = [self.constant(coefficients[-1])] * len(exponents)
        for c in coefficients[-2::-1]:
            values = [self.multiply_add(p, f, self.constant(c)) for p, f in zip(values, fraction, strict=True)]
        places, steps = [b.bitcast(x, self.integers) for x in shifted], self._integers([significand] * self.width)
        if has_table:
            values = [b.fmul(p, f) for p, f in zip(values, fraction, strict=True)]
            kind = ir.FunctionType(self.integers, [self.integers] * 3)
            look_up = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpermi2var.q.512")
            low, high = self._integers(_TABLE[:8]), self._integers(_TABLE[8:])
            # the instruction looks at the last four bits of a place
            found = [b.add(b.call(look_up, [low, k, high]), b.shl(k, steps)) for k in places]
            powers = [b.bitcast(x, self.type) for x in found]
            values = [self.multiply_add(x, p, x) for x, p in zip(powers, values, strict=True)]
        else:
            found = [b.bitcast(p, self.integers) for p in values]
            values = [b.bitcast(b.add(p, b.shl(k, steps)), self.type) for p, k in zip(found, places, strict=True)]
        if bounded:
            return values
        cutoff, zero = self.constant(_CUTOFF[self.bits]), self.constant(0.0)
        return [b.select(b.fcmp_ordered(">=", s, cutoff), x, zero) for s, x in zip(exponents, values, strict=True)]

    def _integers(self, values: list[int]) -> Any:
        return ir.Constant(self.integers, [ir.Constant(self.integers.element, value) for value in values])

    def sum(self, vector: Any) -> Any:
        """The sum of all places in float64, by halves."""
        double = ir.VectorType(ir.DoubleType(), self.width)
        wide = vector if self.bits == 64 else self.builder.fpext(vector, double)
        kind = ir.FunctionType(ir.DoubleType(), [ir.DoubleType(), double])
        name = f"llvm.vector.reduce.fadd.v{self.width}f64"
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, [ir.Constant(ir.DoubleType(), 0.0), wide], fastmath=("reassoc",))


class _Step:
    """The instructions of one block of rows against one panel of columns."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        distance, self.formula, _, self.end = signature.args[0].literal_value.split()
        # the weight of each feature follows the factor
        self.distance, self.weighted = distance.removeprefix("weighted_"), distance.startswith("weighted_")
        bits, bits_of_sums = (signature.args[k].dtype.bitwidth for k in (1, 5))
        self.b, self.v = builder, Vectors(builder, bits, VECTOR_BYTES * 8 // bits)
        self.wide = Vectors(builder, bits_of_sums, self.v.width)
        self.panel = PANEL_VECTORS * self.v.width
        pairs = zip(signature.args[1:10], arguments[1:10], strict=True)
        arrays = [context.make_array(kind)(context, builder, value) for kind, value in pairs]
        self.data = [array.data for array in arrays]
        self.shape = [cgutils.unpack_tuple(builder, array.shape) for array in arrays]
        self.row_block, self.column_panel, self.first_panel, self.triangle = arguments[10:]

    def at(self, array: int, *terms: Any) -> Any:
        """Pointer to the number at the sum of the terms, which are integers and products of them."""
        offset = _integer(0)
        for term in terms:
            product = _integer(1)
            for factor in term if isinstance(term, tuple) else (term,):
                product = self.b.mul(product, _integer(factor) if isinstance(factor, int) else factor)
            offset = self.b.add(offset, product)
        return self.b.gep(self.data[array], [offset])

    def panel_at(self, array: int, *terms: Any) -> list[Any]:
        """Pointers to the vectors of a panel."""
        return [self.at(array, *terms, q * self.v.width) for q in range(PANEL_VECTORS)]

    def emit(self) -> None:
        b, v = self.b, self.v
        values = self._stored() if self.distance == "stored" else self._formula(self._distances())
        entries = [values[r : r + PANEL_VECTORS] for r in range(0, len(values), PANEL_VECTORS)]
        if self.end == STORE:
            for r, row in enumerate(entries):
                # the last two arguments are then the offset of the first entry and the distance between rows
                for value, pointer in zip(row, self.panel_at(7, self.first_panel, (self.triangle, r)), strict=True):
                    v.store(value, pointer)
            return
        if self.distance != "stored":
            self._below_diagonal(entries)
        v = self.wide
        t, s = self.shape[4][1], self.shape[5][1]
        with cgutils.for_range(b, t) as loop:
            factors = self.panel_at(4, (self.column_panel, t, self.panel), (loop.index, self.panel))
            sums = [self.at(6, (loop.index, ROWS * v.width), r * v.width) for r in range(ROWS)]
            self._add([v.load(pointer) for pointer in factors], entries, sums)
        with cgutils.for_range(b, s) as loop:
            left = [v.broadcast(self.at(5, (self.row_block, s, ROWS), (loop.index, ROWS), r)) for r in range(ROWS)]
            panel = b.sub(self.column_panel, self.first_panel)
            self._add(
                left, zip(*entries, strict=True), self.panel_at(7, (panel, s, self.panel), (loop.index, self.panel))
            )

    def _add(self, factors: list[Any], entries: Any, sums: list[Any]) -> None:
        """To each sum, a row of entries times the factors."""
        for row, pointer in zip(entries, sums, strict=True):
            total = self.wide.load(pointer)
            for entry, factor in zip(row, factors, strict=True):
                total = self.wide.multiply_add(entry, factor, total)
            self.wide.store(total, pointer)

    def _stored(self) -> list[Any]:
        """Entries of a buffer (panels, ROWS, panel), as wide as the sums."""
        start = (self.column_panel, ROWS * self.panel)
        values = [self.v.load(p) for r in range(ROWS) for p in self.panel_at(0, start, r * self.panel)]
        return values if self.wide.bits == self.v.bits else [self.b.fpext(value, self.wide.type) for value in values]

    def _distances(self) -> list[Any]:
        """Inner products with and without offsets, squared distances or 1-norms: vectors, row by row."""
        b, v = self.b, self.v
        d = self.shape[2][1]
        with_offsets = self.distance == "inner" or self.distance.startswith("expanded")
        starts = [v.constant(0.0)] * (ROWS * PANEL_VECTORS)
        if with_offsets:
            right = [v.load(pointer) for pointer in self.panel_at(3, (self.column_panel, self.panel))]
            left = [v.broadcast(self.at(1, (self.row_block, ROWS), r)) for r in range(ROWS)]
            starts = [b.fadd(x, y) for x in left for y in right]
        sums = [cgutils.alloca_once(b, v.type) for _ in starts]
        for start, pointer in zip(starts, sums, strict=True):
            b.store(start, pointer)
        with cgutils.for_range(b, d) as loop:
            right = [v.load(p) for p in self.panel_at(2, (self.column_panel, d, self.panel), (loop.index, self.panel))]
            left = [v.broadcast(self.at(0, (self.row_block, d, ROWS), (loop.index, ROWS), r)) for r in range(ROWS)]
            weight = v.broadcast(self.at(8, 1, loop.index)) if self.weighted else None
            for (x, y), pointer in zip([(x, y) for x in left for y in right], sums, strict=True):
                if with_offsets or self.distance == "split":
                    total = v.multiply_add(x, y, b.load(pointer))
                else:
                    gap = b.fsub(x, y) if weight is None else b.fmul(b.fsub(x, y), weight)
                    square = self.distance == "squared"
                    total = b.load(pointer)
                    total = v.multiply_add(gap, gap, total) if square else b.fadd(total, v.call("fabs", gap))
                b.store(total, pointer)
        return [b.load(pointer) for pointer in sums]

    def _formula(self, sums: list[Any]) -> list[Any]:
        v, x = self.v, _Lanes(self.v, sums)
        if self.distance.startswith("expanded"):
            sign, zero = "<" if self.distance == "expanded-" else ">", v.constant(0.0)
            x.values = [self.b.select(self.b.fcmp_ordered(sign, y, zero), y, zero) for y in sums]
        elif self.distance in ("squared", "manhattan"):
            factor = v.broadcast(self.at(8, 0))
            x.values = [self.b.fmul(value, factor) for value in sums]
        formula = _FORMULAS[self.formula]
        if (formula.__module__, formula.__name__) == ("dkrr.kernels.pairwise", "exponential"):
            return v.exp2(x.values, bounded=self.distance == "split")
        values: list[Any] = formula(v, x).values
        return values

    def _below_diagonal(self, entries: list[list[Any]]) -> None:
        """Entries right of or on the diagonal become 0, if the panel meets it and a triangle is wanted."""
        b, v = self.b, self.v
        held = [[cgutils.alloca_once_value(b, entry) for entry in row] for row in entries]
        ahead = b.sub(b.mul(self.row_block, _integer(ROWS)), b.mul(self.column_panel, _integer(self.panel)))
        meets = b.icmp_signed("<", ahead, _integer(self.panel))
        with b.if_then(b.and_(b.icmp_signed("!=", self.triangle, _integer(0)), meets), likely=False):
            for r, (row, pointers) in enumerate(zip(entries, held, strict=True)):
                for q, (entry, pointer) in enumerate(zip(row, pointers, strict=True)):
                    lanes = [_integer(q * v.width + k) for k in range(v.width)]
                    places = ir.Constant(ir.VectorType(ir.IntType(64), v.width), lanes)
                    below = b.icmp_signed("<", places, v.spread(b.add(ahead, _integer(r))))
                    b.store(b.select(below, entry, v.constant(0.0)), pointer)
        for row, pointers in zip(entries, held, strict=True):
            row[:] = [b.load(pointer) for pointer in pointers]


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
    row_block: Any,
    column_panel: Any,
    first_panel: Any,
    triangle: Any,
) -> Any:
    """One block of rows against one panel of columns; ``kind`` is a literal of :func:`kind_of` and how it ends."""
    arrays = (a, offset_a, b, offset_b, v, u, row_sums, column_sums, factor)
    signature = types.void(kind, *arrays, row_block, column_panel, first_panel, triangle)

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        _Step(context, builder, signature, values).emit()
        return context.get_dummy_value()

    return signature, code


def _typed_sum(typing_context: Any, sums: Any, index: Any) -> Any:
    """The sum of vector ``index`` of an array of vectors."""
    bits = sums.dtype.bitwidth

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        vectors = Vectors(builder, bits, VECTOR_BYTES * 8 // bits)
        array = context.make_array(signature.args[0])(context, builder, values[0])
        return vectors.sum(vectors.load(builder.gep(array.data, [builder.mul(values[1], _integer(vectors.width))])))

    return types.float64(sums, index), code


_step: Any = intrinsic(prefer_literal=True)(_typed_step)
_sum: Any = intrinsic(prefer_literal=True)(_typed_sum)


@cache
def product_function(kind: str, width: int) -> Any:
    """The function that adds both sums for one kind of kernel; :mod:`dkrr.kernels.pairwise` packs its arguments.

    ``product(a, offset_a, b, offset_b, v, u, out, out_t, factor, triangle, strip, run)`` with out (m, t) and
    out_t (panels, s, panel) in float64. Columns are taken in strips of ``strip`` panels; after ``run`` blocks of rows
    the sums of a strip's columns are added to out_t. ``triangle`` leaves out entries on and right of the diagonal.
    """
    kind, rows, panel = f"{kind} {SUMS}", ROWS, PANEL_VECTORS * width

    def product(a, offset_a, b, offset_b, v, u, out, out_t, factor, triangle, strip, run):  # type: ignore[no-untyped-def]
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
                              i, j, first, triangle)
                        # fmt: on
                    for c in range(t):
                        for r in range(rows):
                            out[i * rows + r, c] += _sum(row_sums, c * rows + r)
                if s > 0:
                    for j in range(first, last):
                        for c in range(s):
                            for k in range(panel):
                                out_t[j, c, k] += column_sums[j - first, c, k]

    return _compile(product)


@cache
def fill_function(kind: str, width: int) -> Any:
    """The function that writes the entries of one kind of kernel into a C-order block.

    ``fill(a, offset_a, b, offset_b, out, factor, start, first)`` with out (m, n) for m rows of A from ``start``
    and n rows of B from ``first``.
    """
    kind, rows, panel = f"{kind} {STORE}", ROWS, PANEL_VECTORS * width

    def fill(a, offset_a, b, offset_b, out, factor, start, first):  # type: ignore[no-untyped-def]
        m, n = out.shape
        buffer = np.empty((rows, panel), a.dtype)
        for i in range(start // rows, (start + m - 1) // rows + 1):
            top = i * rows - start
            for j in range(first // panel, (first + n - 1) // panel + 1):
                left = j * panel - first
                if top >= 0 and left >= 0 and top + rows <= m and left + panel <= n:
                    _step(kind, a, offset_a, b, offset_b, a, a, a, out, factor, i, j, top * n + left, n)
                    continue
                _step(kind, a, offset_a, b, offset_b, a, a, a, buffer, factor, i, j, 0, panel)
                for r in range(max(0, -top), min(rows, m - top)):
                    for k in range(max(0, -left), min(panel, n - left)):
                        out[top + r, left + k] = buffer[r, k]

    return _compile(fill)


@cache
def two_sided_function(kind: str, width: int) -> Any:
    """The function for one kind of kernel.

    ``two_sided(a, offset_a, b, offset_b, p, y, weight, w, factor)`` with P (panels, t, panel), or (0, t, panel) for
    none, Y (rows, t), W (panels, t, panel), all float64: adds B^T diag(weight) (Y - B P) to W, and Y becomes Y - B P.
    """
    kind, rows, panel, lanes = f"{kind} {STORE}", ROWS, PANEL_VECTORS * width, vector_width(np.float64)
    stored, parts = STORED, width // lanes

    def two_sided(a, offset_a, b, offset_b, p, y, weight, w, factor):  # type: ignore[no-untyped-def]
        panels, t = b.shape[0], w.shape[1]
        entries = np.empty((panels, rows, panel), a.dtype)
        row_sums, v, nothing = np.empty((t, rows, width)), np.empty((1, t, rows)), np.empty((1, 0, 1))
        for i in range(a.shape[0]):
            row_sums[:] = 0.0
            for j in range(panels):
                # the last two: where the first entry goes, and how far apart rows are
                _step(kind, a, offset_a, b, offset_b, a, a, a, entries, factor, i, j, j * rows * panel, panel)
                if p.shape[0] > 0:
                    _step(stored, entries, w, w, w, p, nothing, row_sums, w, factor, 0, j, 0, 0)
            for c in range(t):
                for r in range(rows):
                    total = y[i * rows + r, c]
                    for k in range(parts):
                        total -= _sum(row_sums, (c * rows + r) * parts + k)
                    y[i * rows + r, c] = total
                    v[0, c, r] = weight[i * rows + r] * total
            for j in range(panels):
                _step(stored, entries, w, w, w, nothing, v, row_sums, w, factor, 0, j, 0, 0)

    return _compile(two_sided)
