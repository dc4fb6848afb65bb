"""The normal equations of a regression in feature space, from sums over the rows: D x D, in memory.

    (G + alpha I) c = g        G = F^T W F,  g = F^T W y;  with an intercept both about the weighted means

One Cholesky factor for each distinct alpha, or one eigendecomposition for all of them.

Cost: D^3 / 3 flops a factor, 16 D^2 bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dkrr.errors import DataError, NotPositiveDefiniteError
from dkrr.linalg.primal.row_pass import Affine, SumLayout, panels
from dkrr.linalg.primal.source import RowsSource
from dkrr.tiles.blas import leading_minor_pivot, potrf, trsm_left

__all__ = ["Equations", "normal_equations"]

logger = logging.getLogger("dkrr.linalg.primal.solver")

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)
# Features whose mean is further from 0 than this many standard deviations are shifted before they are summed. Nearer
# ones lose a digit of the sums, which the residual brings back, and save a pass over every strip.
FAR = 4.0
# a variance that is the difference of sums this many times as large has lost too much
LOST = 1e4


@dataclass(eq=False, kw_only=True)
class Equations:
    """Sums over the rows, of features with their scale.

    Parameters
    ----------
    gram : (D, D)
        G, both triangles.
    cross : (D, t)
        g.
    scale : (D,)
        What turns monomials into features.
    shift : (D,), optional
        Of the monomials, in the passes over the rows; None means zero.
    y_shift : (t,)
    offset : (D,), y_offset : (t,)
        Weighted means of features and targets about the shifts; zero without an intercept.
    y_norm : (t,)
        Weighted norm of y, about its mean with an intercept.
    y_size : (t,)
        The same about zero.
    weight
        Sum of the weights.
    num_used
        Rows of positive weight.
    """

    gram: FloatMatrix
    cross: FloatMatrix
    scale: FloatVector
    shift: FloatVector | None
    y_shift: FloatVector
    offset: FloatVector
    y_offset: FloatVector
    y_norm: FloatVector
    y_size: FloatVector
    weight: float
    num_used: int
    fit_intercept: bool
    _factor: tuple[float, FloatMatrix] | None = field(default=None, repr=False)

    @property
    def gram_norm(self) -> float:
        """|G| in the infinity norm."""
        return float(max(np.abs(row).sum() for row in self.gram))

    @property
    def cross_bound(self) -> FloatVector:
        """max_j |F_j| |y|, which bounds |g| by Cauchy and Schwarz."""
        return np.asarray(np.sqrt(np.maximum(self.gram.diagonal(), 0.0).max()) * self.y_norm)

    @property
    def cross_rounding(self) -> FloatVector:
        """A |g| that may be nothing but the rounding of y and of its sums."""
        return np.asarray(10 * EPS * np.sqrt(np.maximum(self.gram.diagonal(), 0.0).sum()) * self.y_size)

    @property
    def monomial_means(self) -> FloatVector:
        """Weighted means of the monomials, where there is an intercept."""
        moved = self.offset / self.scale
        return moved if self.shift is None else self.shift + moved

    def affine(self, coef: FloatMatrix, intercept: FloatVector) -> Affine:
        """Coefficients of features, and an intercept about the shifts, as a pass takes them."""
        return Affine(self.shift, self.y_shift, self.scale[:, None] * coef, intercept)

    def plain_intercept(self, coef: FloatMatrix, intercept: FloatVector) -> FloatVector:
        """b of f(x) = F(x).c + b."""
        moved = intercept + self.y_shift
        return moved if self.shift is None else moved - (self.scale * self.shift) @ coef

    def factor(self, alpha: float) -> FloatMatrix:
        """L with L L^T = G + alpha I; the last one is kept.

        Raises
        ------
        NotPositiveDefiniteError
            There is none, or rounding alone makes one.
        """
        if self._factor is None or self._factor[0] != alpha:
            self._factor = None  # one copy at a time
            system = self._system(alpha)
            info = potrf(system)
            if info:
                order, pivot = leading_minor_pivot(self._system(alpha), info)
                raise self._singular(pivot, order - 1, alpha)
            pivots = np.square(system.diagonal())
            # rounding alone decides whether such a pivot is positive
            lost = np.flatnonzero(pivots <= len(system) * EPS * (self.gram.diagonal() + alpha))
            if len(lost):
                raise self._singular(float(pivots[lost[0]]), int(lost[0]), alpha)
            self._factor = alpha, system
        return self._factor[1]

    def _system(self, alpha: float) -> FloatMatrix:
        system = self.gram.copy()
        system[np.diag_indices_from(system)] += alpha
        return system

    def _singular(self, pivot: float, feature: int, alpha: float) -> NotPositiveDefiniteError:
        size = len(self.gram)
        suggested = alpha + (10 * max(abs(pivot), size * EPS * float(self.gram.diagonal().max())) or EPS)
        return NotPositiveDefiniteError(
            f"F^T W F + alpha I of {size:,} features is not positive definite at feature {feature:,} "
            f"(pivot {pivot:.2g}, alpha {alpha:.3g}): it depends on those before it",
            hint=f"raise alpha to at least {suggested:.1g}, or leave out features that others determine",
            row=feature,
            pivot=pivot,
            alpha=alpha,
            suggested_alpha=suggested,
        )

    def solve(self, right: FloatMatrix, alphas: FloatVector) -> FloatMatrix:
        """(G + alpha I)^-1 right (D, t), with an alpha for each column."""
        found = np.empty(right.shape)
        # the alpha whose factor is there comes first
        order = sorted(set(alphas.tolist()), key=lambda value: self._factor is None or self._factor[0] != value)
        for alpha in order:
            columns = np.flatnonzero(alphas == alpha)
            lower = self.factor(alpha)
            z = trsm_left(lower, np.ascontiguousarray(right[:, columns]), transposed=False)
            found[:, columns] = trsm_left(lower, z, transposed=True)
        return found


def normal_equations(source: RowsSource, fit_intercept: bool) -> Equations:
    """One pass over the rows, or two where the first shift was a bad guess.

    Raises
    ------
    DataError
        Every weight is zero; the sums are not finite.
    """
    scale, t = source.features.scale, source.num_targets
    shift, y_shift = _first_shift(source) if fit_intercept else (None, np.zeros(t))
    gram, cross, sums, ends = _summed(source, shift, y_shift)
    if not ends[2 * t] > 0:
        raise DataError("every row has weight zero", hint="give some rows a positive weight")
    if fit_intercept:
        variance = gram.diagonal() - np.square(sums) / ends[2 * t]
        if (variance * LOST < gram.diagonal()).any():
            means = sums / ends[2 * t]
            shift = means if shift is None else shift + means
            y_shift = y_shift + ends[t : 2 * t] / ends[2 * t]
            logger.info("means are known now: the sums are formed again about them")
            gram, cross, sums, ends = _summed(source, shift, y_shift)
    weight = float(ends[2 * t])
    means, y_means = scale * sums / weight, ends[t : 2 * t] / weight
    squares = ends[:t] + weight * (2 * y_shift * y_means + np.square(y_shift))
    gram *= scale[:, None]
    gram *= scale
    cross *= scale[:, None]
    centred = np.zeros_like(means), np.zeros(t)
    y_squares = ends[:t].copy()
    if fit_intercept:
        centred = means, y_means
        for row, mean in zip(gram, means, strict=True):  # a row at a time: no second D x D
            row -= weight * mean * means
        cross -= weight * means[:, None] * y_means
        y_squares -= weight * np.square(y_means)
    return Equations(
        gram=gram,
        cross=cross,
        scale=scale,
        shift=shift,
        y_shift=y_shift,
        offset=centred[0],
        y_offset=centred[1],
        y_norm=np.sqrt(np.maximum(y_squares, 0.0)),
        y_size=np.sqrt(np.maximum(squares, 0.0)),
        weight=weight,
        num_used=round(ends[2 * t + 1]),
        fit_intercept=fit_intercept,
    )


def _first_shift(source: RowsSource) -> tuple[FloatVector | None, FloatVector]:
    """Means as far as they are known before the first pass; of monomials, those of a sample."""
    x_mean, x_std, y_mean, _ = source.means()
    if source.features.is_linear:
        return (np.array(x_mean) if (np.abs(x_mean) > FAR * x_std).any() else None), np.array(y_mean)
    total, weight = np.zeros(source.features.num_features), 0.0
    for strip in source.sample():
        root = np.ones(len(strip.x)) if strip.weight is None else strip.weight
        used = root > 0
        with np.errstate(over="ignore", invalid="ignore"):
            monomials = source.features.monomials(strip.x[used], source.features.room(int(used.sum())))
            total += monomials @ root[used]
        weight += float(root.sum())
    if not weight or not np.isfinite(total).all():
        return None, np.array(y_mean)
    return total / weight, np.array(y_mean)


def _summed(
    source: RowsSource, shift: FloatVector | None, y_shift: FloatVector
) -> tuple[FloatMatrix, FloatMatrix, FloatVector, FloatVector]:
    """F^T W F, F^T W Y, F^T W 1, and the sums of the targets, in the order in which they come."""
    size, t = source.features.num_features, source.num_targets
    grid = panels(size)
    layout = SumLayout(grid.tile_size, t)
    gram, cross, sums, ends = np.zeros((size, size)), np.zeros((size, t)), np.zeros(size), np.zeros(2 * t + 2)
    for p, q, vector in source.sums(Affine(shift, y_shift, np.zeros((size, 0)), np.zeros(0))):
        tile, sides, last = layout.parts(vector)
        rows, columns = grid.span(p), grid.span(q)
        gram[rows, columns] += tile[: grid.rows(p), : grid.rows(q)]
        if p == q:
            cross[rows] += sides[:t, : grid.rows(p)].T
            sums[rows] += sides[t, : grid.rows(p)]
            ends += last if p == 0 else 0.0
    for i in range(size):  # the lower triangle is what was summed
        gram[i, i + 1 :] = gram[i + 1 :, i]
    return gram, cross, sums, ends
