"""Writing a data set as its rows stream past, in memory for one chunk an array.

Order on disk, for a new data set and for an append alike:

1. full chunks, each one atomic write; of an append only chunks that the finished rows do not use,
2. the ragged chunk of the finished rows, which gains rows but keeps its old ones,
3. the shape of each array,
4. the attributes of the group, which are what counts: a reader takes n from them.

A kill between any two steps leaves the finished rows as they were. The ragged chunk is replaced as a whole, by one
atomic step: a reader that has the old file mapped keeps it, one that opens the new one finds the old rows where they
were. So rows stay in one array that any Zarr reader can open, which they would not with an array for each append.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import destination
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.generations import Counters, Generation, pack
from dkrr.dataset.rows import DIGEST_ROWS, Floats, RowArray, RowSummary, default_rows_per_chunk
from dkrr.errors import DataError, StoreError
from dkrr.store.failpoints import failpoint
from dkrr.store.files import join, remove_array
from dkrr.store.interruption import check_fence

__all__ = ["DatasetWriter"]


class DatasetWriter:
    """Context manager that writes a data set, or appends to one; leaves nothing behind when its block fails.

    Parameters
    ----------
    location
        Folder or URL.
    fields
        feature_names, target_names, weight_name, classes, y_is_1d and made_up of :class:`~dkrr.dataset.Dataset`.
    rows_per_chunk
        None chooses chunks of at most 4 MiB.
    num_rows
        Rows to come, where known: then the disk is checked before anything is written.
    base
        The data set to append to.
    replaces
        The data set at ``location`` whose next version this is.
    origin
        Stored as it is; plain JSON.

    Raises
    ------
    StorageFullError
        The rows to come do not fit on the disk.
    StoreError
        The destination is not ours, or cannot be written.
    """

    def __init__(
        self,
        location: Any,
        *,
        rows_per_chunk: int | None = None,
        num_rows: int | None = None,
        base: Dataset | None = None,
        replaces: Dataset | None = None,
        origin: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.location, self._base, self._replaces = location, base, replaces
        self._state = destination.inspect(location)
        before = base or replaces
        if before is None and self._state == "complete":
            raise StoreError(f"{location} is a finished data set", hint="append to it, or choose another destination")
        self._attributes = {**fields, "origin": origin}
        self._version = 1 if before is None else before.version + (replaces is not None)
        widths = (len(fields["feature_names"]), len(fields["target_names"]), int(fields["weight_name"] is not None))
        self._widths = {name: width for name, width in zip(("X", "y", "weight"), widths, strict=True) if width}
        self._is_auto = base is None and rows_per_chunk is None
        self._chunk_rows = rows_per_chunk or default_rows_per_chunk(max(widths), num_rows)
        self._generations = list(base.generations) if base is not None else []
        self._counters = Counters(generation=1, row=0) if before is None else before.counters
        self.num_rows = 0  # so far, those of the base included
        if base is not None:
            self._chunk_rows, self.num_rows = base.X.rows_per_chunk, base.num_rows
        self._needed: int | None = None
        if num_rows is not None:
            chunk_bytes = sum(8 * self._chunk_rows * width + 4 for width in self._widths.values())
            self._needed = (-(-num_rows // self._chunk_rows) + 1) * chunk_bytes + (64 << 10)
        self._first = self._next = self.num_rows // self._chunk_rows  # numbers of chunks
        self._fill = self.num_rows - self._first * self._chunk_rows  # rows in the buffers
        self._ragged: dict[str, Floats] | None = {} if self._fill else None  # the base's last chunk, filled up
        self._has_ragged = False
        self._summaries = {name: RowSummary(width) for name, width in self._widths.items()}
        self._buffers: dict[str, Floats] = {}

    def __enter__(self) -> DatasetWriter:
        if self._needed is not None:
            destination.check_space(self.location, self._needed)
        try:
            with destination.storage_errors(self.location, self._needed):
                if self._base is None and self._replaces is None:
                    if self._state == "unfinished":
                        destination.clear(self.location, keep_folder=True)
                    destination.mark_unfinished(self.location, self._state)
                self._buffers = {name: np.empty((self._chunk_rows, width)) for name, width in self._widths.items()}
                for name, rows in self._base.parts().items() if self._base is not None else ():
                    assert self._base is not None  # noqa: S101  (narrows the type)
                    tail = rows.read(self.num_rows // DIGEST_ROWS * DIGEST_ROWS, self.num_rows)
                    self._summaries[name] = RowSummary.resume(self._base.records[name], tail)
                    self._buffers[name][: self._fill] = rows.read(self.num_rows - self._fill, self.num_rows)
        except BaseException:
            self._undo()
            raise
        return self

    def add(self, **rows: Floats) -> None:
        """Take the next rows: X (m, d), and as the data set has them y (m, t) and weight (m, 1).

        They are finite, as the caller has checked.
        """
        if rows.keys() != self._widths.keys():
            raise ValueError(f"{', '.join(rows)} given; {', '.join(self._widths)} expected")
        position, count = 0, len(rows["X"])
        with destination.storage_errors(self.location, self._needed):
            for name, part in rows.items():
                self._summaries[name].add(part)
            while position < count:
                taken = min(self._chunk_rows - self._fill, count - position)
                for name, part in rows.items():
                    self._buffers[name][self._fill : self._fill + taken] = part[position : position + taken]
                self._fill += taken
                self.num_rows += taken
                position += taken
                if self._fill == self._chunk_rows:
                    self._flush()

    def _array(self, name: str) -> RowArray:
        path = destination.array_name(name, self._version)
        shape = {"num_rows": self.num_rows, "num_columns": self._widths[name], "rows_per_chunk": self._chunk_rows}
        return RowArray.unsaved(self.location, path, **shape)

    def _flush(self) -> None:
        number, rows, self._fill = self._next, self._fill, 0
        self._next += 1  # before the write: a write that fails may have left its chunk all the same
        for name, buffer in self._buffers.items():
            if number == self._first and self._ragged is not None:
                self._ragged[name] = buffer[:rows].copy()
            else:
                self._array(name).write_chunk(number, buffer[:rows])

    def mark(
        self,
        label: str | None = None,
        *,
        number: int | None = None,
        first_row: int | None = None,
        dropped: NDArray[np.bool_] | None = None,
    ) -> Generation | None:
        """Record a generation: the rows since the last one, if there are any.

        Parameters
        ----------
        label
            What it is called.
        number, first_row
            Of a generation that is copied; otherwise the next ones.
        dropped
            Of all rows of the source, which were left out for missing values.
        """
        added = self.num_rows - (self._generations[-1].n if self._generations else 0)
        if not added:
            return None
        found = Generation(
            number=self._counters.generation if number is None else number,
            n=self.num_rows,
            num_rows=added,
            digest=self._summaries["X"].digest(),
            first_row=self._counters.row if first_row is None else first_row,
            label=label,
            dropped=pack(dropped) if dropped is not None and dropped.any() else None,
        )
        self._generations.append(found)
        self._counters = Counters(
            generation=max(self._counters.generation, found.number + 1),
            row=max(self._counters.row, found.first_row + added + found.num_dropped),
        )
        return found

    def commit(self, label: str | None = None, dropped: NDArray[np.bool_] | None = None) -> Dataset:
        """Finish the arrays, then publish them; rows that belong to no generation yet become one, see :meth:`mark`."""
        with destination.storage_errors(self.location, self._needed):
            if self.num_rows == (0 if self._base is None else self._base.num_rows):
                raise DataError("no rows to write", hint="check that the source is not empty")
            if self._is_auto and self._next == 0:
                rows = default_rows_per_chunk(max(self._widths.values()), self.num_rows)
                self._chunk_rows = min(rows, self._chunk_rows)
            if self._fill:
                self._flush()
            for name, rows_of_chunk in (self._ragged or {}).items():
                self._has_ragged = True
                self._array(name).write_chunk(self._first, rows_of_chunk)
            for name in self._widths:
                array = self._array(name)
                stale = array.num_chunks  # an append that was killed may have come further than this one
                while array.array.is_valid((stale, 0)):
                    array.array.delete((stale, 0))
                    stale += 1
                array.save_shape()
                array.array.sync()
            self.mark(label, dropped=dropped)
            self._attributes |= {
                "complete": True,
                "num_rows": self.num_rows,
                "digest_rows": DIGEST_ROWS,
                "generations": [generation.to_dict() for generation in self._generations],
                "next": asdict(self._counters),
                "version": self._version,
                "arrays": {name: summary.to_dict() for name, summary in self._summaries.items()},
            }
            if self._replaces is not None or self._base is not None:
                is_new = self._replaces is not None
                self._attributes["earlier"] = destination.earlier_versions(self.location, replaced=is_new)
            failpoint("dataset.before_pointer")
            destination.write_attributes(self.location, self._attributes)
        self._state = "complete"
        failpoint("dataset.after_pointer")
        return open_dataset(self.location)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._undo()

    def _undo(self) -> None:
        """Leave what was there before; what is published stays.

        The first error is the one to report, also where the disk refuses the removal too: hence the suppression.
        """
        with contextlib.suppress(Exception):
            check_fence()  # else what is there is another writer's by now
            before = self._base or self._replaces
            if before is None:
                # nor what was made by somebody else meanwhile
                if self._state != "complete" and destination.inspect(self.location) != "complete":
                    destination.clear(self.location, keep_folder=self._state == "empty")
                return
            found = open_dataset(self.location)
            if (found.version, found.num_rows) != (before.version, before.num_rows):
                return
            for name, rows in before.parts().items():
                if self._replaces is not None:
                    remove_array(join(self.location, destination.array_name(name, self._version)))
                    continue
                for number in range(rows.num_chunks, self._next):
                    rows.array.delete((number, 0))
                rows.save_shape()
                if self._has_ragged:
                    rows.write_chunk(self._first, rows.read(rows.span(self._first)[0], rows.num_rows))
