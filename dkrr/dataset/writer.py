"""Writing a data set as its rows stream past, in memory for one chunk an array.

Order on disk, for a new data set and for an append alike:

1. chunks, each one atomic write; the ragged chunk of finished rows gains rows but keeps its old ones,
2. the shape of each array,
3. the attributes of the group, which are what counts: a reader takes n from them.

A kill between any two steps leaves the finished rows as they were. The ragged chunk is replaced as a whole, by one
atomic step: a reader that has the old file mapped keeps it, one that opens the new one finds the old rows where they
were. So rows stay in one array that any Zarr reader can open, which they would not with an array for each append.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import numpy as np

from dkrr.dataset import destination
from dkrr.dataset.dataset import Dataset, Generation, Mask, fields_of, open_dataset, pack
from dkrr.dataset.rows import DIGEST_ROWS, Floats, RowArray, RowSummary, default_rows_per_chunk
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.store.files import join, remove_array, storage_errors
from dkrr.store.interruption import check_fence
from dkrr.store.lease import hold_lock


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
        self._number, self._row = (1, 0) if before is None else (before.next_generation, before.next_row)
        self.num_rows = 0  # so far, those of the base included
        if base is not None:
            self._chunk_rows, self.num_rows = base.X.rows_per_chunk, base.num_rows
        self._needed: int | None = None
        if num_rows is not None:
            chunk_bytes = sum(8 * self._chunk_rows * width + 4 for width in self._widths.values())
            self._needed = (-(-num_rows // self._chunk_rows) + 1) * chunk_bytes + (64 << 10)
        self._first, self._fill = divmod(self.num_rows, self._chunk_rows)  # number of a chunk, rows in the buffers
        self._next = self._first
        self._summaries = {name: RowSummary(width) for name, width in self._widths.items()}
        self._buffers: dict[str, Floats] = {}

    def __enter__(self) -> DatasetWriter:
        if self._needed is not None:
            destination.check_space(self.location, self._needed)
        try:
            with storage_errors(self.location, self._needed):
                if self._base is None and self._replaces is None:
                    destination.claim(self.location, self._state)
                self._buffers = {name: np.empty((self._chunk_rows, width)) for name, width in self._widths.items()}
                if self._base is not None:
                    tail = self._base.read_parts(self.num_rows // DIGEST_ROWS * DIGEST_ROWS, self.num_rows)
                    for name, rows in self._base.read_parts(self.num_rows - self._fill, self.num_rows).items():
                        self._summaries[name] = RowSummary.resume(self._base.records[name], tail[name])
                        self._buffers[name][: self._fill] = rows
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
        with storage_errors(self.location, self._needed):
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
            self._array(name).write_chunk(number, buffer[:rows])

    def mark(
        self,
        label: str | None = None,
        *,
        number: int | None = None,
        first_row: int | None = None,
        dropped: Mask | None = None,
    ) -> None:
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
            return
        found = Generation(
            number=self._number if number is None else number,
            n=self.num_rows,
            num_rows=added,
            digest=self._summaries["X"].digest(),
            first_row=self._row if first_row is None else first_row,
            label=label,
            dropped=pack(dropped) if dropped is not None and dropped.any() else None,
        )
        self._generations.append(found)
        self._number = max(self._number, found.number + 1)
        self._row = max(self._row, found.first_row + added + found.num_dropped)

    def commit(self, label: str | None = None, dropped: Mask | None = None) -> Dataset:
        """Finish the arrays, then publish them; rows that belong to no generation yet become one, see :meth:`mark`."""
        with storage_errors(self.location, self._needed):
            if self.num_rows == (0 if self._base is None else self._base.num_rows):
                raise DataError("no rows to write", hint="check that the source is not empty")
            if self._is_auto and self._next == 0:
                wanted = default_rows_per_chunk(max(self._widths.values()), self.num_rows)
                self._chunk_rows = min(wanted, self._chunk_rows)
            if self._fill:
                self._flush()
            for name in self._widths:
                array = self._array(name)
                array.save_shape()
                array.array.sync()
            self.mark(label, dropped=dropped)
            self._attributes |= {
                "complete": True,
                "num_rows": self.num_rows,
                "digest_rows": DIGEST_ROWS,
                "generations": [asdict(generation) for generation in self._generations],
                "next": {"generation": self._number, "row": self._row},
                "version": self._version,
                "arrays": {name: summary.to_dict() for name, summary in self._summaries.items()},
            }
            if self._replaces is not None or self._base is not None:
                is_replaced = self._replaces is not None
                self._attributes["earlier"] = destination.earlier_versions(self.location, replaced=is_replaced)
            destination.write_attributes(self.location, self._attributes)
        self._state = "complete"
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
            for name, array in before.parts().items():
                if self._replaces is not None:
                    remove_array(join(self.location, destination.array_name(name, self._version)))
                    continue
                for number in range(array.num_chunks, self._next):
                    array.array.delete((number, 0))
                array.save_shape()
                if self._first < min(self._next, array.num_chunks):  # a ragged chunk that was filled up
                    array.write_chunk(self._first, array.read(array.span(self._first)[0], array.num_rows))


# --- fewer rows -------------------------------------------------------------------------------------------------------


def drop_generations(dest: Any, numbers: Sequence[int]) -> Dataset:
    """Write a new version of a data set without some of its generations.

    Rows that are there are never moved, since somebody may be reading them. What is kept is copied to arrays of a new
    version, and one atomic replacement of the metadata makes that the data set. The arrays of each version before stay
    for an hour after it was replaced, for who began to read it, and are removed by the first append or new version
    after that. A kill at any moment leaves the old version.

    A fit of the new version reuses what it has in common with an earlier fit from the first row on: all rows before a
    generation that was dropped. A window that slides has no first rows in common, and its fit begins anew.

    Parameters
    ----------
    dest
        Folder or URL of a finished data set.
    numbers
        Numbers of generations, see :class:`~dkrr.dataset.Generation`; those that were dropped before are passed over,
        so that a drop that was interrupted can be repeated.

    Raises
    ------
    DataError
        A generation that never was there, or nothing is left.
    DamagedChunkError
        A chunk is damaged; nothing is changed.
    LockedError
        Another process writes to the data set.

    Cost
    ----
    Reads all rows to verify them, then reads and writes those that are kept; disk for all versions of the last hour.
    """

    def kept_from(dataset: Dataset) -> dict[int, int]:
        unknown = sorted(set(numbers) - set(range(1, dataset.next_generation)))
        if unknown:
            there = ", ".join(str(generation.number) for generation in dataset.generations)
            raise DataError(
                f"{dataset.path} never had a generation {unknown[0]}; it has {there}",
                hint="`dkrr info` lists the generations of a data set",
            )
        return {found.number: found.start for found in dataset.generations if found.number not in numbers}

    return _new_version(dest, kept_from)


def keep_last(dest: Any, *, generations: int | None = None, rows: int | None = None) -> Dataset:
    """Write a new version of a data set with its last generations or rows: a sliding window.

    Parameters
    ----------
    generations, rows
        How many; one of the two. Where there are no more, nothing changes.

    Raises
    ------
    ParameterError
        Not one of the two, or less than 1.
    DamagedChunkError, LockedError
        As for :func:`drop_generations`.
    """
    given = [value for value in (generations, rows) if value is not None]
    if len(given) != 1 or given[0] < 1:
        raise ParameterError(
            f"generations is {generations!r} and rows is {rows!r}; one of them, at least 1, expected",
            hint="say how many generations or rows shall stay",
        )

    def kept_from(dataset: Dataset) -> dict[int, int]:
        first = dataset.num_rows - rows if rows is not None else dataset.generations[-(generations or 1) :][0].start
        return {found.number: max(found.start, first) for found in dataset.generations if found.n > first}

    return _new_version(dest, kept_from)


def _new_version(dest: Any, kept_from: Callable[[Dataset], dict[int, int]]) -> Dataset:
    """A version with the generations of which ``kept_from`` says from which row on they stay."""
    if destination.inspect(dest) != "complete":
        raise StoreError(f"{dest} is not a finished data set", hint="ingest one first")
    with hold_lock(dest):
        dataset = open_dataset(dest)
        destination.clear_versions(dest, dataset.version)
        starts = kept_from(dataset)
        kept = [(found, starts[found.number]) for found in dataset.generations if found.number in starts]
        num_rows = sum(found.n - start for found, start in kept)
        if not num_rows:
            raise DataError(
                f"none of {dataset.num_rows:,} rows of {dataset.path} would be left",
                hint="keep at least one generation",
            )
        if num_rows == dataset.num_rows:
            return dataset
        dataset.verify()  # a damaged or exchanged chunk must not be copied under a digest of its own
        options: dict[str, Any] = {"rows_per_chunk": dataset.X.rows_per_chunk, "num_rows": num_rows}
        options |= {"replaces": dataset, "origin": dataset.origin}
        with DatasetWriter(dest, **options, **fields_of(dataset)) as writer:
            for found, start in kept:
                for first, last in dataset.X.blocks(first=start, end=found.n):
                    writer.add(**dataset.read_parts(first, last))
                skipped = int(np.flatnonzero(found.kept)[start - found.start])
                writer.mark(
                    found.label,
                    number=found.number,
                    first_row=found.first_row + skipped,
                    dropped=~found.kept[skipped:],
                )
            return writer.commit()
