"""From any source of rows to a data set on disk, in one streamed pass.

Every value is looked at before it is stored, memory stays bounded by a few blocks of 16 MiB, and what fails leaves
nothing behind. Cost: one read of the source (two of the target column for ``one_hot``) and one write; SHA-256 and
column statistics are gathered on the way, at about the rate of a disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import destination
from dkrr.dataset.checks import FiniteCheck, WeightCheck
from dkrr.dataset.classes import OneHot
from dkrr.dataset.columns import Column, Layout, is_number, resolve, target_columns
from dkrr.dataset.dataset import Dataset, open_dataset
from dkrr.dataset.generations import Generation
from dkrr.dataset.rows import Floats
from dkrr.dataset.sources import Table, open_table
from dkrr.dataset.sources.text import Header
from dkrr.dataset.summary import RowSummary
from dkrr.dataset.writer import DatasetWriter
from dkrr.errors import DataError, ParameterError, StoreError, StoreMismatchError, check_whole
from dkrr.store.files import check_place, overlaps

__all__ = ["append", "fields_of", "ingest"]

Rows = tuple[Floats, Floats | None, Floats | None]
Missing = Literal["error", "drop"]

logger = logging.getLogger("dkrr.dataset")


def ingest(
    source: Any,
    dest: Any,
    *,
    target: Column | Sequence[Column] | None = None,
    features: Sequence[Column] | None = None,
    weight: Column | None = None,
    header: Header = "auto",
    delimiter: str | None = None,
    decimal: str = ".",
    missing: Missing = "error",
    one_hot: bool = False,
    classes: Sequence[Any] | None = None,
    append: bool = False,
    label: str | None = None,
    like: Dataset | None = None,
    y: Any = None,
    sample_weight: Any = None,
    rows_per_chunk: int | None = None,
    wait: bool = False,
) -> Dataset:
    """Write rows from any source into a data set.

    Parameters
    ----------
    source
        A path or s3:// address (.csv, .csv.gz, .parquet file or folder, .npy, Zarr format 3), ``sklearn:NAME``,
        ``generate:NAME?n=...``, a NumPy array or memory map, a pandas, dask or Zarr object, or a :class:`Dataset`. Of a
        folder of Parquet all files count, also those of subfolders, but none whose name begins
        with a dot or an underscore; a subfolder ``year=2019`` makes a column ``year``. Numbers become float64, so
        integers beyond 2^53 are rounded.
    dest
        Folder or URL of the data set.
    target
        Name or number of the target column, or a list of them; negative numbers count from the end. One column given
        without a list makes 1-D targets. None: the targets that the source itself has, if any.
    features
        Names or numbers; None means all columns that are neither target nor weight.
    weight
        Name or number of the column of sample weights.
    header
        Whether a CSV file begins with names; "auto" looks, and asks where the first line may be names or values.
    delimiter
        Of a CSV file; None means a comma, or a semicolon where ``decimal`` is a comma.
    decimal
        What stands before the fraction of a number in a CSV file, "." or ",".
    missing
        What to do with a row that lacks a value (NaN, null, or an empty field, NA, ?, -, nan or null in a text file) in
        one of the columns used: "error", or "drop" to leave it out. How many were dropped is logged, and which they
        were is kept in the generation: row numbers, and so masks and what is held out, count them.
    one_hot
        The target holds classes, numbers or text; it becomes one column of 0 and 1 a class.
    classes
        With ``one_hot``: the classes in their order, those of a fit; another label is an error. None: what occurs.
    append
        Add the rows to the data set at ``dest`` as a generation of their own, all or none; they must match it. Without
        ``target``, ``features`` and ``weight`` its own column names are looked up in the source.
    label
        What the generation is called. An append is done once under a label: the same rows again change nothing, while
        the generation is there.
    like
        Write what an append to this data set would add to one of its own, to look at it first; ``like`` is not changed.
    y : (n,) or (n, t), optional
        Targets given apart from the source.
    sample_weight : (n,), optional
        Weights given apart from the source.
    rows_per_chunk
        None chooses chunks of at most 4 MiB.
    wait
        Wait until another process that writes to ``dest`` has ended, instead of an error.

    Returns
    -------
    dataset
        A finished data set that is at ``dest`` already is returned when it holds the same rows.

    Raises
    ------
    DataError
        Values that are not finite numbers, with file, line, row and column; or shapes that do not fit.
    ParameterError
        Columns that do not exist.
    StoreError, StoreMismatchError
        ``source`` cannot be read, or ``dest`` holds something else.
    StorageFullError
        The disk is too small.
    LockedError
        Another process writes to ``dest``.
    """
    check_place("dest", dest)
    if rows_per_chunk is not None:
        check_whole("rows_per_chunk", rows_per_chunk, hint="leave it out")
    if label is not None and not (isinstance(label, str) and label):
        raise ParameterError(f"label is {label!r}; a text expected", hint="leave it out, or name the append")
    if append and like is not None:
        raise ParameterError(
            "append and like are given, which is an append to one of them", hint="leave one of them out"
        )
    origin = source.path if isinstance(source, Dataset) else source
    if all(isinstance(item, str | os.PathLike) for item in (origin, dest)) and overlaps(origin, dest):
        raise StoreError(f"{dest} and {origin} are, or hold, the same files", hint="choose another destination")
    if missing not in ("error", "drop"):
        raise ParameterError(f"missing is {missing!r}; 'error' or 'drop' expected", hint="leave it out for an error")
    state = destination.inspect(dest)  # what is not ours gets no lock beside it
    fitted = open_dataset(dest) if append and state == "complete" else like
    named = [target, features, weight, None if fitted is None else fitted.names]
    text: dict[str, Any] = {"header": header, "delimiter": delimiter, "decimal": decimal, "named": named}
    table = open_table(source, **text, y=y, sample_weight=sample_weight)
    wanted = _Wanted(target, features, weight, one_hot, classes, rows_per_chunk, label, like, missing == "drop")
    if state == "complete" and not append:
        return _write(table, dest, wanted, append=False)  # compares, and writes nothing
    with destination.writing(dest, wait=wait):
        return _write(table, dest, wanted, append=append)


def append(source: Any, dest: Any, **options: Any) -> Dataset:
    """``ingest(source, dest, append=True)``: add rows to a data set as one generation, all or none."""
    return ingest(source, dest, append=True, **options)


@dataclass(frozen=True)
class _Wanted:
    """What is asked of an ingest, besides the rows."""

    target: Column | Sequence[Column] | None
    features: Sequence[Column] | None
    weight: Column | None
    one_hot: bool
    classes: Sequence[Any] | None
    rows_per_chunk: int | None
    label: str | None
    like: Dataset | None
    drop: bool


def _write(table: Table, dest: Any, wanted: _Wanted, *, append: bool) -> Dataset:
    existing = open_dataset(dest) if destination.inspect(dest) == "complete" else None
    base = existing if append else None
    like = base or wanted.like
    target, features, weight, one_hot = wanted.target, wanted.features, wanted.weight, wanted.one_hot
    if base is not None:
        destination.clear_versions(dest, base.version)
    if like is not None:
        target, features, weight = _as_before(like, table, target, features, weight)
        one_hot = one_hot or (like.classes is not None and table.classes is None)
    layout = resolve(table, target=target, features=features, weight=weight)
    encoder = None
    if one_hot:
        if len(layout.targets) != 1:
            raise ParameterError(
                f"one_hot with {len(layout.targets)} target columns; one column of classes expected", hint="set target"
            )
        known = wanted.classes if like is None else like.classes
        used = [*layout.features, *(() if layout.weight is None else (layout.weight,))] if wanted.drop else None
        encoder = OneHot.of(table, layout.targets[0], used) if known is None else OneHot(known)
    fields = _fields(table, layout, encoder)
    if like is not None:
        _check_same_columns(like, table, layout, fields)
        fields = fields_of(like)
    dropped: list[NDArray[np.bool_]] | None = [] if wanted.drop else None
    rows = _rows(table, layout, encoder, dropped)
    if existing is not None and base is None:
        return _compare(existing, rows, fields)
    if base is not None:
        fields |= {"origin": base.origin}
        before = [generation for generation in base.generations if wanted.label and generation.label == wanted.label]
        if before:
            return _appended_before(base, before[0], table, rows)
    writer = DatasetWriter(dest, rows_per_chunk=wanted.rows_per_chunk, num_rows=table.num_rows, base=base, **fields)
    with writer:
        for X, Y, weights in rows:
            writer.add(X, Y, weights)
        return writer.commit(wanted.label, _all_dropped(table, dropped))


def _all_dropped(table: Table, dropped: list[NDArray[np.bool_]] | None) -> NDArray[np.bool_] | None:
    """Of all rows that the source was read from, which are not there: left out by it or just now."""
    if not dropped or table.dropped is None:
        return np.concatenate(dropped) if dropped else table.dropped
    result = table.dropped.copy()
    result[~table.dropped] = np.concatenate(dropped)
    return result


def _appended_before(base: Dataset, generation: Generation, table: Table, rows: Iterator[Rows]) -> Dataset:
    """``base`` if the source holds the rows of a generation that has its label; reads both, writes nothing."""
    position, is_same = generation.start, True
    for X, Y, weights in rows:
        stop = position + len(X)
        is_same = is_same and stop <= generation.n
        for name, part in (("X", X), ("y", Y), ("weight", weights)):
            if is_same and part is not None:
                is_same = np.array_equal(base.parts()[name].read(position, stop), part)
        position = stop
    if not is_same or position != generation.n:
        raise StoreMismatchError(
            f"generation {generation.number} of {base.path} is called {generation.label!r} and holds "
            f"{generation.num_rows:,} other rows than {table.label}",
            hint="give the append another label, or drop that generation first",
            fields=["label"],
        )
    return base


def _rows(
    table: Table, layout: Layout, encoder: OneHot | None, dropped: list[NDArray[np.bool_]] | None
) -> Iterator[Rows]:
    """Checked rows; after the first value that is not finite the rest is only counted, then reported.

    Where ``dropped`` is a list, rows with missing values are left out, and which they are is added to it.
    """
    label_column = layout.targets[0] if encoder is not None else None
    targets = () if encoder is not None else layout.targets
    columns = [*layout.features, *targets, *(() if layout.weight is None else (layout.weight,))]
    d, end = len(layout.features), len(layout.features) + len(targets)
    finite = FiniteCheck(table, columns[:end])
    weights = None if layout.weight is None else WeightCheck(table, table.names[layout.weight])
    row = 0
    num_dropped, first_dropped = 0, 0
    for values, labels in table.blocks(columns, label_column):
        kept: Any = slice(None)
        num_rows = len(values)
        if dropped is not None:
            gone: NDArray[np.bool_] = np.asarray(np.isnan(values).any(axis=1))
            if encoder is not None and labels is not None:
                gone |= np.array([encoder.is_missing(label) for label in labels], dtype=bool)
                labels = [encoder.classes[0] if gone[i] else label for i, label in enumerate(labels)]
            dropped.append(gone)
            if gone.any():
                first_dropped = first_dropped if num_dropped else row + int(np.argmax(gone))
                num_dropped += int(np.count_nonzero(gone))
                kept = ~gone
                values = np.where(gone[:, None], 0.0, values)  # looked at with the others, which keep their row numbers
        is_clean = finite.look(values[:, :end], row)
        if is_clean:
            if weights is not None:
                weights.look(values[:, end:], row)
            Y = values[:, d:end] if targets else None
            if encoder is not None and labels is not None:
                Y = encoder.encode(labels, table, layout.targets[0], row)
            values, Y = values[kept], None if Y is None else Y[kept]
            yield values[:, :d], Y, None if weights is None else values[:, end:]
        row += num_rows
    finite.finish()
    if row == 0:
        raise DataError(f"{table.label} has no rows", hint="check how it was made")
    if weights is not None:
        weights.finish()
    if num_dropped:
        where = table.locate(first_dropped) or f"row {first_dropped}"
        if num_dropped == row:
            raise DataError(
                f"all {row:,} rows of {table.label} have missing values, the first in {where}",
                hint="leave the column out with features=, or check the delimiter",
            )
        logger.warning(
            "%s of %s rows of %s have missing values and are left out, the first in %s",
            f"{num_dropped:,}",
            f"{row:,}",
            table.label,
            where,
        )


def _fields(table: Table, layout: Layout, encoder: OneHot | None) -> dict[str, Any]:
    """What a data set keeps besides its rows."""
    names = tuple(table.names[j] for j in layout.targets)
    classes = table.classes if encoder is None else encoder.classes
    if encoder is not None:
        names = tuple(f"{names[0]}={label}" for label in encoder.classes)
    made_up = [] if table.is_named else ["feature_names"]
    if not all(table.has_name(j) for j in layout.targets):
        made_up.append("target_names")
    return {
        "made_up": tuple(made_up),
        "feature_names": tuple(table.names[j] for j in layout.features),
        "target_names": names,
        "weight_name": None if layout.weight is None else table.names[layout.weight],
        "classes": classes,
        "y_is_1d": layout.y_is_1d and encoder is None,
    }


def fields_of(dataset: Dataset) -> dict[str, Any]:
    """What :class:`DatasetWriter` is told about columns, as a data set has them."""
    names = ("feature_names", "target_names", "weight_name", "classes", "y_is_1d", "made_up")
    return {name: getattr(dataset, name) for name in names}


def _as_before(base: Dataset, table: Table, target: Any, features: Any, weight: Any) -> tuple[Any, Any, Any]:
    """Columns of an append that are not given by name: those of the data set, found by name."""
    names = set(table.names)
    if _has_no_names(target, table) and table.target is None and base.num_targets:
        wanted = list(target_columns(base.target_names, base.classes))
        if (target is None or table.is_named) and names.issuperset(wanted):
            target = wanted[0] if base.y_is_1d else wanted
    if _has_no_names(weight, table) and table.weight is None and base.weight_name in names:
        weight = base.weight_name if weight is None or table.is_named else weight
    if _has_no_names(features, table) and table.is_named and names.issuperset(base.feature_names):
        features = list(base.feature_names)
    return target, features, weight


def _has_no_names(columns: Any, table: Table) -> bool:
    """Whether columns are not given, or by numbers: those are of another file, whose columns may stand elsewhere."""
    given = columns if isinstance(columns, Sequence) and not isinstance(columns, str) else [columns]
    return all(is_number(column, table.names) for column in given)


def _check_same_columns(base: Dataset, table: Table, layout: Layout, fields: dict[str, Any]) -> None:
    # arrays have no names of their own, so only their number of columns can be compared
    named = {"feature_names": table.is_named, "target_names": all(table.has_name(j) for j in layout.targets)}
    differing = []
    for name, noun in (("feature_names", "features"), ("target_names", "targets")):
        old, new = getattr(base, name), fields[name]
        if len(old) != len(new) or (named[name] and old != new):
            old_text, new_text = (f"{len(names)} ({', '.join(names[:8])})" for names in (old, new))
            differing.append(f"{noun}: {old_text} there, {new_text} given")
    old, new = base.weight_name, fields["weight_name"]
    if (base.weight is None) != (new is None):
        old_text, new_text = ("without" if name is None else "with" for name in (old, new))
        differing.append(f"{old_text} weights there, {new_text} given")
    elif layout.weight is not None and table.has_name(layout.weight) and old != new:
        differing.append(f"weights: {old} there, {new} given")
    if differing:
        raise DataError(
            f"{table.label} does not fit {base.path} ({'; '.join(differing)})",
            hint="append the same columns, chosen by target, features and weight; rename those that mean the same",
        )


def _compare(existing: Dataset, rows: Iterator[Rows], fields: dict[str, Any]) -> Dataset:
    """``existing`` if the source holds the same rows; reads the source, writes nothing."""
    differing = [
        f"{name}: {getattr(existing, name)!r} there, {value!r} wanted"
        for name, value in fields.items()
        if name != "made_up" and getattr(existing, name) != value
    ]
    if not differing:
        summaries = {name: RowSummary(array.num_columns, moments=False) for name, array in existing.parts().items()}
        for X, Y, weights in rows:
            for name, part in (("X", X), ("y", Y), ("weight", weights)):
                if part is not None:
                    summaries[name].add(part)
        for name, summary in summaries.items():
            if summary.num_rows != existing.num_rows:
                differing.append(f"rows: {existing.num_rows} there, {summary.num_rows} wanted")
                break
            if summary.digest() != existing.records[name]["digest"]:
                differing.append(f"digest of {name}: {existing.records[name]['digest'][:12]} there, another wanted")
    if differing:
        raise StoreMismatchError(
            f"{existing.path} exists with other rows ({'; '.join(differing)})",
            hint="add to it with append=True, remove it, or choose another destination",
            fields=differing,
        )
    return existing
