"""The catalogue of a store: which matrices it holds, what they have in common with new rows, and how they are reused.

A key is the SHA-256 over everything that decides the bytes of an array: two fits that agree on a key share it. The
fields behind the key are stored as attributes of the array, so that a mismatch can be explained field by field.

Row r of a Cholesky factor depends on rows 0 .. r of the data alone. So a factor whose key differs from the wanted one
in the digest of the rows alone shares all rows up to the first one that differs, whichever run made it and whether it
was finished or not. What is shared is *proved*: beside every array stands a record with the digests of all blocks of
1,024 rows and of the first n rows after each append, and only what the record and the data set agree upon counts. That
finds a common prefix also where an append was taken back, or a generation was dropped in the middle.

A tile that lies in the common prefix gets a second name in the new array: a hard link on a local file system, a copy
made by the store on an object store. Nothing of the old array is touched, and either may be removed. The tiles of the
ragged row block, whose last rows are new, are *not* copied with NaN in the rows that are still to come: a file would
then be there and not valid. They are read where they are by the task that completes them, which keeps their finished
rows, computes the others and writes the whole tile at once. When the old array is gone by then, the task computes those
rows too. A takeover that was interrupted is simply begun again.

Tiles of an earlier fit can be continued only with its centre, the point at which a kernel is centred; it need not be
the mean, only a point close to the rows, and is frozen with the lineage. Rows that came later and lie far from the rows
whose mean it is are compared by differences, which takes longer than with a centre of their own. The rule is that of
frozen scaling (:mod:`dkrr.dataset.scaling`): beyond a limit nothing is continued, the kernel is centred anew
(:meth:`dkrr.kernels.Kernel.center`), and that is said. So it is, without a limit, where subtracting the centre rounds
typical rows by more than 1e-13 of the kernel's length.

Cost
----
One listing, and one small JSON document for each array of the same kernel: 64 bytes for every 1,024 rows. One link or
copy, and no byte read, for each tile. One pass over the rows for each centre that is found and has newer rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from dkrr.dataset import Dataset, Scaling
from dkrr.dataset.dataset import Part
from dkrr.dataset.rows import DIGEST_ROWS, RowSummary
from dkrr.dataset.scaling import Drift, measure_drift
from dkrr.engine.tasks import RunSummary
from dkrr.errors import DamagedChunkError, StoreError
from dkrr.kernels import FunctionKernel, Kernel
from dkrr.kernels.base import MAX_EXTENT
from dkrr.linalg.operators import RidgeOperator
from dkrr.linalg.workspace import Workspace, keep_for_others
from dkrr.store.chunks import FloatArray
from dkrr.store.files import arrays_below, children, join, link_key, name_of, parent_of, place, read_json, write_json
from dkrr.tiles import TileGrid, TileMatrix

logger = logging.getLogger("dkrr.linalg")

# Raise FORMAT_VERSION when the layout of tiles changes, KERNEL_VERSION when a kernel's values change.
FORMAT_VERSION = 1
KERNEL_VERSION = 4

FUNCTION_ROWS = 16
FOLDER = "lineage"
Kind = Literal["factors", "grams", "models"]
# what two arrays of one lineage may differ in
_OF_ROWS = ("n", "rows_digest", "weight_digest")
# what says how a factor was computed, and not of what
_HOW = frozenset({"blas", "center", "dtype", "gram", "tile_size"})
_REQUESTS_AT_ONCE = 16
# of the work, that may have come over where the rest says how long it would have taken
MOST_SHARE = 0.9


# --- keys -------------------------------------------------------------------------------------------------------------


def gram_fields(operator: RidgeOperator, dtype: str, source_digest: str = "") -> dict[str, Any]:
    """What decides the bytes of the Gram tiles: no alpha, no weights.

    A function is known by a name and by what it makes of some rows that are made up, which need not be of the kind that
    it was written for: of one there is also a digest of what it makes of the first 16 rows, to nine digits.
    """
    function: dict[str, Any] = {}
    if operator.kernel is not None and operator.rows is not None and _calls_functions(operator.kernel):
        rows = operator.rows.read(0, min(FUNCTION_ROWS, operator.grid.n))
        values = operator.kernel.block(rows, rows)
        rounded = np.round(values / max(float(np.abs(values).max()), np.finfo(np.float64).tiny), 9) + 0.0  # no -0
        function = {"values_digest": hashlib.sha256(rounded.tobytes()).hexdigest()}
    return function | {
        "format_version": FORMAT_VERSION,
        "kernel_version": KERNEL_VERSION,
        "kernel": {"kernel": "precomputed"} if operator.kernel is None else operator.kernel.to_dict(),
        "center": None if operator.rows is None or operator.rows.center is None else list(operator.rows.center),
        "n": operator.grid.n,
        "tile_size": operator.grid.tile_size,
        "dtype": dtype,
        "rows_digest": source_digest or (operator.rows.digest if operator.rows is not None else ""),
    }


def _calls_functions(kernel: Kernel) -> bool:
    return isinstance(kernel, FunctionKernel) or any(map(_calls_functions, getattr(kernel, "parts", ())))


def factor_fields(
    operator: RidgeOperator, dtype: str, weight_digest: str | None, blas: str, source_digest: str = ""
) -> dict[str, Any]:
    """What decides the bytes of the factor's tiles."""
    return gram_fields(operator, dtype, source_digest) | {
        "alpha": operator.alpha,
        "weight_digest": weight_digest if operator.weighted else None,
        "gram": "on_the_fly" if operator.gram is None else "stored",
        "blas": blas,
    }


def key_of(fields: dict[str, Any]) -> str:
    """The first 40 hexadecimal digits of the SHA-256 of the fields in canonical JSON."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def short_name(location: str) -> str:
    """What a record calls an earlier array: not its whole key, which would keep `dkrr gc` from removing it."""
    return name_of(location)[:12]


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value))


def _family(kernel: dict[str, Any]) -> str:
    """What all arrays of a kernel have in the names of their records."""
    return key_of({"kernel": kernel, "kernel_version": KERNEL_VERSION, "format_version": FORMAT_VERSION})[:16]


# --- what there is ----------------------------------------------------------------------------------------------------


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
        What decides its bytes, see :func:`factor_fields`.
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
        pair = [
            {name: value for name, value in known.items() if name not in _OF_ROWS}
            | {"weight_digest": known.get("weight_digest") is None}
            for known in (self.fields, _plain(fields))
        ]
        return {name for name in pair[0].keys() | pair[1].keys() if pair[0].get(name) != pair[1].get(name)}


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
    center = _plain(fields.get("center"))
    ends = sorted({generation.n for generation in dataset.generations} | {dataset.num_rows})
    parts: list[tuple[Part, bool]] = [("X", True), ("weight", fields.get("weight_digest") is not None), ("y", is_model)]
    document = {
        "kind": kind,
        # below the root of the store, which can be moved
        "location": location if is_model else f"{name_of(parent_of(location))}/{name_of(location)}",
        "fields": fields,
        # of how many first rows the centre is the mean: all, unless an earlier array of the lineage has it already
        "center_rows": min((e.center_rows for e in known if e.fields.get("center") == center), default=fields["n"]),
        "rows": {
            part: {
                "block_digests": list(dataset.records[part]["block_digests"]),
                "ends": [[n, dataset.prefix_digest(n, part)] for n in ends],
            }
            for part, is_there in parts
            if is_there
        },
    }
    write_json(folder, name, document)


def ancestors(store: Any, dataset: Dataset, kernel: dict[str, Any], *, kinds: Sequence[Kind]) -> list[Ancestor]:
    """Earlier arrays of a kernel that have rows in common with a data set, the longest common prefix first."""
    found = []
    for document in _records(store, f"{_family(kernel)}-"):
        kind, location = document["kind"], document["location"]
        num_rows = _common_rows(dataset, document["rows"]) if kind in kinds else 0
        if num_rows:
            where = location if kind == "models" else join(str(store), *location.split("/"))
            rows = min(num_rows, int(document["center_rows"]))
            fields = document["fields"]
            found.append(Ancestor(kind=kind, location=where, fields=fields, num_rows=num_rows, center_rows=rows))
    return sorted(found, key=lambda item: (-item.num_rows, item.location))


def recorded_models(store: str) -> list[str]:
    """Where the models are, or were, that fits in a store have left a record of."""
    return [str(document["location"]) for document in _records(store, "") if document["kind"] == "models"]


_KEYS, _MARKS = {"kind", "location", "fields", "center_rows", "rows"}, {"block_digests", "ends"}


def _records(store: Any, beginning: str) -> list[dict[str, Any]]:
    """The records that can be read; one that cannot only means that its array is not found."""
    folder = join(str(store), FOLDER)

    def read(name: str) -> Any:
        try:
            document = read_json(folder, name)
        except StoreError:
            return None
        if not isinstance(document, dict) or not document.keys() >= _KEYS:
            return None
        return document if all(marks.keys() >= _MARKS for marks in document["rows"].values()) else None

    names = [name for name in children(folder) if name.startswith(beginning) and name.endswith(".json")]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        return [document for document in threads.map(read, names) if document is not None]


def _common_rows(dataset: Dataset, rows: dict[Part, dict[str, Any]]) -> int:
    """The longest prefix of the data set's rows that the rows of a record are proved to begin with."""
    if not rows.keys() <= set(dataset.parts()):
        return 0
    blocks = dataset.num_rows
    for part, marks in rows.items():
        pairs = zip(dataset.records[part]["block_digests"], marks["block_digests"], strict=False)
        blocks = min(blocks, DIGEST_ROWS * sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    # behind the common blocks there can be less than one block more
    ends = {part: {int(n): digest for n, digest in marks["ends"]} for part, marks in rows.items()}
    for n in sorted(ends["X"], reverse=True):
        is_near = blocks < n <= dataset.num_rows and n - blocks < DIGEST_ROWS
        if is_near and all(dataset.prefix_digest(n, part) == ends[part].get(n) for part in rows):
            return n
    return blocks


def open_factor(
    wanted: dict[str, Any], named: Sequence[str], store: str | None, misfit: Callable[[TileMatrix], str]
) -> TileMatrix:
    """The finished float64 factor of a system that was solved earlier: at a named location, else any in the store.

    The tile size, where its Gram tiles came from and the BLAS kernel decide a factor's bytes but not what it is a
    factor of, so any factor of the matrix will do. Its fields say nothing of what a tile holds, and of a kernel
    function only its name, so that what is found is compared with the matrix before it is used.

    Parameters
    ----------
    wanted
        The fields of :func:`factor_fields` that decide the matrix; they must agree.
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

    Cost
    ----
    One small JSON document for each factor of the store; one look at every tile of the one that is taken, and what
    comparing it takes.
    """
    reasons = []
    for location in (*named, *(other for other in arrays_below(store, "factors") if other not in named)):
        reason = _reason_against(wanted, location)
        if not reason:
            keep_for_others(location)
            reason = _reason_against(wanted, location)  # it may just have been removed
        if reason:
            reasons += [f"{location} {reason}"] * (location in named)
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
    raise StoreError(f"no float64 factor of these {wanted['n']:,} rows: {'; '.join(reasons) or 'the fit left none'}")


def _reason_against(wanted: dict[str, Any], location: str) -> str:
    """Why the array at ``location`` is not this factor, finished and in float64; "" when it is."""
    document = read_json(location, "zarr.json")
    if document is None:
        return "is gone"
    fields = document.get("attributes") if isinstance(document, dict) else None
    if not isinstance(fields, dict) or key_of(fields) not in location:
        return "is not a factor of dkrr, or not the one its name says"
    # not the version of the kernels' code, which says that entries may be rounded otherwise: what is found is
    # compared with the kernel itself
    wanted = {**wanted, "format_version": FORMAT_VERSION}
    differing = sorted(name for name, value in wanted.items() if fields.get(name) != value)
    if differing:
        return f"is a factor of something else ({', '.join(differing)})"
    if fields.get("dtype") != "float64":
        return f"is {fields.get('dtype')}, which is not precise enough"
    factor = TileMatrix.open(location)
    missing = len(factor.missing())
    return f"is not whole: {missing:,} of {factor.grid.num_lower:,} tiles are missing" if missing else ""


# --- taking tiles over ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TakenOver:
    """What a new matrix has of earlier ones of its lineage.

    Parameters
    ----------
    num_rows
        m, the longest common prefix; 0 where nothing was found.
    sources
        The arrays that whole tiles and rows come from.
    ragged
        An earlier matrix with finished rows of ragged tiles, and how many of its first rows are rows of this one.
    reason
        Why nothing was taken over, where an earlier matrix of the same system has rows in common.
    came
        The share of the work of these rows that the earlier matrices had done; one that was interrupted had not all.
    """

    num_rows: int = 0
    came: float = 1.0
    sources: tuple[str, ...] = ()
    ragged: tuple[TileMatrix, int] | None = field(default=None, repr=False)
    reason: str = ""

    def first(self, i: int) -> int:
        """Rows of row block i that need not be computed, when these are some and not all of it."""
        if self.ragged is None:
            return 0
        block, rows = divmod(self.ragged[1], self.ragged[0].grid.tile_size)
        return rows if i == block else 0

    def read(
        self, i: int, j: int, agrees: Callable[[TileMatrix, int, int, int], bool] | None = None
    ) -> FloatArray | None:
        """The finished rows of tile (i, j), :meth:`first` of them, read-only; None where the earlier matrix is gone.

        ``agrees``, if given, is asked whether so many first rows of its tile (i, j) are what they should be.
        """
        rows = self.first(i)
        if self.ragged is not None and rows:
            try:
                if agrees is None or agrees(self.ragged[0], i, j, rows):
                    return self.ragged[0].read(i, j)[:rows, : rows if i == j else None]
            except StoreError as exc:  # removed, or damaged
                logger.info("finished rows of tile (%d, %d) are computed again (%s)", i, j, exc.message)
        return None

    def record(self, workspace: Workspace, name: str, n: int, summary: RunSummary, *, power: int) -> None:
        """Note what a matrix of n rows did not cost.

        Parameters
        ----------
        name
            "factor" or "gram".
        summary
            What was computed.
        power
            The work of m rows is m^3 / 3 flops of a factor, m^2 / 2 entries of a Gram matrix.

        Notes
        -----
        ``workspace.reused[name]`` becomes a dict: ``rows`` of ``of_rows``, ``tiles`` that were not computed, ``work``
        and ``share`` of it that was saved, ``seconds`` that this took at the rate of what was computed (None where too
        little was), and the beginnings of the keys of ``sources``. Where an earlier matrix of the same system could
        not be continued, ``reused["not_continued"][name]`` says why.
        """
        is_whole = summary.num_computed == 0 and summary.num_tasks > 0
        rows, reused = n if is_whole else self.num_rows, workspace.reused
        if not rows:
            if self.reason:
                reused.setdefault("not_continued", {})[name] = self.reason
            return
        share = (rows / n) ** power * (1.0 if is_whole else self.came)
        none: dict[str, Any] = {"rows": rows, "tiles": 0, "work": 0.0, "share": share, "seconds": None, "sources": []}
        before = reused.get(name, none)  # another alpha
        # what most of the time went into says nothing of the rate, where little was computed
        own = summary.seconds * share / (1 - share) if summary.num_computed and share < MOST_SHARE else None
        seconds = [before["seconds"], own]
        known = [value for value in seconds if value is not None]
        reused[name] = {
            "rows": min(rows, before["rows"]),
            "of_rows": n,
            "tiles": before["tiles"] + summary.num_tasks - summary.num_computed,
            "work": before["work"] + share * float(n) ** power / power,
            "share": min(share, before["share"]),
            "seconds": sum(known) if known else None,
            "sources": list(dict.fromkeys([*before["sources"], *map(short_name, self.sources)])),
        }


def continue_lineage(
    operator: RidgeOperator, matrix: TileMatrix, kind: Kind, fields: dict[str, Any], store: Any
) -> TakenOver:
    """Record of which rows a new matrix is made, and give it the tiles that earlier ones in the store have of it.

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
    missing = lacking = set(matrix.missing())
    if not missing:
        return TakenOver()
    found = [other for other in known if other.kind == kind and name_of(other.location) != name_of(matrix.location)]
    sources: list[str] = []
    ragged: tuple[TileMatrix, int] | None = None
    longest, came = 0, set[tuple[int, int]]()
    for other in found:  # those with the longest prefix come first; they may be unfinished, or gone
        if other.differs_in(fields):
            continue
        full, rest = divmod(other.num_rows, matrix.grid.tile_size)
        wanted = [tile for tile in missing if tile[0] < full]
        is_ragged = bool(rest) and ragged is None and any(i == full for i, _ in missing)
        if longest and not wanted and not is_ragged:
            continue
        try:
            source = TileMatrix.open(other.location)
        except StoreError:
            continue  # removed, or being removed
        there = source.array.valid_keys()
        linked = _link(source, matrix, [tile for tile in wanted if source.array.chunk_key(tile) in there])
        missing, came = missing - linked, came | linked
        has_rows = is_ragged and any(source.array.chunk_key((full, j)) in there for j in range(full + 1))
        if has_rows:
            ragged = source, other.num_rows
            came |= {(full, j) for j in range(full + 1) if source.array.chunk_key((full, j)) in there}
        if linked or has_rows or not (wanted or is_ragged):
            longest = max(longest, other.num_rows)
            sources.append(source.location)
    reason = "" if longest else _why_nothing_is_continued(found, fields)
    power = 3 if kind == "factors" else 2
    done = work_of_tiles(matrix.grid, longest, lambda tile: tile in came or tile not in lacking, power=power)
    return TakenOver(num_rows=longest, came=done, sources=tuple(sources), ragged=ragged, reason=reason)


def work_of_tiles(grid: TileGrid, m: int, is_done: Callable[[tuple[int, int]], bool], *, power: int = 3) -> float:
    """The share of the flops of the first m rows of a factor that are done; 1 for none. ``power`` 2: of entries."""
    b, keys = grid.tile_size, [(i, j) for i in range(-(-m // grid.tile_size)) for j in range(i + 1)]
    work = {(i, j): min(b, m - i * b) * ((power - 2) * 2 * j + (1 / power if i == j else 1)) for i, j in keys}
    return sum(work[key] for key in keys if is_done(key)) / sum(work.values()) if keys else 1.0


def _link(source: TileMatrix, target: TileMatrix, tiles: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of the tiles that have come over."""
    keys = [source.array.chunk_key(tile) for tile in tiles]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        linked = threads.map(lambda key: link_key(source.array.store, key, target.array.store), keys)
        return {tile for tile, found in zip(tiles, linked, strict=True) if found is not None}


def _why_nothing_is_continued(found: list[Ancestor], fields: dict[str, Any]) -> str:
    """Why the nearest earlier matrix of the same system cannot be continued; "" where there is none."""
    for other in sorted(found, key=lambda other: (-other.num_rows, len(other.differs_in(fields)))):
        differing = other.differs_in(fields)
        if differing and not differing - _HOW:
            parts = [
                "another centre of the features"
                if name == "center"
                else f"{name} {other.fields.get(name)} there, {fields.get(name)} here"
                for name in sorted(differing, key=lambda name: (name == "center", name))
            ]
            what = f"{other.kind} {short_name(other.location)} shares {other.num_rows:,} rows"
            reason = f"{what}, but was made in another way ({'; '.join(parts)})"
            logger.info("nothing is continued: %s", reason)
            return reason
    return ""


# --- the centre of a lineage ------------------------------------------------------------------------------------------


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
        if self.center is None:
            return f"fitted anew, with the centre of all rows: {self.drift.words()}"
        return f"centred at the mean of the first {self.num_rows:,} rows, frozen; {self.drift.words()}"


def judge_center(
    dataset: Dataset, kernel: Kernel, limit: float | None, center: tuple[float, ...], num_rows: int
) -> FrozenCenter:
    """Whether the rows of a data set are near enough to a centre, the mean of its first rows; reads them once.

    Parameters
    ----------
    limit
        The drift up to which a centre is kept; None keeps any.
    """
    X, none, drift = dataset.X, np.empty(0), Drift()
    # of rows that are compared as they are, none is far from the centre
    if limit is not None and any(center) and num_rows < X.num_rows:
        std = RowSummary.of(X, 0, num_rows).moments().std
        near = Scaling(x_mean=np.array(center), x_std=np.where(std == 0, 1.0, std), y_mean=none, y_std=none)
        drift = measure_drift(near, RowSummary.of(X, num_rows).moments(), None, dataset.feature_names)
    # typical rows, less the centre, may be rounded by 1e-14 of the kernel's length
    typical = np.hypot(dataset.x_std, dataset.x_mean - np.array(center))
    is_near = not any(center) or kernel.extent(typical[None]) <= MAX_EXTENT**2
    is_kept = is_near and (limit is None or drift.value <= limit)
    return FrozenCenter(center=center if is_kept else None, num_rows=num_rows, drift=drift, limit=limit)


def choose_center(
    found: Sequence[Ancestor],
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
        See :func:`judge_center`.
    """

    def is_same(fields: dict[str, Any]) -> bool:
        return (
            fields.get("alpha") in alphas
            and (fields["dtype"], fields["gram"]) == (dtype, gram)
            and (fields["weight_digest"] is None) == (dataset.weight is None)
        )

    refused = None
    judge = cache(partial(judge_center, dataset, kernel, limit))
    centred = [other for other in found if other.fields.get("center") and other.fields.get("tile_size") == tile_size]
    # a factor that can be continued goes before whatever else has more rows
    for other in sorted(centred, key=lambda other: not (other.kind == "factors" and is_same(other.fields))):
        judged = judge(tuple(other.fields["center"]), other.center_rows)
        if judged.center is not None:
            return judged
        refused = refused or judged
    return refused
