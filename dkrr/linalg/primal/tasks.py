"""Tasks of the passes of a regression in feature space: a range of rows on disk in, one chunk of results out.

What is computed is in :mod:`dkrr.linalg.primal.row_pass`. A task begins by looking whether its chunk is there, and
writes it whole or not at all, so that any of them may run twice.

Cost: that of the pass; memory :func:`~dkrr.linalg.primal.row_pass.task_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import ChunkArray
from dkrr.errors import DataError
from dkrr.failpoints import failpoint
from dkrr.kernels.features import FeatureMap
from dkrr.linalg.primal.row_pass import (
    Affine,
    SumLayout,
    add_hat,
    add_path,
    add_residual,
    add_sums,
    panels,
    strip_rows,
)
from dkrr.linalg.primal.rows import StoredStrips, Strip, find_unwritten
from dkrr.linalg.row_ranges import RowRanges
from dkrr.tiles.blas import is_finite

__all__ = ["PassTask", "hat_task", "path_task", "residual_task", "sums_task"]

FloatMatrix = NDArray[np.float64]


@dataclass(frozen=True)
class PassTask:
    """A pass over rows on disk: where its operands and its results are.

    Parameters
    ----------
    features
        F.
    strips
        The rows.
    ranges
        The rows of each task.
    num_targets
        t.
    affine
        Coefficients and shifts, packed, as one chunk.
    result
        A vector for each task, or for each range the rows of ``hat``.
    bases
        B of ``hat`` and ``path`` in panels of columns, one chunk each, (D, 2,048).
    weights
        e (D, k), one chunk.
    constant
        Of the leverages of ``path``.
    """

    features: FeatureMap
    strips: StoredStrips
    ranges: RowRanges
    num_targets: int
    affine: ChunkArray
    result: ChunkArray
    bases: ChunkArray | None = None
    weights: ChunkArray | None = None
    constant: float = 0.0

    @property
    def layout(self) -> SumLayout:
        """Of the sums."""
        return SumLayout(panels(self.features.num_features).tile_size, self.num_targets)

    def number(self, i: int, p: int, q: int) -> int:
        """Which chunk holds tile (p, q) of range i."""
        return i * panels(self.features.num_features).num_lower + p * (p + 1) // 2 + q

    def parameters(self) -> Affine:
        """The coefficients, from the store."""
        packed = np.array(self.affine.read((0,)), dtype=np.float64)
        return Affine.unpack(packed, self.features.num_features, self.num_targets)

    def rows(self, i: int) -> Iterator[Strip]:
        """The strips of range i."""
        return self.strips.between(*self.ranges.span(i), strip_rows(self.features))

    def panels_of_basis(self) -> Iterator[tuple[slice, FloatMatrix]]:
        """B, a panel of columns at a time."""
        if self.bases is not None:
            grid = panels(self.features.num_features)
            for p in range(grid.num_tiles):
                yield grid.span(p), self.bases.read((p, 0))[:, : grid.rows(p)]  # type: ignore[misc]

    def checked(self, i: int, values: FloatMatrix) -> FloatMatrix:
        """What was computed, unless it is not finite."""
        if not is_finite(values):
            start, stop = self.ranges.span(i)
            find_unwritten(self.strips.rows, start, stop)
            raise DataError(
                f"the sums over rows {start:,} to {stop - 1:,} are not finite ({self.features.kernel.describe()})",
                hint="scale the features and the targets",
            )
        return values


def sums_task(task: PassTask, i: int, p: int, q: int) -> bool:
    """Compute and write the sums of tile (p, q) over range i unless they are there; whether they were computed."""
    index = (task.number(i, p, q),)
    if task.result.is_valid(index):
        return False
    failpoint("primal.sums.before_read")
    affine, layout = task.parameters(), task.layout
    vector = np.zeros(layout.length)
    # one of the tasks of a range looks whether its chunks are in their places
    placed = replace(task, strips=replace(task.strips, placed=p == q == 0))
    for strip in placed.rows(i):
        add_sums(task.features, affine, strip, layout, p, q, vector)
    np.negative(vector, out=vector)
    failpoint("primal.sums.after_compute", vector)
    task.result.write(index, task.checked(i, vector))
    failpoint("primal.sums.after_write")
    return True


def residual_task(task: PassTask, i: int) -> bool:
    """The same for the sums of the residual."""
    if task.result.is_valid((i,)):
        return False
    failpoint("primal.residual.before_read")
    affine = task.parameters()
    vector = np.zeros(task.result.chunks)
    for strip in task.rows(i):
        add_residual(task.features, affine, strip, vector)
    failpoint("primal.residual.after_compute", vector)
    task.result.write((i,), task.checked(i, vector))
    return True


def hat_task(task: PassTask, i: int) -> bool:
    """Residuals and quadratic forms of the rows of range i."""
    if task.result.is_valid((i, 0)):
        return False
    failpoint("primal.hat.before_read")
    affine, weights = task.parameters(), _weights(task)
    first, stop = task.ranges.span(i)
    out = np.zeros(task.result.chunks)
    for strip in task.rows(i):
        rows = slice(strip.start - first, strip.start - first + len(strip.x))
        add_hat(task.features, affine, strip, task.panels_of_basis(), weights, out[rows])
    failpoint("primal.hat.after_compute", out)
    task.checked(i, out[: stop - first])
    task.result.write((i, 0), out)
    return True


def path_task(task: PassTask, i: int) -> bool:
    """Sums of squares of range i for every alpha."""
    if task.result.is_valid((i,)):
        return False
    failpoint("primal.path.before_read")
    affine, weights = task.parameters(), _weights(task)
    vector: Any = np.zeros(task.result.chunks)
    for strip in task.rows(i):
        add_path(task.features, affine, strip, task.panels_of_basis(), weights, task.constant, vector)
    failpoint("primal.path.after_compute", vector)
    task.result.write((i,), task.checked(i, vector))
    return True


def _weights(task: PassTask) -> FloatMatrix:
    assert task.weights is not None  # noqa: S101  (narrows the type)
    return np.array(task.weights.read((0, 0)), dtype=np.float64)
