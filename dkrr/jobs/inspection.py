"""What a path holds, and whether it is whole: data sets, models, Gram matrices and factors.

You need it for ``dkrr info``. Describing reads metadata only; verifying reads every byte once, with memory for one
chunk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dkrr.chunks import local_root, read_json
from dkrr.errors import DamagedChunkError, DkrrError, StoreError

__all__ = ["Description", "describe", "verify"]


@dataclass(frozen=True)
class Description:
    """The kind of thing at ``path`` and the facts about it, in the order in which people want them."""

    kind: str
    path: str
    facts: dict[str, Any]


def describe(path: str) -> Description:
    """Say what is at ``path``.

    Raises
    ------
    StoreError
        Nothing of dkrr is there.
    """
    kind = _kind(path)
    return Description(kind, path, _KINDS[kind][0](path))


def verify(path: str) -> list[str]:
    """Read everything at ``path`` and return one sentence for each problem; none means that it is whole.

    Raises
    ------
    StoreError
        Nothing of dkrr is there, or its metadata cannot be read.
    """
    return list(_KINDS[_kind(path)][1](path))


def _kind(path: str) -> str:
    document = read_json(path, "zarr.json")
    if document is None:
        raise StoreError(
            f"{path} is not a data set, model, Gram matrix or factor (no zarr.json)", hint="check the path"
        )
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if isinstance(attributes, dict):
        if attributes.get("dkrr_format") == "dataset":
            return "data set"
        if attributes.get("format") == "dkrr-model":
            return "model"
        if "tile_size" in attributes and "rows_digest" in attributes:
            return "factor" if "alpha" in attributes else "Gram matrix"
    raise StoreError(f"{path} was not written by dkrr", hint="`dkrr ingest` turns arrays into a data set")


def _describe_dataset(path: str) -> dict[str, Any]:
    from dkrr.dataset import open_dataset

    dataset = open_dataset(path)
    return {
        "rows": dataset.num_rows,
        "features": _count_and_names(dataset.feature_names),
        "targets": _count_and_names(dataset.target_names),
        "weights": dataset.weight_name or "none",
        "classes": "none" if dataset.classes is None else ", ".join(map(str, dataset.classes)),
        "chunks": f"{dataset.X.num_chunks} of {dataset.X.rows_per_chunk} rows",
        "generations": ", ".join(str(n) for n, _ in dataset.generations),
        "digest": dataset.digest,
    }


def _count_and_names(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} ({shown})" if names else "0"


def _verify_dataset(path: str) -> Iterator[str]:
    from dkrr.dataset import open_dataset

    try:
        open_dataset(path).verify()
    except DkrrError as exc:
        yield exc.message


def _describe_model(path: str) -> dict[str, Any]:
    from dkrr.model import load_model

    model = load_model(path, verify=False)
    solution = model.solution
    return {
        "rows": model.num_rows,
        "features": model.num_features,
        "targets": model.num_targets,
        "kernel": "precomputed" if model.kernel is None else model.kernel.to_dict(),
        "scaling": "none" if model.scaling is None else "X and y whitened",
        "solver": f"{solution.solver}, {solution.precision}",
        "relative residual": _worst(solution.relative_residual),
        "backward error": _worst(solution.backward_error),
        **{str(name).replace("_", " "): value for name, value in model.provenance.items()},
    }


def _worst(values: Any) -> str:
    return f"{np.max(np.asarray(values)):.1e}"


def _verify_model(path: str) -> Iterator[str]:
    from dkrr.model import load_model

    try:
        model = load_model(path)  # compares every key with the manifest
        for rows in (model.x_fit, model.dual_coef):
            for start in range(0, rows.num_rows if rows is not None else 0, 4096):
                if rows is not None:
                    rows.read(start, min(start + 4096, rows.num_rows))
    except DkrrError as exc:
        yield exc.message


def _describe_tiles(path: str) -> dict[str, Any]:
    from dkrr.tiles import TileMatrix

    matrix = TileMatrix.open(path)
    total = matrix.grid.num_lower
    return {
        "rows": matrix.grid.n,
        "tiles": f"{total - len(matrix.missing())} of {total}, {matrix.grid.tile_size} rows each",
        "bytes": matrix.num_bytes,
        **{name.replace("_", " "): value for name, value in matrix.array.attributes.items() if name != "tile_size"},
    }


def _verify_tiles(path: str) -> Iterator[str]:
    """Every lower tile: there, of the right size, its checksum right, finite; and no file that does not belong."""
    from dkrr.tiles import TileMatrix

    matrix = TileMatrix.open(path)
    for i, j in matrix.grid.lower():
        try:
            tile = matrix.read(i, j)
        except DamagedChunkError as exc:
            yield f"tile ({i}, {j}) is damaged ({exc.reason})"
            continue
        # the Gram matrix is mirrored on read and the factor is 0 there, so the part above the diagonal does not count
        finite = np.isfinite(tile if i != j else np.tril(tile))
        if not finite.all():
            row, column = np.argwhere(~finite)[0] + (matrix.grid.span(i).start, matrix.grid.span(j).start)
            yield f"tile ({i}, {j}) holds a value that is not finite, at row {row:,}, column {column:,}"
    known = {matrix.array.chunk_key(index) for index in matrix.grid.lower()} | {"zarr.json"}
    for key in _local_keys(path):
        if key not in known:
            what = "left by an interrupted write" if key.endswith(".partial") else "of unknown origin"
            yield f"{key} is {what}"


def _local_keys(path: str) -> Iterator[str]:
    root = local_root(path)
    if root is None:
        return
    for folder, _, names in os.walk(root):
        for name in sorted(names):
            yield re.sub(r"\\", "/", os.path.relpath(os.path.join(folder, name), root))


_KINDS: dict[str, tuple[Callable[[str], dict[str, Any]], Callable[[str], Iterator[str]]]] = {
    "data set": (_describe_dataset, _verify_dataset),
    "model": (_describe_model, _verify_model),
    "Gram matrix": (_describe_tiles, _verify_tiles),
    "factor": (_describe_tiles, _verify_tiles),
}
