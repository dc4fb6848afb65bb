"""The graph of a left-looking tile Cholesky: which task waits for which, in what order, and which sums are split.

    L[i,j] = (A[i,j] - sum_{k<j} L[i,k] L[j,k]^T) L[j,j]^-T

With one task a tile the sum of column j begins when column j - 1 is finished, so that few tiles on many workers wait
for each other: every column costs the time of its longest sum. A *partial* task sums all terms but the last few,

    P[i,j] = A[i,j] - sum_{k<j-w} L[i,k] L[j,k]^T

and waits for column j - w - 1 only; the task of the tile goes on from there. The terms are the same in the same order
and P is stored as it is, in the factor's precision, so the factor has the same bytes with whatever split. Simulated, 20
tiles a side on 32 workers are busy 15 % of the time without and 51 % with w = 2; 122 tiles on 100 workers 27 % and 95 %
with w = 6 (:mod:`dkrr.fit.schedule`).

Partial sums are kept in a scratch matrix beside the factor, not in the memory of workers: one that is lost with its
worker would have to be computed again together with everything that waits for it, and reading a tile back costs a
thirtieth of one product. Each is removed when its tile has been written, so only those of a few columns exist at once.

Cost
----
N (N + 1) / 2 nodes with at most three dependencies, and as many again where every column is split. The scratch matrix
holds about (w + 1) N tiles at most.

Scratch beside a factor, there until its rows are whole: partial sums of columns, and strips of new rows.

It is named after the factor, so that an attempt finds what an earlier one left; what that one used and this one has no
use for (strips where there is one thread now, say) is removed all the same when the factor is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dkrr.engine.tasks import Key, Node
from dkrr.errors import ParameterError
from dkrr.store.files import join, name_of, parent_of, remove_array
from dkrr.tiles import TileGrid, TileMatrix

# the third number of a task's key: a partial sum, a strip, or the first terms of one; the strip's number comes fourth
PARTIAL, STRIP, TERMS = 1, 2, 3

# a task that finds its tile takes as long as so much arithmetic
LOOK_FLOPS = 1e8


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which sums are split, and where.

    Parameters
    ----------
    num_columns
        The last so many columns are split; 0 for none.
    num_last
        w, the terms that are left to the task of the tile.

    Raises
    ------
    ParameterError
        A negative number of columns, or no last term.
    """

    num_columns: int = 0
    num_last: int = 1

    def __post_init__(self) -> None:
        if self.num_columns < 0 or self.num_last < 1:
            raise ParameterError(
                f"a split of {self.num_columns} columns with {self.num_last} last terms",
                hint="give at least 0 columns and 1 term",
            )

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


def cholesky_nodes(grid: TileGrid, split: Split | None = None) -> list[Node]:
    """The graph in the order of its priorities: a node (i, j) for each tile, and (i, j, 1) for each partial sum.

    The critical path goes (j, j), (j+1, j), (j+1, j+1): of every column the tile below the diagonal comes first and
    the next diagonal tile right behind it, before the rest of the column. A partial sum of column j comes behind the
    last column that it reads, j - w - 1.
    """
    split = split or Split()
    side, cube, w = grid.num_tiles, float(grid.tile_size) ** 3, split.num_last
    is_split = [split.applies(grid, j) for j in range(side)]

    def tile(i: int, j: int) -> Node:
        update, rest = (cube, cube / 3) if i == j else (2 * cube, cube)
        before: list[Key] = [(i, j - 1)] if j else []
        if i != j:
            before.append((j, j))
        if is_split[j]:
            before.append((i, j, 1))
        return Node((i, j), tuple(before), rest + (w if is_split[j] else j) * update)

    def partial(i: int, j: int) -> Node:
        last = j - w - 1
        before = ((i, last),) if i == j else ((i, last), (j, last))
        return Node((i, j, 1), before, (j - w) * (cube if i == j else 2 * cube))

    nodes = [tile(0, 0)]
    for j in range(side):
        for i in range(j + 1, side):
            nodes.append(tile(i, j))
            if i == j + 1:
                nodes.append(tile(i, i))
        later = j + w + 1
        if later < side and is_split[later]:
            nodes.extend(partial(i, later) for i in range(later, side))
    return nodes


def extension_nodes(
    grid: TileGrid,
    nodes: Sequence[Node],
    num_whole: int,
    first: Mapping[int, int],
    strips: Mapping[int, Sequence[tuple[int, int]]],
    terms: Callable[[int], int],
) -> list[Node]:
    """The same graph for a factor whose first rows are there: row blocks cost what their new rows do, some in strips.

    Parameters
    ----------
    nodes
        Of :func:`cholesky_nodes`.
    num_whole
        So many row blocks are there whole: their tasks only look.
    first
        For each row block how many of its rows are finished in an earlier factor.
    strips
        For some row blocks the spans of rows that are tasks of their own, with keys (i, j, 2, number). Strips of a row
        block do not wait for each other until its diagonal tile; the task of a tile joins them.
    terms
        h(j): so many terms of the sum of a strip in column j are a task of their own, with key (i, j, 3, number), that
        needs the columns before h only; 0 for none.
    """
    area = float(grid.tile_size) ** 2
    found: list[Node] = []
    for node in nodes:
        i, j = node.key[:2]
        before = node.dependencies
        if i < num_whole:
            found.append(replace(node, flops=min(node.flops, LOOK_FLOPS)))
            continue
        if i in strips or first.get(i, 0):
            if len(node.key) > 2:
                continue
            before = tuple(key for key in before if len(key) == 2)
        shares = not strips
        if i not in strips:
            flops = node.flops * (grid.rows(i) - first.get(i, 0)) / grid.tile_size
            found.append(replace(node, dependencies=before, flops=max(flops, area), shares=shares))
            continue
        keys: list[Key] = []
        h = terms(j)
        for s, (start, stop) in enumerate(strips[i]):
            rows = (stop - start) * area
            behind: tuple[Key, ...] = ()
            if h:
                ahead = (i, h - 1) if i == j else (i, h - 1, STRIP, s)
                before_it = tuple(dict.fromkeys((ahead, (j, h - 1))))
                found.append(Node((i, j, TERMS, s), before_it, rows * 2 * h, shares=False))
                behind = ((i, j, TERMS, s),)
            if i == j:
                waits_for: tuple[Key, ...] = ((i, j - 1),) if j else ()
            else:
                waits_for = (*(((i, j - 1, STRIP, s),) if j else ()), (j, j))
            flops = rows * (2 * (j - h) + (i != j))
            found.append(Node((i, j, STRIP, s), (*waits_for, *behind), max(flops, area), shares=False))
            keys.append((i, j, STRIP, s))
        flops = area * grid.tile_size / 3 if i == j else area
        found.append(replace(node, dependencies=(*before, *keys), flops=flops, shares=shares))
    return _new_rows_early(found, num_whole) if strips else found


def _new_rows_early(nodes: Sequence[Node], num_whole: int) -> list[Node]:
    """The new rows of column j right behind tile (j, j): they are a chain of products, other tiles are only looked at.

    Measured (30,000 + 300 rows, two workers): with all looks of a column before them one worker stood idle for 0.5 s.
    """
    place = {node.key: position for position, node in enumerate(nodes)}

    def rank(node: Node) -> tuple[int, int]:
        i, j = node.key[:2]
        return (place[j, j], 1) if j < num_whole <= i else (place[node.key], 0)

    return sorted(nodes, key=rank)


Kind = Literal["sums", "strips"]

_KINDS: tuple[Kind, ...] = ("sums", "strips")


def scratch_location(factor: TileMatrix, kind: Kind) -> str:
    """Where it is."""
    location = factor.array.store
    return join(parent_of(location), f"{name_of(location).removesuffix('.zarr')}-{kind}.zarr")


def remove_scratch(factor: TileMatrix) -> None:
    """Remove all that is beside a factor whose rows are whole."""
    for kind in _KINDS:
        remove_array(scratch_location(factor, kind))


def factor_of_scratch(name: str) -> str | None:
    """Name of the factor that something in the folder of factors is scratch of; None for what is not scratch."""
    for kind in _KINDS:
        if name.endswith(f"-{kind}.zarr"):
            return f"{name.removesuffix(f'-{kind}.zarr')}.zarr"
    return None
