"""What a kernel is: a block of it, walked in strips that stay in the cache of one core, and sums and products.

A kernel is frozen parameters and two ways to act on rows: ``block(A, B, out)`` for the tile floor, ``diag(A)`` for the
diagonal. A kernel of one distance or inner product is a :class:`~dkrr.kernels.pairwise.Pairwise` and writes its
formula. Any other writes ``_fill`` (operands once per block, then one strip at a time) and ``_diag``; strips,
symmetry, the exact diagonal and the finiteness check are here.

A kernel is one matrix product followed by a few passes of elementwise arithmetic. Done on the whole block, every pass
streams it through memory; done on strips of half a mebibyte, only the result does. A strip handed to a kernel is always
C-contiguous float64: it is a piece of ``out`` where that is so, else a scratch strip that is copied (and cast) into
``out``. Elementwise NumPy calls on a strided strip cost twice as much, because NumPy copies them through its buffer.

Cost, rbf with d = 10 on one core: 1.6 ns an entry with full rows of 2,048, 2.2 through the scratch strip.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dkrr.errors import ParameterError
from dkrr.kernels.checks import (
    FloatArray,
    as_rows,
    check_features,
    check_out,
    finite_guard,
    overflow,
    positive,
)
from dkrr.markup import telling

# check(kernel, parameter, value) is the value of a parameter, or raises.
Checks = Mapping[str, Callable[[str, str, Any], Any]]
# fill(rows, columns, strip) writes k(A[rows], B[columns]) into the contiguous float64 strip.
Fill = Callable[[slice, slice, FloatArray], None]

# 512 KiB: a strip, a scratch strip and a packed operand fit into an L2 of 2 MiB, and still into one of 1 MiB.
STRIP_ENTRIES = 1 << 16
STRIP_COLUMNS = 2048
# Edge of the squares in which a triangle is mirrored: source and destination fit into the L1 cache together.
MIRROR_EDGE = 64
# Distance from the origin, in the kernel's own lengths, up to which rows may be scaled, and squared distances may come
# from products: x = c |a|^2 + c |b|^2 - 2 c a.b is off by at most 2 eps 24^2 = 3e-13, and was by 100 eps at 48 lengths.
# Beyond, differences are taken first, of rows as they are. The rows of one side decide: if only the others are far,
# their entries are nearly 0.
MAX_EXTENT = 24.0


class Kernel(ABC):
    """k(A, B)[i, j] = k(a_i, b_j) for rows A (m, d) and B (n, d).

    Subclasses are frozen keyword-only dataclasses. ``name`` is the name in job files and in :meth:`to_dict`; ``checks``
    turns what is given for a parameter into its value, or raises. With ``repr=False`` they are shown by what was given
    to them: ``RBF(gamma=0.5)``.
    """

    name: ClassVar[str]
    checks: ClassVar[Checks] = {}
    # NumPy scalars leave ``np.float64(2) * kernel`` to __rmul__ instead of building an object array.
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every concrete kernel is a dataclass
            value = getattr(self, field.name)
            if field.name in self.checks and not (value is None and field.default is None):
                object.__setattr__(self, field.name, self.checks[field.name](self.name, field.name, value))

    @property
    def stationary(self) -> bool:
        """Whether k(a + c, b + c) = k(a, b): then rows may be centred, and should be, before :meth:`block`."""
        return False

    @property
    def positive_semidefinite(self) -> bool:
        """Whether every Gram matrix is known to be positive semi-definite; False means indefinite or unknown."""
        return False

    @property
    def bounded(self) -> bool:
        """Whether ``_fill`` proves from its operands that every value is finite, so that no strip is checked."""
        return False

    def extent(self, rows: FloatArray) -> float:
        """Largest distance of a row (m, d) from the origin in the kernel's own lengths; 0 where it does not matter.

        Rows of a stationary kernel beyond ``MAX_EXTENT`` are compared by exact differences, as they are.
        """
        return 0.0

    def center(self, mean: FloatArray, std: FloatArray) -> FloatArray | None:
        """The point that is subtracted from rows with such means and deviations (d,) before :meth:`block`, or None.

        Distances lose digits far from the origin, so it is the mean; but where typical rows are still far away from
        that, differences are taken anyway, and subtracting would only round the rows: then it is the origin.
        """
        if not self.stationary:
            return None
        with np.errstate(all="ignore"):  # block() names what is not finite
            return np.zeros_like(mean) if self.extent(std[None]) > MAX_EXTENT else mean

    @abstractmethod
    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        """Build the operands for a block and return what fills strips of up to ``entries`` entries."""

    @abstractmethod
    def _diag(self, A: FloatArray) -> FloatArray:
        """k(a_i, a_i) for each row."""

    def __call__(self, A: npt.ArrayLike, B: npt.ArrayLike) -> FloatArray:
        """Evaluate k(A, B) into a new array.

        Unlike :meth:`block` this subtracts :meth:`center` of B from both first if the kernel is stationary, so that
        rows far from the origin lose nothing. Passing one object twice gives an exactly symmetric result.

        Parameters
        ----------
        A : (m, d)
        B : (n, d)

        Returns
        -------
        (m, n) float64
        """
        same = A is B
        rows_b = as_rows(B, "B")
        rows_a = rows_b if same else as_rows(A, "A")
        check_features(rows_a, rows_b)
        with np.errstate(all="ignore"):  # block() names what is not finite
            is_moved = self.stationary and rows_b.size
            center = self.center(rows_b.mean(axis=0), rows_b.std(axis=0)) if is_moved else None
            if center is not None:
                rows_b = rows_b - center
                rows_a = rows_b if same else rows_a - center
        return self.block(rows_a, rows_b, same=same)

    def block(
        self, A: FloatArray, B: FloatArray, out: npt.NDArray[Any] | None = None, *, same: bool = False
    ) -> npt.NDArray[Any]:
        """Evaluate k(A, B) in place in ``out``, in strips that stay in the cache.

        Parameters
        ----------
        A : (m, d) float64, C-contiguous
        B : (n, d) float64, C-contiguous
        out : (m, n) float64 or float32, rows contiguous
            The row stride may exceed n. A float32 ``out`` receives values evaluated in float64 and rounded once.
        same
            A and B are the same rows: ``out`` is then exactly symmetric, and its diagonal is exactly :meth:`diag`.

        Raises
        ------
        DataError
            A feature or a value of the kernel is not finite, or the kernel does not take such features.

        Notes
        -----
        Cost: 2 m n d flops and one write of ``out``; half of that with ``same``. Besides ``out`` it needs one scaled
        copy of the rows with two more columns, and four strips; what a callable or a scikit-learn kernel allocates by
        itself is its own affair.
        """
        A = as_rows(A, "A")
        B = A if same else as_rows(B, "B")
        check_features(A, B)
        if out is None:
            out = np.empty((len(A), len(B)))
        check_out(out, len(A), len(B))
        kernel = self.resolve(A.shape[1])
        if out.size == 0:
            return out
        guard = None if kernel.bounded else finite_guard(kernel.describe(), A, B)
        rows, columns = strip_shape(len(A), len(B), A.shape[1])
        with np.errstate(all="ignore"):  # overflow is checked above, with the kernel's name
            fill_strips(kernel._fill(A, B, rows * columns), out, rows, columns, guard, lower=same)
            if same:
                mirror(out)
                np.einsum("ii->i", out)[...] = kernel._diag(A)
        return out

    def diag(self, A: npt.ArrayLike) -> FloatArray:
        """k(a_i, a_i) for each row of A (m, d): (m,) float64, exactly the diagonal of ``block(A, A, same=True)``."""
        rows = as_rows(A, "A")
        kernel = self.resolve(rows.shape[1])
        with np.errstate(all="ignore"):  # checked on the next line
            values = kernel._diag(rows)
        if not np.isfinite(values).all():
            raise overflow(kernel.describe(), rows, rows)
        return values

    def resolve(self, num_features: int) -> Self:
        """The kernel for rows of ``num_features`` features, with every default that depends on them decided."""
        if num_features < 1:
            raise ParameterError(f"num_features = {num_features}", hint="at least one feature is expected")
        return self

    def _parameters(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The kernel as plain JSON values; :func:`~dkrr.kernels.kernel_from_dict` is the exact inverse."""
        given = self._parameters().items()
        return {"kernel": self.name} | {key: list(value) if isinstance(value, tuple) else value for key, value in given}

    def __repr__(self) -> str:
        shown = telling(self._parameters()).items()
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def describe(self) -> str:
        """The kernel in words, for messages."""
        return f"kernel {self!r}"

    def __add__(self, other: Kernel | float) -> Sum:
        return _combine(Sum, self, other)

    def __radd__(self, other: float) -> Kernel:
        # what the built-in sum begins with
        return self if other == 0 else _combine(Sum, other, self)

    def __mul__(self, other: Kernel | float) -> Product:
        return _combine(Product, self, other)

    def __rmul__(self, other: float) -> Product:
        return _combine(Product, other, self)


def strip_shape(m: int, n: int, d: int) -> tuple[int, int]:
    """Rows and columns of the strips of an (m, n) block of rows with d features.

    The matrix product packs all columns of B anew for every strip, which costs about d / (2 rows) ns an entry. With
    rows >= 2 d (at most 256) that stays below a tenth of the product itself.
    """
    columns = max(1, min(n, STRIP_COLUMNS))
    rows = max(STRIP_ENTRIES // columns, min(2 * d, 256))
    return max(1, min(m, rows)), columns


def fill_strips(
    fill: Fill,
    out: npt.NDArray[Any],
    num_rows: int,
    num_columns: int,
    check: Callable[[npt.NDArray[Any]], None] | None = None,
    *,
    lower: bool = False,
) -> None:
    """Fill ``out`` strip by strip, or the strips that meet its lower triangle; ``check`` sees each while it is hot."""
    m, n = out.shape
    scratch = np.empty(0)
    for i in range(0, m, num_rows):
        rows = slice(i, min(i + num_rows, m))
        for j in range(0, rows.stop if lower else n, num_columns):
            columns = slice(j, min(j + num_columns, rows.stop if lower else n))
            target = out[rows, columns]
            strip = target
            if not target.flags.c_contiguous or target.dtype != np.float64:
                scratch = scratch if scratch.size else np.empty(num_rows * num_columns)
                strip = scratch[: target.size].reshape(target.shape)
            fill(rows, columns, strip)
            if strip is not target:
                np.copyto(target, strip, casting="same_kind")
            if check is not None:
                # The value that counts is the one after the cast: 1e39 is finite in float64 only.
                check(strip if target.dtype == np.float64 else target)


def mirror(out: npt.NDArray[Any]) -> None:
    """Copy the lower triangle of a square array to the upper one."""
    n = out.shape[0]
    for i in range(0, n, MIRROR_EDGE):
        rows = slice(i, min(i + MIRROR_EDGE, n))
        for j in range(0, i, MIRROR_EDGE):
            columns = slice(j, j + MIRROR_EDGE)
            out[columns, rows] = out[rows, columns].T
        lower = np.tril(out[rows, rows])
        np.add(lower, np.tril(lower, -1).T, out=out[rows, rows])


@dataclass(frozen=True, kw_only=True, repr=False)
class Constant(Kernel):
    """k(a, b) = value. What a number becomes in ``2 * kernel`` and ``kernel + 1``."""

    name = "constant"
    stationary = True
    positive_semidefinite = True
    checks: ClassVar[Checks] = {"value": positive}
    value: float = 1.0

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        return lambda rows, columns, strip: strip.fill(self.value)

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.full(len(A), self.value)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Composite(Kernel):
    """Kernels combined entry by entry with one commutative operation."""

    parts_field: ClassVar[str]
    operation: ClassVar[np.ufunc]

    def __post_init__(self) -> None:
        parts = getattr(self, self.parts_field)
        listed = parts if isinstance(parts, (list, tuple)) else ()
        if not listed or any(not isinstance(part, Kernel) or part.name == "precomputed" for part in listed):
            given = f"{self.parts_field} = {parts!r} of kernel {self.name!r}"
            raise ParameterError(given, hint="give kernels that act on rows")
        object.__setattr__(self, self.parts_field, tuple(parts))

    @property
    def parts(self) -> tuple[Kernel, ...]:
        return tuple(getattr(self, self.parts_field))

    @property
    def stationary(self) -> bool:
        return all(part.stationary for part in self.parts)

    @property
    def positive_semidefinite(self) -> bool:
        return all(part.positive_semidefinite for part in self.parts)  # for products by Schur's theorem

    def resolve(self, num_features: int) -> Self:
        parts = tuple(part.resolve(num_features) for part in self.parts)
        if all(new is old for new, old in zip(parts, self.parts, strict=True)):
            return self
        return type(self)(**{self.parts_field: parts})

    def extent(self, rows: FloatArray) -> float:
        return max(part.extent(rows) for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {"kernel": self.name, self.parts_field: [part.to_dict() for part in self.parts]}

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        # Rows of a stationary kernel come centred by the caller. Those of a mixture cannot be, so that its stationary
        # parts are centred here, where :meth:`center` would: |a|^2 + |b|^2 - 2 a.b cancels far from the origin.
        is_mixture = not self.stationary and any(part.stationary for part in self.parts)
        moments = (B.mean(axis=0), B.std(axis=0)) if is_mixture else None
        fills = []
        for part in self.parts:
            center = None if moments is None else part.center(*moments)
            left, right = (A, B) if center is None or not center.any() else (A - center, B - center)
            fills.append(part._fill(left, right, entries))
        scratch = np.empty(entries if len(fills) > 1 else 0)

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            fills[0](rows, columns, strip)
            for part, fill_part in zip(self.parts[1:], fills[1:], strict=True):
                other = scratch[: strip.size].reshape(strip.shape)
                if not isinstance(part, Constant):
                    fill_part(rows, columns, other)
                self.operation(strip, part.value if isinstance(part, Constant) else other, out=strip)

        return fill

    def _diag(self, A: FloatArray) -> FloatArray:
        values: FloatArray = self.operation.reduce([part._diag(A) for part in self.parts])
        return values


@dataclass(frozen=True, kw_only=True, repr=False)
class Sum(_Composite):
    """k(a, b) = k_1(a, b) + k_2(a, b) + ..."""

    name = "sum"
    parts_field = "terms"
    operation = np.add
    terms: tuple[Kernel, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class Product(_Composite):
    """k(a, b) = k_1(a, b) k_2(a, b) ..."""

    name = "product"
    parts_field = "factors"
    operation = np.multiply
    factors: tuple[Kernel, ...]


C = TypeVar("C", bound=_Composite)


def _combine(kind: type[C], *operands: Kernel | float) -> C:
    parts: list[Kernel] = []
    for operand in operands:
        one = operand if isinstance(operand, Kernel) else Constant(value=operand)
        parts.extend(one.parts if isinstance(one, kind) else [one])
    return kind(**{kind.parts_field: tuple(parts)})
