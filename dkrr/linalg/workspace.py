"""Where a solve keeps its arrays, who runs its tasks, what becomes of damage, and what every phase did.

What n, d and a worker's memory decide is here too: tile edges, and where Gram tiles come from; and the residuals of an
iteration, one after the other, for whoever wants to see them later.

A pass: a phase of tasks over chunks, what becomes of a chunk that is damaged, and the sum of what the tasks make.

    repaired    tasks run to the end: what one cannot read its owner makes again, and the rest is run
    Pass        tasks whose results are small matrices, added in one order while later ones are still computed

You need it for everything that runs on tiles or over rows: the algebra is a function of indices, and nothing else of it
knows of scheduling, stores, damage and restarts. Operands of a :class:`Pass` travel to the tasks through the store and
its parts come back as whole checksummed chunks. What travelled damaged is made again; rows cannot be. Parts depend on
the problem and not on the workers, and so does the order of their sum: it has the same bits on any number of workers.
Where tasks run in this process nothing is written, unless parts stay for another run.

Cost
----
The operands to every task, and one part from each; the driver holds the sum and one part.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import (
    Executor,
    InProcessExecutor,
    Node,
    Progress,
    RunSummary,
    TaskFunction,
    ThreadExecutor,
    run_task,
)
from dkrr.errors import (
    DamagedChunkError,
    DataError,
    DkrrError,
    LockedError,
    ParameterError,
    PlanRefusedError,
    StoreError,
)
from dkrr.kernels import Kernel
from dkrr.linalg.operators import FloatMatrix
from dkrr.linalg.solution import Foreseen
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import delete_key, place, read_json, remove_array, storage_errors, write_json
from dkrr.store.lease import hold_lock
from dkrr.tiles import TileGrid, TileMatrix
from dkrr.tiles.store import made

if TYPE_CHECKING:
    from dkrr.linalg.direct import Split

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
    targets
        Their numbers, where these are some of them.
    points
        Iterations, and the residuals (t,) after them.
    """

    name: str
    tol: float
    alpha: list[float]
    targets: Sequence[int] = ()
    points: list[tuple[int, NDArray[np.float64]]] = field(default_factory=list)
    is_over: bool = False

    def add(self, iteration: int, relative: NDArray[np.float64]) -> None:
        """The residuals (t,) after an iteration."""
        self.points.append((iteration, relative))

    def replace(self, history: Sequence[NDArray[np.float64]]) -> None:
        """The whole history, from before the first iteration on, also of one that was resumed."""
        self.points, self.is_over = list(enumerate(history)), True

    def to_dict(self) -> dict[str, Any]:
        """Plain data: at most 500 points, evenly spaced but for the last one."""
        last, t = len(self.points) - 1, len(self.points[-1][1]) if self.points else 0
        kept = [self.points[k] for k in (*range(0, last, -(-last // (MOST_POINTS - 1)) or 1), last) if k >= 0]
        is_few = t <= MOST_TARGETS
        return {
            "name": self.name,
            "tol": self.tol,
            "alpha": self.alpha[:MOST_TARGETS],
            "num_alphas": len(self.alpha),
            "num_targets": t,
            "is_over": self.is_over,
            "iterations": [iteration for iteration, _ in kept],
            "curves": [f"target {k}" for k in self.targets or range(t)]
            if is_few
            else ["largest", "median", "smallest"],
            "relative_residual": [
                each.tolist() if is_few else [float(each.max()), float(np.median(each)), float(each.min())]
                for _, each in kept
            ],
        }


# Beside the metadata of a matrix: who made it, and may remove it, while nobody else has used it.
MAKER = "maker.json"

# Below a factor, and removed with it: the diagonal of the inverse, see dkrr.linalg.triangular.
INVERSE_DIAGONAL = "inverse_diagonal"
# of it, once it is finished
DIGEST = "digest.json"


def maker_of(location: str) -> str | None:
    """Who may remove a matrix when done with it, None for nobody; "" where the note is damaged, and says so no more."""
    try:
        return (read_json(location, MAKER) or {}).get("maker")
    except StoreError:
        return ""


def keep_for_others(location: str, maker: str = "") -> None:
    """Have a matrix stay that is going to be used here, and that another ``maker`` would remove when done with it."""
    if maker_of(location) not in (None, maker):
        with contextlib.suppress(OSError, StoreError), hold_lock(location, wait=True):
            delete_key(location, MAKER)


@dataclass
class Workspace:
    """Where a solve keeps its arrays and who runs its tasks; collects what every phase did.

    ``durable`` makes finished arrays survive a power failure (fsync at the end of a phase). ``split`` says which sums
    of a factor are split; None leaves it to :func:`~dkrr.linalg.direct.usual_split`. ``reused`` says what was there
    already, see :class:`dkrr.linalg.catalogue.TakenOver`; ``traces`` are the residuals of what iterated. ``maker``
    names who removes matrices at the end, see :meth:`discard`; "" is nobody. ``foreseen`` is what a plan says of the
    way that is taken, ``other_seconds`` asks what the next one would take, and ``given_up`` says which ones were, see
    :mod:`dkrr.fit.fitting`. ``matrices`` are the locations of those that were made or opened, with the tiles of a
    factor that were missing then or damaged later. ``at_end`` collects what removes the state of finished solves when
    their answers are safe; None removes it at once.
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
    matrices: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    at_end: list[Callable[[], object]] | None = None

    def matrix(self, location: Any, grid: TileGrid, dtype: str, fields: dict[str, Any]) -> TileMatrix:
        """Create a matrix that others may share, or open it; for the holder of its lock."""
        self.matrices.setdefault(str(location), set())
        if self.maker and read_json(location, "zarr.json") is None:
            write_json(location, MAKER, {"maker": self.maker})
        elif maker_of(location) not in (None, self.maker):
            delete_key(location, MAKER)
        return TileMatrix.create(location, grid, dtype=dtype, attributes=fields)

    def delete_damaged(self, matrix: TileMatrix, index: tuple[int, ...]) -> None:
        """Remove a tile that is computed again."""
        self.matrices.setdefault(matrix.location, set()).add(index)
        matrix.array.delete(index)

    def discard(self, location: str) -> bool:
        """Remove a matrix that was made here, unless another has used it since, or does now; whether it is gone."""
        with contextlib.suppress(LockedError), hold_lock(location):
            if self.maker and maker_of(location) == self.maker:
                remove_array(location)
                return True
        return False

    @contextmanager
    def scratch(self) -> Iterator[str]:
        """A location of the store for what one computation exchanges with its tasks; gone at the end.

        Nobody else has the name: workers that were given up and come back write where nobody reads.
        """
        location = place(self.store, "scratch", f"{uuid.uuid4().hex}.zarr")
        try:
            yield location
        finally:
            remove_array(location)

    def run(self, phase: str, function: TaskFunction, task: Any, nodes: Sequence[Node], owners: Owners) -> RunSummary:
        """Run tasks to the end, make again what they find damaged, and add the figures to those of the phase."""
        summary = repaired(lambda: self.executor.run(phase, function, task, nodes, self.progress), owners)
        return self.record(phase, summary)

    def record(self, phase: str, summary: RunSummary) -> RunSummary:
        """Add the figures of a phase."""
        self.phases.setdefault(phase, RunSummary()).merge(summary)
        return summary

    def trace(self, name: str, tol: float, alpha: Iterable[float], targets: Sequence[int] = ()) -> ResidualTrace:
        """A new trace of residuals; of many, only the first ones are kept."""
        trace = ResidualTrace(name, tol, sorted({float(value) for value in alpha}), targets)
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


def task_bytes(tile_size: int, num_features: int, itemsize: int = 8) -> int:
    """Peak memory of a worker that factorises and evaluates the residual: two row blocks, their copy, and the larger of

    110 MiB + 5 b^2 itemsize              the factor: an accumulator, two mapped operands, a scratch and a padded tile
    260 MiB + 2 b^2 itemsize + 8 MiB      the residual by compiled code, beside what is kept between tiles
    """
    residual = BASELINE_BYTES + RESIDUAL_BYTES + TILES_KEPT * tile_size**2 * itemsize
    tiles = BARE_BYTES + TILES_IN_MEMORY * tile_size**2 * itemsize
    return max(tiles, residual) + 3 * tile_size * num_features * 8


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


# 64 tasks keep 16 workers busy; fewer where they would be shorter than about 0.1 s
MAX_TASKS = 64
MIN_TASK_ENTRIES = 5e7
ROW_MULTIPLE = 256


@dataclass(frozen=True)
class RowRanges:
    """n rows in ranges of ``size``, the last one smaller."""

    n: int
    size: int

    @classmethod
    def of(cls, n: int, m: int) -> RowRanges:
        """At most 64 ranges, of at least 5e7 kernel entries each; a function of n and m only."""
        rows = max(n / MAX_TASKS, MIN_TASK_ENTRIES / m)
        return cls(n, -int(-rows // ROW_MULTIPLE) * ROW_MULTIPLE)

    def __len__(self) -> int:
        return -(-self.n // self.size)

    def span(self, i: int) -> tuple[int, int]:
        """First row of range i, and one past its last."""
        return i * self.size, min((i + 1) * self.size, self.n)


@dataclass(frozen=True, eq=False)
class Operand:
    """Matrices that every task reads: each one chunk of an array, or where tasks run here as they are.

    In the store they are as large as the first one; what a smaller one has not is zero.
    """

    array: ChunkArray | None
    matrices: Sequence[FloatMatrix]

    @classmethod
    def of(cls, store: Any, path: str, matrices: Sequence[FloatMatrix]) -> Operand:
        """In an array of the store, once :meth:`write` has been called; in memory where the store is None."""
        if store is None:
            return cls(None, matrices)
        rows, columns = matrices[0].shape
        # nobody but the tasks reads it, and they know its shape: no metadata on disk
        shape = (len(matrices) * rows, columns)
        return cls(ChunkArray(store, path, shape, (rows, columns), "float64"), matrices)

    def __getstate__(self) -> dict[str, Any]:
        """Without the matrices: a task reads them from the store."""
        return {"array": self.array, "matrices": ()}

    def read(self, i: int = 0) -> Any:
        """Matrix i, read-only: copy what is used for long, since a mapped chunk stays mapped."""
        return self.matrices[i] if self.array is None else self.array.read((i, 0))

    def write(self) -> None:
        """Hand over all matrices."""
        if self.array is None:
            return
        for i, matrix in enumerate(self.matrices):
            whole = np.zeros(self.array.chunks) if matrix.shape != self.array.chunks else np.ascontiguousarray(matrix)
            if whole.shape != matrix.shape:
                whole[: len(matrix), : matrix.shape[1]] = matrix
            retried(partial(self.array.write, (i, 0), whole))


Operands = Mapping[str, Operand]


def is_here(workspace: Workspace | None) -> bool:
    """Whether tasks run in this process, so that nothing has to travel."""
    return workspace is None or isinstance(workspace.executor, InProcessExecutor)


class Pass:
    """Tasks that make one part each.

    Parameters
    ----------
    name
        Its figures have it.
    compute
        ``compute(operands, i, out)`` makes part i in ``out``, an array of zeros.
    explain
        Gives the error for a part that is not finite.
    flops
        Of every part. The longest are run, and added, first: short ones at the end even out what workers do.
    shape
        Of each part.
    operands
        What ``compute`` reads, by name.
    workspace, store
        Who runs the tasks, and the location below which everything travels; None for this process.
    folder, parts
        Below the store: where parts stay for another run of the same pass, and the name of their array. Without a
        folder the pass has one of its own, which goes with the last part: a worker that was given up and comes back
        writes where nobody reads.
    graph, site
        Names under which progress is reported, and faults are made on purpose, if others.
    owners
        Of what ``compute`` reads besides the operands.
    quiet
        No progress is reported.
    threads
        Parts that are made at once where there is no workspace.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[[Operands, int, Any], None],
        explain: Callable[[int], DkrrError],
        flops: Sequence[float],
        shape: tuple[int, ...],
        *,
        operands: Mapping[str, Sequence[FloatMatrix]],
        workspace: Workspace | None = None,
        store: Any = "",
        folder: str = "",
        parts: str = "result",
        graph: str = "",
        site: str = "",
        owners: Owners | None = None,
        quiet: bool = False,
        threads: int = 1,
    ) -> None:
        self.name, self.graph, self.site = name, graph or name, site or name
        self.compute, self.explain, self.shape, self.store = compute, explain, shape, store
        self.nodes = sorted((Node((i,), (), value) for i, value in enumerate(flops)), key=lambda node: -node.flops)
        self.workspace, self.owners, self.quiet, self.threads = workspace, owners or {}, quiet, threads
        self.is_temporary = not folder
        self.is_here = is_here(workspace) and (workspace is None or self.is_temporary)
        self.folder = folder or f"{name}-{uuid.uuid4().hex}"
        self.array = ChunkArray(store, f"{self.folder}/{parts}", (len(flops) * shape[0], *shape[1:]), shape, "float64")
        where = None if self.is_here else store
        self.operands: Operands = {
            key: Operand.of(where, f"{self.folder}/{key}", matrices) for key, matrices in operands.items()
        }
        self.unwritten = list(self.operands.values())

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs."""
        return self.__dict__ | {"workspace": None, "unwritten": [], "nodes": [], "owners": {}}

    def consume(self, add: Callable[[int, Any], object]) -> None:
        """Call ``add(i, part)`` once for every part, in the order in which they are run, while later ones are computed.

        Raises
        ------
        DamagedChunkError
            Something is missing or damaged that nobody can make again, such as a chunk of the rows.
        DataError
            A part is not finite.
        """
        left, work, summary = deque(self.nodes), self.workspace, RunSummary()
        executor = ThreadExecutor(self.threads) if work is None else work.executor
        waiting: dict[int, Any] = {}  # parts that were made here

        def add_first(part: Any) -> None:
            add(left[0].key[0], part)
            index = self.index(left.popleft().key[0])  # it is added, whatever becomes of its file
            if self.is_temporary and not self.is_here:
                with contextlib.suppress(OSError):  # the folder goes at the end
                    self.array.delete(index)

        def make_here(_: Any, i: int) -> bool:
            if i in waiting:
                return False
            return made(self.site, partial(self.part, i), partial(waiting.__setitem__, i), lambda _: self.explain(i))

        def take(read: Callable[[Callable[[], Any]], Any] = retried, *, all_of_them: bool = False) -> None:
            while self.is_here and left and left[0].key[0] in waiting:
                add_first(waiting.pop(left[0].key[0]))
            while not self.is_here and left and (all_of_them or self.array.is_valid(self.index(left[0].key[0]))):
                add_first(read(partial(self.array.read, self.index(left[0].key[0]))))

        def report(*figures: Any) -> None:
            with contextlib.suppress(*(() if self.is_here else (DamagedChunkError, OSError))):  # met again at the end
                take(lambda action: action())
            if work is not None and work.progress is not None and not self.quiet:
                work.progress(*figures)

        def run() -> None:
            if not self.is_here and not self.is_temporary:
                take()
            while left and self.unwritten:
                self.unwritten.pop().write()
            function, task = (make_here, None) if self.is_here else (compute_part, self)
            if left:
                summary.merge(executor.run(self.graph, function, task, list(left), report))
            if not self.is_here:
                take(all_of_them=True)

        travelling = [item for item in self.operands.values() if item.array is not None]
        operands = {item.array.location: partial(self._write_again, item) for item in travelling}  # type: ignore[union-attr]
        try:
            repaired(run, {**self.owners, **operands, self.array.location: self.array.delete})
        finally:
            if self.is_temporary and not self.is_here:
                remove_array(place(self.store, self.folder))
        if work is not None:
            work.record(self.name, summary)

    def _write_again(self, operand: Operand, _: tuple[int, ...]) -> None:
        self.unwritten.append(operand)

    def sum(self) -> Any:
        """The sum of all parts."""
        total = np.zeros(self.shape)
        self.consume(lambda _, part: np.add(total, part, out=total))
        return total

    def part(self, i: int) -> Any:
        """Compute part i here; it may be not finite."""
        out = np.zeros(self.shape)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self.compute(self.operands, i, out)
        return out

    def index(self, i: int) -> tuple[int, ...]:
        """Of the chunk that holds part i."""
        return i, *[0] * (len(self.shape) - 1)


def compute_part(task: Pass, i: int) -> bool:
    """Compute and write part i unless it is there; whether it was computed."""
    index = task.index(i)
    if task.array.is_valid(index):
        return False
    return made(task.site, partial(task.part, i), partial(task.array.write, index), lambda _: task.explain(i))


def retried(action: Callable[[], Any]) -> Any:
    """Do something with a store in this process as tasks do it: what a device refuses once is tried again."""
    return run_task(lambda _: (True, {"found": action()}), None, ()).values[()]["found"]


def check_task_memory(workspace: Workspace, what: str, needed: int, hint: str) -> None:
    """Refuse what takes more memory than a worker has.

    Raises
    ------
    PlanRefusedError
        ``needed`` bytes are more than the limit of a worker.
    """
    limit = memory_limit_of(workspace.executor)
    if limit is not None and needed > limit:
        message = f"a task with {what} takes {needed:,} bytes; a worker has {limit:,}"
        raise PlanRefusedError(message, hint=hint, needed=needed, limit=limit)


@contextmanager
def resumable_folder(workspace: Workspace, key: str, *, keep: bool = True) -> Iterator[str]:
    """A location of the store for what a solve writes on its way, named by its key; locked, and removed at the end.

    With ``keep`` a solve that is interrupted, or finds no answer, leaves it to the next one with the same key.

    Raises
    ------
    LockedError
        Another process does the same on the same store.
    """
    location = place(workspace.store, "solves", key + ".zarr")
    with hold_lock(location), storage_errors(workspace.store), single_blas_thread():
        try:
            yield location
        except BaseException as error:
            if not keep or isinstance(error, DamagedChunkError | DataError):
                remove_array(location)
            raise
        if workspace.at_end is None:
            remove_array(location)
        else:
            workspace.at_end.append(partial(_remove_unless_held, location))


def _remove_unless_held(location: str) -> None:
    with contextlib.suppress(LockedError), hold_lock(location):
        remove_array(location)
