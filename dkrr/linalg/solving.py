"""Between a data set and a solver: an alpha for each target, and right-hand sides S Y."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset
from dkrr.errors import DamagedChunkError, ParameterError
from dkrr.linalg.blocks import BlockColumns
from dkrr.linalg.intercept import Centring
from dkrr.linalg.operators import RidgeOperator


def target_alphas(alpha: Any, num_targets: int) -> NDArray[np.float64]:
    """An alpha for each target (t,), of one or of as many.

    Raises
    ------
    ParameterError
        No target; another number of alphas, or a negative one.
    """
    values = np.asarray(alpha, dtype=np.float64).ravel()
    if not num_targets:
        raise ParameterError("the rows have no target", hint="name one with target=")
    if len(values) not in (1, num_targets):
        raise ParameterError(f"{len(values)} values of alpha for {num_targets} targets; 1 or {num_targets} expected")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise ParameterError(f"alpha = {values.min()}", hint="give a number that is at least 0")
    return np.broadcast_to(values, (num_targets,)).copy()


def right_hand_sides(
    dataset: Dataset,
    operator: RidgeOperator,
    targets: list[int],
    store: Any,
    *,
    centring: Centring | None = None,
) -> BlockColumns:
    """S Y in blocks. A block that an earlier attempt left is compared: the residual rests on it.

    Parameters
    ----------
    centring
        Of all targets of the data set, to be subtracted from Y.
    """
    assert dataset.y is not None  # noqa: S101  (narrows the type)
    rhs = BlockColumns.create(store, "rhs", operator.grid, len(targets), "float64")
    for i in range(operator.grid.num_tiles):
        span = operator.grid.span(i)
        block = dataset.y.read(span.start, span.stop)[:, targets]
        if centring is not None:
            block = centring.take(targets).apply(block)
        root = operator.root_weight(i)
        if root is not None:
            block = root[:, None] * block
        for panel in range(rhs.num_panels):
            part = block[:, rhs.columns(panel)]
            if not (rhs.is_valid(i, panel) and _holds(rhs, i, panel, part)):
                rhs.write(i, panel, part)
    return rhs


def _holds(rhs: BlockColumns, i: int, panel: int, part: np.ndarray[Any, Any]) -> bool:
    try:
        return np.array_equal(rhs.read(i, panel), part)
    except DamagedChunkError:
        return False
