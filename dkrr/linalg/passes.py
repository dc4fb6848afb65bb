"""A pass: a phase of tasks over chunks, what becomes of a chunk that is damaged, and the sum of what the tasks make.

    made        one task: compute a chunk unless it is there, prove that it is finite, write it
    run_with_repairs   all of them: what a task cannot read its owner makes again, and the rest is run
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
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dkrr.engine.cluster import memory_limit_of
from dkrr.engine.machine import single_blas_thread
from dkrr.engine.tasks import InProcessExecutor, Node, RunSummary, run_task
from dkrr.errors import DamagedChunkError, DataError, DkrrError, PlanRefusedError
from dkrr.linalg.blocks import FloatMatrix
from dkrr.linalg.workspace import Owners, Workspace, repaired
from dkrr.store.chunks import ChunkArray
from dkrr.store.files import place, remove_array, storage_errors
from dkrr.store.lease import hold_lock
from dkrr.tiles.store import made

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
    operands, shared
        What ``compute`` reads, by name; ``shared`` has been written and serves other passes too.
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
        shared: Operands | None = None,
        workspace: Workspace | None = None,
        store: Any = "",
        folder: str = "",
        parts: str = "result",
        graph: str = "",
        site: str = "",
        owners: Owners | None = None,
        quiet: bool = False,
    ) -> None:
        self.name, self.graph, self.site = name, graph or name, site or name
        self.compute, self.explain, self.shape, self.store = compute, explain, shape, store
        self.nodes = sorted((Node((i,), (), value) for i, value in enumerate(flops)), key=lambda node: -node.flops)
        self.workspace, self.owners, self.quiet = workspace, owners or {}, quiet
        self.is_temporary = not folder
        self.is_here = is_here(workspace) and (workspace is None or self.is_temporary)
        self.folder = folder or f"{name}-{uuid.uuid4().hex}"
        self.array = ChunkArray(store, f"{self.folder}/{parts}", (len(flops) * shape[0], *shape[1:]), shape, "float64")
        where = None if self.is_here else store
        own = {key: Operand.of(where, f"{self.folder}/{key}", matrices) for key, matrices in operands.items()}
        self.operands, self.unwritten = {**own, **(shared or {})}, list(own.values())

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
        executor = InProcessExecutor() if work is None else work.executor

        def add_first(part: Any) -> None:
            add(left[0].key[0], part)
            index = self.index(left.popleft().key[0])  # it is added, whatever becomes of its file
            if self.is_temporary and not self.is_here:
                with contextlib.suppress(OSError):  # the folder goes at the end
                    self.array.delete(index)

        def add_here(_: Any, i: int) -> bool:
            if not left or left[0].key[0] != i:  # an attempt that failed behind its sum
                return False
            return made(self.site, partial(self.part, i), add_first, lambda _: self.explain(i))

        def take(read: Callable[[Callable[[], Any]], Any] = retried, *, all_of_them: bool = False) -> None:
            while left and (all_of_them or self.array.is_valid(self.index(left[0].key[0]))):
                add_first(read(partial(self.array.read, self.index(left[0].key[0]))))

        def report(*figures: Any) -> None:
            if not self.is_here:
                with contextlib.suppress(DamagedChunkError, OSError):  # met again when all tasks are done
                    take(lambda action: action())
            if work is not None and work.progress is not None and not self.quiet:
                work.progress(*figures)

        def run() -> None:
            if not self.is_here and not self.is_temporary:
                take()
            while left and self.unwritten:
                self.unwritten.pop().write()
            function, task = (add_here, None) if self.is_here else (compute_part, self)
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

        def add(_: int, part: Any) -> None:
            np.add(total, part, out=total)

        self.consume(add)
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
    return run_task(lambda _: (True, {"found": action()}), None, ()).values["found"]


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
        remove_array(location)
