"""Where a low-rank factor is kept, and the fields behind its key: everything that decides its bytes, and no alpha."""

from __future__ import annotations

from typing import Any

from dkrr.linalg.catalogue import gram_fields, key_of
from dkrr.linalg.lowrank.panels import row_chunks
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.solution import IterativeSettings
from dkrr.store.chunks import check_same
from dkrr.store.files import place, read_json, write_json

__all__ = ["claim", "low_rank_fields", "low_rank_location"]


def low_rank_fields(
    operator: RidgeOperator,
    settings: IterativeSettings,
    rank: int,
    blas: str,
    *,
    weight_digest: str | None = None,
    source_digest: str = "",
) -> dict[str, Any]:
    """What decides the bytes of F: no alpha, and no tile size (except that of a given matrix)."""
    fields = gram_fields(operator, "float64", source_digest)
    if operator.kernel is not None:
        del fields["tile_size"]
    rank = min(rank, operator.grid.n)
    fields["weight_digest"] = weight_digest if operator.weighted else None
    fields |= {"method": settings.preconditioner, "seed": settings.seed, "rank": rank, "blas": blas}
    fields["rows_per_chunk"] = row_chunks(operator.grid.n, rank).tile_size
    return fields


def low_rank_location(store: Any, fields: dict[str, Any]) -> str:
    """``<store>/preconditioners/<key>.zarr``."""
    return place(store, "preconditioners", key_of(fields) + ".zarr")


def claim(location: str, fields: dict[str, Any]) -> None:
    """Write the attributes of the group at ``location``, or compare them.

    Raises
    ------
    StoreMismatchError
        A factor with other fields is there; the message lists them.
    """
    found = read_json(location, "zarr.json")
    if found is None:
        write_json(location, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": fields})
    else:
        check_same(location, found.get("attributes", {}), fields)
