"""What a preconditioner is: an approximate inverse of A = S K S + alpha I, symmetric positive definite.

The low-rank ones and the one made of a tile factor live in modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Deferred", "Identity", "Openable", "Preconditioner"]

FloatMatrix = NDArray[np.float64]


class Preconditioner(Protocol):
    """P_alpha^-1 for any alpha, applied to many columns at once.

    ``inexact`` says that rounding in an application is far above that of float64, so that it is not quite symmetric:
    directions are then made conjugate to the last one by its product instead of by r^T z.
    """

    inexact: bool

    @property
    def description(self) -> str:
        """A few words for messages and records, e.g. "randomly pivoted Cholesky of rank 1,000"."""
        ...

    def apply(self, r: FloatMatrix, alpha: NDArray[np.float64]) -> FloatMatrix:
        """Z (n, c) with column k = P_{alpha[k]}^-1 r[:, k], for R (n, c) and alpha (c,); R is not changed."""
        ...


@runtime_checkable
class Openable(Protocol):
    """What becomes a preconditioner, with ``scratch`` for vectors on their way, until it is closed."""

    @property
    def description(self) -> str: ...

    def open(self, workspace: Any, scratch: Any) -> AbstractContextManager[Preconditioner]: ...


class Identity:
    """No preconditioner."""

    description, inexact = "none", False

    def apply(self, r: FloatMatrix, alpha: NDArray[np.float64]) -> FloatMatrix:
        return r.copy()


class Deferred:
    """A preconditioner that is made when it is first applied: never, where every column is good to begin with.

    A context manager that closes what ``opened`` gave. ``inexact`` is that of the preconditioner to come.
    """

    def __init__(self, opened: Callable[[], AbstractContextManager[Preconditioner]], *, inexact: bool) -> None:
        self.opened, self.inexact = opened, inexact
        self.made: Preconditioner | None = None
        self._closing = ExitStack()

    def __enter__(self) -> Deferred:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @property
    def description(self) -> str:
        """That of the preconditioner, once there is one."""
        return "none was needed" if self.made is None else self.made.description

    def apply(self, r: FloatMatrix, alpha: NDArray[np.float64]) -> FloatMatrix:
        if self.made is None:
            self.made = self._closing.enter_context(self.opened())
        return self.made.apply(r, alpha)
