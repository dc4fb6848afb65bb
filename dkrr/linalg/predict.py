"""Prediction k(Z, X) @ dual_coef in row blocks: memory for a strip, however many rows train and test have.

Cost
----
m n kernel entries and 2 m n t flops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import ResidualError
from dkrr.kernels import Kernel
from dkrr.linalg.products import kernel_product

TRAIN_ROWS = 2048
CHECKED_ROWS = 16
# Of an entry; distances are exact to a tenth of it.
CHECK_TOLERANCE = 1e-11


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
    for rows, coefficients in _training_blocks(x, dual_coef, center):
        kernel_product(kernel, z, rows, coefficients, result)
    return result


def _training_blocks(
    x: RowSource, dual_coef: RowSource, center: NDArray[np.float64] | None
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Centred rows and coefficients, in equal blocks of at most 2,048."""
    num_blocks = max(1, -(-x.num_rows // TRAIN_ROWS))
    for i in range(num_blocks):
        start, stop = i * x.num_rows // num_blocks, (i + 1) * x.num_rows // num_blocks
        rows = x.read(start, stop)
        yield rows if center is None else rows - center, dual_coef.read(start, stop)


def check_training_rows(
    kernel: Kernel,
    x: RowSource,
    dual_coef: RowSource,
    center: NDArray[np.float64] | None,
    *,
    y: RowSource,
    weight: RowSource | None,
    alpha: NDArray[np.float64],
    intercept: NDArray[np.float64] | None,
    residual_norm: NDArray[np.float64],
) -> None:
    """Predict 16 training rows as any rows are predicted, and compare with what the system says of them.

        f(x_p) = y_p - alpha dual_coef_p / w_p - r_p / sqrt(w_p),   |r_p| <= |R|

    The residual R alone proves nothing of predictions: it knows the diagonal of K, and meets other rows in each block.

    Parameters
    ----------
    y, dual_coef : (n, t)
    weight : (n, 1) or None
    alpha, residual_norm : (t,)
        The ridge of each target, and the 2-norm of its R = S Y - S b - A u.
    intercept : (t,) or None

    Raises
    ------
    ResidualError
        A prediction differs by more than |R| and 1e-11 of the terms that it is the sum of.

    Cost
    ----
    16 n kernel entries, 32 n of a kernel that is not positive semi-definite, and one pass over the rows.
    """
    wanted = np.unique(np.linspace(0, x.num_rows - 1, CHECKED_ROWS).astype(int)).tolist()

    def read(source: RowSource) -> NDArray[np.float64]:
        return np.concatenate([source.read(p, p + 1) for p in wanted])

    if weight is not None:
        wanted = [p for p in wanted if weight.read(p, p + 1)[0, 0] > 0]
        if not wanted:
            return
    z, c, target = read(x), read(dual_coef), read(y)
    w = np.ones((len(z), 1)) if weight is None else read(weight)
    if center is not None:
        z = z - center
    found, terms = np.zeros(c.shape), np.abs(target) + alpha * np.abs(c) / w
    scale = np.sqrt(np.abs(kernel.diag(z)))[:, None]
    for rows, coefficients in _training_blocks(x, dual_coef, center):
        kernel_product(kernel, z, rows, coefficients, found)
        # inner products may be much smaller than what they are sums of; by Cauchy and Schwarz they are not larger
        entries = scale * np.sqrt(np.abs(kernel.diag(rows)))
        if not kernel.positive_semidefinite:
            entries = np.maximum(np.abs(kernel.block(z, rows)), entries)
        terms += entries @ np.abs(coefficients)
    if intercept is not None:
        found += intercept
    expected = target - alpha * c / w
    off, allowed = np.abs(found - expected), residual_norm / np.sqrt(w) + CHECK_TOLERANCE * terms
    if not (off <= allowed).all():
        worst, column = np.unravel_index(np.argmax(np.where(off <= allowed, -1.0, off)), off.shape)
        raise ResidualError(
            f"training row {wanted[worst]:,} is predicted as {found[worst, column]:.6g} for target {column}, while the "
            f"system that was solved gives {expected[worst, column]:.6g} (off by {off[worst, column]:.1g}, "
            f"{allowed[worst, column]:.1g} allowed)",
            hint="the kernel has another value for the same two rows when they are predicted: a function must depend "
            "on its two rows alone; else scale the features",
        )
