"""Where a solve keeps its arrays, who runs its tasks, what becomes of damage, and what every phase did.

What n, d and a worker's memory decide is here too: tile edges, and where Gram tiles come from; and the residuals of an
iteration, one after the other, for whoever wants to see them later.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.tasks import Executor, Node, Progress, RunSummary
from dkrr.errors import DamagedChunkError, LockedError, ParameterError, StoreError
from dkrr.kernels import Kernel
from dkrr.linalg.solution import Foreseen
from dkrr.store.files import delete_key, read_json, remove_array, write_json
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix

if TYPE_CHECKING:
    from dkrr.linalg.cholesky import Split

Owners = Mapping[str, Callable[[tuple[int, ...]], object]]
"""For the location of each array that tasks read: how its chunk with an index is made again, or made missing."""
logger = logging.getLogger("dkrr.linalg")


MOST_POINTS = 500

MOST_TARGETS = 6

MOST_TRACES = 8


@dataclass
class ResidualTrace:
    """Relative residuals of one call of conjugate gradients.

    Up to six targets have a curve each; of more, the largest, the median and the smallest residual are kept.

    Parameters
    ----------
    name
        What was iterated, with what preconditioner.
    tol
        Relative residual that was aimed at.
    alpha
        The ridges, each of them once.
    """

    name: str
    tol: float
    alpha: list[float]
    iterations: list[int] = field(default_factory=list)
    relative: list[list[float]] = field(default_factory=list)
    num_targets: int = 0
    is_over: bool = False

    def add(self, iteration: int, relative: NDArray[np.float64]) -> None:
        """The residuals (t,) after an iteration."""
        values = np.asarray(relative, dtype=np.float64)
        self.num_targets = len(values)
        if self.num_targets > MOST_TARGETS:
            values = np.array([values.max(), np.median(values), values.min()])
        self.iterations.append(iteration)
        self.relative.append(values.tolist())

    def replace(self, history: Sequence[NDArray[np.float64]]) -> None:
        """The whole history, from before the first iteration on, also of one that was resumed."""
        self.iterations, self.relative = [], []
        for iteration, relative in enumerate(history):
            self.add(iteration, relative)
        self.is_over = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data: at most 500 points, evenly spaced but for the last one."""
        names = [f"target {k}" for k in range(self.num_targets)]
        if self.num_targets > MOST_TARGETS:
            names = ["largest", "median", "smallest"]
        last = len(self.iterations) - 1
        kept = [*range(0, last, -(-last // (MOST_POINTS - 1)) or 1), last] if last >= 0 else []
        return {
            "name": self.name,
            "tol": self.tol,
            "alpha": self.alpha[:MOST_TARGETS],
            "num_targets": self.num_targets,
            "is_over": self.is_over,
            "iterations": [self.iterations[k] for k in kept],
            "curves": names,
            "relative_residual": [self.relative[k] for k in kept],
        }


# Beside the metadata of a matrix: who made it, and may remove it, while nobody else has used it.
MAKER = "maker.json"

# Below a factor, and removed with it: the diagonal of the inverse, see dkrr.linalg.direct.
INVERSE_DIAGONAL = "inverse_diagonal"


def keep_for_others(location: str, maker: str = "") -> None:
    """Have a matrix stay that is going to be used here, and that another ``maker`` would remove when done with it."""
    if (read_json(location, MAKER) or {}).get("maker", maker) != maker:
        with contextlib.suppress(OSError, StoreError), hold_lock(location, wait=True):
            delete_key(location, MAKER)


@dataclass
class Workspace:
    """Where a solve keeps its arrays and who runs its tasks; collects what every phase did.

    ``durable`` makes finished arrays survive a power failure (fsync at the end of a phase). ``split`` says which sums
    of a factor are split; None leaves it to :func:`~dkrr.linalg.direct.usual_split`. ``reused`` says what was
    there already, see :meth:`record_reuse`; ``traces`` are the residuals of what iterated. ``maker`` names who removes
    matrices at the end, see :meth:`discard`; "" is nobody. ``foreseen`` is what a plan says of the way that is taken,
    ``other_seconds`` asks what the next one would take, and ``given_up`` says which ones were, see
    :mod:`dkrr.fit.fitting`.
    """

    store: Any
    executor: Executor
    progress: Progress | None = None
    blas: str = ""
    durable: bool = False
    split: Split | None = None
    maker: str = ""
    phases: dict[str, RunSummary] = field(default_factory=dict)
    reused: dict[str, Any] = field(default_factory=dict)
    traces: list[ResidualTrace] = field(default_factory=list)
    foreseen: Foreseen | None = None
    other_seconds: Callable[[], float | None] | None = None
    given_up: list[dict[str, Any]] = field(default_factory=list)

    def matrix(self, location: Any, grid: TileGrid, dtype: str, fields: dict[str, Any]) -> TileMatrix:
        """Create a matrix that others may share, or open it; for the holder of its lock."""
        if self.maker and read_json(location, "zarr.json") is None:
            write_json(location, MAKER, {"maker": self.maker})
        elif (read_json(location, MAKER) or {}).get("maker", self.maker) != self.maker:
            delete_key(location, MAKER)
        return TileMatrix.create(location, grid, dtype=dtype, attributes=fields)

    def discard(self, location: str) -> bool:
        """Remove a matrix that was made here, unless another has used it since, or does now; whether it is gone."""
        with contextlib.suppress(LockedError), hold_lock(location):
            if self.maker and (read_json(location, MAKER) or {}).get("maker") == self.maker:
                remove_array(location)
                return True
        return False

    def record(self, phase: str, summary: RunSummary) -> RunSummary:
        """Add the figures of a phase."""
        if phase in self.phases:
            self.phases[phase].merge(summary)
        else:
            self.phases[phase] = summary
        return summary

    def record_reuse(self, name: str, n: int, taken: dict[str, Any], summary: RunSummary, *, power: int) -> None:
        """Note what a matrix of n rows did not cost.

        Parameters
        ----------
        name
            "factor" or "gram".
        taken
            ``rows`` of earlier matrices that are rows of this one, and their ``sources``.
        summary
            What was computed.
        power
            The work of m rows is m^3 / 3 flops of a factor, m^2 / 2 entries of a Gram matrix.

        Notes
        -----
        ``reused[name]`` becomes a dict: ``rows`` of ``of_rows``, ``tiles`` that were not computed, ``work`` and
        ``share`` of it that was saved, ``seconds`` that this took at the rate of what was computed (None where too
        little was), and the beginnings of the keys of ``sources``. Where an earlier matrix of the same system could
        not be continued, ``reused["not_continued"][name]`` says why.
        """
        is_whole = summary.num_computed == 0 and summary.num_tasks > 0
        rows = n if is_whole else int(taken["rows"])
        if not rows:
            if taken.get("reason"):
                self.reused.setdefault("not_continued", {})[name] = taken["reason"]
            return
        share = (rows / n) ** power
        none: dict[str, Any] = {"rows": rows, "tiles": 0, "work": 0.0, "share": share, "seconds": None, "sources": []}
        before = self.reused.get(name, none)  # another alpha
        seconds = [before["seconds"], summary.seconds * share / max(1e-12, 1 - share) if summary.num_computed else None]
        known = [value for value in seconds if value is not None]
        self.reused[name] = {
            "rows": min(rows, before["rows"]),
            "of_rows": n,
            "tiles": before["tiles"] + summary.num_tasks - summary.num_computed,
            "work": before["work"] + float(rows) ** power / power,
            "share": min(share, before["share"]),
            "seconds": sum(known) if known else None,
            "sources": list(dict.fromkeys([*before["sources"], *taken["sources"]])),
        }

    def trace(self, name: str, tol: float, alpha: Iterable[float]) -> ResidualTrace:
        """A new trace of residuals; of many, only the first ones are kept."""
        trace = ResidualTrace(name, tol, sorted({float(value) for value in alpha}))
        if len(self.traces) < MOST_TRACES:
            self.traces.append(trace)
        return trace


# A worker's interpreter with NumPy, SciPy and distributed, measured (peak, before any task): 92 to 105 MiB; and with
# Numba, which it loads for compiled products: 194 to 206, and up to 262 where its libraries were just installed, for
# more of their pages are mapped there.
BARE_BYTES = 110 * 2**20
BASELINE_BYTES = 260 * 2**20
TILES_IN_MEMORY = 5
# accumulator and padded tile, which wait for the next tile
TILES_KEPT = 2
# of a product of compiled code, for the residual: two blocks of rows, packed, and their sums
RESIDUAL_BYTES = 8 * 2**20


def tile_bytes(tile_size: int, num_features: int, itemsize: int = 8) -> int:
    """Memory of a factorisation task besides the interpreter's: 5 b^2 itemsize + 3 b d 8.

    One accumulator, two mapped operands, one scratch tile, one padded tile; two row blocks and their copy.
    """
    return TILES_IN_MEMORY * tile_size**2 * itemsize + 3 * tile_size * num_features * 8


def task_bytes(tile_size: int, num_features: int, itemsize: int = 8) -> int:
    """Peak memory of a worker that factorises and evaluates the residual, with 3 b d 8 bytes more than the larger of

    110 MiB + 5 b^2 itemsize              the factor, see :func:`tile_bytes`
    260 MiB + 2 b^2 itemsize + 8 MiB      the residual by compiled code, beside what is kept between tiles
    """
    residual = BASELINE_BYTES + RESIDUAL_BYTES + TILES_KEPT * tile_size**2 * itemsize
    tiles = tile_bytes(tile_size, num_features, itemsize)
    return max(BARE_BYTES + tiles, residual + 3 * tile_size * num_features * 8)


def choose_tile_size(
    n: int, num_features: int, memory_limit_bytes: int | None, itemsize: int = 8, num_threads: int = 2
) -> int:
    """b = n / max(10, 2 threads + 6) rounded up to 128, in 256 .. 2,048, at most what 80 % of a worker's memory holds.

    Beyond 81,920 rows the edge grows with n / 40, up to 4,096, so that operands are not read more often.

    Ten tiles a side keep two workers busy to the end when the last sums are split (97 % measured), and large tiles cost
    less: at n = 20,480 on two workers edges of 1,024, 1,280 and 2,048 took 52, 48 and 44 CPU seconds.

    Raises
    ------
    ParameterError
        Not even tiles of 128 rows fit.
    """
    sides = max(10, 2 * num_threads + 6)
    b = max(256, min(_rounded(n / sides), 2048), min(_rounded(n / 40) if num_threads <= 16 else 0, 4096))
    limit = None if memory_limit_bytes is None else 0.8 * memory_limit_bytes
    while limit is not None and b > 128 and task_bytes(b, num_features, itemsize) > limit:
        b -= 128
    if limit is not None and task_bytes(b, num_features, itemsize) > limit:
        needed = task_bytes(b, num_features, itemsize)
        raise ParameterError(
            f"a worker of {(memory_limit_bytes or 0) >> 20:,} MiB cannot hold a task with tiles of {b} rows and "
            f"{num_features:,} features, which takes {needed >> 20:,} MiB, {BASELINE_BYTES >> 20} MiB of it Python and "
            f"its libraries; {-int(-1.25 * needed // 2**20):,} MiB would do, of which a fifth is kept free",
            hint="raise memory_limit",
        )
    return b


def _rounded(edge: float) -> int:
    """Up to a multiple of 128."""
    return -int(-edge // 128) * 128


def choose_gram(kernel: Kernel | None, num_alphas: int) -> Literal["stored", "on_the_fly"]:
    """Where "auto" takes Gram tiles from: stored for callables, precomputed matrices, and several alphas."""
    if kernel is None or num_alphas > 1 or kernel.name in ("function", "sklearn"):
        return "stored"
    return "on_the_fly"


MAX_REPAIRS = 100


MAX_REPAIRS_OF_A_TILE = 3


Result = TypeVar("Result")


def repaired(action: Callable[[], Result], owners: Owners) -> Result:
    """What ``action()`` gives, once whatever it found damaged has been made again, or removed, by its owner.

    Raises
    ------
    DamagedChunkError
        A chunk that has no owner.
    StoreError
        The same chunk for the fourth time, or more than a hundred in all: a device that loses data must not keep a fit
        busy for ever.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    while True:
        try:
            return action()
        except DamagedChunkError as damage:
            if damage.path not in owners:
                raise
            chunk = (damage.path, *damage.index)
            counts[chunk] += 1
            again = counts[chunk] > MAX_REPAIRS_OF_A_TILE
            if again or counts.total() > MAX_REPAIRS:
                number = f"tile {damage.index} of" if again else f"{MAX_REPAIRS} tiles of"
                raise StoreError(
                    f"{number} {damage.path} {'is' if again else 'are'} damaged again and again ({damage.reason})",
                    hint="the device loses data; use another store",
                ) from damage
            logger.warning("%s; computing it again", damage.message)
            owners[damage.path](damage.index)


def run_with_repairs(
    executor: Executor,
    phase: str,
    function: Any,
    task: Any,
    nodes: Sequence[Node],
    progress: Progress | None = None,
    *,
    owners: Owners,
) -> RunSummary:
    """Run tasks to the end: what they find damaged is made again, or removed, and what is missing is run once more.

    See :func:`repaired`.
    """
    return repaired(lambda: executor.run(phase, function, task, nodes, progress), owners)
