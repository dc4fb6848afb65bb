"""Checkpoints of conjugate gradients: two alternating generations in the store.

    <location>/0, 1     x, r, p in row chunks; state.json, written last, with everything else

A generation is spoilt only while the other one is whole, so there is always a state to go on from: the whole one with
more iterations, then the other, then a fresh start. Each chunk ends in its checksum; what passes it and is wrong shows
in the true residual, which decides what of a state is used. A state belongs to one fingerprint; one of another system
is removed.

Cost: 3 n c doubles written, for c unfinished columns.
"""

from __future__ import annotations

import base64
import io
import logging
import time
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from dkrr.dataset.rows import RowArray, default_rows_per_chunk
from dkrr.engine.tasks import run_task
from dkrr.errors import StoreError
from dkrr.linalg.cg.iteration import CGState
from dkrr.linalg.passes import retried
from dkrr.store.failpoints import failpoint
from dkrr.store.files import delete_key, place, read_json, remove_array, write_json

logger = logging.getLogger("dkrr.linalg.cg.checkpoint")
EVERY_SECONDS = 60.0
_LONG = ("x", "r", "p")
_SHORT = tuple(item.name for item in fields(CGState) if item.name not in _LONG)


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
        fsync before a state counts.
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
        self._last, self._generation = time.monotonic(), 1
        self.num_saved = 0

    def is_due(self, iteration: int) -> bool:
        """Whether a state shall be saved after this iteration."""
        often = self.every_iterations is not None and iteration % self.every_iterations == 0
        return often or time.monotonic() - self._last >= self.every_seconds

    def save(self, state: CGState) -> None:
        """Write over the older generation.

        Raises
        ------
        StorageFullError, StoreError
            Three attempts failed; the other generation is whole.
        """
        run_task(partial(self._write, self.folder(1 - self._generation)), state, ())
        self._generation, self._last = 1 - self._generation, time.monotonic()
        self.num_saved += 1

    def load(self) -> CGState | None:
        """The newest whole state with this fingerprint; everything else is removed, with a line in the log."""
        found: list[tuple[int, int, dict[str, Any]]] = []
        for generation in (0, 1):
            try:
                document = read_json(self.folder(generation), "state.json")
                if document is not None and document["fingerprint"] != self.fingerprint:
                    logger.warning("the checkpoint %s belongs to another system and is removed", self.location)
                elif document is not None:
                    found.append((int(document["iteration"]), generation, document))
            except (StoreError, LookupError, TypeError, ValueError) as exc:
                logger.warning("generation %d of the checkpoint %s is left out: %s", generation, self.location, exc)
        for iteration, generation, document in sorted(found, key=lambda item: -item[0]):
            try:
                state: CGState = retried(partial(self._read, self.folder(generation), document))
            except (StoreError, LookupError, TypeError, ValueError) as exc:
                logger.warning("generation %d of the checkpoint %s is left out: %s", generation, self.location, exc)
                continue
            self._generation = generation
            logger.info("going on from the checkpoint %s of iteration %d", self.location, iteration)
            return state
        remove_array(self.location)
        return None

    def folder(self, generation: int) -> str:
        """Where a generation is."""
        return place(self.location, str(generation))

    def _write(self, folder: str, state: CGState) -> bool:
        """Write a generation; the same whenever it is tried again."""
        delete_key(folder, "state.json")
        remove_array(folder)
        for name in _LONG:
            matrix = getattr(state, name)
            n, columns = matrix.shape
            if columns:
                rows = min(max(1, n), default_rows_per_chunk(columns))
                array = RowArray.create(folder, name, num_rows=n, num_columns=columns, rows_per_chunk=rows)
                for i, (start, stop) in enumerate(array.blocks()):
                    array.write_chunk(i, matrix[start:stop])
                if self.durable:
                    array.array.sync()
        file = io.BytesIO()
        short: dict[str, Any] = {name: getattr(state, name) for name in _SHORT}
        np.savez(file, **short)
        rest = base64.b64encode(file.getvalue()).decode()
        failpoint("cg.checkpoint.before_state")
        write_json(folder, "state.json", {"fingerprint": self.fingerprint, "iteration": state.iteration, "rest": rest})
        failpoint("cg.checkpoint.after_state")
        return True

    def _read(self, folder: str, document: dict[str, Any]) -> CGState:
        with np.load(io.BytesIO(base64.b64decode(document["rest"])), allow_pickle=False) as file:
            values: dict[str, Any] = {name: file[name] for name in _SHORT}
        values |= {"iteration": int(values["iteration"]), "history": list(values["history"])}
        for name in _LONG:
            if name == "x" or len(values["live"]):
                array = RowArray.open(folder, name)
                values[name] = array.read(0, array.num_rows)
            else:
                values[name] = np.empty((len(values["x"]), 0))
        if values["x"].shape[1] != len(values["relative"]) or values["r"].shape != values["p"].shape:
            raise StoreError(f"{folder} holds arrays of different shapes")
        return CGState(**values)
