"""Any Python function as a kernel: on blocks of rows, or on pairs of rows as scikit-learn calls it.

Which of the two a function is, is found once by probing it on blocks of 2 and 3 rows. In dictionaries (fingerprints,
models) it is named ``module:qualname`` and imported again by that name, so that only importable functions can be
stored; lambdas and local functions work as long as everything stays in one process.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from dkrr.errors import ParameterError
from dkrr.kernels.base import Kernel
from dkrr.kernels.checks import real_values
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["FunctionKernel", "import_function"]

KINDS = ("block", "pair")


@dataclass(frozen=True, kw_only=True)
class FunctionKernel(Kernel):
    """k(A, B) = function(A, B, **kernel_params), or function(a_i, b_j, **kernel_params) for each pair of rows

    Parameters
    ----------
    function
        Symmetric and entry-wise: a block kernel is called on copies of pieces of A and B, which it may change. Returns
        real numbers.
    kernel_params
        Keyword arguments for the function.
    kind
        "block", "pair", or None: probed by :meth:`resolve`.

    Notes
    -----
    Cost: a pair function takes about a microsecond or more an entry, a thousand times the built-in kernels.
    """

    name = "function"
    function: Callable[..., Any]
    kernel_params: Mapping[str, Any] = field(default_factory=dict)
    kind: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ParameterError(f"function = {self.function!r}", hint="a callable is expected")
        if self.kind not in (*KINDS, None):
            raise ParameterError(f"kind = {self.kind!r} for kernel {self.name!r}", hint=f"allowed: {', '.join(KINDS)}")
        object.__setattr__(self, "kernel_params", dict(self.kernel_params))

    def __hash__(self) -> int:
        return hash((self.function, self.kind, tuple(sorted(self.kernel_params))))

    def resolve(self, num_features: int) -> Self:
        super().resolve(num_features)
        if self.kind is not None:
            return self
        kind = self._probe(num_features)
        if kind == "pair":
            warnings.warn(
                f"kernel function {_label(self.function)} takes pairs of rows, which is slow: "
                "let it take blocks (m, d) and (n, d) and return (m, n)",
                UserWarning,
                stacklevel=2,
            )
        return dataclasses.replace(self, kind=kind)

    def _probe(self, num_features: int) -> str:
        """Find out what the function takes. The rows are fixed, distinct and between 0.1 and 0.9."""
        golden = (np.arange(5.0 * num_features) * 0.6180339887498949) % 1.0
        rows = (0.1 + 0.8 * golden).reshape(5, num_features)
        A, B = rows[:2].copy(), rows[2:].copy()
        cause: Exception | None = None
        with np.errstate(all="ignore"):
            try:
                block = self._values(A, B)
                # with d = 3, np.dot of two rows also makes (2, 3) of the blocks, but then fails here
                last = self._values(A[1:], B[2:])
                if block.shape == (2, 3) and last.shape == (1, 1):
                    if not np.allclose(last[0, 0], block[1, 2], equal_nan=True):
                        raise ParameterError(
                            f"kernel function {_label(self.function)} makes {block[1, 2]:g} of two rows within blocks "
                            f"and {last[0, 0]:g} of the same rows alone",
                            hint="an entry may depend on its two rows only",
                        )
                    self._require_symmetric(block, self._values(B, A).T)
                    return "block"
            except ParameterError:
                raise
            except Exception as error:  # whatever a foreign function raises on blocks, it may still take pairs
                cause = error
            try:
                forward = self._values(A[0], B[0])
                if forward.shape == ():
                    self._require_symmetric(forward, self._values(B[0], A[0]))
                    return "pair"
            except ParameterError:
                raise
            except Exception as error:  # reported below
                cause = error
        raise ParameterError(
            f"kernel function {_label(self.function)} made neither (2, 3) of blocks of 2 and 3 rows "
            "nor a number of two rows" + (f" ({type(cause).__name__}: {cause})" if cause else ""),
            hint="let it take blocks (m, d) and (n, d) and return (m, n)",
        ) from cause

    def _require_symmetric(self, forward: FloatArray, backward: FloatArray) -> None:
        if forward.shape != backward.shape or not np.allclose(forward, backward, equal_nan=True):
            raise ParameterError(
                f"kernel function {_label(self.function)} is not symmetric", hint="k(a, b) = k(b, a) is expected"
            )

    def _call(self, left: FloatArray, right: FloatArray) -> Any:
        # copies: a function may work in its rows, and these may be the caller's, and come again
        return self.function(left.copy(), right.copy(), **self.kernel_params)

    def _values(self, left: FloatArray, right: FloatArray) -> FloatArray:
        return real_values(f"kernel function {_label(self.function)}", self._call(left, right))

    def _pair(self, a: FloatArray, b: FloatArray) -> float:
        value = self._call(a, b)
        if isinstance(value, float):  # usually; the checks take as long as a short function
            return value
        value = real_values(f"kernel function {_label(self.function)}", value)
        if value.shape != ():
            raise ParameterError(
                f"kernel function {_label(self.function)} returned shape {value.shape} for two rows",
                hint="a number is expected",
            )
        return float(value)

    def _block(self, A: FloatArray, B: FloatArray) -> FloatArray:
        values = self._values(A, B)
        if values.shape != (len(A), len(B)):
            raise ParameterError(
                f"kernel function {_label(self.function)} returned shape {values.shape} for blocks of "
                f"{len(A)} and {len(B)} rows",
                hint=f"({len(A)}, {len(B)}) is expected",
            )
        return values

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        def fill_block(rows: slice, columns: slice, strip: FloatArray) -> None:
            strip[...] = self._block(A[rows], B[columns])

        def fill_pairs(rows: slice, columns: slice, strip: FloatArray) -> None:
            for values, a in zip(strip, A[rows], strict=True):
                values[:] = [self._pair(a, b) for b in B[columns]]

        return fill_block if self.kind == "block" else fill_pairs

    def _diag(self, A: FloatArray) -> FloatArray:
        if self.kind == "pair":
            return np.array([self._pair(a, a) for a in A])
        pieces = [A[i : i + 64] for i in range(0, len(A), 64)]
        return np.concatenate([np.empty(0), *(self._block(piece, piece).diagonal() for piece in pieces)])

    def to_dict(self) -> dict[str, Any]:
        try:
            params = json.loads(json.dumps(self.kernel_params, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ParameterError(
                f"kernel_params of kernel function {_label(self.function)} cannot be stored ({error})",
                hint="numbers, strings, lists and dictionaries can",
            ) from error
        name = function_name(self.function)
        return {"kernel": self.name, "function": name, "kernel_params": params, "kind": self.kind}


def _label(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", repr(function)))


def function_name(function: Callable[..., Any]) -> str:
    """``module:qualname`` of a function, if importing that gives the function."""
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    hint = "define it at the top level of a module that can be imported"
    if not module or not qualname or module == "__main__" or "<" in qualname:
        raise ParameterError(f"kernel function {_label(function)} of {module} cannot be stored by name", hint=hint)
    name = f"{module}:{qualname}"
    if import_function(name) is not function:
        raise ParameterError(f"kernel function {name} is not what importing that name gives", hint=hint)
    return name


def import_function(name: Any) -> Callable[..., Any]:
    """The function named ``module:qualname``. Importing runs the module's code."""
    module, colon, qualname = str(name).partition(":")
    if not colon or not module or not qualname:
        raise ParameterError(f"kernel function {name!r}", hint="'module:qualname' is expected")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ParameterError(
            f"kernel function {name!r} cannot be imported ({error})", hint="install or correct its module"
        ) from error
    if not callable(found):
        raise ParameterError(f"kernel function {name!r} is a {type(found).__name__}", hint="a callable is expected")
    return found  # type: ignore[no-any-return]
