"""Keys of Gram matrices, factors and solves: SHA-256 over everything that decides their bytes.

Two fits that agree on a key share the array. The fields behind a key are stored as attributes of the array, so a
mismatch can be explained field by field.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from dkrr.linalg.operators import RidgeOperator

__all__ = ["factor_fields", "gram_fields", "key_of"]

# Raise FORMAT_VERSION when the layout of tiles changes, KERNEL_VERSION when a kernel's values change.
FORMAT_VERSION = 1
KERNEL_VERSION = 4


def gram_fields(operator: RidgeOperator, dtype: str, source_digest: str = "") -> dict[str, Any]:
    """What decides the bytes of the Gram tiles: no alpha, no weights."""
    return {
        "format_version": FORMAT_VERSION,
        "kernel_version": KERNEL_VERSION,
        "kernel": {"kernel": "precomputed"} if operator.kernel is None else operator.kernel.to_dict(),
        "center": None if operator.rows is None or operator.rows.center is None else list(operator.rows.center),
        "n": operator.grid.n,
        "tile_size": operator.grid.tile_size,
        "dtype": dtype,
        "rows_digest": source_digest or (operator.rows.digest if operator.rows is not None else ""),
    }


def factor_fields(
    operator: RidgeOperator, dtype: str, weight_digest: str | None, blas: str, source_digest: str = ""
) -> dict[str, Any]:
    """What decides the bytes of the factor's tiles."""
    fields = gram_fields(operator, dtype, source_digest)
    fields["alpha"] = operator.alpha
    fields["weight_digest"] = weight_digest if operator.weighted else None
    fields["gram"] = "on_the_fly" if operator.gram is None else "stored"
    fields["blas"] = blas
    return fields


def key_of(fields: dict[str, Any]) -> str:
    """The first 40 hexadecimal digits of the SHA-256 of the fields in canonical JSON."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:40]
