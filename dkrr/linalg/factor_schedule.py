"""The graph of a left-looking tile Cholesky: which task waits for which, in what order, and what is cut into parts.

    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T

With one task a tile the sum of column j begins when column j - 1 is finished, so that few tiles on many workers wait
for each other: every column costs the time of its longest sum. Two cuts help, and neither changes a byte of the factor,
since the terms stay in their order and parts are stored as they are, in the factor's precision.

The *first terms* of a sum, all but the last w, are a task of their own that waits for column j - w - 1 only; the task
of the tile goes on from there. Simulated, 20 tiles a side on 32 workers are busy 15 % of the time without and 51 % with
w = 2; 122 tiles on 100 workers 27 % and 95 % with w = 6 (:mod:`dkrr.fit.rates`).

Rows that an extension adds are cut into *strips*, one for every two workers, which go through all columns side by side;
without them an append that is shorter than a tile would be one chain of tasks, and one worker's. Two workers share a
strip: its first (j + 1) // 2 terms are made ahead of the chain. One strip for every worker instead would send every
finished tile to all of them: read, checked and packed for gemm for half of the rows each. Measured with two workers,
30,000 rows: 300 more at 23 GF/s a worker, 3,000 more at 31, where the fit itself has 41.

Parts are kept in a scratch array beside the factor, not in the memory of workers: one that is lost with its worker
would have to be computed again together with everything that waits for it, and reading a tile back costs a thirtieth of
one product. It is named after the factor, so that an attempt finds what an earlier one left.

Cost
----
N (N + 1) / 2 nodes with at most three dependencies, and as many again where every column is split. The scratch array
holds about (w + 1) N tiles at most, or twice the new rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dkrr.engine.tasks import Key, Node
from dkrr.store.chunks import CRC_BYTES
from dkrr.store.files import join, name_of, parent_of
from dkrr.tiles import TileGrid, TileMatrix

# a task that finds its tile takes as long as so much arithmetic
LOOK_FLOPS = 1e8
# narrower products run well below the rate of gemm
MIN_STRIP_ROWS = 32
# workers that share a strip, one the first terms of its sums and one the rest
SHARED_BY = 2
# of a shorter sum of a strip the first terms are no task of their own
MIN_TERMS = 4
# with so many row blocks for each worker there is work for everybody without strips
MANY_BLOCKS = 4
_PARTS = "-sums.zarr"


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which sums are split, and where.

    Parameters
    ----------
    num_columns
        The last so many columns are split; 0 for none.
    num_last
        w, the terms that are left to the task of the tile.
    """

    num_columns: int = 0
    num_last: int = 1

    def applies(self, grid: TileGrid, j: int) -> bool:
        """Whether the sums of column j are split: it is one of the last, and two terms or more come before the rest."""
        return j >= max(self.num_last + 2, grid.num_tiles - self.num_columns)

    def first_rest(self, grid: TileGrid, j: int) -> int:
        """The first term of column j that is left to the task of the tile."""
        return j - self.num_last if self.applies(grid, j) else 0

    def to_dict(self) -> dict[str, int]:
        """Plain data, for the record of a run."""
        return {"num_columns": self.num_columns, "num_last": self.num_last}


def usual_split(num_tiles: int, num_threads: int) -> Split:
    """The split where nobody has simulated one: none for one thread, one column more than threads for a few.

    Ten tiles a side on two workers: 92 % busy without, 98 % with it.
    """
    if num_threads < 2:
        return Split()
    if num_threads <= 4:
        return Split(num_columns=num_threads + 1)
    many = 4 * num_threads > num_tiles
    return Split(num_columns=num_tiles if many else num_threads + 1, num_last=min(6, max(2, num_tiles // 12)))


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """What an extension adds to a factor.

    Parameters
    ----------
    num_whole
        So many row blocks are there whole: their tasks only look.
    first
        For each of the others how many of its rows are finished in an earlier factor.
    strips
        For some of them (first row, one past the last) of every strip.
    """

    num_whole: int = 0
    first: Mapping[int, int] = field(default_factory=dict)
    strips: Mapping[int, list[tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, grid: TileGrid, num_finished: int, first: Mapping[int, int], num_threads: int) -> NewRows:
        """Strips where there are few row blocks that are not whole; one chain for each where that is enough."""
        if not num_finished:
            return cls()
        strips = {}
        if num_threads >= 2 and len(first) < MANY_BLOCKS * num_threads:
            most = -(-num_threads // SHARED_BY)
            for i, start in first.items():
                rows = max(MIN_STRIP_ROWS, -(-(grid.rows(i) - start) // most))
                strips[i] = [(s, min(s + rows, grid.rows(i))) for s in range(start, grid.rows(i), rows)]
        return cls(num_whole=num_finished // grid.tile_size, first=first, strips=strips)

    @property
    def most(self) -> tuple[int, int]:
        """Strips of a row block, and rows of a strip, at most."""
        spans = self.strips.values()
        return max(map(len, spans)), max(stop - start for strips in spans for start, stop in strips)


def strips_bytes(grid: TileGrid, num_finished: int, num_threads: int, itemsize: int) -> int:
    """Disk for strips and first terms, at most, where the first ``num_finished`` rows are there; freed at the end."""
    b = grid.tile_size
    first = {i: max(0, num_finished - i * b) for i in range(num_finished // b, grid.num_tiles)}
    new = NewRows.of(grid, num_finished, first, num_threads)
    if not new.strips:
        return 0
    num_strips = sum(len(strips) * (i + 1) for i, strips in new.strips.items())
    return 2 * num_strips * (new.most[1] * b * itemsize + CRC_BYTES)


def num_first_terms(j: int) -> int:
    """So many terms of the sum of a strip in column j are a task of their own; 0 where there are few."""
    return (j + 1) // 2 if j >= MIN_TERMS else 0


def cholesky_nodes(grid: TileGrid, split: Split | None = None, new: NewRows | None = None) -> list[Node]:
    """The graph in the order of its priorities.

    A node (i, j) is a tile, (i, j, s) the first terms of the sum of its strip s, and (i, j, s, 1) the strip; a tile
    without strips is its strip 0 and needs no task for it.

    The critical path goes (j, j), (j+1, j), (j+1, j+1): of every column the tile below the diagonal comes first and
    the next diagonal tile right behind it, before the rest of the column. First terms come behind the last column that
    they read. The new rows of an extension come right behind tile (j, j), as long as the others are only looked at:
    they are a chain of products, and with all looks of a column before them one of two workers stood idle for 0.5 s
    (30,000 + 300 rows).
    """
    split, new = split or Split(), new or NewRows()
    area = float(grid.tile_size) ** 2
    nodes: list[tuple[tuple[int, int, int], Node]] = []
    for i, j in grid.lower():
        place = (j - 1, j, 1) if i == j else (j, i, 0)
        before: tuple[Key, ...] = ((i, j - 1),) * (j > 0) + ((j, j),) * (i != j)
        update, rest = (1.0, 1 / 3) if i == j else (2.0, 1.0)
        first, strips = new.first.get(i, 0), new.strips.get(i, [])
        rows, shares = (grid.rows(i) - first) * area, not new.strips
        if i < new.num_whole:
            nodes.append((place, Node((i, j), before, min(LOOK_FLOPS, rows * (rest + j * update)))))
            continue
        if j < new.num_whole and new.strips:
            place = (j - 1, j, 2)
        h = num_first_terms(j) if strips else 0 if first else split.first_rest(grid, j)
        if not strips:
            if h:
                needed: tuple[Key, ...] = ((i, h - 1),) if i == j else ((i, h - 1), (j, h - 1))
                nodes.append(((h - 1, grid.num_tiles, i), Node((i, j, 0), needed, rows * h * update)))
                before += ((i, j, 0),)
            nodes.append((place, Node((i, j), before, max(area, rows * (rest + (j - h) * update)), shares)))
            continue
        for s, (start, stop) in enumerate(strips):
            rows, terms = (stop - start) * area, (((i, j, s),) if h else ())
            if h:
                ahead: Key = (i, h - 1) if i == j else (i, h - 1, s, 1)
                needed = (ahead,) if i == j else (ahead, (j, h - 1))
                nodes.append((place, Node((i, j, s), needed, rows * 2 * h, shares=False)))
            left: tuple[Key, ...] = before[:1] if i == j else ((i, j - 1, s, 1),) * (j > 0) + ((j, j),)
            flops = rows * (2 * (j - h) + (i != j))
            nodes.append((place, Node((i, j, s, 1), left + terms, max(area, flops), shares=False)))
        parts = tuple((i, j, s, 1) for s in range(len(strips)))
        flops = area * grid.tile_size / 3 if i == j else area
        nodes.append((place, Node((i, j), before + parts, flops, shares=False)))
    return [node for _, node in sorted(nodes, key=lambda item: item[0])]


def scratch_location(factor: TileMatrix) -> str:
    """Where the parts of tiles are."""
    location = factor.array.store
    return join(parent_of(location), name_of(location).removesuffix(".zarr") + _PARTS)


def factor_of_scratch(name: str) -> str | None:
    """Name of the factor that something in the folder of factors is scratch of; None for what is not scratch."""
    return name.removesuffix(_PARTS) + ".zarr" if name.endswith(_PARTS) else None
