"""Where a data set is written, and how: created, appended to, or written anew without some rows, with one commit.

Rows stream past, in memory for one chunk an array. Order on disk, for a new data set and for an append alike:

1. chunks, each one atomic write; the ragged chunk of finished rows gains rows but keeps its old ones,
2. the shape of each array,
3. the attributes of the group, which are what counts: a reader takes n from them.

A kill between any two steps leaves the finished rows as they were. The ragged chunk is replaced as a whole, by one
atomic step: a reader that has the old file mapped keeps it, one that opens the new one finds the old rows where they
were. So rows stay in one array that any Zarr reader can open, which they would not with an array for each append. What
does not count, whoever left it and why, is removed by :func:`tidy`; what is not ours is never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from numbers import Integral
from typing import Any

import numpy as np

from dkrr.dataset.dataset import (
    FORMAT,
    FORMAT_VERSION,
    Dataset,
    Generation,
    Mask,
    array_name,
    attributes_of,
    checksum_of,
    fields_of,
    open_dataset,
    pack,
    state_of,
)
from dkrr.dataset.rows import DIGEST_ROWS, Floats, RowArray, RowSummary, damaged, default_rows_per_chunk
from dkrr.errors import DataError, LockedError, ParameterError, StoreError
from dkrr.store.files import (
    check_space,
    children,
    delete_key,
    is_url,
    join,
    local_root,
    parent_of,
    read_json,
    remove_array,
    remove_drafts,
    storage_errors,
    write_json,
)
from dkrr.store.interruption import check_fence, fenced
from dkrr.store.lease import hold_lock

# readers that have opened a data set go on with its rows for so long after a new version has replaced them
KEPT_SECONDS = 3600.0

_ARRAY = re.compile(r"(X|y|weight)(?:-([1-9]\d*))?")
_PARTIAL = re.compile(r"zarr\.json\.[0-9a-f]{32}\.partial")


def is_finished(location: Any) -> bool:
    """Whether a finished data set is at ``location``; otherwise it can be written there.

    Raises
    ------
    StoreError
        Something that is not a data set of dkrr, a place inside of something of dkrr, a missing parent folder, or no
        permission.
    """
    root = local_root(location)
    with storage_errors(location):
        if root is not None and not root.parent.is_dir():
            raise StoreError(f"{root.parent} is not a folder, so {root} cannot be written", hint="create it first")
        if root is not None and os.path.lexists(root) and not root.is_dir():
            raise StoreError(f"{root} exists and is not a folder", hint="choose another destination")
        names = children(location)
        attributes = attributes_of(location) if "zarr.json" in names else None
    if attributes is not None:
        return attributes.get("complete") is True
    if not all(_PARTIAL.fullmatch(name) for name in names):  # of one killed before its first file was complete
        raise StoreError(f"{location} exists and is not a data set of dkrr", hint="choose another destination")
    check_outside(location)
    return False


def check_outside(location: Any) -> None:
    """Refuse to write inside a model, a version of one, a data set or an array of a store, which hold nothing else.

    Raises
    ------
    StoreError
        Names what ``location`` lies in.
    """
    folder = str(location) if is_url(location) else os.path.realpath(location)
    while (above := parent_of(folder)) != folder:
        folder = above
        try:
            documents = [read_json(folder, name) or {} for name in ("zarr.json", "version.json")]
        except (OSError, StoreError):  # of somebody else, or not ours to look at
            if is_url(folder):
                return
            continue
        group, version = (found if isinstance(found, dict) else {} for found in documents)
        attributes = group.get("attributes") or {}
        is_ours = "dkrr_format" in attributes or "rows_digest" in attributes or attributes.get("format") == "dkrr-model"
        if is_ours or version.get("format") == "dkrr-model-version":
            raise StoreError(
                f"{location} lies in {folder}, which dkrr wrote and which must hold nothing else",
                hint="choose a place outside of it",
            )


def _earlier_versions(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    """The versions before the present one that somebody may still read, the oldest first.

    Each is plain JSON: "version", "replaced_at" (seconds since 1970), and "attributes", what the group said of it.
    """
    found = attributes.get("earlier", [])
    return [item for item in found if time.time() - float(item["replaced_at"]) < KEPT_SECONDS]


def tidy(location: Any) -> None:
    """Remove what counts for nobody of a data set, which the caller has locked.

    Of a finished one that is what writes that failed or were killed have left, and versions that were replaced over an
    hour ago; of one that was never finished it is all that dkrr wrote, and then the folder, if it is empty.
    """
    attributes = attributes_of(location) or {}  # of nobody yet: nothing there is ours but drafts of this document
    is_complete, root = attributes.get("complete") is True, local_root(location)
    kept = {attributes["version"], *(item["version"] for item in _earlier_versions(attributes))} if is_complete else ()
    for name in filter(_ARRAY.fullmatch, children(location) if attributes else ()):
        if int(name.partition("-")[2] or 1) not in kept:
            remove_array(join(location, name))
    remove_drafts(location)
    if not is_complete:
        if attributes:  # which go last: an interrupted removal must still be recognised as ours
            delete_key(location, "zarr.json")
        if root is not None:
            with contextlib.suppress(OSError):  # absent, or something of others is there
                root.rmdir()
        return
    for array in open_dataset(location).parts().values():
        for name in children(join(array.array.location, "c")):
            if name.isdecimal() and int(name) >= array.num_chunks:
                array.array.delete((int(name), 0))
        array.save_shape()


def remove_dataset(location: Any) -> None:
    """Remove what is at a place; of a data set its metadata last: what a kill leaves is made anew, not refused."""
    with contextlib.suppress(StoreError):  # whatever else is there
        if attributes_of(location):
            document = read_json(location, "zarr.json") or {}
            document["attributes"]["complete"] = False
            write_json(location, "zarr.json", document)
            tidy(location)
    remove_array(location)


class DatasetWriter:
    """Writes a data set, of which the caller holds the lock; see :func:`writing`.

    Parameters
    ----------
    location
        Folder or URL.
    fields
        feature_names, target_names, weight_name, classes, y_is_1d, made_up and places of
        :class:`~dkrr.dataset.Dataset`.
    rows_per_chunk
        None chooses chunks of at most 4 MiB.
    num_rows
        Rows to come, where known: then the disk is checked before anything is written.
    before
        The data set that is there, to append to.
    anew
        Write its next version instead, which replaces it.
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
        before: Dataset | None = None,
        anew: bool = False,
        origin: dict[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.location, self._before, self._base = location, before, None if anew else before
        self._attributes = {**fields, "origin": origin}
        self._version = 1 if before is None else before.version + anew
        widths = (len(fields["feature_names"]), len(fields["target_names"]), int(fields["weight_name"] is not None))
        self._widths = {name: width for name, width in zip(("X", "y", "weight"), widths, strict=True) if width}
        self._is_auto = self._base is None and rows_per_chunk is None
        self._chunk_rows = rows_per_chunk or default_rows_per_chunk(max(widths), num_rows)
        self._number, self._row = (1, 0) if before is None else (before.next_generation, before.next_row)
        self._generations, self.num_rows = list[Generation](), 0  # so far, those of before included
        if self._base is not None:
            self._chunk_rows, self.num_rows = self._base.X.rows_per_chunk, self._base.num_rows
            self._generations += self._base.generations
        self.needed: int | None = None
        if num_rows is not None:
            chunk_bytes = sum(8 * self._chunk_rows * width + 4 for width in self._widths.values())
            self.needed = (-(-num_rows // self._chunk_rows) + 1) * chunk_bytes + (64 << 10)
        self._next = self.num_rows // self._chunk_rows  # number of the chunk that is written next
        # its rows so far
        self._held = {name: np.empty((0, width)) for name, width in self._widths.items()}
        self._summaries = {name: RowSummary(width) for name, width in self._widths.items()}

    def begin(self) -> None:
        """Make the place ours, or go on behind the rows that are there."""
        with storage_errors(self.location, self.needed):
            tidy(self.location)  # what an interrupted run left
            if self._before is None:
                self._write_attributes({"complete": False})
            if self._base is not None:
                first = self.num_rows // DIGEST_ROWS * DIGEST_ROWS
                tail = self._base.read_parts(first, self.num_rows)
                self._held = self._base.read_parts(self._next * self._chunk_rows, self.num_rows)
                self._summaries = {name: RowSummary.resume(self._base.records[name], tail[name]) for name in tail}
                for name, array in self._base.parts().items():
                    if self._summaries[name].digest() != self._base.records[name]["digest"]:
                        reason = f"the digest of rows from {first} on differs"
                        hint = "restore it, or ingest the source again"
                        raise damaged(array.array, min(first, self.num_rows - 1) // self._chunk_rows, reason, hint)

    def _write_attributes(self, attributes: dict[str, Any]) -> None:
        """Replace the attributes of the group, atomically and durably."""
        attributes = {"dkrr_format": FORMAT, "format_version": FORMAT_VERSION, **attributes}
        attributes["checksum"] = checksum_of(attributes)
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        write_json(self.location, "zarr.json", document, durable=True)

    def add(self, **rows: Floats) -> None:
        """Take the next rows: X (m, d), and as the data set has them y (m, t) and weight (m, 1).

        They are finite, as the caller has checked.
        """
        with storage_errors(self.location, self.needed):
            start, end = 0, len(rows["X"])
            while start < end:  # a chunk at a time: a block of a source is many, and is in memory already
                stop = min(end, start + self._chunk_rows - len(self._held["X"]))
                self.num_rows += stop - start
                for name, part in rows.items():
                    self._summaries[name].add(part[start:stop])
                    held = [self._held[name], part[start:stop]]
                    self._held[name] = np.concatenate(held) if len(held[0]) else held[1]
                if len(self._held["X"]) == self._chunk_rows:
                    self._write(self._held)
                    self._held = {name: part[:0] for name, part in self._held.items()}
                start = stop
            self._held = {name: np.array(part) for name, part in self._held.items()}  # else all of the block stays

    def _array(self, name: str) -> RowArray:
        shape = {"num_rows": self.num_rows, "num_columns": self._widths[name], "rows_per_chunk": self._chunk_rows}
        return RowArray.unsaved(self.location, array_name(name, self._version), **shape)

    def _write(self, rows: dict[str, Floats]) -> None:
        for name, part in rows.items():
            self._array(name).write_chunk(self._next, part)
        self._next += 1

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
        with storage_errors(self.location, self.needed):
            if self.num_rows == (0 if self._base is None else self._base.num_rows):
                raise DataError("no rows to write", hint="check that the source is not empty")
            if self._is_auto and self._next == 0:
                wanted = default_rows_per_chunk(max(self._widths.values()), self.num_rows)
                self._chunk_rows = min(wanted, self._chunk_rows)
            if len(self._held["X"]):
                self._write(self._held)
            for name in self._widths:
                array = self._array(name)
                array.save_shape()
                array.array.sync()
            self.mark(label, dropped=dropped)
            found = attributes_of(self.location) or {}
            if self._before is not self._base:  # what is there is replaced
                replaced = {name: value for name, value in found.items() if name != "earlier"}
                replaced = {"version": replaced["version"], "replaced_at": time.time(), "attributes": replaced}
                found["earlier"] = [*found.get("earlier", []), replaced]
            self._attributes |= {
                "complete": True,
                "num_rows": self.num_rows,
                "digest_rows": DIGEST_ROWS,
                "generations": [asdict(generation) for generation in self._generations],
                "next": {"generation": self._number, "row": self._row},
                "version": self._version,
                "arrays": {name: summary.to_dict() for name, summary in self._summaries.items()},
                "earlier": _earlier_versions(found),
            }
            self._write_attributes(self._attributes)
        return open_dataset(self.location)


@contextlib.contextmanager
def _in_place(location: Any) -> Iterator[None]:
    """No write in the block becomes visible once the folder has been moved or removed, or holds another data set.

    Of objects, which nobody moves in one step, nothing is asked.
    """
    before = state_of(location)

    def check() -> None:
        if state_of(location) != before:
            raise LockedError(
                f"{location} was moved, removed or replaced while rows were written to it",
                hint="look what is there, and start again",
            )

    with fenced(check):
        yield


@contextlib.contextmanager
def writing(location: Any, **options: Any) -> Iterator[DatasetWriter]:
    """A :class:`DatasetWriter` with these options that leaves nothing behind when its block fails."""
    writer = DatasetWriter(location, **options)
    if writer.needed is not None:
        check_space(location, writer.needed)
    if options.get("before") is None and is_finished(location):
        raise StoreError(f"{location} was made by somebody else meanwhile", hint="look what is there")
    try:
        writer.begin()
        with contextlib.nullcontext() if options.get("before") else _in_place(location):  # see claimed
            yield writer
    except BaseException:
        # the first error is the one to report, also where the disk refuses the removal too
        with contextlib.suppress(Exception):
            check_fence()  # else what is there is another writer's by now
            tidy(location)
        raise


@contextlib.contextmanager
def claimed(location: Any, *, wait: bool = False, to_change: bool = False) -> Iterator[Dataset | None]:
    """The finished data set at ``location``, or None; with its lock, where it is to be written or changed.

    Raises
    ------
    LockedError
        Another process writes there; with ``wait`` it is waited for.
    StoreError
        As for :func:`is_finished`.
    """
    with contextlib.ExitStack() as stack:
        if to_change or not is_finished(location):  # what is not ours gets no lock beside it
            stack.enter_context(hold_lock(location, wait=wait))
        if is_finished(location):
            stack.enter_context(_in_place(location))  # before it is opened
            yield open_dataset(location)
        else:
            yield None


# --- fewer rows -------------------------------------------------------------------------------------------------------


def drop_generations(dest: Any, numbers: Iterable[int]) -> Dataset:
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

    wanted: set[Any] = set(numbers)
    if wrong := [number for number in wanted if isinstance(number, bool) or not isinstance(number, Integral)]:
        raise ParameterError(f"generation {wrong[0]!r}; whole numbers expected", hint="`dkrr info` lists them")

    def kept_from(dataset: Dataset) -> dict[int, int]:
        check_generations(dataset, wanted)
        return {found.number: found.start for found in dataset.generations if found.number not in wanted}

    return _new_version(dest, kept_from)


def check_generations(dataset: Dataset, numbers: Iterable[int]) -> None:
    """Refuse numbers of generations that a data set never had.

    Raises
    ------
    DataError
        One of them.
    """
    unknown = sorted(set(numbers) - set(range(1, dataset.next_generation)))
    if unknown:
        there = ", ".join(str(generation.number) for generation in dataset.generations)
        raise DataError(
            f"{dataset.path} never had a generation {unknown[0]}; it has {there}",
            hint="`dkrr info` lists the generations of a data set",
        )


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
    open_dataset(dest)  # or an error
    with claimed(dest, to_change=True) as dataset:
        assert dataset is not None  # noqa: S101  (narrows the type)
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
        options: dict[str, Any] = {"rows_per_chunk": dataset.X.rows_per_chunk, "num_rows": num_rows}
        options |= {"before": dataset, "anew": True, "origin": dataset.origin}
        with writing(dest, **options, **fields_of(dataset)) as writer:
            dataset.verify()  # a damaged or exchanged chunk must not be copied under a digest of its own
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
