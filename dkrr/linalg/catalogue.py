"""Keys of Gram matrices, factors and solves: SHA-256 over everything that decides their bytes.

Two fits that agree on a key share the array. The fields behind a key are stored as attributes of the array, so a
mismatch can be explained field by field.

Lineage: which earlier arrays of a store hold finished rows of this one, and how many.

Row r of a Cholesky factor depends on rows 0 .. r of the data alone. So a factor whose key differs from the wanted one
in the digest of the rows alone shares all rows up to the first one that differs, whichever run made it and whether it
was finished or not. What is shared is *proved*: beside every array stands a record with the digests of all blocks of
1,024 rows and of the first n rows after each append, and only what the record and the data set agree upon counts. That
finds a common prefix also where an append was taken back, or a generation was dropped in the middle.

The centre of the features, which is part of the key, is frozen with the lineage: it need not be the mean, only a point
close to the rows (:class:`FrozenCenter`). So the records say of which first rows it was the mean.

Cost
----
One listing, and one small JSON document for each array of the same kernel: 64 bytes for every 1,024 rows.

The point at which a kernel is centred, frozen with its lineage for as long as newer rows stay near it.

Tiles of an earlier fit can be continued only with its centre. Rows that came later and lie far from the rows whose mean
it is are compared by differences, which takes longer than with a centre of their own. The rule is that of frozen
scaling (:mod:`dkrr.dataset.drift`): beyond a limit nothing is continued, the kernel is centred anew
(:meth:`dkrr.kernels.Kernel.center`), and that is said. So it is, without a limit, where subtracting the centre rounds
typical rows by more than 1e-13 of the kernel's length.

Cost
----
One pass over the rows for each centre that is found and has newer rows.

What a new matrix takes over from earlier ones of its lineage: whole tiles at once, ragged ones row by row.

A tile that lies in the common prefix gets a second name in the new array: a hard link on a local file system, a copy
made by the store on an object store. Nothing of the old array is touched, and either may be removed.

The tiles of the ragged row block, whose last rows are new, are *not* copied with NaN in the rows that are still to
come: a file would then be there and not valid, and whether a tile is finished would be a question to its content. They
are read where they are by the task that completes them, which keeps their finished rows, computes the others and writes
the whole tile at once. So a tile is whole or absent, as everywhere, and a takeover that was interrupted is simply begun
again. When the old array is gone by then, the task computes those rows too.

Cost
----
One link or copy, and no byte read, for each tile.

Find the finished Cholesky factor of a system that was solved earlier, in the store where it was left.

A factor's fields say which matrix it factorises; a model knows the same of its own system. The tile size, where its
Gram tiles came from and the BLAS kernel decide its bytes but not what it is a factor of, so any float64 factor of the
matrix will do.

The fields say nothing of what a tile holds, and of a kernel function only its name, so that what is found is compared
with the matrix before it is used.

Cost: one small JSON document for each factor of the store; one look at every tile of the one that is taken, and what
comparing it takes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset import Dataset, Scaling
from dkrr.dataset.dataset import Part
from dkrr.dataset.digests import DIGEST_ROWS
from dkrr.dataset.drift import Drift, measure_drift
from dkrr.dataset.summary import row_moments
from dkrr.errors import DamagedChunkError, StoreError
from dkrr.kernels import Kernel
from dkrr.kernels.pairwise import MAX_EXTENT
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import keep_for_others
from dkrr.store.chunks import FloatArray
from dkrr.store.files import (
    arrays_below,
    children,
    is_url,
    join,
    link_key,
    name_of,
    parent_of,
    place,
    read_json,
    write_json,
)
from dkrr.tiles import TileMatrix

__all__ = [
    "Ancestor",
    "Base",
    "CenterJudge",
    "FrozenCenter",
    "TakenOver",
    "WantedFactor",
    "ancestors",
    "choose_center",
    "continue_lineage",
    "factor_fields",
    "gram_fields",
    "key_of",
    "open_factor",
    "record_rows",
    "recorded_models",
    "short_name",
    "take_over",
]

# Raise FORMAT_VERSION when the layout of tiles changes, KERNEL_VERSION when a kernel's values change.
FORMAT_VERSION = 1
KERNEL_VERSION = 4


def gram_fields(operator: RidgeOperator, dtype: str, source_digest: str = "") -> dict[str, Any]:
    """What decides the bytes of the Gram tiles: no alpha, no weights."""
    return {
        "format_version": FORMAT_VERSION,
        "kernel_version": KERNEL_VERSION,
        "kernel": {"kernel": "precomputed"} if operator.kernel is None else operator.kernel.to_dict(),
        "center": None if operator.rows is None or operator.rows.center is None else list(operator.rows.center),
        "n": operator.grid.n,
        "tile_size": operator.grid.tile_size,
        "dtype": dtype,
        "rows_digest": source_digest or (operator.rows.digest if operator.rows is not None else ""),
    }


def factor_fields(
    operator: RidgeOperator, dtype: str, weight_digest: str | None, blas: str, source_digest: str = ""
) -> dict[str, Any]:
    """What decides the bytes of the factor's tiles."""
    fields = gram_fields(operator, dtype, source_digest)
    fields["alpha"] = operator.alpha
    fields["weight_digest"] = weight_digest if operator.weighted else None
    fields["gram"] = "on_the_fly" if operator.gram is None else "stored"
    fields["blas"] = blas
    return fields


def key_of(fields: dict[str, Any]) -> str:
    """The first 40 hexadecimal digits of the SHA-256 of the fields in canonical JSON."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


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
        What decides its bytes, see :mod:`dkrr.linalg.catalogue`.
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


@dataclass(frozen=True, kw_only=True)
class FrozenCenter:
    """The centre of an earlier fit.

    Parameters
    ----------
    center
        Where its kernel is centred; None where the newer rows have drifted, or are, too far away.
    num_rows
        First rows of the data set whose mean it is.
    drift, limit
        Of all rows that came after those, and the most that is allowed; None allows any.
    """

    center: tuple[float, ...] | None
    num_rows: int
    drift: Drift
    limit: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the record of a run."""
        state = "anew" if self.center is None else "frozen"
        return {"center": state, "rows": self.num_rows, "drift": self.drift.to_dict(), "limit": self.limit}

    def sentence(self) -> str:
        """What happened, in words; "" where there are no newer rows, or any are allowed."""
        if self.center is None and (self.limit is None or self.drift.value <= self.limit):
            return f"fitted anew, not centred: distances from the first {self.num_rows:,} rows would be rounded"
        if self.limit is None or not self.drift.num_rows:
            return ""
        far = self.drift.words()
        if self.center is None:
            return f"fitted anew, with the centre of all rows: {far}"
        return f"centred at the mean of the first {self.num_rows:,} rows, frozen; {far}"


class CenterJudge:
    """Whether the rows of a data set are near enough to the centres of earlier fits; reads them once a centre.

    Parameters
    ----------
    limit
        The drift up to which a centre is kept; None keeps any.
    """

    def __init__(self, dataset: Dataset, kernel: Kernel, limit: float | None) -> None:
        self.dataset, self.kernel, self.limit = dataset, kernel, limit
        self._found: dict[tuple[Any, ...], FrozenCenter] = {}

    def judge(self, ancestor: Ancestor) -> FrozenCenter:
        """The centre of an earlier array, which must have one."""
        center = tuple(float(value) for value in ancestor.fields["center"])
        key = (center, ancestor.center_rows)
        if key not in self._found:
            # of rows that are compared as they are, none is far from the centre
            is_free = self.limit is None or not any(center)
            drift = Drift() if is_free else self._drift(center, ancestor.center_rows)
            is_near = (self.limit is None or drift.value <= self.limit) and not self._rounds(np.array(center))
            self._found[key] = FrozenCenter(
                center=center if is_near else None, num_rows=ancestor.center_rows, drift=drift, limit=self.limit
            )
        return self._found[key]

    def allows(self, ancestor: Ancestor) -> bool:
        """Whether an earlier array may be continued, as far as its centre is concerned."""
        return ancestor.fields.get("center") is None or self.judge(ancestor).center is not None

    def _rounds(self, center: NDArray[np.float64]) -> bool:
        """Whether typical rows, less the centre, are rounded by more than 1e-13 of the kernel's length."""
        typical = np.hypot(self.dataset.x_std, self.dataset.x_mean - center)
        return bool(center.any()) and self.kernel.extent(typical[None]) > MAX_EXTENT**2

    def _drift(self, center: tuple[float, ...], num_rows: int) -> Drift:
        X = self.dataset.X
        if num_rows >= X.num_rows:
            return Drift()
        spread = row_moments(X, 0, num_rows).std
        none = np.empty(0)
        near = Scaling(x_mean=np.array(center), x_std=np.where(spread == 0, 1.0, spread), y_mean=none, y_std=none)
        return measure_drift(near, row_moments(X, num_rows), None, self.dataset.feature_names)


def choose_center(
    found: Iterable[Ancestor],
    dataset: Dataset,
    kernel: Kernel,
    *,
    tile_size: int,
    dtype: str,
    gram: str,
    alphas: Sequence[float],
    limit: float | None,
) -> FrozenCenter | None:
    """The centre with which most of earlier fits can be continued; None where there is none to be frozen.

    Parameters
    ----------
    found
        Earlier factors and Gram matrices of the kernel, those with the longest prefix first.
    tile_size, dtype, gram, alphas
        Of the wanted factor.
    limit
        See :class:`CenterJudge`.
    """
    judge = CenterJudge(dataset, kernel, limit)
    kept: dict[bool, FrozenCenter] = {}
    refused: dict[bool, FrozenCenter] = {}
    for ancestor in found:
        fields = ancestor.fields
        if fields.get("center") is None or fields.get("tile_size") != tile_size:
            continue
        is_same = ancestor.kind == "factors" and (
            fields["alpha"] in alphas
            and (fields["dtype"], fields["gram"]) == (dtype, gram)
            and (fields["weight_digest"] is None) == (dataset.weight is None)
        )
        if is_same in kept:
            continue
        judged = judge.judge(ancestor)
        (refused if judged.center is None else kept).setdefault(is_same, judged)
    # a factor that can be continued goes before whatever else has more rows
    ranked = (kept.get(True), kept.get(False), refused.get(True), refused.get(False))
    return next((judged for judged in ranked if judged is not None), None)


logger = logging.getLogger("dkrr.linalg")

COPIES_AT_ONCE = 16
SHORT = 12


@dataclass(frozen=True)
class Base:
    """An earlier matrix whose first ``num_rows`` rows are rows of this one."""

    matrix: TileMatrix
    num_rows: int

    def finished(self, i: int) -> int:
        """Rows of row block i that it has, when it has some and not all."""
        b = self.matrix.grid.tile_size
        return self.num_rows % b if self.num_rows // b == i else 0

    def read(self, i: int, j: int) -> FloatArray | None:
        """The finished rows of tile (i, j), read-only; None when it is not there, or damaged."""
        rows = self.finished(i)
        try:
            tile = self.matrix.read(i, j)
        except DamagedChunkError as exc:
            logger.info("finished rows of tile (%d, %d) are computed again (%s)", i, j, exc.message)
            return None
        except StoreError:
            return None
        return tile[:rows, : rows if i == j else None]


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """What was taken over.

    Parameters
    ----------
    num_rows
        m, the longest common prefix; 0 where nothing was found.
    num_tiles, num_linked, num_bytes
        Whole tiles in the prefix that are there, how many of them got a link or a copy just now, and their bytes.
    sources
        The arrays that they come from.
    bases
        Where finished rows of ragged tiles are.
    reason
        Why nothing was taken over, where an earlier matrix of the same system has rows in common.
    """

    num_rows: int = 0
    num_tiles: int = 0
    num_linked: int = 0
    num_bytes: int = 0
    sources: tuple[str, ...] = ()
    bases: tuple[Base, ...] = field(default=(), repr=False)
    reason: str = ""

    def first(self, i: int) -> int:
        """Rows of row block i that need not be computed."""
        return max((base.finished(i) for base in self.bases), default=0)

    def read(self, i: int, j: int, agrees: Callable[[TileMatrix, int], bool] | None = None) -> FloatArray | None:
        """The finished rows of tile (i, j), :meth:`first` of them, from whichever earlier matrix has them.

        ``agrees``, if given, is asked of each whether so many first rows of its tile are what they should be.
        """
        rows = self.first(i)
        for base in self.bases:
            if rows and base.finished(i) == rows and (agrees is None or agrees(base.matrix, rows)):
                found = base.read(i, j)
                if found is not None:
                    return found
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for the record of a run."""
        return {
            "rows": self.num_rows,
            "tiles": self.num_tiles,
            "bytes": self.num_bytes,
            "sources": [short_name(location) for location in self.sources],
            "reason": self.reason,
        }


def short_name(location: str) -> str:
    """What a record calls an earlier array: not its whole key, which would keep `dkrr gc` from removing it."""
    return name_of(location)[:SHORT]


def continue_lineage(
    operator: RidgeOperator, matrix: TileMatrix, kind: Kind, fields: dict[str, Any], store: Any
) -> TakenOver:
    """Record of which rows a new matrix is made, and give it what earlier ones in the store have of it.

    Parameters
    ----------
    fields
        Everything that decides the bytes of the matrix.
    """
    if operator.kernel is None or operator.rows is None:  # a given matrix has no rows by which it could be known
        return TakenOver()
    dataset = operator.rows.open()
    known = ancestors(store, dataset, fields["kernel"], kinds=("factors", "grams"))
    record_rows(store, kind, fields, dataset, matrix.location, known=known)
    if not matrix.missing():
        return TakenOver()
    found = [ancestor for ancestor in known if ancestor.kind == kind]
    same = [ancestor for ancestor in found if not ancestor.differs_in(fields)]
    taken = take_over(matrix, same)
    if taken.num_rows:
        return taken
    nearest = sorted(found, key=lambda other: (-other.num_rows, len(other.differs_in(fields))))
    reason = next(filter(None, (_reason_against(other, fields) for other in nearest)), "")
    if reason:
        logger.info("nothing is continued: %s", reason)
    return replace(taken, reason=reason)


# what says how a factor was computed, and not of what
_HOW = frozenset({"blas", "center", "dtype", "gram", "tile_size"})


def _reason_against(other: Ancestor, fields: dict[str, Any]) -> str:
    """Why an earlier matrix of the same system cannot be continued; "" where it is one of another system."""
    differing = other.differs_in(fields)
    if not differing or differing - _HOW:
        return ""
    parts = [
        f"{name} {other.fields.get(name)} there, {fields.get(name)} here" for name in sorted(differing - {"center"})
    ]
    parts += ["another centre of the features"] * ("center" in differing)
    name, how = short_name(other.location), "; ".join(parts)
    return f"{other.kind} {name} shares {other.num_rows:,} rows, but was made in another way ({how})"


def take_over(matrix: TileMatrix, found: Sequence[Ancestor]) -> TakenOver:
    """Give a matrix the tiles that earlier ones of its lineage have already; those with the longest prefix come first.

    Parameters
    ----------
    found
        Earlier matrices that differ in their rows only; they may be unfinished, or gone.
    """
    b = matrix.grid.tile_size
    missing = set(matrix.missing())
    sources: list[str] = []
    bases: list[Base] = []
    num_linked = longest = 0
    for ancestor in found:
        if _is_same_place(ancestor.location, matrix.location):
            continue
        full = ancestor.num_rows // b
        wanted = [(i, j) for i, j in missing if i < full]
        ragged = bool(ancestor.num_rows % b) and any(i == full for i, _ in missing)
        if not wanted and not ragged and longest:
            continue
        try:
            source = TileMatrix.open(ancestor.location)
        except StoreError:
            continue  # removed, or being removed
        if source.grid.tile_size != b or source.dtype != matrix.dtype:
            continue
        there = source.array.valid_keys()
        linked = _link(source, matrix, [key for key in wanted if source.array.chunk_key(key) in there])
        missing -= set(linked)
        num_linked += len(linked)
        has_rows = ragged and any(source.array.chunk_key((full, j)) in there for j in range(full + 1))
        if has_rows:
            bases.append(Base(source, ancestor.num_rows))
        if linked or has_rows or not (wanted or ragged):
            longest = max(longest, ancestor.num_rows)
            sources.append(source.location)
    num_tiles = sum(1 for i, j in matrix.grid.lower() if i < longest // b and (i, j) not in missing)
    return TakenOver(
        num_rows=longest,
        num_tiles=num_tiles,
        num_linked=num_linked,
        num_bytes=num_tiles * (matrix.array.chunk_bytes + 4),
        sources=tuple(sources),
        bases=tuple(bases),
    )


def _is_same_place(one: str, other: str) -> bool:
    """Whether two locations below one store are the same, however the store is spelt."""
    return name_of(one) == name_of(other) and name_of(parent_of(one)) == name_of(parent_of(other))


def _link(source: TileMatrix, target: TileMatrix, tiles: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those of the tiles that have come over."""
    origin, destination = source.array.store, target.array.store
    wanted = sorted(tiles)

    def link(tile: tuple[int, int]) -> bool:
        return link_key(origin, source.array.chunk_key(tile), destination) is not None

    if is_url(destination):
        with ThreadPoolExecutor(COPIES_AT_ONCE) as threads:
            done = list(threads.map(link, wanted))
    else:
        done = [link(tile) for tile in wanted]
    return [tile for tile, is_done in zip(wanted, done, strict=True) if is_done]


logger = logging.getLogger("dkrr.linalg")


@dataclass(frozen=True, kw_only=True)
class WantedFactor:
    """What must agree: the fields of :func:`~dkrr.linalg.catalogue.factor_fields` that decide the matrix."""

    kernel: dict[str, Any]
    center: list[float] | None
    n: int
    alpha: float
    rows_digest: str
    weight_digest: str | None

    def reason_against(self, location: str) -> str:
        """Why the array at ``location`` is not this factor, finished and in float64; "" when it is."""
        document = read_json(location, "zarr.json")
        if document is None:
            return "is gone"
        fields = document.get("attributes") if isinstance(document, dict) else None
        if not isinstance(fields, dict) or key_of(fields) not in location:
            return "is not a factor of dkrr, or not the one its name says"
        # not the version of the kernels' code, which says that entries may be rounded otherwise: what is found is
        # compared with the kernel itself
        wanted = {**vars(self), "format_version": FORMAT_VERSION}
        differing = [name for name, value in wanted.items() if fields.get(name) != value]
        if differing:
            return f"is a factor of something else ({', '.join(sorted(differing))})"
        if fields.get("dtype") != "float64":
            return f"is {fields.get('dtype')}, which is not precise enough"
        factor = TileMatrix.open(location)
        missing = factor.missing()
        if missing:
            return f"is not whole: {len(missing):,} of {factor.grid.num_lower:,} tiles are missing"
        return ""


def open_factor(
    wanted: WantedFactor, named: Sequence[str], store: str | None, misfit: Callable[[TileMatrix], str]
) -> TileMatrix:
    """The factor at one of the named locations, else any in the store that is the one.

    Parameters
    ----------
    named
        Where it was when the system was solved.
    store
        A store that is searched, or None.
    misfit
        Says why a factor is not that of the matrix, "" when it is.

    Raises
    ------
    StoreError
        There is none; the message says why not for each that was named, or that is not what its fields say.
    """
    reasons = []
    for location in (*named, *(other for other in arrays_below(store, "factors") if other not in named)):
        reason = _taken(wanted, location)
        if reason:
            reasons += [f"{location} {reason}"] if location in named else []
            continue
        factor = TileMatrix.open(location)
        try:
            reason = misfit(factor)
        except DamagedChunkError as damage:
            reason = f"is damaged ({damage.message})"
        if not reason:
            return factor
        logger.warning("%s %s", location, reason)
        reasons.append(f"{location} {reason}")
    raise StoreError(f"no float64 factor of these {wanted.n:,} rows: {'; '.join(reasons) or 'the fit left none'}")


def _taken(wanted: WantedFactor, location: str) -> str:
    """Take a factor that is wanted into use; why it is not, "" when it is."""
    reason = wanted.reason_against(location)
    if not reason:
        keep_for_others(location)
        reason = wanted.reason_against(location)  # it may just have been removed
    return reason
