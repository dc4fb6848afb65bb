"""SHA-256 over rows, so that "these rows are a prefix of those" can be proved.

Rows are hashed in blocks of 1,024, whatever the chunks on disk: block digest b = SHA-256(the block's little-endian
float64 values). The digest of the first n rows is ::

    SHA-256("dkrr rows <n> x <k>\\n", b_0, b_1, ..., b_{floor(n / 1024) - 1}, SHA-256(the n mod 1024 rows left over))

It depends on the values alone. With the block digests at hand, the digest of *any* prefix costs one block to read,
and appending rows hashes only the new ones. Cost: one pass of SHA-256, 1.4 GB/s on a core with SHA instructions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from dkrr.dataset.rows import Floats

__all__ = ["DIGEST_ROWS", "block_digest", "prefix_digest"]

DIGEST_ROWS = 1024


def block_digest(rows: Floats) -> str:
    """SHA-256 of the little-endian float64 values of ``rows`` in C order."""
    values: Any = np.ascontiguousarray(rows, dtype="<f8")
    return hashlib.sha256(memoryview(values).cast("B")).hexdigest()


def prefix_digest(block_digests: Sequence[str], tail: Floats) -> str:
    """The digest of the rows of all full blocks followed by ``tail``.

    Parameters
    ----------
    block_digests
        Digests of the full blocks, in order.
    tail : (m, k)
        The rows after the last full block, m < 1,024; may be empty.
    """
    if len(tail) >= DIGEST_ROWS:
        raise ValueError(f"tail has {len(tail)} rows; fewer than {DIGEST_ROWS} expected")
    num_rows = len(block_digests) * DIGEST_ROWS + len(tail)
    digest = hashlib.sha256(f"dkrr rows {num_rows} x {tail.shape[1]}\n".encode())
    for value in block_digests:
        digest.update(bytes.fromhex(value))
    if len(tail):
        digest.update(bytes.fromhex(block_digest(tail)))
    return digest.hexdigest()
