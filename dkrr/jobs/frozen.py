"""Scaling that is frozen with its lineage: rows that came later are whitened like the rows of the first fit.

Statistics of all rows would change with every append, and with them every row that the kernel sees; nothing of an
earlier fit could be continued. So a job whose rows begin with the training rows of an earlier fit in the same store, as
digests prove, takes the statistics of that one, unless the new rows have drifted too far from them
(:mod:`dkrr.dataset.scaling`): then everything is fitted anew, with statistics of all rows, and that is said.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Scaling, open_dataset
from dkrr.dataset.rows import row_moments
from dkrr.dataset.scaling import DRIFT_LIMIT, Drift, mask_digest, measure_drift
from dkrr.errors import StoreError
from dkrr.store.files import arrays_below, name_of

__all__ = ["Frozen", "find_scaling"]

logger = logging.getLogger("dkrr.jobs")

Mask = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The scaling of an earlier fit.

    Parameters
    ----------
    scaling
        What its rows were whitened with; None where the new rows have drifted too far.
    num_rows
        Rows of the data set, held-out ones included, whose statistics these are.
    location
        The training rows of exactly this data set, where they are prepared already.
    drift
        Of all rows that came after those; :data:`~dkrr.dataset.scaling.DRIFT_LIMIT` is the most that is allowed.
    """

    scaling: Scaling | None
    num_rows: int
    location: str | None
    drift: Drift

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the record of a run."""
        state = "anew" if self.scaling is None else "frozen"
        return {"scaling": state, "rows": self.num_rows, "drift": self.drift.to_dict(), "limit": DRIFT_LIMIT}

    def sentence(self) -> str:
        """What happened, in words."""
        text = self.drift.words()
        if self.scaling is None:
            return f"fitted anew with statistics of all rows: {text}"
        return f"whitened with the statistics of the first {self.num_rows:,} rows, frozen; {text}"


def find_scaling(store: Any, dataset: Dataset, mask: Mask | None) -> Frozen | None:
    """The scaling of the earlier fit that shares the most rows with a data set; None where there is none.

    Parameters
    ----------
    mask : (n,) bool, optional
        Rows that are held out.
    """
    best: tuple[int, int, Dataset] | None = None
    for location in arrays_below(store, "rows"):
        if not name_of(location).endswith("-train.zarr"):
            continue
        try:
            earlier = open_dataset(location)
        except StoreError:
            continue
        origin = earlier.origin or {}
        shared, first = _shared_rows(origin, dataset, mask), int(origin.get("scaling_rows", 0))
        # of two with the same rows that with the newer statistics, which replaced the others
        if shared and (best is None or (shared, first) > best[:2]):
            best = shared, first, earlier
    return None if best is None else _judged(best[2], best[0], dataset, mask)


def _shared_rows(origin: dict[str, Any], dataset: Dataset, mask: Mask | None) -> int:
    """Rows of the data set that training rows were made of, when they are its first ones and were whitened; else 0."""
    m, resolved = int(origin.get("num_rows", 0)), origin.get("resolved")
    if not 0 < m <= dataset.num_rows or resolved is None or len(resolved["x_mean"]) != dataset.num_features:
        return 0
    held_out = np.zeros(m, dtype=bool) if mask is None else mask[:m]
    if mask_digest(~held_out) != origin["rows"] or dataset.prefix_digest(m) != origin["digest"]["X"]:
        return 0
    return m


def _judged(earlier: Dataset, shared: int, dataset: Dataset, mask: Mask | None) -> Frozen:
    origin = earlier.origin or {}
    scaling, first = Scaling.from_dict(origin["resolved"]), int(origin.get("scaling_rows", shared))
    same_targets = _has_prefix(dataset, origin, shared, "y")
    if not same_targets:  # new targets of the same rows: the features go on, the targets get statistics of their own
        own = row_moments(dataset.parts()["y"], without=mask)
        scaling = replace(scaling, y_mean=own.mean, y_std=np.where(own.std == 0, 1.0, own.std))
    is_same = shared == dataset.num_rows and same_targets and _has_prefix(dataset, origin, shared, "weight")
    has_targets = same_targets and dataset.y is not None
    targets = row_moments(dataset.parts()["y"], first, without=mask) if has_targets else None
    names = (*dataset.feature_names, *dataset.target_names)
    drift = measure_drift(scaling, row_moments(dataset.X, first, without=mask), targets, names)
    if drift.value > DRIFT_LIMIT:
        found = Frozen(scaling=None, num_rows=first, location=None, drift=drift)
        logger.warning("%s", found.sentence())
        return found
    location = str(earlier.path) if is_same else None
    return Frozen(scaling=scaling, num_rows=first, location=location, drift=drift)


def _has_prefix(dataset: Dataset, origin: dict[str, Any], shared: int, part: Any) -> bool:
    """Whether targets or weights are those of the earlier rows, as far as these go."""
    wanted = origin["digest"].get(part)
    if part not in dataset.parts():
        return wanted is None
    return wanted is not None and dataset.prefix_digest(shared, part) == wanted
