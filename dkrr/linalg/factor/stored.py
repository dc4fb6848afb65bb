"""Find the finished Cholesky factor of a system that was solved earlier, in the store where it was left.

A factor's fields say which matrix it factorises; a model knows the same of its own system. The tile size, where its
Gram tiles came from and the BLAS kernel decide its bytes but not what it is a factor of, so any float64 factor of the
matrix will do.

The fields say nothing of what a tile holds, and of a kernel function only its name, so that what is found is compared
with the matrix before it is used.

Cost: one small JSON document for each factor of the store; one look at every tile of the one that is taken, and what
comparing it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dkrr.errors import DamagedChunkError, StoreError
from dkrr.linalg.keys import FORMAT_VERSION, key_of
from dkrr.linalg.workspace import keep_for_others
from dkrr.stores import arrays_below, read_json
from dkrr.tiles import TileMatrix

__all__ = ["WantedFactor", "open_factor"]

logger = logging.getLogger("dkrr.linalg")


@dataclass(frozen=True, kw_only=True)
class WantedFactor:
    """What must agree: the fields of :func:`~dkrr.linalg.keys.factor_fields` that decide the matrix."""

    kernel: dict[str, Any]
    center: list[float] | None
    n: int
    alpha: float
    rows_digest: str
    weight_digest: str | None

    def reason_against(self, location: str) -> str:
        """Why the array at ``location`` is not this factor, finished and in float64; "" when it is."""
        document = read_json(location, "zarr.json")
        if document is None:
            return "is gone"
        fields = document.get("attributes") if isinstance(document, dict) else None
        if not isinstance(fields, dict) or key_of(fields) not in location:
            return "is not a factor of dkrr, or not the one its name says"
        # not the version of the kernels' code, which says that entries may be rounded otherwise: what is found is
        # compared with the kernel itself
        wanted = {**vars(self), "format_version": FORMAT_VERSION}
        differing = [name for name, value in wanted.items() if fields.get(name) != value]
        if differing:
            return f"is a factor of something else ({', '.join(sorted(differing))})"
        if fields.get("dtype") != "float64":
            return f"is {fields.get('dtype')}, which is not precise enough"
        factor = TileMatrix.open(location)
        missing = factor.missing()
        if missing:
            return f"is not whole: {len(missing):,} of {factor.grid.num_lower:,} tiles are missing"
        return ""


def open_factor(
    wanted: WantedFactor, named: Sequence[str], store: str | None, misfit: Callable[[TileMatrix], str]
) -> TileMatrix:
    """The factor at one of the named locations, else any in the store that is the one.

    Parameters
    ----------
    named
        Where it was when the system was solved.
    store
        A store that is searched, or None.
    misfit
        Says why a factor is not that of the matrix, "" when it is.

    Raises
    ------
    StoreError
        There is none; the message says why not for each that was named, or that is not what its fields say.
    """
    reasons = []
    for location in (*named, *(other for other in arrays_below(store, "factors") if other not in named)):
        reason = _taken(wanted, location)
        if reason:
            reasons += [f"{location} {reason}"] if location in named else []
            continue
        factor = TileMatrix.open(location)
        try:
            reason = misfit(factor)
        except DamagedChunkError as damage:
            reason = f"is damaged ({damage.message})"
        if not reason:
            return factor
        logger.warning("%s %s", location, reason)
        reasons.append(f"{location} {reason}")
    raise StoreError(f"no float64 factor of these {wanted.n:,} rows: {'; '.join(reasons) or 'the fit left none'}")


def _taken(wanted: WantedFactor, location: str) -> str:
    """Take a factor that is wanted into use; why it is not, "" when it is."""
    reason = wanted.reason_against(location)
    if not reason:
        keep_for_others(location)
        reason = wanted.reason_against(location)  # it may just have been removed
    return reason
