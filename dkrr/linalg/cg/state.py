"""The state of conjugate gradients between two iterations: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.linalg.columns import take

__all__ = ["CGState", "Checkpoint"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]


@dataclass
class CGState:
    """All that the next iteration depends on. Arrays over ``live`` have one column for each unfinished one.

    Parameters
    ----------
    x : (n, t)
    r, p : (n, c)
        Residuals and directions of the c live columns.
    live : (c,) int
        Their numbers.
    rz, aim, reference, failed : (c,)
        r^T z; the recursive residual to freeze at; the last true residual; the least true residual that contradicted
        a recursive one.
    stalls : (c,) int
        Contradictions in a row that did not halve it.
    frozen : (c,) bool
    relative, largest, iterations, converged : (t,)
        ``largest`` is the largest entry of the last true residual.
    """

    x: FloatMatrix
    r: FloatMatrix
    p: FloatMatrix
    live: NDArray[np.int64]
    rz: FloatVector
    aim: FloatVector
    reference: FloatVector
    failed: FloatVector
    stalls: NDArray[np.int64]
    frozen: NDArray[np.bool_]
    relative: FloatVector
    largest: FloatVector
    iterations: NDArray[np.int64]
    converged: NDArray[np.bool_]
    iteration: int = 0
    history: list[FloatVector] = field(default_factory=list)

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Only the masked live columns stay live."""
        if mask.all():
            return
        kept = np.flatnonzero(mask)
        self.r, self.p = take(self.r, kept), take(self.p, kept)
        for name in ("live", "rz", "aim", "reference", "failed", "stalls", "frozen"):
            setattr(self, name, getattr(self, name)[kept])


class Checkpoint(Protocol):
    """Where states are kept between processes."""

    def load(self) -> CGState | None:
        """The last state of the same system, if there is one."""
        ...

    def is_due(self, iteration: int) -> bool:
        """Whether to save now; asked after each iteration."""
        ...

    def save(self, state: CGState) -> None:
        """Keep a state; a reader finds the old one or the new one."""
        ...
