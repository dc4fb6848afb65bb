"""The marker for a kernel matrix that is given instead of computed."""

from __future__ import annotations

from dataclasses import dataclass

from dkrr.errors import ParameterError
from dkrr.kernels.base import Kernel
from dkrr.kernels.strips import Fill, FloatArray

__all__ = ["Precomputed"]


@dataclass(frozen=True, kw_only=True)
class Precomputed(Kernel):
    """K itself is given. A marker: the matrix belongs to an operator, there is nothing to evaluate on rows."""

    name = "precomputed"

    def _fill(self, A: FloatArray, B: FloatArray, entries: int) -> Fill:
        raise self._error()

    def _diag(self, A: FloatArray) -> FloatArray:
        raise self._error()

    @staticmethod
    def _error() -> ParameterError:
        return ParameterError(
            "kernel 'precomputed' has no values on rows", hint="hand over the kernel matrix, or name another kernel"
        )
