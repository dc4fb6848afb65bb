"""A precomputed matrix in tiles, with targets and weights as a data set."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from typing import Any

import numpy as np

from dkrr.dataset import Dataset, ingest
from dkrr.fit.inputs import given_tiles
from dkrr.store.files import place
from dkrr.tiles import TileMatrix

_KEPT = ExitStack()


def store_given_matrix(K: Any, y: Any, weight: Any, root: Any, tile_size: int) -> tuple[Dataset, TileMatrix, str]:
    """Targets and weights as a data set, the tiles of K below ``root``, and their digest; all of it stays."""
    numbers = np.arange(len(K), dtype=np.float64)[:, None]
    dataset = ingest(numbers, place(root, "rows", uuid.uuid4().hex + ".zarr"), y=y, sample_weight=weight)
    tiles, digest = _KEPT.enter_context(given_tiles(K, root, tile_size))
    return dataset, tiles, digest
