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
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import destination
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.digests import DIGEST_ROWS
from dkrr.dataset.generations import Counters, Generation, pack
from dkrr.dataset.rows import Floats, RowArray, default_rows_per_chunk
from dkrr.dataset.summary import RowSummary
from dkrr.errors import DataError, LockedError, StoreError
from dkrr.store.failpoints import failpoint
from dkrr.store.files import join, remove_array
from dkrr.store.interruption import check_fence

__all__ = ["DatasetWriter"]


class _RowWriter:
    """One array of a data set that grows by rows."""

    def __init__(
        self,
        store: Any,
        path: str,
        num_columns: int,
        rows_per_chunk: int,
        base: RowArray | None,
        record: dict[str, Any] | None,
    ) -> None:
        self.array = base or RowArray.unsaved(
            store, path, num_rows=0, num_columns=num_columns, rows_per_chunk=rows_per_chunk
        )
        self.base = base
        self.num_rows = self.array.num_rows
        self.summary = RowSummary(num_columns)
        self._buffer = np.empty((rows_per_chunk, num_columns))
        self._old: Floats | None = None  # finished rows of the base's ragged chunk
        self._held: Floats | None = None  # that chunk, full, waiting for commit
        self._first_chunk = self.num_rows // rows_per_chunk
        self._next_chunk = self._first_chunk
        self._ragged_written = False
        if base is not None and record is not None:
            tail = self.num_rows // DIGEST_ROWS * DIGEST_ROWS
            self.summary = RowSummary.resume(record, base.read(tail, self.num_rows))
            start = self._first_chunk * rows_per_chunk
            if start < self.num_rows:
                self._old = base.read(start, self.num_rows)
                self._buffer[: len(self._old)] = self._old
        self._fill = self._fed = self.num_rows - self._first_chunk * rows_per_chunk

    @property
    def has_flushed(self) -> bool:
        return self._next_chunk > self._first_chunk

    def add(self, rows: Floats) -> None:
        position = 0
        while position < len(rows):
            taken = min(len(self._buffer) - self._fill, len(rows) - position)
            self._buffer[self._fill : self._fill + taken] = rows[position : position + taken]
            self._fill += taken
            position += taken
            self.num_rows += taken
            if self._fill == len(self._buffer):
                self.feed()
                self._flush()

    def feed(self) -> None:
        """Bring the summary up to the last row."""
        self.summary.add(self._buffer[self._fed : self._fill])
        self._fed = self._fill

    def shrink(self, rows_per_chunk: int) -> None:
        """Smaller chunks, while none has been written."""
        self._buffer = self._buffer[:rows_per_chunk]
        store, path = self.array.array.store, self.array.array.path
        self.array = RowArray.unsaved(
            store, path, num_rows=0, num_columns=self.summary.num_columns, rows_per_chunk=rows_per_chunk
        )

    def finish(self) -> None:
        """Write what is left, and the shape."""
        self.feed()
        if self._fill:
            self._flush()
        if self._held is not None:
            self._ragged_written = True
            self.array.with_rows(self.num_rows).write_chunk(self._first_chunk, self._held)
            self._held = None
        self.array = self.array.with_rows(self.num_rows)
        stale = self.array.num_chunks  # an append that was killed may have come further than this one
        while self.array.array.is_valid((stale, 0)):
            self.array.array.delete((stale, 0))
            stale += 1
        self.array.save_shape()
        self.array.array.sync()

    def undo(self) -> None:
        """Leave the base as it was (a data set that did not exist before is removed whole instead)."""
        if self.base is None:
            return
        kept = self._first_chunk + (self._old is not None)
        for i in range(kept, self._next_chunk):
            self.base.array.delete((i, 0))
        self.base.save_shape()
        if self._ragged_written and self._old is not None:
            self.base.write_chunk(self._first_chunk, self._old)

    def _flush(self) -> None:
        rows = self._buffer[: self._fill]
        number = self._next_chunk
        self._next_chunk += 1  # before the write: a write that fails may have left its chunk all the same
        if number == self._first_chunk and self._old is not None:
            self._held = rows.copy()
        else:
            self.array.with_rows(self.num_rows).write_chunk(number, rows)
        self._fill = self._fed = 0


class DatasetWriter:
    """Context manager that writes a data set, or appends to one; leaves nothing behind when its block fails.

    Parameters
    ----------
    location
        Folder or URL.
    feature_names, target_names, weight_name, classes, y_is_1d, made_up
        As in :class:`~dkrr.dataset.Dataset`.
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
        feature_names: Sequence[str],
        target_names: Sequence[str] = (),
        weight_name: str | None = None,
        classes: Sequence[Any] | None = None,
        y_is_1d: bool = False,
        made_up: Sequence[str] = (),
        rows_per_chunk: int | None = None,
        num_rows: int | None = None,
        base: Dataset | None = None,
        replaces: Dataset | None = None,
        origin: dict[str, Any] | None = None,
    ) -> None:
        self.location = location
        self._state = destination.inspect(location)
        if base is None and replaces is None and self._state == "complete":
            raise StoreError(f"{location} is a finished data set", hint="append to it, or choose another destination")
        self._base, self._replaces = base, replaces
        before = base or replaces
        self._version = 1 if before is None else before.version + (replaces is not None)
        widths = {"X": len(feature_names), "y": len(target_names), "weight": 0 if weight_name is None else 1}
        self._widths = {name: width for name, width in widths.items() if width}
        self._is_auto = base is None and rows_per_chunk is None
        if base is not None:
            rows = base.X.rows_per_chunk
        else:
            rows = rows_per_chunk or default_rows_per_chunk(max(self._widths.values()), num_rows)
        self._attributes: dict[str, Any] = {
            "feature_names": list(feature_names),
            "target_names": list(target_names),
            "weight_name": weight_name,
            "classes": None if classes is None else list(classes),
            "y_is_1d": y_is_1d,
            "made_up": list(made_up),
            "origin": origin,
        }
        self._generations = list(base.generations) if base is not None else []
        self._counters = Counters(generation=1, row=0) if before is None else before.counters
        self._rows_per_chunk = rows
        self._needed: int | None = None
        if num_rows is not None:
            chunks = -(-num_rows // rows) + 1
            self._needed = sum(chunks * (8 * rows * width + 4) for width in self._widths.values()) + (64 << 10)
        self._writers: dict[str, _RowWriter] = {}

    @property
    def num_rows(self) -> int:
        """Rows so far, those of the base included."""
        return self._writers["X"].num_rows

    def __enter__(self) -> DatasetWriter:
        if self._needed is not None:
            destination.check_space(self.location, self._needed)
        try:
            with destination.storage_errors(self.location, self._needed):
                if self._base is None and self._replaces is None:
                    if self._state == "unfinished":
                        destination.clear(self.location, keep_folder=True)
                    destination.mark_unfinished(self.location, self._state)
                for name, width in self._widths.items():
                    base = self._base.parts()[name] if self._base is not None else None
                    record = self._base.records[name] if self._base is not None else None
                    rows = self._rows_per_chunk
                    path = destination.array_name(name, self._version)
                    self._writers[name] = _RowWriter(self.location, path, width, rows, base, record)
        except BaseException:
            self._undo()
            raise
        return self

    def add(self, X: Floats, y: Floats | None = None, weight: Floats | None = None) -> None:
        """Take the next rows: X (m, d), y (m, t), weight (m, 1); finite, as the caller has checked."""
        with destination.storage_errors(self.location, self._needed):
            for name, rows in (("X", X), ("y", y), ("weight", weight)):
                if (rows is not None) != (name in self._writers):
                    raise ValueError(f"{name} is {'not ' if name in self._writers else ''}expected")
                if rows is not None:
                    self._writers[name].add(rows)

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
        writer = self._writers["X"]
        writer.feed()
        before = self._generations[-1].n if self._generations else 0
        added = writer.num_rows - before
        if not added:
            return None
        found = Generation(
            number=self._counters.generation if number is None else number,
            n=writer.num_rows,
            num_rows=added,
            digest=writer.summary.digest(),
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
            before = self._base.num_rows if self._base is not None else 0
            if self.num_rows == before:
                raise DataError("no rows to write", hint="check that the source is not empty")
            if self._is_auto and not any(writer.has_flushed for writer in self._writers.values()):
                rows = default_rows_per_chunk(max(self._widths.values()), self.num_rows)
                for writer in self._writers.values():
                    writer.shrink(min(rows, self._rows_per_chunk))
            for writer in self._writers.values():
                writer.finish()
            self.mark(label, dropped=dropped)
            self._attributes |= {
                "complete": True,
                "num_rows": self.num_rows,
                "digest_rows": DIGEST_ROWS,
                "generations": [generation.to_dict() for generation in self._generations],
                "next": asdict(self._counters),
                "version": self._version,
                "arrays": {name: writer.summary.to_dict() for name, writer in self._writers.items()},
            }
            if self._replaces is not None or self._base is not None:
                is_new = self._replaces is not None
                self._attributes["earlier"] = destination.earlier_versions(self.location, replaced=is_new)
            failpoint("dataset.before_pointer")
            destination.write_attributes(self.location, self._attributes)
        self._writers = {}
        self._state = "complete"
        failpoint("dataset.after_pointer")
        return open_dataset(self.location)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._undo()

    def _undo(self) -> None:
        # the first error is the one to report, also where the disk refuses the removal too: hence the suppressions
        try:
            check_fence()
        except LockedError:
            return  # what is there is another writer's by now
        if self._replaces is not None:
            with contextlib.suppress(Exception):
                if open_dataset(self.location).version == self._replaces.version:
                    for name in self._widths:
                        remove_array(join(self.location, destination.array_name(name, self._version)))
            return
        if self._base is None:
            if self._state != "complete":
                with contextlib.suppress(Exception):
                    if destination.inspect(self.location) != "complete":  # nor made by somebody else meanwhile
                        destination.clear(self.location, keep_folder=self._state == "empty")
            return
        with contextlib.suppress(Exception):
            if open_dataset(self.location).num_rows != self._base.num_rows:
                return  # published before the error: the new rows count, taking them back would break the data set
        for writer in self._writers.values():
            with contextlib.suppress(Exception):
                writer.undo()
