"""Rows on disk as a source for a regression in feature space: the workers go through them.

The sums of G are kept until the fit is over under a name made of what decides them, so that a fit that was interrupted
goes on; the other passes are short, and each has a folder of its own: a worker that was given up and comes back writes
where nobody reads. What travelled damaged is made again; rows cannot be.

Cost: that of the passes, see :mod:`dkrr.linalg.primal.row_pass`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dkrr.chunks import ChunkArray
from dkrr.dataset import Dataset
from dkrr.dataset.summary import decode_floats
from dkrr.engine.tasks import Node
from dkrr.errors import DamagedChunkError
from dkrr.kernels.features import FeatureMap
from dkrr.linalg.gram import rows_of
from dkrr.linalg.keys import key_of
from dkrr.linalg.primal.row_pass import (
    Affine,
    SumLayout,
    panels,
    row_ranges,
    strip_rows,
)
from dkrr.linalg.primal.rows import StoredStrips, Strip, chunk_rows
from dkrr.linalg.primal.source import Tile
from dkrr.linalg.primal.tasks import PassTask, hat_task, path_task, residual_task, sums_task
from dkrr.linalg.repairs import Repairs
from dkrr.linalg.whole_chunks import retried, whole_chunk
from dkrr.linalg.workspace import Workspace
from dkrr.stores import place, remove_array

__all__ = ["StoredSource"]

FloatMatrix = NDArray[np.float64]
FloatVector = NDArray[np.float64]
# an array, a chunk of it, and what belongs there
Operand = tuple[ChunkArray, tuple[int, ...], FloatMatrix]


class StoredSource:
    """Rows of a data set, gone through by the workers.

    Parameters
    ----------
    dataset, features
        Rows with targets, and what becomes of them.
    workspace
        Who runs the tasks.
    scratch
        Location of what travels; the caller removes it.
    """

    def __init__(self, dataset: Dataset, features: FeatureMap, workspace: Workspace, scratch: str) -> None:
        self.dataset, self.features, self.workspace, self.scratch = dataset, features, workspace, scratch
        self.ranges = row_ranges(dataset.num_rows, features, chunk_rows(dataset))
        self.strips = StoredStrips(rows_of(dataset, features.kernel))

    @property
    def num_rows(self) -> int:
        return self.dataset.num_rows

    @property
    def num_targets(self) -> int:
        return self.dataset.num_targets

    def weights(self) -> FloatVector | None:
        weight = self.dataset.weight
        return None if weight is None else weight.read(0, self.num_rows)[:, 0]

    def sample(self) -> list[Strip]:
        x, found = self.dataset.X, []
        numbers = sorted({x.num_chunks * k // 4 for k in range(4)})
        for start, stop in map(x.span, numbers):
            found += [next(self.strips.between(start, stop, strip_rows(self.features)))]
        return found

    def means(self) -> tuple[FloatVector, FloatVector, FloatVector, FloatVector]:
        dataset = self.dataset
        # a data set gives a constant column the deviation 1, for those who divide by it
        return dataset.x_mean, decode_floats(dataset.records["X"]["std"]), dataset.y_mean, dataset.y_std

    def sums(self, affine: Affine) -> Iterator[Tile]:
        grid = panels(self.features.num_features)
        length = SumLayout(grid.tile_size, self.num_targets).length
        folder = "sums-" + key_of({"shift": affine.pack().tobytes().hex()})[:12]
        keys = [(i, p, q) for i in range(len(self.ranges)) for p, q in grid.lower()]
        result = _vectors(self.scratch, f"{folder}/result", len(keys), length)
        task, operands = self._task(folder, affine, result)
        flops = 2.0 * self.ranges.size * grid.tile_size**2
        for (_, p, q), vector in self._results("sums", sums_task, task, operands, keys, flops):
            yield p, q, vector

    def residual(self, affine: Affine) -> FloatVector:
        d, t = affine.coef.shape
        total = np.zeros((d + 2) * t)
        for vector in self._pass("residual", residual_task, affine, (len(total),), 4.0 * d * t):
            total += vector
        return total

    def path(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix, constant: float) -> FloatVector:
        columns = affine.coef.shape[1]
        total = np.zeros(2 * columns + weights.shape[1])
        flops = 2.0 * len(basis) * (len(basis) + columns)
        for vector in self._pass("path", path_task, affine, total.shape, flops, basis, weights, constant):
            total[: 2 * columns] += vector[: 2 * columns]
            np.maximum(total[2 * columns :], vector[2 * columns :], out=total[2 * columns :])
        return total

    def hat(self, affine: Affine, basis: FloatMatrix, weights: FloatMatrix) -> FloatMatrix:
        columns = affine.coef.shape[1] + weights.shape[1]
        out = np.empty((self.num_rows, columns))
        parts = self._pass("hat", hat_task, affine, (self.ranges.size, columns), 2.0 * len(basis) ** 2, basis, weights)
        for i, part in enumerate(parts):
            first, stop = self.ranges.span(i)
            out[first:stop] = part[: stop - first]
        return out

    def _pass(
        self,
        phase: str,
        function: Any,
        affine: Affine,
        shape: tuple[int, ...],
        row_flops: float,
        basis: FloatMatrix | None = None,
        weights: FloatMatrix | None = None,
        constant: float = 0.0,
    ) -> Iterator[Any]:
        """The results of all ranges in order, each an array of ``shape``; one task a range."""
        folder, count = f"{phase}-{uuid.uuid4().hex}", len(self.ranges)
        path = f"{folder}/result"
        if len(shape) == 1:
            result = _vectors(self.scratch, path, count, shape[0])
        else:
            result = whole_chunk(self.scratch, path, shape[0], shape[1], count)
        task, operands = self._task(folder, affine, result, basis, weights, constant)
        keys = [(i,) for i in range(count)]
        try:
            for _, values in self._results(phase, function, task, operands, keys, row_flops * self.ranges.size):
                yield values
        finally:
            remove_array(place(self.scratch, folder))

    def _task(
        self,
        folder: str,
        affine: Affine,
        result: ChunkArray,
        basis: FloatMatrix | None = None,
        weights: FloatMatrix | None = None,
        constant: float = 0.0,
    ) -> tuple[PassTask, list[Operand]]:
        """The description of a pass, and what has to be written for it."""
        packed = affine.pack()
        vector = _vectors(self.scratch, f"{folder}/affine", 1, len(packed))
        operands: list[Operand] = [(vector, (0,), packed)]
        bases = forms = None
        if basis is not None and weights is not None:
            grid = panels(len(basis))
            width = grid.tile_size
            bases = whole_chunk(self.scratch, f"{folder}/bases", len(basis), width, grid.num_tiles)
            for p in range(grid.num_tiles):
                panel = np.zeros((len(basis), width))
                panel[:, : grid.rows(p)] = basis[:, grid.span(p)]
                operands.append((bases, (p, 0), panel))
            forms = whole_chunk(self.scratch, f"{folder}/weights", *weights.shape)
            operands.append((forms, (0, 0), np.ascontiguousarray(weights)))
        task = PassTask(
            features=self.features,
            strips=self.strips,
            ranges=self.ranges,
            num_targets=self.num_targets,
            affine=vector,
            result=result,
            bases=bases,
            weights=forms,
            constant=constant,
        )
        return task, operands

    def _results(
        self,
        phase: str,
        function: Any,
        task: PassTask,
        operands: list[Operand],
        keys: Sequence[tuple[int, ...]],
        flops: float,
    ) -> Iterator[tuple[tuple[int, ...], Any]]:
        """Run a task for every key, then give (key, result) in order; what travelled damaged is made again."""
        repairs, work = Repairs(), self.workspace
        nodes = [Node(key, (), flops) for key in keys]

        def write() -> None:
            for array, index, values in operands:
                array.write(index, values)

        def run() -> None:
            while True:
                try:
                    work.record(phase, work.executor.run(f"primal {phase}", function, task, nodes, work.progress))
                    return
                except DamagedChunkError as damage:
                    # the rows cannot be computed again, what travels can
                    if not any(damage.path == array.location for array, _, _ in operands):
                        raise
                    repairs.add(damage)
                    retried(write)

        retried(write)
        run()
        for key in keys:
            index = (task.number(*key),) if len(key) == 3 else (*key, *[0] * (len(task.result.shape) - 1))
            while True:
                try:
                    yield key, _read(task.result, index)
                    break
                except DamagedChunkError as damage:
                    if damage.path != task.result.location:
                        raise
                    repairs.add(damage)
                    task.result.delete(index)
                    run()


def _vectors(store: Any, path: str, count: int, length: int) -> ChunkArray:
    """A handle on ``count`` vectors, each one chunk; nobody but the tasks of one fit reads them."""
    return ChunkArray(store, path, (count * length,), (length,), "float64")


def _read(array: ChunkArray, index: tuple[int, ...]) -> Any:
    """A copy of a chunk; what a device refuses once is tried again."""
    found: list[Any] = []
    retried(lambda: found.append(np.array(array.read(index), dtype=np.float64)))
    return found[-1]
