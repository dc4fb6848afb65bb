"""Predictions from blocks of rows to a file: .zarr, .npy, .parquet or .csv, in the memory of one block.

Beside each output stands ``OUTPUT.json``, its stamp: which model made it, of which rows, and the SHA-256 of the file,
or of all that is in the folder. An output is replaced when this is still what stands there; anything else belongs to
somebody, and stays.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dkrr import __version__
from dkrr.dataset import Floats, RowArray
from dkrr.dataset.sources import Table
from dkrr.dataset.writer import check_outside
from dkrr.errors import DataError, ParameterError, StoreError
from dkrr.jobs.run_directory import utc_now
from dkrr.models.model import BLOCK_ROWS
from dkrr.store.documents import content_digest
from dkrr.store.files import (
    children,
    is_url,
    name_of,
    overlaps,
    parent_of,
    put_back,
    put_in_place,
    read_json,
    remove_array,
    sibling,
    storage_errors,
    write_json,
)
from dkrr.store.interruption import check_fence
from dkrr.store.objects import put_file

ENDINGS = (".zarr", ".npy", ".parquet", ".csv")
_WORK = re.compile(
    r"(?:data\.zarr|result\.zarr|version\.json)(?:\.lock)?(?:\.[0-9a-f]{32}\.partial)?"
    r"|\.dkrr-probe-[0-9a-f]{32}(?:\.partial)?|export-[a-z0-9_]{8}"
)


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """A table that is made a block of rows at a time.

    Parameters
    ----------
    num_rows
        m.
    names
        Of the k columns of numbers.
    read
        Numbers (stop - start, k) of rows start to stop.
    y_is_1d
        Whether a single column of numbers has no second axis in .npy.
    source, keep
        Columns of the rows that were predicted, copied as they stand into .csv and .parquet, in front of the numbers.
    label, classes
        Of scores, the first columns: the class of the largest one is a last column of this name in .csv and .parquet.
        The stamp has the classes in the order of the scores.
    """

    num_rows: int
    names: list[str]
    read: Callable[[int, int], Floats]
    y_is_1d: bool = False
    source: Table | None = None
    keep: tuple[int, ...] = ()
    label: str = ""
    classes: tuple[Any, ...] = ()

    def blocks(self) -> Iterator[Floats]:
        """The numbers, block by block."""
        for start in range(0, self.num_rows, BLOCK_ROWS):
            yield np.ascontiguousarray(self.read(start, min(start + BLOCK_ROWS, self.num_rows)))


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
    for place, source in itertools.product((output, stamp, work), inputs):
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
    stamped: Any = "unreadable"
    with contextlib.suppress(StoreError, OSError):
        stamped = read_json(parent_of(stamp), name_of(stamp))
    is_ours = isinstance(stamped, dict) and {"dkrr", "sha256", "replaced"} <= stamped.keys()
    digest = content_digest(output)
    is_known = is_ours and (stamped.get("unfinished") or digest in (stamped["sha256"], stamped["replaced"]))
    if (stamped is None or is_ours) and (digest is None or is_known):
        return digest
    if not overwrite:
        raise StoreError(
            f"{output if stamped is None or is_ours else stamp} is there, and not as dkrr wrote it as predictions",
            hint="choose another output, or replace it with --overwrite",
        )
    return None  # what is replaced once by --overwrite does not become predictions by that


def export_predictions(
    predictions: Predictions, output: str, *, stamp: dict[str, Any] | None = None, overwrite: bool = False
) -> None:
    """Write predictions to ``output``, which appears whole or not at all, and their stamp beside it.

    Raises
    ------
    ParameterError, StoreError
        See :func:`check_output`.
    DataError
        The source of columns that are kept has another number of rows.
    """
    replaced = check_output(output, overwrite=overwrite)
    ending = Path(name_of(output)).suffix
    write = {".zarr": _zarr, ".npy": _npy, ".parquet": _arrow, ".csv": _arrow}[ending]
    stamped = {**(stamp or {}), "dkrr": __version__, "predicted_at": utc_now(), "replaced": replaced}
    if predictions.classes:
        stamped["classes"] = list(predictions.classes)
    beside = sibling(output, ".json")
    if is_url(output) and ending == ".zarr":
        # objects take the place of others one by one: until all are there the stamp holds for any of them
        write_json(parent_of(beside), name_of(beside), stamped | {"sha256": None, "unfinished": True})
        remove_array(output)
        _zarr(predictions, output)
        write_json(parent_of(beside), name_of(beside), stamped | {"sha256": content_digest(output)})
        return
    work = None if is_url(output) else work_of(output)
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    with (
        storage_errors(output, 8 * predictions.num_rows * len(predictions.names)),
        tempfile.TemporaryDirectory(prefix="export-", dir=work) as folder,
    ):
        path = os.path.join(folder, f"predictions{ending}")
        write(predictions, path)
        stamped["replaced"] = check_output(output, overwrite=overwrite)  # the last time was a while ago
        # first the stamp, which holds for what is replaced, too
        stamped["sha256"] = content_digest(path)
        if work is None:
            write_json(parent_of(beside), name_of(beside), stamped)
            put_file(parent_of(output), name_of(output), Path(path))
        else:
            write_json(folder, "stamp.json", stamped, durable=True)
            check_fence()
            os.replace(os.path.join(folder, "stamp.json"), beside)
            put_in_place(Path(path), Path(output))


def _zarr(predictions: Predictions, path: str) -> None:
    """The metadata comes last: without it there is no array."""
    m, k = predictions.num_rows, len(predictions.names)
    array = RowArray.unsaved(path, "", num_rows=m, num_columns=k, rows_per_chunk=min(BLOCK_ROWS, m))
    for number, block in enumerate(predictions.blocks()):
        array.write_chunk(number, block)
    array.save_shape()


def _npy(predictions: Predictions, path: str) -> None:
    shape: tuple[int, ...] = (predictions.num_rows, len(predictions.names))
    with open(path, "wb") as file:
        shape = shape[:1] if predictions.y_is_1d else shape
        header: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in predictions.blocks():
            file.write(block.tobytes())


def _arrow(predictions: Predictions, path: str) -> None:
    import pyarrow as pa
    from pyarrow.csv import CSVWriter
    from pyarrow.parquet import ParquetWriter

    is_text = path.endswith(".csv")
    tables = _tables(predictions, is_text)
    first = next(tables)
    try:
        with (CSVWriter if is_text else ParquetWriter)(path, first.schema) as writer:
            for table in itertools.chain([first], tables):
                writer.write_table(table)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as exc:  # a list or a structure that is kept
        ending = Path(path).suffix
        raise DataError(f"a column that is kept cannot be written to {ending} ({exc})", hint="write .parquet") from exc


def _tables(predictions: Predictions, is_text: bool) -> Iterator[Any]:
    """Blocks of rows as Arrow tables: what is kept, the numbers, the class of the largest score."""
    import pyarrow as pa

    source, m, classes = predictions.source, predictions.num_rows, np.array(predictions.classes)
    lengths = [min(BLOCK_ROWS, m - start) for start in range(0, m, BLOCK_ROWS)]
    kept = {}
    if source is not None:
        for column in predictions.keep:
            name, kind = source.names[column], source.label_type(column, as_text=is_text)
            kept[name] = _cut(source.as_written(column, kind=kind), kind, lengths, name)
    for block in predictions.blocks():
        table: dict[str, Any] = {name: next(values) for name, values in kept.items()}
        table |= {name: pa.array(np.ascontiguousarray(block[:, k])) for k, name in enumerate(predictions.names)}
        if predictions.classes:
            table[predictions.label] = pa.array(classes[np.argmax(block[:, : len(classes)], axis=1)].tolist())
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
