"""Vector arithmetic as LLVM instructions: what the compiled kernels are made of.

A loop that is left to the compiler's vectoriser gets vectors of the width that the compiler thinks best (half of what
AVX-512 offers), or none at all if it cannot prove that two arrays are apart. Vectors written out are always vectors:
LLVM splits them where the machine has narrower ones. Multiplications are contracted with additions where the machine
can, nothing is reassociated: the order of every sum is the one that is written here.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

__all__ = ["STAMP", "Vectors"]

# Part of the key under which compiled code is kept: Numba itself looks at the file of the compiled function only.
STAMP = zlib.crc32(Path(__file__).read_bytes())

# bits: (c_1 ... c_n of 2^f = 1 + c_1 f + ... + c_n f^n on [-1/2, 1/2], magic number, bits of the significand).
# The coefficients are minimax in the relative error (Remez): 7e-18 in float64, 2.5e-9 in float32.
_EXP2: dict[int, tuple[tuple[float, ...], float, int]] = {
    64: (
        (
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
}
_CUTOFF = {64: -1000.0, 32: -100.0}
# 2^f = 1 + c_1 f + ... on [-1/32, 1/32], minimax: 7e-18; the bits of 2^(j / 16), less those that j adds to the exponent
_TABLE_POLYNOMIAL = (
    0.6931471805599468,
    0.24022650695910167,
    0.055504108651954584,
    0.009618129102053624,
    0.0013333820232815162,
    0.00015404211699335225,
)
_TABLE_MAGIC = 1.5 * 2.0**48
_TABLE = [int(np.float64(2.0 ** (j / 16)).view(np.int64)) - (j << 48) for j in range(16)]


class Vectors:
    """Builds instructions on vectors of ``width`` numbers of ``bits`` bits.

    Methods that take lists work on all of them in turn, step by step: a polynomial is one long chain, and the
    processor looks ahead over a few chains only if their instructions alternate.
    """

    def __init__(self, builder: Any, bits: int, width: int) -> None:
        self.builder, self.bits, self.width = builder, bits, width
        self.element = ir.DoubleType() if bits == 64 else ir.FloatType()
        self.type = ir.VectorType(self.element, width)
        self.integers = ir.VectorType(ir.IntType(bits), width)

    def constant(self, value: float) -> Any:
        rounded = float(np.float32(value)) if self.bits == 32 else value
        return ir.Constant(self.type, [ir.Constant(self.element, rounded)] * self.width)

    def load(self, pointer: Any) -> Any:
        return self.builder.load(self._cast(pointer), align=self.bits // 8)

    def store(self, vector: Any, pointer: Any) -> None:
        self.builder.store(vector, self._cast(pointer), align=self.bits // 8)

    def _cast(self, pointer: Any) -> Any:
        return self.builder.bitcast(pointer, self.type.as_pointer())

    def spread(self, value: Any, kind: Any = None) -> Any:
        """A scalar in every place."""
        kind = self.type if kind is None else kind
        nothing = ir.Constant(kind, ir.Undefined)
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

    def at_most_zero(self, x: Any) -> Any:
        zero = self.constant(0.0)
        return self.builder.select(self.builder.fcmp_ordered("<", x, zero), x, zero)

    def at_least_zero(self, x: Any) -> Any:
        zero = self.constant(0.0)
        return self.builder.select(self.builder.fcmp_ordered(">", x, zero), x, zero)

    def indices(self, first: Any) -> Any:
        """first, first + 1, ... for a 64-bit ``first``."""
        start = first if self.bits == 64 else self.builder.trunc(first, ir.IntType(32))
        steps = ir.Constant(self.integers, [ir.Constant(self.integers.element, k) for k in range(self.width)])
        return self.builder.add(self.spread(start, self.integers), steps)

    def exp2(self, exponents: list[Any], *, bounded: bool = False) -> list[Any]:
        """2^s for s <= 0, within two units in the last place; exactly 1 for 0, 0 below 2^-1000 (2^-100 in float32).

        ``bounded``: |s| is known to be at most 1,000 (100), and s may be positive.

        s = k + f with an integer k and |f| <= 1/2, both exact: adding the magic number 1.5 2^52 leaves k in the low
        bits of the sum. 2^f is a polynomial, and k is added to its exponent. Where one instruction looks up 16 numbers
        in float64, k counts sixteenths, and 2^(k / 16) comes from a table: 7 instructions of 12 are left of the
        polynomial. The cutoff keeps k in the range of exponents, and the products of tiny entries and tiny vectors away
        from denormal numbers, which take a hundred cycles each.
        """
        b = self.builder
        scaled = self._by_table(exponents) if self._has_table else self._by_polynomial(exponents)
        if bounded:
            return scaled
        cutoff = self.constant(_CUTOFF[self.bits])
        return [
            b.select(b.fcmp_ordered(">=", s, cutoff), x, self.constant(0.0))
            for s, x in zip(exponents, scaled, strict=True)
        ]

    @property
    def _has_table(self) -> bool:
        """Whether vectors are those of AVX-512, with its permutation of two registers."""
        return self.bits == 64 and self.width == 8

    def _split(self, exponents: list[Any], magic: float) -> tuple[list[Any], list[Any]]:
        """Numbers with s, rounded, in their low bits, and what rounding left."""
        b = self.builder
        shifted = [b.fadd(s, self.constant(magic)) for s in exponents]
        whole = [b.fsub(x, self.constant(magic)) for x in shifted]
        return shifted, [b.fsub(s, k) for s, k in zip(exponents, whole, strict=True)]

    def _integers(self, values: list[int]) -> Any:
        return ir.Constant(self.integers, [ir.Constant(self.integers.element, value) for value in values])

    def _by_polynomial(self, exponents: list[Any]) -> list[Any]:
        b = self.builder
        coefficients, magic, significand = _EXP2[self.bits]
        shifted, fraction = self._split(exponents, magic)
        value = [self.constant(coefficients[-1])] * len(exponents)
        for c in (*coefficients[-2::-1], 1.0):
            value = [self.multiply_add(p, f, self.constant(c)) for p, f in zip(value, fraction, strict=True)]
        bits = self._integers([significand] * self.width)
        powers = [b.shl(b.bitcast(x, self.integers), bits) for x in shifted]
        return [b.bitcast(b.add(b.bitcast(p, self.integers), k), self.type) for p, k in zip(value, powers, strict=True)]

    def _by_table(self, exponents: list[Any]) -> list[Any]:
        b = self.builder
        shifted, fraction = self._split(exponents, _TABLE_MAGIC)
        value = [self.constant(_TABLE_POLYNOMIAL[-1])] * len(exponents)
        for c in _TABLE_POLYNOMIAL[-2::-1]:
            value = [self.multiply_add(p, f, self.constant(c)) for p, f in zip(value, fraction, strict=True)]
        value = [b.fmul(p, f) for p, f in zip(value, fraction, strict=True)]
        kind = ir.FunctionType(self.integers, [self.integers] * 3)
        look_up = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.vpermi2var.q.512")
        low, high = self._integers(_TABLE[:8]), self._integers(_TABLE[8:])
        places = [b.bitcast(x, self.integers) for x in shifted]  # the instruction looks at their last four bits
        steps = self._integers([48] * self.width)
        powers = [b.bitcast(b.add(b.call(look_up, [low, k, high]), b.shl(k, steps)), self.type) for k in places]
        return [self.multiply_add(power, p, power) for power, p in zip(powers, value, strict=True)]

    def sum(self, vector: Any) -> Any:
        """The sum of all places in float64, by halves."""
        double = ir.VectorType(ir.DoubleType(), self.width)
        wide = vector if self.bits == 64 else self.builder.fpext(vector, double)
        kind = ir.FunctionType(ir.DoubleType(), [ir.DoubleType(), double])
        function = cgutils.get_or_insert_function(
            self.builder.module, kind, f"llvm.vector.reduce.fadd.v{self.width}f64"
        )
        return self.builder.call(function, [ir.Constant(ir.DoubleType(), 0.0), wide], fastmath=("reassoc",))
