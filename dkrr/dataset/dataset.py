"""A data set on disk: X, y and weights in row chunks, with names, digests and statistics.

``dataset.zarr`` is a Zarr group with the arrays X (n, d), y (n, t) and weight (n, 1) where there are any, which any
Zarr reader can open. Everything else is in the attributes of the group. Each append is a *generation*: n and the digest
of the first n rows of X are kept, so that a fit on the old rows is known to be a fit on a prefix. Generations are
numbered from 1 on and a number is never used twice, also not after a generation was dropped; the same holds for the
numbers of rows, so that what was decided about a row by its number (whether it is held out) stays decided.

Rows are only ever added to an array. Where some are to go, all others are written to arrays of a new *version*, whose
names have its number (X-2), and the attributes then name those; who reads the version before goes on doing so.

Cost: opening reads three or four small JSON files; no rows.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dkrr.dataset.rows import DIGEST_ROWS, Floats, RowArray, RowSummary, damaged, decode_floats, prefix_digest
from dkrr.dataset.table import Fitted
from dkrr.errors import DataError, StoreError
from dkrr.markup import lines_text, named
from dkrr.store.documents import refuse_links
from dkrr.store.files import check_place, document_crc, is_url, list_entries, read_json, storage_errors

FORMAT = "dataset"
FORMAT_VERSION = 1

Part = Literal["X", "y", "weight"]
Mask = NDArray[np.bool_]


def array_name(part: str, version: int) -> str:
    """What the array of a part is called in the group: ``X``, and ``X-2`` in version 2."""
    return part if version == 1 else f"{part}-{version}"


def attributes_of(location: Any) -> dict[str, Any] | None:
    """What the group of a data set at ``location`` says, finished or not; None where there is none."""
    document = read_json(location, "zarr.json")
    found = document.get("attributes") if isinstance(document, dict) else None
    return found if isinstance(found, dict) and found.get("dkrr_format") == FORMAT else None


def checksum_of(attributes: dict[str, Any]) -> str:
    """Of what a group says of its present rows: crc32c of the canonical JSON, earlier versions and itself aside."""
    own = {name: value for name, value in attributes.items() if name not in ("checksum", "earlier")}
    return document_crc(own)


def pack(mask: Mask) -> str:
    """A mask as text, with the checksum of its bits."""
    octets = np.packbits(mask).tobytes()
    return f"{base64.b64encode(octets).decode()}:{crc32c(octets):08x}"


def unpack(text: str, num_rows: int | None = None) -> Mask:
    """The inverse of :func:`pack`; without ``num_rows`` with up to seven False more. Earlier texts have no checksum.

    Raises
    ------
    StoreError
        The bits are others than those of the checksum.
    """
    encoded, _, checksum = text.partition(":")
    octets = base64.b64decode(encoded)
    if checksum and checksum != f"{crc32c(octets):08x}":
        raise StoreError(f"a mask of rows is damaged (crc32c is not {checksum})", hint="restore the document it is in")
    return np.unpackbits(np.frombuffer(octets, dtype=np.uint8), count=num_rows).astype(bool)


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The rows of one append.

    Parameters
    ----------
    number
        1 for the first; never used twice in a data set.
    n
        Rows of the data set up to and including this generation.
    num_rows
        Rows of this generation.
    digest
        Digest of the first ``n`` rows of X.
    first_row
        Number of its first row, counted over all rows that the data set ever had.
    label
        What the append was called, if anything.
    dropped
        Which rows of the source were left out for missing values (:func:`pack`), if any were. They have numbers, too,
        so that a row is held out or not whatever is missing in others.
    """

    number: int
    n: int
    num_rows: int
    digest: str
    first_row: int
    label: str | None = None
    dropped: str | None = None

    @cached_property
    def kept(self) -> Mask:
        """Of all rows that have numbers from ``first_row`` on, which are there."""
        if self.dropped is None:
            return np.ones(self.num_rows, dtype=bool)
        dropped = unpack(self.dropped)
        return ~dropped[: self.num_rows + np.count_nonzero(dropped)]

    @property
    def num_dropped(self) -> int:
        """Rows of the source that were left out for missing values."""
        return 0 if self.dropped is None else len(self.kept) - self.num_rows

    @property
    def start(self) -> int:
        """Position of its first row in the data set."""
        return self.n - self.num_rows


@dataclass
class _InPlace:
    """What is at a path still begins with the rows that were opened, by its metadata; called after every read.

    A folder may be moved away, another one be moved there, or a link be changed: what is read then are rows of both. Of
    objects, which nobody exchanges in one step, it is not asked.

    Raises
    ------
    DataError
        The rows are others.
    StoreError
        There is no data set.
    """

    path: Any
    version: int
    num_rows: int
    digests: dict[str, str]
    state: Any

    def __call__(self) -> None:
        state = state_of(self.path)
        if state != self.state:  # one call of the system, where nothing was written since
            self.compare()
            self.state = state

    def compare(self) -> None:
        """Ask, also where nothing was written since."""
        now, n = open_dataset(self.path, version=self.version), self.num_rows
        for part, digest in self.digests.items():
            if now.num_rows < n or part not in now.records or digest != now.prefix_digest(n, part):
                raise DataError(f"{self.path} holds other rows than when it was opened", hint="open it again, and fit")


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Dataset(Fitted):
    """Rows for a fit or a prediction, opened by :func:`open_dataset` and made by :func:`~dkrr.dataset.ingest`.

    Parameters
    ----------
    path
        Folder (``str``) or URL.
    num_rows
        n.
    feature_names, target_names
        One name a column of X and of y.
    weight_name
        Name of the weight column, None without weights.
    classes
        The label of each column of y where y is one-hot, else None.
    y_is_1d
        Whether y was given as one column without a second axis; predictions then have none either.
    X : RowArray (n, d)
    y : RowArray (n, t) or None
    weight : RowArray (n, 1) or None
    digest, digest_y, digest_weight
        Digest of all rows of X, y and weight; None for what is not there.
    generations : tuple of Generation
        What each append brought, in order, with n and the digest of the first n rows of X.
    x_mean, x_std : (d,)
    y_mean, y_std : (t,)
        Unweighted means and population standard deviations; the latter are 1 for a constant column.
    made_up
        Which of "feature_names" and "target_names" somebody did not give; such names tell no columns apart.
    places
        Where the features, the targets and the weights stood among the columns of the first source, in this order, and
        the columns that are none of them; () where that was not recorded.
    origin
        What the rows were made from, where dkrr made them from another data set.
    version
        Which arrays of the group hold the rows: 1 until rows are dropped, one more each time.
    next_generation, next_row
        The numbers that the next append and its first row get.
    records
        Of each array by name what was gathered when it was written, see :meth:`~dkrr.dataset.rows.RowSummary.to_dict`.
    """

    path: Any
    num_rows: int
    feature_names: tuple[str, ...]
    target_names: tuple[str, ...]
    weight_name: str | None
    classes: tuple[Any, ...] | None
    y_is_1d: bool
    X: RowArray
    y: RowArray | None
    weight: RowArray | None
    digest: str
    digest_y: str | None
    digest_weight: str | None
    generations: tuple[Generation, ...]
    x_mean: Floats
    x_std: Floats
    y_mean: Floats
    y_std: Floats
    made_up: tuple[str, ...] = ()
    places: tuple[tuple[int, ...], ...] = ()
    origin: dict[str, Any] | None = None
    version: int = 1
    next_generation: int = 1
    next_row: int = 0
    records: dict[str, dict[str, Any]] = field(repr=False)
    _verified: Any = field(default=None, repr=False, compare=False)
    _state: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, array in self.parts().items():
            object.__setattr__(self, name, replace(array, check=self._in_place, every_read=True))

    @cached_property
    def _in_place(self) -> _InPlace:
        digests = {part: str(record["digest"]) for part, record in self.records.items()}
        return _InPlace(self.path, self.version, self.num_rows, digests, self._state)

    def __repr__(self) -> str:
        features = named(self.num_features, "feature", self.feature_names)
        targets = named(self.num_targets, "target", self.target_names)
        generations, weight = named(len(self.generations), "generation"), self.weight_name or "none"
        return lines_text(
            f"Dataset {self.path}",
            f"{named(self.num_rows, 'row')}, {features}; {targets}",
            f"{generations}, weights: {weight}, digest {self.digest}",
        )

    @property
    def num_features(self) -> int:
        return len(self.feature_names)

    @property
    def num_targets(self) -> int:
        return len(self.target_names)

    @property
    def targets(self) -> RowArray:
        """y (n, t), of no columns where there are no targets."""
        shape = {"num_rows": self.num_rows, "num_columns": 0, "rows_per_chunk": self.X.rows_per_chunk}
        return self.y or RowArray.unsaved(self.path, array_name("y", self.version), **shape)

    def read(self, start: int, stop: int) -> Floats:
        """Rows ``start`` to ``stop`` of X, (stop - start, d)."""
        return self.X.read(start, stop)

    def read_parts(self, start: int, stop: int) -> dict[str, Floats]:
        """Rows ``start`` to ``stop`` of the arrays that are there, by name."""
        return {name: array.read(start, stop) for name, array in self.parts().items()}

    @property
    def kept(self) -> Mask:
        """Of all rows that its generations were read from, which are there: not those dropped for missing values."""
        return np.concatenate([generation.kept for generation in self.generations])

    @property
    def num_dropped(self) -> int:
        """Rows that were left out for missing values."""
        return sum(generation.num_dropped for generation in self.generations)

    def parts(self) -> dict[str, RowArray]:
        """The arrays that are there, by name."""
        arrays = {"X": self.X, "y": self.y, "weight": self.weight}
        return {name: array for name, array in arrays.items() if array is not None}

    def check_still_there(self) -> None:
        """Compare the rows at the path with the digests that were read when it was opened; appended ones do not matter.

        Where :meth:`verify` has not read them, or files of them have been written since it did, it reads them.

        Raises
        ------
        DataError
            They are others.
        DamagedChunkError
            As :meth:`verify`.
        """
        self._in_place.compare()
        if self._verified != self._stamps():  # chunks that changed places pass their checksums
            self.verify()

    def _stamps(self) -> list[Any]:
        """What tells that a file of rows was written since: where rows are appended it is the last one."""
        arrays, numbers = [part.array for part in self.parts().values()], range(self.X.num_chunks)
        if is_url(self.path):
            keys = {f"c/{i}/0" for i in numbers}
            there = [item for array in arrays for item in list_entries(array.location) if item.key in keys]
            return [(item.key, item.num_bytes, item.version) for item in there]
        files = [os.path.join(array.store, array.chunk_key((i, 0))) for array in arrays for i in numbers]
        found = [os.stat(path) for path in files if os.path.exists(path)]
        return [(file.st_ino, file.st_size, file.st_mtime_ns) for file in found]

    def prefix_digest(self, n: int, part: str = "X") -> str:
        """Digest of the first ``n`` rows.

        Two data sets whose digests at n agree hold the same first n rows, whatever their chunks.

        Raises
        ------
        DamagedChunkError
            Rows had to be read (``n`` is no multiple of 1,024 and was never the end of an append) and are damaged.
        """
        known = {item.n: item.digest for item in self.generations} if part == "X" else {}
        known[self.num_rows] = str(self.records[part]["digest"])
        return known.get(n) or self._digest_of_first(n, part)

    def _digest_of_first(self, n: int, part: str) -> str:
        full = n // DIGEST_ROWS
        tail = self.parts()[part].read(full * DIGEST_ROWS, n)
        return prefix_digest(self.records[part]["block_digests"][:full], tail)

    def verify(self) -> None:
        """Read every row and compare it with the digests.

        Raises
        ------
        DamagedChunkError
            A chunk is missing or damaged, or intact in itself but not the one that was written there.

        Cost
        ----
        One pass over the data set; memory for one chunk.
        """
        stamps = self._stamps()
        for name, array in self.parts().items():
            found = RowSummary.of(array).block_digests
            pairs = itertools.zip_longest(found, self.records[name]["block_digests"])
            differing = [number * DIGEST_ROWS for number, (block, known) in enumerate(pairs) if block != known]
            ends = [(item.n, item.digest) for item in self.generations] if name == "X" else []
            for n, digest in [*ends, (self.num_rows, self.records[name]["digest"])]:
                differing += [n - 1] if self._digest_of_first(n, name) != digest else []
            if differing:
                reason = f"the digest of rows from {differing[0]} on differs"
                hint = "restore it, or ingest the source again"
                raise damaged(array.array, differing[0] // array.rows_per_chunk, reason, hint)
        object.__setattr__(self, "_verified", stamps)


def open_dataset(path: Any, *, version: int | None = None) -> Dataset:
    """Open a data set.

    Parameters
    ----------
    path
        Folder or URL.
    version
        One that was replaced lately; None means the present one.

    Raises
    ------
    StoreError
        Nothing there, unfinished, of a newer format version, damaged metadata, or a version that is gone.
    """
    check_place("path", path)
    where = str(path) if is_url(path) else str(Path(path))
    refuse_links(path, is_deep=False)
    state = state_of(path)  # before it is read
    with storage_errors(path):
        attributes = attributes_of(path)
    if attributes is None:
        raise StoreError(f"{where} is not a data set of dkrr", hint="check the path, or ingest a source first")
    found = attributes.get("format_version")
    if found != FORMAT_VERSION:
        raise StoreError(
            f"{where} has data set format version {found!r}; {FORMAT_VERSION} expected", hint="use a matching dkrr"
        )
    if attributes.get("complete") is not True:
        raise StoreError(f"{where} is unfinished, its ingest was interrupted", hint="run the ingest again")
    try:
        if version not in (None, attributes["version"]):
            known = {item["version"]: item["attributes"] for item in attributes.get("earlier", [])}
            if version not in known:
                raise StoreError(f"version {version} of {where} is gone", hint="open it again: it has other rows now")
            attributes = known[version]
        if attributes.get("checksum", found := checksum_of(attributes)) != found:  # earlier releases wrote none
            raise StoreError(
                f"zarr.json of {where} is damaged (crc32c {found}, {attributes['checksum']} stored)",
                hint="restore it, or ingest the source again",
            )
        return _from_attributes(where, attributes, state)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StoreError(f"{where} has unreadable metadata ({exc!r})", hint="restore it, or ingest it again") from exc


def state_of(path: Any) -> tuple[int, ...] | None:
    """What tells that the metadata of a folder were written since, or are those of another one; None of objects."""
    if is_url(path):
        return None
    with contextlib.suppress(OSError):
        found = os.stat(os.path.join(path, "zarr.json"))
        return found.st_dev, found.st_ino, found.st_mtime_ns
    return ()


def _from_attributes(path: Any, attributes: dict[str, Any], state: Any) -> Dataset:
    records, version, num_rows = attributes["arrays"], int(attributes["version"]), int(attributes["num_rows"])
    arrays = {name: RowArray.open(path, array_name(name, version), num_rows) for name in records}
    names: dict[str, Any] = {name: tuple(attributes[name]) for name in ("feature_names", "target_names", "made_up")}
    for name, known in (("X", names["feature_names"]), ("y", names["target_names"])):
        found = arrays[name].num_columns if name in arrays else 0
        if found != len(known):
            raise StoreError(f"{name} of {path} has {found} columns and {len(known)} names", hint="restore it")
    classes = attributes["classes"]
    return Dataset(
        path=path,
        num_rows=num_rows,
        weight_name=attributes["weight_name"],
        classes=None if classes is None else tuple(classes),
        y_is_1d=bool(attributes["y_is_1d"]),
        generations=tuple(Generation(**item) for item in attributes["generations"]),
        places=tuple(map(tuple, attributes.get("places", ()))),
        origin=attributes["origin"],
        version=version,
        next_generation=int(attributes["next"]["generation"]),
        next_row=int(attributes["next"]["row"]),
        _state=state,
        **names,
        **_fields_of_parts(arrays, records),
    )


def _fields_of_parts(arrays: Mapping[str, RowArray], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a :class:`Dataset` says of its arrays: themselves, their digests, means and standard deviations."""
    fields: dict[str, Any] = {"records": records}
    for name, suffix in (("X", ""), ("y", "_y"), ("weight", "_weight")):
        record = records.get(name, {"digest": None, "mean": [], "std": []})
        fields |= {name: arrays.get(name), f"digest{suffix}": record["digest"]}
        if name != "weight":
            std = decode_floats(record["std"])  # 0 of a constant column
            fields |= {f"{name.lower()}_mean": decode_floats(record["mean"])}
            fields |= {f"{name.lower()}_std": np.where(std == 0, 1.0, std)}
    return fields


def before_appends(dataset: Dataset, digests: Mapping[str, str]) -> Dataset | None:
    """The data set of the first rows that have these digests, which may be all; None where it never had those.

    Appends leave all rows where they are, so the first n rows of a data set that has grown are the data set of before.
    You need it where a process opens the rows of a fit for the first time after others were appended. Nothing of them
    is believed: digests and statistics are made anew and must be those of then.

    Parameters
    ----------
    digests
        Of all rows, by part: of ``"X"``, and of "y" and "weight" where they matter.

    Cost
    ----
    One pass over the first n rows; memory for one chunk.
    """
    if all(dataset.records.get(name, {}).get("digest") == digest for name, digest in digests.items()):
        return dataset
    end = next((item.n for item in dataset.generations if item.digest == digests["X"]), None)
    if end is None or digests.keys() - dataset.records.keys():
        return None
    arrays = {name: RowArray(array.array, end) for name, array in dataset.parts().items()}
    records = {name: RowSummary.of(array).to_dict() for name, array in arrays.items()}
    if any(records[name]["digest"] != digest for name, digest in digests.items()):
        return None
    generations = tuple(item for item in dataset.generations if item.n <= end)
    return replace(dataset, num_rows=end, generations=generations, **_fields_of_parts(arrays, records))


def fields_of(dataset: Dataset) -> dict[str, Any]:
    """What a data set that is made of this one keeps besides rows: names, classes, and whether y has one axis."""
    names = ("feature_names", "target_names", "weight_name", "classes", "y_is_1d", "made_up", "places")
    return {name: getattr(dataset, name) for name in names}
