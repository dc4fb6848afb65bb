"""A data set on disk: X, y and weights in row chunks, with names, digests and statistics.

``dataset.zarr`` is a Zarr group with the arrays X (n, d), y (n, t) and weight (n, 1) where there are any, which any
Zarr reader can open. Everything else is in the attributes of the group. Each append is a *generation*: n and the digest
of the first n rows of X are kept, so that a fit on the old rows is known to be a fit on a prefix.

Rows are only ever added to an array. Where some are to go, all others are written to arrays of a new *version*, whose
names have its number (X-2), and the attributes then name those; who reads the version before goes on doing so.

Cost: opening reads three or four small JSON files; no rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.columns import made_up_names, target_columns
from dkrr.dataset.destination import FORMAT, FORMAT_VERSION, array_name, is_part
from dkrr.dataset.digests import DIGEST_ROWS, block_digest, prefix_digest
from dkrr.dataset.generations import Counters, Generation, read_generations
from dkrr.dataset.rows import Floats, RowArray
from dkrr.dataset.summary import decode_floats
from dkrr.errors import DamagedChunkError, DataError, StoreError
from dkrr.markup import lines_text, named
from dkrr.store.files import check_place, children, local_root, read_json

__all__ = ["Dataset", "Part", "fields_of_parts", "open_dataset"]

Part = Literal["X", "y", "weight"]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Dataset:
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
    origin
        What the rows were made from, where dkrr made them from another data set.
    version
        Which arrays of the group hold the rows: 1 until rows are dropped, one more each time.
    counters
        The numbers of the generation and of the row that come next.
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
    origin: dict[str, Any] | None = None
    version: int = 1
    counters: Counters = field(default_factory=lambda: Counters(generation=1, row=0))
    records: dict[str, dict[str, Any]] = field(repr=False)

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
    def names(self) -> tuple[str, ...]:
        """Names of the features that somebody gave; () where there are none."""
        return () if "feature_names" in self.made_up else self.feature_names

    @property
    def named_targets(self) -> tuple[str, ...]:
        """Names of the columns that the targets were read from, as far as somebody gave them; () for none."""
        return () if "target_names" in self.made_up else target_columns(self.target_names, self.classes)

    def read(self, start: int, stop: int) -> Floats:
        """Rows ``start`` to ``stop`` of X, (stop - start, d)."""
        return self.X.read(start, stop)

    @property
    def kept(self) -> NDArray[np.bool_]:
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

        Raises
        ------
        DataError
            They are others.
        """
        now, n = open_dataset(self.path, version=self.version), self.num_rows
        digests: dict[Part, str | None] = {"X": self.digest, "y": self.digest_y, "weight": self.digest_weight}
        for part, digest in digests.items():
            there = now.prefix_digest(n, part) if now.num_rows >= n and part in now.parts() else None
            if digest not in (None, there):
                raise DataError(f"{self.path} holds other rows than when it was opened", hint="open it again, and fit")

    def prefix_digest(self, n: int, part: Part = "X") -> str:
        """Digest of the first ``n`` rows.

        Two data sets whose digests at n agree hold the same first n rows, whatever their chunks.

        Raises
        ------
        DamagedChunkError
            Rows had to be read (``n`` is no multiple of 1,024 and was never the end of an append) and are damaged.
        """
        array, record = self.parts()[part], self.records[part]
        if not 0 < n <= self.num_rows:
            raise IndexError(f"digest of the first {n} rows; {self.path} has {self.num_rows}")
        if n == self.num_rows:
            return str(record["digest"])
        known = [generation.digest for generation in self.generations if generation.n == n] if part == "X" else []
        if known:
            return known[0]
        full = n // DIGEST_ROWS
        return prefix_digest(record["block_digests"][:full], array.read(full * DIGEST_ROWS, n))

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
        for name, array in self.parts().items():
            blocks = self.records[name]["block_digests"]
            if len(blocks) != self.num_rows // DIGEST_ROWS:
                raise StoreError(
                    f"{array.array.location} has {len(blocks)} block digests for {self.num_rows} rows",
                    hint="restore it, or ingest the source again",
                )
            known = [(generation.n, generation.digest) for generation in self.generations]
            generations = [*known, (self.num_rows, self.digest)] if name == "X" else []
            for number, rows in enumerate(_digest_blocks(array)):
                first = number * DIGEST_ROWS
                if len(rows) == DIGEST_ROWS and block_digest(rows) != blocks[number]:
                    raise self._damaged(array, first, f"rows {first} to {first + len(rows) - 1} have another digest")
                ends = [(n, digest) for n, digest in generations if first < n <= first + len(rows)]
                if name != "X" and first + len(rows) == self.num_rows:
                    ends = [(self.num_rows, self.records[name]["digest"])]
                for n, digest in ends:
                    full = n // DIGEST_ROWS
                    tail = rows[: n - first] if n % DIGEST_ROWS else rows[:0]
                    if prefix_digest(blocks[:full], tail) != digest:
                        raise self._damaged(array, n - 1, f"the digest of the first {n} rows differs")

    def _damaged(self, array: RowArray, row: int, reason: str) -> DamagedChunkError:
        index = (row // array.rows_per_chunk, 0)
        return DamagedChunkError(
            f"chunk {index} of {array.array.location} is damaged ({reason})",
            hint="restore it, or ingest the source again",
            path=array.array.location,
            index=index,
            reason=reason,
        )


def _digest_blocks(array: RowArray) -> Iterator[Floats]:
    """All rows in blocks of 1,024, each chunk read as few times as its size allows."""
    step = max(1, array.rows_per_chunk // DIGEST_ROWS) * DIGEST_ROWS
    for start in range(0, array.num_rows, step):
        rows = array.read(start, min(start + step, array.num_rows))
        for first in range(0, len(rows), DIGEST_ROWS):
            yield rows[first : first + DIGEST_ROWS]


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
    root = local_root(path)
    where = str(path) if root is None else str(root)
    if root is not None:
        for name in filter(is_part, children(root)):
            if (root / name).is_symlink():
                raise StoreError(f"{root / name} is a symbolic link", hint="only plain files and folders are read")
    try:
        document = read_json(path, "zarr.json")
    except PermissionError as exc:
        raise StoreError(f"no permission to read {where}", hint="change its permissions") from exc
    if document is None:
        raise StoreError(f"{where} is not a data set (no zarr.json)", hint="check the path, or ingest a source first")
    attributes = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(attributes, dict) or attributes.get("dkrr_format") != FORMAT:
        raise StoreError(f"{where} is not a data set of dkrr", hint="ingest it first")
    found = attributes.get("format_version")
    if found != FORMAT_VERSION:
        raise StoreError(
            f"{where} has data set format version {found!r}; {FORMAT_VERSION} expected", hint="use a matching dkrr"
        )
    if attributes.get("complete") is not True:
        raise StoreError(f"{where} is unfinished, its ingest was interrupted", hint="run the ingest again")
    try:
        if version not in (None, attributes.get("version", 1)):
            known = {item["version"]: item["attributes"] for item in attributes.get("earlier", [])}
            if known.get(version) is None:
                raise StoreError(f"version {version} of {where} is gone", hint="open it again: it has other rows now")
            attributes = known[version]
        return _from_attributes(where if root is not None else path, attributes)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StoreError(f"{where} has unreadable metadata ({exc!r})", hint="restore it, or ingest it again") from exc


def _from_attributes(path: Any, attributes: dict[str, Any]) -> Dataset:
    num_rows = int(attributes["num_rows"])
    records: dict[str, dict[str, Any]] = attributes["arrays"]
    version = int(attributes.get("version", 1))
    arrays: dict[str, RowArray] = {
        name: RowArray.open(path, array_name(name, version), num_rows)
        for name in ("X", "y", "weight")
        if name in records
    }
    features, targets = tuple(attributes["feature_names"]), tuple(attributes["target_names"])
    for name, names in (("X", features), ("y", targets)):
        found = arrays[name].num_columns if name in arrays else 0
        if found != len(names):
            raise StoreError(f"{name} of {path} has {found} columns and {len(names)} names", hint="restore it")
    generations = read_generations(attributes["generations"])
    counters = attributes.get("next")
    classes = attributes["classes"]
    made_up = attributes.get("made_up")
    return Dataset(
        path=path,
        num_rows=num_rows,
        feature_names=features,
        target_names=targets,
        weight_name=attributes["weight_name"],
        classes=None if classes is None else tuple(classes),
        y_is_1d=bool(attributes["y_is_1d"]),
        generations=generations,
        made_up=made_up_names(features, targets) if made_up is None else tuple(made_up),
        origin=attributes.get("origin"),
        version=version,
        counters=Counters.after(generations) if counters is None else Counters(**counters),
        **fields_of_parts(arrays, records),
    )


def fields_of_parts(arrays: Mapping[str, RowArray], records: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a :class:`Dataset` says of its arrays: themselves, their digests, means and standard deviations."""
    x_mean, x_std = _statistics(records["X"])
    y_mean, y_std = _statistics(records["y"]) if "y" in records else (np.empty(0), np.empty(0))
    return {
        "X": arrays["X"],
        "y": arrays.get("y"),
        "weight": arrays.get("weight"),
        "digest": records["X"]["digest"],
        "digest_y": records["y"]["digest"] if "y" in records else None,
        "digest_weight": records["weight"]["digest"] if "weight" in records else None,
        "x_mean": x_mean,
        "x_std": x_std,
        "y_mean": y_mean,
        "y_std": y_std,
        "records": records,
    }


def _statistics(record: dict[str, Any]) -> tuple[Floats, Floats]:
    """Means and standard deviations of the columns of a record; 1 stands for that of a constant column."""
    mean, std = decode_floats(record["mean"]), decode_floats(record["std"])
    std[std == 0] = 1.0
    for values in (mean, std):
        values.flags.writeable = False
    return mean, std
