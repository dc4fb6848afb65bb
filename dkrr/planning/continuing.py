"""What a fit can continue: factors of its first rows that earlier fits left in the store, and what they save.

    saved flops = m^3 / 3 of n^3 / 3        for m of n rows, each distinct alpha

You need it before "auto" is resolved: only tiles of the same size, precision and source can be continued, so where they
save at least half of the work, or nothing else was asked for, their choices are taken over.

Cost
----
See :mod:`dkrr.linalg.catalogue`; one listing more for each factor that is found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log
from typing import Any

from dkrr.dataset import Dataset
from dkrr.dataset.drift import DRIFT_LIMIT
from dkrr.errors import StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.catalogue import Ancestor, CenterJudge, ancestors
from dkrr.linalg.factor.rows import strips_bytes
from dkrr.linalg.sizes import task_bytes
from dkrr.planning.candidates import Candidate
from dkrr.planning.choices import SolverChoice
from dkrr.store.files import is_url
from dkrr.tiles import TileGrid, TileMatrix

__all__ = ["Continued", "find_continued", "find_other_alpha", "other_alpha_sentence"]

# of the flops; below, whatever is fastest without them is chosen
WORTHWHILE = 0.5


@dataclass(frozen=True, kw_only=True)
class Continued:
    """Factors of the first rows.

    Parameters
    ----------
    tile_size, precision, gram
        As they were chosen then; "mixed" has a float32 factor.
    num_rows, of_rows
        m of n.
    num_tiles, num_bytes
        Whole tiles that need not be computed, of all factors together.
    flops, share
        What is saved, of all factors together; as a share of n^3 / 3 for each.
    older
        m < n of the earlier factor that each one goes on from, an interrupted one, too; of those that are not finished.
    """

    tile_size: int
    precision: str
    gram: str
    num_rows: int
    of_rows: int
    num_tiles: int
    num_bytes: int
    flops: float
    share: float
    older: tuple[int, ...] = ()

    def resolve(self, choice: SolverChoice, tile_size: int | None) -> tuple[SolverChoice, int | None]:
        """What "auto" becomes where it pays to go on."""
        if self.share < WORTHWHILE and choice.solver == "auto":
            return choice, self.tile_size if tile_size is None else tile_size
        frozen = {"solver": "cholesky", "precision": self.precision, "gram": self.gram}
        named: dict[str, Any] = {name: value for name, value in frozen.items() if getattr(choice, name) == "auto"}
        return replace(choice, **named), self.tile_size if tile_size is None else tile_size

    def is_for(self, chosen: Candidate) -> bool:
        """Whether a candidate goes on with these factors."""
        wanted = (chosen.solver, chosen.tile_size, chosen.precision, chosen.gram)
        return wanted == ("cholesky", self.tile_size, self.precision, self.gram)

    def saved(self, chosen: Candidate, num_threads: int) -> Candidate:
        """The candidate with the seconds that are left, and the disk that sharing new rows takes for a while."""
        seconds = dict(chosen.seconds)
        for phase, power in (("factorise", 1.0), ("gram", 2 / 3)):
            if phase in seconds:
                seconds[phase] *= 1 - self.share**power
        less = sum(chosen.seconds.values()) - sum(seconds.values())
        grid, itemsize = TileGrid(self.of_rows, self.tile_size), 8 if self.precision == "float64" else 4
        # one factor after the other
        strips = max((strips_bytes(grid, m, num_threads, itemsize) for m in self.older), default=0)
        disk = chosen.disk_bytes | {"strips": strips}
        low = max(0.0, chosen.seconds_low - less)
        return replace(chosen, seconds=seconds, seconds_low=low, disk_bytes=disk)

    def to_dict(self, seconds: float | None) -> dict[str, Any]:
        """Plain data: what is reused and what that saves."""
        return {
            "rows": self.num_rows,
            "of_rows": self.of_rows,
            "tiles": self.num_tiles,
            "flops": self.flops,
            "share": self.share,
            "seconds": seconds,
        }

    def sentence(self, seconds: float | None) -> str:
        """The same in words."""
        text = f"continues a factor of the first {self.num_rows:,} of {self.of_rows:,} rows"
        text += f": {self.share:.0%} of the flops are saved"
        return text + (f", about {seconds:,.0f} s" if seconds else "")


def find_continued(
    store: Any,
    dataset: Dataset,
    kernel: Kernel | None,
    alphas: tuple[float, ...],
    choice: SolverChoice,
    *,
    tile_size: int | None,
    memory_bytes: int | None = None,
    drift_limit: float | None = DRIFT_LIMIT,
) -> Continued | None:
    """The longest finished prefix of a fit in a store, among the factors that the words of the choice allow.

    Parameters
    ----------
    tile_size
        The edge that was asked for; None means "auto".
    memory_bytes
        Of a task; larger tiles are not gone on with.
    drift_limit
        How far newer rows may lie from the centre of a factor, see :mod:`dkrr.linalg.catalogue`.
    """
    if kernel is None or choice.solver not in ("auto", "cholesky"):
        return None
    distinct = dict.fromkeys(alphas)
    best: dict[float, _Found] = {}
    older: dict[float, int] = {}
    judge = CenterJudge(dataset, kernel, drift_limit)
    for ancestor in ancestors(store, dataset, kernel.to_dict(), kinds=["factors"]):
        fields = ancestor.fields
        alpha = fields.get("alpha")
        if alpha not in distinct or alpha in older or not _is_allowed(fields, dataset, choice, tile_size):
            continue
        first = next(iter(best.values()), None)
        if first is not None and any(first.ancestor.fields[k] != fields[k] for k in ("tile_size", "dtype", "gram")):
            continue
        itemsize = 8 if fields["dtype"] == "float64" else 4
        if memory_bytes is not None and task_bytes(fields["tile_size"], dataset.num_features, itemsize) > memory_bytes:
            continue
        if not judge.allows(ancestor):
            continue
        try:
            tiles = TileMatrix.open(ancestor.location)
        except StoreError:
            continue
        found = _Found.of(ancestor, tiles)
        if found.num_tiles:
            best.setdefault(alpha, found)
            if ancestor.num_rows < dataset.num_rows or found.is_finished:
                older[alpha] = ancestor.num_rows
    if not best:
        return None
    one = next(iter(best.values()))
    ancestor, tiles = one.ancestor, one.tiles
    n, num_tiles = dataset.num_rows, sum(found.num_tiles for found in best.values())
    flops = sum(found.flops for found in best.values())
    linked = 0 if is_url(store) else tiles.array.chunk_bytes + 4
    return Continued(
        tile_size=tiles.grid.tile_size,
        precision=_precision(ancestor.fields["dtype"], choice),
        gram=ancestor.fields["gram"],
        num_rows=min(found.ancestor.num_rows for found in best.values()),
        of_rows=n,
        num_tiles=num_tiles,
        num_bytes=num_tiles * linked,
        flops=flops,
        share=flops / (n**3 / 3 * len(distinct)),
        older=tuple(m for m in older.values() if m < n),
    )


@dataclass(frozen=True)
class _Found:
    """A factor, its whole tiles in the common prefix, the flops of all finished rows there, and whether it is whole."""

    ancestor: Ancestor
    tiles: TileMatrix
    num_tiles: int
    flops: float
    is_finished: bool

    @classmethod
    def of(cls, ancestor: Ancestor, tiles: TileMatrix) -> _Found:
        m, b = ancestor.num_rows, tiles.grid.tile_size
        missing = set(tiles.missing())
        last = m == tiles.grid.n  # then the ragged row block is whole, too
        blocks = -(-m // b)
        finished, total, whole = 0.0, 0.0, 0
        for i in range(blocks):
            rows = min(b, m - i * b)
            for j in range(i + 1):
                work = rows * (j + 1 / 3 if i == j else 2 * j + 1)
                total += work
                if (i, j) not in missing:
                    finished += work
                    whole += rows == b or last
        return cls(ancestor, tiles, whole, float(m) ** 3 / 3 * finished / total, not missing)


def find_other_alpha(store: Any, dataset: Dataset, kernel: Kernel | None, alphas: tuple[float, ...]) -> float | None:
    """The alpha, nearest to the wanted one, of a factor of exactly these rows; None where there is none."""
    if kernel is None or len(set(alphas)) != 1 or not alphas[0] > 0:
        return None
    near: dict[float, float] = {}
    for ancestor in ancestors(store, dataset, kernel.to_dict(), kinds=["factors"]):
        fields = ancestor.fields
        is_same = (fields["n"], fields["weight_digest"]) == (ancestor.num_rows, dataset.digest_weight)
        if is_same and ancestor.num_rows == dataset.num_rows and fields["alpha"] > 0:
            near[abs(log(fields["alpha"] / alphas[0]))] = float(fields["alpha"])
    return near[min(near)] if near else None


def other_alpha_sentence(other: float, alpha: float, tol: float) -> str:
    """What a factor of another alpha is good for, in words."""
    condition = max(other / alpha, alpha / other)
    count = ceil(0.5 * condition**0.5 * log(2 / tol))
    return (
        f"a factor of these rows and alpha {other:g} is in the store: name = 'cg' with preconditioner = 'factor' would "
        f"take about {count:,} iterations and no new factor"
    )


def _is_allowed(fields: dict[str, Any], dataset: Dataset, choice: SolverChoice, tile_size: int | None) -> bool:
    """Whether the words of a choice leave it open to go on with a factor."""
    precisions = {"float64": ("auto", "float64"), "float32": ("auto", "float32", "mixed")}[fields["dtype"]]
    return (
        choice.precision in precisions
        and choice.gram in ("auto", fields["gram"])
        and tile_size in (None, fields["tile_size"])
        and (fields["weight_digest"] is None) == (dataset.weight is None)
    )


def _precision(dtype: str, choice: SolverChoice) -> str:
    if choice.precision != "auto":
        return choice.precision
    return "float64" if dtype == "float64" else "mixed"
