"""The residuals of an iteration, one after the other, kept in bounded space for whoever wants to see them later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_TRACES", "ResidualTrace"]

MOST_POINTS = 500
MOST_TARGETS = 6
MOST_TRACES = 8


@dataclass
class ResidualTrace:
    """Relative residuals of one call of conjugate gradients.

    Up to six targets have a curve each; of more, the largest, the median and the smallest residual are kept. When 500
    points are there, every second one goes, and later ones are taken half as often; the last one always counts.

    Parameters
    ----------
    name
        What was iterated, with what preconditioner.
    tol
        Relative residual that was aimed at.
    alpha
        The ridges, each of them once.
    """

    name: str
    tol: float
    alpha: list[float]
    iterations: list[int] = field(default_factory=list)
    relative: list[list[float]] = field(default_factory=list)
    num_targets: int = 0
    is_over: bool = False
    _every: int = 1

    def add(self, iteration: int, relative: NDArray[np.float64]) -> None:
        """The residuals (t,) after an iteration."""
        values = np.asarray(relative, dtype=np.float64)
        self.num_targets = len(values)
        if self.num_targets > MOST_TARGETS:
            values = np.array([values.max(), np.median(values), values.min()])
        point = [float(value) for value in values]
        # the last point moves along until the next one that is due
        if len(self.iterations) > 1 and self.iterations[-1] % self._every:
            self.iterations[-1], self.relative[-1] = iteration, point
        else:
            self.iterations.append(iteration)
            self.relative.append(point)
        if len(self.iterations) > MOST_POINTS:
            self._every *= 2
            kept = [k for k, number in enumerate(self.iterations) if number % self._every == 0 or number == iteration]
            self.iterations = [self.iterations[k] for k in kept]
            self.relative = [self.relative[k] for k in kept]

    def replace(self, history: Sequence[NDArray[np.float64]]) -> None:
        """The whole history, from before the first iteration on, also of one that was resumed."""
        self.iterations, self.relative, self._every = [], [], 1
        for iteration, relative in enumerate(history):
            self.add(iteration, relative)
        self.is_over = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        names = [f"target {k}" for k in range(self.num_targets)]
        if self.num_targets > MOST_TARGETS:
            names = ["largest", "median", "smallest"]
        return {
            "name": self.name,
            "tol": self.tol,
            "alpha": self.alpha[:MOST_TARGETS],
            "num_targets": self.num_targets,
            "is_over": self.is_over,
            "iterations": self.iterations,
            "curves": names,
            "relative_residual": self.relative,
        }
