"""A pass over rows: a small matrix for each of a few ranges of them, added in the order of the ranges.

    reduce    sum over i of part_i        part_i = what ``compute`` makes of range i and of a few operands

You need it for what is small itself and a sum over all rows: X^T X, X^T y, k(X, Z)^T v, a residual. ``compute`` is
algebra and nothing else. Here is the rest: operands travel to the tasks through the store and parts come back as whole
checksummed chunks, a part that is there is not computed again, what travelled damaged is made again (rows cannot be),
and what is not finite is never written. Ranges depend on the problem and not on the workers, so a sum is the same bits
on any number of them. Without a workspace everything happens in this process, and nothing is written.

Cost
----
The operands to every task, and one part from each; the driver holds the sum and one part.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.dataset.destination import storage_errors
from dkrr.engine.session import memory_limit_of
from dkrr.engine.tasks import Node, run_task
from dkrr.errors import DamagedChunkError, DataError, PlanRefusedError
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.workspace import Workspace
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, remove_array
from dkrr.store.lease import hold_lock
from dkrr.threads import single_blas_thread
from dkrr.tiles.blas import is_finite

__all__ = [
    "ROW_MULTIPLE",
    "Operand",
    "Operands",
    "RowPass",
    "RowRanges",
    "check_task_memory",
    "resumable_folder",
    "retried",
    "whole_chunk",
]

FloatMatrix = NDArray[np.float64]

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
    """Matrices of one shape that every task reads: each one chunk of an array, or where tasks run here as they are."""

    array: ChunkArray | None
    matrices: Sequence[FloatMatrix]

    @classmethod
    def of(cls, store: Any, path: str, matrices: Sequence[FloatMatrix]) -> Operand:
        """In an array of the store, once :meth:`write` has been called; in memory where the store is None."""
        rows, columns = matrices[0].shape
        return cls(None if store is None else whole_chunk(store, path, rows, columns, len(matrices)), matrices)

    def __getstate__(self) -> dict[str, Any]:
        """Without the matrices: a task reads them from the store."""
        return {"array": self.array, "matrices": ()}

    def read(self, i: int = 0) -> Any:
        """Matrix i, read-only: copy what is used for long, since a mapped chunk stays mapped."""
        return self.matrices[i] if self.array is None else self.array.read((i, 0))

    def write(self) -> None:
        """Hand over all matrices."""
        if self.array is not None:
            for i, matrix in enumerate(self.matrices):
                retried(partial(self.array.write, (i, 0), np.ascontiguousarray(matrix)))


Operands = Mapping[str, Operand]


class RowPass:
    """The parts of a pass; iterating gives them in order, and has them computed first.

    Parameters
    ----------
    name
        Its figures have it.
    compute
        ``compute(operands, i, out)`` makes part i in ``out``, an array of zeros.
    explain
        The error for a part that is not finite.
    count, shape
        Number of the parts, and the shape of each.
    flops
        Of a part.
    operands, shared
        What ``compute`` reads, by name; ``shared`` has been written and serves other passes too.
    workspace, store
        Who runs the tasks, and the location below which everything travels; None for this process.
    folder, parts
        Below the store: where parts stay for another run of the same pass, and the name of their array. Without a
        folder the pass has one of its own, which goes with the last part: a worker that was given up and comes back
        writes where nobody reads.
    graph
        Name under which progress is reported, if another.

    Raises
    ------
    DamagedChunkError
        A chunk of the rows is missing or damaged.
    DataError
        A part is not finite.
    """

    def __init__(
        self,
        name: str,
        compute: Callable[[Operands, int, Any], None],
        explain: Callable[[int], DataError],
        count: int,
        shape: tuple[int, ...],
        *,
        flops: float,
        operands: Mapping[str, Sequence[FloatMatrix]],
        shared: Operands | None = None,
        workspace: Workspace | None = None,
        store: Any = "",
        folder: str = "",
        parts: str = "result",
        graph: str = "",
    ) -> None:
        self.name, self.graph, self.compute, self.explain = name, graph or name, compute, explain
        self.count, self.shape, self.flops = count, shape, flops
        self.workspace, self.store, self.repairs = workspace, store, Repairs()
        self.is_temporary, self.is_complete = not folder, False
        self.folder = folder or f"{name}-{uuid.uuid4().hex}"
        # nobody but these tasks reads it, and they know its shape: no metadata on disk
        self.array = ChunkArray(store, f"{self.folder}/{parts}", (count * shape[0], *shape[1:]), shape, "float64")
        where = None if workspace is None else store
        own = {key: Operand.of(where, f"{self.folder}/{key}", matrices) for key, matrices in operands.items()}
        self.operands, self.unwritten = {**own, **(shared or {})}, list(own.values())

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs."""
        return self.__dict__ | {"workspace": None, "unwritten": []}

    def __iter__(self) -> Iterator[Any]:
        """Part 0, 1, ..., each read-only; all are computed before the first is given."""
        work, position = self.workspace, 0
        if work is None:
            yield from map(self.part, range(self.count))
            return
        nodes = [Node((i,), (), self.flops) for i in range(self.count)]
        try:
            while position < self.count:
                try:
                    while self.unwritten:
                        self.unwritten.pop().write()
                    if not self.is_complete:
                        work.record(self.name, work.executor.run(self.graph, compute_part, self, nodes, work.progress))
                        self.is_complete = True
                    part = retried(partial(self.array.read, self.index(position)))
                except DamagedChunkError as damage:
                    self._repair(damage)
                    continue
                yield part
                position += 1
        finally:
            if self.is_temporary:
                remove_array(place(self.store, self.folder))

    def _repair(self, damage: DamagedChunkError) -> None:
        """See to it that it is made again; rows cannot be."""
        operands = [item for item in self.operands.values() if item.array and item.array.location == damage.path]
        if damage.path != self.array.location and not operands:
            raise damage
        self.repairs.add(damage)
        self.unwritten, self.is_complete = operands, False
        if not operands:
            self.array.delete(damage.index)

    def reduce(self) -> Any:
        """The sum of all parts, in their order."""
        total = np.zeros(self.shape)
        for part in self:
            total += part
        return total

    def part(self, i: int) -> Any:
        """Compute part i here."""
        out = np.zeros(self.shape)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            self.compute(self.operands, i, out)
        failpoint(f"{self.name}.after_compute", out)
        if not is_finite(out):
            raise self.explain(i)
        return out

    def index(self, i: int) -> tuple[int, ...]:
        """Of the chunk that holds part i."""
        return i, *[0] * (len(self.shape) - 1)


def compute_part(task: RowPass, i: int) -> bool:
    """Compute and write part i unless it is there; whether it was computed."""
    if task.array.is_valid(task.index(i)):
        return False
    task.array.write(task.index(i), task.part(i))
    return True


def retried(action: Callable[[], Any]) -> Any:
    """Do something with a store in this process as tasks do it: what a device refuses once is tried again."""
    return run_task(lambda _: (True, {"found": action()}), None, ()).values["found"]


def whole_chunk(store: Any, path: str, rows: int, columns: int, parts: int = 1) -> ChunkArray:
    """A handle on ``parts`` matrices (rows, columns), each one chunk, below one another, without metadata on disk."""
    return ChunkArray(store, path, (parts * rows, columns), (rows, columns), "float64")


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
