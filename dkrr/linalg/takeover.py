"""What a new matrix takes over from earlier ones of its lineage: whole tiles at once, ragged ones row by row.

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
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from dkrr.address import name_of, parent_of
from dkrr.chunks import FloatArray
from dkrr.errors import DamagedChunkError, StoreError
from dkrr.linalg.lineage import Ancestor, Kind, ancestors, record_rows
from dkrr.linalg.operators import RidgeOperator
from dkrr.stores import is_url, link_key
from dkrr.tiles import TileMatrix

__all__ = ["Base", "TakenOver", "continue_lineage", "short_name", "take_over"]

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
