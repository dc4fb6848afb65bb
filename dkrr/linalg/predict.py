"""Prediction k(Z, X) @ dual_coef in row blocks: memory for a strip, however many rows train and test have.

Cost
----
m n kernel entries and 2 m n t flops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.kernels import Kernel
from dkrr.linalg.products import kernel_product

__all__ = ["ArrayRows", "RowSource", "predict_block"]

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

    The order of the sum is that of the training rows in equal blocks of at most 2,048, whatever the number of rows in
    ``z``. Where :func:`~dkrr.linalg.products.kernel_product` is compiled (known kernels, at most 64 features and 32
    targets, at least 1,024 training rows) a row's prediction has the same bits however ``z`` is cut into calls;
    elsewhere it depends on the cut by rounding, because matrix products do.
    """
    result = np.zeros((len(z), dual_coef.num_columns))
    if center is not None:
        z = z - center
    num_blocks = max(1, -(-x.num_rows // TRAIN_ROWS))
    for i in range(num_blocks):
        start, stop = i * x.num_rows // num_blocks, (i + 1) * x.num_rows // num_blocks
        rows = x.read(start, stop)
        if center is not None:
            rows = rows - center
        kernel_product(kernel, z, rows, dual_coef.read(start, stop), result)
    return result
