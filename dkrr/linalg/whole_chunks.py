"""Small matrices that travel between the driver and its tasks through the store, each one chunk without metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import ChunkArray
from dkrr.engine.tasks import run_task

__all__ = ["add_chunk", "retried", "whole_chunk"]

FloatMatrix = NDArray[np.float64]


def whole_chunk(store: Any, path: str, rows: int, columns: int, parts: int = 1) -> ChunkArray:
    """A handle on ``parts`` matrices (rows, columns), each one chunk, below one another.

    Nobody but the tasks of one fit reads them, and these know the shape: there is no metadata on disk.
    """
    return ChunkArray(store, path, (parts * rows, columns), (rows, columns), "float64")


def retried(action: Callable[[], object]) -> None:
    """Do something with a store in this process as tasks do it: what a device refuses once is tried again."""

    def once(_: None) -> bool:
        action()
        return True

    run_task(once, None, ())


def add_chunk(total: FloatMatrix, chunks: ChunkArray, i: int) -> None:
    """Add chunk i of several that lie below one another."""
    total += chunks.read((i, 0))
