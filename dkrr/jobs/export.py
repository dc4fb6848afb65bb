"""Predictions from their array to a file: .zarr, .npy, .parquet or .csv, a block of rows at a time.

A stamp says which model made them. .parquet has it in its metadata (key ``dkrr``), .zarr in its attributes; the other
two cannot hold one, so for every format it also stands beside the file, in ``OUTPUT.json``, with the SHA-256 of the
file that it belongs to.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dkrr.address import name_of, parent_of, sibling
from dkrr.dataset import RowArray
from dkrr.errors import ParameterError
from dkrr.failpoints import failpoint
from dkrr.objects import put_file
from dkrr.stores import is_url, local_root, read_json, remove_array, write_json

__all__ = ["check_output", "export_predictions"]

ENDINGS = (".zarr", ".npy", ".parquet", ".csv")


Stamp = dict[str, Any] | None


def export_predictions(
    predictions: RowArray, output: str, names: list[str], *, y_is_1d: bool, stamp: Stamp = None
) -> None:
    """Write predictions (m, t) to ``output``; it appears whole or not at all, and its ``stamp`` with it.

    Raises
    ------
    ParameterError
        The ending is none of .zarr, .npy, .parquet, .csv.
    """
    names = names or [f"prediction_{column}" for column in range(predictions.num_columns)]
    check_output(output)
    writers = {".zarr": _zarr, ".npy": _npy, ".parquet": _parquet, ".csv": _csv}
    ending = Path(name_of(output)).suffix
    if is_url(output):
        if ending == ".zarr":
            _zarr_objects(predictions, output, stamp)
            _put_stamp(output, stamp, None)
            return
        with tempfile.TemporaryDirectory(prefix="dkrr-") as folder:
            path = os.path.join(folder, "predictions")
            writers[ending](predictions, path, names, y_is_1d, stamp)
            digest = None if stamp is None else _sha256(path)
            put_file(parent_of(output), name_of(output), Path(path))
        _put_stamp(output, stamp, digest)
        return
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    partial = f"{output}.{uuid.uuid4().hex}.partial"
    try:
        writers[ending](predictions, partial, names, y_is_1d, stamp)
        digest = None if stamp is None or ending == ".zarr" else _sha256(partial)
        failpoint("predict.before_pointer")
        if ending == ".zarr" and os.path.isdir(output):
            shutil.rmtree(output)
        os.replace(partial, output)
        failpoint("predict.after_pointer")
        _put_stamp(output, stamp, digest)
    finally:
        if os.path.isdir(partial):
            shutil.rmtree(partial)
        elif os.path.exists(partial):
            os.unlink(partial)


def _put_stamp(output: str, stamp: Stamp, digest: str | None) -> None:
    if stamp is not None:
        beside = sibling(output, ".json")
        write_json(parent_of(beside), name_of(beside), stamp | ({} if digest is None else {"sha256": digest}))


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_output(output: str) -> None:
    """Refuse a name that predictions cannot be written to.

    Raises
    ------
    ParameterError
        An ending that is none of .zarr, .npy, .parquet, .csv.
    """
    ending = Path(name_of(output)).suffix
    if ending not in ENDINGS:
        raise ParameterError(f"{output} ends in {ending!r}; one of {', '.join(ENDINGS)} expected", hint="rename it")


def _zarr(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, stamp: Stamp) -> None:
    root = local_root(predictions.array.store)
    if root is None:  # predicted beside an address: fetched, chunk by chunk
        _zarr_objects(predictions, path, stamp)
        return
    for start, stop in predictions.blocks():
        predictions.read(start, stop)  # verifies every chunk before it is handed over
    shutil.copytree(root / predictions.array.path, path)
    if stamp is not None:
        write_json(path, "zarr.json", _stamped(read_json(path, "zarr.json"), stamp))


def _stamped(document: Any, stamp: Stamp) -> Any:
    """The metadata of an array with the stamp among its attributes."""
    if stamp is None:
        return document
    return {**document, "attributes": {**document.get("attributes", {}), "dkrr": stamp}}


def _zarr_objects(predictions: RowArray, output: str, stamp: Stamp) -> None:
    """The array at an address: what was there goes first, the metadata comes last."""
    array, copy = predictions.array, replace(predictions.array, store=output, path="")
    remove_array(output)
    for i in range(predictions.num_chunks):
        copy.write((i, 0), array.read((i, 0)))
    document = read_json(array.store, f"{array.path}/zarr.json" if array.path else "zarr.json")
    write_json(output, "zarr.json", _stamped(document, stamp))


def _npy(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, stamp: Stamp) -> None:
    shape: tuple[int, ...] = (predictions.num_rows, predictions.num_columns)
    with open(path, "wb") as file:
        header: dict[str, Any] = {"descr": "<f8", "fortran_order": False, "shape": shape[:1] if y_is_1d else shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start, stop in predictions.blocks():
            file.write(np.ascontiguousarray(predictions.read(start, stop)).tobytes())


def _parquet(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, stamp: Stamp) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    metadata = None if stamp is None else {"dkrr": json.dumps(stamp, sort_keys=True)}
    schema = pa.schema([(name, pa.float64()) for name in names], metadata=metadata)
    with pq.ParquetWriter(path, schema) as writer:
        for start, stop in predictions.blocks():
            writer.write_table(_table(predictions.read(start, stop), names).replace_schema_metadata(metadata))


def _csv(predictions: RowArray, path: str, names: list[str], y_is_1d: bool, stamp: Stamp) -> None:
    import pyarrow as pa
    from pyarrow.csv import CSVWriter

    schema = pa.schema([(name, pa.float64()) for name in names])
    with CSVWriter(path, schema) as writer:
        for start, stop in predictions.blocks():
            writer.write_table(_table(predictions.read(start, stop), names))


def _table(block: Any, names: list[str]) -> Any:
    import pyarrow as pa

    return pa.table({name: np.ascontiguousarray(block[:, column]) for column, name in enumerate(names)})
