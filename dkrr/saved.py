"""Where a model is kept: a Zarr group of one to three arrays and attributes, with a manifest of SHA-256 over every key.

You need it to change what a model's folder holds, or how it gets there whole; what the arrays mean is known to
:mod:`dkrr.model`. Nothing is pickled, and metadata is checked before any array is read.

Cost: every byte of the arrays is written once, and read once where it is verified.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from dkrr.dataset import CheckedRows, RowArray
from dkrr.dataset.destination import check_outside, storage_errors
from dkrr.errors import StoreError
from dkrr.linalg.predict import RowSource
from dkrr.store.documents import MANIFEST, check_manifest, manifest_digest, refuse_links, write_manifest
from dkrr.store.failpoints import failpoint
from dkrr.store.files import (
    check_place,
    children,
    is_below,
    list_keys,
    local_root,
    put_back,
    put_in_place,
    read_json,
    read_key,
    remove_array,
    write_json,
)
from dkrr.store.lease import hold_lock

__all__ = ["ARRAYS", "save_arrays", "saved_attributes", "saved_rows"]

FORMAT = "dkrr-model"
FORMAT_VERSION = 1
ROWS_PER_CHUNK = 4096
ARRAYS = ("X_fit", "dual_coef", "sample_weight")
_KNOWN = {"zarr.json", MANIFEST, *ARRAYS}


def saved_rows(path: Any, name: str, digest: str) -> CheckedRows:
    """Rows of the model at ``path`` whose manifest had this digest; they are read from disk, and never from another's.

    A model is replaced whole: while its manifest is there, so are its rows.
    """
    return CheckedRows(RowArray.open(path, name), partial(_check_digest, path, digest), every_read=True)


def _check_digest(path: Any, digest: str) -> None:
    if read_key(path, MANIFEST) is None or manifest_digest(path) != digest:
        raise StoreError(f"{path} was replaced by another model, or removed", hint="load it again")


def save_arrays(path: Any, attributes: dict[str, Any], arrays: Mapping[str, RowSource], *, overwrite: bool) -> None:
    """Write a model's arrays and attributes to a folder, where they appear whole or not at all, or to an address.

    Raises
    ------
    StoreError
        Something is there already, or, with ``overwrite``, something that is no model; or the path lies inside of
        something that dkrr wrote.
    LockedError
        Another process writes there.
    """
    check_place("path", path)
    root = local_root(path)
    check_outside(path)
    attributes = {"format": FORMAT, "format_version": FORMAT_VERSION} | attributes
    _refuse_what_is_there(path, overwrite=overwrite)
    num_bytes = sum(8 * rows.num_rows * rows.num_columns for rows in arrays.values())
    with storage_errors(path, num_bytes), hold_lock(path):
        _refuse_what_is_there(path, overwrite=overwrite)  # by now
        if root is None:
            _save_objects(path, attributes, arrays)
            return
        partial = root.with_name(f"{root.name}.{uuid.uuid4().hex}.partial")
        try:
            _write(str(partial), attributes, arrays)
            failpoint("model.before_pointer")
            put_in_place(partial, root)
            failpoint("model.after_pointer")
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _refuse_what_is_there(path: Any, *, overwrite: bool) -> None:
    """Refuse to write where something is, unless it is a model that may be replaced."""
    root = local_root(path)
    if root is not None:
        put_back(root)
    if read_json(path, "zarr.json") is not None or (root is not None and os.path.lexists(root)):
        if not overwrite:
            raise StoreError(f"{path} exists", hint="choose another path, or overwrite=True to replace a model")
        _require_nothing_else(path)


def saved_attributes(path: Any, *, verify: bool) -> dict[str, Any]:
    """The attributes of the model at a path, after every check that needs no array's meaning.

    Raises
    ------
    StoreError
        Not a model, another format version, a link, or, with ``verify``, a key that is missing, extra, or not what the
        manifest says.
    """
    root = local_root(path)
    if root is not None:
        put_back(root)
    refuse_links(path)
    attributes = _require_model(path)
    if verify:
        check_manifest(path)
    return attributes


def _require_nothing_else(path: Any) -> None:
    """Refuse to replace what is no model, or a model with files of somebody else in it."""
    root = local_root(path)
    if root is not None and root.is_symlink():
        raise StoreError(f"{path} is a symbolic link", hint="give the path that it points to")
    refuse_links(path)
    _require_model(path)
    written = read_json(path, MANIFEST) or {}  # a save to an address that was interrupted has none
    foreign = [
        key
        for key in list_keys(path)
        if key not in written and (written or key.partition("/")[0] not in _KNOWN) and key != MANIFEST
    ]
    if foreign:
        raise StoreError(f"{path} holds something else ({foreign[0]})", hint="choose another path")


def _save_objects(path: Any, attributes: dict[str, Any], arrays: Mapping[str, RowSource]) -> None:
    if any(isinstance(rows, CheckedRows) and is_below(rows.rows.array.store, path) for rows in arrays.values()):
        raise StoreError(f"the rows of this model are read from {path}", hint="save it at another address")
    foreign = [name for name in children(path) if name not in _KNOWN]
    if foreign:
        raise StoreError(f"{path} holds something else ({foreign[0]})", hint="choose another address")
    remove_array(path)  # the metadata first; also what a save that was interrupted left
    _write(path, attributes, arrays)
    failpoint("model.after_pointer")


def _write(store: Any, attributes: dict[str, Any], arrays: Mapping[str, RowSource]) -> None:
    for name, rows in arrays.items():
        copy = RowArray.create(
            store, name, num_rows=rows.num_rows, num_columns=rows.num_columns, rows_per_chunk=ROWS_PER_CHUNK
        )
        for number, start in enumerate(range(0, rows.num_rows, ROWS_PER_CHUNK)):
            copy.write_chunk(number, rows.read(start, min(start + ROWS_PER_CHUNK, rows.num_rows)))
    if local_root(store) is None:
        failpoint("model.before_pointer")
    write_json(store, "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": attributes})
    write_manifest(store)


def _require_model(path: Any) -> dict[str, Any]:
    document = read_json(path, "zarr.json")
    for old in (".zgroup", ".zarray") if document is None else ():
        if read_json(path, old) is not None:
            raise StoreError(f"{path} is Zarr format 2; format 3 expected", hint="only models of dkrr are read")
    if not isinstance(document, dict) or document.get("node_type") != "group" or document.get("zarr_format") != 3:
        raise StoreError(f"{path} is not a model of dkrr", hint="check the path")
    attributes = document.get("attributes")
    found = attributes.get("format") if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or found != FORMAT:
        raise StoreError(f"{path} is not a model of dkrr (format {found!r})", hint="check the path")
    version = attributes.get("format_version")
    if version != FORMAT_VERSION:
        raise StoreError(
            f"{path} has model format version {version}; this dkrr reads version {FORMAT_VERSION}",
            hint="install a newer dkrr, or save the model again",
        )
    return dict(attributes)
