"""Rows on disk as a lazy dask array, and rows together with what they depend on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Floats, RowArray, open_dataset
from dkrr.dataset.dataset import Part
from dkrr.errors import DamagedChunkError, DataError
from dkrr.temporary import TemporaryStore

__all__ = ["HeldRows", "check_still_there", "lazy_rows"]


@dataclass(frozen=True)
class HeldRows:
    """Rows with what they are in: a temporary store, which lasts as long as anything that was made of them in this
    process, or the caller's data set, which must still be there at the end of every pass."""

    rows: RowArray
    holder: TemporaryStore | Dataset

    @property
    def num_rows(self) -> int:
        return self.rows.num_rows

    @property
    def num_columns(self) -> int:
        return self.rows.num_columns

    def read(self, start: int, stop: int, out: Floats | None = None) -> Floats:
        """Rows ``start`` to ``stop``.

        Raises
        ------
        DataError
            At the path of the data set are other rows now.
        """
        try:
            found = self.rows.read(start, stop, out)
        except DamagedChunkError:
            if isinstance(self.holder, Dataset):  # chunks of other rows may have another size
                check_still_there(self.holder)
            raise
        if stop == self.num_rows and isinstance(self.holder, Dataset):
            check_still_there(self.holder)
        return found


def check_still_there(dataset: Dataset) -> None:
    """Compare the rows at the path of a data set with the digests that were read when it was opened.

    Appending to it does not matter.

    Raises
    ------
    DataError
        They are others.
    """
    now, n = open_dataset(dataset.path, version=dataset.version), dataset.num_rows
    digests: dict[Part, str | None] = {"X": dataset.digest, "y": dataset.digest_y, "weight": dataset.digest_weight}
    for part, digest in digests.items():
        there = now.prefix_digest(n, part) if now.num_rows >= n and part in now.parts() else None
        if digest not in (None, there):
            raise DataError(f"{dataset.path} holds other rows than when it was opened", hint="open it again, and fit")


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
