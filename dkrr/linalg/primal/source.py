"""What a regression in feature space is fitted on: n rows that can be gone through, in memory or on disk.

Both give the same four things, see :mod:`dkrr.linalg.primal.row_pass`; rows on disk are
:class:`dkrr.linalg.primal.stored.StoredSource`.

Cost: that of the passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
from dkrr.linalg.primal.rows import ArrayStrips, Strip
from dkrr.tiles.blas import is_finite

__all__ = ["ArraySource", "RowsSource", "Tile"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]
Tile = tuple[int, int, FloatVector]


class RowsSource(Protocol):
    """n rows that can be gone through."""

    @property
    def features(self) -> FeatureMap: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_targets(self) -> int: ...

    def weights(self) -> FloatVector | None:
        """All weights (n,)."""
        ...

    def sample(self) -> list[Strip]:
        """A few strips from everywhere, for a shift."""
        ...

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector, FloatVector]:
        """Means and standard deviations of X and Y, unweighted, as far as they are known."""
        ...

    def sums(self, affine: Affine) -> Iterator[Tile]:
        """(p, q, vector of :class:`SumLayout`), for p >= q, several of each."""
        ...

    def residual(self, affine: Affine) -> FloatVector: ...

    def hat(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix) -> FloatMatrix: ...

    def path(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix, constant: float) -> FloatVector: ...


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Rows in memory: x (n, d), y (n, t), weight (n,) or None."""

    features: FeatureMap
    x: FloatMatrix
    y: FloatMatrix
    weight: FloatVector | None = None

    @property
    def num_rows(self) -> int:
        return len(self.x)

    @property
    def num_targets(self) -> int:
        return int(self.y.shape[1])

    def weights(self) -> FloatVector | None:
        return self.weight

    def _strips(self) -> Iterator[Strip]:
        yield from ArrayStrips(self.x, self.y, self.weight).between(0, len(self.x), strip_rows(self.features))

    def sample(self) -> list[Strip]:
        return list(ArrayStrips(self.x, self.y, self.weight).between(0, len(self.x), -(-len(self.x) // 4)))

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector, FloatVector]:
        return self.x.mean(axis=0), self.x.std(axis=0), self.y.mean(axis=0), self.y.std(axis=0)

    def sums(self, affine: Affine) -> Iterator[Tile]:
        grid = panels(self.features.num_features)
        layout = SumLayout(grid.tile_size, self.num_targets)
        for p, q in grid.lower():
            vector = np.zeros(layout.length)
            for strip in self._strips():
                add_sums(self.features, affine, strip, layout, p, q, vector)
            yield p, q, self._checked(np.negative(vector))

    def residual(self, affine: Affine) -> FloatVector:
        d, t = affine.coef.shape
        vector = np.zeros((d + 2) * t)
        for strip in self._strips():
            add_residual(self.features, affine, strip, vector)
        return self._checked(vector)

    def hat(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix) -> FloatMatrix:
        out = np.empty((len(self.x), affine.coef.shape[1] + weights.shape[1]))
        for strip in self._strips():
            whole = iter([(slice(None), basis)])
            add_hat(self.features, affine, strip, whole, weights, out[strip.start : strip.start + len(strip.x)])
        return self._checked(out)

    def path(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix, constant: float) -> FloatVector:
        vector = np.zeros(2 * affine.coef.shape[1] + weights.shape[1])
        for strip in self._strips():
            whole = iter([(slice(None), basis)])
            add_path(self.features, affine, strip, whole, weights, constant, vector)
        return self._checked(vector)

    def _checked(self, values: FloatMatrix) -> FloatMatrix:
        if not is_finite(values):
            raise self.features.overflow(self.x)
        return values
