"""Lineage: which earlier arrays of a store hold finished rows of this one, and how many.

Row r of a Cholesky factor depends on rows 0 .. r of the data alone. So a factor whose key differs from the wanted one
in the digest of the rows alone shares all rows up to the first one that differs, whichever run made it and whether it
was finished or not. What is shared is *proved*: beside every array stands a record with the digests of all blocks of
1,024 rows and of the first n rows after each append, and only what the record and the data set agree upon counts. That
finds a common prefix also where an append was taken back, or a generation was dropped in the middle.

The centre of the features, which is part of the key, is frozen with the lineage: it need not be the mean, only a point
close to the rows (:mod:`dkrr.linalg.frozen_center`). So the records say of which first rows it was the mean.

Cost
----
One listing, and one small JSON document for each array of the same kernel: 64 bytes for every 1,024 rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from dkrr.address import join, name_of, parent_of
from dkrr.dataset import Dataset
from dkrr.dataset.dataset import Part
from dkrr.dataset.rows import DIGEST_ROWS
from dkrr.errors import StoreError
from dkrr.linalg.keys import FORMAT_VERSION, KERNEL_VERSION, key_of
from dkrr.stores import children, is_url, place, read_json, write_json

__all__ = ["Ancestor", "ancestors", "record_rows", "recorded_models"]

FOLDER = "lineage"
Kind = Literal["factors", "grams", "models"]
# what two arrays of one lineage may differ in
_OF_ROWS = ("n", "rows_digest", "weight_digest")
_READERS = 8


@dataclass(frozen=True, kw_only=True)
class Ancestor:
    """An earlier array whose first ``num_rows`` rows are the first rows of a data set.

    Parameters
    ----------
    kind
        What it is: tiles of a factor or of a Gram matrix, or a model.
    location
        Where it is; it may have been removed since.
    fields
        What decides its bytes, see :mod:`dkrr.linalg.keys`.
    num_rows
        m, the proved common prefix.
    center_rows
        How many of them its centre is the mean of.
    """

    kind: Kind
    location: str
    fields: dict[str, Any]
    num_rows: int
    center_rows: int

    def differs_in(self, fields: dict[str, Any]) -> set[str]:
        """Names of the fields, besides those of the rows, in which it is another matrix than the wanted one."""
        fields = _plain(fields)
        names = (self.fields.keys() | fields.keys()) - set(_OF_ROWS)
        differing = {name for name in names if self.fields.get(name) != fields.get(name)}
        if (self.fields.get("weight_digest") is None) != (fields.get("weight_digest") is None):
            differing.add("weight_digest")
        return differing


def record_rows(
    store: Any,
    kind: Kind,
    fields: dict[str, Any],
    dataset: Dataset,
    location: str,
    *,
    known: Iterable[Ancestor] = (),
) -> None:
    """Write down of which rows an array is made, before anything else of it is written.

    Parameters
    ----------
    fields
        What decides the bytes of the array; ``kernel`` and ``weight_digest`` are looked at here.
    location
        Of an array in the store, whose name holds its key; or of a model anywhere, the last one of these rows.
    known
        Its ancestors: one with the same centre had it first.
    """
    is_model = kind == "models"
    key = str(fields["rows_digest"]) if is_model else name_of(location).removesuffix(".zarr")
    folder, name = place(store, FOLDER), f"{_family(fields['kernel'])}-{key}.json"
    if not is_model and read_json(folder, name) is not None:
        return
    parts: dict[str, bool] = {"X": True, "weight": fields.get("weight_digest") is not None, "y": is_model}
    document = {
        "kind": kind,
        "location": location if is_model else _relative(location),
        "fields": fields,
        "center_rows": _center_rows(fields, known),
        **{part: _marks(dataset, part) if is_there else None for part, is_there in parts.items()},  # type: ignore[arg-type]
    }
    write_json(folder, name, document)


def ancestors(store: Any, dataset: Dataset, kernel: dict[str, Any], *, kinds: Iterable[Kind]) -> list[Ancestor]:
    """Earlier arrays of a kernel that have rows in common with a data set, the longest common prefix first."""
    folder, family, wanted = join(str(store), FOLDER), _family(kernel), set(kinds)
    names = [name for name in children(folder) if name.startswith(f"{family}-") and name.endswith(".json")]
    found = []
    for document in _read_all(folder, names):
        if document["kind"] not in wanted or document["fields"].get("kernel") != _plain(kernel):
            continue
        num_rows = _common_rows(dataset, document)
        if num_rows:
            kind, fields, location = document["kind"], document["fields"], document["location"]
            if kind != "models":
                location = join(str(store), *location.split("/"))
            rows = min(num_rows, int(document.get("center_rows") or num_rows))
            found.append(Ancestor(kind=kind, location=location, fields=fields, num_rows=num_rows, center_rows=rows))
    return sorted(found, key=lambda item: (-item.num_rows, item.location))


def recorded_models(store: str) -> list[str]:
    """Where the models are, or were, that fits in a store have left a record of."""
    folder = join(store, FOLDER)
    names = [name for name in children(folder) if name.endswith(".json")]
    return [str(document["location"]) for document in _read_all(folder, names) if document["kind"] == "models"]


def _relative(location: str) -> str:
    """The location of an array below the root of its store, so that a store can be moved."""
    return f"{name_of(parent_of(location))}/{name_of(location)}"


def _center_rows(fields: dict[str, Any], known: Iterable[Ancestor]) -> int:
    """Of how many first rows the centre is the mean: all, unless an earlier array of the lineage has it already."""
    center = _plain(fields.get("center"))
    return min((item.center_rows for item in known if item.fields.get("center") == center), default=int(fields["n"]))


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def _family(kernel: dict[str, Any]) -> str:
    """What all arrays of a kernel have in the names of their records."""
    return key_of({"kernel": kernel, "kernel_version": KERNEL_VERSION, "format_version": FORMAT_VERSION})[:16]


def _read_all(folder: str, names: list[str]) -> Iterator[dict[str, Any]]:
    """The records that can be read; one that cannot only means that its array is not found."""

    def read(name: str) -> Any:
        try:
            return read_json(folder, name)
        except StoreError:
            return None

    if is_url(folder) and len(names) > 1:
        with ThreadPoolExecutor(_READERS) as threads:
            documents = list(threads.map(read, names))
    else:
        documents = [read(name) for name in names]
    needed = {"kind", "location", "fields", "X", "weight", "y"}
    yield from (document for document in documents if isinstance(document, dict) and needed <= document.keys())


def _marks(dataset: Dataset, part: Part) -> dict[str, Any]:
    """Digests by which the first rows of a part can be recognised later."""
    ends = sorted({generation.n for generation in dataset.generations} | {dataset.num_rows})
    return {
        "block_digests": list(dataset.records[part]["block_digests"]),
        "ends": [[n, dataset.prefix_digest(n, part)] for n in ends],
    }


def _common_rows(dataset: Dataset, document: dict[str, Any]) -> int:
    """The longest prefix of the data set's rows that the rows of a record are proved to begin with."""
    parts: list[Part] = [part for part in ("X", "weight", "y") if document[part] is not None]
    if any(part not in dataset.parts() for part in parts):
        return 0
    blocks = dataset.num_rows
    for part in parts:
        marks = document[part]
        own = dataset.records[part]["block_digests"]
        equal = 0
        for mine, theirs in zip(own, marks["block_digests"], strict=False):
            if mine != theirs:
                break
            equal += 1
        blocks = min(blocks, equal * DIGEST_ROWS)
    # behind the common blocks there can be less than one block more
    digests = {part: {int(n): digest for n, digest in document[part]["ends"]} for part in parts}
    for n in sorted(digests["X"], reverse=True):
        is_near = blocks < n <= dataset.num_rows and n - blocks < DIGEST_ROWS
        if is_near and all(dataset.prefix_digest(n, part) == digests[part].get(n) for part in parts):
            return n
    return blocks
