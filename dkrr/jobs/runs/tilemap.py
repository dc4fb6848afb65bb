"""The tiles of a matrix while they are computed: which are done and which run, on a map of bounded size.

A lower triangle of N tiles a side is kept whole up to N = 48; beyond that a cell of the map stands for a block of
tiles, and says which share of them is done. So a status holds at most 1,176 characters of it, whatever n is.

Nothing here imports more than the standard library.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["MOST_CELLS", "TRIANGLES", "TileMap"]

MOST_CELLS = 48
FULL = 9
# phases whose tasks are the tiles (i, j), i >= j, of a lower triangle; (i, j, 1) is a part of the sum of a tile
TRIANGLES = ("gram", "factorise")

Key = tuple[int, ...]


class TileMap:
    """Follows the tasks of a graph; an observer as :class:`dkrr.engine.receipts.TaskObserver` describes it."""

    def __init__(self, most_cells: int = MOST_CELLS) -> None:
        self.most_cells = most_cells
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.phase, self.side, self._edge = "", 0, 1
        self._done: list[int] = []
        self._total: list[int] = []
        self._running: set[Key] = set()
        self._finished: set[Key] = set()
        self._order: list[Key] = []
        self._first = 0

    def begin(self, phase: str, keys: Sequence[Key]) -> None:
        """Start a new map; a graph that is no triangle of tiles has none."""
        with self._lock:
            self._clear()
            if phase not in TRIANGLES or not keys:
                return
            self.phase = phase
            self._order = [key for key in keys if len(key) == 2]
            self.side = 1 + max(key[0] for key in keys)
            self._edge = -(-self.side // self.most_cells)
            cells = -(-self.side // self._edge)
            self._total = [0] * (cells * (cells + 1) // 2)
            self._done = [0] * len(self._total)
            for i in range(self.side):
                for j in range(i + 1):
                    self._total[self._cell(i, j)] += 1

    def started(self, key: Key) -> None:
        """A tile is being computed; the one before it in the same process is not any more."""
        self.running([key])

    def running(self, keys: Iterable[Key]) -> None:
        """These are the tiles that are being computed now."""
        with self._lock:
            self._running = {key[:2] for key in keys if len(key) >= 2 and key[1] <= key[0] < self.side}

    def finished(self, key: Key) -> None:
        """A tile is done."""
        with self._lock:
            if not self.side or len(key) != 2 or key in self._finished or not key[1] <= key[0] < self.side:
                return
            self._finished.add(key)
            self._running.discard(key)
            self._done[self._cell(*key)] += 1

    def _now(self, num_threads: int) -> set[Key]:
        """Tiles that were heard to run, and those that are next in line for the threads that are left.

        What was heard is as old as a heartbeat, and a tile may take less: then it is the next ones that run.
        """
        running = self._running - self._finished
        while self._first < len(self._order) and self._order[self._first] in self._finished:
            self._first += 1
        for key in self._order[self._first : self._first + 4 * self.side + 16]:
            if len(running) >= num_threads:
                break
            if key not in self._finished and self._is_ready(*key):
                running.add(key)
        return running

    def _is_ready(self, i: int, j: int) -> bool:
        """Whether nothing has to come before: a Gram tile waits for none, one of a factor for two."""
        if self.phase != "factorise":
            return True
        return (j == 0 or (i, j - 1) in self._finished) and (i == j or (j, j) in self._finished)

    def to_dict(self, num_threads: int = 0) -> dict[str, Any] | None:
        """``phase``, ``side`` (tiles), ``cells`` (of the map), ``done`` (row by row, a digit from 0 for none to 9 for
        all), ``running`` (numbers of cells) and ``num_running`` (tiles); None where there is no triangle.
        """
        with self._lock:
            if not self.side:
                return None
            shares = (
                FULL if done == total else min(FULL - 1, FULL * done // total)
                for done, total in zip(self._done, self._total, strict=True)
            )
            running = self._now(num_threads)
            return {
                "phase": self.phase,
                "side": self.side,
                "cells": -(-self.side // self._edge),
                "done": "".join(map(str, shares)),
                "running": sorted({self._cell(*key) for key in running}),
                "num_running": len(running),
            }

    def _cell(self, i: int, j: int) -> int:
        row, column = i // self._edge, j // self._edge
        return row * (row + 1) // 2 + column
