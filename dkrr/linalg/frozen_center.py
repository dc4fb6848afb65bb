"""The point at which a kernel is centred, frozen with its lineage for as long as newer rows stay near it.

Tiles of an earlier fit can be continued only with its centre. Rows that came later and lie far from the rows whose mean
it is are compared by differences, which takes longer than with a centre of their own. The rule is that of frozen
scaling (:mod:`dkrr.dataset.drift`): beyond a limit nothing is continued, the kernel is centred anew
(:meth:`dkrr.kernels.Kernel.center`), and that is said. So it is, without a limit, where subtracting the centre rounds
typical rows by more than 1e-13 of the kernel's length.

Cost
----
One pass over the rows for each centre that is found and has newer rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Scaling
from dkrr.dataset.drift import Drift, measure_drift
from dkrr.dataset.rows import row_moments
from dkrr.kernels import Kernel
from dkrr.kernels.pairwise import MAX_EXTENT
from dkrr.linalg.lineage import Ancestor

__all__ = ["CenterJudge", "FrozenCenter", "choose_center"]


@dataclass(frozen=True, kw_only=True)
class FrozenCenter:
    """The centre of an earlier fit.

    Parameters
    ----------
    center
        Where its kernel is centred; None where the newer rows have drifted, or are, too far away.
    num_rows
        First rows of the data set whose mean it is.
    drift, limit
        Of all rows that came after those, and the most that is allowed; None allows any.
    """

    center: tuple[float, ...] | None
    num_rows: int
    drift: Drift
    limit: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the record of a run."""
        state = "anew" if self.center is None else "frozen"
        return {"center": state, "rows": self.num_rows, "drift": self.drift.to_dict(), "limit": self.limit}

    def sentence(self) -> str:
        """What happened, in words; "" where there are no newer rows, or any are allowed."""
        if self.center is None and (self.limit is None or self.drift.value <= self.limit):
            return f"fitted anew, not centred: distances from the first {self.num_rows:,} rows would be rounded"
        if self.limit is None or not self.drift.num_rows:
            return ""
        far = self.drift.words()
        if self.center is None:
            return f"fitted anew, with the centre of all rows: {far}"
        return f"centred at the mean of the first {self.num_rows:,} rows, frozen; {far}"


class CenterJudge:
    """Whether the rows of a data set are near enough to the centres of earlier fits; reads them once a centre.

    Parameters
    ----------
    limit
        The drift up to which a centre is kept; None keeps any.
    """

    def __init__(self, dataset: Dataset, kernel: Kernel, limit: float | None) -> None:
        self.dataset, self.kernel, self.limit = dataset, kernel, limit
        self._found: dict[tuple[Any, ...], FrozenCenter] = {}

    def judge(self, ancestor: Ancestor) -> FrozenCenter:
        """The centre of an earlier array, which must have one."""
        center = tuple(float(value) for value in ancestor.fields["center"])
        key = (center, ancestor.center_rows)
        if key not in self._found:
            # of rows that are compared as they are, none is far from the centre
            is_free = self.limit is None or not any(center)
            drift = Drift() if is_free else self._drift(center, ancestor.center_rows)
            is_near = (self.limit is None or drift.value <= self.limit) and not self._rounds(np.array(center))
            self._found[key] = FrozenCenter(
                center=center if is_near else None, num_rows=ancestor.center_rows, drift=drift, limit=self.limit
            )
        return self._found[key]

    def allows(self, ancestor: Ancestor) -> bool:
        """Whether an earlier array may be continued, as far as its centre is concerned."""
        return ancestor.fields.get("center") is None or self.judge(ancestor).center is not None

    def _rounds(self, center: NDArray[np.float64]) -> bool:
        """Whether typical rows, less the centre, are rounded by more than 1e-13 of the kernel's length."""
        typical = np.hypot(self.dataset.x_std, self.dataset.x_mean - center)
        return bool(center.any()) and self.kernel.extent(typical[None]) > MAX_EXTENT**2

    def _drift(self, center: tuple[float, ...], num_rows: int) -> Drift:
        X = self.dataset.X
        if num_rows >= X.num_rows:
            return Drift()
        spread = row_moments(X, 0, num_rows).std
        none = np.empty(0)
        near = Scaling(x_mean=np.array(center), x_std=np.where(spread == 0, 1.0, spread), y_mean=none, y_std=none)
        return measure_drift(near, row_moments(X, num_rows), None, self.dataset.feature_names)


def choose_center(
    found: Iterable[Ancestor],
    dataset: Dataset,
    kernel: Kernel,
    *,
    tile_size: int,
    dtype: str,
    gram: str,
    alphas: Sequence[float],
    limit: float | None,
) -> FrozenCenter | None:
    """The centre with which most of earlier fits can be continued; None where there is none to be frozen.

    Parameters
    ----------
    found
        Earlier factors and Gram matrices of the kernel, those with the longest prefix first.
    tile_size, dtype, gram, alphas
        Of the wanted factor.
    limit
        See :class:`CenterJudge`.
    """
    judge = CenterJudge(dataset, kernel, limit)
    kept: dict[bool, FrozenCenter] = {}
    refused: dict[bool, FrozenCenter] = {}
    for ancestor in found:
        fields = ancestor.fields
        if fields.get("center") is None or fields.get("tile_size") != tile_size:
            continue
        is_same = ancestor.kind == "factors" and (
            fields["alpha"] in alphas
            and (fields["dtype"], fields["gram"]) == (dtype, gram)
            and (fields["weight_digest"] is None) == (dataset.weight is None)
        )
        if is_same in kept:
            continue
        judged = judge.judge(ancestor)
        (refused if judged.center is None else kept).setdefault(is_same, judged)
    # a factor that can be continued goes before whatever else has more rows
    ranked = (kept.get(True), kept.get(False), refused.get(True), refused.get(False))
    return next((judged for judged in ranked if judged is not None), None)
