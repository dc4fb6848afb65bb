"""Fewer rows: a data set without a generation, or with its last generations or rows only.

Rows that are there are never moved, since somebody may be reading them. What is kept is copied to arrays of a new
version, and one atomic replacement of the metadata makes that the data set. The arrays of each version before stay for
an hour after it was replaced, for who began to read it, and are removed by the first append or new version after that.
A kill at any moment leaves the old version.

A fit of the new version reuses what it has in common with an earlier fit from the first row on: all rows before a
generation that was dropped. A window that slides has no first rows in common, and its fit begins anew.

Cost
----
Reads all rows to verify them, then reads and writes those that are kept; disk for all versions of the last hour.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dkrr.dataset import destination
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.generations import Generation
from dkrr.dataset.ingest import fields_of
from dkrr.dataset.writer import DatasetWriter
from dkrr.errors import DataError, ParameterError, StoreError

__all__ = ["drop_generations", "keep_last"]

Kept = tuple[Generation, int, int]
"""A generation and which of the data set's rows stay of it, from ``start`` to ``stop``."""


def drop_generations(dest: Any, numbers: Sequence[int]) -> Dataset:
    """Write a new version of a data set without some of its generations.

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
    """
    wanted = set(numbers)

    def choose(dataset: Dataset) -> list[Kept]:
        known = range(1, dataset.counters.generation)
        unknown = sorted(wanted - set(known))
        if unknown:
            there = ", ".join(str(generation.number) for generation in dataset.generations)
            raise DataError(
                f"{dataset.path} never had a generation {unknown[0]}; it has {there}",
                hint="`dkrr info` lists the generations of a data set",
            )
        return [(found, found.start, found.n) for found in dataset.generations if found.number not in wanted]

    return _new_version(dest, choose)


def keep_last(dest: Any, *, generations: int | None = None, rows: int | None = None) -> Dataset:
    """Write a new version of a data set with its last generations or rows: a sliding window.

    Parameters
    ----------
    generations, rows
        How many; one of the two. Where there are no more, nothing changes.

    Raises
    ------
    ParameterError
        None or both of them, or less than one.
    DataError, DamagedChunkError, LockedError
        See :func:`drop_generations`.
    """
    given = [count for count in (generations, rows) if count is not None]
    if len(given) != 1 or isinstance(given[0], bool) or given[0] < 1:
        raise ParameterError(
            f"generations is {generations!r} and rows is {rows!r}; one of them, at least 1, expected",
            hint="say how many generations or rows shall stay",
        )

    def choose(dataset: Dataset) -> list[Kept]:
        if generations is not None:
            return [(found, found.start, found.n) for found in dataset.generations[-generations:]]
        first = max(0, dataset.num_rows - (rows or 0))
        return [(found, max(found.start, first), found.n) for found in dataset.generations if found.n > first]

    return _new_version(dest, choose)


def _new_version(dest: Any, choose: Callable[[Dataset], list[Kept]]) -> Dataset:
    if destination.inspect(dest) != "complete":
        raise StoreError(f"{dest} is not a finished data set", hint="ingest one first")
    with destination.writing(dest):
        dataset = open_dataset(dest)
        destination.clear_versions(dest, dataset.version)
        kept = choose(dataset)
        num_rows = sum(stop - start for _, start, stop in kept)
        if not num_rows:
            raise DataError(
                f"none of {dataset.num_rows:,} rows of {dataset.path} would be left",
                hint="keep at least one generation",
            )
        if num_rows == dataset.num_rows:
            return dataset
        dataset.verify()  # a damaged or exchanged chunk must not be copied under a digest of its own
        writer = DatasetWriter(
            dest,
            **fields_of(dataset),
            rows_per_chunk=dataset.X.rows_per_chunk,
            num_rows=num_rows,
            replaces=dataset,
            origin=dataset.origin,
        )
        with writer:
            for generation, start, stop in kept:
                for first, last in dataset.X.blocks(first=start, end=stop):
                    writer.add(**dataset.read_parts(first, last))
                skipped = int(np.flatnonzero(generation.kept)[start - generation.start])
                writer.mark(
                    generation.label,
                    number=generation.number,
                    first_row=generation.first_row + skipped,
                    dropped=~generation.kept[skipped:],
                )
            return writer.commit()
