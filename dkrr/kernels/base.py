"""What a kernel is: parameters and rows that are checked, a block that is walked in strips, and sums and products.

A kernel is frozen parameters and two ways to act on rows: ``block(A, B, out)`` for the tile floor, ``diag(A)`` for the
diagonal. A kernel of one distance or inner product is a :class:`~dkrr.kernels.pairwise.Pairwise` and writes its
formula. Any other writes ``_fill`` (operands once per block, then one strip at a time) and ``_diag``; strips,
symmetry, the exact diagonal and the finiteness check are here. Each parameter has one check, in ``checks``.

A kernel is one matrix product followed by a few passes of elementwise arithmetic. Done on the whole block, every pass
streams it through memory; done on strips of half a mebibyte, only the result does. A strip handed to a kernel is always
C-contiguous float64: it is a piece of ``out`` where that is so, else a scratch strip that is copied (and cast) into
``out``. Elementwise NumPy calls on a strided strip cost twice as much, because NumPy copies them through its buffer.

Cost, rbf with d = 10 on one core: 1.6 ns an entry with full rows of 2,048, 2.2 through the scratch strip.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dkrr.errors import DataError, ParameterError, did_you_mean
from dkrr.markup import telling

FloatArray = npt.NDArray[np.float64]
# check(kernel, parameter, value) is the value of a parameter, or raises.
Checks = Mapping[str, Callable[[str, str, Any], Any]]
# fill(rows, columns, strip) writes k(A[rows], B[columns]) into the contiguous float64 strip.
Fill = Callable[[slice, slice, FloatArray], None]

# Bound on the terms of a sum that is to be proved finite from its operands alone: leaves room for 1e8 of them.
LIMIT = 1e300
# 512 KiB: a strip, a scratch strip and a packed operand fit into an L2 of 2 MiB, and still into one of 1 MiB.
STRIP_ENTRIES = 1 << 16
STRIP_COLUMNS = 2048
# Edge of the squares in which a triangle is mirrored: source and destination fit into the L1 cache together.
MIRROR_EDGE = 64
# Distance from the origin, in the kernel's own lengths, up to which rows may be scaled, and squared distances may come
# from products: x = c |a|^2 + c |b|^2 - 2 c a.b is off by at most 2 eps 7^2, about 100 eps. Beyond, differences are
# taken first, of rows as they are: blocks of up to 100 features take less time then (45 for 143 ms at d = 10), products
# with a vector up to 1.6 times as much. The rows of one side decide: if only the others are far, their entries are
# nearly 0.
MAX_EXTENT = 7.0


def nearest(name: str, allowed: Iterable[str]) -> str:
    """A hint for a wrong name: the nearest right one, then all of them."""
    known = sorted(allowed)
    listed = f"allowed: {', '.join(known)}" if known else "none is allowed here"
    return f"{did_you_mean(name, known)} {listed}".strip()


def check_names(what: str, given: Mapping[str, Any], allowed: Iterable[str]) -> None:
    """Raise ParameterError for the first key of ``given`` that is not allowed."""
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            raise ParameterError(f"{what} has no parameter {key!r}", hint=nearest(str(key), allowed))


def finite(kernel: str, name: str, value: Any, *, above: float = -math.inf) -> float:
    """``value`` as a finite float larger than ``above``."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    is_number = isinstance(value, Real) and not isinstance(value, (bool, np.bool_))
    if not is_number or not math.isfinite(value) or float(value) <= above:  # as it will be: others may be smaller
        least = "" if above == -math.inf else f" > {above:g}"
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint=f"a finite number{least} is expected")
    return float(value)


# ``value`` as a finite float > 0
positive = functools.partial(finite, above=0.0)


def one_of(*allowed: Any) -> Callable[[str, str, Any], Any]:
    """The check of a parameter that has a few values."""

    def check(kernel: str, name: str, value: Any) -> Any:
        if value not in allowed:
            raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint=f"one of {allowed} is expected")
        return allowed[allowed.index(value)]

    return check


def positive_or_vector(kernel: str, name: str, value: Any) -> float | tuple[float, ...]:
    """``value`` as a float > 0, or a sequence as a tuple of them (one per feature)."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return positive(kernel, name, value)
    if not value:
        raise ParameterError(f"{name} = {value!r} for kernel {kernel!r}", hint="give a number, or one per feature")
    return tuple(positive(kernel, f"{name}[{i}]", item) for i, item in enumerate(value))


def as_rows(rows: Any, side: str) -> FloatArray:
    """``rows`` as a C-contiguous float64 array (m, d); no copy where it is one already."""
    if np.ma.is_masked(rows):
        raise DataError(f"{side} has values under a mask", hint="fill them, or leave those rows out")
    array = np.asarray(rows)
    if array.ndim != 2 or array.shape[1] == 0:
        raise DataError(f"{side} has shape {array.shape}; (rows, features) expected", hint="reshape it to two")
    if array.dtype.kind not in "fiub":
        raise DataError(f"{side} has dtype {array.dtype}; real numbers expected", hint="convert it to float64")
    return np.ascontiguousarray(array, dtype=np.float64)


def both_sides(A: Any, B: Any, *, same: bool = False) -> tuple[FloatArray, FloatArray]:
    """A (m, d) and B (n, d) as :func:`as_rows` gives them; with ``same`` they are one array."""
    A = as_rows(A, "A")
    B = A if same else as_rows(B, "B")
    if A.shape[1] != B.shape[1]:
        raise DataError(f"A has {A.shape[1]} features, B has {B.shape[1]}", hint="both need the same features")
    return A, B


def _at_first(wrong: npt.NDArray[np.bool_], rows: FloatArray, side: str, expected: str, hint: str) -> DataError:
    """The error for the first entry of the rows that is wrong."""
    row, column = (int(index) for index in np.argwhere(wrong)[0])
    value = float(rows[row, column])
    message = f"{side}[{row}, {column}] = {value!r}; {expected}"
    return DataError(message, hint=hint, row=row, column=column, value=value, side=side)


def require_nonnegative(kernel: str, **sides: FloatArray) -> None:
    """Raise DataError for the first negative entry. NaN passes; the finiteness check names it."""
    for side, rows in sides.items():
        if np.fmin.reduce(rows, axis=None, initial=0.0) < 0:
            hint = "shift the features to start at 0, or take another kernel"
            raise _at_first(rows < 0, rows, side, f"kernel {kernel!r} needs non-negative features", hint)


def overflow(description: str, A: FloatArray, B: FloatArray) -> DataError:
    """The error for a kernel that is not finite: names a bad entry of the rows if there is one, else the overflow."""
    for rows, side in ((A, "A"), (B, "B")):
        if not np.isfinite(rows).all():
            return _at_first(~np.isfinite(rows), rows, side, "finite features expected", "remove or impute such rows")
    largest = max(float(np.abs(rows).max(initial=0.0)) for rows in (A, B))
    return DataError(
        f"{description} is not finite on these rows (largest |feature| {largest:.3g})", hint="scale the features"
    )


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
            if field.name in self.checks and (value is not None or field.default is not None):
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
        rows_a, rows_b = both_sides(A, B, same=same)
        with np.errstate(all="ignore"):  # block() names what is not finite
            center = self.center(rows_b.mean(axis=0), rows_b.std(axis=0)) if rows_b.size else None
            if center is not None:
                rows_a, rows_b = rows_a - center, rows_b - center
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
        A, B = both_sides(A, B, same=same)
        out = np.empty((len(A), len(B))) if out is None else out
        is_one = out.shape == (len(A), len(B)) and out.dtype in (np.float64, np.float32) and out.flags.writeable
        if not is_one or (len(A) > 0 and len(B) > 1 and out.strides[1] != out.itemsize):
            raise ParameterError(
                f"out has shape {out.shape}, dtype {out.dtype}, strides {out.strides} and writeable "
                f"{out.flags.writeable}",
                hint=f"({len(A)}, {len(B)}) float64 or float32 with writable, contiguous rows is expected",
            )
        kernel = self.resolve(A.shape[1])
        if out.size:
            with np.errstate(all="ignore"):  # overflow is checked, with the kernel's name
                kernel._fill_strips(A, B, out, lower=same)
                if same:
                    mirror(out)
                    np.einsum("ii->i", out)[...] = kernel._diag(A)
        return out

    def _fill_strips(self, A: FloatArray, B: FloatArray, out: npt.NDArray[Any], *, lower: bool) -> None:
        """Fill ``out`` strip by strip, or the strips that meet its lower triangle.

        The matrix product packs all columns of B anew for every strip, which costs about d / (2 rows) ns an entry. With
        rows >= 2 d (at most 256) that stays below a tenth of the product itself.
        """
        (m, n), width = out.shape, min(len(B), STRIP_COLUMNS)
        height = min(m, max(1, STRIP_ENTRIES // width, min(2 * A.shape[1], 256)))
        fill, scratch = self._fill(A, B, height * width), np.empty(height * width)
        for i in range(0, m, height):
            rows = slice(i, min(i + height, m))
            end = rows.stop if lower else n
            for j in range(0, end, width):
                columns = slice(j, min(j + width, end))
                target = out[rows, columns]
                is_direct = target.flags.c_contiguous and target.dtype == np.float64
                strip = target if is_direct else scratch[: target.size].reshape(target.shape)
                fill(rows, columns, strip)
                if not is_direct:
                    np.copyto(target, strip, casting="same_kind")
                if not self.bounded:
                    # Checked while it is hot, and after the cast: 1e39 is finite in float64 only. Infinity and NaN
                    # survive a sum of squares, which is the cheapest pass; it may also overflow by itself.
                    flat = (strip if target.dtype == np.float64 else target).ravel()
                    if not np.isfinite(flat @ flat) and not np.isfinite(flat).all():
                        raise overflow(self.describe(), A, B)

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

        def plain(value: Any) -> Any:
            return [item.to_dict() if isinstance(item, Kernel) else item for item in value]

        given = self._parameters().items()
        return {"kernel": self.name} | {k: plain(value) if isinstance(value, tuple) else value for k, value in given}

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


def _kernels_on_rows(kernel: str, name: str, value: Any) -> tuple[Kernel, ...]:
    listed = value if isinstance(value, (list, tuple)) else ()
    if not listed or any(not isinstance(part, Kernel) or part.name == "precomputed" for part in listed):
        raise ParameterError(f"{name} = {value!r} of kernel {kernel!r}", hint="give kernels that act on rows")
    return tuple(listed)


@dataclass(frozen=True, kw_only=True, repr=False)
class _Composite(Kernel):
    """Kernels combined entry by entry with one commutative operation."""

    checks: ClassVar[Checks] = {"terms": _kernels_on_rows, "factors": _kernels_on_rows}
    parts_field: ClassVar[str]
    operation: ClassVar[np.ufunc]

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
        return type(self)(**{self.parts_field: [part.resolve(num_features) for part in self.parts]})

    def extent(self, rows: FloatArray) -> float:
        return max(part.extent(rows) for part in self.parts)

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        # Rows of a stationary kernel come centred by the caller. Those of a mixture cannot be, so that its stationary
        # parts are centred here, where :meth:`center` would: |a|^2 + |b|^2 - 2 a.b cancels far from the origin.
        is_mixture = not self.stationary and any(part.stationary for part in self.parts)
        fills, scratch = [], np.empty(entries)
        for part in self.parts:
            center = part.center(B.mean(axis=0), B.std(axis=0)) if is_mixture else None
            sides = (A, B) if center is None else (A - center, B - center)
            fills.append(part._fill(*sides, entries))

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            fills[0](rows, columns, strip)
            other = scratch[: strip.size].reshape(strip.shape)
            for part, fill_part in zip(self.parts[1:], fills[1:], strict=True):
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
