"""A random subset of the rows of a data set, in random order, as one small array on disk.

The first m of its rows are a random subset themselves, so that a search on few rows and a check on more of them use
nested samples. Workers read it by its path. Rows of weight 0 are left out: they take no part in a fit.

Cost: one pass over the chunks that hold a chosen row; 8 m (d + t + 1) bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, RowArray
from dkrr.errors import DamagedChunkError, DataError, StoreError
from dkrr.selection.likelihood import Explained
from dkrr.store.files import remove_array
from dkrr.store.lease import hold_lock

__all__ = ["Subset", "draw_subset"]

FloatArray = NDArray[np.float64]

ROWS_PER_CHUNK = 1024


@dataclass(frozen=True, kw_only=True)
class Subset:
    """Where a subset is, and what its columns are: d features, t targets, and the weights if there are any."""

    location: str
    num_rows: int
    num_features: int
    num_targets: int
    weighted: bool

    def read(self, num_rows: int, *, intercept: bool) -> Explained:
        """The first ``num_rows`` rows."""
        d, t = self.num_features, self.num_targets
        rows = RowArray.open(self.location).read(0, num_rows)
        weight = rows[:, d + t].copy() if self.weighted else None
        return Explained(x=rows[:, :d], y=rows[:, d : d + t].copy(), weight=weight, intercept=intercept)


def draw_subset(dataset: Dataset, num_rows: int, seed: int, location: str) -> Subset:
    """Draw ``num_rows`` rows (all, if there are not so many) and write them to ``location``.

    What an earlier call with the same arguments wrote there is used as it is; one that writes it is waited for.

    Raises
    ------
    DataError
        The data has no targets, or fewer than two rows of positive weight.
    """
    if dataset.y is None:
        raise DataError(f"{dataset.path} has no target", hint="name one: [data] target = [-1]")
    usable = _usable(dataset)
    if len(usable) < 2:
        raise DataError(f"{dataset.path} has {len(usable)} rows of positive weight", hint="two at least are needed")
    num_rows = min(num_rows, len(usable))
    subset = Subset(
        location=location,
        num_rows=num_rows,
        num_features=dataset.num_features,
        num_targets=dataset.num_targets,
        weighted=dataset.weight is not None,
    )
    if _is_whole(subset):
        return subset
    with hold_lock(location, wait=True):
        if not _is_whole(subset):
            _write(dataset, usable, seed, subset)
    return subset


def _write(dataset: Dataset, usable: NDArray[np.int64], seed: int, subset: Subset) -> None:
    location, num_rows = subset.location, subset.num_rows
    chosen = usable[np.random.default_rng(seed).permutation(len(usable))[:num_rows]]
    rows = _gather(dataset, chosen)
    remove_array(location)
    array = RowArray.create(location, "", num_rows=num_rows, num_columns=rows.shape[1], rows_per_chunk=ROWS_PER_CHUNK)
    for number, start in enumerate(range(0, num_rows, ROWS_PER_CHUNK)):
        array.write_chunk(number, rows[start : start + ROWS_PER_CHUNK])


def _usable(dataset: Dataset) -> NDArray[np.int64]:
    """Numbers of the rows of positive weight."""
    if dataset.weight is None:
        return np.arange(dataset.num_rows)
    found = [
        start + np.flatnonzero(dataset.weight.read(start, stop)[:, 0] > 0) for start, stop in dataset.weight.blocks()
    ]
    return np.concatenate(found)


def _gather(dataset: Dataset, chosen: NDArray[np.int64]) -> FloatArray:
    """Rows ``chosen`` of features, targets and weights side by side, in that order."""
    parts = dataset.parts()
    rows = np.empty((len(chosen), sum(part.num_columns for part in parts.values())))
    column = 0
    for name in ("X", "y", "weight"):
        part = parts.get(name)
        if part is None:
            continue
        columns = slice(column, column + part.num_columns)
        column = columns.stop
        for start, stop in part.blocks():
            inside = np.flatnonzero((chosen >= start) & (chosen < stop))
            if len(inside):
                rows[inside, columns] = part.read(start, stop)[chosen[inside] - start]
    return rows


def _is_whole(subset: Subset) -> bool:
    columns = subset.num_features + subset.num_targets + subset.weighted
    try:
        array = RowArray.open(subset.location)
        return (array.num_rows, array.num_columns) == (subset.num_rows, columns) and bool(
            array.read(0, array.num_rows).size
        )
    except (StoreError, DamagedChunkError, FileNotFoundError):
        return False


def standard_deviations(rows: Explained) -> FloatArray:
    """Of the features (d,); 1 for one that is constant."""
    deviations: Any = rows.x.std(axis=0)
    deviations[~(deviations > 1e-12)] = 1.0
    return np.asarray(deviations)
