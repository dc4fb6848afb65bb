"""pandas data frames and series, converted column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dkrr.dataset.columns import unique_names
from dkrr.dataset.rows import Floats
from dkrr.dataset.sources.table import BLOCK_BYTES, Block, Table, check_shape, to_floats
from dkrr.errors import DataError

__all__ = ["FrameTable"]


class FrameTable(Table):
    """A DataFrame, or a Series where one column is enough."""

    def __init__(self, frame: Any, label: str, *, prefix: str = "x", allow_1d: bool = False) -> None:
        num_rows, width = check_shape(frame.shape, label, allow_1d=allow_1d)
        self.is_1d = frame.ndim == 1
        is_named = not self.is_1d or frame.name is not None
        if self.is_1d:
            frame = frame.to_frame(prefix if frame.name is None else frame.name)
        super().__init__(label, unique_names(frame.columns, label), num_rows, is_named=is_named)
        self._frame = frame
        self._step = max(256, BLOCK_BYTES // (8 * width))

    def blocks(self, columns: Sequence[int], label_column: int | None = None) -> Iterator[Block]:
        size = len(self._frame)
        for start in range(0, size, self._step):
            part = self._frame.iloc[start : start + self._step]
            values = np.empty((len(part), len(columns)))
            for k, j in enumerate(columns):
                values[:, k] = self._column(part.iloc[:, j], j, start)
            yield values, None if label_column is None else part.iloc[:, label_column].tolist()

    def _column(self, series: Any, j: int, first_row: int) -> Floats:
        label = f"column {self.names[j]!r} of {self.label}"
        dtype = series.dtype
        kind = getattr(getattr(dtype, "numpy_dtype", getattr(dtype, "subtype", dtype)), "kind", "O")
        if isinstance(dtype, np.dtype):
            return to_floats(series.to_numpy(), label, first_row)
        if kind in "biuf":  # nullable, sparse and Arrow-backed numbers; what is missing becomes NaN
            return to_floats(series.to_numpy(dtype=np.float64, na_value=np.nan), label, first_row)
        raise DataError(
            f"{label} has dtype {dtype}; numbers expected",
            hint="convert it to numbers, or leave the column out with features=",
            dtype=str(dtype),
        )
