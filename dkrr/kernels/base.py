"""What a kernel is, and the algebra of kernels: constants, sums and products.

A kernel is frozen parameters and two ways to act on rows: ``block(A, B, out)`` for the tile floor, ``diag(A)`` for the
diagonal. A new kernel writes ``_fill`` (operands once per block, then one strip at a time) and ``_diag``; strips,
symmetry, the exact diagonal and the finiteness check are here.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from dkrr.errors import ParameterError
from dkrr.kernels.checks import as_rows, check_features, check_out, finite_guard, overflow, positive
from dkrr.kernels.pairwise import MAX_EXTENT, Pairwise
from dkrr.kernels.strips import Fill, FloatArray, fill_rectangle, fill_symmetric, strip_shape
from dkrr.markup import telling

__all__ = ["Constant", "Kernel", "Product", "Sum"]


class Kernel(ABC):
    """k(A, B)[i, j] = k(a_i, b_j) for rows A (m, d) and B (n, d).

    Subclasses are frozen keyword-only dataclasses. ``name`` is the name in job files and in :meth:`to_dict`. With
    ``repr=False`` they are shown by what was given to them: ``RBF(gamma=0.5)``.
    """

    name: ClassVar[str]
    # NumPy scalars leave ``np.float64(2) * kernel`` to __rmul__ instead of building an object array.
    __array_ufunc__ = None

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

    @property
    def pairwise(self) -> Pairwise | None:
        """The kernel, resolved, as a function of one distance or inner product; None if it is no such function."""
        return None

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
        if self.stationary and rows_b.size:
            with np.errstate(all="ignore"):  # block() names what is not finite
                center = self.center(rows_b.mean(axis=0), rows_b.std(axis=0))
                assert center is not None  # noqa: S101  (it is stationary)
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
        Cost: 2 m n d flops and one write of ``out``; half of that with ``same``. Besides ``out`` it needs at most
        :meth:`workspace_bytes`.
        """
        A = as_rows(A, "A")
        B = A if same else as_rows(B, "B")
        m, d = A.shape
        n = B.shape[0]
        check_features(A, B)
        if out is None:
            out = np.empty((m, n))
        check_out(out, m, n)
        kernel = self.resolve(d)
        if out.size == 0:
            return out
        rows, columns = strip_shape(m, n, d)
        guard = None if kernel.bounded else finite_guard(kernel.describe(), A, B)
        with np.errstate(all="ignore"):  # overflow is checked above, with the kernel's name
            fill = kernel._fill(A, B, rows * columns)
            if same:
                fill_symmetric(fill, out, d, guard)
                np.einsum("ii->i", out)[...] = kernel._diag(A)
            else:
                fill_rectangle(fill, out, d, guard)
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

    def workspace_bytes(self, m: int, n: int, d: int) -> int:
        """Upper bound on the memory of ``block`` on (m, d) and (n, d) rows besides ``out``, in bytes.

        At most one scaled copy of the rows with two more columns, (m + n) (d + 3) numbers with the norms, and four
        strips. What a callable or a scikit-learn kernel allocates by itself is its own affair.
        """
        rows, columns = strip_shape(m, n, d)
        return 8 * ((m + n) * (d + 3) + 4 * rows * columns) + 65536

    def resolve(self, num_features: int) -> Kernel:
        """The kernel for rows of ``num_features`` features, with every default that depends on them decided."""
        if num_features < 1:
            raise ParameterError(f"num_features = {num_features}", hint="at least one feature is expected")
        return self

    def to_dict(self) -> dict[str, Any]:
        """The kernel as plain JSON values; :func:`~dkrr.kernels.kernel_from_dict` is the exact inverse."""
        values: dict[str, Any] = {"kernel": self.name}
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every concrete kernel is a dataclass
            value = getattr(self, field.name)
            values[field.name] = list(value) if isinstance(value, tuple) else value
        return values

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in telling(values).items())})"

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


@dataclass(frozen=True, kw_only=True)
class Constant(Kernel):
    """k(a, b) = value. What a number becomes in ``2 * kernel`` and ``kernel + 1``."""

    name = "constant"
    value: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", positive(self.name, "value", self.value))

    @property
    def stationary(self) -> bool:
        return True

    @property
    def positive_semidefinite(self) -> bool:
        return True

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            strip.fill(self.value)

        return fill

    def _diag(self, A: FloatArray) -> FloatArray:
        return np.full(len(A), self.value)


@dataclass(frozen=True, kw_only=True)
class _Composite(Kernel):
    """Kernels combined entry by entry with one commutative operation."""

    parts_field: ClassVar[str]
    operation: ClassVar[np.ufunc]

    def __post_init__(self) -> None:
        parts = getattr(self, self.parts_field)
        if not isinstance(parts, (list, tuple)) or not parts:
            raise ParameterError(f"{self.parts_field} = {parts!r} of kernel {self.name!r}", hint="give kernels")
        for part in parts:
            if not isinstance(part, Kernel) or part.name == "precomputed":
                raise ParameterError(f"{part!r} inside kernel {self.name!r}", hint="give kernels that act on rows")
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

    def workspace_bytes(self, m: int, n: int, d: int) -> int:
        rows, columns = strip_shape(m, n, d)
        own = 8 * (rows * columns + (m + n) * d)
        return own + sum(part.workspace_bytes(m, n, d) for part in self.parts)

    def extent(self, rows: FloatArray) -> float:
        return max(part.extent(rows) for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        return {"kernel": self.name, self.parts_field: [part.to_dict() for part in self.parts]}

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        # Rows of a stationary kernel come centred by the caller. Those of a mixture cannot be, so that its stationary
        # parts are centred here, where :meth:`center` would: |a|^2 + |b|^2 - 2 a.b cancels far from the origin.
        centred_a, centred_b = A, B
        std = np.zeros(B.shape[1])
        if not self.stationary and any(part.stationary for part in self.parts):
            mean, std = B.mean(axis=0), B.std(axis=0)
            centred_b = B - mean
            centred_a = centred_b if A is B else A - mean
        fills = [
            part._fill(centred_a, centred_b, entries)
            if part.stationary and part.extent(std[None]) <= MAX_EXTENT
            else part._fill(A, B, entries)
            for part in self.parts
        ]
        constants = [part.value if isinstance(part, Constant) else None for part in self.parts]
        scratch = np.empty(entries if len(fills) > 1 else 0)
        operation = self.operation

        def fill(rows: slice, columns: slice, strip: FloatArray) -> None:
            fills[0](rows, columns, strip)
            for part, constant in zip(fills[1:], constants[1:], strict=True):
                if constant is not None:
                    operation(strip, constant, out=strip)
                    continue
                other = scratch[: strip.size].reshape(strip.shape)
                part(rows, columns, other)
                operation(strip, other, out=strip)

        return fill

    def _diag(self, A: FloatArray) -> FloatArray:
        total = self.parts[0]._diag(A)
        for part in self.parts[1:]:
            total = self.operation(total, part._diag(A))
        return total


@dataclass(frozen=True, kw_only=True)
class Sum(_Composite):
    """k(a, b) = k_1(a, b) + k_2(a, b) + ..."""

    name = "sum"
    parts_field = "terms"
    operation = np.add
    terms: tuple[Kernel, ...]


@dataclass(frozen=True, kw_only=True)
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
        if isinstance(operand, kind):
            parts.extend(operand.parts)
        elif isinstance(operand, Kernel):
            parts.append(operand)
        else:
            parts.append(Constant(value=operand))
    return kind(**{kind.parts_field: tuple(parts)})
