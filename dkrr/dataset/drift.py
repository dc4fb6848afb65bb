"""Drift: how far rows that came later lie from the rows whose statistics they are whitened with.

    drift_j = max(|mean_j(new) - mean_j| / std_j - 3 / sqrt(m), log(std_j(new) / std_j))

for column j and m new rows: a mean that moved by one standard deviation, beyond three times the noise of a mean of m
rows, counts as 1, and so does a spread that is e times as large. A spread that shrank is no harm. Whitening rests on
statistics that no longer describe the rows when this is large: kernels then see columns at the wrong scale, and a fit
should be made anew with statistics of all rows.

Cost: one pass over the new rows, or none where their moments are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.dataset.rows import Floats, Moments
from dkrr.dataset.scaling import Scaling

__all__ = ["DRIFT_LIMIT", "MIN_ROWS", "Drift", "measure_drift"]

# before everything is fitted anew: a mean may move by one standard deviation
DRIFT_LIMIT = 1.0

# of fewer rows a mean and a spread say little
MIN_ROWS = 30
NOISE = 3.0


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The largest drift of any column.

    Parameters
    ----------
    value
        As above; 0 where there are too few new rows to tell.
    column
        Name of the column, "" where there is none.
    num_rows
        m.
    """

    value: float = 0.0
    column: str = ""
    num_rows: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"value": self.value, "column": self.column, "rows": self.num_rows}

    def words(self) -> str:
        """How far, and how far it may be."""
        of_column = f"{self.column}; " if self.column else ""
        return f"{self.num_rows:,} newer rows drift by {self.value:.2g} ({of_column}limit {DRIFT_LIMIT:g})"


def measure_drift(scaling: Scaling, x: Moments, y: Moments | None, names: tuple[str, ...]) -> Drift:
    """The drift of new rows.

    Parameters
    ----------
    scaling
        The statistics that they are whitened with.
    x, y
        Moments of their features and targets, before whitening.
    names
        Of all features, then of all targets.
    """
    if x.count < MIN_ROWS:
        return Drift(num_rows=x.count)
    values = _drift(scaling.x_mean, scaling.x_std, x)
    if y is not None and scaling.y_mean.size:
        values = np.concatenate([values, _drift(scaling.y_mean, scaling.y_std, y)])
    worst = int(np.argmax(values))
    return Drift(value=max(0.0, float(values[worst])), column=names[worst], num_rows=x.count)


def _drift(mean: Floats, std: Floats, new: Moments) -> Floats:
    with np.errstate(divide="ignore", over="ignore"):
        moved = np.abs(new.mean - mean) / std - NOISE / np.sqrt(new.count)
        spread = np.log(new.std / std)
    # what overflowed has drifted as far as anything can
    values: Floats = np.nan_to_num(np.maximum(moved, spread), nan=np.inf, posinf=np.inf, neginf=0.0)
    return values
