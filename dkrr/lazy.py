"""Rows on disk as a lazy dask array, and rows that keep the temporary store alive in which they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Floats, RowArray
from dkrr.temporary import TemporaryStore

__all__ = ["HeldRows", "lazy_rows"]


@dataclass(frozen=True)
class HeldRows:
    """Rows in a temporary store, which lasts as long as anything that was made of them in this process."""

    rows: RowArray
    store: TemporaryStore

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def num_columns(self) -> int:
        return self.rows.num_columns

    def read(self, start: int, stop: int, out: Floats | None = None) -> Floats:
        """Rows ``start`` to ``stop``."""
        return self.rows.read(start, stop, out)


def lazy_rows(rows: RowArray | HeldRows) -> Any:
    """The rows as a dask array (n, k) whose blocks are chunks on disk; nothing is read before it is computed."""
    import dask.array as da

    array = rows.rows if isinstance(rows, HeldRows) else rows
    spans = list(array.blocks())
    return da.map_blocks(
        _read,
        dtype=np.float64,
        chunks=(tuple(stop - start for start, stop in spans), (array.num_columns,)),
        meta=np.empty((0, 0)),
        rows=rows,
        spans=spans,
    )


def _read(
    rows: RowArray | HeldRows, spans: list[tuple[int, int]], block_id: tuple[int, int] = (0, 0)
) -> NDArray[np.float64]:
    return rows.read(*spans[block_id[0]])
