"""Predictions from their array to a file: .zarr, .npy, .parquet or .csv, a block of rows at a time.

Beside each output stands ``OUTPUT.json``, its stamp: which model made it, of which rows, and the SHA-256 of the file,
or of all that is in the folder. An output is replaced when this is still what stands there; anything else belongs to
somebody, and stays.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dkrr._version import __version__
from dkrr.dataset import RowArray
from dkrr.dataset.destination import check_outside, storage_errors
from dkrr.dataset.sources import Table
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.jobs.runs.directory import utc_now
from dkrr.store.documents import content_digest
from dkrr.store.failpoints import failpoint
from dkrr.store.files import (
    children,
    is_url,
    local_root,
    name_of,
    overlaps,
    parent_of,
    put_back,
    put_in_place,
    read_json,
    remove_array,
    sibling,
    write_json,
)
from dkrr.store.interruption import check_fence
from dkrr.store.objects import put_file

__all__ = ["Beside", "check_output", "export_predictions", "work_of"]

ENDINGS = (".zarr", ".npy", ".parquet", ".csv")
_WORK = re.compile(
    r"(?:data\.zarr|result\.zarr|version\.json)(?:\.lock)?(?:\.[0-9a-f]{32}\.partial)?"
    r"|\.dkrr-probe-[0-9a-f]{32}(?:\.partial)?|export-[a-z0-9_]{8}"
)


def work_of(output: str) -> str:
    """Where predictions are kept until they are complete: a folder beside the output."""
    return sibling(output, ".work")


def check_output(output: str, inputs: Iterable[str] = (), *, overwrite: bool = False) -> str | None:
    """Refuse an output that would take the place of something else; what is replaced is known by its digest.

    Parameters
    ----------
    inputs
        What the predictions are made from, which they never replace.
    overwrite
        Whether anything else may be replaced.

    Returns
    -------
    digest
        Of dkrr's predictions there, see :func:`~dkrr.store.documents.content_digest`; None where there are none.

    Raises
    ------
    ParameterError
        An ending that is none of .zarr, .npy, .parquet, .csv.
    StoreError
        The output is an input, something that dkrr did not write as predictions, or inside of something that it wrote.
    """
    ending = Path(name_of(output)).suffix
    if ending not in ENDINGS:
        raise ParameterError(f"{output} ends in {ending!r}; one of {', '.join(ENDINGS)} expected", hint="rename it")
    check_outside(output)
    stamp, work = sibling(output, ".json"), work_of(output)
    for source in inputs:
        for place in (output, stamp, work):
            if overlaps(place, source):
                raise StoreError(
                    f"{output} would be written over {source}, which the predictions are made from",
                    hint="give the predictions a name and a folder of their own",
                )
    is_foreign = not is_url(work) and os.path.lexists(work) and not os.path.isdir(work)
    if is_foreign or any(not _WORK.fullmatch(name) for name in children(work)):
        raise StoreError(
            f"{work}, where predictions are kept until they are complete, holds something else",
            hint="move it away, or choose another output",
        )
    if not is_url(output):
        put_back(Path(output))
    said = _stamp_at(stamp)
    if said == {} and not overwrite:
        raise _foreign(stamp)
    digest = content_digest(output)
    if digest is None or (said and (said.get("unfinished") or digest in (said["sha256"], said["replaced"]))):
        return digest
    if not overwrite:
        raise _foreign(output)
    return None  # what is replaced once by --overwrite does not become predictions by that


def _stamp_at(location: str) -> dict[str, Any] | None:
    """The stamp beside an output; None where nothing is, an empty one where something else is."""
    try:
        said = read_json(parent_of(location), name_of(location))
    except (StoreError, OSError):
        return {}
    if said is None or (isinstance(said, dict) and {"dkrr", "sha256", "replaced"} <= said.keys()):
        return said
    return {}


def _foreign(location: str) -> StoreError:
    return StoreError(
        f"{location} is there, and not as dkrr wrote it as predictions",
        hint="choose another output, or replace it with --overwrite",
    )


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What stands beside the numbers of predictions.

    Parameters
    ----------
    source, keep
        Columns of the rows that were predicted, copied as they stand into .csv and .parquet, in front of the numbers.
    label, classes
        Of scores, the first columns: the class of the largest one is a last column of this name in .csv and .parquet.
        The stamp has the classes in the order of the scores.
    """

    source: Table | None = None
    keep: tuple[int, ...] = ()
    label: str = ""
    classes: tuple[Any, ...] = ()

    @property
    def names(self) -> list[str]:
        """Of the columns that are kept."""
        return [] if self.source is None else [self.source.names[column] for column in self.keep]


def export_predictions(
    predictions: RowArray,
    output: str,
    names: list[str],
    *,
    y_is_1d: bool,
    stamp: dict[str, Any] | None = None,
    overwrite: bool = False,
    beside: Beside | None = None,
) -> None:
    """Write predictions (m, t) to ``output``, which appears whole or not at all, and their stamp beside it.

    Raises
    ------
    ParameterError, StoreError
        See :func:`check_output`.
    DataError
        The source of columns that are kept has another number of rows.
    """
    beside = beside or Beside()
    names = names or [f"prediction_{column}" for column in range(predictions.num_columns)]
    replaced = check_output(output, overwrite=overwrite)
    writers = {".zarr": _zarr, ".npy": _npy, ".parquet": _parquet, ".csv": _csv}
    ending = Path(name_of(output)).suffix
    said = {**(stamp or {}), "dkrr": __version__, "predicted_at": utc_now(), "replaced": replaced}
    if beside.classes:
        said["classes"] = list(beside.classes)
    if is_url(output) and ending == ".zarr":
        # objects take the place of others one by one: until all are there the stamp holds for any of them
        _put_stamp(output, said | {"sha256": None, "unfinished": True})
        _zarr_objects(predictions, output)
        _put_stamp(output, said | {"sha256": content_digest(output)})
        return
    work = None if is_url(output) else work_of(output)
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    with (
        storage_errors(output, 8 * predictions.num_rows * predictions.num_columns),
        tempfile.TemporaryDirectory(prefix="export-", dir=work) as folder,
    ):
        path = os.path.join(folder, "predictions")
        writers[ending](predictions, path, names, y_is_1d, beside)
        failpoint("predict.before_pointer")
        said["replaced"] = check_output(output, overwrite=overwrite)  # the last time was a while ago
        # first the stamp, which holds for what is replaced, too
        said["sha256"] = content_digest(path)
        if work is None:
            _put_stamp(output, said)
            put_file(parent_of(output), name_of(output), Path(path))
        else:
            write_json(folder, "stamp.json", said, durable=True)
            check_fence()
            os.replace(os.path.join(folder, "stamp.json"), sibling(output, ".json"))
            put_in_place(Path(path), Path(output))
        failpoint("predict.after_pointer")


def _put_stamp(output: str, said: dict[str, Any]) -> None:
    stamp = sibling(output, ".json")
    write_json(parent_of(stamp), name_of(stamp), said)


def _zarr(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, beside: Beside) -> None:
    root = local_root(predictions.array.store)
    if root is None:  # predicted beside an address: fetched, chunk by chunk
        _zarr_objects(predictions, path)
        return
    for start, stop in predictions.blocks():
        predictions.read(start, stop)  # verifies every chunk before it is handed over
    shutil.copytree(root / predictions.array.path, path)


def _zarr_objects(predictions: RowArray, output: str) -> None:
    """The array at an address: what was there goes first, the metadata comes last."""
    array, copy = predictions.array, replace(predictions.array, store=output, path="")
    remove_array(output)
    for i in range(predictions.num_chunks):
        copy.write((i, 0), array.read((i, 0)))
    write_json(output, "zarr.json", read_json(array.store, f"{array.path}/zarr.json" if array.path else "zarr.json"))


def _npy(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, beside: Beside) -> None:
    shape: tuple[int, ...] = (predictions.num_rows, predictions.num_columns)
    with open(path, "wb") as file:
        header: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": shape[:1] if y_is_1d else shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start, stop in predictions.blocks():
            file.write(np.ascontiguousarray(predictions.read(start, stop)).tobytes())


def _parquet(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, beside: Beside) -> None:
    import pyarrow.parquet as pq

    tables = _tables(predictions, names, beside)
    first = next(tables)
    with pq.ParquetWriter(path, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def _csv(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, beside: Beside) -> None:
    import pyarrow as pa
    from pyarrow.csv import CSVWriter

    tables = _tables(predictions, names, beside)
    first = next(tables)
    try:
        with CSVWriter(path, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:  # a list or a structure that is kept
        raise DataError(f"a column that is kept cannot be written to .csv ({exc})", hint="write .parquet") from exc


def _tables(predictions: RowArray, names: list[str], beside: Beside) -> Iterator[Any]:
    """Blocks of rows as Arrow tables: what is kept, the numbers, the class of the largest score."""
    import pyarrow as pa

    blocks = list(predictions.blocks())
    kept = {}
    if beside.source is not None:
        lengths = [stop - start for start, stop in blocks]
        for name, column in zip(beside.names, beside.keep, strict=True):
            kept[name] = _cut(beside.source.as_written(column), beside.source.label_type(column), lengths, name)
    classes = np.array(beside.classes)
    for start, stop in blocks:
        block = predictions.read(start, stop)
        table: dict[str, Any] = {name: next(values) for name, values in kept.items()}
        table |= {name: pa.array(np.ascontiguousarray(block[:, column])) for column, name in enumerate(names)}
        if beside.classes:
            table[beside.label] = pa.array(classes[np.argmax(block[:, : len(classes)], axis=1)].tolist())
        yield pa.table(table)


def _cut(arrays: Iterator[Any], kind: Any, lengths: list[int], name: str) -> Iterator[Any]:
    """The values of a column in blocks of these lengths, which are all of them."""
    import pyarrow as pa

    rest = pa.chunked_array([], kind)
    for number, length in enumerate(lengths, 1):
        # of the last block, until there is no more
        while len(rest) < length + (number == len(lengths)) and (more := next(arrays, None)) is not None:
            rest = pa.chunked_array([*rest.chunks, more], kind)
        if len(rest) < length or (number == len(lengths) and len(rest) > length):
            raise DataError(
                f"column {name!r} has another number of rows than the {sum(lengths):,} that were predicted",
                hint="the file was changed: start again",
            )
        yield rest[:length]
        rest = rest[length:]
