"""Checkpoints of conjugate gradients: two alternating generations in the store and an atomic pointer.

    <location>/0, 1     x, r, p in row chunks, the scalars and the history, and state.json, written last
    <location>/pointer.json    the generation to read

A generation is spoilt only while the pointer names the other one, so there is always a whole state to go on from. Each
chunk ends in its checksum, and state.json holds all of them again: chunks that changed places are found, too. What is
damaged is answered by the other generation, then by a fresh start. A state belongs to one fingerprint; one of another
system is removed.

Cost: 3 n c doubles written, for c unfinished columns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from dkrr.dataset.rows import default_rows_per_chunk
from dkrr.engine.tasks import run_task
from dkrr.errors import StoreError
from dkrr.linalg.cg.state import CGState
from dkrr.store.chunks import ChunkArray
from dkrr.store.failpoints import failpoint
from dkrr.store.files import place, read_json, remove_array, write_json

__all__ = ["StoredCheckpoint"]

logger = logging.getLogger("dkrr.linalg.cg.checkpoint")

EVERY_SECONDS = 60.0
_OF_LIVE = ("live", "rz", "aim", "reference", "failed", "stalls", "frozen")
_OF_ALL = ("relative", "largest", "iterations", "converged")

FloatMatrix = NDArray[np.float64]


class StoredCheckpoint:
    """The checkpoint of one system in a store.

    Parameters
    ----------
    location
        Folder or URL for it alone.
    fingerprint
        Key of all that decides the iterates.
    every_seconds, every_iterations
        When a state is due: after so much time, or so many iterations.
    durable
        fsync before the pointer moves.
    """

    def __init__(
        self,
        location: Any,
        fingerprint: str,
        *,
        every_seconds: float = EVERY_SECONDS,
        every_iterations: int | None = None,
        durable: bool = False,
    ) -> None:
        self.location, self.fingerprint, self.durable = location, fingerprint, durable
        self.every_seconds, self.every_iterations = every_seconds, every_iterations
        self._last = time.monotonic()
        self._generation = 1
        self.num_saved = 0

    def is_due(self, iteration: int) -> bool:
        """Whether a state shall be saved after this iteration."""
        if self.every_iterations is not None and iteration % self.every_iterations == 0:
            return True
        return time.monotonic() - self._last >= self.every_seconds

    def save(self, state: CGState) -> None:
        """Write the generation that the pointer does not name, then move the pointer.

        Raises
        ------
        StorageFullError, StoreError
            Three attempts failed; the other generation is whole.
        """
        writing = _Writing(self, state, 1 - self._generation)
        run_task(_Writing.run, writing, (state.iteration,))
        self._generation = writing.generation
        self._last = time.monotonic()
        self.num_saved += 1

    def load(self) -> CGState | None:
        """The newest whole state with this fingerprint; everything else is removed, with a line in the log."""
        for generation in self._candidates():
            try:
                reading = _Reading(self, generation)
                run_task(_Reading.run, reading, (generation,))
                state = reading.state
            except (StoreError, LookupError, TypeError, ValueError) as exc:
                logger.warning("generation %d of the checkpoint %s is left out: %s", generation, self.location, exc)
                continue
            if state is None:
                continue
            self._generation = generation
            logger.info("going on from the checkpoint %s of iteration %d", self.location, state.iteration)
            return state
        self.remove()
        return None

    def remove(self) -> None:
        """Remove both generations."""
        remove_array(self.location)

    def folder(self, generation: int) -> str:
        """Where a generation is."""
        return place(self.location, str(generation))

    def _candidates(self) -> list[int]:
        try:
            pointer = read_json(self.location, "pointer.json")
        except StoreError as exc:
            logger.warning("the pointer of the checkpoint %s is damaged: %s", self.location, exc)
            return [0, 1]
        if pointer is None:
            return []
        named = int(pointer.get("generation", 0)) % 2
        return [named, 1 - named]

    def read(self, generation: int) -> CGState | None:
        """The state of a generation; None when there is none, or one of another system."""
        folder = self.folder(generation)
        document = read_json(folder, "state.json")
        if document is None:
            return None
        if document["fingerprint"] != self.fingerprint:
            logger.warning("the checkpoint %s belongs to another system and is removed", folder)
            return None
        t, live = int(document["num_columns"]), int(document["num_live"])
        sums = document["checksums"]
        scalars = _read_matrix(folder, "scalars", sums)
        x = _read_matrix(folder, "x", sums)
        r, p = (_read_matrix(folder, name, sums) if live else np.empty((len(x), 0)) for name in ("r", "p"))
        values: dict[str, Any] = {name: scalars[row, :live].copy() for row, name in enumerate(_OF_LIVE)}
        values |= {name: scalars[len(_OF_LIVE) + row].copy() for row, name in enumerate(_OF_ALL)}
        for name in ("live", "stalls", "iterations"):
            values[name] = values[name].astype(np.int64)
        for name in ("frozen", "converged"):
            values[name] = values[name].astype(np.bool_)
        if x.shape[1] != t or r.shape[1] != live or p.shape != r.shape or len(r) != len(x):
            raise StoreError(f"{folder} holds arrays of different shapes")
        history = [row.copy() for row in scalars[len(_OF_LIVE) + len(_OF_ALL) :]]
        return CGState(x=x, r=r, p=p, iteration=int(document["iteration"]), history=history, **values)


@dataclass
class _Reading:
    """A generation on its way from the store; what a device refuses once is tried again."""

    checkpoint: StoredCheckpoint
    generation: int
    state: CGState | None = None

    def run(self, generation: int) -> bool:
        self.state = self.checkpoint.read(generation)
        return self.state is not None


@dataclass
class _Writing:
    """A generation on its way to the store."""

    checkpoint: StoredCheckpoint
    state: CGState
    generation: int

    def remaining_bytes(self) -> int:
        """For the message of a full disk."""
        return self.state.x.nbytes + self.state.r.nbytes + self.state.p.nbytes

    def run(self, iteration: int) -> bool:
        """Write it; the same whenever it is tried again."""
        checkpoint, state = self.checkpoint, self.state
        folder = checkpoint.folder(self.generation)
        remove_array(folder)
        checksums: dict[str, list[int]] = {}
        matrices = {"x": state.x, "scalars": _scalars(state)}
        if len(state.live):
            matrices |= {"r": state.r, "p": state.p}
        for name, matrix in matrices.items():
            array = _array(folder, name, matrix.shape)
            checksums[name] = []
            for i, block in enumerate(_chunks(matrix, array.chunks)):
                checksums[name].append(int(crc32c(block.data.cast("B"))))
                array.write((i, 0), block)
            if checkpoint.durable:
                array.sync()
        document = {
            "fingerprint": checkpoint.fingerprint,
            "iteration": iteration,
            "num_columns": state.x.shape[1],
            "num_live": len(state.live),
            "checksums": checksums,
        }
        write_json(folder, "state.json", document)
        failpoint("cg.checkpoint.before_pointer")
        write_json(checkpoint.location, "pointer.json", {"generation": self.generation})
        failpoint("cg.checkpoint.after_pointer")
        return True


def _array(folder: str, name: str, shape: tuple[int, ...]) -> ChunkArray:
    rows = min(max(1, shape[0]), default_rows_per_chunk(shape[1]))
    return ChunkArray.create(folder, name, shape=shape, chunks=(rows, shape[1]))


def _chunks(matrix: FloatMatrix, chunk: tuple[int, ...]) -> Iterator[FloatMatrix]:
    for start in range(0, len(matrix), chunk[0]):
        block = np.full(chunk, np.nan)
        part = matrix[start : start + chunk[0]]
        block[: len(part)] = part
        yield block


def _scalars(state: CGState) -> FloatMatrix:
    """Vectors over live columns (padded with NaN), vectors over all columns, and the history, as rows."""
    t = state.x.shape[1]
    rows = []
    for name in _OF_LIVE:
        row = np.full(t, np.nan)
        row[: len(state.live)] = getattr(state, name)
        rows.append(row)
    rows += [np.asarray(getattr(state, name), np.float64) for name in _OF_ALL]
    return np.vstack([*rows, *state.history])


def _read_matrix(folder: str, name: str, checksums: dict[str, list[int]]) -> FloatMatrix:
    array = ChunkArray.open(folder, name)
    matrix = np.empty(array.shape)
    for i in range(array.num_chunks[0]):
        block = array.read((i, 0))
        if int(crc32c(block.data.cast("B"))) != checksums[name][i]:
            raise StoreError(f"chunk {i} of {array.location} is not the one that was written")
        rows = slice(i * array.chunks[0], min((i + 1) * array.chunks[0], array.shape[0]))
        matrix[rows] = block[: rows.stop - rows.start]
    return matrix
