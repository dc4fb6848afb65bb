"""Prediction k(Z, X) @ dual_coef in row blocks: memory for a strip, however many rows train and test have.

Cost
----
m n kernel entries and 2 m n t flops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.kernels import Kernel
from dkrr.tiles.blas import buffer

__all__ = ["ArrayRows", "RowSource", "predict_block"]

STRIP_ROWS = 256
TRAIN_ROWS = 2048


class RowSource(Protocol):
    """Rows that can be read a slice at a time: a ``RowArray`` on disk or :class:`ArrayRows` in memory."""

    @property
    def num_rows(self) -> int: ...

    @property
    def num_columns(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class ArrayRows:
    """Rows in memory."""

    array: NDArray[np.float64]

    @property
    def num_rows(self) -> int:
        return len(self.array)

    @property
    def num_columns(self) -> int:
        return int(self.array.shape[1])

    def read(self, start: int, stop: int) -> NDArray[np.float64]:
        """A view of rows ``start:stop``."""
        return self.array[start:stop]


def predict_block(
    kernel: Kernel, z: NDArray[np.float64], x: RowSource, dual_coef: RowSource, center: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """k(z, X) @ dual_coef (m, t) for rows z (m, d) that fit into memory.

    The order of the sum is that of the training rows in blocks of 2,048, whatever the number of rows in ``z``.
    """
    result = np.zeros((len(z), dual_coef.num_columns))
    if center is not None:
        z = z - center
    for start in range(0, x.num_rows, TRAIN_ROWS):
        stop = min(start + TRAIN_ROWS, x.num_rows)
        rows = x.read(start, stop)
        if center is not None:
            rows = rows - center
        coefficients = dual_coef.read(start, stop)
        for first in range(0, len(z), STRIP_ROWS):
            strip = z[first : first + STRIP_ROWS]
            block: Any = buffer("strip", (len(strip), stop - start), np.float64)
            kernel.block(strip, rows, block)
            result[first : first + STRIP_ROWS] += block @ coefficients
    return result
